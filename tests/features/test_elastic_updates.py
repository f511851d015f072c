"""Clouds that are late, leave and come back, while the others go on; real processes too."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.channels import stored
from tests.local_replicas import (
    DILOCO,
    MEAN,
    Diary,
    Replica,
    Scalar,
    asked,
    end_of,
    equal,
    furthest,
    groups,
    reference,
    rounds_of,
)
from tests.pipelines import in_threads
from tests.replicas import Post
from tests.runs import no_workers, read, start, wait_for
from tests.toy import toy_config
from xcloud.base.errors import ConfigError, LinkClosed
from xcloud.comm.compressor import Chain
from xcloud.comm.precision import BlockInt
from xcloud.features.replicas.averaging import ReplicaPeer, Terms
from xcloud.features.replicas.late import GoOn, LatePolicy, Skip
from xcloud.features.replicas.links import ServerLinks
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.features.replicas.merging import Median, NormBound, Robust, TrimmedMean
from xcloud.launch import processes as launch
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.exchange import Work
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.events import EVENTS_FILE

SKIP = LocalUpdates(2, MEAN, late=Skip(0.2))
GO_ON = LocalUpdates(2, MEAN, late=GoOn(20.0))


def test_with_everyone_in_time_it_is_diloco() -> None:
    settings = LocalUpdates(4, DILOCO, late=Skip(20.0))
    post, diary = Post(3), Diary()
    job = [Replica(r, post.links(r), settings, 12) for r in range(3)]
    end_of(job[0].exchange).reporter = diary
    in_threads([lambda r=r: r.run(12) for r in job])

    rounds = [range(1, 5), range(5, 9), range(9, 13)]
    assert furthest(job[0].values, reference(3, rounds, (0.7, 0.9, True), [1, 1, 1])) < 1e-6
    assert all(equal(job[0].values, other.values) for other in job[1:])
    assert diary.weights == {4: (4, 4, 4), 8: (4, 4, 4), 12: (4, 4, 4)}
    assert not diary.words


def test_the_hub_shows_every_contribution_that_comes() -> None:
    post, diary, seen = Post(2), Diary(), list[tuple[int, int, float]]()
    job = [Scalar(r, post, GO_ON, 4, diary, change=1.0 + r) for r in range(2)]
    job[0].end.terms = Terms(
        watch=lambda step, replica, named: seen.append((step, replica, float(named["0.weight"])))
    )
    in_threads([lambda r=r: r.run(1, 4) for r in job])

    assert seen == [(2, 1, -4.0), (4, 1, -4.0)]  # the outer gradient: outer - values


def test_a_late_cloud_is_left_out_once_and_its_change_is_in_the_next_merge() -> None:
    """Replica 2 stops in step 2 until the others have merged without it; they go on at once. When
    the hub is in step 3 it asks: its own change stays with it, on top of what was merged."""
    post, diary = Post(3), Diary()
    late = Scalar(2, post, SKIP, 8, diary, change=10.0)
    others = [Scalar(r, post, SKIP, 8, diary) for r in (0, 1)]

    def hold(step: int) -> None:
        if step == 2:
            diary.wait_for(lambda d: (2, "late") in d.words and d.hub_step == 3)

    in_threads(
        [
            lambda: others[0].run(1, 8, asked(post, diary, 2, at=3)),
            lambda: others[1].run(1, 8),
            lambda: late.run(1, 8, hold),
        ]
    )

    assert diary.words == [(2, "late"), (2, "back")]
    assert diary.weights == {2: (2, 2, 0), 4: (2, 2, 3), 6: (2, 2, 2), 8: (2, 2, 2)}
    assert late.made == [1, 2, 4, 5, 6, 7, 8]  # it left out the one that the hub had behind it
    first, second, others_after = 2.0, (2 * 2 + 2 * 2 + 3 * 30) / 7, (2 + 2 + 20) / 3
    assert late.value == pytest.approx(first + second + 2 * others_after, abs=1e-4)
    assert others[0].value == others[1].value == late.value


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_whose_value_is_not_finite_counts_for_nothing_and_heals(replica: int) -> None:
    post, diary = Post(2), Diary()
    job = [Scalar(r, post, GO_ON, 4, diary) for r in range(2)]

    def spoil(step: int) -> None:
        if step == 2:
            job[replica].parameter.data += math.nan

    in_threads([
        lambda r=r: job[r].run(1, 4, spoil if r == replica else lambda step: None)
        for r in range(2)
    ])  # fmt: skip

    left_out = (0, 2) if replica == 0 else (2, 0)
    assert diary.weights == {2: left_out, 4: (2, 2)}
    assert job[0].value == job[1].value == 4.0


def test_replicas_round_independently_so_that_their_errors_average_out() -> None:
    post, x = Post(3), torch.linspace(-1, 1, 64)
    module, int4 = nn.ParameterDict({"x": x}), Chain(int4=BlockInt(4, 64, stochastic=True))
    ends = [end_of(rounds_of(post.links(r), module, SKIP, 4, compressor=int4)) for r in (1, 2)]
    first, second = (end.codec.encode([x])[1][0] for end in ends)
    assert not torch.equal(first, second)


def test_one_that_missed_many_merges_gets_all_values() -> None:
    post, diary = Post(2), Diary()
    settings = LocalUpdates(1, DILOCO, late=Skip(0.02))
    hub = Scalar(0, post, settings, 12, diary)
    late = Scalar(1, post, settings, 12, diary, change=3.0)

    def hold(step: int) -> None:
        if step == 1:
            diary.wait_for(lambda d: len(d.weights) >= 8)

    in_threads([lambda: hub.run(1, 12, slowly), lambda: late.run(1, 12, hold)])

    assert hub.value == late.value
    assert diary.words[:2] == [(1, "late"), (1, "back")]
    assert torch.equal(*(one.rounds.fragments[0].values.velocity[0] for one in (hub, late)))


@pytest.mark.parametrize("is_finite", [True, False], ids=["merged", "left out"])
def test_one_that_is_told_a_short_last_round_with_others_ends_where_the_first_cloud_does(
    is_finite: bool,
) -> None:
    """Merges of steps 2 and 4 are the outer optimizer's, that of step 5 is the mean, or is left
    out."""
    post, diary = Post(2), Diary()
    settings = LocalUpdates(2, DILOCO, late=Skip(0.02))
    hub = Scalar(0, post, settings, 5, diary)
    late = Scalar(1, post, settings, 5, diary)

    def wait_at_the_end(step: int) -> None:
        if step == 5:
            hub.end.late = Skip(20.0)
            if not is_finite:
                hub.parameter.data += math.nan

    def hold(step: int) -> None:
        if step == 2:
            diary.wait_for(lambda d: 5 in d.weights)

    in_threads([lambda: hub.run(1, 5, wait_at_the_end), lambda: late.run(1, 5, hold)])

    first = 0.7 * (2 + 0.9 * 2)
    second = 0.7 * (2 + 0.9 * (0.9 * 2 + 2))
    assert diary.weights == {2: (2, 0), 4: (2, 0), 5: (1 if is_finite else 0, 0)}
    assert hub.value == late.value == pytest.approx(first + second + is_finite)
    assert torch.equal(*(one.rounds.fragments[0].values.velocity[0] for one in (hub, late)))


def slowly(step: int) -> None:
    if step > 8:
        time.sleep(0.05)


@pytest.mark.parametrize(("back_at", "weight"), [(7, 1), (8, 0)])
def test_the_others_go_on_without_one_that_is_gone_and_take_it_in_again(
    back_at: int, weight: int
) -> None:
    """Between two merges, or at the step of one, which then is without it."""
    post, diary = Post(3), Diary()
    others = [Scalar(r, post, GO_ON, 12, diary) for r in (0, 1)]
    lost = Scalar(2, post, GO_ON, 12, diary, change=4.0)
    again: list[Scalar] = []

    def die_and_return() -> None:
        lost.run(1, 3)  # it dies in its second round
        post.end(2)
        diary.wait_for(lambda d: d.hub_step == back_at)
        post.begin_again(2)
        again.append(Scalar(2, post, GO_ON, 12, diary, change=4.0, is_newcomer=True))
        again[0].run(1, 12)

    waiting = asked(post, diary, 2, back_at)
    in_threads(
        [lambda: others[0].run(1, 12, waiting), lambda: others[1].run(1, 12), die_and_return]
    )

    assert diary.words == [(2, "left"), (2, "back")]
    assert diary.weights[2] == (2, 2, 2)
    assert diary.weights[4] == (2, 2, 0) and diary.weights[6] == (2, 2, 0)
    assert diary.weights[8] == (2, 2, weight)
    assert diary.weights[10] == diary.weights[12] == (2, 2, 2)
    assert again[0].made == [*range(back_at + 1, 13)]
    assert others[0].value == others[1].value == again[0].value


def test_a_lost_cloud_ends_the_run_where_nothing_else_was_asked_for() -> None:
    settings = LocalUpdates(2, MEAN, late=Skip(20.0))
    post, diary = Post(2), Diary()
    hub = Scalar(0, post, settings, 4, diary)
    post.end(1)
    with pytest.raises(LinkClosed, match=r"add \+strategy/averaging/late=go_on"):
        hub.run(1, 4)


def test_one_that_never_comes_counts_as_gone_unless_late_ones_are_skipped() -> None:
    settings = LocalUpdates(2, MEAN, late=GoOn(0.05))
    post, diary = Post(2), Diary()
    Scalar(0, post, settings, 6, diary).run(1, 6)
    assert diary.words == [(1, "left")]
    assert set(diary.weights.values()) == {(2, 0)}


def test_one_that_was_waited_for_in_vain_is_taken_in_again_on_the_same_link() -> None:
    """It is late at its second merge: the hub must expect its second message, not a first one."""
    settings = LocalUpdates(2, MEAN, late=GoOn(0.5))
    post, diary = Post(2), Diary()
    hub = Scalar(0, post, settings, 8, diary)
    late = Scalar(1, post, settings, 8, diary, change=3.0)

    def hold(step: int) -> None:
        if step == 4:
            diary.wait_for(lambda d: (1, "left") in d.words and d.hub_step == 5)

    in_threads(
        [
            lambda: hub.run(1, 8, asked(post, diary, 1, at=5)),
            lambda: late.run(1, 8, hold),
        ]
    )

    assert diary.words == [(1, "left"), (1, "back")]
    assert diary.weights == {2: (2, 2), 4: (2, 0), 6: (2, 3), 8: (2, 2)}
    assert hub.value == late.value


def test_waiting_for_the_late_costs_the_others_no_more_than_was_asked_for() -> None:
    """One that was skipped is not waited for again before it has come."""
    settings = LocalUpdates(1, MEAN, late=Skip(0.02))
    post, diary, waits = Post(2), Diary(), list[float]()
    hub = Scalar(0, post, settings, 40, diary)
    links = hub.end.links
    recv = links.next

    def counted(replica: int, key: MessageKey, wait_s: float) -> Any:
        waits.append(wait_s)
        return recv(replica, key, wait_s)

    links.next = counted
    hub.run(1, 40)
    assert len(diary.weights) == 40
    assert len(waits) > 40 and sum(wait > 0 for wait in waits) == 2  # the first, and at the end


def test_a_change_that_was_not_merged_is_neither_lost_nor_counted_twice() -> None:
    """4 bits with feedback: what a skipped message told is in the values, not in the residual."""
    post, diary = Post(2), Diary()
    options: dict[str, Any] = {"compressor": Chain(int4=BlockInt(4, 64))}
    late = Scalar(1, post, SKIP, 4, diary, change=3.3, **options)
    hub = Scalar(0, post, SKIP, 4, diary, **options)

    def hold(step: int) -> None:
        if step == 2:
            diary.wait_for(lambda d: (1, "late") in d.words and d.hub_step == 3)

    in_threads([lambda: hub.run(1, 4, asked(post, diary, 1, at=3)), lambda: late.run(1, 4, hold)])

    assert late.made == [1, 2, 4]
    assert diary.weights == {2: (2, 0), 4: (2, 3)}
    assert hub.value == late.value == pytest.approx(2 + (2 * 2 + 3 * 9.9) / 5, abs=0.05)
    residual = late.end.codec.state_dict()
    assert all(abs(float(v)) < 0.05 for v in residual.values() if isinstance(v, Tensor))


def test_it_goes_on_from_its_state() -> None:
    options: dict[str, Any] = {"compressor": Chain(int4=BlockInt(4, 64))}

    def job() -> list[Scalar]:
        post, diary = Post(2), Diary()
        return [Scalar(r, post, GO_ON, 9, diary, 0.37 + r, **options) for r in range(2)]

    whole, first, second = job(), job(), job()
    in_threads([lambda r=r: r.run(1, 9) for r in whole])
    in_threads([lambda r=r: r.run(1, 5) for r in first])
    for old, new in zip(first, second, strict=True):
        new.parameter.data.copy_(old.parameter.data)
        new.rounds.load_state_dict(stored(old.rounds.state_dict()))
    in_threads([lambda r=r: r.run(6, 9) for r in second])

    assert [r.value for r in whole] == [r.value for r in second]


def test_a_run_goes_on_from_the_state_of_the_hub_alone() -> None:
    """After step 5 of merges at 2, 4, 6: the hub keeps what it has done since the merge, the other
    begins with what was merged."""

    def job(**options: Any) -> tuple[Diary, list[Scalar]]:
        post, diary = Post(2), Diary()
        hub = Scalar(0, post, GO_ON, 8, diary)
        return diary, [hub, Scalar(1, post, GO_ON, 8, diary, change=4.0, **options)]

    _, before = job()
    in_threads([lambda r=r: r.run(1, 5) for r in before])
    assert [r.value for r in before] == [11.0, 14.0]
    diary, (hub, other) = job(is_newcomer=True)
    hub.parameter.data.copy_(before[0].parameter.data)
    hub.rounds.load_state_dict(stored(before[0].rounds.state_dict()))

    def go_on() -> None:
        hub.rounds.resume(5)
        hub.run(6, 8)

    in_threads([go_on, lambda: other.run(1, 8)])

    assert not diary.words
    assert diary.weights == {6: (2, 1), 8: (2, 2)} and other.made == [6, 7, 8]
    assert hub.value == other.value == pytest.approx(10 + (2 * 2 + 1 * 4) / 3 + 5)


def test_all_ranks_of_a_cloud_get_what_the_first_one_merged() -> None:
    post = Post(2)
    job = [(r, group) for r in range(2) for group in groups(2)]
    modules = [nn.ParameterDict({"x": torch.full((3,), 1.0)}) for _ in job]
    parameters = [module["x"] for module in modules]
    rounds = [
        rounds_of(post.links(r), module, GO_ON, 4, group)
        for (r, group), module in zip(job, modules, strict=True)
    ]

    def run(number: int) -> None:
        for step in range(1, 5):
            rounds[number].before_update(step, {}, {})
            parameters[number].data += 1.0 + job[number][0]
            rounds[number].after_update(step, Work(1, 1.0))

    in_threads([lambda n=n: run(n) for n in range(4)])

    assert all(torch.equal(p, torch.full((3,), 7.0)) for p in parameters)


@pytest.mark.parametrize("more", [{"fragments": 2}, {"overlap": 1}, {"mix": 0.5}])
@pytest.mark.parametrize("late", [Skip(), GoOn()], ids=repr)
def test_what_elastic_merges_cannot_do_is_refused(late: LatePolicy, more: Any) -> None:
    with pytest.raises(ConfigError, match="all parameters at once"):
        LocalUpdates(4, MEAN, late=late, **more)


@pytest.mark.parametrize("late", [Skip(), GoOn()], ids=repr)
@pytest.mark.parametrize("merge", [Median(), TrimmedMean(), NormBound()], ids=repr)
def test_no_robust_merge_is_the_word_of_the_first_cloud(merge: Robust, late: LatePolicy) -> None:
    with pytest.raises(ConfigError, match=r"first cloud merges for all.*averaging\.merge=null"):
        LocalUpdates(4, MEAN, merge=merge, late=late)


def test_a_fast_cloud_waits_for_the_first_one_as_long_as_that_lives() -> None:
    """However long its round takes: no time of the link counts."""
    post, diary = Post(2), Diary()
    job = [Scalar(r, post, GO_ON, 4, diary) for r in range(2)]
    job[1].end.links.patience_s = 0.0  # type: ignore[attr-defined]
    in_threads([lambda: job[0].run(1, 4, asked(post, diary, 1, at=2)), lambda: job[1].run(1, 4)])
    assert diary.weights == {2: (2, 2), 4: (2, 2)}


LONG = {"_target_": "tests.toy.ToyModel", "step_s": 0.03}
ELASTIC = (
    "strategy=local_updates", "strategy.averaging.every=5", "+strategy/averaging/late=go_on",
    "strategy.averaging.late.wait_s=20", "strategy.averaging.late.restart_s=0", "compression=int4",
    "training.max_steps=60",
)  # fmt: skip


def killing(
    monkeypatch: pytest.MonkeyPatch, victim: str, when: Callable[[], bool]
) -> list[tuple[str, Any]]:
    """Kills a rank once. Returns all ranks that are started, which grows."""
    started: list[tuple[str, Any]] = []
    real = launch.start_process

    def recording(command: list[str], environment: dict[str, str], log: Path) -> Any:
        process = real(command, environment, log)
        started.append((environment["LOCAL_RANK"], process))
        return process

    monkeypatch.setattr(launch, "start_process", recording)

    def kill() -> None:
        wait_for(when)
        (pid,) = (process.pid for rank, process in started if rank == victim)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return started


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cloud_is_killed_and_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other one makes all of its steps, merges alone meanwhile and takes it in again."""
    started = killing(monkeypatch, "1", lambda: '"event":"merge"' in read(tmp_path / EVENTS_FILE))
    config = toy_config("two_clouds", list(ELASTIC))
    config["model"] = LONG
    summary = start(tmp_path, config)

    assert [rank for rank, _ in started] == ["0", "1", "1"]
    merges = summary["merges"]
    assert merges["whole"] + merges["partial"] == 12 and merges["partial"] >= 1
    assert (merges["clouds_lost"], merges["clouds_back"]) == (1, 1)
    assert summary["num_steps"] == 60 and summary["final_loss"] < 1.5
    assert summary["compression_ratio"]["averaging"] > 1.5
    assert "cloud cloud_b is back" in read(tmp_path / EVENTS_FILE)
    assert no_workers(tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_loss_of_the_first_cloud_costs_what_it_did_since_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its two ranks save for all; the other cloud begins again with what they merged."""
    folder = CheckpointFolder(tmp_path)
    started = killing(monkeypatch, "0", lambda: bool(folder.agreed_steps()))
    checkpoints = ["training.checkpoint.every_steps=8", "launch.max_restarts=1"]
    config = toy_config("two_clouds", [*ELASTIC, *checkpoints, "training.max_steps=40"])
    config["cluster"]["clouds"]["cloud_a"]["num_ranks"] = 2  # type: ignore[index]
    summary = start(tmp_path, config | {"model": LONG})

    assert [rank for rank, _ in started] == ["0", "1", "2"] * 2
    assert summary["num_steps"] == 40 and summary["num_resumes"] == 1
    assert summary["num_steps_done_twice"] <= 40 - 8
    assert summary["merges"]["whole"] == 8 and summary["merges"]["clouds_lost"] == 0
    assert folder.agreed_steps() == [40] and folder.ranks(40) == [0, 1]
    assert summary["final_loss"] < 1.5 and no_workers(tmp_path)


class Ends:
    """Ends of rank 0, whose peers answer from a list: what came, or why nothing can."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.forgotten: list[int] = []
        self.answers: list[Any] = []
        self.back: set[int] = set()
        self.transport = SimpleNamespace(begins_again=lambda ranks: bool(self.back & {*ranks}))

    def both(self, line: str, peer: int, **settings: Any) -> Any:
        self.opened.append(peer)
        self.back.clear()  # its new processes have been met
        return None, SimpleNamespace(recv=self.recv)

    def recv(self, key: MessageKey, **waits: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, LinkClosed):
            raise answer
        return (answer,)

    def overdue_s(self, peers: Any, num_bytes: int) -> float:
        return 1.0

    def forget(self, rank: int) -> None:
        self.forgotten.append(rank)


def test_a_cloud_that_begins_again_is_lost_once_and_then_met_with_all_its_ranks() -> None:
    """However often, and whether its new process or the end of its old link shows first."""
    ends = Ends()
    rejoined: list[int] = []
    peers = [ReplicaPeer(0, "a", (0,)), ReplicaPeer(1, "b", (1, 2)), ReplicaPeer(3, "c", (3,))]
    links = ServerLinks(
        replica=0, peers=peers, num_replicas=3, num_shares=1, num_parts=1,
        ends=cast(Any, ends), device=torch.device("cpu"), line="averaging", stage=0,
        rejoin=rejoined.append,
    )  # fmt: skip
    links.open(100)
    assert ends.opened == [1, 3]

    def heard() -> Any:
        try:
            (value,) = links.next(1, MessageKey(Kind.AVERAGING, 1))
        except LinkClosed as error:
            return str(error)
        return value.item()

    for _ in range(2):
        ends.answers = [torch.tensor(1), torch.tensor(2), torch.tensor(3)]
        assert heard() == 1
        ends.back = {1, 2}
        assert "has begun again" in heard() and ends.forgotten == [1, 2] and not rejoined
        assert [heard(), heard()] == [2, 3]
        assert rejoined == [1, 2] and ends.opened == [1, 3, 1]

        ends.answers = [LinkClosed("it broke"), torch.tensor(4)]
        assert heard() == "it broke" and ends.forgotten == [1, 2, 1, 2]
        ends.back = {2}
        assert heard() == 4, "of its end was told before"
        assert rejoined == [1, 2, 1, 2] and ends.opened == [1, 3, 1, 1]
        ends.opened, ends.forgotten, ends.back = [1, 3], [], set()
        rejoined.clear()
    assert not ends.answers

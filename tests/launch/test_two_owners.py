"""What each owner of a run over several machines sees, and what he learns of the other."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from tests.toy import toy_config
from xcloud.base.errors import ConfigError
from xcloud.job import config as configs
from xcloud.job.given import read_shared
from xcloud.job.job import Launch
from xcloud.launch import join, joined_rank
from xcloud.launch.join import AGAIN, BEGIN_AGAIN, CloudRanks, Machine
from xcloud.launch.joined_rank import JoinedProcess, check_peers, place_of
from xcloud.launch.local import stopped_in_words
from xcloud.launch.own_progress import OwnProgress, what_left
from xcloud.launch.processes import RunStopped
from xcloud.launch.rank_process import RankProcess
from xcloud.layout import Cloud, ClusterLayout
from xcloud.line.hello import RUN_BYTES
from xcloud.line.line_state import LineState
from xcloud.line.mailbox import Mailbox
from xcloud.line.transport import SealedLines
from xcloud.net.frame import Kind
from xcloud.record.events import EVENTS_FILE, StepTotals
from xcloud.record.reporter import Reporter
from xcloud.show import following
from xcloud.show.display import ProgressLine
from xcloud.show.monitor import Monitor

HERE = "/data/eu/hospital.b/train.es"


def reported(is_abroad: bool, **fields: Any) -> dict[str, Any]:
    lines: list[bytes] = []
    reporter = Reporter(1, "cloud_b", lines.append, is_abroad=is_abroad)
    reporter.event("x", now=True, **fields)
    (line,) = lines
    return dict(json.loads(line))


@pytest.mark.parametrize(
    "text",
    [
        f"kept as {HERE}", f"'{HERE}': no space left", f"from ({HERE})", HERE,
        "[Errno 2] No such file: '~/corpus/train.es'", "in C:\\data\\eu\\train.es",
        "file:///data/eu/train.es", f"a\n{HERE}\nb", "path=/data/eu, and more",
    ],
)  # fmt: skip
def test_no_path_of_this_machine_is_reported_to_another_owner(text: str) -> None:
    """Wherever in an event it stands; to rank 0 of the same cloud it is told as it is."""
    for fields in ({"text": text}, {"values": {"a": text}}, {"rows": [["b", {"c": text}]]}):
        told = json.dumps(reported(True, **fields))
        assert "(a path)" in told and "eu" not in told and "corpus" not in told
        assert "(a path)" not in json.dumps(reported(False, **fields))


@pytest.mark.parametrize(
    "text", ["3/4 of 1.5 s/step", "int8+int8", "loss 2.1", "a -> b", "int4/8"]
)
def test_what_is_no_path_is_reported_as_it_is(text: str) -> None:
    assert reported(True, text=text)["text"] == text


def test_how_a_network_was_made_of_own_texts_stays_in_the_own_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sent: list[bytes] = []
    for is_abroad in (True, False):
        reporter = Reporter(1, "cloud_b", sent.append, is_abroad=is_abroad)
        reporter.remark(f"backbone: held-out loss 2.530, from {HERE}")
        assert len(sent) == (0 if is_abroad else 1)
        assert ("loss 2.530" in capsys.readouterr().out) is is_abroad


def test_every_cloud_sees_its_own_steps_twice_a_minute() -> None:
    said: list[str] = []
    now_s = [100.0]
    progress = OwnProgress(100, said.append, clock=lambda: now_s[0])
    progress.on_event("note", {"text": "x"})
    for step in range(1, 62):
        sent = {"forward": 1000, "other": 250}
        progress.on_event("step", {"step": step, "step_s": 0.5, "waiting_s": 0.2, "sent": sent})
        now_s[0] += 1.0
    assert [line.split()[1] for line in said] == ["1/100", "31/100", "61/100"]
    assert said[1] == "step 31/100  34 s left  0.500 s/step  waits 0.200 s  sends 20 kbit/s"
    progress.on_event("step", {"step": 62, "step_s": 0.5, "loss": 2.0})
    now_s[0] += 30
    progress.on_event("step", {"step": 63, "step_s": 0.5})
    assert "loss 2.000" in said[-1]
    progress.on_event("step", {"step": 64, "step_s": 0.5, "loss": 2.0})
    progress.on_event("phase", {"name": "evaluation"})
    assert said[-1].startswith("step 64/100"), "the last one is said before what follows"


def test_two_owners_see_one_loss_and_one_time_for_a_step() -> None:
    """They talk on the phone. Each line names whose waiting it shows."""
    stream = io.StringIO()
    first = ProgressLine(60, stream=stream)
    said: list[str] = []
    other = OwnProgress(60, said.append, cloud="cloud_b")
    for step in range(1, 61):
        step_s = 0.1 if step % 7 else 3.0
        waits = {"cloud_a": 0.5 * step_s, "cloud_b": 0.4 * step_s}
        loss = 8.0 - 0.1 * step - step % 3
        first.update(
            StepTotals(step, step_s, loss=loss, numbers={
                ("num_ranks", "cloud_a"): 1, ("num_ranks", "cloud_b"): 1,
                **{("waiting_s", cloud): waiting_s for cloud, waiting_s in waits.items()},
            })
        )  # fmt: skip
        other.on_event(
            "step",
            {"step": step, "step_s": step_s, "loss": loss, "waiting_s": waits["cloud_b"]},
        )
    first.close()
    other.on_event("phase", {"name": "evaluation"})
    shown = stream.getvalue().splitlines()[-1].split("  ")
    own = said[-1].split("  ")
    assert own[:4] == shown[:4] and own[0] == "step 60/60" and own[2].startswith("loss 1.9")
    assert shown[4].startswith("cloud_a waits ") and own[4].startswith("cloud_b waits ")


def test_who_trains_apart_is_shown_an_own_loss() -> None:
    said: list[str] = []
    progress = OwnProgress(60, said.append, cloud="cloud_b", next_merge=lambda step: step + 3)
    progress.on_event("step", {"step": 1, "step_s": 0.5, "loss": 2.0})
    assert "own loss 2.000" in said[0] and said[0].endswith("next merge at step 4")


def who_stopped(clouds: str, rank: int, is_asked: bool, asked: int | None = None) -> str:
    """Return what the terminal of a rank's cloud says.

    clouds: by letter.
    is_asked: whether it is the one that was stopped.
    asked: the rank of which rank 0 has heard that it was.
    """
    layout = ClusterLayout({f"cloud_{name}": Cloud() for name in clouds}, "sealed")
    ranks = CloudRanks(
        SimpleNamespace(cluster=layout, launch=Launch()),  # type: ignore[arg-type]
        Path("run"),
        file=Path("file"),
        cloud=layout.cloud_of(rank),
        machine=Machine(),
        listen=None,
        more_words=(),
    )
    ranks.is_asked_to_stop = is_asked
    return ranks.who_stopped(asked)


def test_every_terminal_says_which_cloud_has_stopped_the_run() -> None:
    assert who_stopped("ab", 1, is_asked=True).startswith("stopped by cloud_b (Ctrl+C")
    assert who_stopped("ab", 0, is_asked=True).startswith("stopped by cloud_a (Ctrl+C")
    assert who_stopped("ab", 0, is_asked=False, asked=1) == "stopped by cloud_b"
    assert who_stopped("ab", 1, is_asked=False) == "stopped by cloud_a"
    assert who_stopped("abc", 0, is_asked=False, asked=2) == "stopped by cloud_c"
    assert "another cloud" in who_stopped("abc", 1, is_asked=False)
    # Both at once: each says that it was stopped itself.
    assert who_stopped("ab", 0, is_asked=True, asked=1).startswith("stopped by cloud_a")


def test_who_stops_before_a_checkpoint_is_told_how_to_begin_again(tmp_path: Path) -> None:
    text = stopped_in_words(tmp_path, by="stopped by b", again=AGAIN, unsaved=BEGIN_AGAIN)
    assert text == f"stopped by b; nothing is saved yet; to restart {AGAIN}"


def test_every_cloud_sees_what_left_it_by_kind(tmp_path: Path) -> None:
    assert what_left(tmp_path) == ""
    for rank, num in ((1, 2_000_000), (2, 1_000_000)):
        messages = [{"kind": "gradient", "num_bytes": num}, {"kind": "alive", "num_bytes": 0}]
        (tmp_path / f"rank{rank}.wire.json").write_text(json.dumps({"messages": messages}))
    heading, row = what_left(tmp_path).splitlines()
    assert heading == "sent to other clouds:" and row.split() == ["gradient", "3.00", "MB"]
    assert Kind.GRADIENT.name.lower() == "gradient"
    (tmp_path / "rank1.wire.earlier.json").write_text("{}")
    assert what_left(tmp_path).startswith("sent to other clouds in this attempt:")


def follow(folder: Path, monkeypatch: pytest.MonkeyPatch, *events: dict[str, Any]) -> str:
    """What the monitor's table says of a run of two clouds whose second attempt had these."""
    file = folder / configs.EXPERIMENT_FILE
    configs.Settings.of(toy_config("two_clouds", ["cluster/wan=real"])).write(file)
    first = [
        {"event": "step", "step": 1, "step_s": 0.5, "rank": 0},
        {"event": "step", "step": 1, "step_s": 0.5, "rank": 1},
        *({"event": "stop", "step": 1, "rank": rank} for rank in (0, 1)),
    ]
    with (folder / EVENTS_FILE).open("w") as log:
        for number, event in enumerate([*first, *events]):
            cloud = f"cloud_{'ab'[event['rank']]}"
            log.write(json.dumps({"cloud": cloud, "t": 1000.0 + number, **event}) + "\n")
    (folder / "rank0.wire.json").write_text("{}")  # rank 0 has ended
    monkeypatch.setattr(following, "RECORD_WITHIN_S", 0.1)
    monitor = Monitor(read_shared(file, folder), folder)
    following.follow(monitor, following.os.getppid(), is_again=False, past=len(first))
    return ""


STOPS = [{"event": "stop", "step": 2, "rank": rank} for rank in (0, 1)]
RESUME = {"event": "resume", "step": 1, "rank": 0}
STEPS = [{"event": "step", "step": 2, "step_s": 0.5, "rank": rank} for rank in (0, 1)]


@pytest.mark.parametrize(
    ("events", "status", "cause", "has_tables"),
    [
        ([RESUME, *STEPS, *STOPS], "stopped", "interrupted", True),
        (
            [RESUME, *STEPS, {"event": "stop_asked", "of": 1, "rank": 0}, *STOPS],
            "stopped", "stopped by cloud_b", True,
        ),
        ([RESUME], "failed", "before rank 0 had finished", False),
        ([], "failed", "before rank 0 had finished", False),
    ],
    ids=["stopped", "stopped elsewhere", "no step", "never joined"],
)  # fmt: skip
def test_the_first_cloud_s_table_is_of_this_attempt_and_says_who_was_stopped(
    events: list[dict[str, Any]], status: str, cause: str, has_tables: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also where the monitor comes when all events are there already."""
    follow(tmp_path, monkeypatch, *events)
    summary = json.loads((tmp_path / "summary.json").read_text())
    shown = capsys.readouterr().out
    assert summary["status"] == status and cause in summary["cause"] and cause in shown
    assert ("step time, median" in shown) is has_tables


class Calls:
    """Notes what is called of it, in order, under a name."""

    def __init__(self, name: str, told: list[str], **more: Any) -> None:
        vars(self).update(more, _name=name, _told=told)

    def __getattr__(self, called: str) -> Any:
        return lambda *given, **_: self._told.append(f"{self._name} {called}")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_owner_s_rank_reports_its_lines_before_it_leaves_and_the_lines_are_closed_last(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    state = LineState("rank 1 of cloud_b")
    lines: Any = SealedLines.__new__(SealedLines)
    monkeypatch.setattr(SealedLines, "states", {"b": state}, raising=False)
    monkeypatch.setattr(SealedLines, "close", lambda _: told.append("lines close"))
    monkeypatch.setattr(SealedLines, "abandon", lambda _: told.append("lines abandon"))
    process = JoinedProcess.__new__(JoinedProcess)
    process.rank, process.lines = rank, lines
    process.detector = cast(Any, Calls("detector", told))
    process.state = cast(Any, SimpleNamespace(peers=None))
    role: Any = SimpleNamespace(peers=["him"], reporter=Calls("reporter", told))
    with process.taking_part(role, final_report=lambda: None):
        told.append("trains")
    reports = ["reporter event", "reporter flush"] if rank == 0 else []
    leaves = ["detector leave", "lines close"]
    assert told == ["detector connected", "trains", *reports, *leaves]
    assert process.state.peers == ["him"]

    told.clear()
    monkeypatch.setattr(RankProcess, "fail", lambda *_: told.append("is told") or 3)
    assert process.fail(OSError()) == 3
    assert told == ["detector close", "is told", "lines abandon"]


def test_both_owners_mean_one_run_and_each_listens_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clouds = {"a": Cloud(2, [0], address="10.0.0.1:7000"), "b": Cloud(1, [1])}
    layout = ClusterLayout(clouds, "sealed")
    monkeypatch.setenv("LOCAL_RANK", "1")
    first, other = (place_of(layout, rank, attempt=4, listen=None) for rank in (1, 2))
    assert first.listens_at == layout.address_of(1) and other.listens_at is None
    moved = place_of(layout, 1, attempt=5, listen="0.0.0.0:8000")
    assert moved.listens_at == ("0.0.0.0", 8001) and (first.attempt, moved.attempt) == (4, 5)
    assert first.run == other.run == moved.run and len(first.run) == RUN_BYTES
    larger = ClusterLayout({**clouds, "b": Cloud(2, [1])}, "sealed")
    assert place_of(larger, 1, attempt=4, listen=None).run != first.run


def test_a_cloud_needs_the_certificates_of_those_it_has_a_line_to_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has a line to the first, which it reports to, and to its neighbours."""
    clouds = {
        name: Cloud(1, [stage], address=f"10.0.0.{stage}:7000" if stage < 3 else None)
        for stage, name in enumerate("abcd")
    }
    layout = ClusterLayout(clouds, "sealed")
    rows = ("bcd", "a", ""), ("bc", "a", "d"), ("ac", "b", ""), ("a", "b", "c"), ("abd", "c", "")
    for known, cloud, lacks in rows:
        keys = SimpleNamespace(peers=dict.fromkeys(known, ()), pem_file=Path("own.pem"))
        monkeypatch.setattr(joined_rank, "this_clouds_keys", lambda keys=keys: keys)
        try:
            check_peers(layout, cloud)
            assert not lacks
        except ConfigError as error:
            assert lacks and f"peers: {{{lacks}: [{lacks}.pem]}}" in str(error)


def ranks_of_b(wan: Any, machine: Machine = join.ALONE, listen: str | None = None) -> CloudRanks:
    first = Cloud(address="h:1" if wan == "sealed" else None)
    layout = ClusterLayout({"cloud_a": first, "cloud_b": Cloud(2)}, wan)
    job: Any = SimpleNamespace(cluster=layout, launch=Launch())
    return CloudRanks(
        job, Path("run"), Path("file"), "cloud_b", machine, listen, more_words=["--roll-back"]
    )


def test_each_rank_is_told_its_attempt_and_where_its_cloud_meets_and_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    started: list[int] = []
    monkeypatch.setattr(join.LocalRanks, "start", lambda ranks: started.append(ranks.attempt))
    monkeypatch.setattr(CloudRanks, "tell_other_clouds", lambda ranks: told.append(ranks.ranks))
    monkeypatch.setattr(join, "time", SimpleNamespace(time=lambda: 1000.9))
    at_once = lambda target, daemon: SimpleNamespace(start=target)  # noqa: E731
    monkeypatch.setattr(join, "threading", SimpleNamespace(Thread=at_once))
    second = Machine(1, 2, meet_at="h:2")
    cases: list[tuple[CloudRanks, list[str], int]] = [
        (ranks_of_b("sealed"), [], 1),
        (ranks_of_b("sealed", listen="i:3"), ["--listen", "i:3"], 1),
        (ranks_of_b("sealed", second), ["--meet-at", "h:2"], 0),
        (ranks_of_b(Mailbox("/box")), [], 0),
    ]
    for ranks, more, num_told in cases:
        assert ranks.speaker == ranks.ranks[0] == (2 if more[:1] == ["--meet-at"] else 1)
        assert (ranks.interface == {}) is (more[:1] == ["--meet-at"])
        told.clear()
        ranks.start()
        assert started.pop() == 1000 and told == []
        own = ["--attempt", "1000", "--run-dir", "run", *more, "--roll-back"]
        words = ranks.words_of(2)
        assert words[-len(own) :] == own and words[:2] == ["worker", "file"]
        ranks.start()  # within the same second
        assert started.pop() == 1001 and len(told) == num_told


@pytest.mark.parametrize("first", ["cloud_a", "cloud_b"])
def test_the_first_cloud_tells_all_others_of_its_restart_and_they_tell_the_first(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(join, "this_clouds_keys", lambda: "keys")
    lines = SimpleNamespace(tell_of_restart=told.append)
    monkeypatch.setattr(join, "SealedLines", lambda place, keys, say: told.append(place) or lines)
    ranks = ranks_of_b("sealed")
    clouds = {"cloud_a": Cloud(2, address="h:1"), "cloud_b": Cloud(2), "cloud_c": Cloud(1)}
    ordered = sorted(clouds, key=lambda name: name != first)
    ranks.layout = ClusterLayout({name: clouds[name] for name in ordered}, "sealed")
    ranks.ranks = range(ranks.layout.ranks_in("cloud_b")[0], 4)
    ranks.attempt = 7
    ranks.tell_other_clouds()
    place, peers = told
    assert place.attempt == 7 and place.rank == ranks.ranks[0]
    assert peers == ([2, 4] if first == "cloud_b" else [0])


def test_words_of_join_say_which_machine_of_which_cloud_this_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(join, "join", lambda *of, **named: asked.append((of, named)))
    monkeypatch.setattr(join, "this_clouds_policy", lambda: SimpleNamespace(me=None))
    monkeypatch.chdir(tmp_path)
    usual = {"cloud": "b", "machine": join.ALONE, "listen": None, "more_words": []}
    several = ["--nnodes", "2", "--node-rank", "1", "--master-addr"]
    cases: list[tuple[list[str], str, dict[str, Any]]] = [
        ([], "runs/x-b", {}),
        (["--run-dir", "mine", "--roll-back"], "mine", {"more_words": ["--roll-back"]}),
        (["--listen", "i:3"], "runs/x-b", {"listen": "i:3"}),
        ([*several, "h"], "runs/x-b", {"machine": Machine(1, 2, "h:29500")}),
        (
            [*several, "::1", "--master-port", "7"],
            "runs/x-b",
            {"machine": Machine(1, 2, "[::1]:7")},
        ),
    ]
    for words, folder, changed in cases:
        assert join.main(["x.yaml", "--cloud", "b", *words]) == 0
        assert asked.pop() == ((Path("x.yaml"), tmp_path / folder), {**usual, **changed})
    for words, said in (
        (["--listen", "i"], "--listen must be HOST:PORT, got i"),
        (several[:-1], "needs --nnodes, --master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "h"], "needs --nnodes"),
        (["--nnodes", "2", "--node-rank", "-1", "--master-addr", "h"], "needs --nnodes"),
    ):
        with pytest.raises(ConfigError, match=said):
            join.main(["x.yaml", "--cloud", "b", *words])
    with pytest.raises(ConfigError, match="give --cloud"):
        join.main(["x.yaml"])
    monkeypatch.setattr(join, "join", Mock(side_effect=RunStopped("stopped by b")))
    assert join.main(["x.yaml", "--cloud", "b"]) == 75


def test_names_for_an_ingress_are_one_a_rank() -> None:
    layout = ClusterLayout({"a": Cloud(2, address="h:1"), "b": Cloud()}, "sealed")
    names = [place_of(layout, rank=r, attempt=0, listen=None).label_of(r) for r in (0, 1)]
    said = join.labels_in_words(layout, "a")
    assert said == f"names in the TLS hello, for an ingress: rank 0 {names[0]}, rank 1 {names[1]}"
    assert len({*names}) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_tells_of_its_lines_before_it_leaves_and_closes_them_last(rank: int) -> None:
    """Only rank 0 reports lines: its events need no link."""
    done: list[Any] = []
    lines: Any = object.__new__(SealedLines)
    measured = SimpleNamespace(
        peer_name="rank 2 of b", round_trip_s=0.1, bytes_per_s=1000.0, num_cuts=3, num_outages=2,
        outage_s=1.23456, sent_again_bytes=7,
    )  # fmt: skip
    unmeasured = SimpleNamespace(**{**vars(measured), "bytes_per_s": None})
    lines.states = {2: measured, 3: unmeasured}
    lines.close = lambda: done.append("closed")
    lines.abandon = lambda: done.append("abandoned")
    process: Any = object.__new__(JoinedProcess)
    process.rank = rank
    process.lines = lines
    process.detector = SimpleNamespace(
        connected=lambda *of: done.append(of),
        leave=lambda: done.append("left"),
        close=lambda: done.append("ended"),
    )
    reporter = SimpleNamespace(
        event=lambda kind, **fields: done.append((kind, fields)),
        flush=lambda: done.append("flushed"),
    )

    @contextmanager
    def usual(process: Any, role: Any, final_report: Any) -> Iterator[None]:
        done.append("begun")
        yield
        done.append("trained")

    role: Any = SimpleNamespace(reporter=reporter)
    with mock.patch.object(RankProcess, "taking_part", usual):
        with process.taking_part(role, final_report="report"):
            done.append("trains")
    event = {
        "to": "rank 2 of b", "round_trip_s": 0.1, "bandwidth_bits_per_s": 8000.0, "num_cuts": 3,
        "num_outages": 2, "outage_s": 1.235, "sent_again_bytes": 7,
    }  # fmt: skip
    told = [("line", event), ("line", {**event, "bandwidth_bits_per_s": None}), "flushed"]
    before = [(bool, "report"), "begun", "trains", "trained"]
    assert done == [*before, *(told if rank == 0 else []), "left", "closed"]
    done.clear()
    with mock.patch.object(RankProcess, "fail", lambda process, error: 3):
        assert process.fail(ValueError()) == 3
        assert done == ["ended", "abandoned"]
        process.detector = process.lines = None  # before the rendezvous
        assert process.fail(ValueError()) == 3 and len(done) == 2


def test_machines_of_a_cloud_meet_and_take_the_attempt_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    asked: list[Any] = []
    monkeypatch.setattr(
        joined_rank, "store_of_machines", lambda *of, **given: asked.append((of, given)) or store
    )
    job: Any = SimpleNamespace(
        cluster=SimpleNamespace(liveness=SimpleNamespace(join_within_s=5.0))
    )
    for rank, attempt in ((4, 11), (5, 12)):
        process: Any = object.__new__(JoinedProcess)
        process.rank, process.attempt = rank, attempt
        assert process.meet(job, "[::1]:7", mates=[4, 5], detector="it") is store
        assert process.attempt == 11
    (first, given), (_, second) = asked
    assert first == ("::1", 7) and given["detector"] == "it" and given["within_s"] == 5.0
    assert [one[key] for one in (given, second) for key in ("rank", "num_ranks", "serves")] == [
        0, 2, True, 1, 2, False,
    ]  # fmt: skip


def test_only_the_first_rank_of_a_machine_speaks_without_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(joined_rank, "say", said.append)
    for is_first in (True, False):
        process: Any = object.__new__(JoinedProcess)
        process.rank, process.is_first_here = 3, is_first
        process._say("waiting")
    assert said == ["waiting", "rank 3: waiting"]

"""When a run saves, what that costs, and that its last step is saved."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.attempts import (
    CODECS,
    LAST,
    SHAPES,
    STRATEGIES,
    Attempt,
    Shape,
    job,
    undisturbed,
    whole,
)
from tests.channels import same_state
from tests.nightly import each_once, first_daily
from xcloud.comm.state import State
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.pipeline.control import Control, Signal
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Checkpoints
from xcloud.rank.saving import CheckpointMessage
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.reporter import Reporter


def test_checkpoints_cost_no_bytes_but_where_they_are_made(tmp_path: Path) -> None:
    shape = SHAPES["two clouds, GPipe"]
    saving = Attempt(tmp_path, job(shape, CODECS["plain"]))
    saving.train(3)
    usual = Attempt(tmp_path, job(shape, CODECS["plain"]), Checkpoints(0, 0))
    usual.train(3)

    assert usual.from_step == 2  # of one step only
    rank_0 = [attempt.ranks[0].wiring.ends.records for attempt in (saving, usual)]
    sent = [sum(sum(link.num_bytes.values()) for link in links) for links in rank_0]
    assert 0 < sent[0] - 3 * sent[1] < 300
    assert same_state(saving.state, usual.state)


def test_the_last_step_waits_for_a_checkpoint_that_is_still_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, folder, reporter = (
        threading.Event(),
        CheckpointFolder(tmp_path),
        Reporter(0, "a", len),
    )

    def write(folder: Any, *rest: Any, of: Any = CheckpointFolder.write) -> Any:
        assert may_write.wait(60)
        return of(folder, *rest)

    def wait(own: Any, *rest: Any, of: Any = CheckpointWriter.wait) -> None:
        may_write.set()
        of(own, *rest)

    monkeypatch.setattr(CheckpointFolder, "write", write)
    made = Checkpointer(
        Timing(Checkpoints(3, 0), last_step=6), CheckpointWriter(folder, 0, {}), None, {}, reporter
    )
    made.after(3, Signal.CHECKPOINT)
    monkeypatch.setattr(CheckpointWriter, "wait", wait)
    made.after(6, Signal.CHECKPOINT)
    may_write.set()
    for _ in range(2):  # what is written, what follows from it
        made.settle()
    made.close(is_finished=False)
    assert folder.agreed_steps() == [6, 3]


def test_a_state_is_copied_once_the_last_one_is_written_and_its_events_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two states would take twice the memory, and a crash would lose what was told of the steps
    that are saved."""
    done: list[str] = []
    reporter = Reporter(0, "a", lambda lines: done.append("flushed"))
    writer = CheckpointWriter(CheckpointFolder(tmp_path), 0, {})
    made = Checkpointer(Timing(Checkpoints(3, 0)), writer, None, {}, reporter)
    may_write = threading.Event()
    real_write = CheckpointFolder.write
    real_copy = CheckpointWriter.copy

    def write(folder: Any, *rest: Any) -> Any:
        assert may_write.wait(60)
        found = real_write(folder, *rest)
        done.append("written")
        return found

    def copy(own: Any, parts: Any) -> Any:
        done.append("copied")
        return real_copy(own, parts)

    monkeypatch.setattr(CheckpointFolder, "write", write)
    monkeypatch.setattr(CheckpointWriter, "copy", copy)
    reporter.event("step", step=3)
    made.save(3)
    assert done == ["flushed", "copied"]
    reporter.event("step", step=6)
    second = threading.Thread(target=made.save, args=(6,))
    second.start()
    second.join(0.2)
    assert "copied" not in done[2:]
    may_write.set()
    second.join(60)
    made.settle()
    made.close(is_finished=False)
    assert done.index("written") < done.index("copied", 2)
    assert "flushed" in done[2 : done.index("copied", 2)]


def test_a_disk_that_is_too_slow_is_written_to_half_as_often(tmp_path: Path) -> None:
    """All replicas go by the same steps: twice the interval, or they might never meet."""
    outs = {1: Mock()}
    control = Control(0, dict(outs), {}, 1.0, {})
    writer = CheckpointWriter(CheckpointFolder(tmp_path), 0, {})
    timing = Timing(Checkpoints(3, 0))
    made = Checkpointer(timing, writer, control, {}, Reporter(0, "a", len), is_told=False)
    made.save(3)  # rank 1 does not say that it has written its part
    assert made.is_pending
    for step, every in ((4, 3), (6, 6), (9, 6), (12, 12)):
        made.signal(step)
        assert timing.every == every
    made.close(is_finished=False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writing_thread_that_fails_ends_the_rank_and_does_not_hang_it(tmp_path: Path) -> None:
    writer = CheckpointWriter(CheckpointFolder(tmp_path), 0, {})
    writer.later(lambda: {}["no such part"])
    with pytest.raises(AssertionError, match="the thread that writes checkpoints has failed"):
        writer.wait()


def test_a_rank_that_is_lost_after_it_has_told_of_its_part_takes_no_other_with_it(
    tmp_path: Path,
) -> None:
    """As a producer that ends between its word and that of rank 0."""
    outs = {rank: Mock() for rank in (1, 2)}
    control = Control(0, dict(outs), {}, 1.0, {})
    writer = CheckpointWriter(CheckpointFolder(tmp_path), 0, {})
    made = Checkpointer(Timing(Checkpoints(3, 0)), writer, control, {}, Reporter(0, "a", len))
    made.save(3)
    made.settle()
    done = Frame(
        MessageKey(Kind.CHECKPOINT, 3),
        (torch.tensor([CheckpointMessage.DONE], dtype=torch.uint8),),
        1,
        0.0,
        0,
    )
    control.receive(2, done)
    del control.out[2]
    made.lose(2)
    control.receive(1, done)
    made.close(is_finished=False)

    assert CheckpointFolder(tmp_path).agreed_steps() == [3]
    assert outs[1].send.called and not outs[2].send.called


def test_no_word_of_rank_0_takes_a_checkpoint_that_is_agreed_on(tmp_path: Path) -> None:
    """Neither that it is lost, nor that another is agreed on of which there is no part here."""
    folder = CheckpointFolder(tmp_path)
    for step in (100, 200):
        folder.write(step, 1, {"x": torch.ones(1)}, {})
        folder.mark_agreed(step, 1, {})
    control = Control(1, {0: Mock()}, {}, 1.0, {})
    writer, lines = CheckpointWriter(folder, 1, {}), list[bytes]()
    made = Checkpointer(
        Timing(Checkpoints(100, 0, keep=1)), writer, control, {}, Reporter(1, "b", lines.append)
    )

    def hear(step: int, message: CheckpointMessage) -> None:
        code = torch.tensor([message], dtype=torch.uint8)
        control.receive(0, Frame(MessageKey(Kind.CHECKPOINT, step), (code,), 1, 0.0, 0))

    for step in (200, 100, 300):
        hear(step, CheckpointMessage.LOST)
    for step in (300, 10**9):
        hear(step, CheckpointMessage.AGREED)
    made.close(is_finished=False)
    assert folder.agreed_steps() == [200, 100]
    assert folder.ranks(100) == folder.ranks(200) == [1]
    assert b"its part is not here" in b"".join(lines)


def _but_for_times(states: list[State]) -> list[State]:
    return [{k: v for k, v in one.items() if "budget.numbers" not in k} for one in states]


def limited(cloud_ranks: int = 1, **limit: Any) -> Shape:
    clouds = {name: Cloud(cloud_ranks, [0, 1], replica=r) for r, name in enumerate("ab")}
    strategy = Strategy("local_updates", None, LocalUpdates(every=4, **limit))
    return Shape(ClusterLayout(clouds), GPipe(4), strategy=strategy)


@pytest.mark.parametrize(
    ("cloud_ranks", "limit"), each_once([1, 2], [{"max_tokens": 4}, {"max_s": 1e-9}])
)
def test_clouds_that_leave_out_steps_save_after_them_too(
    limit: dict[str, Any], cloud_ranks: int, tmp_path: Path
) -> None:
    shape = limited(cloud_ranks, **limit)
    first = Attempt(tmp_path, job(shape, CODECS["plain"]))
    first.train(7)
    assert all(first.ranks[0].trainer.exchange.is_idle(step) for step in (7, 8))
    assert first.folder.agreed_steps() == [6, 4]
    second = Attempt(tmp_path, job(shape, CODECS["plain"]))
    second.train()
    assert second.from_step == 6
    both = [_but_for_times(states) for states in (second.state, whole(shape))]
    assert "max_s" in limit or same_state(*both)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_checkpoint_is_due_by_steps_or_minutes_until_one_is_made() -> None:
    clock = Clock()
    timing = Timing(Checkpoints(5, 2.0), clock=clock)
    assert not timing.look(4) and not timing.is_due
    assert timing.look(5) and not timing.look(6) and timing.is_due
    timing.saved(6)
    assert not timing.is_due and timing.saved_step == 6
    timing.saved(7, is_complete=False)
    assert timing.saved_step == 6
    clock.now_s = 120.0
    assert not timing.look(8)
    clock.now_s = 120.1
    assert timing.look(9)
    timing.saved(9)
    assert not timing.look(11)
    by_steps = Timing(Checkpoints(5, 0.0), clock=clock)
    clock.now_s = 1e6
    assert not by_steps.look(4) and not by_steps.is_half_way(1)


def test_steps_between_checkpoints_are_estimated_from_half_of_the_minutes_on() -> None:
    def estimated(every: int, now_s: float, num_steps: int, steps: int = 0) -> int | None:
        clock = Clock()
        timing = Timing(Checkpoints(steps, 2.0), from_step=100, clock=clock)
        timing.every = every
        clock.now_s = now_s
        return timing.better_every(100 + num_steps)

    assert estimated(0, 59.9, 12) is None
    assert estimated(0, 60.0, 12) == 24 and estimated(0, 6000.0, 12) == 1
    found = [estimated(every, 60.0, 12) for every in (19, 20, 24, 30, 31)]
    assert found == [24, None, None, None, 24], "each change may cost a checkpoint"
    assert estimated(30, 60.0, 12, steps=9) == 9
    clock = Clock()
    timing = Timing(Checkpoints(0, 2.0), clock=clock)
    found = []
    for clock.now_s in (60.0, 119.0, 120.0, 239.0, 240.0):
        found.append(timing.better_every(12))
    assert found == [24, None, 12, None, 6], "each time when twice as long has passed"


def test_the_room_of_a_copy_is_made_half_way_to_it() -> None:
    clock = Clock()
    timing = Timing(Checkpoints(10, 2.0), last_step=100, clock=clock)
    assert [step for step in range(20) if timing.is_half_way(step)] == [
        *range(5, 10),
        *range(15, 20),
    ]
    assert timing.is_half_way(95) and not Timing(Checkpoints(10, 0), last_step=99).is_half_way(95)
    clock.now_s = 59.9
    assert not timing.is_half_way(1)
    clock.now_s = 60.0
    assert timing.is_half_way(1)


@pytest.mark.parametrize(("shape", "every_steps"), each_once(STRATEGIES, [0, 500, 3], count=1))
def test_minutes_count_in_every_strategy(shape: str, every_steps: int, tmp_path: Path) -> None:
    """Steps of 10 s: after three rank 0 tells replicas how many there are in a minute, ahead of
    the first."""
    minutes = Checkpoints(every_steps, 1, 9)
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]), minutes, step_s=10.0)
    attempt.train()
    assert attempt.folder.agreed_steps() == ([9, 6, 3] if every_steps == 3 else [9, 8])


def test_a_replica_that_hears_too_late_how_often_to_save_costs_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Checkpointer.take_report

    def deaf(checkpointer: Checkpointer, peer: int, step: int, code: int) -> None:
        if (checkpointer.rank, code) != (2, CheckpointMessage.EVERY):
            take(checkpointer, peer, step, code)

    monkeypatch.setattr(Checkpointer, "take_report", deaf)
    shape = SHAPES["3 replicas, one update late"]
    attempt = Attempt(
        tmp_path, job(shape, CODECS["plain"]), Checkpoints(0, 1), step_s=10.0, slow_until=LAST + 1
    )
    attempt.train()
    saved = {(e["step"], e["rank"]) for e in attempt.told("checkpoint")}
    assert saved == {(8, 0), (8, 1), (8, 3), *((9, rank) for rank in range(4))}
    assert attempt.folder.steps() == attempt.folder.agreed_steps() == [9]


@pytest.mark.parametrize("shape", first_daily(STRATEGIES, count=1))
def test_the_last_step_is_saved_however_short_the_run(shape: str, tmp_path: Path) -> None:
    first = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]), Checkpoints())
    first.train()
    assert first.folder.agreed_steps() == [LAST]
    never = tmp_path / "never"
    Attempt(never, job(SHAPES[shape], CODECS["plain"]), Checkpoints(0, 0)).train()
    assert not never.exists()


def test_a_run_that_is_asked_to_end_saves_its_step_first(tmp_path: Path) -> None:
    shape = "2x2 lanes, 1F1B"
    first = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]), Checkpoints(1000, 0))
    first.asked.asked_at_s = 0.0
    first.train()
    assert first.folder.agreed_steps() == [1]
    second = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    second.train()
    assert same_state(second.state, undisturbed(shape))


def test_minutes_are_rank_0s_and_all_save_after_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal = Checkpointer.signal

    def at_step_3(checkpointer: Checkpointer, step: int) -> Signal:
        checkpointer.timing._saved_s -= 61.0 if step == 3 else 0.0
        return signal(checkpointer, step)

    monkeypatch.setattr(Checkpointer, "signal", at_step_3)
    attempt = Attempt(tmp_path, job(SHAPES["2x2 lanes, 1F1B"], CODECS["plain"]), Checkpoints(0, 1))
    attempt.train(6)
    assert attempt.folder.steps() == attempt.folder.agreed_steps() == [3]
    assert attempt.folder.ranks(3) == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_save_says_so_and_the_last_step_is_still_to_be_saved(rank: int) -> None:
    done: list[Any] = []
    checkpointing: Any = object.__new__(Checkpointer)
    checkpointing.rank = rank
    checkpointing.timing = SimpleNamespace(
        saved=lambda step, is_complete: done.append((step, is_complete))
    )
    checkpointing.ledger = SimpleNamespace(begin=lambda step, ranks: done.append((step, ranks)))
    checkpointing._lack = lambda step, why: done.append((step, why))
    checkpointing.fail(7, reason="full")
    assert done == [(7, False), *([(7, {0})] if rank == 0 else []), (7, "full")]


@pytest.mark.parametrize(
    ("signal", "is_writing", "is_last", "does"),
    [
        (Signal.CHECKPOINT, True, False, "fails"),
        (Signal.CHECKPOINT, True, True, "saves"),
        (Signal.CHECKPOINT, False, False, "saves"),
        (Signal.STOP, True, False, "saves"),
        (Signal.GO_ON, True, False, "goes on"),
    ],
)
def test_a_step_whose_checkpoint_is_due_while_one_is_written_is_left_out(
    signal: Signal, is_writing: bool, is_last: bool, does: str
) -> None:
    """The last one is waited for."""
    done: list[Any] = []
    checkpointer: Any = object.__new__(Checkpointer)
    checkpointer.rank = 1
    checkpointer.fail = lambda step, reason: done.append(("fails", step, reason))
    checkpointer.save = lambda step: done.append(("saves", step))
    checkpointer._tell = lambda to, step, message: None
    checkpointer.asked = SimpleNamespace(was_asked=False, is_reported=False)
    checkpointer._parts = "parts"
    checkpointer.notes = SimpleNamespace(flush=lambda: None)
    checkpointer.writer = SimpleNamespace(
        is_writing=is_writing, prepare=lambda parts: done.append("prepares")
    )
    checkpointer.timing = SimpleNamespace(
        saved_step=5, is_half_way=lambda step: False, final_step=7 if is_last else 8
    )
    stops = checkpointer.after(7, signal)
    told = {
        "fails": [("fails", 7, "that of step 5 is still being written")],
        "saves": [("saves", 7)],
        "goes on": [],
    }
    assert done == told[does] and stops is (signal is Signal.STOP)

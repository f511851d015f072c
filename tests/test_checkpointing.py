"""Saving while training, and going on from the files: ranks in threads over links in memory, as
they are wired in a run. Bit for bit, whatever ends the first attempt."""

import errno
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.channels import same_state
from tests.pipelines import in_threads
from tests.resumable_jobs import CODECS, SHAPES, Shape, job
from tests.trainers import Rank
from xcloud.base.errors import ConfigError, DataError
from xcloud.cluster.layout import Cloud, ClusterLayout
from xcloud.comm.state import load_states, states_of
from xcloud.join.agreement import judge
from xcloud.parallel.control import Signal
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.schedule import GPipe
from xcloud.parallel.strategy import Strategy
from xcloud.rank.checkpoints import CheckpointPart
from xcloud.record import checkpoints
from xcloud.record.checkpoints import AGREED_FILE, CheckpointFolder
from xcloud.record.reporter import Reporter
from xcloud.survive import saving
from xcloud.survive.changes import Places
from xcloud.survive.checkpointing import Checkpointer, CheckpointMessage
from xcloud.survive.resume import RankCheckpoints
from xcloud.survive.saving import CheckpointWriter, StopSignal, Timing
from xcloud.training.settings import Checkpoints

SETTINGS = {"seed": "1", "training.max_steps": "9", "compression": "a", "cluster.clouds": "two"}
EVERY_2 = Checkpoints(2, 0, 2)
LAST = 9

# A pipeline, replicas that meet in every step, and those that meet from time to time.
STRATEGIES = (
    "two clouds, GPipe", "3 replicas, one update late", "2 pipelines apart, fragments under way",
)  # fmt: skip


@dataclass
class Attempt:
    """At a run: every rank with its checkpoints in one folder. settings: as the ranks compare.
    step_s: on the clock of the checkpoints; None: the machine's. slow_until: up to this step
    nobody waits for what rank 1 writes. has_passed: set after that step."""

    run_dir: Path
    ranks: list[Rank]
    schedule: Checkpoints = EVERY_2
    settings: dict[str, str] = field(default_factory=lambda: dict(SETTINGS))
    asked: StopSignal = field(default_factory=StopSignal)
    step_s: float | None = None
    slow_until: int = 0
    has_passed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.lines: list[bytes] = []
        self.folder = CheckpointFolder(self.run_dir)
        self.holders = [
            RankCheckpoints(self.folder, r.number, places_of(r), self.settings) for r in self.ranks
        ]
        tables = {h.rank: h.table() for h in self.holders}
        verdict = judge(tables, {}, lambda rank: f"rank {rank}", lambda ranks: frozenset())[0]
        if verdict.kind != "go":
            raise ConfigError(verdict.text)
        self.from_step, self.note, self.attempt = verdict.from_step, verdict.text, time.time_ns()
        self.checkpointers: dict[int, Checkpointer] = {}
        self.ready = threading.Barrier(len(self.ranks))

    def train(self, until_step: int = LAST, lost: Sequence[int] = ()) -> None:
        """lost: ranks that write no more from their last update on, as if they were killed."""
        in_threads([lambda r=rank: self._train(r, until_step, lost) for rank in self.ranks])

    def _train(self, rank: Rank, until_step: int, lost: Sequence[int]) -> None:
        number, trainer = rank.number, rank.trainer
        holder = self.holders[number]
        parts = rank.stateful
        if self.from_step:
            state, _ = holder.restore(self.from_step, states_of(parts), {"data": "1"})
            load_states(parts, state, "a rank")
        if self.from_step:
            self.folder.delete_after(self.from_step, number)
        about = {**holder.about(self.attempt), "facts": {"data": "1"}}
        clock, step_s = time.monotonic, self.step_s
        if step_s is not None:
            clock = lambda: step_s * trainer.num_updates  # noqa: E731
        made = self.checkpointers[number] = Checkpointer(
            Timing(self.schedule, self.from_step, LAST, clock),
            CheckpointWriter(self.folder, number, about),
            rank.wiring.control,
            parts,
            Reporter(number, "a", self.lines.append),
            self.asked,
        )
        is_directed = trainer.pipeline.layout.num_replicas == 1
        rank.parts.append(CheckpointPart(made, self.asked, is_directed, trainer.pipeline.clock))
        self.ready.wait(60)
        for step in range(trainer.num_updates + 1, until_step + 1):
            signal = rank.update(step).signal
            if step == until_step and number in lost:
                signal = Signal.GO_ON
            made.after(step, signal)
            if signal is Signal.STOP:
                break
            self.ready.wait(60)
            if step == self.slow_until:
                self.has_passed.set()
            if step >= self.slow_until or number != 1:
                made.wait()  # or a step that comes too soon is not saved
            while step >= self.slow_until and made.is_pending and not lost:
                time.sleep(0.001)
            self.ready.wait(60)
        else:
            if until_step == LAST:
                made.save_last()
        made.wait()
        rank.wiring.meet()
        made.close()
        made._notes.reporter.flush()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for lines in self.lines for line in lines.splitlines()]

    @property
    def state(self) -> Any:
        return [rank.state_dict() for rank in self.ranks]


def places_of(rank: Rank) -> Places:
    layout = rank.wiring.ends.layout
    assert isinstance(layout, ClusterLayout)
    return Places.held(layout, rank.strategy, LAST)


def whole(shape: Shape, codec: str = "plain") -> Attempt:
    """Undisturbed, and without checkpoints."""
    attempt = Attempt(Path("no folder"), job(shape, CODECS[codec]), Checkpoints(0, 0))
    attempt.train()
    return attempt


@pytest.mark.parametrize("codec", ["int4, delta", "svd with warm start, int4", "phases"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_that_was_lost_goes_on_from_its_files_bit_for_bit(
    shape: str, codec: str, tmp_path: Path
) -> None:
    def attempt() -> Attempt:
        return Attempt(tmp_path, job(SHAPES[shape], CODECS[codec]))

    first = attempt()
    assert first.from_step == 0
    first.train(5)
    second = attempt()
    assert second.from_step == 4
    second.train()

    assert same_state(second.state, whole(SHAPES[shape], codec).state)
    assert second.folder.agreed_steps() == [9, 8]
    assert {e["step"] for e in first.events if e["event"] == "checkpoint"} == {2, 4}


def test_checkpoints_cost_no_bytes_but_where_they_are_made(tmp_path: Path) -> None:
    shape = SHAPES["two clouds, GPipe"]
    saving = Attempt(tmp_path, job(shape, CODECS["plain"]))
    saving.train(3)
    usual = Attempt(tmp_path, job(shape, CODECS["plain"]), Checkpoints(0, 0))
    usual.train(3)

    assert usual.from_step == 2  # of one step only
    rank_0 = [attempt.ranks[0].wiring.wan_stats for attempt in (saving, usual)]
    sent = [sum(sum(link.num_bytes.values()) for link in links) for links in rank_0]
    assert 0 < sent[0] - 3 * sent[1] < 300
    assert same_state(saving.state, usual.state)


@pytest.mark.parametrize("lost", [[0], [1], [0, 1]])
def test_a_checkpoint_that_one_rank_lacks_does_not_count(lost: list[int], tmp_path: Path) -> None:
    shape = SHAPES["two clouds, GPipe"]
    Attempt(tmp_path, job(shape, CODECS["plain"])).train(4, lost)
    second = Attempt(tmp_path, job(shape, CODECS["plain"]))
    assert second.from_step == 2 and second.note == ""
    assert not second.folder.is_agreed(4)
    second.train()
    assert same_state(second.state, whole(shape).state)


def damage(run_dir: Path, step: int, rank: int) -> None:
    path = CheckpointFolder(run_dir).step_dir(step) / f"rank-{rank}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    shape = SHAPES["2x2 lanes, 1F1B"]
    Attempt(tmp_path, job(shape, CODECS["int4, delta"])).train(5)
    damage(tmp_path, 4, 2)
    second = Attempt(tmp_path, job(shape, CODECS["int4, delta"]))

    assert second.from_step == 2
    assert "going on from step 2, not from the newest" in second.note
    assert "rank 2: step-000004/rank-2.safetensors is not what was written" in second.note
    second.train()
    assert same_state(second.state, whole(shape, "int4, delta").state)


def test_a_damaged_part_is_found_by_ranks_that_there_were_not_before(tmp_path: Path) -> None:
    Attempt(tmp_path, job(SHAPES["two clouds, GPipe"], CODECS["plain"])).train(5)
    damage(tmp_path, 4, 1)
    more = changed(tmp_path, "2x2 lanes, 1F1B", "plain", cluster__clouds="two each")
    assert more.from_step == 2
    assert "rank 3: step-000004/rank-1.safetensors is not what was written" in more.note


def test_without_a_good_one_the_run_is_refused_and_does_not_begin_anew(tmp_path: Path) -> None:
    shape = SHAPES["two clouds, GPipe"]
    Attempt(tmp_path, job(shape, CODECS["plain"])).train(5)
    damage(tmp_path, 4, 1)
    for path in CheckpointFolder(tmp_path).step_dir(2).glob("rank-0.*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"step 4: rank 1: .*SHA-256.*step 2: rank 0: the part"):
        Attempt(tmp_path, job(shape, CODECS["plain"]))


def test_one_that_never_was_agreed_is_no_loss(tmp_path: Path) -> None:
    shape = SHAPES["two clouds, GPipe"]
    Attempt(tmp_path, job(shape, CODECS["plain"])).train(2, lost=[1])
    assert Attempt(tmp_path, job(shape, CODECS["plain"])).from_step == 0


def test_one_that_all_have_written_counts_only_where_none_has_word_of_rank_0(
    tmp_path: Path,
) -> None:
    # Before that word reports of the last steps may still have been on a line that then broke.
    shape = SHAPES["two clouds, GPipe"]
    first = Attempt(tmp_path, job(shape, CODECS["plain"]))
    first.train(4)
    (first.folder.step_dir(4) / AGREED_FILE).unlink()
    assert first.folder.ranks(4) == [0, 1]
    assert Attempt(tmp_path, job(shape, CODECS["plain"])).from_step == 2
    (first.folder.step_dir(2) / AGREED_FILE).unlink()
    second = Attempt(tmp_path, job(shape, CODECS["plain"]))
    assert second.from_step == 4 and second.note == ""
    second.train()
    assert same_state(second.state, whole(shape).state)


def test_parts_of_different_attempts_are_never_mixed(tmp_path: Path) -> None:
    shape = SHAPES["two clouds, GPipe"]
    first = Attempt(tmp_path, job(shape, CODECS["plain"]))
    first.train(4, lost=[1])
    kept = {p: p.read_bytes() for p in first.folder.step_dir(4).glob("rank-0.*")}
    Attempt(tmp_path, job(shape, CODECS["plain"])).train(4, lost=[0])
    for path, data in kept.items():  # from a copy of the folder, say
        path.write_bytes(data)
    assert first.folder.ranks(4) == [0, 1]
    first.folder.mark_agreed(4, 0, {})
    assert Attempt(tmp_path, job(shape, CODECS["plain"])).from_step == 2


FULL = OSError(errno.ENOSPC, "No space left on device")


def fails(monkeypatch: pytest.MonkeyPatch, phase: str, steps: Sequence[int]) -> None:
    """In rank 1; where all share a folder, one that cannot mark an agreement is enough if all
    cannot."""

    def replace(source: Path, target: Path, of: Any = os.replace) -> None:
        if target.name == "rank-1.safetensors" and int(target.parent.name[5:]) in steps:
            raise FULL
        of(source, target)

    def write(path: Path, rank: int, pieces: Any, of: Any = checkpoints.write_whole) -> Any:
        def broken() -> Iterator[Any]:
            for number, piece in enumerate(pieces):
                if number == (2 if is_data else 0):
                    raise FULL
                yield piece

        is_data = path.suffix == ".safetensors"
        is_it = path.suffix == {"data": ".safetensors", "JSON": ".json"}[phase]
        is_it &= rank == 1 and int(path.parent.name[5:]) in steps
        return of(path, rank, broken() if is_it else pieces)

    def mark(folder: Any, step: int, *rest: Any, of: Any = CheckpointFolder.mark_agreed) -> None:
        if step in steps:
            raise FULL
        of(folder, step, *rest)

    def prune(folder: Any, rank: int, keep: int, of: Any = CheckpointFolder.prune) -> None:
        if rank == 1:
            raise FULL
        of(folder, rank, keep)

    def copy(parts: Any) -> Any:
        trainer = parts["trainer"]
        if trainer.pipeline.rank == 1 and trainer.num_updates in steps:
            raise MemoryError if phase == "memory of Python" else RuntimeError("can't allocate")
        return states_of(parts)

    if phase in ("data", "JSON"):
        monkeypatch.setattr(checkpoints, "write_whole", write)
    elif phase == "rename":
        monkeypatch.setattr(os, "replace", replace)
    elif phase == "agreement":
        monkeypatch.setattr(CheckpointFolder, "mark_agreed", mark)
    elif phase == "prune":
        monkeypatch.setattr(CheckpointFolder, "prune", prune)
    else:
        monkeypatch.setattr(saving, "states_of", copy)


PHASES = ("memory", "memory of Python", "data", "JSON", "rename", "agreement")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("shape", STRATEGIES)
def test_a_rank_that_fails_once_costs_one_checkpoint_whatever_it_was_about(
    shape: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, phase, [4])
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]), Checkpoints(2, 0, 9))
    attempt.train()
    assert attempt.folder.agreed_steps() == [9, 8, 6, 2]
    lost = {e["step"] for e in attempt.events if e["event"] == "lost_checkpoint"}
    notes = [e["text"] for e in attempt.events if e["event"] == "note"]
    assert lost == {4} and all("step 4 could not be written (" in note for note in notes)
    assert notes and same_state(attempt.state, whole(SHAPES[shape]).state)


@pytest.mark.parametrize("phase", ["memory", "data", "JSON", "rename"])
@pytest.mark.parametrize("shape", STRATEGIES)
def test_a_rank_that_goes_on_failing_fills_no_disk_and_is_named_once(
    shape: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that the others have written of it are deleted; what was agreed before stays."""
    fails(monkeypatch, phase, range(4, 8))
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    attempt.train(7)
    assert attempt.folder.steps() == attempt.folder.agreed_steps() == [2]
    lost = [e for e in attempt.events if e["event"] == "lost_checkpoint"]
    notes = [e["text"] for e in attempt.events if e["event"] == "note"]
    assert [(e["rank"], e["step"]) for e in lost] == [(1, 4), (1, 6)]
    assert len(notes) == 1 and "step 4 could not be written (" in notes[0]
    second = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    second.train()
    assert second.from_step == 2 and same_state(second.state, whole(SHAPES[shape]).state)


@pytest.mark.parametrize("shape", STRATEGIES)
def test_old_checkpoints_that_cannot_be_deleted_cost_none_and_are_named_once(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, "prune", range(LAST))
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    attempt.train()
    assert attempt.folder.agreed_steps()[:2] == [9, 8]
    assert not [e for e in attempt.events if e["event"] == "lost_checkpoint"]
    (note,) = [e["text"] for e in attempt.events if e["event"] == "note"]
    assert note.startswith("old checkpoints cannot be deleted (") and "fill the disk" in note


@pytest.mark.parametrize("shape", STRATEGIES)
def test_a_disk_that_takes_longer_than_the_interval_stops_no_training_and_costs_one_at_most(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes its first part until all have made two more that are due."""
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]), slow_until=6)
    write = CheckpointFolder.write

    def slow(folder: CheckpointFolder, step: int, rank: int, *rest: Any) -> int:
        assert (step, rank) != (2, 1) or attempt.has_passed.wait(60)
        return write(folder, step, rank, *rest)

    agreed, mark = [], CheckpointFolder.mark_agreed

    def marking(folder: CheckpointFolder, step: int, rank: int, *rest: Any) -> None:
        agreed.extend([step] if rank == 0 else [])
        mark(folder, step, rank, *rest)

    monkeypatch.setattr(CheckpointFolder, "write", slow)
    monkeypatch.setattr(CheckpointFolder, "mark_agreed", marking)
    attempt.train()
    assert agreed[0] == 2 and agreed[-2:] == [8, 9]
    assert attempt.folder.steps() == [9, 8]
    lost = {e["step"] for e in attempt.events if e["event"] == "lost_checkpoint"}
    assert lost <= {4}
    notes = [e["text"] for e in attempt.events if e["event"] == "note"]
    said = "at step 4 a checkpoint is due, and that of step 2 is still being written by rank 1"
    assert len([note for note in notes if said in note]) == 1
    assert same_state(attempt.state, whole(SHAPES[shape]).state)


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
        made.wait()
    made.close()
    assert folder.agreed_steps() == [6, 3]


def _but_for_times(attempt: Attempt) -> Any:
    return [{k: v for k, v in one.items() if "budget.numbers" not in k} for one in attempt.state]


def limited(cloud_ranks: int = 1, **limit: Any) -> Shape:
    clouds = {name: Cloud(cloud_ranks, [0, 1], replica=r) for r, name in enumerate("ab")}
    strategy = Strategy("local_updates", None, LocalUpdates(every=4, **limit))
    return Shape(ClusterLayout(clouds), GPipe(4), strategy=strategy)


@pytest.mark.parametrize("cloud_ranks", [1, 2])
@pytest.mark.parametrize("limit", [{"most_tokens": 4}, {"most_s": 1e-9}], ids=repr)
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
    both = [_but_for_times(attempt) for attempt in (second, whole(shape))]
    assert "most_s" in limit or same_state(*both)


@pytest.mark.parametrize("shape", STRATEGIES)
@pytest.mark.parametrize(
    ("every_steps", "saved"), [(0, [9, 8]), (500, [9, 8]), (3, [9, 6, 3])], ids=repr
)
def test_minutes_count_in_every_strategy(
    shape: str, every_steps: int, saved: list[int], tmp_path: Path
) -> None:
    """Steps of 10 s: after three rank 0 tells replicas how many there are in a minute, ahead of
    the first."""
    minutes = Checkpoints(every_steps, 1, 9)
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]), minutes, step_s=10.0)
    attempt.train()
    assert attempt.folder.agreed_steps() == saved


def test_a_replica_that_hears_too_late_how_often_to_save_costs_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Checkpointer._take

    def deaf(checkpointer: Checkpointer, peer: int, step: int, code: int) -> None:
        if (checkpointer.rank, code) != (2, CheckpointMessage.EVERY):
            take(checkpointer, peer, step, code)

    monkeypatch.setattr(Checkpointer, "_take", deaf)
    shape = SHAPES["3 replicas, one update late"]
    attempt = Attempt(
        tmp_path, job(shape, CODECS["plain"]), Checkpoints(0, 1), step_s=10.0, slow_until=LAST + 1
    )
    attempt.train()
    saved = {(e["step"], e["rank"]) for e in attempt.events if e["event"] == "checkpoint"}
    assert saved == {(8, 0), (8, 1), (8, 3), *((9, rank) for rank in range(4))}
    assert attempt.folder.steps() == attempt.folder.agreed_steps() == [9]


@pytest.mark.parametrize("shape", STRATEGIES)
def test_the_last_step_is_saved_however_short_the_run(shape: str, tmp_path: Path) -> None:
    first = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]), Checkpoints())
    first.train()
    assert first.folder.agreed_steps() == [LAST]
    never = tmp_path / "never"
    Attempt(never, job(SHAPES[shape], CODECS["plain"]), Checkpoints(0, 0)).train()
    assert not never.exists()


def test_a_run_that_is_asked_to_end_saves_its_step_first(tmp_path: Path) -> None:
    shape = SHAPES["2x2 lanes, 1F1B"]
    first = Attempt(tmp_path, job(shape, CODECS["plain"]), Checkpoints(1000, 0))
    first.asked._asked_at_s = 0.0
    first.train()
    assert first.folder.agreed_steps() == [1]
    second = Attempt(tmp_path, job(shape, CODECS["plain"]))
    second.train()
    assert same_state(second.state, whole(shape).state)


def test_minutes_are_rank_0s_and_all_save_after_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = Checkpointer.decide

    def at_step_3(checkpointer: Checkpointer, step: int) -> Signal:
        checkpointer.timing._saved_s -= 61.0 if step == 3 else 0.0
        return decide(checkpointer, step)

    monkeypatch.setattr(Checkpointer, "decide", at_step_3)
    attempt = Attempt(tmp_path, job(SHAPES["2x2 lanes, 1F1B"], CODECS["plain"]), Checkpoints(0, 1))
    attempt.train(6)
    assert attempt.folder.steps() == attempt.folder.agreed_steps() == [3]
    assert attempt.folder.ranks(3) == [0, 1, 2, 3]


def changed(tmp_path: Path, shape: str, codec: str, **settings: str) -> Attempt:
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    return Attempt(tmp_path, job(SHAPES[shape], CODECS[codec]), settings={**SETTINGS, **settings})


def test_another_compression_goes_on_without_what_the_old_one_remembers(tmp_path: Path) -> None:
    shape = "two clouds, GPipe"
    Attempt(tmp_path, job(SHAPES[shape], CODECS["int4, delta"])).train(4)
    other = changed(tmp_path, shape, "topk and randomk, error feedback", compression="b")
    found = other.holders[0].changes(4)
    assert found.said == ["compression a -> b"]
    assert found.price(True) == "lost by this: what compression remembers of earlier steps"
    assert found.price(False) == "nothing is lost by this"
    other.train(4)  # loads, and trains no step
    weights = [
        {key: value for key, value in state.items() if key.startswith("trainer.")}
        for attempt in (other, whole_until(shape, "int4, delta", 4)) for state in attempt.state
    ]  # fmt: skip
    assert same_state(weights[:2], weights[2:])
    other.train(5)


def whole_until(shape: str, codec: str, step: int) -> Attempt:
    attempt = Attempt(Path("no folder"), job(SHAPES[shape], CODECS[codec]), Checkpoints(0, 0))
    attempt.train(step)
    return attempt


def test_another_number_of_lanes_takes_over_the_stages(tmp_path: Path) -> None:
    Attempt(tmp_path, job(SHAPES["2x2 lanes, 1F1B"], CODECS["plain"])).train(4)
    fewer = changed(tmp_path, "two clouds, GPipe", "plain", cluster__clouds="one each")
    assert fewer.from_step == 4
    fewer.train(4)
    parts = [fewer.folder.read(4, rank) for rank in (0, 2)]
    for state, part in zip(fewer.state, parts, strict=True):
        own = {key: value for key, value in state.items() if key.startswith("trainer.")}
        assert same_state([own], [{key: part[key] for key in own}])
    fewer.train()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": "2"}, "seed is 2: that would be another run; set seed back to 1, or start a"),
        ({"model.size": "9"}, "model.size is 9: that would be another run; leave model.size out"),
    ],
)
def test_what_cannot_go_on_is_refused_with_the_reason(
    settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    shape = SHAPES["two clouds, GPipe"]
    Attempt(tmp_path, job(shape, CODECS["plain"])).train(3)
    with pytest.raises(ConfigError, match=said):
        Attempt(tmp_path, job(shape, CODECS["plain"]), settings={**SETTINGS, **settings})


def test_another_release_or_other_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPES["two clouds, GPipe"]
    Attempt(tmp_path, job(shape, CODECS["plain"])).train(3)
    attempt = Attempt(tmp_path, job(shape, CODECS["plain"]))
    with pytest.raises(DataError, match="data is not what the checkpoint of step 2 was trained"):
        attempt.holders[0].restore(2, {}, {"data": "2"})
    other_cluster = changed(tmp_path, "two clouds, GPipe", "plain", cluster__clouds="other")
    with pytest.raises(DataError, match="data is not what the checkpoint of step 2 was trained"):
        other_cluster.holders[0].restore(2, {}, {"data": "2"})
    monkeypatch.setattr("xcloud.survive.resume.__version__", "99")
    with pytest.raises(ConfigError, match=r"it was written by xcloud .*, this is 99"):
        Attempt(tmp_path, job(shape, CODECS["plain"]))


def test_training_longer_or_with_another_rate_is_said_and_goes_on(tmp_path: Path) -> None:
    shape = "two clouds, GPipe"
    Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"])).train(4)
    longer = changed(tmp_path, shape, "plain", training__max_steps="12")
    assert longer.from_step == 4
    found = longer.holders[0].changes(4)
    assert found.said == ["training.max_steps 9 -> 12"]
    assert found.price(True) == "nothing is lost by this"
    longer.train()
    assert same_state(longer.state, whole(SHAPES[shape]).state)

"""Checkpoints on a disk: complete, checked, or not there; some cannot be written at all."""

import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.attempts import (
    CODECS,
    LAST,
    SHAPES,
    STRATEGIES,
    Attempt,
    changed,
    job,
    undisturbed,
)
from tests.channels import same_state
from tests.nightly import each_once, first_daily
from tests.pipelines import in_threads
from xcloud.base.errors import ConfigError, DataError
from xcloud.comm.state import states_of
from xcloud.features.checkpoints import saving
from xcloud.pipeline.settings import Checkpoints
from xcloud.record import checkpoint_files as checkpoints
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.files import AGREED_FILE

STATE: dict[str, torch.Tensor | int] = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "half": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "wide": torch.tensor(7, dtype=torch.int64),
    "turned": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).t(),
    "empty": torch.empty(0, 4),
    "flags": torch.tensor([True, False]),
    "count": 2**40,
}


def folder(tmp_path: Path, *steps: int, ranks: int = 1, agree: bool = True) -> CheckpointFolder:
    made = CheckpointFolder(tmp_path)
    for step in steps:
        for rank in range(ranks):
            made.write(step, rank, STATE, {"release": "1"})
        if agree:
            made.mark_agreed(step, 0, {})
    return made


def test_a_part_comes_back_bit_for_bit(tmp_path: Path) -> None:
    parts = folder(tmp_path, 5)
    parts.check(5, 0)
    found = parts.read(5, 0)

    assert parts.ranks(5) == [0] and parts.about(5, 0) == {"release": "1"}
    assert found.keys() == STATE.keys() and found["count"] == 2**40
    for name, value in STATE.items():
        if isinstance(value, torch.Tensor):
            same = found[name]
            assert isinstance(same, torch.Tensor) and same.dtype == value.dtype
            assert torch.equal(same, value)
    assert load_file(parts.step_dir(5) / "rank-0.safetensors").keys() == STATE.keys() - {"count"}


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-0.json"])
def test_every_flipped_bit_and_every_cut_is_found(name: str, tmp_path: Path) -> None:
    parts = folder(tmp_path, 5)
    path = parts.step_dir(5) / name
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            parts.check(5, 0)
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        parts.read(5, 0)
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        parts.check(5, 0)
    path.unlink()
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        parts.check(5, 0)


def test_a_part_is_there_with_its_last_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, replace = CheckpointFolder(tmp_path), os.replace

    def full(source: Path, target: Path) -> None:
        if target.suffix == ".json":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        parts.write(5, 0, STATE, {})
    assert parts.steps() == [5] and not list(parts.step_dir(5).iterdir())


def test_the_newest_agreed_ones_are_kept_and_what_lies_between(tmp_path: Path) -> None:
    parts = folder(tmp_path, 1, 3, 5, ranks=2)
    folder(tmp_path, 2, 4, ranks=2, agree=False)
    for draft in (".rank-0.json.0", ".AGREED.0"):  # of a process that was killed
        (parts.step_dir(1) / draft).touch()
    parts.prune(0, 2)
    assert {step: parts.ranks(step) for step in parts.steps()} == {
        5: [0, 1], 4: [0, 1], 3: [0, 1], 2: [1], 1: [1]
    }  # fmt: skip
    parts.prune(1, 2)
    assert parts.steps() == [5, 4, 3] and parts.agreed_steps() == [5, 3]
    for number in (0, 1):
        with pytest.raises(ConfigError, match=r"step 5\)\. They would be deleted.*--roll-back"):
            parts.delete_after(3, number)
    assert parts.steps() == [5, 4, 3] and parts.ranks(4) == [0, 1]
    for number in (0, 1):
        assert parts.delete_after(3, number, roll_back=True)
    assert parts.steps() == [3]


def test_nobody_s_word_deletes_a_step_that_all_ranks_have_agreed_on(tmp_path: Path) -> None:
    parts = folder(tmp_path, 1, 3, ranks=2)
    folder(tmp_path, 4, ranks=2, agree=False)
    assert [parts.delete_lost(step, 1) for step in (1, 3, 4)] == [False, False, True]
    assert {step: parts.ranks(step) for step in parts.steps()} == {4: [0], 3: [0, 1], 1: [0, 1]}
    with pytest.raises(ConfigError, match="go on from step 0"):  # a run that begins anew
        parts.delete_after(0, 1)
    assert parts.delete_after(3, 1) == [4]


def test_ranks_may_delete_the_parts_of_one_step_at_once(tmp_path: Path) -> None:
    parts = CheckpointFolder(tmp_path)
    for step in range(1, 400):
        parts.step_dir(step).mkdir(parents=True)
        in_threads([lambda n=step: parts.delete(n, 0)] * 4)
    assert parts.steps() == []


def test_nothing_is_deleted_before_another_is_agreed(tmp_path: Path) -> None:
    parts = folder(tmp_path, 1, 2, agree=False)
    parts.prune(0, 1)
    assert parts.steps() == [2, 1] and parts.agreed(2) == {}


def test_what_is_told_of_an_agreement_is_found_again(tmp_path: Path) -> None:
    parts = folder(tmp_path, 1, agree=False)
    facts: dict[str, Any] = {"without": [2]}
    parts.mark_agreed(1, 0, facts)
    assert parts.agreed(1) == facts
    (parts.step_dir(1) / "AGREED").write_text(json.dumps([1])[:-1])
    assert parts.agreed(1) == {} and parts.is_agreed(1)


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (1, 0, 1)], ids=repr)
def test_in_a_shared_folder_what_rank_0_tells_of_an_agreement_stays(
    ranks: tuple[int, ...], tmp_path: Path
) -> None:
    parts = folder(tmp_path, 1, ranks=2, agree=False)
    for rank in ranks:
        parts.mark_agreed(1, rank, {"held_by": [0, 1]} if rank == 0 else {})
        assert parts.is_agreed(1)
    assert parts.agreed(1) == {"held_by": [0, 1]}


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what a descriptor stands for")
def test_every_name_on_the_way_to_a_part_is_on_the_disk_before_the_part_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(opened: int) -> None:
        sync(opened)
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{opened}')).relative_to(tmp_path)}")

    def rename(source: Path, target: Path) -> None:
        replace(source, target)
        done.append(f"rename to {target.name}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    CheckpointFolder(tmp_path).write(5, 0, STATE, {})
    counts = done.index("rename to rank-0.json")
    assert {"sync .", "sync checkpoints", "sync checkpoints/step-000005"} <= {*done[:counts]}
    assert done[counts + 1 :] == ["sync checkpoints/step-000005"]


@pytest.mark.parametrize("lost", first_daily([[0], [1], [0, 1]], count=2))
def test_a_checkpoint_that_one_rank_lacks_does_not_count(lost: list[int], tmp_path: Path) -> None:
    shape = "two clouds, GPipe"
    Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"])).train(4, lost)
    second = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    assert second.from_step == 2 and second.note == ""
    assert not second.folder.is_agreed(4)
    second.train()
    assert same_state(second.state, undisturbed(shape))


def damage(run_dir: Path, step: int, rank: int) -> None:
    path = CheckpointFolder(run_dir).step_dir(step) / f"rank-{rank}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    shape = "2x2 lanes, 1F1B"
    Attempt(tmp_path, job(SHAPES[shape], CODECS["int4, delta"])).train(5)
    damage(tmp_path, 4, 2)
    second = Attempt(tmp_path, job(SHAPES[shape], CODECS["int4, delta"]))

    assert second.from_step == 2
    assert "going on from step 2, not from the newest" in second.note
    assert "rank 2: step-000004/rank-2.safetensors is not what was written" in second.note
    second.train()
    assert same_state(second.state, undisturbed(shape, "int4, delta"))


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
    shape = "two clouds, GPipe"
    first = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    first.train(4)
    (first.folder.step_dir(4) / AGREED_FILE).unlink()
    assert first.folder.ranks(4) == [0, 1]
    assert Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"])).from_step == 2
    (first.folder.step_dir(2) / AGREED_FILE).unlink()
    second = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    assert second.from_step == 4 and second.note == ""
    second.train()
    assert same_state(second.state, undisturbed(shape))


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

    mark_agreed = CheckpointFolder.mark_agreed
    delete_old = CheckpointFolder.prune

    def mark(folder: Any, step: int, *rest: Any, **named: Any) -> None:
        if step in steps:
            raise FULL
        mark_agreed(folder, step, *rest, **named)

    def prune(folder: Any, rank: int, *rest: Any, **named: Any) -> None:
        if rank == 1:
            raise FULL
        delete_old(folder, rank, *rest, **named)

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


@pytest.mark.parametrize(("shape", "phase"), each_once(STRATEGIES, PHASES, count=2))
def test_a_rank_that_fails_once_costs_one_checkpoint_whatever_it_was_about(
    shape: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, phase, [4])
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]), Checkpoints(2, 0, 9))
    attempt.train()
    assert attempt.folder.agreed_steps() == [9, 8, 6, 2]
    lost = {e["step"] for e in attempt.told("lost_checkpoint")}
    notes = attempt.notes
    assert lost == {4} and all("step 4 could not be written (" in note for note in notes)
    assert notes and same_state(attempt.state, undisturbed(shape))


@pytest.mark.parametrize(
    ("shape", "phase"), each_once(STRATEGIES, ["memory", "data", "JSON", "rename"], count=1)
)
def test_a_rank_that_goes_on_failing_fills_no_disk_and_is_named_once(
    shape: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that the others have written of it are deleted; what was agreed before stays."""
    fails(monkeypatch, phase, range(4, 8))
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    attempt.train(7)
    assert attempt.folder.steps() == attempt.folder.agreed_steps() == [2]
    lost = attempt.told("lost_checkpoint")
    notes = attempt.notes
    assert [(e["rank"], e["step"]) for e in lost] == [(1, 4), (1, 6)]
    assert len(notes) == 1 and "step 4 could not be written (" in notes[0]
    second = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    second.train()
    assert second.from_step == 2 and same_state(second.state, undisturbed(shape))


@pytest.mark.parametrize("shape", first_daily(STRATEGIES, count=1))
def test_old_checkpoints_that_cannot_be_deleted_cost_none_and_are_named_once(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(monkeypatch, "prune", range(LAST))
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]))
    attempt.train()
    assert attempt.folder.agreed_steps()[:2] == [9, 8]
    assert not attempt.told("lost_checkpoint")
    (note,) = attempt.notes
    assert note.startswith("old checkpoints cannot be deleted (") and "fill the disk" in note


@pytest.mark.parametrize("shape", first_daily(STRATEGIES, count=1))
def test_a_disk_that_takes_longer_than_the_interval_stops_no_training_and_costs_one_at_most(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 writes its first part until all have made two more that are due."""
    attempt = Attempt(tmp_path, job(SHAPES[shape], CODECS["plain"]), slow_until=6)
    write = CheckpointFolder.write

    def slow(folder: CheckpointFolder, step: int, rank: int, *rest: Any, **named: Any) -> int:
        assert (step, rank) != (2, 1) or attempt.has_passed.wait(60)
        return write(folder, step, rank, *rest, **named)

    agreed, mark = [], CheckpointFolder.mark_agreed

    def marking(folder: CheckpointFolder, step: int, rank: int, *rest: Any, **named: Any) -> None:
        agreed.extend([step] if rank == 0 else [])
        mark(folder, step, rank, *rest, **named)

    monkeypatch.setattr(CheckpointFolder, "write", slow)
    monkeypatch.setattr(CheckpointFolder, "mark_agreed", marking)
    attempt.train()
    assert agreed[0] == 2 and agreed[-2:] == [8, 9]
    assert attempt.folder.steps() == [9, 8]
    lost = {e["step"] for e in attempt.told("lost_checkpoint")}
    assert lost <= {4}
    notes = attempt.notes
    said = "at step 4 a checkpoint is due, and that of step 2 is still being written by rank 1"
    assert len([note for note in notes if said in note]) == 1
    assert same_state(attempt.state, undisturbed(shape))

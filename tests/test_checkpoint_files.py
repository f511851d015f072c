"""Parts of a checkpoint on a disk: complete, checked, or not there."""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.pipelines import in_threads
from xcloud.base.errors import ConfigError, DataError
from xcloud.record.checkpoint_files import CheckpointFolder

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

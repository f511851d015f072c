"""The files of a run's checkpoints, complete or not at all: one shard of every rank, in
safetensors and JSON. What is in a shard, and when it is written, is decided elsewhere
(features/checkpoints/checkpointing.py).

RUN/checkpoints/step-000500/rank-1.safetensors   tensors
                            rank-1.json          numbers, what wrote it, SHA-256 of both files
                            AGREED               every rank of the run has completed its shard

The JSON file is written last: a shard without it does not exist. Each cloud has the shards of its
own ranks in its own run folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError, DataError
from xcloud.record.files import AGREED_FILE, CheckpointSteps, numbers, read_json

_DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointFolder(CheckpointSteps):
    """The checkpoints of one run on this machine.

    Ranks that share the folder write and delete their own shards only.
    """

    def ranks(self, step: int) -> list[int]:
        """Return the ranks whose shard is here, complete."""
        return sorted(numbers(self.step_dir(step), pattern=r"rank-(\d+)\.json"))

    def write(
        self, step: int, rank: int, state: Mapping[str, Tensor | int], about: Mapping[str, Any]
    ) -> int:
        """Write one rank's shard. Return its bytes once it is on the disk.

        about: facts for whoever reads it, of plain containers.
        Raises OSError, and leaves no file then.
        """
        folder = self.step_dir(step)
        folder.mkdir(parents=True, exist_ok=True)
        # The names of folders are on the disk only once their own folders are written.
        for above in (self.path, self.path.parent):
            sync_names(above)
        # A shard of an earlier attempt at this step is none of this one.
        _delete_part(folder, rank=rank)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        numbers = {name: value for name, value in state.items() if name not in tensors}
        try:
            # Tensors first: the JSON, which makes a shard of them, has their digest.
            path = _shard(folder, rank, "safetensors")
            digest, num_bytes = _write_tensors(path, rank, tensors)
            text = {"step": step, "rank": rank, "about": dict(about), "numbers": numbers,
                    "num_bytes": num_bytes, "sha256": digest}  # fmt: skip
            # The JSON has a digest of itself, too: a bit that flips in a number is found.
            data = json.dumps({**text, "own_sha256": _digest_of(text)}).encode()
            write_whole(_shard(folder, rank, "json"), rank=rank, pieces=[data])
        # Also at Ctrl+C: no half of a shard is left.
        except BaseException:
            _delete_part(folder, rank=rank)
            raise
        return num_bytes + len(data)

    def about(self, step: int, rank: int) -> dict[str, Any]:
        """Return the facts written with a shard. Raises DataError if it is missing or damaged."""
        return dict(self._head(step, rank=rank)["about"])

    def check(self, step: int, rank: int) -> None:
        """Read all of a shard. Raises DataError saying what is wrong with it."""
        head = self._head(step, rank=rank)
        path = _shard(self.step_dir(step), rank, "safetensors")
        try:
            with open(path, "rb") as file:
                # The size first, as it is quicker to say and tells what was cut off.
                num_bytes = file.seek(0, os.SEEK_END)
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{_name(path)} cannot be read: {error.strerror}") from error
        if num_bytes != head["num_bytes"]:
            raise DataError(
                f"{_name(path)} has {num_bytes:,} bytes, {head['num_bytes']:,} were written"
            )
        if digest != head["sha256"]:
            raise DataError(f"{_name(path)} is not what was written: its SHA-256 differs")

    def read(self, step: int, rank: int) -> dict[str, Tensor | int]:
        """Return a shard. Raises DataError unless it is what was written."""
        self.check(step, rank)
        tensors = load_file(_shard(self.step_dir(step), rank, "safetensors"))
        return {**tensors, **self._head(step, rank=rank)["numbers"]}

    def mark_agreed(self, step: int, rank: int, facts: Mapping[str, Any]) -> None:
        """Note that every rank has completed its shard.

        rank: the one that writes the note.
        facts: written by rank 0; others may share its folder, so they never replace what is there.
        """
        path = self.step_dir(step) / AGREED_FILE
        # Only rank 0 has facts; the mark of the others is that the file is there.
        if rank == 0:
            write_whole(path, rank=rank, pieces=[json.dumps(dict(facts)).encode()])
        else:
            path.touch()
            sync_names(path.parent)

    def agreed(self, step: int) -> dict[str, Any]:
        """Return what `mark_agreed` wrote; empty without it."""
        return read_json(self.step_dir(step) / AGREED_FILE)

    def prune(self, rank: int, keep: int, places: object = None) -> None:
        """Delete this rank's shards of all steps before the newest `keep` that are agreed, and
        those of ranks that stood in other places: nobody else will."""
        # Kept are agreed steps: a later one that is not may never be.
        kept = self.agreed_steps()[:keep]
        for step in self.steps():
            if kept and step < kept[-1]:
                self._delete_all(step, rank=rank, fact="places", now=places)

    def delete(self, step: int, rank: int) -> None:
        """Delete one rank's shard, and the folder of the step if nothing is left in it."""
        folder = self.step_dir(step)
        _delete_part(folder, rank=rank)
        with contextlib.suppress(OSError):  # other ranks' parts are there
            folder.rmdir()

    def delete_lost(self, step: int, rank: int) -> bool:
        """Delete this rank's shard of a step that some rank has no shard of. Return whether it
        did.

        What all ranks have agreed on stays, whoever calls it lost.
        """
        # Another cloud may still begin with it.
        if self.is_agreed(step):
            return False
        self.delete(step, rank=rank)
        return True

    def delete_after(
        self, step: int, rank: int, attempt: int | None = None, roll_back: bool = False
    ) -> list[int]:
        """Delete shards of later steps, which will be repeated: this rank's, and those of attempts
        before this one. Return the steps.

        roll_back: True to delete also shards of checkpoints that all ranks had agreed on.
        Raises ConfigError, and deletes nothing, if there are such shards and roll_back is False.
        """
        later = [number for number in self.steps() if number > step]
        # Ranks that have a shard here, not any machine: AGREED alone is nothing to lose.
        agreed = [number for number in later if self.is_agreed(number) and self.ranks(number)]
        if agreed and not roll_back:
            steps = ", ".join(map(str, reversed(agreed)))
            raise ConfigError(
                f"the ranks go on from step {step}, but this cloud has later checkpoints that all "
                f"ranks had agreed on (step {steps}). They would be deleted: if that is meant, "
                "start this cloud's worker with --roll-back; else ask the other clouds what "
                "became of theirs"
            )
        # Step 0 is the start: there is nothing that the run would repeat after it.
        for number in later if step else ():
            self._delete_all(number, rank=rank, fact="attempt", now=attempt)
        return later if step else []

    def _delete_all(self, step: int, rank: int, fact: str, now: object) -> None:
        """Delete this rank's shard, and others here that were written with another fact."""
        # First: without it the step is no checkpoint any more, whatever is left of it.
        (self.step_dir(step) / AGREED_FILE).unlink(missing_ok=True)
        for other in self.ranks(step):
            with contextlib.suppress(DataError):  # its own rank deletes it just now
                # Compared as JSON, as tuples come back as lists.
                if json.dumps(self.about(step, rank=other).get(fact)) != json.dumps(now):
                    self.delete(step, rank=other)
        self.delete(step, rank=rank)

    def _head(self, step: int, rank: int) -> dict[str, Any]:
        path = _shard(self.step_dir(step), rank, "json")
        try:
            head = parsed_json(path.read_text("utf-8"))
            written = head.pop("own_sha256")
        except FileNotFoundError as error:
            raise DataError(f"there is no {_name(path)}") from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"{_name(path)} is damaged: {why}") from error
        # Compared last: damage that breaks the JSON has said so above.
        if written != _digest_of(head):
            raise DataError(f"{_name(path)} is not what was written: its SHA-256 differs")
        return dict(head)


def _delete_part(folder: Path, rank: int) -> None:
    # The JSON first: without it the rest is no part.
    parts = (_shard(folder, rank, "json"), _shard(folder, rank, "safetensors"))
    # Drafts of a process that was killed. Looked up by name: other ranks may delete the folder.
    drafts = (draft_of(path, rank=rank) for path in (*parts, folder / AGREED_FILE))
    for path in (*parts, *drafts):
        path.unlink(missing_ok=True)


def _name(path: Path) -> str:
    """Return the path without the run folder's own, which is nobody else's matter."""
    return f"{path.parent.name}/{path.name}"


def _digest_of(head: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()


def _write_tensors(path: Path, rank: int, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write a safetensors file, and hash it in the same pass. Return SHA-256 and bytes.

    The values are not copied: the library's own `save_file` holds all of them a second time.
    """
    # Wide values first, so that each begins at a multiple of its size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        value = tensors[name]
        begin = end
        end = end + value.numel() * value.element_size()
        header[name] = {
            "dtype": _DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    # Safetensors wants the tensors to begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    pieces = [len(text).to_bytes(8, "little"), text]
    # A tensor of a GPU is copied only while it is written.
    flat = (tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8) for name in names)
    of_tensors = (memoryview(one.numpy()) for one in flat)  # type: ignore[arg-type]
    return write_whole(path, rank=rank, pieces=chain(pieces, of_tensors))


def write_whole(path: Path, rank: int, pieces: Iterable[bytes | memoryview]) -> tuple[str, int]:
    """Write a file under another name until all of it is on the disk. Return SHA-256 and bytes."""
    draft = draft_of(path, rank=rank)
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with open(draft, "wb", buffering=0) as file:
            for piece in pieces:
                digest.update(piece)
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
                num_bytes += len(piece)
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_names(path.parent)
    return digest.hexdigest(), num_bytes


def sync_names(folder: Path) -> None:
    """Bring to the disk which files and folders are in it."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _shard(folder: Path, rank: int, ending: Literal["json", "safetensors"]) -> Path:
    """Return a file of a rank's shard: its tensors, or the JSON with all else."""
    return folder / f"rank-{rank}.{ending}"


def draft_of(path: Path, rank: int) -> Path:
    """Return the path at which a rank writes a file before it bears its name."""
    return path.with_name(f".{path.name}.{rank}")

"""Export the trained model: one safetensors file per stage.

Every cloud writes its own part to its run folder, with the tokenizer of its side. To translate
after a run on several machines, put the parts into one `model` folder.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import DataError, RunFailed
from xcloud.base.placeholders import check_is_safetensors
from xcloud.base.project import MODEL_DIR
from xcloud.comm.state import State
from xcloud.contracts.model import Stage, TaskData


def export_stage(
    run_dir: Path,
    stage: int,
    module: Stage,
    tensors: dict[str, Tensor],
    learned: State | None,
    data: TaskData,
) -> Path:
    """Write a stage's weights and the tokenizers of this side. Return the file of the weights.

    tensors: the tensors that the stage exports, in full.
    learned: what the compressors of what it sends to another cloud have learned, which whoever
        uses the run needs as much as the weights; None if they never learn.
    """
    path = run_dir / MODEL_DIR / f"stage{stage}.safetensors"

    def write(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        data.save_tokenizers(folder)
        architecture = json.dumps(module.architecture)
        save_file(tensors, folder / path.name, metadata={"architecture": architecture})
        if learned is not None:
            kept = {name: value for name, value in learned.items() if isinstance(value, Tensor)}
            numbers = {name: value for name, value in learned.items() if name not in kept}
            about = {"numbers": json.dumps(numbers)}
            save_file(kept, folder / learned_file(stage), metadata=about)

    try:
        with exporting(run_dir):
            write(path.parent)
    except RunFailed as error:  # hours of training: any other disk will do
        with exporting(run_dir):
            write(spare := Path(tempfile.mkdtemp(prefix="xcloud-model-")))
        raise RunFailed(f"{error}. This part of it is in {spare}: copy it there") from error
    return path


def learned_file(stage: int) -> str:
    """Return the name of the file of what the compressors behind a stage have learned."""
    return f"boundary{stage}.safetensors"


def read_learned(folder: Path, stage: int) -> State | None:
    """Return what the compressors behind a stage have learned; None without a file. Raises
    DataError for a file that is none of ours."""
    path = folder / learned_file(stage)
    if not path.is_file():
        return None
    check_is_safetensors(path)
    with safe_open(path, "pt") as file:
        numbers = parsed_json((file.metadata() or {}).get("numbers", "null"))
    if not isinstance(numbers, dict) or not all(type(n) is int for n in numbers.values()):
        raise DataError(f"{path} has no whole numbers by name in its metadata")
    return {**numbers, **load_file(path)}


def whole(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Return full tensors, on the CPU. If the stage is sharded, each of its ranks calls it.

    keep: True if this rank wants the tensors. Otherwise it returns none.
    """
    found = {}
    for name, tensor in tensors.items():
        gather = getattr(tensor, "full_tensor", None)
        full = tensor if gather is None else gather()
        # Gathered in every rank of the stage, since it is a collective; copied in one.
        if keep:
            found[name] = full.detach().cpu().contiguous()
    return found


@contextmanager
def exporting(run_dir: Path) -> Iterator[None]:
    """Raise RunFailed, naming the disk, for a model that cannot be written: unlike a lost log, it
    fails the run."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunFailed(
            f"the trained model could not be written to {run_dir / MODEL_DIR}: {error}"
            f"{_room_at(run_dir, error)}"
        ) from error


def _room_at(folder: Path, error: Exception) -> str:
    """Say how full the disk of a folder is, or of the nearest one above it that exists."""
    if any(words in str(error) for words in ("File too large", "quota exceeded")):
        return "; that is a limit of this user's (ulimit -f, a quota), and not the disk's"
    there = next(at for at in (folder.absolute(), *folder.absolute().parents) if at.exists())
    try:
        free_mb = shutil.disk_usage(there).free / 1e6
    except OSError:  # what cannot be written is told in any case
        return ""
    return f"; the disk of that folder has {free_mb:,.0f} MB free"

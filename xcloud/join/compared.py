"""What ranks compare before the start (agreement.py).

Compared, and a difference is an error:
  settings   every key of the resolved experiment file, as dotted name and value
  release    xcloud.__version__
  code       a digest of every .py file of xcloud, and of each module outside it that the
             experiment names as a _target_ (line ends do not count)
  draws      a digest of numbers from torch's CPU generator: the order of the samples is drawn in
             every cloud, so it must be the same everywhere
Compared, and a difference is only noted:
  torch      its version: clouds with and without GPUs need different builds, and nothing but the
             draws above must be bit-equal across clouds

Neither compared nor sent, because it may differ without changing results:
  - names: name, sweep, label, profile, cluster.name; the tracker; follow_up, which runs
    afterwards; launch, which starts the ranks of one machine
  - the machine: hydra, every cache_dir, the device of a cloud
  - places of files: path, paths, folder, files, *_path, *_file, *_dir, and any value that looks
    like a path (/..., ~..., ./...). name_or_path is compared as long as it is the name of a
    checkpoint in both clouds. Of a tokenizer's file the contents are compared, by digest.
  - task.sizes, which only clouds that read no data give (loading.py compares the sizes)
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import xcloud
from xcloud.base.project import code_digests, commit, file_digest

Table = Mapping[str, Mapping[str, str]]
"""Section (setting, code, fact, info) -> dotted key or file -> value as JSON text."""

PATH = "(a path)"
"""In place of a value that is a path: not sent, and equal to anything."""

_UNCOMPARED = {
    "name", "sweep", "label", "profile", "tracker", "follow_up", "hydra", "launch", "cache_dir",
    "cluster.name", "task.sizes",
}  # fmt: skip
MAX_VALUE = 160
"""Characters; a longer value is cut and followed by its digest."""

_DEVICE = re.compile(r"cluster\.clouds\.[^.]+\.device")
_PLACE = re.compile(r"(.*_)?(path|paths|file|files|folder|folders|dir|dirs)")
_LOOKS_LIKE_PATH = re.compile(r"[/~\\]|\.\.?[/\\]|[A-Za-z]:[/\\]|file:")


def table_of(settings: Mapping[str, Any]) -> Table:
    """Everything of this rank that is compared. All of it is ASCII.

    settings: the resolved experiment file as plain containers.
    """
    generator = torch.Generator().manual_seed(1)
    draws = torch.randperm(1000, generator=generator)
    return {
        "setting": compared_settings(settings),
        "code": _code(settings),
        "fact": {
            "release of xcloud": _text_of(xcloud.__version__),
            "digest of torch's random numbers": _digest(repr(draws.tolist()).encode()),
        },
        "info": {"torch": _text_of(torch.__version__), "commit": _text_of(commit())},
    }


def compared_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> value as JSON text, of every setting that must be equal in all ranks."""
    found: dict[str, str] = {}

    def walk(node: Any, key: str) -> None:
        leaf = key.rsplit(".", 1)[-1]
        if key in _UNCOMPARED or leaf == "cache_dir" or _DEVICE.fullmatch(key):
            return
        if key.endswith("tokenizer.path"):
            found[key] = _contents(node)
        elif leaf == "name_or_path":
            found[key] = PATH if _is_place(node) else _text_of(node)
        elif _PLACE.fullmatch(leaf):
            return
        elif isinstance(node, Mapping) and node:
            if key and "_target_" not in node:  # the order of members may count
                found[key] = _text_of(list(node))
            for name, entry in node.items():
                walk(entry, f"{key}.{name}" if key else str(name))
        elif isinstance(node, list | tuple) and node:
            for index, entry in enumerate(node):
                walk(entry, f"{key}[{index}]")
        elif isinstance(node, str) and _LOOKS_LIKE_PATH.match(node):
            found[key] = PATH
        else:
            found[key] = _text_of(node)

    walk(settings, "")
    return {json.dumps(key)[1:-1]: value for key, value in found.items()}


def _is_place(value: object) -> bool:
    """A folder or file, not the name of a checkpoint ("minilm", "owner/name")."""
    if not isinstance(value, str):
        return False
    return (
        bool(_LOOKS_LIKE_PATH.match(value))
        or value.count("/") > 1
        or "\\" in value
        or Path(value).exists()
    )


def _contents(path: object) -> str:
    """Digest of a file; PATH where this machine has none."""
    file = Path(path) if isinstance(path, str) else None
    if file is None or not file.is_file():
        return PATH
    return f'"(contents {_digest(file.read_bytes())})"'


def _code(settings: Mapping[str, Any]) -> dict[str, str]:
    """Digest of every file of the package, and of each other module that a _target_ is of."""
    found = {f"xcloud/{file}": digest for file, digest in code_digests().items()}
    for target in sorted(_targets(settings)):
        module = sys.modules.get(target.rsplit(".", 1)[0])
        file_name = getattr(module, "__file__", None)
        if target.startswith("xcloud.") or not file_name or not Path(file_name).is_file():
            continue
        found[f"module {target.rsplit('.', 1)[0]}"] = file_digest(Path(file_name))
    return found


def _targets(node: Any) -> set[str]:
    if isinstance(node, Mapping):
        own = {str(node["_target_"])} if "_target_" in node else set()
        return own.union(*(_targets(entry) for entry in node.values()))
    if isinstance(node, list | tuple):
        return set[str]().union(*(_targets(entry) for entry in node))
    return set()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _text_of(value: object) -> str:
    """JSON, in ASCII; 2 and 2.0 are one number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = json.dumps(value, default=str)
    if len(text) > MAX_VALUE:
        text = f"{text[: MAX_VALUE - 40]}... (digest {_digest(text.encode())})"
    return text

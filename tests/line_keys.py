"""Keys of clouds for tests, made once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from xcloud.line.keys import LineKeys, make_key, read_line_keys


@cache
def folder_of_keys() -> Path:
    """Return a folder with the keys of cloud_a, cloud_b and cloud_c."""
    folder = tempfile.TemporaryDirectory(prefix="xcloud-keys-")
    _FOLDERS.append(folder)
    for name in ("cloud_a", "cloud_b", "cloud_c"):
        make_key(name, Path(folder.name))
    return Path(folder.name)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def keys_of(me: str, peers: Sequence[str]) -> LineKeys:
    """Return the keys of a cloud that knows these peers."""
    folder = folder_of_keys()
    named = {peer: [f"{peer}.pem"] for peer in peers}
    return read_line_keys(me, named, policy_file=folder / "policy.yaml")


def copy_keys(folder: Path) -> Path:
    """Copy all keys into a folder, and return where its policy would lie."""
    shutil.copytree(folder_of_keys(), folder, dirs_exist_ok=True)
    return folder / "policy.yaml"

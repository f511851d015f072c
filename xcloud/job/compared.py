"""What clouds compare of the settings of a run before it starts, and of two attempts at one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xcloud.base.settings import Leads
from xcloud.base.walk import walk
from xcloud.security.places import is_place, mark_of
from xcloud.tasks.tokenizer import Tokenizer

PATH = "(a path)"
"""In place of a value that is a path: not sent, and equal to anything."""

# Names and places of a run, which each cloud may choose; sizes are compared as row counts.
_UNCOMPARED = {
    "name", "sweep", "label", "profile", "tracker", "follow_up", "hydra", "launch", "cluster.name",
    "task.sizes",
}  # fmt: skip
MAX_VALUE = 160
"""Characters; a longer value is cut and followed by its digest."""

# One cloud may have a GPU where another has none.
_DEVICE = re.compile(r"cluster\.clouds\.[^.]+\.device")


def compared_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> value as JSON text, of every setting that must be equal in all ranks.

    Where a setting leads is declared with it (base.settings.Leads): files of a cloud's own, and
    addresses, are left out; a file that all must have alike is compared by its contents; a name on
    the hub is compared as long as it means no folder. Of a constructor that is not xcloud's, texts
    without a mark count as paths if they could be one.
    """
    found: dict[str, str] = {}
    for node in walk(settings):
        value = node.value
        if node.path in _UNCOMPARED or _DEVICE.fullmatch(node.path):
            # Nothing below it is compared, either.
            node.is_closed = True
            continue
        # A mark says where a setting leads. Of a class from elsewhere there are no marks, so paths
        # are guessed.
        mark, is_foreign = mark_of(node)
        if mark is not None:
            node.is_closed = True
            # The value may name a folder of this machine; only what is left of it crosses.
            text = _marked(mark, value=value)
            if text is not None:
                found[node.path] = text
        elif isinstance(value, Mapping) and value:
            # Clouds and ranks are numbered in the order in which members stand.
            if node.path and "_target_" not in value:  # the order of members may count
                found[node.path] = as_text(list(value))
        # Each entry is compared by itself.
        elif isinstance(value, list | tuple) and value:
            continue
        elif isinstance(value, str) and is_foreign and node.name != "_target_" and is_place(value):
            found[node.path] = PATH
        else:
            found[node.path] = as_text(value)
    # JSON between its quotes: keys are ASCII too, in one line.
    return {json.dumps(key)[1:-1]: value for key, value in found.items()}


def _marked(leads: Leads, value: object) -> str | None:
    """Return what is compared of a setting that leads out of the experiment; None: nothing."""
    if leads.shared is not None:
        return _contents(value, check=Tokenizer.load if leads.shared == "tokenizer" else None)
    if leads.to == "hub":
        if isinstance(value, str) and is_place(value):
            return PATH
        return as_text(value)
    return None


def _contents(path: object, check: Callable[[Path], object] | None) -> str:
    """Return the digest of a file; PATH where this machine has none.

    check: a function that reads the file and raises DataError for another kind of file. The digest
        is sent, and that of any other file could reveal its content.
    """
    if not isinstance(path, str):
        return as_text(path)
    file = Path(path).expanduser()
    # Two clouds need not have the same files: whose stage reads it must have it.
    if not file.is_file():
        return PATH
    if check is not None:
        check(file)
    return f'"(contents {digest_of(file.read_bytes())})"'


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def as_text(value: object) -> str:
    """JSON, in ASCII; 2 and 2.0 are one number."""
    # A file may say 2 and a command line 2.0.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = json.dumps(value, default=str)
    # A long value crosses in every agreement, so it is cut; its digest still tells it apart.
    if len(text) > MAX_VALUE:
        text = f"{text[: MAX_VALUE - 40]}... (digest {digest_of(text.encode())})"
    return text

"""What a data set says of itself (README.md, .huggingface.yaml). It is read before `datasets` sees
it, which would look for the data files that it names wherever they are, and contact who has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from xcloud.base.bounded import check_size
from xcloud.base.errors import DataError
from xcloud.base.yaml_text import events

CARDS = ("README.md", ".huggingface.yaml")
"""The files in which `datasets` looks for "configs"."""
MAX_BYTES = 8 << 20
MAX_VALUES = 200_000
OPENED = frozenset("Audio Image Video Pdf Nifti Mesh BioSequence BioStructure".split())
"""Kinds of columns of `datasets` whose values are files that it opens."""
_PLACES = ("data_files", "data_dir")


def cards_of(
    name: str, folder: Path | None, revision: str | None, reached: bool
) -> Iterator[Path]:
    """Yield the cards of a data set in a folder or on the hub. Nothing else is fetched.

    reached: true if the hub can be reached. Without the hub `datasets` sends no request either.
    """
    if folder is not None:
        # A folder's own cards; nothing is asked of the hub.
        yield from (folder / card for card in CARDS if (folder / card).is_file())
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    for card in CARDS:
        try:
            yield Path(
                hf_hub_download(
                    name,
                    card,
                    repo_type="dataset",
                    revision=revision,
                    local_files_only=not reached,
                )
            )
        except (EntryNotFoundError, LocalEntryNotFoundError):
            # A data set may have one of the two, both, or none.
            continue


def check_card(path: Path, name: str) -> None:
    """Raise DataError if a card names data that is not in its own folder, or is no plain YAML."""
    # Before it is read: a card may be gigabytes.
    check_size(path, max_bytes=MAX_BYTES)
    try:
        text = path.read_text("utf-8")
        # The part of a README.md between two lines of dashes.
        if path.name.endswith(".md"):
            from huggingface_hub.repocard import REGEX_YAML_BLOCK

            block = REGEX_YAML_BLOCK.search(text)
            text = block[2] if block else ""
        # Anchors can make a few lines billions of values, and parsing is what would fill the
        # memory, so events are counted before.
        for number, event in enumerate(events(text)):
            if number > MAX_VALUES or getattr(event, "anchor", None):
                raise DataError(
                    f"{name}: {path.name} has anchors, aliases or more than {MAX_VALUES:,} values"
                )
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        said = " ".join(str(error).split())
        # `from None`: the parser's own error would show lines of a file that is somebody else's.
        raise DataError(f"{name}: {path.name} is no card of a data set: {said:.200}") from None
    configs = content.get("configs") if isinstance(content, dict) else None
    # Other forms than a list of objects are no configs for `datasets` either.
    for config in configs if isinstance(configs, list) else ():
        for key in _PLACES if isinstance(config, dict) else ():
            for place in _texts(config.get(key)):
                if leads_out(place):
                    raise DataError(f"{name}: {path.name} names {place!r}, no file of its own")


def check_features(features: Any, name: str) -> None:
    """Raise DataError for columns whose values `datasets` opens, wherever a row says they are.

    features: the features of `datasets`, None where they are not known before rows are read.
    """
    for column, feature in (features or {}).items():
        # A stack instead of recursion: features nest as deep as a stranger's file says.
        rest = [feature]
        while rest:
            one = rest.pop()
            if type(one).__name__ in OPENED:
                raise DataError(
                    f"{name}: its column {column!r} is {type(one).__name__}, whose rows name "
                    "files and addresses that reading opens: leave that column out of the data set"
                )
            # A sequence has its kind under `feature`; structures are dictionaries or lists.
            inner = one if isinstance(one, dict | list) else getattr(one, "feature", None)
            if isinstance(inner, dict):
                rest += inner.values()
            elif isinstance(inner, list):
                rest += inner
            elif inner is not None:
                rest.append(inner)


def leads_out(place: str) -> bool:
    """Return whether a pattern of data files may lead out of the data set's folder."""
    return (
        "://" in place
        or "::" in place
        # A backslash leads out on Windows, and in an escaped pattern.
        or "\\" in place
        or place.startswith(("/", "~"))
        # A scheme without slashes, "file:x", or a drive, "C:x".
        or bool(re.match(r"[A-Za-z][\w+.-]*:", place))
        or ".." in place.split("/")
    )


def _texts(node: Any) -> Iterator[str]:
    """Yield all texts in a setting, keys too: what is a split and what a path, `datasets` says."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)

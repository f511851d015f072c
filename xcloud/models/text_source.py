"""The protocol of public text, which every cloud may see. No text here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from xcloud.base.errors import ConfigError
from xcloud.contracts.model import TokenIds


@runtime_checkable
class PublicTexts(Protocol):
    """Text that every cloud produces or reads identically, as token ids."""

    def describe(self) -> str:
        """A short name, without reading anything."""

    def token_ids(self, cache_dir: Path) -> TokenIds:
        """Size and special ids of the tokenizer."""

    def sentences(self, num: int, cache_dir: Path) -> Sequence[Sequence[int]]:
        """Token ids of `num` texts without special ids, equal in every cloud. Raises DataError if
        there are fewer."""


def check_public_text(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is a source of public text."""
    if not isinstance(value, PublicTexts):
        raise ConfigError(
            f"{name} must be a source of public text (xcloud.tasks.public_text.PublicText), got "
            f"{value!r}"
        )

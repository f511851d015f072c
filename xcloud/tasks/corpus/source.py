"""Protocols of sources: each gives the tables of every split. The corpora (pairs.py, labelled.py,
paragraphs.py) define what a row means. Opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from xcloud.base.errors import DataError
from xcloud.contracts.task import Split
from xcloud.tasks.corpus.text import Rows

DEV_NAMES = ("dev", "val", "valid", "validation")
FileKind = Literal["table", "json", "lines"]
OwnNames = Mapping[Split, Mapping[str, str]]
"""Split -> set name -> part name ("" for none)."""


class Table(Protocol):
    """Rows with named columns."""

    @property
    def where(self) -> str:
        """Location, for messages."""

    def columns(self) -> list[str]:
        """Column names. May read a file's first line."""

    def read(self, wanted: Mapping[str, str], keys: str, number: str | None = None) -> Rows:
        """wanted: new name -> column; others are dropped. keys: the settings that choose columns,
        for error messages. number: the column that may hold numbers (a label)."""


def check_columns(table: Table, wanted: Sequence[str], keys: str) -> None:
    """Raise DataError if a table has a header without one of these; opens no side of line pairs.
    keys: what to change then."""
    header = table.columns()
    if "translation" not in header and (missing := sorted(set(wanted) - set(header))):
        raise DataError(
            f"{table.where}: no column {', '.join(missing)}; it has {', '.join(header)}. "
            f"Choose with {keys}"
        )


@dataclass(frozen=True)
class Form:
    """File formats of a corpus. endings: format by file ending. languages: of line pairs
    (train.es, train.en), if any."""

    expected: str
    is_usual: Callable[[str, Split], bool]
    endings: Mapping[str, FileKind] = field(
        default_factory=lambda: {"tsv": "table", "jsonl": "json", "json": "json"}
    )
    languages: Sequence[str] = ()


@dataclass(frozen=True)
class Found:
    """splits: split -> part -> its tables; the part "" is the whole split.

    test_key: the setting that chose the test set; None if it was found by name.
    facts, remarks: become `agreed` and `remarks` of a Parallel.
    """

    splits: Mapping[Split, Mapping[str, Sequence[Table]]]
    test_key: str | None
    facts: Mapping[str, object]
    remarks: Sequence[str] = ()

    @property
    def training(self) -> Table:
        """The first table of train; its columns are used for all splits."""
        return next(iter(self.splits["train"].values()))[0]


class Source(Protocol):
    """A folder or a hub data set. Frozen, validated on construction."""

    @property
    def where(self) -> str:
        """Location, for messages."""

    def describe(self) -> str:
        """A short name, without reading anything."""

    def check(self) -> bool:
        """Quick check: raise DataError if missing. Returns whether `find` is fast and local."""

    def find(self, form: Form) -> Found:
        """Reads no text. Raises DataError if a set is missing or ambiguous."""

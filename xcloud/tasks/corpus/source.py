"""What every source of rows gives: the tables of each split. What a row means is said by the
corpora: pairs.py, labelled.py, paragraphs.py. No file is opened here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from xcloud.tasks.corpus.text import Rows
from xcloud.tasks.task import Split

DEV_NAMES = ("dev", "val", "valid", "validation")
OwnNames = Mapping[Split, Mapping[str, str]]
"""Split -> a set's own name -> its part ("" where it has none)."""


class Table(Protocol):
    """Rows with named columns."""

    @property
    def where(self) -> str:
        """For messages."""

    def columns(self) -> list[str]:
        """Their names. Opens a file for its first line."""

    def read(self, wanted: Mapping[str, str], keys: str, number: str | None = None) -> Rows:
        """wanted: new name -> column; others are not kept. keys: the settings that choose them,
        for a DataError. number: the column that may hold numbers (a label)."""


@dataclass(frozen=True)
class Form:
    """What files a corpus is made of. languages: of line pairs (train.es, train.en), if any."""

    expected: str
    is_usual: Callable[[str, Split], bool]
    kinds: Sequence[str] = ("table", "json", "lines")
    languages: Sequence[str] = ()


@dataclass(frozen=True)
class Found:
    """splits: split -> part -> its tables; the part "" is the whole split.

    test_key: the setting that named the test set, None where nobody did.
    facts, remarks: as `agreed` and `remarks` of a Parallel.
    """

    splits: Mapping[Split, Mapping[str, Sequence[Table]]]
    test_key: str | None
    facts: Mapping[str, object]
    remarks: Sequence[str] = ()

    @property
    def training(self) -> Table:
        """The first table of train, whose columns count for all."""
        return next(iter(self.splits["train"].values()))[0]


class Source(Protocol):
    """A folder, a data set of the hub, … Frozen, checked when built."""

    @property
    def where(self) -> str:
        """For messages."""

    def describe(self) -> str:
        """In a few words, without reading it."""

    def check(self) -> bool:
        """Raise DataError at once if it is not there. True where `find` is quick and local."""

    def find(self, form: Form) -> Found:
        """Reads no text. Raises DataError where a set is missing or ambiguous."""

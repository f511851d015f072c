"""Rows with named columns: what a source of a task gives, and which of them are used. No file
formats here.

Row numbers mean the same sample in every cloud, so no rule here may depend on a row's text.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Leads, Positive, settings
from xcloud.base.wording import listed, quoted
from xcloud.contracts.model import SPLITS, Cut, DataSplit

DEV_NAMES = ("dev", "val", "valid", "validation")
GivenText = Annotated[str, Field(min_length=1)]
Names = Annotated[GivenText | Sequence[GivenText] | None, Leads("inside")]
Share = Positive | Annotated[float, Field(gt=0, le=0.5)]
Size = Annotated[int, Field(ge=1, le=100_000)]
FileKind = Literal["table", "json", "squad", "lines", "text"]
MAX_KEYS = 8  # unused ones that are named
OwnNames = Mapping[DataSplit, Mapping[str, str]]
"""Split -> set name -> part name ("" for none)."""


@dataclass(frozen=True)
class Rows:
    """Some columns of a split; only visible ones are included. num_empty: rows that were left out
    of the set because they hold no text."""

    num_rows: int
    texts: Mapping[str, Sequence[Any]]
    num_empty: int = 0

    def take(self, numbers: Sequence[int]) -> Rows:
        texts = {name: [column[i] for i in numbers] for name, column in self.texts.items()}
        return Rows(num_rows=len(numbers), texts=texts)

    @staticmethod
    def joined(parts: Iterable[Rows]) -> Rows:
        parts = list(parts)
        names = parts[0].texts if parts else ()
        texts = {name: [text for part in parts for text in part.texts[name]] for name in names}
        num_rows, num_empty = (
            sum(numbers) for numbers in ([p.num_rows for p in parts], [p.num_empty for p in parts])
        )
        return Rows(num_rows, texts, num_empty)


def digest_of(cells: Iterable[Any]) -> str:
    """Return a digest of a column's cells and their order: texts, or lists of JSON values."""
    digest = hashlib.sha256()
    for cell in cells:
        text = json.dumps(cell, sort_keys=True) if not isinstance(cell, str) else cell
        # The length comes first, so that ["ab", "c"] and ["a", "bc"] differ. A text may hold half
        # of a surrogate pair, which strict UTF-8 refuses.
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Corpus:
    """A task's rows as one rank sees them.

    remarks: sentences for the user on how the splits were made.
    agreed: the facts that must be equal in all clouds besides row counts. They contain no private
        text.
    further: texts that belong to no row, by column.
    train_set: all rows of the training set that teach something, before some were held out of it
        or a sample was drawn.
    useless: the rows that were left out because they teach nothing, by reason and split. They are
        left out first: chance would else fill a small dev set with them.
    """

    splits: Mapping[DataSplit, Rows]
    remarks: Sequence[str] = ()
    agreed: Mapping[str, object] = field(default_factory=dict)
    further: Mapping[str, Sequence[str]] = field(default_factory=dict)
    train_set: Rows = Rows(num_rows=0, texts={})
    useless: Mapping[str, Mapping[DataSplit, Cut]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[DataSplit, int]:
        return {split: self.splits[split].num_rows for split in SPLITS}

    def digests(self) -> dict[str, str]:
        """Return a digest of each column that was read, by split, and of further texts. A column
        "group" only says which rows are held out together, by names of files."""
        found = {
            f"{name} of {split}": digest_of(cells)
            for split, rows in self.splits.items()
            for name, cells in rows.texts.items()
            if name != "group"
        }
        further = {f"further texts of {name}": digest_of(t) for name, t in self.further.items()}
        return found | further


class RowTable(Protocol):
    """Rows with named columns, read one after the other."""

    @property
    def where(self) -> str:
        """Return the location, for messages."""

    @property
    def names(self) -> Sequence[str]:
        """Return the set's own name and those of its files; a table in memory has none."""

    def columns(self) -> list[str]:
        """Return the names of the columns. May read a file's first line."""

    def rows(
        self, columns: Sequence[str], keys: str, optional: Sequence[str] = ()
    ) -> Iterable[tuple[Any, ...]]:
        """Yield the cells of these columns, mostly texts, and behind them those of optional ones,
        None where a row has none; with no columns, an empty tuple a row.

        keys: the settings that choose columns, for messages.
        """

    @property
    def seen(self) -> Mapping[str, int]:
        """Return how many of the rows that were read last hold something under each key, whether
        it was asked for or not. The number is 0 where only the names are known."""


def unread_keys(
    tables: Iterable[RowTable], used: Callable[[RowTable], Collection[str]]
) -> list[str]:
    """Return for the user which keys of tables that were read nobody uses, once for all files that
    have the same ones.

    used: a function that returns the keys of a table that its task uses, including those that this
        rank may not see.
    """
    files: dict[tuple[str, ...], dict[str, None]] = {}
    num_rows = Counter[str]()
    for table in tables:
        known = used(table)
        unused = {key: num for key, num in table.seen.items() if key not in known}
        if unused:
            # Files with the same unused keys share a remark: a folder may have hundreds of them.
            files.setdefault(tuple(unused), {})[name_of(table) or table.where] = None
        num_rows.update(unused)
    remarks = []
    for others, names in files.items():
        words = [
            quoted(key) + (f" of {num_rows[key]:,} rows" if num_rows[key] else "")
            for key in others[:MAX_KEYS]
        ]
        if len(others) > MAX_KEYS:
            words.append(f"{len(others) - MAX_KEYS:,} more")
        remarks.append(f"{', '.join(names)}: not used: {', '.join(words)}")
    return remarks


def name_of(table: RowTable) -> str:
    """Return what a table is called in messages."""
    return " + ".join(table.names[1:] or table.names)


def check_columns(table: RowTable, wanted: Sequence[str], keys: str) -> None:
    """Raise DataError if a table lacks one of these columns, or has two. keys: what to change."""
    there = table.columns()
    # A name that stands twice is as bad as none: which of the two columns is meant nobody can
    # tell.
    if odd := sorted(column for column in {*wanted} if there.count(column) != 1):
        said = "two columns" if odd[0] in there else "no column"
        said += f" {', '.join(odd)}; it has {listed(there)}"
        if table.where.endswith((".tsv", ".tsv.gz")):
            said += ", by its first line, which names them"
        raise DataError(f"{table.where}: {said}. Choose with {keys}")


def check_is_no_header(where: str, names: Sequence[str], cells: Sequence[Any]) -> None:
    """Raise DataError for a row whose cells are the names of their columns: where two files were
    joined, the header of the second is no sample. A single cell may well be called as its column
    is."""
    if len(names) > 1 and all(
        isinstance(cell, str) and cell.strip().casefold() == name.strip().casefold()
        for name, cell in zip(names, cells, strict=True)
    ):
        said = f"this row repeats the names of the columns ({listed(names)}), as where two files "
        raise DataError(f"{where}: {said}were joined; remove it, in every cloud's file")


def read(table: RowTable, wanted: Mapping[str, str], keys: str) -> Rows:
    """Return these columns as texts without outer spaces; null and NaN become empty ones.

    wanted: the column of each new name.
    """
    columns: list[list[str]] = [[] for _ in wanted]
    num_rows = 0
    for row in table.rows([*wanted.values()], keys):
        num_rows += 1
        for column, cell in zip(columns, row, strict=True):
            if isinstance(cell, list | dict):
                said = f"{quoted(cell)} is no text; see {keys}"
                raise DataError(f"{table.where}, row {num_rows}: {said}")
            is_missing = cell is None or cell != cell  # NaN differs from itself
            column.append("" if is_missing else str(cell).strip())
    return Rows(num_rows, texts=dict(zip(wanted, columns, strict=True)))


@dataclass(frozen=True)
class Form:
    """The data that a task reads, as described to its source.

    expected: the files that make up a corpus in a folder, in words.
    rows: the kind of its rows, in words, where some sources have only these.
    name: the name of the corpus, where it is a known one.
    endings: the format of each file ending.
    languages: the languages of line pairs (train.es, train.en), if any.
    version: the suffix that the usual name of a file may have (train-v1.1).
    files, splits: the sets that make up a split by their names in the corpus itself, as files of a
        folder and on the hub; used where none are asked for.
    hub, config: the data set on the hub and its configuration, used where none is asked for.
    hides_test: the labels of the test set on the hub are not public.
    train_language: the language of train and dev, where each language has sets of its own.
    test_languages: the languages of test then; none: all that there are.
    """

    expected: str
    rows: str = ""
    name: str = ""
    endings: Mapping[str, FileKind] = field(
        default_factory=lambda: {"tsv": "table", "jsonl": "json", "json": "json"}
    )
    languages: Sequence[str] = ()
    version: re.Pattern[str] | None = None
    files: OwnNames = field(default_factory=dict)
    splits: OwnNames = field(default_factory=dict)
    hub: str = ""
    config: str | None = None
    hides_test: bool = False
    train_language: str = ""
    test_languages: Sequence[str] = ()


Tables = dict[DataSplit, Mapping[str, Sequence[RowTable]]]
"""Split -> part -> tables; the part "" is the whole split."""


@dataclass(frozen=True)
class SplitTables:
    """The tables of each split.

    test_key: the setting that chose the test set; None if it was chosen by name.
    facts, remarks, further: the values that Corpus takes.
    """

    tables: Tables
    facts: Mapping[str, object]
    remarks: Sequence[str] = ()
    test_key: str | None = None
    further: Mapping[str, Sequence[str]] = field(default_factory=dict)


@settings("task.data", kw_only=True)
class Source(ABC):
    """The place that a task's rows come from. It finds the tables of each split, and knows nothing
    of what a task makes of them: each question comes with the form of what the task reads."""

    rows: ClassVar[str] = ""  # the one kind of rows that it has; "": any of one language
    names_columns: ClassVar[bool] = True  # whether somebody chose their names
    title: ClassVar[str] = ""  # its short name; "": where it is

    @property
    def is_public(self) -> bool:
        """Return whether its texts are known to be public, so that samples of them may be shown in
        a tracker. Files of a folder are somebody's own."""
        return False

    @abstractmethod
    def where(self, form: Form) -> str:
        """Return the location, for messages."""

    def source_name(self, form: Form) -> str:
        """Return a short name, without reading anything."""
        return self.title or self.where(form)

    @abstractmethod
    def find(self, form: Form) -> SplitTables:
        """Find the tables of each split. Reads no text. Raises DataError if a set is missing or
        ambiguous."""

    def check(self, form: Form) -> None:
        """Raise ConfigError if it has no rows of this form."""
        if self.rows not in ("", form.rows) or (form.train_language and not self.rows):
            raise ConfigError(
                f"task.data is {type(self).__name__}, which has {self.rows or 'one language'}, "
                f"and this task reads {form.rows}: set task and task.data to what fits"
            )

    def check_source(self, form: Form) -> SplitTables | None:
        """Raise DataError if data is missing; return the tables where they are local. Quick."""
        return self.find(form)

    def is_usual(self, name: str, split: DataSplit, form: Form) -> bool:
        """Return whether a set of this name usually is the split."""
        return name in (DEV_NAMES if split == "dev" else (split,))

    def choose(
        self,
        there: Sequence[RowTable],
        form: Form,
        key: str,
        own_names: OwnNames,
        expected: str,
        unread: Sequence[str] = (),
    ) -> Tables:
        """Return the sets of each split: those that the settings `key` request, all of the
        corpus's own names, or the one with a usual name. dev and test may have none. unread: files
        that hold data in a form that is not read, for messages."""
        where = self.where(form)
        found = listed(map(name_of, there))
        if unread:
            found += f"; of forms that are not read: {listed(unread)}"
        chosen: dict[DataSplit, list[RowTable]] = {}
        for split in SPLITS:
            setting = key.format(split)
            own = own_names.get(split, {})
            asked: Names = getattr(self, setting.removeprefix("task.data."))
            if asked is None:
                # The corpus's own sets are taken only if all of them are there: half of them would
                # be another corpus than the one that scores are compared with.
                asked = list(own) if own.keys() <= {one.names[0] for one in there} else ()
            # A pattern takes every set that fits, and asking twice for the same one does no harm.
            for pattern in [asked] if isinstance(asked, str) else asked:
                matching = [one for one in there if any(fnmatch(n, pattern) for n in one.names)]
                if not matching:
                    said = f"nothing for {setting}={pattern}; found: {found}"
                    raise DataError(f"{where}: {said}")
                held = chosen.setdefault(split, [])
                held += [one for one in matching if one not in held]
        # Checked before the usual names, which must not take what somebody has asked for.
        taken = [one for sets in chosen.values() for one in sets]
        if twice := [name_of(one) for one in taken if taken.count(one) > 1]:
            said = f"{twice[0]} is used for two splits; check {key.format('*')}"
            raise DataError(f"{where}: {said}")
        for split in (split for split in SPLITS if split not in chosen):
            # What is chosen for another split is not usual for this one: test_file=dev leaves no
            # dev set.
            usual = [t for t in there if t not in taken and self.is_usual(t.names[0], split, form)]
            if len(usual) > 1:
                said = f"several for {split}: {listed(map(name_of, usual))}"
                raise DataError(f"{where}: {said}; choose with {key.format(split)}=NAME")
            # A dev.csv beside a train.tsv was meant to be used. Holding dev out of train instead
            # would score another set in silence.
            if usual:
                chosen[split] = usual
            elif split != "train" and (
                other := [n for n in unread if self.is_usual(n.partition(".")[0], split, form)]
            ):
                said = f"{other[0]} is of a form that is not read, and there is no other {split}"
                raise DataError(f"{where}: {said} set; write {expected}, or move it away")
        if "train" not in chosen:
            said = f"no training set; expected {expected}; found: {found}"
            raise DataError(f"{where}: {said}. Choose with {key.format('train')}=NAME")
        tables: Tables = {}
        for split, sets in chosen.items():
            parts: dict[str, list[RowTable]] = {}
            for one in sets:
                part = own_names.get(split, {}).get(one.names[0], "")
                parts.setdefault(part, []).append(one)
            tables[split] = {"": sets} if "" in parts else parts  # only if every set has a part
        return tables


def in_train(splits: Mapping[DataSplit, Rows]) -> list[str]:
    """Return remarks on rows of dev and test whose texts stand in train, too. Labels alone say
    nothing of that."""
    remarks = []
    for split in (split for split in SPLITS if split != "train"):
        names = [n for n in splits[split].texts if n not in ("label", "part", "group", "answers")]
        if not names:
            continue
        # Digests are compared, not texts: of long documents the set would take as much memory as
        # train.
        rows = [
            digest_of(cells)
            for cells in zip(*(splits[split].texts[n] for n in names), strict=True)
        ]
        wanted = {*rows}
        columns = (splits["train"].texts[name] for name in names)
        wanted &= {digest_of(cells) for cells in zip(*columns, strict=True)}
        if num := sum(row in wanted for row in rows):
            remarks.append(f"{split}: {num:,} of {len(rows):,} samples are also in train")
    return remarks


def chosen_rows(num_rows: int, wanted: int) -> list[int]:
    """Draw at most `wanted` row numbers below num_rows, alike in every run; ascending."""
    draw = random.Random(0).random  # random() alone: the same on every Python version
    # A key for each row: which rows are drawn for a smaller `wanted` are among those of a larger
    # one.
    keys = [draw() for _ in range(num_rows)]
    return sorted(sorted(range(num_rows), key=keys.__getitem__)[:wanted])


def interleaved(sets: Mapping[str, Rows]) -> Rows:
    """Interleave the sets row by row; adds the column "part" with the set name."""
    most = max(rows.num_rows for rows in sets.values())
    order = [(p, row) for row in range(most) for p, rows in sets.items() if row < rows.num_rows]
    names = next(iter(sets.values())).texts
    texts = {name: [sets[part].texts[name][row] for part, row in order] for name in names}
    return Rows(num_rows=len(order), texts={**texts, "part": [part for part, _ in order]})


@dataclass(frozen=True)
class Given:
    """A RowTable in memory."""

    where: str
    cells: Mapping[str, Sequence[Any]]
    names: Sequence[str] = ()
    seen: ClassVar[Mapping[str, int]] = {}  # nobody reads a key that was not made for it

    def columns(self) -> list[str]:
        return list(self.cells)

    def rows(
        self, columns: Sequence[str], keys: str, optional: Sequence[str] = ()
    ) -> list[tuple[Any, ...]]:
        check_columns(self, wanted=columns, keys=keys)
        num_rows = len(next(iter(self.cells.values())))
        if not columns:
            return [()] * num_rows
        none = [None] * num_rows
        found = (self.cells.get(name, none) for name in (*columns, *optional))
        return list(zip(*found, strict=True))


@settings("task.data", kw_only=True)
class Demo(Source):
    """A corpus of the demo texts (xcloud/demo), which are public. A digest shows that all clouds
    have the same ones. Labels were drawn independently for each sample: a fixed order would
    reveal them to a cloud that sees only sample numbers."""

    names_columns = False
    is_public = True
    order: ClassVar[Sequence[DataSplit]] = SPLITS  # in which splits take their rows

    def where(self, form: Form) -> str:
        return "demo"

    def check_source(self, form: Form) -> None:
        """Do nothing: demo texts are part of the package."""

    @property
    def counts(self) -> dict[DataSplit, int]:
        return {split: getattr(self, f"num_{split}") for split in SPLITS}

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def generated(
        self, names: Sequence[str], rows: Iterable[Sequence[Any]], samples: object
    ) -> SplitTables:
        """Return rows of cells, cut into consecutive splits. samples: what all clouds agree on."""
        # Rows are made once and cut into splits in `order`, so that a larger num_train leaves the
        # others as they are where they come first.
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        result = Tables()
        start = 0
        for split in self.order:
            part = slice(start, start + self.counts[split])
            cells = {name: column[part] for name, column in columns.items()}
            result[split] = {"": [Given(where=f"demo, {split}", cells=cells)]}
            start = part.stop
        facts = {"demo": hashlib.sha256(repr(samples).encode()).hexdigest()}
        return SplitTables(tables=result, facts=facts)

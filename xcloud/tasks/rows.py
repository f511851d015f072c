"""Rows with named columns: what a source of a task gives, and which of them are used. No file
formats here.

Row numbers mean the same sample in every cloud, so no rule here may depend on a row's text.
"""

from __future__ import annotations

import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from xcloud.base.errors import DataError
from xcloud.base.settings import Leads, Positive, settings
from xcloud.base.wording import listed, quoted
from xcloud.contracts.model import SPLITS, Cut, Split

DEV_NAMES = ("dev", "val", "valid", "validation")
Text = Annotated[str, Field(min_length=1)]
Names = Annotated[Text | Sequence[Text] | None, Leads("inside")]
Share = Positive | Annotated[float, Field(gt=0, le=0.5)]
Size = Annotated[int, Field(ge=1, le=100_000)]
FileKind = Literal["table", "json", "squad", "lines", "text"]
MAX_KEYS = 8  # unused ones that are named
OwnNames = Mapping[Split, Mapping[str, str]]
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
        return Rows(num_rows=num_rows, texts=texts, num_empty=num_empty)


def digest_of(cells: Iterable[Any]) -> str:
    """Return a digest of a column's cells and their order: texts, or lists of JSON values."""
    digest = hashlib.sha256()
    for cell in cells:
        text = cell
        if not isinstance(cell, str):
            text = json.dumps(cell, sort_keys=True)
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

    splits: Mapping[Split, Rows]
    remarks: Sequence[str] = ()
    agreed: Mapping[str, object] = field(default_factory=dict)
    further: Mapping[str, Sequence[str]] = field(default_factory=dict)
    train_set: Rows = Rows(num_rows=0, texts={})
    useless: Mapping[str, Mapping[Split, Cut]] = field(default_factory=dict)

    @property
    def counts(self) -> dict[Split, int]:
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

    def check(self) -> None:
        """Raise DataError if its form is not what its name says. Reads its beginning only."""

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
    return Rows(num_rows=num_rows, texts=dict(zip(wanted, columns, strict=True)))


@dataclass(frozen=True)
class Form:
    """The files that make up a corpus in a folder.

    endings: the format of each file ending.
    languages: the languages of line pairs (train.es, train.en), if any.
    """

    expected: str
    endings: Mapping[str, FileKind] = field(
        default_factory=lambda: {"tsv": "table", "jsonl": "json", "json": "json"}
    )
    languages: Sequence[str] = ()


Tables = dict[Split, Mapping[str, Sequence[RowTable]]]
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


@settings("task", kw_only=True)
class Source(ABC):
    """The place that a task's rows come from. A base class of settings: the class that
    YAML names has a source and a task as its bases, so that all settings stand beside each other
    under `task`.

    dev_share, test_share: the rows to hold out of train where a dev or test split is missing: a
        row count (500) or a fraction of the training rows (0.02).
    max_train_samples, max_eval_samples: the largest number of samples, in splits with parts of
        each part; null: all. Which rows are held out and drawn does not depend on `seed`: every
        run is scored on the same ones.
    """

    dev_share: Share = 0.02
    test_share: Share = 0.02
    max_train_samples: Positive | None = None
    max_eval_samples: Positive | None = None
    names_columns: ClassVar[bool] = True  # whether somebody chose their names

    def __post_init__(self) -> None:  # noqa: B027
        """Check what relates several settings; each base calls the next."""

    @property
    def is_public(self) -> bool:
        """Return whether its texts are known to be public, so that samples of them may be shown in
        a tracker. Files of a folder are somebody's own."""
        return False

    @property
    @abstractmethod
    def where(self) -> str:
        """Return the location, for messages."""

    @abstractmethod
    def source_name(self) -> str:
        """Return a short name, without reading anything."""

    @property
    @abstractmethod
    def form(self) -> Form:
        """Return which files the task reads."""

    @abstractmethod
    def find(self) -> SplitTables:
        """Find the tables of each split. Reads no text. Raises DataError if a set is missing or
        ambiguous."""

    def check_source(self) -> SplitTables | None:
        """Raise DataError if data is missing; return the tables where they are local. Quick."""
        return self.find()

    @property
    def own_names(self) -> OwnNames:
        """Return the names of the corpus itself, used where none were requested."""
        return {}

    def is_usual(self, name: str, split: Split) -> bool:
        """Return whether a set of this name usually is the split."""
        return name in (DEV_NAMES if split == "dev" else (split,))

    def choose(
        self, there: Sequence[RowTable], key: str, expected: str, unread: Sequence[str] = ()
    ) -> Tables:
        """Return the sets of each split: those that the settings `key` request, all of its own
        names, or the one with a usual name. dev and test may have none. unread: files that hold
        data in a form that is not read, for messages."""
        found = listed(map(name_of, there))
        if unread:
            found += f"; of forms that are not read: {listed(unread)}"
        chosen: dict[Split, list[RowTable]] = {}
        for split in SPLITS:
            setting = key.format(split)
            own = self.own_names.get(split, {})
            asked: Names = getattr(self, setting.removeprefix("task."))
            if asked is None:
                if own.keys() <= {one.names[0] for one in there}:
                    asked = list(own)
                else:
                    asked = ()
            for pattern in [asked] if isinstance(asked, str) else asked:
                matching = [one for one in there if any(fnmatch(n, pattern) for n in one.names)]
                if not matching:
                    said = f"nothing for {setting}={pattern}; found: {found}"
                    raise DataError(f"{self.where}: {said}")
                held = chosen.setdefault(split, [])
                held += [one for one in matching if one not in held]
        taken = [one for sets in chosen.values() for one in sets]
        if twice := [name_of(one) for one in taken if taken.count(one) > 1]:
            said = f"{twice[0]} is used for two splits; check {key.format('*')}"
            raise DataError(f"{self.where}: {said}")
        for split in (split for split in SPLITS if split not in chosen):
            usual = [t for t in there if t not in taken and self.is_usual(t.names[0], split=split)]
            if len(usual) > 1:
                said = f"several for {split}: {listed(map(name_of, usual))}"
                raise DataError(f"{self.where}: {said}; choose with {key.format(split)}=NAME")
            if usual:
                chosen[split] = usual
            elif split != "train" and (
                other := [n for n in unread if self._may_be(n, split=split)]
            ):
                said = f"{other[0]} is of a form that is not read, and there is no other {split}"
                raise DataError(f"{self.where}: {said} set; write {expected}, or move it away")
        if "train" not in chosen:
            said = f"no training set; expected {expected}; found: {found}"
            raise DataError(f"{self.where}: {said}. Choose with {key.format('train')}=NAME")
        tables: Tables = {}
        for split, sets in chosen.items():
            parts: dict[str, list[RowTable]] = {}
            for one in sets:
                part = self.own_names.get(split, {}).get(one.names[0], "")
                parts.setdefault(part, []).append(one)
            # only if every set has a part
            if "" in parts:
                tables[split] = {"": sets}
            else:
                tables[split] = parts
        return tables

    def _may_be(self, file: str, split: Split) -> bool:
        return self.is_usual(file.partition(".")[0], split=split)

    def arrange(
        self,
        tables: SplitTables,
        rows_of: Callable[[RowTable], Rows],
        used: Callable[[RowTable], Collection[str]],
        dev_as_test: bool = False,
        useless_of: Callable[[Rows], Mapping[int, str]] = lambda _: {},
    ) -> Corpus:
        """Read all three splits, with a remark for each one held out of train or sampled, and
        for its rows that are not used. Parts are sampled equally and interleaved, so that a prefix
        of a split covers all of them.

        used: a function that returns the keys of a table that its task uses, including those that
            this rank does not see.
        dev_as_test: if there is no test set, the dev set becomes the test set, and dev is held out
            of train, so that nothing is tuned on the reported scores.
        useless_of: a function that returns the numbers of the rows of which nothing can be
            learned, each with the reason.

        Rows with the same cell in a column "group" are held out together.
        """
        splits: dict[Split, Mapping[str, Rows]] = {
            split: {part: Rows.joined(map(rows_of, held)) for part, held in parts.items()}
            for split, parts in tables.tables.items()
        }
        for split, parts in splits.items():
            if empty := [part for part, rows in parts.items() if not rows.num_rows]:
                raise DataError(f"{self.where}: {empty[0] or 'the set'} of {split} has no rows")
        remarks = list(tables.remarks)
        every = (table for of in tables.tables.values() for table in chain(*of.values()))
        remarks += unread_keys(every, used=used)
        for split in (split for split in SPLITS if split in splits):
            if num := sum(rows.num_empty for rows in splits[split].values()):
                remarks.append(f"{split}: {num:,} empty texts left out")
        useless: dict[str, dict[Split, Cut]] = {}
        for split, parts in splits.items():
            splits[split] = {
                part: self._useful(rows, split, useless_of(rows), useless)
                for part, rows in parts.items()
            }
        train = splits["train"][""]
        if dev_as_test and "test" not in splits and "dev" in splits:
            splits["test"] = splits.pop("dev")
            remarks.append("test: the dev set, as there is no labelled test set")
        for split, numbers in self._held_out(splits, train=train).items():
            splits[split] = {"": train.take(numbers)}
            if split != "train":
                remarks.append(f"{split} held out of train")
        result = dict[Split, Rows]()
        for split in SPLITS:
            if split == "train":
                most = self.max_train_samples
            else:
                most = self.max_eval_samples
            parts = splits[split]
            if most is not None and any(rows.num_rows > most for rows in parts.values()):
                before = sum(rows.num_rows for rows in parts.values())
                remarks.append(f"{split}: a sample of its {before:,} rows")
                parts = {
                    part: rows.take(chosen_rows(rows.num_rows, wanted=most))
                    for part, rows in parts.items()
                }
            if list(parts) == [""]:
                result[split] = parts[""]
            else:
                result[split] = interleaved(parts)
        remarks += _in_train(result)
        for split, rows in result.items():
            for column in (name for name in rows.texts if name not in ("label", "part", "group")):
                if num := sum(cell == "" for cell in rows.texts[column]):
                    remarks.append(f"{split}: {num:,} empty cells of {column} are kept")
        agreed = dict(tables.facts)
        drawn = {f.name: getattr(self, f.name) for f in fields(Source)}
        if any(drawn[one.name] != one.default for one in fields(Source)):
            agreed["sampling"] = drawn
        return Corpus(
            splits=result, remarks=remarks, agreed=agreed, further=tables.further, train_set=train,
            useless=useless,
        )  # fmt: skip

    def _useful(
        self,
        rows: Rows,
        split: Split,
        reasons: Mapping[int, str],
        useless: dict[str, dict[Split, Cut]],
    ) -> Rows:
        """Return the rows without those that have a reason to be left out, which are counted in
        `useless`. Raises DataError if none is left."""
        if not reasons:
            return rows
        for reason, num in Counter(reasons.values()).items():
            cut = Cut(num=num, of=rows.num_rows, setting="they teach nothing")
            useless.setdefault(reason, {})[split] = cut
        if len(reasons) == rows.num_rows:
            said = "; ".join(f"{num:,}: {why}" for why, num in Counter(reasons.values()).items())
            raise DataError(
                f"{self.where}: none of {rows.num_rows:,} rows of {split} can be learned: {said}"
            )
        return rows.take([i for i in range(rows.num_rows) if i not in reasons])

    def _held_out(self, there: Iterable[Split], train: Rows) -> dict[Split, list[int]]:
        """Return row numbers of train for each missing split and, last, for what remains of it."""
        groups = train.texts.get("group", range(train.num_rows))
        left = list(dict.fromkeys(groups))
        shares: dict[Split, int | float] = {"dev": self.dev_share, "test": self.test_share}
        wanted = {
            split: share if isinstance(share, int) else max(1, int(share * len(left)))
            for split, share in shares.items()
            if split not in there
        }
        if not wanted:
            return {}
        if sum(wanted.values()) >= len(left):
            said = f"{' and '.join(wanted)} need {sum(wanted.values()):,} rows, but train has"
            lower = " and ".join(f"task.{split}_share" for split in wanted)
            said += f" {len(left):,}; lower {lower}, or add a set for each"
            raise DataError(f"{self.where}: {said}")
        split_of: dict[Any, Split] = {}
        for split, count in wanted.items():
            split_of |= {left[i]: split for i in chosen_rows(len(left), wanted=count)}
            left = [group for group in left if group not in split_of]
        return {
            split: [i for i, group in enumerate(groups) if split_of.get(group, "train") == split]
            for split in (*wanted, "train")
        }


def _in_train(splits: Mapping[Split, Rows]) -> list[str]:
    """Return remarks on rows of dev and test whose texts stand in train, too. Labels alone say
    nothing of that."""
    remarks = []
    for split in (split for split in SPLITS if split != "train"):
        names = [n for n in splits[split].texts if n not in ("label", "part", "group", "answers")]
        if not names:
            continue
        rows = [
            digest_of(cells)
            for cells in zip(*(splits[split].texts[n] for n in names), strict=True)
        ]
        wanted = {*rows}
        columns = (splits["train"].texts[name] for name in names)
        wanted &= {digest_of(cells) for cells in zip(*columns, strict=True)}
        if num := sum(row in wanted for row in rows):
            remarks.append(f"{split}: {num:,} of {len(rows):,} rows stand in train, too")
    return remarks


def chosen_rows(num_rows: int, wanted: int) -> list[int]:
    """Draw at most `wanted` row numbers below num_rows, alike in every run; ascending."""
    draw = random.Random(0).random  # random() alone: the same on every Python version
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

    def check(self) -> None:
        """Do nothing: its cells were made here."""

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


@settings("task", kw_only=True)
class Demo(Source):
    """A corpus of the demo texts (xcloud/demo), which are public. A digest shows that all clouds
    have the same ones. Labels were drawn independently for each sample: a fixed order would
    reveal them to a cloud that sees only sample numbers."""

    where = "demo"
    names_columns = False
    title: ClassVar[str]
    order: ClassVar[Sequence[Split]] = SPLITS  # in which splits take their rows

    @property
    def is_public(self) -> bool:
        return True

    def source_name(self) -> str:
        return self.title

    def check_source(self) -> None:
        """Do nothing: demo texts are part of the package."""

    @property
    def counts(self) -> dict[Split, int]:
        return {split: getattr(self, f"num_{split}") for split in SPLITS}

    def generated(
        self, names: Sequence[str], rows: Iterable[Sequence[Any]], samples: object
    ) -> SplitTables:
        """Return rows of cells, cut into consecutive splits. samples: what all clouds agree on."""
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


@settings("task", kw_only=True)
class DemoSized(Demo):
    """A demo corpus of a size that is asked for.

    num_train, num_dev, num_test: the number of rows of each split.
    """

    num_train: Size = 8_000
    num_dev: Size = 500
    num_test: Size = 1_000

    @property
    def total(self) -> int:
        return sum(self.counts.values())

"""Labelled texts from any source: which columns are used and how sets make up splits.

Rows (text.py) have the columns "first" and possibly "second" if text is visible, "label" if labels
are visible, and "part" (the name of a row's set) in splits made of several sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from xcloud.base.checks import check_choice
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.task import Split
from xcloud.tasks.corpus.folder import Names, is_usual_name, patterns_of
from xcloud.tasks.corpus.source import Form, Found, Source, Table
from xcloud.tasks.corpus.text import Parallel, Rows, Sampling, limit

Kind = Literal["classes", "value"]
EXPECTED = "train.tsv (first line: column names) or train.jsonl"
KEYS = "task.text_columns and task.label_column"

PAIRS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"),
    ("premise", "hypothesis"), ("#1 String", "#2 String"), ("text1", "text2"),
    ("text_a", "text_b"),
)  # fmt: skip
SINGLES = ("sentence", "text", "question", "review", "comment", "content")
LABELS: Mapping[str, Sequence[str]] = {
    "classes": ("label", "gold_label", "is_duplicate", "Quality", "class", "category"),
    "value": ("score", "similarity", "relatedness", "value", "label"),
}


class LabelledCorpus(Protocol):
    """A source of labelled texts. Frozen, validated on construction, reads only in `read`."""

    def describe(self) -> str:
        """A short name, without reading anything."""

    def check(self) -> None:
        """Quick check: raise DataError if data is missing. Keeps no text or label."""

    def read(self, visible: frozenset[str]) -> Parallel:
        """visible: a subset of {"text", "label"}; nothing else is kept. Raises DataError."""


@dataclass(frozen=True)
class ColumnChoice:
    """Which columns hold text and label; None: by usual names. num_texts None: 1 or 2."""

    text_columns: Names = None
    label_column: str | None = None
    num_texts: int | None = None
    kind: Kind = "classes"

    def __post_init__(self) -> None:
        check_choice("task.kind", self.kind, ("classes", "value"))
        given = patterns_of(self.text_columns, "task.text_columns")
        allowed = (1, 2) if self.num_texts is None else (self.num_texts,)
        if given and len(given) not in allowed:
            raise ConfigError(
                f"task.text_columns must name {' or '.join(map(str, allowed))} columns here, "
                f"got {given}"
            )
        if self.label_column is not None and not (
            isinstance(self.label_column, str) and self.label_column
        ):
            raise ConfigError(f"task.label_column must name a column, got {self.label_column!r}")

    def find(self, there: Sequence[str], where: str) -> Columns:
        """Choose among a training set's columns `there`."""
        said = f"{where} has the columns {', '.join(there) or 'none'}"
        texts = tuple(patterns_of(self.text_columns, "task.text_columns"))
        usual = [*PAIRS, *((name,) for name in SINGLES)]
        if not texts:
            fitting = [
                names for names in usual
                if set(names) <= set(there) and self.num_texts in (None, len(names))
            ]  # fmt: skip
            if not fitting:
                what = {None: "one or two texts", 1: "one text", 2: "two texts"}[self.num_texts]
                raise DataError(
                    f"{said}; none has a usual name for {what}. Set task.text_columns=[NAME]"
                )
            texts = fitting[0]
        label = self.label_column or next((n for n in LABELS[self.kind] if n in there), None)
        if label is None:
            raise DataError(f"{said}; none has a usual label name. Set task.label_column=NAME")
        if missing := [name for name in (*texts, label) if name not in there]:
            raise DataError(
                f"{said}, but no {', '.join(missing)}; see task.text_columns, task.label_column"
            )
        return Columns(texts, label)


@dataclass(frozen=True)
class Columns:
    texts: tuple[str, ...]
    label: str

    def visible(self, visible: frozenset[str]) -> dict[str, str]:
        """first, second, label -> column name, visible ones only."""
        wanted = dict(zip(("first", "second"), self.texts, strict=False))
        shown = wanted if "text" in visible else {}
        return shown | ({"label": self.label} if "label" in visible else {})

    def __str__(self) -> str:
        return f"{' + '.join(self.texts)} → {self.label}"


@dataclass(frozen=True)
class Labelled:
    """A LabelledCorpus. An unlabelled test set is ignored unless requested."""

    source: Source
    columns: ColumnChoice = field(default_factory=ColumnChoice)
    sampling: Sampling = field(default_factory=Sampling)

    def describe(self) -> str:
        return self.source.describe()

    def check(self) -> None:
        if self.source.check():
            self._find()

    def read(self, visible: frozenset[str]) -> Parallel:
        found, tables, columns = self._find()
        wanted = columns.visible(visible)
        splits: dict[Split, Sets] = {
            split: {
                part: Rows.joined(table.read(wanted, KEYS, columns.label) for table in joined)
                for part, joined in parts.items()
            }
            for split, parts in tables.items()
        }
        rows, remarks = arranged(splits, self.sampling, self.source.where)
        agreed = {**found.facts, "columns": str(columns), "sampling": repr(self.sampling)}
        remarks = [f"columns {columns}", *found.remarks, *remarks]
        return Parallel(self.describe(), rows, remarks, agreed)

    def _find(self) -> tuple[Found, dict[Split, Mapping[str, Sequence[Table]]], Columns]:
        """The source's tables, the usable ones by split, and the training set's columns."""
        found = self.source.find(Form(EXPECTED, is_usual_name))
        tables, train = dict(found.splits), found.training
        columns = self.columns.find(train.columns(), train.where)
        test = [table for joined in tables.get("test", {}).values() for table in joined]
        if hidden := [table for table in test if columns.label not in table.columns()]:
            if found.test_key is not None:
                raise DataError(
                    f"{hidden[0].where}: no column {columns.label}, so it cannot be scored; "
                    f"choose another {found.test_key}"
                )
            del tables["test"]  # its labels are not public, as in GLUE
        if tables.get("dev") == tables.get("test"):
            tables.pop("dev", None)  # task.test=validation: dev is then held out of train
        return found, tables, columns


Sets = Mapping[str, Rows]
"""The sets of a split by part name; a single set named "" is the whole split."""


def arranged(
    splits: Mapping[Split, Sets], sampling: Sampling, where: str
) -> tuple[dict[Split, Rows], list[str]]:
    """All three splits: missing ones are held out of train, long ones are sampled.

    Without a labelled test set, the dev set becomes the test set and dev is held out of train, so
    that nothing is tuned on the reported scores. Parts are sampled equally and interleaved, so
    that a prefix of a split covers all parts.
    """
    splits, remarks = dict(splits), []
    if "test" not in splits and "dev" in splits:
        splits["test"] = splits.pop("dev")
        remarks.append("test: the dev set, as there is no labelled test set")
    parted = {split: sets for split, sets in splits.items() if list(sets) != [""]}
    none = Rows(0, {})
    plain: dict[Split, Rows] = {
        split: none if split in parted else sets[""] for split, sets in splits.items()
    }
    result, more = sampling.apply(plain, where)
    for split, sets in parted.items():
        most = sampling.max_train_pairs if split == "train" else sampling.max_eval_pairs
        cut = {name: limit(rows, most, sampling.seed) for name, rows in sets.items()}
        result[split] = interleaved(cut)
        if any(cut[name].num_rows < sets[name].num_rows for name in cut):
            more.append(f"{split}: {most:,} rows of each part, seed {sampling.seed}")
    return result, [*remarks, *more]


def interleaved(sets: Sets) -> Rows:
    """Interleave the sets row by row; adds the column "part" with the set name."""
    order = sorted(
        (row, number) for number, rows in enumerate(sets.values()) for row in range(rows.num_rows)
    )
    parts = list(sets.items())
    keys = [key for key in ("first", "second", "label") if key in parts[0][1].texts]
    texts: dict[str, Sequence[str]] = {
        key: [parts[number][1].texts[key][row] for row, number in order] for key in keys
    }
    texts["part"] = [parts[number][0] for _, number in order]
    return Rows(len(order), texts)

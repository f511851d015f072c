"""Labels, a class or a value: from cells to numbers, from predictions to labels. What labelled
texts look like: usual column names, and the classes, scores and files of known data sets.

GLUE: Wang et al., arXiv:1804.07461. Its test labels are not public, so scores here are dev scores,
as in most papers. XNLI: Conneau et al., arXiv:1809.05053. PAWS-X: Yang et al., arXiv:1908.11828.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xcloud.base.errors import DataError
from xcloud.base.wording import listed, quoted
from xcloud.contracts.model import DataSplit, Head
from xcloud.tasks.rows import OwnNames, RowTable
from xcloud.tasks.scores import LabelKind

# Cells, in lower case, that mark a missing label: SNLI has "-", GLUE's hidden labels are -1.
MISSING = frozenset({"", "-", "-1", "nan", "null", "<na>"})
VALUE_UNIT = 1e-6  # predictions are in these units; see Head
MAX_CLASSES = 1000
MAX_SHOWN = 30  # classes of which the first lines of a run tell the number of samples
MAX_DIGITS = 9  # of a label that is a number
UNSEEN = ("Cf", "Cc")  # categories of characters: format and control
_ALIKE = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u04bb\u0410\u0412"
    "\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0406\u0408\u0405"
    "\u03bf\u03bd\u03c1\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7"
    "\u2010\u2011\u2012\u2013\u2014\u2212\u2018\u2019\xb4`",
    # Pairs by place: each letter above stands for the one below it at the same place.
    "aeopcyxijshABEKMHOPCTYXIJSovpABEZHIKMNOPTYX------''''",
)
"""Letters of Cyrillic and Greek that look like Latin ones, dashes and quotes."""
ASKED = ". Is task.label_column right?"


def check_are_there(cells: Sequence[str], known: Benchmark, where: str) -> None:
    """Raise DataError if a label is missing. where: of these cells, in the order of the set."""
    # A class may be called "null" or "-", and -1 is a value among others.
    named = {*(known.classes or ()), *(["-1"] if known.kind == "value" else [])}
    missing = [n for n, cell in enumerate(cells) if plain(cell) in MISSING and cell not in named]
    if not missing:
        return
    cell = cells[missing[0]]
    said = f"{where}: {len(missing):,} of {len(cells):,} rows have no label; the first is row "
    said += f"{missing[0] + 1}, with {cell!r}. "
    # All of them missing is no slip in a row: the set's labels are hidden, or another column has
    # them.
    if len(missing) == len(cells) > 1:
        said += "If this set's labels are hidden, test on the dev set (task.data.test_file=dev or "
        raise DataError(f"{said}task.data.test=validation); else set task.label_column")
    said += "Remove these rows, in every cloud's file"
    if cell:
        said += f"; if {cell!r} is a class, name it and the others in task.classes"
    raise DataError(said)


@dataclass(frozen=True)
class LabelSet:
    """The meaning of a corpus's labels. names: of classes, in label order; None: numbers, such as
    similarities from 0 to 5, learned and scored unscaled. numbers: the class of each cell."""

    names: tuple[str, ...] | None
    numbers: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(
        known: Benchmark,
        cells: Mapping[DataSplit, Sequence[str]],
        train_set: Sequence[str],
        where: str,
    ) -> LabelSet:
        """Return what all cells of a corpus mean: names of classes, or else indices of them.

        train_set: the cells of the whole training set, which show the classes where they are not
            known: numbers 0..n-1 if all cells are numbers, else their names in alphabetical order.
        Raises DataError for an unknown label, and where some cells are names and others indices.
        """
        if known.kind == "value":
            return LabelSet(None)
        if known.classes is None:
            names = _classes_of(train_set, where=f"{where}, train")
        else:
            names = tuple(known.classes)
        by_name = {name: number for number, name in enumerate(names)}
        by_index = {str(number): number for number in range(len(names))}
        # Other words for a class have its number.
        for other, name in known.synonyms.items():
            by_name[other] = by_name[name]
        found = {split: set(of) for split, of in cells.items()}
        check_differ({*names}.union(*found.values()), meant=known.classes or (), where=where)
        the_classes = _some(names, most=MAX_SHOWN)
        # All cells by name, or all by number. Tried in this order: classes called "1" and "0" are
        # names.
        for numbers in (by_name, by_index):
            if all(of <= numbers.keys() for of in found.values()):
                return LabelSet(names, numbers)
        for split, of in found.items():
            if unknown := sorted(of - by_name.keys() - by_index.keys()):
                said = f"unknown labels: {_some(unknown)}; the classes are {the_classes}"
                if known.classes is None:
                    said += ", as in the training set; task.classes may name more"
                raise DataError(f"{where}, {split}: {said}{ASKED}")
        either = set[str]().union(*found.values())
        # Left are cells that only a name explains beside others that only a number does.
        only_names = sorted(either - by_index.keys())
        only_indices = sorted(either - by_name.keys())
        said = f"some labels are names of classes ({_some(only_names)}), others their numbers "
        said += f"({_some(only_indices)}); the classes are {the_classes}. Write one of the two"
        raise DataError(f"{where}: {said}, or set task.classes to the labels that there are")

    @property
    def head(self) -> Head:
        if self.names is None:
            return Head(kind="value", num_outputs=1)
        return Head(kind="classes", num_outputs=len(self.names))

    def parse(self, cells: Sequence[str], where: str) -> Tensor:
        """Return a number for each cell. Raises DataError for a value that is none."""
        if self.names is not None:
            return torch.tensor([self.numbers[cell] for cell in cells], dtype=torch.int64)
        values = []
        for number, cell in enumerate(cells, start=1):
            try:
                values.append(float(cell))
            except ValueError as error:
                said = f"row {number}: the label {quoted(cell)} is not a number{ASKED}"
                raise DataError(f"{where}, {said}") from error
        # Single precision, as predictions are.
        found = torch.tensor(values, dtype=torch.float32)
        if not found.isfinite().all():
            raise DataError(f"{where}: a label is not a finite number{ASKED}")
        return found

    def describe(self, labels: Tensor) -> str:
        """Return how often each class occurs, or between which values labels lie."""
        if self.names is None:
            low, high = torch.aminmax(labels)
            return f"values {float(low):.3g} to {float(high):.3g}"
        counts = torch.bincount(labels, minlength=len(self.names)).tolist()
        seen = [f"{n} {count:,}" for n, count in zip(self.names, counts, strict=True) if count]
        text = listed(seen[:MAX_SHOWN])
        # As many as a line can hold; a corpus may have a thousand classes.
        if len(seen) > MAX_SHOWN:
            text += f" and {len(seen) - MAX_SHOWN:,} more classes"
        if without := [n for n, count in zip(self.names, counts, strict=True) if not count]:
            text += f", none of {', '.join(without[:5])}"
            if len(without) > 5:
                text += f" and {len(without) - 5:,} more classes"
        # Where labels are indices that is said, since nobody has checked which name an index
        # means.
        if self.numbers.keys() >= {*self.names}:
            return text
        return f"{text}, by number"

    def read(self, prediction: Sequence[int]) -> float:
        """Convert a stage's prediction to a label value."""
        # Values travel as millionths, so that all predictions are whole numbers.
        return prediction[0] * (VALUE_UNIT if self.names is None else 1)

    def show(self, label: float) -> str:
        if self.names is None:
            return f"{label:.3g}"
        # A model may predict a class that the head has and the labels have not.
        if 0 <= label < len(self.names):
            return self.names[int(label)]
        return f"{label} (no class)"


def plain(label: str) -> str:
    """Return a label as a reader sees it, by which two that look alike are equal: without case,
    characters that are not seen, other forms of the same letters, and zeros before or behind a
    whole number."""
    # NFKC makes one of full-width and ordinary letters; after casefold some forms come apart
    # again, so it is done twice.
    composed = unicodedata.normalize("NFKC", label)
    seen = "".join(one for one in composed if unicodedata.category(one) not in UNSEEN)
    text = " ".join(unicodedata.normalize("NFKC", seen.casefold()).split())
    # "3", "3.0" and "03" are one class written by two programs.
    whole = re.fullmatch(r"(\d+)(\.0+)?", text)
    # Python refuses to read numbers of thousands of digits, which no label is.
    return str(int(whole[1][:MAX_DIGITS])) if whole and len(whole[1]) <= MAX_DIGITS else text


def check_differ(labels: Iterable[str], meant: Collection[str], where: str) -> None:
    """Raise DataError if two labels look alike, which are two classes by a slip.

    meant: the labels that somebody has named, which may look alike.
    """
    held: dict[str, str] = {}
    # Sorted, so that the message names the same pair in every cloud.
    for label in sorted(labels):
        # A label that looks like another in either way is one of the two.
        looks = (plain(label), _loosely(label))
        other = next((held[look] for look in looks if look in held), label)
        for look in looks:
            held.setdefault(look, label)
        # Both named in task.classes: somebody means two.
        if other != label and not {label, other} <= {*meant}:
            said = (
                f"the labels {_by_code(other)} and {_by_code(label)} look alike, and would be two"
            )
            said += (
                " classes. Write one of them in every file and cloud; if both are meant, name all"
            )
            raise DataError(f"{where}: {said} classes in task.classes")


def _loosely(label: str) -> str:
    """Return a label in which letters of other scripts that look like Latin ones, dashes, quotes,
    and what stands between two words are alike, and a whole number is its value, as a truth
    value is."""
    text = plain(unicodedata.normalize("NFKC", label).translate(_ALIKE))
    # Programs write a truth value as a word or as a number.
    text = {"true": "1", "false": "0"}.get(text, text)
    if re.fullmatch(r"[+-]?\d{1,9}(\.0*)?(e[+-]?\d{1,2})?", text):
        return f"{float(text) + 0.0:.15g}"  # + 0.0: no -0
    # "not relevant", "not_relevant" and "not-relevant" are one.
    return re.sub(r"(?<=[^\W_])[\s_-]+(?=[^\W_])", " ", text)


def _by_code(label: str) -> str:
    """Return a label with the code points of what is not ASCII in it."""
    odd = " ".join(f"U+{ord(one):04X}" for one in label if not " " <= one <= "~")
    return quoted(label) + (f" ({odd})" if odd else "")


def _classes_of(cells: Sequence[str], where: str) -> tuple[str, ...]:
    names = sorted(set(cells))
    if not 2 <= len(names) <= MAX_CLASSES:
        said = f"{len(names):,} different labels ({_some(names)}), not 2 to {MAX_CLASSES}"
        raise DataError(f"{where}: {said}{ASKED} For numeric targets set task.kind=value")
    # Numbers 0..n-1 are indices of classes, of which some may not occur in the training set.
    most = MAX_CLASSES
    if all(name.isdecimal() and len(name) <= MAX_DIGITS for name in names) and all(
        str(int(name)) == name for name in names
    ):  # else 01 is a code, and a name
        most = max(map(int, names))
    return tuple(map(str, range(most + 1)) if most < MAX_CLASSES else names)


def _some(cells: Sequence[str], most: int = 5) -> str:
    more = f", … ({len(cells):,} in all)" if len(cells) > most else ""
    return listed(map(quoted, cells[:most])) + more


@dataclass(frozen=True)
class Benchmark:
    """A kind of labelled texts, as far as it is known.

    classes: the classes in label order; None for values, and where only the training labels show
        them.
    metrics: the names of the metrics; None: the defaults of the kind (Classification.scores).
    num_texts: the numbers of texts that a sample may have.
    files, hub_splits: the sets that make up a split, with their part names.
    synonyms: other words for a class that its files have.
    hub, languages: the data set and the languages of a benchmark tested in several languages.
    """

    classes: Sequence[str] | None
    metrics: Sequence[str] | None
    num_texts: tuple[int, ...]
    files: OwnNames = field(default_factory=dict)
    hub_splits: OwnNames = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)
    hub: str = "nyu-mll/glue"
    languages: tuple[str, ...] = ()
    kind: LabelKind = "classes"

    def columns(self, table: RowTable, texts: Sequence[str], label: str | None) -> dict[str, str]:
        """Return the columns of a training set by use: first, perhaps second, and label; those
        given, or with usual names."""
        there = table.columns()
        described = f"{table.where} has the columns {listed(there)}"
        if table.where.endswith((".tsv", ".tsv.gz")):
            described += " by its first line, which names them"
        # Pairs first: a table with both sentences and a column "text" is one of pairs.
        usual = (*PAIRS, *((name,) for name in SINGLES))
        if not texts:
            fitting = (t for t in usual if set(t) <= set(there) and len(t) in self.num_texts)
            texts = next(fitting, ())
        if not texts:
            what = " or ".join(map(str, self.num_texts))
            said = f"none has a usual name for {what} text(s). Set task.text_columns=[NAME]"
            raise DataError(f"{described}; {said}")
        label = label or next((name for name in LABELS[self.kind] if name in there), None)
        if label is None:
            said = "none has a usual label name. Set task.label_column=NAME"
            raise DataError(f"{described}; {said}")
        # Checked for what was given and what was found alike.
        if missing := [name for name in (*texts, label) if name not in there]:
            raise DataError(f"{described}, but no {', '.join(missing)}; see {KEYS}")
        return {**dict(zip(("first", "second"), texts, strict=False)), "label": label}


ENTAILMENT = ("entailment", "not_entailment")
RELATIONS = ("entailment", "neutral", "contradiction")
GLUE: Mapping[str, Benchmark] = {
    "sst2": Benchmark(classes=("negative", "positive"), metrics=("accuracy",), num_texts=(1,)),
    "cola": Benchmark(
        classes=("unacceptable", "acceptable"),
        metrics=("matthews", "accuracy"),
        num_texts=(1,),
        files={
            "train": {"in_domain_train": ""},
            "dev": {"in_domain_dev": "", "out_of_domain_dev": ""},
        },
    ),
    "mrpc": Benchmark(
        classes=("not_equivalent", "equivalent"), metrics=("f1", "accuracy"), num_texts=(2,)
    ),
    "qnli": Benchmark(classes=ENTAILMENT, metrics=("accuracy",), num_texts=(2,)),
    "qqp": Benchmark(
        classes=("not_duplicate", "duplicate"), metrics=("f1", "accuracy"), num_texts=(2,)
    ),
    "stsb": Benchmark(classes=None, metrics=("pearson", "spearman"), num_texts=(2,), kind="value"),
    "mnli": Benchmark(
        classes=RELATIONS,
        metrics=("accuracy",),
        num_texts=(2,),
        files={"dev": {"dev_matched": "matched", "dev_mismatched": "mismatched"}},
        hub_splits={
            "dev": {"validation_matched": "matched", "validation_mismatched": "mismatched"}
        },
    ),
    "rte": Benchmark(classes=ENTAILMENT, metrics=("accuracy",), num_texts=(2,)),
    "wnli": Benchmark(
        classes=("not_entailment", "entailment"), metrics=("accuracy",), num_texts=(2,)
    ),
}
CROSS_LINGUAL: Mapping[str, Benchmark] = {
    "xnli": Benchmark(
        classes=RELATIONS,
        metrics=("accuracy",),
        num_texts=(2,),
        synonyms={"contradictory": "contradiction"},
        hub="facebook/xnli",
        languages=tuple("en ar bg de el es fr hi ru sw th tr ur vi zh".split()),
    ),
    "pawsx": Benchmark(
        classes=("different", "paraphrase"),
        metrics=("accuracy",),
        num_texts=(2,),
        hub="google-research-datasets/paws-x",
        languages=("en", "de", "es", "fr", "ja", "ko", "zh"),
    ),
}

KEYS = "task.text_columns and task.label_column"
PAIRS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"),
    ("premise", "hypothesis"), ("premise", "hypo"), ("#1 String", "#2 String"), ("text1", "text2"),
    ("text_a", "text_b"),
)  # fmt: skip
SINGLES = ("sentence", "text", "question", "review", "comment", "content")
LABELS: Mapping[LabelKind, Sequence[str]] = {
    "classes": ("label", "gold_label", "is_duplicate", "Quality", "class", "category"),
    "value": ("score", "similarity", "relatedness", "value", "label"),
}

"""Labels, a class or a value: from cells to numbers, from predictions to labels. What labelled
texts look like: usual column names, and the classes, scores and files of known data sets.

GLUE: Wang et al., arXiv:1804.07461. Its test labels are not public, so scores here are dev scores,
as in most papers. XNLI: Conneau et al., arXiv:1809.05053. PAWS-X: Yang et al., arXiv:1908.11828.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xcloud.base.errors import DataError
from xcloud.contracts.model import Head
from xcloud.tasks.rows import OwnNames, Table
from xcloud.tasks.scores import Kind

VALUE_UNIT = 1e-6  # predictions are in these units; see Head
MOST_CLASSES = 1000
ASKED = ". Is task.label_column right?"


@dataclass(frozen=True)
class Labels:
    """Named classes, of which a cell holds the name or its index in `names`. names None: numbers,
    such as similarities from 0 to 5, learned and scored unscaled."""

    names: tuple[str, ...] | None

    @staticmethod
    def of(known: Benchmark, cells: Sequence[str], where: str) -> Labels:
        """Where the classes are not known: numbers 0..n-1 if all cells are numbers, else their
        names in alphabetical order."""
        if known.classes is not None or known.kind == "value":
            return Labels(None if known.classes is None else tuple(known.classes))
        names = sorted(set(cells))
        if not 2 <= len(names) <= MOST_CLASSES:
            said = f"{len(names):,} different labels ({_some(names)}), not 2 to {MOST_CLASSES}"
            raise DataError(f"{where}: {said}{ASKED} For numeric targets set task.kind=value")
        most = max(map(int, names)) if all(map(str.isdecimal, names)) else MOST_CLASSES
        return Labels(tuple(map(str, range(most + 1)) if most < MOST_CLASSES else names))

    @property
    def head(self) -> Head:
        return Head("value", 1) if self.names is None else Head("classes", len(self.names))

    def parse(self, cells: Sequence[str], where: str) -> Tensor:
        """One number per cell. Raises DataError for an invalid label."""
        if self.names is None:
            try:
                values = torch.tensor([float(cell) for cell in cells], dtype=torch.float32)
            except ValueError as error:
                raise DataError(f"{where}: a label is not a number ({error}){ASKED}") from error
            if not values.isfinite().all():
                raise DataError(f"{where}: a label is not a finite number{ASKED}")
            return values
        known = {str(number): number for number in range(len(self.names))}
        known |= {name: number for number, name in enumerate(self.names)}
        if unknown := set(cells) - known.keys():
            hidden = "; -1 hides a label: test on the dev set (task.test_file=dev or "
            hidden = f"{hidden}task.test=validation)" if unknown == {"-1"} else ASKED
            said = f"{_some(sorted(unknown))}; the classes are {', '.join(self.names[:20])}"
            raise DataError(f"{where}: unknown labels: {said}{hidden}")
        return torch.tensor([known[cell] for cell in cells], dtype=torch.int64)

    def read(self, prediction: Sequence[int]) -> float:
        """Convert a stage's prediction to a label value."""
        return prediction[0] * (VALUE_UNIT if self.names is None else 1)

    def show(self, label: float) -> str:
        if self.names is None:
            return f"{label:.3g}"
        return self.names[int(label)] if 0 <= label < len(self.names) else f"{label} (no class)"


def _some(cells: Sequence[str]) -> str:
    return ", ".join(map(repr, cells[:5])) + (", …" if len(cells) > 5 else "")


@dataclass(frozen=True)
class Benchmark:
    """What is known of labelled texts. classes: in label order; None for values, and where only
    the training labels show them. metrics: None: the defaults of the kind (metrics_of).
    num_texts: that a sample may have. files, hub_splits: the sets that make up a split, with their
    part names. hub, languages: of one tested in several languages."""

    classes: Sequence[str] | None
    metrics: Sequence[str] | None
    num_texts: tuple[int, ...]
    files: OwnNames = field(default_factory=dict)
    hub_splits: OwnNames = field(default_factory=dict)
    hub: str = "nyu-mll/glue"
    languages: tuple[str, ...] = ()
    kind: Kind = "classes"

    def columns(self, table: Table, texts: Sequence[str], label: str | None) -> dict[str, str]:
        """first, perhaps second, and label -> column of a training set, those given or with usual
        names."""
        there = table.columns()
        described = f"{table.where} has the columns {', '.join(there) or 'none'}"
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
        if missing := [name for name in (*texts, label) if name not in there]:
            raise DataError(f"{described}, but no {', '.join(missing)}; see {KEYS}")
        return {**dict(zip(("first", "second"), texts, strict=False)), "label": label}


ENTAILMENT = ("entailment", "not_entailment")
RELATIONS = ("entailment", "neutral", "contradiction")
GLUE: Mapping[str, Benchmark] = {
    "sst2": Benchmark(("negative", "positive"), ("accuracy",), (1,)),
    "cola": Benchmark(
        ("unacceptable", "acceptable"), ("matthews", "accuracy"), (1,),
        {"train": {"in_domain_train": ""}, "dev": {"in_domain_dev": "", "out_of_domain_dev": ""}},
    ),
    "mrpc": Benchmark(("not_equivalent", "equivalent"), ("f1", "accuracy"), (2,)),
    "qnli": Benchmark(ENTAILMENT, ("accuracy",), (2,)),
    "qqp": Benchmark(("not_duplicate", "duplicate"), ("f1", "accuracy"), (2,)),
    "stsb": Benchmark(None, ("pearson", "spearman"), (2,), kind="value"),
    "mnli": Benchmark(
        RELATIONS, ("accuracy",), (2,),
        {"dev": {"dev_matched": "matched", "dev_mismatched": "mismatched"}},
        {"dev": {"validation_matched": "matched", "validation_mismatched": "mismatched"}},
    ),
    "rte": Benchmark(ENTAILMENT, ("accuracy",), (2,)),
    "wnli": Benchmark(("not_entailment", "entailment"), ("accuracy",), (2,)),
}  # fmt: skip
CROSS_LINGUAL: Mapping[str, Benchmark] = {
    "xnli": Benchmark(
        RELATIONS, ("accuracy",), (2,), hub="facebook/xnli",
        languages=("en", "ar", "bg", "de", "el", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur",
                   "vi", "zh"),
    ),
    "pawsx": Benchmark(
        ("different", "paraphrase"), ("accuracy",), (2,), hub="google-research-datasets/paws-x",
        languages=("en", "de", "es", "fr", "ja", "ko", "zh"),
    ),
}  # fmt: skip

KEYS = "task.text_columns and task.label_column"
PAIRS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("question", "sentence"),
    ("premise", "hypothesis"), ("#1 String", "#2 String"), ("text1", "text2"),
    ("text_a", "text_b"),
)  # fmt: skip
SINGLES = ("sentence", "text", "question", "review", "comment", "content")
LABELS: Mapping[Kind, Sequence[str]] = {
    "classes": ("label", "gold_label", "is_duplicate", "Quality", "class", "category"),
    "value": ("score", "similarity", "relatedness", "value", "label"),
}

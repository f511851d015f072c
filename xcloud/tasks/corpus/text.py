"""The rows a corpus returns, and deterministic sampling of rows. No file formats here.

Row numbers mean the same pair in every cloud, so no rule here may depend on one side's text.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.task import Split

SPLITS: tuple[Split, ...] = ("train", "dev", "test")


@dataclass(frozen=True)
class Rows:
    """The texts of one split by column; only visible columns are included."""

    num_rows: int
    texts: Mapping[str, Sequence[str]]

    def take(self, numbers: Sequence[int]) -> Rows:
        texts = {language: [side[i] for i in numbers] for language, side in self.texts.items()}
        return Rows(len(numbers), texts)

    @staticmethod
    def joined(parts: Iterable[Rows]) -> Rows:
        parts = list(parts)
        languages = parts[0].texts if parts else ()
        texts = {lang: [text for part in parts for text in part.texts[lang]] for lang in languages}
        return Rows(sum(part.num_rows for part in parts), texts)


@dataclass(frozen=True)
class Parallel:
    """A corpus as one rank sees it.

    remarks: how the splits were made, for the user.
    agreed: what must be equal in all clouds besides row counts; contains no private text.
    monolingual: texts of visible languages that are part of no pair.
    """

    name: str
    splits: Mapping[Split, Rows]
    remarks: Sequence[str] = ()
    agreed: Mapping[str, object] = field(default_factory=dict)
    monolingual: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def texts(self, language: str) -> list[str]:
        """All that may be learned from without translations: of the training pairs and others."""
        return [*self.splits["train"].texts[language], *self.monolingual.get(language, ())]


class Corpus(Protocol):
    """A source of sentence pairs. Frozen, validated on construction, reads only in `read`."""

    def describe(self) -> str:
        """A short name, without reading anything."""

    def check(self, source: str, target: str) -> None:
        """Quick check: raise DataError if files are missing. Reads no text, uses no network."""

    def read(self, source: str, target: str, visible: frozenset[str]) -> Parallel:
        """Texts of the `visible` ones among the languages (source, target). Raises DataError."""


def chosen_rows(num_rows: int, wanted: int, seed: int) -> list[int]:
    """A seeded sample of `wanted` row numbers below num_rows, ascending."""
    draw = random.Random(seed).random  # random() alone: the same on every Python version
    keys = [draw() for _ in range(num_rows)]
    return sorted(sorted(range(num_rows), key=keys.__getitem__)[:wanted])


def limit(rows: Rows, most: int | None, seed: int) -> Rows:
    """At most `most` rows: a seeded sample by row number, in file order."""
    if most is None or rows.num_rows <= most:
        return rows
    return rows.take(chosen_rows(rows.num_rows, most, seed))


@dataclass(frozen=True)
class Sampling:
    """What to hold out if a corpus has no dev or test split, and how many rows to keep.

    dev_share, test_share: a row count (500) or a fraction of the training rows (0.02).
    Rows are drawn by number with the corpus's own `seed`: all experiment seeds are scored on the
    same sentences, and every cloud draws the same rows.
    """

    dev_share: int | float = 0.02
    test_share: int | float = 0.02
    max_train_pairs: int | None = None
    max_eval_pairs: int | None = None
    seed: int = 0
    unit: Literal["pairs", "samples"] = "pairs"  # what users call a row

    def __post_init__(self) -> None:
        for name in ("dev_share", "test_share"):
            share = getattr(self, name)
            rows = isinstance(share, int) and not isinstance(share, bool) and share >= 1
            if not rows and not (isinstance(share, float) and 0 < share < 0.5):
                raise ConfigError(
                    f"task.{name} must be a row count such as 500 or a share above 0 and below "
                    f"0.5 such as 0.02, got {share!r}"
                )
        for part, most in (("train", self.max_train_pairs), ("eval", self.max_eval_pairs)):
            if most is not None:
                check_int(f"task.max_{part}_{self.unit}", most, 1)
        check_int("task.split_seed", self.seed, 0)

    def apply(
        self, splits: Mapping[Split, Rows], where: str
    ) -> tuple[dict[Split, Rows], list[str]]:
        """All three splits, and a remark for each one held out of train or sampled."""
        result, remarks, train = dict(splits), [], splits["train"]
        for split, rows in self.held_out(splits, train.num_rows, where).items():
            result[split] = train.take(rows)
            if split != "train":
                remarks.append(f"{split} held out of train, seed {self.seed}")
        for split in SPLITS:
            most = self.max_train_pairs if split == "train" else self.max_eval_pairs
            before = result[split].num_rows
            result[split] = limit(result[split], most, self.seed)
            if result[split].num_rows < before:
                remarks.append(f"{split}: a sample of its {before:,} rows, seed {self.seed}")
        return result, remarks

    def held_out(
        self, there: Container[Split], num_rows: int, where: str, unit: str = "rows"
    ) -> dict[Split, list[int]]:
        """Row numbers of train for each missing split and, last, for the remaining train; empty if
        none is missing. Raises DataError if train has too few rows."""
        shares: dict[Split, int | float] = {"dev": self.dev_share, "test": self.test_share}
        wanted = {
            split: share if isinstance(share, int) else max(1, int(share * num_rows))
            for split, share in shares.items()
            if split not in there
        }
        if not wanted:
            return {}
        if sum(wanted.values()) >= num_rows:
            raise DataError(
                f"{where}: {' and '.join(wanted)} need {sum(wanted.values()):,} {unit}, but train "
                f"has {num_rows:,}; lower {' and '.join(f'task.{s}_share' for s in wanted)}"
            )
        result: dict[Split, list[int]] = {}
        left = list(range(num_rows))
        for split, count in wanted.items():
            positions = set(chosen_rows(len(left), count, self.seed))
            result[split] = [row for i, row in enumerate(left) if i in positions]
            left = [row for i, row in enumerate(left) if i not in positions]
        return {**result, "train": left}

"""Reviews, answers, inferences and stories of xcloud/demo_corpus as understanding corpora: no
download, no files.

Labels are drawn independently for each sample: a fixed order would reveal labels to a cloud that
sees only sample numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError
from xcloud.contracts.task import Split
from xcloud.demo_corpus import STORY_QUESTIONS, Story, answers, inferences, reviews, stories
from xcloud.tasks.corpus.labelled import Sets, interleaved
from xcloud.tasks.corpus.text import SPLITS, Parallel, Rows

T = TypeVar("T")
MAX_SAMPLES = 100_000  # of a split
LANGUAGES = ("en", "es")


@dataclass(frozen=True)
class DemoSizes:
    """Split sizes and the corpus seed, which is independent of the experiment's seed."""

    num_train: int = 8_000
    num_dev: int = 500
    num_test: int = 1_000
    seed: int = 7

    def __post_init__(self) -> None:
        for name in ("num_train", "num_dev", "num_test"):
            check_int(f"task.{name}", getattr(self, name), 1, MAX_SAMPLES)
        check_int("task.corpus_seed", self.seed, 0)

    @property
    def total(self) -> int:
        return self.num_train + self.num_dev + self.num_test

    def cut(self, samples: Sequence[T]) -> dict[Split, Sequence[T]]:
        ends = (self.num_train, self.num_train + self.num_dev)
        return {"train": samples[: ends[0]], "dev": samples[slice(*ends)],
                "test": samples[ends[1] : self.total]}  # fmt: skip

    def parallel(self, name: str, splits: Mapping[Split, Rows], samples: object) -> Parallel:
        # The text is public, so a digest of it can show that all clouds run the same grammar.
        digest = hashlib.sha256(repr(samples).encode()).hexdigest()
        return Parallel(name, splits, [f"seed {self.seed}"], {"demo": digest, "seed": self.seed})


def rows_of(samples: Sequence[tuple[str, ...]], visible: frozenset[str]) -> Rows:
    """Visible columns of samples (first text, perhaps a second, label)."""
    *texts, labels = map(list, zip(*samples, strict=True))
    columns = dict(zip(("first", "second"), texts, strict=False)) if "text" in visible else {}
    return Rows(len(samples), columns | ({"label": labels} if "label" in visible else {}))


@dataclass(frozen=True)
class DemoReviews:
    """One-sentence film reviews; label 1 is positive, 0 negative."""

    sizes: DemoSizes = DemoSizes()

    def describe(self) -> str:
        return "demo film reviews"

    def check(self) -> None:
        """Nothing to check."""

    def read(self, visible: frozenset[str]) -> Parallel:
        samples = reviews(self.sizes.total, self.sizes.seed)
        rows = [(text, str(int(positive))) for text, positive in samples]
        splits = {split: rows_of(part, visible) for split, part in self.sizes.cut(rows).items()}
        return self.sizes.parallel(self.describe(), splits, samples)


@dataclass(frozen=True)
class DemoAnswers:
    """Question and sentence; entailment if the sentence answers the question."""

    sizes: DemoSizes = DemoSizes()

    def describe(self) -> str:
        return "demo questions and sentences"

    def check(self) -> None:
        """Nothing to check."""

    def read(self, visible: frozenset[str]) -> Parallel:
        samples = answers(self.sizes.total, self.sizes.seed)
        rows = [(q, s, "entailment" if y else "not_entailment") for q, s, y in samples]
        splits = {split: rows_of(part, visible) for split, part in self.sizes.cut(rows).items()}
        return self.sizes.parallel(self.describe(), splits, samples)


@dataclass(frozen=True)
class DemoInference:
    """Premise and hypothesis in English and Spanish: trained in one, tested in both. The test
    set has num_test pairs per language."""

    sizes: DemoSizes = DemoSizes()
    train_language: str = "en"
    languages: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for language in (self.train_language, *(self.languages or ())):
            if language not in LANGUAGES:
                raise ConfigError(
                    f"the demo has the languages {', '.join(LANGUAGES)}, got {language!r}; for "
                    "others set profile=files and task.path"
                )
        if self.languages is not None and not self.languages:
            raise ConfigError("task.languages must name at least one language, or be null for all")

    def describe(self) -> str:
        return "demo inference"

    def check(self) -> None:
        """Nothing to check."""

    def read(self, visible: frozenset[str]) -> Parallel:
        samples = inferences(self.sizes.total, self.sizes.seed)
        cut = self.sizes.cut(samples)

        def rows(split: Split, language: str) -> Rows:
            return rows_of([(*pair[language], relation) for pair, relation in cut[split]], visible)

        here = self.train_language
        tested = self.languages or sorted(LANGUAGES, key=lambda x: (x != here, x))
        tests: Sets = {language: rows("test", language) for language in tested}
        splits: dict[Split, Rows] = {
            "train": rows("train", here), "dev": rows("dev", here), "test": interleaved(tests)
        }  # fmt: skip
        return self.sizes.parallel(self.describe(), splits, samples)


def demo_stories(sizes: DemoSizes) -> dict[Split, Sequence[Story]]:
    """Paragraphs with STORY_QUESTIONS questions each; sizes count questions, rounded up."""
    counts = {s: math.ceil(getattr(sizes, f"num_{s}") / STORY_QUESTIONS) for s in SPLITS}
    samples = stories(sum(counts.values()), sizes.seed)
    rounded = DemoSizes(counts["train"], counts["dev"], counts["test"], sizes.seed)
    return rounded.cut(samples)

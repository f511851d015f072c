"""The tasks on the texts of xcloud/demo_corpus: no download, no files.

The text is public, so a digest of it can show that all clouds run the same grammar. Labels are
drawn independently for each sample: a fixed order would reveal labels to a cloud that sees only
sample numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, Positive, settings
from xcloud.contracts.task import SPLITS, Split
from xcloud.demo_corpus import (
    MAX_PAIRS,
    STORY_QUESTIONS,
    answers,
    inferences,
    pairs,
    reviews,
    stories,
)
from xcloud.tasks.classification import Classification, CrossLingual
from xcloud.tasks.corpus.rows import Form, Source, SplitTables, Table, check_columns
from xcloud.tasks.language_modelling import LanguageModelling
from xcloud.tasks.question_answering import QuestionAnswering
from xcloud.tasks.translation import Translation

Size = Annotated[int, Field(ge=1, le=100_000)]


@dataclass(frozen=True)
class Given:
    """A Table in memory."""

    where: str
    cells: Mapping[str, Sequence[Any]]

    def columns(self) -> list[str]:
        return list(self.cells)

    def rows(self, columns: Sequence[str], keys: str) -> list[tuple[Any, ...]]:
        """See Table."""
        check_columns(self, columns, keys)
        if not columns:
            return [()] * len(next(iter(self.cells.values())))
        return list(zip(*(self.cells[name] for name in columns), strict=True))


class Demo(Source):
    """A generated corpus: the same for the same seed, whatever the experiment's."""

    where = "demo"
    title: ClassVar[str]
    order: ClassVar[Sequence[Split]] = SPLITS  # in which splits take their rows

    def source_name(self) -> str:
        return self.title

    def check_source(self, form: Form) -> None:
        """Nothing to check."""

    def facts(self, **more: object) -> Mapping[str, object]:
        """Without columns, which are always the same."""
        return super().facts()

    @property
    def counts(self) -> dict[Split, int]:
        """Rows of each split."""
        return {split: getattr(self, f"num_{split}") for split in SPLITS}

    def tables(self, columns: Mapping[str, Sequence[Any]]) -> dict[Split, dict[str, list[Table]]]:
        """Cut columns into consecutive splits."""
        result: dict[Split, dict[str, list[Table]]] = {}
        start = 0
        for split in self.order:
            part = slice(start, start + self.counts[split])
            cells = {name: column[part] for name, column in columns.items()}
            result[split] = {"": [Given(f"demo, {split}", cells)]}
            start = part.stop
        return result


@settings("task", kw_only=True)
class DemoSized(Demo):
    """num_train, num_dev, num_test: rows of each split."""

    num_train: Size = 8_000
    num_dev: Size = 500
    num_test: Size = 1_000
    corpus_seed: NotNegative = 7

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def generated(
        self, columns: Mapping[str, Sequence[Any]], samples: object, **facts: object
    ) -> SplitTables:
        """The splits, of all columns. samples: the texts to agree on, beside `facts`."""
        facts["demo"] = hashlib.sha256(repr(samples).encode()).hexdigest()
        return SplitTables(self.tables(columns), facts, [f"seed {self.corpus_seed}"])


@settings("task", kw_only=True)
class DemoTranslation(Demo, Translation):
    """`num_pairs` different sentence pairs of 4 to 25 words, train, dev and test together.

    No sentence occurs twice in either language, so the splits are disjoint. The same seed gives
    the same pairs on every machine, whatever the experiment's seed.

    num_monolingual: further sentences in each language that have no translation in the other and
    occur in no pair: texts for tokenizers and for backbones to be pretrained on.
    """

    title = "demo grammar"
    num_pairs: Positive = 24_000
    num_dev: Positive = 1_000
    num_test: Positive = 1_000
    num_monolingual: NotNegative = 0
    corpus_seed: NotNegative = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most = self.num_dev + self.num_test + 1, MAX_PAIRS - 2 * self.num_monolingual
        if not least <= self.num_pairs <= most:
            raise ConfigError(
                f"task.num_pairs must be {least}..{most}: at least one more than task.num_dev and "
                "task.num_test together, and at most what twice task.num_monolingual leaves of "
                f"{MAX_PAIRS}; got {self.num_pairs}"
            )

    @property
    def num_train(self) -> int:
        return self.num_pairs - self.num_dev - self.num_test

    def check_source(self, form: Form) -> None:
        if {self.source, self.target} != {"es", "en"}:
            raise ConfigError(
                f"the demo grammar has es and en only, got source={self.source!r}, "
                f"target={self.target!r}; for other languages set profile=files and task.path"
            )

    def find(self, form: Form) -> SplitTables:
        self.check_source(form)
        num, extra = self.num_pairs, self.num_monolingual
        every = pairs(num + 2 * extra, self.corpus_seed)
        sides = {"es": [es for es, _ in every], "en": [en for _, en in every]}
        digest = hashlib.sha256("\n".join(es + "\t" + en for es, en in every).encode())
        facts = {"demo_grammar": digest.hexdigest(), "seed": self.corpus_seed}
        remarks = [f"{extra:,} further sentences in each language"] if extra else []
        # Of the other pairs one half lends its Spanish, the other half its English.
        further = {"es": sides["es"][num : num + extra], "en": sides["en"][num + extra :]}
        remarks.append(f"seed {self.corpus_seed}")
        return SplitTables(self.tables(sides), facts, remarks, further=further)


@settings("task", kw_only=True)
class DemoClassification(DemoSized, Classification):
    """Film reviews (label 1 is positive, 0 negative), also for sst2; for qnli questions with
    sentences (entailment if the sentence answers the question)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name not in ("classification", "sst2", "qnli"):
            raise ConfigError(
                f"task.name={self.name}: the demo has sst2 and qnli only; for {self.name} use "
                "profile=files with task.path=DIR, or profile=paper"
            )

    def source_name(self) -> str:
        return "demo questions and sentences" if self.name == "qnli" else "demo film reviews"

    def find(self, form: Form) -> SplitTables:
        if self.name != "qnli":
            samples = reviews(self.total, self.corpus_seed)
            label = [str(int(positive)) for _, positive in samples]
            columns = {"sentence": [text for text, _ in samples], "label": label}
            return self.generated(columns, samples, seed=self.corpus_seed)
        asked = answers(self.total, self.corpus_seed)
        columns = {
            "question": [question for question, _, _ in asked],
            "sentence": [sentence for _, sentence, _ in asked],
            "label": ["entailment" if yes else "not_entailment" for _, _, yes in asked],
        }
        return self.generated(columns, asked, seed=self.corpus_seed)


@settings("task", kw_only=True)
class DemoCrossLingual(DemoSized, CrossLingual):
    """Premise and hypothesis in English and Spanish: trained in one, tested in both. The test
    set has num_test pairs per language."""

    title = "demo inference"
    train_language: Literal["en", "es"] = "en"
    languages: Annotated[Sequence[Literal["en", "es"]], Field(min_length=1)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name != "xnli":
            raise ConfigError(f"task.name={self.name}: the demo has xnli only; use profile=files")

    def find(self, form: Form) -> SplitTables:
        samples, here = inferences(self.total, self.corpus_seed), self.train_language
        columns = {
            language: {
                "premise": [texts[language][0] for texts, _ in samples],
                "hypothesis": [texts[language][1] for texts, _ in samples],
                "label": [relation for _, relation in samples],
            }
            for language in (str(here), "es" if here == "en" else "en")
        }
        test = {x: self.tables(columns[x])["test"][""] for x in self.languages or columns}
        made = self.generated(columns[here], samples, seed=self.corpus_seed)
        return replace(made, tables={**made.tables, "test": test})


@settings("task", kw_only=True)
class DemoQuestionAnswering(DemoSized, QuestionAnswering):
    """Short generated stories with three questions each; the sizes count questions, rounded up."""

    title = "demo stories"
    num_train: Size = 3_000
    num_dev: Size = 300
    num_test: Size = 900

    @property
    def counts(self) -> dict[Split, int]:
        return {s: math.ceil(n / STORY_QUESTIONS) for s, n in super().counts.items()}

    def find(self, form: Form) -> SplitTables:
        told = stories(self.total, self.corpus_seed)
        asked = [
            [
                {"question": question, "answers": [{"text": answer, "start": start}]}
                for question, answer, start in story.questions
            ]
            for story in told
        ]
        ends = [sum(list(self.counts.values())[:n]) for n in range(len(SPLITS) + 1)]
        by_split = {s: told[ends[n] : ends[n + 1]] for n, s in enumerate(SPLITS)}
        return self.generated({"context": [story.text for story in told], "qas": asked}, by_split)


@settings("task", kw_only=True)
class DemoLanguageModelling(DemoSized, LanguageModelling):
    """Embedded English paragraphs of four events."""

    title = "demo stories"
    order = ("dev", "test", "train")
    num_train: Size = 3_000
    num_dev: Size = 200
    num_test: Size = 400

    def find(self, form: Form) -> SplitTables:
        texts = [story.text for story in stories(self.total, self.corpus_seed)]
        return SplitTables(self.tables({"text": texts}), {})

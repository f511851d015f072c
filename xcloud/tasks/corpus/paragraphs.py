"""Paragraphs with questions whose answers stand in them: SQuAD 1.1, XQuAD. Knows no tokens.

    train.jsonl      one paragraph a line: {"context": …, "qas": [{"id", "question", "answers"}]},
                     an answer being its text, or {"text": …, "start": first character}
    train-v1.1.json  the official form, {"data": [{"paragraphs": [{"context", "qas"}]}]}
An answer without a place is looked for in the text; its first place as whole words counts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from xcloud.errors import ConfigError, DataError
from xcloud.tasks.corpus.demo_labelled import DemoSizes, demo_stories
from xcloud.tasks.corpus.files import (
    DEV_NAMES,
    Names,
    TextFile,
    choose_files,
    is_usual_name,
    patterns_of,
    read_lines,
)
from xcloud.tasks.corpus.hub import BATCH_ROWS, check_hub, is_local, load_hub
from xcloud.tasks.corpus.labelled_files import list_tables
from xcloud.tasks.corpus.text import SPLITS, Sampling, chosen_rows
from xcloud.tasks.task import Split

EXPECTED = "train.jsonl (a paragraph a line) or train-v1.1.json"
VERSION = re.compile(r"-v\d+(\.\d+)*$")


class Question(NamedTuple):
    """answers: (text, its first character in the context); none where they may not be seen."""

    ident: str
    text: str
    answers: tuple[tuple[str, int], ...]


class Paragraph(NamedTuple):
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Reading:
    """A corpus of paragraphs. remarks, agreed: as in Parallel."""

    name: str
    splits: Mapping[Split, Sequence[Paragraph]]
    remarks: Sequence[str] = ()
    agreed: Mapping[str, object] = field(default_factory=dict)


class ParagraphCorpus(Protocol):
    """Where paragraphs come from. Frozen, checked when built, reads nothing before `read`."""

    def describe(self) -> str: ...

    def check(self) -> None:
        """Raise DataError at once if data is missing."""

    def read(self) -> Reading:
        """Raises DataError."""


@dataclass(frozen=True)
class ParagraphFiles:
    """A folder with train, dev and test files, told by their names (dev-v1.1.json counts too).

    sampling: shares are of paragraphs, so that no context is in two splits; limits are questions.
    """

    path: str
    train_file: Names = None
    dev_file: Names = None
    test_file: Names = None
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError("task.path must name the folder that holds the corpus")
        for name in ("train_file", "dev_file", "test_file"):
            patterns_of(getattr(self, name), f"task.{name}")

    def describe(self) -> str:
        return f"files in {Path(self.path).expanduser().resolve().name}"

    def check(self) -> None:
        self._chosen()

    def read(self) -> Reading:
        chosen = self._chosen()
        splits: dict[Split, Sequence[Paragraph]] = {}
        for split, files in chosen.items():
            splits[split] = [p for file in files for p in read_paragraphs(file.paths[""])]
        found, remarks = arranged(splits, self.sampling, str(Path(self.path).expanduser()))
        names = {split: [file.name for file in files] for split, files in chosen.items()}
        return Reading(
            self.describe(), found, remarks, {"files": names, "sampling": repr(self.sampling)}
        )

    def _chosen(self) -> dict[Split, list[TextFile]]:
        folder = Path(self.path).expanduser()
        asked: dict[Split, Names] = {
            "train": self.train_file, "dev": self.dev_file, "test": self.test_file
        }  # fmt: skip
        files = [file for file in list_tables(folder, EXPECTED) if file.kind == "json"]
        return choose_files(folder, files, asked, _is_usual, EXPECTED)


@dataclass(frozen=True)
class ParagraphHub:
    """A data set in the hub's form of SQuAD: one question a row; see LabelledHub."""

    name: str
    config: str | None = None
    revision: str | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError("task.path must be a hub id such as owner/name, or a folder")

    def describe(self) -> str:
        return Path(self.name).name if is_local(self.name) else self.name

    def check(self) -> None:
        check_hub(self.name, self.config, self.revision)

    def read(self) -> Reading:
        loaded: Mapping[str, Any] = load_hub(self.name, self.config, self.revision)
        splits: dict[Split, Sequence[Paragraph]] = {}
        for split in SPLITS:
            usual = DEV_NAMES if split == "dev" else (split,)
            found = next((name for name in usual if name in loaded), None)
            if found is not None:
                splits[split] = _grouped(loaded[found], f"{self.name}, split {found}")
        if "train" not in splits:
            raise DataError(f"{self.name}: no split train; there are: {', '.join(loaded)}")
        rows, remarks = arranged(splits, self.sampling, self.name)
        agreed = {
            "config": self.config,
            "revision": self.revision,
            "sampling": repr(self.sampling),
        }
        return Reading(self.describe(), rows, remarks, agreed)


@dataclass(frozen=True)
class DemoParagraphs:
    """Small stories made by a grammar, with three questions each; sizes count questions."""

    sizes: DemoSizes = field(default_factory=lambda: DemoSizes(3_000, 300, 900))

    def describe(self) -> str:
        return "demo stories"

    def check(self) -> None:
        """Nothing can be missing."""

    def read(self) -> Reading:
        splits: dict[Split, Sequence[Paragraph]] = {}
        stories_of = demo_stories(self.sizes, 3)
        for split, stories in stories_of.items():
            splits[split] = [
                Paragraph(
                    told.text,
                    tuple(
                        Question(f"{split}{number}.{i}", asked, ((answer, start),))
                        for i, (asked, answer, start) in enumerate(told.questions)
                    ),
                )
                for number, told in enumerate(stories)
            ]
        # The text is public, so its digest may show that two clouds run the same grammar.
        digest = hashlib.sha256(repr(stories_of).encode()).hexdigest()
        remarks = [f"seed {self.sizes.seed}"]
        return Reading(self.describe(), splits, remarks, {"demo": digest})


def arranged(
    splits: Mapping[Split, Sequence[Paragraph]], sampling: Sampling, where: str
) -> tuple[dict[Split, Sequence[Paragraph]], list[str]]:
    """As labelled.arranged: without a test set the dev set is the test, and dev is held out of
    train, by paragraph."""
    found, remarks = dict(splits), []
    if "test" not in found and "dev" in found:
        found["test"] = found.pop("dev")
        remarks.append("test: the dev set, for no other one is there")
    train = found["train"]
    if not train:
        raise DataError(f"{where}: the training set has no paragraphs")
    shares = {"dev": sampling.dev_share, "test": sampling.test_share}
    for split in SPLITS:
        if split in found:
            continue
        share = shares[split]
        count = share if isinstance(share, int) else max(1, int(share * len(splits["train"])))
        if count >= len(train):
            raise DataError(
                f"{where}: {split} needs {count} paragraphs, but train has {len(train)}; lower "
                f"task.{split}_share"
            )
        held = set(chosen_rows(len(train), count, sampling.seed))
        found[split] = [paragraph for i, paragraph in enumerate(train) if i in held]
        train = found["train"] = [p for i, p in enumerate(train) if i not in held]
        remarks.append(f"{split}: {count} paragraphs held out of train, seed {sampling.seed}")
    for split in SPLITS:
        most = sampling.max_train_pairs if split == "train" else sampling.max_eval_pairs
        before = num_questions(found[split])
        if most is not None and most < before:
            found[split] = _sampled(found[split], before, most, sampling.seed)
            remarks.append(f"{split}: a sample of its {before:,} questions, seed {sampling.seed}")
    return found, remarks


def num_questions(paragraphs: Iterable[Paragraph]) -> int:
    return sum(len(paragraph.questions) for paragraph in paragraphs)


def _sampled(paragraphs: Sequence[Paragraph], there: int, most: int, seed: int) -> list[Paragraph]:
    chosen, number, kept = set(chosen_rows(there, most, seed)), 0, []
    for paragraph in paragraphs:
        count = len(paragraph.questions)
        questions = tuple(q for i, q in enumerate(paragraph.questions) if number + i in chosen)
        number += count
        if questions:
            kept.append(Paragraph(paragraph.context, questions))
    return kept


def read_paragraphs(path: Path) -> list[Paragraph]:
    """Of a .jsonl or of an official .json file, plain or gzipped."""
    found: list[Paragraph] = []
    if path.name.removesuffix(".gz").endswith(".json"):
        try:
            whole = json.loads("\n".join(read_lines(path)))
            rows = [row for article in whole["data"] for row in article["paragraphs"]]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}: not of the form {{"data": [{{"paragraphs": [...]}}]}} ({error!r}); '
                "a file with one paragraph a line must be named .jsonl"
            ) from error
        return [_paragraph(row, f"{path}, paragraph {i}") for i, row in enumerate(rows, start=1)]
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error.msg})") from error
        found.append(_paragraph(row, f"{path}, line {number}"))
    return found


def _paragraph(row: Any, where: str) -> Paragraph:
    try:
        context, questions = row["context"], []
        for number, qa in enumerate(row["qas"]):
            places = [_place(context, answer) for answer in qa["answers"]]
            if not places:
                raise DataError(
                    f"{where}: the question {qa['question']!r} has no answer; SQuAD 2.0's "
                    "unanswerable questions are not supported"
                )
            if None in places:
                missing = qa["answers"][places.index(None)]
                raise DataError(f"{where}: the answer {missing!r} is not in its context there")
            known = tuple(place for place in places if place is not None)
            questions.append(Question(str(qa.get("id", number)), qa["question"], known))
        return Paragraph(context, tuple(questions))
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f'{where}: expected {{"context", "qas": [{{"id", "question", "answers"}}]}}, but '
            f"{error!r}"
        ) from error


def _place(context: str, answer: Any) -> tuple[str, int] | None:
    """The answer's text and its place; None if it is not there."""
    if isinstance(answer, str):
        text, start = answer, None
    else:
        text, start = answer["text"], answer.get("start", answer.get("answer_start"))
    if start is not None:
        return (text, start) if context[start : start + len(text)] == text else None
    whole = re.search(rf"(?<!\w){re.escape(text)}(?!\w)", context)
    at = whole.start() if whole else context.find(text)
    return (text, at) if text and at >= 0 else None


def _grouped(dataset: Any, where: str) -> list[Paragraph]:
    """Rows of one question each; neighbours with the same context are one paragraph."""
    found: list[tuple[str, list[Question]]] = []
    try:
        for batch in dataset.iter(batch_size=BATCH_ROWS):
            columns = (batch[name] for name in ("id", "context", "question", "answers"))
            for ident, context, asked, answers in zip(*columns, strict=True):
                pairs = zip(answers["text"], answers["answer_start"], strict=True)
                if not found or found[-1][0] != context:
                    found.append((context, []))
                found[-1][1].append(Question(ident, asked, tuple(pairs)))
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{where}: expected the columns id, context, question and answers (text, "
            f"answer_start), but {error!r}"
        ) from error
    return [Paragraph(context, tuple(questions)) for context, questions in found]


def _is_usual(name: str, split: Split) -> bool:
    return is_usual_name(VERSION.sub("", name), split)

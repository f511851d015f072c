"""Extractive question answering (SQuAD 1.1): windows, spans and scores.

A sample is a window: the question and as much of the paragraph as fits. A long paragraph yields
several overlapping windows; the answer is the best-scoring span over all windows of a question.

Rows of a source (SQuAD 1.1, XQuAD) are one of
    context, qas                  a paragraph: [{"question", "answers"}], an answer being its text,
                                  or {"text": …, "start": character offset}
    context, question, answers    the same in columns
Answers may also be {"text": […], "answer_start": […]}, as on the hub. An answer without a start
is placed at its first whole-word occurrence.

Shapes: B samples (windows), S positions, N windows of a split.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
import torch

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Positive, settings
from xcloud.base.wording import quoted
from xcloud.contracts.model import SPLITS, Answers, Cut, DataSplit, Head, Scores
from xcloud.demo import STORY_QUESTIONS, stories
from xcloud.tasks.rows import Corpus, Demo, Form, Rows, RowTable, Size, SplitTables, check_columns
from xcloud.tasks.scores import bootstrap_error, exact_match, ratio_error, word_f1
from xcloud.tasks.text_task import PairTable, TextTask, View, counted, public_tokenizer
from xcloud.tasks.tokenizer import PretrainedTokenizer, Tokenizer, TokenizerChoice

KEYS = "task.data.path: a data set in the format of SQuAD"
FORMS = (
    'Expected {"context", "qas": [{"question", "answers"}]}, or the columns context, question, '
    'answers; answers are a list of texts or of {"text", "start"}, or {"text": […], '
    '"answer_start": […]}'
)
IMPOSSIBLE = "is_impossible"  # of a question of SQuAD 2.0, whatever answers stand beside it
MIN_CONTEXT = 8  # paragraph tokens per window


def rows_of(table: RowTable) -> Rows:
    """Read a row a question: its context, its answers [(text, character offset in the context)],
    and its paragraph as its group, so that no two splits share a context. Raises DataError."""
    texts: dict[str, list[Any]] = {"group": [], "context": [], "question": [], "answers": []}
    for where, context, question, given in _asked(table):
        for what, value in (("context", context), ("question", question)):
            if not isinstance(value, str):
                raise DataError(f"{where}: {what} is {quoted(value)}, which is no text. {FORMS}")
        # () marks a question that has no answer, whatever stands under answers.
        answers = _answers(given, where=where) if given != () else []
        if not answers:
            said = "has no answer; SQuAD 2.0's unanswerable questions are not supported"
            raise DataError(f"{where}: the question {quoted(question)} {said}")
        places = [_place(context, answer=one, where=where) for one in answers]
        for column, cell in zip(texts.values(), (where, context, question, places), strict=True):
            column.append(cell)
    return Rows(num_rows=len(texts["group"]), texts=texts)


def used_keys(table: RowTable) -> tuple[str, ...]:
    if "qas" in table.columns():
        return ("context", "qas")
    return ("context", "question", "answers", IMPOSSIBLE)


def _asked(table: RowTable) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the paragraph, for messages, its context, a question and its answers. Rows of one
    question share a paragraph if their contexts are equal and consecutive."""
    columns = [key for key in used_keys(table) if key != IMPOSSIBLE]
    number = 0
    before = None
    for context, *rest, impossible in table.rows(columns, KEYS, optional=(IMPOSSIBLE,)):
        if "qas" in columns:
            # One row is a paragraph with all its questions, as in SQuAD's own files.
            number += 1
            where = f"{table.where}, paragraph {number}"
            (asked,) = rest
            if not isinstance(asked, list):
                raise DataError(f"{where}: qas is {quoted(asked)}, which is no list. {FORMS}")
            for one in asked:
                if not isinstance(one, dict) or not {"question", "answers"} <= one.keys():
                    raise DataError(f"{where}: qas has {quoted(one)}. {FORMS}")
                answers = () if one.get(IMPOSSIBLE) else one["answers"]
                yield where, context, one["question"], answers
        else:
            # Columns of the hub: rows of one paragraph stand behind each other.
            number += context != before
            before = context
            question, answers = rest
            where = f"{table.where}, paragraph {number}"
            yield (
                where,
                context,
                question,
                # As a .tsv and a .jsonl have it.
                () if impossible in (True, "True", "true", "1") else answers,
            )


def _answers(given: Any, where: str) -> list[Any]:
    """Return answers as a list of texts, or of objects with a text and where it starts: given as
    such a list, as one of them, or as an object of two lists."""
    found = given
    if isinstance(given, dict):
        texts = given.get("text")
        starts = given.get("answer_start", given.get("start"))
        # Lists side by side, as on the hub; `datasets` stores lists of objects so.
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            pairs = zip(texts, starts, strict=True)
            found = [{"text": text, "start": start} for text, start in pairs]
        elif isinstance(texts, list) and starts is None:
            found = texts
        else:
            found = [given]
    elif isinstance(given, str):
        found = [given]
    if not isinstance(found, list):
        raise DataError(f"{where}: answers is {quoted(given)}. {FORMS}")
    return found


def _place(context: str, answer: Any, where: str) -> tuple[str, int]:
    text = answer
    start = None
    if isinstance(answer, dict):
        text = answer.get("text")
        start = answer.get("start", answer.get("answer_start"))
    if not isinstance(text, str) or not (start is None or type(start) is int):
        raise DataError(f"{where}: the answer {quoted(answer)} is of another form. {FORMS}")
    if start is None:
        # Without a place the answer is looked for as a whole word first: "art" does not stand in
        # "party".
        whole = re.search(rf"(?<!\w){re.escape(text)}(?!\w)", context)
        start = whole.start() if whole else context.find(text)
    # The place must hold the answer's text: offsets in bytes, say, would teach other words.
    if text == "" or start < 0 or context[start : start + len(text)] != text:
        raise DataError(
            f"{where}: the answer {quoted(answer)} is not at that place in its context"
        )
    return text, start


@dataclass(frozen=True)
class Windows:
    """The windows of a split, in question order.

    asked: the questions.
    question_of: the question of each window, [N].
    starts: the number of the first paragraph token of each window, [N].
    offsets: the half-open character span of every token, by paragraph.
    num_long: the number of questions that were truncated.
    """

    table: PairTable
    asked: Rows
    question_of: Sequence[int]
    starts: Sequence[int]
    offsets: Mapping[str, Sequence[tuple[int, int]]]
    num_long: int

    @staticmethod
    def of(
        asked: Rows, tokenizer: Tokenizer, max_length: int, max_question: int, stride: int
    ) -> Windows:
        """Cut paragraphs into windows.

        max_length: tokens per window, special ids and question included; questions are
        truncated to max_question. stride: tokens between the starts of consecutive windows."""
        # A paragraph is encoded once for all its questions.
        contexts = list(dict.fromkeys(asked.texts["context"]))
        encoded = dict(zip(contexts, tokenizer.reader.encode_with_offsets(contexts), strict=True))
        questions = tokenizer.encode(asked.texts["question"])
        room = max_length - PairTable.num_special(True, num_separators=tokenizer.num_separators)
        made = []
        for number, context in enumerate(asked.texts["context"]):
            ids, _ = encoded[context]
            if not ids:
                raise DataError(f"a paragraph has no words: {quoted(context)}")
            head = questions[number][:max_question]
            fits = room - len(head)
            # Windows overlap, so that an answer at the end of one stands inside the next.
            for start in window_starts(len(ids), fits, stride):
                made.append((head, ids[start : start + fits], number, start))
        # A rank that sees no text makes none.
        heads, parts, question_of, starts = zip(*made, strict=True) if made else ([],) * 4
        special = tokenizer.token_ids
        separators = tokenizer.num_separators
        table = PairTable(
            firsts=heads,
            seconds=parts,
            max_length=max_length,
            special=special,
            num_separators=separators,
        )
        offsets = {context: spans for context, (_, spans) in encoded.items()}
        num_long = sum(len(question) > max_question for question in questions)
        return Windows(
            table, asked, question_of, starts=starts, offsets=offsets, num_long=num_long
        )

    def label(self, window: int) -> tuple[int, int, int]:
        """Return positions of the first answer's first and last token in this window (0 and 0 if
        not fully inside), and of the paragraph's first token."""
        begin, end, tokens = self._place(window)
        text, first_char = self.asked.texts["answers"][self.question_of[window]][0]
        # Spans are half-open: the first token that ends behind the answer's beginning, and the
        # last that begins before its end.
        first = bisect_right(tokens, first_char, key=itemgetter(1))  # ends after it
        last = bisect_left(tokens, first_char + len(text), key=itemgetter(0)) - 1
        # From tokens of the paragraph to positions in this window.
        shift = begin - self.starts[window]
        # An answer that a window holds in part is no label there: it stands whole in the next one.
        inside = begin <= first + shift <= last + shift < end
        if inside:
            return (first + shift, last + shift, begin)
        return (0, 0, begin)

    def answer(self, window: int, first: int, last: int) -> str:
        """Return the text from position to position; empty if it begins outside the paragraph."""
        begin, end, tokens = self._place(window)
        # A span that reaches beyond the paragraph ends with it.
        last = min(last, end - 1)
        if not begin <= first <= last:
            return ""
        shift = begin - self.starts[window]
        context: str = self.asked.texts["context"][self.question_of[window]]
        return context[tokens[first - shift][0] : tokens[last - shift][1]].strip()

    def _place(self, window: int) -> tuple[int, int, Sequence[tuple[int, int]]]:
        """Return the half-open range of positions of paragraph tokens, and its spans."""
        begin = self.table.second_at[window]
        length = len(self.table.tokens[window])
        context = self.asked.texts["context"][self.question_of[window]]
        return begin, length - 1, self.offsets[context]


def window_starts(length: int, fits: int, stride: int) -> list[int]:
    """Return start tokens of windows of `fits` tokens that cover a text of `length` tokens."""
    # A stride larger than a window would leave tokens out.
    step = min(stride, fits)
    return list(range(0, max(0, length - fits) + step, step))


@settings("task", kw_only=True)
class QuestionAnswering(TextTask):
    """The span of a paragraph that answers a question, to be found.

    max_length: tokens per window, question and special ids included. max_question: longer
    questions are truncated. stride: tokens between the starts of consecutive windows.
    tokenizer: a public tokenizer, the same in every cloud that reads text.
    sizes: windows per split. Shares and splits count paragraphs, so that splits share no context;
    limits count questions, which are the rows.

    Answers cannot be located or scored without their paragraph: a rank that reads labels must also
    read the text, as when the first and the last stage have one owner.
    """

    answers: ClassVar[Answers] = "span"
    name: ClassVar[str] = "squad"
    agreed_names: ClassVar[tuple[str, ...]] = ("max_question", "stride")
    form: ClassVar[Form] = Form(
        expected="train.jsonl (a paragraph a line) or train-v1.1.json",
        rows="questions on paragraphs",
        endings={"jsonl": "json", "json": "squad"},
        version=re.compile(r"-v\d+(\.\d+)*$"),  # dev-v1.1.json
    )
    tokenizer: TokenizerChoice = PretrainedTokenizer("minilm")
    max_length: Positive = 384
    max_question: Positive = 64
    stride: Positive = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        # Two separators, as RoBERTa has them: the longest case.
        least = self.max_question + PairTable.num_special(True, num_separators=2) + MIN_CONTEXT
        if self.max_length < least:
            asked = f"a question of task.max_question={self.max_question} tokens and some of the "
            said = f"too short for {asked}paragraph; set it to at least {least}"
            raise ConfigError(f"task.max_length is {self.max_length}, {said}")

    def check_tables(self, tables: SplitTables) -> None:
        for table in (table for parts in tables.tables.values() for table in parts[""]):
            check_columns(table, wanted=used_keys(table), keys=KEYS)

    def read(self, fields: frozenset[str]) -> Corpus:
        return self.arrange(
            self.data.find(self.form), rows_of=rows_of, used=used_keys, dev_as_test=True
        )

    def view(self, corpus: Corpus, fields: frozenset[str]) -> QuestionAnsweringData:
        return QuestionAnsweringData(task=self, corpus=corpus, fields=fields)

    def load(self, fields: frozenset[str], seed: int) -> View[Any]:
        if "label" in fields and not fields & {"text", "types"}:
            raise ConfigError(
                f"{self.name}: a rank of this layout reads labels but not text, without which no "
                "answer can be located or scored. Give the first and the last stage to one owner, "
                "as in cluster.clouds={owner: {stages: [0, 2]}, other: {stages: [1]}}"
            )
        return super().load(fields, seed)


class QuestionAnsweringData(View[QuestionAnswering]):
    """One rank's view (TaskData): everything, or only the sizes if it sees no field."""

    def __init__(self, task: QuestionAnswering, corpus: Corpus, fields: frozenset[str]) -> None:
        windows: dict[DataSplit, Windows] = {}
        tokenizers = {}
        # A rank that sees no field has read only counts.
        if corpus.splits["train"].texts:
            tokenizers["text"] = tokenizer = public_tokenizer(
                task.tokenizer, cache_dir=task.cache_dir
            )
            lengths = (task.max_length, task.max_question, task.stride)
            windows = {s: Windows.of(corpus.splits[s], tokenizer, *lengths) for s in SPLITS}
        sizes = {split: len(made.starts) for split, made in windows.items()}
        columns: dict[str, dict[DataSplit, Any]] = {name: {} for name in task.fields}
        cuts: dict[str, dict[DataSplit, Cut]] = {"questions cut": {}, "answers in no window": {}}
        for split, made in windows.items():
            labels = [made.label(i) for i in range(sizes[split])]
            num = made.asked.num_rows
            cuts["questions cut"][split] = Cut(
                num=made.num_long, of=num, setting="task.max_question"
            )
            # Position 0 is bos, where no answer begins.
            seen = {q for q, (first, *_) in zip(made.question_of, labels, strict=True) if first}
            if num and not seen:
                said = f"no window of {split} holds a full answer to any of its {num:,} questions"
                raise DataError(f"{task.describe()}: {said}; raise task.max_length")
            outside = Cut(num=num - len(seen), of=num, setting="task.max_length, task.stride")
            cuts["answers in no window"][split] = outside
            found = (made.table.tokens, made.table.types(), torch.tensor(labels))
            # In the order of the task's fields: text, types, label.
            for column, cells in zip(columns.values(), found, strict=True):
                column[split] = cells
        self.windows = windows if fields else {}
        self.head = Head(kind="span", num_outputs=2) if "label" in fields else None
        remarks = [f"windows of the questions {counted(corpus.counts)}"] if self.windows else []
        super().__init__(task, corpus, fields, tokenizers, columns, sizes, remarks, cuts=cuts)

    def sentences(self, field: str) -> Sequence[Sequence[int]]:
        """Return training questions and the paragraph parts of their windows."""
        self.tokenizer(field)
        windows = self.windows["train"]
        texts = [windows.table.texts(i) for i in range(self._rows["train"])]
        # The last window of a question stays, as its question is the same in all.
        questions = dict(zip(windows.question_of, texts, strict=True))
        return [text[0] for text in questions.values()] + [text[1] for text in texts]

    def score(self, split: DataSplit, predictions: dict[int, list[int]]) -> Scores:
        """Return F1 and exact match in percent, over questions with a window in `predictions`: of
        each the best span over all windows."""
        self.check_predictions(split, predictions)
        # question -> window
        windows = self.windows[split]
        best = dict[int, int]()
        # Sorted, and replaced only by a better one, so that of equal ones the first window counts.
        for window in sorted(predictions):
            held = best.setdefault(windows.question_of[window], window)
            if predictions[window][2] > predictions[held][2]:
                best[windows.question_of[window]] = window
        samples: dict[int, dict[str, Any]] = {}
        for question, window in best.items():
            answer = windows.answer(window, *predictions[window][:2])
            references = [text for text, _ in windows.asked.texts["answers"][question]]
            texts = {"prediction": answer, "reference": references[0]}
            f1 = word_f1(answer, references)
            exact = exact_match(answer, references)
            samples[question] = {**texts, "f1": f1, "exact_match": exact}
        found = {k: np.array([one[k] for one in samples.values()]) for k in ("f1", "exact_match")}
        values = {name: float(each.mean()) for name, each in found.items()}
        f1_N = found["f1"]
        # counts are never all zero: as many questions are drawn as there are.
        error = bootstrap_error(
            len(f1_N), measure=lambda counts: float(np.average(f1_N, weights=counts))
        )
        errors = {"f1": error, "exact_match": ratio_error(found["exact_match"], below=1)}
        return Scores(values, errors, samples)

    def signature(self) -> dict[str, str]:
        compared = "lowercase, without punctuation and articles; the best reference counts"
        return {
            "f1": f"F1 of words, mean over questions, percent; {compared}",
            "exact_match": f"share of exact answers, percent; {compared}",
        }

    def shown(self, split: DataSplit, ident: int) -> Mapping[str, str]:
        return {"question": self.windows[split].asked.texts["question"][ident]}


@settings("task.data", kw_only=True)
class DemoQuestions(Demo):
    """Short generated stories with three questions each.

    num_train, num_dev, num_test: the number of questions of each split, rounded up to whole
        stories.
    """

    rows = "questions on paragraphs"
    title = "demo stories"
    num_train: Size = 3_000
    num_dev: Size = 300
    num_test: Size = 900

    @property
    def counts(self) -> dict[DataSplit, int]:
        return {s: math.ceil(n / STORY_QUESTIONS) for s, n in super().counts.items()}

    def find(self, form: Form) -> SplitTables:
        # A story has as many questions for each split, so whole stories are counted.
        told = stories(self.total)
        rows = []
        for one in told:
            asked = [(q, [{"text": text, "start": at}]) for q, text, at in one.questions]
            rows.append((one.text, [{"question": q, "answers": said} for q, said in asked]))
        return self.generated(("context", "qas"), rows, samples=told)

"""Preferences: pairs of a chosen and a rejected answer to one prompt, plain texts or chats.

Rows (rows.py) have the columns "prompt", "chosen" and "rejected": three texts, or three lists of
messages; and "given", what a template gets beside them (tools, documents). A sample is a pair: two
documents, the chosen one first. Its batch fields are those of language_modelling.py, and only
answers are to be guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import PositiveFloat, settings
from xcloud.base.wording import listed, quoted
from xcloud.contracts.model import NO_LABEL, DataSplit, Scores
from xcloud.demo import NUM_ROWS, reviews
from xcloud.tasks.language_modelling import (
    CHAT_KEYS,
    GIVEN,
    SYSTEM,
    CausalTokenizer,
    Chat,
    Document,
    Fitted,
    LanguageData,
    LanguageModelling,
    Messages,
    check_is_readable,
    given_of,
    is_chat,
    messages_of,
    with_system,
)
from xcloud.tasks.rows import Corpus, Demo, Form, Rows, RowTable, Size, SplitTables, digest_of
from xcloud.tasks.scores import ratio_error
from xcloud.tasks.text_task import check_visible

PROMPT = "prompt"
CHOSEN = "chosen"
REJECTED = "rejected"
COLUMNS = (PROMPT, CHOSEN, REJECTED, GIVEN)
MILLIONTHS = 1e6  # of a nat: what is predicted
KEYS = "task.data.path: pairs"
FORMS = (
    'A line is {"prompt": …, "chosen": …, "rejected": …}: three texts, or three lists of messages '
    '{"role": …, "content": …}; or it has no prompt, and two chats that begin alike'
)
BEGINNING = 3  # words of a review that make a prompt

EMPTY = "an answer is empty"
EQUAL = "both answers are equal"
SAME_TOKENS = "both answers are the same tokens"
UNANSWERED = "an answer has no message of the role 'assistant'"
MIRRORED = "the same pair is also there the other way round"


class Pair(NamedTuple):
    """A prompt with two answers: texts, or lists of messages. given: as in Chat."""

    prompt: Any
    chosen: Any
    rejected: Any
    given: Mapping[str, Any]


@settings("task", kw_only=True)
class Preferences(LanguageModelling):
    """Pairs of answers to one prompt, of which one is to become more probable than the other,
    against the model as it was at the start of the run.

    loss = -log sigmoid(beta * ((log p - log p_0)(chosen) - (log p - log p_0)(rejected)))
    with log p the sum over an answer's tokens. Source: Rafailov et al., arXiv:2305.18290, eq. 7.

    beta: the cost of departing from the model of the start. With less, the model may depart
        further.
    max_length: the largest number of tokens of a pair, which are its prompt twice and both
        answers. A longer pair is left out.
    """

    name: ClassVar[str] = "preferences"
    form: ClassVar[Form] = Form(
        expected="train.jsonl (prompt, chosen, rejected)",
        rows="pairs of answers",
        endings={"jsonl": "json"},
    )
    unit: ClassVar[str] = "pairs"
    beta: PositiveFloat = 0.1

    def used_keys(self, table: RowTable) -> tuple[str, ...]:
        return (PROMPT, CHOSEN, REJECTED, *CHAT_KEYS)

    def rows_of(self, table: RowTable) -> Rows:
        """Return the pairs of a table, one a row. Raises DataError for rows of another form."""
        pairs = [
            # Row by row, so that an error names its row.
            _pair(cells, where=f"{table.where}, row {number}")
            for number, cells in enumerate(_cells(table), start=1)
        ]
        check_is_readable(table)
        # Whether texts repeat their prompt shows in all rows together, so it is asked behind the
        # last one.
        pairs = _without_prompts(pairs)
        columns = zip(*pairs, strict=True) if pairs else [()] * len(COLUMNS)
        texts = {name: list(column) for name, column in zip(COLUMNS, columns, strict=True)}
        return Rows(num_rows=len(pairs), texts=texts)

    def useless_of(self, rows: Rows) -> dict[int, str]:
        pairs = _pairs(rows)
        # Digests of all pairs, of which one that stands there the other way round is looked for.
        said = {_words(pair, swapped=False) for pair in pairs}
        reasons = ((number, _useless(pair, said)) for number, pair in enumerate(pairs))
        return {number: reason for number, reason in reasons if reason is not None}

    def check_tables(self, tables: SplitTables) -> None:
        for parts in tables.tables.values():
            for table in parts[""]:
                # The first row only; ranks read the rest.
                for cells in islice(_cells(table), 1):
                    _pair(cells, where=f"{table.where}, row 1")

    def chats(self, rows: Rows) -> list[Chat]:
        # A pair of plain texts has no chat.
        every = (_chats(pair) for pair in _pairs(rows) if isinstance(pair.prompt, list))
        return [chat for both in every for chat in both]

    def samples(
        self, tokenizer: CausalTokenizer, rows: Rows, where: str
    ) -> tuple[list[list[Document]], Fitted]:
        """Return the two documents of each pair that fits whole; a part of an answer says nothing
        of which is better."""
        pairs = _pairs(rows)
        remarks = tokenizer.check_is_written(self.chats(rows), where)
        useless = Counter[str]()
        num_long = 0
        samples = []
        for number, pair in enumerate(pairs):
            place = f"{where}, pair {number + 1}"
            both = [
                _document(tokenizer, pair, answer, where=place, max_length=self.max_length)
                for answer in (pair.chosen, pair.rejected)
            ]
            # Both answers stand in one sample, each behind its own copy of the prompt.
            fits = sum(len(document.ids) for document in both) <= self.max_length
            if not (fits and all(any(document.learned[1:]) for document in both)):
                num_long += 1
            # Texts that differ may be the same tokens: spaces that the tokenizer drops, or what a
            # template strips.
            elif both[0].ids == both[1].ids:
                useless[SAME_TOKENS] += 1
            else:
                # A sample is a pair, never packed with another: a reward is of one pair.
                samples.append([document._replace(number=number) for document in both])
        if not samples:
            reasons = [f"{num:,} teach nothing, as {reason}" for reason, num in useless.items()]
            if num_long:
                reasons.append(
                    f"{num_long:,} do not fit into task.max_length={self.max_length} with their "
                    "prompt twice and both answers: raise it"
                )
            said_of = f"none of {rows.num_rows:,} pairs can be learned"
            raise DataError(f"{where}: {said_of}: {'; '.join(reasons)}")
        return samples, Fitted(
            pieces=[document for pair in samples for document in pair],
            num=rows.num_rows,
            num_cut=0,
            num_left_out=num_long,
            useless=useless,
            remarks=remarks,
        )

    def test_chats(self, num: int) -> list[Chat]:
        """Return the first chats of the test set, each with the chosen answer."""
        pairs = _pairs(self.read(frozenset({"text"})).splits["test"])
        return [_chats(pair)[0] for pair in pairs[:num]]

    def view(self, corpus: Corpus, fields: frozenset[str]) -> PreferenceData:
        return PreferenceData(task=self, corpus=corpus, fields=fields)


def _pairs(rows: Rows) -> list[Pair]:
    return [Pair(*of) for of in zip(*(rows.texts[name] for name in COLUMNS), strict=True)]


def _cells(table: RowTable) -> Iterator[dict[str, Any]]:
    """Yield the cells of each row by name. Raises DataError if a table lacks an answer."""
    there = table.columns()
    if not {CHOSEN, REJECTED} <= {*there}:
        raise DataError(f"{table.where}: its keys are {listed(there)}. {FORMS}")
    columns = [name for name in (PROMPT, CHOSEN, REJECTED) if name in there]
    for row in table.rows(columns, KEYS, optional=CHAT_KEYS):
        yield dict(zip((*columns, *CHAT_KEYS), row, strict=True))


def _pair(cells: Mapping[str, Any], where: str) -> Pair:
    """Return a row as a pair. Raises DataError for another form. Of two chats the prompt is what
    both begin with, unless it stands apart; if both repeat it, it is taken off."""
    prompt = cells.get(PROMPT)
    chosen = cells[CHOSEN]
    rejected = cells[REJECTED]
    system = cells.get(SYSTEM)
    given = given_of(cells, where)
    # Three texts: the prompt stands apart, and nothing has to be looked for.
    if all(isinstance(cell, str) for cell in (prompt, chosen, rejected)):
        if system or given:
            name = SYSTEM if system else next(iter(given))
            raise DataError(
                f"{where}: its key {name!r} belongs to chats, and these are plain texts. Write it "
                "into prompt, or make lists of messages of prompt, chosen and rejected"
            )
        return Pair(prompt, chosen, rejected, {})
    if not (is_chat(chosen) and is_chat(rejected)):
        raise DataError(f"{where}: it is of another form. {FORMS}")
    answers = [messages_of(cell, where, forms=FORMS) for cell in (chosen, rejected)]
    asked: Messages
    if prompt and is_chat(prompt):
        asked = messages_of(prompt, where, forms=FORMS)
        # Some data sets write the whole chat in both answers and the prompt beside it.
        repeats = [answer[: len(asked)] == asked for answer in answers]
        if any(repeats) and not all(repeats):
            raise DataError(f"{where}: one answer repeats the prompt, and the other does not")
        if all(repeats):
            answers = [answer[len(asked) :] for answer in answers]
    else:
        # Two chats begin alike up to where their answers differ.
        both = zip(*answers, strict=False)
        asked = [two[0] for two in takewhile(lambda two: two[0] == two[1], both)]
        answers = [answer[len(asked) :] for answer in answers]
        if not asked:
            raise DataError(f"{where}: it is of another form. {FORMS}")
        # Then the prompt is usually the text of the last question.
        if prompt and prompt not in [message["content"] for message in asked]:
            said = (
                f"its prompt {quoted(prompt)} is none of the messages that both chats begin with"
            )
            raise DataError(f"{where}: {said}")
    # Behind the prompt, so that it goes before what both have in common.
    if isinstance(system, str) and system.strip():
        asked = with_system(system, messages=asked, where=where)
    elif system:
        raise DataError(f"{where}: system is {quoted(system)}, which is no text")
    return Pair(list(asked), answers[0], answers[1], given)


def _without_prompts(pairs: list[Pair]) -> list[Pair]:
    """Return pairs of plain texts whose answers do not repeat the prompt, where all of a file
    do."""
    texts = [pair for pair in pairs if isinstance(pair.prompt, str)]
    # In all pairs, as a single answer may well begin like its prompt.
    if not texts or not all(
        pair.prompt.strip() and answer.startswith(pair.prompt)
        for pair in texts
        for answer in (pair.chosen, pair.rejected)
    ):
        return pairs
    return [
        pair._replace(
            chosen=pair.chosen.removeprefix(pair.prompt),
            rejected=pair.rejected.removeprefix(pair.prompt),
        )
        for pair in pairs
    ]


def _words(pair: Pair, swapped: bool) -> str:
    """Return the digest of what a pair says, whatever blanks stand around its answers.

    swapped: true if the rejected answer comes first.
    """
    answers = [_stripped(pair.chosen), _stripped(pair.rejected)]
    # The digest of the pair the other way round is that of this one with its answers exchanged.
    if swapped:
        answers.reverse()
    return digest_of([pair.prompt, dict(pair.given), *answers])


def _stripped(answer: Any) -> Any:
    if isinstance(answer, str):
        return answer.strip()
    return [{**message, "content": message["content"].strip()} for message in answer]


def _useless(pair: Pair, said: Collection[str]) -> str | None:
    """Return the reason why nothing can be learned from a pair; None if something can.

    said: the digests of all pairs of the set, as `_words` returns them.
    """
    answers = [_stripped(pair.chosen), _stripped(pair.rejected)]
    if answers[0] == answers[1]:
        return EQUAL
    # In a chat the answer may consist of several messages, such as the call of a tool and what
    # came of it.
    for answer in answers:
        if not isinstance(answer, str) and all(one["role"] != "assistant" for one in answer):
            return UNANSWERED
        texts = (
            [answer]
            if isinstance(answer, str)
            else [one["content"] or one.get("tool_calls") for one in answer]
        )
        if not any(texts):
            return EMPTY
    return MIRRORED if _words(pair, swapped=True) in said else None


def _chats(pair: Pair) -> list[Chat]:
    """Return the prompt with each of its answers."""
    both = (pair.chosen, pair.rejected)
    return [Chat([*pair.prompt, *answer], given=pair.given) for answer in both]


def _document(
    tokenizer: CausalTokenizer, pair: Pair, answer: Any, where: str, max_length: int
) -> Document:
    """Return a prompt with one of its answers, which alone is to be guessed."""
    if isinstance(pair.prompt, str):
        return tokenizer.continued(pair.prompt, answer)
    tokenizer.learns_chats = True
    messages = [*pair.prompt, *answer]
    return tokenizer.chat(
        messages, where, num_given=len(pair.prompt), given=pair.given, max_length=max_length
    )


class PreferenceData(LanguageData):
    """One rank's view of pairs (TaskData).

    reference: the predictions of the model of the start, by split and sample
        (CausalStage.predict), in a rank that scores. They are set before the first step.
    """

    def __init__(self, task: Preferences, corpus: Corpus, fields: frozenset[str]) -> None:
        super().__init__(task, corpus=corpus, fields=fields)
        self.beta = task.beta
        self.reference: dict[DataSplit, Mapping[int, Sequence[int]]] = {}

    def weight(self, ids: Tensor) -> float:
        check_visible("label", there=self._fields)
        return float(len(ids))

    def score(self, split: DataSplit, predictions: dict[int, list[int]]) -> Scores:
        """Return how often the chosen answer has the larger reward, by how much, what the chosen
        one gained, and the loss; errors are over pairs. Predicted are millionths of a nat and
        tokens of each answer."""
        self.check_predictions(split, predictions)
        order = sorted(predictions)
        nats = nats_of([predictions[i] for i in order])
        # What the model of the start gave the same answers; it is taken once, and both are of the
        # same tokens.
        start_nats = nats_of([self.reference[split][i] for i in order])
        # log p = -nats, so what a sequence gained is the nats of the start less those of now.
        rewards = self.beta * (start_nats - nats)
        margins = rewards[:, 0] - rewards[:, 1]
        columns = {
            # A tie is half a hit, as it is by tossing a coin.
            "reward_accuracy": 50 * (1 + np.sign(margins)),
            "reward_margin": margins,
            "chosen_reward": rewards[:, 0],
            # -log sigmoid(x) = log(1 + exp(-x)), without overflow for large x.
            "loss": np.logaddexp(0, -margins),
        }
        spread = {name: ratio_error(column, below=1) for name, column in columns.items()}
        samples = {
            i: {"margin": float(margin), "chosen_reward": float(reward)}
            for i, margin, reward in zip(order, margins, rewards[:, 0], strict=True)
        }
        return Scores(
            values={name: float(column.mean()) for name, column in columns.items()},
            errors=spread,
            samples=samples,
        )

    def signature(self) -> dict[str, str]:
        reward = f"{self.beta} x gain in log-probability of an answer since the start"
        return {
            "reward_accuracy": "pairs whose chosen answer has the larger reward, ties half, "
            f"percent; reward: {reward}",
            "reward_margin": f"reward of the chosen answer less that of the other, mean; {reward}",
            "chosen_reward": f"mean; {reward}",
            "loss": "mean of -log sigmoid(reward margin)",
        }

    def _documents_of(self, split: DataSplit, ident: int) -> Iterator[dict[str, list[int]]]:
        """Yield a pair: tokens by the names that they are shown under. Two answers without their
        prompt say nothing."""
        if "text" not in self._fields:
            return
        columns = [self._columns[name][split] for name in self._task.fields]
        texts, types, labels = (list(map(int, column[ident])) for column in columns)
        given = [token == NO_LABEL for token in labels]
        # The first label stands at the last token of the prompt.
        shown = {PROMPT: texts[: given.index(False) + 1]}
        for number, name in enumerate((CHOSEN, REJECTED)):
            # Types tell the two answers of a sample apart.
            rows = zip(labels, types, strict=True)
            shown[name] = [t for t, type_ in rows if type_ == number and t != NO_LABEL]
        yield shown


def nats_of(predictions: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Return the nats of both answers of each pair, float64 [B, 2]."""
    found = np.reshape(predictions, (-1, 2, 2))[:, :, 0] / MILLIONTHS
    return np.where(found < 0, np.nan, found)  # NOT_FINITE


@settings("task.data", kw_only=True)
class DemoAnswers(Demo):
    """Embedded film reviews: the prompt is how two begin, the chosen answer goes on in praise, the
    rejected one in blame.

    num_train, num_dev, num_test: the number of pairs of each split.
    """

    rows = "pairs of answers"
    title = "demo reviews"
    num_train: Size = 3_000
    num_dev: Size = 200
    num_test: Size = 400

    def find(self, form: Form) -> SplitTables:
        pairs = review_pairs()
        if self.total > len(pairs):
            raise ConfigError(
                f"the demo has {len(pairs):,} pairs of reviews, and {self.total:,} are asked for "
                "(task.data.num_train, num_dev, num_test): ask for less"
            )
        return self.generated((PROMPT, CHOSEN, REJECTED), rows=pairs, samples=pairs)


def review_pairs() -> list[tuple[str, str, str]]:
    """Return (beginning, how a good review goes on, how a bad one does), in the order in which the
    second of the two comes."""
    waiting: dict[tuple[str, bool], list[str]] = {}
    pairs = []
    # All reviews of the demo, however many pairs are asked for: which pairs there are must not
    # depend on num_train.
    for text, is_good in reviews(NUM_ROWS["reviews"]):
        beginning = " ".join(text.split()[:BEGINNING])
        rest = text[len(beginning) :]
        # A review waits under its first words until one of the other kind comes that begins alike.
        others = waiting.get((beginning, not is_good))
        if not others:
            waiting.setdefault((beginning, is_good), []).append(rest)
        elif is_good:
            pairs.append((beginning, rest, others.pop(0)))
        else:
            pairs.append((beginning, others.pop(0), rest))
    return pairs

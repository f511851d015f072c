"""Preferences: pairs of a chosen and a rejected answer to one prompt, plain texts or chats.

Rows (rows.py) have the columns "prompt", "chosen" and "rejected": three texts, or three lists of
messages. A sample is a pair: two documents, the chosen one first. Its batch fields are those of
language_modelling.py, and only answers are to be guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import PositiveFloat, settings
from xcloud.base.wording import listed
from xcloud.contracts.model import NO_LABEL, Scores, Split
from xcloud.demo import NUM_ROWS, reviews
from xcloud.tasks.language_modelling import (
    CausalTokenizer,
    Chat,
    Document,
    Fitted,
    LanguageData,
    LanguageModelling,
    is_chat,
)
from xcloud.tasks.rows import Corpus, DemoSized, Form, Rows, RowTable, Size, SplitTables
from xcloud.tasks.sources import Folder, Hub
from xcloud.tasks.text_task import check_visible

PROMPT = "prompt"
CHOSEN = "chosen"
REJECTED = "rejected"
MILLIONTHS = 1e6  # of a nat: what is predicted
KEYS = "task.path: pairs"
FORMS = (
    'A line is {"prompt": …, "chosen": …, "rejected": …}: three texts, or three lists of messages '
    '{"role": …, "content": …}; or it has no prompt, and two chats that begin alike'
)
BEGINNING = 3  # words of a review that make a prompt

Pair = tuple[Any, Any, Any]
"""Prompt, chosen and rejected answer: texts or chats."""


@settings("task", kw_only=True)
class Preferences(LanguageModelling):
    """Pairs of answers to one prompt, of which one is to become more probable than the other,
    against the model as it was at the start of the run.

    loss = -log sigmoid(beta * ((log p - log p_0)(chosen) - (log p - log p_0)(rejected)))
    with log p the sum over an answer's tokens. Source: Rafailov et al., arXiv:2305.18290, eq. 7.

    beta: what it costs to depart from the model of the start; with less the model may go further.
    max_length: in tokens, of a pair: its prompt twice and both answers. A longer pair is left out.
    """

    name: ClassVar[str] = "preferences"
    form: ClassVar[Form] = Form(
        expected="train.jsonl (prompt, chosen, rejected)", endings={"jsonl": "json"}
    )
    beta: PositiveFloat = 0.1

    def rows_of(self, table: RowTable) -> Rows:
        """Return the pairs of a table, one a row. Raises DataError for rows of another form."""
        columns = _columns(table)
        pairs = []
        for number, row in enumerate(table.rows(columns, KEYS), start=1):
            cells = dict(zip(columns, row, strict=True))
            pairs.append(_pair(cells, where=f"{table.where}, row {number}"))
        names = (PROMPT, CHOSEN, REJECTED)
        texts = {name: [pair[n] for pair in pairs] for n, name in enumerate(names)}
        return Rows(num_rows=len(pairs), texts=texts)

    def check_tables(self, tables: SplitTables) -> None:
        for parts in tables.tables.values():
            for table in parts[""]:
                columns = _columns(table)
                first = next(iter(table.rows(columns, KEYS)))
                cells = dict(zip(columns, first, strict=True))
                _pair(cells, where=f"{table.where}, row 1")

    def unit(self, rows: Rows) -> str:
        return "pairs"

    def samples(
        self, tokenizer: CausalTokenizer, rows: Rows, where: str
    ) -> tuple[list[list[Document]], Fitted]:
        """Return the two documents of each pair that fits whole; a part of an answer says nothing
        of which is better."""
        columns = (rows.texts[name] for name in (PROMPT, CHOSEN, REJECTED))
        samples = []
        for number, (prompt, *answers) in enumerate(zip(*columns, strict=True)):
            said = f"{where}, pair {number + 1}"
            pair = [_document(tokenizer, prompt=prompt, answer=a, where=said) for a in answers]
            fits = sum(len(document.ids) for document in pair) <= self.max_length
            if fits and all(any(document.learned[1:]) for document in pair):
                samples.append([document._replace(number=number) for document in pair])
        if not samples:
            raise DataError(
                f"{where}: none of {rows.num_rows:,} pairs fits into task.max_length="
                f"{self.max_length} with its prompt twice and both answers: raise it"
            )
        return samples, Fitted(
            pieces=[document for pair in samples for document in pair],
            num=rows.num_rows,
            num_cut=0,
            num_left_out=rows.num_rows - len(samples),
        )

    def test_chats(self, num: int) -> list[Chat]:
        """Return the first chats of the test set, each with the chosen answer."""
        texts = self.read(frozenset({"text"})).splits["test"].texts
        both = zip(texts[PROMPT][:num], texts[CHOSEN], strict=False)
        return [[*prompt, *chosen] for prompt, chosen in both]

    def view(self, corpus: Corpus, fields: frozenset[str]) -> PreferenceData:
        return PreferenceData(task=self, corpus=corpus, fields=fields)


def _columns(table: RowTable) -> list[str]:
    """Return which of the three columns a table has. Raises DataError if it lacks an answer."""
    there = table.columns()
    if not {CHOSEN, REJECTED} <= {*there}:
        raise DataError(f"{table.where}: its keys are {listed(there)}. {FORMS}")
    return [name for name in (PROMPT, CHOSEN, REJECTED) if name in there]


def _pair(cells: Mapping[str, Any], where: str) -> Pair:
    """Return a row as a pair. Raises DataError for another form. Of two chats the prompt is what
    both begin with, unless it stands apart."""
    prompt = cells.get(PROMPT)
    chosen = cells[CHOSEN]
    rejected = cells[REJECTED]
    if all(isinstance(cell, str) for cell in (prompt, chosen, rejected)):
        return prompt, chosen, rejected
    if is_chat(chosen) and is_chat(rejected):
        if is_chat(prompt):
            return prompt, chosen, rejected
        both = zip(chosen, rejected, strict=False)
        shared = len(list(takewhile(lambda two: two[0] == two[1], both)))
        if shared:
            return chosen[:shared], chosen[shared:], rejected[shared:]
    raise DataError(f"{where}: it is of another form. {FORMS}")


def _document(tokenizer: CausalTokenizer, prompt: Any, answer: Any, where: str) -> Document:
    """Return a prompt with one of its answers, which alone is to be guessed."""
    if isinstance(prompt, str):
        return tokenizer.continued(prompt, answer)
    tokenizer.learns_chats = True
    messages: Chat = [*prompt, *answer]
    return tokenizer.chat(messages, where=where, num_given=len(prompt))


class PreferenceData(LanguageData):
    """One rank's view of pairs (TaskData).

    reference: by split and sample, what the model of the start predicts (CausalStage.predict); in
        a rank that scores, set before the first step.
    """

    def __init__(self, task: Preferences, corpus: Corpus, fields: frozenset[str]) -> None:
        super().__init__(task, corpus=corpus, fields=fields)
        self.beta = task.beta
        self.reference: dict[Split, Mapping[int, Sequence[int]]] = {}

    def weight(self, ids: Tensor) -> float:
        check_visible("label", there=self._fields)
        return float(len(ids))

    def score(self, split: Split, predictions: dict[int, list[int]]) -> Scores:
        """Return how often the chosen answer has the larger reward, by how much, what the chosen
        one gained, and the loss; errors are over pairs. Predicted are millionths of a nat and
        tokens of each answer."""
        self.check_predictions(split, predictions=predictions)
        order = sorted(predictions)
        nats = nats_of([predictions[i] for i in order])
        start_nats = nats_of([self.reference[split][i] for i in order])
        rewards = self.beta * (start_nats - nats)
        margins = rewards[:, 0] - rewards[:, 1]
        columns = {
            # A tie is half a hit, as it is by tossing a coin.
            "reward_accuracy": 50 * (1 + np.sign(margins)),
            "reward_margin": margins,
            "chosen_reward": rewards[:, 0],
            "loss": np.logaddexp(0, -margins),
        }
        num = len(order)
        spread = {name: float(column.std()) / num**0.5 for name, column in columns.items()}
        samples = {
            i: {"margin": round(float(margin), 6), "chosen_reward": round(float(reward), 6)}
            for i, margin, reward in zip(order, margins, rewards[:, 0], strict=True)
        }
        return Scores(
            values={name: round(float(column.mean()), 6) for name, column in columns.items()},
            errors={name: round(error, 6) for name, error in spread.items()},
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

    def _documents_of(self, split: Split, ident: int) -> Iterator[dict[str, list[int]]]:
        """Yield a pair: tokens by the names that they are shown under."""
        if "text" not in self._fields:
            answers = list(super()._documents_of(split, ident))
            if len(answers) == 2:  # else turns of chats, and no telling which are of the second
                chosen, rejected = (tokens for answer in answers for tokens in answer.values())
                answers = [{CHOSEN: chosen, REJECTED: rejected}]
            yield from answers
            return
        columns = [self._columns[name][split] for name in self._task.fields]
        texts, types, labels = (list(map(int, column[ident])) for column in columns)
        given = [token == NO_LABEL for token in labels]
        shown = {PROMPT: texts[: given.index(False) + 1]}
        for number, name in enumerate((CHOSEN, REJECTED)):
            rows = zip(labels, types, strict=True)
            shown[name] = [t for t, type_ in rows if type_ == number and t != NO_LABEL]
        yield shown


def nats_of(predictions: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    """Return the nats of both answers of each pair, float64 [B, 2]."""
    return np.reshape(predictions, (-1, 2, 2))[:, :, 0] / MILLIONTHS


@settings("task", kw_only=True)
class FolderPreferences(Folder, Preferences):
    """Your own pairs in the folder `path`; each file may end in .gz.

    .jsonl: an object a line. {"prompt": "…", "chosen": "…", "rejected": "…"} are plain texts,
        which are joined as they stand. With lists of messages they are chats; without a prompt two
        chats, whose prompt is what both begin with.
    """


@settings("task", kw_only=True)
class HubPreferences(Hub, Preferences):
    """A data set of the hub with the columns prompt, chosen and rejected, such as
    trl-lib/ultrafeedback_binarized."""


@settings("task", kw_only=True)
class DemoPreferences(DemoSized, Preferences):
    """Embedded film reviews: the prompt is how two begin, the chosen answer goes on in praise, the
    rejected one in blame."""

    title = "demo reviews"
    num_train: Size = 3_000
    num_dev: Size = 200
    num_test: Size = 400

    def find(self) -> SplitTables:
        pairs = review_pairs()
        if self.total > len(pairs):
            raise ConfigError(
                f"the demo has {len(pairs):,} pairs of reviews, and {self.total:,} are asked for "
                "(task.num_train, num_dev, num_test): ask for less"
            )
        return self.generated((PROMPT, CHOSEN, REJECTED), rows=pairs, samples=pairs)


def review_pairs() -> list[tuple[str, str, str]]:
    """Return (beginning, how a good review goes on, how a bad one does), in the order in which the
    second of the two comes."""
    waiting: dict[tuple[str, bool], list[str]] = {}
    pairs = []
    for text, is_good in reviews(NUM_ROWS["reviews"]):
        beginning = " ".join(text.split()[:BEGINNING])
        rest = text[len(beginning) :]
        others = waiting.get((beginning, not is_good))
        if not others:
            waiting.setdefault((beginning, is_good), []).append(rest)
        elif is_good:
            pairs.append((beginning, rest, others.pop(0)))
        else:
            pairs.append((beginning, others.pop(0), rest))
    return pairs

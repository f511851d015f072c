"""A finished run as a model of lm-evaluation-harness: what follows a text, and how probable it is.
All stages run in this process; a message between two clouds goes through the run's compressors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.wording import listed
from xcloud.contracts.model import NO_LABEL, NO_TOKEN
from xcloud.models.stages import LABEL, TEXT, TYPES
from xcloud.use import Choice, TextGenerator

UNDERSTOOD = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
"""Of a task's generation_kwargs."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """The model that lm-eval asks.

    Texts begin as documents do in training, with the begin token if the tokenizer has one.

    chats: texts are what the chat template has written, which writes that token itself.
    cached: a text that is written on goes through the stages token by token, else whole each time.
    """

    def __init__(self, generator: TextGenerator, chats: bool, cached: bool) -> None:
        super().__init__()
        self._generator = generator
        self._chats = chats
        self._cached = cached
        experiment = generator.experiment
        batch = experiment.training.eval_batch_size
        self._max_batch_tokens = batch * experiment.task.max_length  # as in the run's evaluation
        self.max_length = generator.longest

    @property
    def eot_token_id(self) -> int:
        return int(self._generator.text.token_ids.eos)

    @property
    def prefix_token_id(self) -> int:
        """Return what a text is scored behind that has no context: the begin token, or the end
        token if there is none."""
        return int(self._generator.text.token_ids.bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self._generator.folder)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        text = self._generator.text
        if self._chats:
            ids = text.encode_written(string)
        else:
            ids = text.encode(string, begins=add_special_tokens is not False)
        return list(ids)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        text = self._generator.text
        return str(text.render(chat_history, ask=add_generation_prompt, where="a task's chat"))

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text. A text that is longer than the model is
        cut into windows, of which each has as much context as fits."""
        windows = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (nats, _) in zip(owners, found, strict=True):
            totals[owner] += nats
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        """Return for each (text, context, continuation) the log-likelihood of the continuation, in
        nats, and whether each of its tokens is the most probable one. Of a text that is longer
        than the model the beginning is left out."""
        texts = []
        for text, context, continuation in requests:
            if not continuation:
                raise DataError(f"nothing to score: the tokenizer joins both parts of {text!r}")
            ids = [*context, *continuation][-self.max_length - 1 :]
            learned = min(len(continuation), len(ids) - 1)
            labels = [*[NO_LABEL] * (len(ids) - 1 - learned), *ids[len(ids) - learned :]]
            texts.append((ids[:-1], labels))
        found: dict[int, tuple[float, bool]] = {}
        progress = tqdm(total=len(texts), desc="scoring", disable=disable_tqdm)
        for numbers in self._batches([len(ids) for ids, _ in texts]):
            found |= zip(numbers, self._scores([texts[i] for i in numbers]), strict=True)
            progress.update(len(numbers))
        progress.close()
        return [found[i] for i in range(len(texts))]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of texts of about equal length, the longest first, as many as fit into
        a batch."""
        batch: list[int] = []
        for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if batch and (len(batch) + 1) * lengths[batch[0]] > self._max_batch_tokens:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _scores(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """texts: token ids, and at each place the token to be guessed."""

        def padded(rows: Sequence[list[int]], fill: int) -> torch.Tensor:
            longest = max(map(len, rows))
            return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])

        ids = padded([ids for ids, _ in texts], fill=NO_TOKEN)
        labels = padded([labels for _, labels in texts], fill=NO_LABEL)
        batch = {
            "ids": torch.arange(len(ids)),
            TEXT: ids,
            TYPES: torch.zeros_like(ids),
            LABEL: labels,
        }
        return self._generator.ask_last(batch, lambda last, *given: last.likelihoods(*given))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [(request.args[0], _understood(request.args[1])) for request in requests]
        texts = []
        for context, how in tqdm(asked, desc="generating", disable=disable_tqdm):
            texts.append(self._written_on(context, how=how))
        return texts

    def _written_on(self, context: str, how: Mapping[str, Any]) -> str:
        """Return what follows, up to an end token or the first of the strings `until`."""
        temperature = float(how.get("temperature", 1.0)) if how["do_sample"] else 0.0
        choice = Choice(temperature=temperature, top_p=float(how.get("top_p", 1.0)))
        room = max(1, self.max_length - how["max_gen_toks"])
        given = self.tok_encode(context)[-room:]
        written = ""
        for piece in self._generator.after(given, how["max_gen_toks"], choice, self._cached):
            written += piece
            ends = [at for stop in how["until"] if stop and (at := written.find(stop)) >= 0]
            if ends:
                return written[: min(ends)]
        return written


def _understood(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's generation_kwargs in the harness's own names. Raises ConfigError."""
    how = dict(normalize_gen_kwargs(dict(given)))
    if unknown := sorted(how.keys() - UNDERSTOOD):
        raise ConfigError(
            f"generation_kwargs of a task: {listed(unknown)} cannot be followed here; "
            f"{listed(sorted(UNDERSTOOD))} can"
        )
    return how

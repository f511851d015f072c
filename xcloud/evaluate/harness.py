"""A finished run as a model of lm-evaluation-harness: what follows a text, and how probable it is.
All stages run in this process; a message between two clouds goes through the run's compressors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.wording import listed
from xcloud.contracts.model import NO_LABEL, NO_TOKEN
from xcloud.models.following import Choice
from xcloud.models.stages import LABEL, TEXT, TYPES
from xcloud.use import TextGenerator

UNDERSTOOD = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
"""Of a task's generation_kwargs."""
CUT = "num_cut"
SHORT = "num_short"


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """The model that lm-eval asks. It answers what lm-eval's own HFLM does of the merged model
    (tests/evaluate/test_evaluate.py sets both side by side), but for two cases, which are counted
    and said: a prompt that fits is never cut for the sake of the answer's length, and an answer
    may be shorter instead.

    Texts begin with the begin token where the tokenizer itself writes one.

    generator: the trained run that is asked.
    chats: texts are what the chat template has written, which writes that token itself.
    cached: a text that is written on goes through the stages token by token, else whole each time.
    """

    def __init__(self, generator: TextGenerator, chats: bool, cached: bool) -> None:
        super().__init__()
        self.generator = generator
        self.chats = chats
        self.cached = cached
        experiment = generator.experiment
        batch = experiment.training.eval_batch_size
        self._max_batch_tokens = batch * experiment.task.max_length  # as in the run's evaluation
        self.max_length = generator.longest
        # One for all requests: samples of one question (repeats) are to differ.
        self._draw = torch.Generator().manual_seed(0)
        self.not_whole: dict[str, dict[str, set[int]]] = {CUT: {}, SHORT: {}}
        """By what happened and task the numbers of the samples that it happened to: the beginning
        of a question was left out, or there was no room for as many tokens as the task allows."""

    @property
    def eot_token_id(self) -> int:
        return int(self.generator.text.token_ids.eos)

    @property
    def prefix_token_id(self) -> int:
        """Return what a text is scored behind that has no context: the begin token, or the end
        token if there is none."""
        return int(self.generator.text.token_ids.bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.generator.folder)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        text = self.generator.text
        # What the chat template has written holds its special tokens as text, and its own begin
        # token.
        if self.chats:
            return list(text.encode_written(string))
        if add_special_tokens is None:
            return list(text.encode_itself(string))
        return list(text.encode(string, begins=add_special_tokens))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat up to where the answer is to begin, or, without add_generation_prompt, up
        to where it is to go on: the last message is then its beginning (a task's gen_prefix)."""
        text = self.generator.text
        if not add_generation_prompt:
            return str(text.begun(chat_history, where="a task's chat"))
        return str(text.render(chat_history, ask=True, where="a task's chat"))

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        self._cut_numbers: list[int] = []
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        for number in self._cut_numbers:
            self._note(CUT, requests[number])
        return found

    def _note(self, what: str, request: Any) -> None:
        task = str(getattr(request, "task_name", ""))
        self.not_whole[what].setdefault(task, set()).add(getattr(request, "doc_id", 0))

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text. A text that is longer than the model is
        cut into windows, of which each has as much context as fits. As in HFLM a begin token that
        the tokenizer writes is scored, too."""
        windows = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                # Windows of the harness overlap by a token; disjoint, each token is scored once.
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (nats, _) in zip(owners, found, strict=True):
            totals[owner] += nats
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return for each (text, context, continuation) the log-likelihood of the continuation, in
        nats, and whether each of its tokens is the most probable one. Of a context for which there
        is no room the beginning is left out, which `_cut_numbers` notes; a continuation that is
        longer than the model is refused, before anything is computed."""
        texts = []
        self._cut_numbers = []
        for number, (text, context, continuation) in enumerate(requests):
            if not continuation:
                raise DataError(f"nothing to score: the tokenizer joins both parts of {text!r}")
            if len(continuation) > self.max_length:
                raise DataError(
                    f"an answer of {len(continuation)} tokens does not fit into the "
                    f"{self.max_length} positions of the model, so it cannot be compared with "
                    f"others: leave it out of the task. It begins: {str(text)[:100]!r}"
                )
            # Something must stand before the first token that is scored.
            whole = [*(context or [self.prefix_token_id]), *continuation]
            if len(whole) > self.max_length + 1:
                self._cut_numbers.append(number)
            # One token more than there are positions: the last one is only guessed.
            ids = whole[-self.max_length - 1 :]
            # The label of a place is the next token; the context is not scored.
            labels = [NO_LABEL] * (len(ids) - 1 - len(continuation)) + [*continuation]
            texts.append((ids[:-1], labels))
        found: dict[int, tuple[float, bool]] = {}
        # None: shown in a terminal, and not written into a file.
        progress = tqdm(total=len(texts), desc="scoring", disable=disable_tqdm or None)
        for numbers in self._batches([len(ids) for ids, _ in texts]):
            found |= zip(numbers, self._scores([texts[i] for i in numbers]), strict=True)
            progress.update(len(numbers))
        progress.close()
        return [found[i] for i in range(len(texts))]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the numbers of texts of about equal length, the longest first, as many as fit into
        a batch."""
        batch: list[int] = []
        # The longest first: a batch is as wide as its first text.
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
        return self.generator.ask_last(batch, lambda last, *given: last.likelihoods(*given))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [(request, _understood(request.args[1])) for request in requests]
        given = [self._prompt(request, how=how) for request, how in asked]
        texts = []
        pairs = zip(given, asked, strict=True)
        for ids, (_, how) in tqdm(
            pairs, total=len(asked), desc="generating", disable=disable_tqdm or None
        ):
            texts.append(self._written_on(ids, how=how))
        return texts

    def _prompt(self, request: Any, how: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a prompt. Of one that has no room its beginning is left out, as
        HFLM does. Raises DataError where HFLM refuses, too."""
        ids = self.tok_encode(request.args[0]) or [self.prefix_token_id]
        if len(ids) >= self.max_length:
            room = self.max_length - how["max_gen_toks"]
            if room < 1:
                raise DataError(
                    f"a prompt of {len(ids)} tokens and an answer of {how['max_gen_toks']} "
                    f"(generation_kwargs: max_gen_toks) do not fit into the {self.max_length} "
                    f"positions of the model: {request.args[0][:100]!r}"
                )
            self._note(CUT, request)
            return ids[-room:]
        if len(ids) + how["max_gen_toks"] > self.max_length:
            self._note(SHORT, request)
        return ids

    def _written_on(self, given: Sequence[int], how: Mapping[str, Any]) -> str:
        """Return what follows, up to an end token or the first of the strings `until`."""
        temperature = float(how.get("temperature", 1.0)) if how["do_sample"] else 0.0
        choice = Choice(temperature, top_p=float(how.get("top_p", 1.0)), draw=self._draw)
        text = self.generator.text
        ends = text.special_ids(how["until"])
        stops = [stop for stop in how["until"] if stop]
        ids: list[int] = []
        # Each token is decoded with all before it: a stop string may begin in the middle of a
        # token, and a character may be made of several tokens.
        for token in self.generator.tokens_after(
            given, how["max_gen_toks"], choice, self.cached, ends
        ):
            ids.append(token)
            written = text.decode(ids)
            if any(stop in written for stop in stops):
                break
        # The harness cuts at the stop, so that texts end where those of HFLM do.
        return str(postprocess_generated_text(text.decode(ids), stops, None))


def _understood(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's generation_kwargs in the harness's own names. Raises ConfigError."""
    how = dict(normalize_gen_kwargs(dict(given)))
    if unknown := sorted(how.keys() - UNDERSTOOD):
        raise ConfigError(
            f"generation_kwargs of a task: {listed(unknown)} cannot be followed here; "
            f"{listed(sorted(UNDERSTOOD))} can"
        )
    return how

"""Try a trained causal language model: python -m xcloud generate RUN "Once upon" ["A question?"]

RUN is a run's output folder, with the parts of all clouds in it. It writes on as it goes: the most
probable token each time, or one drawn (--temperature, --top-p, --seed). The message between two
clouds goes through the run's compressors, as it did in training (--uncompressed leaves them out).
A model that has learned chats takes the text as a question.

Keys and values of earlier tokens are kept, so after the prompt one row crosses for each token. A
compressor that looks at all rows together (low rank, top-k) sees another matrix then than in
training; --no-cache sends the whole text for each token, as an evaluation does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from xcloud.base.errors import DataError
from xcloud.comm.boundary import Message
from xcloud.models.causal_stage import CausalStage, Past
from xcloud.models.stages import TEXT, TYPES
from xcloud.tasks.causal_text import CausalTokenizer
from xcloud.use.trained import TrainedRun, parser_of

UNFINISHED = "\ufffd"  # a tokenizer's word for bytes that are no character yet


class Choice:
    """How the next token is chosen. temperature 0: the most probable one. Else one is drawn from
    softmax(logits / temperature), of the fewest tokens whose probabilities reach top_p
    (arXiv:1904.09751); equal seeds draw alike."""

    def __init__(self, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._draw = torch.Generator().manual_seed(seed)

    def of(self, logits_V: Tensor) -> int:
        if not self._temperature:
            return int(logits_V.argmax())
        shares_V, words_V = (
            (logits_V.double() / self._temperature).softmax(0).sort(descending=True)
        )
        kept_V = shares_V * (shares_V.cumsum(0) - shares_V < self._top_p)
        return int(words_V[torch.multinomial(kept_V, 1, generator=self._draw)])


@dataclass(frozen=True)
class Writer:
    """All stages in one process. carry(stage, message): what arrives behind a stage of what it
    sends. cached: each token goes through the stages once; else with all before it, each time."""

    stages: Sequence[CausalStage]
    carry: Callable[[int, Message], Message]
    cached: bool = True

    def tokens(self, ids: Sequence[int], choice: Choice) -> Iterator[int]:
        """What follows, without end."""
        text, new = list(ids), list(ids)
        pasts = [Past() if self.cached else None for _ in self.stages]
        while True:
            given = torch.tensor([new if self.cached else text])
            batch = {"ids": torch.arange(1), TEXT: given, TYPES: torch.zeros_like(given)}
            message: Message | None = None
            with torch.no_grad():
                for number, stage in enumerate(self.stages[:-1]):
                    message = self.carry(number, stage(message, batch, pasts[number]).send)
                logits_BV = self.stages[-1].next_words(message, batch, pasts[-1])
            new = [choice.of(logits_BV[0])]
            text += new
            yield new[0]


class Generator:
    """A trained run that writes on. Raises ConfigError or DataError if the folder holds no
    finished run of a causal language model."""

    def __init__(self, run_dir: Path, compressed: bool = True, cached: bool = True) -> None:
        run = TrainedRun.open(run_dir, "causal language model")
        self._tokenizer = cast(CausalTokenizer, run.text)
        self.between = "\n" if self._tokenizer.learns_chats else ""  # question and answer
        stages = cast(list[CausalStage], run.stages())
        self._writer = Writer(stages, partial(run.carry, compressed=compressed), cached)
        config = stages[-1].architecture["config"]
        self._longest = int(config["max_position_embeddings"])

    def pieces(
        self, prompt: str, max_new_tokens: int, choice: Choice | None = None
    ) -> Iterator[str]:
        """What follows the prompt, up to the end token, as it comes."""
        tokenizer = self._tokenizer
        given = tokenizer.prompt(prompt)
        ids, written = list(given), tokenizer.decode(given)
        if len(given) >= self._longest:
            raise DataError(
                f"the prompt has {len(given)} tokens; the model has {self._longest} positions"
            )
        following = self._writer.tokens(given, choice or Choice())
        for _ in range(min(max_new_tokens, self._longest - len(given))):
            token = next(following)
            if token == tokenizer.token_ids.eos:
                break
            ids.append(token)
            text = tokenizer.decode(ids)
            # Later tokens may change what the last ones mean: a character of several bytes.
            if text.startswith(written) and not text.endswith(UNFINISHED):
                yield text[len(written) :]
                written = text
        yield tokenizer.decode(ids)[len(written) :]


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of("generate", __doc__)
    parser.add_argument("text", nargs="+", help="what to go on from")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: no drawing (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="of what share it is drawn from")
    parser.add_argument("--seed", type=int, default=0, help="of drawing")
    parser.add_argument("--no-cache", action="store_true", help="send the whole text each time")
    parser.add_argument("--uncompressed", action="store_true", help="leave the compressors out")
    arguments = parser.parse_args(words)
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens must be 1 or more, got {arguments.max_new_tokens}")
    if not 0 <= arguments.temperature < float("inf"):
        parser.error(f"--temperature must be 0 or more, got {arguments.temperature}")
    if not 0 < arguments.top_p <= 1:
        parser.error(f"--top-p must be above 0 and at most 1, got {arguments.top_p}")
    generator = Generator(arguments.run, not arguments.uncompressed, not arguments.no_cache)
    for text in arguments.text:
        choice = Choice(arguments.temperature, arguments.top_p, arguments.seed)
        print(text, end=generator.between, flush=True)
        for piece in generator.pieces(text, arguments.max_new_tokens, choice):
            print(piece, end="", flush=True)
        print(flush=True)

"""What a causal language model writes on: one token after the other, through all its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from xcloud.comm.channel import Message
from xcloud.contracts.model import Batch
from xcloud.models.causal_network import Past
from xcloud.models.stages import TEXT, TYPES


class TextStage(Protocol):
    """A stage of a causal language model, as writing needs it."""

    __call__: Callable[..., Any]

    def next_words(
        self, received: Message | None, batch: Batch, past: Past | None = None
    ) -> Tensor: ...


class Choice:
    """The next token. temperature 0: the most probable one. Else one drawn from softmax(logits /
    temperature), of the fewest tokens whose probabilities reach top_p (arXiv:1904.09751).

    draw: the generator of random numbers. Texts that share one are drawn one after the other.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        draw: torch.Generator | None = None,
    ) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._draw = draw or torch.Generator().manual_seed(seed)

    def of(self, logits_V: Tensor) -> int:
        if not self._temperature:
            return int(logits_V.argmax())
        # float64: sums over a large vocabulary decide at the edge of top_p.
        scaled_V = logits_V.double() / self._temperature
        shares_V, words_V = scaled_V.softmax(0).sort(descending=True)
        # Those whose predecessors do not reach top_p yet: the first one is always kept.
        kept_V = shares_V * (shares_V.cumsum(0) - shares_V < self._top_p)
        return int(words_V[torch.multinomial(kept_V, 1, generator=self._draw)])


@torch.no_grad()
def following(
    stages: Sequence[TextStage],
    carry: Callable[[int, Message, Batch], Message],
    ids: Sequence[int],
    choice: Choice,
    cached: bool = True,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[int]:
    """The tokens after these, without end. carry(stage, message, batch): what arrives of what a
    stage sends. cached: each token goes through the stages once; else with all before it, each
    time. autocast: makes the context that stages compute in."""
    text = list(ids)
    new = list(ids)
    pasts = [Past() if cached else None for _ in stages]
    while True:
        # With kept keys and values only the new token goes through the stages.
        given = torch.tensor([new if cached else text])
        batch = {"ids": torch.arange(1), TEXT: given, TYPES: torch.zeros_like(given)}
        message: Message | None = None
        for number, stage in enumerate(stages[:-1]):
            with autocast():
                sent = stage(message, batch, pasts[number]).send
            message = carry(number, sent, batch)
        with autocast():
            logits_BV = stages[-1].next_words(message, batch, past=pasts[-1])
        new = [choice.of(logits_BV[0])]
        text += new
        yield new[0]

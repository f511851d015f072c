"""One rank of a generator's cloud (a Producer): mask, fill, train, pack.

Text, gradients and masks stay in the cloud; corrupted ids and replaced flags leave it.
No networking, no averaging.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from xcloud.base.project import MODEL_DIR
from xcloud.comm.ids import CorruptedTexts, IdPacking
from xcloud.comm.state import State
from xcloud.contracts.one_way_parts import Fed, OneWayContext
from xcloud.electra.config import Generator
from xcloud.models.attention import Packing
from xcloud.models.checkpoint import export_bert
from xcloud.models.electra import choose_masked, corrupt, inner_rows
from xcloud.models.encoder import Encoder
from xcloud.models.seeding import seed_of, seeded_on
from xcloud.tasks.multilingual_text import TextStream
from xcloud.tasks.tokenizer import Tokenizer
from xcloud.training.divergence import diverged
from xcloud.training.trained_module import TrainedModule


class GeneratorRank:
    def __init__(
        self,
        encoder: Encoder,
        stream: TextStream,
        tokenizer: Tokenizer,
        packing: IdPacking,
        settings: Generator,
        cloud: str,
        lane: int,
        context: OneWayContext,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._encoder, self._stream, self._tokenizer = encoder, stream, tokenizer
        self._packing, self._settings, self._cloud, self._lane = packing, settings, cloud, lane
        self._seed, self._num_steps = context.seed, context.num_steps
        self._device, self._autocast = context.device, autocast
        self._starts_V = torch.tensor(tokenizer.word_starts()) if settings.whole_words else None
        encoder.train(not settings.frozen)
        encoder.requires_grad_(not settings.frozen)
        self._optimizer = (
            None if settings.frozen else settings.optimizer.build(encoder.parameters())
        )
        self._trained = TrainedModule(encoder, self._optimizer)

    @property
    def parameters_module(self) -> nn.Module | None:
        return None if self._settings.frozen else self._encoder

    def produce(self, number: int) -> Fed:
        """Texts, masks, sampled ids and dropout depend only on seed, cloud, lane and number."""
        settings, special = self._settings, self._tokenizer.token_ids
        ids_R, counts_B = self._stream.batch(number)
        draw = torch.Generator().manual_seed(self._random("masks", number))
        masked_M = choose_masked(ids_R, special, settings.mask_share, draw, self._starts_V)
        with (
            seeded_on(self._device, self._random("dropout", number)),
            torch.set_grad_enabled(not settings.frozen),
            self._autocast(),
        ):
            made = corrupt(
                self._encoder,
                ids_R.to(self._device),
                Packing(counts_B.to(self._device)),
                masked_M.to(self._device),
                special,
                settings.temperature,
                draw,
            )
        if not settings.frozen:
            torch.autograd.backward(made.loss)
        loss = float(made.loss.detach())
        if not math.isfinite(loss):
            raise diverged(
                f"the loss of batch {number} of producer {self._cloud!r} is {loss}",
                "the batch cannot be skipped: nothing can be sampled, so there is nothing to send",
            )
        inner_C = inner_rows(counts_B)
        texts = CorruptedTexts(
            made.ids_R.cpu()[inner_C], counts_B - 2, made.replaced_R.cpu()[inner_C]
        )
        payload = self._packing.pack(texts)
        return Fed(payload, len(counts_B), len(inner_C), loss)

    def replan(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def update(self, number: int) -> None:
        if self._optimizer is None:
            return
        settings = self._settings.optimizer
        if settings.clip_norm:
            nn.utils.clip_grad_norm_(self._encoder.parameters(), settings.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(number, self._num_steps)
        self._optimizer.step()

    def state_dict(self) -> State:
        return self._trained.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._trained.load_state_dict(state)

    def finish(self, run_dir: Path, lane: int) -> None:
        """Export a trained generator as a BertForMaskedLM, in its own cloud."""
        if lane or self._settings.frozen:
            return
        folder = run_dir / MODEL_DIR / f"generator_{self._cloud}"
        export_bert(self._encoder, folder, self._tokenizer.token_ids.pad)
        self._tokenizer.save_pretrained(folder, self._encoder.config.max_positions)

    def _random(self, what: str, number: int) -> int:
        return seed_of(self._seed, what, self._cloud, self._lane, number)

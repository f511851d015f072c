"""One rank of the discriminator's cloud (a Consumer): unpack batches, train, count, export.
No text, no networking; nothing is sent back.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from xcloud.base.errors import FrameError
from xcloud.base.project import MODEL_DIR
from xcloud.comm.ids import CorruptedTexts, IdPacking
from xcloud.comm.state import State, load_states, states_of
from xcloud.contracts.one_way_parts import SUMS, OneWayContext
from xcloud.electra.config import DiscriminatorSettings
from xcloud.models.checkpoint import export_electra
from xcloud.models.electra import Discriminator, detect_replaced
from xcloud.models.seeding import seed_of, seeded_on
from xcloud.tasks.tokenizer import Tokenizer
from xcloud.training.trained_module import TrainedModule

DISCRIMINATOR_DIR = "discriminator"
SCORED_STEPS = 50  # evaluate over the last steps; batches are scored before training on them


class DiscriminatorRank:
    def __init__(
        self,
        network: Discriminator,
        tokenizer: Tokenizer,
        packing: IdPacking,
        settings: DiscriminatorSettings,
        context: OneWayContext,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._network, self._tokenizer, self._packing = network.train(), tokenizer, packing
        self._settings, self._seed, self._num_steps = settings, context.seed, context.num_steps
        self._device, self._autocast = context.device, autocast
        self._producers = context.producers
        self._optimizer = settings.optimizer.build(network.parameters())
        self._trained = TrainedModule(network, self._optimizer)
        self._step_sums: Counter[str] = Counter()
        self._recent: deque[Counter[str]] = deque(maxlen=SCORED_STEPS)

    @property
    def module(self) -> nn.Module:
        return self._network

    def consume(self, payloads: Sequence[tuple[int, Tensor]]) -> Mapping[str, float]:
        sums: Counter[str] = Counter()
        for producer, payload in payloads:
            try:
                texts = self._packing.unpack(payload)
            except FrameError as error:
                name = dict(enumerate(self._producers)).get(producer, producer)
                raise FrameError(f"a batch of producer {name!r} is refused: {error}") from error
            sums.update(self._learn(texts))
        self._step_sums.update(sums)
        return sums

    def _learn(self, texts: CorruptedTexts) -> dict[str, float]:
        ids_C, counts_B, replaced_C = texts
        # Dropout depends on the batch itself, not on which rank consumes it, or when.
        content = zlib.crc32(ids_C.numpy().tobytes())
        dropout = seed_of(self._seed, "discriminator dropout", content)
        with seeded_on(self._device, dropout), self._autocast():
            found = detect_replaced(
                self._network,
                ids_C.to(self._device),
                counts_B.to(self._device),
                replaced_C.to(self._device),
                self._tokenizer.token_ids,
            )
        torch.autograd.backward(found.loss)
        return {
            "loss_sum": float(found.loss.detach()),
            "weight": len(ids_C),
            "samples": len(counts_B),
            "tokens": len(ids_C),
            "true_positives": found.true_positives,
            "false_positives": found.false_positives,
            "false_negatives": found.false_negatives,
        }

    def update(self, step: int, weight: float) -> None:
        settings = self._settings.optimizer
        factor = self._settings.loss_weight / weight
        for parameter in self._network.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        if settings.clip_norm:
            nn.utils.clip_grad_norm_(self._network.parameters(), settings.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step, self._num_steps)
        self._optimizer.step()
        self._recent.append(self._step_sums)
        self._step_sums = Counter()

    def skip(self, step: int) -> None:
        self._step_sums = Counter()

    def state_dict(self) -> State:
        recent = [[sums[name] for name in SUMS] for sums in self._recent]
        scores = torch.tensor(recent, dtype=torch.float64).view(-1, len(SUMS))
        return {"recent": scores} | states_of({"network": self._trained})

    def load_state_dict(self, state: State) -> None:
        recent = state.get("recent")
        if not isinstance(recent, Tensor) or recent.dim() != 2 or recent.shape[1] != len(SUMS):
            raise ValueError(
                f"the state of a discriminator needs 'recent', {len(SUMS)} sums of each step, got "
                f"{sorted(state)}; it was saved with other settings"
            )
        load_states({"network": self._trained}, state, "a discriminator", ["recent"])
        rows = [Counter(dict(zip(SUMS, row, strict=True))) for row in recent.tolist()]
        self._recent = deque(rows, maxlen=SCORED_STEPS)

    def export(self, run_dir: Path, lane: int) -> None:
        """Write model/discriminator, a checkpoint with its tokenizer."""
        if lane:
            return
        folder = run_dir / MODEL_DIR / DISCRIMINATOR_DIR
        encoder, head = self._network.encoder, self._network.head
        special = self._tokenizer.token_ids
        export_electra(encoder, head.dense, head.score, folder, special.pad)
        self._tokenizer.save_pretrained(folder, encoder.config.max_positions)

    def evaluate(self, lane: int) -> Mapping[str, float]:
        """Replaced-token detection over this rank's batches of the last steps: percent, and
        nats per token."""
        if lane:
            return {}
        sums: Counter[str] = sum(self._recent, Counter())
        hits = sums["true_positives"]
        detected, replaced = hits + sums["false_positives"], hits + sums["false_negatives"]
        return {
            "replaced_precision": round(100 * hits / max(1, detected), 4),
            "replaced_recall": round(100 * hits / max(1, replaced), 4),
            "replaced_f1": round(200 * hits / max(1, detected + replaced), 4),
            "replaced_loss": round(sums["loss_sum"] / max(1, sums["weight"]), 6),
        }

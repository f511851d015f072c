"""A small causal language model pretrained on the spot on public text, and kept as a checkpoint
folder of `transformers`, so that every cloud can make the same one. Not fine-tuned here.

Shapes: B samples, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xcloud.base.checks import check_int
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import BuildContext, TokenIds
from xcloud.hub import bytes_of, key_of
from xcloud.models.backbone import make_in_lane_0
from xcloud.models.causal_network import (
    Part,
    check_type,
    config_of,
    network_of,
)
from xcloud.models.causal_stage import LABEL, TEXT, TYPES, CausalStage
from xcloud.models.causal_weights import draw_weights, write_checkpoint
from xcloud.models.descent import Descent
from xcloud.models.encoder import check_heads
from xcloud.models.seeding import seed_of
from xcloud.models.text_source import PublicTexts, check_public_text

# Part of every cache key: raise it when the same settings would give other weights than before.
CODE_VERSION = 2


@dataclass(frozen=True)
class NextTokenPretraining(Descent):
    """Guess the next token, in windows of `length` tokens of the joined texts.

    seed is the base's own, not the run's: runs of several seeds share it, as they would share a
    published checkpoint. steps=0 leaves random weights.
    """

    steps: int = 800
    batch_size: int = 16
    length: int = 64
    learning_rate: float = 3e-3
    warmup_steps: int = 80
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        owner = "NextTokenPretraining"
        self.check_descent(owner)
        check_int(f"{owner}.batch_size", self.batch_size, 1)
        check_int(f"{owner}.length", self.length, 2)


@dataclass(frozen=True)
class OwnCausal:
    """A model of the Llama kind (or mistral, qwen2), made from `num_texts`
    public texts and kept as cache_dir/causal/<hash>, a folder that transformers loads. The hash
    covers texts, sizes, settings and CODE_VERSION, not the seed of the run.

    num_kv_heads: heads of keys and values; None: num_heads. tied: one matrix for embeddings and
    head. The cloud that makes it holds it whole, once.
    """

    text: PublicTexts
    num_texts: int = 20_000
    kind: str = "llama"
    hidden: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    feed_forward: int = 384
    tied: bool = False
    pretraining: NextTokenPretraining = field(default_factory=NextTokenPretraining)

    def __post_init__(self) -> None:
        check_public_text("OwnCausal.text", self.text)
        check_type(self.kind, "OwnCausal.kind")
        if self.kind not in ("llama", "mistral", "qwen2"):
            raise ConfigError(
                f"OwnCausal.kind must be llama, mistral or qwen2, got {self.kind!r}; other kinds "
                "come from a checkpoint (model.checkpoint)"
            )
        for name in ("hidden", "num_layers", "num_heads", "feed_forward"):
            check_int(f"OwnCausal.{name}", getattr(self, name), 1)
        check_int("OwnCausal.num_texts", self.num_texts, 1)
        check_heads("OwnCausal.num_heads", self.num_heads, self.hidden)
        if self.num_kv_heads is not None:
            check_int("OwnCausal.num_kv_heads", self.num_kv_heads, 1)
            if self.num_heads % self.num_kv_heads:
                raise ConfigError(
                    f"OwnCausal.num_kv_heads must divide num_heads {self.num_heads}, got "
                    f"{self.num_kv_heads}"
                )
        if not isinstance(self.tied, bool):
            raise ConfigError(f"OwnCausal.tied must be true or false, got {self.tied!r}")
        if not isinstance(self.pretraining, NextTokenPretraining):
            raise ConfigError(
                f"OwnCausal.pretraining must be a NextTokenPretraining, got {self.pretraining!r}"
            )

    def describe(self) -> str:
        return f"own {self.kind} {self.num_layers} x {self.hidden}"

    def config(self, max_length: int, ids: TokenIds | None = None) -> Any:
        """ids None: with one word, for whoever asks for shapes of blocks only."""
        words = TokenIds(1, 0, 0, 0, 0) if ids is None else ids
        described = {
            "model_type": self.kind,
            "vocab_size": words.size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads or self.num_heads,
            "intermediate_size": self.feed_forward,
            "max_position_embeddings": max(max_length, self.pretraining.length),
            "tie_word_embeddings": self.tied,
            "bos_token_id": words.bos,
            "eos_token_id": words.eos,
            "pad_token_id": None,
        }
        return config_of(described | ({"sliding_window": None} if self.kind == "mistral" else {}))

    def folder(self, context: BuildContext) -> Path:
        """The checkpoint, made if it is not in the cache. Every lane calls it, and it waits for
        lane 0 at context.barrier."""
        ids = self.text.token_ids(context.cache_dir)
        config = self.config(context.max_length, ids)
        texts = self.text.sentences(self.num_texts, context.cache_dir)
        folder = context.cache_dir / "causal" / self._key(config, ids, texts)
        make_in_lane_0(folder, context, partial(self._make, config, ids, texts, context))
        return folder

    def _make(
        self,
        config: Any,
        ids: TokenIds,
        texts: Sequence[Sequence[int]],
        context: BuildContext,
        folder: Path,
        unfinished: Path,
    ) -> None:
        said = f"{self.describe()}: pretraining on {len(texts):,} public texts"
        shorter = "model.own.pretraining.steps=N makes it shorter"
        context.report(f"{said}, {self.pretraining.steps} steps; {shorter}")
        part = Part(range(self.num_layers), True, True)
        network = network_of(config, part)
        draw_weights(network, self.pretraining.seed)
        stage = CausalStage(network, part, 8192, {"lora": False}).to(context.device)
        loss = _pretrain(
            stage,
            texts,
            ids,
            self.pretraining,
            lambda line: context.report(f"{said}, {line}"),
            unfinished,
        )
        write_checkpoint(network, folder)
        if self.pretraining.steps:
            context.report(f"{self.describe()}: loss {loss:.3f} at the end")

    def _key(self, config: Any, ids: TokenIds, texts: Sequence[Sequence[int]]) -> str:
        described = {
            "code": CODE_VERSION,
            "settings": {k: v for k, v in asdict(self).items() if k != "text"},
            "positions": config.max_position_embeddings,
            "ids": asdict(ids),
        }
        return key_of(described, bytes_of(texts))


def _pretrain(
    stage: CausalStage,
    texts: Sequence[Sequence[int]],
    ids: TokenIds,
    settings: NextTokenPretraining,
    report: Callable[[str], None],
    unfinished: Path,
) -> float:
    """Train in place; nats per token of the last batches. Depends on settings and texts alone."""
    flat = torch.tensor([token for text in texts for token in (ids.bos, *text, ids.eos)])
    if len(flat) <= settings.length:
        raise DataError(
            f"the public texts have {len(flat)} tokens, fewer than a window of "
            f"{settings.length}: raise OwnCausal.num_texts"
        )
    device = next(stage.parameters()).device
    draw = torch.Generator().manual_seed(seed_of(settings.seed, "windows"))

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = stage(None, {name: part.to(device) for name, part in batch.items()}).loss
        return loss / batch[LABEL].numel()

    mean = math.nan

    def said() -> str:
        return f"loss {mean:.3f}"

    batches = map(_windows, repeat(flat), repeat(settings), repeat(draw))
    with torch.enable_grad():
        stage.train()
        for _, loss in settings.descend(stage, batches, loss_of, report, said, unfinished):
            now = float(loss)
            mean = now if math.isnan(mean) else 0.95 * mean + 0.05 * now
    return mean


def _windows(
    flat: Tensor, settings: NextTokenPretraining, draw: torch.Generator
) -> dict[str, Tensor]:
    starts_B = torch.randint(len(flat) - settings.length, (settings.batch_size,), generator=draw)
    text_BS = flat[starts_B[:, None] + torch.arange(settings.length)]
    label_BS = flat[starts_B[:, None] + torch.arange(1, settings.length + 1)]
    return {TEXT: text_BS, TYPES: torch.zeros_like(text_BS), LABEL: label_BS}

"""A small causal language model pretrained on the spot on public text, and kept as a checkpoint
folder of `transformers`, so that every cloud can make the same one. Not fine-tuned here.

Shapes: B samples, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import NotNegative, Positive, PositiveFloat, settings
from xcloud.contracts.model import BuildContext, TokenIds
from xcloud.hub import bytes_of, key_of
from xcloud.models.causal_network import (
    Part,
    config_of,
    draw_weights,
    network_of,
    write_checkpoint,
)
from xcloud.models.causal_stage import CausalStage
from xcloud.models.encoder import check_heads
from xcloud.models.made_once import Descent, PublicTexts, made_once
from xcloud.models.stages import LABEL, TEXT, TYPES, seed_of

# Part of every cache key: raise it when the same settings would give other weights than before.
CODE_VERSION = 2


@settings("NextTokenPretraining")
class NextTokenPretraining(Descent):
    """Guess the next token, in windows of `length` tokens of the joined texts."""

    steps: NotNegative = 800
    learning_rate: PositiveFloat = 3e-3
    warmup_steps: NotNegative = 80
    batch_size: Positive = 16
    length: Annotated[int, Field(ge=2)] = 64


@settings("OwnCausal")
class OwnCausal:
    """A model of the Llama kind (or mistral, qwen2), made from `num_texts`
    public texts and kept as cache_dir/causal/<hash>, a folder that transformers loads. The hash
    covers texts, sizes, settings and CODE_VERSION, not the seed of the run.

    num_kv_heads: heads of keys and values; None: num_heads. tied: one matrix for embeddings and
    head. The cloud that makes it holds it whole, once.
    """

    text: PublicTexts
    num_texts: Positive = 20_000
    kind: Literal["llama", "mistral", "qwen2"] = "llama"  # others: model.checkpoint
    hidden: Positive = 128
    num_layers: Positive = 4
    num_heads: Positive = 4
    num_kv_heads: Positive | None = None
    feed_forward: Positive = 384
    tied: bool = False
    pretraining: NextTokenPretraining = field(default_factory=NextTokenPretraining)

    def __post_init__(self) -> None:
        check_heads("OwnCausal.num_heads", self.num_heads, self.hidden)
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"OwnCausal.num_kv_heads must divide num_heads {self.num_heads}, got "
                f"{self.num_kv_heads}"
            )

    def describe(self) -> str:
        return f"own {self.kind} {self.num_layers} x {self.hidden}"

    def config(self, max_length: int, ids: TokenIds | None = None) -> Any:
        """ids None: of one token, enough for the shapes of blocks."""
        ids = ids or TokenIds(1, 0, 0, 0, 0)
        described = {
            "model_type": self.kind,
            "vocab_size": ids.size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads or self.num_heads,
            "intermediate_size": self.feed_forward,
            "max_position_embeddings": max(max_length, self.pretraining.length),
            "tie_word_embeddings": self.tied,
            "bos_token_id": ids.bos,
            "eos_token_id": ids.eos,
            "pad_token_id": None,
        }
        return config_of(described | ({"sliding_window": None} if self.kind == "mistral" else {}))

    def folder(self, context: BuildContext) -> Path:
        """The checkpoint, made if it is not in the cache; see made_once."""
        ids = self.text.token_ids(context.cache_dir)
        config = self.config(context.max_length, ids)
        texts = self.text.sentences(self.num_texts, context.cache_dir)

        def build(folder: Path, unfinished: Path) -> None:
            def report(line: str) -> None:
                what = f"{self.describe()}: pretraining on {len(texts):,} public texts"
                context.report(f"{what}, {line}")

            shorter = "model.own.pretraining.steps=N makes it shorter"
            report(f"{self.pretraining.steps} steps; {shorter}")
            part = Part(range(self.num_layers), True, True)
            network = network_of(config, part)
            draw_weights(network, self.pretraining.seed)
            stage = CausalStage(network, part, 8192, {"lora": False}).to(context.device)
            loss = _pretrain(stage, texts, ids, self.pretraining, report, unfinished)
            write_checkpoint(network, folder)
            if self.pretraining.steps:
                context.report(f"{self.describe()}: loss {loss:.3f} at the end")

        described = {
            "code": CODE_VERSION,
            "settings": {k: v for k, v in asdict(self).items() if k != "text"},
            "positions": config.max_position_embeddings,
            "ids": asdict(ids),
        }
        return made_once(f"causal/{key_of(described, bytes_of(texts))}", context, build)[0]


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

    def windows() -> Iterator[dict[str, Tensor]]:
        while True:
            starts_B = torch.randint(
                len(flat) - settings.length, (settings.batch_size,), generator=draw
            )
            places_BS = starts_B[:, None] + torch.arange(settings.length)
            text_BS, label_BS = flat[places_BS].to(device), flat[places_BS + 1].to(device)
            yield {TEXT: text_BS, TYPES: torch.zeros_like(text_BS), LABEL: label_BS}

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = stage(None, batch).loss
        return loss / batch[LABEL].numel()

    mean = math.nan
    with torch.enable_grad():
        stage.train()
        descent = settings.descend(
            stage, windows(), loss_of, report, lambda: f"loss {mean:.3f}", unfinished
        )
        for _, loss in descent:
            now = float(loss)
            mean = now if math.isnan(mean) else 0.95 * mean + 0.05 * now
    return mean

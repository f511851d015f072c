"""Causal language models that start from weights drawn by the run's seed, each stage in its own
cloud. Every block draws from a random stream of its own, so the layout changes nothing."""

from __future__ import annotations

from typing import Any

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Labelled, Positive, settings


@settings("ProtocolGpt", kw_only=True)
class ProtocolGpt(Labelled):
    """The network of the benchmark Protocol NanoGPT (protocol_gpt.py), which is of the size that
    stands here: 203,828,352 parameters.

    vocab_size: the number of token ids, at least as many as the tokenizer has.
    hidden: the number of features of a row, a multiple of num_heads.
    num_layers: the number of blocks; the benchmark has one in each of eight stages.
    num_heads: the number of attention heads of a block.
    """

    vocab_size: Positive = 50_304
    hidden: Positive = 1024
    num_layers: Positive = 8
    num_heads: Positive = 8

    def __post_init__(self) -> None:
        if self.hidden % (4 * self.num_heads):
            raise ConfigError(
                f"ProtocolGpt.hidden is {self.hidden} for {self.num_heads} heads: half of a "
                f"head's pairs of features turn, so take a multiple of {4 * self.num_heads}"
            )

    label_form = "new Protocol GPT {num_layers} x {hidden}"

    def config(self, max_length: int) -> Any:
        from xcloud.models.protocol_gpt import ProtocolGptConfig

        return ProtocolGptConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            max_position_embeddings=max_length,
        )

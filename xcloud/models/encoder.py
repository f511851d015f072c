"""A BERT-type network in parts: embeddings, single layers, masked-language head.
Checkpoints are loaded in backbone.py, pretraining is in pretraining.py.

Shapes: B samples, S positions, R rows (tokens that are not padding), H features, V token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Fraction, NotNegativeFloat, Positive, settings
from xcloud.models.attention import Cache, Packing, SelfAttention

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # under the names of transformers
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@settings("EncoderConfig")
class EncoderConfig:
    """The architecture: everything needed to build an Encoder, except weights.

    Devlin et al., arXiv:1810.04805: post-LN, learned positions. RoBERTa's unused first positions
    are dropped, so there is no offset: see checkpoint.py.
    """

    vocab_size: Positive
    hidden: Positive
    num_layers: Positive
    num_heads: Positive
    feed_forward: Positive
    max_positions: Positive  # longest text, special ids included
    dropout: Fraction = 0.1  # after the embeddings and each sub-layer
    attention_dropout: Fraction = 0.0  # 0 keeps attention on the fused kernel
    activation: Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"] = "gelu"
    layer_norm_eps: NotNegativeFloat = 1e-12
    type_vocab_size: Positive = 1

    def __post_init__(self) -> None:
        check_heads("EncoderConfig.num_heads", self.num_heads, self.hidden)


def check_heads(name: str, num_heads: int, hidden: int) -> None:
    """Raise ConfigError unless the features divide evenly over the heads."""
    if hidden % num_heads:
        raise ConfigError(f"{name} must divide the hidden size {hidden}, got {num_heads}")


class Embeddings(nn.Module):
    """LayerNorm(word + position + type)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.word_adapter: nn.Embedding | None = None

    def adapt_words(self) -> None:
        """Add to each word's vector a second one [V, H], trained and zero at first."""
        zeros_VH = torch.zeros_like(self.words.weight)
        self.word_adapter = nn.Embedding(len(zeros_VH), zeros_VH.shape[1], _weight=zeros_VH)

    def forward(self, ids_R: Tensor, packing: Packing, types_R: Tensor | None = None) -> Tensor:
        """[R] -> [R, H]. types_R: None means all 0."""
        packing.check(self.positions.num_embeddings)
        of_type = self.types.weight[0] if types_R is None else self.types(types_R)
        words = self.words(ids_R)
        if self.word_adapter is not None:
            words = words + self.word_adapter(ids_R)
        positions = self.positions(packing.positions)
        rows: Tensor = self.dropout(self.norm(words + of_type + positions))
        return rows


class EncoderLayer(nn.Module):
    """x = LN(x + attention(x)); x = LN(x + down(activation(up(x)))).

    `attend` and `feed` are the two sub-layers, for callers that insert something in between.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config.hidden, config.num_heads, config.attention_dropout)
        self.attention_norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)
        self.up = nn.Linear(config.hidden, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]

    def forward(
        self, rows_RH: Tensor, packing: Packing, causal: bool = False, past: Cache | None = None
    ) -> Tensor:
        return self.feed(self.attend(rows_RH, packing, causal, past))

    def attend(
        self, rows_RH: Tensor, packing: Packing, causal: bool = False, past: Cache | None = None
    ) -> Tensor:
        attended = self.attention(rows_RH, packing, causal, past)
        rows: Tensor = self.attention_norm(rows_RH + self.dropout(attended))
        return rows

    def feed(self, rows: Tensor) -> Tensor:
        fed = self.down(self.activation(self.up(rows)))
        rows = self.norm(rows + self.dropout(fed))
        return rows


class MaskedHead(nn.Module):
    """logits = words . LN(activation(dense(x))) + bias, with `words` the embedding itself.

    The embedding is passed in, not stored, so that the state dict contains it once.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, rows_RH: Tensor, words_VH: Tensor) -> Tensor:
        """[R, H] -> [R, V]."""
        return F.linear(self.norm(self.activation(self.dense(rows_RH))), words_VH, self.bias)


class Encoder(nn.Module):
    """A whole network or a part of it: some `layers`, with or without embeddings and head.

    The state dict of a part uses the names of the whole network.
    """

    def __init__(
        self,
        config: EncoderConfig,
        layers: range | None = None,
        *,
        embeddings: bool = True,
        head: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        if layers is None:
            layers = range(config.num_layers)
        self.embeddings = Embeddings(config) if embeddings else None
        self.layers = nn.ModuleDict({str(i): EncoderLayer(config) for i in layers})
        self.head = MaskedHead(config) if head else None
        self.apply(partial(_start_weights, std=0.02 * math.sqrt(768 / config.hidden)))

    def forward(
        self,
        ids_R: Tensor,
        packing: Packing,
        types_R: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Token ids [R] -> last hidden rows [R, H]. Needs the embeddings."""
        assert self.embeddings is not None
        rows: Tensor = self.embeddings(ids_R, packing, types_R)
        for layer in self.layers.values():
            rows = layer(rows, packing, causal)
        return rows

    def logits(self, rows_RH: Tensor) -> Tensor:
        """Hidden rows [R, H] -> logits [R, V]."""
        assert self.head is not None and self.embeddings is not None
        scores: Tensor = self.head(rows_RH, self.embeddings.words.weight)
        return scores

    def layer(self, index: int) -> EncoderLayer:
        """A layer by its index in the whole network."""
        return cast(EncoderLayer, self.layers[str(index)])

    def load_part(self, weights: Mapping[str, Tensor]) -> None:
        """Load this part from the whole network's weights. DataError if one is missing."""
        own = self.state_dict()
        lacking = sorted(set(own) - set(weights))
        if lacking:
            raise DataError(f"backbone weights lack {lacking[0]} and {len(lacking) - 1} more")
        self.load_state_dict({name: weights[name] for name in own})


def _start_weights(module: nn.Module, std: float) -> None:
    """Normal, biases zero. BERT's 0.02 suits width 768; narrower networks learn faster with a
    larger std: width 128, 800 steps, 16.2 % held-out accuracy with 0.05, 14.9 % with 0.02.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)

"""Attention over packed rows, without computing or storing padding; a Transformer's layer, and a
BERT-type network: embeddings, layers, head. Where its weights come from: backbone.py.

Shapes: B samples, S positions of the longest sample, R = sum(counts) rows (tokens that are not
padding), H features of a row, h heads of d features, V token ids, N hypotheses of a decoding step.
Between sub-layers a batch is [R, H]; only inside attention it is laid out as [B, h, S, d].
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Fraction, NotNegativeFloat, Positive, settings
from xcloud.comm.devices import bring
from xcloud.contracts.architecture import MAX_LAYERS

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # under the names of transformers
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class Packing:
    """Token positions of a padded batch, from the counts alone, which cross with the rows. It
    packs what is on the host; `on` gives one for what is on a device.

    counts: the tokens per sample, int64 [B], all >= 1. Samples are padded on the right. The counts
        stay on the host.
    mask: a mask that is True at tokens, bool [B, 1, 1, S]; None if nothing is padded.
    positions: the position of each row in its sample, int64 [R], or the given position instead: in
        its document, or in the text that is being decoded.
    """

    def __init__(self, counts: Tensor, positions: Tensor | None = None) -> None:
        # Both ends in one copy from the device.
        shortest, longest = torch.stack(counts.aminmax()).tolist()
        if shortest < 1:
            raise ValueError("a sample has no token")
        self.counts = counts.long()
        self.longest = longest
        self.mask: Tensor | None = None
        places = torch.arange(longest, device=counts.device)
        if shortest == longest:
            # Equal lengths: nothing is padded, and packing is a change of shape.
            own = places.repeat(len(counts))
        else:
            is_token_BS = places < self.counts[:, None]
            self.mask = is_token_BS[:, None, None, :]
            flat = is_token_BS.flatten()
            self._cells_R = flat.nonzero()[:, 0]
            # A padded cell repeats the previous row: finite, and without gradient, because keys
            # are masked and results of padded queries are dropped.
            self._rows = flat.cumsum(0) - 1
            own = self._cells_R % longest
        self.positions = own if positions is None else positions

    @classmethod
    def of(cls, ids_BS: Tensor, pad: int) -> Packing:
        return cls((ids_BS != pad).sum(1))

    def on(self, device: torch.device) -> Packing:
        """Return the packing of rows that are on this device."""
        # Counts stay on the host, which needs the numbers.
        there = copy.copy(self)
        there.positions = bring(self.positions, device)
        if self.mask is not None:
            there.mask = bring(self.mask, device)
            there._cells_R = bring(self._cells_R, device)
            there._rows = bring(self._rows, device)
        return there

    def check(self, num_positions: int) -> None:
        """Raise ValueError for a text longer than a network can take."""
        if self.longest > num_positions:
            most = f"this network supports at most {num_positions}"
            raise ValueError(f"got a text of {self.longest} tokens; {most}: lower task.max_length")

    def pack(self, grid: Tensor) -> Tensor:
        """[B, at least S, ...] -> [R, ...]."""
        flat = grid[:, : self.longest].flatten(0, 1)
        if self.mask is None:
            return flat
        return flat.index_select(0, self._cells_R)

    def unpack(self, rows: Tensor) -> Tensor:
        """[R, ...] -> [B, S, ...]; padded cells hold arbitrary values."""
        flat = rows.index_select(0, self._rows) if self.mask is not None else rows
        return torch.unflatten(flat, 0, (len(self.counts), self.longest))


@dataclass
class Cache:
    """The keys and values that a decoder's layer attends to beside the rows it is given.

    source: the keys and values of the source, [2, B, h, S, d], shared by the hypotheses of a
        sentence.
    mask: the mask of the source's padding.
    decodes: the rows are one new token each, and the cache also keeps the keys and values of the
        t tokens so far, [2, N, h, t, d].
    """

    source: Tensor | None = None
    mask: Tensor | None = None
    decodes: bool = False
    past: Tensor | None = None

    def keep(self, rows: Tensor, sentences: Tensor | None) -> None:
        """Keep some rows only, as CachedDecoder.keep does."""
        if self.past is not None:
            self.past = self.past.index_select(1, rows)
        if sentences is not None and self.source is not None:
            self.source = self.source.index_select(1, sentences)
            if self.mask is not None:
                self.mask = self.mask.index_select(0, sentences)


class SelfAttention(nn.Module):
    """softmax(q k' / sqrt(d)) v within each sample, then the output projection."""

    def __init__(self, hidden: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        _start_attention(self, hidden)

    def forward(self, rows_RH: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        """cache: of a decoder, in which a row sees itself and those before it."""
        grid = packing.unpack(self.query_key_value(rows_RH))
        heads = torch.unflatten(grid, 2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        pair = heads[1:]
        decodes = cache is not None and cache.decodes
        if cache is not None and decodes:
            pair = cache.past = pair if cache.past is None else torch.cat((cache.past, pair), 3)
        keys, values = pair
        mixed = F.scaled_dot_product_attention(
            heads[0],
            keys,
            values,
            # Padding is on the right, so the causal mask already hides it.
            attn_mask=packing.mask if cache is None else None,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=cache is not None and not decodes,
        )
        return cast(Tensor, self.output(packing.pack(mixed.transpose(1, 2).flatten(2))))


class CrossAttention(nn.Module):
    """Attention of target rows to the source rows of the same sample; widths may differ."""

    def __init__(self, hidden: int, source_hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden, hidden)
        self.key_value = nn.Linear(source_hidden, 2 * hidden)
        self.output = nn.Linear(hidden, hidden)
        _start_attention(self, hidden)

    def open(self, source_RH: Tensor, packing: Packing, decodes: bool) -> Cache:
        grid = packing.unpack(self.key_value(source_RH))
        heads = torch.unflatten(grid, 2, (2, self.num_heads, -1))
        return Cache(source=heads.permute(2, 0, 3, 1, 4), mask=packing.mask, decodes=decodes)

    def forward(self, rows_RH: Tensor, packing: Packing, cache: Cache) -> Tensor:
        """packing: of the target rows. In a decoding step hypotheses are their positions."""
        assert cache.source is not None
        keys, values = cache.source
        grid = packing.unpack(self.query(rows_RH))
        # In a decoding step N hypotheses of a sentence are as many queries to its keys, which stay
        # [B, h, S, d].
        query = grid.reshape(len(keys), -1, self.num_heads, keys.shape[3]).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=cache.mask)
        return cast(Tensor, self.output(packing.pack(mixed.transpose(1, 2).reshape(grid.shape))))


def _start_attention(attention: nn.Module, hidden: int) -> None:
    """Xavier separately for query, key, value and output, even if fused; biases zero. With
    nn.Linear's default AB-Net's loss is 5 % higher after 150 steps of a toy task."""
    for linear in attention.children():
        assert isinstance(linear, nn.Linear)
        for part in torch.split(linear.weight, hidden):
            nn.init.xavier_uniform_(part)
        nn.init.zeros_(linear.bias)


class Layer(nn.Module):
    """x + attention(LN(x)); x + feed(LN(x)). crosses: in a decoder attention is causal, and
    x + cross-attention(LN(x), source) comes in between."""

    def __init__(
        self, hidden: int, num_heads: int, feed_forward: int, dropout: float, crosses: bool
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, num_heads)
        if crosses:
            self.cross_norm = nn.LayerNorm(hidden)
            self.cross = CrossAttention(hidden, source_hidden=hidden, num_heads=num_heads)
        self.feed_norm = nn.LayerNorm(hidden)
        up = nn.Linear(hidden, feed_forward)
        down = nn.Linear(feed_forward, hidden)
        for linear in (up, down):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.feed = nn.Sequential(up, nn.ReLU(), down)
        self.dropout = nn.Dropout(dropout)

    def forward(self, rows_RH: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(rows_RH), packing, cache)
        rows: Tensor = rows_RH + self.dropout(attended)
        if cache is not None:
            attended = self.cross(self.cross_norm(rows), packing, cache)
            rows = rows + self.dropout(attended)
        rows = rows + self.dropout(self.feed(self.feed_norm(rows)))
        return rows


@settings("EncoderConfig")
class EncoderConfig:
    """The architecture of an Encoder (Devlin et al., arXiv:1810.04805: post-LN, learned positions,
    which begin at 0 in RoBERTa, too)."""

    vocab_size: Annotated[int, Field(ge=1, le=2**24)]
    hidden: Annotated[int, Field(ge=1, le=2**17)]
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    num_heads: Positive
    feed_forward: Annotated[int, Field(ge=1, le=2**20)]
    max_positions: Annotated[int, Field(ge=1, le=2**24)]  # longest text, special ids included
    dropout: Fraction = 0.1  # after the embeddings and each sub-layer
    attention_dropout: Fraction = 0.0  # 0 keeps attention on the fused kernel
    activation: Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"] = "gelu"
    layer_norm_eps: NotNegativeFloat = 1e-12
    type_vocab_size: Annotated[int, Field(ge=1, le=2**16)] = 1

    def __post_init__(self) -> None:
        check_heads("EncoderConfig.num_heads", num_heads=self.num_heads, whole=self.hidden)


def check_heads(name: str, num_heads: int, whole: int, what: str = "the hidden size") -> None:
    """Raise ConfigError unless the whole divides evenly over the heads."""
    if whole % num_heads:
        raise ConfigError(f"{name} must divide {what} {whole}, got {num_heads}")


class Embeddings(nn.Module):
    """LayerNorm(word + position + type)."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.word_adapter: nn.Embedding | None = None  # a second vector of each word (AbNet)

    def forward(self, ids_R: Tensor, packing: Packing, types_R: Tensor | None = None) -> Tensor:
        """[R] -> [R, H]. types_R: None means all 0."""
        packing.check(self.positions.num_embeddings)
        of_type = self.types.weight[0] if types_R is None else self.types(types_R)
        words = self.words(ids_R)
        if self.word_adapter is not None:
            words = words + self.word_adapter(ids_R)
        placed = words + of_type + self.positions(packing.positions)
        return cast(Tensor, self.dropout(self.norm(placed)))


class EncoderLayer(nn.Module):
    """x = LN(x + attention(x)) in `attend`; x = LN(x + down(activation(up(x)))) in `feed`."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(
            hidden=config.hidden, num_heads=config.num_heads, dropout=config.attention_dropout
        )
        self.attention_norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)
        self.up = nn.Linear(config.hidden, config.feed_forward)
        self.down = nn.Linear(config.feed_forward, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, rows_RH: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        return self.feed(self.attend(rows_RH, packing=packing, cache=cache))

    def attend(self, rows_RH: Tensor, packing: Packing, cache: Cache | None = None) -> Tensor:
        attended = self.attention(rows_RH, packing, cache)
        return cast(Tensor, self.attention_norm(rows_RH + self.dropout(attended)))

    def feed(self, rows: Tensor) -> Tensor:
        fed = self.down(self.activation(self.up(rows)))
        return cast(Tensor, self.norm(rows + self.dropout(fed)))


class MaskedHead(nn.Module):
    """logits = words . LN(activation(dense(x))) + bias, with `words` the embedding, which is
    passed in, so that the state dict contains it once."""

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
        numbers = range(config.num_layers) if layers is None else layers
        self.embeddings = Embeddings(config) if embeddings else None
        self.layers = nn.ModuleDict({str(i): EncoderLayer(config) for i in numbers})
        self.head = MaskedHead(config) if head else None
        self.apply(partial(_start_weights, std=0.02 * math.sqrt(768 / config.hidden)))

    def forward(
        self, ids_R: Tensor, packing: Packing, types_R: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """[R] -> [R, H]."""
        assert self.embeddings is not None
        rows: Tensor = self.embeddings(ids_R, packing, types_R)
        for layer in self.layers.values():
            rows = layer(rows, packing, Cache() if causal else None)
        return rows

    def logits(self, rows_RH: Tensor) -> Tensor:
        """[R, H] -> [R, V]."""
        assert self.head is not None and self.embeddings is not None
        return cast(Tensor, self.head(rows_RH, self.embeddings.words.weight))

    def layer(self, index: int) -> EncoderLayer:
        return cast(EncoderLayer, self.layers[str(index)])

    def load_part(self, weights: Mapping[str, Tensor]) -> None:
        """Load this part from the whole network's weights; a head that they lack stays as it is.
        DataError if anything else is missing."""
        own = self.state_dict()
        if lacking := [n for n in own if n not in weights and not n.startswith("head.")]:
            raise DataError(
                f"the backbone has no weights for {lacking[0]} and {len(lacking) - 1} more"
            )
        self.load_state_dict({name: weights.get(name, own[name]) for name in own})


def _start_weights(module: nn.Module, std: float) -> None:
    """Normal, biases zero. BERT's 0.02 suits width 768; narrower networks learn faster with a
    larger std: width 128, 800 steps, 16.2 % held-out accuracy with 0.05, 14.9 % with 0.02."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)

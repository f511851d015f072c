"""Attention over packed rows, without computing or storing padding. No layers or residuals.

Shapes: B samples, S positions of the longest sample, R = sum(counts) rows (tokens that are not
padding), H features of a row, h heads of d features, N rows of a decoding step (one new token for
each hypothesis), T target positions.
Between sub-layers a batch is [R, H]; only inside attention it is laid out as [B, h, S, d].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Packing:
    """Token positions of a padded batch. Built from the counts alone, so a cloud that receives
    only counts and rows can rebuild it.

    counts: int64 [B], all >= 1, tokens per sample; samples are padded on the right.
    mask: padding mask, bool [B, 1, 1, S], True at tokens; None if nothing is padded.
    positions: int64 [R], position of each row in its sample.
    """

    def __init__(self, counts: Tensor) -> None:
        shortest, longest = torch.stack(counts.aminmax()).tolist()
        if shortest < 1:
            raise ValueError("a sample has no token; every text needs at least its end id")
        self.counts = counts.long()
        self.num_samples = counts.shape[0]
        self.longest = longest
        self.mask: Tensor | None = None
        places = torch.arange(longest, device=counts.device)
        if shortest == longest:
            self.positions = places.repeat(self.num_samples)
        else:
            is_token_BS = places < self.counts[:, None]
            self.mask = is_token_BS[:, None, None, :]
            flat = is_token_BS.flatten()
            self._cells_R = flat.nonzero()[:, 0]
            # A padded cell repeats the previous row: finite, and without gradient, because keys
            # are masked and results of padded queries are dropped.
            self._rows = flat.cumsum(0) - 1
            self.positions = self._cells_R % longest

    @classmethod
    def of(cls, ids_BS: Tensor, pad: int) -> Packing:
        """From ids padded on the right."""
        return cls((ids_BS != pad).sum(1))

    def pack(self, grid: Tensor) -> Tensor:
        """[B, at least S, ...] -> [R, ...]."""
        flat = grid[:, : self.longest].flatten(0, 1)
        return flat if self.mask is None else flat.index_select(0, self._cells_R)

    def unpack(self, rows: Tensor) -> Tensor:
        """[R, ...] -> [B, S, ...]; padded cells hold arbitrary values."""
        flat = rows if self.mask is None else rows.index_select(0, self._rows)
        return torch.unflatten(flat, 0, (self.num_samples, self.longest))


@dataclass
class GrowingCache:
    """Keys and values [N, h, t, d] of the t tokens decoded so far, for one layer."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append one position [N, h, 1, d]; return all so far."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat((self.keys, keys), 2)
            values = torch.cat((self.values, values), 2)
        self.keys, self.values = keys, values
        return keys, values

    def keep(self, rows: Tensor) -> None:
        """Row i continues the former row rows[i]."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, rows)
            self.values = self.values.index_select(0, rows)


@dataclass
class FixedCache:
    """Keys and values [B, h, S, d] of the source sentences, for one layer; computed once.

    Shared by all hypotheses of a sentence, so beams copy nothing here.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None

    def keep(self, sentences: Tensor) -> None:
        self.keys = self.keys.index_select(0, sentences)
        self.values = self.values.index_select(0, sentences)
        self.mask = None if self.mask is None else self.mask.index_select(0, sentences)


class SelfAttention(nn.Module):
    """softmax(q k' / sqrt(d)) v within each sample, then the output projection.

    Query, key and value are one matrix product, which is faster than three small ones.
    """

    def __init__(self, hidden: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        _start_weights(self, hidden)

    def forward(self, rows_RH: Tensor, packing: Packing, causal: bool = False) -> Tensor:
        grid = packing.unpack(self.query_key_value(rows_RH))
        heads = torch.unflatten(grid, 2, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value,
            # Padding is on the right, so the causal mask already hides it.
            attn_mask=None if causal else packing.mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        output: Tensor = self.output(packing.pack(mixed.transpose(1, 2).flatten(2)))
        return output

    def step(self, rows_NH: Tensor, cache: GrowingCache) -> Tensor:
        """Causal attention of one new token for each hypothesis; extends the cache."""
        heads = torch.unflatten(self.query_key_value(rows_NH), 1, (3, self.num_heads, 1, -1))
        query, key, value = heads.unbind(1)
        key, value = cache.extend(key, value)
        mixed = F.scaled_dot_product_attention(query, key, value)
        output: Tensor = self.output(mixed.flatten(1))
        return output


class CrossAttention(nn.Module):
    """Attention of target rows to the source rows of the same sample; widths may differ."""

    def __init__(self, hidden: int, source_hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden, hidden)
        self.key_value = nn.Linear(source_hidden, 2 * hidden)
        self.output = nn.Linear(hidden, hidden)
        _start_weights(self, hidden)

    def open(self, source_RH: Tensor, packing: Packing) -> FixedCache:
        """Keys and values of the source sentences."""
        grid = packing.unpack(self.key_value(source_RH))
        heads = torch.unflatten(grid, 2, (2, self.num_heads, -1))
        keys, values = heads.permute(2, 0, 3, 1, 4)
        return FixedCache(keys, values, packing.mask)

    def forward(self, rows_RH: Tensor, packing: Packing, source: FixedCache) -> Tensor:
        """packing: of the target rows."""
        grid_BTH = packing.unpack(self.query(rows_RH))
        output: Tensor = self.output(packing.pack(self._mix(grid_BTH, source)))
        return output

    def step(self, rows_NH: Tensor, source: FixedCache) -> Tensor:
        """N = B * hypotheses per sentence; the hypotheses take the place of T."""
        grid_BTH = torch.unflatten(self.query(rows_NH), 0, (source.keys.shape[0], -1))
        output: Tensor = self.output(self._mix(grid_BTH, source).flatten(0, 1))
        return output

    def _mix(self, query_BTH: Tensor, source: FixedCache) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            torch.unflatten(query_BTH, 2, (self.num_heads, -1)).transpose(1, 2),
            source.keys,
            source.values,
            attn_mask=source.mask,
        )
        return mixed.transpose(1, 2).flatten(2)


def _start_weights(attention: nn.Module, hidden: int) -> None:
    """Xavier separately for query, key, value and output, even if fused; biases zero.
    With nn.Linear's smaller default, AB-Net's loss is 5 % higher after 150 steps of a toy task.
    """
    for linear in attention.children():
        assert isinstance(linear, nn.Linear)
        for part in torch.split(linear.weight, hidden):
            nn.init.xavier_uniform_(part)
        nn.init.zeros_(linear.bias)

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
    """Token positions of a padded batch, from the counts alone, which cross with the rows.

    counts: int64 [B], all >= 1, tokens per sample; samples are padded on the right.
    mask: padding mask, bool [B, 1, 1, S], True at tokens; None if nothing is padded.
    positions: int64 [R], position of each row in its sample, or what is given instead: in its
        document, in the text that is being decoded.
    """

    def __init__(self, counts: Tensor, positions: Tensor | None = None) -> None:
        shortest, longest = torch.stack(counts.aminmax()).tolist()
        if shortest < 1:
            raise ValueError("a sample has no token; every text needs at least its end id")
        self.counts = counts.long()
        self.num_samples = counts.shape[0]
        self.longest = longest
        self.mask: Tensor | None = None
        places = torch.arange(longest, device=counts.device)
        if shortest == longest:
            own = places.repeat(self.num_samples)
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

    def check(self, num_positions: int) -> None:
        """Raise ValueError for a text longer than a network can take."""
        if self.longest > num_positions:
            raise ValueError(
                f"got a text of {self.longest} tokens; this network supports at most "
                f"{num_positions}. Lower the task's max_length."
            )

    def pack(self, grid: Tensor) -> Tensor:
        """[B, at least S, ...] -> [R, ...]."""
        flat = grid[:, : self.longest].flatten(0, 1)
        return flat if self.mask is None else flat.index_select(0, self._cells_R)

    def unpack(self, rows: Tensor) -> Tensor:
        """[R, ...] -> [B, S, ...]; padded cells hold arbitrary values."""
        flat = rows if self.mask is None else rows.index_select(0, self._rows)
        return torch.unflatten(flat, 0, (self.num_samples, self.longest))


@dataclass
class Cache:
    """What attention of one layer has to look at: keys and values [2, N, h, t, d] of the t tokens
    decoded so far; or [2, B, h, S, d] of the source, computed once and shared by the hypotheses of
    a sentence. mask: of the source's padding.
    """

    pair: Tensor | None = None
    mask: Tensor | None = None

    def extend(self, pair: Tensor) -> Tensor:
        """Append one position [2, N, h, 1, d]; return all so far."""
        self.pair = pair if self.pair is None else torch.cat((self.pair, pair), 3)
        return self.pair

    def keep(self, rows: Tensor) -> None:
        """Row i continues the former row rows[i]."""
        self.pair = None if self.pair is None else self.pair.index_select(1, rows)
        self.mask = None if self.mask is None else self.mask.index_select(0, rows)


@dataclass
class LayerCache:
    """Of a decoder layer: what it sees of the source and, in a decoding step, of the past."""

    source: Cache
    past: Cache | None = None


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

    def forward(
        self, rows_RH: Tensor, packing: Packing, causal: bool = False, past: Cache | None = None
    ) -> Tensor:
        """past: rows are one new token of each hypothesis, which sees those before it too."""
        grid = packing.unpack(self.query_key_value(rows_RH))
        heads = torch.unflatten(grid, 2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        keys, values = heads[1:] if past is None else past.extend(heads[1:])
        mixed = F.scaled_dot_product_attention(
            heads[0],
            keys,
            values,
            # Padding is on the right, so the causal mask already hides it.
            attn_mask=None if causal else packing.mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal and past is None,
        )
        output: Tensor = self.output(packing.pack(mixed.transpose(1, 2).flatten(2)))
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

    def open(self, source_RH: Tensor, packing: Packing) -> Cache:
        """Keys and values of the source sentences."""
        grid = packing.unpack(self.key_value(source_RH))
        heads = torch.unflatten(grid, 2, (2, self.num_heads, -1))
        return Cache(heads.permute(2, 0, 3, 1, 4), packing.mask)

    def forward(self, rows_RH: Tensor, packing: Packing, source: Cache) -> Tensor:
        """packing: of the target rows. In a decoding step, of N = B * hypotheses per sentence, the
        hypotheses take the place of the positions."""
        assert source.pair is not None
        keys, values = source.pair
        grid = packing.unpack(self.query(rows_RH))
        query = grid.reshape(len(keys), -1, self.num_heads, keys.shape[3]).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=source.mask)
        output: Tensor = self.output(packing.pack(mixed.transpose(1, 2).reshape(grid.shape)))
        return output


def _start_weights(attention: nn.Module, hidden: int) -> None:
    """Xavier separately for query, key, value and output, even if fused; biases zero.
    With nn.Linear's smaller default, AB-Net's loss is 5 % higher after 150 steps of a toy task.
    """
    for linear in attention.children():
        assert isinstance(linear, nn.Linear)
        for part in torch.split(linear.weight, hidden):
            nn.init.xavier_uniform_(part)
        nn.init.zeros_(linear.bias)

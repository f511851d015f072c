"""Causal attention within documents whose rows stand one behind the other, without a mask of all
pairs: memory grows with the number of rows, work with the sum of the squares of the documents'
lengths. `transformers` calls `attend` for the models of causal_network.py.

Shapes: B samples, R rows of a micro-batch, D documents of a group, L tokens of the longest of
them, S new positions and T positions that they may see, N heads of F features.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from xcloud.comm.devices import bring
from xcloud.models.encoder import Packing

ATTENTION = "documents"  # our name among the attention functions of transformers
SHORTEST = 0.75  # length of a group's shortest document, as a share of its longest
QUERIES = 256  # queries whose mask exists at a time, where a mask is needed
LONG = 512  # tokens; see _kernel


class Documents:
    """The documents of a micro-batch, in groups of similar length.

    A group is padded on the right to its longest document. Causal attention hides that padding
    from every token, so it needs no mask.

    packing: the packing of the micro-batch, on the host.
    device: the device of the rows.
    """

    def __init__(self, packing: Packing, device: torch.device) -> None:
        starts_R = packing.positions == 0
        starts_R[packing.counts.cumsum(0) - packing.counts] = True  # a sample never sees another
        starts = starts_R.nonzero()[:, 0].tolist()
        lengths = [
            stop - start for start, stop in zip(starts, [*starts[1:], len(starts_R)], strict=True)
        ]
        members: list[list[int]] = []
        for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
            # From the longest down, a group ends where padding would be more than a quarter of a
            # document.
            if not members or lengths[number] < SHORTEST * lengths[members[-1][0]]:
                members.append([])
            members[-1].append(number)
        all_rows: list[Tensor] = []
        self._groups: list[tuple[Tensor, Packing]] = []
        # In their order in the batch, so that gathering rows reads memory forward.
        for numbers in map(sorted, members):
            rows = torch.cat([torch.arange(lengths[n]) + starts[n] for n in numbers])
            counts = torch.tensor([lengths[n] for n in numbers])
            all_rows.append(rows)
            self._groups.append((bring(rows, device), Packing(counts).on(device)))
        # Puts rows of all groups back where they stood.
        self._order_R = bring(torch.cat(all_rows).argsort(), device)

    def attend(
        self, query_RNF: Tensor, key_RNF: Tensor, value_RNF: Tensor, how: Callable[..., Tensor]
    ) -> Tensor:
        """Return what each row takes from its document, [R, N, F]. how: see `causal`."""
        made = []
        for rows, packing in self._groups:
            grids = []
            for tensor in (query_RNF, key_RNF, value_RNF):
                # One group: rows are in order already, and nothing is copied.
                own = tensor if len(self._groups) == 1 else tensor.index_select(0, rows)
                grids.append(packing.unpack(own).transpose(1, 2))
            made.append(packing.pack(how(*grids).transpose(1, 2)))
        if len(made) == 1:
            return made[0]
        return torch.cat(made).index_select(0, self._order_R)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    documents: Documents | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool = False,
    output_router_logits: bool = False,
) -> tuple[Tensor, None]:
    """Return what `transformers` expects of an attention function, [B, S, N, F] and no weights.
    A further argument, which would ask for another attention, is a TypeError.

    query: a tensor [B, N, S, F].
    key, value: tensors [B, N or fewer, T, F], of earlier tokens too.
    documents: the documents that the rows of the only sample (B = 1) belong to; None: each sample
        is one document.
    position_ids, use_cache, output_router_logits: unused.
    """
    assert getattr(module, "is_causal", True), "config_of refuses a model that is not"
    how = partial(causal, dropout=dropout, scaling=scaling, window=sliding_window, softcap=softcap)
    if documents is None:
        return how(query, key, value).transpose(1, 2), None
    query_RNF, key_RNF, value_RNF = (t[0].transpose(0, 1) for t in (query, key, value))
    return documents.attend(query_RNF, key_RNF, value_RNF, how=how)[None], None


def causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return softmax(q k' * scaling) v, [D, N, S, F], where the last query sees all T keys, the
    one before it all but the last, and so on, each at most the `window` nearest.

    softcap: scores become softcap * tanh(scores / softcap), as in Gemma 2.
    """
    num_new = query.shape[2]
    num_keys = key.shape[2]
    before = num_keys - num_new
    window = min(window or num_keys, num_keys)
    # torch's causal flag is of squares; one new token sees everything and needs none.
    is_plain = softcap is None and window == num_keys and (num_new == 1 or before == 0)
    if not (is_plain and _shares_keys(query)):
        # One head of keys and values for each head of queries.
        num_each = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(num_each, 1)
        value = value.repeat_interleave(num_each, 1)
    if is_plain:
        with _kernel(query):
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=num_new > 1,
                scale=scaling,
                enable_gqa=key.shape[1] < query.shape[1],
            )
    made = []
    # A few queries at a time: their mask is [QUERIES, keys], and a window leaves out most keys.
    for start in range(0, num_new, QUERIES):
        some = query[:, :, start : start + QUERIES]
        first = max(0, before + start - window + 1)
        stop = before + start + some.shape[2]
        sees = torch.ones(some.shape[2], stop - first, dtype=torch.bool, device=query.device)
        diagonal = before + start - first
        sees = sees.tril(diagonal).triu(diagonal - window + 1)
        keys = key[:, :, first:stop]
        values = value[:, :, first:stop]
        if softcap is None:
            with _kernel(query):
                mixed = F.scaled_dot_product_attention(
                    some, keys, values, attn_mask=sees, dropout_p=dropout, scale=scaling
                )
        else:
            scores = some @ keys.transpose(2, 3) * (scaling or query.shape[3] ** -0.5)
            scores = softcap * torch.tanh(scores / softcap)
            # The least number and not -inf: a row of -inf alone would be NaN.
            scores = scores.masked_fill(~sees, torch.finfo(scores.dtype).min)
            weights = F.dropout(scores.softmax(-1, dtype=torch.float32), dropout)
            mixed = weights.to(values.dtype) @ values
        made.append(mixed)
    return torch.cat(made, 2)


def _shares_keys(query: Tensor) -> bool:
    """Return whether a fused kernel takes fewer heads of keys than of queries without a mask: on
    GPUs only in 16 bits, and plain products would keep all scores."""
    device = query.device.type
    return device == "cpu" or query.dtype.itemsize == 2 or torch.is_autocast_enabled(device)


def _kernel(query: Tensor) -> AbstractContextManager[object]:
    """Return the context of the fused kernel for long documents on CPUs, whatever the trainer
    chose for short ones: plain products keep all scores for the backward."""
    if query.device.type == "cpu" and query.shape[2] >= LONG:
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    return nullcontext()

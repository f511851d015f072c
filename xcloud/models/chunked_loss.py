"""Cross-entropy over a large vocabulary, a piece of it at a time. Knows no model and no padding.

Shapes: R rows, H features, V words, C words of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def chunked_cross_entropy(
    rows_RH: Tensor,
    words_VH: Tensor,
    labels_R: Tensor,
    chunk: int,
    softcap: float | None = None,
) -> Tensor:
    """float32 [R]: -log softmax(rows @ words')[label] of each row, in nats.

    Only [R, C] logits exist at any time, C = `chunk`: the forward keeps the running maximum and
    sum of a row, the backward computes each piece again from rows and words.
    softcap: logits become softcap * tanh(logits / softcap), as in Gemma 2.
    Under autocast the products are in its dtype; sums are float32.
    """
    device = rows_RH.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows_RH, words_VH = rows_RH.to(dtype), words_VH.to(dtype)
    losses: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows_RH, words_VH, labels_R, chunk, softcap
    )
    return losses


def _pieces(num_words: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, num_words, chunk))


def _logits(rows_RH: Tensor, words_CH: Tensor, softcap: float | None) -> Tensor:
    """float32 [R, C]."""
    logits_RC = (rows_RH @ words_CH.T).float()
    return logits_RC if softcap is None else softcap * torch.tanh(logits_RC / softcap)


def _places(labels_R: Tensor, piece: slice, num: int) -> tuple[Tensor, Tensor]:
    """Rows whose label lies in this piece of `num` words, and its place there."""
    inside = labels_R - piece.start
    rows = ((inside >= 0) & (inside < num)).nonzero()[:, 0]
    return rows, inside[rows]


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: Tensor,
        words_VH: Tensor,
        labels_R: Tensor,
        chunk: int,
        softcap: float | None,
    ) -> Tensor:
        most_R = torch.full(labels_R.shape, -torch.inf, device=rows_RH.device)
        total_R, right_R = torch.zeros_like(most_R), torch.zeros_like(most_R)
        for piece in _pieces(len(words_VH), chunk):
            logits_RC = _logits(rows_RH, words_VH[piece], softcap)
            rows, places = _places(labels_R, piece, logits_RC.shape[1])
            right_R[rows] = logits_RC[rows, places]
            larger_R = torch.maximum(most_R, logits_RC.amax(1))
            total_R = total_R * (most_R - larger_R).exp()
            total_R += logits_RC.sub_(larger_R[:, None]).exp_().sum(1)
            most_R = larger_R
        norm_R = most_R + total_R.log()
        ctx.save_for_backward(rows_RH, words_VH, labels_R, norm_R)
        ctx.chunk, ctx.softcap = chunk, softcap
        return norm_R - right_R

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows_RH, words_VH, labels_R, norm_R = ctx.saved_tensors
        wants_rows, wants_words = ctx.needs_input_grad[:2]
        # Summed over the pieces, so in float32 whatever the dtype of the products.
        to_rows = torch.zeros_like(rows_RH, dtype=torch.float32) if wants_rows else None
        to_words = torch.zeros_like(words_VH) if wants_words else None
        for piece in _pieces(len(words_VH), ctx.chunk):
            logits_RC = _logits(rows_RH, words_VH[piece], ctx.softcap)
            slope_RC = (logits_RC - norm_R[:, None]).exp_()
            rows, places = _places(labels_R, piece, logits_RC.shape[1])
            slope_RC[rows, places] -= 1
            slope_RC *= gradients[0][:, None]
            if ctx.softcap is not None:
                slope_RC *= 1 - (logits_RC / ctx.softcap) ** 2
            slope_RC = slope_RC.to(rows_RH.dtype)
            if to_rows is not None:
                to_rows += slope_RC @ words_VH[piece]
            if to_words is not None:
                to_words[piece] = slope_RC.T @ rows_RH
        return None if to_rows is None else to_rows.to(rows_RH.dtype), to_words, None, None, None

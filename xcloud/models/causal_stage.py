"""A stage of a cut causal language model: token ids or rows in, rows or the loss out.
Which blocks it holds and where they come from is causal.py's.

Batch fields, int64 [B, S]: "text" token ids, NO_TOKEN after them; "types" which of the sample's
documents a token belongs to, from 0; "label" the token to be guessed at each place, NO_LABEL where
none is.
Shapes: B samples, S positions, R rows (tokens that are not padding), H features,
V token ids, C of them in a piece of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from xcloud.contracts.model import (
    NO_LABEL,
    NO_TOKEN,
    Architecture,
    Batch,
    Message,
    Stage,
    StageOutput,
)
from xcloud.models.causal_network import HEAD, KINDS, Part, adapter_tensors, ties_embeddings
from xcloud.models.encoder import Packing
from xcloud.models.split_point import Projection
from xcloud.models.stages import LABEL, TEXT, TYPES

Masks = Tensor | None | dict[str, Tensor | None]


def same_attention() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """For what is computed again in the backward: by the kernel of the forward, which the trainer
    chooses for its precision."""
    # The switch is that of CPUs too.
    is_fused = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return nullcontext(), nullcontext() if is_fused else sdpa_kernel(SDPBackend.MATH)


def packed_places(types_BS: Tensor) -> Tensor:
    """Position of each token in its document, from 0."""
    order_BS = torch.arange(types_BS.shape[1], device=types_BS.device).expand_as(types_BS)
    begins = torch.ones_like(types_BS, dtype=torch.bool)
    begins[:, 1:] = types_BS[:, 1:] != types_BS[:, :-1]
    starts_BS = torch.where(begins, order_BS, 0).cummax(1).values
    return order_BS - starts_BS


def attention_masks(config: Any, places_BS: Tensor, num_new: int | None = None) -> Masks:
    """What the model's forward takes as attention_mask, float32 [B, 1, S, S]: 0 where a token may
    look, else very low. A token sees itself and what stands before it in its own document. None
    where samples are one document each: attention then needs no memory in the square of S. All
    layers share a mask, 4 bytes a pair of tokens: 1.1 GB for a sample of 16,384.

    places_BS: position of each token in its document; 0 begins one. num_new: only the rows of so
    many last tokens are wanted; None: all.
    """
    begins_BS, length = places_BS == 0, places_BS.shape[1]
    documents_BS = begins_BS.cumsum(1, dtype=torch.int32)
    before = 0 if num_new is None else length - num_new
    window = getattr(config, "sliding_window", None) or length
    is_plain = not before and config._attn_implementation == "sdpa" and not begins_BS[:, 1:].any()

    def mask_of(window: int) -> Tensor | None:
        if is_plain and window >= length:
            return None
        # In place: each [S, S] more would be felt.
        sees = documents_BS[:, None, before:, None] == documents_BS[:, None, None]
        hidden = sees.tril_(before).triu_(before - window + 1).logical_not_()
        mask = torch.zeros(hidden.shape, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)

    full = mask_of(length)
    near = full if window >= length else mask_of(window)
    if KINDS[config.model_type].by_type:
        return {"full_attention": full, "sliding_attention": near}
    return near


class Past:
    """What a part's blocks keep of the tokens so far: keys and values. Samples are one document
    each, of equal length."""

    def __init__(self) -> None:
        from transformers import DynamicCache

        self.keys_and_values = DynamicCache()  # without a config it drops nothing; masks do
        self.length = 0


def run(
    network: Any,
    places_BS: Tensor,
    ids_BS: Tensor | None,
    rows_BSH: Tensor | None,
    past: Past | None = None,
) -> Tensor:
    """Through this part's embeddings (ids) or from rows, its blocks and its norm: [B, S, H].
    past: of the tokens before these, which are added to it."""
    cache, seen_BS = None, places_BS
    if past is not None:
        past.length += places_BS.shape[1]
        cache = past.keys_and_values
        seen_BS = torch.arange(past.length, device=places_BS.device).expand(len(places_BS), -1)
    masks = attention_masks(network.config, seen_BS, places_BS.shape[1])
    output = network.base_model(
        input_ids=ids_BS, inputs_embeds=rows_BSH, attention_mask=masks, position_ids=places_BS,
        past_key_values=cache, use_cache=cache is not None,
    )  # fmt: skip
    rows: Tensor = output.last_hidden_state
    return rows


class CausalStage(Stage):
    """network: the part of the model that this stage holds. chunk: tokens of a piece in the loss.

    cut: what reduces rows on their way out, or restores them on their way in. handed_over: see
    Stage.hand_over. frozen: nothing is trained, and there is no dropout. is_tied: the embeddings
    or the head here are one matrix with the pipeline's other end.
    """

    def __init__(
        self,
        network: nn.Module,
        part: Part,
        chunk: int,
        architecture: Architecture,
        cut: nn.Module | None = None,
        handed_over: tuple[Tensor, ...] = (),
        frozen: bool = False,
        is_tied: bool = False,
    ) -> None:
        super().__init__(architecture, handed_over, frozen)
        self.network = network
        self._part, self._chunk = part, chunk
        self.cut, self._is_tied = cut, is_tied
        if frozen:
            self.requires_grad_(False)

    def tied(self) -> nn.Parameter | None:
        if not self._is_tied:
            return None
        network = cast(Any, self.network)
        tied = self._head if self._part.is_last else network.get_input_embeddings()
        return cast(nn.Parameter, tied.weight)

    def take_over(self, tensors: tuple[Tensor, ...]) -> None:
        cast(Projection, self.cut).start(*tensors)

    def exported(self) -> dict[str, Tensor]:
        """What training changes, under the names of peft or transformers: adapters, or all."""
        cut = {} if self.cut is None else self.cut.state_dict(prefix="cut.")
        if self.architecture["lora"]:
            return dict(adapter_tensors(self.network)) | cut
        state = self.network.state_dict()
        if self._part.is_first and self._part.is_last and ties_embeddings(self.network.config):
            del state[f"{HEAD}.weight"]  # it is that of the embeddings
        return state | cut

    def load_exported(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.exported()
        if own.keys() != tensors.keys():
            odd = sorted(own.keys() ^ tensors.keys())
            raise RuntimeError(f"{odd[0]} and {len(odd) - 1} more are on one side only")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])

    def forward(
        self, received: Message | None, batch: Batch, past: Past | None = None
    ) -> StageOutput:
        """past: of the tokens before those of the batch, which are added to it; None: the batch
        has all."""
        packing, rows = self._rows(received, batch, past)
        if self._part.is_last:
            return StageOutput(loss=self._losses(rows, packing, batch)[0].sum())
        counts, places = packing.counts.to(torch.int16), packing.positions.to(torch.int16)
        return StageOutput({"counts": counts, "places": places, "hidden": rows.float()})

    @torch.no_grad()
    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        """Of each sample [millionths of a nat, tokens guessed] of one document after the other."""
        packing, rows = self._rows(received, batch)
        losses, guessed = self._losses(rows, packing, batch)
        starts_R = packing.positions == 0
        num_documents = int(starts_R.sum())
        owners = starts_R.cumsum(0)[guessed] - 1
        nats = torch.zeros(num_documents, dtype=torch.float64, device=losses.device)
        nats.index_add_(0, owners, losses.double())
        counts = owners.bincount(minlength=num_documents)
        found = torch.stack(((1e6 * nats).round().long(), counts), 1)
        ends = starts_R.cumsum(0)[packing.counts.cumsum(0) - 1].tolist()
        return [found[start:end].flatten().tolist() for start, end in pairwise([0, *ends])]

    @torch.no_grad()
    def next_words(
        self, received: Message | None, batch: Batch, past: Past | None = None
    ) -> Tensor:
        """Logits [B, V] of what follows each sample."""
        packing, rows = self._rows(received, batch, past)
        last_BH = rows[packing.counts.cumsum(0) - 1]
        return _logits(last_BH, self._head.weight, self._softcap)

    def _rows(
        self, received: Message | None, batch: Batch, past: Past | None = None
    ) -> tuple[Packing, Tensor]:
        """Where tokens stand in their documents, and this part's rows."""
        ids_BS = rows_BSH = None
        if received is None:
            there_BS = batch[TEXT] != NO_TOKEN
            places_R = packed_places(batch[TYPES])[there_BS]
            if past is not None:
                places_R = places_R + past.length
            packing = Packing(there_BS.sum(1), places_R)
            ids_BS = packing.unpack(batch[TEXT][there_BS])
        else:
            packing = Packing(received["counts"], received["places"].long())
            hidden = received["hidden"]
            rows_BSH = packing.unpack(hidden if self.cut is None else self.cut(hidden, packing))
        places_BS = packing.unpack(packing.positions)
        rows = packing.pack(run(self.network, places_BS, ids_BS, rows_BSH, past))
        if self.cut is not None and self._part.is_first:
            rows = self.cut(rows, packing)
        return packing, rows

    def _losses(self, rows: Tensor, packing: Packing, batch: Batch) -> tuple[Tensor, Tensor]:
        """Nats of each guessed token, and its row. Other rows never reach the head."""
        labels_R = packing.pack(batch[LABEL])
        guessed = (labels_R != NO_LABEL).nonzero()[:, 0]
        losses = chunked_cross_entropy(
            rows[guessed], self._head.weight, labels_R[guessed], self._chunk, self._softcap
        )
        return losses, guessed

    @property
    def _head(self) -> nn.Linear:
        return cast(nn.Linear, getattr(self.network, HEAD))

    @property
    def _softcap(self) -> float | None:
        cap: float | None = getattr(self.network.config, "final_logit_softcapping", None)
        return cap


def chunked_cross_entropy(
    rows_RH: Tensor,
    words_VH: Tensor,
    labels_R: Tensor,
    chunk: int,
    softcap: float | None = None,
) -> Tensor:
    """float32 [R]: -log softmax(rows @ words')[label] of each row, in nats, words being [V, H].

    Only [R, C] logits exist at any time, C = `chunk`: the forward keeps the norm of each piece,
    the backward computes the piece again from rows and words.
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


def _logits(rows_RH: Tensor, words_CH: Tensor, softcap: float | None) -> Tensor:
    """float32 [R, C]."""
    logits_RC = (rows_RH @ words_CH.T).float()
    return logits_RC if softcap is None else softcap * torch.tanh(logits_RC / softcap)


def _pieces(words_VH: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """(first word, [C, H])."""
    return zip(count(0, chunk), torch.split(words_VH, chunk), strict=False)


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
        norms, right_R = [], torch.zeros(labels_R.shape, device=rows_RH.device)
        for start, words_CH in _pieces(words_VH, chunk):
            logits_RC = _logits(rows_RH, words_CH, softcap)
            norms.append(logits_RC.logsumexp(1))
            rows = (labels_R // chunk == start // chunk).nonzero()[:, 0]
            right_R[rows] = logits_RC[rows, labels_R[rows] - start]
        norm_R = torch.stack(norms).logsumexp(0)
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
        for start, words_CH in zip(
            count(0, ctx.chunk), torch.split(words_VH, ctx.chunk), strict=False
        ):
            logits_RC = _logits(rows_RH, words_CH, ctx.softcap)
            slope_RC = (logits_RC - norm_R[:, None]).exp_()
            rows = (labels_R // ctx.chunk == start // ctx.chunk).nonzero()[:, 0]
            slope_RC[rows, labels_R[rows] - start] -= 1
            slope_RC *= gradients[0][:, None]
            if ctx.softcap is not None:
                slope_RC *= 1 - (logits_RC / ctx.softcap) ** 2
            slope_RC = slope_RC.to(rows_RH.dtype)
            if to_rows is not None:
                to_rows += slope_RC @ words_CH
            if to_words is not None:
                to_words[start : start + ctx.chunk] = slope_RC.T @ rows_RH
        return None if to_rows is None else to_rows.to(rows_RH.dtype), to_words, None, None, None

"""Frozen matrices as they are stored: in 32, 16, 8 or 4 bits a weight, made dense only while a
product needs them, in the dtype that the product is computed in.

kind       bytes a weight      a weight is
float32    4                   as it is (such matrices stay torch's own)
bfloat16   2                   as it is, or rounded once
float16    2                   as it is
int8       1 + 4 / inputs      code * scale / 127; a scale for each output (arXiv:2208.07339)
nf4        1/2 + 4 / 64        one of 16 values * scale; a scale for 64 weights (arXiv:2305.14314)

Codes and scales are those of `bitsandbytes`, but that its int8 rounds weights to 16 bits first: of
a checkpoint in FP32 some 0.8 % of the codes differ by one. It is not needed: where it is
installed, peft imports it, and with it torch's compiler, into every process. Its int8 layers also
round what goes in; here all kinds round weights alone, so a product is that of the dense matrix.
Codes and scales are frozen parameters, so memory, digests and checkpoints count them as weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.comm.devices import scratch

WeightFormat = Literal["float32", "bfloat16", "float16", "int8", "nf4"]
PACKED = ("int8", "nf4")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NF4_BLOCK = 64  # weights with one scale
NF4_BLOCKS_AT_ONCE = 1 << 14  # made dense by way of 6 MB, which another whole matrix exceeds
# Quantiles of the normal distribution, scaled to [-1, 1] (arXiv:2305.14314, appendix E).
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


class FrozenMatrix(nn.Module):
    """In place of a Linear or a Conv1D: y = x W' + b, W [O, I] kept as `kind`, without memory yet.

    The gradient goes to x alone; nothing is kept for the backward, which makes W dense again."""

    scales: nn.Parameter | None

    def __init__(self, linear: nn.Module, kind: WeightFormat) -> None:
        super().__init__()
        self.kind = kind
        # On the meta device: shapes are known, memory comes when the block is filled.
        given = cast(Tensor, linear.weight)
        self.is_transposed = not isinstance(linear, nn.Linear)  # as GPT-2 stores it
        self.stored_shape = given.shape
        self.shape = given.T.shape if self.is_transposed else given.shape
        self.bias = cast("Tensor | None", linear.bias)
        count = given.numel()
        if kind == "nf4":
            num_blocks = -(-count // NF4_BLOCK)
            self.weight = _empty(num_blocks, NF4_BLOCK // 2, dtype=torch.uint8)
            self.scales = _empty(num_blocks, dtype=torch.float32)
        elif kind == "int8":
            self.weight = _empty(*self.shape, dtype=torch.int8)
            self.scales = _empty(self.shape[0], dtype=torch.float32)
        else:
            self.weight = _empty(*self.shape, dtype=DTYPES[kind])
            self.scales = None

    def fill(self, given: Tensor) -> None:
        """Take over a matrix of a checkpoint, in its shape there."""
        dense = given.T if self.is_transposed else given
        if self.kind == "nf4":
            flat = dense.float().reshape(-1)
            blocks = F.pad(flat, (0, -len(flat) % NF4_BLOCK)).view(-1, NF4_BLOCK)
            scales = blocks.abs().amax(1)
            values = torch.tensor(NF4_VALUES, device=flat.device)
            middles = (values[1:] + values[:-1]) / 2
            # A value's code is the number of middles between neighbours that lie below it.
            nearest = torch.bucketize(_over(blocks, scales=scales), middles).to(torch.uint8)
            # Two codes a byte, the first one in the upper half, as bitsandbytes has them.
            codes = (nearest[:, 0::2] << 4) | nearest[:, 1::2]
        elif self.kind == "int8":
            scales = dense.float().abs().amax(1)
            codes = _over(dense.float(), scales=scales).mul_(127).round_()
        else:
            self.weight.copy_(dense)
            return
        self.weight.copy_(codes)
        cast(Tensor, self.scales).copy_(scales)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return W [O, I], which holds until this thread makes another matrix dense."""
        if self.scales is None:
            return cast_to(dtype, self.weight)
        # Memory that is kept and used again: a product needs W for itself alone.
        room = partial(scratch, device=self.weight.device)
        if self.kind == "nf4":
            values = room("dense", (len(self.weight), NF4_BLOCK), dtype)
            # Some blocks at a time (NF4_BLOCKS_AT_ONCE), by way of a table of the 256 pairs of
            # values.
            parts = (
                torch.split(one, NF4_BLOCKS_AT_ONCE) for one in (self.weight, self.scales, values)
            )
            for codes, scales, filled in zip(*parts, strict=True):
                places = room("codes", (codes.numel(),), torch.int32).copy_(codes.flatten())
                pairs = room("pairs", (codes.numel(), 2), torch.float32)
                torch.index_select(pairs_of_halves(codes.device), 0, places, out=pairs)
                torch.mul(pairs.view(len(codes), -1), scales[:, None], out=filled)
            # The last block may be filled up with zeros.
            return values.flatten()[: self.shape.numel()].view(self.shape)
        # In float32 the wide form is the result already.
        use = "dense" if dtype == torch.float32 else "wide"
        wide = room(use, self.shape, torch.float32).copy_(self.weight)
        return cast_to(dtype, wide.mul_((self.scales / 127)[:, None]))

    def stored(self) -> Tensor:
        """Return float32 W in the shape that a checkpoint has it in."""
        dense = self.dense(torch.float32).clone()
        return dense.T if self.is_transposed else dense

    def forward(self, rows: Tensor) -> Tensor:
        # A function of our own is not autocast by torch.
        dtype = rows.dtype
        if torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            rows.to(dtype), self
        )
        return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: FrozenMatrix) -> Tensor:
        # The module and not its dense matrix: that would stay in memory until the backward.
        ctx.matrix = matrix
        bias = matrix.bias
        if bias is not None:
            bias = bias.to(rows.dtype)
        return F.linear(rows, matrix.dense(rows.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.matrix.dense(gradient.dtype), None


class FrozenEmbedding(nn.Module):
    """In place of an Embedding: float32 rows of a table in 16 bits, without memory yet."""

    def __init__(self, embedding: nn.Embedding, kind: WeightFormat) -> None:
        super().__init__()
        self.weight = _empty(*embedding.weight.shape, dtype=DTYPES[kind])
        self._scale = float(getattr(embedding, "scalar_embed_scale", 1.0))  # of Gemma 3

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight).float() * self._scale


def cast_to(dtype: torch.dtype, weights: Tensor) -> Tensor:
    """Return weights in this dtype, which hold until this thread makes others dense."""
    if weights.dtype == dtype:
        return weights
    return scratch("dense", weights.shape, dtype, device=weights.device).copy_(weights)


def keep_matrices(block: nn.Module, kind_of: Callable[[str], WeightFormat]) -> None:
    """Put a FrozenMatrix in place of each Linear and Conv1D of a block, adapters aside.

    kind_of: a function that returns the type in which the weight of this name in the block is
        kept.
    """
    from transformers.pytorch_utils import Conv1D

    for name, module in list(block.named_modules()):
        # Adapters are small and trained: they stay as they are.
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in f".{name}":
            kind = kind_of(f"{name}.weight")
            if kind != "float32":
                block.set_submodule(name, FrozenMatrix(linear=module, kind=kind))


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def _over(rows: Tensor, scales: Tensor) -> Tensor:
    """Return rows / scales, in [-1, 1]; of a row of zeros zeros."""
    return (rows / scales[:, None]).nan_to_num_(0)


@cache
def pairs_of_halves(device: torch.device) -> Tensor:
    """Return the two values of each byte, float32 [256, 2]."""
    values = torch.tensor(NF4_VALUES, device=device)
    return torch.stack((values.repeat_interleave(16), values.repeat(16)), 1)

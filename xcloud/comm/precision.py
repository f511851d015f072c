"""Send a tensor unchanged, in a shorter floating-point format, or as integers of 1 to 8 bits in
blocks; and the packing of such integers. Pure tensor code: no links, no groups.

Shapes: N values of the tensor in any shape; integers in M = ceil(N / block) blocks of K values.

`pack` and `unpack` take codes of one width, cut into planes of 8, 4, 2 and 1 bits (6 = 4 + 2). A
plane of w bits is packed in rows: byte j holds codes j, j + M, j + 2M, … with M = ceil(N * w / 8),
so that every step is one pass over neighbouring bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from xcloud.base.settings import Positive, settings
from xcloud.comm.compressor import Compressor, Draws, Family, Feedback, refuse_integers, wide
from xcloud.net.frame import Tensors, TensorSpec

Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
_LABELS = {"float16": "fp16", "bfloat16": "bf16"}


@settings("Cast")
class Cast(Compressor):
    """float16 or bfloat16 on the wire.

    float16 values are scaled by a power of two that brings max|x| into [2**14, 2**15): gradients
    of 1e-9 keep all 11 bits, and 1e9 does not overflow. Values below 2**-29 of the maximum lose
    bits; those that plain float16 can represent do not change.
    NaN stays NaN; an inf stays inf (and, in float16, makes inf of what exceeds 65504).

    Wire, for [*shape]: values [*shape] (2 bytes each); float16 only: exponent int16 [1].

    dtype: type of the values on the wire.
    """

    family: ClassVar[Family] = "precision"
    feedback: ClassVar[Feedback] = "useful"
    dtype: Literal["float16", "bfloat16"] = "float16"

    @property
    def label(self) -> str:
        return _LABELS[self.dtype]

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        if self.dtype == "bfloat16":
            return (TensorSpec(shape=spec.shape, dtype=torch.bfloat16),)
        return (
            TensorSpec(shape=spec.shape, dtype=torch.float16),
            TensorSpec(shape=(1,), dtype=torch.int16),
        )

    def compress(self, tensor: Tensor) -> Tensors:
        refuse_integers(tensor)
        tensor = tensor.detach()
        if self.dtype == "bfloat16":
            return (tensor.to(torch.bfloat16),)
        # Nothing to scale. The exponent is sent all the same, as sizes are promised beforehand.
        if tensor.dtype == torch.float16 or tensor.numel() == 0:
            return (tensor.half(), torch.zeros(1, dtype=torch.int16, device=tensor.device))
        values = tensor.to(wide(tensor.dtype))
        low, high = torch.aminmax(values)
        largest = torch.maximum(-low, high)
        exponent = torch.frexp(largest).exponent - 15
        # 2**126 is the largest power of two whose inverse is normal in float32.
        exponent = exponent.clamp_(-126).where(largest.isfinite(), 0)
        scaled = values * torch.exp2(-exponent.to(values.dtype))
        return (scaled.half(), exponent.to(torch.int16).view(1))

    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
        if self.dtype == "bfloat16" or spec.dtype == torch.float16:
            return parts[0].to(spec.dtype)
        values, exponent = parts
        values = values.to(wide(spec.dtype))
        return values.mul_(torch.exp2(exponent[0].to(values.dtype))).to(spec.dtype)


_TIGHTER = {2: 0.75, 3: 0.85, 4: 0.9}
"""With few bits a smaller scale, which clips the largest values, is often better. Both are tried
for every block: 8 % less error at 2 bits, 6 % at 3, 3 % at 4, on Gaussian and Student-t(3) data.
"""


_CHUNK = 1 << 17
"""Values per pass: with what is made of them they fit into the processor's cache."""


@settings("BlockInt", frozen=False)
class BlockInt(Draws):
    """Integers of `bits` bits and one scale for each block of `block` neighbouring values.

    2..8 bits: x_hat = scale * code, code = round(x / scale) in -2**(bits-1) .. 2**(bits-1) - 1,
        scale = -(the value of largest magnitude) / 2**(bits-1).
    1 bit: x_hat = ±scale, scale = mean|x| in the block (whose sum must be finite in float32).
    stochastic: code = floor(x / scale + u), u uniform in [0, 1), so that the mean of many x_hat
        is x. scale = max|x| / (2**(bits-1) - 1), at 1 bit max|x|, so that nothing is clipped.
        Rounding up may exceed max|x| by 1.6 %, which overflows float16 above 64,500.

    Source: Pan et al., ZTE Technology Journal 2023(4), section 2.2.1 (fixed INT8 for backward);
    block scales: Dettmers et al., arXiv:2110.02861. Difference: the scale has a sign, which puts
    the one code that symmetric integers waste on the side of the largest value; the other side is
    clipped at 1 - 2**(1-bits) of it. Relative error of hidden states of MiniLM in blocks of 64:
        2 bits: symmetric .74, signed scale .48, both scales tried .42; 4 bits: .146, .128, .123
    A minimum beside the scale would pay for its 16 bits only on one-sided data.

    Scales are bfloat16, rounded towards zero: they have the range of float32 (float16 would lose
    gradients of 1e-9), and no decoded value exceeds the block's largest. They are sent as int16,
    so that no later member of a chain compresses them.

    Wire, for N values: codes uint8 [packed_bytes(N, bits)] (bits/8 bytes each), scales int16 [M].
    Arithmetic is float32. An all-zero block, or one below 2**-119, decodes to zeros. A NaN or
    inf makes values of its own block NaN (or inf), so that divergence stays visible.
    bits: number of bits per value.
    block: number of neighbouring values that share a scale.
    seed: seed of stochastic rounding, which is combined with the channel's seed.
    """

    family: ClassVar[Family] = "precision"
    bits: Annotated[int, Field(ge=1, le=8)] = 8
    block: Positive = 64
    stochastic: bool = False
    """True: round up or down at random, so that the mean of many decoded values is the value."""
    seed: Seed = 0

    @property
    def feedback(self) -> Feedback:
        if self.bits > 2:
            return "useful"
        return "harmful" if self.stochastic else "needed"

    @property
    def label(self) -> str:
        return f"int{self.bits}" + ("-stochastic" if self.stochastic else "")

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec(shape=(packed_bytes(spec.numel, bits=self.bits),), dtype=torch.uint8),
            TensorSpec(shape=(-(-spec.numel // self.block),), dtype=torch.int16),
        )

    def compress(self, tensor: Tensor) -> Tensors:
        refuse_integers(tensor)
        values_N = tensor.detach().reshape(-1).float()
        num_values = len(values_N)
        if tail := num_values % self.block:
            # Codes of the padding are not sent; at 1 bit it must not change the mean.
            padding = float(values_N[-tail:].abs().mean()) if self.bits == 1 else 0.0
            values_N = pad(values_N, (0, self.block - tail), value=padding)
        blocks_MK = values_N.view(-1, self.block)
        codes_MK = torch.empty_like(blocks_MK, dtype=torch.uint8)
        scales_M = torch.empty(len(blocks_MK), dtype=torch.int16, device=tensor.device)
        quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
        if self.stochastic:
            # The receiver needs no seed: codes are what they are.
            generator = torch.Generator(tensor.device).manual_seed(self._next_seed())
            quantize = partial(self._stochastic, generator=generator)
        else:
            quantize = _signs if self.bits == 1 else self._nearest
        # In pieces that a processor's cache holds; on a GPU each would be kernels of its own.
        on_cpu = tensor.device.type == "cpu"
        step = max(1, _CHUNK // self.block if on_cpu else len(blocks_MK))
        for rows in (slice(i, i + step) for i in range(0, len(blocks_MK), step)):
            levels_CK, scales_C = quantize(blocks_MK[rows])
            # Through int8, which is ten times faster here than a conversion to uint8.
            codes_MK[rows] = levels_CK.to(torch.int8).view(torch.uint8)
            scales_M[rows] = scales_C.to(torch.bfloat16).view(torch.int16)
        codes_N = codes_MK.view(-1)[:num_values].add_(self._offset)
        return (pack(codes_N, bits=self.bits), scales_M)

    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
        packed, scales = parts
        codes_N = unpack(packed, bits=self.bits, num_codes=spec.numel)
        scales_M = scales.view(torch.bfloat16).float()
        # Room for whole blocks, so that scales multiply rows of a matrix. What lies behind the
        # last value is never read.
        values = torch.empty(len(scales) * self.block, device=packed.device)
        values_N = values[: spec.numel]
        values_N.copy_(codes_N.sub_(self._offset).view(torch.int8))
        if self.bits == 1:
            values_N.mul_(2).add_(1)
        values.view(-1, self.block).mul_(scales_M[:, None])
        return values_N.to(spec.dtype).view(spec.shape)

    @property
    def _offset(self) -> int:
        """Added to levels to make codes; at 1 bit level 0 stands for +scale."""
        return 1 << (self.bits - 1)

    def _nearest(self, blocks_MK: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks [M, K] → levels [M, K] as float32, scales [M]."""
        half = self._offset
        low_M = blocks_MK.amin(1)
        high_M = blocks_MK.amax(1)
        # The scale's sign puts the code -half, which has no counterpart, on the side of the
        # largest value.
        scales_M = _cut(torch.where(high_M > -low_M, high_M, low_M).div_(-half))
        exact_MK = blocks_MK * _inverse(scales_M)[:, None]
        if self.bits not in _TIGHTER:
            return exact_MK.round_().clamp_(-half, half - 1), scales_M
        tighter_M = _cut(scales_M * _TIGHTER[self.bits])
        ratio_M1 = (tighter_M * _inverse(scales_M))[:, None]  # about _TIGHTER, 0 for zeros
        levels_MK = exact_MK.round().clamp_(-half, half - 1)
        error_M = levels_MK.sub_(exact_MK).square_().sum(1)
        levels_MK = torch.div(exact_MK, ratio_M1.clamp_min(0.5), out=levels_MK)
        levels_MK.round_().clamp_(-half, half - 1)
        better_M = levels_MK.mul_(ratio_M1).sub_(exact_MK).square_().sum(1) < error_M
        # Rounded again, which is faster than to keep both; divided by 1 it is as it was.
        chosen_M1 = torch.where(better_M[:, None], ratio_M1.clamp_min(0.5), 1)
        levels_MK = exact_MK.div_(chosen_M1).round_().clamp_(-half, half - 1)
        return levels_MK, torch.where(better_M, tighter_M, scales_M)

    def _stochastic(self, blocks_MK: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        largest_M = torch.maximum(-blocks_MK.amin(1), blocks_MK.amax(1))
        half = self._offset
        scales_M = _cut(largest_M.div_(max(half - 1, 1)).mul_(1 + 2**-7))  # never below max|x|
        levels_MK = blocks_MK * _inverse(scales_M)[:, None]
        if self.bits == 1:
            levels_MK.mul_(0.5).sub_(0.5)  # -1 and +1 are the levels -1 and 0
        noise_MK = torch.rand(levels_MK.shape, generator=generator, device=levels_MK.device)
        return levels_MK.add_(noise_MK).floor_().clamp_(-half, max(half - 1, 0)), scales_M


def _signs(blocks_MK: Tensor) -> tuple[Tensor, Tensor]:
    return (blocks_MK >= 0).float().sub_(1), _cut(blocks_MK.abs().mean(1))


def _cut(scales_M: Tensor) -> Tensor:
    """float32 rounded towards zero to what bfloat16 can represent; NaN stays NaN."""
    return (scales_M.view(torch.int32) & -0x10000).view(torch.float32)


def _inverse(scales_M: Tensor) -> Tensor:
    """1 / scale, or 0 where that would overflow (so zeros stay zeros); NaN stays NaN."""
    return (1 / scales_M).masked_fill_(scales_M.abs() < 2**-126, 0)


def packed_bytes(num_codes: int, bits: int) -> int:
    """Bytes of `num_codes` codes: bits/8 each, every plane rounded up to a whole byte."""
    return sum(_plane_bytes(num_codes, width) for width, _ in _planes(bits))


def pack(codes_N: Tensor, bits: int) -> Tensor:
    """Integer codes in 0 .. 2**bits - 1, bits 0..31 → uint8 [packed_bytes(N, bits)].

    uint8 codes must fit into `bits` bits: they are not masked where that would cost a pass.
    """
    num_codes = codes_N.numel()
    packed = torch.empty(packed_bytes(num_codes, bits), dtype=torch.uint8, device=codes_N.device)
    start = 0
    for width, shift in _planes(bits):
        is_whole = bits == width
        plane = (codes_N >> shift).bitwise_and_((1 << width) - 1) if not is_whole else codes_N
        plane = plane.to(torch.uint8)
        size = _plane_bytes(num_codes, width)
        target = packed[start : start + size]
        # Row 0 fills the bytes, the others are added above its bits.
        target.copy_(plane[:size])
        for offset, first in _rows(width, size=size):
            row = plane[first : first + size]
            target[: len(row)].add_(row, alpha=1 << offset)  # bits still zero: add is or
        start += size
    return packed


def unpack(packed: Tensor, bits: int, num_codes: int) -> Tensor:
    """The codes of `pack`, uint8 [N] up to 8 bits and int32 [N] beyond."""
    dtype = torch.uint8 if bits <= 8 else torch.int32
    codes_N = torch.zeros(num_codes, dtype=dtype, device=packed.device)
    start = 0
    for width, shift in _planes(bits):
        size = _plane_bytes(num_codes, width)
        plane = _unpack_plane(packed[start : start + size], width, num_codes)
        if bits == width:
            return plane
        codes_N.bitwise_or_(plane.to(dtype) << shift)
        start += size
    return codes_N


def _unpack_plane(source: Tensor, width: int, num_codes: int) -> Tensor:
    if width == 8:
        # A copy, as callers go on in place and the message may be decoded again.
        return source.clone()
    plane = torch.empty(num_codes, dtype=torch.uint8, device=source.device)
    size = len(source)
    mask = (1 << width) - 1
    torch.bitwise_and(source, mask, out=plane[:size])
    for offset, first in _rows(width, size=size):
        row = plane[first : first + size]
        torch.bitwise_right_shift(source[: len(row)], offset, out=row)
        if offset + width < 8:
            row.bitwise_and_(mask)
    return plane


@cache
def _planes(bits: int) -> tuple[tuple[int, int], ...]:
    """(width, shift) of each plane, widest first and highest bits first."""
    planes = []
    shift = bits
    while shift:
        width = next(width for width in (8, 4, 2, 1) if width <= shift)
        shift -= width
        planes.append((width, shift))
    return tuple(planes)


def _plane_bytes(num_codes: int, width: int) -> int:
    return -(-num_codes * width // 8)


def _rows(width: int, size: int) -> Iterator[tuple[int, int]]:
    """(bit offset in the byte, first code) of every row after the first."""
    for row in range(1, 8 // width):
        yield row * width, row * size

"""Send only some values: the largest, or a random sample. The others decode to zero.

Shapes: N values of the tensor in any shape, k of them sent; R rows of D values (D: last axis).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.base.settings import Rate, settings
from xcloud.cluster.frame import TensorSpec
from xcloud.comm.compression import Compressor, Draws, Family, Feedback, Parts, refuse_integers
from xcloud.comm.precision import pack, packed_bytes, unpack

_SAMPLE = 1 << 16
"""Values that show roughly where the largest begin."""


@settings("TopK")
class TopK(Compressor):
    """The k = max(1, round(rate * N)) values of largest magnitude of the whole tensor.

    Source: Aji and Heafield, arXiv:1704.05021. Ties go to the first positions; a NaN counts as
    largest, so that divergence stays visible.

    Wire, for N values: values [k] in the tensor's dtype; positions uint8, see `_SortedPositions`:
    9 bits per value sent at rate 0.01, 5.3 at 0.1, 2 at 0.5.
    """

    family: ClassVar[Family] = "sparse"
    feedback: ClassVar[Feedback] = "needed"
    rate: Rate

    @property
    def label(self) -> str:
        return f"topk({self.rate:g})"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        num_kept = _num_kept(self.rate, spec.numel)
        num_bytes = _SortedPositions(num_kept, spec.numel).num_bytes
        return (TensorSpec((num_kept,), spec.dtype), TensorSpec((num_bytes,), torch.uint8))

    def compress(self, tensor: Tensor) -> Parts:
        refuse_integers(tensor)
        values_N = tensor.detach().reshape(-1)
        num_kept = _num_kept(self.rate, len(values_N))
        positions = _largest(values_N.float(), num_kept)
        packed = _SortedPositions(num_kept, len(values_N)).encode(positions)
        return (values_N.index_select(0, positions), packed)

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        values, packed = parts
        positions = _SortedPositions(len(values), spec.numel).decode(packed)
        return _spread(values, positions, spec)


@settings("TopRows")
class TopRows(Compressor):
    """The k = max(1, round(rate * R)) rows of largest norm, sent whole. Ours.

    For gradients at a boundary: few tokens carry most of a classifier's gradient, and a row that
    is sent keeps its direction. Ties go to the first rows; a row with a NaN counts as largest, so
    that divergence stays visible. A tensor of one axis has rows of one value.

    Wire, for [R, D]: values [k, D] in the tensor's dtype; positions uint8, see `_SortedPositions`,
    2 to 8 bits for each row sent.
    """

    family: ClassVar[Family] = "sparse"
    feedback: ClassVar[Feedback] = "needed"
    rate: Rate

    @property
    def label(self) -> str:
        return f"toprows({self.rate:g})"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        num_rows, width = _rows_of(spec)
        num_kept = _num_kept(self.rate, num_rows)
        num_bytes = _SortedPositions(num_kept, num_rows).num_bytes
        return (TensorSpec((num_kept, width), spec.dtype), TensorSpec((num_bytes,), torch.uint8))

    def compress(self, tensor: Tensor) -> Parts:
        refuse_integers(tensor)
        num_rows, width = _rows_of(TensorSpec.of(tensor))
        rows_RD = tensor.detach().reshape(num_rows, width)
        num_kept = _num_kept(self.rate, num_rows)
        # Scaled by the largest value: squares of gradients of 1e-25 would underflow.
        largest_R = rows_RD.float().abs().amax(1) if width else rows_RD.new_zeros(num_rows).float()
        scale_R = torch.where(largest_R > 0, largest_R, torch.ones_like(largest_R))
        norms_R = (rows_RD.float() / scale_R[:, None]).norm(dim=1) * scale_R
        positions = _largest(norms_R, num_kept)
        packed = _SortedPositions(num_kept, num_rows).encode(positions)
        return (rows_RD.index_select(0, positions), packed)

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        values, packed = parts
        num_rows, width = _rows_of(spec)
        positions = _SortedPositions(len(values), num_rows).decode(packed)
        dense = torch.zeros((num_rows, width), dtype=spec.dtype, device=values.device)
        return dense.index_copy_(0, positions, values.to(spec.dtype)).view(spec.shape)


@settings("RandomK", frozen=False)
class RandomK(Draws):
    """k = max(1, round(rate * N)) values, one from each of k equal strips of the tensor.

    The strips start at a random offset, so each value has the same probability k/N. They need
    k random numbers, 10 to 20 times faster at rate 0.1 than a random permutation of N.
    The receiver draws the same positions from the seed in the message (CPU generator, both ends).

    unbiased: multiply by N/k, so that the mean over many messages is the tensor. For one message
    this is worse than sending nothing (relative error sqrt(N/k - 1), otherwise sqrt(1 - k/N)),
    and error feedback diverges with it. Use it only where gradients of many senders are averaged.
    NaN or inf anywhere, drawn or not, makes the first value NaN, so that divergence stays visible.

    Wire, for N values: values [k] in the tensor's dtype; seed int64 [1] (8 bytes).
    """

    family: ClassVar[Family] = "sparse"
    rate: Rate
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0  # combined with the channel's
    unbiased: bool = False

    @property
    def feedback(self) -> Feedback:
        return "harmful" if self.unbiased else "needed"

    @property
    def label(self) -> str:
        return f"randomk({self.rate:g})" + ("-unbiased" if self.unbiased else "")

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        num_kept = _num_kept(self.rate, spec.numel)
        return (TensorSpec((num_kept,), spec.dtype), TensorSpec((1,), torch.int64))

    def compress(self, tensor: Tensor) -> Parts:
        refuse_integers(tensor)
        values_N = tensor.detach().reshape(-1)
        seed = self._next_seed(self.seed)
        num_kept = _num_kept(self.rate, len(values_N))
        positions = _drawn(num_kept, len(values_N), seed).to(tensor.device)
        values = values_N.index_select(0, positions)
        _show_divergence(values, values_N)
        return (values, torch.tensor([seed], dtype=torch.int64, device=tensor.device))

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        values, seed = parts
        if self.unbiased and len(values):
            # Not before sending, where the factor could overflow float16.
            values = values * (spec.numel / len(values))
        positions = _drawn(len(values), spec.numel, int(seed)).to(values.device)
        return _spread(values, positions, spec)


@settings("RandomTopK", frozen=False)
class RandomTopK(Draws):
    """The k = max(1, round(top * m)) values of largest magnitude among
    m = max(1, round(random * N)) that are drawn as `RandomK` draws them.

    Source: Wang et al., "CocktailSGD", ICML 2023, which sends these in 4 bits:
    Chain(randomtopk=RandomTopK(0.1, 0.1), int4=BlockInt(4)), 1 % of the values.
    What is drawn costs a seed only, and a position among m fewer bits than one among N; the search
    for the largest is over m values. With feedback, what was not drawn has its turn later.
    NaN or inf anywhere, drawn or not, makes the first value NaN, so that divergence stays visible.

    Wire, for N values: values [k] in the tensor's dtype; positions uint8, see `_SortedPositions`,
    5.3 bits per value at top = 0.1; seed int64 [1] (8 bytes).
    """

    family: ClassVar[Family] = "sparse"
    feedback: ClassVar[Feedback] = "needed"
    random: Rate
    top: Rate
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0  # combined with the channel's

    @property
    def label(self) -> str:
        return f"topk({self.top:g} of random {self.random:g})"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        num_drawn = _num_kept(self.random, spec.numel)
        num_kept = _num_kept(self.top, num_drawn)
        return (
            TensorSpec((num_kept,), spec.dtype),
            TensorSpec((_SortedPositions(num_kept, num_drawn).num_bytes,), torch.uint8),
            TensorSpec((1,), torch.int64),
        )

    def compress(self, tensor: Tensor) -> Parts:
        refuse_integers(tensor)
        values_N = tensor.detach().reshape(-1)
        seed = self._next_seed(self.seed)
        num_drawn = _num_kept(self.random, len(values_N))
        drawn = values_N.index_select(0, _drawn(num_drawn, len(values_N), seed).to(tensor.device))
        positions = _largest(drawn.float(), _num_kept(self.top, num_drawn))
        values = drawn.index_select(0, positions)
        _show_divergence(values, values_N)
        packed = _SortedPositions(len(values), num_drawn).encode(positions)
        return (values, packed, torch.tensor([seed], dtype=torch.int64, device=tensor.device))

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        values, packed, seed = parts
        num_drawn = _num_kept(self.random, spec.numel)
        among = _SortedPositions(len(values), num_drawn).decode(packed)
        positions = _drawn(num_drawn, spec.numel, int(seed)).to(values.device)
        return _spread(values, positions.index_select(0, among), spec)


@lru_cache(maxsize=1024)  # a message asks for the same one four times
class _SortedPositions:
    """Code k ascending positions below N; the number of bytes depends on k and N alone.

    A bitmap (N bits), or Elias-Fano coding where that is shorter (below a rate of about 0.4): the
    lower l bits of each position in binary, the upper bits in unary, as a bitmap of
    k + ceil(N / 2**l) bits whose i-th one is at (position_i >> l) + i. That is 2 + log2(N/k) bits
    per position, at most 0.6 above the entropy; plain positions would take log2(N), 21 for a
    tensor of 2048 x 768.
    """

    def __init__(self, num_kept: int, numel: int) -> None:
        self.num_kept, self.numel = num_kept, numel
        bitmap_bytes = packed_bytes(numel, 1)
        coded_bytes, self.low_bits = min((self._size(bits), bits) for bits in range(32))
        self.is_bitmap = bitmap_bytes <= coded_bytes
        self.num_bytes = min(bitmap_bytes, coded_bytes)

    def _num_unary(self, low_bits: int) -> int:
        return self.num_kept + (max(self.numel - 1, 0) >> low_bits) + 1

    def _size(self, low_bits: int) -> int:
        return packed_bytes(self.num_kept, low_bits) + packed_bytes(self._num_unary(low_bits), 1)

    def encode(self, positions: Tensor) -> Tensor:
        """Ascending int64 [k] → uint8 [num_bytes]."""
        if self.is_bitmap:
            return pack(_marks(positions, self.numel), 1)
        rank = torch.arange(self.num_kept, device=positions.device)
        upper = _marks((positions >> self.low_bits).add_(rank), self._num_unary(self.low_bits))
        lower = positions.to(torch.int32).bitwise_and_((1 << self.low_bits) - 1)
        return torch.cat([pack(lower, self.low_bits), pack(upper, 1)])

    def decode(self, packed: Tensor) -> Tensor:
        """Raises FrameError for anything but num_kept positions below numel: on a GPU an index out
        of range would end the process."""
        if self.is_bitmap:
            return self._counted(_marked(unpack(packed, 1, self.numel)))
        start = packed_bytes(self.num_kept, self.low_bits)
        lower = unpack(packed[:start], self.low_bits, self.num_kept)
        upper = self._counted(_marked(unpack(packed[start:], 1, self._num_unary(self.low_bits))))
        upper.sub_(torch.arange(self.num_kept, device=packed.device))
        positions = upper.bitwise_left_shift_(self.low_bits).bitwise_or_(lower)
        if self.num_kept and (last := int(positions.amax())) >= self.numel:
            raise FrameError(f"position {last} in a sparse tensor of {self.numel} values")
        return positions

    def _counted(self, marked: Tensor) -> Tensor:
        if len(marked) != self.num_kept:
            raise FrameError(
                f"{len(marked)} positions in a sparse tensor, {self.num_kept} were promised"
            )
        return marked


def _marks(positions: Tensor, size: int) -> Tensor:
    """uint8 [size], 1 at the positions."""
    marks = torch.zeros(size, dtype=torch.uint8, device=positions.device)
    return marks.index_fill_(0, positions, 1)


def _marked(marks: Tensor) -> Tensor:
    """Ascending positions of what is not 0."""
    return marks.view(torch.bool).nonzero().view(-1)


def _few_marked(marks_N: Tensor) -> Tensor:
    """`_marked` where few are: 8 marks are looked at as one number first, 3 times as fast."""
    whole = len(marks_N) & -8
    words = marks_N[:whole].view(torch.int64).nonzero().view(-1)
    within = marks_N[:whole].view(-1, 8).index_select(0, words).nonzero()
    positions = words.index_select(0, within[:, 0]).mul_(8).add_(within[:, 1])
    return torch.cat([positions, _marked(marks_N[whole:]).add_(whole)])


def _rows_of(spec: TensorSpec) -> tuple[int, int]:
    """(number of rows, values per row)."""
    width = spec.shape[-1] if len(spec.shape) > 1 else 1
    return (spec.numel // width if width else 0), width


def _num_kept(rate: float, numel: int) -> int:
    return min(numel, max(1, round(rate * numel)))


def _largest(values_N: Tensor, num_kept: int) -> Tensor:
    """Ascending positions of the `num_kept` largest magnitudes of a float32 tensor.

    The bits of a magnitude sort as the magnitude does. Where few of many are wanted, a sample of
    them gives a bound that some more exceed, and only these are searched; otherwise a histogram
    over the upper 16 bits finds the threshold's bin. 3 to 10 times faster than torch.topk.
    """
    if num_kept == 0:
        return torch.zeros(0, dtype=torch.int64, device=values_N.device)
    bits_N = values_N.view(torch.int32) & 0x7FFFFFFF
    if _SAMPLE < len(bits_N) and num_kept < len(bits_N) // 16:
        sample = bits_N[:: len(bits_N) // _SAMPLE]
        rank = len(sample) * num_kept / len(bits_N)
        most = int(rank + 4 * rank**0.5) + 8  # of the sample, 4 deviations above what is expected
        bound = sample.kthvalue(len(sample) - most + 1).values
        candidates = _few_marked(bits_N >= bound)
        if len(candidates) >= num_kept:
            found = bits_N.index_select(0, candidates)
            return candidates.index_select(0, _exactly(found, found, num_kept, num_kept))
    if len(bits_N) <= 1 << 14:  # counting 32,768 bins would take longer than the search
        return _exactly(bits_N, bits_N, num_kept, num_kept)
    bins_N = bits_N >> 16
    num_from = torch.bincount(bins_N, minlength=1 << 15).flip(0).cumsum(0)  # from the top down
    last = int(torch.searchsorted(num_from, num_kept))
    num_above = int(num_from[last - 1]) if last else 0
    in_bin = bits_N[bins_N == (1 << 15) - 1 - last]
    return _exactly(bits_N, in_bin, num_kept, num_kept - num_above)


def _exactly(bits_N: Tensor, some: Tensor, num_kept: int, num_of_some: int) -> Tensor:
    """Ascending positions of the `num_kept` largest, down to the `num_of_some`-largest of `some`;
    the last of equal ones are left out."""
    threshold = some.kthvalue(len(some) - num_of_some + 1).values
    positions = (bits_N >= threshold).nonzero().view(-1)
    surplus = len(positions) - num_kept
    if surplus:
        ties = (bits_N[positions] == threshold).nonzero().view(-1)
        chosen = torch.ones(len(positions), dtype=torch.bool, device=bits_N.device)
        chosen[ties[-surplus:]] = False
        positions = positions[chosen]
    return positions


def _show_divergence(chosen: Tensor, values_N: Tensor) -> None:
    """Make the first chosen value NaN if any of all values is not finite."""
    if len(chosen) and not bool(torch.stack(torch.aminmax(values_N)).isfinite().all()):
        chosen[0] = torch.nan


@lru_cache(maxsize=1)  # who encodes with feedback decodes the same message next
def _drawn(num_kept: int, numel: int, seed: int) -> Tensor:
    """Distinct positions, one in each of `num_kept` strips whose sizes differ by at most one. Not
    to be changed."""
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.arange(num_kept + 1).mul_(numel).div_(max(num_kept, 1), rounding_mode="floor")
    sizes = bounds.diff()
    offset = torch.randint(max(numel, 1), (1,), generator=generator)
    within = torch.rand(num_kept, dtype=torch.float64, generator=generator).mul_(sizes)
    return bounds[:-1].add(within.long()).add_(offset).remainder_(max(numel, 1))


def _spread(values: Tensor, positions: Tensor, spec: TensorSpec) -> Tensor:
    dense = torch.zeros(spec.numel, dtype=spec.dtype, device=values.device)
    return dense.scatter_(0, positions, values.to(spec.dtype)).view(spec.shape)

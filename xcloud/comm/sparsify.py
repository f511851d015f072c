"""Send only some values: the largest, or a random sample. The others decode to zero.

Shapes: N values of the tensor in any shape, k of them sent; R rows of D values (D: last axis).
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.base.settings import Rate, settings
from xcloud.comm.compressor import Compressor, Draws, Family, Feedback, refuse_integers
from xcloud.comm.precision import Seed, pack, packed_bytes, unpack
from xcloud.net.frame import Tensors, TensorSpec

_SAMPLE = 1 << 16
"""Values that show roughly where the largest begin."""


class _Sparse(Compressor):
    """Base class. A tensor is a list of items: values, or rows. Of these some are drawn (`Draws`)
    or all are looked at, and of these the largest are sent, or all.

    Wire: the items sent in the tensor's dtype; if they are the largest, their positions uint8, see
    `SortedPositions`; if they were drawn, the seed int64 [1] (8 bytes).
    """

    family: ClassVar[Family] = "sparse"
    _sends_largest: ClassVar[bool] = True

    @property
    def feedback(self) -> Feedback:
        return "needed"

    @abstractmethod
    def _numbers(self, num_items: int) -> tuple[int, int]:
        """Return how many items are looked at, and how many are sent."""

    def _shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """The number of items, and the shape of one."""
        return (spec.numel,)

    def _magnitudes(self, items: Tensor) -> Tensor:
        """float32, one of each item; its sign does not matter."""
        return items.float()

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        num_items, *item = self._shape(spec)
        num_seen, num_kept = self._numbers(num_items)
        specs = [TensorSpec(shape=(num_kept, *item), dtype=spec.dtype)]
        if self._sends_largest:
            num_bytes = SortedPositions(num_kept, numel=num_seen).num_bytes
            specs.append(TensorSpec(shape=(num_bytes,), dtype=torch.uint8))
        if isinstance(self, Draws):
            specs.append(TensorSpec(shape=(1,), dtype=torch.int64))
        return tuple(specs)

    def compress(self, tensor: Tensor) -> Tensors:
        refuse_integers(tensor)
        shape = self._shape(TensorSpec.of(tensor))
        sent = items = tensor.detach().reshape(shape)
        num_seen, num_kept = self._numbers(shape[0])
        parts: list[Tensor] = []
        if isinstance(self, Draws):
            seed = self._next_seed()
            sent = items.index_select(
                0, drawn_positions(num_seen, numel=shape[0], seed=seed).to(tensor.device)
            )
            parts.append(torch.tensor([seed], dtype=torch.int64, device=tensor.device))
        if self._sends_largest:
            positions = _largest(self._magnitudes(sent), num_kept)
            sent = sent.index_select(0, positions)
            # In front of the seed, as `wire_specs` promises.
            parts.insert(0, SortedPositions(num_kept, numel=num_seen).encode(positions))
        if isinstance(self, Draws) and num_kept:
            # Of a random choice most NaN would never be sent.
            if not bool(torch.stack(torch.aminmax(items)).isfinite().all()):
                sent[0] = torch.nan
        return (sent, *parts)

    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
        values, *places = parts
        shape = self._shape(spec)
        num_seen, num_kept = self._numbers(shape[0])
        if self._sends_largest:
            positions = SortedPositions(num_kept, numel=num_seen).decode(places[0])
        if isinstance(self, Draws):
            seed = int(places[-1])
            drawn = drawn_positions(num_seen, numel=shape[0], seed=seed).to(values.device)
            positions = drawn.index_select(0, positions) if self._sends_largest else drawn
        dense = torch.zeros(shape, dtype=spec.dtype, device=values.device)
        return dense.index_copy_(0, positions, values.to(spec.dtype)).view(spec.shape)


@settings("TopK")
class TopK(_Sparse):
    """The k = max(1, round(rate * N)) values of largest magnitude of the whole tensor.

    Source: Aji and Heafield, arXiv:1704.05021. Ties go to the first positions; a NaN counts as
    largest, so that divergence stays visible. A position takes 9 bits at rate 0.01, 5.3 at 0.1.
    rate: share of the values, of TopRows of the rows, that is sent.
    """

    rate: Rate

    label_form = "topk({rate:g})"

    def _numbers(self, num_items: int) -> tuple[int, int]:
        return num_items, _num_kept(self.rate, numel=num_items)


@settings("TopRows")
class TopRows(TopK):
    """The k = max(1, round(rate * R)) rows of largest norm, sent whole. Ours.

    For gradients at a boundary: few tokens carry most of a classifier's gradient, and a row that
    is sent keeps its direction. Ties go to the first rows; a row with a NaN counts as largest, so
    that divergence stays visible. A tensor of one axis has rows of one value.
    """

    label_form = "toprows({rate:g})"

    def _shape(self, spec: TensorSpec) -> tuple[int, ...]:
        width = spec.shape[-1] if len(spec.shape) > 1 else 1
        return (spec.numel // width if width else 0), width

    def _magnitudes(self, items: Tensor) -> Tensor:
        # In float64, as squares of gradients of 1e-25 would underflow.
        norms_R: Tensor = torch.linalg.vector_norm(items, dim=1, dtype=torch.float64)
        return norms_R.float()


@settings("RandomK", frozen=False)
class RandomK(Draws, _Sparse):
    """k = max(1, round(rate * N)) values, one from each of k equal strips of the tensor.

    The strips start at a random offset, so each value has the same probability k/N; a random
    permutation of N would take 10 to 20 times as long. The receiver draws the same positions from
    the seed in the message (CPU generator, both ends).

    unbiased: multiply by N/k, so that the mean over many messages is the tensor. For one message
    this is worse than sending nothing (relative error sqrt(N/k - 1), otherwise sqrt(1 - k/N)),
    and error feedback diverges with it. Use it only where gradients of many senders are averaged.
    NaN or inf anywhere, drawn or not, makes the first value NaN, so that divergence stays visible.
    rate: share of the values that is sent.
    seed: seed for drawing positions, which is combined with the channel's seed.
    """

    _sends_largest = False

    rate: Rate
    seed: Seed = 0
    unbiased: bool = False
    """True: multiply by N/k, so that the mean over many messages is the tensor. Only for gradients
    of many senders that are averaged; for one message it is worse than sending nothing."""

    @property
    def feedback(self) -> Feedback:
        return "harmful" if self.unbiased else "needed"

    @property
    def label(self) -> str:
        return f"randomk({self.rate:g})" + ("-unbiased" if self.unbiased else "")

    def _numbers(self, num_items: int) -> tuple[int, int]:
        return 2 * (_num_kept(self.rate, numel=num_items),)

    def decompress(self, parts: Tensors, spec: TensorSpec) -> Tensor:
        values, seed = parts
        if self.unbiased and len(values):
            # Not before sending, where the factor could overflow float16.
            values = values * (spec.numel / len(values))
        return super().decompress((values, seed), spec)


@settings("RandomTopK", frozen=False)
class RandomTopK(Draws, _Sparse):
    """The k = max(1, round(top * m)) values of largest magnitude among
    m = max(1, round(random * N)) that are drawn as `RandomK` draws them.

    Source: Wang et al., "CocktailSGD", ICML 2023, which sends these in 4 bits:
    Chain(randomtopk=RandomTopK(0.1, 0.1), int4=BlockInt(4)), 1 % of the values.
    What is drawn costs a seed only, and a position among m fewer bits than one among N; the search
    for the largest is over m values. With feedback, what was not drawn has its turn later.
    NaN or inf anywhere, drawn or not, makes the first value NaN, so that divergence stays visible.
    random: share of the values that is drawn.
    top: share of the drawn values that is sent.
    seed: seed for drawing positions, which is combined with the channel's seed.
    """

    random: Rate
    top: Rate
    seed: Seed = 0

    label_form = "topk({top:g} of random {random:g})"

    def _numbers(self, num_items: int) -> tuple[int, int]:
        num_drawn = _num_kept(self.random, numel=num_items)
        return num_drawn, _num_kept(self.top, numel=num_drawn)


@lru_cache(maxsize=1024)  # a message asks for the same one four times
class SortedPositions:
    """Code k ascending positions below N; the number of bytes depends on k and N alone.

    A bitmap (N bits), or Elias-Fano coding where that is shorter (below a rate of about 0.4): the
    lower l bits of each position in binary, the upper bits in unary, as a bitmap of
    k + ceil(N / 2**l) bits whose i-th one is at (position_i >> l) + i. That is 2 + log2(N/k) bits
    per position, at most 0.6 above the entropy.
    """

    def __init__(self, num_kept: int, numel: int) -> None:
        self.num_kept = num_kept
        self.numel = numel
        bitmap_bytes = packed_bytes(numel, bits=1)
        coded_bytes, self.low_bits = min(
            (packed_bytes(num_kept, bits) + packed_bytes(self._num_unary(bits), bits=1), bits)
            for bits in range(32)
        )
        self.is_bitmap = bitmap_bytes <= coded_bytes
        self.num_bytes = min(bitmap_bytes, coded_bytes)

    def _num_unary(self, low_bits: int) -> int:
        return self.num_kept + (max(self.numel - 1, 0) >> low_bits) + 1

    def encode(self, positions: Tensor) -> Tensor:
        """Ascending int64 [k] → uint8 [num_bytes]."""
        if self.is_bitmap:
            return pack(_marks(positions, size=self.numel), bits=1)
        rank = torch.arange(self.num_kept, device=positions.device)
        upper = _marks(
            (positions >> self.low_bits).add_(rank), size=self._num_unary(self.low_bits)
        )
        lower = positions.to(torch.int32).bitwise_and_((1 << self.low_bits) - 1)
        return torch.cat([pack(lower, bits=self.low_bits), pack(upper, bits=1)])

    def decode(self, packed: Tensor) -> Tensor:
        """Raises FrameError for anything but num_kept positions below numel: on a GPU an index out
        of range would end the process."""
        if self.is_bitmap:
            return self._counted(_marked(unpack(packed, bits=1, num_codes=self.numel)))
        start = packed_bytes(self.num_kept, bits=self.low_bits)
        lower = unpack(packed[:start], bits=self.low_bits, num_codes=self.num_kept)
        upper = self._counted(
            _marked(unpack(packed[start:], bits=1, num_codes=self._num_unary(self.low_bits)))
        )
        # The i-th one lies at upper + i, see the class.
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
    return positions.new_zeros(size, dtype=torch.uint8).index_fill_(0, positions, 1)


def _marked(marks: Tensor) -> Tensor:
    return marks.view(torch.bool).nonzero().view(-1)


def _few_marked(marks_N: Tensor) -> Tensor:
    """`_marked` where few are: 8 marks are looked at as one number first, 3 times as fast."""
    whole = len(marks_N) & -8
    words = marks_N[:whole].view(torch.int64).nonzero().view(-1)
    within = marks_N[:whole].view(-1, 8).index_select(0, words).nonzero()
    positions = words.index_select(0, within[:, 0]).mul_(8).add_(within[:, 1])
    return torch.cat([positions, _marked(marks_N[whole:]).add_(whole)])


def _num_kept(rate: float, numel: int) -> int:
    return min(numel, max(1, round(rate * numel)))


def _largest(values_N: Tensor, num_kept: int) -> Tensor:
    """Ascending positions of the `num_kept` largest magnitudes of a float32 tensor.

    3 to 10 times faster than torch.topk: the bits of a magnitude sort as the magnitude does; where
    few of many are wanted a sample gives a bound that some more exceed, otherwise a histogram over
    the upper 16 bits finds the threshold's bin.
    """
    if num_kept == 0:
        return torch.zeros(0, dtype=torch.int64, device=values_N.device)
    bits_N = values_N.view(torch.int32) & 0x7FFFFFFF
    if _SAMPLE < len(bits_N) and num_kept < len(bits_N) // 16:
        sample = bits_N[:: len(bits_N) // _SAMPLE]
        rank = len(sample) * num_kept / len(bits_N)
        most = int(rank + 4 * rank**0.5) + 8  # of the sample, 4 deviations above what is expected
        bound = sample.kthvalue(len(sample) - most + 1).values
        # Nearly always a few more than wanted, and exact from here on. Where the sample misled,
        # fewer: then the slower way below.
        candidates = _few_marked(bits_N >= bound)
        if len(candidates) >= num_kept:
            found = bits_N.index_select(0, candidates)
            return candidates.index_select(
                0, _exactly(found, some=found, num_kept=num_kept, num_of_some=num_kept)
            )
    if len(bits_N) <= 1 << 14:  # counting 32,768 bins would take longer than the search
        return _exactly(bits_N, some=bits_N, num_kept=num_kept, num_of_some=num_kept)
    bins_N = bits_N >> 16
    # Exponent and 7 bits of the mantissa: the bin that holds the k-th largest is searched alone.
    num_from = torch.bincount(bins_N, minlength=1 << 15).flip(0).cumsum(0)  # from the top down
    last = int(torch.searchsorted(num_from, num_kept))
    num_above = int(num_from[last - 1]) if last else 0
    in_bin = bits_N[bins_N == (1 << 15) - 1 - last]
    return _exactly(bits_N, some=in_bin, num_kept=num_kept, num_of_some=num_kept - num_above)


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


@lru_cache(maxsize=1)  # who encodes with feedback decodes the same message next
def drawn_positions(num_kept: int, numel: int, seed: int) -> Tensor:
    """Distinct positions, one in each of `num_kept` strips whose sizes differ by at most one. Not
    to be changed."""
    generator = torch.Generator().manual_seed(seed)
    bounds = torch.arange(num_kept + 1).mul_(numel).div_(max(num_kept, 1), rounding_mode="floor")
    sizes = bounds.diff()
    # So every value is as likely as any other, although strips differ in length by one.
    offset = torch.randint(max(numel, 1), (1,), generator=generator)
    within = torch.rand(num_kept, dtype=torch.float64, generator=generator).mul_(sizes)
    return bounds[:-1].add(within.long()).add_(offset).remainder_(max(numel, 1))

"""An entropy code for small whole numbers, most of them zero. It takes well below a bit a value
where nearly all are zero, needs no tables, and works on whole arrays. numpy only.

The numbers are written in planes. The first says which are not 0, the next which of these exceed
1, and so on; signs are sent as they are, and what exceeds MOST_PLANES in an Elias gamma code. Of
a plane, the places of the rarer answer are sent for each class of columns apart: first how many
there are, then the gaps between them in Rice codes, whose parameter follows from that number.
Before the first plane the rows that are all zero are named in the same way, and left out.

Rice codes of gaps take 0 to 4 % more than the entropy of places that are drawn at random (Golomb,
IEEE Trans. IT 1966; Rice 1979). As counts are sent with every message, the code follows it.

Wire: bytes of the first string u32 | high parts, each in unary | low parts, each in so many bits.

Shapes: R rows, C columns, S classes of neighbouring columns, N values, M places, P pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from xcloud.base.errors import FrameError
from xcloud.comm.ids import Ints

Bytes = npt.NDArray[np.uint8]
Marks = npt.NDArray[np.bool_]

MOST_PLANES = 14
MOST_BITS = 24  # of a number
HEAD_BYTES = 4
CODES_PER_VALUE = 4
"""High parts of a message for each value, at most, so that a receiver's memory is bounded."""


def encode(codes_RC: npt.NDArray[np.int32], edges: Sequence[int]) -> Bytes | None:
    """Return the numbers as bytes; None if they would have too many high parts to be read.

    edges: the first column of each class of columns, followed by the number of columns.
    """
    out = _Writer()
    active_R: Marks = (codes_RC != 0).any(axis=1)
    out.plane(active_R, edges_S=np.array([0, len(active_R)]))
    # Column by column, so that the columns of a class are neighbours and share their gaps.
    codes_N = codes_RC[active_R].T.ravel()
    sizes_N = np.abs(codes_N)
    edges_S = np.array(edges) * int(active_R.sum())
    for plane in range(MOST_PLANES):
        if not len(sizes_N):
            break
        places, edges_S = out.plane(sizes_N > plane, edges_S=edges_S)
        sizes_N = sizes_N[places]
        if plane == 0:
            # Signs of a symmetric source have no pattern, so nothing is gained by coding them.
            out.low((codes_N[places] < 0).astype(np.int64), widths=1)
    # What is left after the last plane: few numbers, each in about twice the bits of its length.
    out.gamma(sizes_N.astype(np.int64) - MOST_PLANES)
    return out.joined(most=most_codes(codes_RC.size, len(edges)))


def decode(data: Bytes, num_rows: int, edges: Sequence[int]) -> npt.NDArray[np.int32]:
    """Reverse `encode`. Raises FrameError for what it cannot have written."""
    num_columns = edges[-1]
    read = _Reader(data, most=most_codes(num_rows * num_columns, len(edges)))
    # The same steps in the same order as `encode`: nothing on the wire says where a plane begins.
    rows, _ = read.plane(np.array([0, num_rows]))
    sizes_N = np.zeros(len(rows) * num_columns, dtype=np.int32)
    found = np.arange(len(sizes_N))
    edges_S = np.array(edges) * len(rows)
    signed = found
    signs = np.zeros(0, dtype=np.int64)
    for plane in range(MOST_PLANES):
        if not len(found):
            break
        # Places count among the values that are still larger than the plane before, so each plane
        # is asked of fewer of them.
        places, edges_S = read.plane(edges_S)
        found = found[places]
        sizes_N[found] = plane + 1
        if plane == 0:
            signs = 1 - 2 * read.low(np.ones(len(found), dtype=np.int64))
            signed = found
    if len(found):
        sizes_N[found] = read.gamma(len(found)) + MOST_PLANES
    # Nothing may stand behind the end: no reader of the code would look at it.
    read.check_end()
    if len(signs):
        sizes_N[signed] *= signs.astype(np.int32)
    codes_RC = np.zeros((num_rows, num_columns), dtype=np.int32)
    codes_RC[rows] = sizes_N.reshape(num_columns, len(rows)).T
    return codes_RC


def most_codes(num_values: int, num_edges: int) -> int:
    """Return how many high parts a message may have."""
    return CODES_PER_VALUE * num_values + MOST_PLANES * num_edges + num_values // 8 + 64


def _rice_parameters(num_S: Ints, lengths_S: Ints) -> Ints:
    """Return the number of low bits of the gaps between so many of so many places, in whole
    numbers: both ends must agree."""
    means_S = (1000 * lengths_S - 500 * num_S) // np.maximum(2077 * num_S, 1)
    return _bit_lengths(np.where(num_S > 0, means_S, 0))


def _bit_lengths(numbers_N: Ints) -> Ints:
    """Return the number of bits of whole numbers from 0, exact below 2**53."""
    return np.frexp(numbers_N.astype(np.float64))[1].astype(np.int64)


@dataclass(eq=False)
class _Writer:
    """Collects high and low parts."""

    _high: list[Ints] = field(default_factory=list)
    _low: list[tuple[Ints, Ints]] = field(default_factory=list)  # numbers, and bits of each

    def plane(self, marks_N: Marks, edges_S: Ints) -> tuple[Ints, Ints]:
        """Write which places are marked. Return them, and where each class begins among them."""
        places = np.flatnonzero(marks_N)
        starts_S = np.searchsorted(places, edges_S)
        lengths_S = np.diff(edges_S)
        num_S = np.diff(starts_S)
        self.gamma(num_S)
        # The rarer answer is written, so that gaps are long whichever way a plane leans. Both ends
        # see by the counts which one that is.
        is_turned_S = 2 * num_S > lengths_S
        own = places
        if is_turned_S.any():
            own = np.flatnonzero(marks_N ^ np.repeat(is_turned_S, lengths_S))
            num_S = np.where(is_turned_S, lengths_S - num_S, num_S)
        widths = np.repeat(_rice_parameters(num_S, lengths_S), num_S)
        before = np.empty_like(own)
        before[1:] = own[:-1]
        firsts = (np.cumsum(num_S) - num_S)[num_S > 0]
        # A gap never crosses from one class into the next, as each class has a parameter of its
        # own.
        before[firsts] = edges_S[:-1][num_S > 0] - 1
        gaps = own - before - 1
        self._high.append(gaps >> widths)
        self.low(gaps & ((1 << widths) - 1), widths=widths)
        return places, starts_S

    def gamma(self, numbers_N: Ints) -> None:
        """Write whole numbers from 0: the length of each, then its lower bits."""
        lengths_N = _bit_lengths(numbers_N)
        self._high.append(lengths_N)
        self.low(numbers_N, widths=np.maximum(lengths_N - 1, 0))

    def low(self, numbers_N: Ints, widths: Ints | int) -> None:
        self._low.append((numbers_N, np.broadcast_to(widths, numbers_N.shape)))

    def joined(self, most: int) -> Bytes | None:
        high_N = np.concatenate(self._high)
        if len(high_N) > most:
            return None
        # A number n in unary is n zeros and a one.
        bits = np.zeros(int(high_N.sum()) + len(high_N), dtype=np.uint8)
        bits[np.cumsum(high_N + 1) - 1] = 1
        unary = np.packbits(bits)
        # The lowest bits of each number, the lowest first: K bits in all, without a loop.
        numbers_N, widths_N = (np.concatenate(parts) for parts in zip(*self._low, strict=True))
        place_K = np.repeat(np.arange(len(numbers_N)), widths_N)
        shift_K = np.arange(len(place_K)) - (np.cumsum(widths_N) - widths_N)[place_K]
        bits_K = ((numbers_N[place_K] >> shift_K) & 1).astype(np.uint8)
        head = np.frombuffer(np.array([len(unary)], dtype="<u4").tobytes(), dtype=np.uint8)
        return np.concatenate([head, unary, np.packbits(bits_K)])


class _Reader:
    """Reads what a _Writer has collected. Raises FrameError for what it cannot have."""

    def __init__(self, data: Bytes, most: int) -> None:
        if len(data) < HEAD_BYTES:
            raise FrameError("coded values are truncated")
        num_bytes = int(np.frombuffer(data[:HEAD_BYTES].tobytes(), "<u4")[0])
        unary = data[HEAD_BYTES : HEAD_BYTES + num_bytes]
        # Every number ends with a one, so they are counted before an array is made for them.
        num_codes = int(np.bitwise_count(unary).sum(dtype=np.int64))
        if len(unary) != num_bytes or num_codes > most:
            raise FrameError(f"coded values of {num_codes} numbers, at most {most} are read")
        self._high = np.diff(np.flatnonzero(np.unpackbits(unary)), prepend=-1) - 1
        self._low = data[HEAD_BYTES + num_bytes :]
        self._num_high = 0
        self._num_low = 0

    def plane(self, edges_S: Ints) -> tuple[Ints, Ints]:
        """Return which places are marked, and where each class begins among the marked."""
        lengths_S = np.diff(edges_S)
        marked_S = self.gamma(len(lengths_S))
        # All that follows is sized by these counts, which a stranger may have written.
        if (marked_S > lengths_S).any():
            raise FrameError(f"{marked_S.tolist()} of {lengths_S.tolist()} values are marked")
        is_turned_S = 2 * marked_S > lengths_S
        num_S = np.where(is_turned_S, lengths_S - marked_S, marked_S)
        widths = np.repeat(_rice_parameters(num_S, lengths_S), num_S)
        # What no honest gap exceeds; so nothing overflows below.
        high = np.minimum(self._next(len(widths)), edges_S[-1])
        steps = (high << widths) + self.low(widths) + 1
        ends = np.cumsum(steps)
        ends_S = np.concatenate([[0], ends])[np.cumsum(num_S)]
        before_S = np.concatenate([[0], ends_S[:-1]])
        if (ends_S - before_S > lengths_S).any():
            raise FrameError("a marked value lies behind the last one")
        own = ends - 1 + np.repeat(edges_S[:-1] - before_S, num_S)
        starts_S = np.concatenate([[0], np.cumsum(marked_S)])
        if not is_turned_S.any():
            return own, starts_S
        marks_N = np.repeat(is_turned_S, lengths_S)
        marks_N[own] ^= True
        return np.flatnonzero(marks_N), starts_S

    def gamma(self, num: int) -> Ints:
        lengths_N = self._next(num)
        if (lengths_N > MOST_BITS + 8).any():
            raise FrameError(f"a coded number of {int(lengths_N.max())} bits")
        top_N = np.where(lengths_N > 0, np.int64(1) << np.maximum(lengths_N - 1, 0), 0)
        return top_N + self.low(np.maximum(lengths_N - 1, 0))

    def low(self, widths_N: Ints) -> Ints:
        first = self._num_low
        num_bits = int(widths_N.sum())
        self._num_low += num_bits
        if self._num_low > 8 * len(self._low):
            raise FrameError("coded values are truncated")
        # Only the bytes that hold these bits are unpacked: the string is read in many pieces.
        taken = self._low[first // 8 : -(-self._num_low // 8)]
        bits_K = np.unpackbits(taken)[first % 8 :][:num_bits].astype(np.int64)
        total_N = np.zeros(len(widths_N), dtype=np.int64)
        if num_bits:
            starts_N = np.cumsum(widths_N) - widths_N
            place_K = np.repeat(np.arange(len(widths_N)), widths_N)
            bits_K <<= np.arange(num_bits) - starts_N[place_K]
            some = widths_N > 0
            # reduceat would return a neighbour's bit for a number of no bits.
            total_N[some] = np.add.reduceat(bits_K, starts_N[some])
        return total_N

    def check_end(self) -> None:
        unread = 8 * len(self._low) - self._num_low
        if self._num_high != len(self._high) or unread > 7:
            raise FrameError("coded values with more behind their end")

    def _next(self, num: int) -> Ints:
        taken = self._high[self._num_high : self._num_high + num]
        if len(taken) < num:
            raise FrameError(f"{len(taken)} of {num} coded numbers arrived")
        self._num_high += num
        return taken

"""Pack numbers into bit strings and unpack them. What a number means is not known here.

`pack` and `unpack` take codes of one width, cut into planes of 8, 4, 2 and 1 bits (6 = 4 + 2). A
plane of w bits is packed in rows: byte j holds codes j, j + M, j + 2M, … with M = ceil(N * w / 8),
so every step is one pass over neighbouring bytes; with codes j, j + 1, … in a byte the same work
takes strided passes. `write_bits` and `read_bits` take numbers of different widths.

Shapes: N codes or numbers, K bits in total.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


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
        plane = codes_N
        if bits != width:
            plane = (codes_N >> shift).bitwise_and_((1 << width) - 1)
        plane = plane.to(torch.uint8)
        size = _plane_bytes(num_codes, width)
        target = packed[start : start + size]
        target.copy_(plane[:size])
        for offset, first in _rows(width, size):
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
        return source.clone()
    plane = torch.empty(num_codes, dtype=torch.uint8, device=source.device)
    size, mask = len(source), (1 << width) - 1
    torch.bitwise_and(source, mask, out=plane[:size])
    for offset, first in _rows(width, size):
        row = plane[first : first + size]
        torch.bitwise_right_shift(source[: len(row)], offset, out=row)
        if offset + width < 8:
            row.bitwise_and_(mask)
    return plane


@cache
def _planes(bits: int) -> tuple[tuple[int, int], ...]:
    """(width, shift) of each plane, widest first and highest bits first."""
    planes, shift = [], bits
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


Ints = npt.NDArray[np.int64]


def bits_bytes(widths_N: Ints) -> int:
    """Bytes that numbers of these widths take."""
    return (int(widths_N.sum()) + 7) // 8


def write_bits(numbers_N: Ints, widths_N: Ints) -> Tensor:
    """Numbers in 0..2**width-1, lowest bits first → uint8 [bits_bytes(widths)]."""
    place_K, shift_K = _layout(widths_N)
    bits_K = (numbers_N[place_K] >> shift_K) & 1
    return torch.from_numpy(np.packbits(bits_K.astype(np.uint8)))


def read_bits(data: Tensor, widths_N: Ints) -> Ints:
    """The numbers of `write_bits`; widths up to 52."""
    place_K, shift_K = _layout(widths_N)
    bits_K = np.unpackbits(data.numpy(), count=len(place_K)).astype(np.int64)
    # Sums below 2**53 are exact in float64.
    sums = np.bincount(place_K, weights=bits_K << shift_K, minlength=len(widths_N))
    return sums.astype(np.int64)


def _layout(widths_N: Ints) -> tuple[Ints, Ints]:
    """For every bit: the index of its number, and which bit of that number it is."""
    place_K = np.repeat(np.arange(len(widths_N)), widths_N)
    starts_N = np.cumsum(widths_N) - widths_N
    return place_K, np.arange(len(place_K)) - starts_N[place_K]

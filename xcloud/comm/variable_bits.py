"""Pack numbers of different widths into one bit string, and unpack them, in a few numpy passes.
(For many numbers of one width bitpack.py is faster.)

Shapes: N numbers, K bits in total.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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

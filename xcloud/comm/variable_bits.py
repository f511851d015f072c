"""Numbers of different widths as one bit string without gaps, and back, in a few passes of numpy.
(Many numbers of one width: bitpack.py, which is faster.)

Shapes: N numbers, K bits of all numbers together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


def bits_bytes(widths_N: Ints) -> int:
    """Bytes of numbers of these widths."""
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
    """Of every bit: the place of its number, and which bit of it this is."""
    place_K = np.repeat(np.arange(len(widths_N)), widths_N)
    starts_N = np.cumsum(widths_N) - widths_N
    return place_K, np.arange(len(place_K)) - starts_N[place_K]

"""Rice-code ascending numbers by their gaps: positions of replaced tokens, ids of a dictionary.

A gap g is coded as (g >> k) zeros and a one in one bit string, and its k low bits in another; k
(one byte) minimises the size. For positions drawn at random with probability p this costs 1 to 3 %
more than the entropy H(p) (Golomb, IEEE Trans. IT 1966; Rice 1979).

Shapes: N numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.comm.variable_bits import Ints, bits_bytes, read_bits, write_bits


def encode_ascending(numbers_N: Ints, below: int) -> Tensor:
    """Strictly ascending numbers in 0..below-1 → uint8; empty for no numbers."""
    if not len(numbers_N):
        return torch.empty(0, dtype=torch.uint8)
    gaps = np.diff(numbers_N, prepend=-1) - 1
    k = _best_k(gaps, below)
    ends = np.cumsum((gaps >> k) + 1) - 1
    bits = np.zeros(int(ends[-1]) + 1, dtype=np.uint8)
    bits[ends] = 1
    low = write_bits(gaps & ((1 << k) - 1), np.full(len(gaps), k))
    head = torch.tensor([k], dtype=torch.uint8)
    return torch.cat((head, torch.from_numpy(np.packbits(bits)), low))


def decode_ascending(data: Tensor, count: int, below: int) -> tuple[Ints, int]:
    """Decode `count` numbers from the start of uint8 `data`; returns them and the bytes consumed.

    Raises FrameError for anything that encode_ascending cannot have produced.
    """
    if not count:
        return np.empty(0, dtype=np.int64), 0
    if count > below or not len(data):
        raise FrameError(f"{count} ascending numbers below {below} in {len(data)} bytes")
    k = int(data[0])
    if k > 31 or (1 << k) > below:
        raise FrameError(f"gaps are coded with k={k} for numbers below {below}")
    # The last one-bit of the gaps is within `longest` bits, whatever the numbers are.
    longest = count + (below >> k)
    string = data[1 : 1 + (longest + 7) // 8].numpy()
    ends = np.flatnonzero(np.unpackbits(string))[:count].astype(np.int64)
    if len(ends) < count:
        raise FrameError(f"{len(ends)} of {count} gaps arrived")
    start = 1 + (int(ends[-1]) // 8 + 1)
    widths = np.full(count, k)
    stop = start + bits_bytes(widths)
    if stop > len(data):
        raise FrameError("the low bits of the gaps are cut short")
    high = np.diff(ends, prepend=-1) - 1
    gaps = (high << k) + read_bits(data[start:stop], widths)
    numbers = np.cumsum(gaps + 1) - 1
    if int(numbers[-1]) >= below:
        raise FrameError(f"a number is {int(numbers[-1])}, expected below {below}")
    return numbers, stop


def _best_k(gaps: Ints, below: int) -> int:
    """The cheapest k. The cost is convex in k: walk downhill from the k of the mean gap."""

    def cost(k: int) -> int:
        return len(gaps) * (k + 1) + int((gaps >> k).sum())

    most = max(below, 1).bit_length() - 1
    k = min(most, int(gaps.mean() + 1).bit_length() - 1)
    while k < most and cost(k + 1) < cost(k):
        k += 1
    while k and cost(k - 1) <= cost(k):
        k -= 1
    return k

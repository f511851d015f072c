"""Code token ids in fewer bits than log2(vocabulary): a small dictionary of the message's frequent
ids, and codes whose length depends on the rank. Lossless, self-contained, no shared table.

Ids that occur MIN_COUNT times or more get ranks by frequency. A token is a class and c bits: class
c holds the ranks 2**c - 1 .. 2**(c+1) - 2, or, for rare tokens, the ids in that range (the classes
of Elias gamma, IEEE Trans. IT 1975). The classes are Huffman-coded by zlib, the bits are
concatenated (variable_bits.py). Order within a class does not matter, so the dictionary's ids are
sent as ascending numbers (gap_code.py).

Shapes: T tokens, U distinct ids, D of them in the dictionary.
"""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.comm.gap_code import decode_ascending, encode_ascending
from xcloud.comm.variable_bits import Ints, bits_bytes, read_bits, write_bits

# An entry costs 8 to 10 bits. Of 2, 3 and 4 occurrences, 3 was smallest on Wikipedia text of four
# languages, 2,048 to 65,536 tokens, by 0 to 1 %.
MIN_COUNT = 3
RARE = 32  # added to the class of a token that is not in the dictionary
HEADER = 8  # bytes: D, and the size of the classes


def encode_ids(ids_T: Ints, vocab_size: int) -> Tensor:
    """int64 [T] in 0..vocab_size-1 → uint8."""
    # Not bincount: the cost must not grow with the vocabulary.
    ids_U, place_T, counts_U = np.unique(ids_T, return_inverse=True, return_counts=True)
    frequent = np.flatnonzero(counts_U >= MIN_COUNT)
    order_D = frequent[np.argsort(-counts_U[frequent], kind="stable")]
    ranges = _class_ranges(len(order_D))
    for first, stop in ranges:
        order_D[first:stop].sort()
    rank_U = np.full(len(ids_U), -1, dtype=np.int64)
    rank_U[order_D] = np.arange(len(order_D))
    ids_D = ids_U[order_D]

    rank_T = rank_U[place_T]
    rare_T = rank_T < 0
    value_T = np.where(rare_T, ids_T, rank_T) + 1  # 1 or more: its highest bit is the class
    class_T = _class_of(value_T)
    symbol_T = (class_T + RARE * rare_T).astype(np.uint8)
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    classes = squeeze.compress(symbol_T.tobytes()) + squeeze.flush()

    head = np.array([len(ids_D), len(classes)], dtype="<u4").tobytes() + classes
    parts = [torch.from_numpy(np.frombuffer(bytearray(head), dtype=np.uint8))]
    parts += [encode_ascending(ids_D[first:stop], vocab_size) for first, stop in ranges]
    parts.append(write_bits(value_T - (np.int64(1) << class_T), class_T))
    return torch.cat(parts)


def decode_ids(data: Tensor, num_tokens: int, vocab_size: int) -> tuple[Ints, int]:
    """Decode `num_tokens` ids from the start of uint8 `data`; returns them and the bytes consumed.

    Raises FrameError for anything that encode_ids cannot have produced; all ids are below
    vocab_size.
    """
    if len(data) < HEADER:
        raise FrameError(f"ranked ids need {HEADER} bytes or more, got {len(data)}")
    size, num_bytes = (int(n) for n in np.frombuffer(data[:HEADER].numpy().tobytes(), "<u4"))
    if size > min(num_tokens // MIN_COUNT, vocab_size) or HEADER + num_bytes > len(data):
        raise FrameError(f"a dictionary of {size} ids and {num_bytes} bytes of classes")
    symbol_T = _inflate(data[HEADER : HEADER + num_bytes], num_tokens)
    at = HEADER + num_bytes

    ids_D = np.empty(size, dtype=np.int64)
    for first, stop in _class_ranges(size):
        ids_D[first:stop], taken = decode_ascending(data[at:], stop - first, vocab_size)
        at += taken

    rare_T, class_T = symbol_T // RARE, (symbol_T % RARE).astype(np.int64)
    end = at + bits_bytes(class_T)
    if int(rare_T.max(initial=0)) > 1 or end > len(data):
        raise FrameError(f"{len(data) - at} bytes for codes of {end - at}, or unknown classes")
    value_T = read_bits(data[at:end], class_T) + (np.int64(1) << class_T) - 1
    is_rare_T = rare_T == 1
    known_T = np.where(is_rare_T, vocab_size, size)
    if (value_T >= known_T).any():
        raise FrameError(f"a code points beyond {vocab_size} ids or {size} dictionary entries")
    ids_T = value_T
    ids_T[~is_rare_T] = ids_D[value_T[~is_rare_T]]
    return ids_T, end


def _inflate(data: Tensor, num_tokens: int) -> npt.NDArray[np.uint8]:
    """The classes; never decompresses more than expected."""
    try:
        inflate = zlib.decompressobj(-15)
        raw = inflate.decompress(data.numpy().tobytes(), num_tokens + 1)
    except zlib.error as error:
        raise FrameError(f"the classes of the tokens are damaged: {error}") from error
    if len(raw) != num_tokens or not inflate.eof or inflate.unused_data:
        raise FrameError(f"{len(raw)} classes arrived for {num_tokens} tokens")
    return np.frombuffer(raw, dtype=np.uint8)


def _class_of(values: Ints) -> Ints:
    """floor(log2(value)), exact below 2**53."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64) - 1


def _class_ranges(size: int) -> list[tuple[int, int]]:
    """(first rank, end) of each class among `size` ranks, half-open."""
    edges = [2**c - 1 for c in range(size.bit_length() + 1)]
    return [(first, min(stop, size)) for first, stop in pairwise(edges) if first < size]

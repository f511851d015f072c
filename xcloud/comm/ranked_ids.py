"""Token ids in fewer bits than log2(vocabulary): a small dictionary of the frequent ids of the
message, and codes whose length follows the rank. Lossless, self-contained, no shared table.

Ids that occur MIN_COUNT times or more get ranks by frequency. A token is a class and the bits
below it: class c holds the ranks (or, for rare tokens, the ids themselves) 2**c - 1 .. 2**(c+1) - 2
(Elias gamma's classes, IEEE Trans. IT 1975), so c bits follow. The classes are Huffman-coded by
zlib, the bits of each class packed by bitpack.py; the dictionary's ids within a class are in no
order that must be kept, so they go as ascending numbers (gap_code.py).

Shapes: T tokens, U different ids, D of them in the dictionary.
"""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xcloud.comm.bitpack import pack, packed_bytes, unpack
from xcloud.comm.gap_code import Ints, decode_ascending, encode_ascending
from xcloud.errors import FrameError

# An entry costs 8 to 10 bits. Of 2, 3 and 4 occurrences, 3 was smallest on Wikipedia text of four
# languages, 2,048 to 65,536 tokens, by 0 to 1 %.
MIN_COUNT = 3
RARE = 32  # added to the class of a token that is not in the dictionary
HEADER = 8  # bytes: D, and how many bytes the classes take


def encode_ids(ids_T: Ints, vocab_size: int) -> Tensor:
    """int64 [T] in 0..vocab_size-1 → uint8."""
    # unique and not bincount: its cost must not follow the vocabulary.
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
    order, runs = _runs(symbol_T)
    low_T = (value_T - (np.int64(1) << class_T)).astype(np.int32)[order]
    parts += [
        pack(torch.from_numpy(low_T[start:stop]), symbol % RARE) for symbol, start, stop in runs
    ]
    return torch.cat(parts)


def decode_ids(data: Tensor, num_tokens: int, vocab_size: int) -> tuple[Ints, int]:
    """`num_tokens` ids from the start of uint8 `data`, and how many bytes they took.

    Raises FrameError for what encode_ids cannot have made; all ids are below vocab_size.
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

    order, runs = _runs(symbol_T)
    sorted_T = np.empty(num_tokens, dtype=np.int64)
    for symbol, start, stop in runs:
        rare, width = divmod(symbol, RARE)
        known = vocab_size if rare else size
        end = at + packed_bytes(stop - start, width)
        if rare > 1 or width >= RARE or end > len(data):
            raise FrameError(f"{stop - start} tokens of class {symbol} do not fit the message")
        low = unpack(data[at:end], width, stop - start).numpy().astype(np.int64)
        values = low + ((1 << width) - 1)
        if int(values.max()) >= known:
            raise FrameError(f"a token's code is {int(values.max())}, expected below {known}")
        sorted_T[start:stop] = values if rare else ids_D[values]
        at = end
    ids_T = np.empty(num_tokens, dtype=np.int64)
    ids_T[order] = sorted_T
    return ids_T, at


def _inflate(data: Tensor, num_tokens: int) -> npt.NDArray[np.uint8]:
    """The classes; never more than are due, whatever the bytes say."""
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
    """(first rank, rank behind the last) of each class among `size` ranks."""
    edges = [2**c - 1 for c in range(size.bit_length() + 1)]
    return [(first, min(stop, size)) for first, stop in pairwise(edges) if first < size]


def _runs(symbol_T: npt.NDArray[np.uint8]) -> tuple[Ints, list[tuple[int, int, int]]]:
    """The order that sorts the tokens by symbol, and (symbol, start, stop) in that order."""
    order = np.argsort(symbol_T, kind="stable")  # a radix sort for bytes
    stops = np.cumsum(np.bincount(symbol_T, minlength=1)).tolist()
    starts = [0, *stops[:-1]]
    pieces = zip(range(len(stops)), starts, stops, strict=True)
    return order, [piece for piece in pieces if piece[1] < piece[2]]

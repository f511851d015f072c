"""Pack a batch of corrupted texts into few bytes: token ids, lengths, which tokens were replaced.
Lossless, self-contained, no shared table, no pickle.

Wire (little endian), after a header of HEADER_BYTES that describes the coding of the rest:
    lengths   (length - shortest) of each sample, as many bits as the longest needs
    ids       fixed: ceil(log2(vocab_size)) bits a token; ranked: see below
    replaced  bitmap: 1 bit a token; gaps: positions of the replaced ones, as ascending numbers
Ids and flags each use the smaller of their two codings, so a message is never larger than fixed
ids and a bitmap.

Ranked ids: those that occur MIN_COUNT times or more get ranks by frequency. A token is a class
and c bits: class c holds the ranks 2**c - 1 .. 2**(c+1) - 2, or, for rare tokens, the ids in that
range (the classes of Elias gamma, IEEE Trans. IT 1975). The classes are Huffman-coded by zlib,
the bits are concatenated. The dictionary's ids are sent as ascending numbers in each class.

Ascending numbers: Rice codes of the gaps. A gap g is (g >> k) zeros and a one in one bit string,
and its k low bits in another; k (one byte) minimises the size: 1 to 3 % above the entropy, for
positions drawn at random (Golomb, IEEE Trans. IT 1966; Rice 1979).

Shapes: B samples, R or T tokens of all samples, U distinct ids, D of them in the dictionary,
N ascending numbers.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.base.settings import settings
from xcloud.comm.precision import pack, packed_bytes, unpack

Ints = npt.NDArray[np.int64]

VERSION = 1
FIXED = 0
RANKED = 1
BITMAP = 0
GAPS = 1
# version, coding of ids, coding of flags, bits of a length, shortest length, vocabulary size,
# vocabulary digest, samples, tokens, replaced tokens
HEADER = struct.Struct("<BBBBIIIIII")
HEADER_BYTES = HEADER.size


class CorruptedTexts(NamedTuple):
    """ids_R: int64. counts_B: int64, tokens of each sample. replaced_R: bool."""

    ids_R: Tensor
    counts_B: Tensor
    replaced_R: Tensor


@settings("IdPacking")
class IdPacking:
    """The codec; both ends need the same settings.

    digest: 32-bit digest of the vocabulary; ids of another vocabulary are refused.
    max_samples, max_length: limits of a message, checked before anything is unpacked.
    coding: "fixed" never uses ranked ids (a third more bytes, three times as fast).
    """

    vocab_size: Annotated[int, Field(ge=1, le=2**31 - 1)]
    max_samples: Annotated[int, Field(ge=1, le=2**31 - 1)]
    max_length: Annotated[int, Field(ge=1, le=2**31 - 1)]
    digest: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    coding: Literal["smallest", "fixed"] = "smallest"

    @property
    def bits(self) -> int:
        """Width of a fixed-width id: ceil(log2(vocab_size)), 18 for 250,002."""
        return (self.vocab_size - 1).bit_length()

    @property
    def max_bytes(self) -> int:
        """Upper bound on the size of a message."""
        tokens = self.max_samples * self.max_length
        lengths = packed_bytes(self.max_samples, bits=self.max_length.bit_length())
        return (
            HEADER_BYTES
            + lengths
            + packed_bytes(tokens, bits=self.bits)
            + packed_bytes(tokens, bits=1)
        )

    def pack(self, texts: CorruptedTexts) -> Tensor:
        """uint8 [N] on the CPU. Raises ValueError for texts outside these settings."""
        ids_R, counts_B, replaced_R = (tensor.cpu() for tensor in texts)
        num_tokens = len(ids_R)
        num_samples = len(counts_B)
        if not 1 <= num_samples <= self.max_samples or int(counts_B.max()) > self.max_length:
            raise ValueError(
                f"{num_samples} samples of {counts_B.tolist()} tokens; allowed are "
                f"{self.max_samples} of {self.max_length}"
            )
        assert int(counts_B.sum()) == num_tokens == len(replaced_R)
        if num_tokens and not 0 <= int(ids_R.min()) <= int(ids_R.max()) < self.vocab_size:
            raise ValueError(f"ids must be in 0..{self.vocab_size - 1}")

        shortest, longest = (int(n) for n in torch.stack(counts_B.aminmax()))
        length_bits = (longest - shortest).bit_length()
        lengths = pack((counts_B - shortest).int(), bits=length_bits)
        id_coding = FIXED
        ids = pack(ids_R.int(), bits=self.bits)
        if self.coding == "smallest" and num_tokens:
            ranked = encode_ids(ids_R.numpy(), vocab_size=self.vocab_size)
            # Where few ids repeat, the dictionary costs more than it saves.
            if len(ranked) < len(ids):
                id_coding = RANKED
                ids = ranked
        places = replaced_R.numpy().nonzero()[0]
        flag_coding = GAPS
        flags = encode_ascending(places, below=num_tokens)
        # Where nearly half of the tokens are replaced, a bit for each is shorter.
        if len(flags) >= packed_bytes(num_tokens, bits=1):
            flag_coding = BITMAP
            flags = pack(replaced_R.to(torch.uint8), bits=1)
        head = HEADER.pack(
            VERSION, id_coding, flag_coding, length_bits, shortest, self.vocab_size, self.digest,
            num_samples, num_tokens, len(places),
        )  # fmt: skip
        header = torch.from_numpy(np.frombuffer(bytearray(head), dtype=np.uint8))
        return torch.cat((header, lengths, ids, flags))

    def unpack(self, payload: Tensor) -> CorruptedTexts:
        """Reverse `pack`. Raises FrameError for anything that `pack` cannot have produced."""
        if payload.dtype != torch.uint8 or payload.dim() != 1 or len(payload) < HEADER_BYTES:
            raise FrameError(f"not a message of token ids: {payload.dtype} {tuple(payload.shape)}")
        rest = Reader(payload.cpu().contiguous())
        (
            version, id_coding, flag_coding, length_bits, shortest, vocab_size, digest,
            num_samples, num_tokens, num_replaced,
        ) = HEADER.unpack(rest.take(HEADER_BYTES).numpy().tobytes())  # fmt: skip
        if version != VERSION or max(id_coding, flag_coding) > 1 or length_bits > 31:
            raise FrameError(
                f"token ids of version {version}, expected {VERSION}, or unknown codes"
            )
        if (vocab_size, digest) != (self.vocab_size, self.digest):
            raise FrameError(
                f"token ids of another vocabulary: {vocab_size} words, digest {digest:08x}; "
                f"expected {self.vocab_size}, {self.digest:08x}. All clouds need one tokenizer "
                "file"
            )
        # Sizes before contents: all that follows is allocated by them.
        most = self.max_samples, self.max_length
        is_long = not num_replaced <= num_tokens <= num_samples * self.max_length
        if is_long or not 1 <= num_samples <= self.max_samples:
            raise FrameError(
                f"{num_replaced} replaced of {num_tokens} tokens in {num_samples} texts of {most}"
            )
        counts_B = rest.codes(length_bits, count=num_samples).long() + shortest
        # Two ways to the number of tokens must agree, or rows and texts would be out of step.
        if int(counts_B.max()) > self.max_length or int(counts_B.sum()) != num_tokens:
            raise FrameError(f"lengths of {int(counts_B.sum())} tokens in all, got {num_tokens}")

        if id_coding == RANKED:
            ids_R = torch.from_numpy(decode_ids(rest, num_tokens, vocab_size=self.vocab_size))
        else:
            ids_R = rest.codes(self.bits, count=num_tokens).long()
            if num_tokens and int(ids_R.max()) >= self.vocab_size:
                raise FrameError(f"id {int(ids_R.max())} is not below {self.vocab_size}")
        if flag_coding == GAPS:
            places = decode_ascending(rest, count=num_replaced, below=max(1, num_tokens))
            replaced_R = torch.zeros(num_tokens, dtype=torch.bool)
            replaced_R[torch.from_numpy(places)] = True
        else:
            replaced_R = rest.codes(1, count=num_tokens).bool()
            if int(replaced_R.sum()) != num_replaced:
                raise FrameError(f"{int(replaced_R.sum())} flags set, expected {num_replaced}")
        if len(rest.data):
            raise FrameError(f"{len(rest.data)} unexpected bytes after the token ids")
        return CorruptedTexts(ids_R, counts_B, replaced_R)


@dataclass
class Reader:
    """A reader of what is left of a message, uint8."""

    data: Tensor

    def take(self, num_bytes: int) -> Tensor:
        if len(self.data) < num_bytes:
            raise FrameError(
                f"token ids are truncated: {len(self.data)} bytes left, expected {num_bytes}"
            )
        taken = self.data[:num_bytes]
        self.data = self.data[num_bytes:]
        return taken

    def codes(self, bits: int, count: int) -> Tensor:
        """See `unpack`."""
        return unpack(self.take(packed_bytes(count, bits)), bits=bits, num_codes=count)


# An entry costs 8 to 10 bits. Of 2, 3 and 4 occurrences, 3 was smallest on Wikipedia text of four
# languages, 2,048 to 65,536 tokens, by 0 to 1 %.
MIN_COUNT = 3
RARE = 32  # added to the class of a token that is not in the dictionary
RANKED_HEADER = 8  # bytes: D, and the size of the classes


def encode_ids(ids_T: Ints, vocab_size: int) -> Tensor:
    """int64 [T] in 0..vocab_size-1 → uint8."""
    # Not bincount: the cost must not grow with the vocabulary.
    ids_U, place_T, counts_U = np.unique(ids_T, return_inverse=True, return_counts=True)
    frequent = np.flatnonzero(counts_U >= MIN_COUNT)
    order_D = frequent[np.argsort(-counts_U[frequent], kind="stable")]
    ranges = _class_ranges(len(order_D))
    # Within a class the order does not change the cost of a rank, and ascending ids are cheap to
    # send.
    for first, stop in ranges:
        order_D[first:stop].sort()
    # -1 for ids that are too rare for the dictionary: these stand for themselves.
    rank_U = np.full(len(ids_U), -1, dtype=np.int64)
    rank_U[order_D] = np.arange(len(order_D))
    ids_D = ids_U[order_D]

    rank_T = rank_U[place_T]
    rare_T = rank_T < 0
    value_T = np.where(rare_T, ids_T, rank_T) + 1  # 1 or more: its highest bit is the class
    class_T = np.frexp(value_T.astype(np.float64))[1].astype(np.int64) - 1  # exact below 2**53
    symbol_T = (class_T + RARE * rare_T).astype(np.uint8)
    # Huffman only: neighbouring classes do not repeat, so a search for strings finds nothing.
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    classes = squeeze.compress(symbol_T.tobytes()) + squeeze.flush()

    head = np.array([len(ids_D), len(classes)], dtype="<u4").tobytes() + classes
    parts = [torch.from_numpy(np.frombuffer(bytearray(head), dtype=np.uint8))]
    parts += [encode_ascending(ids_D[first:stop], below=vocab_size) for first, stop in ranges]
    parts.append(write_bits(value_T - (np.int64(1) << class_T), widths_N=class_T))
    return torch.cat(parts)


def decode_ids(data: Reader, num_tokens: int, vocab_size: int) -> Ints:
    """`num_tokens` ids below vocab_size. Raises FrameError for anything that encode_ids cannot
    have produced."""
    size, num_bytes = np.frombuffer(data.take(RANKED_HEADER).numpy().tobytes(), "<u4").tolist()
    # An entry stands for MIN_COUNT tokens at least, so a longer dictionary is no honest one.
    if size > min(num_tokens // MIN_COUNT, vocab_size):
        raise FrameError(f"a dictionary of {size} ids for {num_tokens} tokens")
    symbol_T = _inflate(data.take(num_bytes), num_tokens)
    ids_D = np.empty(size, dtype=np.int64)
    for first, stop in _class_ranges(size):
        ids_D[first:stop] = decode_ascending(data, count=stop - first, below=vocab_size)
    rare_T = symbol_T // RARE
    class_T = (symbol_T % RARE).astype(np.int64)
    if int(rare_T.max(initial=0)) > 1:
        raise FrameError(f"unknown classes of tokens: {int(symbol_T.max())}")
    value_T = read_bits(data, widths_N=class_T) + (np.int64(1) << class_T) - 1
    is_rare_T = rare_T == 1
    if (value_T >= np.where(is_rare_T, vocab_size, size)).any():
        raise FrameError(f"a code points beyond {vocab_size} ids or {size} dictionary entries")
    # Rare tokens stand for themselves, frequent ones for their place in the dictionary.
    value_T[~is_rare_T] = ids_D[value_T[~is_rare_T]]
    return value_T


def _inflate(data: Tensor, num_tokens: int) -> npt.NDArray[np.uint8]:
    """The classes; never decompresses more than expected."""
    try:
        inflate = zlib.decompressobj(-15)
        # One more than expected shows that there is more, without unpacking it.
        raw = inflate.decompress(data.numpy().tobytes(), num_tokens + 1)
    except zlib.error as error:
        raise FrameError(f"the classes of the tokens are damaged: {error}") from error
    if len(raw) != num_tokens or not inflate.eof or inflate.unused_data:
        raise FrameError(f"{len(raw)} classes arrived for {num_tokens} tokens")
    return np.frombuffer(raw, dtype=np.uint8)


def _class_ranges(size: int) -> list[tuple[int, int]]:
    """(first rank, end) of each class among `size` ranks, half-open."""
    edges = [2**c - 1 for c in range(size.bit_length() + 1)]
    return [(first, min(stop, size)) for first, stop in pairwise(edges) if first < size]


def encode_ascending(numbers_N: Ints, below: int) -> Tensor:
    """Strictly ascending numbers in 0..below-1 → uint8; empty for no numbers."""
    if not len(numbers_N):
        return torch.empty(0, dtype=torch.uint8)
    gaps = np.diff(numbers_N, prepend=-1) - 1
    choices = range(max(below, 1).bit_length())
    k = min(choices, key=lambda k: len(gaps) * (k + 1) + int((gaps >> k).sum()))  # the fewest bits
    ends = np.cumsum((gaps >> k) + 1) - 1
    bits = np.zeros(int(ends[-1]) + 1, dtype=np.uint8)
    bits[ends] = 1
    low = write_bits(gaps & ((1 << k) - 1), widths_N=np.full(len(gaps), k))
    head = torch.tensor([k], dtype=torch.uint8)
    return torch.cat((head, torch.from_numpy(np.packbits(bits)), low))


def decode_ascending(data: Reader, count: int, below: int) -> Ints:
    """`count` of them. Raises FrameError for what encode_ascending cannot have produced."""
    if not count:
        return np.empty(0, dtype=np.int64)
    k = int(data.take(1)[0])
    if count > below or k > 31 or (1 << k) > below:
        raise FrameError(f"gaps are coded with k={k} for numbers below {below}")
    # The last one-bit of the gaps is within `longest` bits, whatever the numbers are.
    longest = count + (below >> k)
    string = data.data[: (longest + 7) // 8].numpy()
    # Each gap ends with a one; of the last byte's other bits nothing is read.
    ends = np.flatnonzero(np.unpackbits(string))[:count].astype(np.int64)
    if len(ends) < count:
        raise FrameError(f"{len(ends)} of {count} gaps arrived")
    data.take(int(ends[-1]) // 8 + 1)
    widths = np.full(count, k)
    high = np.diff(ends, prepend=-1) - 1
    gaps = (high << k) + read_bits(data, widths_N=widths)
    numbers = np.cumsum(gaps + 1) - 1
    if int(numbers[-1]) >= below:
        raise FrameError(f"a number is {int(numbers[-1])}, expected below {below}")
    return numbers


def write_bits(numbers_N: Ints, widths_N: Ints) -> Tensor:
    """Numbers in 0..2**width-1, lowest bits first → uint8, (sum of the widths + 7) // 8
    bytes."""
    place_K, shift_K = _layout(widths_N)
    bits_K = (numbers_N[place_K] >> shift_K) & 1
    return torch.from_numpy(np.packbits(bits_K.astype(np.uint8)))


def read_bits(data: Reader, widths_N: Ints) -> Ints:
    """The numbers of `write_bits`; widths up to 52."""
    packed = data.take((int(widths_N.sum()) + 7) // 8)
    place_K, shift_K = _layout(widths_N)
    bits_K = np.unpackbits(packed.numpy(), count=len(place_K)).astype(np.int64)
    # Sums below 2**53 are exact in float64.
    sums = np.bincount(place_K, weights=bits_K << shift_K, minlength=len(widths_N))
    return sums.astype(np.int64)


def _layout(widths_N: Ints) -> tuple[Ints, Ints]:
    """For every bit: the index of its number, and which bit of that number it is."""
    place_K = np.repeat(np.arange(len(widths_N)), widths_N)
    starts_N = np.cumsum(widths_N) - widths_N
    return place_K, np.arange(len(place_K)) - starts_N[place_K]

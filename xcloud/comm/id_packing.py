"""Pack a batch of corrupted texts into few bytes: token ids, lengths, which tokens were replaced.
Lossless, self-contained, no pickle.

Wire (little endian), after a header of HEADER_BYTES that describes the coding of the rest:
    lengths   (length - shortest) of each sample, as many bits as the longest needs
    ids       fixed: ceil(log2(vocab_size)) bits a token; ranked: see ranked_ids.py
    replaced  bitmap: 1 bit a token; gaps: positions of the replaced ones, see gap_code.py
Ids and flags each use the smaller of their two codings, so a message is never larger than fixed
ids and a bitmap.

Shapes: B samples, R tokens of all samples.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xcloud.base.checks import check_choice, check_int
from xcloud.base.errors import FrameError
from xcloud.comm.bitpack import pack, packed_bytes, unpack
from xcloud.comm.gap_code import decode_ascending, encode_ascending
from xcloud.comm.ranked_ids import decode_ids, encode_ids

VERSION = 1
FIXED, RANKED = 0, 1
BITMAP, GAPS = 0, 1
# version, coding of ids, coding of flags, bits of a length, shortest length, vocabulary size,
# vocabulary digest, samples, tokens, replaced tokens
HEADER = struct.Struct("<BBBBIIIIII")
HEADER_BYTES = HEADER.size


class CorruptedTexts(NamedTuple):
    """ids_R: int64. counts_B: int64, tokens of each sample. replaced_R: bool."""

    ids_R: Tensor
    counts_B: Tensor
    replaced_R: Tensor


@dataclass(frozen=True)
class IdPacking:
    """The codec; both ends need the same settings.

    digest: 32-bit digest of the vocabulary; ids of another vocabulary are refused.
    max_samples, max_length: limits of a message, checked before anything is unpacked.
    coding: "fixed" never uses ranked ids (a third more bytes, three times as fast).
    """

    vocab_size: int
    max_samples: int
    max_length: int
    digest: int = 0
    coding: Literal["smallest", "fixed"] = "smallest"

    def __post_init__(self) -> None:
        check_int("IdPacking.vocab_size", self.vocab_size, 1, 2**31 - 1)
        check_int("IdPacking.max_samples", self.max_samples, 1, 2**31 - 1)
        check_int("IdPacking.max_length", self.max_length, 1, 2**31 - 1)
        check_int("IdPacking.digest", self.digest, 0, 2**32 - 1)
        check_choice("IdPacking.coding", self.coding, ("smallest", "fixed"))

    @property
    def bits(self) -> int:
        """Width of a fixed-width id: ceil(log2(vocab_size)), 18 for 250,002."""
        return (self.vocab_size - 1).bit_length()

    @property
    def max_bytes(self) -> int:
        """Upper bound on the size of a message."""
        tokens = self.max_samples * self.max_length
        lengths = packed_bytes(self.max_samples, self.max_length.bit_length())
        return HEADER_BYTES + lengths + packed_bytes(tokens, self.bits) + packed_bytes(tokens, 1)

    def pack(self, texts: CorruptedTexts) -> Tensor:
        """uint8 [N] on the CPU. Raises ValueError for texts outside these settings."""
        ids_R, counts_B, replaced_R = (tensor.cpu() for tensor in texts)
        num_tokens, num_samples = len(ids_R), len(counts_B)
        if not 1 <= num_samples <= self.max_samples or int(counts_B.max()) > self.max_length:
            raise ValueError(
                f"{num_samples} samples of up to {int(counts_B.max()) if num_samples else 0} "
                f"tokens; allowed are {self.max_samples} of {self.max_length}"
            )
        if int(counts_B.sum()) != num_tokens or len(replaced_R) != num_tokens:
            raise ValueError(f"{num_tokens} ids, but lengths of {int(counts_B.sum())} in all")
        if num_tokens and not 0 <= int(ids_R.min()) <= int(ids_R.max()) < self.vocab_size:
            raise ValueError(f"ids must be in 0..{self.vocab_size - 1}")

        shortest, longest = (int(n) for n in torch.stack(counts_B.aminmax()))
        length_bits = (longest - shortest).bit_length()
        lengths = pack((counts_B - shortest).int(), length_bits)
        id_coding, ids = FIXED, None
        fixed_bytes = packed_bytes(num_tokens, self.bits)
        if self.coding == "smallest" and num_tokens:
            id_coding, ids = RANKED, encode_ids(ids_R.numpy(), self.vocab_size)
        if ids is None or len(ids) >= fixed_bytes:
            id_coding, ids = FIXED, pack(ids_R.int(), self.bits)
        places = replaced_R.numpy().nonzero()[0]
        flag_coding, flags = GAPS, encode_ascending(places, num_tokens)
        if len(flags) >= packed_bytes(num_tokens, 1):
            flag_coding, flags = BITMAP, pack(replaced_R.to(torch.uint8), 1)
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
        payload = payload.cpu().contiguous()
        version = int(payload[0])
        if version != VERSION:
            raise FrameError(f"token ids packed by version {version}, expected {VERSION}")
        (
            _, id_coding, flag_coding, length_bits, shortest, vocab_size, digest,
            num_samples, num_tokens, num_replaced,
        ) = HEADER.unpack(payload[:HEADER_BYTES].numpy().tobytes())  # fmt: skip
        if (vocab_size, digest) != (self.vocab_size, self.digest):
            raise FrameError(
                f"token ids of another vocabulary: {vocab_size} words, digest {digest:08x}; "
                f"expected {self.vocab_size}, {self.digest:08x}. All clouds need one tokenizer "
                "file"
            )
        if not 1 <= num_samples <= self.max_samples or length_bits > 31:
            raise FrameError(f"{num_samples} samples in a message, most {self.max_samples}")
        if num_tokens > num_samples * self.max_length or num_replaced > num_tokens:
            raise FrameError(
                f"{num_replaced} replaced of {num_tokens} tokens in {num_samples} samples of at "
                f"most {self.max_length}"
            )
        if max(id_coding, flag_coding) > 1:
            raise FrameError(f"unknown codings {id_coding} and {flag_coding}")
        data = payload[HEADER_BYTES:]

        taken, data = _split(data, packed_bytes(num_samples, length_bits))
        counts_B = unpack(taken, length_bits, num_samples).long() + shortest
        if int(counts_B.max()) > self.max_length or int(counts_B.sum()) != num_tokens:
            raise FrameError(f"lengths of {int(counts_B.sum())} tokens in all, got {num_tokens}")

        if id_coding == RANKED:
            array, num_bytes = decode_ids(data, num_tokens, self.vocab_size)
            ids_R, data = torch.from_numpy(array), data[num_bytes:]
        else:
            taken, data = _split(data, packed_bytes(num_tokens, self.bits))
            ids_R = unpack(taken, self.bits, num_tokens).long()
            if num_tokens and int(ids_R.max()) >= self.vocab_size:
                raise FrameError(f"id {int(ids_R.max())} is not below {self.vocab_size}")

        if flag_coding == GAPS:
            places, num_bytes = decode_ascending(data, num_replaced, max(1, num_tokens))
            replaced_R = torch.zeros(num_tokens, dtype=torch.bool)
            replaced_R[torch.from_numpy(places)] = True
            data = data[num_bytes:]
        else:
            taken, data = _split(data, packed_bytes(num_tokens, 1))
            replaced_R = unpack(taken, 1, num_tokens).bool()
            if int(replaced_R.sum()) != num_replaced:
                raise FrameError(f"{int(replaced_R.sum())} flags set, expected {num_replaced}")
        if len(data):
            raise FrameError(f"{len(data)} unexpected bytes after the token ids")
        return CorruptedTexts(ids_R, counts_B, replaced_R)


def _split(data: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
    if len(data) < num_bytes:
        raise FrameError(f"token ids are cut short: {len(data)} bytes left, expected {num_bytes}")
    return data[:num_bytes], data[num_bytes:]

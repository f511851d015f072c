"""Encode a message as bytes: a self-describing header, then the tensors. Never a pickle.

Layout, little-endian:
  magic "XCLD" | version u8 | kind u8 | number of parts u8 | unused u8 | step u32 | micro-batch u32
  | sequence u32 | crc32 u32 | payload bytes u64 | deliver_at f64            (40 bytes)
  per part: dtype u8 | number of axes u8 | size of each axis u32
  payload: the parts' bytes, concatenated
The checksum covers the whole frame, with the crc field set to zero.
"""

from __future__ import annotations

import math
import mmap
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError, FrameError

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class TensorSpec:
    """The shape and type of a tensor: enough to count its bytes or to receive it.

    is_bound: the tensor has one axis, and may be shorter.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_bound: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def admits(self, found: TensorSpec) -> bool:
        """Return whether a tensor of the spec `found` is what this one promises."""
        if not self.is_bound:
            return found == self
        is_short = len(found.shape) == 1 and found.shape[0] <= self.shape[0]
        return is_short and found.dtype == self.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_floating(self) -> bool:
        return self.dtype.is_floating_point


MAGIC = b"XCLD"
VERSION = 1
_MAX_AXIS = 2**32 - 1  # of one axis, by the layout above
_HEADER = struct.Struct("<4sBBBBIIIIQd")
HEAD_BYTES = _HEADER.size
"""No frame is shorter."""
_CRC_OFFSET = 20
_PAYLOAD_OFFSET = 24
_DELIVER_OFFSET = 32

_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
_CODE_OF = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Kind(IntEnum):
    """The purpose of a frame. Training and evaluation activations differ, so that a rank that is
    out of step never mistakes one for the other."""

    ACTIVATION = 1
    GRADIENT = 2
    EVALUATION = 3
    NORM = 4
    REPORT = 5
    CHOICE = 6  # what ranks measured, and what rank 0 chose by it
    CLOSE = 7  # the last of a link
    START = 8  # what a stage passes to the next one, once, before the first step
    BARRIER = 9  # a rank has reached a barrier; rank 0 answers when all have
    ALIVE = 10  # a heartbeat of a rank that is busy outside a step
    AVERAGING = 11  # gradients or weight changes, between replicas of the pipeline
    # One-way jobs: a producer's batch, its "ready", the consumer's order for batches, and its
    # "stop" when it needs no more.
    BATCH = 16
    READY = 17
    ORDER = 18
    STOP = 19
    CHECKPOINT = 24  # how far a rank is with its part of a checkpoint
    WORD = 25  # a text between a rank and rank 0, before the first step (net/words.py)
    STORED = 26  # what is written to a folder or bucket, and is never a frame


OF_A_STEP = (Kind.ACTIVATION, Kind.GRADIENT, Kind.NORM, Kind.CHOICE, Kind.AVERAGING)
"""Kinds that ranks wait for inside an update, each with a deadline."""

_SMALL = (Kind.NORM, Kind.REPORT, Kind.CHOICE, Kind.BARRIER, Kind.ALIVE, Kind.CHECKPOINT)
TRAFFIC_OF = dict.fromkeys(_SMALL, "other") | {
    Kind.ACTIVATION: "forward",
    Kind.GRADIENT: "backward",
    Kind.AVERAGING: "averaging",
}
"""The name under which a pipeline's step counts the bytes of a kind; none of a kind that is sent
outside steps."""


class MessageKey(NamedTuple):
    """The identity of a message; the receiver knows which one to expect."""

    kind: Kind
    step: int = 0
    micro_batch: int = 0

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} of step {self.step}, micro-batch {self.micro_batch}"


class Frame(NamedTuple):
    """A message as it was received."""

    key: MessageKey
    parts: tuple[Tensor, ...]
    sequence: int
    deliver_at_s: float  # below 0: at once, and its sender sent it at -deliver_at_s
    num_bytes: int


def frame_bytes(specs: tuple[TensorSpec, ...]) -> int:
    """Return the bytes of a frame that carries these parts, header included.

    Raises ConfigError for parts whose sizes it cannot hold.
    """
    longest = max((size for spec in specs for size in spec.shape), default=0)
    if longest > _MAX_AXIS:
        raise ConfigError(
            f"a message would carry {longest:,} values in one part; the most is "
            f"{_MAX_AXIS:,}. Spread "
            "them over more ranks of a cloud (cluster.clouds.NAME.num_ranks), or merge in parts "
            "(strategy=streaming strategy.averaging.fragments=N)"
        )
    descriptors = sum(2 + 4 * len(spec.shape) for spec in specs)
    return _HEADER.size + descriptors + sum(spec.num_bytes for spec in specs)


LONG_BYTES = 1 << 25
"""From here on a message gets pages of its own, which go back to the system once it is done with.
The heap of a launched rank gives nothing back below 1 GiB (LIBRARY_SETTINGS of
launch/processes.py), so that activations need no new pages in every step; long messages, which
come and go in threads of their own, would stay in it many times over."""


def message_buffer(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] on the CPU, uninitialised. It takes memory only as far as it has
    been filled."""
    if num_bytes < LONG_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def encode_frame(key: MessageKey, parts: tuple[Tensor, ...], sequence: int) -> Tensor:
    """Return uint8 [frame_bytes] on the CPU. The parts may be on any device and are copied
    once."""
    specs = tuple(TensorSpec.of(part) for part in parts)
    frame = message_buffer(frame_bytes(specs))
    payload_bytes = sum(spec.num_bytes for spec in specs)
    head = _HEADER.pack(
        MAGIC, VERSION, key.kind, len(parts), 0, key.step, key.micro_batch, sequence, 0,
        payload_bytes, 0.0,
    )  # fmt: skip
    for spec in specs:
        if spec.dtype not in _CODE_OF:
            raise FrameError(f"a frame cannot carry a tensor of {spec.dtype}")
        axes = len(spec.shape)
        head += struct.pack(f"<BB{axes}I", _CODE_OF[spec.dtype], axes, *spec.shape)
    offset = len(head)
    _bytes_of(frame)[:offset] = head
    for part, spec in zip(parts, specs, strict=True):
        place = frame[offset : offset + spec.num_bytes]
        # The one copy: from whatever device and dtype, as bytes, into the frame that is sent. On a
        # GPU the host waits here until the part has been computed (docs/decisions/0023).
        place.copy_(part.detach().contiguous().view(-1).view(torch.uint8))
        offset += spec.num_bytes
    return frame


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a uint8 CPU tensor, writable."""
    return memoryview(cast(Any, tensor.numpy()))


def seal_frame(frame: Tensor, deliver_at_s: float) -> None:
    """Write the delivery time (0 = at once; below 0: at once, and the time of sending with its
    sign turned) and the checksum, just before sending."""
    view = _bytes_of(frame)
    struct.pack_into("<d", view, _DELIVER_OFFSET, deliver_at_s)
    struct.pack_into("<I", view, _CRC_OFFSET, 0)
    struct.pack_into("<I", view, _CRC_OFFSET, zlib.crc32(view))


def bytes_of_frame(start: Tensor, sender: str) -> int:
    """Return how many bytes a frame has whose first ones these are: at least its header.

    Raises FrameError naming `sender` where they are no beginning of a frame.
    """
    view = _bytes_of(start)
    if len(view) < _HEADER.size or view[:5] != MAGIC + bytes([VERSION]):
        return decode_frame(start, sender).num_bytes  # which says what is wrong
    num_parts = view[6]
    payload = struct.unpack_from("<Q", view, _PAYLOAD_OFFSET)[0]
    offset = _HEADER.size
    for _ in range(num_parts):
        if offset + 2 > len(view):
            raise FrameError(f"the header of a frame from {sender} is damaged: it has no end")
        offset += 2 + 4 * view[offset + 1]
    return int(offset + payload)


def decode_frame(buffer: Tensor, sender: str) -> Frame:
    """Check and unpack the frame at the start of `buffer` (uint8, may be longer).

    Raises FrameError naming `sender` and the defect. The parts own their memory.
    """
    view = _bytes_of(buffer)
    if len(view) < _HEADER.size:
        raise FrameError(f"{len(view)} bytes from {sender} are too few for a frame")
    magic, version, kind, num_parts, _, step, micro_batch, sequence, crc, payload, deliver_at = (
        _HEADER.unpack_from(view)
    )
    if magic != MAGIC:
        raise FrameError(f"what {sender} sent does not begin with {MAGIC!r} but with {magic!r}")
    if version != VERSION:
        raise FrameError(
            f"{sender} speaks frame version {version}, this rank {VERSION}; run one release of "
            "xcloud in all clouds"
        )
    try:
        offset = _HEADER.size
        specs = []
        for _ in range(num_parts):
            code, axes = struct.unpack_from("<BB", view, offset)
            shape = struct.unpack_from(f"<{axes}I", view, offset + 2)
            specs.append(TensorSpec(shape, dtype=_DTYPES[code]))
            offset += 2 + 4 * axes
        end = offset + payload
        # Before anything is allocated: the sizes are the sender's word.
        if end > len(view) or payload != sum(spec.num_bytes for spec in specs):
            raise FrameError(f"a frame from {sender} promises {payload} bytes and holds others")
        if not math.isfinite(deliver_at):
            raise ValueError(f"its time is {deliver_at}")
        key = MessageKey(Kind(kind), step, micro_batch)
    except (struct.error, IndexError, ValueError) as error:
        raise FrameError(f"the header of a frame from {sender} is damaged: {error}") from error
    # The checksum is of the frame with its own field zeroed, and comes last: what was checked
    # before bounds the bytes that it reads.
    struct.pack_into("<I", view, _CRC_OFFSET, 0)
    found = zlib.crc32(view[:end])
    if found != crc:
        raise FrameError(
            f"{key} from {sender} was damaged on the way: checksum {found:08x}, sent {crc:08x}"
        )
    parts = []
    for spec in specs:
        place = buffer[offset : offset + spec.num_bytes]
        # Copied out, as the buffer is received into again, and as offsets in a frame are not
        # aligned to the parts' dtypes.
        part = message_buffer(spec.num_bytes).copy_(place)
        parts.append(part.view(spec.dtype).view(spec.shape))
        offset += spec.num_bytes
    return Frame(
        key, parts=tuple(parts), sequence=sequence, deliver_at_s=deliver_at, num_bytes=end
    )

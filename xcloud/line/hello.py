"""The greeting on every connection between two clouds: who sends what to whom.

The rank that dials says it first, and the other answers with its own, or with why it refuses.
Little-endian, at most 256 bytes:
  length of the rest u8 | magic "XCLH" | version u8 | connection u8 | of u8 | attempt u32
  | known u32 | sender rank u32 | receiver rank u32 | expected u32 | run (16 bytes)
  | three texts, each length u8 and UTF-8: cloud of the sender, cloud of the receiver, line
A refusal: length of the rest u8 | magic "XCLR" | version u8 | reason u8
"""

from __future__ import annotations

import socket
import struct
import time
from enum import IntEnum
from typing import NamedTuple

from xcloud.base.errors import ConfigError, FrameError

VERSION = 3
RUN_BYTES = 16
MAX_CONNECTIONS = 10  # of one direction of a link
HELLO_S = 5.0
_MAX_REST = 255
_MAGIC = b"XCLH"
_REFUSAL_MAGIC = b"XCLR"
_HEAD = struct.Struct(f"<4sBBBIIIII{RUN_BYTES}s")
_REFUSAL = struct.Struct("<4sBB")


class StreamName(NamedTuple):
    """One direction of a line between two ranks of different clouds."""

    line: str
    sender_cloud: str
    sender: int
    receiver_cloud: str
    receiver: int

    def __str__(self) -> str:
        return (
            f"line {self.line!r} from rank {self.sender} of {self.sender_cloud} to rank "
            f"{self.receiver} of {self.receiver_cloud}"
        )


class Hello(NamedTuple):
    """A greeting.

    run: 16 bytes that are the same in both clouds, and not those of another experiment.
    attempt: a number of this start of the sending cloud. No other start has the same one.
    connection, of: number of this connection, and number of connections of the stream.
    expected: number of the first frame that the receiver has not got in full; 0 from a sender.
    known: the attempt of the other cloud that this one knows; 0 if it knows none.
    """

    stream: StreamName
    run: bytes
    attempt: int
    connection: int
    of: int
    expected: int = 0
    known: int = 0


class HelloRefusal(IntEnum):
    """A reason not to answer a greeting."""

    NOT_YET = 1
    EARLIER_ATTEMPT = 2
    OTHER_RUN = 3


WHY_REFUSED = {
    HelloRefusal.NOT_YET: "it is not ready for this link",
    HelloRefusal.EARLIER_ATTEMPT: "it has begun the run again",
    HelloRefusal.OTHER_RUN: "it runs another experiment file, or only one end is a doctor",
}


def encode_hello(hello: Hello) -> bytes:
    """Return a greeting as bytes. Raises ConfigError for names that are too long."""
    stream = hello.stream
    data = _HEAD.pack(
        _MAGIC, VERSION, hello.connection, hello.of, hello.attempt, hello.known, stream.sender,
        stream.receiver, hello.expected, hello.run,
    )  # fmt: skip
    for text in (stream.sender_cloud, stream.receiver_cloud, stream.line):
        # Cut to what a length byte can say, so that it is the next check that fails, in words.
        name = text.encode()
        data += struct.pack("<B", min(len(name), _MAX_REST)) + name
    if len(data) > _MAX_REST:
        raise ConfigError(
            f"the names of clouds {stream.sender_cloud} and {stream.receiver_cloud} are too long "
            "for a line between them; 64 letters each fit"
        )
    return struct.pack("<B", len(data)) + data


def encode_refusal(reason: HelloRefusal) -> bytes:
    data = _REFUSAL.pack(_REFUSAL_MAGIC, VERSION, reason)
    return struct.pack("<B", len(data)) + data


def decode_hello(data: bytes, sender: str) -> Hello | HelloRefusal:
    """Return the greeting or refusal in the bytes after its length.

    Raises FrameError naming `sender` for anything but what encode_hello and encode_refusal make.
    """
    try:
        # Both forms come at the same place, as the answer to a greeting.
        is_refusal = data[:4] == _REFUSAL_MAGIC
        if is_refusal:
            _, version, reason = _REFUSAL.unpack(data)
        else:
            (magic, version, connection, of, attempt, known, sends, receives, expected, run) = (
                _HEAD.unpack_from(data)
            )
            if magic != _MAGIC:
                raise ValueError(f"it begins with {magic!r}")
        if version != VERSION:
            raise FrameError(
                f"{sender} speaks version {version} of the line, this rank {VERSION}; run one "
                "release of xcloud in all clouds"
            )
        if is_refusal:
            return HelloRefusal(reason)
        names = []
        at = _HEAD.size
        for _ in range(3):
            until = at + 1 + data[at]
            if until > len(data):
                raise ValueError("a name is longer than the rest")
            names.append(data[at + 1 : until].decode())
            at = until
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes follow its end")
        if not all(name and name.isprintable() for name in names):
            raise ValueError("a name cannot be printed")
        # A peer decides with this how many threads this rank starts.
        if not connection < of <= MAX_CONNECTIONS:
            raise ValueError(f"it is connection {connection} of {of}")
    except (struct.error, ValueError, IndexError) as error:  # UnicodeDecodeError is a ValueError
        raise FrameError(f"{sender} sent no greeting: {error}") from None
    stream = StreamName(
        names[2], sender_cloud=names[0], sender=sends, receiver_cloud=names[1], receiver=receives
    )
    return Hello(stream, run, attempt, connection, of=of, expected=expected, known=known)


def read_hello(connection: socket.socket, sender: str) -> Hello | HelloRefusal:
    """Read a greeting or refusal. Raises FrameError for anything else, TimeoutError for one that
    takes longer than HELLO_S, OSError where the connection ends."""
    until_s = time.monotonic() + HELLO_S
    # One deadline for both reads: a peer that sends a byte now and then gains nothing by it.
    [length] = _read(connection, num_bytes=1, until_s=until_s)
    return decode_hello(_read(connection, num_bytes=length, until_s=until_s), sender=sender)


def _read(connection: socket.socket, num_bytes: int, until_s: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return data

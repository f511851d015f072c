"""What the sender of a line knows of the pieces that are under way."""

import struct
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from xcloud.base.errors import ConfigError, FrameError
from xcloud.line import pieces
from xcloud.line.hello import (
    WHY_REFUSED,
    Hello,
    HelloRefusal,
    StreamName,
    decode_hello,
    encode_hello,
    encode_refusal,
)
from xcloud.line.pieces import HEADER, MAX_OPEN_FRAMES, PIECE_BYTES, Assembly, Outbox
from xcloud.net.frame import HEAD_BYTES
from xcloud.net.link_end import QueuedBytes, ignore


def test_bandwidth_is_measured_over_a_whole_piece_and_a_fifth_of_a_second_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(num_bytes: int, took_s: float) -> float | None:
        frames = iter([torch.zeros(num_bytes, dtype=torch.uint8)])
        box = Outbox(1 << 30, next_frame=lambda: next(frames, None), queued=Mock())
        monkeypatch.setattr(pieces, "time", Mock(monotonic=lambda: 0.0))
        num_pieces = 0
        while box.take(0) is not None:
            num_pieces += 1
        monkeypatch.setattr(pieces, "time", Mock(monotonic=lambda: took_s))
        box.acknowledge(0, num_pieces)
        return box.bytes_per_s

    assert measured(1000, took_s=0.5) is None
    assert measured(2 * PIECE_BYTES, took_s=0.1) is None
    assert measured(2 * PIECE_BYTES, took_s=0.5) == 4 * PIECE_BYTES


def box_of(*sizes: int, sent_again: Any = ignore) -> Outbox:
    frames = iter([torch.zeros(size, dtype=torch.uint8) for size in sizes])
    return Outbox(
        1 << 30, next_frame=lambda: next(frames, None), queued=QueuedBytes(), sent_again=sent_again
    )


def test_bandwidth_leaves_out_the_round_trip_before_the_first_acknowledgement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(pieces, "time", Mock(monotonic=lambda: now_s[0]))
    box = box_of(2 * PIECE_BYTES)
    box.ask(0)
    now_s[0] = 0.2
    box.acknowledge(0, 1)
    assert box.round_trip_s == 0.2
    while box.take(0) is not None:
        pass
    now_s[0] = 1.0  # the line was busy for 0.6 s, after a round trip of 0.2 s
    box.acknowledge(0, 3)
    assert box.bytes_per_s == pytest.approx(2 * PIECE_BYTES / 0.6)


def test_a_frame_that_the_receiver_has_is_done_with_though_its_answer_was_lost() -> None:
    """Each before the one that it expects; that one is sent again, as far as it has crossed."""
    again: list[int] = []
    box = box_of(1000, 1000, 1000, sent_again=again.append)
    box.begin(0, of=1, expected=0)
    for _ in range(3):
        assert box.take(0) is not None
    box.cut(0, sent_bytes=3 * (1000 + HEADER.size) - 400)
    box.begin(0, of=1, expected=2)
    assert box.queued.num_bytes == 1000
    piece, data, _ = box.take(0) or pytest.fail("the third is sent again")
    assert (piece.frame, len(data), again) == (2, 1000, [600])
    assert box.take(0) is None
    box.acknowledge(0, 1)
    assert box.is_empty and not box.awaits(0)


def test_what_never_left_this_machine_is_not_counted_as_sent_again() -> None:
    again: list[int] = []
    box = box_of(5000, sent_again=again.append)
    box.begin(0, of=1, expected=0)
    box.take(0)
    box.cut(0, sent_bytes=0)
    box.begin(0, of=1, expected=0)
    assert box.take(0) is not None and again == [0]
    box.cut(0)  # where the system does not say
    box.begin(0, of=1, expected=0)
    assert box.take(0) is not None and again == [0, 5000]


def test_no_more_frames_are_under_way_than_the_receiver_takes() -> None:
    box = box_of(*[HEAD_BYTES] * (MAX_OPEN_FRAMES + 5))
    box.begin(0, of=1, expected=0)
    num = 0
    while box.take(0) is not None:
        num += 1
    assert num == MAX_OPEN_FRAMES
    delivered: list[Any] = []
    assembly = Assembly(1 << 20, max_bytes=1 << 30, deliver=delivered.append)
    for frame in range(1, MAX_OPEN_FRAMES):
        assembly.place(frame, HEAD_BYTES, 0)
    with pytest.raises(FrameError, match="under way"):
        assembly.place(MAX_OPEN_FRAMES, HEAD_BYTES, 0)
    with pytest.raises(FrameError, match="has 40 or more"):
        assembly.place(0, HEAD_BYTES - 1, 0)
    assembly.place(0, HEAD_BYTES, 0)
    for frame in range(MAX_OPEN_FRAMES):
        assembly.arrived(frame, 0)
    assert len(delivered) == assembly.expected == MAX_OPEN_FRAMES
    assembly.place(2 * MAX_OPEN_FRAMES - 1, HEAD_BYTES, 0)


@pytest.mark.parametrize(("connection", "of"), [(1, 1), (10, 10), (0, 0), (10, 11), (0, 11)])
def test_a_greeting_names_a_connection_of_those_there_are(connection: int, of: int) -> None:
    name = StreamName("forward 0", "a", sender=0, receiver_cloud="b", receiver=1)
    said = encode_hello(Hello(name, bytes(16), attempt=1, connection=connection, of=of))
    with pytest.raises(FrameError, match=f"it is connection {connection} of {of}"):
        decode_hello(said[1:], sender="a")
    last = encode_hello(Hello(name, bytes(16), attempt=1, connection=9, of=10))
    assert decode_hello(last[1:], sender="a").connection == 9  # type: ignore[union-attr]


def test_a_greeting_is_on_the_wire_as_every_release_of_its_version_reads_it() -> None:
    name = StreamName("forward 0", "a", sender=1, receiver_cloud="bc", receiver=2)
    said = Hello(name, bytes(range(16)), attempt=3, connection=4, of=5, expected=6, known=7)
    numbers = struct.pack("<BBBIIIII", 3, 4, 5, 3, 7, 1, 2, 6)
    rest = b"XCLH" + numbers + bytes(range(16)) + b"\1a\2bc\x09forward 0"
    assert encode_hello(said) == bytes([len(rest)]) + rest
    assert decode_hello(rest, sender="a") == said
    refusals = {"NOT_YET": 1, "EARLIER_ATTEMPT": 2, "OTHER_RUN": 3}
    assert {reason.name: encode_refusal(reason) for reason in HelloRefusal} == {
        reason: b"\6XCLR\3" + bytes([number]) for reason, number in refusals.items()
    }
    for reason in HelloRefusal:
        assert decode_hello(encode_refusal(reason)[1:], sender="a") is reason
    assert all(WHY_REFUSED[reason] for reason in HelloRefusal)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rest: b"XCLX" + rest[4:], "begins with b'XCLX'"),
        (lambda rest: rest[:4] + b"\2" + rest[5:], "speaks version 2 of the line, this rank 3"),
        (lambda rest: b"XCLR\2\1", "speaks version 2"),
        (lambda rest: b"XCLR\3\x09", "sent no greeting"),
        (lambda rest: rest[:-1], "a name is longer than the rest"),
        (lambda rest: rest + b"x", "1 bytes follow its end"),
        (lambda rest: rest[:20], "sent no greeting"),
        (lambda rest: rest.replace(b"\1a", b"\1\x1b"), "a name cannot be printed"),
        (lambda rest: rest.replace(b"\1a", b"\0"), "a name cannot be printed"),
    ],
)
def test_what_is_no_greeting_is_refused_by_its_sender_s_name(change: Any, said: str) -> None:
    name = StreamName("forward 0", "a", sender=1, receiver_cloud="bc", receiver=2)
    rest = encode_hello(Hello(name, bytes(16), attempt=3, connection=0, of=1))[1:]
    with pytest.raises(FrameError, match=f"cloud_x .*{said}"):
        decode_hello(change(rest), sender="cloud_x")


def test_names_that_fit_into_no_greeting_are_refused_where_it_is_written() -> None:
    def said(length: int) -> bytes:
        name = StreamName("f", "a" * length, sender=1, receiver_cloud="b", receiver=2)
        return encode_hello(Hello(name, bytes(16), attempt=3, connection=0, of=1))

    longest = next(length for length in range(256) if len(said(length)) == 256)
    assert said(longest)[0] == 255
    with pytest.raises(ConfigError, match="too long for a line between them"):
        said(longest + 1)


def test_an_answer_that_counts_no_frame_says_how_long_it_took_and_that_nothing_moves() -> None:
    box = box_of(2 * PIECE_BYTES, 1000)
    box.begin(0, of=1, expected=0)
    assert box.is_empty and not box.awaits(0)
    assert len((box.take(0) or pytest.fail("a piece"))[1]) == PIECE_BYTES
    box.ask(0)
    assert box.awaits(0) and not box.is_empty
    assert box.acknowledge(0, 1) == (PIECE_BYTES, 0, True)
    assert box.acknowledge(0, 2) == (0, 1, False)
    assert box.acknowledge(0, 2) == (0, 0, False)
    box.take(0)
    piece, data, frame_bytes = box.take(0) or pytest.fail("the last frame")
    assert (piece.frame, piece.number, len(data), frame_bytes) == (1, 0, 1000, 1000)
    assert box.acknowledge(0, 4) == (PIECE_BYTES + 1000, 0, True)  # of the first frame
    assert box.is_empty and box.queued.num_bytes == 0
    for counted in (3, 5):
        with pytest.raises(FrameError, match=f"acknowledges {counted} pieces; .* 4 of 4"):
            box.acknowledge(0, counted)


def test_what_is_under_way_stays_within_the_window_but_for_one_frame() -> None:
    """The bytes that were acknowledged of the oldest frame are no longer under way."""
    frames = iter([torch.zeros(size, dtype=torch.uint8) for size in (3 * PIECE_BYTES, 10, 10)])
    box = Outbox(PIECE_BYTES + 10, next_frame=lambda: next(frames, None), queued=QueuedBytes())
    box.begin(0, of=1, expected=0)
    taken = 0
    while box.take(0) is not None:
        taken += 1
    assert taken == 3  # all of the first frame, and no other beside it
    box.acknowledge(0, 1)
    assert box.take(0) is None
    box.acknowledge(0, 2)
    assert box.take(0) is not None and box.take(0) is None
    box.acknowledge(0, 3)
    assert box.take(0) is not None


def test_a_connection_that_is_one_of_several_may_expect_what_was_oldest_when_it_was_made() -> None:
    box = box_of(1000, 1000, 1000)
    for number in (0, 1):
        box.begin(number, of=2, expected=0)
    for _ in range(3):
        box.take(0)
    box.acknowledge(0, 2)
    box.begin(1, of=2, expected=1)  # it had been at frame 0 before
    with pytest.raises(FrameError, match="expects frame 1, but 2 to 3 can come"):
        box.begin(1, of=2, expected=1)
    with pytest.raises(FrameError, match="expects frame 1, but 2 to 3 can come"):
        box.begin(0, of=1, expected=1)
    with pytest.raises(FrameError, match="expects frame 4, but 0 to 3 can come"):
        box.begin(0, of=2, expected=4)
    box.begin(0, of=2, expected=3)
    assert box.is_empty


def test_an_assembly_forgets_what_it_has_delivered_and_bounds_what_it_holds() -> None:
    delivered: list[bytes] = []
    assembly = Assembly(
        3 * PIECE_BYTES,
        2 * PIECE_BYTES,
        deliver=lambda frame: delivered.append(frame.numpy().tobytes()),
    )
    long = PIECE_BYTES + HEAD_BYTES
    assembly.place(1, long, 1)[:] = b"b" * HEAD_BYTES
    assembly.arrived(1, 1)
    assembly.arrived(1, 1)  # which counts once
    with pytest.raises(FrameError, match="1 frames from 0 on are not finished"):
        assembly.place(2, PIECE_BYTES, 0)
    assembly.place(0, HEAD_BYTES, 0)[:] = b"a" * HEAD_BYTES
    assembly.arrived(0, 0)
    assert delivered == [b"a" * HEAD_BYTES] and assembly.expected == 1
    assembly.place(0, HEAD_BYTES, 0)[:] = b"x" * HEAD_BYTES  # it goes nowhere
    assembly.arrived(0, 0)
    assembly.place(1, long, 0)[:] = b"a" * PIECE_BYTES
    assembly.arrived(1, 0)
    assert delivered[1] == b"a" * PIECE_BYTES + b"b" * HEAD_BYTES and assembly.expected == 2
    assembly.place(2, 3 * PIECE_BYTES, 2)  # alone a frame may be longer than all together
    with pytest.raises(FrameError, match=r"frame 2 has 786,433 bytes; .* at most 786,432"):
        assembly.place(2, 3 * PIECE_BYTES + 1, 0)


def test_what_is_said_on_a_connection_without_a_piece_is_the_same_in_every_release() -> None:
    said = {"ask": pieces.ASK, "end": pieces.END, "ask behind": pieces.ASK_BEHIND}
    assert said == {
        "ask": bytes(16),
        "end": bytes(12) + b"\1\0\0\0",
        "ask behind": bytes(12) + b"\2\0\0\0",
    }

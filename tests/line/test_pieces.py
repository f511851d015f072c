"""What the sender of a line knows of the pieces that are under way."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from xcloud.base.errors import FrameError
from xcloud.line import pieces
from xcloud.line.hello import Hello, StreamName, decode_hello, encode_hello
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
    assert box._queued._num_bytes == 1000
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

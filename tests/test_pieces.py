"""What the sender of a line knows of the pieces that are under way."""

from unittest.mock import Mock

import pytest
import torch

from xcloud.line import pieces
from xcloud.line.pieces import PIECE_BYTES, Outbox


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

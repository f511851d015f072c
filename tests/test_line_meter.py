"""How long a real line was busy, from when its messages were sent and came."""

import time

import pytest
import torch

from xcloud.comm.compression import ChannelId
from xcloud.net.frame import Kind, MessageKey, encode_frame, seal_frame
from xcloud.net.link_end import InSettings, ReceivingEnd
from xcloud.pipeline.line_meter import LineMeter, LineMeters

AHEAD_S = 5000.0  # the receiver's clock before the sender's
LATENCY_S = 0.03


def line(num_bytes: int, ready: list[float], bits_per_s: float) -> list[tuple[float, float]]:
    """(sent, arrived), each by its own clock, of messages one behind the other."""
    moments, free_at_s = [], 0.0
    for ready_s in ready:
        free_at_s = max(free_at_s, ready_s) + 8 * num_bytes / bits_per_s
        moments.append((ready_s, free_at_s + LATENCY_S + AHEAD_S))
    return moments


def probed() -> LineMeter:
    meter = LineMeter()
    for late_s in (0.001, 0.0, 0.5, 0.001):  # one was held up
        meter.probe(1.0, 1.0 + late_s + LATENCY_S + AHEAD_S)
    return meter


@pytest.mark.parametrize(
    "ready", [[10.0, 10.1, 10.2, 10.3], [10.0, 30.0, 50.0], [10.0]], ids=["full", "idle", "one"]
)
def test_bytes_over_busy_seconds_are_the_bandwidth_whatever_the_clocks_say(
    ready: list[float],
) -> None:
    meter, moments = probed(), line(1_000_000, ready, 8e6)
    busy_s = sum(meter.busy_s(*both) for both in moments)
    assert busy_s == pytest.approx(len(ready), rel=0.01)
    assert meter.delay_s == pytest.approx(LATENCY_S + AHEAD_S, abs=0.002)


def test_a_fast_line_is_not_busy_and_without_a_probe_nothing_is_known() -> None:
    meter, moments = probed(), line(1_000_000, [10.0, 10.1, 10.2], 1e12)
    assert sum(meter.busy_s(*both) for both in moments) < 1e-4
    assert LineMeter().busy_s(1.0, 2.0) == 0.0


def test_links_of_one_peer_share_the_line_and_probes_are_no_traffic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meters = LineMeters()
    forward, backward = (ChannelId(1, n, d, 1, 0) for n, d in enumerate(("forward", "backward")))
    ends = [
        ReceivingEnd(InSettings("rank 1", 4096, on_arrival=meters.of(channel)))
        for channel in (forward, backward)
    ]
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def come(end: int, key: MessageKey, sequence: int, sent_at_s: float, at_s: float) -> None:
        nonlocal now_s
        frame = encode_frame(key, (torch.zeros(4),), sequence)
        seal_frame(frame, -sent_at_s)
        now_s = at_s
        ends[end]._open(frame)

    come(0, MessageKey(Kind.ALIVE), 0, 1.0, 101.0)
    come(0, MessageKey(Kind.ACTIVATION, 1), 1, 2.0, 105.0)
    come(1, MessageKey(Kind.GRADIENT, 1), 0, 2.0, 108.0)
    come(1, MessageKey(Kind.GRADIENT, 1, 1), 1, 20.0, 121.0)
    assert meters.line_s == {forward: 3.0, backward: 3.0 + 1.0}

"""How long a real line was busy, from when its messages were sent and came; what a step sent
between clouds, and how the predictions of an evaluation come together."""

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xcloud.comm.compression import ChannelId
from xcloud.comm.step_clock import StepClock
from xcloud.net.frame import Kind, MessageKey, encode_frame, seal_frame
from xcloud.net.link import LinkName, LinkRecord
from xcloud.net.link_end import InSettings, ReceivingEnd
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.hook import StepReport
from xcloud.pipeline.line_meter import LineMeter, LineMeters
from xcloud.rank.task_data import gather_predictions
from xcloud.record.reporter import Reporter
from xcloud.train.wan_meter import WanMeter

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


def test_seconds_on_the_line_are_told_for_each_cloud_that_a_rank_sends_to() -> None:
    """The middle of three clouds sends activations on, and gradients back."""
    before, behind, control = (LinkRecord(to=cloud) for cloud in "aca")
    wiring: Any = SimpleNamespace(
        ends=SimpleNamespace(records=[before, behind, control], is_emulated=True),
        boundaries=SimpleNamespace(wan_sends=[]), averaging=[],
    )  # fmt: skip
    meter = WanMeter(wiring, Reporter(1, "b", lambda lines: None), False)
    for step in (1, 2):
        before.line_s[Kind.GRADIENT] += 0.25 * step
        behind.line_s[Kind.ACTIVATION] += 0.5
        behind.line_s[Kind.ACTIVATION] += 0.125
        control.line_s[Kind.NORM] += 0.75
    event = meter.describe(StepReport(2, 1.0, StepClock(), 0.1, None, None, 0, 0.0))

    assert event["line_busy_s"] == {"forward": {"c": 1.25}, "backward": {"a": 0.75}}


def test_a_step_sends_what_all_links_to_other_clouds_carried_since_the_last() -> None:
    """Bytes of whole frames, by the kind of their traffic; what no step counts is left out."""
    before, behind, control = (LinkRecord(to=cloud) for cloud in "aca")
    wiring: Any = SimpleNamespace(
        ends=SimpleNamespace(records=[before, behind, control], is_emulated=False),
        boundaries=SimpleNamespace(wan_sends=[]), averaging=[],
    )  # fmt: skip
    before.num_bytes[Kind.GRADIENT] += 1_000_000  # of an earlier step
    meter = WanMeter(wiring, Reporter(1, "b", lambda lines: None), False)
    before.num_bytes += Counter({Kind.GRADIENT: 700, Kind.ACTIVATION: 5, Kind.ALIVE: 1})
    behind.num_bytes += Counter({Kind.ACTIVATION: 11_000, Kind.EVALUATION: 1 << 30})
    control.num_bytes += Counter({Kind.NORM: 20, Kind.REPORT: 300, Kind.GRADIENT: 40})

    event = meter.describe(StepReport(2, 1.0, StepClock(), 0.1, None, None, 0, 0.0))

    assert event["sent"] == {"forward": 11_005, "backward": 740, "other": 321}
    again = meter.describe(StepReport(3, 1.0, StepClock(), 0.1, None, None, 0, 0.0))
    assert again["sent"] == {"forward": 0, "backward": 0, "other": 0}


def test_the_event_of_a_step_has_what_crossed_since_the_last_one_and_what_was_learned() -> None:
    """What crosses between two steps, for an evaluation, is told apart."""
    forward, backward = (
        SimpleNamespace(identity=SimpleNamespace(direction=name), raw_bytes=100)
        for name in ("forward", "backward")
    )
    averaging = SimpleNamespace(raw_bytes=1000)
    to_a = LinkRecord(LinkName(0, 1, receiver=0), to="a")
    to_c = LinkRecord(LinkName(1, 1, receiver=2), to="c")
    wiring: Any = SimpleNamespace(
        ends=SimpleNamespace(records=[to_a, to_c], is_emulated=False),
        boundaries=SimpleNamespace(wan_sends=[forward, backward]), averaging=[averaging],
    )  # fmt: skip
    told: list[dict[str, Any]] = []
    notes: list[str] = []
    reporter: Any = SimpleNamespace(
        event=lambda kind, **fields: told.append({"event": kind, **fields}), note=notes.append
    )
    to_a.num_bytes[Kind.START] += 500
    to_a.sent_again_bytes += 4
    meter = WanMeter(wiring, reporter, tells_skips=True)
    clock = StepClock()
    report = StepReport(
        2, 1.23456789, clock, 0.1, loss=1.5, grad_norm=2.5, num_samples=3, num_tokens=40,
        num_learned=9.0,
    )  # fmt: skip
    to_a.num_bytes[Kind.GRADIENT] += 30
    to_c.num_bytes += Counter({Kind.ACTIVATION: 20, Kind.AVERAGING: 7, Kind.NORM: 2})
    to_a.sent_again_bytes += 5
    to_c.sent_again_bytes += 6
    forward.raw_bytes += 80
    backward.raw_bytes += 60
    averaging.raw_bytes += 14
    meter.after_update(2, report)
    [event] = told
    assert {name: value for name, value in event.items() if name not in clock.seconds} == {
        "event": "step", "step": 2, "step_s": 1.234568,
        "sent": {"forward": 20, "backward": 30, "other": 2, "averaging": 7},
        "raw": {"forward": 80, "backward": 60, "averaging": 14},
        "boundaries": {"0 backward": 30, "1 forward": 20},
        "samples": 3, "tokens": 40, "learned": 9.0, "sent_again": 15,
        "loss": 1.5, "learning_rate": 0.1, "grad_norm": 2.5,
    }  # fmt: skip
    assert clock.seconds.keys() <= event.keys()

    told.clear()
    meter.forget()
    assert told == [{"event": "sent_outside", "num_bytes": 500}], "what crossed before the step"
    told.clear()
    meter.forget()
    assert told == []
    to_a.num_bytes += Counter(dict.fromkeys(Kind, 10))
    meter.forget()
    sent_bytes = 10 * (len(Kind) - 1)
    assert told == [{"event": "sent_outside", "num_bytes": sent_bytes}], "all but what is stored"
    told.clear()
    skipped = replace(report, step=3, loss=None, skipped="it is not finite")
    meter.after_update(3, skipped)
    event, skip = told
    assert set(event["sent"].values()) == set(event["raw"].values()) == {0}
    assert not {"sent_again", "loss", "learning_rate", "grad_norm", "line_busy_s"} & event.keys()
    assert skip == {"event": "skipped_update", "step": 3} and notes == ["it is not finite"]
    WanMeter(wiring, reporter, tells_skips=False).after_update(3, skipped)
    assert len(told) == 3 and len(notes) == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_a_long_split_is_gathered_sample_by_sample_without_copying_the_rest() -> None:
    """In time that grows with its square, this takes longer than a test may."""
    mine = {ident: [ident % 7] * 24 for ident in range(100_000)}

    assert gather_predictions(mine, RankGroup.alone()) == mine


def test_predictions_of_any_length_come_together() -> None:
    mine = {3: [1, 2, 3], 0: [], 7: [9]}

    assert gather_predictions(mine, RankGroup.alone()) == mine
    assert gather_predictions({}, RankGroup.alone()) == {}

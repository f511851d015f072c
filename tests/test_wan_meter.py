"""What a step sent between clouds, and how an evaluation's predictions come together."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

from xcloud.comm.step_clock import StepClock
from xcloud.net.frame import Kind
from xcloud.net.link import LinkRecord
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.hook import StepReport
from xcloud.rank.task_data import gather_predictions
from xcloud.record.reporter import Reporter
from xcloud.train.wan_meter import WanMeter


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


def test_a_long_split_is_gathered_sample_by_sample_without_copying_the_rest() -> None:
    """In time that grows with its square, this takes longer than a test may."""
    mine = {ident: [ident % 7] * 24 for ident in range(100_000)}

    assert gather_predictions(mine, RankGroup.alone()) == mine


def test_predictions_of_any_length_come_together() -> None:
    mine = {3: [1, 2, 3], 0: [], 7: [9]}

    assert gather_predictions(mine, RankGroup.alone()) == mine
    assert gather_predictions({}, RankGroup.alone()) == {}

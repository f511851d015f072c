"""Wrong values of the right shape: what is usual of a stream, faults in it, and what is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.nightly import first_daily
from tests.pipelines import BORDER, D, in_threads, samples, wired
from tests.toy import toy_config
from xcloud.base.errors import FrameError
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable, Selection
from xcloud.comm.compressor import Chain
from xcloud.comm.precision import BlockInt
from xcloud.feature_list import FIGURES
from xcloud.features.sentinel.baseline import LEARNS_FOR, Baseline, Departure
from xcloud.features.sentinel.feature import on_departure
from xcloud.features.sentinel.measures import measure
from xcloud.features.sentinel.watch import Sentinel, WatchedEnd, watched
from xcloud.job.config import Settings
from xcloud.job.job import PipelineJob
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.hook import StepReport
from xcloud.record.intake import check, kinds_of
from xcloud.record.summary import RunStatistics

FEATURES = 16
TWO_CLOUDS = ClusterLayout({"cloud_a": Cloud(), "cloud_b": Cloud()}, "free")
FAULTS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "signs flipped": lambda x, _: -x,
    "scaled by 10": lambda x, _: 10 * x,
    "zeros": lambda x, _: torch.zeros_like(x),
    "a constant": lambda x, _: torch.full_like(x, float(x.square().mean().sqrt())),
    "noise of its norm": lambda x, chance: x.square().mean().sqrt() * torch.randn(
        x.shape, generator=chance
    ),
}  # fmt: skip


def messages(chance: torch.Generator) -> Iterator[Tensor]:
    """Heavy-tailed rows around a mean row, whose norm grows as in a warm-up."""
    mean = torch.randn(FEATURES, generator=chance)
    for step in range(10_000):
        rows = torch.randn(60, FEATURES, generator=chance) ** 3 + mean
        yield (1 + min(step, 300) / 300) * rows


def test_a_usual_stream_is_never_left() -> None:
    chance = torch.Generator().manual_seed(1)
    baseline = Baseline(FEATURES)
    for _, message in zip(range(1500), messages(chance), strict=False):
        assert baseline.judge(measure(message)) is None


@pytest.mark.parametrize("fault", first_daily(FAULTS, count=3))
def test_a_fault_is_found_within_20_steps_told_once_and_then_usual(fault: str) -> None:
    chance = torch.Generator().manual_seed(2)
    baseline = Baseline(FEATURES)
    stream = messages(chance)
    for _, message in zip(range(150), stream, strict=False):
        baseline.judge(measure(message))
    found = [
        at
        for at, message in zip(range(500), stream, strict=False)
        if baseline.judge(measure(FAULTS[fault](message, chance))) is not None
    ]
    assert len(found) == 1 and found[0] < 20


def test_four_odd_steps_are_no_departure() -> None:
    chance = torch.Generator().manual_seed(3)
    baseline = Baseline(FEATURES)
    for step, message in zip(range(400), messages(chance), strict=False):
        factor = 100 if step % 150 > 145 else 1
        assert baseline.judge(measure(factor * message)) is None


def test_a_change_is_told_in_its_fifth_step_if_75_steps_before_it_are_usual() -> None:
    def told(num_usual: int) -> tuple[int, Departure] | None:
        baseline = Baseline(2)
        for step in range(1, 180):
            factor = 10.0 if step > num_usual else math.exp(0.1 * (-1) ** step)
            if (departure := baseline.judge(measure(factor * torch.ones(4, 2)))) is not None:
                return step, departure
        return None

    assert told(74) is None, "the change is itself among what is usual"
    for num_usual in (75, 90):
        found = told(num_usual)
        assert found is not None and found[0] == num_usual + 5
        departure = found[1]
        assert departure.statistic == "norm" and departure.value == pytest.approx(math.log(10))
        assert (departure.usual, departure.deviation) == pytest.approx((0.0, 0.1), abs=1e-6)


def test_a_long_message_is_measured_by_1024_of_its_rows_at_most() -> None:
    rows = torch.randn(2049, 2)
    for num, every in ((1024, 1), (1025, 2), (2048, 2), (2049, 3)):
        assert torch.equal(measure(rows[:num]), measure(rows[:num:every]))
    assert not torch.equal(measure(rows[:1024]), measure(rows[:1024:2]))


def test_a_stream_that_has_hardly_moved_may_move_a_little() -> None:
    """Fine-tuning leaves activations where they are for a hundred steps, and then does not."""
    chance = torch.Generator().manual_seed(6)
    still = torch.randn(1000, FEATURES, generator=chance)
    for factor, num_departures in ((1.04, 0), (1.08, 1)):
        baseline = Baseline(FEATURES)
        found = [baseline.judge(measure((factor if k > 100 else 1) * still)) for k in range(150)]
        assert sum(one is not None for one in found) == num_departures


def test_a_baseline_goes_on_where_it_was_saved() -> None:
    chance = torch.Generator().manual_seed(4)
    stream = [measure(m) for _, m in zip(range(80), messages(chance), strict=False)]
    whole = Baseline(FEATURES)
    saved = Baseline(FEATURES)
    for message in stream[:60]:
        whole.judge(message)
        saved.judge(message)
    resumed = Baseline(FEATURES)
    resumed.load_state_dict(saved.state_dict())
    for message in stream[60:]:
        assert whole.judge(message) == resumed.judge(message)
    again, once = whole.state_dict(), resumed.state_dict()
    assert again.keys() == once.keys()
    assert all(torch.equal(torch.as_tensor(again[n]), torch.as_tensor(once[n])) for n in once)
    with pytest.raises(ValueError, match="baseline of messages"):
        Baseline(FEATURES + 1).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    "rows",
    [torch.zeros(3, 4), torch.full((1, 4), 1e-30), torch.full((5, 4), 3e38), torch.ones(1, 4)],
    ids=["zeros", "tiny", "huge", "one row"],
)
def test_any_finite_values_can_be_judged(rows: Tensor) -> None:
    baseline = Baseline(4)
    for _ in range(LEARNS_FOR + 30):
        departure = baseline.judge(measure(rows))
        assert departure is None
    assert all(math.isfinite(float(v)) for v in baseline.state_dict()["directions"].flatten())


def test_what_is_not_finite_is_left_to_the_trainer() -> None:
    baseline = Baseline(4)
    baseline.judge(measure(torch.ones(2, 4)))
    before = baseline.state_dict()
    assert baseline.judge(measure(torch.tensor([[1.0, math.nan, 1.0, 1.0]]))) is None
    assert all(torch.equal(torch.as_tensor(before[n]), torch.as_tensor(v))
               for n, v in baseline.state_dict().items())  # fmt: skip


def test_half_precision_is_measured_as_float32() -> None:
    rows = torch.full((2, 4), 300.0, dtype=torch.float16)  # whose squares overflow
    assert float(measure(rows)[0]) == 90_000.0


class Rank:
    """A rank that receives activations of another cloud, whose codec may change."""

    def __init__(self) -> None:
        choices = {
            "none": Compression(),
            "int2": Compression(Chain(int2=BlockInt(2)), Chain(int2=BlockInt(2))),
        }
        both = wired(TWO_CLOUDS, {0: BORDER}, Selectable(choices))
        self.selections = [one.wiring.boundaries.shared(Selection) for one in both]
        self.sender = both[0].wiring.boundaries.ports[0].forward_out[1]
        wiring = both[1].wiring
        ports, self.ends = watched(wiring.boundaries.ports, wiring.ends)
        self.receiver = cast(WatchedEnd, ports[0].forward_in[0])
        self.close = [one.wiring.close for one in both]
        self.events: list[dict[str, Any]] = []
        self.chance = torch.Generator().manual_seed(5)

    def sentinel(self, on_departure: str = "alarm") -> Sentinel:
        reporter = SimpleNamespace(
            event=lambda kind, **f: self.events.append({"event": kind, **f})
        )
        return Sentinel(
            self.ends, TWO_CLOUDS, reporter=cast(Any, reporter),
            on_departure=cast(Any, on_departure),
        )  # fmt: skip

    def step(
        self, step: int, sentinel: Sentinel, factor: float = 1.0, kind: Kind = Kind.ACTIVATION
    ) -> None:
        batch = samples(torch.arange(8))
        counts = (batch["ids"] % 4 + 1).to(torch.int16)
        hidden = torch.randn(int(counts.sum()), D, generator=self.chance)
        message = {"counts": counts, "hidden": factor * hidden}
        key = MessageKey(kind, step)
        self.sender.send(key, message, batch)
        self.receiver.recv(key, batch)
        sentinel.after_update(step, cast(StepReport, None))


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    in_threads(made.close)


def test_a_departure_is_told_with_the_peer_the_step_and_the_statistic(rank: Rank) -> None:
    sentinel = rank.sentinel()
    for step in range(1, 121):
        rank.step(step, sentinel, factor=10.0 if step > 100 else 1.0)
    [event] = rank.events
    assert event["event"] == "departure" and 100 < event["step"] <= 120
    assert event["sender"] == 0 and event["peer"] == "cloud_a"
    assert event["stream"] == "hidden forward over boundary 0"
    assert event["statistic"] == "norm" and event["value"] > event["usual"]
    check({"rank": 1, "cloud": "cloud_b", "t": 1.0, **event}, 200, kinds_of(FIGURES))
    statistics = RunStatistics(2, FIGURES)
    statistics.feed({"rank": 1, "cloud": "cloud_b", "t": 1.0, **event})
    summary = statistics.summary(name="x", status="finished")
    assert summary["departures"] == [{k: v for k, v in event.items() if k != "event"}]


def test_a_run_that_asks_for_it_stops(rank: Rank) -> None:
    sentinel = rank.sentinel("stop")
    for step in range(1, 101):
        rank.step(step, sentinel)
    with pytest.raises(FrameError, match=r"rank 0 \(cloud_a\) sends, hidden forward .* norm"):
        for step in range(101, 121):
            rank.step(step, sentinel, factor=0.0)


def test_another_compressor_in_the_middle_is_no_departure_and_learns_its_own(rank: Rank) -> None:
    sentinel = rank.sentinel()
    for step in range(1, 361):
        if step % 60 == 0:
            for selection in rank.selections:
                selection.switch(step // 60 % 2, step)
        rank.step(step, sentinel)
    assert rank.events == []
    learned = [s.baseline.num_steps for s in rank.receiver.streams["hidden"].values()]
    assert learned[0] + learned[1] == 360 and min(learned) > LEARNS_FOR
    for step in range(361, 390):
        rank.step(step, sentinel, factor=10.0)
    assert len(rank.events) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["cluster/wan=free"], "ignore"),
        (["cluster/wan=office_100m"], "ignore"),
        (["cluster/wan=office_100m", "+cluster.links.cloud_a-cloud_b=real"], "alarm"),
        (["cluster/wan=real"], "alarm"),
        (["cluster/wan=sealed", "+cluster.clouds.cloud_a.address=a.example:7000"], "alarm"),
        (["cluster/wan=real", "security.on_departure=ignore"], "ignore"),
        (["cluster/wan=office_100m", "security.on_departure=alarm"], "alarm"),
        (["cluster/wan=office_100m", "security.on_departure=stop"], "stop"),
    ],
)
def test_clouds_that_one_machine_plays_are_watched_only_if_a_run_asks_for_it(
    words: list[str], expected: str
) -> None:
    job = Settings.of(toy_config("two_clouds", words)).job
    assert on_departure(cast(PipelineJob, job)) == expected


def test_evaluations_are_not_judged(rank: Rank) -> None:
    sentinel = rank.sentinel()
    for step in range(1, 150):
        is_training = step <= 100
        kind = Kind.ACTIVATION if is_training else Kind.EVALUATION
        rank.step(step, sentinel, factor=1.0 if is_training else 10.0, kind=kind)
    assert rank.events == []


def test_a_departure_in_words() -> None:
    said = Departure("norm", value=2.3, usual=0.1, deviation=0.05).in_words
    assert said == "norm 2.3, usual is 0.1 ± 0.05"


def test_after_a_departure_nothing_is_judged_until_the_stream_is_known_again() -> None:
    """Else each step of what lasts, and of what follows it, would be one more departure."""
    chance = torch.Generator().manual_seed(5)
    baseline = Baseline(FEATURES)
    stream = messages(chance)
    told_at = None
    for step, message in zip(range(400), stream, strict=False):
        factor = 1.0 if step < 150 else 10.0
        if told_at is not None:
            factor = 10.0 ** (2 + (step - told_at) // 10)  # moves on every ten steps
        if baseline.judge(measure(factor * message)) is not None:
            assert told_at is None
            told_at = step
        if told_at is not None and step == told_at + LEARNS_FOR:
            break
    assert told_at is not None and baseline.num_steps == LEARNS_FOR


def test_running_means_follow_the_last_steps_and_not_the_whole_past() -> None:
    """A thousand steps of one direction are forgotten after some dozens of another."""
    baseline = Baseline(2)
    for _ in range(1000):
        baseline.judge(measure(torch.tensor([[1.0, 0.0]] * 4)))
    angle = 0.05  # small enough to be no departure, which would begin anew
    turned = torch.tensor([[math.cos(angle), math.sin(angle)]] * 4)
    for _ in range(100):
        assert baseline.judge(measure(turned)) is None
    usual = torch.as_tensor(baseline.state_dict()["directions"])[0]

    assert math.atan2(float(usual[1]), float(usual[0])) == pytest.approx(angle, rel=0.05)


def test_asymmetry_is_the_mean_of_signed_squares_and_not_the_mean() -> None:
    symmetric = torch.tensor([[1.0], [1.0], [1.0], [1.0]])
    skewed = torch.tensor([[4.0], [0.0], [0.0], [0.0]])  # of the same mean
    assert measure(symmetric)[3] == measure(skewed)[3] == 1.0
    assert measure(symmetric)[4] == 1.0 and measure(skewed)[4] == 4.0
    assert measure(-skewed)[4] == -4.0

"""Costs given in tables and taken from recorded steps; the last test records a real one."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks.paper_step import simulate
from tests.toy import toy_config
from xcloud.cluster.layout import Cloud, ClusterLayout
from xcloud.cluster.link_profile import LinkProfile
from xcloud.launch.local import run
from xcloud.parallel.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.parallel.schedule import GPipe, Schedule
from xcloud.plan.costs import FREE, Costs, Direction, Update
from xcloud.plan.measured import measured_costs
from xcloud.plan.prediction import Prediction
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.record.timeline import Timeline, timeline_of

FULL = Costs(
    [0.010, 0.020],
    [0.020, 0.040],
    [Direction(20_000, 0.001, 0.002)],
    [Direction(10_000, 0.003, 0.001)],
    [Update(0.001, 0.0, 0.002, 0.003), Update(0.0, 0.0, 0.001, 0.006)],
    {1: 1.5},
    {"a-b": LinkProfile(8e6, 0.004, trace=[[5.0, 1e6]])},
    weights_s=[0.008, 0.016],
)
PLAIN = replace(FULL, slowdown={}, lines={})
TWO = ClusterLayout({"a": Cloud(), "b": Cloud()}, LinkProfile(8e6, 0.004))


def predict(costs: Costs, schedule: Schedule = GPipe(4)) -> Prediction:  # noqa: B008
    return simulate(schedule, TWO, costs, agrees=True, num_passes=2, num_steps=3)


@pytest.mark.parametrize("schedule", [GPipe(4), OneForwardOneBackward(4), ZeroBubble(4)], ids=repr)
def test_a_predicted_step_read_back_as_costs_predicts_itself(schedule: Schedule) -> None:
    first = predict(PLAIN, schedule)

    costs = measured_costs(first.timeline)
    again = predict(costs, schedule)

    # To the microseconds that a record is kept in.
    assert again.step_s == pytest.approx(first.step_s, abs=1e-4)
    assert [b.name for b in again.timeline.lanes[1].boxes if b.what != "wait"] == [
        b.name for b in first.timeline.lanes[1].boxes if b.what != "wait"
    ]
    assert costs.forward_s == pytest.approx(PLAIN.forward_s, abs=2e-6)
    assert costs.backward_s == pytest.approx(PLAIN.backward_s, abs=2e-6)
    late_s = [0.0, 0.016] if isinstance(schedule, ZeroBubble) else [0.0, 0.0]
    assert costs.weights_s == pytest.approx(late_s, abs=2e-6)
    assert costs.forward[0].num_bytes == 20_000
    assert costs.forward[0].decompress_s == pytest.approx(0.002, abs=2e-6)
    assert costs.updates[1].optimizer_s == pytest.approx(0.006, abs=1e-5)
    # Other micro-batches and another line.
    wider = replace(costs, lines={"a-b": FREE, "b-a": FREE})
    assert predict(wider, GPipe(9)).step_s == pytest.approx(
        predict(replace(PLAIN, lines=wider.lines), GPipe(9)).step_s, rel=1e-3
    )


def test_ranks_of_a_stage_are_read_as_their_mean_and_wait_for_nobody() -> None:
    layout = ClusterLayout({"a": Cloud(3), "b": Cloud(2)}, LinkProfile(8e6, 0.004))
    costs = replace(PLAIN, updates=[Update(average_s=0.01), Update(average_s=0.02)],
                    slowdown={1: 2.0})  # fmt: skip
    first = simulate(GPipe(6), layout, costs, agrees=True, num_steps=2)

    again = measured_costs(first.timeline)

    assert again.forward_s[0] == pytest.approx((0.01 + 0.02 + 0.01) / 3, abs=3e-6)
    assert [u.average_s for u in again.updates] == pytest.approx([0.01, 0.02], abs=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "one_forward_one_backward"])
def test_a_real_step_read_back_as_costs_predicts_its_own_time(
    schedule: str, tmp_path: Path
) -> None:
    config = toy_config(
        "two_clouds_dp",
        [
            "cluster/wan=office_100m", "cluster.wan.bandwidth_bits_per_s=20e6",
            "cluster.wan.latency_s=0.02", f"schedule={schedule}", "training.accumulate_steps=2",
            "training.max_steps=16", "compression=int8",
        ],
    )  # fmt: skip
    config["model"] |= {"step_s": 0.01}  # type: ignore[operator]
    run(OmegaConf.create(config), tmp_path)
    step = timeline_of(EventReader(tmp_path / EVENTS_FILE))
    assert step is not None
    from xcloud.job.config import EXPERIMENT_FILE, read_job

    experiment = read_job(tmp_path / EXPERIMENT_FILE)

    found = simulate(
        experiment.schedule, experiment.cluster, measured_costs(step), agrees=True,
        num_passes=2, num_steps=3,
    )  # fmt: skip

    for lane, predicted in zip(step.lanes, found.timeline.lanes, strict=True):
        assert sorted({b.name for b in lane.boxes if b.direction and b.what != "wait"}) == sorted(
            {b.name for b in predicted.boxes if b.direction and b.what != "wait"}
        )
    recorded_s = 1e-6 * max(lane.until_us - lane.from_us for lane in step.lanes)
    assert found.step_s == pytest.approx(recorded_s, rel=0.25)  # a busy machine is not its model
    assert messages(found.timeline) == messages(step)


def messages(step: Timeline) -> list[tuple[object, ...]]:
    return sorted(
        (f.kind, f.sender, f.receiver, f.micro_batch, f.num_bytes)
        for some in step.flights.values()
        for f in some
        if f.kind in ("activation", "gradient")
    )

"""Costs given in tables, and taken from recorded steps: of one step, and of a trial. The steps are
simulated; tests/planner/test_trial.py records real ones."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, product
from statistics import median

import pytest

from benchmarks.paper_step import simulate
from tests.nightly import first_daily
from tests.plan_pieces import EIGHT, piece
from xcloud.base.errors import ConfigError
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.simulator.costs import FREE, Costs, Curve, Direction, Profile, Update
from xcloud.simulator.measured import Leg, StageFacts, Trial, measured_costs, typical
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan
from xcloud.simulator.prediction import Prediction
from xcloud.simulator.pricing import Pricer

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


def test_a_curve_is_the_same_whether_a_list_or_a_file_gave_its_points() -> None:
    """Plans are kept by the profile that they were made from."""
    one, other = (Curve(points) for points in ([(1.0, 2.0), (2.0, 3.0)], ((1.0, 2.0), (2.0, 3.0))))
    assert one == other and len({one, other}) == 1
    assert [one.at(samples) for samples in (0.5, 1.0, 3.0)] == [1.5, 2.0, 4.0]
    falls = Curve([(1.0, 1.0), (2.0, -1.0)])
    assert (falls.at(3.0), falls.change_at(3.0)) == (0.0, -3.0)
    with pytest.raises(ConfigError, match="points with more and more samples"):
        Curve([(1.0, 2.0), (1.0, 3.0)])


def test_ranks_of_a_stage_are_read_as_their_mean_and_wait_for_nobody() -> None:
    layout = ClusterLayout({"a": Cloud(3), "b": Cloud(2)}, LinkProfile(8e6, 0.004))
    costs = replace(PLAIN, updates=[Update(average_s=0.01), Update(average_s=0.02)],
                    slowdown={1: 2.0})  # fmt: skip
    first = simulate(GPipe(6), layout, costs, agrees=True, num_steps=2)

    again = measured_costs(first.timeline)

    assert again.forward_s[0] == pytest.approx((0.01 + 0.02 + 0.01) / 3, abs=3e-6)
    assert [u.average_s for u in again.updates] == pytest.approx([0.01, 0.02], abs=3e-6)


# Of the steps of a trial.


def recorded(profile: Profile, layout: ClusterLayout, ends: tuple[int, ...]) -> list[Leg]:
    """The steps of a trial as the simulator foresees them."""
    pricer = Pricer(profile, {"pipeline": Arranged(Strategy(), layout)}, 16)

    def leg(schedule: Schedule, name: str) -> Leg:
        step = pricer.predict(Plan("pipeline", ends, schedule, name)).timeline
        splits = isinstance(schedule, ZeroBubble)
        return Leg(16 / schedule.num_micro_batches, name, splits, measured_costs(step))

    shapes: list[Schedule] = [GPipe(m) for m in (1, 2, 4, 8)]
    legs = [leg(shape, NO_COMPRESSION) for shape in (*shapes, ZeroBubble(2), ZeroBubble(8))]
    return [*legs, *(leg(GPipe(m), "int4") for m in (1, 8))]


def trial_over(profile: Profile, *parts: list[int]) -> Trial:
    """A trial of a model of equal blocks, simulated; parts: of each cloud the blocks of its
    stages."""
    counts, clouds = [n for part in parts for n in part], dict[str, Cloud]()
    for part in parts:
        first = sum(len(c.stages or ()) for c in clouds.values())
        clouds[f"c{len(clouds)}"] = Cloud(1, tuple(range(first, first + len(part))))
    ends = tuple(accumulate(counts))
    facts = [
        StageFacts(
            4000 * n, sum(p.trained_bytes for p in profile.pieces[end - n : end]), 1e6 * n,
            6e5 * n, n,
        )
        for n, end in zip(counts, ends, strict=True)
    ]  # fmt: skip
    return Trial(
        recorded(profile, ClusterLayout(clouds, "free"), ends), NO_COMPRESSION, facts,
        [(c.stages or (), 1) for c in clouds.values()], 16.0, [len(part) for part in parts],
    )  # fmt: skip


def test_the_costs_of_every_block_come_back_from_simulated_steps() -> None:
    front = replace(EIGHT.pieces[0], forward_s=Curve([(1, 0.03), (2, 0.06)]), trained_bytes=9000)
    head = replace(EIGHT.pieces[7], backward_s=Curve([(1, 0.07), (2, 0.14)]))
    pieces = [front, *EIGHT.pieces[1:7], head]
    profile = replace(EIGHT, pieces=pieces, fetch_s=Curve([(1, 0.002)]), control_bytes=99)
    trial = trial_over(profile, [4], [4])

    found, *calls = trial.pieces([0] * 7, trial_over(profile, [1, 2], [5]))

    assert [p.boundary for p in found] == [p.boundary for p in pieces]
    assert [call.at(4.0) for call in calls] == pytest.approx([0, 0], abs=1e-4)
    for b in (2.0, 3.0, 8.0):
        for mine, given in zip(found, pieces, strict=True):
            assert mine.forward_s.at(b) == pytest.approx(given.forward_s.at(b), abs=2e-4)
            assert mine.backward_s.at(b) == pytest.approx(given.backward_s.at(b), abs=2e-4)
            assert mine.weights_s.at(b) == pytest.approx(given.weights_s.at(b), abs=2e-4)
            assert mine.activation_bytes.at(b) == pytest.approx(given.activation_bytes.at(b))
            assert mine.splitting_s.at(b) == pytest.approx(0.0, abs=2e-4)
    assert sum(p.optimizer_s for p in found) == pytest.approx(0.008, abs=1e-4)
    assert found[0].trained_bytes == 9000 and trial.control_bytes == 99
    assert trial.fetch_s().at(4) == pytest.approx(0.008, abs=1e-4)

    for name in ("none", "int4"):
        mine, given = trial.directions(name, 0), EIGHT.compressors[name].boundaries[0]
        assert mine.backward is not None and given.backward is not None
        for b in (2.0, 5.0, 16.0):
            assert mine.forward.at(b).num_bytes == given.forward.at(b).num_bytes
            assert mine.backward.at(b).decompress_s == pytest.approx(
                given.backward.at(b).decompress_s, abs=1e-4
            )
    again = replace(profile, pieces=found, fetch_s=Curve([(1, 0.002)]))
    two = {"pipeline": Arranged(Strategy(), ClusterLayout({"a": Cloud(), "b": Cloud()}, "free"))}
    for plan in (
        Plan("pipeline", (2, 8), GPipe(4), NO_COMPRESSION),
        Plan("pipeline", (5, 8), ZeroBubble(8, 3), "int4"),
    ):
        seen, meant = (Pricer(p, two, 16).step_s(plan) for p in (again, profile))
        assert seen == pytest.approx(meant, rel=2e-3), "a cut that was not in the trial"


@pytest.mark.parametrize("seed", range(8))
def test_what_a_call_of_a_stage_takes_is_told_from_its_blocks(seed: int) -> None:
    """Of a trial's two runs, and foreseen for cuts that were in neither."""
    draw = random.Random(seed)
    each = Curve([(1, draw.uniform(1e-3, 4e-3)), (16, draw.uniform(0.02, 0.05))])
    half = Curve([(b, s / 2) for b, s in each.points])
    block = replace(EIGHT.pieces[0], forward_s=half, backward_s=each, weights_s=Curve())
    head_s, front_s = draw.uniform(1.0, 3.0), draw.uniform(1.0, 2.0)
    head = replace(
        block, forward_s=Curve([(b, head_s * s) for b, s in each.points]), boundary=None
    )
    front = replace(block, forward_s=Curve([(b, front_s * s) for b, s in half.points]))
    given = replace(
        EIGHT, pieces=[front, *[block] * 4, head],
        stage_forward_s=Curve([(1, 1e-3), (16, 2e-3)]),
        stage_backward_s=Curve([(1, draw.uniform(0, 2e-3)), (16, 2e-3)]),
    )  # fmt: skip
    first, second = draw.choice([
        ([[3], [3]], [[1, 1], [4]]), ([[2], [4]], [[3], [2, 1]]), ([[4], [2]], [[1, 2], [3]]),
        ([[2], [2], [2]], [[1, 1], [2], [2]]),
    ])  # fmt: skip

    found, forward_s, backward_s = trial_over(given, *first).pieces(
        [0] * 5, trial_over(given, *second)
    )

    seen = replace(given, pieces=found, stage_forward_s=forward_s, stage_backward_s=backward_s)
    for b in (2.0, 4.0, 16.0):
        assert forward_s.at(b) == pytest.approx(given.stage_forward_s.at(b), abs=5e-5)
        assert backward_s.at(b) == pytest.approx(given.stage_backward_s.at(b), abs=5e-5)
    two = {"pipeline": Arranged(Strategy(), ClusterLayout({"a": Cloud(), "b": Cloud()}, "free"))}
    for cut, m in ((2, 8), (4, 4), (5, 1)):
        plan = Plan("pipeline", (cut, 6), GPipe(m), "none")
        took_s, meant_s = (Pricer(profile, two, 16).step_s(plan) for profile in (seen, given))
        assert took_s == pytest.approx(meant_s, rel=2e-3)


@pytest.mark.parametrize("seed", range(6))
def test_a_cut_that_was_tried_is_foreseen_even_if_stages_warm_each_other_up(seed: int) -> None:
    """In a rank's second stage a call may take less, as the first has warmed it up. What is then
    told apart wrongly must not show where the trial has seen the stages themselves."""
    draw = random.Random(seed)
    given = replace(EIGHT, stage_backward_s=Curve([(1, 0.01), (16, 0.01)]))
    trial, other = trial_over(given, [4], [4]), trial_over(given, [1, 2], [5])
    saved_s = draw.uniform(0.002, 0.009)
    legs = [
        replace(leg, costs=replace(
            leg.costs, backward_s=[first - saved_s, *others]
        ))
        for leg in other.legs
        for first, *others in [leg.costs.backward_s]
    ]  # fmt: skip

    found, forward_s, backward_s = trial.pieces([0] * 7, replace(other, legs=legs))

    seen = replace(given, pieces=found, stage_forward_s=forward_s, stage_backward_s=backward_s)
    two = {"pipeline": Arranged(Strategy(), ClusterLayout({"a": Cloud(), "b": Cloud()}, "free"))}
    for cut, m in ((4, 8), (4, 2), (3, 4), (5, 4)):
        plan = Plan("pipeline", (cut, 8), GPipe(m), "none")
        took_s, meant_s = (Pricer(profile, two, 16).step_s(plan) for profile in (seen, given))
        assert took_s == pytest.approx(meant_s, rel=2e-3)


def test_a_model_that_is_cut_in_one_way_has_the_costs_of_its_stages() -> None:
    pieces = [replace(EIGHT.pieces[0], blocks=0), replace(EIGHT.pieces[7], blocks=0)]
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, "free")
    facts = [StageFacts(4000, 4000, 1e6, 6e5), StageFacts(4000, 0, 1e6, 6e5)]
    legs = recorded(replace(EIGHT, pieces=pieces), layout, (1, 2))

    (first, last), *_ = Trial(legs, "none", facts, [((0,), 1), ((1,), 1)], 16.0).pieces([0])

    assert (first.name, last.name, last.boundary, last.blocks) == ("stage 0", "stage 1", None, 0)
    assert first.weights_s.at(4) == 0, "the first stage puts nothing off"
    assert last.weights_s.at(4) == pytest.approx(0.04, abs=1e-4)
    assert first.optimizer_s == pytest.approx(0.002, abs=1e-5) and last.optimizer_s == 0


def test_a_block_of_a_stage_that_stands_alone_takes_its_share() -> None:
    for count in (1, 3):
        profile = replace(EIGHT, pieces=[*EIGHT.pieces[: count - 1], EIGHT.pieces[7]])
        found = trial_over(profile, [count]).pieces([0] * (count - 1))[0]
        assert len(found) == count and {piece.blocks for piece in found} == {1}
        for one in found:
            assert one.forward_s.at(4) == pytest.approx(0.04, abs=1e-4)
            assert one.parameter_bytes == pytest.approx(4000, abs=1)


def test_no_curve_of_times_or_bytes_is_below_0() -> None:
    with pytest.raises(ConfigError, match="never below 0"):
        piece("front", forward_s=-0.01)


def test_of_several_steps_a_number_is_the_median_and_lines_are_those_of_the_first() -> None:
    one, two, three = (
        replace(FULL, forward_s=[s, 0.02], forward=[Direction(size, s)])
        for s, size in ((0.3, 10), (0.1, 30), (0.2, 20))
    )
    found = typical([one, two, three])
    assert found == replace(FULL, forward_s=[0.2, 0.02], forward=[Direction(20, 0.2)])
    assert typical([PLAIN]) == PLAIN


@pytest.mark.parametrize("saved", [0.0, 0.2, -0.3])
def test_a_split_backward_that_takes_less_than_a_whole_one_is_priced_as_it_was_seen(
    saved: float,
) -> None:
    """As where a trial's whole backwards are GPipe's, whose activations have left the caches."""
    given = replace(EIGHT, pieces=[
        replace(p, splitting_s=Curve([(1, -saved * 0.01), (16, -saved * 0.16)]))
        for p in EIGHT.pieces
    ])  # fmt: skip
    trial, other = trial_over(given, [4], [4]), trial_over(given, [1, 2], [5])

    found, *calls = trial.pieces([0] * 7, other)

    two = {"pipeline": Arranged(Strategy(), ClusterLayout({"a": Cloud(), "b": Cloud()}, "free"))}
    for cut, m in ((4, 8), (4, 4), (3, 2), (6, 8)):
        for schedule in (ZeroBubble(m), GPipe(m)):
            plan = Plan("pipeline", (cut, 8), schedule, NO_COMPRESSION)
            profiles = replace(given, pieces=found), given
            seen_s, meant_s = (Pricer(profile, two, 16).step_s(plan) for profile in profiles)
            assert seen_s == pytest.approx(meant_s, rel=2e-3)
    assert [call.at(4.0) for call in calls] == pytest.approx([0, 0], abs=1e-4)


@pytest.mark.parametrize("share", first_daily([-0.1, 0.0, 0.1], count=1))
def test_steps_that_vary_tell_what_zero_bubble_takes_for_cuts_that_were_not_tried(
    share: float,
) -> None:
    """Every recorded second is off by 2 %, and splitting adds or saves up to a tenth: half of the
    steps foreseen are within 1 %, and all within 5 %."""
    given = replace(EIGHT, pieces=[
        replace(p, splitting_s=Curve([(1, share * 0.03), (16, share * 0.48)]))
        for p in EIGHT.pieces
    ])  # fmt: skip
    two = {"pipeline": Arranged(Strategy(), ClusterLayout({"a": Cloud(), "b": Cloud()}, "free"))}
    trials, draw = (trial_over(given, [4], [4]), trial_over(given, [1, 2], [5])), random.Random(0)

    def varied(trial: Trial) -> Trial:
        def off(seconds: Sequence[float]) -> list[float]:
            return [s * draw.gauss(1.0, 0.02) for s in seconds]

        names = ("forward_s", "backward_s", "weights_s")
        legs = [
            replace(
                leg, costs=replace(leg.costs, **{n: off(getattr(leg.costs, n)) for n in names})
            )
            for leg in trial.legs
        ]
        return replace(trial, legs=legs)

    errors = []
    for _ in range(6):
        trial, other = map(varied, trials)
        found, forward_s, backward_s = trial.pieces([0] * 7, other)
        seen = replace(given, pieces=found, stage_forward_s=forward_s, stage_backward_s=backward_s)
        for cut, m in product((2, 3, 5, 6), (2, 4, 8)):
            plan = Plan("pipeline", (cut, 8), ZeroBubble(m), NO_COMPRESSION)
            took_s, meant_s = (Pricer(profile, two, 16).step_s(plan) for profile in (seen, given))
            errors.append(abs(took_s / meant_s - 1))
    assert median(errors) < 0.01 and max(errors) < 0.05


def test_a_profile_says_when_it_was_measured() -> None:
    assert replace(EIGHT, measured_at_s=0.0).measured_on == "written by hand"
    noon_s = time.mktime((2026, 11, 27, 12, 30, 0, 0, 0, -1))
    assert replace(EIGHT, measured_at_s=noon_s).measured_on == "2026-11-27 12:30"

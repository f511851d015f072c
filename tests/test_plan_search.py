"""What the planner chooses, against pricing everything; and its estimate, memory and variants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan_pieces import COMPRESSORS, EIGHT, SCHEDULES, STRATEGIES, codec, drawn, every_plan
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble, max_kept
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.planner.plan_report import Report, write_plan, write_plan_picture
from xcloud.planner.search import (
    Space,
    fastest,
    search,
    splits_of,
)
from xcloud.planner.settings import variants_of, with_micro_batches
from xcloud.record.timeline import PLAN_FILE, predicted_of
from xcloud.simulator.costs import AveragingCodec, CompressorCosts, Curve
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan
from xcloud.simulator.pricing import Pricer


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_as_fast_as_the_fastest_of_all_plans(seed: int) -> None:
    pricer, space = drawn(seed)

    found = search(pricer, space, 4)

    every = every_plan(pricer, space)
    min_s = min(map(pricer.step_s, every))
    assert found.best[0].step_s == pytest.approx(min_s, rel=0.005)
    assert [p.step_s for p in found.best] == sorted(p.step_s for p in found.best)
    pairs = [(p.plan.strategy, p.plan.compression) for p in found.best]
    assert len(set(pairs)) == len(pairs) == 4, "the best of each strategy and compressor"
    assert found.own.plan == space.own and found.num_plans == len(every)


@pytest.mark.parametrize("seed", range(12))
def test_the_estimate_orders_plans_nearly_as_the_simulation_does(seed: int) -> None:
    pricer, space = drawn(seed)
    plans = [p for p in space.groups(pricer.arranged) if p.strategy == "pipeline"]
    pairs = [(pricer.estimate_s(plan), pricer.step_s(plan)) for plan in plans]
    for estimated_s, simulated_s in pairs:
        assert 0.5 * simulated_s <= estimated_s <= 1.4 * simulated_s
    min_s = min(simulated for _, simulated in pairs)
    assert min(pairs)[1] <= 1.15 * min_s, "the least estimate is nearly the fastest"


def test_one_rank_each_is_estimated_as_a_gpipe_without_a_line_takes() -> None:
    free = ClusterLayout({"a": Cloud(), "b": Cloud()}, "free")
    bare = replace(EIGHT, pieces=[replace(p, optimizer_s=0.0) for p in EIGHT.pieces])
    pricer = Pricer(bare, {"pipeline": Arranged(Strategy(), free)}, 16)
    for m in (1, 2, 8):
        plan = Plan("pipeline", (4, 8), GPipe(m), NO_COMPRESSION)
        assert pricer.estimate_s(plan) == pytest.approx(pricer.step_s(plan), rel=1e-3)


def test_a_whole_model_in_each_rank_is_a_pipeline_of_one_stage() -> None:
    layout = ClusterLayout({"a": Cloud(2), "b": Cloud(1, slowdown=2.0)}, LinkProfile(1e9))
    strategy = STRATEGIES["data_parallel"]
    inside = {"a-a": LinkProfile(1e6)}
    arranged = {"dp": Arranged(strategy, strategy.arrange(layout))}
    quiet, ringed = (Pricer(replace(EIGHT, lines=lines), arranged, 16) for lines in ({}, inside))
    plan = Plan("dp", (8,), GPipe(4), NO_COMPRESSION)

    slow, fast = (quiet.predict(plan, replica) for replica in (1, 0))
    each_s = 4 * 8 * 0.03
    assert slow.step_s == pytest.approx(2 * (2 * each_s + 8 * 0.001))
    assert fast.step_s == pytest.approx(each_s + 8 * 0.001), "two ranks, a micro-batch each"
    ring_s = 2 * LinkProfile(1e6).transfer_s(32_000 // 2)
    assert ringed.predict(plan, 0).step_s == pytest.approx(fast.step_s + ring_s)
    price = quiet.price(plan)
    half_s = 8 * 8 * 0.03  # of the samples
    assert price.compute_s == pytest.approx((1 + 2) * half_s + 4 * 8 * 0.001)
    assert price.bound == "compute of stage 0"


def test_a_plan_that_does_not_fit_is_not_chosen_and_one_in_flight_less_is() -> None:
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, LinkProfile(1e9))
    arranged = {"pipeline": Arranged(Strategy(), layout)}
    own = Plan("pipeline", (4, 8), GPipe(8), NO_COMPRESSION)
    space = Space(own, {"pipeline": [(4, 8)]}, [8], [NO_COMPRESSION], ["schedule"], SCHEDULES)

    def chosen(megabytes: float) -> list[Schedule]:
        pricer = Pricer(EIGHT, arranged, 16)

        def fits(plan: Plan) -> bool:
            return pricer.memory(plan)["a"] <= megabytes * 1e6

        return [plan.schedule for plan in fastest(pricer, space, 1, fits=fits).best]

    # In stage 0 two samples of 4 blocks of 1 MB for each micro-batch in flight, and their message.
    assert max_kept(GPipe(8).actions(0, 2), 1, 8e6, 0) == 64e6
    assert Pricer(EIGHT, arranged, 16).memory(own) == dict.fromkeys("ab", 64e6 + 8 * 2e6 + 64e3)
    assert chosen(100) != [] and chosen(5) == []
    (few,) = chosen(21)
    assert isinstance(few, OneForwardOneBackward) and (few.num_in_flight or 2) == 2


def test_variants_differ_in_what_they_do_and_begin_with_the_schedule_itself() -> None:
    assert variants_of(GPipe(), 4, 8) == [GPipe(8)]
    found = variants_of(OneForwardOneBackward(4, 5), 2, 8)
    assert found[0] == OneForwardOneBackward(8, 5)
    assert {s.num_in_flight for s in found[1:]} == {2, 3, 4}  # type: ignore[attr-defined]
    late = variants_of(ZeroBubble(), 2, 8)
    assert late[0] == ZeroBubble(8) and ZeroBubble(8, 8, 8) in late
    orders = [tuple(tuple(s.actions(stage, 2)) for stage in (0, 1)) for s in late]
    assert len(set(orders)) == len(orders), "none twice under another name"
    assert variants_of(OneForwardOneBackward(), 2, 1) == [OneForwardOneBackward(1)]
    assert with_micro_batches(ZeroBubble(4, 3, 2), 6) == ZeroBubble(6, 3, 2)
    plans = (Plan("hybrid", (1, 2), s, "none") for s in (ZeroBubble(8, 5, 3), GPipe(9)))
    assert [plan.schedule_in(1, 2, num_lanes=2) for plan in plans] == [
        ZeroBubble(4, 3, 2),
        GPipe(4),
    ]


@pytest.mark.usefixtures("pictures")
def test_the_report_names_the_best_the_own_and_what_to_change(tmp_path: Path) -> None:
    slow = ClusterLayout({"a": Cloud(), "b": Cloud()}, LinkProfile(2e7, 0.01))
    dear = {
        **COMPRESSORS,
        "int8": CompressorCosts("int8", [codec(3e5, 5e-4)], AveragingCodec(9000)),
    }
    profile = replace(EIGHT, compressors=dear, fetch_s=Curve([(1, 1e-4)]))
    arranged = {n: Arranged(s, s.arrange(slow)) for n, s in STRATEGIES.items()}
    pricer = Pricer(profile, arranged, 16)
    splits = {n: splits_of(profile.pieces, found.num_stages) for n, found in arranged.items()}
    own = Plan("pipeline", (1, 8), GPipe(1), NO_COMPRESSION)
    space = Space(
        own, splits, (1, 2, 4), [*dear], ("split", "micro_batches", "compression"), SCHEDULES
    )
    ranked = search(pricer, space, 3)
    why = ["it is of another machine"]
    report = Report(pricer, space, ranked, 0.5, why, {"hybrid": "no"})
    assert report.best == ranked.best[0].plan
    assert [entry.micro_batches for entry in report.over_micro_batches] == [1, 2, 4]

    write_plan(tmp_path, report, ranked.best[0])
    assert write_plan_picture(tmp_path / "plan.png", report)

    table = json.loads((tmp_path / PLAN_FILE).read_text())
    assert table["chosen"]["compression"] == "int4"
    assert table["own"]["schedule"] == "gpipe" and table["own"]["split"] == "1 | 7 blocks"
    assert "less" in table["own"]["change_next"], "one change that gains most"
    assert all(plan["change_next"] for plan in table["plans"])
    assert sum(table["chosen"]["spent_s"].values()) == pytest.approx(ranked.best[0].step_s)
    assert table["chosen"]["bound"] == next(iter(table["chosen"]["spent_s"]))
    assert table["best_micro_batches"] in (1, 2, 4) and table["not_planned"] == {"hybrid": "no"}
    assert table["profile"]["stale"] == ["it is of another machine"]
    for name, points in table["step_time_over_bandwidth"].items():
        steps = [s for _, s in points]
        assert steps == sorted(steps, reverse=True), f"a faster line never costs: {name}"
    told = predicted_of(tmp_path)
    assert told == {"predicted_step_time_s": round(ranked.best[0].step_s, 6)}
    assert predicted_of(tmp_path / "nothing") == {}

"""The search for plans: on profiles written by hand, and against pricing everything."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.nightly import first_daily
from tests.plan_pieces import (
    COMPRESSORS,
    EIGHT,
    SCHEDULES,
    STRATEGIES,
    codec,
    drawn,
    every_plan,
    piece,
)
from xcloud.base.errors import ConfigError
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.late import GoOn
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble, max_kept
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.planner.plan_report import Report, write_plan, write_plan_picture
from xcloud.planner.search import (
    Space,
    crossings,
    fastest,
    over_micro_batches,
    search,
    splits_of,
    step_at,
)
from xcloud.planner.settings import DIMENSIONS, Planning, variants_of, with_micro_batches
from xcloud.record.timeline import PLAN_FILE, predicted_of
from xcloud.simulator import formulas
from xcloud.simulator.costs import (
    AveragingCodec,
    BoundaryCodec,
    CompressorCosts,
    Curve,
    DirectionCurves,
    Profile,
    from_table,
    read_profile,
    write_profile,
)
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan
from xcloud.simulator.pricing import Pricer

TWO = ClusterLayout({"a": Cloud(), "b": Cloud()}, LinkProfile(100e6, 0.01))
PIPELINE = Strategy()
ORDERS = [GPipe(), OneForwardOneBackward(), ZeroBubble()]


def pricer(
    profile: Profile = EIGHT, layout: ClusterLayout = TWO, *, batch_size: int = 16,
    **strategies: Strategy,
) -> Pricer:  # fmt: skip
    arranged = {name: Arranged(s, s.arrange(layout))
                for name, s in {"pipeline": PIPELINE, **strategies}.items()}  # fmt: skip
    return Pricer(profile, arranged, batch_size)


def space(priced: Pricer, counts: tuple[int, ...] = (1, 2, 4, 8), varies=DIMENSIONS) -> Space:  # type: ignore[no-untyped-def]
    pieces = priced.profile.pieces
    splits = {name: splits_of(pieces, found.num_stages) for name, found in priced.arranged.items()}
    own = Plan("pipeline", splits["pipeline"][0], GPipe(4), NO_COMPRESSION)
    return Space(own, splits, counts, list(priced.profile.compressors), varies, ORDERS)


def test_unequal_pieces_are_cut_where_both_clouds_work_equally() -> None:
    heavy = replace(EIGHT, pieces=[*EIGHT.pieces[:6], piece("heavy", 0.06), EIGHT.pieces[7]])
    free = replace(TWO, wan="free")
    priced = pricer(heavy, free)

    found = search(priced, space(priced), 5)

    assert found.best[0].plan.ends == (6, 8)
    assert found.best[0].plan.compression == NO_COMPRESSION
    assert found.best[0].bound.startswith("compute of stage 1")


def test_a_cloud_that_computes_slowly_gets_less() -> None:
    slow = replace(TWO, clouds={"a": Cloud(slowdown=3.0), "b": Cloud()}, wan="free")
    priced = pricer(EIGHT, slow)

    assert search(priced, space(priced), 1).best[0].plan.ends == (2, 8)


@pytest.mark.parametrize("is_large", [False, True])
def test_the_search_finds_what_pricing_every_plan_finds_in_a_large_space_with_fewer_simulations(
    is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        monkeypatch.setattr("xcloud.planner.search.MAX_WORK", 0)
    local = Strategy("local_updates", None, LocalUpdates(every=10))
    parallel = Strategy("data_parallel", None, GradientAveraging())
    for wan in (LinkProfile(8e6, 0.05), LinkProfile(1e9, 0.01), "free"):
        priced = pricer(layout=replace(TWO, wan=wan), data_parallel=parallel, local=local)
        room = space(priced)

        found = search(priced, room, 3)

        every = every_plan(priced, room)
        steps = {plan: priced.step_s(plan) for plan in every}
        assert found.best[0].step_s == pytest.approx(min(steps.values()))
        assert found.num_plans == len(every)
        assert (found.num_simulated < len(every)) == is_large


def test_a_compressor_pays_below_the_bandwidth_where_the_simulated_times_cross() -> None:
    priced, plan = pricer(), Plan("pipeline", (4, 8), GPipe(4), NO_COMPRESSION)

    found = crossings(step_at(priced, plan), ["none", "int4"])

    assert found.keys() == {"int4"} and 1e8 < found["int4"] < 1e10
    for factor, pays in ((0.99, True), (1.01, False)):
        there = priced.at_bandwidth(factor * found["int4"])
        gain_s = there.step_s(plan) - there.step_s(plan._replace(compression="int4"))
        assert (gain_s > 0) == pays


def test_a_compressor_without_cost_pays_everywhere_and_one_without_gain_nowhere() -> None:
    compressors = COMPRESSORS | {
        "gift": CompressorCosts("gift", [codec(1e5)]),
        "waste": CompressorCosts("waste", [codec(2e6, 0.01)]),
    }
    priced = pricer(replace(EIGHT, compressors=compressors))
    plan = Plan("pipeline", (4, 8), GPipe(4), NO_COMPRESSION)

    found = crossings(step_at(priced, plan), ["gift", "waste"])

    assert found["gift"] > 1e11 and found["waste"] == 0


def test_the_simulated_bubble_equals_formula_1_on_a_free_line_and_2_with_overlap() -> None:
    pieces = [replace(p, optimizer_s=0.0) for p in EIGHT.pieces]
    bare = replace(EIGHT, pieces=pieces, control_bytes=0)
    plan = Plan("pipeline", (4, 8), GPipe(4), NO_COMPRESSION)
    free = pricer(bare, replace(TWO, wan="free"))

    for at in over_micro_batches(free, plan, [1, 4, 16]):
        assert at.bubble_ratio == pytest.approx(at.free) == 1 / at.micro_batches

    # 1 MB at 100 Mbit/s with packet headers; a micro-batch of 4 samples computes for 0.16 s.
    busy = pricer(bare, replace(TWO, wan=LinkProfile(100e6, 0.0)))
    (at,) = over_micro_batches(busy, plan, [4])
    tt = LinkProfile(100e6).line_s(4_000_000)
    whole_s = formulas.step_of_overlapped_transfers(2, 4, 0.16, 0.32, tt)
    assert at.step_s == pytest.approx(whole_s)
    assert at.overlapped == pytest.approx(at.bubble_ratio, rel=0.01)
    assert at.blocking == pytest.approx(
        formulas.bubble_of_blocking_transfers(2, 4, 0.16, 0.32, tt)
    )


def test_a_cost_of_each_micro_batch_gives_a_best_number_of_them() -> None:
    fixed = [piece(f"block {i}", fixed_s=0.02) for i in range(8)]
    priced = pricer(replace(EIGHT, pieces=fixed), replace(TWO, wan="free"))

    found = search(priced, space(priced, (1, 2, 4, 8, 16)), 1).best[0].plan

    assert 1 < found.micro_batches < 16


def test_averaging_costs_bytes_over_bandwidth_and_rarely_where_rarely_done() -> None:
    slow = replace(TWO, wan=LinkProfile(1e6, 0.1))
    big = {NO_COMPRESSION: CompressorCosts("none", [codec(1e6)], AveragingCodec(10**6, 0.3, 0.2))}
    priced = pricer(
        replace(EIGHT, compressors=big), slow,
        every=Strategy("data_parallel", None, GradientAveraging()),
        hidden=Strategy("data_parallel", None, GradientAveraging(delay=1)),
        rarely=Strategy("local_updates", None, LocalUpdates(every=100)),
        quarters=Strategy("local_updates", None, LocalUpdates(every=100, fragments=4)),
    )  # fmt: skip
    plan = Plan("every", (8,), GPipe(4), NO_COMPRESSION)
    alone_s = 2 * 8 * (0.04 + 0.08) + 8 * 0.001  # two micro-batches of 4 samples
    wire_s = slow.wan.line_s(10**6) + 0.1  # type: ignore[union-attr]

    assert priced.step_s(plan) == pytest.approx(alone_s + 0.5 + wire_s)
    hidden_s = alone_s + 0.5 + max(0.0, wire_s - alone_s)
    assert priced.step_s(plan._replace(strategy="hidden")) == pytest.approx(hidden_s)
    rarely = priced.price(plan._replace(strategy="rarely"))
    assert rarely.step_s == pytest.approx(alone_s + (0.5 + wire_s) / 100)
    assert rarely.bytes_per_step == pytest.approx(2 * 10**6 / 100)
    quarters = priced.price(plan._replace(strategy="quarters"))
    quarter_s = slow.wan.line_s(10**6 // 4) + 0.1  # type: ignore[union-attr]
    assert quarters.step_s == pytest.approx(alone_s + (0.5 + 4 * quarter_s) / 100)
    assert quarters.bytes_per_step == pytest.approx(2 * 10**6 / 100)
    assert priced.price(plan).bound == "averaging over link a-b"


@pytest.mark.parametrize("num_clouds", [2, 3])
@pytest.mark.parametrize("strategy", ["data_parallel", "hybrid"])
def test_the_replica_with_most_micro_batches_is_the_one_that_is_waited_for(
    num_clouds: int, strategy: str
) -> None:
    """Micro-batch i belongs to replica i mod R, and their number may be no multiple of R."""
    stages = 2 if strategy == "hybrid" else 1
    layout = ClusterLayout({f"c{i}": Cloud() for i in range(stages * num_clouds)}, "free")
    averaging = Strategy(strategy, num_clouds if stages == 2 else None, GradientAveraging())
    priced = pricer(layout=layout, batch_size=240, **{strategy: averaging})
    ends = (4, 8) if stages == 2 else (8,)
    for m in range(num_clouds, 4 * num_clouds):
        plan = Plan(strategy, ends, GPipe(m), NO_COMPRESSION)
        price = priced.price(plan)
        most = -(-m // num_clouds)  # each takes 0.03 s a sample and piece, forward and backward
        one_s = 0.03 * 8 / stages * 240 / m
        bubbles_s = (stages - 1) * one_s
        assert price.step_s == priced.step_s(plan)
        assert price.step_s == pytest.approx(most * one_s + bubbles_s, rel=0.02), m
        assert price.compute_s == pytest.approx(0.03 * 8 * 240, rel=0.02), "all samples"


def test_where_a_cloud_may_be_lost_two_clouds_ask_and_answer() -> None:
    big = {NO_COMPRESSION: CompressorCosts("none", [codec(1e6)], AveragingCodec(10**6, 0.3, 0.2))}
    elastic = LocalUpdates(every=1, late=GoOn())
    priced = pricer(
        replace(EIGHT, compressors=big), far=Strategy("local_updates", None, elastic),
        near=Strategy("local_updates", None, LocalUpdates(every=1)),
    )  # fmt: skip
    far, near = (priced.step_s(Plan(n, (8,), GPipe(4), NO_COMPRESSION)) for n in ("far", "near"))

    assert far - near == pytest.approx(0.3 + 0.2 + 0.01 + TWO.wan.line_s(10**6))  # type: ignore[union-attr]


def test_more_in_flight_is_more_memory() -> None:
    priced = pricer()
    gpipe = Plan("pipeline", (4, 8), GPipe(8), NO_COMPRESSION)

    few = gpipe._replace(schedule=OneForwardOneBackward(8, 2))
    most, least = (priced.price(plan).memory["a"] for plan in (gpipe, few))

    # 4 pieces x 1 MB and a message of 1 MB for each of 2 samples, in 8 or 2 micro-batches;
    # 4 values of 4 bytes each.
    assert most == 8 * 2 * 5e6 + 4 * 16_000 and least == 2 * 2 * 5e6 + 4 * 16_000


def test_messages_without_an_answer_take_the_budget_of_their_link_and_no_more() -> None:
    """Nobody waits for them: an evaluation, or a boundary that no gradient crosses."""
    silent = [BoundaryCodec(DirectionCurves(Curve([(1, 1e6)])))]
    quiet = replace(EIGHT, compressors={NO_COMPRESSION: CompressorCosts("none", silent)})
    plan = Plan("pipeline", (4, 8), OneForwardOneBackward(8, 2), NO_COMPRESSION)
    own = 2 * 2 * 4e6 + 4 * 16_000

    for budget, queued in ((10**9, 8 * 2e6), (5_000_000, 5e6), (1, 2e6)):
        layout = replace(TWO, link_budget_bytes=budget)
        assert pricer(quiet, layout=layout).price(plan).memory["a"] == own + queued


def test_weights_that_wait_make_a_step_shorter_and_take_memory() -> None:
    priced = pricer(layout=replace(TWO, wan=LinkProfile(1e9, 0.01)))
    room = space(priced, counts=(8,), varies=("schedule",))
    plan = Plan("pipeline", (4, 8), OneForwardOneBackward(8, 4), NO_COMPRESSION)

    (best,) = search(priced, replace(room, own=plan), 1).best
    assert isinstance(best.plan.schedule, ZeroBubble) and best.step_s < priced.step_s(plan)
    never = replace(room, own=plan, schedules=ORDERS[:2])
    assert not isinstance(search(priced, never, 1).best[0].plan.schedule, ZeroBubble)

    for in_memory, waiting in ((1, 1), (4, 4)):  # of the last stage, which has one in flight
        memory = priced.price(plan._replace(schedule=ZeroBubble(8, 4, in_memory))).memory
        queued = 4 * 2 * 1e6  # four messages of two samples, at either end
        assert memory["a"] == 4 * 2 * 4e6 + queued + 4 * 16_000
        kept = max(2 * 4e6 + (waiting - 1) * 2 * 2.4e6, waiting * 2 * 2.4e6)
        assert memory["b"] == kept + queued + 4 * 16_000


def test_what_splitting_a_backward_costs_is_paid_where_it_is_split() -> None:
    dear = [replace(piece, splitting_s=Curve([(1, 0.004)])) for piece in EIGHT.pieces]
    costs = pricer(replace(EIGHT, pieces=dear)), pricer()
    schedules = ZeroBubble(8, 4, 4), OneForwardOneBackward(8, 4)
    split, whole = (Plan("pipeline", (4, 8), s, NO_COMPRESSION) for s in schedules)

    longer, usual = (each.predict(split).ranks for each in costs)
    assert longer[0].compute_s == pytest.approx(usual[0].compute_s)  # splits nothing
    assert longer[1].compute_s == pytest.approx(usual[1].compute_s + 16 * 4 * 0.004)
    assert costs[0].step_s(whole) == costs[1].step_s(whole)


def test_a_dimension_that_is_not_searched_stays() -> None:
    priced = pricer(layout=replace(TWO, wan=LinkProfile(1e6, 0.01)))
    room = space(priced, varies=("micro_batches", "schedule"))

    found = search(priced, room, 4)

    assert {p.plan.compression for p in found.best} == {NO_COMPRESSION}
    assert {p.plan.ends for p in found.best} == {(1, 8)}


def test_a_split_that_is_not_searched_stays_though_it_is_not_among_those_tried() -> None:
    many = [*(piece(f"{i}") for i in range(63)), piece("head", boundary=None)]
    layout = ClusterLayout({f"c{i}": Cloud() for i in range(8)}, "free")
    priced = pricer(replace(EIGHT, pieces=many), layout)
    own = Plan("pipeline", (1, 2, 3, 4, 5, 6, 7, 64), GPipe(8), NO_COMPRESSION)
    room = replace(space(priced, (8,), ("schedule",)), own=own)

    assert {p.plan.ends for p in search(priced, room, 4).best} == {own.ends}


def test_in_one_cloud_there_is_nothing_to_compress() -> None:
    inside = ClusterLayout({"a": Cloud(2, stages=(0, 1), one_stage_per_rank=True)}, "free")
    priced = pricer(layout=inside)
    assert {p.plan.compression for p in search(priced, space(priced), 9).best} == {NO_COMPRESSION}


def test_a_rank_of_two_stages_fetches_once() -> None:
    data = replace(EIGHT, fetch_s=Curve([(1, 0.01)]))
    both = ClusterLayout({"a": Cloud(stages=(0, 2)), "b": Cloud(stages=(1,))}, "free")
    plan = Plan("pipeline", (4, 5, 8), GPipe(4), NO_COMPRESSION)
    longer_s, usual_s = (
        Pricer(p, {"pipeline": Arranged(PIPELINE, both)}, 16).predict(plan).step_s
        for p in (data, EIGHT)
    )
    assert longer_s == pytest.approx(usual_s + 16 * 0.01)


def test_of_very_many_splits_the_even_one_and_its_neighbours_are_tried() -> None:
    many = [piece(f"{i}") for i in range(64)]

    found = splits_of(many, 8)

    assert (8, 16, 24, 32, 40, 48, 56, 64) in found and len(found) == 15


def test_a_profile_survives_its_file_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    given = replace(
        EIGHT, lines={"*": LinkProfile(1e6)}, of={"torch": "2"}, fetch_s=Curve([(1, 2)])
    )
    write_profile(file, given)

    assert json.dumps(asdict(read_profile(file))) == json.dumps(asdict(given))
    for change, said in (
        ({"pieces": []}, "profile.pieces must be .* at least 1 item"),
        ({"compressors": {"none": {"label": "x", "boundaries": []}}}, "has 0 entries"),
        ({"version": 1}, "profile.version must be 2, got 1"),
        ({"lines": {"*": {"latency": 1}}}, r"profile.lines.\*"),
        ({"fetch_s": "fast"}, "profile.fetch_s must be"),
        ({"speed": 1}, "unknown setting 'profile.speed'"),
        ({"fetch_s": [[2, 1], [1, 1]]}, "more and more samples"),
    ):
        with pytest.raises(ConfigError, match=said):
            from_table("profile", Profile, asdict(given) | change)
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"profile\.json"):
        read_profile(file)


def test_what_goes_on_around_the_codec_of_an_average_is_part_of_the_step() -> None:
    around = replace(EIGHT, around_gradients_s=0.25, around_changes_s=0.5)
    given = {
        "parallel": Strategy("data_parallel", None, GradientAveraging()),
        "local": Strategy("local_updates", None, LocalUpdates(every=10)),
    }
    for name, more_s in (("parallel", 0.25), ("local", 0.05)):
        plan = Plan(name, (8,), GPipe(4), NO_COMPRESSION)
        without, found = (pricer(p, **given).price(plan) for p in (EIGHT, around))
        assert found.step_s == pytest.approx(without.step_s + more_s)
        assert found.spent_s["codec of averaging"] >= more_s


def test_a_real_network_needs_numbers() -> None:
    with pytest.raises(ConfigError, match="real network from 'a' to 'b'"):
        pricer(layout=replace(TWO, wan="real"))
    lines = {"*": LinkProfile(1e7, 0.02)}
    found = pricer(replace(EIGHT, lines=lines), replace(TWO, wan="real"))
    assert found.line("pipeline", "a", "b").latency_s == 0.02


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "maybe"}, "plan.mode must be one of show, apply"),
        ({"search": ["cut"]}, r"plan.search\[0\] must be one of split"),
        ({"micro_batches": [0]}, "plan.micro_batches"),
        ({"compressors": {"x": 1}}, "plan.compressors.x must be a Compression"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Planning(**settings)  # type: ignore[arg-type]


def test_counts_go_up_to_the_batch_and_hold_the_own_one() -> None:
    assert Planning().counts(16, 5) == [1, 2, 3, 4, 5, 6, 8, 12, 16]
    assert Planning(search=["split"]).counts(16, 5) == [5]
    assert Planning().counts(512, 256)[-2:] == [128, 256], "the job's own is never left out"
    assert Planning(micro_batches=[256, 512]).counts(1024, 1) == [1, 256, 512]
    with pytest.raises(ConfigError, match=r"plan\.micro_batches has 512, and a pass has 256"):
        Planning(micro_batches=[8, 512]).counts(256, 1)


def test_a_plan_of_256_micro_batches_has_a_price() -> None:
    priced = pricer(batch_size=256)
    found = search(priced, replace(space(priced, (256,)), varies=("micro_batches", "schedule")), 3)

    assert found.best and all(entry.plan.micro_batches == 256 for entry in found.best)


def test_a_compressor_that_gains_by_rounding_only_has_a_crossing() -> None:
    """Where computing bounds a step on every line, differences are of sums in another order."""

    def step_s(name: str, rate: float) -> float:
        return 1.0 + 1e-15 * (int(1e3 * rate) % 7 - 3) * (name == "int4")

    found = crossings(step_s, ["none", "int4"])

    assert found.keys() == {"int4"} and 0 <= found["int4"]


@pytest.mark.parametrize("seed", first_daily(range(12), count=3))
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


@pytest.mark.parametrize("seed", first_daily(range(12), 5))
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


@pytest.mark.slow
@pytest.mark.nightly
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
    assert told == {"predicted_step_time_s": pytest.approx(ranked.best[0].step_s)}
    assert predicted_of(tmp_path / "nothing") == {}


def test_a_cut_is_told_in_blocks_where_the_model_is_cut_freely() -> None:
    def said(blocks: list[int], *ends: int) -> str:
        pieces = [SimpleNamespace(blocks=number) for number in blocks]
        priced: Any = SimpleNamespace(profile=SimpleNamespace(pieces=pieces))
        nothing: Any = None
        plan = Plan("pipeline", ends, GPipe(4), NO_COMPRESSION)
        return Report(priced, space=nothing, ranked=nothing).split(plan)

    assert said([1, 2, 1, 1, 1], 2, 5) == "3 | 3 blocks"
    assert said([1, 2, 0, 1, 1], 2, 5) == "2 | 5"
    assert said([1, 2, 1, 1, 1], 5) == "whole"

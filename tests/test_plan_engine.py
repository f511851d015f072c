"""The engine of the simulator against one that is slow and plain: all moments by repetition until
none changes. And the parts that it is given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest

from tests.plan_pieces import EIGHT
from xcloud.base.errors import ConfigError
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile, line_bytes
from xcloud.pipeline.one_forward_one_backward import ZeroBubble
from xcloud.pipeline.schedule import Action, GPipe
from xcloud.planner.settings import Planning
from xcloud.record.timeline import read_predicted, write_predicted
from xcloud.simulator.costs import (
    FREE,
    NORM,
    AveragingCodec,
    Costs,
    Curve,
    Direction,
    DirectionCurves,
    TransferCost,
    Update,
    lines_of,
)
from xcloud.simulator.engine import NEVER, Program, run
from xcloud.simulator.formulas import ExchangeCost, exchange_of
from xcloud.simulator.prediction import Simulator


def plainly(
    program: Program, seconds: Sequence[Sequence[float]], sizes: Sequence[int],
    lines: Sequence[LinkProfile],
) -> tuple[list[list[float]], list[float]]:  # fmt: skip
    """When each operation begins, and each parcel arrives, of steady lines. Looks at all that
    could happen next, and does what comes first."""
    ranks = range(len(program.needs))
    begun: list[list[float]] = [[] for _ in ranks]
    free = [0.0 for _ in ranks]
    line_free = [0.0 for _ in lines]
    arrived = [float("inf")] * len(program.parcels)
    tokens: list[list[float]] = [[] for _ in program.counts]
    posts: list[tuple[float, int, int]] = []  # when, rank, index
    while True:
        ready = []
        for rank in ranks:
            index = len(begun[rank])
            if index == len(program.needs[rank]):
                continue
            token = program.needs[rank][index]
            if token < 0 or len(tokens[token]) == program.counts[token]:
                at = max([free[rank], *(tokens[token] if token >= 0 else [])])
                ready.append((at, rank))
        first_post = min(posts, default=None)
        if ready and (first_post is None or min(ready)[0] < first_post[0]):
            at, rank = min(ready)
            index = len(begun[rank])
            begun[rank].append(at)
            free[rank] = at + seconds[rank][index]
            posts.append((free[rank], rank, index))
        elif first_post is not None:
            posts.remove(first_post)
            at, rank, index = first_post
            for number in program.posts[rank][index]:
                parcel = program.parcels[number]
                line = lines[parcel.route]
                until = max(at, line_free[parcel.route]) + line.line_s(sizes[number])
                line_free[parcel.route] = until
                arrived[number] = until + line.latency_s
                tokens[parcel.token].append(arrived[number])
            if (token := program.signals[rank][index]) >= 0:
                tokens[token].append(at)
        else:
            return begun, arrived


@pytest.mark.parametrize("seed", range(20))
def test_the_engine_finds_the_moments_that_a_plain_search_finds(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks, num_operations = draw.choice([2, 3, 4]), draw.choice([3, 6, 9])
    program = Program.for_ranks(num_ranks)
    routes = {pair: program.route() for pair in permutations(range(num_ranks), 2)}
    lines = [LinkProfile(draw.uniform(1e3, 1e5), draw.choice([0.0, 0.7])) for _ in routes]
    waiting: list[list[int]] = [[] for _ in range(num_ranks)]  # tokens that a rank may wait for
    seconds: list[list[float]] = [[] for _ in range(num_ranks)]
    for _ in range(num_operations):
        for rank in range(num_ranks):
            need = waiting[rank].pop(0) if waiting[rank] and draw.random() < 0.7 else -1
            posts, signal = list[int](), -1
            if draw.random() < 0.6:
                receiver = draw.choice([r for r in range(num_ranks) if r != rank])
                token = program.token()
                posts.append(program.parcel(rank, receiver, routes[rank, receiver], token))
                waiting[receiver].append(token)
            if draw.random() < 0.2:
                signal = program.token()
                waiting[draw.randrange(num_ranks)].append(signal)
            program.operation(rank, need, tuple(posts), signal)
            seconds[rank].append(draw.uniform(0.01, 1.0))
    sizes = [draw.randrange(100, 5000) for _ in program.parcels]

    found = run(program, seconds, sizes, lines)

    begun, arrived = plainly(program, seconds, sizes, lines)
    assert [len(own) for own in found.begin_s] == [len(own) for own in begun]
    for mine, plain in zip(found.begin_s, begun, strict=True):
        assert mine == pytest.approx(plain)
    assert [p.arrived_s for p in found.passages] == pytest.approx(arrived)


def test_a_rank_whose_message_never_comes_stops_and_says_so() -> None:
    program = Program.for_ranks(2)
    program.operation(0)
    program.operation(1, need=program.token())
    program.parcel(0, 1, program.route(), 0)

    found = run(program, [[1.0], [1.0]], [8], [FREE])

    assert found.has_ended(program, 0) and not found.has_ended(program, 1)
    assert found.passages == [NEVER]


def test_costs_of_several_stages_add_up_and_a_slow_rank_takes_longer() -> None:
    costs = Costs(
        [1.0, 2.0], [3.0, 4.0], [Direction(10, 0.1, 0.2)], [Direction(20, 0.3, 0.4)],
        [Update(1, 2, 3, 4), Update(5, 6, 7, 8)], {1: 2.0}, control_bytes=9, weights_s=[0.5, 1.0],
    )  # fmt: skip
    parts = ("fetch", "average", "norm", "optimizer")
    assert [costs.update_s(part, 0, (0, 1)) for part in parts] == [6, 8, 10, 12]
    slow = [costs.update_s(part, 1, (1,)) for part in parts]
    assert slow == [10, 6, 14, 16], "an all-reduce is not slower"
    assert costs.action_s(1, Action("backward", 1, 0)) == 8.0
    assert costs.action_s(0, Action("weights", 1, 3)) == 1.0
    there, back = (TransferCost(way, 0, 0, 0, 1) for way in ("forward", "backward"))
    assert costs.direction(there) == Direction(10, 0.1, 0.2)
    assert costs.direction(back) == Direction(20, 0.3, 0.4)
    assert Costs([1.0], [1.0]).update_s("fetch", 0, (0,)) == 0
    assert costs.direction(TransferCost(NORM, -1, 0, 1, 0)) == Direction(9)
    assert Costs([1.0], [1.0]).action_s(0, Action("weights", 0, 0)) == 0


def test_lines_come_from_the_profile_before_the_layout_and_a_bandwidth_before_both() -> None:
    slow, fast, own = LinkProfile(1e6), LinkProfile(1e9), LinkProfile(5e6, 0.5, trace=[[1.0, 2.0]])
    clouds = {name: Cloud() for name in "abc"}
    layout = ClusterLayout(clouds, own, links={"a-c": slow})

    found = lines_of(layout, {"a-b": fast, "b-b": slow})

    assert (found["a-b"], found["b-a"], found["a-c"], found["b-c"]) == (fast, fast, slow, own)
    assert found["b-b"] is slow and "a-a" not in found
    assert lines_of(layout, {"*": fast})["a-c"] == fast
    there = lines_of(layout, {}, bandwidth=7.0)["b-c"]
    assert (there.bandwidth_bits_per_s, there.latency_s, there.trace) == (7.0, 0.5, ())
    assert lines_of(ClusterLayout(clouds, "free"), {})["a-b"] is FREE
    assert FREE.line_s(10**9) < 1e-6
    with pytest.raises(ConfigError, match="nobody says what the real network"):
        lines_of(ClusterLayout(clouds, "real"), {})


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_an_exchange_hides_behind_the_steps_that_it_overlaps(overlap: int) -> None:
    layout = ClusterLayout({"a": Cloud(replica=0), "b": Cloud(replica=1, stages=[0])})
    line = LinkProfile(1e6, 0.25)
    averaging = LocalUpdates(every=4, overlap=overlap)
    costs = AveragingCodec(125_000, 0.3, 0.1)

    found = exchange_of(layout, averaging, costs, [1.0], dict.fromkeys(("a-b", "b-a"), line), 0.2)

    wire_s = 8 * line_bytes(125_000) / 1e6 + 0.25
    waits_s = max(0.0, wire_s - overlap * 0.5)
    assert found.step_s(0.5) == pytest.approx(0.5 + (0.3 + 0.1 + 0.2 + waits_s) / 4)
    assert found.bytes_per_step == {"a-b": 125_000 / 4, "b-a": 125_000 / 4}
    assert ExchangeCost().step_s(0.5) == 0.5 and ExchangeCost().bytes_per_step == {}


def test_a_curve_is_straight_between_its_points_and_beyond_and_never_negative() -> None:
    curve = Curve([(2, 1.0), (4, 2.0), (8, 8.0)])
    assert [curve.at(b) for b in (2, 3, 4, 6, 10)] == [1.0, 1.5, 2.0, 5.0, 11.0]
    assert Curve([(4, 2.0)]).at(6) == 3.0 and Curve().at(5) == 0.0
    assert Curve([(1, 1.0), (2, 0.5)]).at(5) == 0.0
    way = DirectionCurves(Curve([(1, 10.4)]), Curve([(1, 0.1)]))
    assert way.at(2) == Direction(21, 0.2, 0.0)
    with pytest.raises(ConfigError, match="more and more samples"):
        Curve([(2, 1), (2, 1)])


def test_what_a_plan_foresaw_is_read_back_from_its_trace(tmp_path: Path) -> None:
    layout = ClusterLayout({"a": Cloud(), "b": Cloud(2)}, LinkProfile(1e6, 0.01))
    costs = Costs([0.01, 0.02], [0.02, 0.04], [Direction(900, 0.001)], [Direction(500)],
                  weights_s=[0.01, 0.02])  # fmt: skip
    step = Simulator(ZeroBubble(4, 3), layout, agrees=True, num_steps=2).run(costs).timeline
    write_predicted(tmp_path, step, "pipeline")

    assert read_predicted(tmp_path) == step
    assert read_predicted(tmp_path / "nothing") is None


def test_settings_that_name_candidates_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"plan\.strategies\.x must be a Strategy"):
        Planning(strategies={"x": 1})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"plan\.trial_steps"):
        Planning(trial_steps=0)
    with pytest.raises(ConfigError, match=r"plan\.micro_batches"):
        Planning(micro_batches=[])
    assert Planning(schedules={"gpipe": GPipe()}, strategies={"dp": Strategy(
        "data_parallel", None, GradientAveraging())}).rows == 10  # fmt: skip
    assert EIGHT.trained_bytes == 32_000 and EIGHT.measured_on == "written by hand"
    assert EIGHT.differs_from({"torch": "9"}) == [], "nobody said with what"

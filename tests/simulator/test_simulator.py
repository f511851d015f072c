"""The simulator against formulas, sums by hand, and one that is slow and plain."""

import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.paper_step import UniformCosts, simulate
from tests.plan_pieces import EIGHT
from tests.timelines import assert_valid_trace
from xcloud.base.errors import ConfigError
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link import CONTROL, LinkClock
from xcloud.net.link_profile import InboundWire, LinkProfile, line_bytes
from xcloud.net.memory_transport import MemoryWorld
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import Action, GPipe, Schedule
from xcloud.planner.settings import Planning
from xcloud.record.timeline import chrome_trace, read_predicted, write_predicted
from xcloud.show.pictures import write_timeline
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
from xcloud.simulator.engine import NEVER, Lines, Parcel, Program, run
from xcloud.simulator.formulas import (
    ExchangeCost,
    bubble_of_a_free_link,
    bubble_of_blocking_transfers,
    exchange_of,
    max_queued,
    step_of_overlapped_transfers,
)
from xcloud.simulator.prediction import Prediction, Simulator

GRID = list(product([1, 2, 3, 5], [1, 2, 7], [(1.0, 2.0), (1.3, 0.7)], [0.0, 0.5, 1.5, 5.0]))


def test_jitter_is_that_of_the_emulated_link_and_no_message_overtakes_another(
    tmp_path: Path,
) -> None:
    profile = LinkProfile(1e9, latency_s=0.01, jitter_s=0.5)
    clock = LinkClock(profile, tmp_path / "a-b.clock")
    begin_s = clock.started_at_s
    expected = [clock.reserve(100, begin_s).deliver_at_s - begin_s for _ in range(20)]
    program = SimpleNamespace(parcels=[Parcel(0, 1, 0, 0)])
    lines = Lines(program, [100], [profile])  # type: ignore[arg-type]
    arrived = [lines.carry(0, 0, 0.0).arrived_s for _ in range(20)]
    assert arrived == sorted(arrived)
    assert arrived == pytest.approx(expected, abs=1e-6)
    assert arrived[-1] - arrived[0] > 0.1, "each has a jitter of its own"


def test_the_inbound_wire_gives_the_steps_that_protocol_nanogpt_has_measured() -> None:
    """Dense: 2,048 bytes a token, 8 samples a micro-batch, 100.5 s; subspace: 322, 16, 19.889."""
    wire = InboundWire(200e6, latency_s=0.05)
    layout = ClusterLayout({f"c{i}": Cloud() for i in range(8)}, wire)
    for num_bytes, size, law_s, measured_s in ((2048, 8, 101.0, 100.5), (322, 16, 19.8, 19.889)):
        message = Direction(num_bytes * size * 1024)
        costs = Costs([0.0] * 8, [0.0] * 8, [message] * 7, [message] * 7)
        m = 512 // size
        exact_s = (2 * m + 2 * (8 - 2)) * (message.num_bytes * 8 / 200e6 + 0.05)
        assert exact_s == pytest.approx(law_s, abs=0.05)
        assert Simulator(GPipe(m), layout).run(costs).step_s == pytest.approx(exact_s)
        found_s = Simulator(OneForwardOneBackward(m), layout).run(costs).step_s
        assert found_s == pytest.approx(measured_s, rel=0.016)


def test_messages_from_both_sides_take_turns_on_a_ranks_inbound_wire(tmp_path: Path) -> None:
    wire = InboundWire(8e6, latency_s=0.05)
    layout = ClusterLayout({f"c{i}": Cloud() for i in range(3)}, wire)
    world = MemoryWorld()
    ends = [Ends(world.transport(rank), layout, tmp_path) for rank in range(3)]
    boundaries = {sender: ends[sender].clock_to(1, boundary=0) for sender in (0, 2)}
    first, second = (boundaries[sender] for sender in (0, 2))
    assert first is not None and second is not None
    begin_s = first.started_at_s
    assert first.reserve(100_000, begin_s).deliver_at_s - begin_s == pytest.approx(0.15)
    assert second.reserve(100_000, begin_s).deliver_at_s - begin_s == pytest.approx(0.30)
    control = ends[0].clock_to(1, boundary=CONTROL)
    assert control is not None and control.reserve(100, begin_s).deliver_at_s == begin_s
    with pytest.raises(ConfigError, match="own steady wire"):
        InboundWire(8e6, jitter_s=0.1)


def test_of_messages_that_nothing_answers_those_of_all_passes_may_wait() -> None:
    def queued(budget: int, num_ranks: int = 3) -> float:
        return max_queued(
            GPipe(4), stage=0, num_stages=2, num_ranks=num_ranks, sizes=(100, None),
            budget=budget, num_passes=5,
        )  # fmt: skip

    assert queued(10**9) == 5 * 2 * 100, "of four micro-batches a rank has two, in each pass"
    assert queued(10**9, num_ranks=1) == 5 * 4 * 100
    assert queued(300) == 300 and queued(30) == 100, "as many as the budget, and one at least"


@dataclass(frozen=True)
class ForwardOnly(Schedule):
    num_micro_batches: int
    label = "forward only"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        return [Action("forward", stage, i) for i in range(self.num_micro_batches)]


def chain(num_stages: int, ranks: int = 1, **links: object) -> ClusterLayout:
    """A cloud for each stage."""
    return ClusterLayout({f"c{i}": Cloud(ranks) for i in range(num_stages)}, "free", **links)  # type: ignore[arg-type]


def uniform(schedule: Schedule, num_stages: int, *costs: float, **kinds: bool) -> Prediction:
    return simulate(schedule, chain(num_stages), UniformCosts(*costs), **kinds)  # type: ignore[arg-type]


def test_bubble_of_a_free_link_is_the_papers_formula_1() -> None:
    for p, m, (tf, tb), _ in GRID:
        expected = bubble_of_a_free_link(p, m)
        assert expected == (p - 1) / m
        assert uniform(GPipe(m), p, tf, tb).bubble_ratio == pytest.approx(expected)
        # 1F1B moves work, not idle time.
        found = uniform(OneForwardOneBackward(m), p, tf, tb)
        assert found.bubble_ratio == pytest.approx(expected)


def test_bubble_of_blocking_transfers_is_the_papers_formula_2() -> None:
    for _, m, (tf, tb), tt in GRID:
        expected = ((2 - 1) * (tf + tb + 2 * tt) + 2 * (m - 1) * tt) / (m * (tf + tb))
        assert bubble_of_blocking_transfers(2, m, tf, tb, tt) == pytest.approx(expected)
        found = uniform(GPipe(m), 2, tf, tb, tt, transfers_block=True)
        assert found.bubble_ratio == pytest.approx(expected)
    for p in (3, 4, 6):  # one micro-batch fills any number of stages
        found = uniform(GPipe(1), p, 1.0, 2.0, 0.3, transfers_block=True)
        expected = bubble_of_blocking_transfers(p, 1, 1.0, 2.0, 0.3)
        assert found.bubble_ratio == pytest.approx(expected)


def test_overlapped_transfers_take_the_derived_formula_2_prime() -> None:
    for (p, m, (tf, tb), tt), latency in product(GRID, (0.0, 0.2, 4.0)):
        expected = step_of_overlapped_transfers(p, m, tf, tb, tt, latency)
        if p > 1:
            assert expected == pytest.approx(
                p * (tf + tb)
                + 2 * (p - 1) * (tt + latency)
                + (m - 1) * (max(tf, tt) + max(tb, tt))
            )
        found = uniform(GPipe(m), p, tf, tb, tt, latency)
        assert found.step_s == pytest.approx(expected)
        assert sum(found.critical_s.values()) == pytest.approx(found.step_s)


def test_more_in_flight_repairs_1f1b_on_a_slow_link() -> None:
    """Facts of the design: p=2, m=16, tf=1, tb=2 (bubble ratios)."""

    def bubble(schedule: Schedule, tt: float) -> float:
        return round(uniform(schedule, 2, 1.0, 2.0, tt).bubble_ratio, 3)

    assert bubble(OneForwardOneBackward(16), 0.5) == 0.229
    assert bubble(GPipe(16), 0.5) == 0.083
    assert bubble(OneForwardOneBackward(16, 4), 0.5) < 0.1


def test_blocking_1f1b_keeps_its_numbers() -> None:
    """Pinned: here two messages often could cross at the same moment, and one must go first."""
    for p, m, tt, latency, step_s in [
        (2, 8, 0.5, 0.1, 35.9), (2, 8, 0.5, 0.0, 35.0), (3, 5, 1.5, 0.0, 48.5),
    ]:  # fmt: skip
        found = uniform(OneForwardOneBackward(m), p, 1.0, 2.0, tt, latency, transfers_block=True)
        assert found.step_s == pytest.approx(step_s)


def test_the_slowest_stage_sets_the_pace() -> None:
    costs = Costs([1.0, 3.0], [2.0, 4.0])

    found = simulate(GPipe(6), chain(2), costs)

    assert found.step_s == pytest.approx(1 + 6 * (3 + 4) + 2)
    assert (
        found.ranks[1].compute_s == pytest.approx(42)
        and next(iter(found.critical_s)) == "compute of stage 1"
    )
    twice = Costs([1.0, 3.0], [2.0, 4.0], slowdown={1: 2.0})
    assert simulate(GPipe(6), chain(2), twice).step_s == pytest.approx(1 + 6 * 14 + 2)


def test_lanes_share_the_line_of_their_clouds_and_nothing_inside_one() -> None:
    # A message is 1 s on the line (125 bytes with its packet header of 66: 1528 bits).
    profile = LinkProfile(1528.0, 0.25)
    costs = Costs([1.0, 1.0], [1.0, 1.0], [Direction(125)], [Direction(0)])
    between = ClusterLayout({"a": Cloud(4), "b": Cloud(4)}, profile)
    inside = ClusterLayout({"a": Cloud(8, [0, 1], one_stage_per_rank=True)}, profile)

    shared = simulate(ForwardOnly(4), between, costs)
    assert [f.from_us / 1e6 for f in shared.timeline.flights["a", "b"]] == [1, 2, 3, 4]
    assert shared.step_s == pytest.approx(1 + 4 + 0.25 + 1)
    assert shared.links[0].num_bytes == 4 * 125 and shared.links[0].busy_s == pytest.approx(4)
    assert simulate(ForwardOnly(4), inside, costs).step_s == pytest.approx(2.0)


def test_8_ranks_feed_3_and_each_micro_batch_meets_its_own() -> None:
    layout = ClusterLayout({"a": Cloud(8), "b": Cloud(3)}, "free")
    simulator = Simulator(OneForwardOneBackward(24), layout, num_passes=2)

    found = simulator.run(UniformCosts(1.0, 2.0, 0.1))

    for transfer in simulator.transfers:
        ends = {layout.owner(stage, transfer.micro_batch % 24) for stage in (0, 1)}
        assert {transfer.sender, transfer.receiver} == ends
    done = [op.action for ops in simulator.ops for op in ops if op.action is not None]
    assert len(done) == len(set(done)) == 2 * 2 * 48
    assert found.ranks[8].compute_s == pytest.approx(48 / 3 * 3)


def test_a_line_with_a_trace_is_slow_while_its_trace_says_so() -> None:
    # 191 bytes on the line, 1528 bits: 1 s at the full rate, 2 s at half of it.
    profile = LinkProfile(1528.0, trace=[[1.5, 764.0]])
    costs = Costs([0.0, 0.0], [0.0, 0.0], [Direction(125)], [Direction(0)])

    found = simulate(ForwardOnly(2), ClusterLayout({"a": Cloud(), "b": Cloud()}, profile), costs)

    assert [f.until_us / 1e6 for f in found.timeline.flights["a", "b"]] == [1.0, 2.5]


def test_codecs_take_the_time_of_the_rank_that_runs_them() -> None:
    costs = Costs([1.0, 1.0], [1.0, 1.0], [Direction(10, 0.25, 0.5)], [Direction(10, 2.0, 4.0)])

    found = simulate(GPipe(3), chain(2), costs)

    assert [use.codec_s for use in found.ranks] == pytest.approx([3 * 4.25, 3 * 2.5])
    boxes = [b.name for b in found.timeline.lanes[1].boxes[:4]]
    assert boxes == ["wait for F0", "decompress F0", "F0", "decompress F1"]
    assert found.timeline.bubble_ratio == pytest.approx(found.bubble_ratio)


def test_steps_in_a_row_hide_the_way_of_the_norm_behind_the_next_activation() -> None:
    """Rank 1 hears the sum one latency after rank 0 knows it, as it would the next activation."""
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, LinkProfile(1e12, 3.0))
    costs = Costs([1.0, 1.0], [2.0, 2.0], updates=[Update(optimizer_s=0.5)] * 2)

    alone = simulate(GPipe(4), layout, costs, agrees=True)
    in_a_row = simulate(GPipe(4), layout, costs, agrees=True, num_steps=3)

    expected = step_of_overlapped_transfers(2, 4, 1.0, 2.0, 0.0, 3.0) + 0.5
    assert alone.step_s == pytest.approx(expected + 3.0)
    assert in_a_row.step_s == pytest.approx(expected)
    assert sum(in_a_row.critical_s.values()) == pytest.approx(expected)
    assert [f.kind for f in in_a_row.timeline.flights["b", "a"]].count("norm") == 1
    assert min(lane.from_us for lane in in_a_row.timeline.lanes) == 0


def test_ranks_of_a_stage_average_once_all_are_there() -> None:
    costs = Costs(
        [1.0, 1.0], [1.0, 1.0], updates=[Update(average_s=0.5), Update()], slowdown={0: 3.0}
    )
    layout = ClusterLayout({"a": Cloud(2), "b": Cloud(1)}, "free")

    found = simulate(GPipe(2), layout, costs, agrees=True)

    ends = {lane.rank: lane.boxes for lane in found.timeline.lanes}
    averages = [[b for b in ends[rank] if b.what == "average"] for rank in (0, 1)]
    assert averages[0][0].until_us == averages[1][-1].until_us  # rank 1 waited for it
    assert found.ranks[1].average_s > found.ranks[0].average_s == pytest.approx(0.5)


@pytest.mark.usefixtures("pictures")
def test_a_predicted_step_is_drawn_as_a_recorded_one(tmp_path: Path) -> None:
    found = uniform(OneForwardOneBackward(4), 3, 0.01, 0.02, 0.005, 0.003).timeline

    assert_valid_trace(chrome_trace(found, {}))
    write_timeline(tmp_path / "t.png", found, "predicted")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_the_bubble_of_zero_bubble_is_that_of_zb_h1() -> None:
    """Qi et al., table 2: (p - 1)(tF + tB - tW), where 1F1B has (p - 1)(tF + tB + tW); here
    backward_s is tB + tW."""
    for p in (2, 3, 4, 6):
        layout, m = chain(p), 2 * p
        costs = UniformCosts(1.0, 2.0, weights_s=1.0)

        split, whole = (
            simulate(kind(m), layout, costs) for kind in (ZeroBubble, OneForwardOneBackward)
        )

        assert whole.step_s == pytest.approx(3 * m + 3 * (p - 1))
        assert split.step_s == pytest.approx(3 * m + 1 * (p - 1))
        assert sum(use.compute_s for use in split.ranks) == pytest.approx(3 * m * p)
        assert [box.name for box in split.timeline.lanes[-1].boxes[-2:]] == [
            f"W{m - 2}", f"W{m - 1}"
        ]  # fmt: skip


def test_zero_bubble_ends_on_any_layout() -> None:
    """Stages dealt to clouds at random, with lanes: every action is computed once."""
    draw = random.Random(0)
    for _ in range(40):
        num_stages, num_clouds, m = draw.randint(2, 6), draw.randint(1, 3), draw.randint(1, 9)
        dealt = [draw.randrange(num_clouds) for _ in range(num_stages)]
        clouds = {
            f"c{cloud}": Cloud(draw.randint(1, 3), [s for s, c in enumerate(dealt) if c == cloud])
            for cloud in set(dealt)
        }
        schedule = ZeroBubble(m, draw.choice([None, 1, 3, 7]), draw.choice([None, 1, 2, 20]))
        simulator = Simulator(schedule, ClusterLayout(clouds, "free"))

        simulator.run(UniformCosts(1.0, 2.0, 0.5, 0.3, weights_s=1.0))

        found = [op.action for ops in simulator.ops for op in ops if op.action]
        each = [schedule.actions(stage, num_stages) for stage in range(num_stages)]
        assert sorted(found) == sorted(action for actions in each for action in actions)


def test_stages_that_are_interleaved_halve_the_bubble() -> None:
    """Two clouds of equal work, in one stage each or in two; and one that holds both ends."""
    m = 8
    interleaved = ClusterLayout({"a": Cloud(1, [0, 2]), "b": Cloud(1, [1, 3])}, "free")
    both_ends = ClusterLayout({"a": Cloud(1, [0, 2]), "b": Cloud(1, [1])}, "free")
    half, whole = UniformCosts(1.0, 2.0, weights_s=1.0), UniformCosts(2.0, 4.0, weights_s=2.0)

    for schedule, bubble in ((GPipe(m), 6), (OneForwardOneBackward(m), 6), (ZeroBubble(m), 2)):
        assert simulate(schedule, chain(2), whole).step_s == pytest.approx(6 * m + bubble)
        assert simulate(schedule, interleaved, half).step_s == pytest.approx(6 * m + bubble / 2)
        assert simulate(schedule, both_ends, half).step_s == pytest.approx(6 * m)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kind", [OneForwardOneBackward, ZeroBubble])
def test_lanes_are_never_slower_than_one_lane_with_its_share_of_micro_batches(
    kind: type[OneForwardOneBackward],
) -> None:
    costs = [
        UniformCosts(1.0, 2.0, weights_s=1.0),
        UniformCosts(1.0, 2.0, 0.7, 0.2, weights_s=0.5),
        UniformCosts(2.0, 1.0, 0.0, 1.3, weights_s=0.1),
    ]
    for p, num_ranks, own, each in product([1, 2, 3, 4], [2, 3, 4], [1, 3, 4, 7], costs):
        one = simulate(kind(own), chain(p), each).step_s
        # A line between clouds is shared; over one of its own a lane is as fast as alone.
        clouds = {"all": Cloud(p * num_ranks, list(range(p)), one_stage_per_rank=True)}
        lanes = simulate(kind(num_ranks * own), ClusterLayout(clouds, "free"), each).step_s

        assert lanes <= one + 1e-9, (p, num_ranks, own, each)


def test_frozen_parts_send_no_gradient() -> None:
    simulator = Simulator(GPipe(4), chain(2), without_gradient={0})

    found = simulator.run(UniformCosts(1.0, 2.0, 0.5))

    assert {t.direction for t in simulator.transfers} == {"forward"}
    assert found.step_s == pytest.approx(1 + 0.5 + 4 * (1 + 2))
    middle = Simulator(ZeroBubble(4), chain(3), without_gradient={1})
    assert not [op for op in middle.ops[1] if op.what in ("backward", "weights")]


def test_a_schedule_that_waits_for_itself_is_refused() -> None:
    class BackwardFirst(GPipe):
        def actions(self, stage: int, num_stages: int) -> list[Action]:
            return super().actions(stage, num_stages)[::-1]

    for block in (False, True):
        with pytest.raises(ValueError, match="2 stages deadlocks"):
            uniform(BackwardFirst(2), 2, 1.0, 1.0, transfers_block=block)


def test_a_real_network_has_no_numbers() -> None:
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, "real")
    with pytest.raises(ConfigError, match="'a-b'"):
        simulate(GPipe(2), layout, Costs([1.0, 1.0], [1.0, 1.0]))


def test_the_simulator_needs_no_torch() -> None:
    code = (
        "import sys, xcloud.simulator.prediction, xcloud.record.timeline, "
        "xcloud.simulator.measured; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.nightly
def test_work_grows_with_actions_not_with_ranks_squared() -> None:
    """4,096 ranks and 256 micro-batches: 16 times the ranks that get work must not be 16 times
    slower. Counted, not timed: operations and messages are those of the actions."""
    simulator = Simulator(OneForwardOneBackward(256), chain(16, ranks=256))

    assert len(simulator.transfers) == 2 * 15 * 256
    assert sum(map(len, simulator.ops)) == 16 * 256 * (2 + 1 + 4)  # fetch; arrive ... optimizer
    assert simulator.run(UniformCosts(1.0, 2.0)).step_s == pytest.approx(16 * 3.0)


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

    assert [*map(len, found.begin_s)] == [1, 0] != [*map(len, program.needs)]
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
    with pytest.raises(ConfigError, match="bandwidth and latency of the real network"):
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

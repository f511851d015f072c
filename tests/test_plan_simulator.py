"""The simulator against formulas and sums that can be done by hand."""

import random
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from benchmarks.paper_step import UniformCosts, simulate
from tests.timelines import assert_valid_trace
from xcloud.base.errors import ConfigError
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import Action, GPipe, Schedule
from xcloud.record.timeline import chrome_trace
from xcloud.show.pictures import write_timeline
from xcloud.simulator.costs import Costs, Direction, Update
from xcloud.simulator.formulas import (
    bubble_of_a_free_link,
    bubble_of_blocking_transfers,
    step_of_overlapped_transfers,
)
from xcloud.simulator.prediction import Prediction, Simulator

GRID = list(product([1, 2, 3, 5], [1, 2, 7], [(1.0, 2.0), (1.3, 0.7)], [0.0, 0.5, 1.5, 5.0]))


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
        with pytest.raises(ValueError, match="2 stages waits for itself for ever"):
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


def test_work_grows_with_actions_not_with_ranks_squared() -> None:
    """4,096 ranks and 256 micro-batches: 16 times the ranks that get work must not be 16 times
    slower. Counted, not timed: operations and messages are those of the actions."""
    simulator = Simulator(OneForwardOneBackward(256), chain(16, ranks=256))

    assert len(simulator.transfers) == 2 * 15 * 256
    assert sum(map(len, simulator.ops)) == 16 * 256 * (2 + 1 + 4)  # fetch; arrive ... optimizer
    assert simulator.run(UniformCosts(1.0, 2.0)).step_s == pytest.approx(16 * 3.0)

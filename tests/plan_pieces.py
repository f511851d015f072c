"""Profiles and clouds for tests of the planner."""

from __future__ import annotations

import random

from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.planner.search import Space, splits_of
from xcloud.planner.settings import DIMENSIONS
from xcloud.simulator.costs import (
    AveragingCodec,
    BoundaryCodec,
    CompressorCosts,
    Curve,
    Direction,
    DirectionCurves,
    ModelPiece,
    Profile,
)
from xcloud.simulator.plan import NO_COMPRESSION, Arranged, Plan
from xcloud.simulator.pricing import Pricer


def piece(
    name: str, forward_s: float = 0.01, boundary: int | None = 0, fixed_s: float = 0.0
) -> ModelPiece:
    """Seconds of a sample, and of each micro-batch besides."""
    forward = Curve([(1, fixed_s + forward_s), (2, fixed_s + 2 * forward_s)])
    backward = Curve([(1, fixed_s + 2 * forward_s), (2, fixed_s + 4 * forward_s)])
    return ModelPiece(
        name, forward, backward, boundary, 4000, 4000, Curve([(1, 1e6)]), 0.001, 1,
        weights_s=Curve([(1, forward_s)]), deferred_bytes=Curve([(1, 6e5)]),
    )  # fmt: skip


def codec(num_bytes: float, seconds: float = 0.0) -> BoundaryCodec:
    """Bytes and seconds of each end for a sample."""
    way = DirectionCurves(Curve([(1, num_bytes)]), Curve([(1, seconds)]), Curve([(1, seconds)]))
    return BoundaryCodec(way, way)


COMPRESSORS = {
    NO_COMPRESSION: CompressorCosts("none+none", [codec(1e6)], AveragingCodec(32_000)),
    "int4": CompressorCosts(
        "int4+int4", [codec(1.3e5, 0.001)], AveragingCodec(4_200, 0.001, 0.001)
    ),
}


EIGHT = Profile(
    [*(piece(f"block {i}") for i in range(7)), piece("head", boundary=None)], COMPRESSORS
)

SCHEDULES: list[Schedule] = [GPipe(), OneForwardOneBackward(), ZeroBubble()]
STRATEGIES = {
    "pipeline": Strategy(),
    "data_parallel": Strategy("data_parallel", None, GradientAveraging()),
    "local_updates": Strategy("local_updates", None, LocalUpdates(every=10)),
}


def drawn(seed: int) -> tuple[Pricer, Space]:
    """A model of blocks that take what a seed says, on two or three clouds of one or two ranks."""
    draw = random.Random(seed)
    num_clouds, num_blocks = draw.choice([2, 2, 3]), draw.choice([4, 6])
    clouds = {
        f"c{i}": Cloud(draw.choice([1, 1, 2]), slowdown=draw.choice([1.0, 1.0, 2.0]))
        for i in range(num_clouds)
    }
    line = LinkProfile(10 ** draw.uniform(6.5, 9.5), draw.choice([0.0, 0.01, 0.08]))
    pieces = [
        piece(f"block {i}", draw.uniform(0.002, 0.02), 0, draw.choice([0.0, 0.004]))
        for i in range(num_blocks - 1)
    ]
    pieces.append(piece("head", draw.uniform(0.002, 0.05), None))
    layout = ClusterLayout(clouds, line)
    arranged = {n: Arranged(s, s.arrange(layout)) for n, s in STRATEGIES.items()}
    pricer = Pricer(Profile(pieces, COMPRESSORS), arranged, 16)
    splits = {n: splits_of(pieces, found.num_stages) for n, found in arranged.items()}
    own = Plan("pipeline", splits["pipeline"][0], GPipe(4), NO_COMPRESSION)
    counts = (2, 3, 4, 6, 8)
    return pricer, Space(own, splits, counts, [*COMPRESSORS], DIMENSIONS, SCHEDULES)


def every_plan(pricer: Pricer, space: Space) -> list[Plan]:
    """With every schedule."""
    return [
        plan._replace(schedule=schedule)
        for plan in space.groups(pricer.arranged)
        for schedule in space.schedules_for(
            len(plan.ends),
            plan.micro_batches,
            pricer.arranged[plan.strategy].layout.num_lanes,
        )
    ]


BOTH_WAYS = [(0, direction) for direction in ("forward", "backward")]
WAYS = [
    dict.fromkeys(BOTH_WAYS, Direction(4_000_000)),
    dict.fromkeys(BOTH_WAYS, Direction(1_000_000, 0.04, 0.08)),
]
"""What two compressors send and cost at the only boundary: plain and few bits."""

"""Profiles and clouds for tests of the planner."""

from __future__ import annotations

from xcloud.plan.plans import NO_COMPRESSION
from xcloud.plan.profile import (
    AveragingCodec,
    BoundaryCodec,
    CompressorCosts,
    Curve,
    DirectionCurves,
    Piece,
    Profile,
)


def piece(
    name: str, forward_s: float = 0.01, boundary: int | None = 0, fixed_s: float = 0.0
) -> Piece:
    """Seconds of a sample, and of each micro-batch besides."""
    forward = Curve([(1, fixed_s + forward_s), (2, fixed_s + 2 * forward_s)])
    backward = Curve([(1, fixed_s + 2 * forward_s), (2, fixed_s + 4 * forward_s)])
    return Piece(
        name, forward, backward, boundary, 4000, 4000, Curve([(1, 1e6)]), 0.001, 1,
        weights_s=Curve([(1, forward_s)]), put_off_bytes=Curve([(1, 6e5)]),
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

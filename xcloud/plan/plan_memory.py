"""What a rank keeps in memory under a plan, and sums over a profile's pieces."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from xcloud.cluster.layout import ClusterLayout
from xcloud.parallel.schedule import Schedule, most_kept
from xcloud.plan.plans import Arranged, Plan
from xcloud.plan.profile import Profile


class Sums(NamedTuple):
    """Of the pieces in front of each: seconds of forward, backward and the part of it that may be
    put off; bytes of activations, and of what is kept for that part; what splitting adds."""

    forward: list[float]
    backward: list[float]
    weights: list[float]
    activations: list[float]
    put_off: list[float]
    splitting: list[float]

    @staticmethod
    def of(profile: Profile, b: float) -> Sums:
        """b: samples of a micro-batch."""
        pieces = profile.pieces
        # What was measured of a block may be a difference, and more than its whole.
        late_s = [min(piece.weights_s.at(b), piece.backward_s.at(b)) for piece in pieces]
        return Sums(
            [0.0, *accumulate(piece.forward_s.at(b) for piece in pieces)],
            [0.0, *accumulate(piece.backward_s.at(b) for piece in pieces)],
            [0.0, *accumulate(late_s)],
            [0.0, *accumulate(piece.activation_bytes.at(b) for piece in pieces)],
            [0.0, *accumulate(piece.put_off_bytes.at(b) for piece in pieces)],
            [0.0, *accumulate(piece.splitting_s.at(b) for piece in pieces)],
        )


def memory_of(plan: Plan, arranged: Arranged, profile: Profile, sums: Sums) -> dict[str, int]:
    """Bytes of the fullest rank, by cloud. sums: at the plan's samples of a micro-batch."""
    layout, found = arranged.layout, dict[str, int]()
    averaging = arranged.strategy.averaging
    copies = 0 if averaging is None else averaging.traffic.num_copies
    for name, cloud in layout.clouds.items():
        held = [0] if arranged.is_whole else list(cloud.stages or ())
        each = [_stage_bytes(plan, layout, profile, stage, sums, copies) for stage in held]
        found[name] = round(max(each) if cloud.one_stage_per_rank else sum(each))
    return found


def _stage_bytes(
    plan: Plan, layout: ClusterLayout, profile: Profile, stage: int, sums: Sums, copies: int
) -> float:
    start, end = (0, *plan.ends)[stage], plan.ends[stage]
    pieces = profile.pieces[start:end]
    trained = sum(piece.trained_bytes for piece in pieces)
    lanes = len(layout.ranks_of(stage)) * layout.num_replicas
    activations, put_off = (of[end] - of[start] for of in (sums.activations, sums.put_off))
    held = _most_kept(plan.schedule, stage, len(plan.ends), lanes, activations, put_off)
    # Gradients and two moments beside the weights.
    return sum(piece.parameter_bytes for piece in pieces) + (3 + copies) * trained + held


@lru_cache(maxsize=65536)
def _most_kept(
    schedule: Schedule, stage: int, num_stages: int, lanes: int, activations: float, put_off: float
) -> float:
    """Bytes that a rank keeps for backwards to come."""
    return most_kept(schedule.actions(stage, num_stages), lanes, activations, put_off)

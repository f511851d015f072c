"""Closed forms: the paper's formulas, the cost of averaging between clouds, memory of a rank.

The paper's formulas hold for equal stages: p stages, m micro-batches; tf, tb: forward and backward
time of a micro-batch; tt: one transfer; l: latency. Bubble ratio R = idle time / ideal computing
time m(tf+tb).
Source: Pan et al., ZTE Technology Journal 2023(4), section 1.1, (1) and (2); (2') is derived.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

from xcloud.job.strategy import Averaging, everyone_merges
from xcloud.layout import ClusterLayout
from xcloud.net.link_profile import LinkProfile
from xcloud.pipeline.one_forward_one_backward import max_kept
from xcloud.pipeline.schedule import Schedule, max_in_flight
from xcloud.simulator.costs import AveragingCodec, Profile
from xcloud.simulator.plan import Arranged, Plan


def bubble_of_a_free_link(p: int, m: int) -> float:
    """Return the bubble ratio by formula (1): R = (p-1)/m."""
    return (p - 1) / m


def bubble_of_blocking_transfers(p: int, m: int, tf: float, tb: float, tt: float) -> float:
    """Return the bubble ratio by formula (2): R = [(p-1)(tf+tb+2tt) + 2(m-1)tt] / (m(tf+tb)).

    Sender and receiver wait while a message crosses. Exact for two stages; a middle stage of three
    or more waits twice for each micro-batch, on both its boundaries.
    """
    return ((p - 1) * (tf + tb + 2 * tt) + 2 * (m - 1) * tt) / (m * (tf + tb))


def step_of_overlapped_transfers(
    p: int, m: int, tf: float, tb: float, tt: float = 0.0, latency_s: float = 0.0
) -> float:
    """Return the seconds of a step by formula (2').

    T = p(tf+tb) + 2(p-1)(tt+l) + (m-1)[max(tf,tt) + max(tb,tt)]: transfers overlap with computing
    and are carried one after the other in each direction of a boundary. One stage has no boundary:
    m(tf+tb).
    """
    if p == 1:
        return m * (tf + tb)
    # In the steady state the slower of computing and carrying sets the pace, in each direction.
    steady = max(tf, tt) + max(tb, tt)
    return p * (tf + tb) + 2 * (p - 1) * (tt + latency_s) + (m - 1) * steady


@dataclass(frozen=True)
class ExchangeCost:
    """The cost of what replicas average.

    codec_s, wire_s: the seconds of one exchange.
    num_bytes: the bytes of one exchange that leave cloud a for b, by "a-b".
    per_step: the number of exchanges in a step.
    hides_steps: the number of steps for which it may continue beside other work; 0 = ranks wait
        for it.
    where: its slowest line.
    """

    codec_s: float = 0.0
    wire_s: float = 0.0
    num_bytes: Mapping[str, float] = field(default_factory=dict)
    per_step: float = 0.0
    hides_steps: float = 0.0
    where: str = ""

    def step_s(self, own_s: float) -> float:
        """Return the seconds of a step whose replicas take own_s by themselves."""
        waits_s = max(0.0, self.wire_s - self.hides_steps * own_s)
        return own_s + self.per_step * (self.codec_s + waits_s)

    @property
    def bytes_per_step(self) -> dict[str, float]:
        return {pair: self.per_step * size for pair, size in self.num_bytes.items()}


@dataclass(frozen=True)
class _Merge:
    """A way to average some values over replicas.

    merging: the clouds that merge for others; empty where each merges all for itself.
    num_bytes: the size of each message from or to a merging cloud.
    codec_s: the seconds of encoding and decoding in a rank.
    """

    merging: tuple[str, ...]
    num_bytes: float
    codec_s: float


def _merge_of(
    averaging: Averaging,
    clouds: tuple[str, ...],
    num_bytes: float,
    encode_s: float,
    decode_s: float,
) -> _Merge:
    """Return how replicas average values of which each needs num_bytes, encode_s and decode_s.

    clouds: the clouds of the replicas, in their order.
    """
    num_replicas = len(clouds)
    if averaging.traits.is_elastic:  # the first cloud merges for all, as the others may be gone
        return _Merge(
            merging=clouds[:1], num_bytes=num_bytes, codec_s=2 * encode_s + num_replicas * decode_s
        )
    if everyone_merges(num_replicas, is_robust=averaging.merge is not None):
        return _Merge(
            merging=(), num_bytes=num_bytes, codec_s=encode_s + decode_s * (num_replicas - 1)
        )
    # Each merges a part, and hands back its result in place of sending a contribution to it.
    codec_s = encode_s + 2 * decode_s * (num_replicas - 1) / num_replicas
    return _Merge(merging=clouds, num_bytes=num_bytes / num_replicas, codec_s=codec_s)


def exchange_of(
    layout: ClusterLayout,
    averaging: Averaging,
    costs: AveragingCodec,
    shares: Sequence[float],
    lines: Mapping[str, LinkProfile],
    around_s: float = 0.0,
) -> ExchangeCost:
    """Return the costs of averaging over replicas. Of several sets of clouds the slowest counts.

    Two replicas send each other everything, B bytes: encode + B/bandwidth + latency + decode. So
    do more of them where the merge is robust (replicas/averaging.py), and each decodes R - 1
    messages. Else from R = 3 on each merges a part and hands it back: two rounds of B/R to each
    other replica, each over the line of these two clouds. A part is back with the last replica
    once the slowest contribution to it has come and the slowest answer has gone. Where a cloud may
    be late or gone the first cloud merges for all: two rounds of B. A cloud's ranks share codecs
    evenly, and their line. Replicas are taken to begin at once.

    shares: the share of the trained values in each stage; one entry where replicas hold the whole
        model.
    lines: the line between two clouds, by "a-b".
    around_s: the seconds that an exchange of all values takes beside its codec.
    """
    traits = averaging.traits
    replicas = range(layout.num_replicas)
    slowest = ExchangeCost()
    num_bytes = defaultdict[str, float](float)
    stages_at = defaultdict[tuple[str, ...], list[int]](list)  # by clouds: they share lines
    for stage in range(len(shares)):
        stages_at[tuple(layout.stage_cloud(stage, replica=r) for r in replicas)].append(stage)
    for clouds, stages in stages_at.items():
        # The replica with the fewest ranks shares the codecs' work among fewest, so it is last.
        num_ranks = min(
            len({rank for stage in stages for rank in layout.ranks_of(stage, replica=replica)})
            for replica in replicas
        )
        # Fragments are merged in turn, so one exchange moves a fragment's part.
        share = sum(shares[stage] for stage in stages) / traits.fragments
        merge = _merge_of(
            averaging,
            clouds,
            num_bytes=costs.num_bytes * share,
            encode_s=costs.encode_s * share / num_ranks,
            decode_s=costs.decode_s * share / num_ranks,
        )
        codec_s = merge.codec_s + around_s * share / num_ranks
        took_s = {
            (a, b): lines[f"{a}-{b}"].transfer_s(round(merge.num_bytes))
            for a, b in permutations(clouds, 2)
            if not merge.merging or a in merge.merging or b in merge.merging
        }
        slowest_way = max(took_s, key=lambda way: took_s[way])
        # A merging cloud answers once the slowest contribution has come; the exchange ends with
        # the slowest of all answers.
        round_trips_s = []
        for merging in merge.merging:
            to_it_s = max(s for (_, receiver), s in took_s.items() if receiver == merging)
            from_it_s = max(s for (sender, _), s in took_s.items() if sender == merging)
            round_trips_s.append(from_it_s + to_it_s)
        wire_s = max(round_trips_s, default=took_s[slowest_way])
        # A contribution or a result goes each way; where all merge, both do.
        num_messages = 2 if len(merge.merging) > 1 else 1
        for sender, receiver in took_s:
            num_bytes[f"{sender}-{receiver}"] += merge.num_bytes * num_messages
        # Sets of clouds exchange at the same time, over different lines, so the slowest decides;
        # bytes add up all the same.
        if codec_s + wire_s >= slowest.codec_s + slowest.wire_s:
            slowest = ExchangeCost(
                codec_s,
                wire_s,
                per_step=traits.per_step,
                hides_steps=traits.hidden_steps,
                where="-".join(slowest_way),
            )
    return replace(slowest, num_bytes=dict(num_bytes))


class PieceWork(NamedTuple):
    """The work of consecutive pieces; seconds and activations are those of one micro-batch."""

    forward_s: float
    backward_s: float
    weights_s: float
    splitting_s: float
    activation_bytes: float
    deferred_bytes: float
    parameter_bytes: float
    trained_bytes: float
    optimizer_s: float


def work_before(profile: Profile, b: float) -> list[PieceWork]:
    """Return the work of all pieces before each, and last that of all.

    b: the number of samples of a micro-batch.
    """
    before = [PieceWork(*[0] * len(PieceWork._fields))]
    for piece in profile.pieces:
        backward_s = piece.backward_s.at(b)
        # What was measured of a block may be a difference, and more than its whole.
        late_s = min(piece.weights_s.at(b), backward_s)
        own = PieceWork(
            forward_s=piece.forward_s.at(b),
            backward_s=backward_s,
            weights_s=late_s,
            splitting_s=piece.splitting_s.change_at(b),
            activation_bytes=piece.activation_bytes.at(b),
            deferred_bytes=piece.deferred_bytes.at(b),
            parameter_bytes=piece.parameter_bytes,
            trained_bytes=piece.trained_bytes,
            optimizer_s=piece.optimizer_s,
        )
        # Sums from the first piece on: the work of any stage is then one difference, for the
        # thousands of cuts that a search looks at.
        before.append(PieceWork(*map(operator.add, before[-1], own)))
    return before


def memory_of(
    plan: Plan,
    arranged: Arranged,
    works: Sequence[PieceWork],
    messages: Mapping[int, tuple[int, int | None]],
    num_passes: int = 1,
) -> dict[str, int]:
    """Return the bytes of the fullest rank, by cloud.

    works: the work of each stage.
    messages: the bytes forward and back over each boundary between ranks, by the stage before it.
        The bytes back are None where no gradient returns.
    num_passes: the number of passes over the schedule in an update.
    """
    layout = arranged.layout
    fullest = dict[str, int]()
    p = len(plan.ends)
    averaging = arranged.strategy.averaging
    copies = averaging.traits.num_copies if averaging is not None else 0
    decoded = 0.0
    if averaging is not None and averaging.merge is not None:
        # A robust merge looks at all contributions at once, its own included, in every replica.
        decoded = layout.num_replicas / averaging.traits.fragments
    schedule = plan.schedule.for_lanes(p, num_lanes=layout.num_lanes)
    budget = layout.link_budget_bytes

    def stage_bytes(stage: int) -> float:
        work = works[stage]
        num_ranks = len(layout.ranks_of(stage)) * layout.num_replicas
        held = _max_kept(
            schedule,
            stage,
            num_stages=p,
            num_ranks=num_ranks,
            activations=work.activation_bytes,
            waiting=work.deferred_bytes,
        )
        # Over the boundary before the stage and over the one behind it.
        queued = sum(
            max_queued(
                schedule,
                stage=end,
                num_stages=p,
                num_ranks=num_ranks,
                sizes=messages[end],
                budget=budget,
                num_passes=num_passes,
            )
            for end in (stage - 1, stage)
            if end in messages
        )
        # Gradients and two moments beside the weights; a rank merges its share of a stage.
        merged = decoded / len(layout.ranks_of(stage))
        copied = (3 + plan.schedule.num_more_copies + copies + merged) * work.trained_bytes
        return work.parameter_bytes + copied + held + queued

    for name, cloud in layout.clouds.items():
        each = map(stage_bytes, [0] if arranged.is_whole else cloud.stages or ())
        # A rank has one of its cloud's stages, or all of them.
        fullest[name] = round(max(each) if cloud.one_stage_per_rank else sum(each))
    return fullest


@lru_cache(maxsize=65536)
def max_queued(
    schedule: Schedule,
    stage: int,
    num_stages: int,
    num_ranks: int,
    sizes: tuple[int, int | None],
    budget: int,
    num_passes: int,
) -> float:
    """Return the bytes of messages over the boundary after `stage` that may wait in a rank there.

    Messages in flight wait, each of which goes forward or comes back; where none come back, all of
    an update may, as far as the link's budget goes (LinkWindow).
    """
    forward, back = sizes
    if back is None:
        # No gradient holds the sender back, so it may be a whole update ahead.
        most = num_passes * math.ceil(schedule.num_micro_batches / num_ranks)
        return min(most * forward, max(budget, forward))
    in_flight = max_in_flight(schedule.actions(stage, num_stages), link=lambda i: i % num_ranks)
    return max(in_flight.values()) * max(forward, back)


@lru_cache(maxsize=65536)
def _max_kept(
    schedule: Schedule, stage: int, num_stages: int, num_ranks: int, activations: float,
    waiting: float,
) -> float:  # fmt: skip
    """Return the bytes that a rank keeps for backwards to come."""
    return max_kept(schedule.actions(stage, num_stages), num_ranks, activations, waiting)

"""What it costs that replicas in several clouds average, as a formula.

Two replicas send each other everything, B bytes: encode + B/bandwidth + latency + decode. From
R = 3 on each merges a part and hands it back (parallel/averaging.py): two rounds of B/R to each
other replica, each over a line of its own. Where a cloud may be late or gone the first cloud
merges for all: two rounds of B. A cloud's ranks share codecs evenly, and their line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xcloud.cluster.layout import ClusterLayout
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.strategy import GradientAveraging
from xcloud.plan.line import Line
from xcloud.plan.profile import AveragingCodec


@dataclass(frozen=True)
class Exchange:
    """One exchange, of which there are `per_step` in a step. hides_s: how long it may go on beside
    other work, in steps: 0 = ranks wait for it. where: its slowest line."""

    codec_s: float = 0.0
    wire_s: float = 0.0
    num_bytes: float = 0.0
    per_step: float = 0.0
    hides_steps: float = 0.0
    where: str = ""

    def step_s(self, own_s: float) -> float:
        """A step whose replicas take own_s by themselves."""
        waits_s = max(0.0, self.wire_s - self.hides_steps * own_s)
        return own_s + self.per_step * (self.codec_s + waits_s)

    @property
    def codec_s_per_step(self) -> float:
        return self.per_step * self.codec_s

    @property
    def bytes_per_step(self) -> float:
        return self.per_step * self.num_bytes


def exchange_of(
    layout: ClusterLayout,
    averaging: GradientAveraging | LocalUpdates,
    costs: AveragingCodec,
    shares: Sequence[float],
    lines: Mapping[str, Line],
) -> Exchange:
    """shares: of the trained values, by stage; one entry where replicas hold the whole model.
    lines: by "a-b"."""
    num_replicas, fragments, per_step, hides = layout.num_replicas, 1, 1.0, 0.0
    is_elastic = False
    if isinstance(averaging, LocalUpdates):
        fragments, hides = averaging.fragments, float(averaging.overlap)
        per_step, is_elastic = fragments / averaging.every, averaging.is_elastic
    elif averaging.delay:
        hides = 1.0
    slowest = Exchange()
    total_bytes = 0.0
    for stage, share in enumerate(shares):
        clouds = [layout.stage_cloud(stage, replica) for replica in range(num_replicas)]
        lanes = min(len(layout.ranks_of(stage, replica)) for replica in range(num_replicas))
        whole = costs.num_bytes * share / fragments
        encode_s = costs.encode_s * share / fragments / lanes
        decode_s = costs.decode_s * share / fragments / lanes
        others = num_replicas - 1
        if num_replicas == 2:
            rounds, size, pairs = 1, whole, _pairs(clouds)
            codec_s = encode_s + decode_s
            total_bytes += 2 * whole
        elif is_elastic:
            rounds, size, pairs = 2, whole, _pairs(clouds, hub=True)
            codec_s = 2 * encode_s + (1 + others) * decode_s
            total_bytes += 2 * others * whole
        else:
            rounds, size, pairs = 2, whole / num_replicas, _pairs(clouds)
            codec_s = encode_s * (1 + 1 / num_replicas)
            codec_s += 2 * decode_s * others / num_replicas
            total_bytes += 2 * others * whole
        took = {pair: rounds * (lines[pair].line_s(round(size)) + lines[pair].latency_s)
                for pair in pairs}  # fmt: skip
        where = max(took, key=lambda pair: took[pair])
        if codec_s + took[where] >= slowest.codec_s + slowest.wire_s:
            slowest = Exchange(codec_s, took[where], 0.0, per_step, hides, where)
    return Exchange(
        slowest.codec_s, slowest.wire_s, total_bytes, per_step, hides, slowest.where
    )  # fmt: skip


def _pairs(clouds: Sequence[str], hub: bool = False) -> list[str]:
    return [
        f"{a}-{b}" for a in clouds for b in clouds if a != b and (not hub or clouds[0] in (a, b))
    ]

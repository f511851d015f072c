"""What it costs that replicas in several clouds average, as a formula.

Two replicas send each other everything, B bytes: encode + B/bandwidth + latency + decode. From
R = 3 on each merges a part and hands it back (parallel/averaging.py): two rounds of B/R to each
other replica, each over the line of these two clouds; a part is back with the last replica once
the slowest contribution to it has come and the slowest answer has gone. Where a cloud may be late
or gone the first cloud merges for all: two rounds of B. A cloud's ranks share codecs evenly, and
their line. Replicas are taken to begin at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from xcloud.cluster.layout import ClusterLayout
from xcloud.parallel.strategy import Averaging
from xcloud.plan.line import Line
from xcloud.plan.profile import AveragingCodec


@dataclass(frozen=True)
class Exchange:
    """One exchange, of which there are `per_step` in a step. hides_s: how long it may go on beside
    other work, in steps: 0 = ranks wait for it. where: its slowest line. num_bytes: by "a-b",
    that leave cloud a for b."""

    codec_s: float = 0.0
    wire_s: float = 0.0
    num_bytes: Mapping[str, float] = field(default_factory=dict)
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
    def bytes_per_step(self) -> dict[str, float]:
        return {pair: self.per_step * size for pair, size in self.num_bytes.items()}


def exchange_of(
    layout: ClusterLayout,
    averaging: Averaging,
    costs: AveragingCodec,
    shares: Sequence[float],
    lines: Mapping[str, Line],
    around_s: float = 0.0,
) -> Exchange:
    """shares: of the trained values, by stage; one entry where replicas hold the whole model.
    lines: by "a-b". around_s: what an exchange of all values takes beside its codec."""
    num_replicas, traffic = layout.num_replicas, averaging.traffic
    slowest, num_bytes = Exchange(), defaultdict[str, float](float)
    for clouds, stages in _together(layout, len(shares)).items():
        lanes = min(
            len({rank for stage in stages for rank in layout.ranks_of(stage, replica)})
            for replica in range(num_replicas)
        )
        share = sum(shares[stage] for stage in stages) / traffic.fragments
        whole = costs.num_bytes * share
        encode_s, decode_s = costs.encode_s * share / lanes, costs.decode_s * share / lanes
        if traffic.has_hub:
            size, codec_s, mergers = whole, 2 * encode_s + num_replicas * decode_s, clouds[:1]
        elif num_replicas == 2:
            size, codec_s, mergers = whole, encode_s + decode_s, clouds[:0]
        else:
            # Of its own part a replica hands back the result in place of sending a contribution.
            size, mergers = whole / num_replicas, clouds
            codec_s = encode_s + 2 * decode_s * (num_replicas - 1) / num_replicas
        codec_s += around_s * share / lanes
        took = {}
        for a, b in permutations(clouds, 2):
            if not mergers or a in mergers or b in mergers:
                line = lines[f"{a}-{b}"]
                took[f"{a}-{b}"] = line.line_s(round(size)) + line.latency_s
        where = max(took, key=lambda pair: took[pair])
        wire_s = took[where]
        if mergers:
            wire_s = max(
                max(took[f"{a}-{m}"] for a in clouds if a != m)
                + max(took[f"{m}-{b}"] for b in clouds if b != m)
                for m in mergers
            )
        # Each way once, and where all merge once more.
        for pair in took:
            num_bytes[pair] += size * (2 if len(mergers) > 1 else 1)
        if codec_s + wire_s >= slowest.codec_s + slowest.wire_s:
            slowest = Exchange(codec_s, wire_s, {}, traffic.per_step, traffic.hidden_steps, where)
    return replace(slowest, num_bytes=dict(num_bytes))


def _together(layout: ClusterLayout, num_shares: int) -> dict[tuple[str, ...], list[int]]:
    """Stages whose replicas stand in the same clouds, so that they share lines."""
    found = defaultdict[tuple[str, ...], list[int]](list)
    for stage in range(num_shares):
        clouds = tuple(layout.stage_cloud(stage, r) for r in range(layout.num_replicas))
        found[clouds].append(stage)
    return found

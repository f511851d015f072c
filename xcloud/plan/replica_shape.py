"""What of a replica's layout counts for the time of a step, and which replicas do not differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from xcloud.cluster.layout import ClusterLayout
from xcloud.plan.line import Line


class ReplicaShape(NamedTuple):
    """A replica, by stage. lanes: ranks. up, down: lines to the next stage and back; None inside a
    cloud."""

    slowdown: Sequence[float]
    lanes: Sequence[int]
    up: Sequence[Line | None]
    down: Sequence[Line | None]


def shape_of(layout: ClusterLayout, lines: Mapping[str, Line]) -> ReplicaShape:
    """lines: by "a-b"."""
    stages = range(layout.num_stages)
    clouds = [layout.stage_cloud(stage) for stage in stages]
    behind = [*pairwise(clouds), (clouds[-1], clouds[-1])]
    return ReplicaShape(
        [layout.clouds[cloud].slowdown for cloud in clouds],
        [len(layout.ranks_of(stage)) for stage in stages],
        [lines[f"{here}-{there}"] if here != there else None for here, there in behind],
        [lines[f"{there}-{here}"] if here != there else None for here, there in behind],
    )


def alike(replicas: Sequence[ClusterLayout], lines: Mapping[str, Line]) -> dict[int, list[int]]:
    """Numbers of replicas, by the first of those like them: as many ranks and stages, computing as
    fast, over the same lines."""
    firsts, found = dict[object, int](), dict[int, list[int]]()
    for number, layout in enumerate(replicas):
        clouds, wires = tuple(layout.clouds.values()), tuple(
            lines.get(f"{a}-{b}") for a, b in product(layout.clouds, repeat=2)
        )  # fmt: skip
        first = firsts.setdefault((repr(clouds), repr(wires)), number)
        found.setdefault(first, []).append(number)
    return found

"""Joins one rank of a pipeline to the others, as its job and layout say: groups, links for
small messages around rank 0, replicas, stage boundaries (boundaries.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from xcloud.base.errors import LinkClosed, LinkTimeout
from xcloud.cluster.frame import Frame, Kind
from xcloud.cluster.link import LinkStats
from xcloud.comm.state import MEMORY, Marked, Stateful, StatefulParts
from xcloud.comm.step_clock import StepClock
from xcloud.job.experiment import Experiment
from xcloud.parallel.control import REPORT_CAPACITY_BYTES, Control, StageSums, note_ages
from xcloud.parallel.rank_group import RankGroup
from xcloud.wire.boundaries import Boundaries, join_boundaries
from xcloud.wire.ends import FRAME_SLACK_BYTES, Ends, OnReport
from xcloud.wire.replicas import PeerLinks, replica_links, tied_links

_CONTROL_AHEAD = 8  # small messages under way on a control link: a norm, reports


@dataclass(frozen=True)
class Wiring(StatefulParts):
    """All ends that one rank holds. groups: by stage, the ranks that hold it. control: None where
    there is one rank. replicas: links to this rank's counterparts; None where the pipeline stands
    once. tied: to the pipeline's other end, where a matrix is tied over two ranks. is_elastic:
    other clouds may be late or gone, and only merges wait for them."""

    ends: Ends
    groups: dict[int, RankGroup]
    control: Control | None
    sums: StageSums
    replicas: PeerLinks | None
    tied: PeerLinks | None
    boundaries: Boundaries
    is_elastic: bool

    @property
    def wan_stats(self) -> list[LinkStats]:
        """Of the links in the order of `ends.records`."""
        return [link.stats for link in self.ends.wan_outs]

    def parts(self) -> Mapping[str, Stateful]:
        """What the channels carry from step to step; links and counters begin anew."""
        return {MEMORY: Marked(self.boundaries.channels, "a rank's channels")}

    def expect_signs_of_life(self) -> None:
        """From now on a rank that is silent for lost_after_s is lost, in a step too. Not where
        links are emulated, which hold messages back, or where clouds may leave and come back."""
        if not self.is_elastic and not self.ends.is_emulated:
            for life in self.ends.lives.values():
                life.beats = True

    def meet(self) -> None:
        """Wait until every rank has come here, see Control.meet; where clouds may leave, every
        one of the first cloud."""
        if self.control is None:
            return
        if not self.is_elastic:
            self.control.meet()
        elif self.ends.rank in self.first_cloud:
            self.control.meet(self.first_cloud)

    @property
    def first_cloud(self) -> tuple[int, ...]:
        """Ranks of the cloud that rank 0 is in."""
        return self.ends.layout.ranks_in(self.ends.layout.cloud_of(0))

    def close(self) -> None:
        """Deliver everything, hear every peer's goodbye, as long as it sends heartbeats."""
        self.ends.close(*([LinkClosed, LinkTimeout] if self.is_elastic else []))


def wire(
    job: Experiment, ends: Ends, clock: StepClock, device: torch.device, on_report: OnReport
) -> Wiring:
    """Every rank of the job calls it at the same time. on_report: called in rank 0, in a
    background thread, for each report of another rank."""
    layout = job.cluster
    groups = {}
    for stage in range(layout.num_stages):
        for ranks in layout.replicas_of(stage):
            group = ends.group(ranks, device)
            if group is not None:
                groups[stage] = group
    control = join_control(ends, on_report) if layout.num_ranks > 1 else None
    sums = _join_sums(job, ends, control)
    replicas = None
    if layout.num_replicas > 1:
        rejoin = None
        if job.is_elastic:
            assert control is not None
            rejoin = partial(_join_peer, control, ends, on_report)
        replicas = replica_links(ends, layout, device, rejoin)
    tied = tied_links(ends, layout, device) if job.ties_ends else None
    boundaries = join_boundaries(job, ends, clock, device)
    return Wiring(ends, groups, control, sums, replicas, tied, boundaries, job.is_elastic)


def join_control(ends: Ends, on_report: OnReport) -> Control:
    """Reports, checkpoints and heartbeats, between rank 0 and each other rank of any job.
    on_report: see wire."""
    layout, everyone = ends.layout, range(ends.layout.num_ranks)
    ends.line("control", everyone)
    peers = everyone[1:] if ends.rank == 0 else everyone[:1]
    overdue_s = max(layout.overdue_s(ends.rank, peer, 1024) for peer in peers)
    control = Control(ends.rank, {}, {}, overdue_s, ends.lives)
    for peer in peers:
        _join_peer(control, ends, on_report, peer)
    return control


def _join_peer(control: Control, ends: Ends, on_report: OnReport, peer: int) -> None:
    """The links to one peer, also again to one that has come back."""
    handlers: dict[Kind, Callable[[Frame], None]] = (
        {Kind.REPORT: partial(on_report, peer)}
        if ends.rank == 0
        else {Kind.ALIVE: partial(note_ages, ends.lives)}
    )
    handlers[Kind.CHECKPOINT] = partial(control.hear, peer)
    capacity = REPORT_CAPACITY_BYTES + FRAME_SLACK_BYTES
    control.out[peer], control.incoming[peer] = ends.both(
        "control", peer, capacity, _CONTROL_AHEAD, handlers
    )


def _join_sums(job: Experiment, ends: Ends, control: Control | None) -> StageSums:
    """In the replica of rank 0 over the links of `control`, in others over a star of their own."""
    layout, rank, own = job.cluster, ends.rank, StageSums(ends.rank, ())
    for replica in range(layout.num_replicas):
        leaders, leader_of = layout.leaders(replica), layout.leader_of(replica)
        line = f"norms.{replica}"
        is_apart = 0 not in leaders and len(leaders) > 1
        if is_apart:
            ends.line(line, leaders)
        if layout.placement(rank).replica != replica:
            continue
        own = StageSums(rank, leader_of)
        if is_apart and rank in leaders:
            out, incoming = ends.star(line, leaders, FRAME_SLACK_BYTES, _CONTROL_AHEAD)
            overdue_s = max(layout.overdue_s(rank, peer, 1024) for peer in out)
            own = StageSums(rank, leader_of, out, incoming, overdue_s)
        elif 0 in leaders and control is not None:
            own = StageSums(rank, leader_of, control.out, control.incoming, control.overdue_s)
    return own

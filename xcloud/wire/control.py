"""The links of the small messages beside the boundaries, in stars around one rank: signs of life,
reports and checkpoints to and from rank 0, gradient norms to the leader of each replica.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from xcloud.cluster.frame import Frame, Kind
from xcloud.cluster.layout import ClusterLayout
from xcloud.parallel.control import REPORT_CAPACITY_BYTES, Control, StageSums, note_ages
from xcloud.wire.ends import FRAME_SLACK_BYTES, Ends, OnReport

_CONTROL_AHEAD = 8  # small messages under way on a control link: a norm, reports


def join_control(ends: Ends, layout: ClusterLayout, on_report: OnReport) -> Control:
    """Between rank 0 and each other rank. on_report: see wire."""
    rank, everyone = ends.rank, range(layout.num_ranks)
    ends.line("control", everyone)
    peers = everyone[1:] if rank == 0 else everyone[:1]
    overdue_s = max(layout.overdue_s(rank, peer, 1024) for peer in peers)
    control = Control(rank, {}, {}, overdue_s, ends.lives)
    for peer in peers:
        join_control_of(control, ends, layout, on_report, peer)
    return control


def join_control_of(
    control: Control,
    ends: Ends,
    layout: ClusterLayout,
    on_report: OnReport,
    peer: int,
) -> None:
    """The link to one peer, also again to one that has come back."""
    rank, capacity = ends.rank, REPORT_CAPACITY_BYTES + FRAME_SLACK_BYTES
    handlers: dict[Kind, Callable[[Frame], None]] = (
        {Kind.REPORT: partial(on_report, peer)}
        if rank == 0
        else {Kind.ALIVE: partial(note_ages, ends.lives)}
    )
    window = ends.window(_CONTROL_AHEAD, capacity)
    handlers[Kind.CHECKPOINT] = partial(control.hear, peer)
    overdue_s, advice = layout.overdue_s(rank, peer, capacity), layout.overdue_advice(rank, peer)
    control.out[peer] = ends.out("control", peer, capacity, window, overdue_s=overdue_s)
    control.incoming[peer] = ends.incoming(
        "control", peer, capacity, window, handlers, advice=advice
    )


def join_sums(ends: Ends, layout: ClusterLayout, replica: int, control: Control) -> StageSums:
    """In the replica of rank 0 over the links of `control`, in others over a star of their own."""
    stars = {
        r: layout.leaders(r) for r in range(layout.num_replicas) if 0 not in layout.leaders(r)
    }
    for number, leaders in stars.items():
        if len(leaders) > 1:
            ends.line(f"norms.{number}", leaders)
    rank, leader_of, leaders = ends.rank, layout.leader_of(replica), layout.leaders(replica)
    if replica not in stars:
        return StageSums(rank, leader_of, control.out, control.incoming, control.overdue_s)
    if rank not in leaders:
        return StageSums(rank, leader_of)
    peers = leaders[1:] if rank == leaders[0] else leaders[:1]
    line, window = f"norms.{replica}", ends.window(_CONTROL_AHEAD, FRAME_SLACK_BYTES)
    out = {peer: ends.out(line, peer, FRAME_SLACK_BYTES, window) for peer in peers}
    incoming = {
        peer: ends.incoming(
            line, peer, FRAME_SLACK_BYTES, window, advice=layout.overdue_advice(rank, peer)
        )
        for peer in peers
    }
    overdue_s = max((layout.overdue_s(rank, peer, 1024) for peer in peers), default=0.0)
    return StageSums(rank, leader_of, out, incoming, overdue_s)

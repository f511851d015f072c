"""The common part of the ranks of producers and of the consumer in a one-way job. Batches go from
every rank of a producer to every rank of the consumer, orders from the consumer's first rank to
every producer; reports, checkpoints and heartbeats through the star around rank 0 of any job.

The consumer must outlive any producer: there is no collective over both, only over the ranks of
one cloud, and each point-to-point link ends alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from xcloud.base.errors import FrameError, LinkError
from xcloud.comm.state import Stateful
from xcloud.comm.step_clock import StepClock, What
from xcloud.contracts.one_way import OneWayContext
from xcloud.features.one_way.job import OneWayExperiment
from xcloud.net.failure_detector import MOVED_CARRIES
from xcloud.net.frame import Frame, Kind
from xcloud.net.link import CONTROL, LinkName, LinkRecord
from xcloud.net.link_end import ReceivingEnd, SendingEnd
from xcloud.net.link_profile import LinkWindow
from xcloud.pipeline.control import REPORT_CARRIES, Control
from xcloud.pipeline.ends import FRAME_SLACK_BYTES, Ends, Handlers
from xcloud.pipeline.trainer import DivergenceGuard
from xcloud.pipeline.wiring import join_control
from xcloud.rank.export import exporting
from xcloud.rank.reports import MemoryMeter, bytes_of
from xcloud.rank.role import RankContext, Role
from xcloud.rank.saving import CHECKPOINT_CARRIES, Saver

_ORDER_BYTES = 12  # a number, a rank of the consumer, batches in all, int32 each
_MORE_AHEAD = 8  # messages on a link beside batches or orders for them

CARRIES = {
    Kind.BATCH: ("packed token ids and flags uint8 [N]",),
    Kind.READY: (),
    Kind.REPORT: REPORT_CARRIES,
    Kind.ORDER: ("number and receiver of each ordered batch, plan in all int32 [N, 3]",),
    Kind.STOP: (),
    Kind.ALIVE: MOVED_CARRIES,
    Kind.CHECKPOINT: CHECKPOINT_CARRIES,
}


class OneWayEnds(Ends):
    """The link ends of a rank in a job that ranks leave one by one.

    received: the messages that this rank received from another cloud, by sender, if
        `keeps_record`.
    """

    def __init__(self, *ends: Any, keeps_record: bool = False) -> None:
        super().__init__(*ends)
        self._keeps_record = keeps_record
        self.received: dict[int, LinkRecord] = {}

    def incoming(
        self,
        line: str,
        peer: int,
        capacity_bytes: int,
        window: LinkWindow,
        handlers: Handlers | None = None,
        *rest: Any,
        **named: Any,
    ) -> ReceivingEnd:
        if self._keeps_record and self.leaves_cloud(peer):
            link = LinkName(boundary=CONTROL, sender=peer, receiver=self.rank)
            here = self.layout.placement(self.rank).cloud
            record = self.received.setdefault(peer, LinkRecord(link, to=here))
            taken = handlers or {}
            handlers = {
                kind: noting(record, carries=CARRIES[kind], handler=t) for kind, t in taken.items()
            }
        return super().incoming(line, peer, capacity_bytes, window, handlers, *rest, **named)

    def await_close(self, peer: int) -> None:
        """Wait until a peer closes its link, while it sends heartbeats. Raises LinkTimeout."""
        for other, end in self._ends:
            if other == peer and isinstance(end, ReceivingEnd):
                end.close(self.layout.liveness.lost_after_s)

    def part_from(self, peers: Sequence[int], patience_s: float) -> set[int]:
        """Deliver everything to these peers and close the links, then wait for them to close
        theirs.

        patience_s: seconds; a peer that sends heartbeats is waited for. One that has not answered
            is not.
        Returns the peers that did not close their links.
        """
        theirs = [(peer, end) for peer, end in self._ends[::-1] if peer in peers]
        unheard = set[int]()
        # Sending ends of all peers first, so that all of them can end at the same time.
        for kind in (SendingEnd, ReceivingEnd):
            for peer, end in ((peer, end) for peer, end in theirs if isinstance(end, kind)):
                try:
                    # A peer that did not answer once is not waited for a second time.
                    end.close(0.0 if peer in unheard else patience_s)
                    if isinstance(end, ReceivingEnd) and not end.has_closed:
                        unheard.add(peer)
                except LinkError:
                    unheard.add(peer)
        for peer in peers:
            self.forget(peer)
        return unheard


def noting(
    record: LinkRecord, carries: Sequence[str], handler: Callable[[Frame], None]
) -> Callable[[Frame], None]:
    """Return the handler, with what it takes noted in `record`.

    What it refuses is not noted, nor a message with another number of tensors: it carries nothing
    that has a name.
    """

    def take(frame: Frame) -> None:
        kind = frame.key.kind
        if len(frame.parts) != len(carries):
            raise FrameError(
                f"a {kind.name.lower()} has {len(frame.parts)} parts, expected {len(carries)}"
            )
        # The handler first: what it refuses was not taken, and must not stand in the audit.
        handler(frame)
        record.note(kind, frame.parts, carries=carries, num_bytes=frame.num_bytes)

    return take


class OneWayRank(Role[OneWayExperiment]):
    """A rank of a one-way job.

    computing: the lock that is held by the one rank that computes where all are in one process.
    max_waiting: the number of batches ordered or waiting at one source, late ones too.
    lines: the capacity and window of each line.
    """

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        layout = self.job.cluster
        max_ahead = self.job.feed.max_ahead
        self.place = layout.placement(self.rank)
        # The consumer notes what it gets: a producer that is lost leaves no record of its own.
        self.ends = ends = OneWayEnds(
            context.transport, layout, context.run_dir, keeps_record=self.place.producer is None
        )
        self.computing = context.transport.computing
        groups = [
            ends.group(layout.ranks_in(cloud), device=context.device) for cloud in layout.clouds
        ]
        # Every rank makes the groups of all clouds, in one order, as torch asks; it is in one of
        # them.
        (self.group,) = (group for group in groups if group is not None)
        # Far above what an honest peer can have outstanding; it only bounds what a broken one
        # costs.
        self.max_waiting = 4 * max_ahead + 64
        batch_bytes = self.job.model.max_payload_bytes
        # As many orders in one message as can be open at once, levelling ones with them.
        order_bytes = 2 * _ORDER_BYTES * max_ahead
        self.lines = {}
        for line, num_bytes in {"batches": batch_bytes, "orders": order_bytes}.items():
            capacity = num_bytes + FRAME_SLACK_BYTES
            self.lines[line] = (
                capacity,
                ends.window(max_ahead + _MORE_AHEAD, frame_bytes=capacity),
            )
        self.control: Control = join_control(ends, on_report=context.on_report)
        self.peers = ends.detector.peers
        self.records = ends.records
        self.received = ends.received
        self.memory = MemoryMeter(context.device)
        training = self.job.training
        self.guard = DivergenceGuard(training.on_divergence, training.max_skips_in_a_row)

    def building(self, num_steps: int) -> OneWayContext:
        """Return the context in which the model builds this rank's part."""
        job = self.job
        place = self.place
        return OneWayContext(
            seed=job.seed,
            device=self.context.device,
            cache_dir=job.cache_path,
            report=self.reporter.remark,
            group_rank=place.group_rank,
            barrier=self.group.barrier,
            num_steps=num_steps,
            producers=job.cluster.producers,
            cloud=place.cloud,
            group_size=place.group_size,
        )

    @contextmanager
    def computing_in(self, clock: StepClock, what: What) -> Iterator[None]:
        """Wait for this rank's turn to compute, and hold it while the block lasts."""
        with ExitStack() as stack:
            with clock.during("wait"):
                stack.enter_context(self.computing)
            with clock.during(what):
                yield

    def export(self, write: Callable[[Path], None]) -> None:
        """Write what was trained, in the first rank of the cloud, if the run is finished."""
        if self.group.leads and not self.is_stopped:
            with exporting(self.context.run_dir), self.computing:
                write(self.context.run_dir)

    def report_memory(self, module: nn.Module | None, part: Stateful) -> None:
        # Contracts of one-way parts have no optimizer to ask, but their states name the moments.
        kept = [value for name, value in part.state_dict().items() if "moments." in name]
        moments = bytes_of(value for value in kept if isinstance(value, Tensor))
        modules = [] if module is None else [module]
        self.reporter.event("memory", **self.memory.describe(modules, moments))

    def leave(self, checkpoints: Saver) -> None:
        """End this rank, which has nothing more to do.

        Rank 0 says what counts as a checkpoint before it closes its links.
        """
        # Rank 0 closes last: until then its verdict on the last checkpoint may come.
        if self.rank != 0:
            self.ends.await_close(0)
        checkpoints.close(is_finished=not self.is_stopped)
        self.reporter.flush()
        self.ends.close()

"""Joins a rank of a one-way job: batches go from every rank of a producer to every rank of the
consumer, orders from the consumer's first rank to every producer. Reports, checkpoints and signs
of life go through the same star around rank 0 as in any job.

The consumer must outlive any producer: there is no collective over both, only over the ranks of
one cloud, and each point-to-point link ends alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from xcloud.base.errors import LinkClosed, LinkError, LinkTimeout
from xcloud.cluster.frame import Frame, Kind, MessageKey
from xcloud.cluster.link_end import SendingEnd
from xcloud.comm.state import Stateful
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way_parts import OneWayContext
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.control import CHECKPOINT_CARRIES, REPORT_CARRIES, Control
from xcloud.parallel.one_way.inbox import Inbox, OrderBook
from xcloud.parallel.one_way.plan import Order, Source
from xcloud.rank.role import RankContext, Role
from xcloud.record.rank_state import failure_of
from xcloud.survive.checkpointing import Checkpointer, CheckpointMessage
from xcloud.training.memory_meter import MemoryMeter, bytes_of
from xcloud.training.trainer import DivergenceGuard
from xcloud.wire.ends import FRAME_SLACK_BYTES, Ends
from xcloud.wire.wiring import join_control

_ORDER_BYTES = 12  # a number, a rank of the consumer, batches in all, int32 each
_MORE_AHEAD = 8  # messages beside batches and their orders

CARRIES = {
    Kind.BATCH: ("packed token ids and flags uint8 [N]",),
    Kind.READY: (),
    Kind.REPORT: REPORT_CARRIES,
    Kind.ORDER: ("number and receiver of each ordered batch, plan in all int32 [N, 3]",),
    Kind.STOP: (),
    Kind.ALIVE: (),
    Kind.CHECKPOINT: CHECKPOINT_CARRIES,
}
_NOT_BATCHES = tuple(kind for kind in CARRIES if kind is not Kind.BATCH)


class OneWayRank(Role[OneWayExperiment]):
    """What the ranks of producers and of the consumer share. computing: held by the one rank that
    computes where all are in one process."""

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        layout = self.job.cluster
        self.place = layout.placement(self.rank)
        # The consumer notes what it gets: a producer that is lost leaves no record of its own.
        self.ends = Ends(
            context.transport, layout, context.run_dir,
            received=CARRIES if self.place.producer is None else None,
        )  # fmt: skip
        self.computing = self.ends.computing
        groups = [
            self.ends.group(layout.ranks_in(cloud), context.device) for cloud in layout.clouds
        ]
        (self.group,) = (group for group in groups if group is not None)
        for line in ("batches", "orders"):
            self.ends.line(line, range(layout.num_ranks))
        self.control: Control = join_control(self.ends, context.on_report)
        self.lives, self.records = self.ends.lives, self.ends.records
        self.received = self.ends.received
        self.memory = MemoryMeter(context.device)

    def divergence_guard(self) -> DivergenceGuard:
        training = self.job.training
        return DivergenceGuard(training.on_divergence, training.max_skips_in_a_row)

    def building(self, num_steps: int) -> OneWayContext:
        return OneWayContext(
            self.job.seed, self.context.device, self.job.cache_path, self.group.barrier,
            self.reporter.note, num_steps, self.job.cluster.producers,
        )  # fmt: skip

    @contextmanager
    def computing_in(self, clock: StepClock) -> Iterator[None]:
        """Once it is this rank's turn, which it waits for."""
        with ExitStack() as stack:
            with clock.during("wait"):
                stack.enter_context(self.computing)
            yield

    def report_memory(self, module: nn.Module | None, part: Stateful) -> None:
        moments = [
            value
            for name, value in part.state_dict().items()
            if "moments." in name and isinstance(value, Tensor)
        ]
        modules = [] if module is None else [module]
        self.reporter.event("memory", **self.memory.describe(modules, bytes_of(moments)))

    def leave(self, checkpoints: Checkpointer) -> None:
        """Once this rank has nothing more to do. What counts as a checkpoint rank 0 says before
        its goodbye."""
        if self.rank != 0:
            self.ends.await_goodbye(0)
        checkpoints.close()
        if not self.is_stopped:
            checkpoints.keep_newest()
        self.reporter.flush()
        self.ends.close()


@dataclass
class ProducerLinks:
    """outs: to each rank of the consumer."""

    outs: list[SendingEnd]
    orders: OrderBook

    def say_ready(self) -> None:
        for out in self.outs:
            out.send(MessageKey(Kind.READY), (), CARRIES[Kind.READY])

    def send(self, consumer: int, number: int, payload: Tensor) -> None:
        key = MessageKey(Kind.BATCH, number)
        self.outs[consumer].send(key, (payload,), CARRIES[Kind.BATCH])


@dataclass
class ConsumerLinks:
    """out: to the producers' ranks (first rank only)."""

    job: OneWayExperiment
    ends: Ends
    inbox: Inbox
    out: dict[Source, SendingEnd]
    is_fed: bool = True  # more batches are wanted

    def needs_one_of(self, lost: frozenset[int]) -> bool:
        """Of producers that are silent: any of them, or the last ones, as feed.on_slow says."""
        layout, is_silent = self.job.cluster, []
        for producer, cloud in enumerate(layout.producers) if self.is_fed else ():
            if not self.inbox.has_ended(producer):
                is_silent.append(not lost.isdisjoint(layout.ranks_in(cloud)))
        if self.job.feed.on_slow == "wait":
            return any(is_silent)
        return bool(is_silent) and all(is_silent)

    def why_gone(self, p: int) -> str:
        """In the producer's own words where it has left them on this machine."""
        ranks = self.job.cluster.ranks_in(self.job.cluster.producers[p])
        failures = (failure_of(self.ends.run_dir, rank) for rank in ranks)
        own = [str(f["message"]) for f in failures if f is not None and not f["peer_lost"]]
        return (own[0] if own else self.inbox.end_of(p)) or "lost by another rank"

    def part_from_producers(self) -> dict[str, str]:
        """By cloud, why one did not say goodbye."""
        layout = self.job.cluster
        patience_s = max(layout.liveness.lost_after_s, self.job.feed.slow_after_s)
        ranks = range(layout.num_consumers, layout.num_ranks)
        unheard = self.ends.part_from(ranks, patience_s)
        return {
            cloud: self.inbox.end_of(p) or unheard[rank]
            for p, cloud in enumerate(layout.producers)
            for rank in reversed(layout.ranks_in(cloud))
            if rank in unheard
        }

    def send_orders(self, orders: list[Order]) -> None:
        """A producer that is gone gets nothing; its end is found elsewhere."""
        by_source: dict[Source, list[list[int]]] = {}
        for order in orders:
            row = [order.number, order.consumer, order.num_planned]
            by_source.setdefault(order.source, []).append(row)
        for source, rows in by_source.items():
            self._send(source, Kind.ORDER, torch.tensor(rows, dtype=torch.int32))

    def send_save(self, step: int, is_last: bool) -> None:
        """After all that was ordered so far."""
        code = CheckpointMessage.SAVE_AND_STOP if is_last else CheckpointMessage.SAVE
        for source in self.out:
            self._send(source, Kind.CHECKPOINT, torch.tensor([code], dtype=torch.uint8), step=step)

    def send_stop(self) -> None:
        """No more batches are wanted."""
        self.is_fed = False
        for source in self.out:
            self._send(source, Kind.STOP)

    def _send(self, source: Source, kind: Kind, *parts: Tensor, step: int = 0) -> None:
        if self.inbox.has_ended(source.producer):
            return
        try:
            self.out[source].send(MessageKey(kind, step), parts, CARRIES[kind])
        except (LinkClosed, LinkTimeout) as error:
            self.inbox.set_ended(source, str(error))


def producer_links(job: OneWayExperiment, ends: Ends) -> ProducerLinks:
    layout, size = job.cluster, _order_bytes(job)
    most_number = 2 * job.max_steps * job.training.batches_per_step + 4096  # late ones, made twice
    orders = OrderBook(ends.lives[0], layout.num_consumers, _most_waiting(job), most_number)
    capacity = job.model.max_payload_bytes + FRAME_SLACK_BYTES
    window = ends.window(_most_ahead(job), capacity)
    outs = [
        ends.out("batches", consumer, capacity, window) for consumer in range(layout.num_consumers)
    ]
    handlers: dict[Kind, Callable[[Frame], None]] = {
        Kind.ORDER: orders.take_orders, Kind.STOP: orders.take_stop,
        Kind.CHECKPOINT: orders.take_save,
    }  # fmt: skip
    window = ends.window(_most_ahead(job), size)
    ends.incoming("orders", 0, size, window, handlers, on_end=orders.take_end)
    return ProducerLinks(outs, orders)


def consumer_links(job: OneWayExperiment, ends: Ends) -> ConsumerLinks:
    sources, size = sources_of(job), _order_bytes(job)
    lives = {source: ends.lives[rank] for source, rank in sources.items()}
    inbox = Inbox(list(sources), job.model.max_payload_bytes, lives, _most_waiting(job))
    capacity = job.model.max_payload_bytes + FRAME_SLACK_BYTES
    for source, rank in sources.items():
        handlers = {
            Kind.BATCH: partial(inbox.put, source),
            Kind.READY: partial(_ready, inbox, source),
        }
        ends.incoming(
            "batches", rank, capacity, ends.window(_most_ahead(job), capacity), handlers,
            on_end=partial(_ended, inbox, source),
        )  # fmt: skip
    window = ends.window(_most_ahead(job), size)
    leads = ends.rank == 0
    out = {s: ends.out("orders", r, size, window) for s, r in sources.items() if leads}
    return ConsumerLinks(job, ends, inbox, out)


def sources_of(job: OneWayExperiment) -> dict[Source, int]:
    """Every rank that feeds, as the plan names it, with its number in the job."""
    return {
        Source(producer, group_rank): rank
        for producer, cloud in enumerate(job.cluster.producers)
        for group_rank, rank in enumerate(job.cluster.ranks_in(cloud))
    }


def _ready(inbox: Inbox, source: Source, frame: Frame) -> None:
    inbox.set_ready(source)


def _ended(inbox: Inbox, source: Source, reason: LinkError) -> None:
    inbox.set_ended(source, str(reason))


def _most_waiting(job: OneWayExperiment) -> int:
    """Batches ordered or waiting at one source: late ones too, which lost their slot."""
    return 4 * job.feed.most_ahead + 64


def _most_ahead(job: OneWayExperiment) -> int:
    """Messages on a link: batches or orders for them, and a few others."""
    return job.feed.most_ahead + _MORE_AHEAD


def _order_bytes(job: OneWayExperiment) -> int:
    return FRAME_SLACK_BYTES + 2 * _ORDER_BYTES * job.feed.most_ahead


def other_bytes(rank: OneWayRank) -> int:
    """What has crossed between clouds besides batches: orders, reports and the like."""
    both = (*rank.records, *rank.received.values())
    return sum(record.bytes_of[kind] for record in both for kind in _NOT_BATCHES)

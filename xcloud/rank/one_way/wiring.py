"""Joins the ranks of a one-way job: batches go from every rank of a producer to every rank of the
consumer, orders from the consumer's first rank to every producer, and nothing else.

The consumer must outlive any producer: there is no collective over both, only over the ranks of
one cloud, and each point-to-point link ends alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.cluster.frame import Frame, Kind, MessageKey
from xcloud.cluster.link import LinkRecord
from xcloud.cluster.link_end import ReceivingEnd, SendingEnd
from xcloud.cluster.link_profile import LinkWindow
from xcloud.cluster.one_way_layout import OneWayLayout
from xcloud.cluster.transport import Transport
from xcloud.parallel.control import (
    REPORT_CAPACITY_BYTES,
    REPORT_CARRIES,
    code_of,
    send_report,
)
from xcloud.parallel.one_way.inbox import Inbox
from xcloud.parallel.one_way.orders import OrderBook
from xcloud.parallel.one_way.plan import Order, Source
from xcloud.parallel.rank_group import RankGroup
from xcloud.survive.checkpointing import News
from xcloud.wire.ends import FRAME_SLACK_BYTES, Ends, OnReport

_ORDER_BYTES = 12  # a number, a rank of the consumer, batches in all, int32 each
_REPORTS_AHEAD = 8  # and other small messages that are no batches and no orders

_CARRIES = {
    Kind.BATCH: ("packed token ids and flags uint8 [N]",),
    Kind.READY: (),
    Kind.REPORT: REPORT_CARRIES,
    Kind.ORDER: ("number and receiver of each ordered batch, plan in all int32 [N, 3]",),
    Kind.STOP: (),
    Kind.ALIVE: (),
    Kind.CHECKPOINT: ("how far a rank is with its part of a checkpoint uint8",),
    Kind.GOODBYE: (),
}

_OTHER = (Kind.READY, Kind.REPORT, Kind.ORDER, Kind.STOP, Kind.ALIVE, Kind.CHECKPOINT)


@dataclass
class ProducerWiring:
    """What a producer's rank holds."""

    cloud: RankGroup
    outs: list[SendingEnd]
    ins: list[ReceivingEnd]
    to_recorder: SendingEnd
    orders: OrderBook
    records: list[LinkRecord]  # of what leaves the cloud
    _listener: Callable[[int, int, int], None] | None = None

    def report(self, lines: bytes) -> None:
        send_report(self.to_recorder, lines)

    @property
    def peers(self) -> list[int]:
        return [0]

    def tell(self, peer: int, step: int, code: int) -> None:
        send_news(self.to_recorder, step, code)

    def hear(self, frame: Frame) -> None:
        """When to save comes in turn with the orders, anything else at once."""
        code = News(code_of(frame, 0))
        if code in (News.SAVE, News.SAVE_AND_STOP):
            self.orders.take_save(frame.key.step, code)
        else:
            assert self._listener is not None, "a checkpoint before the first step"
            self._listener(0, frame.key.step, code)

    def listen(self, take: Callable[[int, int, int], None]) -> None:
        self._listener = take

    def say_ready(self) -> None:
        for out in self.outs:
            out.send(MessageKey(Kind.READY), (), _CARRIES[Kind.READY])

    def send(self, consumer: int, number: int, payload: Tensor) -> None:
        key = MessageKey(Kind.BATCH, number)
        self.outs[consumer].send(key, (payload,), _CARRIES[Kind.BATCH])

    def say_alive(self) -> None:
        """Once no more is wanted: the consumer waits for the end of a producer that lives."""
        if self.orders.is_stopped:
            for out in self.outs:
                out.say_alive()

    def close(self, timeout_s: float) -> None:
        """Deliver everything. The consumer has said goodbye with its stop; the link ends at once
        if it is gone."""
        for out in self.outs:
            out.close(timeout_s)
        for incoming in self.ins:
            incoming.close(timeout_s)


@dataclass
class ConsumerWiring:
    """What a rank of the consumer holds. out: to the producers' ranks (first rank only). records:
    of what leaves the cloud. received: by rank of the producer, as a lost one writes no record.
    """

    cloud: RankGroup
    inbox: Inbox
    records: list[LinkRecord] = field(default_factory=list)
    received: dict[int, LinkRecord] = field(default_factory=dict)
    out: dict[Source, SendingEnd] = field(default_factory=dict)
    ins: dict[Source, ReceivingEnd] = field(default_factory=dict)
    peers_out: list[SendingEnd] = field(default_factory=list)
    peers_in: list[ReceivingEnd] = field(default_factory=list)
    rank_of: dict[Source, int] = field(default_factory=dict)
    _listener: Callable[[int, int, int], None] | None = None
    agreed_step: int = 0  # first rank: what the others of the consumer have not been told yet
    lost: set[int] = field(default_factory=set)  # producers that are gone, as the plan knows
    is_fed: bool = True  # more batches are wanted

    @property
    def peers(self) -> list[int]:
        """First rank: the others of the consumer, and of the producers that the plan counts on."""
        if self.peers_out:
            return [0]
        fed = [rank for source, rank in self.rank_of.items() if source.producer not in self.lost]
        return [*range(1, self.cloud.num_lanes), *fed]

    def tell(self, peer: int, step: int, code: int) -> None:
        """The other ranks of the consumer are told with the sums of the next step."""
        if self.peers_out:
            send_news(self.peers_out[0], step, code)
        elif peer < self.cloud.num_lanes:
            self.agreed_step = step if code == News.AGREED else self.agreed_step
        else:
            (source,) = (source for source, rank in self.rank_of.items() if rank == peer)
            send_news(self.out[source], step, code)

    def listen(self, take: Callable[[int, int, int], None]) -> None:
        self._listener = take

    def hear(self, peer: int, step: int, code: int) -> None:
        if self._listener is None:
            raise FrameError(f"rank {peer} tells of a checkpoint before the first step")
        self._listener(peer, step, code)

    def send_save(self, step: int, code: int) -> None:
        """After all that was ordered so far. First rank only."""
        for source in self.out:
            part = torch.tensor([code], dtype=torch.uint8)
            self._send(source, Kind.CHECKPOINT, part, step=step)

    @property
    def other_bytes(self) -> int:
        """What has crossed between clouds besides batches: orders, reports and the like."""
        both = (*self.records, *self.received.values())
        return sum(record.bytes_of[kind] for record in both for kind in _OTHER)

    def report(self, lines: bytes) -> None:
        """Of a rank that is not the first."""
        send_report(self.peers_out[0], lines)

    def send_orders(self, orders: list[Order]) -> None:
        """First rank only. A producer that is gone hears nothing; its end is found elsewhere."""
        by_source: dict[Source, list[list[int]]] = {}
        for order in orders:
            row = [order.number, order.consumer, order.num_planned]
            by_source.setdefault(order.source, []).append(row)
        for source, rows in by_source.items():
            self._send(source, Kind.ORDER, torch.tensor(rows, dtype=torch.int32))

    def send_stop(self) -> None:
        """No more batches are wanted. In every rank; all but the first have nobody to tell."""
        self.is_fed = False
        for source in self.out:
            self._send(source, Kind.STOP)

    def _send(self, source: Source, kind: Kind, *parts: Tensor, step: int = 0) -> None:
        if source not in self.out or self.inbox.end_of(source.producer) is not None:
            return
        try:
            self.out[source].send(MessageKey(kind, step), parts, _CARRIES[kind])
        except (LinkClosed, LinkTimeout) as error:
            self.inbox.set_ended(source, str(error))

    def close_producers(self, timeout_s: float) -> dict[int, str]:
        """Say goodbye to every producer and hear theirs, which come once they have exported: of
        one that gives signs of life however late. Returns why there was none, by producer: not an
        error."""
        unheard: dict[int, str] = {}
        for source, out in sorted(self.out.items()):
            try:
                out.close(timeout_s)
            except LinkError as error:
                unheard.setdefault(source.producer, str(error))
        for source, incoming in sorted(self.ins.items()):
            try:
                incoming.close(timeout_s)
                if not incoming.said_goodbye:
                    reason = self.inbox.end_of(source.producer) or "its link has ended"
                    unheard.setdefault(source.producer, reason)
            except LinkError as error:
                unheard.setdefault(source.producer, str(error))
        return unheard

    def close(self, timeout_s: float) -> None:
        """The links between the ranks of the consumer, when all have come here."""
        self.cloud.barrier()
        for out in self.peers_out:
            out.close(timeout_s)
        for incoming in self.peers_in:
            incoming.close(timeout_s)


def send_news(link: SendingEnd, step: int, code: int) -> None:
    """Of the checkpoint after a step."""
    part = torch.tensor([code], dtype=torch.uint8)
    link.send(MessageKey(Kind.CHECKPOINT, step), (part,), _CARRIES[Kind.CHECKPOINT])


def sources_of(layout: OneWayLayout) -> dict[Source, int]:
    """Every rank that feeds, as the plan names it, with its number in the job."""
    return {
        Source(producer, lane): rank
        for producer, cloud in enumerate(layout.producers)
        for lane, rank in enumerate(layout.ranks_in(cloud))
    }


class OneWayWirer:
    """Builds one rank's ends. Every rank does so at the same time with the same arguments."""

    def __init__(
        self,
        transport: Transport,
        layout: OneWayLayout,
        max_payload_bytes: int,
        run_ahead: int,
        run_dir: Path,
        most_batches: int = 1 << 30,
    ) -> None:
        """most_batches: of one rank of a producer in all."""
        self.rank, self.layout, self.most_batches = transport.rank, layout, most_batches
        self.max_payload_bytes, self.run_ahead = max_payload_bytes, run_ahead
        self._ends = Ends(transport, layout, run_dir)
        self.lives = self._ends.lives
        groups = [self._ends.group(layout.ranks_in(cloud)) for cloud in layout.clouds]
        (self._own,) = (group for group in groups if group is not None)
        for line in ("batches", "orders", "inside"):
            self._ends.line(line, range(layout.num_ranks))

    def producer(self) -> ProducerWiring:
        orders = OrderBook(
            self.lives[0], self.layout.num_consumers, self._most_waiting, self.most_batches
        )
        outs = [
            self._out("batches", peer, self._to_consumer_bytes(peer))
            for peer in range(self.layout.num_consumers)
        ]
        wiring = ProducerWiring(self._own, outs, [], outs[0], orders, self._ends.records)
        handlers: dict[Kind, Callable[[Frame], None]] = {
            Kind.ORDER: orders.take_orders, Kind.STOP: orders.take_stop,
            Kind.CHECKPOINT: wiring.hear,
        }  # fmt: skip
        size = self._order_bytes
        incoming = self._ends.incoming(
            "orders", 0, size, self._window(size), handlers, on_end=orders.take_end
        )
        wiring.ins.append(incoming)
        return wiring

    def consumer(self, on_report: OnReport) -> ConsumerWiring:
        sources = sources_of(self.layout)
        lives = {source: self.lives[rank] for source, rank in sources.items()}
        inbox = Inbox(list(sources), self.max_payload_bytes, lives, self._most_waiting)
        wiring = ConsumerWiring(self._own, inbox, self._ends.records, rank_of=sources)
        for source, rank in sources.items():
            if self.layout.crosses_clouds:
                wiring.received[rank] = LinkRecord(self.layout.consumer, self.rank, None)
            handlers = {
                kind: partial(_arrived, wiring, source, wiring.received.get(rank), on_report)
                for kind in (Kind.BATCH, Kind.READY, Kind.REPORT, Kind.ALIVE, Kind.CHECKPOINT)
            }
            capacity = self._to_consumer_bytes(self.rank)
            wiring.ins[source] = self._ends.incoming(
                "batches", rank, capacity, self._window(capacity), handlers,
                on_end=partial(_ended, inbox, source),
            )  # fmt: skip
            if self.rank == 0:
                wiring.out[source] = self._out("orders", rank, self._order_bytes)
        capacity = REPORT_CAPACITY_BYTES + FRAME_SLACK_BYTES
        if self.rank == 0:
            window = self._window(capacity)
            for peer in range(1, self.layout.num_consumers):
                heard: dict[Kind, Callable[[Frame], None]] = {
                    Kind.REPORT: partial(on_report, peer),
                    Kind.CHECKPOINT: partial(_news, wiring, peer)
                }  # fmt: skip
                end = self._ends.incoming("inside", peer, capacity, window, heard)
                wiring.peers_in.append(end)
        else:
            wiring.peers_out = [self._out("inside", 0, capacity)]
        return wiring

    @property
    def _most_waiting(self) -> int:
        """Batches ordered or waiting at one source: late ones too, which lost their slot."""
        return 4 * self.run_ahead + 64

    @property
    def _order_bytes(self) -> int:
        return FRAME_SLACK_BYTES + 2 * _ORDER_BYTES * self.run_ahead

    def _to_consumer_bytes(self, consumer: int) -> int:
        longest = max(self.max_payload_bytes, REPORT_CAPACITY_BYTES if consumer == 0 else 0)
        return longest + FRAME_SLACK_BYTES

    def _out(self, line: str, peer: int, capacity: int) -> SendingEnd:
        return self._ends.out(line, peer, capacity, self._window(capacity))

    def _window(self, capacity: int) -> LinkWindow:
        """Batches ahead, or as many messages with orders for them, and a few reports."""
        under_way = self.run_ahead + _REPORTS_AHEAD
        return self._ends.window(under_way, capacity)


def _arrived(
    wiring: ConsumerWiring,
    source: Source,
    record: LinkRecord | None,
    on_report: OnReport,
    frame: Frame,
) -> None:
    """In the link's thread. record: None where nothing crosses clouds. Raises FrameError for what
    a producer may not send; that is not noted, as it carries nothing that has a name."""
    kind = frame.key.kind
    if len(frame.parts) != len(_CARRIES[kind]):
        raise FrameError(
            f"a {kind.name.lower()} of producer {source.producer} (rank {source.lane}) has "
            f"{len(frame.parts)} parts, expected {len(_CARRIES[kind])}"
        )
    if kind is Kind.BATCH:
        wiring.inbox.put(source, frame)
    elif kind is Kind.READY:
        wiring.inbox.set_ready(source)
    elif kind is Kind.REPORT:
        on_report(wiring.rank_of[source], frame)
    elif kind is Kind.CHECKPOINT:
        _news(wiring, wiring.rank_of[source], frame)
    if record is not None:
        record.note(kind, frame.parts, _CARRIES[kind], frame.num_bytes)


def _news(wiring: ConsumerWiring, rank: int, frame: Frame) -> None:
    """In the link's thread."""
    wiring.hear(rank, frame.key.step, code_of(frame, rank))


def _ended(inbox: Inbox, source: Source, reason: LinkError) -> None:
    inbox.set_ended(source, str(reason))

"""Who brings batches to a rank of the consumer: links (wiring.py), or producers in its process."""

from __future__ import annotations

from typing import Protocol

from xcloud.cluster.frame import Frame, Kind, MessageKey
from xcloud.parallel.one_way.inbox import Inbox
from xcloud.parallel.one_way.plan import Order, Source
from xcloud.parallel.rank_group import RankGroup
from xcloud.rank.one_way.producer import ProducerRun


class Feeding(Protocol):
    """Whatever brings batches: links to other ranks, or the producers in this process."""

    cloud: RankGroup
    inbox: Inbox
    agreed_step: int
    """First rank: a checkpoint that the others of the consumer have not heard of yet."""
    lost: set[int]
    """Producers that are gone, once the plan knows: until then a checkpoint needs their parts."""

    @property
    def other_bytes(self) -> int: ...

    def send_orders(self, orders: list[Order]) -> None: ...

    def send_save(self, step: int, code: int) -> None: ...

    def send_stop(self) -> None: ...


class LocalFeeding:
    """Producers in the consumer's own process: an order is carried out at once."""

    def __init__(self, producers: list[ProducerRun], max_payload_bytes: int) -> None:
        sources = [Source(index, 0) for index in range(len(producers))]
        self.cloud = RankGroup.alone()
        self.inbox = Inbox(sources, max_payload_bytes)
        self.other_bytes = self.agreed_step = 0  # nothing crosses
        self.lost: set[int] = set()
        self._producers = producers
        for source in sources:
            self.inbox.set_ready(source)

    def send_orders(self, orders: list[Order]) -> None:
        for order in orders:
            producer = self._producers[order.source.producer]
            producer.replan(order.num_planned)
            fed = producer.produce(order.number)
            producer.learn(order.number, fed)
            key = MessageKey(Kind.BATCH, order.number)
            frame = Frame(key, (fed.payload.cpu(),), order.number, 0.0, fed.payload.numel())
            self.inbox.put(order.source, frame)

    def send_save(self, step: int, code: int) -> None:
        """They are saved with the consumer."""

    def send_stop(self) -> None:
        """They wait for nothing."""

"""Batches that have come to one rank of the consumer, and what is known of the producers (Inbox);
which of them it takes in a step, as planned, and what it reports (Intake)."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xcloud.base.errors import FrameError, LinkError
from xcloud.comm.state import State as Saved
from xcloud.comm.state import StatefulTree
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way import COUNTS
from xcloud.features.one_way.feed import ConsumptionPlan, Order, Presence, Round, packed, unpacked
from xcloud.features.one_way.job import OneWayExperiment
from xcloud.features.one_way.layout import OneWayLayout
from xcloud.net.frame import Frame
from xcloud.net.link_profile import LinkProfile
from xcloud.net.peer import Peer
from xcloud.record.events import add_to
from xcloud.record.reporter import Reporter

POLL_S = 0.2


class Arrived(NamedTuple):
    """A batch that has come.

    num_bytes: the bytes on the wire, header included.
    """

    producer: int
    source: int
    number: int
    payload: Tensor
    num_bytes: int


@dataclass
class _Box:
    """The batches and messages of one source.

    due: the numbers that were ordered and have not come.
    ended: the reason why none will come.
    """

    producer: int
    name: str
    peer: Peer
    waiting: deque[Arrived] = field(default_factory=deque)
    due: deque[int] = field(default_factory=deque)
    last_number: int = 0
    heard_at_s: float = 0.0
    is_ready: bool = False
    ended: str = ""


class Inbox(StatefulTree):
    """The batches that have come to one rank. Links fill it from their threads; one thread takes
    from it.

    peers: the record of each rank; `wait` notes there what it waits for.
    max_waiting: the largest number of waiting batches of a source, which sends none that was not
        ordered.

    Its state has the batches that are here, once all that were ordered have come; a resumed run is
    connected anew.
    """

    own_names = ("batches", "payloads")

    def __init__(
        self,
        layout: OneWayLayout,
        max_payload_bytes: int,
        peers: Mapping[int, Peer],
        max_waiting: int = 1 << 14,
    ) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._max_waiting = max_waiting
        self._changed = threading.Condition(threading.RLock())
        self._boxes = []
        for source, p in enumerate(layout.producer_of):
            rank = layout.num_consumers + source
            place = layout.placement(rank)
            name = f"producer {place.cloud!r} (its rank {place.group_rank})"
            self._boxes.append(_Box(producer=p, name=name, peer=peers[rank]))
        self._of = [[self._boxes[source] for source in sources] for sources in layout.sources]

    # from the links
    def put(self, source: int, frame: Frame) -> None:
        """Take a batch. Raises FrameError for anything but one vector of bytes in the order of its
        numbers."""
        number = frame.key.step
        parts = frame.parts
        box = self._boxes[source]
        name = f"batch {number} of {box.name}"
        with self._changed:
            if len(parts) != 1 or parts[0].dtype != torch.uint8 or parts[0].dim() != 1:
                found = [(p.dtype, tuple(p.shape)) for p in parts]
                raise FrameError(f"{name} is not one vector of bytes but {found}")
            if len(parts[0]) > self._max_payload_bytes or number <= box.last_number:
                raise FrameError(
                    f"{name} has {len(parts[0])} bytes, at most {self._max_payload_bytes} were "
                    f"promised, and came after number {box.last_number}"
                )
            # An order may be known here later than its batch comes, but not without end.
            due = box.due
            num = len(box.waiting)
            if (due and number < due[-1] and number not in due) or num >= self._max_waiting:
                raise FrameError(
                    f"{name} was not ordered: due are {list(due)[:8]}, and {num} wait here"
                )
            # A number that was passed over never comes: numbers only rise (checked above).
            while due and due[0] <= number:
                due.popleft()
            box.last_number = number
            box.heard_at_s = time.monotonic()
            box.waiting.append(
                Arrived(
                    producer=box.producer,
                    source=source,
                    number=number,
                    payload=parts[0],
                    num_bytes=frame.num_bytes,
                )
            )
            self._changed.notify_all()

    def set_ready(self, source: int, frame: Frame | None = None) -> None:
        with self._changed:
            self._boxes[source].is_ready = True
            self._changed.notify_all()

    def set_ended(self, source: int, reason: LinkError | str) -> None:
        with self._changed:
            self._boxes[source].ended = self._boxes[source].ended or str(reason)
            self._changed.notify_all()

    # from the plan
    def expect(self, orders: Sequence[Order]) -> None:
        """Note that these are on their way to this rank: from now on silence counts."""
        with self._changed:
            for order in orders:
                box = self._boxes[order.source]
                if order.number > box.last_number:
                    # Silence counts from the first order on: before it there was nothing to send.
                    if not box.due:
                        box.heard_at_s = time.monotonic()
                    box.due.append(order.number)

    def readmit(self, producer: int) -> None:
        """Restart a producer that was lost with what is ordered from now on."""
        for box in self._of[producer]:
            box.waiting.clear()
            # What was ordered before the loss is not waited for (ConsumptionPlan.readmit_lost).
            box.due.clear()

    # for the training loop
    def is_ready(self, producer: int) -> bool:
        """Return whether all ranks of a producer have said so, and nothing that was ordered is
        missing."""
        return all(box.is_ready and not box.ended and not box.due for box in self._of[producer])

    def was_ready(self, producer: int) -> bool:
        """Return whether a producer was ever ready."""
        return all(box.is_ready for box in self._of[producer])

    def end_of(self, producer: int) -> str:
        """Return why nothing more can come from a producer; empty while something can.

        A producer ends with the first of its ranks.
        """
        return next((box.ended for box in self._of[producer] if box.ended), "")

    def silent_s(self, producer: int) -> float:
        """Return how long a producer has been silent although something was ordered; 0 if nothing
        is due."""
        heard = [box.heard_at_s for box in self._of[producer] if box.due]
        return time.monotonic() - min(heard) if heard else 0.0

    @property
    def due(self) -> list[int]:
        """The producers that owe something that was ordered, and may still send it."""
        owing = sorted({box.producer for box in self._boxes if box.due})
        return [p for p in owing if not self.end_of(p)]

    @property
    def filled(self) -> list[int]:
        """The sources of which there are batches."""
        return [source for source, box in enumerate(self._boxes) if box.waiting]

    def next_of(self, sources: Iterable[int]) -> Arrived | None:
        """Return the unused batch with the lowest number of any of these; None: there is none."""
        heads = [self._boxes[source].waiting for source in sources if source in self.filled]
        if heads:
            return min(heads, key=lambda waiting: waiting[0].number).popleft()
        return None

    def wait(self, timeout_s: float, until: Callable[[], bool]) -> None:
        """Block until something has changed such that `until()` holds, or the time is over."""
        # `status` shows what is awaited: batches that are due; if none is, the readiness of those
        # not ready.
        with self._changed:
            there = [box for box in self._boxes if not box.ended]
            awaited = [(box.peer, f"batch {box.due[0]}") for box in there if box.due]
            unready = (box.peer for box in there if not box.is_ready)
            awaited = awaited or [(peer, "the message that it is ready") for peer in unready]
        with ExitStack() as stack:
            for peer, message in awaited:
                stack.enter_context(peer.awaiting(message))
            with self._changed:
                self._changed.wait_for(until, timeout_s)

    def own(self) -> Saved:
        with self._changed:
            waiting = [one for box in self._boxes for one in box.waiting]
            rows = [(a.source, a.number, len(a.payload), a.num_bytes) for a in waiting]
            payloads = [torch.empty(0, dtype=torch.uint8), *(a.payload for a in waiting)]
            # Payloads of different lengths become one vector of bytes, with a table of what is
            # where.
            batches = packed([[box.last_number for box in self._boxes], rows])
            return {"batches": batches, "payloads": torch.cat(payloads)}

    def take(self, own: Saved) -> None:
        """Take over a state before anything arrives. Raises ValueError for other sources."""
        last_numbers, rows = unpacked(own, name="batches")
        pieces = torch.split(torch.as_tensor(own["payloads"]), [size for _, _, size, _ in rows])
        for box, last_number in zip(self._boxes, last_numbers, strict=True):
            box.last_number = last_number
            box.waiting.clear()
        for (source, number, _, num_bytes), payload in zip(rows, pieces, strict=True):
            box = self._boxes[source]
            box.waiting.append(
                Arrived(
                    producer=box.producer,
                    source=source,
                    number=number,
                    payload=payload.clone(),
                    num_bytes=num_bytes,
                )
            )


@dataclass
class Intake:
    """The intake of one rank of the consumer; the first one reports on producers and sums over
    all.

    used: the batches of this step so far.
    skipped: the number of batches that this step did without, by name of the producer.
    """

    job: OneWayExperiment
    reporter: Reporter
    plan: ConsumptionPlan
    inbox: Inbox
    group_rank: int
    clock: StepClock
    used: list[Arrived] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    _other_bytes: int = 0
    _noted_slow: set[int] = field(default_factory=set)

    def collect(self, step: int, mine: Round) -> list[Arrived]:
        """Return the batches of this rank for a step. They are noted in `mine`, with those that
        did not come in time."""
        arrived: list[Arrived] = []
        late: Counter[int] = Counter()  # by source
        self._look_for_slow(step)
        with self.clock.during("wait"):
            for source in self.plan.step_slots(self.group_rank):
                if (one := self._await(step, source=source)) is None:
                    late[source] += 1
                else:
                    arrived.append(one)
            # No slot was planned: nobody is active. A short wait, then the ranks agree anew.
            if not arrived and not late:  # until a producer is there that feeds
                inbox = self.inbox
                idle = [p for p, state in enumerate(self.plan.state) if state is Presence.ABSENT]
                inbox.wait(POLL_S, lambda: any(inbox.is_ready(p) or inbox.end_of(p) for p in idle))
        for one in arrived:
            mine.consumed[one.source, self.group_rank] += 1
        for source, number in late.items():
            mine.skipped[source, self.group_rank] = number
            self.skipped[self.plan.names[self.plan.producer_of[source]]] += number
        self.used += arrived
        return arrived

    def await_ordered(self) -> None:
        """Block until all that was ordered is here, or cannot come."""
        with self.clock.during("wait"):
            while self.inbox.due:
                self.inbox.wait(POLL_S, lambda: not self.inbox.due)

    def look(self, mine: Round) -> None:
        """Note which producers are ready, and which gone."""
        for p in range(len(self.plan.state)):
            mine.ready[p] = self.inbox.is_ready(p)
            mine.dead[p] = bool(self.inbox.end_of(p))

    def _await(self, step: int, source: int) -> Arrived | None:
        """Return the next batch of a source; None if it is gone and used up."""
        p = self.plan.producer_of[source]
        inbox = self.inbox
        while True:
            has_ended = bool(inbox.end_of(p))  # first: what came before the end is still taken
            if (arrived := inbox.next_of([source])) is not None:
                return arrived
            if has_ended:
                return None
            self._look_for_slow(step)
            inbox.wait(POLL_S, lambda: source in inbox.filled or bool(inbox.end_of(p)))

    def _look_for_slow(self, step: int) -> None:
        """Say once that the run waits for a slow producer, and when it sends again."""
        inbox = self.inbox
        slow_after_s = self.plan.feed.slow_after_s
        active = [p for p in self.plan.active if not inbox.end_of(p)]
        slow = {p for p in active if inbox.silent_s(p) > slow_after_s}
        for p in sorted(slow - self._noted_slow):
            what = f"has sent nothing for {slow_after_s:g} s (feed.slow_after_s); waiting for it"
            self.producer(step, p, state=Presence.SLOW, what=what)
        for p in sorted(self._noted_slow - slow):
            self.producer(step, p, state=Presence.ACTIVE, what="sends again")
        self._noted_slow = slow

    def producer(self, step: int, p: int, state: Presence, what: str) -> None:
        if self.group_rank == 0:
            name = self.plan.names[p]
            self.reporter.event("producer", producer=name, state=state.name.lower(), step=step)
            self.reporter.note(f"producer {name} {what} (step {step})")

    def changed(self, step: int, p: int, now: Presence, why_gone: str) -> None:
        """Report a change of a producer's state.

        why_gone: the reason why a dead producer is gone.
        """
        what = "is ready"
        if now is Presence.DEAD:
            what = f"is gone ({why_gone})"
            if self.job.feed.on_dead != "stop":
                others = ", ".join(self.plan.names[q] for q in self.plan.active if q != p)
                what += f"; {others} take over its share" if others else "; nobody else feeds"
        self.producer(step, p, state=now, what=what)

    def end_step(
        self, step: int, other_bytes: int, sums: Mapping[str, float], is_skipped: bool
    ) -> None:
        """Report a step.

        other_bytes: the bytes sent and received so far besides batches.
        sums: the sums over all ranks.
        """
        fed_bytes: Counter[str] = Counter()
        line_s: dict[str, float] = {}
        layout = self.job.cluster
        for arrived in self.used if layout.crosses_clouds else ():
            name = self.plan.names[arrived.producer]
            fed_bytes[name] += arrived.num_bytes
            # Seconds that an emulated line was busy; of a real one only the bytes are known.
            wan = layout.wan_of(name, there=layout.consumer)
            if isinstance(wan, LinkProfile):
                add_to(line_s, more={name: wan.line_s(arrived.num_bytes)})
        event: dict[str, Any] = {
            "step": step,
            "step_s": round(self.clock.end_step(), 6),
            **{kind: round(seconds, 6) for kind, seconds in self.clock.seconds.items()},
            "sent": {"forward": fed_bytes.total(), "other": other_bytes - self._other_bytes},
            "taken": Counter(self.plan.names[arrived.producer] for arrived in self.used),
            "skipped": self.skipped,
            "fed_bytes": fed_bytes,
            "line_s": line_s,
        }
        # The sums are of all ranks, so one rank reports them; bytes and seconds each reports its
        # own.
        if self.group_rank == 0:
            event["samples"] = round(sums["samples"])
            event["tokens"] = round(sums["tokens"])
            if not is_skipped:
                event["loss"] = sums["loss_sum"] / sums["weight"]
                hits, wrong, missed = (sums[name] for name in COUNTS)
                denominators = {"precision": hits + wrong, "recall": hits + missed}
                # A denominator of 0 leaves the score out, as 0 would be a score.
                event["values"] = {name: hits / n for name, n in denominators.items() if n}
        self.reporter.event("step", **event)
        self._other_bytes = other_bytes
        self.used = []
        self.skipped = Counter()

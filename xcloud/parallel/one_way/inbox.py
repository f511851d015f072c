"""What the producers have sent to one rank of the consumer and it has not used yet; who of them
is there, who is silent, who is gone. Filled by the links' threads, emptied by the training loop.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.cluster.frame import Frame
from xcloud.cluster.liveness import PeerLife
from xcloud.comm.state import State, whole_numbers
from xcloud.parallel.one_way.plan import Order, Source


class Arrived(NamedTuple):
    source: Source
    number: int
    payload: Tensor
    num_bytes: int  # on the wire, header included


class Inbox:
    """All methods may be called from any thread. lives: note there what `wait` waits for.
    most_waiting: batches of a source, which sends none that was not ordered."""

    def __init__(
        self,
        sources: Sequence[Source],
        max_payload_bytes: int,
        lives: Mapping[Source, PeerLife] | None = None,
        most_waiting: int = 1 << 14,
    ) -> None:
        self.num_producers = 1 + max(source.producer for source in sources)
        self._sources, self._max_payload_bytes = tuple(sources), max_payload_bytes
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._waiting: dict[Source, deque[Arrived]] = {source: deque() for source in sources}
        self._ready: set[Source] = set()
        self._ended: dict[Source, str] = {}
        self._refused: set[int] = set()
        self._ordered: Counter[Source] = Counter()
        self._received: Counter[Source] = Counter()
        self._last_number: Counter[Source] = Counter()
        self._heard_at_s: dict[Source, float] = dict.fromkeys(sources, 0.0)
        self._lives = lives or {}
        self._due: dict[Source, deque[int]] = {source: deque() for source in sources}

    # --- what the links tell
    def put(self, source: Source, frame: Frame) -> None:
        """Raises FrameError for anything but one vector of bytes in the order of its numbers."""
        number = frame.key.step
        with self._changed:
            last = self._last_number[source]
            parts = frame.parts
            if len(parts) != 1 or parts[0].dtype != torch.uint8 or parts[0].dim() != 1:
                raise FrameError(
                    f"batch {number} of producer {source.producer} (rank {source.lane}) is not "
                    f"one vector of bytes but {[(p.dtype, tuple(p.shape)) for p in parts]}; "
                    "nothing else may come from a producer"
                )
            if len(parts[0]) > self._max_payload_bytes or number <= last:
                raise FrameError(
                    f"batch {number} of producer {source.producer} (rank {source.lane}) has "
                    f"{len(parts[0])} bytes, at most {self._max_payload_bytes} were promised, and "
                    f"came after number {last}"
                )
            # An order may be known here later than its batch comes, but not without end.
            due, num = self._due[source], len(self._waiting[source])
            if (due and number < due[-1] and number not in due) or num >= self._most_waiting:
                raise FrameError(
                    f"batch {number} of producer {source.producer} (rank {source.lane}) was not "
                    f"ordered: due are {list(due)[:8]}, and {num} wait here"
                )
            self._last_number[source] = number
            self._received[source] += 1
            while self._due[source] and self._due[source][0] <= number:
                self._due[source].popleft()
            self._heard_at_s[source] = time.monotonic()
            self._waiting[source].append(Arrived(source, number, parts[0], frame.num_bytes))
            self._changed.notify_all()

    def set_ready(self, source: Source) -> None:
        with self._changed:
            self._ready.add(source)
            self._changed.notify_all()

    def set_ended(self, source: Source, reason: str) -> None:
        with self._changed:
            self._ended.setdefault(source, reason)
            self._changed.notify_all()

    def refuse(self, producer: int, reason: str) -> None:
        """It takes no part from the start, and the others suffice (feed.min_producers)."""
        with self._changed:
            self._refused.add(producer)
            for source in self._of(producer):
                self._ended.setdefault(source, reason)
            self._changed.notify_all()

    # --- what the plan tells
    def expect(self, orders: Sequence[Order]) -> None:
        """These are on their way to this rank: from now on silence counts."""
        with self._changed:
            for order in orders:
                if self._ordered[order.source] == self._received[order.source]:
                    self._heard_at_s[order.source] = time.monotonic()
                self._ordered[order.source] += 1
                self._due[order.source].append(order.number)

    # --- what the training loop asks
    def is_ready(self, producer: int) -> bool:
        """All its ranks have said so, and nothing that was ordered is missing."""
        with self._changed:
            return all(
                source in self._ready
                and source not in self._ended
                and self._ordered[source] == self._received[source]
                for source in self._of(producer)
            )

    def was_ready(self, producer: int) -> bool:
        """All its ranks have ever said so."""
        with self._changed:
            return self._ready.issuperset(self._of(producer))

    def was_refused(self, producer: int) -> bool:
        with self._changed:
            return producer in self._refused

    def end_of(self, producer: int) -> str | None:
        """Why nothing more can come from it; None while something can. A producer whose ranks
        average their gradients ends with the first of them."""
        with self._changed:
            return self._end_of(producer)

    def ended(self, producer: int) -> bool:
        return self.end_of(producer) is not None

    def has(self, source: Source) -> bool:
        with self._changed:
            return bool(self._waiting[source])

    def silent_s(self, producer: int) -> float:
        """How long it has been silent although something was ordered; 0 if nothing is due."""
        with self._changed:
            now = time.monotonic()
            return max(
                now - self._heard_at_s[source]
                if self._ordered[source] > self._received[source]
                else 0.0
                for source in self._of(producer)
            )

    def is_due(self, producer: int) -> bool:
        """Something that was ordered for this rank has not come, and still may."""
        with self._changed:
            missing = any(self._ordered[s] > self._received[s] for s in self._of(producer))
            return missing and self._end_of(producer) is None

    def is_whole(self) -> bool:
        """Nothing that was ordered for this rank is missing, but of producers that are gone."""
        return not any(self.is_due(producer) for producer in range(self.num_producers))

    def readmit(self, producer: int) -> None:
        """A producer that was lost begins again with what is ordered from now on."""
        with self._changed:
            for source in self._of(producer):
                self._waiting[source].clear()
                self._due[source].clear()
                self._ordered[source] = self._received[source]

    def with_batches(self) -> list[int]:
        """Producers of which something is here."""
        with self._changed:
            return sorted({s.producer for s, waiting in self._waiting.items() if waiting})

    def take(self, source: Source) -> Arrived | None:
        """The oldest unused batch of a source, None if there is none."""
        with self._changed:
            waiting = self._waiting[source]
            return waiting.popleft() if waiting else None

    def take_of(self, producer: int) -> Arrived | None:
        """The batch with the lowest number of any rank of a producer."""
        with self._changed:
            heads = [w for s, w in self._waiting.items() if s.producer == producer and w]
            return min(heads, key=lambda w: w[0].number).popleft() if heads else None

    # --- what a run goes on from
    def state_dict(self) -> State:
        """Batches that are here, and the counts that say which are not. Who is ready or gone is
        no part of it: whoever goes on is connected anew."""
        with self._changed:
            waiting = [
                (place, arrived)
                for place, source in enumerate(self._sources)
                for arrived in self._waiting[source]
            ]
            rows = [(p, a.number, len(a.payload), a.num_bytes) for p, a in waiting]
            counters = (self._ordered, self._received, self._last_number)
            return {
                "counts": torch.tensor([[c[s] for s in self._sources] for c in counters]),
                "batches": torch.tensor(rows, dtype=torch.int64).view(-1, 4),
                "payloads": torch.cat(
                    [torch.empty(0, dtype=torch.uint8), *(a.payload for _, a in waiting)]
                ),
            }

    def load_state_dict(self, state: State) -> None:
        """Before anything arrives. Raises ValueError for the state of other sources."""
        counts = whole_numbers(state, "counts", 3, len(self._sources)).tolist()
        batches = whole_numbers(state, "batches", -1, 4)
        payloads = state["payloads"]
        assert isinstance(payloads, Tensor)
        pieces = torch.split(payloads, batches[:, 2].tolist())
        with self._changed:
            self._ordered, self._received, self._last_number = (
                Counter(dict(zip(self._sources, row, strict=True))) for row in counts
            )
            self._waiting = {source: deque() for source in self._sources}
            for (place, number, _, num_bytes), payload in zip(
                batches.tolist(), pieces, strict=True
            ):
                source = self._sources[place]
                self._waiting[source].append(Arrived(source, number, payload.clone(), num_bytes))
            self._heard_at_s = dict.fromkeys(self._sources, time.monotonic())

    def wait(self, timeout_s: float, until: Callable[[], bool]) -> None:
        """Until something has changed such that `until()` holds, or the time is over."""
        with ExitStack() as stack:
            for source, message in self._awaited().items():
                if (life := self._lives.get(source)) is not None:
                    stack.enter_context(life.awaiting(message))
            with self._changed:
                self._changed.wait_for(until, timeout_s)

    def _awaited(self) -> dict[Source, str]:
        """Batches that are due; if none is, that who is not ready says it is."""
        with self._changed:
            there = [source for source in self._sources if source not in self._ended]
            batches = {s: f"batch {self._due[s][0]}" for s in there if self._due[s]}
            return batches or {
                s: "the word that it is ready" for s in there if s not in self._ready
            }

    def _of(self, producer: int) -> list[Source]:
        return [source for source in self._sources if source.producer == producer]

    def _end_of(self, producer: int) -> str | None:
        reasons = [self._ended[s] for s in self._of(producer) if s in self._ended]
        return reasons[0] if reasons else None

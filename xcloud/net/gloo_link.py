"""Our carrier: links over torch.distributed point-to-point calls, with a thread at each end.

Measured facts this file rests on (gloo, torch 2.13): a message leaves only when the peer has
posted its receive, so receives are posted ahead (`LinkWindow`); a receive may be longer than the
message, so one buffer size serves all; a process group for each direction keeps a link full
duplex. A long frame is sent in fragments: gloo says nothing of a transfer before its end, and a
message that moves for longer than `overdue_after_s` is not overdue. The long message itself goes
back to the system once it is read (`message_buffer`), so that averaging links, which are idle for
most of a step, hold their posted fragments alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from xcloud.base.errors import FrameError, LinkClosed, LinkError
from xcloud.net.frame import Kind, bytes_of_frame, message_buffer, seal_frame
from xcloud.net.gloo_groups import GlooCollectives, OpenGroups
from xcloud.net.gloo_pair import GlooPair, Transfer, first_line
from xcloud.net.link import PostedReceives, Reservation
from xcloud.net.link_end import InSettings, Outgoing, OutSettings, ReceivingEnd, SendingEnd
from xcloud.net.rendezvous import FOREVER, JOIN_WITHIN_S
from xcloud.net.transport import CPU, Collectives, Rendezvous, Transport

_TAGS = 1 << 30
FRAGMENT_BYTES = 1 << 22
"""The most bytes of one transfer. It takes 34 s at 1 Mbit/s, far less than `overdue_after_s`."""


class GlooOutLink(SendingEnd):
    """Sends frames to one peer from a background thread."""

    def __init__(self, pair: GlooPair, settings: OutSettings) -> None:
        super().__init__(settings)
        self._pair = pair
        clock = settings.clock
        latency_at = clock.latency_at if clock is not None else lambda moment_s: 0.0
        self._posted = PostedReceives(num_posted=settings.window.num_posted, latency_at=latency_at)
        self._thread = threading.Thread(target=self._run, name=f"to-{self.peer_name}", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        with self._sending:
            self._send_closes(self.settings.window.num_posted)
            self._queue.put(None, num_bytes=0)  # the thread ends there
        self._await_end(self._has_ended, timeout_s, failing="did not take the last messages")

    def _has_ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        settings = self.settings
        tags = count()
        try:
            self._pair.join()
            while (item := self._queue.get()) is not None:
                key, sequence, frame, queued_at_s = item
                # As late as this: the line may be taken by other ranks until the message can
                # really start.
                slot = self._take_line(item)
                if slot is None:
                    seal_frame(frame, deliver_at_s=-time.monotonic())
                else:
                    seal_frame(frame, deliver_at_s=slot.deliver_at_s)
                self.record.sending(
                    key, sequence, num_bytes=frame.numel(), queued_at_s=queued_at_s, slot=slot
                )
                if slot is not None:
                    settings.note_progress(key.kind, at_s=slot.deliver_at_s)
                for start in range(0, frame.numel(), FRAGMENT_BYTES):
                    fragment = frame[start : start + FRAGMENT_BYTES]
                    # Returns once the peer's machine has taken the fragment; a receive was posted
                    # for it then. Tags number the fragments, so that gloo pairs the n-th one sent
                    # with the n-th receive.
                    self._pair.isend(fragment, next(tags) % _TAGS).wait()
                    if slot is None:
                        settings.note_progress(key.kind)
                    # Our heartbeats would hide a dead line back.
                    if key.kind is not Kind.ALIVE and not settings.peer.silence_is_loss:
                        taken_at_s = slot.deliver_at_s if slot is not None else time.monotonic()
                        settings.peer.note_taken(taken_at_s)
                del item, frame, fragment  # not held until the next message
        except RuntimeError as error:
            self.failure = LinkClosed(f"{self.peer_name} is gone: {first_line(error)}")
        except Exception as error:  # a thread that dies in silence loses what is sent
            self.failure = LinkClosed(f"the link to {self.peer_name} broke: {error!r}")

    def _take_line(self, item: Outgoing) -> Reservation | None:
        """Return the message's time on the emulated line; None without one.

        Waits until the receive for it is known to be posted: others may use the line meanwhile.
        """
        if (clock := self.settings.clock) is None:
            return None
        ready_at_s = max(item.queued_at_s, self._posted.known_at_s)
        if (wait_s := ready_at_s - time.monotonic()) > 0:
            time.sleep(wait_s)
        slot = clock.reserve(item.frame.numel(), ready_at_s)
        self._posted.used(slot.deliver_at_s)
        return slot


class GlooInLink(ReceivingEnd):
    """Receives frames from one peer in a background thread, each at its time of delivery."""

    def __init__(self, pair: GlooPair, settings: InSettings) -> None:
        super().__init__(settings)
        self._pair = pair
        self._thread = threading.Thread(
            target=self._run, name=f"from-{self.peer_name}", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        posted: deque[tuple[Tensor, Transfer]] = deque()
        try:
            self._pair.join()
            fragments = self._fragments(posted)
            while True:
                frame = self._open(self._next_frame(fragments))
                if frame.key.kind is Kind.CLOSE:
                    for _, rest in posted:  # as many closes are sent as receives are posted
                        rest.wait()
                    return self._leave()
                # The bytes are here already; the emulated line delivers them now
                # (docs/decisions/0002).
                if (wait_s := frame.deliver_at_s - time.monotonic()) > 0:
                    time.sleep(wait_s)
                self._deliver(frame)
                del frame  # not held until the next message
        except LinkError as error:
            self._end(error)
        except RuntimeError as error:
            self._end(LinkClosed(f"{self.peer_name} is gone: {first_line(error)}"))
        except Exception as error:  # a thread that dies in silence leaves its reader waiting
            self._end(LinkClosed(f"the link from {self.peer_name} broke: {error!r}"))

    def _fragments(self, posted: deque[tuple[Tensor, Transfer]]) -> Iterator[Tensor]:
        """Yield one fragment after the other. Each is good until the next one is asked for.

        posted: the receives that are under way.
        """
        settings = self.settings
        size = min(FRAGMENT_BYTES, settings.capacity_bytes)
        tags = count()
        spare = list[Tensor]()
        while True:
            while len(posted) < settings.window.num_posted:
                # Buffers are used again, so that no more than num_posted + 1 of them are ever
                # filled.
                buffer = spare.pop() if spare else message_buffer(size)
                posted.append((buffer, self._pair.irecv(buffer, tag=next(tags) % _TAGS)))
            buffer, work = posted.popleft()
            work.wait()
            yield buffer
            spare.append(buffer)

    def _next_frame(self, fragments: Iterator[Tensor]) -> Tensor:
        """Return the bytes of the next frame, with whatever follows them in its buffer."""
        first = next(fragments)
        num_bytes = bytes_of_frame(first, sender=self.peer_name)
        if num_bytes <= len(first):
            return first
        settings = self.settings
        if num_bytes > settings.capacity_bytes:
            raise FrameError(
                f"a frame from {self.peer_name} has {num_bytes:,} bytes; at most "
                f"{settings.capacity_bytes:,} were promised"
            )
        whole = message_buffer(num_bytes)
        # A long message gets memory of its own, once its header has been read and its length
        # checked.
        whole[: len(first)] = first
        for start in range(len(first), num_bytes, FRAGMENT_BYTES):
            settings.note_moving()
            rest = whole[start : start + FRAGMENT_BYTES]
            rest.copy_(next(fragments)[: len(rest)])
        return whole


def heartbeat_link(
    store: Store, rank: int, within_s: float, out: OutSettings, incoming: InSettings
) -> tuple[SendingEnd, ReceivingEnd]:
    """Make both ends of the link of heartbeats between rank 0 and another rank, which share one
    process group.

    store: the part of the store for this link. It is the same at both ends, and nothing else uses
        it.
    within_s: seconds that the other side may take to join it.
    """
    pair = GlooPair(
        store,
        line="life",
        ranks="heartbeats",
        place=int(rank != 0),
        join_within=timedelta(seconds=within_s),
    )
    return GlooOutLink(pair, settings=out), GlooInLink(pair, settings=incoming)


class GlooTransport(Transport):
    """The transport over gloo: a process group of two for each direction of a link. Those of
    `group` are torch's.

    world: the ranks that it joins; None: all of the rendezvous.
    """

    def __init__(self, rendezvous: Rendezvous, world: Sequence[int] | None = None) -> None:
        super().__init__(rendezvous)
        self._world = list(range(rendezvous.num_ranks) if world is None else world)
        # Torch's own world cannot lose and regain ranks, so open ranks make groups by themselves.
        self._open = OpenGroups(rendezvous) if rendezvous.is_open else None
        if self._open is None and len(self._world) > 1 and not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=rendezvous.store,
                rank=self._world.index(rendezvous.rank),
                world_size=len(self._world),
                timeout=timedelta(seconds=JOIN_WITHIN_S),
            )

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        return GlooOutLink(pair=self._pair(line, self.rank, receiver=peer), settings=settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        return GlooInLink(pair=self._pair(line, peer, receiver=self.rank), settings=settings)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        if self._open is not None:
            return self._open.join(ranks)
        if len(ranks) == 1:
            return None
        places = [self._world.index(rank) for rank in ranks]  # torch counts within the world
        group = dist.new_group(places, timeout=FOREVER)
        if self.rank in ranks:
            return GlooCollectives(group, ranks, device)
        return None

    def begins_again(self, ranks: Sequence[int]) -> bool:
        return self._open is not None and self._open.begins_again(ranks)

    def _pair(self, line: str, sender: int, receiver: int) -> GlooPair:
        ranks = f"{sender}-{receiver}"
        if self._open is not None:
            ranks = f"{sender}.{self._open.times(sender)}-{receiver}.{self._open.times(receiver)}"
        return GlooPair.claimed(
            self.rendezvous.store, line, ranks, place=int(self.rank == receiver)
        )

"""Signs of life while the ranks join under torchrun: from when a rank and rank 0 have both come to
the store until this rank has all its links, which have signs of life of their own. Torch's process
groups would wait for a rank that has died in between as long as for one that is still to come.

Every rank but 0 has a line to rank 0, a process group of two, over which the two say in turn how
they are. Rank 0 tells the others of one that is lost. Like the rendezvous of torch, these messages
are not counted.

Message: int64 [2], a word and the rank that it is about.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from xcloud.errors import FrameError, LinkClosed, LinkError, LinkTimeout

BEAT_S = 0.5
GRACE_S = 1.0  # in which the main thread may find a better reason to end


class _Word(IntEnum):
    ALIVE = 0
    MET = 1  # the sender has all its links, and looks no more
    ENDED = 2  # the line to a rank broke
    SILENT = 3  # a rank gave no sign of life for too long


class Joining:
    """What one rank knows of the others until it has met them. Thread-safe.

    name_of: of a rank, for messages. on_lost: called in a thread, once, when a rank that had come
    is lost and this one still waits. It must end the process: the main thread may wait in torch.
    """

    def __init__(
        self,
        rank: int,
        name_of: Callable[[int], str],
        lost_after_s: float,
        on_lost: Callable[[LinkError], None],
    ) -> None:
        self._rank, self._name_of, self.on_lost = rank, name_of, on_lost
        self._lost_after_s = lost_after_s
        self._lines: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()
        self._says = (_Word.ALIVE, rank)
        self._news = threading.Event()  # has met, or knows of a loss: to be told at once
        self._over = threading.Event()

    def watch(self, peer: int, store: Store) -> None:
        """From now on `peer` is here: rank 0 calls it for each other rank, these for rank 0, with
        the same part of the store, which nothing else uses. Replaces an earlier line to it."""
        thread = threading.Thread(
            target=self._follow, args=(peer, store), name=f"joining {peer}", daemon=True
        )
        self._lines[peer] = thread
        thread.start()

    def met(self) -> None:
        """This rank has all its links."""
        with self._lock:
            if self._says[0] is _Word.ALIVE:
                self._says = (_Word.MET, self._rank)
        self._over.set()
        self._news.set()

    def close(self) -> None:
        """This rank ends with a reason of its own. It tells the others of a loss that it knows."""
        self._over.set()
        until_s = time.monotonic() + GRACE_S
        for thread in self._lines.values() if self._news.is_set() else ():
            thread.join(max(0.0, until_s - time.monotonic()))

    def _follow(self, peer: int, store: Store) -> None:
        try:
            line = _Line(store, int(self._rank != 0), self._lost_after_s)
            if self._rank == 0:
                line.send(_Word.ALIVE, 0)
            while True:
                word, rank = line.receive(self._name_of(peer))
                if word is not _Word.ALIVE:
                    break
                self._news.wait(min(BEAT_S, self._lost_after_s / 4))
                said = self._says
                line.send(*said)
                if said[0] is not _Word.ALIVE:
                    return
        except FrameError as error:
            self._end(error)
        except RuntimeError as error:
            if self._lines[peer] is threading.current_thread():
                is_late = any(sign in str(error).lower() for sign in ("timed out", "timeout"))
                self._lose(_Word.SILENT if is_late else _Word.ENDED, peer)
        else:
            if word is not _Word.MET:
                self._lose(word, rank)

    def _lose(self, word: _Word, rank: int) -> None:
        with self._lock:
            if self._says[0] is not _Word.ALIVE:
                return
            self._says = (word, rank)
        self._news.set()
        name = self._name_of(rank)
        if word is _Word.ENDED:
            self._end(LinkClosed(f"{name} ended while the ranks joined"))
        else:
            self._end(
                LinkTimeout(
                    f"{name} gave no sign of life for {self._lost_after_s:g} s while the ranks "
                    "joined. Is that rank stopped, or its link down?"
                )
            )

    def _end(self, error: LinkError) -> None:
        if not self._over.wait(GRACE_S):
            self.on_lost(error)


class _Line:
    """Raises RuntimeError once the other side is gone, or silent for timeout_s."""

    def __init__(self, store: Store, place: int, timeout_s: float) -> None:
        self._timeout, self._place = timedelta(seconds=timeout_s), place
        self._group: Any = dist.ProcessGroupGloo(store, place, 2, self._timeout)

    def send(self, word: _Word, rank: int) -> None:
        message = torch.tensor([word, rank])
        self._group.send([message], 1 - self._place, 0).wait(self._timeout)

    def receive(self, sender: str) -> tuple[_Word, int]:
        message = torch.zeros(2, dtype=torch.int64)
        self._group.recv([message], 1 - self._place, 0).wait(self._timeout)
        word, rank = message.tolist()
        if word not in [*_Word] or rank < 0:
            raise FrameError(f"{sender} sent ({word}, {rank}) where a sign of life was due")
        return _Word(word), rank

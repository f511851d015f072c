"""A process group of two over gloo: what a direction of a link, a line of heartbeats and a line of
words are carried by."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from xcloud.base.errors import ConfigError
from xcloud.net.rendezvous import FOREVER

_SOURCE = re.compile(r"^\[\S+:\d+\] ")


class GlooPair:
    """The process group of a line between two ranks, which has place 0 or 1: of one direction of a
    link, or of both.

    Its name, line and ranks, must be its own in the store: see `claimed`.

    join_within: time for which `join` waits for the other side.
    """

    def __init__(
        self, store: Store, line: str, ranks: str, place: int, join_within: timedelta = FOREVER
    ) -> None:
        self._store = store
        self._line = line
        self._name = f"{line} {ranks}"
        self._place = place
        self._join_within = join_within
        self._group: Any = None
        self._failure: RuntimeError | None = None
        self._joining = threading.Lock()

    @classmethod
    def claimed(cls, store: Store, line: str, ranks: str, place: int) -> GlooPair:
        """Return a pair that is made once. Raises ConfigError if its place is taken: a later pair
        of the name would find the addresses of the earlier one, and hang."""
        if store.add(f"{line} {ranks} place {place}", 1) > 1:
            raise ConfigError(
                f"there is a line {line!r} between ranks {ranks} already; one rendezvous makes "
                "each line once: give another system of links a part of the store of its own "
                "(PrefixStore)"
            )
        return cls(store, line, ranks, place)

    def join(self) -> None:
        """Wait for the other side, in the thread of a link's end; both ends may call it. Who wants
        something of that end waits no longer than its deadline. Raises RuntimeError if the other
        side does not come in time."""
        with self._joining:
            if self._failure is not None:
                raise self._failure
            if self._group is not None:
                return
            try:
                # A client of its own: whoever waits in a store keeps others of that client
                # waiting.
                own: Any = self._store.clone()  # type: ignore[attr-defined]
                own.set_timeout(self._join_within)
                gloo: Any = dist.ProcessGroupGloo
                options = gloo._Options()
                options._devices = [_device(self._line)]
                options._threads = 2
                options._timeout = self._join_within
                self._group = gloo(PrefixStore(self._name, own), self._place, 2, options)
            except RuntimeError as error:
                # Kept for the other end, which shares this pair and would wait once more.
                self._failure = error
                raise

    def isend(self, frame: Tensor, tag: int) -> Transfer:
        return Transfer(self._group.send([frame], 1 - self._place, tag))

    def irecv(self, buffer: Tensor, tag: int) -> Transfer:
        return Transfer(self._group.recv([buffer], 1 - self._place, tag))


@dataclass(frozen=True)
class Transfer:
    """A message that is being sent or received."""

    work: dist.Work

    def wait(self, within: timedelta = FOREVER) -> None:
        """Wait until it is done. Raises RuntimeError if it is not in time, or the other side is
        gone."""
        self.work.wait(within)  # without a limit that of joining would count


@cache
def _device(line: str) -> Any:
    """Return the device of a line, on the interface that torch would take.

    The thread of each device looks a hundred times a second, so all pairs of a line share one.
    """
    gloo: Any = dist.ProcessGroupGloo
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo.create_device(interface=names.split(",")[0])
    return gloo.create_default_device()


def first_line(error: BaseException) -> str:
    """Return what gloo says of an error, without source position, advice and C++ trace."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return _SOURCE.sub("", line).partition(". This is typically caused")[0].strip()

"""Mailboxes for tests: a transport through one, and both ends of a link."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tests.line_keys import keys_of
from xcloud.line.mailbox import MailboxInLink, MailboxOutLink
from xcloud.line.mailbox_lines import MailboxLines
from xcloud.line.transport import SealedPlace
from xcloud.net.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd
from xcloud.net.link_profile import LinkWindow
from xcloud.net.transport import CPU, Collectives, Transport

CLOUDS = ("cloud_a", "cloud_b", "cloud_c")
RUN = bytes(range(16))
WITHIN_S = 20.0
_MAKING_KEYS = threading.Lock()  # they are made once, by whoever comes first


def lines(url: str | Path, rank: int, num_ranks: int = 2, run: bytes = RUN) -> MailboxLines:
    with _MAKING_KEYS:
        keys = keys_of(CLOUDS[rank], [cloud for cloud in CLOUDS if cloud != CLOUDS[rank]])
    place = SealedPlace(
        rank,
        num_ranks,
        run,
        attempt=1,
        cloud_of=CLOUDS.__getitem__,
        address_of=lambda rank: None,
        listener_of=lambda here, there: here,
        listens_at=None,
        first_within_s=WITHIN_S,
        reconnect_s=WITHIN_S,
    )
    return MailboxLines(str(url), place, keys)


class MailboxTransport(Transport):
    """A transport whose links all go through a mailbox."""

    def __init__(self, in_memory: Transport, url: str | Path) -> None:
        super().__init__(in_memory.rendezvous)
        self.computing = in_memory.computing
        self.lines = lines(url, self.rank, in_memory.rendezvous.num_ranks)

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        return self.lines.out(line, peer, settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        return self.lines.incoming(line, peer, settings)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        return None


def both(url: str | Path) -> list[MailboxLines]:
    """The lines of cloud_a and cloud_b, which have met."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(partial(lines, url), range(2)))


class Ends(NamedTuple):
    """Both ends of a link from cloud_a to cloud_b."""

    out: MailboxOutLink
    incoming: MailboxInLink
    of: list[MailboxLines]


@contextmanager
def linked(
    url: str | Path, capacity_bytes: int = 1 << 20, window: LinkWindow | None = None
) -> Iterator[Ends]:
    settings = (capacity_bytes, window or LinkWindow())
    of = both(url)
    out = of[0].out("control", 1, OutSettings("receiver", *settings))
    incoming = of[1].incoming("control", 0, InSettings("sender", *settings))
    try:
        yield Ends(out, incoming, of)
    finally:
        for one in of:
            one.stop()


def files_in(url: Path) -> list[Path]:
    """The objects of frames that lie in a mailbox."""
    return sorted(file for file in url.rglob("*") if file.is_file() and "note-" not in file.name)

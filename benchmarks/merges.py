"""How long a merge of two clouds takes through a mailbox, beside a sealed line and gloo.

    python -m benchmarks.merges [--bytes 3000 1000000 16000000] [--quiet-s 0 10]
        [--carriers gloo line mailbox] [--url FOLDER]

A merge: each end sends a message of so many bytes and takes that of the other. Both ends are
threads of this process; the line and gloo go over its loopback, so that all times are those of
the carriers alone. --quiet-s: how long nothing has crossed before, as in the steps between two
merges: whoever waits for a mailbox looks ever more seldom. A row is the median of 3 merges, and
the longest. --url: a bucket, to measure its requests too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed import HashStore

from benchmarks.machine import say_where
from xcloud.line.keys import LineKeys, make_key, read_line_keys
from xcloud.line.mailbox_lines import MailboxLines
from xcloud.line.transport import SealedLines, SealedPlace
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.gloo_link import GlooInLink, GlooOutLink
from xcloud.net.gloo_pair import GlooPair
from xcloud.net.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd
from xcloud.net.link_profile import LinkWindow

CLOUDS = ("cloud_a", "cloud_b")
CARRIERS = ("gloo", "line", "mailbox")
PORT = 29591
ROUNDS = 3
WITHIN_S = 60.0


class Ends(NamedTuple):
    """Both links of one rank."""

    out: SendingEnd
    incoming: ReceivingEnd


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", nargs="+", type=int, default=[3_000, 1_000_000, 16_000_000])
    parser.add_argument("--quiet-s", nargs="+", type=float, default=[0.0, 10.0])
    parser.add_argument("--carriers", nargs="+", choices=CARRIERS, default=CARRIERS)
    parser.add_argument("--url", help="of the mailbox; a temporary folder by default")
    given = parser.parse_args()
    say_where()
    torch.set_num_threads(1)
    print(f"{'bytes':>11} {'quiet s':>8} {'carrier':>8} | {'median s':>9} {'longest s':>9}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as threads:
        for cloud in CLOUDS:
            make_key(cloud, Path(folder))
        url = given.url or str(Path(folder, "box"))
        Path(folder, "box").mkdir()
        makers = {
            "gloo": over_gloo(),
            "line": over_line(folder),
            "mailbox": over_mailbox(folder, url),
        }
        for carrier in given.carriers:
            make = makers[carrier]
            capacity = max(given.bytes) + 4096
            ends = list(threads.map(partial(make, capacity), range(2)))
            number = 0
            for num_bytes in given.bytes:
                for quiet_s in given.quiet_s:
                    took_s = []
                    for _ in range(ROUNDS):
                        time.sleep(quiet_s)
                        took_s.append(max(threads.map(partial(merge, num_bytes, number), ends)))
                        number += 1
                    times = f"{statistics.median(took_s):9.3f} {max(took_s):9.3f}"
                    print(f"{num_bytes:11,} {quiet_s:8g} {carrier:>8} | {times}", flush=True)


def merge(num_bytes: int, number: int, ends: Ends) -> float:
    """Send and take one message. Return the seconds."""
    key = MessageKey(Kind.AVERAGING, number)
    part = torch.zeros(num_bytes, dtype=torch.uint8)
    started_s = time.monotonic()
    ends.out.send(key, (part,))
    ends.incoming.recv(key, WITHIN_S)
    return time.monotonic() - started_s


Make = Callable[[int, int], Ends]
"""Makes the links of a rank, of (bytes of the longest frame, rank)."""


def settings(capacity: int) -> tuple[OutSettings, InSettings]:
    window = LinkWindow()
    return (
        OutSettings("the other", capacity, window=window),
        InSettings("the other", capacity, window=window),
    )


def over_gloo() -> Make:
    store = HashStore()

    def make(capacity: int, rank: int) -> Ends:
        out, incoming = settings(capacity)
        within = timedelta(seconds=WITHIN_S)
        to, back = (
            GlooPair(
                store, f"from {sender}", ranks="0-1", place=int(rank != sender), join_within=within
            )
            for sender in (rank, 1 - rank)
        )
        return Ends(GlooOutLink(to, out), GlooInLink(back, incoming))

    return make


def keys_of(folder: str, rank: int) -> LineKeys:
    peer = CLOUDS[1 - rank]
    return read_line_keys(
        CLOUDS[rank], {peer: [f"{peer}.pem"]}, policy_file=Path(folder) / "policy.yaml"
    )


def place_of(rank: int) -> SealedPlace:
    address = ("127.0.0.1", PORT)
    return SealedPlace(
        rank,
        num_ranks=2,
        run=bytes(16),
        attempt=1 + rank,
        cloud_of=CLOUDS.__getitem__,
        address_of=lambda peer: address if peer == 1 else None,
        listener_of=lambda here, there: CLOUDS[1],
        listens_at=address if rank == 1 else None,
        first_within_s=WITHIN_S,
        reconnect_s=WITHIN_S,
    )


def over_line(folder: str) -> Make:
    def make(capacity: int, rank: int) -> Ends:
        out, incoming = settings(capacity)
        lines = SealedLines(place_of(rank), keys_of(folder, rank), say=print)
        return Ends(lines.out("merge", 1 - rank, out), lines.incoming("merge", 1 - rank, incoming))

    return make


def over_mailbox(folder: str, url: str) -> Make:
    def make(capacity: int, rank: int) -> Ends:
        out, incoming = settings(capacity)
        lines = MailboxLines(url, place_of(rank), keys_of(folder, rank))
        return Ends(lines.out("merge", 1 - rank, out), lines.incoming("merge", 1 - rank, incoming))

    return make


if __name__ == "__main__":
    main()

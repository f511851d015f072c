"""What the ends of a link keep in memory between two messages."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.replicas import connected
from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.averaging import averager_for
from xcloud.launch.processes import LIBRARY_SETTINGS
from xcloud.net.frame import LONG_BYTES, Kind, MessageKey, frame_bytes
from xcloud.net.gloo_link import FRAGMENT_BYTES, GlooInLink, GlooOutLink
from xcloud.net.link_end import InSettings, OutSettings


class Done:
    def wait(self) -> None: ...


@dataclass
class Received:
    """Of one posted receive: waits for a message, as gloo's work does."""

    pair: Pair
    buffer: Tensor

    def wait(self) -> None:
        frame = self.pair.sent.get(timeout=20)
        self.buffer[: len(frame)] = frame
        self.pair.filled.append(weakref.ref(self.buffer))


@dataclass
class Pair:
    """A Pair of gloo_link.py in one process. filled, frames: whatever once held a message."""

    sent: queue.Queue[Tensor] = field(default_factory=queue.Queue)
    filled: list[weakref.ref[Tensor]] = field(default_factory=list)
    frames: list[weakref.ref[Tensor]] = field(default_factory=list)
    taken: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def join(self) -> None:
        """Both ends are here."""

    def isend(self, frame: Tensor, tag: int) -> Any:
        self.frames.append(weakref.ref(frame))
        self.sent.put(frame.clone())
        return Done()

    def irecv(self, buffer: Tensor, tag: int) -> Any:
        self.taken.release()
        return Received(self, buffer)


def test_ends_of_a_link_hold_no_long_message_once_it_is_read() -> None:
    pair, part = Pair(), torch.zeros(LONG_BYTES, dtype=torch.uint8)
    capacity = part.numel() + 4096
    out = GlooOutLink(pair, OutSettings("rank 1", capacity))
    incoming = GlooInLink(pair, InSettings("rank 0", capacity))
    for number in range(5):
        key = MessageKey(Kind.AVERAGING, 1, number)
        out.send(key, (part,))
        incoming.recv(key, 20)
    for _ in range(3 + 5 * 9):  # receives are posted again once a message's buffer is done with
        assert pair.taken.acquire(timeout=20)
    out.close(20)
    incoming.close(20)

    assert len(pair.filled) >= 5 and len(pair.frames) >= 5
    assert not any(ref() is not None and ref().numel() > 4096 for ref in pair.frames)  # type: ignore[union-attr]
    held = {id(buffer): buffer.numel() for ref in pair.filled if (buffer := ref()) is not None}
    assert all(num_bytes <= FRAGMENT_BYTES for num_bytes in held.values())
    assert len(held) <= 1 + incoming.settings.window.num_posted


HELD = """
import sys, threading
from pathlib import Path
import torch
from torch._C._distributed_c10d import HashStore
from xcloud.net.gloo_link import GlooTransport
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.transport import Rendezvous
from xcloud.comm.compressor import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.averaging import averager_for
from xcloud.pipeline.ends import Ends
from xcloud.features.replicas.links import replica_links

class OnlyLinks(GlooTransport):
    def __init__(self, rendezvous):  # two ranks in one process
        self.rendezvous, self.rank, self._open = rendezvous, rendezvous.rank, None

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

SHAPES = {"w": torch.Size([10_000_000])}
store, together, found = HashStore(), threading.Barrier(2), []
layout = ClusterLayout({n: Cloud(1, (0,), replica=i) for i, n in enumerate("ab")}, "free")

def rank(number):
    ends = Ends(OnlyLinks(Rendezvous(number, 2, store)), layout, Path())
    links = replica_links(ends, layout, torch.device("cpu"))
    codec = lambda shapes: TensorCodec(shapes, lambda *_: Chain(), 1, True)
    averager = averager_for(links, SHAPES, codec)
    links.open(averager.max_bytes)
    gradient = torch.ones(SHAPES["w"])
    together.wait()
    before = held()
    for step in range(1, 7):
        averager.start(step, [gradient])
        averager.finish(step)
    together.wait()
    ends.close()
    together.wait()
    found.append((held() - before) / gradient.nbytes)

threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join(100) for thread in threads]
print(max(found))
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_averaging_holds_no_message_in_the_heap_of_a_launched_rank() -> None:
    environment = {**os.environ, **LIBRARY_SETTINGS, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", HELD]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)

    assert not ended.returncode, ended.stderr
    assert float(ended.stdout) < 2.0, "of both ranks, in messages"


def test_a_message_of_too_many_values_is_refused_before_the_run_with_the_number() -> None:
    shapes = {"w": torch.Size([2**16, 2**16])}
    mail = connected(2)[0]
    made = averager_for(mail, shapes, lambda s: TensorCodec(s, lambda *_: Chain(), 1, True))
    with pytest.raises(ConfigError, match=r"4,294,967,296 values in one part; the most is 4,294"):
        _ = made.max_bytes
    assert frame_bytes(())

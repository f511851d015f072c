"""A line with a round trip between two network namespaces, and real links over it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.namespaces import ADDRESSES, INTERFACE, delay_available, inside, two_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.xdist_group("measures"),
    pytest.mark.skipif(delay_available() is not None, reason=str(delay_available())),
]
ROOT = Path(__file__).parents[2]

TCP = """
import json, socket, sys, time
if sys.argv[1] == "0":
    peer = socket.create_server((sys.argv[2], 5000)).accept()[0]
    for _ in range(5):
        peer.sendall(peer.recv(1))
    started_s, num_bytes = time.monotonic(), 0
    while data := peer.recv(1 << 20):
        num_bytes += len(data)
    print(json.dumps(8 * num_bytes / (time.monotonic() - started_s)))
else:
    while True:
        try:
            peer = socket.create_connection((sys.argv[2], 5000), 1)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    round_trips_s = []
    for _ in range(5):
        started_s = time.monotonic()
        peer.sendall(b"x")
        peer.recv(1)
        round_trips_s.append(time.monotonic() - started_s)
    peer.sendall(bytes(5_000_000))
    print(json.dumps(min(round_trips_s)))
"""

LINKS = """
import json, os, sys, time
import torch, torch.distributed as dist
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.gloo_link import GlooInLink, GlooOutLink, GlooPair
from xcloud.net.link_end import InSettings, OutSettings
from xcloud.net.link_profile import LinkWindow
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[2]}:29581", rank=rank, world_size=2)
found = {}
for num_posted in (3, 20):
    window = LinkWindow(num_posted)
    pair = GlooPair(dist.distributed_c10d._get_default_store(), str(num_posted), "", rank)
    if rank == 0:
        link = GlooOutLink(pair, OutSettings("rank 1", 1000, window=window))
        dist.barrier()
        for i in range(20):
            link.send(MessageKey(Kind.ACTIVATION, 1, i), (torch.zeros(100),))
    else:
        link = GlooInLink(pair, InSettings("rank 0", 1000, window=window))
        dist.barrier()
        for i in range(20):
            link.recv(MessageKey(Kind.ACTIVATION, 1, i), 20)
            first_s = time.monotonic() if i == 0 else first_s
        found[num_posted] = time.monotonic() - first_s
    link.close(20)
print(json.dumps(found), flush=True)
os._exit(0)
"""


def on_two_hosts(script: str, bits_per_s: float | None, round_trip_s: float) -> list[object]:
    """What the script prints on each host, as JSON."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    with two_hosts(bits_per_s, round_trip_s) as hosts:
        processes = [
            subprocess.Popen(
                [*inside(host), sys.executable, "-c", script, str(rank), ADDRESSES[0]],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
            )
            for rank, host in enumerate(hosts)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(out) for out in outputs]


def test_the_line_has_the_round_trip_and_the_bandwidth_it_is_asked_for() -> None:
    bits_per_s, round_trip_s = on_two_hosts(TCP, 50e6, 0.1)

    assert isinstance(round_trip_s, float) and isinstance(bits_per_s, float)
    assert round_trip_s >= 0.1
    # Never more than 1448 of 1514 bytes are ours; how much less is up to TCP and the machine.
    assert 0 < bits_per_s < 50e6


def test_a_real_link_carries_as_many_messages_in_a_round_trip_as_receives_are_posted() -> None:
    _, found = on_two_hosts(LINKS, 100e6, 0.1)

    assert isinstance(found, dict)
    # From the first to the last of 20 messages: six round trips with three receives, else none.
    assert found["3"] > 0.6
    assert found["20"] < 0.5 * found["3"]

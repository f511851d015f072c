"""What the line between two owners carries, beside bare TLS and gloo in the same sitting, and
through a relay on the receiver's host.

    python -m benchmarks.bench_line [--mbit 0 100] [--rtt-ms 0 100] [--frame-bytes 1000000]
        [--carriers line relay tls gloo] [--seconds 6] [--rounds 1] [--json FILE]

One process sends frames as fast as it may for so many seconds, another takes them. --mbit 0: no
limit, on this machine's loopback; else in two network namespaces over a delaying line
(delay_line.c; without a round trip the kernel's shaper), which needs root, iproute2, gcc and
/dev/net/tun. Prints goodput, in MB/s and as a share of what the line can carry, in the second
half of the time (TCP's slow start is in the first), that share in the median half second, and the
processor time of both ends in seconds a GB of the whole transfer. What waits at a sender when the
time is over is not in the goodput. The median leaves out what BBR does every 10 s: to measure the
round trip it sends nearly nothing for 0.2 s and more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from benchmarks.machine import say_where
from benchmarks.namespaces import ADDRESSES, INTERFACE, delay_available, inside, two_hosts
from xcloud.launch.processes import LIBRARY_SETTINGS
from xcloud.line.connection import Stream
from xcloud.line.hello import RUN_BYTES, StreamName
from xcloud.line.keys import LineKeys, make_key, read_line_keys
from xcloud.line.line_state import LineState
from xcloud.line.pinned_tls import PinnedTls
from xcloud.line.relayed import Meeting, rooms_of
from xcloud.line.stream_link import StreamInLink, StreamOutLink
from xcloud.line.ways import Dialler, Listener, Way
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.gloo_link import GlooInLink, GlooOutLink
from xcloud.net.gloo_pair import GlooPair
from xcloud.net.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd
from xcloud.net.link_profile import LinkWindow, line_bytes

ROOT = Path(__file__).resolve().parent.parent
CARRIERS = ("line", "relay", "tls", "gloo")
PORT = 29590
RELAY_PORT = 29591
LABEL = "bench"
RUN = bytes(RUN_BYTES)
NAME = StreamName("bulk", "cloud_a", sender=0, receiver_cloud="cloud_b", receiver=1)
KEYS = {"sender": ("cloud_a", "cloud_b"), "receiver": ("cloud_b", "cloud_a")}
FEWEST_FRAMES = 4
HALF_SECOND_S = 0.5


def main() -> None:
    if sys.argv[1:2] == ["--end"]:
        return run_end(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", nargs="+", type=float, default=[0.0, 100.0])
    parser.add_argument("--rtt-ms", nargs="+", type=float, default=[0.0, 100.0])
    parser.add_argument("--frame-bytes", nargs="+", type=int, default=[1_000_000])
    parser.add_argument("--carriers", nargs="+", choices=CARRIERS, default=CARRIERS)
    parser.add_argument("--connections", type=int, default=0, help="of the line; 0: its choice")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    say_where()
    limited = [mbit for mbit in given.mbit if mbit]
    if limited and (reason := delay_available()) is not None:
        sys.exit(f"with a limit this benchmark cannot run here: {reason}")
    print(f"{'Mbit/s':>7} {'rtt ms':>7} {'frame':>11} {'carrier':>8} | {'MB/s':>8} {'of line':>8} "
          f"{'median':>8} {'CPU s/GB':>9}")  # fmt: skip
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for cloud in ("cloud_a", "cloud_b"):
            make_key(cloud, Path(folder))
        for mbit in given.mbit:
            for rtt_ms in given.rtt_ms if mbit else [0.0]:
                line = two_hosts(mbit * 1e6, rtt_ms / 1e3 or None) if mbit else nullcontext(None)
                with line as hosts:
                    for frame_bytes in given.frame_bytes:
                        for carrier in given.carriers:
                            job = {
                                "carrier": carrier, "frame_bytes": frame_bytes,
                                "seconds": given.seconds, "folder": folder,
                                "connections": given.connections,
                            }  # fmt: skip
                            rows = [measure(job, hosts, mbit) for _ in range(given.rounds)]
                            row = {"mbit": mbit, "rtt_ms": rtt_ms, **job, "rounds": rows}
                            found.append(row)
                            show(row)
    if given.json:
        given.json.write_text(json.dumps(found) + "\n")


def show(row: dict[str, Any]) -> None:
    rate, *shares, cpu = (
        statistics.median(one[key] for one in row["rounds"])
        for key in ("bytes_per_s", "share", "median_share", "cpu_s_per_gb")
    )
    of_line = " ".join(f"{share:8.3f}" if row["mbit"] else f"{'-':>8}" for share in shares)
    print(f"{row['mbit']:7g} {row['rtt_ms']:7g} {row['frame_bytes']:11,} {row['carrier']:>8} | "
          f"{rate / 1e6:8.2f} {of_line} {cpu:9.2f}", flush=True)  # fmt: skip


def measure(job: dict[str, Any], hosts: Sequence[str] | None, mbit: float) -> dict[str, float]:
    """Send for a while. Return what came, a second, and what it cost."""
    prefixes: Sequence[Sequence[str]] = [(), ()] if hosts is None else [inside(h) for h in hosts]
    interface = "lo" if hosts is None else INTERFACE
    environment = {
        **os.environ, **LIBRARY_SETTINGS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface,
    }  # fmt: skip
    address = "127.0.0.1" if hosts is None else ADDRESSES[1]
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "benchmarks.bench_line", "--end",
             json.dumps({**job, "side": side, "address": address})],
            cwd=ROOT, env=environment, stdout=subprocess.DEVNULL,
        )
        for prefix, side in zip(prefixes, KEYS, strict=True)
    ]  # fmt: skip
    if job["carrier"] == "relay":
        listen = ("--listen", f"{address}:{RELAY_PORT}")
        command = [*prefixes[1], sys.executable, "-m", "xcloud", "relay", *listen]
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL))
    try:
        for process, side in zip(processes, KEYS, strict=False):
            if process.wait(timeout=600):
                sys.exit(f"the {side} ended with {process.returncode}: {job}")
        answers = [json.loads(answer_file(job, side).read_text()) for side in KEYS]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    arrived_s = np.array(answers[1]["arrived_s"])
    arrived_s -= arrived_s[0]
    come = job["frame_bytes"] * np.arange(len(arrived_s))
    until_s = min(max(job["seconds"], arrived_s[FEWEST_FRAMES - 1]), arrived_s[-1])
    num_parts = max(1, round(until_s / 2 / HALF_SECOND_S))
    ends_s = np.linspace(until_s / 2, until_s, num_parts + 1)
    rates = np.diff(np.interp(ends_s, arrived_s, come)) / np.diff(ends_s)

    def share(bytes_per_s: float) -> float:
        return line_bytes(round(bytes_per_s)) * 8 / (mbit * 1e6) if mbit else 0.0

    return {
        "bytes_per_s": float(rates.mean()),
        "share": share(rates.mean()),
        "median_share": share(np.median(rates)),
        "cpu_s_per_gb": sum(answer["cpu_s"] for answer in answers) / float(come[-1]) * 1e9,
    }


def answer_file(job: dict[str, Any], side: str) -> Path:
    """Return where an end leaves what it has seen: libraries print to its output."""
    return Path(job["folder"]) / f"{side}.json"


def run_end(job: dict[str, Any]) -> None:
    """Be the sender or the receiver, and leave what this end has seen in a file."""
    carry = {"tls": over_tls, "gloo": over_gloo}.get(job["carrier"], over_line)
    arrived_s: list[float] = []
    before_s = [0.0]

    def start() -> None:
        before_s[0] = cpu_s()

    carry(job, start, arrived_s)
    answer = {"arrived_s": arrived_s, "cpu_s": cpu_s() - before_s[0]}
    answer_file(job, job["side"]).write_text(json.dumps(answer))
    os._exit(0)  # threads of carriers may be at work


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def over_line(job: dict[str, Any], start: Callable[[], None], arrived_s: list[float]) -> None:
    tls = pinned(job)
    address: tuple[str, int] | Meeting = (job["address"], PORT)
    if job["carrier"] == "relay":
        keys, peer = keys_of(job)
        relay = (job["address"], RELAY_PORT)
        address = Meeting(relay, rooms=rooms_of(keys, cloud=peer, label=LABEL))
    way: Way
    if job["side"] == "receiver":
        way = Listener(address, tls, "cloud_b", rank=1, run=RUN, attempt=1)
    else:
        way = Dialler(address, "cloud_b", tls)
    stream = Stream(
        NAME, RUN, attempt=1, way=way, state=LineState("the other end"),
        num_connections=job["connections"],
    )  # fmt: skip
    if job["side"] == "receiver":
        receive(StreamInLink(stream, in_settings(job)), job, start, arrived_s)
    else:
        send(StreamOutLink(stream, out_settings(job)), job, start)


def over_gloo(job: dict[str, Any], start: Callable[[], None], arrived_s: list[float]) -> None:
    is_receiver = job["side"] == "receiver"
    store = TCPStore(job["address"], PORT, is_master=is_receiver)
    pair = GlooPair(store, "bulk", "0-1", place=int(is_receiver))
    if is_receiver:
        receive(GlooInLink(pair, in_settings(job)), job, start, arrived_s)
    else:
        send(GlooOutLink(pair, out_settings(job)), job, start)


def over_tls(job: dict[str, Any], start: Callable[[], None], arrived_s: list[float]) -> None:
    """Bare TLS of Python's ssl, with blocking sockets and nothing of ours."""
    tls = pinned(job)
    frame = memoryview(bytearray(os.urandom(job["frame_bytes"])))
    if job["side"] == "receiver":
        listening = socket.create_server((job["address"], PORT))
        plain, _ = listening.accept()
        end, _ = tls.accept(plain)
        start()
        end.settimeout(None)
        while fill(end, frame):
            arrived_s.append(time.monotonic())
        return
    plain = dialled((job["address"], PORT))
    end = tls.dial(plain, "cloud_b")
    start()
    end.settimeout(None)
    for _ in sending(job):
        end.sendall(frame)
    end.unwrap().close()


def fill(end: ssl.SSLSocket, place: memoryview) -> bool:
    at = 0
    while at < len(place):
        num_bytes = end.recv_into(place[at:])
        if not num_bytes:
            end.unwrap()
            return False
        at += num_bytes
    return True


def dialled(address: tuple[str, int]) -> socket.socket:
    until_s = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(address)
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def pinned(job: dict[str, Any]) -> PinnedTls:
    keys, _ = keys_of(job)
    return PinnedTls(keys, LABEL)


def keys_of(job: dict[str, Any]) -> tuple[LineKeys, str]:
    """Return the keys of an end's cloud, and the name of the other cloud."""
    me, peer = KEYS[job["side"]]
    policy = Path(job["folder"]) / "policy.yaml"
    return read_line_keys(me, {peer: [f"{peer}.pem"]}, policy_file=policy), peer


def window(job: dict[str, Any]) -> LinkWindow:
    """The window of a link whose sender runs ahead as far as cluster.link_budget_bytes lets it."""
    return LinkWindow.covering(1, job["frame_bytes"] + 64, num_ahead=1 << 20)


def in_settings(job: dict[str, Any]) -> InSettings:
    capacity_bytes = max(job["frame_bytes"] + 64, 1 << 16)
    return InSettings("sender", capacity_bytes, window=window(job))


def out_settings(job: dict[str, Any]) -> OutSettings:
    capacity_bytes = max(job["frame_bytes"] + 64, 1 << 16)
    return OutSettings("receiver", capacity_bytes, window=window(job))


def sending(job: dict[str, Any]) -> Any:
    """Yield the numbers of the frames that a sender sends."""
    number = 0
    until_s = time.monotonic() + job["seconds"]
    while time.monotonic() < until_s or number < FEWEST_FRAMES:
        yield number
        number += 1


def send(end: SendingEnd, job: dict[str, Any], start: Callable[[], None]) -> None:
    part = torch.randint(256, (job["frame_bytes"],), dtype=torch.uint8)
    end.send(MessageKey(Kind.START), ())
    start()
    for number in sending(job):
        end.send(MessageKey(Kind.ACTIVATION, number), (part,))
    end.send(MessageKey(Kind.STOP), ())
    end.close(300.0)


def receive(
    end: ReceivingEnd, job: dict[str, Any], start: Callable[[], None], arrived_s: list[float]
) -> None:
    end.recv(MessageKey(Kind.START), 60.0)
    start()
    number = 0
    # The last one is not known, so that what comes is looked at before it is asked for.
    while (frame := end._inbox.get()).key.kind is not Kind.STOP:  # type: ignore[union-attr]
        assert frame.key.step == number  # type: ignore[union-attr]
        arrived_s.append(time.monotonic())
        number += 1
    end.close(60.0)
    if isinstance(end, StreamInLink):
        end.join(10.0)


if __name__ == "__main__":
    main()

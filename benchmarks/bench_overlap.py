"""What it gains to sum gradients over the ranks of a cloud during the backward (early_sums.py).

python -m benchmarks.bench_overlap [--layers 24] [--batch 128] [--rounds 5] [--bandwidth 1e9]

Two ranks of one thread each, gloo. Every update is made with both ways in alternation, in the same
processes: forward and backward of so many square layers, then their gradients summed. Without
--bandwidth the ranks meet over loopback, where carrying bytes costs the same cores that compute;
with it they stand in network namespaces (root, iproute2), whose line carries so many bits per
second. Printed: medians, the ratio, and whether both ways gave the same bits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.machine import say_where
from benchmarks.namespaces import ADDRESSES, INTERFACE, two_hosts
from xcloud.net.gloo_groups import GlooCollectives
from xcloud.pipeline.exchange import FlatBuffer, RankGroup
from xcloud.pipeline.overlapped_sums import BUCKET_BYTES, OverlappedSums


def network(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def worker(rank: int, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=given.meet)
    group = RankGroup(rank, (0, 1), GlooCollectives(dist.new_group([0, 1]), (0, 1)))
    ways: dict[str, tuple[nn.Module, FlatBuffer, OverlappedSums | None]] = {}
    for way in ("after", "during"):
        module = network(given.width, given.layers)
        buffer = FlatBuffer(module.parameters())
        early = OverlappedSums({0: buffer}, {0: group}, {0: 1}, int(given.bucket * 2**20))
        if way == "after":
            buffer.finish_sum = None
        ways[way] = (module, buffer, early if way == "during" else None)
    torch.manual_seed(rank)
    x = torch.randn(given.batch, given.width)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sums: dict[str, Tensor] = {}
    for number in range(given.rounds + 1):
        for way, (module, buffer, early) in ways.items():
            buffer.zero()
            dist.barrier()
            started_s = time.perf_counter()
            if early is not None:
                early.begin()
            loss = module(x).square().mean()
            loss.backward()
            buffer.sum_over(group, loss.detach())
            if number:  # the first one warms up
                seconds[way].append(time.perf_counter() - started_s)
            sums[way] = buffer.flat
    if rank == 0:
        after, during = (statistics.median(seconds[way]) for way in ("after", "during"))
        num_bytes = ways["after"][1].flat.nbytes
        print(
            f"{num_bytes / 1e6:.0f} MB: after {after:.3f} s, during {during:.3f} s, "
            f"ratio {during / after:.3f}, same bits: {torch.equal(*sums.values())}"
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket", type=float, default=BUCKET_BYTES / 2**20, help="MB")
    parser.add_argument("--bandwidth", type=float, help="bit/s; default: loopback")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--meet")
    given = parser.parse_args()
    if given.rank is not None:
        worker(given.rank, given)
        return
    say_where()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        hosts, environment = None, {**os.environ, "OMP_NUM_THREADS": "1"}
        meet = f"file://{folder}/meet"
        if given.bandwidth:
            hosts = stack.enter_context(two_hosts(given.bandwidth))
            environment["GLOO_SOCKET_IFNAME"] = INTERFACE
            meet = f"tcp://{ADDRESSES[0]}:29517"
        ranks = []
        for rank in (0, 1):
            within = ["ip", "netns", "exec", hosts[rank]] if hosts else []
            words = [sys.executable, "-m", "benchmarks.bench_overlap", *sys.argv[1:]]
            words += ["--rank", str(rank), "--meet", meet]
            ranks.append(subprocess.Popen([*within, *words], env=environment))
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")


if __name__ == "__main__":
    main()

"""Step time against torch.distributed.pipelining (GPipe and 1F1B), and against what computing
alone takes, side by side.

    python -m benchmarks.bench_pipelining [--mbit 3 10 30 100 1000 free] [--rounds 3] [--steps 10]
        [--rtt-ms 0 50 150] [--micro-batches 4] [--systems "xcloud ZB 8 INT4" ...]

Two namespaces as hosts, one rank in each, the kernel limits their link (tbf), or a line in user
space that also has a round trip. Every rank holds the
same Transformer layers in both systems, computes the same micro-batches in FP32 and makes the same
SGD step; the systems take turns within one pair of processes, so noise hits all alike. Prints the
median step time of each, and writes JSON with --json.

A system is named by whose it is, its schedule, micro-batches in flight (not for GPipe), and its
compressor, forward and backward: "xcloud 1F1B 3 INT4+INT2". Without one nothing is compressed.
"compute" is each rank's forward, backward and update of the same micro-batches with nobody to wait
for, both ranks at once, the slower one: what a step takes at least, with one round trip
(experiments/README.md).

Like for like, and by cause:
- links: GPipe / GPipe and 1F1B / 1F1B, both with 2 micro-batches in flight. The schedule is the
  same, so what differs is how messages travel.
- schedule: our 1F1B with 3 in flight / our 1F1B with 2. torch's 1F1B keeps as many in flight as
  there are stages, so there is nothing of its own to compare this one with.
- split 2, split 3: our zero bubble / our 1F1B with as many in flight. What differs is when the
  gradients of weights are computed: of the feed-forward layers, two thirds of all weights, as
  torch's attention layers multiply in one function.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count, product
from pathlib import Path

from benchmarks.machine import ran_on, say_where
from benchmarks.namespaces import (
    ADDRESSES,
    INTERFACE,
    available,
    delay_available,
    inside,
    two_hosts,
)

BATCH, LENGTH, HIDDEN, LAYERS = 32, 64, 384, 3
_systems = count()  # of ours, in the same order in both ranks
COMPUTE = "compute"
SYSTEMS = (
    COMPUTE, "xcloud GPipe", "xcloud 1F1B 2", "xcloud 1F1B 3", "xcloud ZB 2", "xcloud ZB 3",
    "xcloud 1F1B 3 INT4", "xcloud 1F1B 3 INT4+INT2", "torch GPipe", "torch 1F1B 2",
)  # fmt: skip
RATIOS = {
    "links GPipe": ("xcloud GPipe", "torch GPipe"),
    "links 1F1B": ("xcloud 1F1B 2", "torch 1F1B 2"),
    "schedule": ("xcloud 1F1B 3", "xcloud 1F1B 2"),
    "split 2": ("xcloud ZB 2", "xcloud 1F1B 2"),
    "split 3": ("xcloud ZB 3", "xcloud 1F1B 3"),
    "INT4": ("xcloud 1F1B 3 INT4", "xcloud 1F1B 3"),
    "INT4+INT2": ("xcloud 1F1B 3 INT4+INT2", "xcloud 1F1B 3"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mbit", nargs="+", default=["30", "100", "1000", "free"])
    parser.add_argument(
        "--rtt-ms", "--round-trip-ms", dest="round_trip_ms", nargs="+", type=float, default=[0.0]
    )
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps of each system in a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.systems
    if arguments.rank is not None:
        return rank_main(arguments)
    say_where()
    reason = delay_available() if any(arguments.round_trip_ms) else available()
    if reason is not None:
        sys.exit(f"this benchmark cannot run here: {reason}")
    results = {}
    pairs = {name: pair for name, pair in RATIOS.items() if set(pair) <= set(names)}
    print(f"m = {arguments.micro_batches}; seconds a step")
    for round_trip_ms, mbit in product(arguments.round_trip_ms, arguments.mbit):
        rate = None if mbit == "free" else float(mbit) * 1e6
        found = measure(rate, 1e-3 * round_trip_ms, arguments)
        medians = {name: statistics.median(times) for name, times in found["times"].items()}
        ratios = {name: medians[a] / medians[b] for name, (a, b) in pairs.items()}
        if COMPUTE in medians:
            limit_s = medians[COMPUTE] + 1e-3 * round_trip_ms
            ratios |= {f"{n} / limit": medians[n] / limit_s for n in names if n != COMPUTE}
        link = f"{mbit} Mbit/s, {round_trip_ms:g} ms"
        for table in (medians, ratios):
            print(f"{link:>19} | " + "; ".join(f"{n} {v:.3f}" for n, v in table.items()),
                  flush=True)  # fmt: skip
        results[link] = {"median_s": medians, "ratios": ratios, "losses": found["losses"]}
        if arguments.json:
            about = ran_on() | {"micro_batches": arguments.micro_batches}
            arguments.json.write_text(json.dumps(about | {"links": results}, indent=1) + "\n")


def measure(
    rate: float | None, round_trip_s: float, arguments: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    with two_hosts(rate, round_trip_s or None) as hosts, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        processes = []
        for rank, host in enumerate(hosts):
            command = [*inside(host), sys.executable, "-m", "benchmarks.bench_pipelining",
                       "--rank", str(rank), "--rounds", str(arguments.rounds),
                       "--steps", str(arguments.steps), "--out", str(out),
                       "--micro-batches", str(arguments.micro_batches),
                       "--systems", *arguments.systems]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE,
                           "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29555"}  # fmt: skip
            processes.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        return dict(json.loads(out.read_text()))


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    rank, m = arguments.rank, arguments.micro_batches
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    systems = {name: system(name, rank, m) for name in arguments.systems}
    times: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, list[float]] = {name: [] for name in systems}
    for round_ in range(arguments.rounds + 1):
        for name, step in systems.items():
            dist.barrier()
            for _ in range(arguments.steps if round_ else 2):
                started = time.perf_counter()
                loss = step()
                took_s = torch.tensor(time.perf_counter() - started)
                if name == COMPUTE:
                    dist.all_reduce(took_s, dist.ReduceOp.MAX)
                if round_:  # round 0 warms up
                    times[name].append(float(took_s))
                losses[name].append(loss)
    if rank == 1:  # only the last stage knows the losses; its steps take as long as rank 0's
        arguments.out.write_text(json.dumps({"times": times, "losses": losses}))
    dist.barrier()
    os._exit(0)


def system(name: str, rank: int, m: int):
    """One step of it, as a function. Raises SystemExit for a name that is none."""
    from xcloud.comm.compression import Compression
    from xcloud.comm.compressor import Chain
    from xcloud.comm.memory import NoMemory
    from xcloud.comm.precision import BlockInt
    from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
    from xcloud.pipeline.schedule import GPipe

    match name.split():
        case ["compute"]:
            return alone(rank, m)
        case ["torch", "GPipe"]:
            return theirs(rank, "ScheduleGPipe", m)
        case ["torch", "1F1B", "2"]:
            return theirs(rank, "Schedule1F1B", m)
        case ["xcloud", "GPipe", *codec]:
            schedule = GPipe(m)
        case ["xcloud", ("1F1B" | "ZB") as kind, in_flight, *codec]:
            schedule = (OneForwardOneBackward if kind == "1F1B" else ZeroBubble)(m, int(in_flight))
        case _:
            sys.exit(f"--systems: no such system: {name!r}; see --help")
    codecs = [
        BlockInt(int(bits.removeprefix("INT"))) for bits in "".join(codec).split("+") if bits
    ]
    forward, backward = (codecs * 2)[:2] if codecs else (Chain(), Chain())
    return ours(rank, schedule, Compression(forward, backward, NoMemory(), NoMemory()))


def alone(rank: int, m: int):
    """Its micro-batches one after the other, with nobody to wait for."""
    import torch

    from xcloud.pipeline.batch_plan import cut

    module = layers(rank)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    x, y = data()
    pieces = cut(torch.arange(BATCH), m)

    def step() -> float:
        optimizer.zero_grad()
        for ids in pieces:
            found = module(x[ids].requires_grad_(rank == 1))
            found.backward(y[ids])
        optimizer.step()
        return 0.0

    return step


def layers(rank: int):
    """The same start weights in every system."""
    import torch
    from torch import nn

    torch.manual_seed(rank)
    return nn.Sequential(
        *[
            nn.TransformerEncoderLayer(HIDDEN, 6, 4 * HIDDEN, 0.0, batch_first=True)
            for _ in range(LAYERS)
        ]
    )


def data():
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, BATCH, LENGTH, HIDDEN, generator=generator)


def ours(rank: int, schedule, compression):
    import torch
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    from tests.pipelines import wired_job
    from xcloud.comm.channel import Boundary, BoundaryField
    from xcloud.comm.step_clock import StepClock
    from xcloud.contracts.model import Stage, StageOutput
    from xcloud.layout import Cloud, ClusterLayout
    from xcloud.net.gloo_link import GlooTransport
    from xcloud.net.transport import Rendezvous
    from xcloud.pipeline.batch_plan import cut
    from xcloud.pipeline.ends import Ends
    from xcloud.pipeline.pipeline import Pipeline
    from xcloud.pipeline.wiring import wire

    class Layers(Stage):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(rank)

        def forward(self, received, batch):
            if received is None:
                return StageOutput(send={"hidden": self.layers(batch["x"])})
            found = self.layers(received["hidden"])
            return StageOutput(loss=((found - batch["y"]) ** 2).mean(dim=(1, 2)).sum())

    boundary = Boundary((BoundaryField("hidden", (LENGTH, HIDDEN), torch.float32),), 1)
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, "real")
    clock, cpu = StepClock(), torch.device("cpu")
    job = wired_job(layout, {0: boundary}, compression, schedule, BATCH)
    store = PrefixStore(f"system {next(_systems)}", _get_default_store())  # lines of its own
    transport = GlooTransport(Rendezvous(rank, 2, store))
    ends = Ends(transport, layout, Path("."), clock.messages)
    wiring = wire(job, ends, clock, cpu, print)
    stage = Layers()
    pipeline = Pipeline(rank, layout, {rank: stage}, wiring.boundaries.ports, cpu, 1, clock)
    optimizer = torch.optim.SGD(stage.parameters(), 1e-3)
    x, y = data()
    batches = {
        i: {"ids": ids, "x": x[ids], "y": y[ids]}
        for i, ids in enumerate(cut(torch.arange(BATCH), schedule.num_micro_batches))
    }
    counter = iter(range(1, 1_000_000))

    def step() -> float:
        optimizer.zero_grad()
        loss = pipeline.step(schedule, batches, next(counter), weight=float(BATCH))
        optimizer.step()
        return float(loss)

    step.wiring = wiring  # the links' threads live as long as the step
    return step


def theirs(rank: int, schedule_name: str, m: int):
    import torch
    from torch.distributed import pipelining

    module = layers(rank)
    x, y = data()
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = getattr(pipelining, schedule_name)(
        stage, m, loss_fn=lambda found, target: ((found - target) ** 2).mean()
    )
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return step


if __name__ == "__main__":
    main()

"""FP32 step time against torch.distributed.pipelining (GPipe and 1F1B), side by side.

    python -m benchmarks.bench_pipelining [--mbit 30 100 1000 free] [--rounds 3] [--steps 10]

Two namespaces as hosts, one rank in each, the kernel limits their link (tbf). Every rank holds the
same Transformer layers in both systems, computes the same micro-batches in FP32 and makes the same
SGD step; the systems take turns within one pair of processes, so noise hits all alike. No
compression. Prints the median step time of each, and writes JSON with --json.

Like for like, and by cause:
- links: GPipe / GPipe and 1F1B / 1F1B, both with 2 micro-batches in flight. The schedule is the
  same, so what differs is how messages travel.
- schedule: our 1F1B with 3 in flight / our 1F1B with 2. torch's 1F1B keeps as many in flight as
  there are stages, so there is nothing of its own to compare this one with.
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
from pathlib import Path

from benchmarks.namespaces import ADDRESSES, INTERFACE, available, inside, two_hosts

BATCH, LENGTH, HIDDEN, LAYERS, MICRO_BATCHES = 32, 64, 384, 3, 4
SYSTEMS = ("xcloud GPipe", "xcloud 1F1B 2", "xcloud 1F1B 3", "torch GPipe", "torch 1F1B 2")
RATIOS = {
    "links GPipe": ("xcloud GPipe", "torch GPipe"),
    "links 1F1B": ("xcloud 1F1B 2", "torch 1F1B 2"),
    "schedule": ("xcloud 1F1B 3", "xcloud 1F1B 2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mbit", nargs="+", default=["30", "100", "1000", "free"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps of each system in a round")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return rank_main(arguments.rank, arguments.rounds, arguments.steps, arguments.out)
    if (reason := available()) is not None:
        sys.exit(f"this benchmark cannot run here: {reason}")
    results = {}
    print(f"{'link':>12} | {' '.join(f'{name:>13}' for name in SYSTEMS)} | "
          f"{' '.join(f'{name:>11}' for name in RATIOS)}")  # fmt: skip
    for mbit in arguments.mbit:
        rate = None if mbit == "free" else float(mbit) * 1e6
        found = measure(rate, arguments.rounds, arguments.steps)
        medians = {name: statistics.median(times) for name, times in found["times"].items()}
        ratios = {name: medians[a] / medians[b] for name, (a, b) in RATIOS.items()}
        row = " ".join(f"{medians[name]:>13.3f}" for name in SYSTEMS)
        found_ratios = " ".join(f"{ratios[name]:>11.2f}" for name in RATIOS)
        print(f"{mbit:>7} Mbit | {row} | {found_ratios}", flush=True)
        results[mbit] = {"median_s": medians, "ratios": ratios, "losses": found["losses"]}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(rate: float | None, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    with two_hosts(rate) as hosts, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        processes = []
        for rank, host in enumerate(hosts):
            command = [*inside(host), sys.executable, "-m", "benchmarks.bench_pipelining",
                       "--rank", str(rank), "--rounds", str(rounds), "--steps", str(steps),
                       "--out", str(out)]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE,
                           "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29555"}  # fmt: skip
            processes.append(subprocess.Popen(command, env=environment))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        return dict(json.loads(out.read_text()))


def rank_main(rank: int, rounds: int, steps: int, out: Path) -> None:
    import torch
    import torch.distributed as dist

    from xcloud.parallel.schedule import GPipe, OneForwardOneBackward

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    systems = {
        "xcloud GPipe": ours(rank, GPipe(MICRO_BATCHES)),
        "xcloud 1F1B 2": ours(rank, OneForwardOneBackward(MICRO_BATCHES, 2)),
        "xcloud 1F1B 3": ours(rank, OneForwardOneBackward(MICRO_BATCHES, 3)),
        "torch GPipe": theirs(rank, "ScheduleGPipe"),
        "torch 1F1B 2": theirs(rank, "Schedule1F1B"),
    }
    times: dict[str, list[float]] = {name: [] for name in systems}
    losses: dict[str, list[float]] = {name: [] for name in systems}
    for round_ in range(rounds + 1):
        for name, step in systems.items():
            dist.barrier()
            for _ in range(steps if round_ else 2):
                started = time.perf_counter()
                loss = step()
                if round_:  # round 0 warms up
                    times[name].append(time.perf_counter() - started)
                losses[name].append(loss)
    if rank == 1:  # only the last stage knows the losses; its steps take as long as rank 0's
        out.write_text(json.dumps({"times": times, "losses": losses}))
    dist.barrier()
    os._exit(0)


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


def ours(rank: int, schedule):
    import torch

    from xcloud.cluster.layout import Cloud, ClusterLayout
    from xcloud.cluster.transport import GlooTransport
    from xcloud.comm.border import Border, BorderField
    from xcloud.comm.chain import Chain
    from xcloud.comm.memory import NoMemory
    from xcloud.comm.phases import Compression
    from xcloud.comm.step_clock import StepClock
    from xcloud.contracts.stage import Stage, StageOutput
    from xcloud.parallel.pipeline import Pipeline
    from xcloud.run.wiring import wire
    from xcloud.training.batch_plan import cut

    class Layers(Stage):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(rank)

        def forward(self, received, batch):
            if received is None:
                return StageOutput(send={"hidden": self.layers(batch["x"])})
            found = self.layers(received["hidden"])
            return StageOutput(loss=((found - batch["y"]) ** 2).mean(dim=(1, 2)).sum())

    border = Border((BorderField("hidden", (LENGTH, HIDDEN), torch.float32),), 1)
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, "real")
    clock, cpu = StepClock(), torch.device("cpu")
    plain = Compression(Chain(), Chain(), NoMemory(), NoMemory())
    wiring = wire(
        GlooTransport(rank), layout, {0: border}, plain, BATCH, cpu, clock, Path("."), print,
        schedule, seed=1,
    )  # fmt: skip
    stage = Layers()
    pipeline = Pipeline(
        rank, {rank: stage}, 2, wiring.ports, layout.owner, {rank: (0, 1)}, cpu, 1, clock
    )
    optimizer = torch.optim.SGD(stage.parameters(), 1e-3)
    x, y = data()
    batches = {
        i: {"ids": ids, "x": x[ids], "y": y[ids]}
        for i, ids in enumerate(cut(torch.arange(BATCH), MICRO_BATCHES))
    }
    counter = iter(range(1, 1_000_000))

    def step() -> float:
        optimizer.zero_grad()
        loss = pipeline.step(schedule, batches, next(counter), weight=float(BATCH))
        optimizer.step()
        return float(loss)

    step.wiring = wiring  # the links' threads live as long as the step
    return step


def theirs(rank: int, schedule_name: str):
    import torch
    from torch.distributed import pipelining

    module = layers(rank)
    x, y = data()
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = getattr(pipelining, schedule_name)(
        stage, MICRO_BATCHES, loss_fn=lambda found, target: ((found - target) ** 2).mean()
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

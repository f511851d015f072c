"""One of the ranks that bench_emulator and distance_to_limit time: a stage of a small Transformer,
one cloud each, INT8.

    python -m benchmarks.emulator_rank RANK STAGES tcp://ADDRESS:PORT LINK   (LINK: JSON, see main)

Reads blocks to run from stdin, a JSON object a line, and prints the seconds of each step. Real
links, wiring, pipeline and exchange of norms; only data and model are made up, so that nothing
has to be loaded or pretrained. Messages are as long as those of the demo AB-Net.

XCLOUD_SLEEP_S in the environment: stages sleep so long for a sample, forward and twice that
backward, instead of computing, and leave the processors to whatever carries the messages. "zero"
in a block: zero bubble with all micro-batches in flight, and GPipe otherwise.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from tests.pipelines import wired_job
from xcloud.comm.channel import Boundary, BoundaryField, Message
from xcloud.comm.compression import Compression
from xcloud.comm.precision import BlockInt
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import Batch, Stage, StageOutput
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Kind
from xcloud.net.gloo_link import GlooTransport
from xcloud.net.link_profile import LinkProfile, Wan
from xcloud.net.transport import Rendezvous
from xcloud.pipeline.batch_plan import cut
from xcloud.pipeline.control import Signal
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.one_forward_one_backward import ZeroBubble
from xcloud.pipeline.pipeline import Pipeline
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.pipeline.wiring import wire

BATCH, LENGTH, HIDDEN, LAYERS = 64, 14, 128, 3


class Layers(Stage):
    """A part of the Transformer; the last one has a loss."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self._is_last = is_last
        sleep_s = os.environ.get("XCLOUD_SLEEP_S")
        self.layers = (
            SleepingLayers(float(sleep_s))
            if sleep_s
            else nn.Sequential(
                *[
                    nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, 0.0, batch_first=True)
                    for _ in range(LAYERS)
                ]
            )
        )

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        found = self.layers(batch["x"] if received is None else received["hidden"])
        if not self._is_last:
            return StageOutput(send={"hidden": found})
        return StageOutput(loss=((found - batch["y"]) ** 2).mean(dim=(1, 2)).sum())


class Sleep(torch.autograd.Function):
    """Keeps its input; takes its time, as layers on a processor of their own would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Tensor, sample_s: float) -> Tensor:
        ctx.sample_s = sample_s
        time.sleep(sample_s * len(x))
        return x + shift

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        time.sleep(ctx.sample_s * len(gradient))
        return gradient, gradient.sum(dim=(0, 1)), None


class SleepingLayers(nn.Module):
    """As long forward as backward for the gradient of the input, and for that of the weights,
    which may be put off."""

    def __init__(self, sample_s: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(HIDDEN))
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.linear.weight.register_hook(self._sleep_for_weights)
        self._sample_s, self._num_samples = sample_s, 0

    def forward(self, x: Tensor) -> Tensor:
        self._num_samples = len(x)
        kept: Tensor = Sleep.apply(x, self.shift, self._sample_s)  # type: ignore[no-untyped-call]
        return self.linear(kept)  # type: ignore[no-any-return]

    def _sleep_for_weights(self, gradient: Tensor) -> None:
        time.sleep(self._sample_s * self._num_samples)


_systems = count()


class System:
    """A stage and its links for one schedule and one budget for receives."""

    def __init__(
        self, rank: int, num_stages: int, wan: Wan, schedule: Schedule, budget_bytes: int,
        folder: Path,
    ) -> None:  # fmt: skip
        clouds = {name: Cloud() for name in "abcdefgh"[:num_stages]}
        layout = ClusterLayout(clouds, wan, link_budget_bytes=budget_bytes)
        hidden = BoundaryField("hidden", (LENGTH, HIDDEN), torch.float32)
        cpu, clock = torch.device("cpu"), StepClock()
        self._schedule = schedule
        self._pieces = cut(torch.arange(BATCH), schedule.num_micro_batches)
        self._rank, self._num_stages, self._steps = rank, num_stages, 0
        int8 = Compression(BlockInt(8), BlockInt(8))
        boundaries = {stage: Boundary((hidden,), 1) for stage in range(num_stages - 1)}
        job = wired_job(layout, boundaries, int8, schedule, len(self._pieces[0]))
        # Each system has a part of the store, and so clocks of its own.
        store = PrefixStore(f"system {next(_systems)}", _get_default_store())
        transport = GlooTransport(Rendezvous(rank, num_stages, store))
        ends = Ends(transport, layout, folder, clock.messages)
        self.wiring = wire(job, ends, clock, cpu, print)
        torch.manual_seed(rank)
        self._stage = Layers(rank == num_stages - 1)
        self._pipeline = Pipeline(
            rank, layout, {rank: self._stage}, self.wiring.boundaries.ports, cpu, 1, clock
        )
        self._optimizer = torch.optim.SGD(self._stage.parameters(), 1e-3)
        x, y = torch.randn(2, BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
        self._batches = {
            i: {"ids": ids, "x": x[ids], "y": y[ids]} for i, ids in enumerate(self._pieces)
        }

    def step(self) -> float:
        """One update; its seconds."""
        started = time.perf_counter()
        self._steps += 1
        self._optimizer.zero_grad()
        self._pipeline.step(self._schedule, self._batches, self._steps, float(BATCH))
        self.wiring.sums.sum_over_stages(self._steps, {self._rank: 1.0}, lambda step: Signal.GO_ON)
        self._optimizer.step()
        return time.perf_counter() - started

    @property
    def bytes_per_step(self) -> float:
        stats = self.wiring.ends.outs[-1].record
        return (stats.num_bytes[Kind.ACTIVATION] + stats.num_bytes[Kind.GRADIENT]) / self._steps


def main() -> None:
    """LINK: {"bandwidth_bits_per_s": ..., "latency_s": ...} of an emulated link, or "real"."""
    rank, num_stages, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    link = json.loads(sys.argv[4])
    wan: Wan = "real" if link == "real" else LinkProfile(**link)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_stages)
    systems: dict[tuple[int, int, bool], System] = {}
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            block: dict[str, Any] = json.loads(line)
            m, budget_bytes = block["micro_batches"], block["budget_bytes"]
            is_split = "zero" in block
            wanted = m, budget_bytes, is_split
            if wanted not in systems:
                schedule = ZeroBubble(m, m) if is_split else GPipe(m)
                systems[wanted] = System(
                    rank, num_stages, wan, schedule, budget_bytes, Path(folder)
                )
            system = systems[wanted]
            dist.barrier()
            times = [system.step() for _ in range(block["steps"])]
            print(json.dumps({"times": times, "bytes": system.bytes_per_step}), flush=True)
    os._exit(0)  # the links' threads wait for messages


if __name__ == "__main__":
    main()

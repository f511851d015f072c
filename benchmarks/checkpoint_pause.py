"""Does a checkpoint of a large model stop training for less than one step?
python -m benchmarks.checkpoint_pause [--parameters N] [--tokens N] [--too-early] [--json FILE]

A model of N parameters (1e9) in bf16 with its AdamW moments, on the CPU, saved as a rank of a
pipeline saves its stage: the training thread copies the state, a thread writes it to --folder
(/dev/shm, so that no disk is measured). Compared: the pause of the training thread with one step,
which is the optimizer's, measured on all parameters, and forward and backward of --tokens tokens,
measured on one layer and multiplied. Next to it the optimizer's step while the thread writes, and
while it makes the memory of the first copy, half way to the first checkpoint. --too-early: the
first checkpoint comes before that.

Needs 18 bytes a parameter: values and moments (6), the copy (6) and the file (6); all matrices
share one gradient. What does not fit into free memory is refused, with the number that does. About
3 minutes and 18 GB for 1e9 on two cores. Sizes are simulated: the weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.machine import ran_on
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing
from xcloud.launch.processes import LIBRARY_SETTINGS
from xcloud.pipeline.control import Signal
from xcloud.pipeline.settings import Checkpoints, Optimizer
from xcloud.pipeline.trainer import TrainedModule
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.reporter import Reporter

WIDTH = 4096
BYTES_PER_PARAMETER = 18
ABOUT: dict[str, Any] = {"release": "", "attempt": 1, "stages": [], "settings": {}, "facts": {}}


def model_of(num_parameters: int) -> nn.Sequential:
    """Square matrices of WIDTH, the last one with as many rows as are left; bf16."""
    rows, layers = -(-num_parameters // WIDTH), []
    while rows > 0:
        layer = nn.Linear(WIDTH, min(WIDTH, rows), bias=False, dtype=torch.bfloat16)
        rows -= WIDTH
        layers.append(layer)
    return nn.Sequential(*layers)


def seconds(work: Callable[[], object], times: int = 3) -> list[float]:
    taken = []
    for _ in range(times):
        started_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started_s)
    return taken


def computing_s(layer: nn.Module, num_tokens: int) -> float:
    """Of forward and backward through one layer, the gradient of its input included."""
    x_ND = torch.randn(num_tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)

    def both() -> None:
        out: Tensor = layer(x_ND)
        out.backward(torch.ones_like(out))

    both()  # the first call prepares the matrix products
    return statistics.median(seconds(both))


def measure(
    num_parameters: int, num_tokens: int, folder: Path, is_too_early: bool = False
) -> dict[str, Any]:
    module = model_of(num_parameters)
    num_parameters = sum(p.numel() for p in module.parameters())
    optimizer = Optimizer(learning_rate=1e-6).build(module)
    layer_s = computing_s(module[0], num_tokens)
    forward_backward_s = layer_s * num_parameters / module[0].weight.numel()
    gradient = torch.full((WIDTH, WIDTH), 1e-3, dtype=torch.bfloat16)
    for parameter in module.parameters():
        parameter.grad = gradient[: len(parameter)]
    optimizer.step()  # the first one makes the moments
    optimizer_s = statistics.median(seconds(optimizer.step))

    told: list[bytes] = []
    reporter, files = Reporter(0, "a", told.append), CheckpointFolder(folder)
    checkpoints = Checkpointer(
        Timing(Checkpoints(every_steps=3, every_minutes=0, keep=1)),
        CheckpointWriter(files, 0, ABOUT), None,
        {"stage 0": TrainedModule(module, optimizer)}, reporter,
    )  # fmt: skip
    pauses_s, while_preparing_s, while_writing_s = [], [], []
    started_s = time.perf_counter()
    if not is_too_early:
        checkpoints.after(1, Signal.GO_ON)
        ready = threading.Thread(target=checkpoints.settle, args=(False,))
        ready.start()
        while ready.is_alive():
            while_preparing_s += seconds(optimizer.step, 1)
    prepare_s = time.perf_counter() - started_s
    for step in (3, 6, 9):
        pauses_s += seconds(lambda step=step: checkpoints.save(step), 1)
        while_writing_s += seconds(optimizer.step, 1)
        for _ in ("written", "agreed"):
            checkpoints.settle()
        files.delete(step, 0)  # two would not fit
    checkpoints.close()
    reporter.flush()
    events = [json.loads(line) for lines in told for line in lines.splitlines()]
    step_s = optimizer_s + forward_backward_s
    return {
        "parameters": num_parameters,
        "tokens": num_tokens,
        "state_GB": round(6 * num_parameters / 1e9, 3),
        "pause_s": [round(s, 3) for s in pauses_s],
        "is_too_early": is_too_early,
        "prepare_s": round(prepare_s, 3),
        "write_s": [e["write_s"] for e in events if e["event"] == "checkpoint"],
        "lost": [e["reason"] for e in events if e["event"] == "lost_checkpoint"],
        "optimizer_s": round(optimizer_s, 3),
        "optimizer_while_preparing_s": [round(s, 3) for s in while_preparing_s],
        "optimizer_while_writing_s": [round(s, 3) for s in while_writing_s],
        "forward_backward_s": round(forward_backward_s, 3),
        "step_s": round(step_s, 3),
        "worst_pause_in_steps": round(max(pauses_s) / step_s, 3),
        "worst_pause_in_optimizer_steps": round(max(pauses_s) / optimizer_s, 3),
        "is_under_one_step": max(pauses_s) < step_s,
    }


def fitting(folder: Path) -> int:
    """Parameters for which there is memory, a twentieth of it to spare."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    return int(0.95 * min(available / BYTES_PER_PARAMETER, shutil.disk_usage(folder).free / 6))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--too-early", action="store_true", help="do not prepare the first copy")
    parser.add_argument("--json", type=Path, help="append the result to this file, too")
    given = parser.parse_args()
    # As the launcher has it: freed memory is kept.
    if not LIBRARY_SETTINGS.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]],
                  {**os.environ, **LIBRARY_SETTINGS})  # fmt: skip
    most = fitting(given.folder)
    if not 1 <= given.parameters <= most:
        parser.error(f"--parameters {given.parameters:,.0f}: 1 to {most:,} fit into memory now")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(int(given.parameters), given.tokens, Path(folder), given.too_early)
    text = json.dumps({**ran_on(), **found})
    print(text, flush=True)
    if given.json is not None:
        with open(given.json, "a") as file:
            file.write(text + "\n")
    if found["lost"]:
        sys.exit("a checkpoint could not be written: its pause does not count")


if __name__ == "__main__":
    main()

"""How fast this machine is just now: the same small work whatever the job, so that a profile can
say whether the machine still is as fast as when it was measured.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from xcloud.plan.stopwatch import Stopwatch
from xcloud.training.settings import Optimizer

LASTING_S = 0.3


def reference_s(device: torch.device, threads: int, lasting_s: float = LASTING_S) -> float:
    """Median seconds of forward, backward and update of a small Transformer layer, done again and
    again for lasting_s. threads: as many as a rank has."""
    watch, before = Stopwatch(device), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            layer = nn.TransformerEncoderLayer(256, 8, 512, dropout=0.0, batch_first=True)
        layer.to(device)
        optimizer = Optimizer().build(layer.parameters())
        hidden = torch.ones(4, 64, 256, device=device)

        def once() -> float:
            started_s = watch.now_s()
            layer.zero_grad(set_to_none=False)
            layer(hidden).square().mean().backward()
            optimizer.step()
            return watch.now_s() - started_s

        once()
        found, until_s = [once()], time.perf_counter() + lasting_s
        while time.perf_counter() < until_s:
            found.append(once())
        return statistics.median(found)
    finally:
        torch.set_num_threads(before)

"""The loop that pretrains a network, and what an interrupted one goes on from. What is learned is
in pretraining.py and causal_base.py; a run's training loop is in training/.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from xcloud.base.checks import check_int, check_number
from xcloud.comm.state import State, Stateful, load_states, states_of
from xcloud.record.checkpoints import CheckpointFolder
from xcloud.training.optimizer import Optimizer
from xcloud.training.trained_module import TrainedModule

FIRST_REPORT_S = 2.0  # by then the time of a step is known
REPORT_EVERY_S = 30.0
SAVE_EVERY_S = 20.0

Batch = TypeVar("Batch")


class Descent:
    """How a backbone is pretrained: AdamW with linear warm-up, then linear decay to zero, and
    gradients of norm 1 at most. Weight decay spares biases and norms, as in training/optimizer.py.
    """

    steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    seed: int

    def check_descent(self, owner: str) -> None:
        check_int(f"{owner}.steps", self.steps, 0)
        check_number(f"{owner}.learning_rate", self.learning_rate, 0, above=True)
        check_int(f"{owner}.warmup_steps", self.warmup_steps, 0)
        check_number(f"{owner}.weight_decay", self.weight_decay, 0)
        check_int(f"{owner}.seed", self.seed, 0)

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        warm = (step + 1) / (self.warmup_steps + 1)
        left = (self.steps - step) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * min(1.0, warm, left)

    def descend(
        self,
        network: nn.Module,
        batches: Iterator[Batch],
        loss_of: Callable[[Batch], Tensor],
        report: Callable[[str], None],
        score: Callable[[], object],
        unfinished: Path | None = None,
        more: nn.Module | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Train `network` in place; yields each step, counted from 0, and its loss.

        batches: the same from the first on in every process. score: said in progress reports.
        unfinished: a folder for the state of network, optimizer, random generators and `more`,
        written every SAVE_EVERY_S; an earlier process's descent goes on from there, bit for bit.
        """
        decayed = Optimizer(betas=(0.9, 0.98), weight_decay=self.weight_decay)
        optimizer = decayed.build(network.parameters())
        parts: dict[str, Stateful] = {"network": TrainedModule(network, optimizer)}
        parts["generators"] = _Generators(next(network.parameters()).device)
        if more is not None:
            parts["more"] = TrainedModule(more, None)
        folder = CheckpointFolder(unfinished) if unfinished is not None else None
        saved = [step for step in folder.steps() if folder.ranks(step)] if folder else []
        first = saved[0] if saved else 0
        if folder and first:
            load_states(parts, folder.read(first, 0), "an unfinished backbone")
            for _ in range(first):
                next(batches)
            report(f"goes on after step {first} of {self.steps}, where it was interrupted")
        saved_at_s = time.monotonic()
        began_at_s, report_at_s = math.nan, saved_at_s + FIRST_REPORT_S
        for step in range(first, self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate_at(step)
            loss = loss_of(next(batches))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            yield step, loss.detach()
            done, now_s = step + 1, time.monotonic()
            if step == first:  # takes longer than others
                began_at_s = now_s
            elif now_s >= report_at_s:
                left_s = (now_s - began_at_s) / (step - first) * (self.steps - done)
                left = f"{left_s / 60:.0f} min" if left_s > 90 else f"{left_s:.0f} s"
                report(f"step {done}/{self.steps}, about {left} left, {score()}")
                report_at_s = now_s + REPORT_EVERY_S
            if folder and now_s - saved_at_s >= SAVE_EVERY_S:
                folder.write(done, 0, states_of(parts), {})
                for earlier in folder.steps()[1:]:
                    folder.delete(earlier, 0)
                saved_at_s = time.monotonic()


class _Generators:
    """Torch's own random generators, from which dropout draws on this device."""

    def __init__(self, device: torch.device) -> None:
        self._all = [torch.default_generator]
        if device.type == "cuda":
            self._all.append(torch.cuda.default_generators[device.index or 0])

    def state_dict(self) -> State:
        return {str(number): one.get_state() for number, one in enumerate(self._all)}

    def load_state_dict(self, state: State) -> None:
        for number, one in enumerate(self._all):
            one.set_state(torch.as_tensor(state[str(number)]))

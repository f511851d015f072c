"""Small networks that are pretrained on the spot, once, and kept in the cache: where they lie, on
what public text, by which descent. What is learned is in pretraining.py and causal_base.py.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from xcloud.base.errors import DataError
from xcloud.base.settings import NotNegative, NotNegativeFloat, PositiveFloat, settings
from xcloud.base.units import human_duration
from xcloud.comm.state import State, Stateful, load_states, states_of
from xcloud.contracts.model import BuildContext, TokenIds
from xcloud.hub import make_once
from xcloud.record.checkpoints import CheckpointFolder
from xcloud.training.settings import Optimizer
from xcloud.training.trained_module import TrainedModule

FIRST_REPORT_S = 2.0  # by then the time of a step is known
REPORT_EVERY_S = 30.0
SAVE_EVERY_S = 20.0

Batch = TypeVar("Batch")


@runtime_checkable
class PublicTexts(Protocol):
    """Text that every cloud produces or reads identically, as token ids."""

    def describe(self) -> str:
        """A short name, without reading anything."""

    def token_ids(self, cache_dir: Path) -> TokenIds:
        """Size and special ids of the tokenizer."""

    def sentences(self, num: int, cache_dir: Path) -> Sequence[Sequence[int]]:
        """Token ids of `num` texts without special ids, equal in every cloud. Raises DataError if
        there are fewer."""


def made_once(
    name: str, context: BuildContext, build: Callable[[Path, Path], None]
) -> tuple[Path, bool]:
    """The file or folder `name` of the cache, and whether this rank made it. Every rank of a stage
    calls it; the first builds it if it is not there, the others wait at context.barrier.

    build: called with the path to write, and with a folder that outlives an interrupted call.
    Raises DataError in a rank that does not see what the first one wrote.
    """
    path = context.cache_dir / name
    unfinished = path.with_suffix(".unfinished")
    made = context.group_rank == 0 and make_once(path, lambda part: build(part, unfinished))
    if made:
        shutil.rmtree(unfinished, ignore_errors=True)
    context.barrier()  # Every rank must reach this line, cached or not, or the others hang.
    if not path.exists():
        raise DataError(
            f"rank {context.group_rank} of the stage does not find {path}, which its rank 0 "
            "wrote: the ranks of a stage must share one cache folder"
        )
    return path, made


@settings("pretraining")
class Descent:
    """How a network is pretrained: AdamW with linear warm-up, then linear decay to zero, and
    gradients of norm 1 at most. Weight decay spares biases and norms, as in training/settings.py.

    seed is the network's own, not the run's: runs of several seeds share it, as they would share a
    published checkpoint. steps=0 leaves random weights.
    """

    steps: NotNegative
    learning_rate: PositiveFloat
    warmup_steps: NotNegative
    weight_decay: NotNegativeFloat = 0.01
    seed: NotNegative = 0

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
        unfinished: Path,
        more: nn.Module | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Train `network` in place; yields each step, counted from 0, and its loss.

        batches: the same from the first on in every process. score: part of progress reports.
        unfinished: a folder for the state of network, optimizer, random generators and `more`,
        written every SAVE_EVERY_S; an earlier process's descent is resumed from it, bit for bit.
        """
        decayed = Optimizer(betas=(0.9, 0.98), weight_decay=self.weight_decay)
        optimizer = decayed.build(network.parameters())
        parts: dict[str, Stateful] = {"network": TrainedModule(network, optimizer)}
        parts["generators"] = _Generators(next(network.parameters()).device)
        if more is not None:
            parts["more"] = TrainedModule(more, None)
        folder = CheckpointFolder(unfinished)
        first = next((step for step in folder.steps() if folder.ranks(step)), 0)
        if first:
            load_states(parts, folder.read(first, 0), "an unfinished backbone")
            report(f"resumed after step {first} of {self.steps}, where it was interrupted")
        for _ in range(first):
            next(batches)
        began_at_s = saved_at_s = time.monotonic()
        report_at_s = began_at_s + FIRST_REPORT_S
        for step in range(first, self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate_at(step)
            loss = loss_of(next(batches))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            yield step, loss.detach()
            now_s = time.monotonic()
            if step == first:  # takes longer than others
                began_at_s = now_s
            elif now_s >= report_at_s:
                left_s = (now_s - began_at_s) / (step - first) * (self.steps - step - 1)
                left = human_duration(left_s)
                report(f"step {step + 1}/{self.steps}, about {left} left, {score()}")
                report_at_s = time.monotonic() + REPORT_EVERY_S
            if now_s - saved_at_s >= SAVE_EVERY_S:
                folder.write(step + 1, 0, states_of(parts), {})
                for earlier in folder.steps()[1:]:
                    folder.delete(earlier, 0)
                saved_at_s = now_s


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

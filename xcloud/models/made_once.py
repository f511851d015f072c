"""Small networks that are pretrained on the spot, once, and kept in the cache: where they lie, on
what public text, by which descent. What is learned is in pretraining.py and causal_base.py.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Protocol, TypeVar, runtime_checkable

import torch
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import DataError
from xcloud.base.settings import NotNegative, settings
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
    learning_rate: Annotated[float, Field(gt=0.0)]
    warmup_steps: NotNegative
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
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
        unfinished: Path | None = None,
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
        saved = _Saved(parts, unfinished)
        for _ in range(saved.step):
            next(batches)
        if saved.step:
            report(f"resumed after step {saved.step} of {self.steps}, where it was interrupted")
        progress = _Progress(saved.step, self.steps, report, score)
        for step in range(saved.step, self.steps):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate_at(step)
            loss = loss_of(next(batches))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            yield step, loss.detach()
            progress.after(step + 1)
            saved.after(step + 1)


class _Saved:
    """The state of a descent in a folder, or (None) nowhere. step: how many are done in it."""

    def __init__(self, parts: dict[str, Stateful], folder: Path | None) -> None:
        self._parts, self._saved_at_s = parts, time.monotonic()
        self._folder = CheckpointFolder(folder) if folder is not None else None
        steps = self._folder.steps() if self._folder else []
        self.step = next((s for s in steps if self._folder and self._folder.ranks(s)), 0)
        if self._folder and self.step:
            load_states(parts, self._folder.read(self.step, 0), "an unfinished backbone")

    def after(self, step: int) -> None:
        if self._folder and time.monotonic() - self._saved_at_s >= SAVE_EVERY_S:
            self._folder.write(step, 0, states_of(self._parts), {})
            for earlier in self._folder.steps()[1:]:
                self._folder.delete(earlier, 0)
            self._saved_at_s = time.monotonic()


class _Progress:
    """Report every REPORT_EVERY_S how far a descent is, and how long the rest will take."""

    def __init__(
        self, first: int, steps: int, report: Callable[[str], None], score: Callable[[], object]
    ) -> None:
        self._first, self._steps, self._report, self._score = first, steps, report, score
        self._began_at_s, self._report_at_s = math.nan, time.monotonic() + FIRST_REPORT_S

    def after(self, step: int) -> None:
        now_s = time.monotonic()
        if step == self._first + 1:  # takes longer than others
            self._began_at_s = now_s
        elif now_s >= self._report_at_s:
            step_s = (now_s - self._began_at_s) / (step - self._first - 1)
            left = human_duration(step_s * (self._steps - step))
            self._report(f"step {step}/{self._steps}, about {left} left, {self._score()}")
            self._report_at_s = now_s + REPORT_EVERY_S


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

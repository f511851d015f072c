"""The memory that one rank's training takes, and of what."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xcloud.parallel.exchange import local_part
from xcloud.parallel.part import Part, StepReport
from xcloud.record.reporter import Reporter
from xcloud.survive.saving import bytes_to_copy
from xcloud.training.trainer import Trainer


class MemoryMeter:
    """`first_step` goes around every step; `describe` says in bytes:

    peak: most resident memory of the process since the first step began, libraries and network
        buffers included; where the system cannot forget an earlier peak (no Linux, or not
        allowed), since the process began.
    gpu_peak: most that torch had allocated on the GPU; only where there is one.
    parameters, gradients, optimizer: of this rank's stages; frozen weights and buffers are
        parameters here, moments are the optimizer's.
    activations: most that was kept at once for the backward of the first step, over all
        micro-batches in flight. What a backward computes again is not kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._activations = SavedTensors()
        self._is_first = True

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """The first time peaks begin anew and activations are counted; later, nothing."""
        if not self._is_first:
            yield
            return
        self._is_first = False
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (Linux)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        with self._activations:
            yield

    def describe(self, modules: Iterable[nn.Module], optimizer_bytes: int) -> dict[str, Any]:
        tensors = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}.values()
        found: dict[str, Any] = {"peak": _peak_bytes()}
        if self._device.type == "cuda":
            found["gpu_peak"] = torch.cuda.max_memory_allocated(self._device)
        return found | {
            "parameters": bytes_of(tensors),
            "gradients": bytes_of(t.grad for t in tensors if t.grad is not None),
            "optimizer": optimizer_bytes,
            "activations": self._activations.peak_bytes,
        }


class MemoryReport(Part):
    """Of a pipeline's rank. states: takes the state that checkpoints copy; None: none are made."""

    def __init__(
        self, trainer: Trainer, reporter: Reporter, states: Callable[[], object] | None
    ) -> None:
        self._trainer, self._reporter, self._states = trainer, reporter, states
        self._meter, self._first = MemoryMeter(trainer.pipeline.device), ExitStack()

    def before_update(self, step: int) -> None:
        self._first.enter_context(self._meter.first_step())

    def after_update(self, step: int, report: StepReport) -> None:
        self._first.close()

    def finish(self) -> None:
        moments = optimizer_bytes(self._trainer.optimizers)
        figures = self._meter.describe(self._trainer.pipeline.stages.values(), moments)
        copied = bytes_to_copy(self._states) if self._states is not None else 0
        self._reporter.event("memory", **figures, checkpoint=copied)


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """While it is entered, counts what autograd keeps for the backward: num_bytes now, peak_bytes
    at most. Parameters are left out, and what several tensors share is counted once."""

    def __init__(self) -> None:
        self.peak_bytes = self.num_bytes = 0
        self._kept: Counter[int] = Counter()  # tensors in each memory block, by its address
        self._lock = threading.Lock()  # a GPU's backward lets go in a thread of its own
        super().__init__(self._keep, lambda kept: getattr(kept, "tensor", kept))

    def _keep(self, tensor: Tensor) -> Tensor | _Kept:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        kept = _Kept(tensor, self, storage.data_ptr(), storage.nbytes())
        self._add(kept.address, 1, kept.num_bytes)
        return kept

    def _add(self, address: int, count: int, num_bytes: int) -> None:
        with self._lock:
            before = self._kept[address]
            self._kept[address] += count
            if not before or not self._kept[address]:
                self.num_bytes += count * num_bytes
                self.peak_bytes = max(self.peak_bytes, self.num_bytes)


@dataclass(eq=False)
class _Kept:
    """A tensor that autograd keeps, and what tells that it is let go."""

    tensor: Tensor
    owner: SavedTensors
    address: int
    num_bytes: int

    def __del__(self) -> None:
        self.owner._add(self.address, -1, self.num_bytes)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of tensors dealt over ranks what this one holds."""
    return sum(part.numel() * part.element_size() for part in map(local_part, tensors))


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Of what they keep of each parameter."""
    kept = (value for o in optimizers for state in o.state.values() for value in state.values())
    return bytes_of(value for value in kept if isinstance(value, Tensor))


def _peak_bytes() -> int:
    """Most resident memory of this process. Linux: since the last reset; and not getrusage's,
    which a process inherits from the one that started it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource  # not on Windows, which has no gloo either

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

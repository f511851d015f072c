"""The reports of one rank after the last update: the memory that its training took, by kind, and
one of the last steps, span by span and message by message. Rank 0 chooses the step;
record/timeline.py merges what the ranks report. Also the clock of steps on a GPU."""

from __future__ import annotations

import ctypes
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xcloud.comm.devices import scratch_bytes
from xcloud.comm.step_clock import RecordedStep, Span, StepClock
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.link import MessageLog
from xcloud.net.link_end import QueuedBytes
from xcloud.net.transport import machine_id
from xcloud.pipeline.control import Control
from xcloud.pipeline.exchange import local_part
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.peak_bytes import PeakBytes
from xcloud.record.reporter import Reporter

_ENTRIES_PER_EVENT = 500  # about 25 kB a line; the report link takes 256 KiB


@dataclass(frozen=True)
class TypicalStep(Hook):
    """A part that reports one of the last steps.

    control: None where there is one rank.
    owner: the owner of this rank's clock, where clouds belong to several: two owners' machines
        share no clock, even where both name themselves alike.
    """

    clock: StepClock
    control: Control | None
    reporter: Reporter
    owner: str = ""

    def finish(self) -> None:
        """Send the "timeline" events of the step that rank 0 chooses by its own clock, as a step
        ends in all ranks together. Every rank has recorded it."""
        steps = self.clock.recorded
        messages = self.clock.messages
        if not steps or messages is None:  # the last step was made before the run was resumed
            return
        step_s = [step.ended_at_s - step.started_at_s for step in steps]
        typical = steps[nearest_to_median([step.step for step in steps], step_s)].step
        # One rank's clock decides, or the timeline would join spans of several steps.
        number = typical if self.control is None else self.control.barrier(number=typical)
        for step in steps:
            if step.step == number:
                for part in timeline_events(step, messages, owner=self.owner):
                    self.reporter.event("timeline", **part)
        self.reporter.flush()


def nearest_to_median(steps: Sequence[int], step_s: Sequence[float]) -> int:
    """Return the index of the step nearest to the median time, the latest of equals. Step 1, which
    warms every cache, only if there is no other."""
    candidates = [i for i, step in enumerate(steps) if step > 1] or [0]
    median = statistics.median(step_s[i] for i in candidates)
    return min(reversed(candidates), key=lambda i: abs(step_s[i] - median))


def timeline_events(
    step: RecordedStep, messages: MessageLog, owner: str = ""
) -> Iterator[dict[str, Any]]:
    """Return the fields of one rank's "timeline" events; long lists are split over several events.

    Times are whole microseconds since `started_us`, by this machine's monotonic clock;
    `machine` identifies who shares it, `unix_us` is the wall-clock time at its zero.
    spans: [what, direction, stage, micro-batch, from, until]
    sent: [boundary, receiver, sequence, name, micro-batch, bytes, queued, on the line from, until]
    received: [boundary, sender, sequence, at]
    """
    origin_us = round(1e6 * step.started_at_s)

    def us(moment_s: float) -> int:
        # Round before subtracting the origin, so that equal times stay equal across ranks.
        return round(1e6 * moment_s) - origin_us

    lists: dict[str, list[list[Any]]] = {
        "spans": [
            [s.what, *s.place, us(s.started_at_s), us(s.ended_at_s)] for s in step.spans
        ],
        "sent": [
            [m.link.boundary, m.link.receiver, m.sequence, m.key.kind.name.lower(),
             m.key.micro_batch, m.num_bytes, us(m.queued_at_s), us(m.line_from_s),
             None if m.line_until_s is None else us(m.line_until_s)]
            for m in list(messages.sent)
            if _is_sent(m.key, at_s=m.queued_at_s, step=step)
        ],
        "received": [
            [m.link.boundary, m.link.sender, m.sequence, us(m.received_at_s)]
            for m in list(messages.received)
            if m.key.step == step.step or _is_near(m.received_at_s, step)
        ],
    }  # fmt: skip
    head = {
        "step": step.step,
        "machine": f"{machine_id():x}{owner and ' of '}{owner}",
        "started_us": origin_us,
        "unix_us": round(1e6 * (time.time() - time.monotonic())),
        "step_us": us(step.ended_at_s),
    }
    empty: dict[str, list[list[Any]]] = {name: [] for name in lists}
    yield {**head, **{name: entries[:_ENTRIES_PER_EVENT] for name, entries in lists.items()}}
    for name, entries in lists.items():
        # A long step has more messages than the report link takes in one; who reads them joins the
        # lists.
        for first in range(_ENTRIES_PER_EVENT, len(entries), _ENTRIES_PER_EVENT):
            yield {**head, **empty, name: entries[first : first + _ENTRIES_PER_EVENT]}


def _is_sent(key: MessageKey, at_s: float, step: RecordedStep) -> bool:
    """Return whether a rank sent a message while it made a step. Where updates overlap it may be
    one of the next step. Reports belong to no step but occupy the line: those from just before the
    step are included."""
    if key.kind is Kind.REPORT:
        return _is_near(at_s, step)
    return step.started_at_s <= at_s <= step.ended_at_s


def _is_near(at_s: float, step: RecordedStep) -> bool:
    """Return whether a moment lies in a step, or at most one such step before or after it."""
    step_s = step.ended_at_s - step.started_at_s
    return step.started_at_s - step_s <= at_s <= step.ended_at_s + step_s


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """A count of what autograd keeps for the backward while this is entered: num_bytes now,
    peak_bytes at most. Parameters are left out, and what several tensors share is counted once."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.peak_bytes = 0
        self._kept: Counter[int] = Counter()  # tensors in each memory block, by its address
        self._lock = threading.Lock()  # a GPU's backward lets go in a thread of its own
        super().__init__(self._keep, lambda kept: getattr(kept, "tensor", kept))

    def _keep(self, tensor: Tensor) -> Tensor | _KeptTensor:
        # A parameter is counted as a parameter, also where the backward keeps a view of it.
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        kept = _KeptTensor(
            tensor, owner=self, address=storage.data_ptr(), num_bytes=storage.nbytes()
        )
        self._add(kept.address, count=1, num_bytes=kept.num_bytes)
        return kept

    def _add(self, address: int, count: int, num_bytes: int) -> None:
        with self._lock:
            before = self._kept[address]
            self._kept[address] += count
            # The first tensor of a memory block brings its bytes, the last one takes them away.
            if not before or not self._kept[address]:
                self.num_bytes += count * num_bytes
                self.peak_bytes = max(self.peak_bytes, self.num_bytes)


@dataclass(eq=False)
class _KeptTensor:
    """A tensor that autograd keeps, which tells its owner when it is let go."""

    tensor: Tensor
    owner: SavedTensors
    address: int
    num_bytes: int

    def __del__(self) -> None:
        self.owner._add(self.address, count=-1, num_bytes=self.num_bytes)


@dataclass(eq=False)
class MemoryMeter:
    """A meter of the memory of one rank. `first_step` goes around every step; `describe` returns
    bytes:

    peak: maximum resident memory of the process since the first step began, libraries and network
        buffers included. If the system cannot reset an earlier peak (no Linux, or not allowed), it
        counts from the start of the process.
    program: resident memory when the meter was made, before there was a model: Python, libraries,
        and in a pipeline the data. It is part of the peak, and not of gpu_peak.
    gpu_peak: maximum that torch had allocated on the GPU; absent without a GPU.
    parameters, gradients, optimizer: memory of this rank's stages. Frozen weights and buffers
        count as parameters here, and moments as the optimizer's.
    activations: maximum that was kept at once for the backward of the first step, over all
        micro-batches in flight. Activations that a backward recomputes are not kept.
    """

    device: torch.device
    program_bytes: int = field(default_factory=lambda: _status_bytes("VmRSS"))
    _activations: SavedTensors = field(default_factory=SavedTensors)
    _is_first: bool = True

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Reset the peaks and count activations, the first time that it is entered."""
        # Later steps need as much, and hooks on every kept tensor take time.
        if not self._is_first:
            yield
            return
        self._is_first = False
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak (Linux)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with self._activations:
            yield

    def bytes_beside(self, tensor_bytes: int) -> int:
        """Return the memory that the rank takes on its device now beside so much of tensors: the
        program, with what was imported since it began. On a GPU it takes none."""
        if self.device.type == "cuda":
            return 0
        give_freed_memory_back()
        return max(0, _status_bytes("VmRSS") - tensor_bytes)

    def describe(self, modules: Iterable[nn.Module], optimizer_bytes: int) -> dict[str, Any]:
        # By identity: two stages of a rank may share a tied weight.
        tensors = {id(t): t for m in modules for t in (*m.parameters(), *m.buffers())}.values()
        found: dict[str, Any] = {
            "peak": _status_bytes("VmHWM"), "program": self.program_bytes
        }  # fmt: skip
        if self.device.type == "cuda":
            found["gpu_peak"] = torch.cuda.max_memory_allocated(self.device)
        return found | {
            "parameters": bytes_of(tensors),
            "gradients": bytes_of(t.grad for t in tensors if t.grad is not None),
            "optimizer": optimizer_bytes,
            "activations": self._activations.peak_bytes,
        }


@dataclass(eq=False)
class WorkSpace:
    """The most memory that tensors take at once in an update, beyond what there was before it and
    the activations that are kept: results on their way to the next operator, and the scratch
    tensors in which matrices are made dense.

    num_bytes: known after `end`.
    """

    device: torch.device
    num_bytes: int = 0
    _activations: SavedTensors = field(default_factory=SavedTensors)
    _made: PeakBytes = field(default_factory=PeakBytes)
    _open: ExitStack = field(default_factory=ExitStack)
    _before: int = 0

    def begin(self) -> None:
        self._open.enter_context(self._activations)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            # On a GPU torch counts by itself; on the CPU every operator is watched, which is slow.
            # That is why a work space is measured in one update of a trial and in no run.
            self._open.enter_context(self._made)

    def end(self) -> None:
        self._open.close()
        if self.device.type == "cuda":
            grown = torch.cuda.max_memory_allocated(self.device) - self._before
        else:
            grown = self._made.peak
        # Scratch tensors are kept from one product to the next, so they grew before `begin`.
        self.num_bytes = max(0, grown - self._activations.peak_bytes) + scratch_bytes()


class MemoryReport(Hook):
    """A part that reports the memory of a pipeline's rank.

    queued: messages that wait to be sent or read.
    bytes_to_copy: returns what a checkpoint copies; None: none are made.
    """

    def __init__(
        self,
        trainer: Trainer,
        reporter: Reporter,
        meter: MemoryMeter,
        queued: QueuedBytes,
        bytes_to_copy: Callable[[], int] | None,
    ) -> None:
        self._trainer = trainer
        self._reporter = reporter
        self._bytes_to_copy = bytes_to_copy
        self._meter = meter
        self._queued = queued
        self._first = ExitStack()

    def before_update(self, step: int) -> None:
        self._first.enter_context(self._meter.first_step())

    def after_update(self, step: int, report: StepReport) -> None:
        self._first.close()

    def finish(self) -> None:
        moments = optimizer_bytes(self._trainer.optimizers)
        figures = self._meter.describe(self._trainer.pipeline.stages.values(), moments)
        copied = 0 if self._bytes_to_copy is None else self._bytes_to_copy()
        queued = self._queued.peak_bytes
        self._reporter.event("memory", **figures, queued=queued, checkpoint=copied)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; of those dealt over ranks what this one holds."""
    return sum(part.numel() * part.element_size() for part in map(local_part, tensors))


def optimizer_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes that optimizers keep of each parameter."""
    kept = (value for o in optimizers for state in o.state.values() for value in state.values())
    return bytes_of(value for value in kept if isinstance(value, Tensor))


def give_freed_memory_back() -> None:
    """Give the system back what has been freed, such as what a model was read from: the heap of a
    launched rank keeps it otherwise (LIBRARY_SETTINGS of launch/processes.py). Only glibc can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(name: str) -> int:
    """Return the resident memory of this process: VmRSS now, VmHWM at most. Linux: since the last
    reset; and not getrusage's, which a process inherits from the one that started it. Elsewhere
    the peak stands for both."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    import resource  # not on Windows, which has no gloo either

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class GpuClock(StepClock):
    """A step clock that measures a GPU's work.

    That work continues after the call that began it has returned. So within a step the ends of a
    span are events on the GPU's stream, which are read once a step. Waiting for the device after
    each span would cost the time that it measures. Host times are used between steps. They are
    also used when a slow device is emulated, because that waits for the device.
    """

    def __init__(
        self, device: torch.device, record_from: int | None = None, slowdown: float = 1.0
    ) -> None:
        super().__init__(record_from, slowdown)
        self._device = device
        self._began_at_s = 0.0
        self._began: Any = None  # the event at the beginning of the step; None: host times
        self._unread: list[Span] = []

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.slowdown == 1:
            self._began = _event()
            self._began_at_s = time.monotonic()

    def end_step(self) -> float:
        step_s = super().end_step()
        self._began = None
        return step_s

    def settle(self) -> None:
        """Count the spans of the last step, in seconds of the host's clock. Waits for the
        device."""
        # Once a step, behind its backward: events that have not happened have no time.
        torch.cuda.synchronize(self._device)
        spans = self._unread
        self._unread = []
        for what, start, end, place in spans:
            # Events know only the time since another one, so all count from the step's first.
            from_s = self._began_at_s + self._began.elapsed_time(start) / 1e3
            until_s = self._began_at_s + self._began.elapsed_time(end) / 1e3
            super().count(Span(what, from_s, ended_at_s=until_s, place=place))

    def now(self) -> Any:
        return time.monotonic() if self._began is None else _event()

    def count(self, span: Span) -> None:
        if self._began is None:
            super().count(span)
        else:
            # Its ends are events of the stream; asking for their times now would wait for the
            # device.
            self._unread.append(span)


def _event() -> Any:
    """Return an event of the current stream: when all work given to it before is done."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event

"""How one rank's main thread spent a step: seconds by kind and, on request, span by span.
Not a profiler: a span is one action of the pipeline's loop, never a kernel.

All moments are time.monotonic(), which every process on a machine shares; rank/reports.py has the
clock of a GPU.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from xcloud.net.link import MessageLog

Computing = Literal["fetch", "forward", "backward", "weights", "clip", "optimizer"]
What = Computing | Literal["compress", "decompress", "wait", "average"]

SUM_OF: dict[What, str] = {
    **dict.fromkeys(get_args(Computing), "compute_s"),
    "compress": "codec_s",
    "decompress": "codec_s",
    "wait": "waiting_s",
    "average": "sync_s",
}


KEEP_STEPS = 8
"""Only the last steps of a run are recorded: caches are warm then, other steps cost nothing."""


class Place(NamedTuple):
    """The schedule's action that a span belongs to; micro_batch counts within the update."""

    direction: str  # as Action.kind; "" outside the schedule
    stage: int
    micro_batch: int


NOWHERE = Place(direction="", stage=-1, micro_batch=-1)


class Span(NamedTuple):
    what: What
    started_at_s: float
    ended_at_s: float
    place: Place


class RecordedStep(NamedTuple):
    step: int
    started_at_s: float
    ended_at_s: float
    spans: list[Span]  # in order, never overlapping


class StepClock:
    """Seconds of one rank in one step, by kind of work: the values of SUM_OF.

    A step begins at the end of the one before, without the time that was `paused` (an evaluation).

    record_from: number of the first step whose spans are kept in `recorded`, and whose messages in
        `messages`. It is meant for the last few steps of a run, because nothing is ever dropped.
        None: nothing is recorded.
    slowdown: factor by which every computing span takes longer, in evaluations too. The clock
        sleeps at the end of the span, which emulates a slow device.
    """

    def __init__(self, record_from: int | None = None, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.seconds = dict.fromkeys(SUM_OF.values(), 0.0)
        self.place = NOWHERE  # set by the pipeline before each action
        self.recorded: list[RecordedStep] = []
        self.messages = MessageLog(record_from) if record_from is not None else None
        self._spans: list[Span] | None = None  # of the current step; None: not recorded
        self._step = 0
        self._started_at_s = 0.0
        self._ended_at_s: float | None = None  # the step before, and what was paused since
        self._open: _During | None = None  # the innermost block that counts now

    def begin_step(self, step: int) -> None:
        self._step = step
        # From the end of the step before, so that nothing between two steps is lost to both.
        self._started_at_s = self._ended_at_s or time.monotonic()
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        if self.messages is not None and step >= self.messages.from_step:
            # Reports belong to no step, but keep the line busy: they are recorded from here on,
            # too.
            self.messages.is_open = True
            self._spans = []

    def settle(self) -> None:
        """Count all spans so far, of a device that computes apart too."""

    def end_step(self) -> float:
        """Returns the step's seconds."""
        self.settle()
        # Behind `settle`, which on a GPU waits for the step's last work.
        self._ended_at_s = ended_at_s = time.monotonic()
        if self._spans is not None:
            self.recorded.append(
                RecordedStep(
                    step=self._step,
                    started_at_s=self._started_at_s,
                    ended_at_s=ended_at_s,
                    spans=self._spans,
                )
            )
            self._spans = None
        return ended_at_s - self._started_at_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of a block between two steps out of both."""
        started_at_s = time.monotonic()
        try:
            yield
        finally:
            # Before the first step there is none that the time could be taken from.
            if self._ended_at_s is not None:
                self._ended_at_s += time.monotonic() - started_at_s

    def during(self, what: What) -> _During:
        """`with clock.during("forward"):` counts the block's time. A block inside another one
        interrupts it: a moment is counted once."""
        return _During(clock=self, what=what)

    @property
    def doing(self) -> What | None:
        """The kind that the innermost block counts now; None outside of all."""
        return None if self._open is None else self._open.what

    def now(self) -> Any:
        """This moment, for `count`."""
        return time.monotonic()

    def count(self, span: Span) -> None:
        self.seconds[SUM_OF[span.what]] += span.ended_at_s - span.started_at_s
        if self._spans is not None:
            self._spans.append(span)


@dataclass(slots=True, eq=False)
class _During:
    """A class, because a @contextmanager generator takes twice as long."""

    clock: StepClock
    what: What
    _outer: _During | None = field(init=False)
    _started_at: Any = field(init=False)

    def __enter__(self) -> None:
        clock = self.clock
        self._outer = clock._open
        if self._outer is not None:
            # The outer block is counted up to here, and begins again behind the inner one.
            self._outer._count()
        clock._open = self
        self._started_at = clock.now()

    def __exit__(self, *_: object) -> None:
        self._count()
        self.clock._open = self._outer
        if self._outer is not None:
            self._outer._started_at = self.clock.now()

    def _count(self) -> None:
        clock = self.clock
        # Only what a slower device would do more slowly; the line and its codecs stay as they are.
        if clock.slowdown > 1 and SUM_OF[self.what] == "compute_s":
            clock.settle()
            time.sleep((clock.slowdown - 1) * (time.monotonic() - self._started_at))
        clock.count(
            Span(
                what=self.what,
                started_at_s=self._started_at,
                ended_at_s=clock.now(),
                place=clock.place,
            )
        )

"""How one rank's main thread spent a step: seconds by kind and, on request, span by span.
Not a profiler: a span is one action of the pipeline's loop, never a kernel.

All moments are time.monotonic(), which every process on a machine shares.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

from xcloud.cluster.message_log import MessageLog

Computing = Literal["fetch", "forward", "backward", "weights", "clip", "optimizer"]
What = Computing | Literal["compress", "decompress", "wait", "average"]

SUM_OF: dict[What, str] = {
    **dict.fromkeys(get_args(Computing), "compute_s"),
    "compress": "codec_s",
    "decompress": "codec_s",
    "wait": "waiting_s",
    "average": "sync_s",
}


class Place(NamedTuple):
    """The schedule's action that a span belongs to; micro_batch counts within the update."""

    direction: str  # as Action.kind; "" outside the schedule
    stage: int
    micro_batch: int


NOWHERE = Place("", -1, -1)


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
    """Seconds of one rank in one step, by kind of work.

    record_from: from this step on, spans are kept in `recorded` and messages in `messages`; meant
    for the last few steps of a run, as nothing is ever dropped. None records nothing. A step
    begins where the one before ended, but for what was `paused` (an evaluation).
    slowdown: stretch every computing span, in evaluation too, by this factor, by sleeping at its
    end (emulates a slow device).
    """

    def __init__(self, record_from: int | None = None, slowdown: float = 1.0) -> None:
        self.slowdown = slowdown
        self.compute_s = self.codec_s = self.waiting_s = self.sync_s = 0.0
        self.place = NOWHERE  # set by the pipeline before each action
        self.recorded: list[RecordedStep] = []
        self.messages = MessageLog(record_from) if record_from is not None else None
        self._spans: list[Span] | None = None  # of the current step; None: not recorded
        self._step, self._started_at_s = 0, 0.0
        self._ended_at_s: float | None = None  # the step before, and what was paused since

    def begin_step(self, step: int) -> None:
        self._step, self._started_at_s = step, self._ended_at_s or time.monotonic()
        self.compute_s = self.codec_s = self.waiting_s = self.sync_s = 0.0
        if self.messages is not None and step >= self.messages.from_step:
            self.messages.is_open = True
            self._spans = []

    def end_step(self) -> float:
        """Returns the step's seconds."""
        self._ended_at_s = ended_at_s = time.monotonic()
        if self._spans is not None:
            self.recorded.append(
                RecordedStep(self._step, self._started_at_s, ended_at_s, self._spans)
            )
            self._spans = None
        return ended_at_s - self._started_at_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Between two steps: the block's time belongs to neither."""
        started_at_s = time.monotonic()
        try:
            yield
        finally:
            if self._ended_at_s is not None:
                self._ended_at_s += time.monotonic() - started_at_s

    def during(self, what: What) -> _During:
        """`with clock.during("forward"):` counts the block's time. Blocks do not nest: a moment is
        counted once."""
        return _During(self, what)

    def count(self, what: What, started_at_s: float, ended_at_s: float) -> None:
        name = SUM_OF[what]
        setattr(self, name, getattr(self, name) + ended_at_s - started_at_s)
        if self._spans is not None:
            self._spans.append(Span(what, started_at_s, ended_at_s, self.place))


class _During:
    """A class, because a @contextmanager generator takes twice as long."""

    __slots__ = ("_clock", "_started_at_s", "_what")

    def __init__(self, clock: StepClock, what: What) -> None:
        self._clock, self._what = clock, what

    def __enter__(self) -> None:
        self._started_at_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        clock, ended_at_s = self._clock, time.monotonic()
        if clock.slowdown > 1 and SUM_OF[self._what] == "compute_s":
            time.sleep((clock.slowdown - 1) * (ended_at_s - self._started_at_s))
            ended_at_s = time.monotonic()
        clock.count(self._what, self._started_at_s, ended_at_s)

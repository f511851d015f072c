"""What one rank did in one of the last steps, span by span and message by message; which of them,
the ranks agree after the last step. record/timeline.py merges what they report.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xcloud.cluster.frame import Kind, MessageKey
from xcloud.cluster.link import MessageLog
from xcloud.cluster.transport import Meeting, machine_id
from xcloud.comm.step_clock import RecordedStep, StepClock
from xcloud.parallel.part import Part
from xcloud.record.reporter import Reporter

_ENTRIES_PER_EVENT = 500  # about 25 kB a line; the report link takes 256 KiB


@dataclass(frozen=True)
class TypicalStep(Part):
    clock: StepClock
    meeting: Meeting
    reporter: Reporter

    def finish(self) -> None:
        """Send the "timeline" events of the step, which every rank has recorded."""
        steps, messages = self.clock.recorded, self.clock.messages
        if not steps or messages is None:  # the last step was made before the run was resumed
            return
        offset_s = time.time() - time.monotonic()  # a machine's own, else
        own = [[moment_s + offset_s for moment_s in step[1:3]] for step in steps]
        ranks = range(self.meeting.num_ranks)
        texts = self.meeting.gather("last steps", json.dumps(own), ranks)
        # When the last rank began and ended each, so that all ranks choose the same one.
        moments = np.array([json.loads(text) for text in texts]).max(0)
        step_s = (moments[:, 1] - moments[:, 0]).tolist()
        chosen = steps[most_typical([step.step for step in steps], step_s)]
        for part in timeline_events(chosen, messages):
            self.reporter.event("timeline", **part)
        self.reporter.flush()


def most_typical(steps: Sequence[int], step_s: Sequence[float]) -> int:
    """Index of the step nearest to the median time, the latest of equals. Step 1, which warms
    every cache, only if there is no other."""
    candidates = [i for i, step in enumerate(steps) if step > 1] or [0]
    median = statistics.median(step_s[i] for i in candidates)
    return min(reversed(candidates), key=lambda i: abs(step_s[i] - median))


def timeline_events(step: RecordedStep, messages: MessageLog) -> Iterator[dict[str, Any]]:
    """The fields of one rank's "timeline" events; long lists are split over several events.

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
            if _belongs(m.key, m.queued_at_s, step)
        ],
        "received": [
            [m.link.boundary, m.link.sender, m.sequence, us(m.received_at_s)]
            for m in list(messages.received)
            if _belongs(m.key, m.received_at_s, step)
        ],
    }  # fmt: skip
    head = {
        "step": step.step,
        "machine": f"{machine_id():x}",
        "started_us": origin_us,
        "unix_us": round(1e6 * (time.time() - time.monotonic())),
        "step_us": us(step.ended_at_s),
    }
    empty: dict[str, list[list[Any]]] = {name: [] for name in lists}
    yield {**head, **{name: entries[:_ENTRIES_PER_EVENT] for name, entries in lists.items()}}
    for name, entries in lists.items():
        for first in range(_ENTRIES_PER_EVENT, len(entries), _ENTRIES_PER_EVENT):
            yield {**head, **empty, name: entries[first : first + _ENTRIES_PER_EVENT]}


def _belongs(key: MessageKey, at_s: float, step: RecordedStep) -> bool:
    """Reports belong to no step but occupy the line; include those from just before the step."""
    if key.kind is not Kind.REPORT:
        return key.step == step.step
    step_s = step.ended_at_s - step.started_at_s
    return step.started_at_s - step_s <= at_s <= step.ended_at_s + step_s

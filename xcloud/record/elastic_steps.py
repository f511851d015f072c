"""Steps of runs whose clouds come and go: the ranks of a cloud that is gone are not waited for."""

from __future__ import annotations

import math

from xcloud.record.events import Event, StepCollector, StepTotals


class ElasticCollector(StepCollector):
    """A collector that completes a step without the ranks of a cloud that has left."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._gone_until: dict[int, float] = {}  # the last step that a lost rank does not report
        self._done = -1  # the latest complete step, once ranks have gone

    def feed(self, event: Event) -> StepTotals | None:
        """Return the totals of the next complete step, if there is one."""
        if event["event"] == "absence":
            self._note_absence(event)
        # Complete already without the rank that reports now.
        is_late = event["event"] == "step" and event["step"] <= self._done
        return super().feed({"event": "late"} if is_late else event)

    def _note_absence(self, event: Event) -> None:
        for rank in event["ranks"]:
            if event["what"] == "left":
                self._gone_until[rank] = math.inf
            elif event["what"] == "back" and rank in self._gone_until:
                self._gone_until[rank] = event["step"]  # it begins with the next one
        # A cloud that left may have been all that a step waited for.
        for step in sorted(self._reports):
            self._close(step)

    def _go_back(self, to_step: int) -> None:
        super()._go_back(to_step)
        self._done = min(self._done, to_step)
        # Ranks that were gone at that step are still gone.
        self._gone_until = {rank: min(u, to_step) for rank, u in self._gone_until.items()}

    def _absent(self, step: int) -> set[int]:
        return {rank for rank, until in self._gone_until.items() if step <= until}

    def _close(self, step: int) -> None:
        super()._close(step)
        # Closed just now, or before.
        if self._gone_until and step not in self._reports:
            self._done = max(self._done, step)

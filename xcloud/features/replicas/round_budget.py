"""Which updates a replica leaves out before a merge (max_s and max_tokens of LocalUpdates)."""

from __future__ import annotations

import time

import torch

from xcloud.comm.state import State, StatefulTree, whole_number
from xcloud.pipeline.exchange import RankGroup


class RoundBudget(StatefulTree):
    """The time and tokens of a replica between two multiples of `every`. Once they are used up it
    leaves out the updates up to the next multiple.

    idle_until: the last update that is left out; a late replica skips those up to the server's
        step, too.
    clock: a function that returns seconds.
    """

    own_names = ("idle_until", "numbers")

    def __init__(
        self, every: int, max_s: float | None, max_tokens: int | None, group: RankGroup
    ) -> None:
        self._every = every
        self._max_s = max_s
        self._max_tokens = max_tokens
        self._group = group
        self.clock = time.monotonic
        self.idle_until = 0
        self._num_tokens = 0.0
        self._started_s: float | None = None  # since the last multiple

    def end_step(self, step: int, num_tokens: float) -> None:
        """Count what was used. num_tokens: what the replica trained on in this step."""
        if self._max_s is None and self._max_tokens is None:
            return
        if step % self._every == 0:
            self._num_tokens = 0.0
            self._started_s = self.clock()
        elif step > self.idle_until:
            self._num_tokens += num_tokens
            if self._started_s is None:  # the first step builds caches: it is not counted
                self._started_s = self.clock()
            is_over = self._max_s is not None and self.clock() - self._started_s >= self._max_s
            is_over |= self._max_tokens is not None and self._num_tokens >= self._max_tokens
            # Clocks of a cloud's ranks differ, so their leader's decides for them.
            if bool(self._group.from_leader(torch.tensor([float(is_over)]))):
                self.idle_until = step - step % self._every + self._every

    def own(self) -> State:
        # A clock's reading means nothing in another process: seconds since the start are kept.
        elapsed_s = self.clock() - self._started_s if self._started_s is not None else 0.0
        numbers = torch.tensor([self._num_tokens, elapsed_s], dtype=torch.float64)
        return {"idle_until": self.idle_until, "numbers": numbers}

    def take(self, own: State) -> None:
        self.idle_until = whole_number(own, name="idle_until")
        self._num_tokens, elapsed_s = torch.as_tensor(own["numbers"]).tolist()
        self._started_s = self.clock() - elapsed_s if elapsed_s else None

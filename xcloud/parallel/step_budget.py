"""How many steps a replica makes between two merges where clouds are not equally fast.

Steps are numbered alike in all replicas, and a merge stands at a number. A replica that has used
up its time or its tokens leaves out the steps up to the next multiple of `every` and so comes to
the merge early: the fast do `every` steps, the slow fewer, and each counts for what it did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from xcloud.comm.state import State, whole_number
from xcloud.parallel.exchange import RankGroup


@dataclass
class StepBudget:
    """replica: all ranks of this replica, of which the first decides. clock: seconds; elapsed time
    is part of the state."""

    every: int
    replica: RankGroup
    most_s: float | None = None
    most_tokens: int | None = None
    clock: Callable[[], float] = time.monotonic
    _idle_until: int = 0
    _num_tokens: float = 0.0
    _started_s: float | None = None

    @property
    def is_limited(self) -> bool:
        return self.most_s is not None or self.most_tokens is not None

    def is_idle(self, step: int) -> bool:
        return step <= self._idle_until

    def idle_until(self, step: int) -> None:
        self._idle_until = max(self._idle_until, step)

    def end_step(self, step: int, num_tokens: float) -> None:
        """After the merge, if there is one at this step. Every rank of the replica calls it.
        num_tokens: that the replica trained on."""
        if not self.is_limited:
            return
        if step % self.every == 0:
            self._num_tokens, self._started_s = 0.0, self.clock()
            return
        if self.is_idle(step):
            return
        self._num_tokens += num_tokens
        if self._started_s is None:  # the first step builds caches: it is not counted
            self._started_s = self.clock()
        is_over = self.most_s is not None and self.clock() - self._started_s >= self.most_s
        is_over |= self.most_tokens is not None and self._num_tokens >= self.most_tokens
        if bool(self.replica.from_leader(torch.tensor([float(is_over)]))):
            self.idle_until(step - step % self.every + self.every)

    def state_dict(self) -> State:
        elapsed_s = 0.0 if self._started_s is None else self.clock() - self._started_s
        numbers = torch.tensor([self._num_tokens, elapsed_s], dtype=torch.float64)
        return {"idle_until": self._idle_until, "numbers": numbers}

    def load_state_dict(self, state: State) -> None:
        self._idle_until = whole_number(state, "idle_until")
        numbers = state["numbers"]
        assert isinstance(numbers, torch.Tensor)
        self._num_tokens, elapsed_s = numbers.tolist()
        self._started_s = self.clock() - elapsed_s if self.is_limited else None

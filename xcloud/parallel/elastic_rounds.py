"""Local updates where a cloud may be late, leave and come back: what a rank does of them.

The first rank of each cloud carries all of its values across (hub.py); the others get them from
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from xcloud.comm.state import State, Stateful, load_states, states_of, whole_number
from xcloud.parallel.hub import Hub, Member
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.step_budget import StepBudget


class ElasticRounds:
    """Merges stand at multiples of `every` and at the last step, of all parameters at once.

    A replica that was late leaves out the steps up to the one that the hub is at, so that it is in
    time for the next merge. After the last step all replicas have the same values.

    parameters: the same in every rank of `inside`. end: the hub or a member, in the first of these
    ranks; None in the others. work: samples or tokens that this replica trains on in a step.
    """

    def __init__(
        self,
        settings: LocalUpdates,
        parameters: Sequence[nn.Parameter],
        inside: RankGroup,
        end: Hub | Member | None,
        last_step: int,
        work: Callable[[int], float],
        pace: StepBudget,
    ) -> None:
        assert (end is not None) == inside.leads
        self._settings, self._parameters, self._inside = settings, list(parameters), inside
        self._end, self._last_step, self._work, self._pace = end, last_step, work, pace
        self._weight = 0.0
        self._is_anchored = False

    def is_idle(self, step: int) -> bool:
        return self._pace.is_idle(step)

    def welcome(self, step: int) -> None:
        """Of the cloud that merges, going on after `step` from its checkpoint: the others `join`
        now."""
        self._begin()
        if isinstance(self._end, Hub):
            self._end.welcome(step)

    def join(self) -> int:
        """Of another cloud that begins in a job that goes on: take the values of the others.
        Returns the step at which they are; this replica goes on with the next one."""
        self._begin()
        hub_step = 0
        if self._end is not None:
            assert isinstance(self._end, Member)
            hub_step = self._end.join()
        return self._tell(hub_step, True)

    def _begin(self) -> None:
        """The anchor is what replicas start from."""
        if not self._is_anchored and self._end is not None:
            self._end.ends.values.drop()
        self._is_anchored = True

    def begin_step(self, step: int) -> None:
        self._begin()

    def end_step(self, step: int) -> None:
        self._begin()
        is_last = step == self._last_step
        is_due = step % self._settings.every == 0 or is_last
        if not self.is_idle(step):
            self._weight += self._work(step)
        if is_due:
            hub_step, is_taken = self._merge(step)
            self._tell(hub_step, is_taken)
        if isinstance(self._end, Hub):
            # After the merge: who is told of this step has its next message for a later one.
            self._end.answer_absent(step)
            if is_last:
                self._end.end(step)
        self._pace.end_step(step)

    def _merge(self, step: int) -> tuple[int, bool]:
        """Of this cloud's first rank: the step at which the hub is, and whether what this replica
        did counts now."""
        weight = self._settings.weight_of(self._weight)
        end, hub_step, taken = self._end, step, False
        if end is None:
            return hub_step, taken
        if not end.ends.values.are_finite:
            end.ends.values.take()  # a merge bears no such change: it is lost
            weight = 0.0
        if isinstance(end, Hub):
            taken = end.merge(step, weight)
        elif step > end.known:
            hub_step, taken = end.merge(step, weight)
        if end.known >= self._last_step:
            end.ends.values.take()  # nothing can count any more: replicas end equal
        return hub_step, taken

    def _tell(self, hub_step: int, is_taken: bool) -> int:
        """The first rank's parameters and progress to the others of its cloud. Returns the step at
        which the hub is."""
        if self._inside.num_lanes > 1:
            told = torch.tensor([hub_step, int(is_taken)])
            hub_step, is_taken = self._inside.from_leader(told).tolist()
            for parameter in self._parameters:
                self._inside.from_leader(parameter.data)
        if is_taken:
            self._weight = 0.0
        self._pace.idle_until(hub_step)
        return hub_step

    def state_dict(self) -> State:
        self._begin()
        state: State = {"weight": torch.tensor(self._weight, dtype=torch.float64)}
        if self._end is not None:
            state["known"] = self._end.known
        return state | states_of(self._parts)

    def load_state_dict(self, state: State) -> None:
        """All replicas are there again, whoever had left before; they do not know what was merged
        last."""
        self._is_anchored = True
        load_states(self._parts, state, "elastic local updates", ("weight", "known"))
        self._weight = float(state["weight"])
        if self._end is not None:
            self._end.known = whole_number(state, "known")

    @property
    def _parts(self) -> dict[str, Stateful]:
        found: dict[str, Stateful] = {"pace": self._pace}
        if self._end is not None:
            ends = self._end.ends
            found |= {"values": ends.values, "codec": ends.codec, "merged": ends.merged}
        return found

"""Each replica trains alone for a number of steps; then their changes are merged (local_updates.py
has the settings). What a replica does between merges is the trainer's.

Moments of the inner optimizer stay where they are and are never sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from xcloud.comm.state import (
    MEMORY,
    State,
    Stateful,
    join_states,
    load_states,
    split_state,
    states_of,
    whole_number,
)
from xcloud.parallel.averaging import Averager
from xcloud.parallel.exchange import FlatBuffer, GradientExchange
from xcloud.parallel.fragments import contiguous, dealt, offsets
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.outer_parameters import OuterParameters
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.step_budget import StepBudget

MakeAverager = Callable[[Mapping[str, torch.Size], int], Averager]
"""Of the tensors that one rank carries across, by name, and of the fragment's number."""


_NOTHING = 1e-12
_UNDER_WAY = f"{MEMORY}.under_way"


class Rounds(Stateful, Protocol):
    """What a rank's replica does at the boundary of two steps."""

    def begin_step(self, step: int) -> None:
        """Before the update."""

    def end_step(self, step: int) -> None:
        """After the update, made, skipped or left out."""

    def is_idle(self, step: int) -> bool:
        """Whether this replica leaves out step `step`; the same in all of its ranks."""


@dataclass
class LocalExchange:
    """The exchange of one stage: gradients inside the replica, and the rank's rounds after the
    last of its stages."""

    inside: GradientExchange
    rounds: Rounds
    is_last: bool

    def before_update(self, step: int, buffer: FlatBuffer, loss: Tensor) -> Tensor:
        self.rounds.begin_step(step)
        return self.inside.before_update(step, buffer, loss)

    def after_update(self, step: int, buffer: FlatBuffer) -> None:
        self.inside.after_update(step, buffer)
        if self.is_last:
            self.rounds.end_step(step)

    def state_dict(self) -> State:
        return join_states({name: part.state_dict() for name, part in self._parts.items()})

    def load_state_dict(self, state: State) -> None:
        for name, part in split_state(state, self._parts, "local updates").items():
            self._parts[name].load_state_dict(part)

    @property
    def _parts(self) -> dict[str, Stateful]:
        return {"inside": self.inside} | ({"rounds": self.rounds} if self.is_last else {})


def local_exchanges(
    inside: Mapping[int, GradientExchange], rounds: Rounds
) -> dict[int, GradientExchange]:
    """The exchanges of a rank's stages, in whose order the trainer calls them."""
    last = max(inside)
    return {stage: LocalExchange(e, rounds, stage == last) for stage, e in inside.items()}


@dataclass
class _Fragment:
    """weight: what this replica did since it last sent. under_way: the step at which it did, 0 for
    none."""

    values: OuterParameters
    averager: Averager | None
    offset: int
    weight: float = 0.0
    under_way: int = 0


class LocalRounds:
    """All replicas take part in every merge. The last step ends with one of all parameters, of
    which replicas keep nothing of their own: they end equal.

    parameters: trained ones of this rank's stages by name, in the same order in every rank that
    holds them. inside: the ranks of this replica that hold the same. num_shares: how many of them
    carry something across. make_averager: not called in the others. work: samples or tokens that
    this replica trains on in a step. after_last: called with the last step when all are equal.
    note: told of parameters that are not finite.
    """

    def __init__(
        self,
        settings: LocalUpdates,
        parameters: Mapping[str, nn.Parameter],
        inside: RankGroup,
        num_shares: int,
        make_averager: MakeAverager,
        last_step: int,
        work: Callable[[int], float],
        pace: StepBudget,
        after_last: Callable[[int], None] = lambda step: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._settings, self._last_step, self._work = settings, last_step, work
        self._after_last, self._note = after_last, note
        self._pace = pace
        self._fragments: list[_Fragment] = []
        names, trained = list(parameters), list(parameters.values())
        runs = contiguous([p.numel() for p in trained], settings.fragments) if trained else []
        starts = offsets(settings.every, len(runs))
        for number, (run, offset) in enumerate(zip(runs, starts, strict=True)):
            own = [trained[position] for position in run]
            shares = dealt([p.numel() for p in own], num_shares)
            named = {names[position]: trained[position] for position in run}
            values = OuterParameters(named, shares, inside, settings.outer)
            averager = None
            if inside.lane < num_shares:
                shapes = {names[run[place]]: own[place].shape for place in shares[inside.lane]}
                averager = make_averager(shapes, number)
            self._fragments.append(_Fragment(values, averager, offset))
        self._is_anchored = False

    def is_idle(self, step: int) -> bool:
        return self._pace.is_idle(step)

    def begin_step(self, step: int) -> None:
        if not self._is_anchored:
            for fragment in self._fragments:
                fragment.values.drop()
            self._is_anchored = True

    def end_step(self, step: int) -> None:
        settings, is_last = self._settings, step == self._last_step
        if not self.is_idle(step):
            work = self._work(step)
            for fragment in self._fragments:
                fragment.weight += work
        for fragment in self._under_way:
            if step - fragment.under_way >= settings.overlap or is_last:
                self._finish(fragment, settings.mix)
        for fragment in self._fragments:
            if is_last or (step % settings.every == fragment.offset):
                self._start(fragment, step)
                # One after the other: links have room for those of `overlap`, not for all.
                if is_last or not settings.overlap:
                    self._finish(fragment, 0.0 if is_last else settings.mix)
        self._pace.end_step(step)
        if is_last:
            self._after_last(step)

    @property
    def _under_way(self) -> list[_Fragment]:
        """In the order in which they were sent."""
        found = [fragment for fragment in self._fragments if fragment.under_way]
        return sorted(found, key=lambda fragment: fragment.under_way)

    def _start(self, fragment: _Fragment, step: int) -> None:
        # Where no replica has done anything, their mean.
        weight = max(self._settings.weight_of(fragment.weight), _NOTHING)
        if not fragment.values.are_finite:
            fragment.values.take()
            weight = 0.0
            self._note(
                f"parameters were not finite at the merge of step {step}: this replica goes back "
                "to the values of the merge before and counts for nothing in this one"
            )
        if fragment.averager is not None:
            fragment.averager.start(step, fragment.values.gradient(), weight)
        fragment.under_way, fragment.weight = step, 0.0

    def _finish(self, fragment: _Fragment, mix: float) -> None:
        if fragment.averager is not None:
            fragment.values.move(fragment.averager.finish(fragment.under_way))
        fragment.values.take(mix)
        fragment.under_way = 0

    def state_dict(self) -> State:
        self.begin_step(0)
        states = {name: states_of(parts) for name, parts in self._parts.items()}
        for number, fragment in enumerate(self._fragments):
            states[str(number)][_UNDER_WAY] = fragment.under_way
            states[str(number)]["weight"] = torch.tensor(fragment.weight, dtype=torch.float64)
        return join_states(states)

    def load_state_dict(self, state: State) -> None:
        """What was under way between replicas is sent again, by the averagers."""
        self._is_anchored = True
        states = split_state(state, self._parts, "local updates")
        for name, own in states.items():
            load_states(self._parts[name], own, f"local updates ({name})", (_UNDER_WAY, "weight"))
        for number, fragment in enumerate(self._fragments):
            own = states[str(number)]
            fragment.under_way = whole_number(own, _UNDER_WAY)
            fragment.weight = float(own["weight"])

    @property
    def _parts(self) -> dict[str, dict[str, Stateful]]:
        found: dict[str, dict[str, Stateful]] = {"rounds": {"pace": self._pace}}
        for number, fragment in enumerate(self._fragments):
            found[str(number)] = {"values": fragment.values}
            if fragment.averager is not None:
                found[str(number)]["averager"] = fragment.averager
        return found

"""State: what something needs to resume exactly, and how it is composed of the state of parts.
When it is saved is decided elsewhere (features/checkpoints/).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor | int]
"""Contents of a checkpoint: tensors (safetensors) and whole numbers (JSON)."""

MEMORY = "(memory)"
"""Part of a state, at any depth: what compression remembers of earlier messages, and messages
under way. It has no meaning with another compressor, or between other ranks."""
OUTER = "(outer)"
"""Part of a state: by the name of a parameter, what all replicas agreed on in their last merge."""


class Stateful(Protocol):
    """Something whose state must be restored for a run to resume exactly: a compressor, a memory,
    either end of a channel, an exchange, a trainer, the parts of a one-way job. What follows from
    the seed and the step is no state."""

    def state_dict(self) -> State:
        """A snapshot; later calls do not change it. Large tensors come from `copy_of`."""

    def load_state_dict(self, state: State) -> None:
        """Restore the state of an equally configured object. Raises ValueError for any other."""


StateTree = Mapping[str, "Stateful | StateTree | None"]
"""Parts by name, which contains no dot. None has no state."""


class StatefulParts:
    """Base class of what has stateful parts, values of its own, or both. A subclass gives parts by
    name, and `own_names`, with `own` and `take` for values that are no whole numbers under these
    names; saving and restoring stand here only.

        class Trainer(StatefulParts):
            own_names = ("step",)

            def parts(self) -> StateTree:
                return {"network": self._network, "exchange": self._exchange}
    """

    own_names: Collection[str] = ()
    """What may stand before the first dot of keys of the object's own values."""

    def parts(self) -> StateTree:
        return {}

    def own(self) -> State:
        return {name: getattr(self, name) for name in self.own_names}

    def take(self, own: State) -> None:
        """Restore what `own` returned, checked by whole_number and the like: called before the
        parts are restored, also where a state has none of these values. Raises ValueError."""
        for name in self.own_names:
            setattr(self, name, whole_number(own, name))

    def state_dict(self) -> State:
        return self.own() | states_of(self.parts())

    def load_state_dict(self, state: State) -> None:
        """Raises ValueError for what belongs to no part and is no value of its own."""
        own = {k: v for k, v in state.items() if k.partition(".")[0] in self.own_names}
        self.take(own)
        rest = {key: value for key, value in state.items() if key not in own}
        load_states(self.parts(), rest, f"a {type(self).__name__}")


def states_of(parts: StateTree) -> State:
    """The states of named parts as one; `load_states` gives them back."""
    return join_states(
        {
            name: states_of(part) if isinstance(part, Mapping) else part.state_dict()
            for name, part in parts.items()
            if part is not None
        }
    )


def load_states(parts: StateTree, state: State, owner: str) -> None:
    """Raises ValueError for the state of a part that is not there."""
    present = {name: part for name, part in parts.items() if part is not None}
    for name, own in split_state(state, present, owner).items():
        part = present[name]
        if isinstance(part, Mapping):
            load_states(part, own, owner)
        else:
            part.load_state_dict(own)


def join_states(states: Mapping[str, State]) -> State:
    """Merge the states of named parts: {"a": {"x": 1}} → {"a.x": 1}."""
    return {
        f"{name}.{key}": value for name, state in states.items() for key, value in state.items()
    }


def split_state(state: State, names: Iterable[str], owner: str) -> dict[str, State]:
    """Reverse `join_states`, with an entry for each name. Raises ValueError for unknown names."""
    states: dict[str, State] = {name: {} for name in names}
    for key, value in state.items():
        name, _, rest = key.partition(".")
        if name not in states:
            raise ValueError(
                f"the state of {owner} contains {key!r}, which belongs to none of its parts "
                f"({', '.join(states) or 'it has none'}); it was saved with other settings"
            )
        states[name][rest] = value
    return states


def whole_number(state: State, name: str) -> int:
    """The whole number `name` of a state. Raises ValueError if there is none."""
    value = state.get(name)
    if not isinstance(value, int):
        raise ValueError(
            f"a state needs a whole number {name!r}, got {sorted(state)}; it was saved with other "
            "settings"
        )
    return value


def fill(places: Mapping[str, Tensor], state: State, owner: str) -> None:
    """Copy a state into tensors of the same names, shapes and dtypes. Raises ValueError if it has
    others."""

    def spec(value: Tensor | int | None) -> object:
        return (value.dtype, value.shape) if isinstance(value, Tensor) else None

    names = places.keys() | state.keys()
    if wrong := [n for n in sorted(names) if spec(places.get(n)) != spec(state.get(n))]:
        raise ValueError(
            f"the state of {owner} does not fit it: {', '.join(wrong)} missing, unknown or of "
            "another shape; it was saved with other settings"
        )
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(torch.as_tensor(state[name]))


Copier = Callable[[tuple[Tensor, ...]], Tensor]
_copier: ContextVar[Copier | None] = ContextVar("_copier", default=None)  # None: a clone


def copy_of(tensor: Tensor, *more: Tensor) -> Tensor:
    """For `state_dict`: a copy of a tensor, or of several joined along axis 0, made by the copier
    that this thread uses."""
    return (_copier.get() or own_copy)((tensor, *more))


def own_copy(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()


@contextlib.contextmanager
def copying(copier: Copier) -> Iterator[None]:
    """Within, `copy_of` uses this one."""
    token = _copier.set(copier)
    try:
        yield
    finally:
        _copier.reset(token)

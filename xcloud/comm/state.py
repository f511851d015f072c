"""State: what an object needs to resume exactly, and how it is composed of its children's states.
When it is saved is decided elsewhere (features/checkpoints/)."""

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
"""The name, at any depth of a state, of what compression remembers of earlier messages, and of
messages under way. It has no meaning with another compressor, or between other ranks."""
OUTER = "(outer)"
"""The name of what all replicas agreed on in their last merge, by the name of a parameter."""


class Stateful(Protocol):
    """An object whose state must be restored for a run to resume exactly: a compressor, a memory,
    either end of a channel, an exchange, a trainer, the parts of a one-way job. What follows from
    the seed and the step is no state."""

    def state_dict(self) -> State:
        """Return a snapshot that later calls do not change. Large tensors come from `copy_of`."""

    def load_state_dict(self, state: State) -> None:
        """Restore the state of an equally configured object. Raises ValueError for any other."""


StateTree = Mapping[str, "Stateful | StateTree | None"]
"""Stateful children by name. A name contains no dot; a child that is None has no state."""


def joined(*trees: StateTree) -> StateTree:
    """Return the children of several trees as one tree. Raises ValueError for two of one name, of
    which a checkpoint would keep the state of one."""
    found: dict[str, Stateful | StateTree | None] = {}
    for tree in trees:
        for name, child in tree.items():
            if name in found:
                raise ValueError(
                    f"two parts of a rank keep their state as {name!r}: a checkpoint would "
                    "lose that of one; give one of them another name"
                )
            found[name] = child
    return found


class StatefulTree:
    """An object with stateful children, values of its own, or both.

    A subclass names the attributes that are its children in `child_names`, or returns children by
    other names, and lists its own values in `own_names`; it overrides `own` and `take` for those
    that are no whole numbers. Saving and restoring stand here only.

        class Trainer(StatefulTree):
            own_names = ("step",)
            child_names = ("network", "exchange")
    """

    own_names: Collection[str] = ()
    """What may stand before the first dot in the keys of the object's own values."""

    child_names: Collection[str] = ()
    """The attributes that are stateful children, or None."""

    def children(self) -> StateTree:
        """Return the stateful children by name."""
        return {name: getattr(self, name) for name in self.child_names}

    def own(self) -> State:
        """Return the object's own values, without its children's."""
        return {name: getattr(self, name) for name in self.own_names}

    def take(self, own: State) -> None:
        """Restore what `own` returned, before the children are restored. It is called for a state
        without such values, too. Raises ValueError for values that do not fit."""
        for name in self.own_names:
            setattr(self, name, whole_number(own, name))

    def state_dict(self) -> State:
        return self.own() | states_of(self.children())

    def load_state_dict(self, state: State) -> None:
        """Restore own values, then the children. Raises ValueError for a key that belongs to
        neither."""
        own = {k: v for k, v in state.items() if k.partition(".")[0] in self.own_names}
        self.take(own)
        rest = {key: value for key, value in state.items() if key not in own}
        load_states(self.children(), state=rest, owner=f"a {type(self).__name__}")


def states_of(children: StateTree) -> State:
    """Return the states of named children as one; `load_states` gives them back."""
    return join_states(
        {
            name: states_of(child) if isinstance(child, Mapping) else child.state_dict()
            for name, child in children.items()
            if child is not None
        }
    )


def load_states(children: StateTree, state: State, owner: str) -> None:
    """Restore named children from their joined states. Raises ValueError for the state of a child
    that is not there."""
    present = {name: child for name, child in children.items() if child is not None}
    for name, own in split_state(state, names=present, owner=owner).items():
        child = present[name]
        if isinstance(child, Mapping):
            load_states(child, state=own, owner=owner)
        else:
            child.load_state_dict(own)


def join_states(states: Mapping[str, State]) -> State:
    """Merge the states of named children: {"a": {"x": 1}} → {"a.x": 1}."""
    return {
        f"{name}.{key}": value for name, state in states.items() for key, value in state.items()
    }


def split_state(state: State, names: Iterable[str], owner: str) -> dict[str, State]:
    """Split what `join_states` merged, with an entry for each name. Raises ValueError for a key of
    another name."""
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
    """Return the whole number `name` of a state. Raises ValueError if there is none."""
    value = state.get(name)
    if not isinstance(value, int):
        raise ValueError(
            f"a state needs a whole number {name!r}, got {sorted(state)}; it was saved with other "
            "settings"
        )
    return value


def fill(targets: Mapping[str, Tensor], state: State, owner: str) -> None:
    """Copy a state into tensors of the same names, shapes and dtypes. Raises ValueError if it has
    others."""

    def spec(value: Tensor | int | None) -> object:
        if isinstance(value, Tensor):
            return (value.dtype, value.shape)
        return None

    names = sorted(targets.keys() | state.keys())
    # All are compared before the first is copied, so a wrong state leaves the object as it was.
    wrong = [name for name in names if spec(targets.get(name)) != spec(state.get(name))]
    if wrong:
        raise ValueError(
            f"the state of {owner} does not fit it: {', '.join(wrong)} missing, unknown or of "
            "another shape; it was saved with other settings"
        )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(torch.as_tensor(state[name]))


Copier = Callable[[tuple[Tensor, ...]], Tensor]
# Of each thread: a snapshot for a checkpoint catches no copy that another thread asks for.
_copier: ContextVar[Copier | None] = ContextVar("_copier", default=None)  # None: a clone


def copy_of(tensor: Tensor, *more: Tensor) -> Tensor:
    """Return a copy, for `state_dict`, of a tensor or of several joined along axis 0, made by the
    copier that this thread uses."""
    if (copier := _copier.get()) is not None:
        return copier((tensor, *more))
    return torch.cat((tensor, *more)) if more else tensor.clone()


@contextlib.contextmanager
def copying(copier: Copier) -> Iterator[None]:
    """Let `copy_of` use this copier inside the block."""
    token = _copier.set(copier)
    try:
        yield
    finally:
        _copier.reset(token)

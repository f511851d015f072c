"""State: what something needs to resume exactly, how it is composed of the state of parts, and
copies of it between two updates. When to copy is decided elsewhere (survive/checkpointing.py).

Copies go into memory whose pages are there already: touching new ones takes several times as long
as the copy.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

State = dict[str, Tensor | int]
"""Contents of a checkpoint: tensors (safetensors) and whole numbers (JSON)."""

MEMORY = "(memory)"
"""Part of a state, at any depth: what compression remembers of earlier messages, and messages
under way. It has no meaning with another compressor, or between other ranks."""
OUTER = "(outer)"
"""Part of a state: by the name of a parameter, what all replicas agreed on in their last merge."""


@runtime_checkable
class Stateful(Protocol):
    """Something whose state must be restored for a run to resume exactly: a compressor, a memory,
    either end of a channel, an exchange, a trainer, the parts of a one-way job. What follows from
    the seed and the step is no state."""

    def state_dict(self) -> State:
        """A snapshot; later calls do not change it. Large tensors come from `copy_of`."""

    def load_state_dict(self, state: State) -> None:
        """Restore the state of an equally configured object. Raises ValueError for any other."""


class StatefulParts:
    """Base class of what has stateful parts, values of its own, or both. A subclass gives parts by
    name, and `own_names`, with `own` and `take` for values that are no whole numbers under these
    names; saving and restoring stand here only.

        class Trainer(StatefulParts):
            own_names = ("step",)

            def parts(self) -> Mapping[str, Stateful]:
                return {"network": self._network, "exchange": self._exchange}
    """

    own_names: Collection[str] = ()
    """What may stand before the first dot of keys of the object's own values."""

    def parts(self) -> Mapping[str, Stateful]:
        """Names contain no dot. See `stateful` for parts of which only some have state."""
        return {}

    def own(self) -> State:
        return {name: getattr(self, name) for name in self.own_names}

    def take(self, own: State) -> None:
        """Restore what `own` returned, checked by whole_number and the like: called before the
        parts are restored, also where a state has none of these values. Raises ValueError."""
        for name in self.own_names:
            setattr(self, name, whole_number(own, name))

    @property
    def state_owner(self) -> str:
        """Whose state it is, for messages."""
        return type(self).__name__

    def state_dict(self) -> State:
        return self.own() | states_of(self.parts())

    def load_state_dict(self, state: State) -> None:
        """Raises ValueError for what belongs to no part and is no value of its own."""
        own = {k: v for k, v in state.items() if k.partition(".")[0] in self.own_names}
        self.take(own)
        load_states(self.parts(), state, self.state_owner, own)


class Marked(StatefulParts):
    """Parts under a mark, such as MEMORY: what `states_of` gives, as one part."""

    def __init__(self, parts: Mapping[str, Stateful], owner: str) -> None:
        self._parts, self._owner = parts, owner

    def parts(self) -> Mapping[str, Stateful]:
        return self._parts

    @property
    def state_owner(self) -> str:
        return self._owner


def stateful(parts: Mapping[str, object]) -> dict[str, Stateful]:
    """Those of the parts that have state."""
    return {name: part for name, part in parts.items() if isinstance(part, Stateful)}


def join_states(states: Mapping[str, State]) -> State:
    """Merge the states of named parts: {"a": {"x": 1}} → {"a.x": 1}. Names contain no dot."""
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


def is_marked(key: str, mark: str) -> bool:
    return mark in key.split(".")


def whole_number(state: State, name: str) -> int:
    """The whole number `name` of a state. Raises ValueError if there is none."""
    value = state.get(name)
    if not isinstance(value, int):
        raise ValueError(
            f"a state needs a whole number {name!r}, got {sorted(state)}; it was saved with other "
            "settings"
        )
    return value


def whole_numbers(state: State, name: str, *shape: int) -> Tensor:
    """An int64 tensor of this shape, -1 for any length. Raises ValueError if there is none."""
    value = state.get(name)
    if (
        not isinstance(value, Tensor)
        or value.dtype != torch.int64
        or value.dim() != len(shape)
        or any(n not in (-1, m) for n, m in zip(shape, value.shape, strict=True))
    ):
        found = (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
        raise ValueError(
            f"a state needs whole numbers {name!r} of shape {list(shape)}, got {found}; it was "
            "saved with other settings"
        )
    return value


def rows_of(width: int, rows: Sequence[tuple[int, ...]]) -> Tensor:
    """int64 [len(rows), width], of no rows too, for `whole_numbers`."""
    return torch.tensor(rows, dtype=torch.int64).view(-1, width)


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


def states_of(parts: Mapping[str, Stateful]) -> State:
    """The states of named parts as one; `load_states` gives them back."""
    return join_states({name: part.state_dict() for name, part in parts.items()})


def load_states(
    parts: Mapping[str, Stateful], state: State, owner: str, own: Collection[str] = ()
) -> None:
    """own: names of the owner's own values, which it takes itself. Raises ValueError for the state
    of a part that is not there."""
    of_parts = {name: value for name, value in state.items() if name not in own}
    for name, part in split_state(of_parts, parts, owner).items():
        parts[name].load_state_dict(part)


_ALIGN = 64
_PAGE_BYTES = 4096
_PIECE_PAGES = 4096  # touched before looking whether to stop

_Copier = Callable[[tuple[Tensor, ...]], Tensor]
_copier: ContextVar[_Copier | None] = ContextVar("_copier", default=None)  # None: a clone


def copy_of(tensor: Tensor, *more: Tensor) -> Tensor:
    """For `state_dict`: a copy of a tensor, or of several joined along axis 0. It is valid until
    the next snapshot of a `SnapshotBuffer` that this thread uses."""
    copier = _copier.get()
    return _own_copy((tensor, *more)) if copier is None else copier((tensor, *more))


def bytes_to_copy(take: Callable[[], object]) -> int:
    """Of host memory that the snapshot `take` needs in a `SnapshotBuffer`. Nothing is copied."""
    num_bytes = 0

    def count(tensors: tuple[Tensor, ...]) -> Tensor:
        nonlocal num_bytes
        if tensors[0].device.type == "cpu":
            num_bytes += _aligned(sum(tensor.nbytes for tensor in tensors))
        return tensors[0]

    with _copying(count):
        take()
    return num_bytes


class SnapshotBuffer:
    """Host memory for one snapshot at a time, kept for the next one. What does not fit, and
    tensors of other devices, get memory of their own."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Within, `copy_of` copies into this memory, over the snapshot before."""
        self._used = 0
        with _copying(self._copy):
            yield

    def enlarge(self, num_bytes: int, stop: threading.Event) -> None:
        """To so many bytes, which no snapshot is in meanwhile, and touch all of them unless `stop`
        comes first. Touching holds no lock of Python's and uses one core."""
        if num_bytes <= len(self._memory):
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # never both at a time
        with contextlib.suppress(RuntimeError):  # no memory now: the copy itself will say so
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        pages = self._memory.numpy()[::_PAGE_BYTES]
        for first in range(0, len(pages), _PIECE_PAGES):
            if stop.is_set():
                return
            pages[first : first + _PIECE_PAGES] = 0

    def _copy(self, tensors: tuple[Tensor, ...]) -> Tensor:
        like, num_bytes = tensors[0], sum(tensor.nbytes for tensor in tensors)
        end = self._used + num_bytes
        if like.device.type != "cpu" or end > len(self._memory):
            return _own_copy(tensors)
        place = self._memory[self._used : end].view(like.dtype)
        self._used = _aligned(end)
        with torch.no_grad():
            if len(tensors) == 1:
                return place.view(like.shape).copy_(like)
            place = place.view(-1, *like.shape[1:])
            return torch.cat([tensor.detach() for tensor in tensors], out=place)


@contextlib.contextmanager
def _copying(copier: _Copier) -> Iterator[None]:
    token = _copier.set(copier)
    try:
        yield
    finally:
        _copier.reset(token)


def _own_copy(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0].clone()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN

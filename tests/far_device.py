"""A device that nobody waits for, on a machine without one: its tensors say that they are
elsewhere (as torch's meta tensors do), are held on the host all the same, and refuse whatever
would have the host wait for their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

HOST = torch.device("cpu")
FAR = torch.device("meta")
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
BY_PLACE = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)


class FarTensor(Tensor):
    """A tensor of the far device. held: its values, on the host."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> FarTensor:
        made: FarTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=FAR,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _compute(op, args=args, named=kwargs or {})


class FarDevice(TorchDispatchMode):
    """While it is entered, tensors can be made on the far device and brought there."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _compute(op, args=args, named=kwargs or {})


def held(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of either device."""
    return tensor.held if isinstance(tensor, FarTensor) else tensor


def _compute(op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Run an operation on the values. Raises AssertionError if the host would wait for them."""
    given = [leaf for leaf in tree.tree_leaves((args, named)) if isinstance(leaf, Tensor)]
    is_far = any(isinstance(tensor, FarTensor) for tensor in given)
    makes_far = is_far
    if named.get("device") is not None:
        makes_far = torch.device(named["device"]) == FAR
    if is_far:
        assert makes_far, f"the host waits for a copy: {op}"
        assert not _waits(op, args=args), f"the host waits for values: {op}"
        on_host = [t for t in given if not isinstance(t, FarTensor) and t.dim()]
        assert not on_host, f"{op} has tensors of two devices"

    def on_host_of(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return HOST
        return held(leaf) if isinstance(leaf, Tensor) else leaf

    args, named = tree.tree_map(on_host_of, (args, named))
    found = op(*args, **named)
    if not makes_far:
        return found
    return tree.tree_map(lambda leaf: FarTensor(leaf) if isinstance(leaf, Tensor) else leaf, found)


def _waits(op: Any, args: tuple[Any, ...]) -> bool:
    if op in BY_PLACE:  # by whole numbers its result has a size that is known
        places = [place for place in args[1] if place is not None]
        return any(place.dtype in (torch.bool, torch.uint8) for place in places)
    return bool(WAITS & set(op.tags))

"""How many bytes of tensors operators make at once, counted where they are made: always the same
for the same work."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """peak: most bytes at once of the storages that operators have made within the block, in the
    thread that entered it. A view of what was there before makes none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._held = 0
        self._known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # What an operator is given was there before the block, or is counted already.
        self._known.update(_storages((args, kwargs)))
        given = func(*args, **(kwargs or {}))
        for storage in _storages(given):
            if storage in self._known:  # an operator in place, or a view
                continue
            self._known.add(storage)
            # The storage itself says when it is freed; tensors that share it come and go.
            weakref.finalize(storage, self._gone, storage.nbytes())
            self._held += storage.nbytes()
            self.peak = max(self.peak, self._held)
        return given

    def _gone(self, num_bytes: int) -> None:
        self._held -= num_bytes


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the memory of all tensors in nested containers."""
    for tensor in tree_leaves(values):
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            continue
        # A DTensor says how large the whole is, and has no memory itself. By way of Any: mypy
        # holds that no tensor can be a wrapper, and what follows for unreachable.
        if not is_traceable_wrapper_subclass(cast(Any, tensor)):
            yield tensor.untyped_storage()

"""How many bytes of tensors there are at once, counted where they are made: always the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """peak: most bytes at once of the storages that operators gave out within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._held = 0
        self._known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if not isinstance(tensor, Tensor) or is_traceable_wrapper_subclass(tensor):
                continue  # a DTensor says how large the whole is, and has no memory itself
            if not tensor.is_meta:
                self._note(tensor.untyped_storage())
        return given

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        weakref.finalize(storage, self._gone, storage.nbytes())
        self._held += storage.nbytes()
        self.peak = max(self.peak, self._held)

    def _gone(self, num_bytes: int) -> None:
        self._held -= num_bytes

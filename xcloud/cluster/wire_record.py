"""Record what one rank sent to or received from other clouds, by kind: contents, shapes, counts,
bytes. Keeps neither tensor values nor the order of messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from xcloud.cluster.frame import Kind


@dataclass
class _Entry:
    """All messages of one kind and composition on one link."""

    carries: tuple[str, ...]
    dtypes: tuple[str, ...]
    smallest: list[list[int]]  # size of each axis of each part
    largest: list[list[int]]
    num_messages: int = 0
    num_bytes: int = 0

    def add(self, parts: Sequence[Tensor], num_bytes: int) -> None:
        self.num_messages += 1
        self.num_bytes += num_bytes
        for part, low, high in zip(parts, self.smallest, self.largest, strict=True):
            for axis, size in enumerate(part.shape):
                low[axis], high[axis] = min(low[axis], size), max(high[axis], size)

    def described_parts(self) -> list[dict[str, Any]]:
        carries = self.carries or ("unnamed",) * len(self.dtypes)
        shapes = zip(self.smallest, self.largest, strict=True)
        return [
            {"carries": carried, "dtype": dtype,
             "shape": [a if a == b else f"{a}-{b}" for a, b in zip(low, high, strict=True)]}
            for carried, dtype, (low, high) in zip(carries, self.dtypes, shapes, strict=True)
        ]  # fmt: skip


@dataclass
class LinkRecord:
    """What went over one link. to: cloud of the receiver. boundary: number of the stage before it;
    None for control messages from and to rank 0 and in one-way jobs. bytes_of: whole frames, by
    kind; other threads may read it."""

    to: str
    receiver: int
    boundary: int | None
    bytes_of: Counter[Kind] = field(default_factory=Counter)
    _entries: dict[tuple[Any, ...], _Entry] = field(default_factory=dict)

    def note(
        self, kind: Kind, parts: Sequence[Tensor], carries: Sequence[str], num_bytes: int
    ) -> None:
        """carries: a description of each part. num_bytes: of the whole frame."""
        dtypes = tuple(str(part.dtype).removeprefix("torch.") for part in parts)
        axes = tuple(part.dim() for part in parts)
        key = (kind, tuple(carries), dtypes, axes)
        if key not in self._entries:
            sizes = [list(part.shape) for part in parts]
            self._entries[key] = _Entry(tuple(carries), dtypes, sizes, [list(s) for s in sizes])
        self._entries[key].add(parts, num_bytes)
        self.bytes_of[kind] += num_bytes

    def described(self) -> list[dict[str, Any]]:
        return [
            {
                "to": self.to,
                "receiver": self.receiver,
                "boundary": self.boundary,
                "kind": kind.name.lower(),
                "parts": entry.described_parts(),
                "num_messages": entry.num_messages,
                "num_bytes": entry.num_bytes,
            }
            for (kind, *_), entry in self._entries.items()
        ]

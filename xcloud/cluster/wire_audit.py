"""What kinds of messages crossed a link between clouds: dtype, shape, count and bytes of each.
Looks at headers only; keeps no values.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from xcloud.cluster.frame import Kind


class Row(NamedTuple):
    """One kind of message, from one cloud to another. parts: dtype and axes of every tensor in
    it, as "uint8[N]"."""

    sender: str
    receiver: str
    kind: str
    parts: str


class WireAudit:
    """Counts whole frames, headers included; filled from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: Counter[Row] = Counter()
        self._bytes: Counter[Row] = Counter()

    def count(
        self, sender: str, receiver: str, kind: Kind, parts: Sequence[Tensor], num_bytes: int
    ) -> None:
        described = ", ".join(describe(part) for part in parts)
        row = Row(sender, receiver, kind.name.lower(), described)
        with self._lock:
            self._messages[row] += 1
            self._bytes[row] += num_bytes

    def rows(self) -> list[dict[str, Any]]:
        """For a report: one dictionary for each kind, plain values only."""
        with self._lock:
            return [
                {**row._asdict(), "messages": self._messages[row], "bytes": self._bytes[row]}
                for row in sorted(self._messages)
            ]

    def num_bytes(self, *kinds: str) -> int:
        with self._lock:
            return sum(count for row, count in self._bytes.items() if row.kind in kinds)


def describe(part: Tensor) -> str:
    """uint8[N], int32[N, 2]: the first axis varies."""
    axes = ["N", *map(str, part.shape[1:])] if part.dim() else []
    return f"{str(part.dtype).removeprefix('torch.')}[{', '.join(axes)}]"

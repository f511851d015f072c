"""Deal tensors out in parts of about equal size, cut between rows, and put them together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Rows (axis 0) first .. last - 1 of tensor number `index`; a scalar has one row."""

    name: str
    index: int
    first: int
    last: int
    shape: torch.Size

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """A view."""
        tensor = tensors[self.index]
        return tensor[self.first : self.last] if tensor.dim() else tensor


def dealt(shapes: Mapping[str, torch.Size], num_parts: int) -> list[list[Piece]]:
    """Every row of every tensor in exactly one part, in order; parts differ by a row's size. A
    part may be empty, if there are few rows. A tensor without values is in the part where it
    falls, whole."""
    total = sum(shape.numel() for shape in shapes.values())
    parts: list[list[Piece]] = [[] for _ in range(num_parts)]
    seen = 0
    for index, (name, shape) in enumerate(shapes.items()):
        num_rows = shape[0] if shape else 1
        width = shape.numel() // num_rows if num_rows else 0
        first = 0
        while first < num_rows or (first == num_rows == 0):
            middle = seen + width / 2  # of the row: it goes where its middle lies
            part = min(num_parts - 1, int(num_parts * middle / max(total, 1)))
            last = num_rows
            if width and part < num_parts - 1:
                ends_at = total * (part + 1) / num_parts
                last = min(num_rows, max(first + 1, first + round((ends_at - seen) / width)))
            rows = torch.Size((last - first, *shape[1:])) if shape else shape
            whole = last - first == num_rows
            label = name if whole else f"{name}[{first}:{last}]"
            parts[part].append(Piece(label, index, first, last, rows))
            seen += (last - first) * width
            first = last
            if not num_rows:
                break
    return parts


def joined(found: Iterable[tuple[Piece, Tensor]], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The tensors whose pieces these are."""
    rows: list[list[tuple[int, Tensor]]] = [[] for _ in shapes]
    for piece, tensor in found:
        rows[piece.index].append((piece.first, tensor))
    return [
        torch.cat([tensor for _, tensor in sorted(own, key=lambda pair: pair[0])])
        if len(own) > 1
        else own[0][1]
        for own in rows
    ]

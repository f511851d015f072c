"""Tensors cut into parts of about equal size: runs of neighbours (fragments that are merged in
turn, stages), whole tensors or rows of them (shares that the ranks of a cloud carry across); and
put together again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xcloud.parallel.exchange import RankGroup


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


def contiguous(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Positions 0..len(sizes) - 1 in `count` runs of about equal sum, none of them empty."""
    assert len(sizes) >= count, (len(sizes), count)
    whole, done = sum(sizes), 0
    runs: list[list[int]] = [[]]
    for position, size in enumerate(sizes):
        runs_left, positions_left = count - len(runs), len(sizes) - position
        # The next run begins where its boundary is nearer to this tensor's start than to its end.
        is_due = (done + size / 2) * count >= whole * len(runs)
        if runs[-1] and runs_left and (is_due or positions_left <= runs_left):
            runs.append([])
        runs[-1].append(position)
        done += size
    return runs


def by_tensor(shapes: Mapping[str, torch.Size], num_shares: int) -> list[list[Piece]]:
    """Whole tensors in shares of about equal sum, the largest first; a share may be empty."""
    whole = [
        Piece(name, index, 0, shape[0] if shape else 1, shape)
        for index, (name, shape) in enumerate(shapes.items())
    ]
    shares: list[list[Piece]] = [[] for _ in range(num_shares)]
    sums = [0] * num_shares
    for piece in sorted(whole, key=lambda piece: -piece.shape.numel()):
        lightest = sums.index(min(sums))
        shares[lightest].append(piece)
        sums[lightest] += piece.shape.numel()
    return [sorted(share, key=lambda piece: piece.index) for share in shares]


def by_rows(shapes: Mapping[str, torch.Size], num_shares: int) -> list[list[Piece]]:
    """Every row of every tensor in exactly one share, in order; shares differ by a row's size. A
    share may be empty, if there are few rows. A tensor without values is in the share where it
    falls, whole."""
    total = sum(shape.numel() for shape in shapes.values())
    shares: list[list[Piece]] = [[] for _ in range(num_shares)]
    seen = 0
    for index, (name, shape) in enumerate(shapes.items()):
        num_rows = shape[0] if shape else 1
        width = shape.numel() // num_rows if num_rows else 0
        first = 0
        while first < num_rows or (first == num_rows == 0):
            middle = seen + width / 2  # of the row: it goes where its middle lies
            share = min(num_shares - 1, int(num_shares * middle / max(total, 1)))
            last = num_rows
            if width and share < num_shares - 1:
                ends_at = total * (share + 1) / num_shares
                last = min(num_rows, max(first + 1, first + round((ends_at - seen) / width)))
            rows = torch.Size((last - first, *shape[1:])) if shape else shape
            label = name if last - first == num_rows else f"{name}[{first}:{last}]"
            shares[share].append(Piece(label, index, first, last, rows))
            seen += (last - first) * width
            first = last
            if not num_rows:
                break
    return shares


def joined(pieces: Iterable[tuple[Piece, Tensor]], count: int) -> list[Tensor]:
    """The tensors, so many, that these are pieces of, as by_rows has put them in order."""
    rows: list[list[Tensor]] = [[] for _ in range(count)]
    for piece, tensor in pieces:
        rows[piece.index].append(tensor)
    return [torch.cat(own) if len(own) > 1 else own[0] for own in rows]


def gather_shares(
    group: RankGroup, shares: Sequence[Sequence[Piece]], mine: Sequence[Tensor], like: Tensor
) -> list[tuple[Piece, Tensor]]:
    """All pieces with their tensors, in every rank of the group, of which the first hold a share
    each. mine: this rank's share; empty without one. like: of the same dtype and device."""
    if group.group_size == 1:
        return list(zip(shares[0], mine, strict=True))
    # Gathered, not summed: adding zeros would change the sign of a zero.
    sizes = [[piece.shape.numel() for piece in share] for share in shares]
    row = like.new_zeros(max(map(sum, sizes)))
    if mine:
        flat = torch.cat([tensor.reshape(-1) for tensor in mine])
        row[: len(flat)] = flat
    rows = [group.from_leader(row)] if len(shares) == 1 else group.gather(row)
    return [
        (piece, tensor.view(piece.shape))
        for share, own, row in zip(shares, sizes, rows, strict=False)
        for piece, tensor in zip(share, torch.split(row[: sum(own)], own), strict=True)
    ]

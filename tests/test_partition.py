"""Tensors cut into parts of about equal size."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xcloud.parallel.merging import by_rows, joined

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, num_parts=st.integers(1, 7))
def test_parts_are_about_equal_and_make_the_whole(shapes: list[list[int]], num_parts: int) -> None:
    named = {f"t{i}": torch.Size(shape) for i, shape in enumerate(shapes)}
    tensors = [torch.randn(shape) for shape in named.values()]
    parts = by_rows(named, num_parts)
    found = [(piece, piece.of(tensors)) for part in parts for piece in part]

    assert all(piece.shape == tensor.shape for piece, tensor in found)
    assert len({piece.name for piece, _ in found}) == len(found)
    again = joined(found, len(named))
    assert all(torch.equal(a, b) for a, b in zip(again, tensors, strict=True))
    total = sum(t.numel() for t in tensors)
    widest = max(t.numel() // max(1, t.shape[0] if t.dim() else 1) for t in tensors)
    for part in parts:
        assert sum(piece.shape.numel() for piece in part) <= total / num_parts + 2 * widest

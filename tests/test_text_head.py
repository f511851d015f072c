"""Pooling, the way to the head, and the three kinds of answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.peak_bytes import PeakBytes
from xcloud.contracts.model import Head
from xcloud.models.encoder import Packing
from xcloud.models.low_rank_split import way_to_head
from xcloud.models.stages import SampleHead, SpanHead, pool

COUNTS = torch.tensor([4, 1, 3])
PACKING = Packing(COUNTS)
STARTS = [0, 4, 5]


def test_a_sample_is_its_first_row_or_their_mean() -> None:
    rows = torch.randn(8, 6)
    parts = rows.split(COUNTS.tolist())

    assert torch.equal(pool(rows, PACKING, "first"), rows[STARTS])
    torch.testing.assert_close(
        pool(rows, PACKING, "mean"), torch.stack([part.mean(0) for part in parts])
    )


def test_the_way_to_the_head_is_an_identity_path_of_its_rank() -> None:
    down, up = way_to_head(10, 4, 7)
    rows = torch.randn(5, 10)
    kept = up(down(rows))

    torch.testing.assert_close(up(down(kept)), kept)  # a projection
    assert torch.linalg.matrix_rank(kept) == 4
    assert not torch.equal(way_to_head(10, 4, 8)[0].weight, down.weight)


def test_losses_are_sums_over_samples() -> None:
    rows = torch.randn(3, 6)
    classes = SampleHead(6, Head("classes", 4), 0.0, 1, None)
    label = torch.tensor([0, 3, 1])
    expected = sum(F.cross_entropy(classes(rows)[i], label[i]) for i in range(3))
    torch.testing.assert_close(classes.loss(classes(rows), label, None), expected)
    value = SampleHead(6, Head("value", 1), 0.0, 1, None)
    wanted = torch.tensor([0.5, 2.0, -1.0])
    torch.testing.assert_close(
        value.loss(value(rows), wanted, None), (value(rows)[:, 0] - wanted).square().sum()
    )


def test_predictions_are_whole_numbers() -> None:
    head = SampleHead(6, Head("value", 1), 0.0, 1, None)
    assert head.predict(torch.tensor([[0.1234567], [-2.0]]), COUNTS, None) == [
        [123457],
        [-2000000],
    ]
    head = SampleHead(6, Head("classes", 3), 0.0, 1, None)
    assert head.predict(torch.tensor([[0.0, 2.0, 1.0]]), COUNTS, None) == [[1]]


def test_a_checkpoint_gives_the_pooler() -> None:
    given = {"weight": torch.randn(6, 6), "bias": torch.randn(6)}
    head = SampleHead(6, Head("classes", 2), 0.0, 1, given)
    assert torch.equal(head.dense.weight, given["weight"])


def test_the_loss_of_a_span_knows_no_padding() -> None:
    head = SpanHead(6, 30, 1)
    scores = torch.randn(8, 2)
    label = torch.tensor([[1, 2, 1], [0, 0, 0], [0, 2, 0]])
    expected = 0.0
    for part, (first, last, _) in zip(scores.split(COUNTS.tolist()), label, strict=True):
        expected += F.cross_entropy(part[:, 0], first) / 2 + F.cross_entropy(part[:, 1], last) / 2
    torch.testing.assert_close(head.loss(scores, label, PACKING), torch.as_tensor(expected))
    gradient = torch.autograd.grad(head.loss(scores.requires_grad_(), label, PACKING), scores)[0]
    assert gradient.isfinite().all()


def test_spans_of_a_long_batch_are_compared_sample_by_sample() -> None:
    head, packing = SpanHead(6, 30, 1), Packing(torch.full((16,), 400))
    label = torch.zeros(16, 3, dtype=torch.int64)
    with PeakBytes() as memory:
        head.predict(torch.randn(16 * 400, 2), label, packing)
    assert memory.peak < 6 * 4 * 400**2, "a few grids of one sample, not those of 16"


@pytest.mark.parametrize("longest", [1, 2, 30])
def test_a_span_is_the_best_that_is_allowed(longest: int) -> None:
    head = SpanHead(6, longest, 1)
    counts = torch.tensor([9, 6])
    packing = Packing(counts)
    label = torch.tensor([[0, 0, 3], [0, 0, 1]])
    draw = torch.Generator().manual_seed(3)
    for _ in range(20):
        scores = torch.randn(15, 2, generator=draw)
        found = head.predict(scores, label, packing)
        for part, allowed_from, answer in zip(
            scores.split(counts.tolist()), (3, 1), found, strict=True
        ):
            spans = {
                (i, j): float(part[i, 0] + part[j, 1])
                for i in range(allowed_from, len(part) - 1)
                for j in range(i, min(i + longest, len(part) - 1))
            }
            best = max(spans, key=lambda span: spans[span])
            assert (answer[0], answer[1]) == best
            assert answer[2] == pytest.approx(1e4 * spans[best], abs=1)

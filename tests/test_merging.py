"""One bad replica moves a robust merge a little, and the mean as far as it likes; and parts of
about equal size make the whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.replicas import averagers, exchange, same_bits
from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.averaging import AllToAll, Terms
from xcloud.features.replicas.merging import (
    Contribution,
    Median,
    NormBound,
    Robust,
    TrimmedMean,
    by_rows,
    joined,
    weighted_mean,
    weighted_sum,
)

ROBUST = [Median(), TrimmedMean(), TrimmedMean(0.4), NormBound(1.5)]
TRUTH = torch.randn(4000, generator=torch.Generator().manual_seed(0))


def honest(seed: int) -> list[Tensor]:
    """What a good replica tells: the truth and some noise."""
    generator = torch.Generator().manual_seed(seed)
    values = TRUTH + 0.3 * torch.randn(4000, generator=generator)
    return [values[:1000].view(50, 20), values[1000:]]


def bad(kind: str) -> list[Tensor]:
    tensors = honest(9)
    if kind == "NaN":
        tensors[0][3, 3] = math.nan
        return tensors
    return [t * {"huge": 1e6, "flipped": -10.0}[kind] for t in tensors]


def distance(tensors: list[Tensor]) -> float:
    """From the truth, relative."""
    return float((torch.cat([t.flatten() for t in tensors]) - TRUTH).norm() / TRUTH.norm())


@pytest.mark.parametrize("merge", ROBUST, ids=repr)
def test_one_bad_replica_does_not_move_a_robust_merge_far(merge: Robust) -> None:
    for num_replicas in (3, 5):
        good = [Contribution(honest(r), 1.0) for r in range(num_replicas - 1)]
        without = distance(weighted_mean(good))
        for kind in ("huge", "flipped", "NaN"):
            for place in (0, num_replicas - 1):
                everybody = [*good[:place], Contribution(bad(kind), 1.0), *good[place:]]
                # A bound on the norm lets the bad one pull with 1.5 norms of R.
                most = without + (2.6 / num_replicas if isinstance(merge, NormBound) else 0.4)
                assert distance(merge(everybody)) < most, (num_replicas, kind)
                assert not distance(weighted_mean(everybody)) < 1.5 * most


def test_where_all_are_good_the_cost_is_the_variance_that_is_stated() -> None:
    for num_replicas, median, trimmed in ((3, 1.35, 1.35), (5, 1.43, 1.14)):
        noise = [honest(r) for r in range(num_replicas)]
        good = [Contribution(tensors, 1.0) for tensors in noise]
        mean = distance(weighted_mean(good)) ** 2
        assert distance(Median()(good)) ** 2 / mean == pytest.approx(median, rel=0.05)
        assert distance(TrimmedMean()(good)) ** 2 / mean == pytest.approx(trimmed, rel=0.05)
        assert distance(NormBound(1.5)(good)) ** 2 == pytest.approx(mean)


def test_robust_merges_of_few_values_are_what_they_say() -> None:
    def of(merge: Robust, *values: float, weights: tuple[float, ...] = ()) -> float:
        (found,) = merge(
            [
                Contribution([torch.tensor([value])], weight)
                for value, weight in zip(values, weights or (1.0,) * len(values), strict=True)
            ]
        )
        return float(found)

    assert of(Median(), 5.0, 1.0, 2.0) == 2.0
    assert of(Median(), 5.0, 1.0, 2.0, 4.0) == 3.0
    assert of(Median(), 5.0, math.inf, 2.0) == 3.5
    assert of(Median(), 5.0, 1.0, 2.0, weights=(1.0, 0.0, 1.0)) == 3.5
    assert of(TrimmedMean(0.2), 5.0, 1.0, 2.0, 100.0, 3.0) == pytest.approx(10 / 3)
    assert of(NormBound(1.0), 3.0, -3.0, 300.0, weights=(1.0, 1.0, 2.0)) == pytest.approx(
        1.5, rel=1e-3
    )
    assert math.isnan(of(Median(), math.nan, 1.0, math.nan))
    assert math.isnan(of(Median(), math.nan, 1.0))
    assert of(NormBound(), 0.0, 0.0, 0.0) == 0.0


def test_sum_and_mean_hide_nothing_and_use_weights() -> None:
    contributions = [Contribution([torch.tensor([2.0])], 1.0), Contribution([torch.ones(1)], 3.0)]
    assert float(weighted_sum(contributions)[0]) == 5.0
    assert float(weighted_mean(contributions)[0]) == 1.25
    assert math.isnan(float(weighted_mean([Contribution([torch.ones(1)], 0.0)])[0]))
    contributions.append(Contribution([torch.tensor([math.nan])], 1.0))
    assert math.isnan(float(weighted_mean(contributions)[0]))


def test_replicas_with_a_robust_merge_are_equal_and_two_are_too_few() -> None:
    shapes = {str(i): tensor.shape for i, tensor in enumerate(honest(0))}

    def codec() -> TensorCodec:
        return TensorCodec(shapes, lambda name, shape: Chain(), 1, True)

    for merge in ROBUST:
        tensors = [honest(0), bad("NaN"), honest(2)]
        replicas = averagers(3, lambda mail, m=merge: AllToAll(mail, codec(), Terms(m)))
        found = exchange(replicas, 1, tensors)
        assert same_bits(found) and distance(found[0]) < 1.0
    with pytest.raises(ConfigError, match=r"Median\(\) needs 3 replicas or more.*got 2"):
        Median().check(2)
    with pytest.raises(ConfigError, match=r"TrimmedMean.share must be a number in \[0, 0.5\]"):
        TrimmedMean(0.6)
    with pytest.raises(ConfigError, match=r"NormBound.factor must be a number in \[1, inf\)"):
        NormBound(0.5)


@settings(max_examples=80, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6),
    num_parts=st.integers(1, 7),
)
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

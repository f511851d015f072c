import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs import arrives
from xcloud.comm.sparsify import RandomK, RandomTopK, SortedPositions, TopK, TopRows
from xcloud.net.frame import TensorSpec


@given(rate=st.floats(0.001, 1), numel=st.integers(1, 3000), seed=st.integers(0, 99))
def test_topk_keeps_the_largest_values_exactly_and_nothing_else(
    rate: float, numel: int, seed: int
) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    num_kept = max(1, round(rate * numel))
    largest = tensor.abs().topk(num_kept).indices
    expected = torch.zeros(numel).scatter(0, largest, tensor[largest])

    assert torch.equal(arrives(TopK(rate), tensor), expected)


@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0]), min_size=1, max_size=50))
def test_topk_sends_exactly_k_values_however_many_are_equal(values: list[float]) -> None:
    tensor = torch.tensor(values)
    num_kept = max(1, round(0.3 * len(values)))
    sent, _ = TopK(0.3).compress(tensor)

    assert sorted(sent.abs().tolist()) == sorted(tensor.abs().topk(num_kept).values.tolist())
    assert arrives(TopK(0.3), tensor).norm() == sent.norm()


def test_topk_is_global_over_the_tensor() -> None:
    tensor = torch.ones(4, 5)
    tensor[2] = 9.0

    assert arrives(TopK(0.25), tensor).sum(1).tolist() == [0.0, 0.0, 45.0, 0.0]


def test_topk_of_a_sparse_tensor_arrives_exactly() -> None:
    tensor = torch.zeros(50, 40)
    tensor[::7, 3] = torch.randn(8)

    assert torch.equal(arrives(TopK(0.004), tensor), tensor)


def test_topk_sends_a_nan_first() -> None:
    tensor = torch.randn(100)
    tensor[17] = float("nan")

    assert arrives(TopK(0.01), tensor)[17].isnan()


@given(
    numel=st.integers(1, 5000),
    rate=st.floats(0, 1),
    clustered=st.booleans(),
    seed=st.integers(0, 99),
)
def test_positions_come_back_in_the_promised_bytes(
    numel: int, rate: float, clustered: bool, seed: int
) -> None:
    num_kept = max(1, round(rate * numel))
    chosen = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:num_kept]
    positions = torch.arange(num_kept) if clustered else chosen.sort().values
    coding = SortedPositions(num_kept, numel)
    packed = coding.encode(positions)

    assert packed.shape == (coding.num_bytes,)
    assert torch.equal(coding.decode(packed), positions)
    last = numel - num_kept + torch.arange(num_kept)
    assert torch.equal(coding.decode(coding.encode(last)), last)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9])
def test_positions_take_little_more_than_their_entropy(rate: float) -> None:
    numel = 2048 * 768
    num_kept = round(rate * numel)
    entropy_bits = -(rate * math.log2(rate) + (1 - rate) * math.log2(1 - rate)) * numel
    bits = 8 * SortedPositions(num_kept, numel).num_bytes

    assert bits >= entropy_bits
    assert bits <= numel + 8
    assert bits <= entropy_bits + 0.65 * num_kept


def test_randomk_sends_eight_bytes_beside_the_values() -> None:
    values, seed = RandomK(0.1).wire_specs(TensorSpec((100, 20), torch.bfloat16))

    assert (values.numel, values.dtype) == (200, torch.bfloat16)
    assert seed.num_bytes == 8


@given(rate=st.floats(0.001, 1), numel=st.integers(1, 2000), seed=st.integers(0, 99))
def test_randomk_sends_distinct_values_unchanged(rate: float, numel: int, seed: int) -> None:
    tensor = torch.arange(1.0, numel + 1)
    seen = arrives(RandomK(rate, seed=seed), tensor)
    kept = seen != 0

    assert int(kept.sum()) == max(1, round(rate * numel))
    assert torch.equal(seen[kept], tensor[kept])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_randomk_gives_every_value_the_same_chance(rate: float) -> None:
    compressor, ones, num_messages = RandomK(rate), torch.ones(101), 4000
    share = sum(arrives(compressor, ones) for _ in range(num_messages)) / num_messages
    spread = math.sqrt(rate * (1 - rate) / num_messages)

    assert (share - round(rate * 101) / 101).abs().max() < 5 * spread


@pytest.mark.slow
@pytest.mark.nightly
def test_the_mean_of_unbiased_messages_is_the_tensor() -> None:
    compressor, tensor = RandomK(0.25, unbiased=True), torch.randn(60)
    mean = sum(arrives(compressor, tensor) for _ in range(4000)) / 4000

    assert ((mean - tensor).abs() < 5 * tensor.abs() * math.sqrt(3 / 4000) + 1e-6).all()


def test_randomk_draws_anew_for_each_message_and_each_seed() -> None:
    tensor, first, second = torch.randn(1000), RandomK(0.1), RandomK(0.1, seed=1)
    seen = [arrives(first, tensor), arrives(first, tensor), arrives(second, tensor)]

    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


def test_toprows_keeps_the_longest_rows_whole() -> None:
    tensor = torch.tensor([[3.0, 4.0], [6.0, 0.0], [0.0, 1.0], [-5.0, -5.0]])
    expected = torch.tensor([[0.0, 0.0], [6.0, 0.0], [0.0, 0.0], [-5.0, -5.0]])

    assert torch.equal(arrives(TopRows(0.5), tensor), expected)
    assert torch.equal(arrives(TopRows(0.5), 1e-25 * tensor), 1e-25 * expected)


def test_toprows_costs_its_rows_and_a_few_bits_each() -> None:
    values, positions = TopRows(0.15).wire_specs(TensorSpec((800, 112), torch.float32))

    assert values == TensorSpec((120, 112), torch.float32)
    assert positions.num_bytes * 8 <= 6 * 120


def test_the_largest_of_those_drawn_arrive_and_the_others_have_their_turn() -> None:
    tensor = torch.arange(1.0, 1001)
    compressor, seen = RandomTopK(0.2, 0.1), torch.zeros(1000, dtype=torch.bool)
    compressor.use_stream(5)
    for _ in range(60):
        parts = compressor.compress(tensor)
        found = compressor.decompress(parts, TensorSpec.of(tensor))
        kept = found != 0
        assert int(kept.sum()) == 20 and torch.equal(found[kept], tensor[kept])
        assert int(kept[:500].sum()) <= 1  # 200 are drawn, 100 of them from the upper half
        seen |= kept
    assert seen[950:].all()
    # 20 values, 20 of 200 positions in 110 bits, a seed.
    specs = compressor.wire_specs(TensorSpec.of(tensor))
    assert sum(spec.num_bytes for spec in specs) == 80 + 14 + 8


@pytest.mark.parametrize("numel", [1000, 20_000, 150_000])
def test_topk_finds_what_a_sort_finds_whatever_the_size(numel: int) -> None:
    gaussian = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    periodic = torch.zeros(numel)
    periodic[1::2] = gaussian[1::2]  # a sample of every second value sees zeros only
    for values in (gaussian, gaussian.round(), gaussian.sort().values, periodic):
        for rate in (0.001, 0.02, 0.3):
            (kept, _), k = TopK(rate).compress(values), round(rate * numel)
            order = values.abs().sort(descending=True, stable=True).indices[:k]
            assert torch.equal(kept, values[order.sort().values]), (rate, k)


@pytest.mark.parametrize("compressor", [RandomK(0.1), RandomTopK(0.1, 0.5)])
def test_a_nan_is_sent_whatever_is_drawn_in_the_first_value_alone(
    compressor: RandomK | RandomTopK,
) -> None:
    tensor = torch.ones(1000)
    tensor[17] = math.inf
    sent, *_ = compressor.compress(tensor)
    assert sent.numel() > 2 and sent[0].isnan() and not sent[1:].isnan().any()

"""Factors of a gradient by one step of power iteration a call."""

import pytest
import torch
from torch import Tensor

from xcloud.comm import low_rank as power_sgd
from xcloud.comm.low_rank import PowerSgd, outer_sum
from xcloud.net.frame import TensorSpec


def gradients(num: int) -> list[Tensor]:
    """Of one matrix with slowly decaying singular values, with a little noise in each."""
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(120, 80, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(80, 80, generator=generator)).Q
    mean = left @ torch.diag(1 / torch.arange(1.0, 81)) @ right
    return [mean + 1e-3 * torch.randn(120, 80, generator=generator) for _ in range(num)]


def error(tensor: Tensor, compressor: PowerSgd) -> float:
    seen = compressor.decompress(compressor.compress(tensor), TensorSpec.of(tensor))
    return float((tensor - seen).norm() / tensor.norm())


def test_the_warm_start_comes_near_to_the_best_matrix_of_that_rank() -> None:
    compressor, tensors = PowerSgd(4), gradients(8)
    errors = [error(tensor, compressor) for tensor in tensors]
    values = torch.linalg.svdvals(tensors[-1])
    best = float(values[4:].norm() / values.norm())

    assert errors[0] > 1.15 * best
    assert errors[-1] < 1.01 * best


def test_exactly_low_rank_input_comes_back_exactly_at_once() -> None:
    torch.manual_seed(0)
    compressor = PowerSgd(5)
    for _ in range(3):  # each of another basis
        assert error(torch.randn(90, 5) @ torch.randn(5, 60), compressor) < 1e-5


def test_bytes_are_those_of_two_thin_factors() -> None:
    def num_bytes(rank: int, *shape: int) -> int:
        specs = PowerSgd(rank).wire_specs(TensorSpec(shape, torch.float32))
        return sum(spec.num_bytes for spec in specs)

    assert num_bytes(4, 512, 2048) == 4 * 4 * (512 + 2048)  # 1/102 of the matrix
    assert num_bytes(4, 3, 50) == 4 * 3 * (3 + 50)  # no more columns than rows
    assert num_bytes(4, 1, 50) == 4 * (1 + 50)


def test_decoding_gives_the_same_bits_whatever_the_passes_and_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(700, 8), torch.randn(8, 500)
    expected = sum(left[:, i, None] * right[i] for i in range(8))
    threads = torch.get_num_threads()
    try:
        for num_threads, chunk in ((1, 1 << 16), (2, 1 << 16), (1, 1 << 10), (2, 1 << 20)):
            torch.set_num_threads(num_threads)
            monkeypatch.setattr(power_sgd, "_CHUNK", chunk)
            assert torch.equal(outer_sum(left, right), expected)
    finally:
        torch.set_num_threads(threads)
    assert not outer_sum(torch.zeros(3, 0), torch.zeros(0, 5)).any()


def test_a_state_of_another_compressor_is_refused() -> None:
    with pytest.raises(ValueError, match="a PowerSgd contains 'num_calls'"):
        PowerSgd().load_state_dict({"num_calls": 3})

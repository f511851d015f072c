import pytest
import torch

from tests.codecs import arrives
from xcloud.comm.compressor import Chain
from xcloud.comm.precision import Cast
from xcloud.net.frame import TensorSpec


def test_nothing_sends_the_tensor_in_its_own_dtype() -> None:
    tensor = torch.randn(3, 4, dtype=torch.bfloat16)

    assert Chain().wire_specs(TensorSpec.of(tensor)) == (TensorSpec.of(tensor),)
    assert torch.equal(arrives(Chain(), tensor), tensor)


def test_float16_takes_half_the_bytes_and_one_exponent() -> None:
    specs = Cast("float16").wire_specs(TensorSpec((2048, 768), torch.float32))

    assert sum(spec.num_bytes for spec in specs) == 2 * 2048 * 768 + 2


def test_float16_values_arrive_exactly() -> None:
    tensor = torch.randn(64, 32).half()

    for dtype in (torch.float16, torch.float32, torch.float64):
        assert torch.equal(arrives(Cast("float16"), tensor.to(dtype)), tensor.to(dtype))


def test_all_finite_float16_values_arrive_exactly_in_a_float16_tensor() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()]

    assert torch.equal(arrives(Cast("float16"), every), every)


def test_all_finite_bfloat16_values_arrive_exactly() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.isfinite()]

    assert torch.equal(arrives(Cast("bfloat16"), every), every)


def test_float16_keeps_eleven_bits_at_every_power_of_two() -> None:
    for power in range(-126, 128):
        tensor = torch.tensor([1 + 2**-10, -1.0, 0.5 + 2**-11, 0.0]) * 2.0**power

        assert torch.equal(arrives(Cast("float16"), tensor), tensor), power


def test_small_gradients_survive_float16() -> None:
    gradients = 1e-9 * torch.randn(50, 50)
    seen = arrives(Cast("float16"), gradients)

    assert not gradients.half().any()  # what a plain cast would make of them
    assert (gradients - seen).norm() < 3e-4 * gradients.norm()


def test_large_values_do_not_become_infinite_in_float16() -> None:
    tensor = torch.tensor([65504.0, 65519.0, 65520.0, 1e30, -3.4e38])

    for value in tensor.split(1):
        torch.testing.assert_close(arrives(Cast("float16"), value), value, rtol=1e-3, atol=0)
    assert arrives(Cast("float16"), tensor).isfinite().all()


def test_float64_reaches_beyond_float32() -> None:
    tensor = torch.tensor([1.5e300, -2e299, 0.0], dtype=torch.float64)

    torch.testing.assert_close(arrives(Cast("float16"), tensor), tensor, rtol=1e-3, atol=0)
    torch.testing.assert_close(
        arrives(Cast("float16"), tensor * 1e-310), tensor * 1e-310, rtol=1e-3, atol=0
    )


def test_values_far_below_the_largest_lose_bits_but_not_more_than_promised() -> None:
    tensor = torch.tensor([1.0, 1.001 * 2**-29, 2**-45])
    seen = arrives(Cast("float16"), tensor)

    assert seen[1] == pytest.approx(tensor[1].item(), rel=2**-10)
    assert seen[2] == 0


def test_not_finite_values_do_not_hide_the_others() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), 1.5, -float("inf")])
    seen = arrives(Cast("float16"), tensor)

    assert seen[0].isnan()
    assert torch.equal(seen[1:], tensor[1:])

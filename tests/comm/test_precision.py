"""Casts, integers in blocks and their packed codes: what arrives, and in how many bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.codecs import arrives, relative_error
from xcloud.comm.compressor import Chain
from xcloud.comm.precision import BlockInt, Cast, pack, packed_bytes, unpack
from xcloud.net.frame import TensorSpec


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("scale", [1.0, -3.0, 2.0**-60])
def test_multiples_of_the_scale_arrive_exactly(bits: int, scale: float) -> None:
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (7, 64))
    codes[:, 3] = -half  # each block contains its largest code

    assert torch.equal(arrives(BlockInt(bits), codes * scale), codes * scale)


def test_one_bit_keeps_sign_and_mean_magnitude() -> None:
    tensor = torch.tensor([[1.0, -3.0, 2.0, -2.0], [0.5, 0.5, 0.5, 0.5]])
    seen = arrives(BlockInt(1, block=4), tensor)

    assert torch.equal(seen, torch.tensor([[2.0, -2.0, 2.0, -2.0], [0.5, 0.5, 0.5, 0.5]]))


def test_one_bit_takes_the_mean_of_an_incomplete_block_over_its_own_values() -> None:
    seen = arrives(BlockInt(1, block=64), torch.tensor([4.0, -4.0, 4.0]))

    assert torch.equal(seen, torch.tensor([4.0, -4.0, 4.0]))


@pytest.mark.parametrize(
    ("bits", "num_bytes"),
    [(8, 64000 + 2000), (4, 32000 + 2000), (3, 24000 + 2000), (2, 16000 + 2000), (1, 8000 + 2000)],
)
def test_bytes_are_bits_per_value_and_two_bytes_per_block(bits: int, num_bytes: int) -> None:
    specs = BlockInt(bits).wire_specs(TensorSpec((640, 100), torch.float32))

    assert sum(spec.num_bytes for spec in specs) == num_bytes


@pytest.mark.parametrize("bits", range(5, 9))
def test_no_value_is_off_by_more_than_a_step(bits: int) -> None:
    tensor = torch.randn(100, 64)
    step = tensor.abs().amax(1, keepdim=True) / 2 ** (bits - 1)
    error = (tensor - arrives(BlockInt(bits), tensor)).abs()
    inside = tensor.abs() < 0.5 * tensor.abs().amax(1, keepdim=True)

    # Half a step, and 2**-7 of the value because the scale is cut to bfloat16.
    assert (error <= step * 1.01 + tensor.abs() * 2**-7).all()
    assert (error <= step * 0.51)[inside].all()


@pytest.mark.parametrize(("bits", "gain"), [(2, 0.07), (3, 0.045), (4, 0.02)])
def test_few_bits_gain_from_a_tighter_scale(
    bits: int, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.randn(500, 64)
    both = relative_error(tensor, arrives(BlockInt(bits), tensor))
    monkeypatch.setattr("xcloud.comm.precision._TIGHTER", {})
    one = relative_error(tensor, arrives(BlockInt(bits), tensor))

    assert both < (1 - gain) * one


@pytest.mark.parametrize(("bits", "symmetric"), [(2, 0.717), (3, 0.251), (4, 0.108)])
def test_a_signed_scale_beats_symmetric_codes(bits: int, symmetric: float) -> None:
    tensor = torch.randn(500, 64)
    levels = 2 ** (bits - 1) - 1
    scale = tensor.abs().amax(1, keepdim=True) / levels
    textbook = relative_error(tensor, (tensor / scale).round() * scale)

    assert textbook == pytest.approx(symmetric, rel=0.02)  # the numbers in the docstring
    assert relative_error(tensor, arrives(BlockInt(bits), tensor)) < 0.87 * textbook


def test_an_outlier_spoils_only_its_own_block() -> None:
    tensor = torch.randn(10, 64)
    spoilt = tensor.clone()
    spoilt[4, 7] = 1e6
    others = [row for row in range(10) if row != 4]

    assert torch.equal(arrives(BlockInt(4), tensor)[others], arrives(BlockInt(4), spoilt)[others])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_only_its_own_block(bad: float) -> None:
    tensor = torch.randn(3, 64)
    tensor[1, 9] = bad
    seen = arrives(BlockInt(8), tensor)

    assert not seen[1].isfinite().all()
    assert seen[[0, 2]].isfinite().all()


def test_blocks_of_tiny_and_of_huge_values_live_side_by_side() -> None:
    tensor = torch.randn(4, 64) * torch.tensor([[1e-30], [1e-9], [1e9], [1e30]])
    seen = arrives(BlockInt(8), tensor)

    for row, seen_row in zip(tensor, seen, strict=True):
        assert relative_error(row, seen_row) < 0.01


def test_the_largest_float_does_not_overflow() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        tensor = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
        for bits in range(2, 9):
            assert arrives(BlockInt(bits), tensor).isfinite().all()
            assert arrives(BlockInt(bits), -tensor).isfinite().all()


def test_a_block_below_the_smallest_scale_becomes_zeros_and_not_something_else() -> None:
    block = torch.tensor([1.0, -0.5, 0.25, 0.0])

    assert torch.equal(arrives(BlockInt(8), block * 2**-119), block * 2**-119)
    assert not arrives(BlockInt(8), block * 2**-121).any()


def test_a_long_tensor_is_treated_block_by_block() -> None:
    tensor = torch.randn(3 * 8192 + 5, 8)  # crosses the boundaries of the internal chunks
    seen = arrives(BlockInt(4, block=8), tensor)

    for row in (0, 8191, 8192, 2 * 8192, 3 * 8192 + 4):
        assert torch.equal(seen[row], arrives(BlockInt(4, block=8), tensor[row]))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_mean_of_stochastic_codes_is_the_tensor(bits: int) -> None:
    tensor = torch.randn(4, 64)
    compressor = BlockInt(bits, stochastic=True)
    mean = arrives(compressor, tensor.repeat(2000, 1)).view(2000, 4, 64).mean(0)
    step = 2 * tensor.abs().amax(1, keepdim=True) / max(2**bits - 2, 1)
    nearest = arrives(BlockInt(bits), tensor)

    # The mean of n codes is off by about step / (2 sqrt(n)) = 0.011 steps, at most 5 sigma.
    assert ((mean - tensor).abs() < 0.06 * step).all()
    assert (mean - tensor).norm() < 0.3 * (nearest - tensor).norm()


def test_stochastic_messages_differ_by_call_and_by_seed() -> None:
    tensor = torch.randn(64)
    first, second = BlockInt(4, stochastic=True), BlockInt(4, stochastic=True, seed=1)
    codes = [first.compress(tensor)[0], first.compress(tensor)[0], second.compress(tensor)[0]]

    assert not torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])


@given(bits=st.integers(0, 31), num_codes=st.integers(0, 200), seed=st.integers(0, 99))
def test_codes_come_back(bits: int, num_codes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (num_codes,), generator=generator)
    codes = codes.to(torch.uint8 if bits <= 8 else torch.int32)
    packed = pack(codes, bits)

    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(num_codes, bits),)
    assert torch.equal(unpack(packed, bits, num_codes), codes)


@pytest.mark.parametrize("bits", range(1, 32))
def test_packed_to_exactly_that_many_bits(bits: int) -> None:
    assert packed_bytes(8000, bits) == 1000 * bits
    # Whatever the number of codes, at most the last byte of each of five planes is incomplete.
    assert 0 <= 8 * packed_bytes(8003, bits) - 8003 * bits < 5 * 8


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_largest_code_fills_its_bits_and_no_neighbours(bits: int) -> None:
    codes = torch.zeros(16, dtype=torch.uint8)
    codes[5] = 2**bits - 1
    packed = pack(codes, bits)

    assert sum(int(byte).bit_count() for byte in packed) == bits
    assert torch.equal(unpack(packed, bits, 16), codes)


def test_packing_leaves_the_codes_alone() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    pack(codes, 4)
    unpacked = unpack(codes, 8, 16)
    unpacked.zero_()

    assert torch.equal(codes, torch.arange(16, dtype=torch.uint8))


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

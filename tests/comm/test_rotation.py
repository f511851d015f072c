"""EDEN: levels of a Gaussian after a random rotation."""

import pytest
import torch

from tests.codecs import arrives, relative_error
from xcloud.comm.precision import BlockInt
from xcloud.comm.rotation import BLOCK, Eden, mix
from xcloud.net.frame import TensorSpec


def test_mixing_is_orthonormal_and_its_own_inverse() -> None:
    blocks = torch.randn(5, BLOCK, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mix(mix(blocks)), blocks)
    torch.testing.assert_close(mix(blocks).norm(dim=1), blocks.norm(dim=1))
    assert torch.equal(mix(torch.eye(4)).sign()[1], torch.tensor([1.0, -1.0, 1.0, -1.0]))


@pytest.mark.parametrize(("bits", "most"), [(1, 0.38), (2, 0.13), (3, 0.04), (4, 0.012)])
def test_any_values_have_the_error_of_gaussian_ones(bits: int, most: float) -> None:
    """Squared, of values that integers of as many bits lose: a few large ones among small."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(400, 96, generator=generator)
    for tensor in (values, values**5, values.sign(), values * (values.abs() > 2.5)):
        assert relative_error(tensor, arrives(Eden(bits), tensor)) ** 2 < most


@pytest.mark.parametrize("bits", [1, 2])
def test_heavy_tails_lose_less_than_in_integers_of_more_bytes(bits: int) -> None:
    tensor = torch.randn(256, 384, generator=torch.Generator().manual_seed(3)) ** 3
    eden, plain = Eden(bits), BlockInt(bits)
    sizes = [sum(part.nbytes for part in one.compress(tensor)) for one in (eden, plain)]
    errors = [relative_error(tensor, arrives(one, tensor)) ** 2 for one in (eden, plain)]
    assert sizes[0] < sizes[1] and errors[0] < 0.9 * errors[1]


def test_bytes_are_two_bits_and_an_eighth_and_the_seed() -> None:
    specs = Eden(2).wire_specs(TensorSpec((1024, 384), torch.float32))
    assert sum(spec.num_bytes for spec in specs) == 1024 * 384 * 2.125 / 8 + 8


def test_messages_are_mixed_in_new_ways_so_errors_average_out() -> None:
    codec = Eden(1)
    tensor = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    several = torch.stack([arrives(codec, tensor) for _ in range(32)])
    single = relative_error(tensor, several[0])
    assert relative_error(tensor, several.mean(0)) < 0.75 * single


def test_few_bits_need_feedback_and_more_use_it() -> None:
    assert [Eden(bits).feedback for bits in (1, 2, 3, 4)] == ["needed"] * 2 + ["useful"] * 2

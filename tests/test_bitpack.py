import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xcloud.comm.precision import pack, packed_bytes, unpack


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

import struct
import zlib

import pytest
import torch

from xcloud.base.errors import ConfigError, FrameError
from xcloud.net.frame import (
    OF_A_STEP,
    TRAFFIC_OF,
    Kind,
    MessageKey,
    TensorSpec,
    bytes_of_frame,
    decode_frame,
    encode_frame,
    frame_bytes,
    seal_frame,
)

KEY = MessageKey(Kind.GRADIENT, 70_000, 3)
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


def sealed(*parts: torch.Tensor) -> torch.Tensor:
    frame = encode_frame(KEY, parts, 5)
    seal_frame(frame, 1.5)
    return frame


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_each_dtype_comes_back_bit_equal(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 5) * 9).to(dtype)

    frame = decode_frame(sealed(x), "rank 1")

    assert frame.parts[0].dtype == dtype
    assert torch.equal(frame.parts[0], x)
    assert (frame.key, frame.sequence, frame.deliver_at_s) == (KEY, 5, 1.5)


def test_several_parts_keep_their_order_and_odd_sizes() -> None:
    parts = (
        torch.tensor(7.0),
        torch.arange(3, dtype=torch.uint8),
        torch.zeros(0, 4),
        torch.ones(2),
    )

    found = decode_frame(sealed(*parts), "rank 1").parts

    assert [p.shape for p in found] == [p.shape for p in parts]
    assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))


def test_a_strided_part_is_sent_as_its_values() -> None:
    x = torch.arange(12.0).view(3, 4).t()

    assert torch.equal(decode_frame(sealed(x), "rank 1").parts[0], x)


def test_frame_length_is_known_before_it_is_made() -> None:
    parts = (torch.randn(3, 5), torch.arange(3, dtype=torch.int16))

    assert sealed(*parts).numel() == frame_bytes(tuple(TensorSpec.of(p) for p in parts))


def test_a_buffer_may_be_longer_than_the_frame() -> None:
    x = torch.randn(4)
    buffer = torch.cat([sealed(x), torch.full((99,), 255, dtype=torch.uint8)])

    frame = decode_frame(buffer, "rank 1")

    assert torch.equal(frame.parts[0], x)
    assert frame.num_bytes == buffer.numel() - 99


def test_every_single_flipped_bit_is_noticed() -> None:
    good = sealed(torch.randn(2, 3))
    for position in range(good.numel()):
        bad = good.clone()
        bad[position] ^= 1 << (position % 8)
        with pytest.raises(FrameError, match="rank 1"):
            decode_frame(bad, "rank 1")


def test_a_truncated_frame_is_refused() -> None:
    good = sealed(torch.randn(2, 3))
    for length in (0, 10, 39, 45, good.numel() - 1):
        with pytest.raises(FrameError):
            decode_frame(good[:length].clone(), "rank 1")


def test_another_version_is_named() -> None:
    bad = sealed(torch.randn(2))
    bad[4] = 9

    with pytest.raises(FrameError, match="speaks frame version 9"):
        decode_frame(bad, "rank 1")


def test_a_dtype_that_no_frame_knows_is_refused_at_the_sender() -> None:
    with pytest.raises(FrameError, match="complex64"):
        encode_frame(KEY, (torch.zeros(2, dtype=torch.complex64),), 0)


def test_the_beginning_of_a_frame_says_its_length_or_is_refused() -> None:
    parts = (torch.zeros(3, 1000), torch.zeros(()), torch.zeros(0, 4, dtype=torch.int8))
    frame = encode_frame(MessageKey(Kind.AVERAGING, 3), parts, sequence=7)
    assert bytes_of_frame(frame[:200], sender="b") == frame.numel()
    for num_bytes in range(40 + 2 + 8 + 2):  # the parts' descriptions are longer
        with pytest.raises(FrameError, match=r"too few|damaged|promises"):
            bytes_of_frame(frame[:num_bytes], sender="b")
    for byte in range(5):
        damaged = frame[:200].clone()
        damaged[byte] ^= 1
        with pytest.raises(FrameError, match=r"begin|version"):
            bytes_of_frame(damaged, sender="b")


def test_a_frame_is_on_the_wire_as_every_release_of_its_version_reads_it() -> None:
    part = torch.tensor([1, -2], dtype=torch.int16)
    frame = encode_frame(MessageKey(Kind.GRADIENT, 7, micro_batch=3), (part,), sequence=5)
    seal_frame(frame, -1.5)
    rest = struct.pack("<BBIhh", 6, 1, 2, 1, -2)

    def written(crc: int) -> bytes:
        return struct.pack("<4sBBBBIIIIQd", b"XCLD", 1, 2, 1, 0, 7, 3, 5, crc, 4, -1.5) + rest

    assert frame.numpy().tobytes() == written(zlib.crc32(written(0)))
    codes = [int(encode_frame(KEY, (torch.zeros(1, dtype=dtype),), 0)[40]) for dtype in DTYPES]
    assert codes == [*range(10)]


def test_a_promise_with_a_bound_admits_what_is_shorter_and_no_other_type() -> None:
    bound = TensorSpec((4,), torch.int8, is_bound=True)
    for shape, dtype, fits in (
        ((4,), torch.int8, True), ((0,), torch.int8, True), ((5,), torch.int8, False),
        ((2, 2), torch.int8, False), ((4,), torch.uint8, False),
    ):  # fmt: skip
        assert bound.admits(TensorSpec(shape, dtype)) is fits
    fixed = TensorSpec((4,), torch.int8)
    assert fixed.admits(fixed) and not fixed.admits(TensorSpec((3,), torch.int8))
    assert (bound.num_bytes, bound.numel, bound.is_floating) == (4, 4, False)
    assert TensorSpec((2, 3), torch.float64).num_bytes == 48


def test_messages_are_counted_by_what_they_are_for() -> None:
    other = ("NORM", "REPORT", "CHOICE", "BARRIER", "ALIVE", "CHECKPOINT")
    counted = dict.fromkeys(other, "other")
    counted |= {"ACTIVATION": "forward", "GRADIENT": "backward", "AVERAGING": "averaging"}
    assert {kind.name: name for kind, name in TRAFFIC_OF.items()} == counted
    assert {kind.name for kind in OF_A_STEP} == {
        "ACTIVATION", "GRADIENT", "NORM", "CHOICE", "AVERAGING"
    }  # fmt: skip


def test_a_part_that_no_header_describes_is_refused_with_what_to_do() -> None:
    spec = TensorSpec((2**32 - 1,), torch.int8)
    assert frame_bytes((spec,)) == 40 + 6 + 2**32 - 1
    with pytest.raises(ConfigError, match="4,294,967,296 values in one part; the most is 4,294"):
        frame_bytes((TensorSpec((3, 2**32), torch.int8),))

"""Every parser of what a peer sends, with damaged inputs: it takes or refuses them with one of
our errors, and in either case needs little more memory than an honest message. 300 inputs each,
and 100,000 each night."""

import random
import struct
import time
from pathlib import Path

import pytest
import torch

from tests.parsers import ON_DISK, PARSERS
from tests.peak_bytes import PeakBytes
from xcloud.base.errors import ConfigError, FrameError, XcloudError
from xcloud.comm.compressor import Tensors
from xcloud.comm.sparsify import _drawn

FEW, MANY = 300, 100_000
LONGEST_S = 10.0  # of one input: a second, on a machine that does other things too
DTYPES = [torch.float32, torch.float64, torch.float16, torch.uint8, torch.int8, torch.int16,
          torch.int32, torch.int64, torch.bool]  # fmt: skip
EXTREMES = [0, 1, -1, 127, 128, 255, 2**31 - 1, -(2**31), 1e300, -1e300, float("nan"),
            float("inf"), -float("inf")]  # fmt: skip


def damaged_bytes(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(found) + 1)
        what = draw.randrange(6)
        if what == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            found[at : at + 4] = struct.pack("<I", draw.choice([0, 1, 2**31, 2**32 - 1]))
        elif what == 2:
            del found[at : at + draw.randrange(1, 9)]
        elif what == 3:
            found[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif what == 4:
            del found[at:]
        else:
            found[at : at + 8] = found[-8:]
    return bytes(found)


def damaged_tensors(parts: Tensors, draw: random.Random) -> Tensors:
    found = [part.clone() for part in parts]
    for _ in range(draw.choice([1, 1, 2, 3])):
        at = draw.randrange(len(found)) if found else 0
        what = draw.randrange(8)
        if not found or what == 0:
            found.insert(at, torch.zeros(draw.randrange(9), dtype=draw.choice(DTYPES)))
        elif what == 1:
            del found[at]
        elif what == 2:
            found[at] = found[at].to(draw.choice(DTYPES))
        elif what == 3:
            found[at] = found[at].reshape(-1)[: draw.randrange(found[at].numel() + 1)]
        elif what == 4:
            found[at] = found[at][None]
        elif found[at].numel():
            flat = found[at].reshape(-1)
            if what == 5 or not flat.is_contiguous():
                value = torch.tensor(draw.choice(EXTREMES), dtype=torch.float64)
                flat[draw.randrange(flat.numel())] = value.to(flat.dtype)
            else:
                raw = flat.view(torch.uint8)
                for _ in range(1 if what == 6 else 16):
                    raw[draw.randrange(raw.numel())] = draw.randrange(256)
                if found[at].dtype == torch.bool:
                    raw &= 1
            found[at] = flat.view(found[at].shape)
    return tuple(found)


def fuzzed(name: str, num: int, folder: Path) -> float:
    """Seconds of the longest one."""
    maker = PARSERS[name]
    parser, draw = maker(folder) if maker in ON_DISK else maker(), random.Random(name)
    _drawn.cache_clear()  # a message of another seed draws anew
    with PeakBytes() as honest:
        for message in parser.honest:
            parser.take(message)
    size = max(len(m) if isinstance(m, bytes) else sum(p.nbytes for p in m) for m in parser.honest)
    longest_s, num_refused = 0.0, 0
    for _ in range(num):
        message = draw.choice(parser.honest)
        if isinstance(message, bytes):
            other: bytes | Tensors = damaged_bytes(message, draw)
        else:
            other = damaged_tensors(message, draw)
        started_s = time.perf_counter()
        with PeakBytes() as peak:
            try:
                parser.take(other)
            except (FrameError, ConfigError, XcloudError):
                num_refused += 1
        longest_s = max(longest_s, time.perf_counter() - started_s)
        assert peak.peak <= 2 * (honest.peak + size) + 4096, (name, peak.peak, honest.peak)
    assert num_refused or name == "reports"  # which refuses line by line
    return longest_s


@pytest.mark.parametrize("name", PARSERS)
def test_a_damaged_message_is_taken_or_refused_and_nothing_else(name: str, tmp_path: Path) -> None:
    fuzzed(name, FEW, tmp_path)


def test_ten_thousand_damaged_greetings_are_taken_or_refused() -> None:
    """Strangers with a certificate come this far, so that each night is not often enough."""
    parser = PARSERS["greetings"]()
    draw = random.Random(1)
    num_refused = 0
    for _ in range(10_000):
        try:
            parser.take(damaged_bytes(draw.choice(parser.honest), draw))
        except FrameError:
            num_refused += 1
    assert num_refused > 5_000


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", PARSERS)
def test_a_hundred_thousand_damaged_messages_are_taken_or_refused(
    name: str, tmp_path: Path
) -> None:
    assert fuzzed(name, MANY, tmp_path) < LONGEST_S

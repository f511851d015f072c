"""One random stream for each part of a model. Not the seeding of a run's data or dropout.

A part's start weights depend on the seed and on the part's own name, never on what was built
before it: so they are the same however the parts are spread over clouds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the part of that name, the same in every process and on every machine."""
    text = repr((seed, *names)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@contextmanager
def seeded_on(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from a stream of its own on the CPU and on this device (dropout, say)."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # torch.manual_seed would do, but takes milliseconds where no GPU is used yet.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Draw from the part's own stream on the CPU; the caller's stream is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, *names))
        yield

"""One random stream per model part. Not for seeding a run's data.

A part's initial weights depend on the seed and the part's name, never on what was built before
it, so they do not depend on how parts are spread over clouds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the named part, equal in every process and on every machine."""
    text = repr((seed, *names)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


@contextmanager
def seeded_on(device: torch.device, seed: int) -> Iterator[None]:
    """Use a separate random stream on the CPU and this device, for dropout for example."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # torch.manual_seed takes milliseconds while no GPU is in use.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def seeded(seed: int, *names: str | int) -> Iterator[None]:
    """Use the part's own random stream on the CPU; restores the caller's afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, *names))
        yield

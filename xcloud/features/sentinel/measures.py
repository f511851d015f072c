"""What is measured of a tensor that arrives. Pure tensor code.

Shapes: R rows of D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_NUMBERS = 3
NUM_ROWS = 2
MAX_ROWS = 1024  # evenly spaced ones of a longer message stand for it


def measure(rows: Tensor) -> Tensor:
    """Return float32 [3 + 2D]: mean square, mean magnitude and mean row norm of all values, then
    the mean row of the values, and that of their signed squares (x |x|).

    rows: [R, *features], flattened to [R, D]; R is 1 or more. Nothing is copied to the host.
    """
    # Evenly spaced rows and no drawn ones: a draw would move torch's random numbers.
    every = -(-len(rows) // MAX_ROWS)
    flat = rows.detach()[::every].flatten(1).float()
    size = flat.abs()
    norms = torch.linalg.vector_norm(flat, dim=1)
    # On the device: the host reads them once a step, behind the backward (WatchedStream.judge).
    numbers = torch.stack([flat.square().mean(), size.mean(), norms.mean()])
    return torch.cat([numbers, flat.mean(0), (flat * size).mean(0)])

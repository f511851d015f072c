"""Which samples make up which batch: from the seed alone, so that clouds agree without talking."""

from __future__ import annotations

import torch
from torch import Tensor


class BatchPlan:
    """An endless stream of shuffled epochs, cut into batches of `batch_size` sample ids.

    Every sample comes once in each epoch; a batch may span two epochs.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int) -> None:
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self._epochs: dict[int, Tensor] = {}

    def ids(self, step: int) -> Tensor:
        """Sample ids of update `step` (1-based), int64 [batch_size]."""
        begin = (step - 1) * self.batch_size
        end = begin + self.batch_size
        pieces = []
        for epoch in range(begin // self.num_samples, (end - 1) // self.num_samples + 1):
            first = epoch * self.num_samples
            order = self._order(epoch)
            pieces.append(order[max(begin - first, 0) : end - first])
        return torch.cat(pieces)

    def epoch(self, step: int) -> float:
        """Epochs completed after update `step`."""
        return step * self.batch_size / self.num_samples

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            self._epochs = {k: v for k, v in self._epochs.items() if k == epoch - 1}
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epochs[epoch] = torch.randperm(self.num_samples, generator=generator)
        return self._epochs[epoch]


def cut(ids: Tensor, num_pieces: int) -> list[Tensor]:
    """Neighbouring pieces whose sizes differ by at most one."""
    return list(torch.tensor_split(ids, num_pieces))

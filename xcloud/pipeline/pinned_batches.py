"""Batches whose samples keep their ranks, for memories kept by sample."""

from __future__ import annotations

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.pipeline.batch_plan import BatchPlan, cut


class PinnedBatchPlan(BatchPlan):
    """A BatchPlan in which a sample always falls to the same ranks, for memories kept by sample.

    The samples are dealt to groups of ranks once, at random, in proportion to the places that a
    group has in a batch. Then each group draws from its own samples as a BatchPlan does.

    group_of_piece: number of the group that computes each micro-batch of an update, in order.

    Batches are as long as those of a BatchPlan, but every batch has the same number of samples of
    each group. Every sample comes once in each epoch of its group. If the numbers do not divide, a
    group has up to one sample more or fewer than its exact share. Its epochs are then shorter or
    longer than num_samples / batch_size updates by less than one update each, and those of two
    groups drift apart slowly.

    Raises ConfigError if there are fewer samples than groups.
    """

    def __init__(
        self, num_samples: int, batch_size: int, seed: int, group_of_piece: list[int]
    ) -> None:
        super().__init__(num_samples, batch_size, seed)
        places: dict[int, list[Tensor]] = {}
        for piece, group in zip(
            cut(torch.arange(batch_size), num_pieces=len(group_of_piece)),
            group_of_piece,
            strict=True,
        ):
            places.setdefault(group, []).append(piece)
        self._places = [torch.cat(places[group]) for group in sorted(places)]
        shares = _shares(num_samples, weights=[len(group) for group in self._places])
        generator = torch.Generator().manual_seed(seed)
        # Dealt out once, from the seed, so that a run that resumes deals the same.
        self._samples = torch.split(torch.randperm(num_samples, generator=generator), shares)
        self._plans = [
            # Unrelated orders, or samples of two groups would meet again in every epoch.
            BatchPlan(
                num_samples=share, batch_size=len(group), seed=(seed * 4099 + number) % 2**32
            )
            for number, (share, group) in enumerate(zip(shares, self._places, strict=True), 1)
        ]

    def ids(self, step: int) -> Tensor:
        """Sample ids of update `step` (1-based), int64 [batch_size]."""
        ids = torch.empty(self.batch_size, dtype=torch.int64)
        for places, samples, plan in zip(self._places, self._samples, self._plans, strict=True):
            # The places of a group are those of its micro-batches, so each sample falls to the
            # same ranks.
            ids[places] = samples[plan.ids(step)]
        return ids


def _shares(total: int, weights: list[int]) -> list[int]:
    """Whole numbers >= 1 that add up to `total`, as near to proportional as that allows."""
    if total < len(weights):
        raise ConfigError(
            f"{total} training samples are too few for a memory kept by sample "
            f"(compression.forward_memory or backward_memory): its {len(weights)} groups of ranks "
            "need a sample each; use more samples, fewer ranks or no memory"
        )
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    while (missing := total - sum(shares)) != 0:
        # Too many only where a share below 1 was raised to 1: take from the largest.
        sign = 1 if missing > 0 else -1
        furthest = max(
            (n for n in range(len(shares)) if sign > 0 or shares[n] > 1),
            key=lambda n: sign * (exact[n] - shares[n]),
        )
        shares[furthest] += sign
    return shares

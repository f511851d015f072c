"""Which samples make up which batch: from the seed alone, so that clouds agree without talking."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.contracts.model import Batch
from xcloud.parallel.exchange import Work


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


class PinnedBatchPlan(BatchPlan):
    """A BatchPlan in which a sample always falls to the same ranks, for memories kept by sample.

    group_of_piece: for each micro-batch of an update, in order, the number of the group of ranks
    that computes it. The samples are dealt to the groups once, at random, in proportion to the
    places that a group has in a batch; then each group draws from its own samples as a BatchPlan.

    What differs from a BatchPlan: batches are as long, but every batch has the same number of
    samples of each group. Every sample comes once in each epoch of its group. Where the numbers
    do not divide, a group has up to one sample more or fewer than its exact share, so its epochs
    are shorter or longer than num_samples / batch_size updates by less than one update each, and
    those of two groups drift apart slowly.

    Raises ConfigError if there are fewer samples than groups.
    """

    def __init__(
        self, num_samples: int, batch_size: int, seed: int, group_of_piece: list[int]
    ) -> None:
        super().__init__(num_samples, batch_size, seed)
        places: dict[int, list[Tensor]] = {}
        for piece, group in zip(
            cut(torch.arange(batch_size), len(group_of_piece)), group_of_piece, strict=True
        ):
            places.setdefault(group, []).append(piece)
        self._places = [torch.cat(places[group]) for group in sorted(places)]
        shares = _shares(num_samples, [len(group) for group in self._places])
        generator = torch.Generator().manual_seed(seed)
        self._samples = torch.split(torch.randperm(num_samples, generator=generator), shares)
        self._plans = [
            # Unrelated orders, or samples of two groups would meet again in every epoch.
            BatchPlan(share, len(group), (seed * 4099 + number) % 2**32)
            for number, (share, group) in enumerate(zip(shares, self._places, strict=True), 1)
        ]

    def ids(self, step: int) -> Tensor:
        """Sample ids of update `step` (1-based), int64 [batch_size]."""
        ids = torch.empty(self.batch_size, dtype=torch.int64)
        for places, samples, plan in zip(self._places, self._samples, self._plans, strict=True):
            ids[places] = samples[plan.ids(step)]
        return ids


def cut(ids: Tensor, num_pieces: int) -> list[Tensor]:
    """Neighbouring pieces whose sizes differ by at most one."""
    return list(torch.tensor_split(ids, num_pieces))


@dataclass
class Feed:
    """The samples of one rank's updates, micro-batch by micro-batch.

    turns: (first, period) of each stage of this rank, see Pipeline. fetch(ids): the visible fields
    of samples. weigh(ids): their weight in the loss; None in ranks without the last stage.
    of_replica: (number, how many), where each replica updates apart, from its own micro-batches.
    work: of the update that was begun last.
    """

    plan: BatchPlan
    turns: Collection[tuple[int, int]]
    fetch: Callable[[Tensor], Batch]
    weigh: Callable[[Tensor], float] | None
    of_replica: tuple[int, int] = (0, 1)
    work: Work = field(default_factory=Work)

    def begin(self, step: int, num_micro_batches: int, num_passes: int) -> list[Tensor]:
        """Sample ids of all micro-batches of an update: num_micro_batches of each pass."""
        pieces = cut(self.plan.ids(step), num_passes * num_micro_batches)
        replica, num_replicas = self.of_replica
        numbered = enumerate(pieces)
        ids = torch.cat(
            [piece for i, piece in numbered if i % num_micro_batches % num_replicas == replica]
        )
        self.work = Work(len(ids), self.weigh(ids) if self.weigh else 1.0)
        return pieces

    def batches(self, pieces: Sequence[Tensor]) -> dict[int, Batch]:
        """Of this rank, in one pass. pieces: of the pass."""
        found = {}
        for i, ids in enumerate(pieces):
            if any(i % period == first for first, period in self.turns):
                found[i] = self.fetch(ids)
                self.work.num_own += len(ids)
        return found


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

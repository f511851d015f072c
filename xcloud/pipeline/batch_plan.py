"""Which samples make up which batch: from the seed alone, so that clouds agree without talking."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from xcloud.contracts.model import Batch
from xcloud.pipeline.exchange import Work


@dataclass(eq=False)
class BatchPlan:
    """An endless stream of shuffled epochs, cut into batches of `batch_size` sample ids.

    Every sample comes once in each epoch; a batch may span two epochs.
    """

    num_samples: int
    batch_size: int
    seed: int
    _epochs: dict[int, Tensor] = field(default_factory=dict, init=False)

    def ids(self, step: int) -> Tensor:
        """Sample ids of update `step` (1-based), int64 [batch_size]."""
        begin = (step - 1) * self.batch_size
        end = begin + self.batch_size
        pieces = []
        # A batch may take the end of one epoch and the beginning of the next.
        for epoch in range(begin // self.num_samples, (end - 1) // self.num_samples + 1):
            first = epoch * self.num_samples
            order = self._order(epoch)
            pieces.append(order[max(begin - first, 0) : end - first])
        return torch.cat(pieces)

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            # Two orders are kept at most, each 8 bytes a sample.
            self._epochs = {k: v for k, v in self._epochs.items() if k == epoch - 1}
            # Each epoch from a seed of its own: a run that resumes in the tenth draws none of the
            # nine before.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._epochs[epoch] = torch.randperm(self.num_samples, generator=generator)
        return self._epochs[epoch]


def cut(ids: Tensor, num_pieces: int) -> list[Tensor]:
    """Neighbouring pieces whose sizes differ by at most one."""
    return list(torch.tensor_split(ids, num_pieces))


def samples_of_replica(
    pieces: Sequence[Tensor], num_micro_batches: int, replica: int, of: int
) -> Tensor:
    """Return the sample ids, of an update's micro-batches, that a replica trains on."""
    # In every pass over the pipeline the replicas take the pass's micro-batches in turn.
    own = [p for i, p in enumerate(pieces) if i % num_micro_batches % of == replica]
    return torch.cat(own)


@dataclass
class SampleFeed:
    """The samples of one rank's updates, micro-batch by micro-batch.

    turns: (first, period) of each stage of this rank, see Pipeline.
    fetch(ids): returns the visible fields of samples.
    weigh(ids): returns their weight in the loss. None in ranks without the last stage.
    token_pads: the padding id of each field of tokens that no stage before this rank's reads.
    of_replica: (number of the replica, number of replicas), if each replica makes its own updates,
        from its own micro-batches.
    work: the work of the update that was begun last.
    """

    plan: BatchPlan
    turns: Collection[tuple[int, int]]
    fetch: Callable[[Tensor], Batch]
    weigh: Callable[[Tensor], float] | None
    token_pads: Mapping[str, int] = field(default_factory=dict)
    of_replica: tuple[int, int] = (0, 1)
    work: Work = field(default_factory=Work)

    def begin(self, step: int, num_micro_batches: int, num_passes: int) -> list[Tensor]:
        """Sample ids of all micro-batches of an update: num_micro_batches of each pass."""
        # All ranks draw all ids, those of other ranks too; nobody has to be asked.
        pieces = cut(self.plan.ids(step), num_passes * num_micro_batches)
        ids = samples_of_replica(pieces, num_micro_batches, *self.of_replica)
        self.work = Work(len(ids), self.weigh(ids) if self.weigh else 1.0)
        return pieces

    def batches(self, pieces: Sequence[Tensor]) -> dict[int, Batch]:
        """Return the batches of this rank in one pass, cut into these pieces, by micro-batch."""
        found = {}
        for i, ids in enumerate(pieces):
            # A rank that holds several stages may take a micro-batch at one of them only.
            if any(i % period == first for first, period in self.turns):
                batch = self.fetch(ids)
                found[i] = batch
                self.work.num_own += len(ids)
                self.work.num_tokens += sum(
                    int((batch[name] != pad).sum()) for name, pad in self.token_pads.items()
                )
        return found

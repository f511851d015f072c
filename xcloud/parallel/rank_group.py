"""Ranks that share one part of the work: the lanes of a stage, the ranks of a cloud."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from xcloud.cluster.transport import Collectives


@dataclass(frozen=True)
class RankGroup:
    """`rank` is this rank, one of `ranks`, which are in the order of their lanes. group: what
    joins them; None where the rank is alone, and then every method returns at once."""

    rank: int
    ranks: tuple[int, ...]
    group: Collectives | None = None

    @staticmethod
    def alone(rank: int = 0) -> RankGroup:
        return RankGroup(rank, (rank,))

    @property
    def lane(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def num_lanes(self) -> int:
        return len(self.ranks)

    @property
    def leader(self) -> int:
        """The rank that speaks for the group."""
        return self.ranks[0]

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    def barrier(self) -> None:
        if self.group is not None:
            self.group.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce in place."""
        if self.group is not None:
            self.group.sum(values)
        return values

    def start_sum(self, values: Tensor) -> Callable[[], object]:
        """All-reduce in place. `values` are left alone until the returned call has come back."""
        return _nothing if self.group is None else self.group.start_sum(values)

    def from_leader(self, values: Tensor) -> Tensor:
        """Broadcast in place."""
        if self.group is not None:
            self.group.broadcast(values, self.leader)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """Of every lane, in order; all must be of one shape."""
        return [values] if self.group is None else self.group.gather(values)


def _nothing() -> None:
    """There is nobody to wait for."""

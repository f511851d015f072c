"""Ranks that share one part of the work: the ranks of a stage, the ranks of a cloud."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from xcloud.cluster.liveness import PeerLife
from xcloud.cluster.transport import Collectives


@dataclass(frozen=True)
class RankGroup:
    """`rank` is this rank, one of `ranks`, in the order of their group ranks. group: what
    joins them; None where the rank is alone, and then every method returns at once. lives: of the
    others, by rank, where they are noted as waited for."""

    rank: int
    ranks: tuple[int, ...]
    group: Collectives | None = None
    lives: Mapping[int, PeerLife] = field(default_factory=dict)

    @staticmethod
    def alone(rank: int = 0) -> RankGroup:
        return RankGroup(rank, (rank,))

    @property
    def group_rank(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def group_size(self) -> int:
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
            with self._awaiting("barrier"):
                self.group.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """All-reduce in place."""
        if self.group is not None:
            with self._awaiting("sum"):
                self.group.sum(values)
        return values

    def start_sum(self, values: Tensor) -> Callable[[], object]:
        """All-reduce in place. `values` are left alone until the returned call has come back."""
        if self.group is None:
            return _nothing
        wait = self.group.start_sum(values)

        def noted() -> None:
            with self._awaiting("sum"):
                wait()

        return noted

    def from_leader(self, values: Tensor) -> Tensor:
        """Broadcast in place."""
        if self.group is not None:
            with self._awaiting("broadcast"):
                self.group.broadcast(values, self.leader)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """Of every rank, in order; all must be of one shape."""
        if self.group is None:
            return [values]
        with self._awaiting("gathering"):
            return self.group.gather(values)

    @contextmanager
    def _awaiting(self, what: str) -> Iterator[None]:
        """Each of the others is waited for: nobody knows who of them is late."""
        call = _Call(f"the {what} of {len(self.ranks)} ranks")
        with ExitStack() as stack:
            for rank in self.ranks:
                if rank in self.lives:
                    stack.enter_context(self.lives[rank].awaiting(call))
            yield


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a collective: the next one is another."""

    name: str

    def __str__(self) -> str:
        return self.name


def _nothing() -> None:
    """There is nobody to wait for."""

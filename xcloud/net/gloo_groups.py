"""What joins several ranks of one cloud, or of one stage: sums and the like, over gloo or NCCL.
Where ranks may begin at any time, also again, those of a cloud begin together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from xcloud.base.errors import ConfigError
from xcloud.net.rendezvous import FOREVER, count_of, of_this_attempt
from xcloud.net.transport import CPU, Collectives, Rendezvous, machine_id

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class GlooCollectives(Collectives):
    """The collectives of a cloud: over gloo, or for tensors on GPUs over NCCL, where each of the
    ranks has a GPU of its own. NCCL knows no two ranks on one GPU: these go over gloo, through the
    memory of the host.

    ranks: the ranks in the order of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks: Sequence[int], device: torch.device = CPU
    ) -> None:
        super().__init__(lambda: group, ranks)
        self._nccl = None
        if device.type == "cuda":
            # Over gloo, so that all ranks know of each other's GPU and decide alike.
            places = self.gather(torch.tensor([machine_id(), device.index or 0]))
            if len({tuple(place.tolist()) for place in places}) == len(places):
                # Its own limit would end the process while a rank waits for another cloud.
                self._nccl = dist.new_group(
                    dist.get_process_group_ranks(group),
                    timeout=FOREVER,
                    backend="nccl",
                    use_local_synchronization=True,
                )

    def group_for(self, values: Tensor) -> Any:
        return self._nccl if self._nccl is not None and values.is_cuda else self._group()

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return these ranks as torch shards over them: by gloo on CPUs, by NCCL on GPUs.

        Raises ConfigError where two ranks have one GPU.
        """
        from torch.distributed.device_mesh import DeviceMesh

        if device.type != "cuda":
            return DeviceMesh.from_group(self._group(), device.type)
        if self._nccl is None:
            raise ConfigError(
                f"ranks {self._ranks} share a stage out over NCCL, which needs a GPU for each, "
                "and two of them share one; give the cloud as many ranks as GPUs "
                "(cluster.clouds.NAME.num_ranks), or set its device to cpu"
            )
        return DeviceMesh.from_group(self._nccl, device.type)


@dataclass(eq=False)
class OpenGroups:
    """The groups of ranks that may begin at any time, also again."""

    rendezvous: Rendezvous
    _known: dict[int, int] = field(default_factory=dict)
    """The beginnings of peers with which links were made."""
    _num_groups: int = 0
    _parts: dict[tuple[int, ...], Store] = field(default_factory=dict)
    """The parts of the store of ranks that begin together."""

    def join(self, ranks: Sequence[int]) -> Collectives | None:
        """Join ranks that end and begin together; over gloo on GPUs too."""
        # Counted in ranks that are not in the group too: all make the same calls, so the number is
        # the same in all and names the group's part of the store.
        self._num_groups += 1
        rendezvous = self.rendezvous
        key = tuple(ranks)
        if len(ranks) == 1 or rendezvous.rank not in ranks:
            return None
        if key not in self._parts:
            own = PrefixStore(f"ranks {'-'.join(map(str, ranks))}", rendezvous.store)
            self._parts[key] = of_this_attempt(
                own, rank=rendezvous.rank, ranks=ranks, within_s=rendezvous.within_s
            )
        store = PrefixStore(f"group {self._num_groups}", self._parts[key])
        return Collectives.joined_in(store, rank=rendezvous.rank, ranks=ranks)

    def begins_again(self, ranks: Sequence[int]) -> bool:
        """See Transport."""
        store = self.rendezvous.store
        newest = {peer: count_of(store, name=f"beginnings.{peer}") for peer in ranks}
        # Not before all have begun again: ends made with some would wait for old processes of
        # others.
        if any(count <= self.times(peer) for peer, count in newest.items()):
            return False
        self._known |= newest
        return True

    def times(self, rank: int) -> int:
        """Return how often a rank has begun, as far as this rank's links are concerned."""
        own = rank == self.rendezvous.rank
        return self.rendezvous.beginning if own else self._known.get(rank, 1)

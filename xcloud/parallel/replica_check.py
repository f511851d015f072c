"""Whether replicas hold the same parameters, bit for bit. Compares digests, repairs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from xcloud.base.errors import ReplicasDiffer
from xcloud.cluster.frame import Kind, MessageKey, TensorSpec
from xcloud.parallel.partition import local_part
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.replica_links import Mailbox

_NUMBER = 0xFFFF_FFFF  # in place of a micro-batch; tells it from what is averaged
_BYTES = 16


class ReplicaCheck:
    """Of one rank. Every rank of all replicas makes the same calls.

    mail: None in a rank that has no counterparts; it is compared inside its cloud.
    stages: those of this rank. group: the ranks of its cloud that hold them too.
    name_of: a counterpart in words. every: updates between two comparisons, 0 = none. last_step:
    of training, compared too.
    """

    def __init__(
        self,
        mail: Mailbox | None,
        group: RankGroup,
        stages: Mapping[int, nn.Module],
        name_of: Callable[[int], str],
        every: int,
        last_step: int,
    ) -> None:
        self._mail, self._group, self._stages = mail, group, stages
        self._name_of, self._every, self._last_step = name_of, every, last_step

    def is_due(self, step: int) -> bool:
        return step == self._last_step or (bool(self._every) and step % self._every == 0)

    def compare(self, step: int) -> None:
        """After update `step`; 0 = before the first, where frozen parameters are compared too.

        Raises ReplicasDiffer naming stage and rank.
        """
        mine = torch.stack([digest(self._parameters(m, step)) for m in self._stages.values()])
        for rank, theirs in zip(self._group.ranks, self._group.gather(mine), strict=True):
            self._judge(mine, theirs, f"rank {rank} of the same cloud", step)
        if self._mail is None:
            return
        key, specs = MessageKey(Kind.AVERAGING, step, _NUMBER), (TensorSpec.of(mine),)
        for replica in self._mail.others:
            self._mail.send(replica, key, (mine,), ("digests of parameters",), 0, specs)
        for replica in self._mail.others:
            (theirs,) = self._mail.recv(replica, key)
            self._judge(mine, theirs.cpu(), self._name_of(replica), step)

    def _parameters(self, module: nn.Module, step: int) -> Iterable[Tensor]:
        return (p for p in module.parameters() if p.requires_grad or step == 0)

    def _judge(self, mine: Tensor, theirs: Tensor, name: str, step: int) -> None:
        for stage, own, other in zip(self._stages, mine, theirs, strict=True):
            if not torch.equal(own, other):
                when = f"after update {step}" if step else "before the first update"
                raise ReplicasDiffer(
                    f"{when} the parameters of stage {stage} differ between rank "
                    f"{self._group.rank} and {name}. Replicas must begin with the same seed, "
                    "checkpoint and caches, and compute the same update from the same gradient: "
                    "use the same kind of processor and the same release of torch in all clouds"
                )


def digest(tensors: Iterable[Tensor]) -> Tensor:
    """uint8 [16] of the tensors' bytes, in their order; of sharded ones what this rank holds."""
    hashed = hashlib.blake2b(digest_size=_BYTES)
    for tensor in tensors:
        flat = local_part(tensor).detach().cpu().contiguous().reshape(-1)
        hashed.update(memoryview(cast(Any, flat.view(torch.uint8).numpy())))
    return torch.frombuffer(bytearray(hashed.digest()), dtype=torch.uint8)

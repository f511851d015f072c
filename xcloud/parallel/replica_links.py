"""Messages between one rank and its counterparts in the other replicas; whether they hold the same
parameters, bit for bit. What is averaged, and how, is up to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from xcloud.base.errors import FrameError, ReplicasDiffer
from xcloud.cluster.frame import Kind, MessageKey, TensorSpec
from xcloud.cluster.link import Parts
from xcloud.parallel.exchange import digest
from xcloud.parallel.rank_group import RankGroup

_CHECK = 0xFFFF_FFFF  # in place of a micro-batch; tells it from what is averaged


class ReplicaLinks(Protocol):
    """One rank's links, one each way, to its counterparts in the other replicas of the pipeline:
    the ranks that train the same share of the same stages there.

    Messages between two replicas arrive in the order in which they were sent; the receiver names
    the one that it expects. Keys are of Kind.AVERAGING: the step, and in `micro_batch` whatever
    tells the messages of one step apart.

    replica: this rank's own. num_shares: ranks of each replica that have counterparts, the first
    of a group. num_parts: such ranks of all stages of a replica.
    """

    @property
    def replica(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def num_shares(self) -> int: ...
    @property
    def num_parts(self) -> int: ...

    def open(self, capacity_bytes: int, wait_s: float = 0.0, under_way: int = 1) -> None:
        """Before the first message. capacity_bytes: of the longest message, frame included; the
        same in all replicas. wait_s: how long another replica may take, if that is longer than
        its link. under_way: exchanges that begin before an earlier one ends."""

    def send(
        self, to_replica: int, key: MessageKey, parts: Parts, carries: Sequence[str],
        raw_bytes: int,
    ) -> None:  # fmt: skip
        """Returns before delivery. carries: what each part is, in words, for the record of what
        left the cloud. raw_bytes: FP32 bytes of what the message stands for; 0 for plain numbers.
        """

    def recv(self, from_replica: int, key: MessageKey, wait_s: float | None = None) -> Parts:
        """The next message, which must be `key`. Its parts are the receiver's to check.

        Raises FrameError for another message, LinkTimeout after wait_s seconds (default: what the
        link's profile allows for a message of the largest size), LinkClosed if that rank is gone.
        After a LinkTimeout the same message may be asked for again.
        """

    def name_of(self, replica: int) -> str:
        """The counterpart there, in words."""

    def cloud_of(self, replica: int) -> str: ...

    def ranks_of(self, replica: int) -> Sequence[int]:
        """Of its cloud."""


class Mailbox:
    """Messages of other replicas by their key, although links hand them out in the order sent.

    Nobody can ask a link what comes next. But all replicas make the same calls, so what another
    one sends to this one has the same keys, in the same order, as what this one sends there. All
    averagers that use one rank's links at once must share its mailbox, and whatever is sent over
    it must have its counterpart from there.
    """

    def __init__(self, links: ReplicaLinks) -> None:
        self._links = links
        self.replica, self.num_replicas = links.replica, links.num_replicas
        self.others = [r for r in range(links.num_replicas) if r != links.replica]
        self._expected = {replica: deque[MessageKey]() for replica in self.others}
        self._kept: dict[tuple[int, MessageKey], Parts] = {}

    def send(
        self, to_replica: int, key: MessageKey, parts: Parts, carries: Sequence[str],
        raw_bytes: int,
    ) -> None:  # fmt: skip
        """See ReplicaLinks."""
        self._links.send(to_replica, key, parts, carries, raw_bytes)
        self._expected[to_replica].append(key)

    def recv(self, from_replica: int, key: MessageKey) -> Parts:
        """The counterpart of what was sent there as `key`. Raises LinkTimeout, LinkClosed or
        FrameError as the link does."""
        expected = self._expected[from_replica]
        while (from_replica, key) not in self._kept:
            self._kept[from_replica, expected[0]] = self._links.recv(from_replica, expected[0])
            expected.popleft()
        return self._kept.pop((from_replica, key))


def first_part(parts: Parts, spec: TensorSpec, sender: str) -> tuple[Tensor, Parts]:
    """What a message begins with, and the rest of it. Raises FrameError for another beginning."""
    if not parts or TensorSpec.of(parts[0]) != spec:
        raise FrameError(
            f"a message of {sender} begins with {[TensorSpec.of(p) for p in parts[:1]]}, expected "
            f"{spec}; do all clouds run the same experiment file?"
        )
    return parts[0], parts[1:]


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
        mine = torch.stack(
            [
                digest(p for p in module.parameters() if p.requires_grad or step == 0)
                for _, module in sorted(self._stages.items())
            ]
        )
        for rank, theirs in zip(self._group.ranks, self._group.gather(mine), strict=True):
            self._judge(mine, theirs, f"rank {rank} of the same cloud", step)
        if self._mail is None:
            return
        key = MessageKey(Kind.AVERAGING, step, _CHECK)
        for replica in self._mail.others:
            self._mail.send(replica, key, (mine,), ("digests of parameters",), 0)
        for replica in self._mail.others:
            parts, name = self._mail.recv(replica, key), self._name_of(replica)
            theirs, _ = first_part(parts, TensorSpec.of(mine), name)
            self._judge(mine, theirs.cpu(), name, step)

    def _judge(self, mine: Tensor, theirs: Tensor, name: str, step: int) -> None:
        for stage, own, other in zip(sorted(self._stages), mine, theirs, strict=True):
            if not torch.equal(own, other):
                when = f"after update {step}" if step else "before the first update"
                raise ReplicasDiffer(
                    f"{when} the parameters of stage {stage} differ between rank "
                    f"{self._group.rank} and {name}. Replicas must begin with the same seed, "
                    "checkpoint and caches, and compute the same update from the same gradient: "
                    "use the same kind of processor and the same release of torch in all clouds"
                )

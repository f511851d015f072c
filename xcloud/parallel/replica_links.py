"""Messages between one rank and its counterparts in the other replicas. What is averaged, and how,
is up to others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.cluster.frame import MessageKey, TensorSpec
from xcloud.cluster.link import Parts


@dataclass
class ReplicaLinks(ABC):
    """One rank's links, one each way, to its counterparts in the other replicas of the pipeline:
    the ranks that train the same share of the same stages there.

    Keys are of Kind.AVERAGING: the step, and in `micro_batch` whatever tells the messages of one
    step apart. Links hand messages out in the order in which they were sent, and nobody can ask a
    link what comes next. But all replicas make the same calls, so what another one sends to this
    one has the same keys, in the same order, as what this one sends there: by these `recv` finds
    a message out of turn. What is sent must have its counterpart from there, then.

    replica: this rank's own. num_shares: ranks of each replica that have counterparts, the first
    of a group. num_parts: such ranks of all stages of a replica.
    """

    replica: int
    num_replicas: int
    num_shares: int
    num_parts: int
    _expected: dict[int, deque[MessageKey]] = field(
        default_factory=lambda: defaultdict(deque), init=False
    )
    _early: dict[tuple[int, MessageKey], Parts] = field(default_factory=dict, init=False)

    @property
    def others(self) -> list[int]:
        return [replica for replica in range(self.num_replicas) if replica != self.replica]

    @abstractmethod
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
        self.post(to_replica, key, parts, carries, raw_bytes)
        self._expected[to_replica].append(key)

    def recv(self, from_replica: int, key: MessageKey) -> Parts:
        """The counterpart of what was sent there as `key`. Raises as `next` does."""
        expected = self._expected[from_replica]
        while (from_replica, key) not in self._early:
            self._early[from_replica, expected[0]] = self.next(from_replica, expected[0])
            expected.popleft()
        return self._early.pop((from_replica, key))

    @abstractmethod
    def post(
        self, to_replica: int, key: MessageKey, parts: Parts, carries: Sequence[str],
        raw_bytes: int,
    ) -> None:  # fmt: skip
        """As `send`, of a message that has no counterpart."""

    @abstractmethod
    def next(self, from_replica: int, key: MessageKey, wait_s: float | None = None) -> Parts:
        """The next message, which must be `key`. Its parts are the receiver's to check.

        Raises FrameError for another message, LinkTimeout after wait_s seconds (default: what the
        link's profile allows for a message of the largest size), LinkClosed if that rank is gone.
        After a LinkTimeout the same message may be asked for again.
        """

    @abstractmethod
    def cloud_of(self, replica: int) -> str: ...

    @abstractmethod
    def ranks_of(self, replica: int) -> Sequence[int]:
        """Of its cloud."""

    @abstractmethod
    def name_of(self, replica: int) -> str:
        """The counterpart there, in words."""


def first_part(parts: Parts, spec: TensorSpec, sender: str) -> tuple[Tensor, Parts]:
    """What a message begins with, and the rest of it. Raises FrameError for another beginning."""
    if not parts or TensorSpec.of(parts[0]) != spec:
        raise FrameError(
            f"a message of {sender} begins with {[TensorSpec.of(p) for p in parts[:1]]}, expected "
            f"{spec}; do all clouds run the same experiment file?"
        )
    return parts[0], parts[1:]

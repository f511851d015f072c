"""Messages of other replicas by their key, although links hand them out in the order sent.

Nobody can ask a link what comes next. But all replicas make the same calls, so what another one
sends to this one has the same keys, in the same order, as what this one sends there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from xcloud.cluster.frame import MessageKey, TensorSpec
from xcloud.cluster.link import Parts
from xcloud.parallel.replica_links import ReplicaLinks


class Mailbox:
    """Around one rank's links; all averagers that use them at once must share it. Whatever is sent
    to a replica over it must have its counterpart from there."""

    def __init__(self, links: ReplicaLinks) -> None:
        self._links = links
        others = [r for r in range(links.num_replicas) if r != links.replica]
        self._expected: dict[int, deque[tuple[MessageKey, Sequence[TensorSpec]]]] = {
            replica: deque() for replica in others
        }
        self._kept: dict[tuple[int, MessageKey], Parts] = {}

    @classmethod
    def of(cls, links: ReplicaLinks | Mailbox) -> Mailbox:
        return links if isinstance(links, Mailbox) else cls(links)

    @property
    def replica(self) -> int:
        return self._links.replica

    @property
    def num_replicas(self) -> int:
        return self._links.num_replicas

    @property
    def others(self) -> list[int]:
        return list(self._expected)

    def send(
        self,
        to_replica: int,
        key: MessageKey,
        parts: Parts,
        carries: Sequence[str],
        raw_bytes: int,
        answer: Sequence[TensorSpec],
    ) -> None:
        """answer: specs of the message with the same key that comes from there."""
        self._links.send(to_replica, key, parts, carries, raw_bytes)
        self._expected[to_replica].append((key, answer))

    def recv(self, from_replica: int, key: MessageKey) -> Parts:
        """The counterpart of what was sent there as `key`. Raises LinkTimeout, LinkClosed or
        FrameError as the link does; after a LinkTimeout it may be asked for again."""
        expected = self._expected[from_replica]
        while (from_replica, key) not in self._kept:
            next_key, specs = expected[0]
            parts = self._links.recv(from_replica, next_key, specs)
            expected.popleft()
            self._kept[from_replica, next_key] = parts
        return self._kept.pop((from_replica, key))

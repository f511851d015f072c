"""One rank's links to its counterparts in the other replicas of the pipeline: the ranks that train
the same share of the same stage there. What is averaged, and how, is up to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xcloud.cluster.frame import MessageKey, TensorSpec
from xcloud.cluster.link import Parts


class ReplicaLinks(Protocol):
    """A link each way to every other replica.

    Messages between two replicas arrive in the order in which they were sent; the receiver names
    the one that it expects. Keys are of Kind.AVERAGING: the step, and in `micro_batch` whatever
    tells the messages of one step apart.
    """

    @property
    def replica(self) -> int:
        """This rank's own."""

    @property
    def num_replicas(self) -> int: ...

    def send(
        self,
        to_replica: int,
        key: MessageKey,
        parts: Parts,
        carries: Sequence[str],
        raw_bytes: int,
    ) -> None:
        """Returns before delivery. carries: what each part is, in words, for the record of what
        left the cloud. raw_bytes: FP32 bytes of what the message stands for; 0 for plain numbers.
        """

    def recv(
        self,
        from_replica: int,
        key: MessageKey,
        specs: Sequence[TensorSpec] | None,
        wait_s: float | None = None,
    ) -> Parts:
        """The next message, which must be `key`. specs: of its parts; None takes any.

        Raises FrameError for another message or other specs, LinkTimeout after wait_s seconds
        (default: what the link's profile allows for a message of the largest size), LinkClosed if
        that rank is gone. After a LinkTimeout the same message may be asked for again.
        """

"""What joins one rank to its counterparts in the other replicas: same stage, same share of its
values. Only the protocol; whoever wires a run makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xcloud.cluster.frame import MessageKey
from xcloud.cluster.link import Parts
from xcloud.cluster.tensor_spec import TensorSpec


class ReplicaLinks(Protocol):
    """replica: this rank's, in 0 .. num_replicas - 1."""

    replica: int
    num_replicas: int

    def send(
        self,
        to_replica: int,
        key: MessageKey,
        parts: Parts,
        carries: Sequence[str],
        raw_bytes: int,
    ) -> None:
        """Returns before delivery. carries: what each part is, in words. raw_bytes: FP32 size of
        what the message stands for. Raises LinkClosed if that replica is gone."""

    def recv(
        self,
        from_replica: int,
        key: MessageKey,
        specs: tuple[TensorSpec, ...] | None = None,
        wait_s: float | None = None,
    ) -> Parts:
        """The message `key`, whatever came before it from that replica.

        specs: what it must be; FrameError otherwise. wait_s: None for as long as the link's own
        limit. Raises LinkTimeout when it is late, LinkClosed when that replica is gone.
        """

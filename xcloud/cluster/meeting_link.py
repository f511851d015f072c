"""A link for the few small messages before wiring: on the default process group, without threads
or emulation. The run itself uses GlooOutLink.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from xcloud.base.errors import FrameError, LinkClosed, LinkTimeout
from xcloud.cluster.frame import MessageKey, decode_frame, encode_frame, seal_frame
from xcloud.cluster.gloo_link import first_line
from xcloud.cluster.link import LinkStats, Parts, expect
from xcloud.cluster.wire_record import LinkRecord


class MeetingLink:
    """Both directions between this rank and `peer`; an OutLink and an InLink.

    capacity_bytes: longest frame, the same in both ranks. timeout_s: how long `send` may take.
    record: records what was sent; None if the peer is in the same cloud.
    """

    def __init__(
        self,
        peer: int,
        peer_name: str,
        capacity_bytes: int,
        timeout_s: float,
        record: LinkRecord | None = None,
    ) -> None:
        self.stats = LinkStats()
        self._peer, self._peer_name, self._record = peer, peer_name, record
        self._capacity_bytes, self._timeout_s = capacity_bytes, timeout_s
        self._num_sent = 0

    def send(self, key: MessageKey, parts: Parts, carries: Sequence[str] = ()) -> None:
        """Returns once the peer has received it. Raises LinkTimeout, LinkClosed, or FrameError for
        a frame longer than capacity_bytes."""
        frame = encode_frame(key, parts, self._num_sent)
        if frame.numel() > self._capacity_bytes:
            raise FrameError(
                f"{key} for {self._peer_name} takes {frame.numel():,} bytes, but at most "
                f"{self._capacity_bytes:,} are allowed"
            )
        seal_frame(frame, 0.0)
        self._num_sent += 1
        self.stats.count(key.kind, frame.numel())
        if self._record is not None:
            self._record.note(key.kind, parts, carries, frame.numel())
        self._wait(dist.isend(frame, self._peer), key, self._timeout_s)

    def say_alive(self, parts: Parts = (), carries: Sequence[str] = ()) -> None:
        """Not needed: `recv` has a fixed deadline."""

    def recv(self, key: MessageKey, overdue_s: float) -> Parts:
        buffer = torch.zeros(self._capacity_bytes, dtype=torch.uint8)
        self._wait(dist.irecv(buffer, self._peer), key, overdue_s)
        return expect(decode_frame(buffer, self._peer_name), key, self._peer_name).parts

    def close(self, timeout_s: float) -> None:
        """Nothing to do: `send` has delivered everything."""

    def _wait(self, work: dist.Work | None, key: MessageKey, timeout_s: float) -> None:
        assert work is not None
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            reason = first_line(error)
            if "timed out" in reason.lower():
                raise LinkTimeout(
                    f"{key} was not exchanged between this rank and {self._peer_name} in "
                    f"{timeout_s:.0f} s. Is that rank alive, and of the same release of xcloud?"
                ) from error
            raise LinkClosed(f"{self._peer_name} is gone: {reason}") from error

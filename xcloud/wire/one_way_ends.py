"""The link ends of a rank of a one-way job: some keep a record of what they take, and ranks
leave one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xcloud.base.errors import FrameError, LinkError
from xcloud.cluster.frame import Frame, Kind
from xcloud.cluster.link import CONTROL, LinkName, LinkRecord
from xcloud.cluster.link_end import ReceivingEnd, SendingEnd
from xcloud.wire.ends import Ends, Handlers


class OneWayEnds(Ends):
    """received: by sender, what this rank took of another cloud. carries: what each kind of such
    a message carries; None where no record of them is kept."""

    def __init__(self, *ends: Any, carries: Mapping[Kind, Sequence[str]] | None = None) -> None:
        super().__init__(*ends)
        self._carries = carries
        self.received: dict[int, LinkRecord] = {}

    def handled(self, peer: int, handlers: Handlers) -> Handlers:
        if self._carries is None or not self.leaves_cloud(peer):
            return handlers
        here = self.layout.placement(self.rank).cloud
        link = LinkName(CONTROL, peer, self.rank)
        record = self.received.setdefault(peer, LinkRecord(link, here))
        return {kind: noting(record, self._carries[kind], take) for kind, take in handlers.items()}

    def await_goodbye(self, peer: int) -> None:
        """As long as it sends heartbeats. Raises LinkTimeout."""
        for other, end in self._ends:
            if other == peer and isinstance(end, ReceivingEnd):
                end.close(self.layout.liveness.lost_after_s)

    def part_from(self, peers: Sequence[int], patience_s: float) -> dict[int, str]:
        """Deliver everything to these and say goodbye, then hear theirs, as long as they send
        heartbeats. Returns why one said none, by peer: not an error."""
        unheard: dict[int, str] = {}
        theirs = [(peer, end) for peer, end in self._ends[::-1] if peer in peers]
        for kind in (SendingEnd, ReceivingEnd):
            for peer, end in theirs:
                if isinstance(end, kind):
                    try:
                        end.close(patience_s)
                        if isinstance(end, ReceivingEnd) and not end.said_goodbye:
                            unheard.setdefault(peer, "its link has ended")
                    except LinkError as error:
                        unheard.setdefault(peer, str(error))
        for peer in peers:
            self.forget(peer)
        return unheard


def noting(
    record: LinkRecord, carries: Sequence[str], handler: Callable[[Frame], None]
) -> Callable[[Frame], None]:
    """The handler; what it takes is noted. What it refuses is not, nor what has other parts: it
    carries nothing that has a name."""

    def take(frame: Frame) -> None:
        kind = frame.key.kind
        if len(frame.parts) != len(carries):
            raise FrameError(
                f"a {kind.name.lower()} has {len(frame.parts)} parts, expected {len(carries)}"
            )
        handler(frame)
        record.note(kind, frame.parts, carries, frame.num_bytes)

    return take

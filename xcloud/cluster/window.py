"""How much may be under way on one link: receives posted ahead, bytes in queues. Pure arithmetic.

Gloo sends a message only against a posted receive, and that a receive is posted takes one latency
to become known at the sender. So a link carries at most `num_posted` messages in a round trip,
whatever its bandwidth, and the receives must cover all messages that can be under way at once.
"""

from __future__ import annotations

from dataclasses import dataclass

BUDGET_BYTES = 64_000_000
MIN_POSTED = 3
"""Less would leave the line idle between two large messages."""


@dataclass(frozen=True)
class LinkWindow:
    """The bounds of one direction between two ranks. Both ends must hold the same.

    num_posted: receives that the receiver keeps posted, each in a buffer that could take the
        longest frame (and takes memory as far as one has filled it). The sender ends the link
        with as many goodbyes.
    max_queued_bytes: frames that may wait at the sender before `send` blocks, and at the receiver
        before it takes no more from the network.
    """

    num_posted: int = MIN_POSTED
    max_queued_bytes: int = BUDGET_BYTES

    @classmethod
    def covering(
        cls, num_under_way: int, frame_bytes: int, budget_bytes: int = BUDGET_BYTES
    ) -> LinkWindow:
        """For a link whose sender may be `num_under_way` messages of at most frame_bytes ahead of
        what its receiver has read.

        So many such frames fit into budget_bytes, but MIN_POSTED receives there always are. The
        queue takes all that may be under way even where this is more than the budget: a schedule
        whose `send` blocks waits for itself for ever.
        """
        num_posted = max(MIN_POSTED, min(num_under_way, budget_bytes // frame_bytes))
        return cls(num_posted, max(budget_bytes, num_under_way * frame_bytes))

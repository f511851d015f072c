"""How much may be in flight on one link: receives posted ahead, bytes in queues. Pure arithmetic.

Gloo sends a message only against a posted receive, and the sender learns of it one latency later.
So a link carries at most `num_posted` messages per round trip, whatever its bandwidth, and the
receives must cover all messages that can be in flight at once.
"""

from __future__ import annotations

from dataclasses import dataclass

BUDGET_BYTES = 64_000_000
MIN_POSTED = 3
"""Fewer would leave the line idle between two large messages."""


@dataclass(frozen=True)
class LinkWindow:
    """The limits of one direction between two ranks; the same at both ends.

    num_posted: receives that the receiver keeps posted, each with a buffer for the longest frame
        (pages use memory only once filled). The sender ends the link with as many goodbyes.
    max_queued_bytes: frames that may be queued at the sender before `send` blocks, and at the
        receiver before it stops reading from the network.
    """

    num_posted: int = MIN_POSTED
    max_queued_bytes: int = BUDGET_BYTES

    @classmethod
    def covering(
        cls, num_under_way: int, frame_bytes: int, budget_bytes: int = BUDGET_BYTES
    ) -> LinkWindow:
        """For a sender that may be `num_under_way` messages of at most frame_bytes ahead of what
        its receiver has read.

        Posted receives stay within budget_bytes, but there are at least MIN_POSTED. The queue
        takes everything in flight even beyond the budget: a schedule whose `send` blocked would
        deadlock.
        """
        num_posted = max(MIN_POSTED, min(num_under_way, budget_bytes // frame_bytes))
        return cls(num_posted, max(budget_bytes, num_under_way * frame_bytes))

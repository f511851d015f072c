"""When messages between clouds were on their way, noted at both ends for the timeline of a step.
Counts no bytes (link.py does) and delays nothing.

All moments are time.monotonic() of the machine that notes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from xcloud.cluster.emulated_link import Reservation
from xcloud.cluster.frame import Frame, Kind, MessageKey

CONTROL = -1
"""In place of a border: the small messages around rank 0."""


class LinkName(NamedTuple):
    """The same at both ends. border: number of the stage before it, or CONTROL."""

    border: int
    sender: int
    receiver: int


class SentMessage(NamedTuple):
    """line_from_s, line_until_s: when the emulated line carried it. Elsewhere line_from_s is when
    it was handed to the network, and line_until_s is None: only the receiver knows more."""

    link: LinkName
    key: MessageKey
    sequence: int
    num_bytes: int
    queued_at_s: float
    line_from_s: float
    line_until_s: float | None


class ReceivedMessage(NamedTuple):
    link: LinkName
    key: MessageKey
    sequence: int
    received_at_s: float


class MessageLog:
    """What one rank sent to and received from other clouds; its links append from their threads.

    Messages of steps from from_step on are noted, whenever they come: where nothing comes back, a
    cloud may be many steps ahead of the next. Reports, which are of no step, once it is open.
    """

    def __init__(self, from_step: int) -> None:
        self.from_step = from_step
        self.is_open = False
        self.sent: list[SentMessage] = []
        self.received: list[ReceivedMessage] = []

    def wants(self, key: MessageKey) -> bool:
        if key.kind is Kind.REPORT:
            return self.is_open
        return key.step >= self.from_step and key.kind not in _OF_NO_STEP


_OF_NO_STEP = (Kind.EVALUATION, Kind.MEETING, Kind.ALIVE)


@dataclass(frozen=True)
class LinkLog:
    """One link's way into its rank's log."""

    name: LinkName
    log: MessageLog

    def sending(
        self,
        key: MessageKey,
        sequence: int,
        num_bytes: int,
        queued_at_s: float,
        now_s: float,
        slot: Reservation | None,
    ) -> None:
        """now_s: the message is being handed to the network. slot: its time on an emulated one."""
        if not self.log.wants(key):
            return
        line = (now_s, None) if slot is None else (slot.start_s, slot.sent_s)
        self.log.sent.append(SentMessage(self.name, key, sequence, num_bytes, queued_at_s, *line))

    def received(self, frame: Frame, now_s: float) -> None:
        if self.log.wants(frame.key):
            self.log.received.append(ReceivedMessage(self.name, frame.key, frame.sequence, now_s))

"""Record when messages between clouds were sent and received, for the timeline of a step.
Bytes are counted in link.py.

All times are time.monotonic() of the recording machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from xcloud.cluster.emulated_link import Reservation
from xcloud.cluster.frame import Frame, Kind, MessageKey

CONTROL = -1
"""In place of a boundary: control messages from and to rank 0."""


class LinkName(NamedTuple):
    """The same at both ends. boundary: number of the stage before it, or CONTROL."""

    boundary: int
    sender: int
    receiver: int


class SentMessage(NamedTuple):
    """line_from_s, line_until_s: when the emulated line carried it. On a real link line_from_s is
    when it was passed to the network, and line_until_s is None: only the receiver knows it."""

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

    Messages of step from_step or later are recorded whenever they arrive: without a backward pass
    a cloud may be many steps ahead of the next. Reports belong to no step; they are recorded
    while is_open.
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


_OF_NO_STEP = (Kind.EVALUATION, Kind.MEETING, Kind.ALIVE, Kind.CHECKPOINT)


@dataclass(frozen=True)
class LinkLog:
    """One link's access to its rank's log."""

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
        """now_s: when it is passed to the network. slot: its reservation on an emulated line."""
        if not self.log.wants(key):
            return
        line = (now_s, None) if slot is None else (slot.start_s, slot.sent_s)
        self.log.sent.append(SentMessage(self.name, key, sequence, num_bytes, queued_at_s, *line))

    def received(self, frame: Frame, now_s: float) -> None:
        if self.log.wants(frame.key):
            self.log.received.append(ReceivedMessage(self.name, frame.key, frame.sequence, now_s))

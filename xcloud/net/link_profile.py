"""Bandwidth, latency and faults of a link between two clouds, how much may be in flight on it, and
how long its ends may be silent. Pure arithmetic; sends nothing.

Times in seconds, bandwidth in bits per second of the line, packet headers included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegativeFloat, PositiveFloat, settings
from xcloud.net.unsteady_line import UnsteadyLine

# TCP over IPv4 and Ethernet: of 1514 bytes on the line, 1448 are payload (20 IP, 32 TCP with
# timestamps, 14 Ethernet). A kernel shaper (tbf) counts the same bytes.
PACKET_PAYLOAD_BYTES = 1448
PACKET_HEADER_BYTES = 66


def line_bytes(num_bytes: int) -> int:
    """Return the bytes on the line for `num_bytes` handed to TCP."""
    return num_bytes + PACKET_HEADER_BYTES * math.ceil(num_bytes / PACKET_PAYLOAD_BYTES)


class Wan:
    """A line between two clouds: here the network as it is (cluster/wan=real), whose bandwidth is
    not known. Another carrier is a subclass, named by its YAML in conf/cluster/wan."""

    advice: ClassVar[str] = (
        "a profile of conf/cluster/wan is chosen with a slash, such as cluster/wan=oregon_tokyo"
    )
    in_words: ClassVar[str] = "the network as it is"
    """The line as tables and messages name it, unless its settings say more (`describe`)."""
    emulated: ClassVar[bool] = False
    """Whether the sender's clock says when a message arrives."""
    is_metered: ClassVar[bool] = True
    """Whether the receiving end measures how long messages keep the line busy."""
    between_owners: ClassVar[bool] = False
    """Whether clouds have several owners, each of whom starts their own one."""
    has_numbers: ClassVar[bool] = False
    """Whether it is known what the line can do: a LinkProfile says it, or there is no limit."""

    def allowance_s(self, num_bytes: int) -> float:
        """Return the seconds that a message of this size gets beyond
        cluster.liveness.overdue_after_s, because the line is known to be slow."""
        return 0.0

    def describe(self) -> str:
        return self.in_words


class FreeWan(Wan):
    """A line without a limit; messages are still framed, compressed and counted
    (cluster/wan=free)."""

    in_words = "no limit"
    is_metered = False
    has_numbers = True


class SealedWan(Wan):
    """A line between the clouds of several owners: sealed, and dialled again after a cut
    (cluster/wan=sealed)."""

    in_words = "sealed lines between owners"
    between_owners = True


_ALLOWED_TRANSFERS = 10
"""Messages of the same size that may stand before one in an emulated line's queue."""

REAL = Wan()
FREE = FreeWan()
SEALED = SealedWan()


@settings("wan")
class LinkProfile(Wan, UnsteadyLine):
    """An emulated line: one direction between two clouds; the other is identical and independent.

    bandwidth_bits_per_s: shared by all ranks of the pair of clouds.
    latency_s: one way. The round trip is twice this.
    jitter_s: each message is delayed by a uniform draw from [0, jitter_s], drawn alike in every
        run; no reordering.
    """

    bandwidth_bits_per_s: PositiveFloat
    latency_s: NotNegativeFloat = 0.0
    jitter_s: NotNegativeFloat = 0.0

    emulated = True
    is_metered = False
    has_numbers = True
    is_inbound: ClassVar[bool] = False
    """Whether all messages between stages that come to a rank share one line, whoever sends
    them."""

    def __post_init__(self) -> None:
        for name in ("trace", "outages"):
            object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))
        if self._is_unsteady:
            self.check()

    @property
    def _is_unsteady(self) -> bool:
        return bool(self.trace or self.outages or self.outage_every_s or self.outage_lasting_s)

    @property
    def nominal(self) -> tuple[float, float, float]:
        return 0.0, self.bandwidth_bits_per_s, self.latency_s

    def transfer_s(self, num_bytes: int) -> float:
        """Return the seconds until the last byte arrives on an idle link at its nominal
        bandwidth."""
        return self.line_s(num_bytes) + self.beyond_s

    def line_s(self, num_bytes: int) -> float:
        """Return the seconds that `num_bytes` keep the line busy at its nominal bandwidth."""
        return 8.0 * line_bytes(num_bytes) / self.bandwidth_bits_per_s

    @property
    def beyond_s(self) -> float:
        """The seconds from when a message has left the line until it arrives, at nominal
        latency."""
        return self.latency_s

    def allowance_s(self, num_bytes: int) -> float:
        return _ALLOWED_TRANSFERS * self.transfer_s(num_bytes)

    def describe(self) -> str:
        rate = self.bandwidth_bits_per_s
        unit = f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"
        extras = [f"{2e3 * self.latency_s:g} ms round trip"]
        if self.jitter_s:
            extras.append(f"jitter {1e3 * self.jitter_s:g} ms")
        if self.trace:
            extras.append(f"trace of {len(self.trace)} rates")
        if self.outages or self.outage_every_s:
            extras.append("outages")
        return f"emulated {unit}, {', '.join(extras)}"

    def sent_at(self, start_s: float, num_bytes: int) -> float:
        """Return when the last byte is sent if the first is sent at start_s (seconds since the
        start)."""
        bits = 8.0 * line_bytes(num_bytes)
        # Most lines are steady and need none of the loops of `last_bit_at`.
        if self._is_unsteady:
            return self.last_bit_at(start_s, bits)
        return start_s + bits / self.bandwidth_bits_per_s

    def latency_at(self, now_s: float) -> float:
        """Return the latency one way of a message whose last byte leaves at now_s (seconds since
        the start)."""
        entry = self.entry_from(now_s)[0] if self.trace else self.nominal
        return entry[2] if len(entry) == 3 else self.latency_s


_UNBILLED_BYTES = 1024
"""Norms, reports and heartbeats, of which the benchmark's clock knows nothing."""


@settings("wan")
class InboundWire(LinkProfile):
    """The clock of Protocol NanoGPT: a message takes the receiving rank's one inbound wire for its
    bits and then for its latency, before the next one begins, whichever neighbour it comes from.

    With all stages faster than the wire, a step of p stages and m micro-batches under 1F1B takes
    (2m + 2(p - 2)) * (bits of a message / bandwidth + latency).
    Source: PluralisResearch/ProtocolNanoGPT at 0551bc3b, SimPipelineStage.add_delay. Differences:
    packet headers do not count there, nor here; messages of at most 1,024 bytes take no time here,
    and there is none of them there.

    bandwidth_bits_per_s: the bandwidth of the inbound wire of each rank.
    latency_s: the seconds that each message keeps the wire busy beside its bits.
    """

    is_inbound = True

    def __post_init__(self) -> None:
        if self._is_unsteady or self.jitter_s:
            raise ConfigError(
                "cluster/wan=protocol_nanogpt is the benchmark's own steady wire: remove "
                "wan.trace, wan.outages, wan.outage_every_s, wan.outage_lasting_s and wan.jitter_s"
            )

    def line_s(self, num_bytes: int) -> float:
        if num_bytes <= _UNBILLED_BYTES:
            return 0.0
        return 8.0 * num_bytes / self.bandwidth_bits_per_s + self.latency_s

    @property
    def beyond_s(self) -> float:
        return 0.0

    def sent_at(self, start_s: float, num_bytes: int) -> float:
        return start_s + self.line_s(num_bytes)

    def latency_at(self, now_s: float) -> float:
        return 0.0

    def describe(self) -> str:
        return (
            f"emulated inbound wire of each rank, {self.bandwidth_bits_per_s / 1e6:g} Mbit/s and "
            f"{1e3 * self.latency_s:g} ms a message, one after the other"
        )


BUDGET_BYTES = 64_000_000
MIN_POSTED = 3
"""Fewer would leave the line idle between two large messages."""


@dataclass(frozen=True)
class LinkWindow:
    """The limits of one direction between two ranks; the same at both ends.

    num_posted: receives that the receiver keeps posted, each with a buffer for the longest frame
        (pages use memory only once filled). The sender closes the link with as many frames.
    max_queued_bytes: frames that may be queued at the sender before `send` blocks, and at the
        receiver before it stops reading from the network.
    max_evaluation_bytes: the same of the frames of an evaluation, whose sender may be blocked.
    """

    num_posted: int = MIN_POSTED
    max_queued_bytes: int = BUDGET_BYTES
    max_evaluation_bytes: int = BUDGET_BYTES

    @classmethod
    def covering(
        cls,
        num_under_way: int,
        frame_bytes: int,
        budget_bytes: int = BUDGET_BYTES,
        num_ahead: int = 0,
    ) -> LinkWindow:
        """Return the window of a sender that must be able to be `num_under_way` messages of at
        most frame_bytes ahead of what its receiver has read.

        The queue takes these even beyond budget_bytes: a schedule whose `send` blocked would
        deadlock. Posted receives stay within the budget, but there are at least MIN_POSTED; they
        cover num_ahead messages too, which keep a long line busy and which nobody needs.
        """
        # Each posted receive may have a whole frame in its buffer.
        num_posted = min(max(num_under_way, num_ahead), budget_bytes // frame_bytes)
        return cls(
            max(MIN_POSTED, num_posted),
            max(budget_bytes, num_under_way * frame_bytes),
            budget_bytes,
        )


@settings("cluster.liveness")
class Liveness:
    """The rules by which a silent rank counts as lost.

    interval_s: seconds from one heartbeat of a rank to the next.
    lost_after_s: seconds after its last heartbeat at which a rank counts as lost.
    overdue_after_s: seconds that a live rank may take for one message inside a step. They count
        from the time at which one last moved at any rank, as heartbeats say. An emulated line adds
        ten times the time that the message needs on it.
    join_within_s: seconds to wait for ranks that torchrun has not started yet.
    """

    interval_s: Annotated[float, Field(ge=0.01)] = 5.0  # or a rank would do nothing else
    lost_after_s: PositiveFloat = 20.0
    overdue_after_s: PositiveFloat = 300.0
    join_within_s: PositiveFloat = 43_200.0

    def __post_init__(self) -> None:
        if self.lost_after_s < 3 * self.interval_s:
            raise ConfigError(
                f"cluster.liveness.lost_after_s ({self.lost_after_s:g}) must be at least three "
                f"times cluster.liveness.interval_s ({self.interval_s:g}): heartbeats that "
                "rank 0 passes on come up to two intervals late"
            )


DEFAULT_LIVENESS = Liveness()

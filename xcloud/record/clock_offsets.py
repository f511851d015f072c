"""Estimate the clock offsets between machines from the messages of one step.
Pure arithmetic; all times in microseconds.

On one machine all processes share a clock. Between two machines it works as in NTP (RFC 5905,
section 8), with the fastest message each way, sent at s and received at r:
    offset = (min(r - s there) - min(r - s back)) / 2,   off by at most half of the sum of both,
i.e. by half of the fastest round trip. Exact if both fastest messages take equally long. Without
messages both ways the machines' wall clocks are trusted, and the error is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Passage(NamedTuple):
    """One message between two machines, each time by its own machine's clock."""

    sender: str
    receiver: str
    sent_us: int
    received_us: int


class Offsets(NamedTuple):
    """shift_us: to add to each machine's times. error_us: the largest possible error;
    0 on one machine, None if it is unknown."""

    shift_us: dict[str, int]
    error_us: int | None


def clock_offsets(unix_us: Mapping[str, int], passages: Sequence[Passage]) -> Offsets:
    """Offsets to the clock of the first machine of `unix_us`, which is the wall-clock time at
    each machine's clock zero."""
    fastest: dict[tuple[str, str], int] = {}
    for p in passages:
        pair = (p.sender, p.receiver)
        fastest[pair] = min(
            fastest.get(pair, p.received_us - p.sent_us), p.received_us - p.sent_us
        )
    machines = list(unix_us)
    shift = {machines[0]: 0}
    error: dict[str, int | None] = {machines[0]: 0}
    while len(shift) < len(machines):
        # Prefer messages: of all machines next to a known one, take the most accurate.
        steps = [
            ((fastest[a, b] + fastest[b, a]) / 2, a, b)
            for a, b in fastest
            if (b, a) in fastest and a in shift and b not in shift
        ]
        if not steps:
            break
        half_round_trip, a, b = min(steps)
        shift[b] = shift[a] - round((fastest[a, b] - fastest[b, a]) / 2)
        known = error[a]
        error[b] = None if known is None else known + round(half_round_trip)
    for machine in machines:
        if machine not in shift:
            shift[machine] = unix_us[machine] - unix_us[machines[0]]
            error[machine] = None
    worst = [e for e in error.values() if e is not None]
    return Offsets(shift, max(worst) if len(worst) == len(machines) else None)

"""Merge the ranks' "timeline" events of one step onto one clock, and write a trace for Perfetto or
chrome://tracing. Drawing is in show/pictures.py; no torch.

Times are whole microseconds since the first rank began the step.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from xcloud.base.bounded import parsed_json
from xcloud.record.events import Event, update_s

PLAN_FILE = "plan.json"
TRACE_FILE = "timeline.json"
PREDICTED_FILE = "predicted.json"  # the step that a plan foresaw, as a trace
PLANNED_FILES = (PLAN_FILE, PREDICTED_FILE)
COMPUTING = ("fetch", "forward", "backward", "weights", "clip", "optimizer")
SPANS = (*COMPUTING, "compress", "decompress", "wait", "average")
"""What a rank does in a step, by the names of comm.step_clock.SUM_OF."""
MAX_ENTRIES = 5_000
"""Spans, messages sent and messages received of a rank in one step that are joined and drawn."""
MAX_ROWS = 50
_ENTRIES = ("spans", "sent", "received")
_LETTER = {"forward": "F", "backward": "B", "weights": "W", "activation": "F", "gradient": "B"}


class Box(NamedTuple):
    """One thing a rank did. direction: "forward", "backward", "weights", or "" outside the
    schedule."""

    what: str
    direction: str
    stage: int
    micro_batch: int
    from_us: int
    until_us: int

    @property
    def name(self) -> str:
        """F3, B3 and W3 as in the textbooks; "wait for F3" is waiting for the input of F3."""
        if not self.direction:
            if self.what == "wait":
                return "wait for norm"
            return self.what
        action = f"{_LETTER[self.direction]}{self.micro_batch}"
        if self.what == self.direction:
            return action
        if self.what == "wait":
            return f"wait for {action}"
        return f"{self.what} {action}"


class Flight(NamedTuple):
    """One message between clouds. from_us, until_us: its time on the emulated line, which carries
    one at a time; on a real link, from sending to arrival. arrived_us: latency included."""

    sender: int
    receiver: int
    kind: str  # activation, gradient, averaging, norm, report
    micro_batch: int
    num_bytes: int
    queued_us: int
    from_us: int
    until_us: int
    arrived_us: int

    @property
    def name(self) -> str:
        letter = _LETTER.get(self.kind)
        return f"{letter}{self.micro_batch}" if letter else self.kind


@dataclass(frozen=True)
class Lane:
    """A row of the picture: what one rank did in the step, from its own start of the step to its
    own end."""

    rank: int
    cloud: str
    from_us: int
    until_us: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Timeline:
    """The timeline of one step.

    lanes: one lane for each rank.
    flights: the messages of each direction (sending cloud, receiving cloud), in order.
    """

    step: int
    lanes: tuple[Lane, ...]
    flights: Mapping[tuple[str, str], tuple[Flight, ...]]
    clocks: str  # how the ranks' clocks were joined, and the possible error

    @property
    def clouds(self) -> list[str]:
        return list(dict.fromkeys(lane.cloud for lane in self.lanes))

    @cached_property
    def rows(self) -> Mapping[tuple[str, str], Sequence[Sequence[Flight]]]:
        """The messages of each direction, in as few rows as they fit into without overlap."""
        return {direction: rows_of(flights) for direction, flights in self.flights.items()}

    @property
    def until_us(self) -> int:
        return max(lane.until_us for lane in self.lanes)

    @property
    def step_us(self) -> int:
        """The time of the update, as a run counts it; a rank that is ahead begins it before
        that."""
        spans = ((lane.until_us, lane.until_us - lane.from_us) for lane in self.lanes)
        return round(update_s(spans))

    def total_us(self, *what: str) -> int:
        boxes = (box for lane in self.lanes for box in lane.boxes if box.what in what)
        return sum(box.until_us - box.from_us for box in boxes)

    @property
    def bubble_ratio(self) -> float | None:
        computing_us = self.total_us(*COMPUTING)
        return self.total_us("wait") / computing_us if computing_us else None


def timeline_of(events: Iterable[Event]) -> Timeline | None:
    """Join the "timeline" events of a run's last attempt; None if there are none (it ended too
    early)."""
    parts: dict[int, list[Event]] = {}
    for event in events:
        if event["event"] == "resume":
            # Only the last attempt has a step of all its ranks.
            parts.clear()
        if event["event"] == "timeline":
            parts.setdefault(event["rank"], []).append(event)
    if not parts:
        return None
    heads = {rank: parts[rank][0] for rank in sorted(parts)}
    # A rank that restarted by itself may have recorded another step.
    step = next(iter(heads.values()))["step"]
    others = {rank for rank, head in heads.items() if head["step"] != step}
    heads = {rank: head for rank, head in heads.items() if rank not in others}
    parts = {rank: parts[rank] for rank in heads}
    sent, received = _messages(parts)
    offsets = _offsets(heads, sent=sent, received=received)
    # Its machine's clock, moved to that of the first machine.
    at = {r: one["started_us"] + offsets.shift_us[one["machine"]] for r, one in heads.items()}
    begin = {rank: at_us - min(at.values()) for rank, at_us in at.items()}
    lanes = tuple(_lane(parts[rank], begin_us=begin[rank]) for rank in heads)
    flights: dict[tuple[str, str], list[Flight]] = {}
    until_us = max(lane.until_us for lane in lanes)
    for key, message in sent.items():
        # A message that nobody reports as received has no end to draw.
        if key[2] not in heads:  # the receiver reported nothing: the run was cut off
            continue
        flight = _flight(key, message=message, received_us=received.get(key), begin=begin)
        # Leave out reports that overlap only the previous or the next step.
        if flight.kind != "report" or (flight.until_us > 0 and flight.from_us < until_us):
            direction = heads[key[1]]["cloud"], heads[key[2]]["cloud"]
            flights.setdefault(direction, []).append(flight)
    ordered = {
        way: tuple(sorted(some, key=lambda f: f.from_us)) for way, some in sorted(flights.items())
    }
    if len(offsets.shift_us) == 1:
        clocks = "one machine, one clock"
    elif offsets.error_us is None:
        clocks = f"clocks of {len(offsets.shift_us)} machines joined by wall clocks, error unknown"
    else:
        off_ms = offsets.error_us / 1000
        clocks = f"clocks of {len(offsets.shift_us)} machines joined by messages both ways, "
        clocks += f"off by {off_ms:.3g} ms at most"
    if others:
        clocks += (
            f"; without {', '.join(f'rank {one}' for one in sorted(others))}, of another step"
        )
    lists = [[part[name] for part in some] for some in parts.values() for name in _ENTRIES]
    num_entries = sum(len(entries) for several in lists for entries in several)
    if left_out := num_entries - sum(len([*_first(several)]) for several in lists):
        clocks += f"; {left_out:,} entries left out"
    return Timeline(step=step, lanes=lanes, flights=ordered, clocks=clocks)


def _first(lists: Iterable[Sequence[Any]]) -> Iterator[Any]:
    """Return what a rank reports of one kind, up to so much as a picture can show."""
    return itertools.islice(itertools.chain.from_iterable(lists), MAX_ENTRIES)


def _lane(parts: Sequence[Event], begin_us: int) -> Lane:
    boxes = tuple(
        Box(
            what=what,
            direction=direction,
            stage=stage,
            micro_batch=number,
            from_us=begin_us + start,
            until_us=begin_us + end,
        )
        for what, direction, stage, number, start, end in _first(part["spans"] for part in parts)
    )
    head = parts[0]
    return Lane(
        rank=head["rank"],
        cloud=head["cloud"],
        from_us=begin_us,
        until_us=begin_us + head["step_us"],
        boxes=boxes,
    )


_Key = tuple[int, int, int, int]  # boundary, sender, receiver, number on that link


def _messages(parts: Mapping[int, list[Event]]) -> tuple[dict[_Key, list[Any]], dict[_Key, int]]:
    """Return what every rank sent, and when every rank received it, under the same keys."""
    sent = {}
    received = {}
    for rank, events in parts.items():
        for boundary, receiver, sequence, *message in _first(one["sent"] for one in events):
            sent[boundary, rank, receiver, sequence] = message
        for boundary, sender, sequence, at_us in _first(one["received"] for one in events):
            received[boundary, sender, rank, sequence] = at_us
    return sent, received


def _offsets(
    heads: Mapping[int, Event], sent: Mapping[_Key, list[Any]], received: Mapping[_Key, int]
) -> Offsets:
    passages = []
    for key in sent.keys() & received.keys():
        here = heads[key[1]]
        there = heads[key[2]]
        # On one machine there is one clock.
        if here["machine"] != there["machine"]:
            left_us = here["started_us"] + sent[key][4]
            came_us = there["started_us"] + received[key]
            passages.append(
                MessagePassage(
                    sender=here["machine"],
                    receiver=there["machine"],
                    sent_us=left_us,
                    received_us=came_us,
                )
            )
    # The first report of each machine, whose order gives the clock that others are moved to.
    unix_us = {head["machine"]: head["unix_us"] for head in reversed(list(heads.values()))}
    first = next(iter(heads.values()))["machine"]
    return clock_offsets({first: unix_us.pop(first), **unix_us}, passages=passages)


def _flight(
    key: _Key, message: Sequence[Any], received_us: int | None, begin: Mapping[int, int]
) -> Flight:
    _, sender, receiver, _ = key
    kind, number, num_bytes, queued, start, end = message
    start_us = begin[sender] + start
    # Without a receiver the message is drawn where it begins.
    came_us = begin[receiver] + received_us if received_us is not None else start_us
    # An error in the joined clocks can make a message arrive before it was sent.
    until_us = max(start_us, came_us if end is None else begin[sender] + end)
    queued_us = begin[sender] + queued
    arrived_us = max(until_us, came_us)
    return Flight(
        sender=sender,
        receiver=receiver,
        kind=kind,
        micro_batch=number,
        num_bytes=num_bytes,
        queued_us=queued_us,
        from_us=start_us,
        until_us=until_us,
        arrived_us=arrived_us,
    )


Timed = TypeVar("Timed", Box, Flight)


def rows_of(entries: Iterable[Timed]) -> list[list[Timed]]:
    """Return the entries in as few rows as they fit into without overlap, the lowest free one
    first. What finds no place in MAX_ROWS rows is left out: nobody could read it."""
    rows: list[list[Timed]] = []
    # In the order in which they begin, so that each row fills without gaps.
    for entry in sorted(entries, key=lambda e: (e.from_us, e.until_us)):
        for row in rows:
            if row[-1].until_us <= entry.from_us:
                row.append(entry)
                break
        else:
            if len(rows) < MAX_ROWS:
                rows.append([entry])
    return rows


def chrome_trace(timeline: Timeline, facts: Mapping[str, object]) -> dict[str, Any]:
    """Trace Event Format, JSON object form: a process for each cloud with a thread for each rank,
    and one for the links with a thread (or more, where messages overlap) for each direction;
    arrows point from a message on the line to its receiver. facts: for otherData."""
    entries: list[dict[str, Any]] = []
    arrows = itertools.count(1)

    def name(text: str, pid: int, **thread: int) -> None:
        # Perfetto sorts rows by this index; without it they stand in the order of their names.
        kind, order = ("thread", thread["tid"]) if thread else ("process", pid)
        for what, value in (("name", text), ("sort_index", order)):
            row = {"ph": "M", "pid": pid, "name": f"{kind}_{what}", "args": {what: value}}
            entries.append(row | thread)

    def add(entry: Box | Flight, kind: str, arguments: object, **at: int) -> None:
        # "X": a complete span, with its length.
        span = {"ts": entry.from_us, "dur": entry.until_us - entry.from_us}
        entries.append(
            {"ph": "X", **at, "name": entry.name, "cat": kind, **span, "args": arguments}
        )

    process_of = {cloud: number for number, cloud in enumerate(timeline.clouds, 1)}
    for cloud, process in process_of.items():
        name(cloud, process)
    for lane in timeline.lanes:
        at = {"pid": process_of[lane.cloud], "tid": lane.rank}
        name(f"rank {lane.rank}", **at)
        for box in lane.boxes:
            place = {"stage": box.stage, "micro_batch": box.micro_batch} if box.direction else {}
            add(box, box.what, place, **at)
    links = len(process_of) + 1
    if timeline.flights:
        name("links", links)
    threads = [
        (f"{here} to {there}" + (f" ({number + 1})" if number else ""), process_of[there], row)
        for (here, there), rows in timeline.rows.items()
        for number, row in enumerate(rows)
    ]
    for thread, (label, to, row) in enumerate(threads, 1):
        name(label, links, tid=thread)
        for flight in row:
            told = ("queued_us", "arrived_us", "sender", "receiver")
            arguments = {"bytes": flight.num_bytes, **{n: getattr(flight, n) for n in told}}
            add(flight, flight.kind, arguments, pid=links, tid=thread)
            # An arrow is two events with the same number: "s" on the line, "f" at the receiver.
            same = {"name": flight.name, "cat": "message", "id": next(arrows)}
            begin = {"ph": "s", "pid": links, "tid": thread, "ts": flight.from_us}
            end = {"ph": "f", "bp": "e", "pid": to, "tid": flight.receiver}
            entries += [{**begin, **same}, {**end, "ts": flight.arrived_us, **same}]
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {"step": timeline.step, "clocks": timeline.clocks, **facts},
    }


def write_trace(path: Path, timeline: Timeline, facts: Mapping[str, object]) -> None:
    path.write_text(json.dumps(chrome_trace(timeline, facts=facts)), encoding="utf-8")


def write_predicted(run_dir: Path, timeline: Timeline, strategy: str) -> None:
    """The step of a plan, as a trace that holds the timeline itself as well."""
    # A trace holds no lanes, so the timeline itself stands beside it.
    flights = [[*between, some] for between, some in timeline.flights.items()]
    own = {"lanes": [asdict(lane) for lane in timeline.lanes], "flights": flights}
    write_trace(run_dir / PREDICTED_FILE, timeline, facts={"plan": strategy, "timeline": own})


def read_predicted(run_dir: Path) -> Timeline | None:
    """None for a run without a predicted step."""
    if not (path := run_dir / PREDICTED_FILE).exists():
        return None
    about = parsed_json(path.read_text(encoding="utf-8"))["otherData"]
    lanes = (
        Lane(**lane | {"boxes": tuple(Box(*box) for box in lane["boxes"])})
        # JSON has lists for tuples.
        for lane in about["timeline"]["lanes"]
    )
    flights = {
        (here, there): tuple(Flight(*one) for one in some)
        for here, there, some in about["timeline"]["flights"]
    }
    return Timeline(
        step=about["step"], lanes=tuple(lanes), flights=flights, clocks=about["clocks"]
    )


def predicted_of(run_dir: Path) -> dict[str, Any]:
    """For the summary of a run: what its plan predicted; empty for a run without one."""
    path = run_dir / PLAN_FILE
    table = parsed_json(path.read_text(encoding="utf-8")) if path.exists() else {}
    # A plan that was only shown predicts nothing of this run.
    if not table.get("chosen"):
        return {}
    told: dict[str, Any] = {"predicted_step_time_s": table["predicted_step_time_s"]}
    if epochs := table["chosen"]["over_epochs"]:
        told["predicted_over_epochs"] = dict(epochs)
    return told


class MessagePassage(NamedTuple):
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


def clock_offsets(unix_us: Mapping[str, int], passages: Sequence[MessagePassage]) -> Offsets:
    """Offsets to the clock of the first machine of `unix_us`, which is the wall-clock time at
    each machine's clock zero. Two clocks are joined as in NTP (RFC 5905, section 8), by the
    fastest message each way, sent at s and received at r:
        offset = (min(r - s there) - min(r - s back)) / 2,  off by at most half of the sum of both,
    i.e. by half of the fastest round trip. Without messages both ways the machines' wall clocks
    are trusted, and the error is unknown."""
    fastest: dict[tuple[str, str], int] = {}
    for p in passages:
        pair = (p.sender, p.receiver)
        # May be negative, as two clocks disagree: only differences of two count.
        took_us = p.received_us - p.sent_us
        fastest[pair] = min(fastest.get(pair, took_us), took_us)
    first, *others = unix_us
    shift = {first: 0}
    error: dict[str, int | None] = {first: 0}
    # Each turn joins one machine; some may be joined over others.
    while len(shift) <= len(others):
        # Prefer messages: of all machines next to a known one, take the most accurate.
        steps = [
            ((fastest[a, b] + fastest[b, a]) / 2, a, b)
            for a, b in fastest
            if (b, a) in fastest and a in shift and b not in shift
        ]
        if not steps:
            break
        half_round_trip, a, b = min(steps)
        # Half of what both fastest messages differ by.
        shift[b] = shift[a] - round((fastest[a, b] - fastest[b, a]) / 2)
        known = error[a]
        # Through a machine whose error is unknown nothing is known.
        if known is None:
            error[b] = None
        else:
            error[b] = known + round(half_round_trip)
    # No messages both ways: their wall clocks have to do.
    for machine in {*others} - shift.keys():
        shift[machine], error[machine] = unix_us[machine] - unix_us[first], None
    known_us = [e for e in error.values() if e is not None]
    return Offsets(shift_us=shift, error_us=max(known_us) if len(known_us) == len(error) else None)

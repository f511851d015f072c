"""A step of two ranks as they report it, and its timeline."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from xcloud.record.events import Event
from xcloud.record.timeline import Timeline, timeline_of

MS = 1000


def event(rank: int, started_ms: float, spans: list[list[Any]], **fields: Any) -> Event:
    head = {
        "event": "timeline", "rank": rank, "cloud": "ab"[rank], "t": 0.0, "step": 7,
        "machine": "m", "started_us": round(MS * started_ms), "unix_us": 0, "step_us": 60 * MS,
        "sent": [], "received": [],
    }  # fmt: skip
    return {**head, "spans": spans, **fields}


def two_ranks(**of_b: Any) -> list[Event]:
    """Rank 0 computes F0 in 10 ms and sends it (5 ms on the line, 2 ms of latency); rank 1, which
    began 1 ms later, waits for it, computes it in 8 ms and sends the gradient the same way."""
    a = event(
        0, 1000,
        [
            ["forward", "forward", 0, 0, 0, 10 * MS],
            ["compress", "forward", 0, 0, 10 * MS, 11 * MS],
            ["wait", "backward", 0, 0, 11 * MS, 35 * MS],
            ["backward", "backward", 0, 0, 35 * MS, 45 * MS],
            ["wait", "", -1, -1, 45 * MS, 50 * MS],
            ["optimizer", "", -1, -1, 50 * MS, 60 * MS],
        ],
        sent=[[0, 1, 0, "activation", 0, 640, 11 * MS, 11 * MS, 16 * MS],
              [-1, 1, 3, "report", 0, 90, 300 * MS, 300 * MS, 301 * MS]],
        received=[[0, 1, 9, 34 * MS]],
    )  # fmt: skip
    b = event(
        1, 1001,
        [
            ["wait", "forward", 1, 0, 0, 17 * MS],
            ["forward", "forward", 1, 0, 17 * MS, 25 * MS],
            ["backward", "backward", 1, 0, 25 * MS, 26 * MS],
        ],
        sent=[[0, 0, 9, "gradient", 0, 320, 26 * MS, 26 * MS, 31 * MS]],
        received=[[0, 0, 0, 17 * MS]],
        **of_b,
    )  # fmt: skip
    return [b, a]


def timeline(events: list[Event] | None = None) -> Timeline:
    found = timeline_of(two_ranks() if events is None else events)
    assert found is not None
    return found


def assert_valid_trace(trace: dict[str, Any]) -> None:
    """Trace Event Format (Google, "JSON Object Format"): what the viewers insist on."""
    named = set()
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    arrows: dict[int, list[str]] = {}
    for entry in trace["traceEvents"]:
        assert isinstance(entry["name"], str) and isinstance(entry["pid"], int)
        if entry["ph"] == "M":
            assert entry["name"] in {
                "process_name", "process_sort_index", "thread_name", "thread_sort_index",
            }  # fmt: skip
            named.add((entry["pid"], entry.get("tid")))
            continue
        assert isinstance(entry["tid"], int) and isinstance(entry["ts"], int)
        assert entry["ts"] >= 0
        if entry["ph"] == "X":
            assert isinstance(entry["dur"], int) and entry["dur"] >= 0
            track = tracks.setdefault((entry["pid"], entry["tid"]), [])
            track.append((entry["ts"], entry["ts"] + entry["dur"]))
        else:
            assert entry["ph"] in "sf"
            arrows.setdefault(entry["id"], []).append(entry["ph"])
    assert {pid for pid, _ in tracks} <= {pid for pid, tid in named if tid is None}
    assert tracks.keys() <= named
    assert all(sorted(ends) == ["f", "s"] for ends in arrows.values())
    # Boxes that overlap without one holding the other are drawn wrongly.
    for track in tracks.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(track)))

"""Read back from a run's files: its recorded step, and what its plan predicted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.record.timeline import Box, Flight, Lane, Timeline, timeline_of

PLAN_FILE = "plan.json"
PREDICTED_FILE = "predicted.json"  # the step that a plan foresaw, as a trace


def read_timeline(path: Path) -> Timeline:
    """The recorded step of a run: from its folder, its events.jsonl or its timeline.json. Raises
    ConfigError if there is none."""
    if path.is_dir():
        files = [path / EVENTS_FILE, path / "timeline.json"]
        path = next((file for file in files if file.exists()), files[0])
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name the folder of a run that has ended")
    if path.suffix == ".json":
        return _from_trace(path)
    found = timeline_of(EventReader(path))
    if found is None:
        raise ConfigError(f"{path} holds no recorded step: the run ended before its last step")
    return found


def _from_trace(path: Path) -> Timeline:
    """What chrome_trace wrote. The ends of a rank's step are those of its boxes."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(trace, dict) or "step" not in trace.get("otherData", {}):
        raise ConfigError(f"{path} is no timeline.json of a run")
    entries = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    boxes: dict[tuple[str, int], list[Box]] = {}
    flights: list[Flight] = []
    for entry in entries:
        if entry["ph"] != "X":
            continue
        since_us, arguments = entry["ts"], entry["args"]
        until_us = since_us + entry["dur"]
        if "sender" in arguments:
            flights.append(
                Flight(
                    arguments["sender"], arguments["receiver"], entry["cat"], _number(entry),
                    arguments["bytes"], arguments["queued_us"], since_us, until_us,
                    arguments["arrived_us"],
                )
            )  # fmt: skip
            continue
        direction = ""
        if "stage" in arguments:
            letter = entry["name"].split()[-1][0]
            direction = {"F": "forward", "B": "backward", "W": "weights"}[letter]
        place = arguments.get("stage", -1), arguments.get("micro_batch", -1)
        lane = processes[entry["pid"]], entry["tid"]
        boxes.setdefault(lane, []).append(Box(entry["cat"], direction, *place, since_us, until_us))
    lanes = tuple(
        Lane(rank, cloud, min(b.from_us for b in own), max(b.until_us for b in own), tuple(own))
        for (cloud, rank), own in sorted(boxes.items(), key=lambda item: item[0][1])
    )
    cloud_of = {lane.rank: lane.cloud for lane in lanes}
    by_direction: dict[tuple[str, str], list[Flight]] = {}
    for flight in flights:
        direction_of = cloud_of[flight.sender], cloud_of[flight.receiver]
        by_direction.setdefault(direction_of, []).append(flight)
    return Timeline(
        trace["otherData"]["step"],
        lanes,
        {d: tuple(sorted(by_direction[d], key=lambda f: f.from_us)) for d in sorted(by_direction)},
        trace["otherData"]["clocks"],
    )


def _number(entry: Mapping[str, Any]) -> int:
    return int(entry["name"][1:]) if entry["cat"] in ("activation", "gradient") else -1


def predicted_of(run_dir: Path) -> dict[str, Any]:
    """For the summary of a run: what its plan predicted; empty for a run without one."""
    try:
        found = json.loads((run_dir / PLAN_FILE).read_text(encoding="utf-8"))
        step_s = float(found["predicted_step_time_s"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    told: dict[str, Any] = {"predicted_step_time_s": round(step_s, 6)}
    if epochs := found["chosen"].get("over_epochs"):
        told["predicted_over_epochs"] = {name: round(epochs[name], 6) for name in epochs}
    return told

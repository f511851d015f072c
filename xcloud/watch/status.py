"""`python -m xcloud status RUN`: what every rank of a run does, from the files of its folder.
Works while the run is running, hangs, or has ended. Starts and changes nothing.

Of a run over several machines each cloud's folder shows its own ranks.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from xcloud.base.errors import XcloudError
from xcloud.base.units import human_duration
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.record.files import LAUNCHER_FILE, check_is_run, failure_of
from xcloud.record.summary import SUMMARY_FILE

STALE_S = 5.0  # a rank writes its state every second


@dataclass(frozen=True)
class RankStatus:
    """Of one rank, ages in seconds. process: running, stopped, gone, or unknown (on another
    machine). waits: (rank, message, seconds), the longest first."""

    rank: int
    phase: str
    phase_s: float
    step: int | None
    step_s: float | None
    silent_s: float
    has_ended: bool
    process: str
    waits: tuple[tuple[int, str, float], ...]
    by_torchrun: bool
    is_away: bool

    @classmethod
    def of(cls, state: Mapping[str, Any], now: float) -> RankStatus:
        """state: as RankState writes it."""
        waits = [(one["rank"], one["message"], now - one["since"]) for one in state["waits_for"]]
        process = "gone" if state["ended"] else _process(state["pid"], state["host"])
        return cls(
            rank=state["rank"],
            phase=state["phase"],
            phase_s=now - state["phase_since"],
            step=state.get("step"),
            step_s=now - state["step_at"] if "step_at" in state else None,
            silent_s=now - state["written"],
            has_ended=state["ended"],
            process=process,
            waits=tuple(sorted(waits, key=lambda wait: -wait[2])),
            by_torchrun=state.get("torchrun", False),
            is_away=process == "gone" and state.get("may_leave", False),
        )

    @property
    def is_well(self) -> bool:
        return self.process in ("running", "unknown") and self.silent_s <= STALE_S

    @property
    def trouble(self) -> str:
        what = {"stopped": "is stopped (SIGSTOP)", "gone": "is gone"}
        silent = f"sent no heartbeat for {human_duration(self.silent_s)}"
        return f"rank {self.rank} {what.get(self.process, silent)}"

    def line(self, wait: tuple[int, str, float] | None) -> str:
        """wait: the one to show."""
        text = f"rank {self.rank}: {self.phase} for {human_duration(self.phase_s)}"
        if self.step is not None:
            text += f", step {self.step} done {human_duration(self.step_s or 0.0)} ago"
        if self.has_ended:
            return text
        if wait is not None:
            text += f"; waits for {wait[1]} from rank {wait[0]} for {human_duration(wait[2])}"
        silent = human_duration(self.silent_s)
        return f"{text}; process {self.process}, last heartbeat {silent} ago"


def ranks_of(run_dir: Path, now: float | None = None) -> list[RankStatus]:
    now = time.time() if now is None else now
    ranks = []
    for path in run_dir.glob("rank*.state.json"):
        try:
            ranks.append(RankStatus.of(json.loads(path.read_text("utf-8")), now))
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"{path} cannot be read: {error!r}", file=sys.stderr)
    return sorted(ranks, key=lambda status: status.rank)


def _process(pid: int, host: str) -> str:
    if host != socket.gethostname():
        return "unknown"
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.AccessDenied:
        return "running"
    ends = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_TRACING_STOP: "stopped",
            psutil.STATUS_ZOMBIE: "gone"}  # fmt: skip
    return ends.get(state, "running")


def waited_for(ranks: Sequence[RankStatus]) -> dict[int, tuple[int, str, float]]:
    """The longest wait of each rank that waits. In a collective a rank waits for all others, and
    those that are in it too are not the reason."""
    longest = {}
    waits = {one.rank: one.waits for one in ranks}
    for one in ranks:
        late = [
            wait
            for wait in one.waits
            if (one.rank, wait[1]) not in [other[:2] for other in waits.get(wait[0], ())]
        ]
        if one.waits:
            longest[one.rank] = (late or one.waits)[0]
    return longest


def culprits(ranks: Sequence[RankStatus]) -> dict[int, list[int]]:
    """Of the ranks at the end of each chain of waiting: who waits for them, directly or not. A
    circle of ranks that wait for each other has no end, and its ranks are not listed."""
    well = [one.rank for one in ranks if one.is_well]
    waits_for = {rank: wait[0] for rank, wait in waited_for(ranks).items() if rank in well}
    waiting: dict[int, list[int]] = {}
    for rank in waits_for:
        seen, end = {rank}, waits_for[rank]
        while end in waits_for and end not in seen:
            seen.add(end)
            end = waits_for[end]
        if end not in waits_for:
            waiting.setdefault(end, []).append(rank)
    return waiting


def checkpoints(run_dir: Path) -> dict[int, float]:
    """When each that counts was agreed on, by step."""
    return {
        int(match[1]): path.stat().st_mtime
        for path in run_dir.glob("checkpoints/step-*/AGREED")
        if (match := re.fullmatch(r"step-(\d+)", path.parent.name))
    }


def describe(run_dir: Path) -> str:
    """Raises ConfigError if there is no run."""
    now = time.time()
    check_is_run(run_dir, f"{EVENTS_FILE}*", "events.*.gz", "rank*.state.json")
    ranks = ranks_of(run_dir, now)
    waits = waited_for(ranks)
    lines = [f"{run_dir}: {_whole(run_dir, ranks, now)}", ""]
    lines += [one.line(waits.get(one.rank)) for one in ranks]
    ends = {} if all(one.process == "gone" for one in ranks) else culprits(ranks)
    for rank, waiting in sorted(ends.items()):
        names = ", ".join(map(str, sorted(waiting)))
        lines.append(f"rank {rank} is waited for by rank{'s' * (len(waiting) > 1)} {names}")
    last = {event["sender"]: event for event in EventReader(run_dir / EVENTS_FILE, warn=False)
            if event["event"] == "refused_reports"}  # fmt: skip
    lines += [f"{event['num']} reports of rank {sender} were refused, the last one as: "
              f"{event.get('reason')}" for sender, event in sorted(last.items())]  # fmt: skip
    if marks := checkpoints(run_dir):
        step = max(marks)
        lines.append(f"last checkpoint: step {step}, {human_duration(now - marks[step])} ago")
    else:
        lines.append("no checkpoint yet that all ranks have agreed on")
    return "\n".join(lines)


def _whole(run_dir: Path, ranks: Sequence[RankStatus], now: float) -> str:
    if any(one.process != "gone" for one in ranks):
        ill = [one.trouble for one in ranks if not one.is_well and not one.is_away]
        away = [f"rank {one.rank} is away and may come back" for one in ranks if one.is_away]
        return f"degraded: {', '.join(ill)}" if ill else "; ".join(["running", *away])
    launcher = _read(run_dir / LAUNCHER_FILE)
    if launcher and _process(launcher["pid"], launcher["host"]) != "gone":
        return _between_attempts(run_dir, ranks, launcher, now)
    if summary := _read(run_dir / SUMMARY_FILE):
        cause = summary.get("cause")
        return f"ended, {summary.get('status')}" + (f": {cause}" if cause else "")
    if ranks and all(one.phase.startswith("has done its part") for one in ranks):
        return "this cloud's part is done; the first cloud has the summary"
    if any(one.by_torchrun for one in ranks):
        return "ended before its time; to resume, give the same torchrun command again"
    return f"ended without a summary; to resume: python run.py resume={run_dir.resolve()}"


def _between_attempts(
    run_dir: Path, ranks: Sequence[RankStatus], launcher: Mapping[str, Any], now: float
) -> str:
    """What the launcher does while no rank runs."""
    marks = checkpoints(run_dir)
    again = f"starting again from step {max(marks)}" if marks else "starting"
    if all(now - one.silent_s < launcher["started"] for one in ranks):  # of the attempt before
        return again
    failures = [failure_of(run_dir, one.rank) for one in ranks]
    is_lost = any(failures) or not all(one.has_ended for one in ranks)
    would_come_again = any(failure and failure["expected"] for failure in failures)
    if is_lost and marks and launcher["restarts_left"] and not would_come_again:
        return again
    return "ended; run.py is writing the record"


def _read(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    try:
        return dict(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xcloud status", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    try:
        print(describe(parser.parse_args(words).run_dir))
    except XcloudError as error:
        print(f"xcloud: {error}", file=sys.stderr)
        return 1
    return 0

"""`python -m xcloud status RUN`: what every rank of a run does, from the files of its folder.
Works while the run goes on, hangs, or has ended. Starts and changes nothing.

Of a run over several machines each cloud's folder tells of its own ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcloud.base.errors import XcloudError
from xcloud.record.rank_state import LAUNCHER_FILE, failure_of
from xcloud.record.segments import EVENTS_FILE, check_is_run

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
    by_torchrun: bool = False
    is_away: bool = False

    @property
    def is_well(self) -> bool:
        return self.process in ("running", "unknown") and self.silent_s <= STALE_S


def ranks_of(run_dir: Path, now: float | None = None) -> list[RankStatus]:
    now = time.time() if now is None else now
    found = []
    for path in run_dir.glob("rank*.state.json"):
        try:
            found.append(_status(json.loads(path.read_text("utf-8")), now))
        except (OSError, ValueError, LookupError, TypeError) as error:
            print(f"{path} cannot be read: {error!r}", file=sys.stderr)
    return sorted(found, key=lambda status: status.rank)


def _status(state: dict[str, Any], now: float) -> RankStatus:
    waits = [(one["rank"], one["message"], now - one["since"]) for one in state["waits_for"]]
    process = "gone" if state["ended"] else _process(state["pid"], state["host"])
    is_away = process == "gone" and state.get("may_leave", False)
    step_at = state.get("step_at")
    return RankStatus(
        state["rank"], state["phase"], now - state["phase_since"], state.get("step"),
        None if step_at is None else now - step_at, now - state["written"], state["ended"],
        process, tuple(sorted(waits, key=lambda wait: -wait[2])), state.get("torchrun", False),
        is_away,
    )  # fmt: skip


def _process(pid: int, host: str) -> str:
    if host != socket.gethostname():
        return "unknown"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "running"  # where there is no /proc
    return {"T": "stopped", "t": "stopped", "Z": "gone"}.get(state, "running")


def waited_for(ranks: Sequence[RankStatus]) -> dict[int, tuple[int, str, float]]:
    """The longest wait of each rank that waits. In a collective a rank waits for all others, and
    those that are in it too are not the reason."""
    found = {}
    waits = {one.rank: one.waits for one in ranks}
    for one in ranks:
        late = [
            wait
            for wait in one.waits
            if (one.rank, wait[1]) not in [other[:2] for other in waits.get(wait[0], ())]
        ]
        if one.waits:
            found[one.rank] = (late or one.waits)[0]
    return found


def culprits(ranks: Sequence[RankStatus]) -> dict[int, list[int]]:
    """Of the ranks at the end of each chain of waiting: who waits for them, directly or not. A
    circle of ranks that wait for each other has no end, and its ranks are not listed."""
    well = [one.rank for one in ranks if one.is_well]
    waits_for = {rank: wait[0] for rank, wait in waited_for(ranks).items() if rank in well}
    found: dict[int, list[int]] = {}
    for rank in waits_for:
        seen, end = {rank}, waits_for[rank]
        while end in waits_for and end not in seen:
            seen.add(end)
            end = waits_for[end]
        if end not in waits_for:
            found.setdefault(end, []).append(rank)
    return found


def _checkpoints(run_dir: Path) -> dict[int, float]:
    """When each that counts was agreed on, by step."""
    return {
        int(match[1]): path.stat().st_mtime
        for path in run_dir.glob("checkpoints/step-*/AGREED")
        if (match := re.fullmatch(r"step-(\d+)", path.parent.name))
    }


def last_checkpoint(run_dir: Path, now: float) -> str:
    marks = _checkpoints(run_dir)
    if not marks:
        return "no checkpoint yet that all ranks have agreed on"
    step = max(marks)
    return f"last checkpoint: step {step}, {_age(now - marks[step])} ago"


def describe(run_dir: Path) -> str:
    """Raises ConfigError if there is no run."""
    now = time.time()
    check_is_run(run_dir, f"{EVENTS_FILE}*", "events.*.gz", "rank*.state.json")
    ranks = ranks_of(run_dir, now)
    lines = [f"{run_dir}: {_whole(run_dir, ranks, now)}", ""]
    waits = waited_for(ranks)
    lines += [_line(one, waits.get(one.rank)) for one in ranks]
    ends = {} if all(one.process == "gone" for one in ranks) else culprits(ranks)
    for rank, waiting in sorted(ends.items()):
        names = ", ".join(map(str, sorted(waiting)))
        lines.append(f"rank {rank} is waited for by rank{'s' * (len(waiting) > 1)} {names}")
    return "\n".join([*lines, last_checkpoint(run_dir, now)])


def _whole(run_dir: Path, ranks: Sequence[RankStatus], now: float) -> str:
    if any(one.process != "gone" for one in ranks):
        ill = [one for one in ranks if not one.is_well and not one.is_away]
        if not ill:
            away = [f"rank {one.rank} is away and may come back" for one in ranks if one.is_away]
            return "; ".join(["running", *away])
        return "running, but not well: " + ", ".join(f"rank {one.rank} {_ill(one)}" for one in ill)
    try:
        launcher = json.loads((run_dir / LAUNCHER_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        launcher = None
    if launcher is not None and _process(launcher["pid"], launcher["host"]) != "gone":
        return _without_ranks(run_dir, ranks, now - launcher["started"], launcher["restarts_left"])
    try:
        summary = json.loads((run_dir / "summary.json").read_text("utf-8"))
    except (OSError, ValueError):
        if all(one.phase.startswith("has done its part") for one in ranks) and ranks:
            return "this cloud's part is done; the first cloud has the summary"
        if any(one.by_torchrun for one in ranks):
            return "ended before its time; go on: give the same torchrun command again"
        return f"ended without a summary; go on: python run.py resume={run_dir.resolve()}"
    cause = summary.get("cause")
    return f"ended, {summary.get('status')}" + (f": {cause}" if cause else "")


def _without_ranks(
    run_dir: Path, ranks: Sequence[RankStatus], attempt_s: float, restarts_left: int
) -> str:
    """What the launcher does while none runs. attempt_s: since it began to start them last."""
    found = _checkpoints(run_dir)
    again = f"starting again from step {max(found)}" if found else "starting"
    if all(one.silent_s > attempt_s for one in ranks):  # what they did was the attempt before
        return again
    failures = [failure_of(run_dir, one.rank) for one in ranks]
    is_lost = any(failures) or not all(one.has_ended for one in ranks)
    would_come_again = any(failure and failure["expected"] for failure in failures)
    if is_lost and found and restarts_left and not would_come_again:
        return again
    return "ended; run.py is writing the record"


def _ill(one: RankStatus) -> str:
    what = {"stopped": "is stopped (SIGSTOP)", "gone": "is gone"}
    return what.get(one.process, f"gave no sign of life for {_age(one.silent_s)}")


def _line(one: RankStatus, wait: tuple[int, str, float] | None) -> str:
    done = "" if one.step is None else f", step {one.step} done {_age(one.step_s or 0.0)} ago"
    head = f"rank {one.rank}: {one.phase} for {_age(one.phase_s)}{done}"
    if one.has_ended:
        return head
    if wait is not None:
        peer, message, seconds = wait
        head += f"; waits for {message} from rank {peer} for {_age(seconds)}"
    return f"{head}; process {one.process}, last sign of life {_age(one.silent_s)} ago"


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xcloud status", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    try:
        print(describe(parser.parse_args(words).run_dir))
    except XcloudError as error:
        print(f"xcloud: {error}", file=sys.stderr)
        return 1
    return 0

"""`python -m xcloud status RUN`: what every rank of a run does, from the files of its folder.
Works while the run is running, hangs, or has ended. Starts and changes nothing.

Of a run over several machines each cloud's folder shows its own ranks.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import XcloudError
from xcloud.base.project import run_command
from xcloud.base.terminal import printable, say
from xcloud.base.units import human_duration
from xcloud.job.given import check_is_run
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.record.files import AGREED_FILE, LAUNCHER_FILE, CheckpointSteps, failure_of, read_json
from xcloud.record.summary import SUMMARY_FILE

STALE_S = 5.0  # a rank writes its state every second


AwaitedRank = tuple[int, str, float]  # for which rank, which message, seconds


class RankStatus:
    """A rank as its state file shows it.

    state: the content of the state file, which RankState writes.
    process: running, stopped, gone, or unknown (on another machine).
    waits: the waits of this rank, the longest first.
    """

    def __init__(self, state: Mapping[str, Any], now: float) -> None:
        self._state = state
        self._now = now
        self.rank = int(state["rank"])
        self.phase = state["phase"]
        self.step = state.get("step")
        self.has_ended = state["ended"]
        self.silent_s = now - state["written"]
        # A process of another machine cannot be looked at from here.
        self.process = "gone" if self.has_ended else _process(state["pid"], host=state["host"])
        self.is_away = self.process == "gone" and state.get("may_leave", False)
        self.by_torchrun = state.get("torchrun", False)
        self.lines_down: list[str] = []
        waits: list[AwaitedRank] = []
        # Once it has ended it waits for nobody, whatever its file says.
        if not self.has_ended:  # its last state names what it waited for until then
            self.lines_down = state.get("lines_down", [])
            waits = [
                (one["rank"], one["message"], now - one["since"]) for one in state["waits_for"]
            ]
        self.waits: list[AwaitedRank] = sorted(waits, key=lambda wait: -wait[2])

    @property
    def is_well(self) -> bool:
        return self.process in ("running", "unknown") and self.silent_s <= STALE_S

    @property
    def trouble(self) -> str:
        what = {"stopped": "is stopped (SIGSTOP)", "gone": "is gone"}
        silent = f"sent no heartbeat for {human_duration(self.silent_s)}"
        return f"rank {self.rank} {what.get(self.process, silent)}"

    def line(self, wait: AwaitedRank | None) -> str:
        text = f"rank {self.rank}: {self.phase} for {self._since('phase_since')}"
        if self.step is not None:
            text += f", step {self.step} done {self._since('step_at')} ago"
        if self.has_ended:
            return text
        if wait is not None:
            text += f"; waits for {wait[1]} from rank {wait[0]} for {human_duration(wait[2])}"
        text += "".join(f"; {line}" for line in self.lines_down)
        return f"{text}; process {self.process}, last heartbeat {self._since('written')} ago"

    def as_json(self) -> dict[str, Any]:
        """Return what is known of the rank, for a program."""
        waits = [
            {"rank": rank, "message": what, "for_s": for_s} for rank, what, for_s in self.waits
        ]
        return {
            "rank": self.rank,
            "phase": self.phase,
            "step": self.step,
            "process": self.process,
            "has_ended": self.has_ended,
            "silent_s": self.silent_s,
            "waits_for": waits,
            "lines_down": self.lines_down,
        }

    def _since(self, name: str) -> str:
        return human_duration(self._now - self._state[name])


def ranks_of(run_dir: Path, now: float | None = None) -> list[RankStatus]:
    ranks = []
    for path in run_dir.glob("rank*.state.json"):
        try:
            # One file that cannot be read hides no other rank.
            state = parsed_json(path.read_text("utf-8"))
            ranks.append(RankStatus(state, now=time.time() if now is None else now))
        except (OSError, ValueError, LookupError, TypeError) as error:
            say(f"{path} cannot be read: {error!r}", error=True)
    return sorted(ranks, key=lambda status: status.rank)


def _process(pid: int, host: str) -> str:
    if host != socket.gethostname():
        return "unknown"
    try:
        state = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    # A process of another user: it exists, which is all that was asked.
    except psutil.AccessDenied:
        return "running"
    # A zombie has ended; its parent has only not asked yet.
    ends = {psutil.STATUS_STOPPED: "stopped", psutil.STATUS_TRACING_STOP: "stopped",
            psutil.STATUS_ZOMBIE: "gone"}  # fmt: skip
    return ends.get(state, "running")


def waited_for(ranks: Sequence[RankStatus]) -> dict[int, AwaitedRank]:
    """Return the longest wait of each rank that waits. In a collective a rank waits for all
    others, and those that are in it too are not the reason."""
    # A rank may wait in several threads; what its peer waits for as well explains nothing.
    waits = {one.rank: one.waits for one in ranks if one.waits}
    return {
        rank: next(
            (w for w in own if (rank, w[1]) not in [other[:2] for other in waits.get(w[0], ())]),
            own[0],
        )
        for rank, own in waits.items()
    }


def culprits(ranks: Sequence[RankStatus]) -> dict[int, list[int]]:
    """Return the ranks at the end of each chain of waiting, and who waits for them, directly or
    not. A circle of ranks that wait for each other has no end, and its ranks are not listed."""
    # Ranks that are not well are causes, whatever they wait for.
    well = [one.rank for one in ranks if one.is_well]
    waits_for = {rank: wait[0] for rank, wait in waited_for(ranks).items() if rank in well}
    waiting: dict[int, list[int]] = {}
    for rank in waits_for:
        seen = {rank}
        end = waits_for[rank]
        # Along the chain of waits, until one that waits for nobody.
        while end in waits_for and end not in seen:
            seen.add(end)
            end = waits_for[end]
        # A circle has no culprit.
        if end not in waits_for:
            waiting.setdefault(end, []).append(rank)
    return waiting


def facts_of(run_dir: Path) -> dict[str, Any]:
    """Return what `describe` says, for a program. Raises ConfigError for no folder of a run."""
    now = time.time()
    check_is_run(run_dir, f"{EVENTS_FILE}*", "events.*.gz", "rank*.state.json")
    ranks = ranks_of(run_dir, now=now)
    agreed = CheckpointSteps(run_dir).agreed_steps()
    return {
        "run_dir": str(run_dir),
        "state": _whole(run_dir, ranks=ranks, now=now),
        "ranks": [one.as_json() for one in ranks],
        "waited_for_by": {str(rank): sorted(by) for rank, by in culprits(ranks).items()},
        "checkpoint_step": agreed[0] if agreed else None,
    }


def describe(run_dir: Path) -> str:
    """Return what every rank of a run does, and who waits for whom, as text."""
    now = time.time()
    check_is_run(run_dir, f"{EVENTS_FILE}*", "events.*.gz", "rank*.state.json")
    ranks = ranks_of(run_dir, now=now)
    waits = waited_for(ranks)
    lines = [f"{run_dir}: {_whole(run_dir, ranks=ranks, now=now)}", ""]
    lines += [one.line(waits.get(one.rank)) for one in ranks]
    # Where every rank is gone nobody waits for anybody.
    ends = {} if all(one.process == "gone" for one in ranks) else culprits(ranks)
    for rank, waiting in sorted(ends.items()):
        names = ", ".join(map(str, sorted(waiting)))
        lines.append(f"rank {rank} is waited for by rank{'s' * (len(waiting) > 1)} {names}")
    refused = {
        event["sender"]: event
        for event in EventReader(path=run_dir / EVENTS_FILE, warn=False)
        if event["event"] == "refused_reports"
    }
    lines += [f"{event['num']} reports of rank {sender} were refused, the last one as: "
              f"{event.get('reason')}" for sender, event in sorted(refused.items())]  # fmt: skip
    checkpoints = CheckpointSteps(run_dir)
    last = "no checkpoint yet that all ranks have agreed on"
    for step in checkpoints.agreed_steps()[:1]:
        agreed_at = (checkpoints.step_dir(step) / AGREED_FILE).stat().st_mtime
        last = f"last checkpoint: step {step}, {human_duration(now - agreed_at)} ago"
    return printable("\n".join([*lines, last]))


def _whole(run_dir: Path, ranks: Sequence[RankStatus], now: float) -> str:
    if any(one.process != "gone" for one in ranks):
        # A rank that may leave is no trouble.
        ill = [one.trouble for one in ranks if not one.is_well and not one.is_away]
        away = [f"rank {one.rank} is away and may come back" for one in ranks if one.is_away]
        if ill:
            return f"degraded: {', '.join(ill)}"
        return "; ".join(["running", *away])
    # No rank runs; the launcher may be about to start them again.
    launcher = read_json(run_dir / LAUNCHER_FILE)
    if launcher and _process(launcher["pid"], host=launcher["host"]) != "gone":
        return _between_attempts(run_dir, ranks, launcher, now=now)
    if summary := read_json(run_dir / SUMMARY_FILE):
        cause = summary.get("cause")
        return f"ended, {summary.get('status')}" + (f": {cause}" if cause else "")
    if ranks and all(one.phase.startswith("has finished") for one in ranks):
        return "this cloud's part is done; the first cloud has the summary"
    # Started by torchrun, so by torchrun it goes on.
    if any(one.by_torchrun for one in ranks):
        return "ended before its time; to resume, give the same torchrun command again"
    return f"ended without a summary; to resume: {run_command()} resume={run_dir.resolve()}"


def _between_attempts(
    run_dir: Path, ranks: Sequence[RankStatus], launcher: Mapping[str, Any], now: float
) -> str:
    steps = CheckpointSteps(run_dir).agreed_steps()
    again = f"starting again from step {steps[0]}" if steps else "starting"
    # States older than this attempt are those of the one before.
    if all(now - one.silent_s < launcher["started"] for one in ranks):  # of the attempt before
        return again
    failures = [failure_of(run_dir, rank=one.rank) for one in ranks]
    is_lost = any(failures) or not all(one.has_ended for one in ranks)
    would_come_again = any(failure and failure["expected"] for failure in failures)
    # The launcher starts again after a loss, if it has a checkpoint and restarts left, and if the
    # error would not come again.
    if is_lost and steps and launcher["restarts_left"] and not would_come_again:
        return again
    return "ended; run.py is writing the record"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m xcloud status", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(words)
    try:
        if given.json:
            say(json.dumps(facts_of(given.run_dir), indent=1))
        else:
            say(describe(given.run_dir))
    except XcloudError as error:
        say(f"xcloud: {error}", error=True)
        return 1
    return 0

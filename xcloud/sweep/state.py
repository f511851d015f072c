"""The state of a sweep between commands: sweep.json and the folders of its points.
Prints nothing.

    multirun/NAME/sweep.json          requested overrides and code version, by point folder
    multirun/NAME/<point>/            the run folder of a point; summary.json says how it ended
    multirun/NAME/earlier/            run folders of points that were run again; nothing is deleted

Whether a point is finished follows from its summary.json alone, so a killed sweep can continue.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xcloud.base.errors import ConfigError
from xcloud.base.project import code_digests, commit
from xcloud.job.config import EXPERIMENT_FILE, flatten, read_config
from xcloud.record.mlflow_tracker import REPLACED_FILE, TRACKED_FILE
from xcloud.record.segments import CheckpointSteps
from xcloud.record.summary import read_summary, write_summary
from xcloud.sweep.points import Point, Settings, differences, identity, same_overrides

STATE_FILE = "sweep.json"
LOCK_FILE = ".lock"
EARLIER_DIR = "earlier"
# Code that arranges and shows runs; it cannot change what a run computes.
BESIDE_CODE = ("sweep", "_hydra", "report", "__main__.py")

Verdict = Literal["run", "skip", "again", "resume"]
Changed = Mapping[str, tuple[object, object]]  # by setting: before and now


@dataclass(frozen=True)
class Decision:
    """What to do with a point: run it, keep what it left, run it again from the start or from its
    last checkpoint. why: the reason, if worth printing."""

    point: Point
    verdict: Verdict
    folder: str
    why: str = ""


class SweepState:
    """The file of one sweep. One process at a time: hold `lock()` around everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code, self.commit = code_fingerprint(), commit()
        self.points = read_points(folder)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Raises ConfigError if another process is running this sweep."""
        from filelock import FileLock, Timeout

        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / LOCK_FILE, timeout=0):
                yield
        except Timeout:
            raise ConfigError(
                f"another process runs the sweep in {self.folder}; wait for it, or choose another "
                f"name: sweep=NAME"
            ) from None

    def decide(self, points: Sequence[Point], accept_changes: bool) -> list[Decision]:
        """Skip finished, unchanged points; resume interrupted, unchanged ones; run failed and
        changed ones again."""
        ran = {folder: self._settings(folder) for folder in self.points}
        by_identity = {identity(own): folder for folder, own in ran.items() if own}
        taken, decisions = {*self.points}, []
        for point in points:
            folder = by_identity.get(point.identity) or self._asked_before(point)
            if folder is None:
                folder = _free_name(point.folder, taken)
                decisions.append(Decision(point, "run", folder))
            else:
                changed = differences(ran.get(folder) or point.settings, point.settings)
                decisions.append(self._judge(point, folder, changed, accept_changes))
            taken.add(folder)
            by_identity[point.identity] = folder
        return decisions

    def begin(self, decision: Decision, parallel: int) -> Path:
        """Make an empty folder for the point, unless it resumes in its own; an existing one moves
        to `earlier/`, and its run in MLflow to the deleted ones: a point is one row."""
        run_dir = self.folder / decision.folder
        if decision.verdict == "resume":
            return run_dir
        if run_dir.exists():
            earlier = self.folder / EARLIER_DIR
            earlier.mkdir(exist_ok=True)
            left = run_dir.rename(earlier / _free_name(run_dir.name, os.listdir(earlier)))
            run_dir.mkdir()
            if (left / TRACKED_FILE).exists():
                shutil.copyfile(left / TRACKED_FILE, run_dir / REPLACED_FILE)
        run_dir.mkdir(exist_ok=True)
        self.points[decision.folder] = {
            "label": decision.point.label,
            "seed": decision.point.experiment.seed,
            "overrides": list(decision.point.overrides),
            "commit": self.commit,
            "code": self.code,
            "at_once": parallel,
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        write_summary(self.folder / STATE_FILE, {"name": self.folder.name, "points": self.points})
        return run_dir

    def _asked_before(self, point: Point) -> str | None:
        same = (
            f for f, e in self.points.items() if same_overrides(e["overrides"], point.overrides)
        )
        return next(same, None)

    def _judge(
        self, point: Point, folder: str, changed: Changed, accept_changes: bool
    ) -> Decision:
        summary, entry = read_summary(self.folder / folder), self.points.get(folder, {})
        changes = [f"config changed since: {_describe(changed)}"] if changed else []
        if entry.get("code") != self.code:
            changes.append(f"code changed since: {entry.get('commit')} -> {self.commit}")
        status = summary.get("status", "unfinished")
        if status != "finished":
            why = ": ".join(filter(None, (status, summary.get("cause"))))
            if changes or not (steps := CheckpointSteps(self.folder / folder).agreed_steps()):
                return Decision(point, "again", folder, why)
            return Decision(point, "resume", folder, f"from step {steps[0]}; {why}")
        is_kept = accept_changes or not changes
        return Decision(point, "skip" if is_kept else "again", folder, "; ".join(changes))

    def _settings(self, folder: str) -> Settings | None:
        """The settings that were run there; None if they were never written."""
        try:
            return flatten(read_config(self.folder / folder / EXPERIMENT_FILE))
        except ConfigError:
            return None


def read_points(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries of sweep.json by point folder; empty without that file."""
    path = folder / STATE_FILE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["points"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is damaged ({error}); move it away and the points of this sweep count as "
            f"new, or choose another sweep=NAME"
        ) from error


def code_fingerprint() -> str:
    """A short hash of the sources that decide what a run computes. The commit is no substitute:
    it changes with a README and does not change with an uncommitted edit."""
    files = [pair for pair in code_digests().items() if pair[0].split("/")[0] not in BESIDE_CODE]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:12]


def _free_name(name: str, taken: Sequence[str] | set[str]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    return free


def _describe(changed: Changed, most: int = 3) -> str:
    parts = [f"{key} {old} -> {new}" for key, (old, new) in changed.items()]
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return ", ".join(parts[:most]) + more

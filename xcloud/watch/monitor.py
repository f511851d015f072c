"""Follow a run from outside its ranks: progress line, tracker, summary.json, closing table.

On one machine the process that started the ranks does this; on several, rank 0's machine starts
it as a separate process (python -m xcloud monitor RUN_DIR --parent PID). Both read its
events.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xcloud.base.errors import XcloudError
from xcloud.base.project import MODEL_DIR, commit
from xcloud.job.config import EXPERIMENT_FILE, flatten, read_config, shared_job
from xcloud.job.job import Job
from xcloud.plan.recorded import PREDICTED_FILE, read_timeline
from xcloud.plan.report import PLAN_FILE, predicted_of
from xcloud.record.curves import read_curves
from xcloud.record.events import (
    EVENTS_FILE,
    LOST_LINES_FILE,
    MALFORMED,
    Attempts,
    Event,
    EventReader,
)
from xcloud.record.mlflow_sender import TrackedRun
from xcloud.record.rank_state import SAMPLES_FILE, error_file
from xcloud.record.summary import SUMMARY_FILE, write_summary
from xcloud.record.timeline import timeline_of, write_trace
from xcloud.record.tracking import Status
from xcloud.report.mlflow_view import places_of, prepared_view
from xcloud.report.progress import ProgressLine
from xcloud.report.run_table import print_report
from xcloud.security import leak_meter
from xcloud.security.wire_audit import AUDIT_FILE, compact, join_audit

TRACE_FILE = "timeline.json"
RECORD_WITHIN_S = 10.0

log = logging.getLogger(__name__)


class Monitor:
    """`start()`, `poll()` often, `finish()` once. Nothing here can stop the training."""

    def __init__(self, experiment: Job, params: dict[str, object], run_dir: Path) -> None:
        self.experiment, self.params, self.run_dir = experiment, params, run_dir
        self._reader = EventReader(run_dir / EVENTS_FILE)
        self._heard = False
        self._statistics = experiment.statistics()
        self._progress = ProgressLine(experiment.max_steps)
        self._commit = commit()
        self._num_malformed = 0
        self._shows = True
        self.finished_ranks: set[int] = set()
        self.is_stopped = False  # ended before its time, as it was asked to
        self.trains = False  # the ranks of this attempt have what they go on from

    def start(self, is_again: bool = False) -> None:
        """is_again: in place of a monitor that was lost; else events are of earlier attempts."""
        logging.raiseExceptions = False  # a log on a full disk: no traceback for every line
        self._read_anew(is_again)
        experiment = self.experiment
        tags = {
            "profile": experiment.profile,
            "commit": self._commit,
            "seed": str(experiment.seed),
        }
        if experiment.sweep is not None:
            tags["sweep"] = experiment.sweep
        # A reader and statistics of its own: it may fall behind while its store is down.
        run = TrackedRun(
            experiment.run_name, self.params, tags, self.run_dir, experiment.statistics(),
            experiment.max_steps, prepared_view(),
        )  # fmt: skip
        if not is_again:  # what an earlier attempt ended with is not the end of this one
            self.trains = False
            (self.run_dir / SUMMARY_FILE).unlink(missing_ok=True)
        experiment.tracker.start(run)
        experiment.tracker.artifact(self.run_dir / EXPERIMENT_FILE)

    def poll(self) -> bool:
        """Process new events; return whether any rank has reported, which they do once all have
        met."""
        events = self._reader.poll()
        self._heard = self._heard or bool(events)
        if any(event["event"] == "resume" for event in events):
            self._read_anew(shows=True)
        else:
            self._take_all(events, shows=True)
        return self._heard

    def next_attempt(self) -> None:
        """The ranks are started again, and have not met yet."""
        self.poll()
        self._heard = False

    def _read_anew(self, is_again: bool = False, shows: bool = False) -> None:
        """Take the whole record again, without the steps that were lost. is_again: if the run
        never went on, none of it is of earlier attempts. shows: what is told since it went on."""
        self._statistics = self.experiment.statistics()
        self.finished_ranks, self.is_stopped = set(), False
        path = self.run_dir / EVENTS_FILE
        attempts = Attempts(EventReader(path, warn=False))
        self._reader = EventReader(path, warn=False)
        num_ahead = attempts.num_resumes
        is_earlier = not is_again or num_ahead > 0
        for event in attempts.one_timeline(self._reader):
            if event["event"] == "resume":
                num_ahead -= 1
                is_earlier = num_ahead > 0
            # Of earlier attempts ranks may have stopped; a run that has finished never goes on, so
            # what says so is of this attempt, which may be ahead of this monitor.
            if not (is_earlier and event["event"] == "stop"):
                self._take_all([event], shows and num_ahead == 0)

    def _take_all(self, events: Sequence[Event], shows: bool) -> None:
        for event in events:
            try:
                self._take(event, shows and self._shows)
            except MALFORMED as error:  # it must not end this run
                self._num_malformed += 1
                if self._num_malformed == 1:
                    log.warning("skipped a malformed event (%r): %.200r", error, event)

    def _take(self, event: Event, shows: bool) -> None:
        if event["event"] == "quality":
            # Never in the event: a report may leave the cloud that the samples belong to.
            with contextlib.suppress(OSError, UnicodeDecodeError):
                event["samples_text"] = (self.run_dir / SAMPLES_FILE).read_text("utf-8")
        if event["event"] in ("resume", "phase"):
            self.trains = event.get("name") == "training" or (
                self.trains and event["event"] == "phase"
            )
        totals = self._statistics.feed(event)
        if event["event"] in ("finish", "stop"):
            self.finished_ranks.add(event["rank"])
            self.is_stopped = event["event"] == "stop"
        if shows:
            try:
                self._progress.show(event)
                if totals is not None:
                    self._progress.update(totals)
            except OSError as error:
                self._shows = False
                log.warning("the progress cannot be shown any more: %s", error)

    def lost_lines(self) -> int:
        """Number of lost event lines. Ranks whose "finish" was lost count as finished."""
        try:
            lost = json.loads((self.run_dir / LOST_LINES_FILE).read_text("utf-8"))
        except (OSError, ValueError):
            return 0
        self.finished_ranks.update(lost["finished_ranks"])
        return int(lost["lines"])

    def finish(self, cause: str | None, is_stopped: bool = False) -> dict[str, Any]:
        """Write summary.json, end the tracker's run, print the table. cause: why it ended before
        its time. is_stopped: as it was asked to."""
        self.poll()
        with contextlib.suppress(OSError):
            self._progress.close()
        experiment, tracker = self.experiment, self.experiment.tracker
        pictures = self._draw()
        status: Status = "finished" if cause is None else "stopped" if is_stopped else "failed"
        summary = self._statistics.summary(
            name=experiment.name,
            status=status,
            seed=experiment.seed,
            profile=experiment.profile,
            commit=self._commit,
            cause=cause,
        )
        summary["compression"] = experiment.compression_in_force
        if experiment.strategy_in_force:
            summary["strategy"] = experiment.strategy_in_force
        summary["link"] = experiment.cluster.describe()
        summary["defences"] = experiment.defences_in_force
        summary |= predicted_of(self.run_dir)
        summary["lost_event_lines"] = self.lost_lines() + self._num_malformed
        summary |= self._audit_wire()
        if cause is None:
            summary |= self._measure_leaks()
        summary_path = self.run_dir / SUMMARY_FILE
        try:
            write_summary(summary_path, summary)
        except OSError as error:
            log.error("%s could not be written: %s", summary_path, error)
        files = (SUMMARY_FILE, SAMPLES_FILE, AUDIT_FILE, PLAN_FILE, PREDICTED_FILE)
        kept = [self.run_dir / name for name in files] + pictures
        for path in kept:
            if path.exists():
                tracker.artifact(path)
        tracker.finish(status, summary)
        places: dict[str, object] = {"run folder": self.run_dir}
        if (self.run_dir / MODEL_DIR).is_dir():
            places["model"] = self.run_dir / MODEL_DIR
            if cause is None and (command := experiment.next_command(self.run_dir)) is not None:
                places["next"] = command
        if summary["num_steps"]:  # else there is nothing to compare
            places |= places_of(tracker.recorded())
        print_report(summary, places)
        return summary

    def _audit_wire(self) -> dict[str, Any]:
        """What left each cloud, from the records in this folder (all ranks, on one machine)."""
        try:
            return {"wire": compact(join_audit(self.run_dir))}
        except (XcloudError, OSError, ValueError, KeyError) as error:
            if any(self.run_dir.glob("rank*.wire.json")):
                log.warning("%s is without its %s: %r", self.run_dir, AUDIT_FILE, error)
            return {}  # no rank got as far as writing one

    def _measure_leaks(self) -> dict[str, Any]:
        meter = self.experiment.leak_meter
        if meter is None:
            return {}
        try:
            leakage = leak_meter.flat(leak_meter.measure(self.run_dir))
        except Exception as error:
            log.warning("%s is without its leak figures: %s", self.run_dir, error)
            return {}
        if not meter.keep:
            leak_meter.forget(self.run_dir)
        return leakage

    def _draw(self) -> list[Path]:
        """Draw timeline and pictures of the steps so far; failures give one warning."""
        if not self._statistics.num_steps:
            return []
        experiment = self.experiment
        facts = experiment.facts
        written = []
        try:
            steps = experiment.statistics()  # its totals know of all clouds
            curves = read_curves(self.run_dir / EVENTS_FILE, steps)
            timeline = timeline_of(curves.timeline)
            if timeline is not None:
                write_trace(self.run_dir / TRACE_FILE, timeline, facts)
                written.append(self.run_dir / TRACE_FILE)
            from xcloud.report.pictures import (
                write_pictures,  # only now: matplotlib takes half a second
            )

            title = f"{experiment.name} seed {experiment.seed}, {facts['schedule']}, "
            title += f"link: {facts['link']}, compression: {facts['compression']}"
            foreseen = self.run_dir / PREDICTED_FILE
            predicted = read_timeline(foreseen) if foreseen.exists() else None
            written += write_pictures(self.run_dir, curves, timeline, title, predicted)
        except Exception as error:
            self._statistics.lost_files.append("pictures")
            log.warning("%s is without all its pictures: %r", self.run_dir, error)
        return written


def monitor_of(run_dir: Path, file: Path) -> Monitor:
    config = read_config(file)
    return Monitor(shared_job(config, run_dir), flatten(config), run_dir)


def first_failure(run_dir: Path, rank: int) -> str:
    """The cause of failure of a run on several machines, if known on this machine."""
    found = []
    for path in sorted(run_dir.glob("rank*.error.json")):
        with contextlib.suppress(OSError, ValueError):  # half a file, where the disk is full
            failure, number = json.loads(path.read_text()), path.name.split(".")[0][4:]
            found.append((failure["peer_lost"], f"rank {number}: {failure['message']}"))
    # Whoever has a reason of its own before those that lost it.
    return min(found)[1] if found else f"the run ended before rank {rank} had finished"


def _await(file: Path, parent: int) -> None:
    """As long as the parent is there, RECORD_WITHIN_S at most."""
    give_up_at_s = time.monotonic() + RECORD_WITHIN_S
    while os.getppid() == parent and not file.exists() and time.monotonic() < give_up_at_s:
        time.sleep(0.1)


def main(words: Sequence[str] | None = None) -> int:
    """Follow until every essential rank has finished, or rank 0 is gone."""
    parser = argparse.ArgumentParser(prog="python -m xcloud monitor", description=main.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--experiment", type=Path, required=True, help="the experiment file")
    parser.add_argument("--parent", type=int, required=True, help="process id of rank 0")
    parser.add_argument("--again", action="store_true", help="the first monitor was lost")
    arguments = parser.parse_args(words)
    for number in (signal.SIGINT, signal.SIGTERM):  # torchrun ends rank 0, and this follows
        signal.signal(number, signal.SIG_IGN)
    try:
        monitor = monitor_of(arguments.run_dir, arguments.experiment)
    except XcloudError as error:
        sys.exit(f"xcloud: {error}")
    try:
        return _follow(monitor, arguments.parent, arguments.again)
    except Exception as error:  # without a summary the run would seem to go on
        log.exception("the monitor of %s has failed", arguments.run_dir)
        failed = {"name": monitor.experiment.name, "status": "failed", "quality": {}}
        cause = f"its monitor failed: {error!r:.300}; {EVENTS_FILE} has what the ranks reported"
        write_summary(arguments.run_dir / SUMMARY_FILE, {**failed, "cause": cause})
        return 1


def _follow(monitor: Monitor, parent: int, is_again: bool) -> int:
    monitor.start(is_again)
    essential, run_dir = monitor.experiment.essential_ranks, monitor.run_dir
    record = run_dir / "rank0.wire.json"  # its last file, when all its links have closed
    while os.getppid() == parent and not record.exists():
        if not essential - monitor.finished_ranks:
            break
        monitor.poll()
        monitor.lost_lines()
        time.sleep(0.1)
    # Rank 0 writes its record of what left its cloud once its links have closed.
    _await(record, parent)
    monitor.poll()
    monitor.lost_lines()
    lost = sorted(essential - monitor.finished_ranks)
    if 0 in lost:  # and after it why it ends
        _await(error_file(run_dir, 0), parent)
    cause = first_failure(run_dir, lost[0]) if lost else None
    if monitor.is_stopped and cause is None:
        cause = "interrupted (SIGTERM, SIGUSR1 or Ctrl+C) and saved; the same command goes on"
    monitor.finish(cause, monitor.is_stopped and not lost)
    print(run_dir / SUMMARY_FILE)
    return 1 if lost else 0

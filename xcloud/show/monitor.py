"""Follow a run from outside its ranks: progress line, tracker, calls of the user's command, and at
the end its record.

On one machine the process that started the ranks does this; on several it is a process of its own
(following.py). Both read its events. Nothing here can stop the training.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from xcloud.base.project import commit
from xcloud.job.config import EXPERIMENT_FILE, Settings
from xcloud.record.events import EVENTS_FILE, LOST_LINES_FILE, MALFORMED, Event, EventReader
from xcloud.record.files import SAMPLES_FILE, read_json
from xcloud.record.summary import SUMMARY_FILE, read_summary
from xcloud.show.display import NOTIFIED, ProgressLine, write_record
from xcloud.show.notices import Notices
from xcloud.tracking.tracker import Recording, TrackedRun

log = logging.getLogger(__name__)


class Attempt:
    """An attempt at a run: what the ranks have said of themselves since they were last started.

    is_stopped: True if it ended early on request.
    stop_asked_of: the rank, other than 0, that was asked.
    has_step: True once any rank has made a step.
    trains: True once the ranks have the state from which they resume.
    reports: True once any rank has reported. Ranks report once all have joined.
    stops_count: a rank that says it has stopped has stopped in this attempt.
    """

    def __init__(self) -> None:
        self.finished_ranks: set[int] = set()
        self.is_stopped = False
        self.trains = False
        self.reports = False
        self.has_step = False
        self.stop_asked_of: int | None = None
        self.stops_count = True

    def take(self, event: Event) -> None:
        """Note what an event says of the attempt."""
        kind = event["event"]
        if kind == "resume":
            self.finished_ranks = set()
            self.is_stopped = False
            self.stops_count = True
            self.trains = False
            self.has_step = False
            self.stop_asked_of = None
        elif kind == "phase":
            # From now on the run has the state that it resumes from.
            self.trains |= event.get("name") == "training"
        elif kind in ("step", "fed"):
            self.has_step = True
        elif kind == "stop_asked":
            self.stop_asked_of = event["of"]
        # Events of earlier attempts stand in the same log.
        elif kind == "finish" or (kind == "stop" and self.stops_count):
            self.finished_ranks.add(event["rank"])
            self.is_stopped = kind == "stop"


class Monitor:
    """The follower of a run: `start()` it, `poll()` it often, `finish()` it once."""

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        experiment = settings.job
        self.run_dir = run_dir
        self.experiment = experiment
        self.attempt = Attempt()
        self.num_malformed = 0
        self._statistics = experiment.statistics()
        tags = {"profile": experiment.profile, "commit": commit(), "seed": str(experiment.seed)}
        if experiment.sweep is not None:
            tags["sweep"] = experiment.sweep
        # A collector of its own, since the tracker may fall behind while its store is down.
        # A collector of its own: it may fall behind while its store is down.
        self.run = TrackedRun(
            name=experiment.run_name,
            params=settings.flat,
            tags=tags,
            run_dir=run_dir,
            steps=experiment.statistics().collector,
            num_steps=experiment.max_steps,
        )
        about = {"run": experiment.run_name, "run_dir": str(run_dir.absolute())}
        self._notices = Notices(command=experiment.launch.on_event, about=about)
        self._has_told_of_divergence = False  # in this attempt
        self._reader = EventReader(run_dir / EVENTS_FILE)
        self.past: int | None = None  # events of earlier attempts; None: all that are there
        self._progress: ProgressLine | None = None
        self._recording = Recording()  # until the start
        self._keeps_earlier = False  # the record of an earlier attempt has not been touched yet

    def start(self, is_again: bool = False) -> None:
        """Read what there is and begin the record.

        The record of a finished run stays as it is until the ranks have loaded its state. So a run
        that cannot be trained longer is not harmed by the attempt.

        is_again: True if this monitor replaces one that was lost.
        """
        # logging prints a traceback if its own log can't be written.
        logging.raiseExceptions = False  # a log on a full disk: no traceback for every line
        # Of earlier attempts ranks may have stopped. This one may be ahead of this monitor.
        # All events that are there, so that a resumed run's curves begin at its first step.
        for number, event in enumerate(self._reader):
            is_past = self.past is None or number < self.past
            self.attempt.stops_count = is_again or not is_past
            self._take(event)
            if not self.attempt.stops_count:  # it is of an earlier attempt
                self.attempt.has_step = False
        self._progress = ProgressLine(
            self.experiment.max_steps, next_merge=self.experiment.next_merge
        )
        self.attempt.stops_count = True
        if not is_again:  # how an earlier attempt ended is not the end of this one
            self.attempt.trains = False
        has_record = (self.run_dir / SUMMARY_FILE).exists()
        # A finished run that cannot go on keeps its record.
        self._keeps_earlier = has_record and not is_again
        if not self._keeps_earlier:
            self._begin_record()

    def _begin_record(self) -> None:
        self._keeps_earlier = False
        (self.run_dir / SUMMARY_FILE).unlink(missing_ok=True)
        self._recording = self.experiment.tracker.start(self.run)
        self.keep(self.run_dir / EXPERIMENT_FILE)

    def keep(self, file: Path) -> None:
        """Give a file of the run's folder to the tracker's record, too."""
        self._recording.artifact(file)

    def poll(self) -> bool:
        """Process new events; return whether any rank has reported, which they do once all have
        met."""
        for event in self._reader:
            self.attempt.reports = True
            self._take(event)
        # The ranks have loaded the state: the run goes on.
        if self._keeps_earlier and self.attempt.trains:
            self._begin_record()
        return self.attempt.reports

    def next_attempt(self) -> None:
        """Note that the ranks are started again, and have not met yet."""
        self.poll()
        self.attempt.reports = False
        self._has_told_of_divergence = False

    def _take(self, event: Event) -> None:
        try:
            self.attempt.take(event)
            totals = self._statistics.feed(event)
            # Past events are not shown once more.
            if self._progress is not None:
                self._tell(event)
                self._progress.show(self._with_more(event))
                if totals is not None:
                    self._progress.update(totals)
        # The terminal has gone; the run and its record need none.
        except OSError as error:
            self._progress = None
            log.warning("the progress cannot be shown any more: %s", error)
        # Another cloud may send anything that intake lets through.
        except MALFORMED as error:  # it must not end this run
            self.num_malformed += 1
            if self.num_malformed == 1:
                log.warning("skipped a malformed event (%r): %.200r", error, event)

    def _tell(self, event: Event) -> None:
        """Call the user's command for what an event says of the whole run."""
        kind = event["event"]
        # Each update after the first would say the same.
        if kind == "skipped_update" and not self._has_told_of_divergence:
            self._has_told_of_divergence = True
            self._notices.send("diverged", step=event["step"])
        elif kind == "absence" and event["what"] == "left":
            self._notices.send("cloud_lost", cloud=event["absent"], step=event["step"])
        elif kind == "producer" and event["state"] == "dead":
            self._notices.send("cloud_lost", cloud=event["producer"], step=event["step"])
        elif names := NOTIFIED.get(kind):
            self._notices.send(kind, **{name: event[name] for name in names})
        elif kind == "resume":
            self._has_told_of_divergence = False
            self._notices.send("resumed", step=event["step"])

    def _tell_end(self, status: str, cause: str | None) -> None:
        # A rank that diverged says so only in its error.
        failures = [read_json(path) for path in self.run_dir.glob("rank*.error.json")]
        if cause is not None and any(one.get("kind") == "TrainingDiverged" for one in failures):
            self._notices.send("diverged", step=self._statistics.num_steps, cause=cause)
        self._notices.send("ended", status=status, step=self._statistics.num_steps, cause=cause)
        self._notices.close()

    def _with_more(self, event: Event) -> Event:
        """Return an event with what is shown of it, and never in it: a report may leave the cloud
        that the samples belong to."""
        if event["event"] == "resume":
            return {**event, "steps_again": self._statistics.resumes[-1]["steps_again"]}
        # A sweep has many points, and each point's samples in its folder.
        if event["event"] == "quality" and self.experiment.sweep is None:  # its files have them
            with contextlib.suppress(OSError, UnicodeDecodeError):
                text = (self.run_dir / SAMPLES_FILE).read_text("utf-8")
                return {**event, "samples_text": text}
        return event

    def lost_lines(self) -> int:
        """Return how many event lines were lost. Ranks whose "finish" was lost have finished."""
        lost = read_json(self.run_dir / LOST_LINES_FILE)
        # A rank whose last line was lost on a full disk has finished all the same.
        self.attempt.finished_ranks.update(lost.get("finished_ranks", ()))
        return int(lost.get("lines", 0))

    def finish(
        self, cause: str | None, is_stopped: bool = False, is_raised: bool = False
    ) -> dict[str, Any]:
        """Write summary.json, end the tracker's run, print the table and call the user's command;
        return the summary.

        An attempt that never came to train leaves a finished run's record, and returns that.
        cause: the reason why the run ended early; None if it did not.
        is_stopped: True if the run was asked to end.
        is_raised: True if the caller raises the cause, so that the table need not say it, too.
        """
        # What came since the last look.
        self.poll()
        if self._progress is not None:
            with contextlib.suppress(OSError):
                self._progress.close()
        if cause is None:
            status = "finished"
        else:
            status = "stopped" if is_stopped else "failed"
        # Nothing was trained, so what is there is still true.
        if self._keeps_earlier:
            self._tell_end(status, cause)
            return read_summary(self.run_dir)
        facts = {"status": status, "cause": cause, "commit": self.run.tags["commit"],
                 "lost_event_lines": self.lost_lines() + self.num_malformed,
                 "has_step": self.attempt.has_step, "is_raised": is_raised}  # fmt: skip
        summary = write_record(
            self.experiment,
            run_dir=self.run_dir,
            run=self._statistics,
            recording=self._recording,
            facts=facts,
        )
        self._tell_end(status, cause)
        return summary

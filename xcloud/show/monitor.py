"""Follow a run from outside its ranks: progress line, tracker, calls of the user's command, and at
the end its record.

On one machine the process that started the ranks does this; on several it is a process of its own
(following.py). Both read its events. Nothing here can stop the training.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from xcloud.base.project import MODEL_DIR, commit
from xcloud.feature_list import FIGURES
from xcloud.job.config import EXPERIMENT_FILE, Settings
from xcloud.record.events import EVENTS_FILE, LOST_LINES_FILE, MALFORMED, Event, EventReader
from xcloud.record.files import SAMPLES_FILE, files_of_samples, may_quote_data, read_json
from xcloud.record.summary import SUMMARY_FILE, keep_summary, may_be_lost, read_summary
from xcloud.record.timeline import PLANNED_FILES, TRACE_FILE, predicted_of, write_trace
from xcloud.security.audit import AUDIT_FILE, compact, join_audit
from xcloud.show.display import NOTIFIED, ProgressLine
from xcloud.show.notices import Notices
from xcloud.show.tables import print_report
from xcloud.tracking.tracker import Recording, Status, TrackedRun, note_of

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
        self.past: int | None = None  # events of earlier attempts; None: all that are there
        self._reader = EventReader(run_dir / EVENTS_FILE)
        about = {"run": experiment.run_name, "run_dir": str(run_dir.absolute())}
        self.notices = Notices(command=experiment.launch.on_event, about=about)
        self._has_told_of_divergence = False  # in this attempt
        self._progress: ProgressLine | None = ProgressLine(
            experiment.max_steps, next_merge=experiment.next_merge
        )
        self._statistics = experiment.statistics()
        tags = {"profile": experiment.profile, "commit": commit(), "seed": str(experiment.seed)}
        if experiment.sweep is not None:
            tags["sweep"] = experiment.sweep
        # A collector of its own, since the tracker may fall behind while its store is down.
        self.run = TrackedRun(
            name=experiment.run_name,
            params=settings.flat,
            tags=tags,
            run_dir=run_dir,
            steps=experiment.statistics().collector,
            num_steps=experiment.max_steps,
            files=[run_dir / EXPERIMENT_FILE],
        )
        self._recording: Recording = Recording()  # until the start
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
            self._take(event, is_shown=False)
            if not self.attempt.stops_count:  # it is of an earlier attempt
                self.attempt.has_step = False
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

    def _take(self, event: Event, is_shown: bool = True) -> None:
        try:
            self.attempt.take(event)
            totals = self._statistics.feed(event)
            # Past events are not shown once more.
            if is_shown and self._progress is not None:
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
            self.notices.send("diverged", step=event["step"])
        elif kind == "absence" and event["what"] == "left":
            self.notices.send("cloud_lost", cloud=event["absent"], step=event["step"])
        elif kind == "producer" and event["state"] == "dead":
            self.notices.send("cloud_lost", cloud=event["producer"], step=event["step"])
        elif names := NOTIFIED.get(kind):
            self.notices.send(kind, **{name: event[name] for name in names})
        elif kind == "resume":
            self._has_told_of_divergence = False
            self.notices.send("resumed", step=event["step"])

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
        status: Status = "finished"
        if cause is not None:
            status = "stopped" if is_stopped else "failed"
        # Nothing was trained, so what is there is still true.
        if self._keeps_earlier:
            summary = read_summary(self.run_dir)
        else:
            summary = self._write_record(status, cause, is_raised)
        # A rank that diverged says so only in its error.
        failures = [read_json(path) for path in self.run_dir.glob("rank*.error.json")]
        ended = {"step": self._statistics.num_steps, "cause": cause}
        if cause is not None and any(one.get("kind") == "TrainingDiverged" for one in failures):
            self.notices.send("diverged", **ended)
        self.notices.send("ended", status=status, **ended)
        self.notices.close()
        return summary

    def _write_record(self, status: Status, cause: str | None, is_raised: bool) -> dict[str, Any]:
        """Make the record of the run once, and give it to the folder, pictures, tracker and table;
        return its summary. What cannot be made of it costs one warning, never the rest."""
        job = self.experiment
        run_dir = self.run_dir
        labels = job.labels
        more: dict[str, Any] = {"compression": labels.compression}
        if labels.strategy:
            more["strategy"] = labels.strategy
        more |= {"link": job.cluster.describe(), "defences": labels.defences}
        more |= predicted_of(run_dir)
        more["lost_event_lines"] = self.lost_lines() + self.num_malformed
        # Missing if every rank ended before its links had closed.
        if any(run_dir.glob("rank*.wire.json")):  # else no rank got as far as writing one
            with _may_lack(run_dir, AUDIT_FILE):
                more["wire"] = compact(join_audit(run_dir))
        # What is measured after a run needs a model that has been trained.
        if cause is None:
            with _may_lack(run_dir, "figures that are measured after a run"):
                more |= job.measured(run_dir)
        summary = self._statistics.summary(
            name=job.name, seed=job.seed, profile=job.profile, status=status, cause=cause,
            commit=self.run.tags["commit"],
        )  # fmt: skip
        # Features of this job that no list has, too.
        figures = [*FIGURES, *(one for one in job.figures if one not in FIGURES)]
        summary |= more
        record = self._statistics.record(summary, figures)
        files = [run_dir / name for name in (AUDIT_FILE, *PLANNED_FILES)]
        # Before anything is drawn. What another owner's ranks report may keep one picture from
        # being drawn, and must not cost the others.
        keep_summary(run_dir, summary)
        lost = partial(may_be_lost, run_dir, summary)
        if self._statistics.num_steps:
            drawn = job.drawn
            with lost(TRACE_FILE):
                if record.timeline is not None:
                    write_trace(run_dir / TRACE_FILE, record.timeline, drawn)
                    files.append(run_dir / TRACE_FILE)
            with lost("pictures"):
                from xcloud.show.pictures import write_pictures  # matplotlib takes half a second

                title = f"{job.name} seed {job.seed}, {drawn['schedule']}, "
                title += f"link: {drawn['link']}, compression: {drawn['compression']}"
                files += write_pictures(run_dir, record, title, each=lost)

        tracked = record
        # A tracker may be open to others; the run folder is its owner's.
        if cause is not None and not job.has_public_texts and may_quote_data(run_dir):
            why = f"see {SUMMARY_FILE} in the run folder: it may quote data"
            tracked = record.changed(cause=why)
        else:
            files.insert(0, run_dir / SUMMARY_FILE)
        recording: Recording = self._recording
        for path in [*files, *(run_dir / name for name in files_of_samples(run_dir))]:
            if path.exists():
                recording.artifact(path)
        recording.finish(status, tracked, note_of(tracked, run_dir))

        # In the order in which somebody would look for them.
        places: dict[str, object] = {"run folder": run_dir}
        if (run_dir / MODEL_DIR).is_dir():
            places["model"] = run_dir / MODEL_DIR
            if cause is None and (command := job.next_command(run_dir)) is not None:
                places["next"] = command
        shown = record
        # Whoever called shows the exception, which says it once.
        if is_raised:
            shown = shown.changed(cause=None)
        if cause is not None and not self.attempt.has_step:
            # Else, unless it has finished, its tables would be those of earlier attempts.
            shown = shown.changed(num_steps=0, num_resumes=0, wall_s=None)
        if shown.summary["num_steps"]:  # else there is nothing to compare
            places |= recording.places()
        print_report(shown, places)
        return dict(record.summary)


@contextlib.contextmanager
def _may_lack(run_dir: Path, what: str) -> Iterator[None]:
    try:
        yield
    # Whatever fails here, the run itself has ended as it did.
    except Exception as error:
        log.warning("%s is without its %s: %s", run_dir, what, error)

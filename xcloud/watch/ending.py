"""The record of a run that has ended: pictures, summary.json, what the tracker keeps, the table.
A part that cannot be made costs one warning, never the rest."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xcloud.base.project import MODEL_DIR
from xcloud.job.job import Job
from xcloud.plan.recorded import PLAN_FILE, PREDICTED_FILE, predicted_of, read_predicted
from xcloud.record.files import SAMPLES_FILE, SCORES_FILE
from xcloud.record.summary import SUMMARY_FILE, RunStatistics, write_summary
from xcloud.record.timeline import timeline_of, write_trace
from xcloud.record.tracking import Recording
from xcloud.report.run_table import print_report
from xcloud.security.wire_audit import AUDIT_FILE, compact, join_audit

TRACE_FILE = "timeline.json"

log = logging.getLogger(__name__)


def write_record(
    job: Job, run_dir: Path, run: RunStatistics, recording: Recording, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the summary. facts: status, cause and commit, lost_event_lines."""
    cause, labels = facts["cause"], job.labels
    pictures = _draw(job, run_dir, run) if run.num_steps else []
    known = {name: facts[name] for name in ("status", "cause", "commit")}
    summary = run.summary(name=job.name, seed=job.seed, profile=job.profile, **known)
    summary["compression"] = labels.compression
    if labels.strategy:
        summary["strategy"] = labels.strategy
    summary |= {"link": job.cluster.describe(), "defences": labels.defences}
    summary |= predicted_of(run_dir)
    summary["lost_event_lines"] = facts["lost_event_lines"]
    if any(run_dir.glob("rank*.wire.json")):  # else no rank got as far as writing one
        with _may_lack(run_dir, AUDIT_FILE):
            summary["wire"] = compact(join_audit(run_dir))
    if cause is None and job.leak_meter is not None:
        with _may_lack(run_dir, "leak figures"):
            summary |= job.leak_meter.measure(run_dir)
    try:
        write_summary(run_dir / SUMMARY_FILE, summary)
    except OSError as error:
        log.error("%s could not be written: %s", run_dir / SUMMARY_FILE, error)
    files = (SUMMARY_FILE, SCORES_FILE, SAMPLES_FILE, AUDIT_FILE, PLAN_FILE, PREDICTED_FILE)
    for path in [*(run_dir / name for name in files), *pictures]:
        if path.exists():
            recording.artifact(path)
    recording.finish(facts["status"], summary)
    places: dict[str, object] = {"run folder": run_dir}
    if (run_dir / MODEL_DIR).is_dir():
        places["model"] = run_dir / MODEL_DIR
        if cause is None and (command := job.next_command(run_dir)) is not None:
            places["next"] = command
    if summary["num_steps"]:  # else there is nothing to compare
        places |= recording.places()
    print_report(summary, places)
    return summary


@contextlib.contextmanager
def _may_lack(run_dir: Path, what: str, lost_files: list[str] | None = None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.warning("%s is without its %s: %s", run_dir, what, error)
        if lost_files is not None:
            lost_files.append(what)


def _draw(job: Job, run_dir: Path, run: RunStatistics) -> list[Path]:
    facts, written = facts_of(job), list[Path]()
    with _may_lack(run_dir, "pictures", run.lost_files):
        timeline = timeline_of(run.events("timeline"))
        if timeline is not None:
            write_trace(run_dir / TRACE_FILE, timeline, facts)
            written.append(run_dir / TRACE_FILE)
        from xcloud.report.pictures import write_pictures  # matplotlib takes half a second

        title = f"{job.name} seed {job.seed}, {facts['schedule']}, "
        title += f"link: {facts['link']}, compression: {facts['compression']}"
        predicted = read_predicted(run_dir)
        written += write_pictures(run_dir, run, timeline, title, predicted)
    return written


def facts_of(job: Job) -> dict[str, str]:
    labels = job.labels
    facts = {"schedule": labels.schedule, "link": job.cluster.describe_link(),
             "compression": labels.compression}  # fmt: skip
    return {**facts, "strategy": labels.strategy} if labels.strategy else facts

"""The record of a run that has ended: pictures, summary.json, what the tracker keeps, the table.
A part that cannot be made costs one warning, never the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xcloud.base.errors import XcloudError
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
    cause = facts["cause"]
    pictures = _draw(job, run_dir, run)
    known = {name: facts[name] for name in ("status", "cause", "commit")}
    summary = run.summary(name=job.name, seed=job.seed, profile=job.profile, **known)
    summary["compression"] = job.labels.compression
    if job.labels.strategy:
        summary["strategy"] = job.labels.strategy
    summary["link"] = job.cluster.describe()
    summary["defences"] = job.labels.defences
    summary |= predicted_of(run_dir)
    summary["lost_event_lines"] = facts["lost_event_lines"]
    summary |= _audit_wire(run_dir)
    if cause is None:
        summary |= _measure_leaks(job, run_dir)
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


def _audit_wire(run_dir: Path) -> dict[str, Any]:
    """What left each cloud, from the records in this folder (all ranks, on one machine)."""
    try:
        return {"wire": compact(join_audit(run_dir))}
    except (XcloudError, OSError, ValueError, KeyError) as error:
        if any(run_dir.glob("rank*.wire.json")):
            log.warning("%s is without its %s: %r", run_dir, AUDIT_FILE, error)
        return {}  # no rank got as far as writing one


def _measure_leaks(job: Job, run_dir: Path) -> dict[str, Any]:
    if job.leak_meter is None:
        return {}
    try:
        return job.leak_meter.measure(run_dir)
    except Exception as error:
        log.warning("%s is without its leak figures: %s", run_dir, error)
        return {}


def _draw(job: Job, run_dir: Path, run: RunStatistics) -> list[Path]:
    """Timeline and pictures of the steps so far."""
    if not run.num_steps:
        return []
    facts, written = facts_of(job), []
    try:
        timeline = timeline_of(run.events("timeline"))
        if timeline is not None:
            write_trace(run_dir / TRACE_FILE, timeline, facts)
            written.append(run_dir / TRACE_FILE)
        from xcloud.report.pictures import write_pictures  # matplotlib takes half a second

        title = f"{job.name} seed {job.seed}, {facts['schedule']}, "
        title += f"link: {facts['link']}, compression: {facts['compression']}"
        predicted = read_predicted(run_dir)
        written += write_pictures(run_dir, run, timeline, title, predicted)
    except Exception as error:
        run.lost_files.append("pictures")
        log.warning("%s is without all its pictures: %r", run_dir, error)
    return written


def facts_of(job: Job) -> dict[str, str]:
    """For the pictures of a run."""
    facts = {
        "schedule": job.labels.schedule, "link": job.cluster.describe_link(),
        "compression": job.labels.compression,
    }  # fmt: skip
    return {**facts, "strategy": job.labels.strategy} if job.labels.strategy else facts

"""`python -m xcloud monitor RUN_DIR --experiment FILE`: the monitor of a run on several machines,
which no launcher follows. Rank 0's machine starts it as a separate process."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from xcloud.base.errors import XcloudError
from xcloud.base.run_folder import owned
from xcloud.base.terminal import printable, say
from xcloud.job.given import check_is_run, read_shared
from xcloud.record.events import EVENTS_FILE
from xcloud.record.files import failure_of, rank_file
from xcloud.record.summary import SUMMARY_FILE, write_summary
from xcloud.show.monitor import Monitor

RECORD_WITHIN_S = 10.0
STOPPED = (
    "interrupted (Ctrl+C, SIGTERM, SIGUSR1 or a terminal that has closed) and saved; the same "
    "command resumes it"
)

log = logging.getLogger(__name__)


def first_failure(run_dir: Path, ranks: Iterable[int], lost: int) -> str:
    """The cause of failure of a run on several machines, if known on this machine. lost: a rank
    that has not finished."""
    found = ((rank, failure_of(run_dir, rank)) for rank in ranks)
    # min() below: those with a reason of their own come before those that lost another rank, then
    # the lowest number.
    # Whoever has a reason of its own before those that lost it.
    failures = [(one["peer_lost"], rank, one["message"]) for rank, one in found if one]
    if not failures:
        return f"the run ended before rank {lost} had finished"
    _, rank, message = min(failures)
    return f"rank {rank}: {message}"


def _await(file: Path, parent: int) -> None:
    give_up_at_s = time.monotonic() + RECORD_WITHIN_S
    # Its parent gone means that nobody will write the file.
    while os.getppid() == parent and not file.exists() and time.monotonic() < give_up_at_s:
        time.sleep(0.1)


def main(words: Sequence[str] | None = None) -> int:
    """Follow until every essential rank has finished, or rank 0 is gone."""
    parser = argparse.ArgumentParser(prog="python -m xcloud monitor", description=main.__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--experiment", type=Path, required=True, help="the experiment file")
    parser.add_argument("--parent", type=int, help="process to end with, set by rank 0")
    parser.add_argument(
        "--past", type=int, help="how many events are of earlier attempts, set by rank 0"
    )
    parser.add_argument("--again", action="store_true", help="the first monitor was lost")
    arguments = parser.parse_args(words)
    # The same signal ends rank 0, whose last events are still to come.
    for number in (signal.SIGINT, signal.SIGTERM):  # torchrun ends rank 0, and this follows
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # as well, but for its own children
    run_dir: Path = arguments.run_dir
    with contextlib.ExitStack() as held:
        # Started by hand, so the folder may be in use.
        if arguments.parent is None:  # else rank 0 owns the folder
            check_is_run(run_dir, f"{EVENTS_FILE}*", "events.*.jsonl*")
            held.enter_context(owned(run_dir))
        return _monitor(
            run_dir, experiment=arguments.experiment, parent=arguments.parent,
            is_again=arguments.again, past=arguments.past,
        )  # fmt: skip


def _monitor(
    run_dir: Path, experiment: Path, parent: int | None, is_again: bool, past: int | None
) -> int:
    try:
        monitor = Monitor(read_shared(experiment, run_dir), run_dir)
    except XcloudError as error:
        sys.exit(f"xcloud: {printable(error)}")
    try:
        parent = os.getppid() if parent is None else parent
        return follow(monitor, parent=parent, is_again=is_again, past=0 if is_again else past)
    except Exception as error:  # without a summary the run would seem to be running still
        log.exception("the monitor of %s has failed", run_dir)
        failed = {"name": monitor.experiment.name, "status": "failed", "quality": {}}
        cause = f"its monitor failed: {error!r:.300}; {EVENTS_FILE} has what the ranks reported"
        write_summary(run_dir / SUMMARY_FILE, summary={**failed, "cause": cause})
        return 1


def follow(monitor: Monitor, parent: int, is_again: bool, past: int | None) -> int:
    """Show what the ranks report until the run is over; return the exit code."""
    monitor.past = past
    monitor.start(is_again)
    essential = monitor.experiment.roster.essential
    run_dir = monitor.run_dir
    attempt = monitor.attempt
    # Written once all links have closed, so nothing more comes.
    record = run_dir / "rank0.wire.json"  # its last file, when all its links have closed
    while os.getppid() == parent and not record.exists():
        # All have finished whom the run needs.
        if not essential - attempt.finished_ranks:
            break
        monitor.poll()
        monitor.lost_lines()
        time.sleep(0.1)
    # Rank 0 writes its record of what left its cloud once its links have closed.
    _await(record, parent=parent)
    monitor.poll()
    monitor.lost_lines()
    # Ranks that a run needs and that have said neither "finish" nor "stop".
    lost = sorted(essential - attempt.finished_ranks)
    if 0 in lost:  # and after it why it ends
        _await(rank_file(run_dir, 0, "error.json"), parent=parent)
    ranks = range(monitor.experiment.cluster.num_ranks)
    cause = first_failure(run_dir, ranks, lost=lost[0]) if lost else None
    if attempt.is_stopped and cause is None:
        # Stopped on request is no failure.
        cause = STOPPED
        if (rank := attempt.stop_asked_of) is not None:
            cloud = monitor.experiment.cluster.cloud_of(rank)
            cause = f"stopped by {cloud}, and saved; the same command in every cloud resumes"
    monitor.finish(cause, attempt.is_stopped and not lost)
    say(run_dir / SUMMARY_FILE)
    return 1 if lost else 0

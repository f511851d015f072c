"""How the ranks of a job come together: they meet in a store, all at once or, where clouds may be
late or lost, each as it begins, compare what they run, and go on from what all of them hold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch._C._distributed_c10d import HashStore

from xcloud.cluster.transport import Meeting, meeting_store
from xcloud.job.job import Job
from xcloud.join import restarts
from xcloud.join.agreement import Verdict, agree
from xcloud.join.compared import Table
from xcloud.record.segments import CheckpointSteps
from xcloud.survive.resume import RankCheckpoints, newest_common


def join(
    job: Job, table: Table, rank: int, run_dir: Path, meet: Callable[[], Meeting]
) -> tuple[Meeting, Verdict]:
    """table: what this rank runs. meet: with the others, in a place that is called once this one
    has read its checkpoints. Raises ConfigError in a rank that cannot go on."""
    held = {}
    if CheckpointSteps(run_dir).steps():
        held = RankCheckpoints.of(job, rank, run_dir, table["setting"]).table()
    meeting = meet()
    return meeting, agree(job, meeting, table, held, newest_common)


def meet_here(job: Job, rank: int, run_dir: Path) -> Meeting:
    """On one machine, in a file of the run folder."""
    if job.roster.is_elastic:
        return restarts.meet_any_time(job, rank, run_dir)
    num_ranks, within_s = job.cluster.num_processes, job.cluster.liveness.join_within_s
    store = meeting_store(rank, run_dir, None, 0) if num_ranks > 1 else HashStore()
    return Meeting(rank, num_ranks, store, within_s)

"""What a rank takes part in: what all ranks have agreed to run, in which role, by kind of job. A
further kind of job registers its own here."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from pathlib import Path
from typing import Any

from xcloud.cluster.transport import Meeting
from xcloud.job.experiment import Experiment
from xcloud.job.job import Job
from xcloud.job.one_way import OneWayExperiment
from xcloud.join.agreement import Table, Verdict, agree
from xcloud.rank.one_way.consumer import ConsumerRank
from xcloud.rank.one_way.producer import ProducerRank
from xcloud.rank.role import Role
from xcloud.rank.stage_rank import StageRank
from xcloud.record.files import CheckpointSteps
from xcloud.survive.resume import RankCheckpoints, newest_common


def join(
    job: Job, table: Table, rank: int, run_dir: Path, meet: Callable[[], Meeting]
) -> tuple[Meeting, Verdict]:
    """Compare with the others what is to run and what it goes on from. table: what this rank runs.
    meet: with the others, in a place that is called once this one has read its checkpoints. Raises
    ConfigError in a rank that cannot go on."""
    held = {}
    if CheckpointSteps(run_dir).steps():
        held = RankCheckpoints.of(job, rank, run_dir, table["setting"]).table()
    meeting = meet()
    return meeting, agree(job, meeting, table, held, newest_common)


@singledispatch
def role_of(job: Job, rank: int) -> type[Role[Any]]:
    raise TypeError(f"a {type(job).__name__} has no roles")


@role_of.register
def _(job: Experiment, rank: int) -> type[Role[Any]]:
    return StageRank


@role_of.register
def _(job: OneWayExperiment, rank: int) -> type[Role[Any]]:
    return ConsumerRank if job.cluster.placement(rank).producer is None else ProducerRank

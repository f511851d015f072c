"""Which role each rank of each kind of job has. A further kind of job gets its line here."""

from __future__ import annotations

from typing import Any

from xcloud.job.experiment import Experiment
from xcloud.job.job import Job
from xcloud.job.one_way import OneWayExperiment
from xcloud.rank.one_way.roles import ConsumerRank, LocalRank, ProducerRank
from xcloud.rank.role import Role
from xcloud.rank.stage_rank import StageRank


def role_of(job: Job, rank: int) -> type[Role[Any]]:
    if isinstance(job, OneWayExperiment):
        if job.cluster.form == "local":
            return LocalRank
        return ConsumerRank if job.cluster.placement(rank).producer is None else ProducerRank
    assert isinstance(job, Experiment), f"a {type(job).__name__} has no roles"
    return StageRank

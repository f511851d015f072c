"""Which role each rank of each kind of job has. A further kind of job registers its own here."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from xcloud.job.experiment import Experiment
from xcloud.job.job import Job
from xcloud.job.one_way import OneWayExperiment
from xcloud.rank.one_way.consumer import ConsumerRank
from xcloud.rank.one_way.producer import ProducerRank
from xcloud.rank.role import Role
from xcloud.rank.stage_rank import StageRank


@singledispatch
def role_of(job: Job, rank: int) -> type[Role[Any]]:
    raise TypeError(f"a {type(job).__name__} has no roles")


@role_of.register
def _(job: Experiment, rank: int) -> type[Role[Any]]:
    return StageRank


@role_of.register
def _(job: OneWayExperiment, rank: int) -> type[Role[Any]]:
    return ConsumerRank if job.cluster.placement(rank).producer is None else ProducerRank

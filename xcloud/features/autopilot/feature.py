"""The autopilot as a feature: it changes compression and schedule while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from xcloud.base.errors import ConfigError
from xcloud.comm.compression_plans import Selectable
from xcloud.features.autopilot.pilot import Switching, pilot_of
from xcloud.job.job import PipelineJob
from xcloud.job.needs import Lack, Use, no_plan, one_pipeline, one_update_at_a_time
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.role import RankContext

MAX_CHOICES = 255  # rank 0 sends the number in a byte


def one_rank_at_metered_ends(job: PipelineJob) -> Lack | None:
    layout = job.cluster
    for stage in range(layout.num_stages - 1):
        ends = [layout.ranks_of(s) for s in (stage, stage + 1)]
        wan = layout.wan_between(ends[0][0], peer=ends[1][0])
        most = max(map(len, ends))
        if wan is not None and wan.is_metered and most > 1:
            what = f"after stage {stage} {most} ranks share it (cluster/wan=real)"
            return Lack(setting=what, remedy="give the clouds on both sides one rank each")
    return None


class AutopilotFeature(Feature):
    """A choice, again and again, between compressions and schedules."""

    uses = (
        Use(
            setting="autopilot",
            asked=lambda job: job.autopilot is not None,
            why={
                no_plan: "changes the compression",
                one_pipeline: "decides in one rank for a single pipeline",
                one_update_at_a_time: "changes settings where an update has ended",
                one_rank_at_metered_ends: "measures a real network from one rank at each end",
            },
            without="set autopilot=off",
        ),
    )

    def adjusted(self, job: PipelineJob) -> Mapping[str, Any]:
        assert job.autopilot is not None
        return {"compression": job.autopilot.around(job.compression)}

    def check(self, job: PipelineJob) -> None:
        super().check(job)
        check_choices(job)

    def at_rank(self, context: RankContext[PipelineJob]) -> FeatureAtRank:
        return AutopilotAtRank()


class AutopilotAtRank(FeatureAtRank):
    """The autopilot of one rank: it switches compression and schedule."""

    def hook(self, built: BuiltRank, trainer: Trainer) -> Switching:
        return pilot_of(built.context, trainer=trainer, wiring=built.wiring, memory=built.memory)


def check_choices(job: PipelineJob) -> None:
    """Raise ConfigError if the autopilot may choose what the run's own setting could not be."""
    schedules = job.schedules
    compression = job.compression
    assert isinstance(compression, Selectable)
    num_choices = len(schedules) * len(compression.choices)
    if not 2 <= num_choices <= MAX_CHOICES:
        raise ConfigError(
            f"autopilot has {len(schedules)} schedules ({schedules[0].label}, ...) times "
            f"{len(compression.choices)} compressions ({compression.names[0]}, ...) to choose "
            f"from, the run's own included; there must be 2 to {MAX_CHOICES} together"
        )
    counts = {schedule.num_micro_batches for schedule in schedules}
    by_sample = compression.has_memory or job.training.activation_cache_mb
    if len(counts) > 1 and by_sample and job.cluster.min_micro_batches() > 1:
        raise ConfigError(
            f"autopilot.micro_batches: with {min(counts)} to {max(counts)} micro-batches a sample "
            "would not stay with its ranks, between which a memory of the compression or "
            "training.activation_cache_mb is kept; give each stage one rank, or leave either out"
        )
    for schedule in schedules[1:]:
        own = next(iter(compression.choices.values()))
        try:  # all checks of a run with that number throughout
            replace(job, schedule=schedule, compression=own, autopilot=None)
        except ConfigError as error:
            raise ConfigError(f"autopilot may choose {schedule.label}, but {error}") from error

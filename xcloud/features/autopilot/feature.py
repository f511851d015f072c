"""The autopilot as a feature: it changes compression and schedule while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xcloud.features.autopilot.pilot import RunPilot, pilot_of
from xcloud.features.autopilot.settings import Autopilot
from xcloud.job.job import PipelineJob
from xcloud.job.needs import Lack, Use, no_plan, one_pipeline, one_update_at_a_time
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.role import RankContext
from xcloud.rank.switching import check_choices


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
            asked=lambda job: isinstance(job.autopilot, Autopilot),
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
        assert isinstance(job.autopilot, Autopilot)
        return {"compression": job.autopilot.around(job.compression)}

    def check(self, job: PipelineJob) -> None:
        super().check(job)
        check_choices(job)

    def at_rank(self, context: RankContext[PipelineJob]) -> FeatureAtRank:
        return AutopilotAtRank()


class AutopilotAtRank(FeatureAtRank):
    """The autopilot of one rank: it switches compression and schedule."""

    def hook(self, built: BuiltRank, trainer: Trainer) -> RunPilot:
        return pilot_of(built.context, trainer=trainer, wiring=built.wiring)

"""Sharding as a feature: a cloud's ranks share the parameters of their stages out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from xcloud.base.errors import ConfigError
from xcloud.contracts.model import BuildContext
from xcloud.features.sharding.sharder import Sharder
from xcloud.job.job import PipelineJob
from xcloud.job.needs import (
    Conflict,
    FeatureUse,
    every_update_together,
    no_noise,
    plain,
    sharding_clouds,
    unpacked_weights,
    untied_ends,
)
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.freed_memory import return_freed_memory
from xcloud.pipeline.muon import Muon
from xcloud.pipeline.pipeline import Pipeline
from xcloud.pipeline.schedule import Schedule, rank_actions, split_backwards
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.role import RankContext

_LARGE_BYTES = 1 << 18  # tensors from here on have pages of their own


def equal_shards_in_step(job: PipelineJob) -> Conflict | None:
    """Return a lack where clouds shard the same stage differently, or a stage over one rank.

    Ranks that gather parameters together compute in step; raises ConfigError itself where the
    schedule does not let them.
    """
    layout = job.cluster
    for name, cloud in layout.clouds.items():
        for stage in cloud.stages or () if cloud.shard else ():
            # Replicas average what each rank holds with the rank of the same number elsewhere:
            # parts must be cut alike in all clouds.
            held = {
                other_name: (other.shard, len(layout.ranks_of(stage, replica=other.replica)))
                for other_name, other in layout.clouds.items()
                if stage in (other.stages or ())
            }
            if len(set(held.values())) > 1:
                what = f"stage {stage} is held as (shard, ranks) {held}"
                return Conflict(
                    setting=what, remedy="give these clouds the same num_ranks and shard"
                )
            if held[name][1] < 2:
                what = f"stage {stage} is held by one rank"
                return Conflict(
                    setting=what, remedy=f"give the cloud more (cluster.clouds.{name}.num_ranks)"
                )
            # A rank whose turn comes while the others compute another stage would wait for them in
            # a gather that they never enter.
            turns = [
                {s: layout.turn(s, rank) for s in layout.placement(rank).stages}
                for rank in layout.ranks_in(name)
            ]
            holders = [own for own in turns if stage in own]
            schedule = job.schedule.for_lanes(layout.num_stages, num_lanes=layout.num_lanes)
            check_in_step(
                schedule,
                num_stages=layout.num_stages,
                turns=holders,
                what=f"cluster.clouds.{name}",
            )
    return None


def check_in_step(
    schedule: Schedule, num_stages: int, turns: Sequence[Mapping[int, tuple[int, int]]], what: str
) -> None:
    """Raise ConfigError unless the schedule has all these ranks do the same in turn, each with its
    own micro-batches, and computes their backwards at once.

    turns: the turns of each rank, by stage; see ClusterLayout.turn.
    what: the setting of their cloud, for the message.
    """
    orders = [
        rank_actions(schedule, stages=sorted(own), num_stages=num_stages, turn_of=dict(own))
        for own in turns
    ]
    if any(map(split_backwards, orders)):
        raise ConfigError(
            f"{what}.shard: {schedule.label} puts off the gradients of weights, but gathered "
            "parameters are dropped when their backward ends; choose "
            "schedule=one_forward_one_backward or gpipe, or leave shard out"
        )
    if len({tuple((a.kind, a.stage) for a in actions) for actions in orders}) > 1:
        raise ConfigError(
            f"{what}.shard: ranks that gather parameters together must compute in step, and "
            f"{schedule.label} does not deal {schedule.num_micro_batches} micro-batches evenly to "
            f"{len(turns)} ranks; make schedule.num_micro_batches a multiple of {len(turns)}"
        )


matrices_in_parts = plain(
    lambda job: isinstance(job.training.optimizer, Muon),
    setting="training/optimizer=muon moves a matrix by the whole of its gradient",
    remedy="leave training/optimizer out (AdamW)",
)


class Sharding(Feature):
    """A stage of which each rank keeps a part of every parameter."""

    uses = (
        FeatureUse(
            setting="cluster.clouds.{0[0]}.shard",
            asked=sharding_clouds,
            why={
                untied_ends: "shards gradients over ranks",
                unpacked_weights: "shards parameters over ranks",
                every_update_together: "shards parameters and gradients over ranks",
                equal_shards_in_step: "averages what each rank holds with ranks that hold the "
                "same",
                no_noise: "shards gradients over ranks",
                matrices_in_parts: "leaves each rank a part of every matrix",
            },
            without="leave shard out",
        ),
    )

    def at_rank(self, context: RankContext[PipelineJob]) -> FeatureAtRank | None:
        cloud = context.job.cluster.cloud_of(context.rank)
        if cloud in sharding_clouds(context.job):
            return ShardingAtRank(context, self)
        return None


class ShardingAtRank(FeatureAtRank):
    """The sharders of the stages of one rank."""

    def __init__(self, context: RankContext[PipelineJob], feature: Feature) -> None:
        super().__init__(context, feature)
        self._sharders: dict[int, Sharder] = {}
        # Before any stage is built, so that the process gives back blocks that were whole.
        return_freed_memory(context.device, num_bytes=_LARGE_BYTES)

    def build_context(self, stage: int, group: RankGroup, context: BuildContext) -> BuildContext:
        sharder = Sharder(group, self.context.device, note=self.context.reporter.note)
        self._sharders[stage] = sharder
        return replace(context, deal=sharder.block)

    def complete(self, built: BuiltRank, pipeline: Pipeline) -> None:
        for stage, sharder in self._sharders.items():
            sharder.rest(built.stages[stage])

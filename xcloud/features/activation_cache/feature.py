"""The activation cache as a feature: rows of frozen parts cross once, not in every epoch."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from xcloud.features.activation_cache.cache import (
    MEGABYTE,
    CacheReport,
    CachingPipeline,
    activation_caches,
)
from xcloud.features.activation_cache.price import over_epochs
from xcloud.job.job import PipelineJob
from xcloud.job.needs import (
    Conflict,
    FeatureUse,
    all_clouds_stay,
    compression_changes_rows,
    one_update_at_a_time,
    plain,
    sharding_clouds,
)
from xcloud.pipeline.trainer import Trainer
from xcloud.pipeline.wiring import MakeReceiver
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.role import RankContext
from xcloud.simulator.costs import Profile
from xcloud.simulator.plan import Plan
from xcloud.simulator.pricing import OverEpochs, Pricer

rows_may_be_kept = plain(
    lambda job: not job.security.may_keep_rows,
    setting="security.may_keep_rows=false forbids it",
    remedy="set security.may_keep_rows=true",
)


def constant_boundary(job: PipelineJob) -> Conflict | None:
    if job.cached_boundaries:
        return None
    trained = {True: "something before it is trained", False: "dropout is active before it"}
    reasons = "; ".join(
        f"at boundary {stage} {trained[boundary.gradient_returns]}"
        for stage, boundary in job.boundaries.items()
        if job.cluster.leaves_cloud(stage) and not boundary.is_constant
    )
    none_leaves = f"none leaves its cloud with strategy={job.strategy.name}"
    setting = f"no boundary between clouds has those ({reasons or none_leaves})"
    if not hasattr(job.model, "split"):
        more = ", and no setting of this model freezes all that lies before one"
        return Conflict(setting=setting + more, remedy="")
    remedy = "freeze what lies before one (model.split.layer and model.split.freeze_bottom)"
    return Conflict(setting, remedy)


def kept_stages_whole(job: PipelineJob) -> Conflict | None:
    """Return a lack where a stage is sharded whose rows are kept.

    The ranks of a sharded stage must compute in step, whatever each of them has kept.
    """
    last = max(job.cached_boundaries, default=-1)
    for name in sharding_clouds(job):
        # Every stage up to the last cached boundary leaves out samples, also those that lie
        # behind an earlier one.
        if min(job.cluster.clouds[name].stages or ()) <= last:
            what = f"the ranks of cluster.clouds.{name}, which has shard, must compute in step"
            return Conflict(setting=what, remedy="leave shard out")
    return None


def rows_arrive_alike(job: PipelineJob) -> Conflict | None:
    """Return a lack where the same row would not arrive as the same values in every epoch."""
    for stage in job.cached_boundaries:
        for replica in range(job.cluster.num_replicas):
            if (defence := job.defences_at(stage, replica).get("forward")) is not None:
                what = f"security.defences.forward={defence.label} adds new noise in every epoch"
                return Conflict(
                    setting=f"{what}, which would no longer protect", remedy="leave it out"
                )
        if (lack := compression_changes_rows(job, stage)) is not None:
            return lack
    return None


class CachingAtRank(FeatureAtRank):
    """The caches at the boundaries of one rank."""

    def __init__(self, context: RankContext[PipelineJob], feature: Feature) -> None:
        super().__init__(context, feature)
        job = context.job
        self._has_boundary = bool(job.cached_boundaries)
        if self._has_boundary:
            self.resumed = "the activation cache is not checkpointed: cached rows cross again"
        self._caches = activation_caches(
            job.cluster,
            boundaries=job.boundaries,
            rank=context.rank,
            max_bytes=round(job.training.activation_cache_mb * MEGABYTE),
        )
        if self._caches:
            self.pipeline = partial(CachingPipeline, self._caches)

    def receiver(self, make: MakeReceiver) -> MakeReceiver:
        return partial(self._caches.receiver, make)

    def observer(self, built: BuiltRank, trainer: Trainer) -> CacheReport | None:
        if not self._has_boundary:
            return None
        channels = built.wiring.boundaries.channels.values()
        return CacheReport(channels, reporter=built.context.reporter)


class ActivationCaching(Feature):
    """A store of rows in the cloud that received them."""

    at_work = CachingAtRank

    uses = (
        FeatureUse(
            setting="training.activation_cache_mb={}",
            asked=lambda job: job.training.activation_cache_mb,
            why={
                rows_may_be_kept: "keeps rows of another cloud",
                all_clouds_stay: "relies on what every cloud has kept",
                constant_boundary: "keeps rows that are the same in every epoch",
                rows_arrive_alike: "keeps rows as they arrived in the first epoch",
                kept_stages_whole: "leaves out what a rank need not compute again",
                one_update_at_a_time: "looks at the batch of one update",
            },
            without="set it to 0",
            reads_model=True,
        ),
    )

    left_out_of_trials = MappingProxyType({"training.activation_cache_mb": 0})
    headline = "keeps up to {job.training.activation_cache_mb} MB of frozen rows"

    def price_lacks(self, profile: Profile) -> str:
        if profile.train_samples:
            return ""
        return "it does not say how many samples there are; the first epoch alone is predicted"

    def over_epochs(self, job: PipelineJob, pricer: Pricer, plan: Plan) -> OverEpochs | None:
        training = job.training
        num_samples = pricer.profile.train_samples
        if not num_samples:
            return None
        return over_epochs(
            pricer,
            plan=plan,
            max_bytes=training.activation_cache_mb * MEGABYTE,
            num_samples=num_samples,
            num_steps=training.max_steps,
        )

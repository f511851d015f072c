"""Replicas as a feature: several clouds train the same model, and average it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations

from torch import Tensor, nn

from xcloud.contracts.model import ModelOfParts, TaskData
from xcloud.features.replicas.averaging import ReplicaLinks
from xcloud.features.replicas.links import replica_links
from xcloud.features.replicas.replicas import Replicas
from xcloud.job.job import PipelineJob
from xcloud.job.leaving import Outbound
from xcloud.job.needs import Conflict, FeatureUse
from xcloud.pipeline.batch_plan import cut, samples_of_replica
from xcloud.pipeline.exchange import Exchange, RankGroup
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank, MakeGuard, Watch
from xcloud.record.reporter import Reporter


def self_correcting_compressor(job: PipelineJob) -> Conflict | None:
    """Return a lack where replicas average with a compressor that needs feedback.

    It is asked before any rank has tensors to choose for; compressors chosen by a tensor's name
    are checked by the ranks.
    """
    # A vector and a matrix: choices by shape (PerTensor) differ between these two.
    for shape in ((2,), (2, 2)):
        chosen = job.compression.for_tensor("", shape)
        if chosen.feedback == "needed":
            return Conflict(
                setting=f"compression averages with {chosen.label}, which loses the same part "
                "of every average",
                remedy="choose a compressor that needs no feedback "
                "(docs/strategies.md lists them)",
            )
    return None


class AveragingAtRank(FeatureAtRank):
    """The links of one rank to its counterparts in the other replicas."""

    def exchange(self, built: BuiltRank, watch: Watch | None, guard: MakeGuard | None) -> Exchange:
        job = built.context.job
        wiring = built.wiring
        links = replica_links(
            wiring.ends, layout=job.cluster, device=built.context.device, rejoin=wiring.rejoin
        )
        wiring.averaging.append(links)
        return replicas_exchange(
            job,
            data=built.data,
            links=links,
            group=wiring.groups[min(built.stages)],  # all stages of a rank have the same ranks
            stages=built.stages,
            reporter=built.context.reporter,
            watch=watch,
            guard=guard,
        )


class ReplicaAveraging(Feature):
    """An average of gradients or parameters over replicas of the pipeline."""

    at_work = AveragingAtRank

    uses = (
        FeatureUse(
            setting="strategy.averaging.feedback=false",
            asked=lambda job: (
                job.cluster.num_replicas > 1
                and job.strategy.averaging is not None
                and not job.strategy.averaging.feedback
            ),
            why={self_correcting_compressor: "does not add what a message lost to the next one"},
            without="set feedback to true",
        ),
    )

    def is_used(self, job: PipelineJob) -> bool:
        return job.cluster.num_replicas > 1

    def leaving(self, job: PipelineJob) -> Iterator[Outbound]:
        for stage in range(job.cluster.num_stages):
            yield from _averaged_stage(job, stage)


def _averaged_stage(job: PipelineJob, stage: int) -> Iterator[Outbound]:
    """Yield the messages by which replicas in different clouds share what they have learned."""
    layout = job.cluster
    traits = job.strategy.traits
    label = job.compression.averaged.averaging_choice.label
    often = f"once in {traits.every} steps" if traits.every != 1 else "once a step"
    parts = f"stage {stage}"
    if isinstance(job.model, ModelOfParts):
        parts = ", ".join(sorted(job.model.parts(stage, layout.num_stages)))
    what = "weight changes" if traits.trains_locally else "gradients"
    what = f"{what} of all that is trained in {parts}, compressed by {label}"
    first, *others = (layout.stage_cloud(stage, replica=r) for r in range(layout.num_replicas))
    if not traits.is_elastic:
        for here, there in permutations([first, *others], 2):
            yield Outbound(sender=here, to=there, kind="averaging", what=what, how_often=often)
        return
    for cloud in others:  # the first cloud merges for all
        yield Outbound(sender=cloud, to=first, kind="averaging", what=what, how_often=often)
        merged = f"merged {what}; to a cloud that comes later the weights themselves"
        yield Outbound(sender=first, to=cloud, kind="averaging", what=merged, how_often=often)


def replicas_exchange(
    job: PipelineJob,
    data: TaskData,
    links: ReplicaLinks,
    group: RankGroup,
    stages: Mapping[int, nn.Module],
    reporter: Reporter,
    watch: Watch | None,
    guard: MakeGuard | None,
) -> Exchange:
    """Build the exchange of a rank with its counterparts in the other replicas.

    group: the ranks of this replica that hold the same stages.
    watch, guard: see Replicas.
    """
    assert job.strategy.averaging is not None
    # Every replica knows all replicas' samples from the seed, and so what each can weigh.
    plan = job.batch_plan(data.num_samples("train"))
    num_micro_batches = job.schedule.num_micro_batches
    num_pieces = num_micro_batches * job.training.accumulate_steps
    num_replicas = job.cluster.num_replicas

    def samples(replica: int, step: int) -> Tensor:
        pieces = cut(plan.ids(step), num_pieces)
        return samples_of_replica(pieces, num_micro_batches, replica, of=num_replicas)

    replicas = Replicas(
        links,
        group,
        stages,
        choose=job.compression.for_tensor,
        seed=job.seed,
        last_step=job.max_steps,
        # Update 1 stands for all: batches keep their size.
        num_samples=[len(samples(replica, 1)) for replica in range(num_replicas)],
        weight=lambda replica, step: data.weight(samples(replica, step)),
        reporter=reporter,
        watch=watch,
        guard=guard,
    )
    return job.strategy.averaging.join(replicas)

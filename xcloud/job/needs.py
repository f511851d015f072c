"""Checks of what features need of a job.

Each need is a function of the job that names the setting that stands against it, or finds none;
none is asked for a feature that is off. A new feature is one entry at the end and one line in
experiment.py, and no other feature knows of it. What an object needs of what it is built with (a
strategy of its cluster) it checks there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Selectable
from xcloud.comm.compressor import decodes_rows_alone
from xcloud.comm.memory import NoMemory
from xcloud.job.job import PipelineJob
from xcloud.pipeline.schedule import check_in_step, put_off
from xcloud.security.defences import LABEL

MAX_CHOICES = 255  # rank 0 sends the number in a byte


class Lack(NamedTuple):
    """A setting that stands against a need.

    setting: which one, with its value, in words.
    remedy: what to do.
    """

    setting: str
    remedy: str


Need = Callable[[PipelineJob], Lack | None]


def plain(is_lacking: Callable[[PipelineJob], bool], setting: str, remedy: str) -> Need:
    """Make a need of one condition.

    setting: {job} in it is the job.
    """
    return lambda job: Lack(setting.format(job=job), remedy) if is_lacking(job) else None


no_plan = plain(
    lambda job: job.plan is not None,
    "plan= prices one compression for the whole run",
    remedy="leave plan= out",
)
one_pipeline = plain(
    lambda job: job.cluster.num_replicas > 1,
    "strategy={job.strategy.name} makes {job.cluster.num_replicas} of it",
    remedy="choose strategy=pipeline",
)
several_replicas = plain(
    lambda job: job.cluster.num_replicas == 1,
    "here is one replica",
    remedy="choose strategy=data_parallel or local_updates",
)
every_update_together = plain(
    lambda job: job.strategy.traits.trains_locally,
    "strategy={job.strategy.name} brings whole replicas together from time to time",
    remedy="choose one that averages gradients (strategy=data_parallel)",
)
all_clouds_stay = plain(
    lambda job: job.strategy.traits.is_elastic,
    "strategy={job.strategy.name} lets clouds be late, leave and come back",
    remedy="set strategy.averaging.late=wait and leave=fail",
)
no_privacy = plain(
    lambda job: job.security.privacy is not None,
    "security.privacy noises them apart and bounds gradients of whole stages",
    remedy="set security/privacy=none",
)
untied_ends = plain(
    lambda job: job.ties_ends,
    "model.embeddings=tie exchanges whole ones between both ends",
    remedy="take model.embeddings=untie or freeze",
)
whole_stages = plain(
    lambda job: any(cloud.shard for cloud in job.cluster.clouds.values()),
    "cluster.clouds.*.shard leaves each rank sums of a part of a stage",
    remedy="leave shard out",
)
noise_without_labels = plain(
    lambda job: any(d and d.needs_labels for d in [job.security.defences.get("forward")]),
    "it needs labels, which are not available there",
    remedy="use it backward",
)
whole_replicas = plain(
    lambda job: any(map(job.cluster.leaves_cloud, range(job.cluster.num_stages - 1))),
    "this cluster cuts the model between clouds, which pass each sample's activations and "
    "gradients on without that noise, so its epsilon would not hold there",
    remedy="keep each replica in one cloud (strategy=data_parallel), noise what crosses "
    "(security/defences)",
)
one_sample_each = plain(
    lambda job: job.training.batch_size != job.num_pieces,
    "training.batch_size is {job.training.batch_size} and there are {job.num_pieces} "
    "micro-batches (schedule.num_micro_batches * training.accumulate_steps)",
    remedy="make them equal, most cheaply by training.accumulate_steps",
)
rows_may_be_kept = plain(
    lambda job: not job.security.may_keep_rows,
    "security.may_keep_rows=false forbids it",
    remedy="set security.may_keep_rows=true",
)


def whole_backward(job: PipelineJob) -> Lack | None:
    num_stages = job.cluster.num_stages
    if not any(put_off(job.schedule.actions(stage, num_stages)) for stage in range(num_stages)):
        return None
    remedy = "choose schedule=one_forward_one_backward or gpipe"
    return Lack(f"{job.schedule.label} puts off those of weights", remedy)


def one_rank_at_metered_ends(job: PipelineJob) -> Lack | None:
    layout = job.cluster
    for stage in range(layout.num_stages - 1):
        ends = [layout.ranks_of(s) for s in (stage, stage + 1)]
        wan = layout.wan_between(ends[0][0], ends[1][0])
        most = max(map(len, ends))
        if wan is not None and wan.is_metered and most > 1:
            what = f"after stage {stage} {most} ranks share it (cluster/wan=real)"
            return Lack(what, "give the clouds on both sides one rank each")
    return None


def self_correcting_compressor(job: PipelineJob) -> Lack | None:
    """Return a lack where replicas average with a compressor that needs feedback.

    It is asked before any rank has tensors to choose for; compressors chosen by a tensor's name
    are checked by the ranks.
    """
    for shape in ((2,), (2, 2)):
        chosen = job.compression.for_tensor("", shape)
        if chosen.feedback == "needed":
            return Lack(
                f"compression averages with {chosen.label}, which leaves out the same part again "
                "and again",
                "choose a compressor that needs no feedback (docs/strategies.md lists them)",
            )
    return None


def labels_where_gradients_leave(job: PipelineJob) -> Lack | None:
    layout = job.cluster
    for replica in range(layout.num_replicas):
        for stage in range(layout.num_stages - 1):
            acting = job.defences_at(stage, replica).get("backward")
            if acting is None or not acting.needs_labels:
                continue
            for rank in layout.ranks_of(stage + 1, replica):
                if LABEL not in job.fields_of(rank):
                    cloud = layout.placement(rank).cloud
                    return Lack(
                        f"there are none in rank {rank} of cloud {cloud!r}",
                        "let its ranks hold the last stage too (one_stage_per_rank: false)",
                    )
    return None


def words_may_be_at_both_ends(job: PipelineJob) -> Lack | None:
    """Return a lack where gradients would show words in a cloud where these may not be.

    The gradient of the embeddings shows which words are in a batch, and that of the head which are
    to be predicted.
    """
    layout = job.cluster
    for replica in range(layout.num_replicas):
        first, last = (layout.stage_cloud(s, replica) for s in (0, layout.num_stages - 1))
        for name, cloud in (("text", last), (LABEL, first)):
            holders = job.security.holders.get(name)
            if first != last and holders is not None and cloud not in holders:
                return Lack(
                    f"cloud {cloud!r} would get gradients that show which words are in {name!r}, "
                    f"and security.holders.{name} keeps these in {', '.join(holders)}",
                    "put both ends of the model into one cloud (cluster=u_shape)",
                )
    return None


def equal_shards_in_step(job: PipelineJob) -> Lack | None:
    """Return a lack where clouds shard the same stage differently, or a stage over one rank.

    Ranks that gather parameters together compute in step; raises ConfigError itself where the
    schedule does not let them.
    """
    layout = job.cluster
    for name, cloud in layout.clouds.items():
        for stage in cloud.stages or () if cloud.shard else ():
            held = {
                other_name: (other.shard, len(layout.ranks_of(stage, other.replica)))
                for other_name, other in layout.clouds.items()
                if stage in (other.stages or ())
            }
            if len(set(held.values())) > 1:
                what = f"stage {stage} is held as (shard, ranks) {held}"
                return Lack(what, "give these clouds the same num_ranks and shard")
            if held[name][1] < 2:
                what = f"stage {stage} is held by one rank"
                return Lack(what, f"give the cloud more (cluster.clouds.{name}.num_ranks)")
            turns = [
                {s: layout.turn(s, rank) for s in layout.placement(rank).stages}
                for rank in layout.ranks_in(name)
            ]
            holders = [own for own in turns if stage in own]
            schedule = job.schedule.for_lanes(layout.num_stages, layout.num_lanes)
            check_in_step(
                schedule, layout.num_stages, turns=holders, what=f"cluster.clouds.{name}"
            )
    return None


def constant_boundary(job: PipelineJob) -> Lack | None:
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
        return Lack(setting + more, "")
    remedy = "freeze what lies before one (model.split.layer and model.split.freeze_bottom)"
    return Lack(setting, remedy)


def kept_stages_whole(job: PipelineJob) -> Lack | None:
    """Return a lack where a stage is sharded whose rows are kept.

    The ranks of a sharded stage must compute in step, whatever each of them has kept.
    """
    last = max(job.cached_boundaries, default=-1)
    for name, cloud in job.cluster.clouds.items():
        if cloud.shard and min(cloud.stages or ()) <= last:
            what = f"the ranks of cluster.clouds.{name}, which has shard, must compute in step"
            return Lack(what, "leave shard out")
    return None


def rows_arrive_alike(job: PipelineJob) -> Lack | None:
    """Return a lack where the same row would not arrive as the same values in every epoch."""
    boundaries = job.boundaries
    for stage in job.cached_boundaries:
        for replica in range(job.cluster.num_replicas):
            if (defence := job.defences_at(stage, replica).get("forward")) is not None:
                what = f"security.defences.forward={defence.label} adds new noise in every epoch"
                return Lack(f"{what}, which would no longer protect", "leave it out")
        compression = job.compression.at_boundary(stage)
        if not isinstance(compression, Compression):
            what = f"compression changes during the run ({compression.label})"
            return Lack(what, "take one compression for all of it")
        if not isinstance(compression.forward_memory, NoMemory):
            memory = compression.forward_memory.label
            what = f"compression.forward_memory ({memory}) changes rows from epoch to epoch"
            return Lack(what, "leave it out")
        for field in boundaries[stage].fields:
            width = math.prod(field.features)
            floats = field.dtype.is_floating_point
            if floats and not decodes_rows_alone(compression.forward, width):
                return Lack(
                    f"compression.forward={compression.forward.label} makes of the same row "
                    "another one in each message (it draws, remembers, or looks at several rows "
                    "at once)",
                    f"take none, fp16, bf16 or integers whose block divides {width}",
                )
    return None


def check_boundaries(job: PipelineJob) -> None:
    num_stages = job.cluster.num_stages
    if (boundary := max(job.compression.boundaries)) >= num_stages - 1:
        raise ConfigError(
            f"compression.boundary_{boundary}: there is no such boundary; this cluster has "
            f"{num_stages} stages, so boundaries 0 to {num_stages - 2}"
        )


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


@dataclass(frozen=True)
class Feature:
    """A feature, and what it needs of a job.

    name: as its setting is written, {} in place of what says that a job uses it.
    why: by need, what the feature does that needs it.
    without: how to run without the feature.
    """

    name: str
    why: Mapping[Need, str]
    without: str

    def check(self, job: PipelineJob, used: object) -> None:
        for need, why in self.why.items():
            if (lack := need(job)) is not None:
                remedies = ", or ".join(filter(None, (lack.remedy, self.without)))
                name = self.name.format(used)
                raise ConfigError(f"{name} {why}, but {lack.setting}: {remedies}")


AUTOPILOT = Feature(
    "autopilot",
    why={
        no_plan: "changes the compression",
        one_pipeline: "decides in one rank for a single pipeline",
        one_rank_at_metered_ends: "measures a real network from one rank at each end",
    },
    without="set autopilot=off",
)

NO_FEEDBACK = Feature(
    "strategy.averaging.feedback=false",
    why={self_correcting_compressor: "adds nothing of what a message left out to the next one"},
    without="set feedback to true",
)

TIED_ENDS = Feature(
    "model.embeddings=tie",
    why={
        no_privacy: "hands the other end gradients as they are",
        every_update_together: "needs both ends in every update",
        words_may_be_at_both_ends: "sends gradients to the other end",
    },
    without="take model.embeddings=untie or freeze",
)

SHARDS = Feature(
    "cluster.clouds.{0[0]}.shard",
    why={
        untied_ends: "shards gradients over ranks",
        every_update_together: "shards parameters and gradients over ranks",
        equal_shards_in_step: "averages what each rank holds with ranks that hold the same",
        no_privacy: "shards gradients over ranks",
    },
    without="leave shard out",
)

NOISE_BACKWARD = Feature(
    "security.defences.backward={.label}",
    why={labels_where_gradients_leave: "needs labels where gradients leave a cloud"},
    without="choose security/defences/backward=max_norm or gaussian_noise",
)

NOISE_FORWARD = Feature(
    "security.defences.forward={.label}",
    why={noise_without_labels: "acts at evaluation too"},
    without="choose security/defences/forward=max_norm or gaussian_noise",
)

PRIVATE_CLOUD = Feature(
    "security/privacy=cloud",
    why={
        several_replicas: "noises what replicas in several clouds give to an averaging",
        all_clouds_stay: "gives no bound if what one merge leaves out is sent with the next",
    },
    without="choose security/privacy=sample",
)

PRIVATE_SAMPLE = Feature(
    "security/privacy=sample",
    why={
        whole_stages: "clips each sample's gradient in one rank",
        whole_replicas: "noises parameter gradients",
        whole_backward: "clips each sample's gradient before the next one's is computed",
        one_sample_each: "needs one sample in every micro-batch",
    },
    without="set security/privacy=none",
)

ACTIVATION_CACHE = Feature(
    "training.activation_cache_mb={}",
    why={
        rows_may_be_kept: "keeps rows of another cloud",
        all_clouds_stay: "relies on what every cloud has kept",
        constant_boundary: "keeps rows that are the same in every epoch",
        rows_arrive_alike: "keeps rows as they arrived in the first epoch",
        kept_stages_whole: "leaves out what a rank need not compute again",
    },
    without="set it to 0",
)

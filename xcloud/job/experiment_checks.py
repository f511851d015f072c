"""Settings of an experiment that do not go together. Each check raises ConfigError."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from xcloud.base.errors import ConfigError
from xcloud.cluster.layout import ClusterLayout
from xcloud.comm.activation_cache import decodes_rows_alone
from xcloud.comm.boundary import Boundary
from xcloud.comm.compression import Compression, CompressionPlan, Selectable
from xcloud.comm.memory import NoMemory
from xcloud.contracts.model import SplitModel
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.schedule import Schedule, put_off
from xcloud.parallel.sharding import check_in_step
from xcloud.parallel.strategy import GradientAveraging, Strategy
from xcloud.security.defences import LABEL, Defence
from xcloud.security.privacy import CloudPrivacy, SamplePrivacy
from xcloud.security.visibility import Visibility
from xcloud.training.settings import Training

MAX_CHOICES = 255  # rank 0 tells the number in a byte


class Checked(Protocol):
    """What the checks ask of an experiment."""

    @property
    def plan(self) -> object: ...

    @property
    def cluster(self) -> ClusterLayout: ...

    @property
    def model(self) -> SplitModel: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def schedules(self) -> Sequence[Schedule]: ...

    @property
    def training(self) -> Training: ...

    @property
    def strategy(self) -> Strategy: ...

    @property
    def security(self) -> Visibility: ...

    @property
    def compression(self) -> CompressionPlan: ...

    @property
    def ties_ends(self) -> bool: ...

    @property
    def cached_boundaries(self) -> list[int]: ...

    def fields_of(self, rank: int) -> frozenset[str]: ...
    def defences_at(self, stage: int, replica: int) -> dict[str, Defence]: ...


def check_autopilot(job: Checked) -> None:
    layout = job.cluster
    if job.plan is not None:
        raise ConfigError(
            "plan= prices one compression for the whole run, and autopilot changes it: leave "
            "one of the two out"
        )
    if layout.num_replicas > 1:
        raise ConfigError(
            f"autopilot decides in one rank for a single pipeline, and strategy="
            f"{job.strategy.name} makes {layout.num_replicas} of it: set autopilot=off"
        )
    for stage in range(layout.num_stages - 1):
        ends = [layout.ranks_of(s) for s in (stage, stage + 1)]
        wan = layout.wan_between(ends[0][0], ends[1][0])
        if wan is not None and wan.is_metered and max(map(len, ends)) > 1:
            raise ConfigError(
                f"autopilot measures the real network behind stage {stage} (cluster/wan=real) "
                f"from what one rank at each end sees, and {max(map(len, ends))} ranks share it: "
                "give the clouds on both sides one rank each, or set autopilot=off"
            )


def check_choices(job: Checked) -> None:
    """Whatever the autopilot may choose must be allowed as the run's own setting."""
    layout, schedules = job.cluster, job.schedules
    assert isinstance(job.compression, Selectable)
    if len(schedules) * len(job.compression.choices) < 2:
        raise ConfigError(
            "autopilot has nothing to choose: its choices are the run's own compression, "
            f"{job.compression.names[0]}, and schedule, {schedules[0].label}"
        )
    if len(schedules) * len(job.compression.choices) > MAX_CHOICES:
        raise ConfigError(
            f"autopilot has {len(schedules)} schedules and {len(job.compression.choices)} "
            f"compressions to choose from, and {MAX_CHOICES} together is the most: allow fewer"
        )
    counts = {schedule.num_micro_batches for schedule in schedules}
    by_sample = job.compression.has_memory or job.training.activation_cache_mb
    if len(counts) > 1 and by_sample and layout.min_micro_batches() > 1:
        raise ConfigError(
            f"autopilot.micro_batches: with {min(counts)} to {max(counts)} micro-batches a sample "
            "would not keep its lanes, between which a memory of the compression or "
            "training.activation_cache_mb is kept; give each stage one rank, or leave either out"
        )
    for schedule in schedules[1:]:
        own = next(iter(job.compression.choices.values()))
        try:  # all checks of a run with that number throughout
            replace(job, schedule=schedule, compression=own, autopilot=None)  # type: ignore[type-var]
        except ConfigError as error:
            raise ConfigError(f"autopilot may choose {schedule.label}, but {error}") from error


def check_visibility(job: Checked, replica: int, fields: dict[int, frozenset[str]]) -> None:
    layout, clouds = job.cluster, tuple(job.cluster.clouds)
    stage_cloud = {stage: layout.stage_cloud(stage, replica) for stage in fields}
    try:
        job.security.check(clouds, fields, stage_cloud)
        if job.security.weights:
            parts = {stage: job.model.parts(stage, layout.num_stages) for stage in fields}
            job.security.check_weights(clouds, parts, stage_cloud)
    except ConfigError as error:
        if replica == 0:
            raise
        raise ConfigError(
            f"{error} strategy={job.strategy.name} puts stages {sorted(fields)} there too."
        ) from error


def check_sharded(job: Checked) -> None:
    layout = job.cluster
    for name, cloud in layout.clouds.items():
        if not cloud.shard:
            continue
        what = f"cluster.clouds.{name}"
        if job.ties_ends or isinstance(job.strategy.averaging, LocalUpdates):
            other = "model.embeddings=tie" if job.ties_ends else job.strategy.label
            raise ConfigError(
                f"{what}.shard deals gradients over ranks, and {other} exchanges whole ones "
                "with other clouds: leave one of the two out"
            )
        for stage in cloud.stages or ():
            dealt = {
                name: (other.shard, len(layout.ranks_of(stage, other.replica)))
                for name, other in layout.clouds.items()
                if stage in (other.stages or ())
            }
            if len(set(dealt.values())) > 1:
                raise ConfigError(
                    f"{what}.shard: each rank averages what it holds with one that holds the "
                    f"same, but stage {stage} is held as (shard, ranks) {dealt}; give these "
                    "clouds the same num_ranks and shard"
                )
        if job.security.privacy is not None:
            raise ConfigError(
                f"{what}.shard: security.privacy bounds gradients of whole stages, and each "
                "rank would hold a part: leave one of the two out"
            )
        turns = [
            {stage: layout.turn(stage, rank) for stage in layout.placement(rank).stages}
            for rank in layout.ranks_in(name)
        ]
        for stage in cloud.stages or ():
            if len(layout.ranks_of(stage, cloud.replica)) < 2:
                raise ConfigError(
                    f"{what}.shard: stage {stage} is held by one rank; give the cloud more "
                    "(num_ranks), or leave shard out"
                )
            holders = [own for own in turns if stage in own]
            check_in_step(job.schedule, layout.num_stages, holders, what)


def check_tied(job: Checked) -> None:
    """The gradient of the embeddings tells which words are in a batch, and that of the head
    which are to be guessed: neither may go where these may not be."""
    layout = job.cluster
    if job.security.privacy is not None:
        raise ConfigError(
            "model.embeddings=tie hands the other end gradients as they are, and "
            "security.privacy noises them apart: take untie or freeze"
        )
    if not isinstance(job.strategy.averaging, GradientAveraging | None):
        raise ConfigError(
            f"model.embeddings=tie needs both ends in every update, and {job.strategy.name} "
            "brings replicas together from time to time: take untie or freeze"
        )
    for replica in range(layout.num_replicas):
        first, last = (layout.stage_cloud(s, replica) for s in (0, layout.num_stages - 1))
        for name, cloud in (("text", last), (LABEL, first)):
            holders = job.security.holders.get(name)
            if first != last and holders is not None and cloud not in holders:
                raise ConfigError(
                    f"model.embeddings=tie sends cloud {cloud!r} gradients that tell which "
                    f"words are in {name!r}, and security.holders.{name} keeps these in "
                    f"{', '.join(holders)}: take untie or freeze, or put both ends of the "
                    "model into one cloud (cluster=u_shape)"
                )


def check_defences(job: Checked, replica: int) -> None:
    """A defence that reads labels must act in ranks that load them."""
    layout = job.cluster
    for stage in range(layout.num_stages - 1):
        acting = job.defences_at(stage, replica).get("backward")
        if acting is None or not acting.needs_labels:
            continue
        for rank in layout.ranks_of(stage + 1, replica):
            if LABEL not in job.fields_of(rank):
                raise ConfigError(
                    f"security.defences.backward: {acting.label} needs labels in rank {rank} "
                    f"of cloud {layout.placement(rank).cloud!r}, which sends gradients away "
                    f"but reads none; let its ranks hold the last stage too "
                    "(one_stage_per_rank: false)"
                )


def check_feedback(job: Checked) -> None:
    """Before any rank has tensors to choose for; those chosen by name are checked there."""
    averaging = job.strategy.averaging
    if averaging is None or averaging.feedback:
        return
    for shape in ((2,), (2, 2)):
        chosen = job.compression.for_tensor("", shape)
        if chosen.feedback == "needed":
            raise ConfigError(
                f"strategy.averaging.feedback is false, but compression averages with "
                f"{chosen.label}, which leaves out the same part again and again unless it is "
                "added to the next message: set feedback to true, or choose a compressor that "
                "needs none (docs/averaging.md lists them)"
            )


def check_keeping(job: Checked, boundaries: Mapping[int, Boundary]) -> None:
    """Rows may be kept only where the same ones would cross again in every epoch."""
    megabytes, layout = job.training.activation_cache_mb, job.cluster
    if not megabytes:
        return

    def refused(why: str) -> ConfigError:
        return ConfigError(
            f"training.activation_cache_mb is {megabytes}, but {why}, or set it to 0"
        )

    if not job.security.may_keep_rows:
        raise refused(
            "security.may_keep_rows=false forbids a cloud to keep another's rows: allow it"
        )
    if job.strategy.is_elastic:
        raise refused(
            f"strategy={job.strategy.name} lets clouds leave and come back, and one that does has "
            "lost what the others take for kept: set strategy.averaging.leave=fail and late=wait"
        )
    reasons = {
        stage: "something before it is trained"
        if boundary.gradient_returns
        else "dropout is active before it"
        for stage, boundary in boundaries.items()
        if layout.leaves_cloud(stage) and not boundary.is_constant
    }
    if not job.cached_boundaries:
        found = "; ".join(f"at boundary {stage} {why}" for stage, why in reasons.items())
        why = (
            "no boundary between clouds has the same rows in every epoch "
            f"({found or f'none leaves its cloud with strategy={job.strategy.name}'})"
        )
        if not hasattr(job.model, "split"):
            raise ConfigError(
                f"training.activation_cache_mb is {megabytes}, but {why}, and no setting of this "
                "model "
                "freezes all that lies before one: set it to 0"
            )
        raise refused(
            f"{why}: freeze what lies before one (model.split.layer and "
            "model.split.freeze_bottom=true)"
        )
    for stage in job.cached_boundaries:
        for replica in range(layout.num_replicas):
            if (defence := job.defences_at(stage, replica).get("forward")) is not None:
                raise refused(
                    f"security.defences.forward={defence.label} adds new noise in every epoch, "
                    "which would no longer protect: leave it out"
                )
        compression = job.compression.at_boundary(stage)
        if not isinstance(compression, Compression):
            raise refused(
                f"compression changes during the run ({compression.label}): take one for all of it"
            )
        if not isinstance(compression.forward_memory, NoMemory):
            raise refused(
                f"compression.forward_memory ({compression.forward_memory.label}) changes rows "
                "from epoch to epoch: leave it out"
            )
        for field in boundaries[stage].fields:
            width = math.prod(field.features)
            floats = field.dtype.is_floating_point
            if floats and not decodes_rows_alone(compression.forward, width):
                raise refused(
                    f"compression.forward={compression.forward.label} makes of the same row "
                    "another one in each message (it draws, remembers, or looks at several rows "
                    f"at once): take none, fp16, bf16 or integers whose block divides {width}"
                )


def check_privacy(job: Checked) -> None:
    """Clipping with noise must protect from whoever sees what the other clouds get."""
    privacy, layout = job.security.privacy, job.cluster
    if isinstance(privacy, CloudPrivacy) and layout.num_replicas == 1:
        raise ConfigError(
            "security/privacy=cloud noises what replicas in several clouds give to an "
            "averaging, and here is one replica; choose strategy=data_parallel or "
            "local_updates, or security/privacy=sample"
        )
    if isinstance(privacy, CloudPrivacy) and job.strategy.is_elastic:
        raise ConfigError(
            "security/privacy=cloud cannot be with strategy.averaging.late=skip or "
            "leave=go_on: what a merge left out is sent again with the next one, so that no "
            "bound holds; set late=wait and leave=fail, or choose security/privacy=sample"
        )
    if not isinstance(privacy, SamplePrivacy):
        return
    if any(cloud.shard for cloud in layout.clouds.values()):
        raise ConfigError(
            "security/privacy=sample clips each sample's gradient in one rank, but "
            "cluster.clouds.*.shard deals sums of them over a cloud's ranks; leave shard out"
        )
    if any(layout.leaves_cloud(stage) for stage in range(layout.num_stages - 1)):
        raise ConfigError(
            "security/privacy=sample noises parameter gradients, but this cluster cuts the "
            "model between clouds, which pass each sample's activations and gradients on "
            "without that noise, so its epsilon would not hold there. Keep each replica in "
            "one cloud (strategy=data_parallel), or noise what crosses (security/defences)"
        )
    stages = range(layout.num_stages)
    if any(put_off(job.schedule.actions(stage, layout.num_stages)) for stage in stages):
        raise ConfigError(
            "security/privacy=sample clips each sample's gradient before the next one's is "
            f"computed, but {job.schedule.label} puts off those of weights; choose "
            "schedule=one_forward_one_backward or gpipe"
        )
    pieces = job.schedule.num_micro_batches * job.training.accumulate_steps
    if job.training.batch_size != pieces:
        raise ConfigError(
            "security/privacy=sample clips each sample's gradient, so every micro-batch must "
            f"be one sample, but training.batch_size is {job.training.batch_size} and there "
            f"are {pieces} micro-batches (schedule.num_micro_batches * "
            "training.accumulate_steps); make them equal, most cheaply by "
            "training.accumulate_steps"
        )

"""What the features of a job need of it, and how a job that does not meet it is refused.

A need is a function of the job that names the setting that stands against it, or finds none. Those
that several features have stand here, and what defences need; a feature's own stand in its folder,
as its uses do. What an object needs of what it is built with (a strategy of its cluster) it checks
there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import decodes_rows_alone
from xcloud.comm.memory import NoMemory
from xcloud.job.job import PipelineJob
from xcloud.line.mailbox import Mailbox
from xcloud.security.defences import LABEL


class Conflict(NamedTuple):
    """A setting that stands against a need.

    setting: the name of the setting and its value, as a phrase.
    remedy: an instruction that removes the conflict.
    """

    setting: str
    remedy: str


Requirement = Callable[[PipelineJob], Conflict | None]


@dataclass(frozen=True)
class FeatureUse:
    """A way in which the settings of a job ask for a feature, and what it needs then.

    setting: the setting as it is written, with {} in place of what `asked` returns.
    asked: a function that returns something true where the job asks for the feature.
    why: the action of the feature that makes each need necessary, by need.
    without: the way to run without the feature.
    reads_model: its needs read files of the model, so they are checked together with these.
    """

    setting: str
    asked: Callable[[PipelineJob], object]
    why: Mapping[Requirement, str]
    without: str
    reads_model: bool = False

    def check(self, job: PipelineJob) -> None:
        """Raise ConfigError if the job asks for the feature and lacks what it needs."""
        # What `asked` returns stands in the message, such as a defence with its label.
        if not (asked := self.asked(job)):
            return
        # In the order of `why`: the first need that is not met is the one that is named.
        for need, why in self.why.items():
            if (conflict := need(job)) is not None:
                remedies = ", or ".join(filter(None, (conflict.remedy, self.without)))
                setting = self.setting.format(asked)
                raise ConfigError(f"{setting} {why}, but {conflict.setting}: {remedies}")


def plain(is_lacking: Callable[[PipelineJob], bool], setting: str, remedy: str) -> Requirement:
    """Make a need of one condition.

    setting: {job} in it is the job.
    """
    return lambda job: Conflict(setting.format(job=job), remedy) if is_lacking(job) else None


def ties_ends(job: PipelineJob) -> bool:
    """Return whether the first and the last stage train a matrix in common (tied embeddings)."""
    ties = getattr(job.model, "ties_ends", None)
    return ties is not None and bool(ties(job.cluster.num_stages))


def sharding_clouds(job: PipelineJob) -> list[str]:
    """Return the clouds that shard their stages over their ranks."""
    return [name for name, cloud in job.cluster.clouds.items() if cloud.shard]


no_plan = plain(
    lambda job: job.plan is not None,
    setting="plan= prices one compression for the full run",
    remedy="remove plan=",
)
one_update_at_a_time = plain(
    lambda job: job.schedule.overlaps_updates,
    setting="schedule={job.schedule.label} begins the next update before",
    remedy="choose schedule=gpipe or one_forward_one_backward",
)
one_pipeline = plain(
    lambda job: job.cluster.num_replicas > 1,
    setting="strategy={job.strategy.name} makes {job.cluster.num_replicas} of it",
    remedy="choose strategy=pipeline",
)
every_update_together = plain(
    lambda job: job.strategy.traits.trains_locally,
    setting="strategy={job.strategy.name} averages full replicas from time to time",
    remedy="choose one that averages gradients (strategy=data_parallel)",
)
all_clouds_stay = plain(
    lambda job: job.strategy.traits.is_elastic,
    setting="strategy={job.strategy.name} lets clouds be late, leave and come back",
    remedy="choose strategy/averaging/late=wait",
)
untied_ends = plain(
    ties_ends,
    setting="model.embeddings=tie exchanges full gradients between both ends",
    remedy="take model.embeddings=untie or freeze",
)
unpacked_weights = plain(
    lambda job: getattr(job.model, "weights", None) in ("int8", "nf4"),
    setting="model.weights={job.model.weights} packs weights into codes that cannot be dealt out",
    remedy="choose model.weights=bfloat16 or float32",
)
whole_stages = plain(
    lambda job: bool(sharding_clouds(job)),
    setting="cluster.clouds.*.shard leaves each rank sums of a part of a stage",
    remedy="leave shard out",
)
noise_without_labels = plain(
    lambda job: any(d and d.needs_labels for d in [job.security.defences.get("forward")]),
    setting="it needs labels, which are not available there",
    remedy="use it backward",
)


def labels_where_gradients_leave(job: PipelineJob) -> Conflict | None:
    """Return the conflict with noise that depends on labels, where a rank that sends gradients out
    of its cloud reads none."""
    layout = job.cluster
    # Replicas may spread over other clouds each.
    for replica in range(layout.num_replicas):
        for stage in range(layout.num_stages - 1):
            acting = job.defences_at(stage, replica).get("backward")
            if acting is None or not acting.needs_labels:
                continue
            for rank in layout.ranks_of(stage + 1, replica=replica):
                if LABEL not in job.fields_of(rank):
                    cloud = layout.placement(rank).cloud
                    return Conflict(
                        f"there are none in rank {rank} of cloud {cloud!r}",
                        "let its ranks hold the last stage too (one_stage_per_rank: false)",
                    )
    return None


def no_noise(job: PipelineJob) -> Conflict | None:
    """Return the conflict with a feature that adds noise to what leaves a rank."""
    return next((feature.noises for feature in job.features if feature.noises), None)


def known_last_step(job: PipelineJob) -> Conflict | None:
    """Return the conflict with a feature that may end the run before training.max_steps."""
    return next((feature.ends_early for feature in job.features if feature.ends_early), None)


def compression_changes_rows(job: PipelineJob, stage: int) -> Conflict | None:
    """Return a conflict where the same row would not cross the boundary after `stage` as the same
    values in every message."""
    compression = job.compression.at_boundary(stage)
    if not isinstance(compression, Compression):
        what = f"compression changes during the run ({compression.label})"
        return Conflict(setting=what, remedy="take one compression for all of it")
    # A memory adds what it holds, which changes from message to message.
    if not isinstance(compression.forward_memory, NoMemory):
        memory = compression.forward_memory.label
        what = f"compression.forward_memory ({memory}) changes rows from epoch to epoch"
        return Conflict(setting=what, remedy="leave it out")
    for field in job.boundaries[stage].fields:
        # Codecs of blocks look at so many features at once.
        width = math.prod(field.features)
        if field.is_compressed and not decodes_rows_alone(compression.forward, num_features=width):
            return Conflict(
                setting=f"compression.forward={compression.forward.label} changes the same row "
                "differently in each message (it draws, remembers, or looks at several rows at "
                "once)",
                remedy=f"take none, fp16, bf16 or integers whose block divides {width}",
            )
    return None


def nothing_exact_crosses(job: PipelineJob) -> Conflict | None:
    """Return a conflict if noise would make a field of a defended boundary useless."""
    for stage, boundary in job.boundaries.items():
        # What is exact is a count, say, and a defence adds noise to every field.
        exact = [field.name for field in boundary.fields if field.is_exact]
        # One replica with a defence is enough, as all have the same fields.
        acts = any(job.defences_at(stage, replica) for replica in range(job.cluster.num_replicas))
        if exact and acts:
            return Conflict(
                f"{exact[0]}, of which the loss of the routers is made, must cross as it is",
                "set model.router_loss=0",
            )
    return None


def check_boundaries(job: PipelineJob) -> None:
    num_stages = job.cluster.num_stages
    # Boundaries are numbered by the stage before them; the last stage has none behind it.
    if (boundary := max(job.compression.boundaries)) >= num_stages - 1:
        raise ConfigError(
            f"compression.boundary_{boundary}: there is no such boundary; this cluster has "
            f"{num_stages} stages, so boundaries 0 to {num_stages - 2}"
        )


def check_text_is_read(job: PipelineJob) -> None:
    """Raise ConfigError where rows are to be compared by their tokens at a boundary, and a stage
    beside it does not read the text."""
    num_stages = job.cluster.num_stages
    for stage in range(num_stages - 1):
        if not job.cluster.leaves_cloud(stage):
            continue
        # Phases of a plan may each have a memory.
        for _, one in job.compression.at_boundary(stage).by_step:
            if one.backward_memory.reads_text:
                raise ConfigError(
                    f"compression.backward_memory={one.backward_memory!r} is for activations: "
                    "gradients would stay what they were; leave it out"
                )
            # Both ends keep the memory, so both must know which token a row has.
            for side in (stage, stage + 1) if one.forward_memory.reads_text else ():
                if "text" not in job.model.fields(side, num_stages=num_stages):
                    raise ConfigError(
                        f"compression.forward_memory={one.forward_memory!r} compares rows by "
                        f"their tokens, which both ends must read, and stage {side} reads no "
                        "text. If text may be in every cloud, set model.text_everywhere=true "
                        "(causal models); otherwise leave the memory out"
                    )


def nobody_waits_in_a_step(job: PipelineJob) -> Conflict | None:
    """Return a conflict where a rank waits for another cloud within a step."""
    layout = job.cluster
    remedy = "choose strategy=local_updates, streaming or fedavg"
    if any(layout.leaves_cloud(stage) for stage in range(layout.num_stages - 1)):
        return Conflict(
            f"strategy={job.strategy.name} passes activations from cloud to cloud in every step",
            f"{remedy}, with all stages of a replica in one cloud",
        )
    if not job.strategy.traits.trains_locally:
        return Conflict(f"strategy={job.strategy.name} averages gradients in every update", remedy)
    return None


MAILBOX = FeatureUse(
    setting="cluster/wan=mailbox",
    asked=lambda job: isinstance(job.cluster.wan, Mailbox),
    why={nobody_waits_in_a_step: "takes seconds for a message"},
    without="choose cluster/wan=sealed",
)
SEALED = FeatureUse(
    setting="cluster/wan=sealed or mailbox",
    asked=lambda job: job.cluster.between_owners,
    why={all_clouds_stay: "joins clouds that stay to the end"},
    without="choose cluster/wan=real",
)
DEFENCES = (
    FeatureUse(
        setting="security.defences.backward={.label}",
        asked=lambda job: job.security.defences.get("backward"),
        why={labels_where_gradients_leave: "needs labels where gradients leave a cloud"},
        without="choose security/defences/backward=max_norm or gaussian_noise",
    ),
    FeatureUse(
        setting="security.defences.forward={.label}",
        asked=lambda job: job.security.defences.get("forward"),
        why={noise_without_labels: "acts at evaluation too"},
        without="choose security/defences/forward=max_norm or gaussian_noise",
    ),
)
EXACT_FIELDS = FeatureUse(
    "security.defences",
    asked=lambda job: any(job.security.defences.values()),
    why={nothing_exact_crosses: "changes what leaves a cloud"},
    without="leave security.defences out",
    reads_model=True,
)

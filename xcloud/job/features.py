"""What features a job may use, and what each of them needs of it: the one list by which Experiment
refuses settings that do not fit together. A new feature is one entry here, and no other feature
knows of it; what only one of them needs is a need of its own (needs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xcloud.base.errors import ConfigError
from xcloud.job import needs
from xcloud.job.job import PipelineJob
from xcloud.job.needs import Need


@dataclass(frozen=True)
class Feature:
    """name: as its setting is written, {} in place of what `used` returns: something true where a
    job uses the feature. why: by need, what the feature does that needs it. without: how to run
    without the feature."""

    name: str
    used: Callable[[PipelineJob], object]
    why: Mapping[Need, str]
    without: str

    def check(self, job: PipelineJob) -> None:
        """Raise ConfigError for the first need that the job lacks."""
        if not (used := self.used(job)):
            return
        for need, why in self.why.items():
            if (lack := need(job)) is not None:
                remedies = ", or ".join(filter(None, (lack.remedy, self.without)))
                name = self.name.format(used)
                raise ConfigError(f"{name} {why}, but {lack.setting}: {remedies}")


def _shards(job: PipelineJob) -> list[str]:
    return [name for name, cloud in job.cluster.clouds.items() if cloud.shard]


def _averages_without_feedback(job: PipelineJob) -> bool:
    averaging = job.strategy.averaging
    return job.cluster.num_replicas > 1 and averaging is not None and not averaging.feedback


def _private_by(job: PipelineJob, unit: str) -> bool:
    return job.security.privacy is not None and job.security.privacy.unit == unit


FEATURES: Sequence[Feature] = (
    Feature(
        "autopilot",
        lambda job: job.autopilot,
        {
            needs.no_plan: "changes the compression",
            needs.one_pipeline: "decides in one rank for a single pipeline",
            needs.one_rank_at_metered_ends: "measures a real network from one rank at each end",
        },
        "set autopilot=off",
    ),
    Feature(
        "strategy.averaging.feedback=false",
        _averages_without_feedback,
        {
            needs.self_correcting_compressor: "adds nothing of what a message left out to the "
            "next one"
        },
        "set feedback to true",
    ),
    Feature(
        "model.embeddings=tie",
        lambda job: job.ties_ends,
        {
            needs.no_privacy: "hands the other end gradients as they are",
            needs.every_update_together: "needs both ends in every update",
            needs.words_may_be_at_both_ends: "sends gradients to the other end",
        },
        "take model.embeddings=untie or freeze",
    ),
    Feature(
        "cluster.clouds.{0[0]}.shard",
        _shards,
        {
            needs.untied_ends: "shards gradients over ranks",
            needs.every_update_together: "shards parameters and gradients over ranks",
            needs.equal_shards_in_step: "averages what each rank holds with ranks "
            "that hold the same",
            needs.no_privacy: "shards gradients over ranks",
        },
        "leave shard out",
    ),
    Feature(
        "security.defences.backward={.label}",
        lambda job: job.security.defences.get("backward"),
        {needs.labels_where_gradients_leave: "needs labels where gradients leave a cloud"},
        "choose security/defences/backward=max_norm or gaussian_noise",
    ),
    Feature(
        "security.defences.forward={.label}",
        lambda job: job.security.defences.get("forward"),
        {needs.noise_without_labels: "acts at evaluation too"},
        "choose security/defences/forward=max_norm or gaussian_noise",
    ),
    Feature(
        "security/privacy=cloud",
        lambda job: _private_by(job, "cloud"),
        {
            needs.several_replicas: "noises what replicas in several clouds give to an averaging",
            needs.all_clouds_stay: "gives no bound if what one merge leaves out is sent "
            "with the next",
        },
        "choose security/privacy=sample",
    ),
    Feature(
        "security/privacy=sample",
        lambda job: _private_by(job, "sample"),
        {
            needs.whole_stages: "clips each sample's gradient in one rank",
            needs.whole_replicas: "noises parameter gradients",
            needs.whole_backward: "clips each sample's gradient before the next one's is computed",
            needs.one_sample_each: "needs one sample in every micro-batch",
        },
        "set security/privacy=none",
    ),
)
CHECKED_LAST: Sequence[Feature] = (
    Feature(
        "training.activation_cache_mb={}",
        lambda job: job.training.activation_cache_mb,
        {
            needs.rows_may_be_kept: "keeps rows of another cloud",
            needs.all_clouds_stay: "relies on what every cloud has kept",
            needs.constant_boundary: "keeps rows that are the same in every epoch",
            needs.rows_arrive_alike: "keeps rows as they arrived in the first epoch",
        },
        "set it to 0",
    ),
)

"""Differential privacy as a feature: clip and noise what leaves a cloud, and account for it."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

from xcloud.features.privacy.account import PrivacyAccount
from xcloud.features.privacy.gradients import PrivateGradients
from xcloud.features.privacy.noise import private_contribution
from xcloud.job.job import PipelineJob
from xcloud.job.needs import Conflict, FeatureUse, all_clouds_stay, plain, whole_stages
from xcloud.pipeline.schedule import split_backwards
from xcloud.pipeline.trainer import Trainer
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.role import RankContext

several_replicas = plain(
    lambda job: job.cluster.num_replicas == 1,
    setting="here is one replica",
    remedy="choose strategy=data_parallel or local_updates",
)


whole_replicas = plain(
    lambda job: any(map(job.cluster.leaves_cloud, range(job.cluster.num_stages - 1))),
    setting="this cluster splits the model between clouds. Activations and gradients of samples "
    "cross without that noise, so its epsilon would not hold there",
    remedy="keep each replica in one cloud (strategy=data_parallel), add noise to what crosses "
    "(security/defences)",
)


one_sample_each = plain(
    lambda job: job.training.batch_size != job.num_pieces,
    setting="training.batch_size is {job.training.batch_size} and there are {job.num_pieces} "
    "micro-batches (schedule.num_micro_batches * training.accumulate_steps)",
    remedy="make them equal, most cheaply by training.accumulate_steps",
)


def whole_backward(job: PipelineJob) -> Conflict | None:
    num_stages = job.cluster.num_stages
    if not any(
        split_backwards(job.schedule.actions(stage, num_stages)) for stage in range(num_stages)
    ):
        return None
    remedy = "choose schedule=one_forward_one_backward or gpipe"
    return Conflict(setting=f"{job.schedule.label} puts off those of weights", remedy=remedy)


class PrivacyAtRank(FeatureAtRank):
    """The privacy of one rank: it clips and adds noise, and in rank 0 keeps the account."""

    def __init__(self, context: RankContext[PipelineJob], feature: Feature) -> None:
        super().__init__(context, feature)
        privacy = context.job.security.privacy
        assert privacy is not None
        self._privacy = privacy
        self.changes_each_gradient = privacy.unit == "sample"
        # A replica's loss is a function of its samples that nobody has noised.
        self.hides_losses = context.job.cluster.num_replicas > 1
        # Where samples are protected and not clouds, gradients are noised before.
        if privacy.unit == "cloud":
            self.guard = partial(private_contribution, privacy=privacy)

    def hook(self, built: BuiltRank, trainer: Trainer) -> PrivateGradients | None:
        if self.changes_each_gradient:
            return PrivateGradients(privacy=self._privacy, trainer=trainer)
        return None

    def observer(self, built: BuiltRank, trainer: Trainer) -> PrivacyAccount | None:
        if built.context.rank != 0:
            return None
        return PrivacyAccount(
            privacy=self._privacy,
            trainer=trainer,
            contributions=built.context.job.strategy.traits.max_contributions,
            reporter=built.context.reporter,
        )


class DifferentialPrivacy(Feature):
    """A bound on what the others learn of a sample, or of all that a cloud holds."""

    at_work = PrivacyAtRank

    uses = (
        FeatureUse(
            setting="security/privacy=cloud",
            asked=lambda job: getattr(job.security.privacy, "unit", None) == "cloud",
            why={
                several_replicas: "adds noise to the contributions of replicas in several clouds",
                all_clouds_stay: "gives no bound if a late cloud sends its change later",
            },
            without="choose security/privacy=sample",
        ),
        FeatureUse(
            setting="security/privacy=sample",
            asked=lambda job: getattr(job.security.privacy, "unit", None) == "sample",
            why={
                whole_stages: "clips each sample's gradient in one rank",
                whole_replicas: "noises parameter gradients",
                whole_backward: "clips each sample's gradient before the next one's is computed",
                one_sample_each: "needs one sample in every micro-batch",
            },
            without="set security/privacy=none",
        ),
    )

    noises = Conflict(
        "security.privacy adds noise to each of them and bounds gradients of full stages",
        "set security/privacy=none",
    )
    left_out_of_trials = MappingProxyType({"security.privacy": None})
    headline = "{job.security.privacy.label}"

"""The two-buffered schedule as a feature: updates overlap, and gradients are one update old."""

from __future__ import annotations

from xcloud.features.two_buffered.schedule import TwoBuffered
from xcloud.features.two_buffered.trainer import TwoBufferedPipeline, TwoBufferedTrainer
from xcloud.job.needs import FeatureUse, no_noise, one_pipeline, plain, untied_ends, whole_stages
from xcloud.rank.feature import Feature, FeatureAtRank

one_pass = plain(
    lambda job: job.training.accumulate_steps > 1,
    setting="training.accumulate_steps={job.training.accumulate_steps} makes several passes",
    remedy="set it to 1 and raise schedule.num_micro_batches",
)
nothing_taken_back = plain(
    lambda job: job.training.on_divergence == "skip" and job.compression.has_memory,
    setting="training.on_divergence=skip takes back what compression remembers of an update",
    remedy="set training.on_divergence=stop, or a compression without memory",
)


class OverlappedUpdatesAtRank(FeatureAtRank):
    """Builds the pipeline and the trainer whose updates overlap."""

    changes_each_gradient = True  # two updates add gradients, so no sum may begin in a backward

    pipeline = TwoBufferedPipeline
    trainer = TwoBufferedTrainer


class OverlappedUpdates(Feature):
    """Updates of which the next begins before the one in front of it has ended."""

    at_work = OverlappedUpdatesAtRank

    uses = (
        FeatureUse(
            setting="schedule=two_buffered",
            asked=lambda job: isinstance(job.schedule, TwoBuffered),
            why={
                one_pass: "lets two updates overlap, each of one pass",
                one_pipeline: "lets the updates of one pipeline overlap",
                no_noise: "computes two updates at a time",
                untied_ends: "computes two updates at a time",
                whole_stages: "keeps two copies of full stages",
                nothing_taken_back: "has messages of two updates under way",
            },
            without="choose schedule=gpipe or one_forward_one_backward",
        ),
    )

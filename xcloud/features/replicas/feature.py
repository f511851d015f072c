"""Replicas as a feature: several clouds train the same model, and average it."""

from __future__ import annotations

from xcloud.job.job import PipelineJob
from xcloud.job.needs import Lack, Use
from xcloud.rank.feature import Feature


def _averages_without_feedback(job: PipelineJob) -> bool:
    averaging = job.strategy.averaging
    return job.cluster.num_replicas > 1 and averaging is not None and not averaging.feedback


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


class Replicas(Feature):
    """An average of gradients or parameters over replicas of the pipeline."""

    uses = (
        Use(
            "strategy.averaging.feedback=false",
            asked=_averages_without_feedback,
            why={
                self_correcting_compressor: "adds nothing of what a message left out to the next "
                "one"
            },
            without="set feedback to true",
        ),
    )

    def is_used(self, job: PipelineJob) -> bool:
        return job.cluster.num_replicas > 1

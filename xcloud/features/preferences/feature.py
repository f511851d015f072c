"""Preference tuning as a feature: the last stage of a causal language model learns from pairs of
answers, against the model of the start.

That model is asked once, through the same boundaries as in training, before the first update, so
there is no second copy of it. A run that goes on from a checkpoint builds it anew before it takes
over the checkpoint, and asks it again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from xcloud.contracts.model import BuildContext, DataSplit
from xcloud.features.preferences.loss import PreferenceLoss, trained_pieces
from xcloud.job.job import PipelineJob
from xcloud.job.needs import Conflict, FeatureUse, compression_changes_rows, one_pipeline, plain
from xcloud.models.causal import CausalLM
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.pipeline import Pipeline
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.role import RankContext
from xcloud.rank.task_data import predicted, scored_pieces
from xcloud.tasks.preferences import PreferenceData, Preferences

causal_model = plain(
    lambda job: not isinstance(job.model, CausalLM),
    setting="this model gives none",
    remedy="choose model=causal",
)
no_plan = plain(
    lambda job: job.plan is not None,
    setting="plan= tries several compressions in one run",
    remedy="plan the same model with task=language_modelling, whose steps cost as much",
)


def rows_cross_alike(job: PipelineJob) -> Conflict | None:
    """Return a lack where a row would cross in training as other values than it did when the model
    of the start was asked."""
    for stage in job.boundaries:
        if not job.cluster.leaves_cloud(stage):
            continue
        if (defence := job.defences_at(stage, replica=0).get("forward")) is not None:
            return Conflict(
                setting=f"security.defences.forward={defence.label} adds other noise to every "
                "message",
                remedy="leave it out",
            )
        if (lack := compression_changes_rows(job, stage)) is not None:
            return lack
    return None


class PreferenceTuningAtRank(FeatureAtRank):
    """The loss of the last stage, and what the model of the start says, in one rank."""

    def __init__(self, context: RankContext[PipelineJob], feature: Feature) -> None:
        super().__init__(context, feature)
        self._last = context.job.cluster.num_stages - 1
        self.loss = PreferenceLoss(cast(Preferences, context.job.task).beta)

    def build_context(self, stage: int, group: RankGroup, context: BuildContext) -> BuildContext:
        if stage == self._last:
            return replace(context, document_loss=self.loss)
        return context

    def complete(self, built: BuiltRank, pipeline: Pipeline) -> None:
        """Ask the model of the start about each pair that training or evaluation will meet."""
        job = built.context.job
        training = job.training
        data = cast(PreferenceData, built.data)
        plan = job.batch_plan(data.num_samples("train"))
        size = -(-training.batch_size // job.num_pieces)
        splits: list[DataSplit] = ["test"]
        # The development pairs are asked about only where somebody will evaluate them.
        if training.evaluate_every or training.until is not None:
            splits.append("dev")
        pieces = {split: scored_pieces(training, data.num_samples(split)) for split in splits}
        pieces["train"] = trained_pieces(plan, num_steps=training.max_steps, size=size)
        if built.context.rank == 0:
            num_pairs = sum(len(piece) for of in pieces.values() for piece in of)
            built.context.reporter.note(f"asking the model of the start about {num_pairs:,} pairs")
        for split, of in pieces.items():
            data.reference[split] = predicted(
                pipeline, built.wiring.groups, data, split=split, pieces=of, step=0
            )
        self.loss.reference = data.reference["train"]
        built.wiring.barrier()


class PreferenceTuning(Feature):
    """A loss over pairs of answers, against the model of the start."""

    at_work = PreferenceTuningAtRank

    uses = (
        FeatureUse(
            setting="task=preferences",
            asked=lambda job: isinstance(job.task, Preferences),
            why={
                causal_model: "compares probabilities of full answers",
                one_pipeline: "scores pairs by the initial model in one pipeline",
                no_plan: "scores pairs by the initial model through one compression",
            },
            without="",
        ),
        FeatureUse(
            setting="task=preferences",
            asked=lambda job: isinstance(job.task, Preferences),
            why={rows_cross_alike: "asks the model of the start once, before the first step"},
            without="",
            reads_model=True,
        ),
    )

    headline = "preferences against the model of the start, beta {job.task.beta:g}"

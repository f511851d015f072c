"""A rank of a pipeline: build what trains (building.py), train it with the other ranks, export,
evaluate. `train` is the loop over updates."""

from __future__ import annotations

from xcloud.experiment import Experiment
from xcloud.pipeline.control import Signal
from xcloud.rank.export import export_stage, whole
from xcloud.rank.role import RankContext, Role
from xcloud.train.building import RankTraining, build_training, step_clock, wired


class StageRank(Role[Experiment]):
    """A rank that holds one or more stages."""

    def __init__(self, context: RankContext[Experiment]) -> None:
        super().__init__(context)
        self.clock = step_clock(context.job, rank=self.rank, device=context.device)
        found = (feature.at_rank(context) for feature in context.job.features)
        self.features = [feature for feature in found if feature is not None]
        self.wiring = wired(context, features=self.features, clock=self.clock)
        self.records = self.wiring.ends.records
        self.peers = self.wiring.ends.detector.peers
        self.control = self.wiring.control

    def close(self) -> None:
        self.wiring.close()

    def run(self) -> None:
        training = build_training(
            self.context, wiring=self.wiring, features=self.features, clock=self.clock
        )
        if self.train(training):
            self.finish(training)
        else:
            self.stop(training)

    def train(self, training: RankTraining) -> bool:
        """Make all updates that are left, or those to the target of training.until. Return whether
        the run has come to its end; False if it was asked to stop."""
        trainer = training.trainer
        hooks = training.hooks
        job = self.job
        is_pretrained = getattr(job.model, "is_pretrained", False)
        # Scored before the first step too, for comparison: what training is to improve on.
        if is_pretrained and not job.roster.is_elastic and not trainer.num_updates:
            training.evaluator.evaluate("test", 0)
        for step in range(trainer.num_updates + 1, self.job.max_steps + 1):
            with self.clock.paused():
                hooks.before_update(step)
            report = trainer.update(step, hooks)
            hooks.after_update(step, report)
            if report.signal is Signal.STOP:
                return False
            if training.evaluator.is_over:
                break
        with self.clock.paused():
            hooks.finish()
        return True

    def finish(self, training: RankTraining) -> None:
        """Export, evaluate through the same links, and close the hooks."""
        trainer = training.trainer
        replica = self.job.cluster.placement(self.rank).replica
        for stage, module in trainer.pipeline.stages.items():
            # Replicas are equal after the last merge, and so are the ranks of a stage: one of them
            # writes.
            leads = replica == 0 and self.wiring.groups[stage].leads
            # Every rank of the stage calls it, since a sharded stage is gathered here.
            tensors = whole(module.exported(), keep=leads)
            if leads:
                learned = self.wiring.boundaries.learned(stage)
                export_stage(
                    self.context.run_dir, stage, module, tensors, learned, data=training.data
                )
        training.hooks.settle()
        self.wiring.barrier()  # an evaluation that fails ends all ranks; all have exported now
        self.context.asked.is_armed = False
        if self.context.asked.was_asked:  # while the last step was saved
            return self.stop(training)
        self.reporter.event("phase", now=True, name="evaluation")
        training.evaluator.evaluate("test", trainer.num_updates)
        training.hooks.close(is_finished=True)
        self.reporter.event("finish", num_steps=trainer.num_updates)

    def stop(self, training: RankTraining) -> None:
        """End early, as asked, with a checkpoint of the last step."""
        training.hooks.settle()
        self.wiring.barrier()
        training.hooks.close(is_finished=False)
        self.reporter.event("stop", step=training.trainer.num_updates)
        self.is_stopped = True

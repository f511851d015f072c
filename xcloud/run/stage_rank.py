"""A rank of a pipeline: load what its cloud may see, build its stages, train them with the other
ranks, export, evaluate.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from xcloud.cluster.transport import GlooTransport
from xcloud.comm.memory import Stateful
from xcloud.comm.step_clock import StepClock
from xcloud.job.experiment import Experiment
from xcloud.models.split import BuildContext
from xcloud.parallel.exchange import AllReduce
from xcloud.parallel.pipeline import Pipeline
from xcloud.parallel.stage import Batch, Stage
from xcloud.run.checkpointing import Checkpointer
from xcloud.run.evaluation import Evaluator
from xcloud.run.export import export_stage
from xcloud.run.loading import load
from xcloud.run.role import RankContext, Role
from xcloud.run.typical_step import KEEP_STEPS, report_typical_step
from xcloud.run.wan_meter import WanMeter
from xcloud.run.wiring import wire
from xcloud.security.observer import OBSERVATIONS_DIR, Observer
from xcloud.tasks.task import TaskData
from xcloud.training.settings import autocast_for
from xcloud.training.trainer import Trainer


class StageRank(Role[Experiment]):
    """Holds one or more stages."""

    def __init__(self, context: RankContext[Experiment]) -> None:
        super().__init__(context)
        job, layout = context.job, context.job.cluster
        self.placement = layout.placement(self.rank)
        self.clock = StepClock(
            record_from=max(1, job.max_steps - KEEP_STEPS + 1),
            slowdown=layout.clouds[self.placement.cloud].slowdown,
        )
        self.wiring = wire(
            GlooTransport(self.rank), layout, job.borders, job.compression, job.max_micro_batch,
            context.device, self.clock, context.run_dir,
            on_report=context.on_report,
            schedule=job.schedule,
            defences=job.security.defences,
            seed=job.seed,
        )  # fmt: skip
        self.records = self.wiring.wan_records

    def report(self, lines: bytes) -> None:
        assert self.wiring.control is not None
        self.wiring.control.report(lines)

    def close(self) -> None:
        self.wiring.close()

    def run(self) -> None:
        self.reporter.event("phase", now=True, name="loading")
        data = load(self.job, self.rank, self.wiring.control)
        if self.rank == 0:
            self.reporter.note(data.describe())
        self._train(self._build(data), data)

    def _build(self, data: TaskData) -> dict[int, Stage]:
        job, layout, lanes = self.job, self.job.cluster, self.wiring.lanes
        stages = {}
        for stage in self.placement.stages:
            build = BuildContext(
                seed=job.seed,
                device=self.context.device,
                cache_dir=job.cache_path,
                vocabularies={name: data.vocabulary(name) for name in data.text_fields},
                sentences=data.sentences,
                samples=partial(_spread, data),
                max_length=job.task.max_length,
                lane=lanes[stage].lane,
                barrier=lanes[stage].barrier,
                report=self.reporter.note,
                head=data.head,
            )
            built = job.model.build_stage(stage, layout.num_stages, build)
            stages[stage] = built.to(self.context.device)
        return stages

    def _train(self, stages: dict[int, Stage], data: TaskData) -> None:
        """From the built stages to their export and evaluation."""
        job, layout, rank = self.job, self.job.cluster, self.rank
        device, run_dir = self.context.device, self.context.run_dir
        observer = _observer(job, rank, data)
        if observer is not None:
            self.wiring.observe(observer)
        pipeline = Pipeline(
            rank, stages, layout.num_stages, self.wiring.ports, layout.owner,
            {s: (self.wiring.lanes[s].lane, self.wiring.lanes[s].num_lanes) for s in stages},
            device, job.seed, self.clock, autocast_for(job.training.precision, device),
            observer.batch if observer is not None else None,
        )  # fmt: skip
        if layout.num_ranks > 1:
            dist.barrier()  # a cloud may prepare longer than a message may take
        pipeline.hand_over()

        last = layout.num_stages - 1
        trainer = Trainer(
            rank, pipeline, job.schedule, job.training,
            job.batch_plan(data.num_samples("train")),
            self.wiring.lanes, {stage: AllReduce(self.wiring.lanes[stage]) for stage in stages},
            self.wiring.control,
            lambda ids: _on(device, data.batch("train", ids)),
            data.weight if last in stages else None,
        )  # fmt: skip
        evaluator = Evaluator(
            job.training, rank, pipeline, self.wiring.lanes, data,
            lambda split, ids: _on(device, data.batch(split, ids)), self.reporter, run_dir,
        )  # fmt: skip
        facts = {"the task's data": data.fingerprint()} if job.fields_of(rank) else {}
        parts: dict[str, Stateful] = {"trainer": trainer, "channels": self.wiring}
        checkpoints = self.checkpoints(parts, self.wiring.control, facts)
        trainer.decide = checkpoints.decide
        if trainer.num_updates:  # another cloud may load longer than a message may take
            with self.wiring.alive():
                self.wiring.meet()
        meter = WanMeter(self.wiring)
        self.reporter.event("phase", now=True, name="training")
        self.context.asked.is_armed = job.checkpoint.are_made
        for step in range(trainer.num_updates + 1, job.training.max_steps + 1):
            report = trainer.update(step)
            self.reporter.event("step", **meter.describe(report))
            if report.skipped is not None and rank == 0:  # every rank knows
                self.reporter.event("skipped_update", step=step)
                self.reporter.note(report.skipped)
            if checkpoints.after(step, report.word):
                return self._stop(checkpoints, step)
            every = job.training.evaluate_every
            if every and step % every == 0:
                with self.wiring.alive():
                    evaluator.evaluate("dev", step)
                    self.wiring.meet()  # or the next step would wait for another cloud's decoding
                meter.forget()
        self.context.asked.is_armed = False
        checkpoints.save_last(job.training.max_steps)
        if observer is not None:
            with self.reporter.may_lose(OBSERVATIONS_DIR):
                observer.write(run_dir)
        if self.clock.recorded:  # none if the last step was made before the run went on
            report_typical_step(self.clock, layout.num_ranks, self.reporter)

        # Export, evaluate through the same link, say goodbye.
        with self.wiring.alive():
            for stage, module in stages.items():
                if self.wiring.lanes[stage].leads:
                    export_stage(run_dir, stage, module, data)
            checkpoints.wait()
            self.wiring.meet()  # an evaluation that fails ends all ranks; all have exported now
            self.reporter.event("phase", now=True, name="evaluation")
            evaluator.evaluate("test", job.training.max_steps)
            self.wiring.meet()
            checkpoints.close()
        checkpoints.keep_newest()
        self.reporter.event("finish", num_steps=job.training.max_steps)

    def _stop(self, checkpoints: Checkpointer, step: int) -> None:
        """Before the end, as asked, with a checkpoint of this step."""
        with self.wiring.alive():
            checkpoints.wait()
            self.wiring.meet()
            checkpoints.close()
        self.reporter.event("stop", step=step)
        self.is_stopped = True


def _observer(job: Experiment, rank: int, data: TaskData) -> Observer | None:
    """The leak meter's observer; None if it is off or there is only one cloud."""
    meter, layout = job.leak_meter, job.cluster
    if meter is None:
        return None
    cloud = layout.placement(rank).cloud
    vocabularies = {name: data.vocabulary(name) for name in data.text_fields}
    token_fields = {name: (ids.pad, (ids.bos, ids.eos)) for name, ids in vocabularies.items()}
    return Observer(
        rank, cloud, layout.num_ranks, meter, job.training.max_steps, token_fields,
        job.fields_of_cloud(cloud),
    )  # fmt: skip


def _spread(data: TaskData, count: int) -> Batch:
    """So many training samples from all over the file, which may be sorted."""
    num_samples = data.num_samples("train")
    ids = torch.arange(0, num_samples, max(1, num_samples // count))[:count]
    return data.batch("train", ids)


def _on(device: torch.device, batch: Batch) -> Batch:
    """The batch on the rank's device; sample ids stay where Python reads them."""
    return {name: value if name == "ids" else value.to(device) for name, value in batch.items()}

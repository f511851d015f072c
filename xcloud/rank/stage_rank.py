"""A rank of a pipeline: load what its cloud may see, build its stages, train them with the other
ranks, export, evaluate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from xcloud.cluster.transport import GlooTransport
from xcloud.comm.activation_cache import CachingChannel, describe
from xcloud.comm.state import Stateful, bytes_to_copy, states_of
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import NO_LABEL, Batch, BuildContext, Stage
from xcloud.contracts.task import TaskData
from xcloud.job.experiment import Experiment
from xcloud.join.elastic import StoreFacts, parameters_fact
from xcloud.parallel.averaging_guard import AveragingGuard
from xcloud.parallel.pipeline import Pipeline
from xcloud.parallel.sharding import Sharder, is_sharded, return_freed_memory, whole, whole_blocks
from xcloud.rank.evaluation import Evaluator
from xcloud.rank.exchanges import join_exchanges, join_tied
from xcloud.rank.export import export_stage
from xcloud.rank.loading import load
from xcloud.rank.local_exchanges import LocalTraining
from xcloud.rank.privacy_account import account
from xcloud.rank.role import RankContext, Role
from xcloud.rank.tour import pilot_of
from xcloud.rank.typical_step import KEEP_STEPS, report_typical_step
from xcloud.rank.wan_meter import WanMeter
from xcloud.record.rank_state import ready_file
from xcloud.security.averaging_leaks import AveragingObserver, Victim
from xcloud.security.defences import LABEL
from xcloud.security.observer import OBSERVATIONS_DIR, Observer
from xcloud.security.privacy import CloudPrivacy
from xcloud.survive.checkpointing import Checkpointer
from xcloud.tasks.corpus.text import SPLITS
from xcloud.training.memory_meter import MemoryMeter, optimizer_bytes
from xcloud.training.settings import autocast_for
from xcloud.training.trainer import Trainer, Work
from xcloud.wire.boundaries import observed
from xcloud.wire.ends import Ends
from xcloud.wire.wiring import wire

log = logging.getLogger(__name__)


class StageRank(Role[Experiment]):
    """Holds one or more stages."""

    def __init__(self, context: RankContext[Experiment]) -> None:
        super().__init__(context)
        job, layout = context.job, context.job.cluster
        self.placement = layout.placement(self.rank)
        self.clock = StepClock(
            record_from=max(1, job.max_steps - KEEP_STEPS + 1),
            slowdown=layout.clouds[self.placement.cloud].slowdown,
            device=context.device,
        )
        transport = context.transport or GlooTransport(self.rank, context.device)
        ends = Ends(transport, layout, context.run_dir, self.clock.messages)
        self.wiring = wire(job, ends, self.clock, context.device, context.on_report)
        self.facts = StoreFacts(context.transport) if context.transport is not None else None
        self.records = ends.records
        self.lives = ends.lives
        self._dealers: dict[int, Sharder] = {}  # by stage, where this cloud deals them

    def report(self, lines: bytes) -> None:
        assert self.wiring.control is not None
        self.wiring.control.report(lines)

    def alive(self) -> AbstractContextManager[object]:
        return self.wiring.alive()

    def close(self) -> None:
        self.wiring.close()

    def run(self) -> None:
        self.reporter.event("phase", now=True, name="loading")
        data = load(self.job, self.rank, self.facts or self.wiring.control)
        if self.rank == 0:
            self.reporter.note(data.describe())
        for name, num in data.num_cut.items():
            of = sum(map(data.num_samples, SPLITS))
            said = f"{num:,} of {of:,} {name} texts are longer than {self.job.task.max_length} "
            said += "tokens and were cut (task.max_length)"
            if num and self.rank == 0:
                self.reporter.note(said)
                self.reporter.event("cut", field=name, num=num)
            elif num:  # what this cloud's texts are like is nobody else's matter
                log.warning(said)
        self._train(self._build(data), data)

    @property
    def _tells_skips(self) -> bool:
        """Every rank that shares an update knows; the first of them tells."""
        leaders = self.job.cluster.leaders(self.placement.replica)
        return self.rank == (leaders[0] if self.job.strategy.is_apart else 0)

    def _build(self, data: TaskData) -> dict[int, Stage]:
        job, layout, lanes = self.job, self.job.cluster, self.wiring.lanes
        device, stages = self.context.device, {}
        for stage in self.placement.stages:
            build = context_of(
                job, data, device, self.reporter.note, lanes[stage].lane, lanes[stage].barrier
            )
            if layout.clouds[self.placement.cloud].shard:
                return_freed_memory(device)
                self._dealers[stage] = Sharder(lanes[stage], device)
                build = replace(build, deal=self._dealers[stage].block)
            stages[stage] = job.model.build_stage(stage, layout.num_stages, build).to(device)
            dealt = stage in self._dealers and lanes[stage].leads
            if dealt and any(True for _ in whole_blocks(stages[stage])):
                self.reporter.note(
                    f"stage {stage}: this model is built whole in every rank before it is dealt "
                    "over them, so its weights must fit one rank"
                )
        return stages

    def _train(self, stages: dict[int, Stage], data: TaskData) -> None:
        """From the built stages to their export and evaluation."""
        job, layout, rank = self.job, self.job.cluster, self.rank
        device, run_dir = self.context.device, self.context.run_dir
        observer = _observer(job, rank, data)
        averaged, privacy = None, job.security.privacy
        ports = self.wiring.boundaries.ports
        if observer is not None:
            ports = observed(ports, observer, self.wiring.ends)
            averaged = _averaging_observer(job, observer, stages, data)
        pipeline = Pipeline(
            rank, stages, layout.num_stages, ports, layout.owner,
            {stage: layout.turn(stage, rank) for stage in stages},
            device, job.seed, self.clock, autocast_for(job.training.precision, device),
            observer.batch if observer is not None else None, layout.num_replicas,
        )  # fmt: skip
        if self.facts is not None:
            self.facts.agree(parameters_fact(stages))
        else:
            self.wiring.meet()  # a cloud may prepare longer than a message may take
        pipeline.hand_over()
        for stage, dealer in self._dealers.items():
            dealer.rest(stages[stage])
        local = LocalTraining(
            job.max_steps, partial(layout.stage_cloud, 0), layout.ranks_in, self.reporter,
            Work(job.training.batch_size, 2.0 * job.training.batch_size * job.task.max_length),
        )  # fmt: skip
        guard = AveragingGuard(
            privacy if isinstance(privacy, CloudPrivacy) else None,
            averaged.received if averaged is not None else None,
        )
        exchanges = join_exchanges(
            self.wiring, stages, job.strategy, job.compression.for_tensor, job.seed, local, guard
        )

        last, replica = layout.num_stages - 1, self.placement.replica
        trainer = Trainer(
            rank, pipeline, job.schedule, job.training,
            job.batch_plan(data.num_samples("train")),
            self.wiring.lanes, exchanges, self.wiring.sums,
            lambda ids: _on(device, data.batch("train", ids)),
            data.weight if last in stages else None,
            replica, job.strategy.is_apart, local.is_idle,
            tied=join_tied(self.wiring, stages, job.compression.for_tensor, job.seed),
            privacy=privacy,
            early=[stage for stage, module in stages.items() if not is_sharded(module)],
        )  # fmt: skip
        local.work = lambda: trainer.work
        evaluator = Evaluator(
            job.training, rank, pipeline, self.wiring.lanes, data,
            lambda split, ids: _on(device, data.batch(split, ids)), self.reporter, run_dir,
            layout.lanes_in_step,
        )  # fmt: skip
        facts = {"the task's data": data.fingerprint()} if job.fields_of(rank) else {}
        parts: dict[str, Stateful] = {"trainer": trainer, "channels": self.wiring}
        pilot = pilot_of(job, trainer, self.wiring, self.reporter, run_dir)
        if pilot is not None:
            parts["autopilot"] = trainer.pilot = pilot
        checkpoints = self.checkpoints(parts, self.wiring.control, facts)
        # Rank 0 has a word in every step with all that save, or they go by the step alone.
        is_told = layout.num_replicas == 1 or (job.is_elastic and rank in job.saving_ranks)
        trainer.decide = checkpoints.decide if is_told else checkpoints.decide_by_step
        if trainer.num_updates and rank == 0 and job.cached_boundaries:
            self.reporter.note("rows kept of frozen parts are in no checkpoint: they cross again")
        if trainer.num_updates:  # another cloud may load longer than a message may take
            self.wiring.meet()
            if self.context.holder.places.is_merged(trainer.num_updates):
                local.compare(trainer.num_updates)
        is_first = self.placement.replica == 0  # evaluates and exports; all end equal
        meter, memory = WanMeter(self.wiring), MemoryMeter(device)
        self.wiring.expect_signs_of_life()
        self.reporter.event("phase", now=True, name="training")
        transport = self.context.transport
        if transport is not None and rank not in job.essential_ranks:
            ready_file(run_dir, rank).touch()
        if transport is not None and (transport.is_newcomer or self.context.verdict.from_step):
            if rank in job.saving_ranks:
                local.welcome(trainer.num_updates)
            else:
                trainer.num_updates = local.rejoin()
        if job.scores_first and not trainer.num_updates:  # what training is to improve on
            if is_first:
                evaluator.evaluate("test", 0)
            self.wiring.meet()
            meter.forget()
        self.context.asked.is_armed = is_told and job.checkpoint.are_made
        for step in range(trainer.num_updates + 1, job.training.max_steps + 1):
            with self.clock.paused():
                self.context.turns.take()
            with memory.first_step():
                report = trainer.update(step)
            self.context.turns.note(time.monotonic(), report.step_s)
            self.reporter.event("step", **meter.describe(report))
            if report.skipped is not None and self._tells_skips:
                self.reporter.event("skipped_update", step=step)
                self.reporter.note(report.skipped)
            with self.clock.paused():
                if checkpoints.after(step, report.word):
                    return self._stop(checkpoints, step)
                every = job.training.evaluate_every
                if every and step % every == 0:
                    if is_first:
                        evaluator.evaluate("dev", step)
                    self.wiring.meet()  # or the next step would wait for another cloud's decoding
                    meter.forget()
        self.context.turns.take()  # the end of the run is one too
        self.context.asked.is_armed = False
        checkpoints.save_last(job.training.max_steps)
        if observer is not None:
            with self.reporter.may_lose(OBSERVATIONS_DIR):
                if averaged is not None:
                    averaged.attack()
                observer.write(run_dir)
        if privacy is not None and rank == 0:
            made = trainer.num_updates
            contributions = job.strategy.most_contributions(made)
            told = account(privacy, trainer.plan, made, contributions)
            self.reporter.event("privacy", **told)
        channels = self.wiring.boundaries.channels.values()
        if kept := [c.kept for c in channels if isinstance(c, CachingChannel)]:
            self.reporter.note(describe(kept))
        moments = optimizer_bytes(trainer.optimizers)
        copied = bytes_to_copy(lambda: states_of(parts)) if job.checkpoint.are_made else 0
        figures = memory.describe(stages.values(), moments)
        self.reporter.event("memory", **figures, checkpoint=copied)
        # None is recorded if the last step was made before the run went on.
        if not job.is_elastic and self.clock.recorded:  # it asks all ranks at once
            report_typical_step(self.clock, layout.num_ranks, self.reporter)

        # Export, evaluate through the same link, say goodbye.
        for stage, module in stages.items():
            exports = is_first and self.wiring.lanes[stage].leads
            tensors = whole(module.exported(), exports)
            if exports:
                export_stage(run_dir, stage, module, tensors, data)
        checkpoints.wait()
        self.wiring.meet()  # an evaluation that fails ends all ranks; all have exported now
        self.reporter.event("phase", now=True, name="evaluation")
        if is_first:
            evaluator.evaluate("test", job.training.max_steps)
        self.wiring.meet()
        checkpoints.close()
        checkpoints.keep_newest()
        self.reporter.event("finish", num_steps=job.training.max_steps)

    def _stop(self, checkpoints: Checkpointer, step: int) -> None:
        """Before the end, as asked, with a checkpoint of this step."""
        checkpoints.wait()
        self.wiring.meet()
        checkpoints.close()
        self.reporter.event("stop", step=step)
        self.is_stopped = True


def context_of(
    job: Experiment,
    data: TaskData,
    device: torch.device,
    report: Callable[[str], None],
    lane: int = 0,
    barrier: Callable[[], None] = lambda: None,
) -> BuildContext:
    """For the stages of a rank. lane, barrier: among the ranks that hold the same stage."""
    return BuildContext(
        seed=job.seed,
        device=device,
        cache_dir=job.cache_path,
        vocabularies={name: data.vocabulary(name) for name in data.text_fields},
        sentences=data.sentences,
        samples=partial(_spread, data),
        max_length=job.task.max_length,
        lane=lane,
        barrier=barrier,
        report=report,
        head=data.head,
    )


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
        job.fields_of_cloud(cloud), layout.placement(rank).replica,
    )  # fmt: skip


def _averaging_observer(
    job: Experiment, observer: Observer, stages: Mapping[int, Stage], data: TaskData
) -> AveragingObserver | None:
    """None where nothing is averaged over clouds, or no stage of this rank reads one text."""
    layout = job.cluster
    texts = data.text_fields & job.model.fields(0, layout.num_stages)
    if layout.num_replicas == 1 or 0 not in stages or len(texts) != 1:
        return None
    (text,) = texts
    stage, ids = stages[0], data.vocabulary(text)

    def run(ids_NS: Tensor) -> None:
        ids_NS = ids_NS.to(next(stage.parameters()).device)
        zeros = torch.zeros_like(ids_NS)
        stage(None, {"ids": zeros[:, 0], text: ids_NS, "types": zeros, LABEL: zeros + NO_LABEL})

    words = torch.arange(ids.size)
    words = words[words != ids.pad]
    victim = Victim(stage, run, words, job.task.max_length, job.strategy.covers)
    return AveragingObserver(observer, victim, layout.num_replicas - 1)


def _spread(data: TaskData, count: int) -> Batch:
    """So many training samples from all over the file, which may be sorted."""
    num_samples = data.num_samples("train")
    ids = torch.arange(0, num_samples, max(1, num_samples // count))[:count]
    return data.batch("train", ids)


def _on(device: torch.device, batch: Batch) -> Batch:
    """The batch on the rank's device; sample ids stay where Python reads them."""
    return {name: value if name == "ids" else value.to(device) for name, value in batch.items()}

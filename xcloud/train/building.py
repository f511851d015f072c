"""Build what trains in one rank: wire it to the others, load what its cloud may see, build its
stages, and resume from the checkpoint that the ranks have agreed on. Features change what is built
through a FeatureAtRank (rank/feature.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from xcloud.comm.channel import ReceiveChannel, SendChannel
from xcloud.comm.snapshot import bytes_to_copy
from xcloud.comm.state import StateTree, joined, states_of
from xcloud.comm.step_clock import KEEP_STEPS, StepClock
from xcloud.contracts.model import BASES, Stage, TaskData
from xcloud.experiment import Experiment
from xcloud.features.checkpoints.restored import check_facts, restored
from xcloud.pipeline.batch_plan import SampleFeed
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.exchange import AllReduce, Exchange, digest
from xcloud.pipeline.hook import Hook, Hooks, StepReport
from xcloud.pipeline.overlapped_sums import overlapped_sums
from xcloud.pipeline.pipeline import Pipeline, hand_over
from xcloud.pipeline.settings import autocast_for, is_emulated
from xcloud.pipeline.trainer import LossReport, Trainer
from xcloud.pipeline.wiring import Wiring, wire
from xcloud.rank.agreement import agree_on, agree_where_shared
from xcloud.rank.feature import BuiltRank, Feature, FeatureAtRank
from xcloud.rank.reports import (
    GpuClock,
    MemoryMeter,
    MemoryReport,
    TypicalStep,
    give_freed_memory_back,
)
from xcloud.rank.restarts import enter_late
from xcloud.rank.role import RankContext
from xcloud.rank.row_counts import load_or_be_told
from xcloud.rank.saving import InputDigests
from xcloud.rank.task_data import Evaluator, context_of, note_data, token_pads
from xcloud.record.files import TOKENIZERS_DIR
from xcloud.tasks.tokenizer import keep_tokenizers
from xcloud.train.wan_meter import WanMeter

Context = RankContext[Experiment]
Features = Sequence[FeatureAtRank]


@dataclass(frozen=True)
class ChannelMemories(Hook):
    """A hook that tells this rank's channels whether the update was made. An exploding gradient
    that all ranks skip would else stay in a residual or a delta cache until its sample's next
    visit."""

    channels: Collection[SendChannel | ReceiveChannel]

    def after_update(self, step: int, report: StepReport) -> None:
        for channel in self.channels:
            channel.settle(was_used=report.skipped is None)


def step_clock(job: Experiment, rank: int, device: torch.device) -> StepClock:
    """Build the clock of one rank, which records its last steps span by span."""
    record_from = max(1, job.max_steps - KEEP_STEPS + 1)
    slowdown = job.cluster.clouds[job.cluster.placement(rank).cloud].slowdown
    if device.type == "cuda":
        return GpuClock(device=device, record_from=record_from, slowdown=slowdown)
    return StepClock(record_from=record_from, slowdown=slowdown)


def wired(context: Context, features: Features, clock: StepClock) -> Wiring:
    """Make the links of one rank. All ranks call it at the same time."""
    make_receiver: Callable[..., ReceiveChannel] = ReceiveChannel
    for feature in features:
        make_receiver = feature.receiver(make_receiver)
    job = context.job
    ends = Ends(
        transport=context.transport,
        layout=job.cluster,
        run_dir=context.run_dir,
        messages=clock.messages,
    )
    return wire(
        job,
        ends=ends,
        clock=clock,
        device=context.device,
        on_report=context.on_report,
        make_receiver=make_receiver,
    )


@dataclass(frozen=True)
class RankTraining:
    """The objects that train in one rank, ready for its next update.

    hooks: the objects that act around an update, in the order of the calls.
    """

    data: TaskData
    trainer: Trainer
    hooks: Hooks
    evaluator: Evaluator


def build_training(
    context: Context, wiring: Wiring, features: Features, clock: StepClock
) -> RankTraining:
    """Load the data, build the stages and what trains them, and restore its state if the run goes
    on. All ranks call it at the same time.

    Raises DataError, ConfigError and FrameError where the ranks have not the same to train.
    """
    context.reporter.event("phase", now=True, name="loading")
    data = _load(context)
    memory = MemoryMeter(context.device)  # there is no model yet
    note_data(context, data=data)
    job = context.job
    placement = job.cluster.placement(context.rank)
    stages = {
        stage: build_stage(stage, context, data=data, wiring=wiring, features=features)
        for stage in placement.stages
    }
    built = BuiltRank(context=context, wiring=wiring, data=data, stages=stages, memory=memory)
    pipeline = _pipeline(built, features=features, clock=clock)
    bases = _compare(built)
    if any(ports.boundary.start for ports in pipeline.ports.values()):
        # What a stage measures once for the next one (a basis, a tied weight) crosses before the
        # first step, over the same channels as later messages.
        hand_over(pipeline.stages, pipeline.ports)
    for feature in features:
        # Before anything is restored: this is what the run began with, also in one that resumes.
        feature.complete(built, pipeline=pipeline)
    trainer = _trainer(built, features=features, pipeline=pipeline)
    # A skipped update is reported once: by the first rank of those that share it.
    leader = job.cluster.leaders(placement.replica)[0]
    tells_skips = context.rank == (leader if job.strategy.traits.trains_locally else 0)
    meter = WanMeter(wiring, context.reporter, tells_skips=tells_skips)

    def barrier(claim: bool) -> bool:
        has_claim = wiring.barrier(claim)
        meter.forget()
        return has_claim

    evaluator = Evaluator(
        context=context, pipeline=pipeline, groups=wiring.groups, data=data, barrier=barrier
    )
    facts = {"data": data.own_digests(), "base": bases}
    given = {name: hook for name, hook in job.hooks.items() if not isinstance(hook, Feature)}
    own = {name: hook.join(context) for name, hook in given.items()}
    changing = _changing(built, features, trainer=trainer, meter=meter)
    # All that a checkpoint holds, as one tree. It is complete here, so the hook that saves is made
    # behind the hooks whose state it saves.
    states = joined(
        {"trainer": trainer, "channels": wiring},
        changing.children(),
        {"hooks": own},  # by the names in the config
    )
    # The order is that of the calls (docs/decisions/0016): hooks that change an update, then what
    # saves it, then the evaluation of what was saved, then those that only look.
    hooks = Hooks(
        [
            *own.values(),
            changing,
            _restored(context, wiring=wiring, states=states, facts=facts),
            evaluator,
            *(feature.observer(built, trainer=trainer) for feature in features),
            _memory_report(built, trainer=trainer, memory=memory, states=states),
            _typical_step(context, wiring=wiring, clock=clock),
        ]
    )
    if trainer.num_updates:
        _resume(built, features=features, trainer=trainer)
    meter.forget()
    wiring.start_failure_detection()
    give_freed_memory_back()
    context.reporter.event("phase", now=True, name="training")
    if job.roster.is_elastic:  # the run may have begun without this cloud
        enter_late(
            job,
            rendezvous=context.transport.rendezvous,
            run_dir=context.run_dir,
            trainer=trainer,
            from_step=context.verdict.from_step,
        )
    return RankTraining(data=data, trainer=trainer, hooks=hooks, evaluator=evaluator)


def _load(context: Context) -> TaskData:
    """Load what this cloud may see, and compare it with the checkpoint from which to resume."""
    job = context.job
    goes_on = context.verdict.from_step > 0
    # A run that resumes reads the tokenizers that it began with: with others every row would mean
    # something else.
    task = keep_tokenizers(job.task, folder=context.run_dir / TOKENIZERS_DIR, goes_on=goes_on)
    data = load_or_be_told(job, rendezvous=context.transport.rendezvous, own=task)
    check_facts(context, facts={"data": data.own_digests()})
    return data


def build_stage(
    stage: int, context: Context, data: TaskData, wiring: Wiring, features: Features
) -> Stage:
    """Build one stage of this rank."""
    job = context.job
    group = wiring.groups[stage]
    given = context_of(
        job, data=data, device=context.device, report=context.reporter.remark, group=group
    )
    for feature in features:
        given = feature.build_context(stage, group=group, context=given)
    return job.model.build_stage(stage, job.cluster.num_stages, given).to(given.device)


def _pipeline(built: BuiltRank, features: Features, clock: StepClock) -> Pipeline:
    context = built.context
    job = context.job
    device = context.device
    ports = built.wiring.boundaries.ports
    for feature in features:
        ports = feature.ports(ports, built=built)
    makers = (feature.pipeline for feature in features)
    make = next((make for make in makers if make is not None), Pipeline)
    if is_emulated(job.training.precision, device=device):
        slow = "bf16 in software, some 50 times slower than fp32; take auto or fp32"
        context.reporter.note(f"training.precision=bf16: this processor multiplies {slow}")
    autocast = autocast_for(job.training.precision, device=device)
    return make(context.rank, job.cluster, built.stages, ports, device, job.seed, clock, autocast)


def _compare(built: BuiltRank) -> dict[str, str]:
    """Wait for all ranks, since another cloud may build for longer than a message may take, and
    compare what they were built from. Return the digests of their bases."""
    rendezvous = built.context.transport.rendezvous
    bases = dict[str, str]()
    for stage in built.stages.values():
        bases |= stage.architecture.get(BASES, {})
    shared = {**bases, **built.data.shared_digests()}
    if built.context.job.roster.is_elastic:  # every replica holds all of it
        # All replicas begin with the same parameters, early or late.
        digests = [digest(built.stages[stage].parameters()) for stage in sorted(built.stages)]
        begun_with = bytes(torch.cat(digests).tolist()).hex()
        facts = {"the parameters before the first update": begun_with, **shared}
        agree_on("parameters", rendezvous, facts=facts)
    else:
        built.wiring.barrier()
        agree_where_shared(rendezvous, facts=shared)
    return bases


def _trainer(built: BuiltRank, features: Features, pipeline: Pipeline) -> Trainer:
    context = built.context
    job = context.job
    layout = job.cluster
    data = built.data
    replica = layout.placement(context.rank).replica
    trains_locally = job.strategy.traits.trains_locally
    feed = SampleFeed(
        plan=job.batch_plan(data.num_samples("train")),
        turns=pipeline.turns.values(),
        fetch=partial(data.batch, "train"),
        weigh=data.weight if layout.num_stages - 1 in built.stages else None,
        token_pads=token_pads(job, data=data, stages=built.stages),
        # Replicas that train apart draw from shares of the samples; those that share an update
        # share out its micro-batches.
        of_replica=(replica, layout.num_replicas) if trains_locally else (0, 1),
    )
    is_private = any(feature.hides_losses for feature in features)
    makers = (feature.trainer for feature in features)
    make = next((make for make in makers if make is not None), Trainer)
    return make(
        pipeline=pipeline,
        schedule=job.schedule,
        settings=job.training,
        feed=feed,
        groups=built.wiring.groups,
        exchange=_exchange(built, features=features),
        sums=built.wiring.sums,
        losses=LossReport(
            is_silent=replica > 0 and (is_private or not trains_locally), is_private=is_private
        ),
    )


def _exchange(built: BuiltRank, features: Features) -> Exchange:
    """Return what brings this rank's gradients together with those of others."""
    watches = (feature.watch for feature in features)
    watch = next((watch for watch in watches if watch is not None), None)
    guards = (feature.guard for feature in features)
    guard = next((guard for guard in guards if guard is not None), None)
    exchanges = (feature.exchange(built, watch=watch, guard=guard) for feature in features)
    made = next((exchange for exchange in exchanges if exchange is not None), None)
    return AllReduce(built.wiring.groups) if made is None else made


def _changing(built: BuiltRank, features: Features, trainer: Trainer, meter: Hook) -> Hooks:
    """Return the hooks that act on an update, and have a state."""
    wiring = built.wiring
    sums = None
    shares_stages = any(len(group.ranks) > 1 for group in wiring.groups.values())
    # Sums over a stage's ranks begin while the last backward still runs, unless somebody wants
    # each micro-batch's own gradient first.
    if shares_stages and not any(feature.changes_each_gradient for feature in features):
        sums = overlapped_sums(trainer, groups=wiring.groups)
    memories = None
    if built.context.job.compression.has_memory:
        memories = ChannelMemories([*wiring.boundaries.channels.values()])
    own = (feature.hook(built, trainer) for feature in features)
    return Hooks([sums, memories, *own, meter])


def _restored(context: Context, wiring: Wiring, states: StateTree, facts: InputDigests) -> Hook:
    """Restore `states` from the checkpoint from which the run resumes. Return the hook that saves
    checkpoints.

    facts: values that must be the same as when the checkpoint was made.
    """
    job = context.job
    is_saving = job.roster.is_elastic and context.rank in job.roster.saving
    return restored(
        context,
        states=states,
        control=wiring.control,
        facts=facts,
        # Rank 0's signal reaches, in every step, all ranks that save.
        is_told=job.cluster.num_replicas == 1 or is_saving,
    )


def _memory_report(
    built: BuiltRank, trainer: Trainer, memory: MemoryMeter, states: StateTree
) -> MemoryReport:
    copied = None
    if built.context.job.checkpoint.are_made:
        copied = partial(bytes_to_copy, partial(states_of, states))
    return MemoryReport(
        trainer=trainer,
        reporter=built.context.reporter,
        meter=memory,
        queued=built.wiring.ends.queued,
        bytes_to_copy=copied,
    )


def _typical_step(context: Context, wiring: Wiring, clock: StepClock) -> Hook | None:
    if context.job.roster.is_elastic:  # it asks all ranks at once
        return None
    layout = context.job.cluster
    owner = layout.cloud_of(context.rank) if layout.between_owners else ""
    return TypicalStep(clock, control=wiring.control, reporter=context.reporter, owner=owner)


def _resume(built: BuiltRank, features: Features, trainer: Trainer) -> None:
    """Join the other ranks in a run that resumes. Compare replicas that must be equal."""
    context = built.context
    if context.rank == 0:
        for said in filter(None, (feature.resumed for feature in features)):
            context.reporter.note(said)
    built.wiring.barrier()  # another cloud may load longer than a message may take
    if context.job.places.is_merged(trainer.num_updates):
        trainer.exchange.compare(trainer.num_updates)

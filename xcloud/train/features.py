"""What the settings of a job add to the core: the one list of features. Each is a Hook, or builds
one, in a file of its own; no other file of the core knows any of them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from xcloud.comm.snapshot import bytes_to_copy
from xcloud.comm.state import StateTree, states_of
from xcloud.comm.step_clock import KEEP_STEPS, StepClock
from xcloud.contracts.model import BASES, BuildContext, Stage, TaskData
from xcloud.experiment import Experiment
from xcloud.features.activation_cache.cache import (
    MEGABYTE,
    CacheReport,
    CachingPipeline,
    activation_caches,
)
from xcloud.features.autopilot.pilot import pilot_of
from xcloud.features.checkpoints.restored import check_facts, restored
from xcloud.features.leak_meter.observers import LeakObservers, leak_observers, observed
from xcloud.features.privacy.account import PrivacyAccount
from xcloud.features.privacy.gradients import PrivateGradients
from xcloud.features.replicas.links import replica_links
from xcloud.features.sharding.sharder import Sharder, sharders
from xcloud.features.tied.gradients import tied_gradients
from xcloud.job.needs import ties_ends
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.exchange import AllReduce, Exchange
from xcloud.pipeline.hook import Hook, Hooks
from xcloud.pipeline.overlapped_sums import overlapped_sums
from xcloud.pipeline.pipeline import Pipeline, hand_over
from xcloud.pipeline.settings import autocast_for, is_emulated
from xcloud.pipeline.trainer import Trainer
from xcloud.pipeline.wiring import wire
from xcloud.rank.agreement import agree_on, agree_where_shared
from xcloud.rank.channel_memories import ChannelMemories
from xcloud.rank.reports import GpuClock, MemoryMeter, MemoryReport, TypicalStep
from xcloud.rank.restarts import enter_late, parameters_fact
from xcloud.rank.role import RankContext
from xcloud.rank.row_counts import load_or_be_told
from xcloud.rank.saving import Facts
from xcloud.rank.task_data import Evaluator
from xcloud.record.files import TOKENIZERS_DIR
from xcloud.tasks.tokenizer import keep_tokenizers
from xcloud.train.averaging import averager_of_ends, replicas_exchange


def step_clock(job: Experiment, rank: int, device: torch.device) -> StepClock:
    """Build the clock of one rank, which records its last steps span by span."""
    record_from = max(1, job.max_steps - KEEP_STEPS + 1)
    slowdown = job.cluster.clouds[job.cluster.placement(rank).cloud].slowdown
    if device.type == "cuda":
        return GpuClock(device, record_from, slowdown=slowdown)
    return StepClock(record_from, slowdown)


class Features:
    """The features of one rank. The methods stand in the order in which stage_rank.py calls
    them."""

    def __init__(self, context: RankContext[Experiment], ends: Ends, clock: StepClock) -> None:
        self.context = context
        self.job = context.job
        self.rank = context.rank
        self.reporter = context.reporter
        self.clock = clock
        self.placement = self.job.cluster.placement(self.rank)
        self.caches = activation_caches(
            self.job.cluster,
            self.job.boundaries,
            rank=self.rank,
            max_bytes=round(self.job.training.activation_cache_mb * MEGABYTE),
        )
        self.wiring = wire(
            self.job,
            ends,
            clock=clock,
            device=context.device,
            on_report=context.on_report,
            make_receiver=self.caches.receiver,
        )
        self._sharders: dict[int, Sharder] = {}
        if self.job.cluster.clouds[self.placement.cloud].shard:
            held = {stage: self.wiring.groups[stage] for stage in self.placement.stages}
            self._sharders = sharders(held, context.device, note=self.reporter.note)

    def load(self) -> TaskData:
        """Load what this cloud may see, and hold it against the checkpoint to go on from."""
        goes_on = self.context.verdict.from_step > 0
        task = keep_tokenizers(
            self.job.task, self.context.run_dir / TOKENIZERS_DIR, goes_on=goes_on
        )
        data = load_or_be_told(self.job, self.context.transport.rendezvous, own=task)
        check_facts(self.context, {"data": data.own_digests()})
        self._memory = MemoryMeter(self.context.device)  # there is no model yet
        return data

    def stage(self, number: int, context: BuildContext) -> Stage:
        """Build a stage, block by block over the ranks of a cloud that shards it."""
        if (sharder := self._sharders.get(number)) is not None:
            context = replace(context, deal=sharder.block)
        num_stages = self.job.cluster.num_stages
        return self.job.model.build_stage(number, num_stages, context).to(context.device)

    def leaks(self, stages: Mapping[int, Stage], data: TaskData) -> LeakObservers | None:
        """Return the observers of a job with a leak meter."""
        return leak_observers(self.context, data, stages=stages) if self.job.leak_meter else None

    def pipeline(self, stages: Mapping[int, Stage], leaks: LeakObservers | None) -> Pipeline:
        """Return the pipeline of this rank, observed and with caches where the job has them."""
        job = self.job
        device = self.context.device
        ports = self.wiring.boundaries.ports
        if leaks is not None:
            ports = observed(ports, leaks.observer, ends=self.wiring.ends)
        autocast = autocast_for(job.training.precision, device)
        if is_emulated(job.training.precision, device):
            slow = "bf16 in software, some 50 times slower than fp32; take auto or fp32"
            self.reporter.note(f"training.precision=bf16: this processor multiplies {slow}")
        of = (self.rank, job.cluster, stages, ports, device, job.seed, self.clock, autocast)
        return CachingPipeline(self.caches, *of) if self.caches else Pipeline(*of)

    def meet(self, stages: Mapping[int, Stage], data: TaskData) -> dict[str, str]:
        """Wait for all ranks: another cloud may build its stages longer than a message may take.
        Compare what they were built from. Return its digests."""
        rendezvous = self.context.transport.rendezvous
        bases = dict[str, str]()
        for stage in stages.values():
            bases |= stage.architecture.get(BASES, {})
        shared = {**bases, **data.shared_digests()}
        if self.job.roster.is_elastic:  # every replica holds all of it
            agree_on("parameters", rendezvous, facts={**parameters_fact(stages), **shared})
        else:
            self.wiring.meet()
            agree_where_shared(rendezvous, shared)
        return bases

    def hand_over(self, pipeline: Pipeline) -> None:
        """Give each stage what it begins with, then shard what is left of them."""
        if any(ports.boundary.start for ports in pipeline.ports.values()):
            hand_over(pipeline.stages, pipeline.ports)
        for number, sharder in self._sharders.items():
            sharder.rest(pipeline.stages[number])

    def exchange(self, stages: Mapping[int, Stage], leaks: LeakObservers | None) -> Exchange:
        """Return what brings this rank's gradients together with those of others."""
        job = self.job
        wiring = self.wiring
        if job.cluster.num_replicas == 1:
            return AllReduce(wiring.groups)
        links = replica_links(
            wiring.ends, job.cluster, device=self.context.device, rejoin=wiring.rejoin
        )
        wiring.averaging.append(links)
        group = wiring.groups[min(stages)]  # the same ranks hold all stages of this one
        watch = leaks.averaged.received if leaks is not None and leaks.averaged else None
        return replicas_exchange(
            job, links, group=group, stages=stages, reporter=self.reporter, watch=watch
        )

    def hooks(
        self,
        trainer: Trainer,
        leaks: LeakObservers | None,
        evaluator: Evaluator,
        meter: Hook,
        facts: Facts,
    ) -> Hooks:
        """Return all hooks of this rank, in the order in which an update calls them.

        facts: what must be as it was when a checkpoint was made.
        """
        job = self.job
        context = self.context
        wiring = self.wiring
        own = {name: hook.join(context) for name, hook in job.hooks.items()}
        changing = Hooks(
            [
                self._own_gradients(trainer),
                self._tied_gradients(trainer),
                self._channel_memories(),
                self._autopilot(trainer),
                meter,
            ]
        )
        stateful: StateTree = {"trainer": trainer, "channels": wiring, **changing.children()}
        stateful = {**stateful, "hooks": own}  # by the names in the config
        copied = None
        if job.checkpoint.are_made:
            copied = partial(bytes_to_copy, partial(states_of, stateful))
        return Hooks(
            [
                *own.values(),
                changing,
                restored(
                    context,
                    stateful,
                    control=wiring.control,
                    facts=facts,
                    is_told=self.is_directed,
                ),
                evaluator,
                leaks,
                self._privacy_account(trainer),
                self._cache_report(),
                MemoryReport(
                    trainer,
                    self.reporter,
                    meter=self._memory,
                    queued=wiring.ends.queued,
                    bytes_to_copy=copied,
                ),
                self._typical_step(),
            ]
        )

    def _own_gradients(self, trainer: Trainer) -> Hook | None:
        """Return what acts on this rank's gradients as they come."""
        privacy = self.job.security.privacy
        groups = self.wiring.groups
        if privacy is not None and privacy.unit == "sample":
            return PrivateGradients(privacy, trainer)
        if any(group.group_size > 1 for group in groups.values()):
            return overlapped_sums(trainer, groups)
        return None

    def _tied_gradients(self, trainer: Trainer) -> Hook | None:
        job = self.job
        if not ties_ends(job):
            return None
        return tied_gradients(
            trainer,
            self.wiring.groups,
            layout=job.cluster,
            choose=job.compression.for_tensor,
            seed=job.seed,
            join=averager_of_ends(self.wiring, job.cluster, device=self.context.device),
        )

    def _channel_memories(self) -> Hook | None:
        if not self.job.compression.has_memory:
            return None
        return ChannelMemories([*self.wiring.boundaries.channels.values()])

    def _autopilot(self, trainer: Trainer) -> Hook | None:
        if self.job.autopilot is None:
            return None
        return pilot_of(
            self.context, trainer, wiring=self.wiring, program_bytes=self._memory.program_bytes
        )

    def _privacy_account(self, trainer: Trainer) -> Hook | None:
        job = self.job
        if job.security.privacy is None or self.rank != 0:
            return None
        return PrivacyAccount(
            job.security.privacy,
            trainer,
            contributions=job.strategy.traits.max_contributions,
            reporter=self.reporter,
        )

    def _cache_report(self) -> Hook | None:
        if not self.job.cached_boundaries:
            return None
        return CacheReport(self.wiring.boundaries.channels.values(), self.reporter)

    def _typical_step(self) -> Hook | None:
        if self.job.roster.is_elastic:  # it asks all ranks at once
            return None
        return TypicalStep(self.clock, self.wiring.control, reporter=self.reporter)

    def resume(self, trainer: Trainer) -> None:
        """Meet the other ranks in a run that goes on. Compare replicas that must be equal."""
        if not trainer.num_updates:
            return
        if self.rank == 0 and self.job.cached_boundaries:
            self.reporter.note("the activation cache is not checkpointed: cached rows cross again")
        self.wiring.meet()  # another cloud may load longer than a message may take
        if self.job.places.is_merged(trainer.num_updates):
            trainer.exchange.compare(trainer.num_updates)

    @property
    def is_directed(self) -> bool:
        """True where rank 0's control signal reaches, in every step, all ranks that save."""
        job = self.job
        return job.cluster.num_replicas == 1 or (
            job.roster.is_elastic and self.rank in job.roster.saving
        )

    def enter(self, trainer: Trainer) -> None:
        """Enter a run that may have begun without this cloud."""
        if self.job.roster.is_elastic:
            enter_late(
                self.job,
                self.context.transport.rendezvous,
                run_dir=self.context.run_dir,
                trainer=trainer,
                from_step=self.context.verdict.from_step,
            )

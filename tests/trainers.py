"""All ranks of a toy job in threads, joined by the real wiring over links in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.pipelines import BORDER, ToyStage, in_threads, pipeline, samples, wired
from xcloud.base.errors import TrainingDiverged
from xcloud.comm.channel import Boundary
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phased, Selectable
from xcloud.comm.state import State, Stateful, load_states, states_of
from xcloud.contracts.model import Stage
from xcloud.features.replicas.links import averager_of_ends, replica_links
from xcloud.features.replicas.replicas import Replicas
from xcloud.features.tied.gradients import tied_gradients
from xcloud.features.two_buffered.schedule import TwoBuffered
from xcloud.features.two_buffered.trainer import TwoBufferedPipeline, TwoBufferedTrainer
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.transport import CPU
from xcloud.pipeline.batch_plan import BatchPlan, SampleFeed, cut, samples_of_replica
from xcloud.pipeline.exchange import AllReduce, Exchange
from xcloud.pipeline.hook import Hook, Hooks, StepReport
from xcloud.pipeline.overlapped_sums import overlapped_sums
from xcloud.pipeline.pipeline import Pipeline
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.pipeline.settings import Optimizer, Training
from xcloud.pipeline.trainer import LossReport, Trainer
from xcloud.pipeline.wiring import Wiring
from xcloud.record.reporter import Reporter
from xcloud.train.building import ChannelMemories

LAYOUTS = {
    "one process": ClusterLayout({"local": Cloud(1, [0, 1, 2])}, "free"),
    "three clouds": ClusterLayout({"a": Cloud(), "b": Cloud(), "c": Cloud()}),
    "lanes": ClusterLayout({"a": Cloud(2), "b": Cloud(), "c": Cloud(2)}),
}

SKIP = Training(9, batch_size=8, optimizer=Optimizer(0.1, 1), on_divergence="skip")


@dataclass
class Rank:
    """One rank of the job, and all that it must go on from."""

    trainer: Trainer
    wiring: Wiring
    reporter: Reporter
    told: list[bytes]
    hooks: list[Hook]
    strategy: Strategy = field(default_factory=Strategy)

    @property
    def number(self) -> int:
        return self.trainer.pipeline.rank

    def update(self, step: int) -> StepReport:
        hooks = Hooks(self.hooks)
        report = self.trainer.update(step, hooks)
        hooks.after_update(step, report)
        return report

    def hook(self, kind: type[Any]) -> Any:
        return next(hook for hook in self.hooks if isinstance(hook, kind))

    @property
    def stateful(self) -> dict[str, Stateful]:
        own = {"trainer": self.trainer, "channels": self.wiring}
        return own | {p.name: p for p in self.hooks if p.name in ("tied",)}

    def state_dict(self) -> State:
        return states_of(self.stateful)

    def load_state_dict(self, state: State) -> None:
        load_states(self.stateful, state, "a rank")


@dataclass(frozen=True)
class Guarded:
    """What is done to gradients before they leave a cloud, whose ranks then report no losses.

    guard: what Replicas takes to make its guards. hook: makes the hook of a trainer.
    """

    guard: Callable[..., Any] | None = None
    hook: Callable[[Trainer], Hook] | None = None


def ranks(
    layout: ClusterLayout,
    training: Training,
    compression: Compression | Phased | Selectable | None = None,
    schedule: Schedule = GPipe(2),  # noqa: B008
    plan: BatchPlan | None = None,
    strategy: Strategy = Strategy(),  # noqa: B008
    guarded: Guarded | None = None,
    toy: Callable[[int, int], Stage] = ToyStage,
    are_early: bool = True,
    boundaries: Mapping[int, Boundary] | None = None,
    kept_bytes: int = 0,
    weigh: Callable[[Tensor], float] = len,
) -> list[Rank]:
    """Of 40 samples, unless `plan` says otherwise; without compression, unless it is given.
    toy: makes a stage, by its number and the number of stages. are_early: sums inside a cloud may
    begin in the backward. boundaries: by the stage before; None: the toy's. kept_bytes: see
    wire."""
    layout = strategy.arrange(layout)
    boundaries = boundaries or dict.fromkeys(range(layout.num_stages - 1), BORDER)
    compression = compression or Compression()

    def made(wiring: Wiring, held: Pipeline) -> Rank:
        told: list[bytes] = []
        place = layout.placement(held.rank)
        is_last = layout.num_stages - 1 in held.stages
        feed = SampleFeed(
            plan or BatchPlan(40, training.batch_size, 1),
            held.turns.values(),
            samples,
            (lambda ids: float(weigh(ids))) if is_last else None,
            of_replica=(place.replica, layout.num_replicas)
            if strategy.traits.trains_locally
            else (0, 1),
        )
        reporter, choose = Reporter(held.rank, place.cloud, told.append), compression.for_tensor
        exchange: Exchange = AllReduce(wiring.groups)

        def of(replica: int, step: int) -> Tensor:
            m = schedule.num_micro_batches
            pieces = cut(feed.plan.ids(step), m * training.accumulate_steps)
            return samples_of_replica(pieces, m, replica, layout.num_replicas)

        if layout.num_replicas > 1 and strategy.averaging is not None:
            links = replica_links(wiring.ends, layout, CPU, wiring.rejoin)
            wiring.averaging.append(links)
            exchange = strategy.averaging.join(
                Replicas(
                    links, wiring.groups[min(held.stages)], held.stages, choose, 7,
                    training.max_steps, [len(of(r, 1)) for r in range(layout.num_replicas)],
                    lambda replica, step: float(weigh(of(replica, step))), reporter,
                    guard=guarded.guard if guarded is not None else None,
                )
            )  # fmt: skip
        is_private = guarded is not None and layout.num_replicas > 1
        make: type[Trainer] = Trainer
        if isinstance(schedule, TwoBuffered):
            make = TwoBufferedTrainer
        trainer = make(
            held, schedule, training, feed, wiring.groups, exchange, wiring.sums,
            LossReport(
                place.replica > 0 and (is_private or not strategy.traits.trains_locally),
                is_private,
            ),
        )  # fmt: skip
        hooks: list[Hook] = [ChannelMemories([*wiring.boundaries.channels.values()])]
        if guarded is not None and guarded.hook is not None:
            hooks.append(guarded.hook(trainer))
        elif are_early and make is Trainer:
            hooks.append(overlapped_sums(trainer, wiring.groups))
        tied = tied_gradients(
            trainer,
            wiring.groups,
            layout,
            choose,
            seed=7,
            join=averager_of_ends(wiring, layout, CPU, line="tied"),
        )
        if tied is not None:
            hooks.append(tied)
        return Rank(trainer, wiring, reporter, told, hooks, strategy)

    def stages() -> dict[int, Stage]:
        return {stage: toy(stage, layout.num_stages) for stage in range(layout.num_stages)}

    joined = wired(layout, boundaries, compression, kept_bytes=kept_bytes)
    # In turn: threads share torch's generator.
    held = [pipeline(one, layout, stages()) for one in joined]
    if isinstance(schedule, TwoBuffered):
        held = [
            TwoBufferedPipeline(p.rank, p.layout, p.stages, p.ports, p.device, p.seed, p.clock)
            for p in held
        ]
    both = zip(joined, held, strict=True)
    return in_threads([lambda one=one, own=own: made(one.wiring, own) for one, own in both])


def update(job: Sequence[Rank], step: int) -> list[StepReport | str]:
    """All ranks at once; what each reports, or how it diverges."""

    def one(rank: Rank) -> StepReport | str:
        try:
            return rank.update(step)
        except TrainingDiverged as error:
            return str(error)

    return in_threads([lambda r=rank: one(r) for rank in job])


def spoil(job: Sequence[Rank], stage: int, value: float) -> Any:
    """From now on the gradient of this stage's own bias, and of nothing else, holds `value`."""
    pipelines = (rank.trainer.pipeline for rank in job)
    held = next(p for p in pipelines if stage in p.stages)  # of one lane only
    bias = next(p for p in held.stages[stage].parameters() if p.ndim == 1)
    return bias.register_hook(lambda gradient: torch.full_like(gradient, value))


def clouds(count: int, num_ranks: Sequence[int] | int = 1) -> ClusterLayout:
    numbers = [num_ranks] * count if isinstance(num_ranks, int) else num_ranks
    return ClusterLayout({f"c{i}": Cloud(numbers[i]) for i in range(count)}, "free")


def values(job: Sequence[Rank], stage: int) -> list[Tensor]:
    """The stage's parameters in every rank that holds it, as one vector each."""
    found = [r.trainer.pipeline.stages.get(stage) for r in job]
    return [
        torch.cat([p.detach().reshape(-1) for p in s.parameters()]) for s in found if s is not None
    ]

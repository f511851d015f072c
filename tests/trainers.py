"""All ranks of a toy job in threads, joined by the real wiring over links in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.pipelines import BORDER, ToyStage, in_threads, pipeline, samples, wired
from xcloud.base.errors import TrainingDiverged
from xcloud.cluster.layout import Cloud, ClusterLayout
from xcloud.comm.boundary import Boundary
from xcloud.comm.chain import Chain
from xcloud.comm.compression import Compression, Phased, Selectable
from xcloud.comm.state import State, load_states, states_of
from xcloud.contracts.model import Stage
from xcloud.parallel.averaging_guard import AveragingGuard
from xcloud.parallel.pipeline import Pipeline
from xcloud.parallel.schedule import GPipe, Schedule
from xcloud.parallel.strategy import Strategy
from xcloud.rank.exchanges import join_exchanges, join_tied
from xcloud.rank.local_exchanges import LocalTraining
from xcloud.record.reporter import Reporter
from xcloud.security.privacy import CloudPrivacy, Privacy
from xcloud.training.batch_plan import BatchPlan
from xcloud.training.optimizer import Optimizer
from xcloud.training.settings import Training
from xcloud.training.trainer import StepReport, Trainer, Work
from xcloud.wire.wiring import Wiring

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
    strategy: Strategy = field(default_factory=Strategy)

    def state_dict(self) -> State:
        return states_of({"trainer": self.trainer, "channels": self.wiring})

    def load_state_dict(self, state: State) -> None:
        load_states({"trainer": self.trainer, "channels": self.wiring}, state, "a rank")


def ranks(
    layout: ClusterLayout,
    training: Training,
    compression: Compression | Phased | Selectable | None = None,
    schedule: Schedule = GPipe(2),  # noqa: B008
    plan: BatchPlan | None = None,
    strategy: Strategy = Strategy(),  # noqa: B008
    privacy: Privacy | None = None,
    toy: Callable[[int, int], Stage] = ToyStage,
    are_early: bool = True,
    boundaries: Mapping[int, Boundary] | None = None,
    kept_bytes: int = 0,
) -> list[Rank]:
    """Of 40 samples, unless `plan` says otherwise; without compression, unless it is given.
    toy: makes a stage, by its number and the number of stages. are_early: sums inside a cloud may
    begin in the backward. boundaries: by the stage before; None: the toy's. kept_bytes: see
    wire."""
    layout = strategy.arrange(layout)
    boundaries = boundaries or dict.fromkeys(range(layout.num_stages - 1), BORDER)
    compression = compression or Compression(Chain(), Chain())
    guard = AveragingGuard(privacy if isinstance(privacy, CloudPrivacy) else None)

    def made(wiring: Wiring, held: Pipeline) -> Rank:
        told: list[bytes] = []
        cloud = layout.placement(held.rank).cloud
        local = LocalTraining(
            training.max_steps,
            partial(layout.stage_cloud, 0),
            layout.ranks_in,
            Reporter(held.rank, cloud, told.append),
            Work(training.batch_size, 1e6),
        )
        trainer = Trainer(
            rank=held.rank,
            pipeline=held,
            schedule=schedule,
            training=training,
            plan=plan or BatchPlan(40, training.batch_size, 1),
            lanes={stage: wiring.lanes[stage] for stage in held.stages},
            exchanges=join_exchanges(
                wiring, held.stages, strategy, compression.for_tensor, 7, local, guard
            ),
            sums=wiring.sums,
            fetch=samples,
            weight=(lambda ids: float(len(ids))) if layout.num_stages - 1 in held.stages else None,
            replica=layout.placement(held.rank).replica,
            privacy=privacy,
            early=held.stages if are_early else (),
            apart=strategy.is_apart,
            is_idle=lambda step: local.is_idle(step),
            tied=join_tied(wiring, held.stages, compression.for_tensor, seed=7),
        )
        local.work = lambda: trainer.work
        return Rank(trainer, wiring, local.reporter, told, strategy)

    def stages() -> dict[int, Stage]:
        return {stage: toy(stage, layout.num_stages) for stage in range(layout.num_stages)}

    ties_ends = stages()[0].tied() is not None
    joined = wired(layout, boundaries, compression, ties_ends=ties_ends, kept_bytes=kept_bytes)
    # In turn: threads share torch's generator.
    held = [pipeline(one, layout, stages()) for one in joined]
    both = zip(joined, held, strict=True)
    return in_threads([lambda one=one, own=own: made(one.wiring, own) for one, own in both])


def trainers(layout: ClusterLayout, training: Training) -> list[Trainer]:
    return [rank.trainer for rank in ranks(layout, training)]


def update(job: Sequence[Trainer], step: int) -> list[StepReport | str]:
    """All ranks at once; what each reports, or how it diverges."""

    def one(trainer: Trainer) -> StepReport | str:
        try:
            return trainer.update(step)
        except TrainingDiverged as error:
            return str(error)

    return in_threads([lambda t=trainer: one(t) for trainer in job])


def spoil(job: Sequence[Trainer], stage: int, value: float) -> Any:
    """From now on the gradient of this stage's own bias, and of nothing else, holds `value`."""
    trainer = next(t for t in job if stage in t.pipeline.stages)  # of one lane only
    bias = next(p for p in trainer.pipeline.stages[stage].parameters() if p.ndim == 1)
    return bias.register_hook(lambda gradient: torch.full_like(gradient, value))

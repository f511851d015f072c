"""All ranks of a toy job in threads, joined by the real wiring over links in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.pipelines import BORDER, in_threads, pipeline, samples, wired
from xcloud.cluster.layout import Cloud, ClusterLayout
from xcloud.comm.chain import Chain
from xcloud.comm.memory import State, load_states, states_of
from xcloud.comm.phases import Compression, Phased
from xcloud.errors import TrainingDiverged
from xcloud.parallel.pipeline import Pipeline
from xcloud.parallel.schedule import GPipe, Schedule
from xcloud.parallel.strategy import Strategy
from xcloud.run.exchanges import join_exchanges
from xcloud.run.wiring import Wiring
from xcloud.security.privacy import CloudPrivacy, Privacy
from xcloud.training.batch_plan import BatchPlan
from xcloud.training.optimizer import Optimizer
from xcloud.training.settings import Training
from xcloud.training.trainer import StepReport, Trainer

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

    def state_dict(self) -> State:
        return states_of({"trainer": self.trainer, "channels": self.wiring})

    def load_state_dict(self, state: State) -> None:
        load_states({"trainer": self.trainer, "channels": self.wiring}, state, "a rank")


def ranks(
    layout: ClusterLayout,
    training: Training,
    compression: Compression | Phased | None = None,
    schedule: Schedule = GPipe(2),  # noqa: B008
    plan: BatchPlan | None = None,
    strategy: Strategy = Strategy(),  # noqa: B008
    privacy: Privacy | None = None,
) -> list[Rank]:
    """Of 40 samples, unless `plan` says otherwise; without compression, unless it is given."""
    layout = strategy.arrange(layout)
    borders = dict.fromkeys(range(layout.num_stages - 1), BORDER)
    compression = compression or Compression(Chain(), Chain())

    def made(wiring: Wiring, held: Pipeline) -> Rank:
        trainer = Trainer(
            rank=held.rank,
            pipeline=held,
            schedule=schedule,
            training=training,
            plan=plan or BatchPlan(40, training.batch_size, 1),
            lanes={stage: wiring.lanes[stage] for stage in held.stages},
            exchanges=join_exchanges(
                wiring,
                held.stages,
                strategy,
                compression.for_tensor,
                seed=7,
                privacy=privacy if isinstance(privacy, CloudPrivacy) else None,
            ),
            sums=wiring.sums,
            fetch=samples,
            weight=(lambda ids: float(len(ids))) if layout.num_stages - 1 in held.stages else None,
            replica=layout.placement(held.rank).replica,
            privacy=privacy,
        )
        return Rank(trainer, wiring)

    joined = wired(layout, borders, compression)
    held = [pipeline(one, layout) for one in joined]  # in turn: threads share torch's generator
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

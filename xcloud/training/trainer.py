"""What one rank does with its parameters: batches in, updates out. Below it lies the pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from xcloud.comm.state import State, Stateful, load_states, states_of, whole_number
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.model import Batch
from xcloud.parallel.control import Pilot, Reply, Signal, StageSums
from xcloud.parallel.exchange import FlatBuffer, GradientExchange
from xcloud.parallel.overlapped_sums import OverlappedSums
from xcloud.parallel.pipeline import Pipeline
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.schedule import Schedule
from xcloud.parallel.tied import TiedGradients
from xcloud.security.privacy import Privacy, SamplePrivacy
from xcloud.training.batch_plan import BatchPlan, cut, samples_of
from xcloud.training.divergence import DivergenceGuard
from xcloud.training.private_gradients import PrivateGradients
from xcloud.training.settings import Training
from xcloud.training.trained_module import TrainedModule


@dataclass
class StepReport:
    """What one rank has to say of one update. loss is None but in one rank per job (replicas that
    update apart: per replica), and None there too if the update was skipped: `skipped` then says
    why, for the user."""

    step: int
    step_s: float
    clock: StepClock
    learning_rate: float
    loss: float | None
    grad_norm: float | None
    num_samples: int
    num_tokens: float
    skipped: str | None = None
    word: Signal = Signal.GO_ON  # what all ranks do now


class Work(NamedTuple):
    """What a replica trains on in one update. weight: in the loss, 1 in ranks that do not hold the
    last stage."""

    num_samples: int
    weight: float


@dataclass
class Trainer:
    """lanes, exchanges: by stage, for those of this rank. fetch(ids) gives the visible fields of
    samples; weight(ids) their weight in the loss, and is None in ranks that do not hold the last
    stage. replica: of the pipeline, that of this rank. apart: each replica makes updates of its
    own, from its own micro-batches. is_idle(step): whether this replica leaves that update out;
    its exchanges hear of it all the same. tied: for ranks at the ends of a pipeline that share a
    matrix. privacy: with SamplePrivacy every micro-batch is one sample, whose gradient is clipped.
    With either kind replicas keep their losses to themselves; the loss that replica 0 tells is an
    estimate from one rank's samples. early: stages whose exchanges begin with the sum over
    `lanes`, which the last backward may then start; never with SamplePrivacy."""

    rank: int
    pipeline: Pipeline
    schedule: Schedule
    training: Training
    plan: BatchPlan
    lanes: Mapping[int, RankGroup]
    exchanges: Mapping[int, GradientExchange]
    sums: StageSums
    fetch: Callable[[Tensor], Batch]
    weight: Callable[[Tensor], float] | None
    replica: int = 0
    apart: bool = False
    is_idle: Callable[[int], bool] = lambda step: False
    work: Work = field(default=Work(0, 0.0), init=False)  # of the update that was made last
    tied: TiedGradients | None = None
    privacy: Privacy | None = None
    early: Collection[int] = ()
    decide: Callable[[int], Signal] = lambda step: (
        Signal.GO_ON
    )  # asked in the first rank of a replica
    pilot: Pilot | None = None  # in every rank of a run that has one
    num_updates: int = 0  # made or skipped so far
    _buffers: dict[int, FlatBuffer] = field(default_factory=dict)
    _guard: DivergenceGuard = field(init=False)
    _optimizers: dict[int, torch.optim.Optimizer | None] = field(default_factory=dict)
    _modules: dict[int, TrainedModule] = field(default_factory=dict)
    _private: PrivateGradients | None = None
    _early: OverlappedSums | None = None

    def __post_init__(self) -> None:
        training = self.training
        self._guard = DivergenceGuard(training.on_divergence, training.max_skips_in_a_row)
        for stage, module in sorted(self.pipeline.stages.items()):
            module.train()
            self._buffers[stage] = FlatBuffer(module.parameters())
            trained = self._buffers[stage].parameters
            optimizer = self.training.optimizer.build(trained) if trained else None
            self._optimizers[stage] = optimizer
            self._modules[stage] = TrainedModule(module, optimizer)
        if isinstance(self.privacy, SamplePrivacy):
            leads = frozenset(stage for stage, lanes in self.lanes.items() if lanes.leads)
            self._private = PrivateGradients(
                self.privacy, self._buffers, self.pipeline.num_stages, leads
            )
            self.pipeline.on_backward = self._private.take
        elif self.early:
            buffers = {stage: self._buffers[stage] for stage in self.early}
            self._early = OverlappedSums(buffers, self.lanes, self._num_backwards)
            self.pipeline.on_backward = self._early.end_backward

    def update(self, step: int) -> StepReport:
        """One update of this rank's parameters from `batch_size` samples over all ranks."""
        if self.is_idle(step):
            return self._leave_out(step)
        clock = self.pipeline.clock
        clock.begin_step(step)
        for buffer in self._buffers.values():
            buffer.zero()

        num_passes = self.training.accumulate_steps
        m = self.schedule.num_micro_batches
        pieces = cut(self.plan.ids(step), num_passes * m)
        update_from = self._updates_from(pieces)
        weight = self.weight(update_from) if self.weight else 1.0
        self.work = Work(len(update_from), weight)
        if self._private is not None:
            self._private.begin(len(update_from))
        if self._early is not None:
            self._early.begin()
        loss = torch.zeros((), device=self.pipeline.device)
        num_own = 0
        for number in range(num_passes):
            first = number * m
            with clock.during("fetch"):
                batches = {i: self.fetch(pieces[first + i]) for i in range(m) if self._is_mine(i)}
            loss += self.pipeline.step(self.schedule, batches, step, weight, first)
            num_own += sum(len(batch["ids"]) for batch in batches.values())

        if self._private is not None:
            with clock.during("clip"):
                self._private.finish()
        total_loss = self._exchange_gradients(step, loss)
        if self.replica and (self._keeps_losses or not self.apart):
            total_loss = None  # replica 0 tells the loss of all
        elif total_loss is not None and self._keeps_losses:
            total_loss = float(loss) * len(update_from) / num_own
        leads = total_loss is not None
        total, word = self._agree(step)
        what = f"the loss or gradient of step {step}"
        is_skipped = self._guard.skips(what, math.isfinite(total))
        grad_norm = None if is_skipped else self._clip(total)
        rate = self.training.optimizer.learning_rate_at(step, self.training.max_steps)
        if not is_skipped:
            with clock.during("optimizer"):
                for optimizer in self._optimizers.values():
                    if optimizer is not None:
                        for group in optimizer.param_groups:
                            group["lr"] = rate
                        optimizer.step()
        self._end(step)
        return StepReport(
            step,
            clock.end_step(),
            clock,
            rate,
            None if is_skipped else total_loss,
            grad_norm,
            num_own if self._counts_samples else 0,
            weight if leads else 0.0,
            self._guard.note(what) if is_skipped else None,
            word,
        )

    def use_schedule(self, schedule: Schedule) -> None:
        """From the next update on. All ranks call it between the same two."""
        self.schedule = schedule
        if self._early is not None:
            self._early.num_backwards = self._num_backwards

    @property
    def _num_backwards(self) -> dict[int, int]:
        """Of this rank in an update, by stage."""
        m, passes = self.schedule.num_micro_batches, self.training.accumulate_steps
        turns = self.pipeline.turns
        return {s: passes * len(range(first, m, period)) for s, (first, period) in turns.items()}

    def _leave_out(self, step: int) -> StepReport:
        clock = self.pipeline.clock
        clock.begin_step(step)
        answer = self._within_stages(Reply(math.nan, self._decide(step)))
        self._end(step)
        rate = self.training.optimizer.learning_rate_at(step, self.training.max_steps)
        seconds = clock.end_step()
        return StepReport(step, seconds, clock, rate, None, None, 0, 0.0, word=answer.word)

    def _end(self, step: int) -> None:
        with self.pipeline.clock.during("average"):
            for stage, buffer in self._buffers.items():
                self.exchanges[stage].after_update(step, buffer)
        self.num_updates = step

    def state_dict(self) -> State:
        """Of this rank's stages, between two updates: parameters and moments by name, exchanges,
        and how many updates there were. Channels have theirs in the wiring. Batches, learning
        rates and dropout follow from the seed and the number of the update."""
        return {"num_updates": self.num_updates} | states_of(self._stateful)

    def load_state_dict(self, state: State) -> None:
        """The state of the same rank in the same experiment; ValueError otherwise."""
        self.num_updates = whole_number(state, "num_updates")
        load_states(self._stateful, state, f"the trainer of rank {self.rank}", ["num_updates"])

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in self._optimizers.values() if optimizer is not None]

    @property
    def _stateful(self) -> dict[str, Stateful]:
        found: dict[str, Stateful] = {"guard": self._guard}
        for stage in self._optimizers:
            found[f"stage {stage}"] = self._modules[stage]
            found[f"exchange {stage}"] = self.exchanges[stage]
        if self.tied is not None:
            found["tied"] = self.tied
        return found

    @property
    def _counts_samples(self) -> bool:
        return 0 in self.pipeline.stages

    @property
    def _keeps_losses(self) -> bool:
        return self.privacy is not None and self.pipeline.num_replicas > 1

    def _updates_from(self, pieces: Sequence[Tensor]) -> Tensor:
        """The samples of one update, as one rank sees it. pieces: of all passes in turn."""
        replica = (self.replica, self.pipeline.num_replicas) if self.apart else (0, 1)
        return samples_of(pieces, self.schedule.num_micro_batches, *replica)

    def _is_mine(self, micro_batch: int) -> bool:
        turns = self.pipeline.turns.values()
        return any(micro_batch % period == first for first, period in turns)

    def _exchange_gradients(self, step: int, loss: Tensor) -> float | None:
        """Returns the loss of the whole update in the last stage's leader."""
        last = self.pipeline.num_stages - 1
        total = None
        with self.pipeline.clock.during("average"):
            for stage, buffer in self._buffers.items():
                tells = stage == last and not self._keeps_losses
                mine = loss if tells else 0 * loss  # nan stays
                summed = self.exchanges[stage].before_update(step, buffer, mine)
                if stage == last and self.lanes[stage].leads:
                    total = float(summed)
            if self.tied is not None:
                self.tied.sum(step, self._buffers)
        return total

    def _agree(self, step: int) -> tuple[float, Signal]:
        """The squared norm of the whole gradient, the same bits in every rank: not finite if the
        loss or gradient of any stage is not. Without clip_norm 0 stands for any finite norm. With
        it comes rank 0's word.

        One small message of each stage's leader to rank 0 and one back, in every step. They cost
        no round trip of their own: rank 0 has the first stage, whose backward is the last, so the
        others' messages travel beside the last gradients, and the answer arrives ahead of the
        next step's first activation.
        """
        clock = self.pipeline.clock
        with clock.during("clip"):
            squares = {
                stage: self._squared_norm(buffer)
                for stage, buffer in self._buffers.items()
                if self.lanes[stage].leads
            }
        with clock.during("wait"):
            answer = Reply(math.nan, self._decide(step))
            if squares:
                answer = self.sums.sum_over_stages(
                    step, squares, self.pipeline.num_stages, answer.word, self.pilot
                )
        answer = self._within_stages(answer)
        if self.pilot is not None:
            self.pilot.follow(step, answer.choice)
        return answer.total, answer.word

    def _decide(self, step: int) -> Signal:
        return self.decide(step) if self.rank == self.sums.leaders[0] else Signal.GO_ON

    def _within_stages(self, answer: Reply) -> Reply:
        """Of each stage's leader. Replicas that leave out steps hold all stages in each rank."""
        with self.pipeline.clock.during("average"):
            for lanes in self.lanes.values():
                told = lanes.from_leader(torch.tensor(answer, dtype=torch.float64)).tolist()
                answer = Reply(told[0], Signal(int(told[1])), int(told[2]))
        return answer

    def _squared_norm(self, buffer: FlatBuffer) -> float:
        if not self.training.optimizer.clip_norm:
            return 0.0 if buffer.is_finite() else math.nan
        return buffer.squared_norm() if math.isfinite(float(buffer.flat[-1])) else math.nan

    def _clip(self, squared_norm: float) -> float | None:
        """Scale the gradients so that the norm over all stages and clouds is at most clip_norm."""
        limit = self.training.optimizer.clip_norm
        if not limit:
            return None
        norm = math.sqrt(squared_norm)
        if norm > limit:
            with self.pipeline.clock.during("clip"):
                for buffer in self._buffers.values():
                    buffer.scale(limit / norm)
        return norm

"""What one rank does with its parameters: samples in, an update made. Below it lies the pipeline;
what features do around an update are parts (parallel/part.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from xcloud.comm.state import StatefulParts, StateTree
from xcloud.parallel.control import Reply, Signal, StageSums
from xcloud.parallel.exchange import Exchange, FlatBuffer, RankGroup, Work
from xcloud.parallel.part import Part, StepReport
from xcloud.parallel.pipeline import Pipeline
from xcloud.parallel.schedule import Schedule
from xcloud.training.batch_plan import Feed
from xcloud.training.settings import Training
from xcloud.training.trained_module import TrainedModule

NO_PARTS = Part()


@dataclass(frozen=True)
class LossReport:
    """is_silent: another replica reports the loss. is_private: replicas keep their losses to
    themselves; the one that reports gives an estimate, from the samples of one rank."""

    is_silent: bool = False
    is_private: bool = False


@dataclass(frozen=True)
class TrainedStage:
    """A stage of this rank. group: the ranks that hold it."""

    trained: TrainedModule
    buffer: FlatBuffer
    group: RankGroup


class Trainer(StatefulParts):
    """Makes the updates of one rank. groups: by stage, for those of this rank. sums: of the
    stages' norms. num_updates: made or skipped so far."""

    own_names = ("num_updates",)

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        settings: Training,
        feed: Feed,
        groups: Mapping[int, RankGroup],
        exchange: Exchange,
        sums: StageSums,
        losses: LossReport = LossReport(),
    ) -> None:
        self.pipeline, self.schedule, self.settings, self.feed = pipeline, schedule, settings, feed
        self.exchange, self.sums, self.losses, self.num_updates = exchange, sums, losses, 0
        self.stages: dict[int, TrainedStage] = {}
        for stage, module in sorted(pipeline.stages.items()):
            module.train()
            buffer = FlatBuffer(module.parameters())
            trained = buffer.parameters
            optimizer = settings.optimizer.build(trained) if trained else None
            self.stages[stage] = TrainedStage(
                TrainedModule(module, optimizer), buffer, groups[stage]
            )

    def update(self, step: int, parts: Part = NO_PARTS) -> StepReport:
        """One update of this rank's parameters from `batch_size` samples over all ranks."""
        clock = self.pipeline.clock
        clock.begin_step(step)
        report = StepReport(step, 0.0, clock, self._learning_rate(step))
        work = Work()
        if self.exchange.is_idle(step):
            signal = parts.signal(step) if self.sums.is_first else Signal.GO_ON
            report.signal = self._within_stages(Reply(math.nan, signal)).signal
        else:
            loss = self._compute_gradients(step, parts)
            total_loss = self._exchange_gradients(step, loss, parts)
            reply = self._agree(step, parts)
            if not math.isfinite(reply.total):
                report.skipped = parts.skip(step)
                assert report.skipped, "no part knows what to do with this update"
            else:
                report.loss = total_loss
                report.grad_norm = self._clip(reply.total)
                self._step_optimizers(report.learning_rate)
            report.signal = reply.signal
            work = self.feed.work
            report.num_samples = work.num_own if 0 in self.stages else 0
            report.num_tokens = 0.0 if total_loss is None else work.weight
        with clock.during("average"):
            self.exchange.after_update(step, work)
        self.num_updates = step
        report.step_s = clock.end_step()
        return report

    @property
    def buffers(self) -> dict[int, FlatBuffer]:
        """By stage."""
        return {number: stage.buffer for number, stage in self.stages.items()}

    @property
    def num_backwards(self) -> dict[int, int]:
        """Micro-batches of this rank in an update, by stage."""
        m, passes = self.schedule.num_micro_batches, self.settings.accumulate_steps
        turns = self.pipeline.turns
        return {s: passes * len(range(first, m, period)) for s, (first, period) in turns.items()}

    def use_schedule(self, schedule: Schedule) -> None:
        """From the next update on. All ranks call it between the same two."""
        self.schedule = schedule

    def parts(self) -> StateTree:
        """Batches, learning rates and dropout follow from the seed and the number of the update;
        channels have their state in the wiring."""
        stages = {f"stage {number}": stage.trained for number, stage in self.stages.items()}
        return {"exchange": self.exchange, **stages}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        every = (stage.trained.optimizer for stage in self.stages.values())
        return [optimizer for optimizer in every if optimizer is not None]

    def _learning_rate(self, step: int) -> float:
        return self.settings.optimizer.learning_rate_at(step, self.settings.max_steps)

    def _compute_gradients(self, step: int, parts: Part) -> Tensor:
        """Of this rank's micro-batches, into the buffers; returns their loss."""
        for stage in self.stages.values():
            stage.buffer.zero()
        m, num_passes = self.schedule.num_micro_batches, self.settings.accumulate_steps
        pieces = self.feed.begin(step, m, num_passes)
        parts.begin(step)
        loss = torch.zeros((), device=self.pipeline.device)
        for first in range(0, num_passes * m, m):
            with self.pipeline.clock.during("fetch"):
                batches = self.feed.batches(pieces[first : first + m])
            parts.before_pass(step, batches)
            loss += self.pipeline.step(
                self.schedule, batches, step, self.feed.work.weight, first, parts.after_micro_batch
            )
        parts.after_backward(step)
        return loss

    def _exchange_gradients(self, step: int, loss: Tensor, parts: Part) -> float | None:
        """With the other ranks and replicas. Returns the loss to report, None in most ranks."""
        last, total = self.pipeline.num_stages - 1, None
        is_shared, work = not self.losses.is_private, self.feed.work
        mine = {n: loss if n == last and is_shared else 0 * loss for n in self.stages}  # nan stays
        with self.pipeline.clock.during("average"):
            summed = self.exchange.before_update(step, self.buffers, mine)
            if last in summed and self.stages[last].group.leads and not self.losses.is_silent:
                total = float(summed[last])
            parts.after_exchange(step)
        if total is None or is_shared:
            return total
        return float(loss) * work.num_samples / work.num_own

    def _agree(self, step: int, parts: Part) -> Reply:
        """The squared norm of the whole gradient, the same bits in every rank: not finite if the
        loss or gradient of any stage is not. Without clip_norm 0 stands for any finite norm. With
        it comes what rank 0 decides.

        One small message of each stage's leader to rank 0 and one back, in every step. They cost
        no round trip of their own: rank 0 has the first stage, whose backward is the last, so the
        others' messages travel beside the last gradients, and the reply arrives ahead of the
        next step's first activation.
        """
        clock, reply = self.pipeline.clock, Reply(math.nan)
        with clock.during("clip"):
            squares = {
                number: self._squared_norm(stage.buffer)
                for number, stage in self.stages.items()
                if stage.group.leads
            }
        if squares:
            with clock.during("wait"):
                reply = self.sums.sum_over_stages(step, squares, parts.signal)
        return self._within_stages(reply)

    def _within_stages(self, reply: Reply) -> Reply:
        """From each stage's leader to its other ranks."""
        with self.pipeline.clock.during("average"):
            for stage in self.stages.values():
                sent = torch.tensor(reply, dtype=torch.float64)
                total, signal = stage.group.from_leader(sent).tolist()
                reply = Reply(total, Signal(int(signal)))
        return reply

    def _squared_norm(self, buffer: FlatBuffer) -> float:
        if not self.settings.optimizer.clip_norm:
            return 0.0 if buffer.is_finite() else math.nan
        return buffer.squared_norm() if math.isfinite(float(buffer.flat[-1])) else math.nan

    def _clip(self, squared_norm: float) -> float | None:
        """Scale the gradients so that the norm over all stages and clouds is at most clip_norm."""
        limit = self.settings.optimizer.clip_norm
        if not limit:
            return None
        norm = math.sqrt(squared_norm)
        if norm > limit:
            with self.pipeline.clock.during("clip"):
                for stage in self.stages.values():
                    stage.buffer.scale(limit / norm)
        return norm

    def _step_optimizers(self, learning_rate: float) -> None:
        with self.pipeline.clock.during("optimizer"):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()

"""What one rank does with its parameters: samples in, an update made, or left out where its loss
or gradient is not finite. Below it lies the pipeline; what features do around an update are hooks
(pipeline/hook.py).

The state of a module and its optimizer names parameters and no objects.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from xcloud.base.errors import DataError, TrainingDiverged
from xcloud.comm.state import (
    State,
    StatefulTree,
    StateTree,
    copy_of,
    fill,
    join_states,
    split_state,
)
from xcloud.pipeline.batch_plan import SampleFeed
from xcloud.pipeline.control import Reply, Signal, StageSums
from xcloud.pipeline.exchange import (
    Exchange,
    FlatBuffer,
    RankGroup,
    Work,
    digest,
    local_part,
    with_part,
)
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.pipeline.pipeline import Pipeline
from xcloud.pipeline.schedule import Schedule
from xcloud.pipeline.settings import OnDivergence, Training

NO_HOOKS = Hook()
_ADVICE = "A lower learning_rate, more warmup_steps or a clip_norm of its optimizer may help"
_BEFORE_ANY = (
    "No update has been made before it, so it is not the learning rate: look at the checkpoint, "
    "the data, training.precision and what the compressors leave of them"
)


@dataclass(eq=False)
class DivergenceGuard(StatefulTree):
    """Decides on an update whose loss or gradient is not finite.

    Every rank that shares the update has its own copy of the guard, and all copies count alike.
    So a skipped update leaves parameters and moments unchanged everywhere. It still counts as an
    update: its step, samples and learning rate are used up, only the optimizer does not move.
    """

    on_divergence: OnDivergence = "stop"
    max_skips_in_a_row: int = 10
    num_in_a_row: int = field(default=0, init=False)
    last_step: int = field(default=0, init=False)
    own_names = ("num_in_a_row", "last_step")

    def skip_update(self, step: int, what: str) -> str:
        """Leave out an update, and return a note for the user. Raises TrainingDiverged if it may
        not be left out."""
        # One that was made in between ends the row.
        num_in_a_row = 1 + (self.num_in_a_row if step == self.last_step + 1 else 0)
        # As many in a row as there were steps: no update has been made at all.
        advice = _BEFORE_ANY if num_in_a_row == step else _ADVICE
        if self.on_divergence == "stop":
            remark = "to leave such updates out set training.on_divergence=skip"
            raise diverged(f"{what} is not finite", remark=remark, advice=advice)
        most = self.max_skips_in_a_row
        if num_in_a_row > most:
            what = f"{what} is not finite, after {most} skipped updates in a row"
            remark = f"training.max_skips_in_a_row is {most}"
            raise diverged(what, remark=remark, advice=advice)
        self.num_in_a_row = num_in_a_row
        self.last_step = step
        return (
            f"{what} is not finite: update skipped, parameters are as before "
            f"({num_in_a_row} in a row, at most {most})"
        )


def diverged(what: str, remark: str, advice: str = _ADVICE) -> TrainingDiverged:
    """Build the error for an update that can be neither made nor skipped."""
    return TrainingDiverged(f"{what}; parameters are as before this update. {advice}; {remark}")


@dataclass(frozen=True)
class TrainedModule:
    """A module in training with its optimizer.

    Its state is "values.NAME" of every trained parameter and persistent buffer,
    "moments.WHAT.NAME" of what the optimizer keeps of a parameter ("exp_avg"), and "frozen", a
    digest of the frozen parameters, which are built again. Learning rates follow from the step. Of
    parameters dealt over ranks it is what this rank holds.

    optimizer: None where nothing is trained.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    @cached_property
    def _frozen(self) -> Tensor:
        """The digest of the frozen parameters, uint8 [16]. They do not change: it is made once."""
        return digest(p for p in self.module.parameters() if not p.requires_grad)

    @property
    def _values(self) -> dict[str, Tensor]:
        # Under all of its names: a tied weight stands twice in state_dict, too.
        every = self.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, p in every if not p.requires_grad}
        return {n: v for n, v in self.module.state_dict().items() if n not in frozen}

    def state_dict(self) -> State:
        moments: dict[str, State] = {}
        for name, parameter in self._trained.items():
            assert self.optimizer is not None
            for what, value in self.optimizer.state.get(parameter, {}).items():
                moments.setdefault(what, {})[name] = _copy(value)
        values = {name: _copy(value) for name, value in self._values.items()}
        states = join_states({"values": values, "moments": join_states(moments)})
        return {**states, "frozen": self._frozen}

    def load_state_dict(self, state: State) -> None:
        rest = dict(state)
        frozen = rest.pop("frozen", None)
        if not isinstance(frozen, Tensor) or not torch.equal(frozen, self._frozen):
            raise DataError(
                "the frozen parameters are not those that this was trained with: a checkpoint or "
                "a kept backbone has changed since. Put the old one back, or start a new run"
            )
        parts = split_state(rest, names=("values", "moments"), owner="a trained module")
        own = {name: local_part(value) for name, value in self._values.items()}
        fill(own, state=parts["values"], owner="a trained module")
        self._load_moments(parts["moments"])

    def _load_moments(self, state: State) -> None:
        trained = self._trained
        moments: dict[str, State] = {}
        for key, value in state.items():
            what, _, name = key.partition(".")
            moments.setdefault(name, {})[what] = _copy(value)
        # All or none: a parameter without moments would begin again in the middle of a run.
        if moments and (wrong := moments.keys() ^ trained.keys()):
            raise ValueError(
                f"the state of an optimizer does not fit it: {', '.join(sorted(wrong))} missing "
                "or unknown; it was saved with other settings"
            )
        if self.optimizer is None:
            return
        # The optimizer numbers parameters in the order of its groups, and puts each moment on the
        # device and in the dtype of its parameter.
        for name, kept in moments.items():
            for what, value in kept.items():
                if isinstance(value, Tensor) and value.shape == local_part(trained[name]).shape:
                    kept[what] = with_part(trained[name], part=value)
        numbered = {n: moments[name] for n, name in enumerate(trained) if name in moments}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    @property
    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters of the optimizer by name, in its order."""
        if self.optimizer is None:
            return {}
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return {names[p]: p for group in self.optimizer.param_groups for p in group["params"]}


def _copy(value: Tensor | int) -> Tensor | int:
    return copy_of(local_part(value)) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class LossReport:
    """A rank's way of reporting the loss.

    is_silent: another replica reports it.
    is_private: replicas keep their losses to themselves; the one that reports gives an estimate,
        from the samples of one rank.
    """

    is_silent: bool = False
    is_private: bool = False


@dataclass(frozen=True)
class TrainedStage:
    """A stage of this rank. group: the ranks that hold it."""

    trained: TrainedModule
    buffer: FlatBuffer
    group: RankGroup


class Trainer(StatefulTree):
    """The maker of one rank's updates.

    groups: the group of ranks of each stage of this rank.
    sums: the sums of the stages' norms.
    num_updates: number of updates made or skipped so far.
    schedule: the present schedule. All ranks may set another one between the same two updates.
    """

    own_names = ("num_updates",)

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        settings: Training,
        feed: SampleFeed,
        groups: Mapping[int, RankGroup],
        exchange: Exchange,
        sums: StageSums,
        losses: LossReport = LossReport(),
    ) -> None:
        self.pipeline = pipeline
        self.schedule = schedule
        self.settings = settings
        self.feed = feed
        self.exchange = exchange
        self.sums = sums
        self.losses = losses
        self.num_updates = 0
        self.guard = DivergenceGuard(
            on_divergence=settings.on_divergence, max_skips_in_a_row=settings.max_skips_in_a_row
        )
        self.stages: dict[int, TrainedStage] = {}
        for stage, module in sorted(pipeline.stages.items()):
            module.train()
            buffer = FlatBuffer(module.parameters())
            trained = buffer.parameters
            optimizer = settings.optimizer.build(module) if trained else None
            self.stages[stage] = TrainedStage(
                trained=TrainedModule(module=module, optimizer=optimizer),
                buffer=buffer,
                group=groups[stage],
            )

    def update(self, step: int, hooks: Hook = NO_HOOKS) -> StepReport:
        """Make one update of this rank's parameters from `batch_size` samples over all ranks."""
        clock = self.pipeline.clock
        clock.begin_step(step)
        settings = self.settings
        rate = settings.optimizer.learning_rate_at(step, max_steps=settings.max_steps)
        report = StepReport(step=step, step_s=0.0, clock=clock, learning_rate=rate)
        work = Work()
        # This replica leaves the update out, as all of its ranks know. They still have to end,
        # save or go on together.
        if self.exchange.is_idle(step):
            signal = hooks.signal(step) if self.sums.rank == self.sums.leaders[0] else Signal.GO_ON
            report.signal = self._within_stages(Reply(math.nan, signal)).signal
        else:
            loss = self._compute_gradients(step, hooks=hooks)
            total_loss = self._exchange_gradients(step, loss=loss, hooks=hooks)
            # Behind the exchange, so that the norm is that of the full gradient; before the
            # clipping, since all ranks must scale by one number.
            reply = self._agree(step, hooks=hooks)
            if not math.isfinite(reply.total):
                what = f"the loss or gradient of step {step}"
                # All ranks have the same total, so all skip, or all raise.
                report.skipped = self.guard.skip_update(step, what=what)
            else:
                report.loss = total_loss
                report.grad_norm = self._clip(reply.total)
                self._step_optimizers(report.learning_rate, step)
                work = self.feed.work
            report.signal = reply.signal
            # In ranks of the first stage alone, so that the sum over all ranks is the update's
            # number.
            report.num_samples = self.feed.work.num_own if 0 in self.stages else 0
            report.num_tokens = self.feed.work.num_tokens
            if total_loss is not None and not self.losses.is_private:
                report.num_learned = self.feed.work.weight
        with clock.during("average"):
            # Also behind a skipped update: the others make this call, too.
            self.exchange.after_update(step, work)
        self.num_updates = step
        report.step_s = clock.end_step()
        return report

    @property
    def buffers(self) -> dict[int, FlatBuffer]:
        """The gradient buffers, by stage."""
        return {number: stage.buffer for number, stage in self.stages.items()}

    def children(self) -> StateTree:
        """Batches, learning rates and dropout follow from the seed and the number of the update;
        channels have their state in the wiring."""
        stages = {f"stage {number}": stage.trained for number, stage in self.stages.items()}
        return {"exchange": self.exchange, "guard": self.guard, **stages}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        every = (stage.trained.optimizer for stage in self.stages.values())
        return [optimizer for optimizer in every if optimizer is not None]

    def _compute_gradients(self, step: int, hooks: Hook) -> Tensor:
        """Compute the gradients of this rank's micro-batches into the buffers, and return their
        loss."""
        for stage in self.stages.values():
            # Gradients are views of this vector, so they are set to zero and never dropped.
            stage.buffer.zero()
        m = self.schedule.num_micro_batches
        num_passes = self.settings.accumulate_steps
        with self.pipeline.clock.during("fetch"):  # the weight of a batch may take a look at it
            pieces = self.feed.begin(step, m, num_passes)
        hooks.begin(step)
        loss = torch.zeros((), device=self.pipeline.device)
        for first in range(0, num_passes * m, m):
            with self.pipeline.clock.during("fetch"):
                batches = self.feed.batches(pieces[first : first + m])
            hooks.before_pass(step, batches=batches)
            loss += self.pipeline.step(
                self.schedule, batches, step, self.feed.work.weight, first, hooks.after_micro_batch
            )
        hooks.after_backward(step)
        return loss

    def _exchange_gradients(self, step: int, loss: Tensor, hooks: Hook) -> float | None:
        """Exchange gradients with the other ranks and replicas. Return the loss to report, None in
        most ranks."""
        last = self.pipeline.num_stages - 1
        total = None
        is_shared = not self.losses.is_private
        work = self.feed.work
        mine = {n: loss if n == last and is_shared else 0 * loss for n in self.stages}  # nan stays
        with self.pipeline.clock.during("average"):
            summed = self.exchange.before_update(step, self.buffers, mine)
            if last in summed and self.stages[last].group.leads and not self.losses.is_silent:
                total = float(summed[last])
            hooks.after_exchange(step)
        if total is None or is_shared:
            return total
        # An estimate that tells nothing of other ranks: as if all samples were like this rank's.
        return float(loss) * work.num_samples / work.num_own

    def _agree(self, step: int, hooks: Hook) -> Reply:
        """Return the squared norm of the whole gradient, and with it what rank 0 decides.

        The norm has the same bits in every rank. It is not finite if the loss or gradient of any
        stage is not. Without clip_norm 0 stands for any finite norm.

        One small message of each stage's leader to rank 0 and one back, in every step. They cost
        no round trip of their own: rank 0 has the first stage, whose backward is the last, so the
        others' messages travel beside the last gradients, and the reply arrives ahead of the
        next step's first activation.
        """
        clock = self.pipeline.clock
        reply = Reply(math.nan)
        squares = self._squared_norms()
        if squares:
            with clock.during("wait"):
                reply = self.sums.sum_over_stages(step, values=squares, signal_at=hooks.signal)
        return self._within_stages(reply)

    def _squared_norms(self) -> dict[int, float]:
        """Return the squared norm of each stage that this rank speaks for."""
        with self.pipeline.clock.during("clip"):
            return {
                number: self._squared_norm(stage.buffer)
                for number, stage in self.stages.items()
                if stage.group.leads
            }

    def _within_stages(self, reply: Reply) -> Reply:
        """Pass the reply from each stage's leader to its other ranks, and return it."""
        with self.pipeline.clock.during("average"):
            for stage in self.stages.values():
                sent = torch.tensor(reply, dtype=torch.float64)
                # One broadcast for both, in float64: the norm keeps its bits.
                total, signal = stage.group.from_leader(sent).tolist()
                reply = Reply(total, Signal(int(signal)))
        return reply

    def _squared_norm(self, buffer: FlatBuffer) -> float:
        """Return NaN for a gradient that the optimizer cannot take, or a loss that is not
        finite."""
        # The loss lies in the last place of the buffer and was summed with the gradients.
        if not math.isfinite(float(buffer.flat[-1])):
            return math.nan
        limit = self.settings.optimizer.clip_norm or math.inf
        # Looked through only where clipping would leave a value whose square overflows: a pass
        # over all gradients costs.
        if limit * limit > torch.finfo(buffer.flat.dtype).max and not buffer.has_finite_squares():
            return math.nan
        if self.settings.optimizer.clip_norm:
            return buffer.squared_norm()
        return 0.0

    def _clip(self, squared_norm: float) -> float | None:
        """Scale the gradients so that the norm over all stages and clouds is at most clip_norm."""
        limit = self.settings.optimizer.clip_norm
        if not limit:
            return None
        # The norm over all stages and clouds, so that every rank scales what it holds by one
        # factor.
        norm = math.sqrt(squared_norm)
        if norm > limit:
            with self.pipeline.clock.during("clip"):
                for stage in self.stages.values():
                    stage.buffer.gradients.mul_(limit / norm)
        return norm

    def _step_optimizers(self, learning_rate: float, step: int) -> None:
        with self.pipeline.clock.during("optimizer"):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    # Set anew each time: it follows from the step, so it is no state and a resume
                    # needs none of it.
                    group["lr"] = learning_rate
                optimizer.step()

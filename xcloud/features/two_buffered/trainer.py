"""Training in which the forwards of an update begin before the update in front of it has ended.

Of update k, whose weights before are w[k-1]:

    window k     backwards of batch k, forwards (at later stages backwards, too) of batch k+1
    norm         of batch k, told by each stage as soon as its last backward of it is done
    update k     w[k] = optimizer(w[k-1], gradient of batch k)
    then         the copy that batch k used takes what batch k+2 will use: w[k] + (w[k] - w[k-1])

Before anything that needs the links to be empty (an evaluation, a checkpoint, a stop, the end)
the window has no part of the next batch. What is computed is the same then, only later.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from xcloud.comm.state import State, StateTree, copy_of, fill
from xcloud.comm.step_clock import NOWHERE
from xcloud.contracts.model import Stage
from xcloud.features.two_buffered.schedule import TwoBuffered, next_part, this_part
from xcloud.net.frame import Kind
from xcloud.pipeline.control import Reply, Signal
from xcloud.pipeline.exchange import FlatBuffer, Work
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.pipeline.pipeline import Pass, Pipeline, UnderWay
from xcloud.pipeline.schedule import Action, rank_actions
from xcloud.pipeline.trainer import NO_HOOKS, Trainer


class WeightCopy:
    """The weights that one of the two updates under way computes with, and its gradients.

    modules: the copies of the stages. They share every tensor that is not trained.
    pairs: each trained parameter of the stages with its copy.
    """

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self.modules: dict[int, Stage] = {}
        self.buffers: dict[int, FlatBuffer] = {}
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        for number, stage in stages.items():
            shared = [p for p in stage.parameters() if not p.requires_grad]
            tensors = [*shared, *stage.buffers()]
            # deepcopy's memo makes the copy share what is frozen, and buffers: a copy costs as
            # many bytes as are trained.
            module = copy.deepcopy(stage, {id(tensor): tensor for tensor in tensors})
            module.train()
            self.modules[number] = module
            self.buffers[number] = FlatBuffer(module.parameters())
            originals = (p for p in stage.parameters() if p.requires_grad)
            self.pairs += zip(originals, self.buffers[number].parameters, strict=True)

    @torch.no_grad()
    def keep_originals(self) -> None:
        for original, own in self.pairs:
            own.copy_(original)

    def state_dict(self) -> State:
        return {name: copy_of(value) for name, value in self._named.items()}

    def load_state_dict(self, state: State) -> None:
        fill(self._named, state=state, owner="a copy of the weights")

    @property
    def _named(self) -> dict[str, Tensor]:
        return {
            f"{number}.{name}": p.detach()
            for number, module in self.modules.items()
            for name, p in module.named_parameters()
            if p.requires_grad
        }


@dataclass(eq=False)
class TwoBufferedPipeline(Pipeline):
    """A pipeline in which each of the two updates under way computes with weights of its own."""

    copies: tuple[WeightCopy, ...] = field(default=(), init=False)

    def module(self, stage: int, now: Pass) -> Stage:
        if now.kind is Kind.EVALUATION:
            return self.stages[stage]
        # Two updates are under way at most, with numbers next to each other.
        return self.copies[now.step % 2].modules[stage]


@dataclass
class UpdateBatch:
    """The part of one update's batch that this rank keeps until the update is made.

    total_loss, squared_norms: known once the last backward is done.
    """

    under_way: UnderWay
    work: Work
    total_loss: float | None = None
    squared_norms: dict[int, float] = field(default_factory=dict)


class TwoBufferedTrainer(Trainer):
    """A trainer whose updates overlap: see the head of this file."""

    pipeline: TwoBufferedPipeline
    schedule: TwoBuffered

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        stages = self.pipeline.stages
        self._copies = (WeightCopy(stages), WeightCopy(stages))
        self.pipeline.copies = self._copies
        turns = self.pipeline.turns
        num_stages = self.pipeline.num_stages
        self._window = rank_actions(
            self.schedule, stages=sorted(stages), num_stages=num_stages, turn_of=turns
        )
        m = self.schedule.num_micro_batches
        ahead = [self.schedule.num_ahead(stage, num_stages) for stage in stages]
        # All stages of this rank are last ones: they have finished update k+1's backwards in
        # window k.
        self._ends_a_window_early = min(ahead) == m
        self._batches: dict[int, UpdateBatch] = {}
        self._held_signal = Signal.GO_ON

    def children(self) -> StateTree:
        return {**super().children(), "copy 0": self._copies[0], "copy 1": self._copies[1]}

    def update(self, step: int, hooks: Hook = NO_HOOKS) -> StepReport:
        report = super().update(step, hooks)
        # The copy has looked ahead by a move that was not made, or is not wanted.
        if report.skipped is not None or not self.schedule.predict:
            self._copies[step % 2].keep_originals()
        # A stop or a checkpoint waits for the next update, which begins nothing further.
        signal = max(self._held_signal, report.signal)
        is_drained = step + 1 not in self._batches
        report.signal = signal if is_drained else Signal.GO_ON
        self._held_signal = Signal.GO_ON if is_drained else signal
        del self._batches[step]
        return report

    def _compute_gradients(self, step: int, hooks: Hook) -> Tensor:
        # The first update, and the first one after a drained window: nothing of its batch has
        # begun.
        if step not in self._batches:
            self._fetch(step)
            self._run(next_part(self._window, self.schedule.num_micro_batches), step, hooks)
            if self._ends_a_window_early:
                self._end_batch(step, hooks)
        hooks.begin(step)
        window = self._window
        # The window has a part of the next batch, or it is drained: then the same actions are
        # done, later. All ranks decide alike.
        ends_here = self.settings.is_evaluated(step) or step >= self.settings.max_steps
        if not ends_here and self._held_signal is Signal.GO_ON:
            self._fetch(step + 1)
        else:
            window = this_part(window, self.schedule.num_micro_batches)
        self._run(window, step, hooks)
        if not self._ends_a_window_early:
            self._end_batch(step, hooks)
        elif step + 1 in self._batches:
            self._end_batch(step + 1, hooks)
        self._use(step)
        return self._batches[step].under_way.loss

    def _exchange_gradients(self, step: int, loss: Tensor, hooks: Hook) -> float | None:
        return self._batches[step].total_loss  # exchanged when its last backward was done

    def _agree(self, step: int, hooks: Hook) -> Reply:
        # A rank that leads no stage has no norm to report, and gets the reply from its leader.
        reply = Reply(float("nan"))
        squares = self._batches[step].squared_norms
        if squares:
            with self.pipeline.clock.during("wait"):
                # The norms were reported when the last backward was done (_end_batch), and
                # computing of the next batch has hidden the round trip.
                reply = self.sums.total(step, values=squares, signal_at=hooks.signal)
        return self._within_stages(reply)

    def _step_optimizers(self, learning_rate: float, step: int) -> None:
        weights = self._copies[step % 2]
        weights.keep_originals()
        super()._step_optimizers(learning_rate, step)
        with torch.no_grad():
            for original, own in weights.pairs:
                # The copy has the weights w before the update: it becomes w' + (w' - w), in place.
                own.neg_().add_(original, alpha=2)

    def _fetch(self, step: int) -> None:
        """Take the batch of an update, whose gradients are zero from now on."""
        for buffer in self._copies[step % 2].buffers.values():
            buffer.zero()
        with self.pipeline.clock.during("fetch"):
            pieces = self.feed.begin(step, self.schedule.num_micro_batches, 1)
            batches = self.feed.batches(pieces)
        under_way = UnderWay(
            now=Pass(step),
            batches=batches,
            weight=self.feed.work.weight,
            loss=torch.zeros((), device=self.pipeline.device),
        )
        self._batches[step] = UpdateBatch(under_way, work=self.feed.work)

    def _run(self, actions: list[Action], step: int, hooks: Hook) -> None:
        """Compute the actions of a window: those of its own update, and those of the next."""
        m = self.schedule.num_micro_batches
        for action in actions:
            is_next = action.micro_batch >= m
            # Micro-batches m to 2m-1 of a window are 0 to m-1 of the next update.
            own = action._replace(micro_batch=action.micro_batch % m)
            under_way = self._batches[step + is_next].under_way
            self.pipeline.compute(own, under_way, hooks.after_micro_batch)
        self.pipeline.clock.place = NOWHERE

    def _end_batch(self, step: int, hooks: Hook) -> None:
        """Exchange the gradients of a batch whose backwards are done, and report their norms."""
        self._use(step)
        batch = self._batches[step]
        hooks.after_backward(step)
        batch.total_loss = super()._exchange_gradients(step, batch.under_way.loss, hooks)
        batch.squared_norms = self._squared_norms()
        if batch.squared_norms:
            self.sums.report(step, values=batch.squared_norms)

    def _use(self, step: int) -> None:
        """Let everything around the pipeline see the gradients and the samples of this update."""
        weights = self._copies[step % 2]
        # Optimizers know the original parameters only; hooks and exchange know `stages` and
        # `work`.
        for original, own in weights.pairs:
            original.grad = own.grad
        self.feed.work = self._batches[step].work
        self.stages = {
            number: replace(stage, buffer=weights.buffers[number])
            for number, stage in self.stages.items()
        }

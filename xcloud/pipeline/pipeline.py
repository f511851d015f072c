"""Runs one rank's share of a pipelined step: the loop over a schedule's actions.

Nothing here knows what a stage computes, how a message is compressed or what carries it.
The same loop serves one process that holds all stages and ranks in several clouds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xcloud.comm.channel import Boundary, Message, Receiver, Sender
from xcloud.comm.step_clock import NOWHERE, Place, StepClock
from xcloud.contracts.model import Batch, Stage, StageOutput
from xcloud.layout import ClusterLayout
from xcloud.net.frame import Kind, MessageKey, TensorSpec
from xcloud.pipeline.schedule import (
    Action,
    GPipe,
    Schedule,
    SplitBackward,
    rank_actions,
    split_backwards,
)

Splits = dict[tuple[int, int], Callable[[], SplitBackward]]
"""What splits a backward, by (stage, micro-batch)."""


@dataclass
class BoundaryPorts:
    """The ends of one boundary's channels that this rank holds, by peer rank.

    A rank before the boundary has forward_out and backward_in, a rank after it the other two; a
    rank on both sides has all four, and is its own peer.
    """

    boundary: Boundary
    forward_out: dict[int, Sender] = field(default_factory=dict)
    forward_in: dict[int, Receiver] = field(default_factory=dict)
    backward_out: dict[int, Sender] = field(default_factory=dict)
    backward_in: dict[int, Receiver] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """One pass over a schedule: of a training step, or an evaluation after that step.

    first_micro_batch: number, within the update, of the schedule's micro-batch 0.
    """

    step: int
    first_micro_batch: int = 0
    kind: Kind = Kind.ACTIVATION

    def key(self, action: Action) -> MessageKey:
        """Return the key of the messages that the action receives and sends."""
        kind = Kind.GRADIENT if action.kind == "backward" else self.kind
        return MessageKey(kind, self.step, micro_batch=self.first_micro_batch + action.micro_batch)

    def place(self, action: Action) -> Place:
        return Place(
            action.kind, action.stage, micro_batch=self.first_micro_batch + action.micro_batch
        )


class _Returned(torch.autograd.Function):
    """A zero whose gradient with respect to a value is the one that came back for it.

    torch.autograd.backward also takes gradients, and then imports sympy: half a second of CPU in
    the first update, while other clouds wait.
    """

    @staticmethod
    def forward(context: Any, value: Tensor, gradient: Tensor) -> Tensor:
        context.gradient = gradient
        return value.new_zeros(())

    @staticmethod
    def backward(context: Any, one: Tensor) -> tuple[Tensor, None]:
        return context.gradient, None


@dataclass
class InFlight:
    """A micro-batch between its forward and its backward at one stage.

    send: the message that was sent, still in the graph. Its gradient comes back.
    weights: the split backward that puts off the weights' gradients; None if none are put off.
    """

    batch: Batch
    received: Message | None
    send: Message | None
    loss: Tensor | None
    weights: SplitBackward | None

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
        """Compute the gradients. gradients: the gradients of the outputs. None: the outputs are
        losses."""
        if gradients is not None:
            pairs = zip(outputs, gradients, strict=True)
            outputs = [_Returned.apply(*pair) for pair in pairs]  # type: ignore[no-untyped-call]
        with self.weights or nullcontext():
            torch.autograd.backward(outputs)


@dataclass
class UnderWay:
    """One rank's micro-batches of a pass, from the first forward to the last backward.

    batches: the fields that this rank may see, by micro-batch of the schedule.
    weight: divisor of the loss of the full update.
    loss: the sum so far, divided by `weight`.
    deferred: the split backwards whose second part is still to be computed, by (stage,
        micro-batch).
    """

    now: Pass
    batches: Mapping[int, Batch]
    weight: float
    loss: Tensor
    deferred: dict[tuple[int, int], SplitBackward] = field(default_factory=dict)
    in_flight: dict[tuple[int, int], InFlight] = field(default_factory=dict)


@dataclass(eq=False)
class Pipeline:
    """One rank's stages and ports. Micro-batch i belongs to replica i mod the number of replicas.
    Replica 0 evaluates.

    layout: the layout, which says what each rank computes.
    autocast: makes the context in which stages compute.
    """

    rank: int
    layout: ClusterLayout
    stages: Mapping[int, Stage]
    ports: Mapping[int, BoundaryPorts]
    device: torch.device
    seed: int
    clock: StepClock
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    _plans: dict[Schedule, tuple[list[Action], Splits]] = field(default_factory=dict, init=False)

    @property
    def num_stages(self) -> int:
        return self.layout.num_stages

    @cached_property
    def turns(self) -> dict[int, tuple[int, int]]:
        """The turns of this rank by stage: (first, period). It computes micro-batches first,
        first + period, and so on of that stage."""
        return {stage: self.layout.turn(stage, self.rank) for stage in self.stages}

    def step(
        self,
        schedule: Schedule,
        batches: Mapping[int, Batch],
        step: int,
        weight: float,
        first_micro_batch: int = 0,
        after_micro_batch: Callable[[int], None] = lambda stage: None,
    ) -> Tensor:
        """Run forward and backward of every micro-batch of this rank; gradients add up in `.grad`.

        batches: the fields that this rank may see, by micro-batch number of the schedule.
        first_micro_batch: number, within the update, of the schedule's micro-batch 0 (gradient
            accumulation runs the schedule several times for one update).
        weight: divisor of the loss of the full update (its number of target tokens).
        after_micro_batch: called with each stage whose gradients of a micro-batch are complete.
        Returns the loss of this rank's micro-batches, divided by `weight` (0 without last stage).
        """
        actions, splits = self._plan(schedule)
        under_way = UnderWay(
            now=Pass(step=step, first_micro_batch=first_micro_batch),
            batches=batches,
            weight=weight,
            loss=torch.zeros((), device=self.device),
            deferred={place: split() for place, split in splits.items()},
        )
        # Whatever an action needs from another stage it waits for in `recv`. The order of actions
        # is the schedule's, so no rank has to know what others do.
        for action in actions:
            self.compute(action, under_way, after_micro_batch)
        self.clock.place = NOWHERE
        return under_way.loss

    def compute(
        self, action: Action, under_way: UnderWay, after_micro_batch: Callable[[int], None]
    ) -> None:
        """Compute one action of a pass: receive what it needs, and send on what it gives."""
        now = under_way.now
        self.clock.place = now.place(action)
        place = (action.stage, action.micro_batch)
        if action.kind == "forward":
            batch = under_way.batches[action.micro_batch]
            received = self._receive(action, batch, now)
            # Entered around the forward as well: there the layers' outputs are made so that their
            # weights can wait.
            deferred = under_way.deferred.get(place)
            work = self._forward(action, batch, received=received, now=now, weights=deferred)
            under_way.in_flight[place] = work
            if work.loss is not None:
                # Detached: the sum is only reported, and must not hold the graphs of micro-batches
                # that are done.
                under_way.loss += work.loss.detach() / under_way.weight
        elif action.kind == "backward":
            work = under_way.in_flight.pop(place)
            self._backward(action, work=work, now=now, weight=under_way.weight)
        else:
            with self.clock.during("weights"):
                under_way.deferred.pop(place).compute()
        # A gradient is complete with the backward, or with the weights that it has put off.
        if action.kind != "forward" and place not in under_way.deferred:
            after_micro_batch(action.stage)

    def module(self, stage: int, now: Pass) -> Stage:
        """Return what computes a stage in this pass."""
        return self.stages[stage]

    @torch.no_grad()
    def predict(
        self, pieces: Sequence[Tensor], fetch: Callable[[Tensor], Batch], step: int
    ) -> dict[int, list[int]]:
        """Return predictions by sample id, through the same compressed channels as in training.

        pieces: sample ids of every micro-batch, int64 [B]. fetch: the visible fields of samples.
        Ranks of replica 0 call it. Those without the last stage return nothing.
        """
        predictions: dict[int, list[int]] = {}
        now = Pass(step=step, kind=Kind.EVALUATION)
        for stage in self.stages.values():
            stage.eval()
        num_replicas = self.layout.num_replicas
        # Forwards only, so no schedule has to hold anything back. Micro-batch i belongs to replica
        # i mod R, so replica 0 finds its pieces at each R-th.
        actions, _ = self._plan(GPipe(num_replicas * len(pieces)))
        for action in (a for a in actions if a.kind == "forward"):
            batch = fetch(pieces[action.micro_batch // num_replicas])
            received = self._receive(action, batch, now)
            if action.stage < self.num_stages - 1:
                self._forward(action, batch, received=received, now=now)
                continue
            with self.clock.during("forward"), self.autocast():
                found = self.stages[action.stage].predict(received, batch=batch)
            predictions.update(zip(batch["ids"].tolist(), found, strict=True))
        for stage in self.stages.values():
            stage.train()
        return predictions

    def _plan(self, schedule: Schedule) -> tuple[list[Action], Splits]:
        """Return this rank's actions, and what splits their backwards."""
        # Kept: a run switches between a few schedules, and each number of evaluated pieces is
        # another.
        if schedule not in self._plans:
            fitted = schedule.for_lanes(self.num_stages, num_lanes=self.layout.num_lanes)
            actions = rank_actions(
                fitted, stages=sorted(self.stages), num_stages=self.num_stages, turn_of=self.turns
            )
            late = split_backwards(actions)
            splits = {stage: schedule.splits(self.stages[stage]) for stage, _ in late}
            self._plans[schedule] = actions, {place: splits[place[0]] for place in late}
        return self._plans[schedule]

    def _forward(
        self,
        action: Action,
        batch: Batch,
        received: Message | None,
        now: Pass,
        weights: SplitBackward | None = None,
    ) -> InFlight:
        with self.clock.during("forward"):
            if received is not None and self.ports[action.stage - 1].boundary.gradient_returns:
                for value in received.values():
                    if value.is_floating_point():
                        # A leaf of this rank's graph: its gradient is what goes back over the
                        # boundary.
                        value.requires_grad_()
            # Dropout depends on seed, step, micro-batch and stage alone, not on who computes it.
            micro_batch = now.first_micro_batch + action.micro_batch
            seed = random_seed(self.seed, now.step, micro_batch, action.stage)
            torch.default_generator.manual_seed(seed)  # 70 times faster than torch.manual_seed
            if self.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            with self.autocast(), weights or nullcontext():
                output: StageOutput = self.module(action.stage, now)(received, batch)
        # From here on what has left the stage stands for it, with a defence's noise in the graph:
        # the gradient that comes back is of that.
        sent = output.send
        if sent is not None:
            peer = self.layout.owner(action.stage + 1, micro_batch=action.micro_batch)
            sent = self.ports[action.stage].forward_out[peer].send(now.key(action), sent, batch)
        return InFlight(batch, received, send=sent, loss=output.loss, weights=weights)

    def _backward(self, action: Action, work: InFlight, now: Pass, weight: float) -> None:
        if work.loss is not None:
            with self.clock.during("backward"):
                # Divided by the weight of the whole update, so that sums over micro-batches and
                # ranks are the gradient of the large batch.
                work.backward([work.loss / weight], None)
        elif not self._receive_gradient(action, work=work, now=now):
            return
        if work.received is not None:
            self._send_gradient(action, received=work.received, batch=work.batch, now=now)

    def _receive(self, action: Action, batch: Batch, now: Pass) -> Message | None:
        if action.stage == 0:
            return None
        peer = self.layout.owner(action.stage - 1, micro_batch=action.micro_batch)
        return self.ports[action.stage - 1].forward_in[peer].recv(now.key(action), batch)

    def _receive_gradient(self, action: Action, work: InFlight, now: Pass) -> bool:
        """Receive the gradient of what was sent into the stage. Returns False where none comes."""
        port = self.ports[action.stage]
        if not port.boundary.gradient_fields:
            return False
        assert work.send is not None
        peer = self.layout.owner(action.stage + 1, micro_batch=action.micro_batch)
        # The gradient has as many rows of each sample, so the counts do not cross again.
        known = _integers(work.send)
        gradients = port.backward_in[peer].recv(now.key(action), work.batch, known)
        port.forward_out[peer].learn_from_gradients(now.step, gradients)
        with self.clock.during("backward"):
            pairs = [(work.send[f.name], gradients[f.name]) for f in port.boundary.gradient_fields]
            # Of what depends on nothing that is trained no gradient is wanted.
            needed = [pair for pair in pairs if pair[0].requires_grad]
            if needed:
                work.backward([p[0] for p in needed], [p[1] for p in needed])
        return True

    def _send_gradient(self, action: Action, received: Message, batch: Batch, now: Pass) -> None:
        port = self.ports[action.stage - 1]
        if not port.boundary.gradient_fields:
            return
        gradients: Message = {}
        for entry in port.boundary.gradient_fields:
            value = received[entry.name]
            # A field that the stage did not use has gradient zero.
            gradient = value.grad if value.grad is not None else torch.zeros_like(value)
            gradients[entry.name] = gradient
        peer = self.layout.owner(action.stage - 1, micro_batch=action.micro_batch)
        port.backward_out[peer].send(now.key(action), gradients, batch, known=received)


def _integers(message: Message) -> Message:
    """Return what both ends of a boundary know once a message has crossed it forward."""
    return {name: value for name, value in message.items() if not value.is_floating_point()}


def random_seed(*numbers: int) -> int:
    """Return a 63-bit seed made of a few integers; neighbouring integers give unrelated seeds."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = ((mixed ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return mixed >> 1


@torch.no_grad()
def hand_over(stages: Mapping[int, Stage], ports: Mapping[int, BoundaryPorts]) -> None:
    """Send to successors what stages hand over once, before the first step (Boundary.start)."""
    for stage, module in sorted(stages.items()):
        before = ports.get(stage - 1)
        after = ports.get(stage)
        if before is not None and before.boundary.start:
            for giver in before.forward_in.values():  # every rank before hands over the same
                module.take_over(giver.recv_start(before.boundary.start))
        if after is not None and after.boundary.start:
            handed = tuple(tensor.detach() for tensor in module.handed_over)
            specs = tuple(TensorSpec.of(tensor) for tensor in handed)
            assert specs == after.boundary.start, (specs, after.boundary.start)
            for taker in after.forward_out.values():
                taker.send_start(handed)

"""Runs one rank's share of a pipelined step: the loop over a schedule's actions.

Nothing here knows what a stage computes, how a message is compressed or what carries it.
The same loop serves one process that holds all stages and ranks in several clouds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from xcloud.cluster.frame import Kind, MessageKey
from xcloud.cluster.tensor_spec import TensorSpec
from xcloud.comm.border import Border, Message
from xcloud.comm.channel import ReceiveChannel, SendChannel
from xcloud.comm.step_clock import NOWHERE, Place, StepClock
from xcloud.errors import FrameError
from xcloud.parallel.schedule import Action, ForwardOnly, Schedule, rank_actions
from xcloud.parallel.stage import Batch, Stage, StageOutput
from xcloud.security.defences import LABEL, Defence
from xcloud.security.observer import Observer, Stream


@dataclass
class BorderPorts:
    """The ends of one border's channels that this rank holds, by peer rank.

    A rank before the border has forward_out and backward_in, a rank behind it the other two; a
    rank on both sides has neither for itself: messages are handed over in memory.
    defences: noise on what this border carries away, by direction; empty inside a cloud.
    """

    border: Border
    forward_out: dict[int, SendChannel] = field(default_factory=dict)
    forward_in: dict[int, ReceiveChannel] = field(default_factory=dict)
    backward_out: dict[int, SendChannel] = field(default_factory=dict)
    backward_in: dict[int, ReceiveChannel] = field(default_factory=dict)
    crosses_clouds: bool = False
    defences: Mapping[str, Defence] = field(default_factory=dict)

    def counts_of(self, name: str, counts: Tensor | None) -> Tensor | None:
        """Rows of each sample in this field; None where every sample has one row."""
        counted = {entry.name for entry in self.border.fields if entry.rows == "counted"}
        return counts if name in counted else None


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward at one stage."""

    batch: Batch
    received: Message | None
    output: StageOutput

    @property
    def ids(self) -> Tensor:
        return self.batch["ids"]


class Pipeline:
    """One rank's stages and ports.

    owner(stage, micro_batch): the rank that computes it. lanes: stage -> (lane, number of lanes)
    for the stages of this rank. autocast: makes the context that stages compute in.
    observer: notes what this rank sees of other clouds in training, for the leak meter.
    """

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        num_stages: int,
        ports: Mapping[int, BorderPorts],
        owner: Callable[[int, int], int],
        lanes: dict[int, tuple[int, int]],
        device: torch.device,
        seed: int,
        clock: StepClock,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        observer: Observer | None = None,
    ) -> None:
        self.observer = observer
        self.rank, self.stages, self.num_stages = rank, stages, num_stages
        self.ports, self.owner, self.lanes = ports, owner, lanes
        self.device, self.seed, self.clock, self.autocast = device, seed, clock, autocast
        # Messages between two stages of this rank, by (receiving stage, micro-batch).
        self._handed_on: dict[tuple[int, int], Message] = {}
        self._handed_back: dict[tuple[int, int], Message] = {}
        self._first = 0
        # Of the defences. Not drawn from the run's seed: the receiver knows that one too.
        self._noise = np.random.default_rng()

    def step(
        self,
        schedule: Schedule,
        batches: Mapping[int, Batch],
        step: int,
        weight: float,
        first_micro_batch: int = 0,
    ) -> Tensor:
        """Forward and backward of every micro-batch of this rank; gradients add up in `.grad`.

        batches: micro-batch number of the schedule -> the fields that this rank may see.
        first_micro_batch: what is added to that number to name the micro-batch within the update
            (gradient accumulation runs the schedule several times for one update).
        weight: what the loss of the whole update is divided by (its number of target tokens).
        Returns the loss of this rank's micro-batches, divided by `weight` (0 without last stage).
        """
        self._first = first_micro_batch
        if self.observer is not None and self.observer.wants(step):
            for batch in batches.values():
                self.observer.truth(batch)
        in_flight: dict[tuple[int, int], _InFlight] = {}
        loss = torch.zeros((), device=self.device)
        for action in self._actions(schedule):
            self.clock.place = self._place(action)
            place = (action.stage, action.micro_batch)
            if action.kind == "forward":
                in_flight[place] = self._forward(action, batches[action.micro_batch], step)
                output = in_flight[place].output
                if output.loss is not None:
                    loss += output.loss.detach() / weight
            else:
                self._backward(action, in_flight.pop(place), step, weight)
        self.clock.place = NOWHERE
        return loss

    @torch.no_grad()
    def hand_over(self) -> None:
        """Before the first step: what stages hand to their successors once (Border.start)."""
        key = MessageKey(Kind.START)
        for stage, module in sorted(self.stages.items()):
            port = self.ports.get(stage)
            if port is None or not port.border.start:
                continue
            handed = tuple(tensor.detach() for tensor in module.hand_over())
            found = tuple(TensorSpec.of(tensor) for tensor in handed)
            assert found == port.border.start, (found, port.border.start)
            for channel in port.forward_out.values():
                channel.link.send(key, handed, ("start",) * len(handed))
            if stage + 1 in self.stages:
                self.stages[stage + 1].take_over(handed)
        for stage, module in sorted(self.stages.items()):
            port = self.ports.get(stage - 1)
            if port is None or not port.border.start:
                continue
            for giver in port.forward_in.values():  # every lane before hands over the same
                parts = giver.link.recv(key, giver.overdue_s)
                if tuple(TensorSpec.of(part) for part in parts) != port.border.start:
                    raise FrameError(f"{key}: not what the border between the stages promises")
                module.take_over(tuple(part.to(self.device) for part in parts))

    @torch.no_grad()
    def predict(
        self, pieces: Sequence[Tensor], fetch: Callable[[Tensor], Batch], step: int
    ) -> dict[int, list[int]]:
        """Predictions by sample id, through the same compressed channels as in training.

        pieces: sample ids of every micro-batch, int64 [B]. fetch: the visible fields of samples.
        Ranks without the last stage return nothing.
        """
        predictions: dict[int, list[int]] = {}
        self._first = 0
        for stage in self.stages.values():
            stage.eval()
        for action in self._actions(ForwardOnly(len(pieces))):
            batch = fetch(pieces[action.micro_batch])
            if action.stage < self.num_stages - 1:
                self._forward(action, batch, step, Kind.EVALUATION)
                continue
            received = self._receive_forward(action, batch["ids"], step, Kind.EVALUATION)
            with self.clock.during("forward"), self.autocast():
                found = self.stages[action.stage].predict(received, batch)
            predictions.update(zip(batch["ids"].tolist(), found, strict=True))
        for stage in self.stages.values():
            stage.train()
        return predictions

    def _actions(self, schedule: Schedule) -> list[Action]:
        return rank_actions(schedule, sorted(self.stages), self.num_stages, self.lanes)

    def _forward(
        self, action: Action, batch: Batch, step: int, kind: Kind = Kind.ACTIVATION
    ) -> _InFlight:
        ids = batch["ids"]
        received = self._receive_forward(action, ids, step, kind)
        with self.clock.during("forward"):
            if received is not None and self.ports[action.stage - 1].border.gradient_returns:
                for value in received.values():
                    if value.is_floating_point():
                        value.requires_grad_()
            # Dropout depends on seed, step, micro-batch and stage alone, not on who computes it.
            torch.manual_seed(
                random_seed(self.seed, step, self._first + action.micro_batch, action.stage)
            )
            with self.autocast():
                output = self.stages[action.stage](received, batch)
            self._wait_for_device()
        if output.send is not None:
            counts = output.send.get("counts")
            # Inside the graph: what comes back is the gradient of what was sent.
            sent = self._defended(action, "forward", output.send, counts, batch)
            output = StageOutput(sent, output.loss)
            self._send_forward(action, sent, ids, step, kind)
        return _InFlight(batch, received, output)

    def _backward(self, action: Action, work: _InFlight, step: int, weight: float) -> None:
        received, output = work.received, work.output
        if output.loss is not None:
            with self.clock.during("backward"):
                (output.loss / weight).backward()  # type: ignore[no-untyped-call]
                self._wait_for_device()
        else:
            fields = self.ports[action.stage].border.gradient_fields
            if not fields:
                return
            assert output.send is not None
            gradients = self._receive_backward(action, work, step)
            with self.clock.during("backward"):
                pairs = [(output.send[f.name], gradients[f.name]) for f in fields]
                needed = [pair for pair in pairs if pair[0].requires_grad]
                if needed:
                    torch.autograd.backward([p[0] for p in needed], [p[1] for p in needed])
                self._wait_for_device()
        if received is not None:
            self._send_backward(action, received, work.batch, step)

    def _receive_forward(
        self, action: Action, ids: Tensor, step: int, kind: Kind
    ) -> Message | None:
        if action.stage == 0:
            return None
        peer = self.owner(action.stage - 1, action.micro_batch)
        if peer == self.rank:
            return self._handed_on.pop((action.stage, action.micro_batch))
        channel = self.ports[action.stage - 1].forward_in[peer]
        message = channel.recv(self._key(kind, step, action), ids)
        if kind is Kind.ACTIVATION:
            self._observe(action.stage - 1, "received", message, ids, message.get("counts"), step)
        return message

    def _send_forward(
        self, action: Action, message: Message, ids: Tensor, step: int, kind: Kind
    ) -> None:
        peer = self.owner(action.stage + 1, action.micro_batch)
        if peer == self.rank:
            detached = {name: value.detach() for name, value in message.items()}
            self._handed_on[action.stage + 1, action.micro_batch] = detached
            return
        key = self._key(kind, step, action)
        channel = self.ports[action.stage].forward_out[peer]
        channel.send(key, message, ids, message.get("counts"))
        if kind is Kind.ACTIVATION:
            self._observe(action.stage, "sent", message, ids, message.get("counts"), step)

    def _receive_backward(self, action: Action, work: _InFlight, step: int) -> Message:
        assert work.output.send is not None
        peer = self.owner(action.stage + 1, action.micro_batch)
        if peer == self.rank:
            return self._handed_back.pop((action.stage, action.micro_batch))
        key = self._key(Kind.GRADIENT, step, action)
        channel = self.ports[action.stage].backward_in[peer]
        counts = work.output.send.get("counts")
        message = channel.recv(key, work.ids, counts)
        self._observe(action.stage, "received", message, work.ids, counts, step, "backward")
        return message

    def _send_backward(self, action: Action, received: Message, batch: Batch, step: int) -> None:
        ids, counts = batch["ids"], received.get("counts")
        fields = self.ports[action.stage - 1].border.gradient_fields
        if not fields:
            return
        message: Message = {}
        for entry in fields:
            value = received[entry.name]
            # A field that the stage did not use has gradient zero.
            message[entry.name] = value.grad if value.grad is not None else torch.zeros_like(value)
        peer = self.owner(action.stage - 1, action.micro_batch)
        if peer == self.rank:
            self._handed_back[action.stage - 1, action.micro_batch] = message
            return
        message = self._defended(action, "backward", message, counts, batch)
        key = self._key(Kind.GRADIENT, step, action)
        channel = self.ports[action.stage - 1].backward_out[peer]
        channel.send(key, message, ids, counts)
        self._observe(action.stage - 1, "sent", message, ids, counts, step, "backward")

    def _defended(
        self,
        action: Action,
        direction: str,
        message: Message,
        counts: Tensor | None,
        batch: Batch,
    ) -> Message:
        """The message with its floating fields protected, where this border has a defence."""
        border = action.stage if direction == "forward" else action.stage - 1
        defence = self.ports[border].defences.get(direction)
        if defence is None:
            return message
        protected = dict(message)
        with self.clock.during("compress"):
            for name, value in message.items():
                if not value.is_floating_point():
                    continue
                counted = self.ports[border].counts_of(name, counts)
                labels = batch[LABEL] if defence.needs_labels else None
                protected[name] = defence.protect(value, counted, labels, self._noise)
        return protected

    def _observe(
        self,
        border: int,
        how: str,
        message: Message,
        ids: Tensor,
        counts: Tensor | None,
        step: int,
        direction: str = "forward",
    ) -> None:
        seen = self.observer is not None and self.observer.wants(step)
        if seen and self.ports[border].crosses_clouds:
            assert self.observer is not None
            for name, value in message.items():
                if value.is_floating_point():
                    rows = self.ports[border].counts_of(name, counts)
                    stream = Stream(direction, border, how, name)
                    self.observer.message(stream, ids, rows, value)

    def _key(self, kind: Kind, step: int, action: Action) -> MessageKey:
        return MessageKey(kind, step, self._first + action.micro_batch)

    def _place(self, action: Action) -> Place:
        return Place(action.kind, action.stage, self._first + action.micro_batch)

    def _wait_for_device(self) -> None:
        """Computing is counted where it happens, not where its result is first looked at."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def random_seed(*numbers: int) -> int:
    """A 63-bit seed from a few integers; neighbouring integers give unrelated seeds."""
    mixed = 0x9E3779B97F4A7C15
    for number in numbers:
        mixed = ((mixed ^ (number & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return mixed >> 1

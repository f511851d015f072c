"""What one rank of a producer does: make what was ordered, send it, learn from its own loss, and
wait when nothing is ordered. It gets nothing from the consumer but orders.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from xcloud.cluster.frame import Kind, MessageKey
from xcloud.comm.state import State, Stateful, StatefulParts, whole_number
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way_parts import Fed, Producer
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.control import Signal
from xcloud.parallel.exchange import FlatBuffer
from xcloud.parallel.one_way import NOBODY, Order, rows_of, whole_numbers
from xcloud.rank.checkpoints import restored
from xcloud.rank.export import exporting
from xcloud.rank.one_way.inbox import OrderBook
from xcloud.rank.one_way.one_way_rank import CARRIES, OneWayRank
from xcloud.rank.role import RankContext
from xcloud.record.files import ready_file
from xcloud.record.reporter import FLUSH_EVERY_S
from xcloud.survive.checkpointing import Checkpointer, CheckpointMessage


class ProducerRun(StatefulParts):
    """Makes and learns every number in turn. number: of the last batch learned from. kept:
    payloads made for nobody, which may still be wanted, by number. Figures that were not reported
    yet are no part of its state."""

    own_names = ("number", "num_planned", "kept", "payloads")

    def __init__(self, rank: ProducerRank, part: Producer, name: str) -> None:
        self._rank, self.part, self.name = rank, part, name
        self._guard = rank.divergence_guard()
        module = part.parameters_module
        self._buffer = None if module is None else FlatBuffer(module.parameters())
        self._clock = StepClock()
        self.number = self._num_planned = 0
        self.kept: dict[int, Tensor] = {}
        self._reported_at_s = time.monotonic()
        self._made: Counter[str] = Counter()  # since then
        self._losses: list[float] = []  # of the batches learned from

    def feed(self, checkpoints: Checkpointer) -> bool:
        """Until the consumer wants no more: what is under way is brought to its end, what is
        ordered besides only where ranks that average gradients must end with the same batch.
        Returns whether the run ends early, as it was asked to. Raises LinkClosed if the consumer
        is gone."""
        is_stopped, averages = False, self._buffer is not None and self._rank.group.group_size > 1
        while True:
            with self._clock.during("wait"):
                order = self._rank.orders.next(may_drop=not averages)
            if isinstance(order, Order):
                checkpoints.after(0, Signal.GO_ON)
                self._carry_out(order)
                continue
            self._report()
            if order is None:
                return is_stopped
            is_stopped = order.code == CheckpointMessage.SAVE_AND_STOP
            checkpoints.after(order.step, Signal.STOP if is_stopped else Signal.CHECKPOINT)

    def parts(self) -> dict[str, Stateful]:
        return {"part": self.part, "guard": self._guard}

    def own(self) -> State:
        """Between two batches."""
        return {
            "number": self.number,
            "num_planned": self._num_planned,
            "kept": rows_of(2, [(number, len(p)) for number, p in self.kept.items()]),
            "payloads": torch.cat([torch.empty(0, dtype=torch.uint8), *self.kept.values()]),
        }

    def take(self, own: State) -> None:
        self.number = whole_number(own, "number")
        kept = whole_numbers(own, "kept", -1, 2)
        pieces = torch.split(torch.as_tensor(own["payloads"]), kept[:, 1].tolist())
        self.kept = {n: p.clone() for n, p in zip(kept[:, 0].tolist(), pieces, strict=True)}
        if num_planned := whole_number(own, "num_planned"):
            self._replan(num_planned)

    def _replan(self, num_planned: int) -> None:
        """Batches that this rank will make in all, as the consumer plans by now."""
        if num_planned != self._num_planned:
            self._num_planned = num_planned
            self.part.replan(num_planned)

    def _carry_out(self, order: Order) -> None:
        if order.number in self.kept:
            return self._rank.send(order.consumer, order.number, self.kept.pop(order.number))
        self._replan(order.num_planned)
        fed = self._produce(order.number)
        payload = fed.payload.cpu()
        if order.consumer == NOBODY:
            self.kept[order.number] = payload
        else:  # before anything is learned from it
            self._rank.send(order.consumer, order.number, payload)
        self._learn(order.number, fed)

    def _produce(self, number: int) -> Fed:
        if self._buffer is not None:
            self._buffer.zero()
        with self._rank.computing_in(self._clock, "forward"), self._rank.memory.first_step():
            fed = self.part.produce(number)
        assert fed.payload.dtype == torch.uint8 and fed.payload.dim() == 1, "not a vector of bytes"
        return fed

    def _learn(self, number: int, fed: Fed) -> None:
        """Average the gradients over the ranks of this cloud, and update."""
        loss, group = fed.loss, self._rank.group
        is_finite = math.isfinite(loss)
        if self._buffer is not None:
            with self._clock.during("average"):
                summed = self._buffer.sum_over(group, torch.tensor(fed.loss))
                self._buffer.scale(1.0 / group.group_size)
                loss = float(summed) / group.group_size
            is_finite = self._buffer.is_finite()  # of the sums, so alike in all ranks
        if not is_finite:
            what = f"the loss or gradient of batch {number} of producer {self.name!r}"
            note = self._guard.leave_out(number, what)
            if group.leads:
                self._rank.reporter.event("skipped_update", cloud=self.name, step=number)
                self._rank.reporter.note(note)
        else:
            if self._buffer is not None:
                with self._rank.computing_in(self._clock, "optimizer"):
                    self.part.update(number)
            self._losses.append(loss)
        self.number = number
        self._made.update(num_batches=1, samples=fed.num_samples, tokens=fed.num_tokens)
        if time.monotonic() - self._reported_at_s > FLUSH_EVERY_S:
            self._report()

    def _report(self) -> None:
        """What was made since the last time: one line for many batches, as it crosses the link."""
        if not self._made:
            return
        figures: dict[str, Any] = dict(self._made)
        figures |= {kind: round(seconds, 6) for kind, seconds in self._clock.seconds.items()}
        if self._losses:
            figures["loss"] = round(sum(self._losses) / len(self._losses), 6)
        self._rank.reporter.event("fed", cloud=self.name, **figures)
        self._clock.begin_step(0)  # start counting anew
        self._made.clear()
        self._losses.clear()
        self._reported_at_s = time.monotonic()


class ProducerRank(OneWayRank):
    """One rank of a cloud that feeds."""

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        job, consumers = self.job, range(self.job.cluster.num_consumers)
        most_number = 2 * job.max_steps * job.training.batches_per_step + 4096  # late, made twice
        source = self.rank - len(consumers)
        self.orders = OrderBook(
            self.lives[0], len(consumers), self.most_waiting, most_number, source
        )
        self._outs = [self.out("batches", consumer) for consumer in consumers]
        handlers = {
            Kind.ORDER: self.orders.take_orders, Kind.STOP: self.orders.take_stop,
            Kind.CHECKPOINT: self.orders.take_save,
        }  # fmt: skip
        self.incoming("orders", 0, handlers, self.orders.take_end)

    def say_ready(self) -> None:
        for out in self._outs:
            out.send(MessageKey(Kind.READY), (), CARRIES[Kind.READY])

    def send(self, consumer: int, number: int, payload: Tensor) -> None:
        key = MessageKey(Kind.BATCH, number)
        self._outs[consumer].send(key, (payload,), CARRIES[Kind.BATCH])

    def run(self) -> None:
        job, place, run_dir = self.job, self.place, self.context.run_dir
        assert place.producer is not None
        # Batches that each rank will make if every cloud keeps to its share.
        wanted = job.max_steps * job.training.batches_per_step * job.cluster.shares[place.producer]
        building = self.building(max(1, math.ceil(wanted / place.group_size)))
        with self.computing:
            part = job.model.producer(building)
        run = ProducerRun(self, part, place.cloud)
        checkpoints = restored(self.context, {"producer": run}, self.control, {})
        self.orders.begin_after(run.number, run.kept)
        ready_file(run_dir, self.rank).touch()
        self.say_ready()
        self.context.asked.is_armed = job.checkpoint.are_made
        self.is_stopped = run.feed(checkpoints)
        self.context.asked.is_armed = False
        checkpoints.settle()
        self.report_memory(part.parameters_module, part)
        if self.group.leads and not self.is_stopped:
            with exporting(run_dir), self.computing:
                part.finish(run_dir)
        self.reporter.event("stop" if self.is_stopped else "finish")
        self.leave(checkpoints)

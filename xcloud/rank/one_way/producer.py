"""What one rank of a producer does: make what was ordered, send it, learn from its own loss, and
wait when nothing is ordered. It gets nothing from the consumer but orders.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.comm.state import (
    State,
    Stateful,
    load_states,
    states_of,
    whole_number,
    whole_numbers,
)
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way_parts import Fed, Producer
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.control import Signal
from xcloud.parallel.exchange import FlatBuffer
from xcloud.parallel.one_way.inbox import Ordered, SaveNow
from xcloud.parallel.one_way.plan import NOBODY
from xcloud.rank.checkpoints import restored
from xcloud.rank.export import exporting
from xcloud.rank.one_way.wiring import OneWayRank, ProducerLinks, producer_links
from xcloud.rank.role import RankContext
from xcloud.record.rank_state import ready_file
from xcloud.record.reporter import FLUSH_EVERY_S
from xcloud.survive.checkpointing import Checkpointer, CheckpointMessage


@dataclass
class _Made:
    """Since the last report. losses: of the batches learned from."""

    since_s: float = field(default_factory=time.monotonic)
    num_batches: int = 0
    samples: int = 0
    tokens: int = 0
    losses: list[float] = field(default_factory=list)


class ProducerRun:
    """`produce` and `learn` for every number in turn. number: of the last batch learned from.
    kept: payloads made for nobody, which may still be wanted, by number."""

    def __init__(self, rank: OneWayRank, part: Producer, name: str) -> None:
        self._rank, self.part, self.name = rank, part, name
        self._guard = rank.divergence_guard()
        module = part.parameters_module
        self._buffer = None if module is None else FlatBuffer(module.parameters())
        self.clock = StepClock()
        self.number = self._num_planned = 0
        self.kept: dict[int, Tensor] = {}
        self._made = _Made()

    @property
    def may_stop_anywhere(self) -> bool:
        """No other rank waits for this one's gradients."""
        return self._buffer is None or self._rank.group.group_size == 1

    def _replan(self, num_planned: int) -> None:
        """Batches that this rank will make in all, as the consumer plans by now."""
        if num_planned != self._num_planned:
            self._num_planned = num_planned
            self.part.replan(num_planned)

    def state_dict(self) -> State:
        """Between two batches. Figures that were not reported yet are no part of it."""
        kept = [(number, len(payload)) for number, payload in self.kept.items()]
        own: State = {
            "number": self.number,
            "num_planned": self._num_planned,
            "kept": torch.tensor(kept, dtype=torch.int64).view(-1, 2),
            "payloads": torch.cat([torch.empty(0, dtype=torch.uint8), *self.kept.values()]),
        }
        return own | states_of(self._stateful)

    def load_state_dict(self, state: State) -> None:
        """The state of the same rank in the same experiment; ValueError otherwise."""
        own = ["number", "num_planned", "kept", "payloads"]
        load_states(self._stateful, state, f"producer {self.name!r}", own)
        self.number = whole_number(state, "number")
        kept, payloads = whole_numbers(state, "kept", -1, 2), state["payloads"]
        assert isinstance(payloads, Tensor)
        pieces = torch.split(payloads, kept[:, 1].tolist())
        self.kept = {n: p.clone() for n, p in zip(kept[:, 0].tolist(), pieces, strict=True)}
        if num_planned := whole_number(state, "num_planned"):
            self._replan(num_planned)

    @property
    def _stateful(self) -> dict[str, Stateful]:
        return {"part": self.part, "guard": self._guard}

    def carry_out(self, order: Ordered, links: ProducerLinks) -> None:
        if order.number in self.kept:
            links.send(order.consumer, order.number, self.kept.pop(order.number))
            return
        self._replan(order.num_planned)
        fed = self._produce(order.number)
        payload = fed.payload.cpu()
        if order.consumer == NOBODY:
            self.kept[order.number] = payload
        else:  # before anything is learned from it
            links.send(order.consumer, order.number, payload)
        self._learn(order.number, fed)

    def _produce(self, number: int) -> Fed:
        if self._buffer is not None:
            self._buffer.zero()
        with (
            self._rank.computing_in(self.clock),
            self.clock.during("forward"),
            self._rank.memory.first_step(),
        ):
            fed = self.part.produce(number)
        if fed.payload.dtype != torch.uint8 or fed.payload.dim() != 1:
            raise FrameError(
                f"batch {number} of producer {self.name!r} must be one vector of bytes, got "
                f"{fed.payload.dtype} of shape {tuple(fed.payload.shape)}"
            )
        return fed

    def _learn(self, number: int, fed: Fed) -> None:
        """Average the gradients over the ranks of this cloud, and update."""
        loss = fed.loss
        if self._buffer is not None:
            size = self._rank.group.group_size
            with self.clock.during("average"):
                mine = torch.tensor(fed.loss)
                summed = self._buffer.sum_over(self._rank.group, mine)
                self._buffer.scale(1.0 / size)
                loss = float(summed) / size
            is_finite = self._buffer.is_finite()  # of the sums, so alike in all ranks
        else:
            is_finite = math.isfinite(loss)
        what = f"the loss or gradient of batch {number} of producer {self.name!r}"
        if self._guard.skips(what, is_finite):
            if self._rank.group.leads:
                self._rank.reporter.event("skipped_update", cloud=self.name, step=number)
                self._rank.reporter.note(self._guard.note(what))
        else:
            if self._buffer is not None:
                with self._rank.computing_in(self.clock), self.clock.during("optimizer"):
                    self.part.update(number)
            self._made.losses.append(loss)
        self.number = number
        self._made.num_batches += 1
        self._made.samples += fed.num_samples
        self._made.tokens += fed.num_tokens
        if time.monotonic() - self._made.since_s > FLUSH_EVERY_S:
            self.report()

    def report(self) -> None:
        """What was made since the last time: one line for many batches, as it crosses the link."""
        made = self._made
        if not made.num_batches:
            return
        times = {kind: round(seconds, 6) for kind, seconds in self.clock.seconds.items()}
        more: dict[str, Any] = {**times}
        if made.losses:
            more["loss"] = round(sum(made.losses) / len(made.losses), 6)
        self._rank.reporter.event(
            "fed", cloud=self.name, num_batches=made.num_batches, samples=made.samples,
            tokens=made.tokens, **more,
        )  # fmt: skip
        self.clock.begin_step(0)  # start counting anew
        self._made = _Made()


def feed(run: ProducerRun, links: ProducerLinks, checkpoints: Checkpointer) -> bool:
    """Until the consumer wants no more: what is under way is brought to its end, what is ordered
    besides only where ranks that average gradients must end with the same batch. Returns whether
    the run ends early, as it was asked to. Raises LinkClosed if the consumer is gone."""
    is_stopped = False
    while True:
        with run.clock.during("wait"):
            order = links.orders.next(run.may_stop_anywhere)
        if order is None:
            run.report()
            return is_stopped
        if isinstance(order, SaveNow):
            run.report()
            is_stopped = order.code == CheckpointMessage.SAVE_AND_STOP
            checkpoints.after(order.step, Signal.STOP if is_stopped else Signal.CHECKPOINT)
        else:
            checkpoints.after(0, Signal.GO_ON)
            run.carry_out(order, links)


class ProducerRank(OneWayRank):
    """One rank of a cloud that feeds."""

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        self.links = producer_links(self.job, self.ends)

    def run(self) -> None:
        job, place, run_dir = self.job, self.place, self.context.run_dir
        assert place.producer is not None
        # Batches that each rank will make if every cloud keeps to its share.
        wanted = job.max_steps * job.training.batches_per_step * job.cluster.shares[place.producer]
        building = self.building(max(1, math.ceil(wanted / place.group_size)))
        with self.computing:
            part = job.model.producer(
                place.producer, place.cloud, place.group_rank, place.group_size, building
            )
        run = ProducerRun(self, part, place.cloud)
        checkpoints = restored(self.context, {"producer": run}, self.control, {})
        self.links.orders.begin_after(run.number, run.kept)
        ready_file(run_dir, self.rank).touch()
        self.links.say_ready()
        self.context.asked.is_armed = job.checkpoint.are_made
        self.is_stopped = feed(run, self.links, checkpoints)
        self.context.asked.is_armed = False
        checkpoints.wait()
        self.report_memory(part.parameters_module, part)
        if not self.is_stopped:
            with exporting(run_dir), self.computing:
                part.finish(run_dir, place.group_rank)
        self.reporter.event("stop" if self.is_stopped else "finish")
        self.leave(checkpoints)

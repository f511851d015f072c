"""What one rank of a producer does: make what was ordered, send it, learn from its own loss, and
wait when nothing is ordered. It hears nothing of the consumer but orders.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from xcloud.base.errors import FrameError
from xcloud.comm.state import State, Stateful, load_states, states_of, whole_number, whole_numbers
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way_parts import Fed, Producer
from xcloud.parallel.control import Signal
from xcloud.parallel.exchange import FlatBuffer
from xcloud.parallel.one_way.orders import NOBODY, SaveNow
from xcloud.parallel.rank_group import RankGroup
from xcloud.rank.one_way.wiring import ProducerWiring
from xcloud.record.events import TIMES
from xcloud.record.reporter import FLUSH_EVERY_S, Reporter
from xcloud.survive.checkpointing import Checkpointer, News
from xcloud.training.memory_meter import MemoryMeter
from xcloud.training.trainer import DivergenceGuard


class ProducerRun:
    """One producer's rank; `produce` and `learn` for every number in turn."""

    def __init__(
        self,
        part: Producer,
        cloud: RankGroup,
        num_lanes: int,
        name: str,
        reporter: Reporter,
        guard: DivergenceGuard,
        memory: MemoryMeter,
    ) -> None:
        self._guard, self._memory = guard, memory
        self.part, self._cloud, self._num_lanes = part, cloud, num_lanes
        self.name, self._reporter = name, reporter
        module = part.parameters_module
        self._buffer = None if module is None else FlatBuffer(module.parameters())
        self.clock = StepClock()
        self._told_at_s = time.monotonic()
        self._losses: list[float] = []  # of the batches learned from
        self._number = 0  # of the last batch learned from
        self._num_made = 0
        self._num_planned = 0  # not told yet
        self._samples = self._tokens = 0
        self.kept: dict[int, Tensor] = {}  # payloads made for nobody, which may still be wanted

    @property
    def number(self) -> int:
        """Of the last batch made."""
        return self._number

    @property
    def may_stop_anywhere(self) -> bool:
        """No other rank waits for this one's gradients."""
        return self._buffer is None or self._num_lanes == 1

    def replan(self, num_planned: int) -> None:
        """Batches that this rank will make in all, as the consumer plans by now."""
        if num_planned != self._num_planned:
            self._num_planned = num_planned
            self.part.replan(num_planned)

    def state_dict(self) -> State:
        """Between two batches. Figures that were not told yet are no part of it."""
        payloads = [torch.empty(0, dtype=torch.uint8), *self.kept.values()]
        own: State = {
            "number": self._number, "num_planned": self._num_planned,
            "kept": torch.tensor([(n, len(p)) for n, p in self.kept.items()]).view(-1, 2).long(),
            "payloads": torch.cat(payloads),
        }  # fmt: skip
        return own | states_of(self._stateful)

    def load_state_dict(self, state: State) -> None:
        """The state of the same rank in the same experiment; ValueError otherwise."""
        own = ["number", "num_planned"]
        load_states(self._stateful, state, f"producer {self.name!r}", [*own, "kept", "payloads"])
        self._number, num_planned = (whole_number(state, name) for name in own)
        kept, payloads = whole_numbers(state, "kept", -1, 2), state["payloads"]
        assert isinstance(payloads, Tensor)
        pieces = torch.split(payloads, kept[:, 1].tolist())
        self.kept = {n: p.clone() for n, p in zip(kept[:, 0].tolist(), pieces, strict=True)}
        if num_planned:
            self.replan(num_planned)

    @property
    def _stateful(self) -> dict[str, Stateful]:
        return {"part": self.part, "guard": self._guard}

    def produce(self, number: int) -> Fed:
        """Batch `number`, before anything is learned from it: so it can leave at once."""
        if self._buffer is not None:
            self._buffer.zero()
        with self.clock.during("forward"), self._memory.first_step():
            fed = self.part.produce(number)
        if fed.payload.dtype != torch.uint8 or fed.payload.dim() != 1:
            raise FrameError(
                f"batch {number} of producer {self.name!r} must be one vector of bytes, got "
                f"{fed.payload.dtype} of shape {tuple(fed.payload.shape)}"
            )
        return fed

    def learn(self, number: int, fed: Fed) -> None:
        """Average the gradients over the ranks of this cloud, and update."""
        loss = fed.loss
        if self._buffer is not None:
            with self.clock.during("average"):
                mine = torch.tensor(fed.loss)
                summed = self._buffer.sum_over(self._cloud, mine)
                self._buffer.scale(1.0 / self._num_lanes)
                loss = float(summed) / self._num_lanes
            is_finite = self._buffer.is_finite()  # of the sums, so alike in all ranks
        else:
            is_finite = math.isfinite(loss)
        what = f"the loss or gradient of batch {number} of producer {self.name!r}"
        if self._guard.skips(what, is_finite):
            if self._cloud.lane == 0:
                self._reporter.event("skipped_update", cloud=self.name, step=number)
                self._reporter.note(self._guard.note(what))
        else:
            if self._buffer is not None:
                with self.clock.during("optimizer"):
                    self.part.update(number)
            self._losses.append(loss)
        self._number = number
        self._num_made += 1
        self._samples += fed.num_samples
        self._tokens += fed.num_tokens
        if time.monotonic() - self._told_at_s > FLUSH_EVERY_S:
            self.tell()

    def tell(self) -> None:
        """What was made since the last time: one line for many batches, as it crosses the link."""
        if not self._num_made:
            return
        loss: dict[str, Any] = {}
        if self._losses:
            loss = {"loss": round(sum(self._losses) / len(self._losses), 6)}
        self._reporter.event(
            "fed",
            cloud=self.name,
            num_batches=self._num_made,
            **loss,
            samples=self._samples,
            tokens=self._tokens,
            **{kind: round(getattr(self.clock, kind), 6) for kind in TIMES},
        )
        self.clock.begin_step(0)  # start counting anew
        self._told_at_s = time.monotonic()
        self._losses, self._num_made, self._samples, self._tokens = [], 0, 0, 0


def feed(run: ProducerRun, wiring: ProducerWiring, checkpoints: Checkpointer) -> bool:
    """Until the consumer wants no more: what is under way is brought to its end, what is ordered
    besides only where ranks that average gradients must end with the same batch. Returns whether
    the run ends early, as it was asked to. Raises LinkClosed if the consumer is gone."""
    wiring.orders.begin_after(run.number, run.kept)
    is_stopped = False
    while True:
        with run.clock.during("wait"):
            order = wiring.orders.next(run.may_stop_anywhere)
        if order is None:
            run.tell()
            return is_stopped
        if isinstance(order, SaveNow):
            run.tell()
            is_stopped = order.code == News.SAVE_AND_STOP
            checkpoints.after(order.step, Signal.STOP if is_stopped else Signal.CHECKPOINT)
            continue
        checkpoints.after(0, Signal.GO_ON)
        if order.number in run.kept:
            wiring.send(order.consumer, order.number, run.kept.pop(order.number))
            continue
        run.replan(order.num_planned)
        fed = run.produce(order.number)
        if order.consumer != NOBODY:
            wiring.send(order.consumer, order.number, fed.payload)
        else:
            run.kept[order.number] = fed.payload.cpu()
        run.learn(order.number, fed)

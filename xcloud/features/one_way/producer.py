"""The work of one rank of a producer: make what was ordered, send it, learn from its own loss, and
wait when nothing is ordered. It gets nothing from the consumer but orders."""

from __future__ import annotations

import math
import queue
import time
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xcloud.base.errors import FrameError, LinkError
from xcloud.comm.state import State, StatefulTree, whole_number
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way import Fed, Producer
from xcloud.features.one_way.feed import NOBODY, Order, packed, unpacked
from xcloud.features.one_way.job import OneWayExperiment
from xcloud.features.one_way.ranks import CARRIES, OneWayRank
from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.net.peer import Peer
from xcloud.pipeline.control import Signal
from xcloud.pipeline.exchange import FlatBuffer
from xcloud.rank.role import RankContext
from xcloud.rank.saving import CheckpointMessage, Saver, code_of
from xcloud.rank.task_data import report_cuts
from xcloud.record.files import rank_file
from xcloud.record.reporter import FLUSH_EVERY_S


class SaveNow(NamedTuple):
    """A request to save, between two batches, the state after step `step` of the consumer."""

    step: int
    code: int


class OrderBook:
    """The orders of one rank of a producer. `take_*` are handlers of a link. They raise
    FrameError for messages that no consumer sends.

    num_consumers: the number of ranks that a batch may be for.
    max_waiting: the largest number of orders that have not begun.
    max_number: the largest number of a batch.
    source: the number of this rank.
    """

    def __init__(
        self,
        consumer: Peer | None = None,
        num_consumers: int = 1,
        max_waiting: int = 1 << 14,
        max_number: int = 1 << 30,
        source: int = 0,
    ) -> None:
        self.consumer = consumer or Peer()
        self.num_consumers = num_consumers
        self.max_waiting = max_waiting
        self.max_number = max_number
        self.source = source
        self.is_stopped = False
        self._last = 0  # number ordered
        self._for_nobody = set[int]()  # of these some rank may still want the batch
        self.waiting = queue.SimpleQueue[Order | SaveNow | LinkError | None]()

    def begin_after(self, number: int, for_nobody: Collection[int] = ()) -> None:
        """Begin after batch `number`, which was made before the run resumed.

        for_nobody: the batches that are kept, as they were made for nobody.
        """
        self._last = max(self._last, number)
        self._for_nobody.update(for_nobody)

    def take_orders(self, frame: Frame) -> None:
        """Take orders, int32 [N, 3]. What was ordered for nobody may be ordered again."""
        part = frame.parts[0] if len(frame.parts) == 1 else torch.empty(0)
        if part.dtype != torch.int32 or part.dim() != 2 or part.shape[1] != 3:
            found = [(p.dtype, tuple(p.shape)) for p in frame.parts]
            raise FrameError(f"orders must be int32 [N, 3], got {found}")
        for row in part.tolist():
            order = Order(self.source, *row)
            # Made for nobody before a checkpoint, wanted by a rank after it: the payload is still
            # there.
            is_again = order.number in self._for_nobody
            if (
                self.is_stopped
                or not (is_again or self._last < order.number <= self.max_number)
                or not NOBODY <= order.consumer < self.num_consumers
                or not 1 <= order.num_planned <= self.max_number
                or len(self._for_nobody) > self.max_waiting
            ):
                stopped = "a" if self.is_stopped else "no"
                raise FrameError(
                    f"{order} after number {self._last} and {stopped} stop; there are "
                    f"{self.num_consumers} consumers and at most {self.max_number} batches"
                )
            self._last = max(self._last, order.number)
            if order.consumer != NOBODY:
                self._for_nobody.discard(order.number)
            elif is_again:
                continue
            else:
                self._for_nobody.add(order.number)
            self._put(order)

    def take_stop(self, frame: Frame) -> None:
        """Take the stop. All ranks of the cloud have been ordered the same numbers."""
        if self.is_stopped or frame.parts:
            raise FrameError(f"a stop of {len(frame.parts)} parts, or a second one")
        self.is_stopped = True
        # Past the bound of `_put`: a stop must get in however many orders wait.
        self.waiting.put(None)

    def take_save(self, frame: Frame) -> None:
        """Take a request to save after everything that was ordered so far."""
        self._put(SaveNow(step=frame.key.step, code=code_of(frame, peer=0)))

    def _put(self, item: Order | SaveNow) -> None:
        if self.waiting.qsize() >= self.max_waiting:
            raise FrameError(f"more than {self.max_waiting} orders that are not begun")
        self.waiting.put(item)

    def next(self, may_drop: bool) -> Order | SaveNow | None:
        """Return the next order or request; None if no more is wanted.

        may_drop: true to end at the stop, whatever was ordered before it.
        Raises the reason where the link has ended.
        """
        with self.consumer.awaiting(f"orders after batch {self._last}"):
            item = self.waiting.get()
        # The flag is set by the link's thread ahead of what waits in the queue.
        if may_drop and self.is_stopped:
            return None
        if isinstance(item, LinkError):
            raise item
        return item


class ProducerRun(StatefulTree):
    """The training of one rank of a producer, which makes and learns every number in turn.

    number: the number of the last batch learned from.
    kept: the payloads made for nobody, which may still be wanted, by number.
    """

    own_names = ("number", "num_planned", "kept", "payloads")
    child_names = ("part", "guard")

    def __init__(self, rank: ProducerRank, part: Producer, name: str) -> None:
        self._rank = rank
        self.part = part
        self.name = name
        self.guard = rank.guard
        module = part.parameters_module
        self._buffer = None if module is None else FlatBuffer(module.parameters())
        self._clock = StepClock()
        self.number = self._num_planned = 0
        self.kept: dict[int, Tensor] = {}
        self._reported_at_s = time.monotonic()
        self._made: Counter[str] = Counter()  # since then
        self._losses: list[float] = []  # of the batches learned from

    def feed(self, checkpoints: Saver) -> bool:
        """Carry out orders until the consumer wants no more. Return whether the run ends early.

        What is ordered and not begun is made only where ranks that average gradients must end with
        the same batch.
        Raises LinkClosed if the consumer is gone.
        """
        is_stopped = False
        # With one rank, or nothing to learn, no other rank waits for a batch that is left out.
        averages = self._buffer is not None and len(self._rank.group.ranks) > 1
        while True:
            with self._clock.during("wait"):
                order = self._rank.orders.next(may_drop=not averages)
            if isinstance(order, Order):
                # Between two batches the Checkpointer prepares memory and writes what it has to
                # report; it is given no step, as steps are the consumer's.
                checkpoints.after(0, Signal.GO_ON)
                self._carry_out(order)
                continue
            self._report()
            if order is None:
                return is_stopped
            is_stopped = order.code == CheckpointMessage.SAVE_AND_STOP
            checkpoints.after(order.step, Signal.STOP if is_stopped else Signal.CHECKPOINT)

    def own(self) -> State:
        """Return this rank's own state, between two batches."""
        return {
            "number": self.number,
            "num_planned": self._num_planned,
            "kept": packed([(number, len(p)) for number, p in self.kept.items()]),
            "payloads": torch.cat([torch.empty(0, dtype=torch.uint8), *self.kept.values()]),
        }

    def take(self, own: State) -> None:
        self.number = whole_number(own, name="number")
        kept = unpacked(own, name="kept")
        pieces = torch.split(torch.as_tensor(own["payloads"]), [size for _, size in kept])
        self.kept = {n: p.clone() for (n, _), p in zip(kept, pieces, strict=True)}
        if num_planned := whole_number(own, name="num_planned"):
            self._replan(num_planned)

    def _replan(self, num_planned: int) -> None:
        if num_planned != self._num_planned:
            self._num_planned = num_planned
            self.part.replan(num_planned)

    def _carry_out(self, order: Order) -> None:
        # Made and learned from before the checkpoint: sending it is all that is left.
        if order.number in self.kept:
            return self._rank.send(order.consumer, order.number, self.kept.pop(order.number))
        self._replan(order.num_planned)
        if self._buffer is not None:
            self._buffer.zero()
        with self._rank.computing_in(self._clock, what="forward"), self._rank.memory.first_step():
            fed = self.part.produce(order.number)
        assert fed.payload.dtype == torch.uint8 and fed.payload.dim() == 1, "not a vector of bytes"
        payload = fed.payload.cpu()
        if order.consumer == NOBODY:
            self.kept[order.number] = payload
        else:  # before anything is learned from it
            self._rank.send(order.consumer, order.number, payload)
        self._learn(order.number, fed=fed)

    def _learn(self, number: int, fed: Fed) -> None:
        loss = fed.loss
        group = self._rank.group
        is_finite = math.isfinite(loss)
        if self._buffer is not None:
            with self._clock.during("average"):
                summed = self._buffer.sum_over(group, loss=torch.tensor(fed.loss))
                self._buffer.gradients.mul_(1.0 / len(group.ranks))
                loss = float(summed) / len(group.ranks)
            is_finite = self._buffer.has_finite_squares()  # of the sums, so alike in all ranks
        if not is_finite:
            what = f"the loss or gradient of batch {number} of producer {self.name!r}"
            note = self.guard.skip_update(number, what)
            if group.leads:
                self._rank.reporter.event("skipped_update", cloud=self.name, step=number)
                self._rank.reporter.note(note)
        else:
            if self._buffer is not None:
                with self._rank.computing_in(self._clock, what="optimizer"):
                    self.part.update(number)
            self._losses.append(loss)
        self.number = number
        self._made.update(num_batches=1, samples=fed.num_samples, tokens=fed.num_tokens)
        if time.monotonic() - self._reported_at_s > FLUSH_EVERY_S:
            self._report()

    def _report(self) -> None:
        if not self._made:
            return
        # What was made since the last report; it is counted to the consumer's next step.
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
        job = self.job
        consumers = range(self.job.cluster.num_consumers)
        most = 2 * job.max_steps * job.training.batches_per_step + 4096  # late, made twice
        source = self.rank - len(consumers)
        self.orders = OrderBook(
            consumer=self.peers[0],
            num_consumers=len(consumers),
            max_waiting=self.max_waiting,
            max_number=most,
            source=source,
        )
        batches = self.lines["batches"]
        self.outs = [self.ends.out("batches", consumer, *batches) for consumer in consumers]
        handlers = {
            Kind.ORDER: self.orders.take_orders, Kind.STOP: self.orders.take_stop,
            Kind.CHECKPOINT: self.orders.take_save,
        }  # fmt: skip
        # The end of the link comes behind what was ordered before it.
        self.ends.incoming(
            "orders", 0, *self.lines["orders"], handlers, on_end=self.orders.waiting.put
        )

    def send(self, consumer: int, number: int, payload: Tensor) -> None:
        key = MessageKey(kind=Kind.BATCH, step=number)
        self.outs[consumer].send(key, (payload,), CARRIES[Kind.BATCH])

    def run(self) -> None:
        job = self.job
        place = self.place
        assert place.producer is not None
        # Batches that each rank will make if every cloud keeps to its share.
        wanted = job.max_steps * job.training.batches_per_step * job.cluster.shares[place.producer]
        with self.computing:
            part = job.model.producer(self.building(max(1, math.ceil(wanted / place.group_size))))
        if place.group_rank == 0:  # the ranks of a cloud read the same texts
            report_cuts(self.reporter, num_cut=part.num_cut)
        run = ProducerRun(rank=self, part=part, name=place.cloud)
        # The run first loads what the ranks resume from.
        checkpoints = self.context.restored(
            self.context, {"producer": run}, self.control, {"data": part.own_digests()}
        )
        self.orders.begin_after(run.number, for_nobody=run.kept)
        rank_file(self.context.run_dir, self.rank, "ready").touch()
        for out in self.outs:  # every rank of the consumer
            out.send(MessageKey(Kind.READY), ())
        with self.context.asked.armed(job.checkpoint.are_made):
            self.is_stopped = run.feed(checkpoints)
        checkpoints.settle()
        self.report_memory(part.parameters_module, part)
        self.export(part.finish)
        self.reporter.event("stop" if self.is_stopped else "finish")
        self.leave(checkpoints)

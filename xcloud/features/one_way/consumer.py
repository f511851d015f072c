"""The work of one rank of the consumer: take batches, learn from them, and keep the plan in step
with the other ranks. Which batches, and what it reports of them, is intake.py."""

from __future__ import annotations

import hashlib
import math
import time
from functools import partial

import torch
from torch import Tensor

from xcloud.base.errors import LinkClosed, LinkTimeout
from xcloud.comm.state import State as Saved
from xcloud.comm.state import StatefulTree, whole_number
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way import SUMS, Consumer
from xcloud.features.one_way.feed import ConsumptionPlan, Order, Presence, Round
from xcloud.features.one_way.intake import POLL_S, Inbox, Intake
from xcloud.features.one_way.job import OneWayExperiment
from xcloud.features.one_way.ranks import CARRIES, OneWayRank
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.control import Signal
from xcloud.pipeline.exchange import FlatBuffer
from xcloud.rank.role import RankContext
from xcloud.rank.saving import CheckpointMessage, Saver
from xcloud.rank.task_data import report_scores
from xcloud.record.files import failure_of


class ConsumerRun(StatefulTree):
    """The training of one rank of the consumer; `train` does all steps.

    part: the part of the model that learns.
    """

    child_names = ("part", "plan", "inbox", "guard")
    own_names = ("step", "taken")  # the second one stands in checkpoints of release 0.2

    def __init__(self, rank: ConsumerRank, part: Consumer) -> None:
        job = rank.job
        self._rank = rank
        self.part = part
        self._leads = rank.rank == 0
        batches = job.training.batches_per_step
        self.plan = ConsumptionPlan(
            layout=job.cluster,
            batches_per_step=batches,
            feed=job.feed,
            num_batches=job.max_steps * batches,
        )
        self._clock = StepClock()
        own = rank.place.group_rank
        self._intake = Intake(
            job,
            reporter=rank.reporter,
            plan=self.plan,
            inbox=rank.inbox,
            group_rank=own,
            clock=self._clock,
        )
        self._buffer = FlatBuffer(part.module.parameters())
        self.guard = rank.guard
        self.inbox = rank.inbox
        self.num_updates = 0

    def own(self) -> Saved:
        """Return this rank's own state, between two steps, once every batch that was ordered is
        here."""
        return {"step": self.num_updates}

    def take(self, own: Saved) -> None:
        self.num_updates = whole_number(own, name="step")

    def load_state_dict(self, state: Saved) -> None:
        """Take over a state, before anything arrives. Producers that were lost are there again."""
        super().load_state_dict(state)
        for p in self.plan.readmit_lost():
            self.inbox.readmit(p)
            what = "was lost and may take its share again once it is ready"
            self._intake.producer(self.num_updates, p, state=Presence.ABSENT, what=what)

    def train(self, checkpoints: Saver) -> bool:
        """Do all steps. Return whether the run ended before, as it was asked to.

        Raises LinkClosed when no producer is left, or one is lost that must not be.
        """
        job = self._rank.job
        last = self._rank.job.max_steps
        if self._leads:
            self._rank.reporter.note(f"waiting for {', '.join(self.plan.names)} to be ready")
        for step in range(self.num_updates + 1, last + 1):
            self.num_updates = step
            self._clock.begin_step(step)
            signal = self._update(step, checkpoints)
            # The last step is saved however short the run, so that it can be trained longer.
            if step == last and signal is Signal.GO_ON and job.checkpoint.are_made:
                signal = Signal.CHECKPOINT
            with self._clock.paused():
                if self._save(checkpoints, signal):
                    return True
        return False

    def _update(self, step: int, checkpoints: Saver) -> Signal:
        """Make one update. Return what all ranks do after it."""
        # sums[1] is the weight of the loss. No batch came to any rank: the plan has moved on, and
        # the same step is tried with the next slots.
        while not (agreed := self._attempt(step, checkpoints)).sums[1]:
            if not self.plan.has_started:
                self._clock.begin_step(step)  # waiting for the first is no part of a step
        sums = dict(zip(SUMS, agreed.sums.tolist(), strict=True))
        # Of sums over the ranks of the consumer, so they decide alike.
        is_finite = self._buffer.has_finite_squares() and math.isfinite(sums["loss_sum"])
        note = ""
        if not is_finite:
            what = f"the loss or gradient of step {step} of the consumer"
            note = self.guard.skip_update(step, what)
        # A skipped update counts as one all the same: schedules of the learning rate go by steps.
        with self._rank.computing_in(self._clock, what="optimizer"):
            self.part.update(step, sums["weight"]) if is_finite else self.part.skip(step)
        self._intake.end_step(
            step, other_bytes=self._rank.other_bytes, sums=sums, is_skipped=not is_finite
        )
        if note and self._leads:
            self._rank.reporter.event("skipped_update", step=step)
            self._rank.reporter.note(note)
        return Signal(int(agreed.signal))

    def _attempt(self, step: int, checkpoints: Saver) -> Round:
        """Order, take a step's batches, learn, agree. Return the sums over all ranks.

        A weight of 0 means that nothing came, and the step is to be tried again.
        """
        rank = self._rank
        # Every rank of the consumer plans all orders, and notes those whose batches come to it;
        # only the first one sends them.
        orders = self.plan.orders()
        own = rank.place.group_rank
        rank.inbox.expect([order for order in orders if order.consumer == own])
        if self._leads and orders:
            with self._clock.during("fetch"):
                rank.send_orders(orders)
        # What this rank saw in this attempt. Added up over the ranks it is what all plan by.
        mine = self.plan.round(len(SUMS))
        # A rank without a batch still takes part in the sums: zero gradients and zero weight.
        arrived = self._intake.collect(step, mine)
        self._buffer.zero()
        if arrived:
            with rank.computing_in(self._clock, what="forward"), rank.memory.first_step():
                sums = self.part.consume([(one.producer, one.payload) for one in arrived])
            for name, value in sums.items():
                mine.sums[SUMS.index(name)] = value
        self._intake.look(mine)
        mine.signal[:] = checkpoints.signal(step) if self._leads else Signal.GO_ON
        # Sums inside one cloud. Gradients of producers are theirs: nothing crosses clouds here.
        with self._clock.during("average"):
            self._buffer.sum_over(rank.group, loss=torch.zeros(()))
            rank.group.sum(mine.packed)
        self._move_on(step, agreed=mine, checkpoints=checkpoints)
        return mine

    def _move_on(self, step: int, agreed: Round, checkpoints: Saver) -> None:
        """Take the changes of a step into the plan, and act on those of producers."""
        changes = self.plan.end_step(agreed)
        for p, (before, now) in changes.items():
            why_gone = self._rank.why_gone(p) if now is Presence.DEAD else ""
            self._intake.changed(step, p, now=now, why_gone=why_gone)
            if now is Presence.DEAD:
                self._lose(p, before=before, why=why_gone, checkpoints=checkpoints)
        if all(state is Presence.DEAD for state in self.plan.state):
            names = ", ".join(self.plan.names)
            raise LinkClosed(f"no producer is left: {names} are gone (step {step})")

    def _lose(self, p: int, before: Presence, why: str, checkpoints: Saver) -> None:
        """Continue without a producer, or raise LinkClosed as feed.on_dead says.

        Until now a checkpoint needed its shard: the plan counted on its batches.
        """
        rank = self._rank
        name = self.plan.names[p]
        if self._leads:
            for lost in rank.job.cluster.ranks_in(name):
                rank.control.out.pop(lost, None)
                checkpoints.lose(lost)
        # Whoever was never ready failed at its start: the run ends, whatever feed.on_dead says.
        if before is Presence.ABSENT and not rank.inbox.was_ready(p):
            raise LinkClosed(f"producer {name!r} was lost before it was ready: {why}")
        if rank.job.feed.on_dead == "stop":
            advice = "To continue without it set feed.on_dead=redistribute"
            raise LinkClosed(f"producer {name!r} is gone: {why}. {advice}")

    def _save(self, checkpoints: Saver, signal: Signal) -> bool:
        """Do between two steps what the signal says. Return whether the run ends here.

        All that was ordered arrives first, and the producers save once they have made it.
        """
        if signal is Signal.GO_ON:
            return checkpoints.after(self.num_updates, signal)
        if self._leads:
            # Orders first: links keep their order, so each producer saves after the last number
            # ordered, at which all its ranks are level.
            self._rank.send_orders(self.plan.levelling_orders())
            self._rank.send_save(self.num_updates, is_last=signal is Signal.STOP)
        self._intake.await_ordered()
        checkpoints.after(self.num_updates, signal)
        # What is ordered next must not come before every rank has copied its inbox.
        self._rank.group.barrier()
        return signal is Signal.STOP


class ConsumerRank(OneWayRank):
    """One rank of the cloud that is fed.

    is_fed: true while more batches are wanted.
    """

    is_fed = True

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        layout = self.job.cluster
        self.inbox = Inbox(
            layout,
            max_payload_bytes=self.job.model.max_payload_bytes,
            peers=self.peers,
            max_waiting=self.max_waiting,
        )
        # A source is a rank of the job less the consumer's own, which come first.
        feeding = range(layout.num_consumers, layout.num_ranks)
        for source, rank in enumerate(feeding):
            handlers = {
                Kind.BATCH: partial(self.inbox.put, source),
                Kind.READY: partial(self.inbox.set_ready, source),
            }
            ended = partial(self.inbox.set_ended, source)
            self.ends.incoming("batches", rank, *self.lines["batches"], handlers, on_end=ended)
        # To the sources, from the first rank only.
        orders = self.lines["orders"]
        self._outs = [self.ends.out("orders", rank, *orders) for rank in feeding if self.rank == 0]

    def needs(self, lost: frozenset[int]) -> bool:
        """Return true if this rank cannot continue without any of these.

        It needs each of those that feed it. The plan decides about one that has ended.
        """
        # Only rank 0 has a control link to every rank; the others hear of a loss in the sums of a
        # step.
        if super().needs(lost) or self.rank:
            return super().needs(lost)
        layout = self.job.cluster
        return self.is_fed and any(
            not lost.isdisjoint(layout.ranks_in(cloud))
            for producer, cloud in enumerate(layout.producers)
            if not self.inbox.end_of(producer)
        )

    def why_gone(self, p: int) -> str:
        """Return why a producer is gone, in its own words where it left them on this machine."""
        ranks = self.job.cluster.ranks_in(self.job.cluster.producers[p])
        failures = (failure_of(self.context.run_dir, rank) for rank in ranks)
        # A failure of its own explains more than that its link has closed; one for the loss of a
        # peer explains nothing.
        own = [str(f["message"]) for f in failures if f is not None and not f["peer_lost"]]
        return (own[0] if own else self.inbox.end_of(p)) or "lost by another rank"

    @property
    def other_bytes(self) -> int:
        """The bytes that crossed between clouds besides batches: orders, reports and the like."""
        kinds = CARRIES.keys() - {Kind.BATCH}
        both = (*self.records, *self.received.values())
        return sum(record.num_bytes[kind] for record in both for kind in kinds)

    def send_orders(self, orders: list[Order]) -> None:
        """Send each source what is ordered of it."""
        for source in dict.fromkeys(order.source for order in orders):
            # [N, 3] without the source, which the link says.
            rows = [order[1:] for order in orders if order.source == source]
            self._send(source, Kind.ORDER, torch.tensor(rows, dtype=torch.int32))

    def send_save(self, step: int, is_last: bool) -> None:
        """Ask the producers to save, after all that was ordered so far."""
        code = CheckpointMessage.SAVE_AND_STOP if is_last else CheckpointMessage.SAVE
        for source in range(len(self._outs)):
            self._send(source, Kind.CHECKPOINT, torch.tensor([code], dtype=torch.uint8), step=step)

    def send_stop(self) -> None:
        """Tell the producers that no more batches are wanted."""
        # From now on a producer may end without being missed (see `needs`).
        self.is_fed = False
        for source in range(len(self._outs)):
            self._send(source, kind=Kind.STOP)

    def _send(self, source: int, kind: Kind, *parts: Tensor, step: int = 0) -> None:
        """Send to a source. One that is gone gets nothing; its end is found elsewhere."""
        if self.inbox.end_of(self.job.cluster.producer_of[source]):
            return
        try:
            self._outs[source].send(MessageKey(kind, step), parts, CARRIES[kind])
        except (LinkClosed, LinkTimeout) as error:
            self.inbox.set_ended(source, reason=error)

    def run(self) -> None:
        self._phase("loading")
        job = self.job
        if self.rank == 0:  # how many texts a producer has is nobody else's matter
            digest = hashlib.sha256(job.model.data.encode()).hexdigest()[:16]
            self.reporter.event("data", name=job.model.data, digest=digest, rows={})
        with self.computing:
            part = job.model.consumer(self.building(job.max_steps))
        run = ConsumerRun(rank=self, part=part)
        # The run first loads what the ranks resume from.
        checkpoints = self.context.restored(
            self.context, {"consumer": run}, self.control, {"data": part.own_digests()}
        )
        self.group.barrier()
        self._phase("training")
        with self.context.asked.armed(job.checkpoint.are_made):
            self.is_stopped = run.train(checkpoints)
        self._await_checkpoint(checkpoints, plan=run.plan)  # a stop would drop what it waits for
        # Producers average gradients among their ranks: all must have made the same numbers before
        # they end, also those whose batches nobody wants any more.
        self.send_orders(run.plan.levelling_orders() if self.rank == 0 else [])
        self.send_stop()
        self.export(part.export)
        self.report_memory(part.module, part)
        self._part_from_producers()
        if self.is_stopped:
            self.reporter.event("stop")
        else:
            if self.group.leads:
                self._evaluate(part, step=run.num_updates)
            self.reporter.event("finish", num_steps=run.num_updates)
        self.leave(checkpoints)

    def _await_checkpoint(self, checkpoints: Saver, plan: ConsumptionPlan) -> None:
        """Block until the producers have written their shards, those that are stopped or have
        ended excepted."""
        checkpoints.settle()
        # A disk that hangs must not hold up a run that is done.
        until_s = time.monotonic() + self.job.cluster.liveness.overdue_after_s
        alive = [p for p, state in enumerate(plan.state) if state is not Presence.DEAD]
        while self.rank == 0 and checkpoints.is_pending and time.monotonic() < until_s:
            if any(self.inbox.end_of(p) for p in alive):
                return
            time.sleep(POLL_S)

    def _part_from_producers(self) -> None:
        """Close the links to the producers, which export and end before the evaluation: that may
        take long, or fail."""
        layout = self.job.cluster
        patience_s = max(layout.liveness.lost_after_s, self.job.feed.slow_after_s)
        feeding = range(layout.num_consumers, layout.num_ranks)
        unheard = self.ends.part_from(feeding, patience_s)
        if self.rank != 0:
            return
        for p, cloud in enumerate(layout.producers):
            if not unheard.isdisjoint(layout.ranks_in(cloud)):
                self.reporter.note(
                    f"producer {cloud} did not finish, so what it may have trained was not "
                    f"exported ({self.inbox.end_of(p) or 'it was silent'})"
                )

    def _evaluate(self, part: Consumer, step: int) -> None:
        self._phase("evaluation")
        started = time.perf_counter()
        with self.computing:
            scores = part.evaluate()
        if scores.values:
            report_scores(
                self.reporter,
                split="test",
                step=step,
                scores=scores,
                signature={},
                started_s=started,
            )

    def _phase(self, name: str) -> None:
        if self.rank == 0:
            self.reporter.event("phase", now=True, name=name)

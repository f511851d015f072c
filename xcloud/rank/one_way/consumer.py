"""What one rank of the consumer does: take batches, learn from them, and keep the plan in step
with the other ranks. Which batches is intake.py, what it reports of them events.py.
"""

from __future__ import annotations

import math
import time
from collections import Counter

import torch

from xcloud.base.errors import LinkClosed
from xcloud.comm.state import State as Saved
from xcloud.comm.state import Stateful, load_states, states_of, whole_number, whole_numbers
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way_parts import SUMS, Consumer
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.control import Signal
from xcloud.parallel.exchange import FlatBuffer
from xcloud.parallel.one_way.inbox import Arrived
from xcloud.parallel.one_way.plan import ConsumptionPlan, Round, Source, State
from xcloud.rank.checkpoints import restored
from xcloud.rank.evaluation import report_scores
from xcloud.rank.export import exporting
from xcloud.rank.one_way.events import ConsumerEvents
from xcloud.rank.one_way.intake import POLL_S, Intake
from xcloud.rank.one_way.wiring import OneWayRank, consumer_links, other_bytes
from xcloud.rank.role import RankContext
from xcloud.survive.checkpointing import Checkpointer

GO_ON_FILE = "go_on"


class ConsumerRun:
    """`train()` does all steps. part: what learns."""

    def __init__(self, rank: ConsumerRank, part: Consumer) -> None:
        job, layout = rank.job, rank.job.cluster
        self._rank, self._part = rank, part
        batches = job.training.batches_per_step
        self.plan = ConsumptionPlan(
            layout.shares, layout.group_sizes, layout.num_consumers, batches, job.feed,
            job.max_steps * batches,
        )  # fmt: skip
        self._events = ConsumerEvents(job, rank.reporter, leads=rank.rank == 0)
        self._clock = StepClock()
        self._intake = Intake(
            self.plan, rank.links.inbox, rank.place.group_rank, self._clock, self._events
        )
        self._buffer = FlatBuffer(part.module.parameters())
        self._guard = rank.divergence_guard()
        self._step = 0

    @property
    def _leads(self) -> bool:
        return self._rank.rank == 0

    @property
    def _stateful(self) -> dict[str, Stateful]:
        return {
            "part": self._part, "plan": self.plan, "inbox": self._rank.links.inbox,
            "guard": self._guard,
        }  # fmt: skip

    def state_dict(self) -> Saved:
        """Between two steps. A batch on its way is in no rank's state: wait until it is here."""
        taken = torch.tensor([self._intake.taken[p] for p in range(self.plan.num_producers)])
        own: Saved = {"step": self._step, "taken": taken}
        return own | states_of(self._stateful)

    def load_state_dict(self, state: Saved) -> None:
        """Before anything arrives. The state of the same rank in the same experiment; ValueError
        otherwise. Producers that were lost are there again."""
        load_states(self._stateful, state, "a consumer", ["step", "taken"])
        taken = whole_numbers(state, "taken", self.plan.num_producers).tolist()
        self._intake.taken = Counter(dict(enumerate(taken)))
        self._step = whole_number(state, "step")
        for p in self.plan.readmit_lost():
            self._rank.links.inbox.readmit(p)
            what = "was lost and may take its share again once it is ready"
            self._events.producer(self._step, p, State.ABSENT, what)

    def train(self, checkpoints: Checkpointer) -> bool:
        """From where it stands to the end; whether it ended before, as it was asked to. Raises
        LinkClosed when no producer is left, or one is lost that must not be."""
        self._events.waiting_for_producers()
        last = self._rank.job.max_steps
        for step in range(self._step + 1, last + 1):
            self._step = step
            self._clock.begin_step(step)
            signal = self._update(step, checkpoints)
            if step == last and signal is Signal.GO_ON and self._rank.job.checkpoint.are_made:
                signal = Signal.CHECKPOINT
            with self._clock.paused():
                if self._save(checkpoints, signal):
                    return True
        return False

    def _update(self, step: int, checkpoints: Checkpointer) -> Signal:
        """Returns what all ranks do after it."""
        used: list[Arrived] = []
        skipped: Counter[Source] = Counter()
        while not (agreed := self._attempt(step, used, skipped, checkpoints)).sums[1]:
            if not self.plan.has_started:
                self._clock.begin_step(step)  # waiting for the first is no part of a step
        sums = dict(zip(SUMS, agreed.sums, strict=True))
        # Of sums over the ranks of the consumer, so they decide alike.
        is_finite = self._buffer.is_finite() and math.isfinite(sums["loss_sum"])
        what = f"the loss or gradient of step {step} of the consumer"
        is_skipped = self._guard.skips(what, is_finite)
        with self._rank.computing_in(self._clock), self._clock.during("optimizer"):
            if is_skipped:
                self._part.skip(step)
            else:
                self._part.update(step, sums["weight"])
        self._events.step(
            step, self._clock, used, skipped, other_bytes(self._rank), sums, is_skipped
        )
        if is_skipped:
            self._events.skipped_update(step, self._guard.note(what))
        return Signal(agreed.signal)

    def _attempt(
        self,
        step: int,
        used: list[Arrived],
        skipped: Counter[Source],
        checkpoints: Checkpointer,
    ) -> Round:
        """Order, take a step's batches, learn, agree. Returns the sums over all ranks; a weight of
        0 means that nothing came, and the step is to be tried again."""
        rank, orders = self._rank, self.plan.orders()
        own = rank.place.group_rank
        rank.links.inbox.expect([order for order in orders if order.consumer == own])
        if self._leads and orders:
            with self._clock.during("fetch"):
                rank.links.send_orders(orders)
        arrived, late = self._intake.collect(step)
        used += arrived
        skipped.update(late)
        self._buffer.zero()
        sums: dict[str, float] = {}
        if arrived:
            with (
                rank.computing_in(self._clock),
                self._clock.during("forward"),
                rank.memory.first_step(),
            ):
                fed = [(one.source.producer, one.payload) for one in arrived]
                sums = dict(self._part.consume(fed))
            if unknown := sums.keys() - set(SUMS):
                raise TypeError(f"consume() sums up {sorted(unknown)}; known: {', '.join(SUMS)}")
        mine = Round(
            Counter((one.source, own) for one in arrived),
            {(source, own): number for source, number in late.items()},
            *self._intake.flags(),
            [sums.get(name, 0.0) for name in SUMS],
            checkpoints.decide(step) if self._leads else Signal.GO_ON,
        )
        with self._clock.during("average"):
            self._buffer.sum_over(rank.group, torch.zeros(()))
            packed = rank.group.sum(mine.pack(self.plan.pairs))
        agreed = Round.unpack(packed, self.plan.pairs, self.plan.num_producers)
        self._move_on(step, agreed, checkpoints)
        return agreed

    def _move_on(self, step: int, agreed: Round, checkpoints: Checkpointer) -> None:
        changes = self.plan.end_step(agreed)
        if changes:
            self._intake.taken.clear()
        for p, (before, now) in changes.items():
            why_gone = self._rank.links.why_gone(p) if now is State.DEAD else ""
            self._events.changed(step, p, before, now, self.plan.active, why_gone)
            if now is State.DEAD:
                self._lose(p, before, checkpoints)
        if self.plan.is_exhausted:
            names = ", ".join(self._rank.job.cluster.producers)
            raise LinkClosed(f"no producer is left: {names} are gone (step {step})")

    def _lose(self, p: int, before: State, checkpoints: Checkpointer) -> None:
        """Until now a checkpoint needed its part: the plan counted on its batches."""
        rank, name = self._rank, self._rank.job.cluster.producers[p]
        on_dead, reason = rank.job.feed.on_dead, rank.links.why_gone(p)
        for lost in rank.job.cluster.ranks_in(name) if self._leads else ():
            rank.control.out.pop(lost, None)
            checkpoints.lose(lost)
        if before is State.ABSENT and not rank.links.inbox.was_ready(p):
            raise LinkClosed(f"producer {name!r} was lost before it was ready: {reason}")
        if on_dead == "stop":
            advice = "To continue without it set feed.on_dead=redistribute"
            raise LinkClosed(f"producer {name!r} is gone: {reason}. {advice}")
        if on_dead == "pause" and not self.plan.is_exhausted:
            with self._clock.during("wait"):
                if self._leads:
                    self._wait_for_user()
                rank.group.barrier()

    def _wait_for_user(self) -> None:
        file = self._rank.context.run_dir / GO_ON_FILE
        file.unlink(missing_ok=True)
        self._events.note(
            f"paused at step {self._step} (feed.on_dead=pause); to continue without it make the "
            f"file {file}, to end the run press Ctrl+C"
        )
        while not file.exists():
            time.sleep(POLL_S)
        file.unlink()
        self._events.note("continuing")

    def _save(self, checkpoints: Checkpointer, signal: Signal) -> bool:
        """Between two steps; whether the run ends here. All that was ordered arrives first, so
        that it is in the state of this rank, and the producers save once they have made it."""
        if signal is Signal.GO_ON:
            return checkpoints.after(self._step, signal)
        if self._leads:
            self._rank.links.send_orders(self.plan.levelling_orders())
            self._rank.links.send_save(self._step, signal is Signal.STOP)
        if missing := self._intake.await_ordered():
            names = ", ".join(self._rank.job.cluster.producers[p] for p in missing)
            checkpoints.fail(self._step, f"batches of {names} are missing")
            return signal is Signal.STOP
        return checkpoints.after(self._step, signal)


class ConsumerRank(OneWayRank):
    """One rank of the cloud that is fed."""

    def __init__(self, context: RankContext[OneWayExperiment]) -> None:
        super().__init__(context)
        self.links = consumer_links(self.job, self.ends)
        for rank in context.verdict.refused:
            producer = self.job.cluster.placement(rank).producer
            assert producer is not None
            why = f"refused before the start: {context.verdict.text}"
            self.links.inbox.refuse(producer, why)

    def needs(self, lost: frozenset[int]) -> bool:
        """One of those that feed it, too; what becomes of one that has ended the plan decides."""
        return super().needs(lost) or (self.rank == 0 and self.links.needs_one_of(lost))

    def run(self) -> None:
        self._phase("loading")
        job, place, run_dir = self.job, self.place, self.context.run_dir
        building = self.building(job.max_steps)
        with self.computing:
            part = job.model.consumer(place.group_rank, place.group_size, building)
        run = ConsumerRun(self, part)
        checkpoints = restored(self.context, {"consumer": run}, self.control, {})
        self.group.barrier()
        self._phase("training")
        self.context.asked.is_armed = job.checkpoint.are_made
        self.is_stopped = run.train(checkpoints)
        self.context.asked.is_armed = False
        self._await_checkpoint(checkpoints, run.plan)  # a stop would drop what it waits for
        self.links.send_orders(run.plan.levelling_orders() if self.rank == 0 else [])
        self.links.send_stop()
        if not self.is_stopped:
            with exporting(run_dir), self.computing:
                part.export(run_dir, place.group_rank)
        self.report_memory(part.module, part)
        # They export and go before the evaluation, which may take long, or fail.
        for cloud, reason in self.links.part_from_producers().items():
            if self.rank == 0:
                self.reporter.note(
                    f"producer {cloud} did not finish, so what it may have trained was not "
                    f"exported ({reason})"
                )
        if self.is_stopped:
            self.reporter.event("stop")
        else:
            self._evaluate(part)
        self.leave(checkpoints)

    def _await_checkpoint(self, checkpoints: Checkpointer, plan: ConsumptionPlan) -> None:
        """Until the producers have written theirs; not for one that is stopped or has ended."""
        checkpoints.wait()
        until_s = time.monotonic() + self.job.cluster.liveness.overdue_after_s
        inbox, alive = self.links.inbox, [s is not State.DEAD for s in plan.state]
        while self.rank == 0 and checkpoints.is_pending and time.monotonic() < until_s:
            if any(is_alive and inbox.has_ended(p) for p, is_alive in enumerate(alive)):
                return
            time.sleep(POLL_S)

    def _evaluate(self, part: Consumer) -> None:
        self._phase("evaluation")
        started = time.perf_counter()
        with self.computing:
            scores = part.evaluate(self.place.group_rank)
        if self.rank == 0 and scores.values:
            report_scores(self.reporter, "test", self.job.max_steps, scores, {}, started)
        self.reporter.event("finish", num_steps=self.job.max_steps)

    def _phase(self, name: str) -> None:
        if self.rank == 0:
            self.reporter.event("phase", now=True, name=name)

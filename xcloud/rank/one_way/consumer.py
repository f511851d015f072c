"""What one rank of the consumer does: take batches as planned, learn from them, and keep the plan
in step with the other ranks. What it tells of that is consumer_events.py.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from xcloud.base.errors import LinkClosed
from xcloud.comm import state as memory
from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way_parts import SUMS, Consumer
from xcloud.job.one_way import OneWayExperiment
from xcloud.parallel.control import Signal
from xcloud.parallel.exchange import FlatBuffer
from xcloud.parallel.one_way.inbox import Arrived
from xcloud.parallel.one_way.plan import ConsumptionPlan, Round, Source, State
from xcloud.rank.one_way.consumer_events import ConsumerEvents
from xcloud.rank.one_way.feeding import Feeding
from xcloud.record.rank_state import failure_of
from xcloud.record.reporter import Reporter
from xcloud.survive.checkpointing import Checkpointer, News
from xcloud.training.memory_meter import MemoryMeter
from xcloud.training.trainer import DivergenceGuard

GO_ON_FILE = "go_on"
_POLL_S = 0.2


class ConsumerRun:
    """`train()` does all steps; `stop_producers()` lets the others go."""

    def __init__(
        self,
        experiment: OneWayExperiment,
        feeding: Feeding,
        part: Consumer,
        num_lanes: int,
        reporter: Reporter,
        run_dir: Path,
        memory: MemoryMeter,
    ) -> None:
        self._memory = memory
        layout = experiment.cluster
        self.experiment, self.feed, self.layout = experiment, experiment.feed, layout
        self.plan = ConsumptionPlan(
            layout.shares, layout.num_lanes, num_lanes,
            experiment.training.batches_per_step, experiment.feed,
            experiment.training.max_steps * experiment.training.batches_per_step,
        )  # fmt: skip
        self._feeding, self._part, self._run_dir = feeding, part, run_dir
        self._events = ConsumerEvents(experiment, reporter, leads=feeding.cloud.lane == 0)
        self._cloud, self._inbox = feeding.cloud, feeding.inbox
        self._lane, self._num_lanes = feeding.cloud.lane, num_lanes
        self._buffer = FlatBuffer(part.module.parameters())
        training = experiment.training
        self._guard = DivergenceGuard(training.on_divergence, training.max_skips_in_a_row)
        self._clock = StepClock()
        self._names = layout.producers
        self._taken: Counter[int] = Counter()  # since a producer last came or went
        self._noted_slow: set[int] = set()
        self._step = 0
        self._used: list[Arrived] = []  # in the step under way
        self._skipped: Counter[Source] = Counter()
        self._checkpoints: Checkpointer | None = None
        self._word = Signal.GO_ON
        # What is agreed on after every attempt at a step, as one vector.
        self._pairs = [(s, c) for s in self.plan.sources for c in range(num_lanes)]

    @property
    def _leads(self) -> bool:
        return self._lane == 0

    def state_dict(self) -> memory.State:
        """Between two steps. A batch on its way is in no rank's state: wait until it is here."""
        taken = torch.tensor([self._taken[p] for p in range(len(self._names))])
        own: memory.State = {"step": self._step, "taken": taken}
        return own | memory.states_of(self._stateful)

    def load_state_dict(self, state: memory.State) -> None:
        """Before anything arrives. The state of the same rank in the same experiment; ValueError
        otherwise."""
        memory.load_states(self._stateful, state, "a consumer", ["step", "taken"])
        taken = memory.whole_numbers(state, "taken", len(self._names)).tolist()
        self._taken = Counter(dict(enumerate(taken)))
        self._step = memory.whole_number(state, "step")

    @property
    def _stateful(self) -> dict[str, memory.Stateful]:
        return {
            "part": self._part, "plan": self.plan, "inbox": self._inbox,
            "guard": self._guard,
        }  # fmt: skip

    def save_with(self, checkpoints: Checkpointer) -> None:
        """Before `train`. Of a run that goes on: producers that it had lost are there again."""
        self._checkpoints = checkpoints
        for p in self.plan.readmit_lost():
            self._inbox.readmit(p)
            said = "was lost and may take its share again once it is ready"
            self._events.producer(self._step, p, State.ABSENT, said)

    def train(self, until_step: int | None = None) -> bool:
        """From where it stands to until_step, or to the end; whether it ended before, as it was
        asked to. Raises LinkClosed when no producer is left, or one is lost that must not be."""
        self._events.waiting_for_producers()
        last = self.experiment.training.max_steps if until_step is None else until_step
        for step in range(self._step + 1, last + 1):
            self._step = step
            self._clock.begin_step(step)
            self._used, self._skipped = [], Counter()
            while not (sums := self._attempt())["weight"]:
                if not self.plan.has_started:
                    self._clock.begin_step(step)  # waiting for the first is no part of a step
            # Of sums over the ranks of the consumer, so they decide alike.
            is_finite = self._buffer.is_finite() and math.isfinite(sums["loss_sum"])
            what = f"the loss or gradient of step {step} of the consumer"
            is_skipped = self._guard.skips(what, is_finite)
            with self._clock.during("optimizer"):
                if is_skipped:
                    self._part.skip(step)
                else:
                    self._part.update(step, sums["weight"])
            self._events.step(
                step, self._clock, self._used, self._skipped, self._feeding.other_bytes, sums,
                is_skipped,
            )  # fmt: skip
            if is_skipped:
                self._events.skipped_update(step, self._guard.note(what))
            with self._clock.paused():
                if self._save(self._word):
                    return True
        return False

    def _save(self, word: Signal) -> bool:
        """Between two steps; whether the run ends here. All that was ordered arrives first, so
        that it is in the state of this rank, and the producers save once they have made it."""
        if (checkpoints := self._checkpoints) is None:
            return False
        if word is Signal.GO_ON:
            return checkpoints.after(self._step, word)
        is_last = word is Signal.STOP
        if self._leads:
            self._feeding.send_orders(self.plan.levelling_orders())
            self._feeding.send_save(self._step, News.SAVE_AND_STOP if is_last else News.SAVE)
        missing = self._wait_for_ordered()
        if missing:
            checkpoints.fail(self._step, f"batches of {', '.join(missing)} are missing")
        else:
            checkpoints.after(self._step, word)
        if is_last:
            checkpoints.wait()
            until_s = time.monotonic() + self.layout.liveness.overdue_after_s
            while self._leads and checkpoints.is_pending and not self._lost_ones():
                if time.monotonic() > until_s:  # a producer that is stopped writes nothing
                    break
                time.sleep(_POLL_S)
        return is_last

    def _wait_for_ordered(self) -> list[str]:
        """Producers that are too slow to wait for."""
        with self._clock.during("wait"):
            while not self._inbox.is_whole():
                slow = [p for p in range(len(self._names)) if self._is_slow(p)]
                if slow and self.feed.on_slow == "redistribute":
                    return [self._names[p] for p in slow]
                self._inbox.wait(_POLL_S, self._inbox.is_whole)
        return []

    def _lost_ones(self) -> list[int]:
        """Producers that are gone and that the plan does not know of yet."""
        gone = [p for p in range(len(self._names)) if self._inbox.ended(p)]
        return [p for p in gone if self.plan.state[p] is not State.DEAD]

    def stop_producers(self) -> None:
        """No more is wanted. All ranks of a producer end with the same batch."""
        if self._leads:
            self._feeding.send_orders(self.plan.levelling_orders())
        self._feeding.send_stop()

    def _attempt(self) -> dict[str, float]:
        """Order, take a step's batches, learn, agree. Returns the sums over all ranks; a weight of
        0 means that nothing came, and the step is to be tried again."""
        orders = self.plan.orders()
        self._inbox.expect([order for order in orders if order.consumer == self._lane])
        if self._leads and orders:
            with self._clock.during("fetch"):
                self._feeding.send_orders(orders)
        found, skipped = self._collect()
        self._used += found
        self._skipped.update(skipped)

        self._buffer.zero()
        sums: dict[str, float] = {}
        if found:
            with self._clock.during("forward"), self._memory.first_step():
                sums = dict(self._part.consume([(a.source.producer, a.payload) for a in found]))
            if unknown := sums.keys() - set(SUMS):
                raise TypeError(f"consume() sums up {sorted(unknown)}; known: {', '.join(SUMS)}")
        with self._clock.during("average"):
            self._buffer.sum_over(self._feeding.cloud, torch.zeros(()))
            agreed = self._agree(sums, found, skipped)
        totals = dict(zip(SUMS, agreed[: len(SUMS)].tolist(), strict=True))
        self._move_on(agreed[len(SUMS) :])
        return totals

    def _collect(self) -> tuple[list[Arrived], Counter[Source]]:
        """This rank's batches of a step, and those that did not come in time."""
        found: list[Arrived] = []
        skipped: Counter[Source] = Counter()
        self._look_for_slow_ones()
        with self._clock.during("wait"):
            if self.feed.order == "fixed":
                for source in self.plan.step_slots(self._lane):
                    arrived = self._await(source)
                    if arrived is None:
                        skipped[source] += 1
                    else:
                        found.append(arrived)
            else:
                while len(found) < self.plan.per_consumer:
                    arrived = self._await_any()
                    if arrived is None:
                        break
                    self._taken[arrived.source.producer] += 1
                    found.append(arrived)
            if not found and not skipped:
                self._wait_for_news()
        return found, skipped

    def _await(self, source: Source) -> Arrived | None:
        """The next batch of a source; None if it is too slow, or gone and used up."""
        p = source.producer
        while True:
            ended = self._inbox.end_of(p)  # first: what came before the end is still taken
            if (arrived := self._inbox.take(source)) is not None:
                return arrived
            if ended is not None or self.plan.state[p] is State.SLOW:
                return None
            self._look_for_slow_ones()
            if self._is_slow(p) and self.feed.on_slow == "redistribute":
                return None
            self._inbox.wait(_POLL_S, lambda: self._inbox.has(source) or self._inbox.ended(p))

    def _await_any(self) -> Arrived | None:
        """A batch of whoever has one, nearest to the shares; None if nothing more can be expected
        in this step."""
        while True:
            due = [p for p in range(len(self._names)) if self._inbox.is_due(p)]
            ready = self._inbox.with_batches()
            chosen = self.plan.choose(ready, self._taken)
            if chosen is not None:
                return self._inbox.take_of(chosen)
            self._look_for_slow_ones()
            if self.feed.on_slow == "redistribute":
                due = [p for p in due if not self._is_slow(p)]
            if not due:
                # Nobody else will come: shares do not matter any more.
                return self._inbox.take_of(ready[0]) if ready else None
            self._inbox.wait(_POLL_S, lambda: self._inbox.with_batches() != ready)  # noqa: B023

    def _wait_for_news(self) -> None:
        """Nobody feeds at the moment: until one is ready, or gone."""
        idle = [p for p, s in enumerate(self.plan.state) if s in (State.ABSENT, State.SLOW)]
        self._inbox.wait(
            _POLL_S, lambda: any(self._inbox.is_ready(p) or self._inbox.ended(p) for p in idle)
        )

    def _is_slow(self, p: int) -> bool:
        return self._inbox.silent_s(p) > self.feed.slow_after_s

    def _look_for_slow_ones(self) -> None:
        """Where the run waits for a slow producer, say so; elsewhere the plan does."""
        if self.feed.on_slow != "wait":
            return
        for p in range(len(self._names)):
            if self._inbox.ended(p) or self.plan.state[p] is not State.ACTIVE:
                self._noted_slow.discard(p)
            elif self._is_slow(p) and p not in self._noted_slow:
                self._noted_slow.add(p)
                self._events.waits_for_slow(self._step, p)
            elif p in self._noted_slow and not self._is_slow(p):
                self._noted_slow.discard(p)
                self._events.producer(self._step, p, State.ACTIVE, "sends again")

    def _agree(
        self, sums: dict[str, float], found: list[Arrived], skipped: Counter[Source]
    ) -> Tensor:
        """Sums over the ranks of the consumer: losses and counts, then what the plan must know."""
        lane = self._lane
        consumed = Counter(arrived.source for arrived in found)
        redistributes = self.feed.on_slow == "redistribute"
        numbers = [sums.get(name, 0.0) for name in SUMS]
        for p in range(len(self._names)):
            is_slow = redistributes and self._is_slow(p)
            flags = (self._inbox.is_ready(p), is_slow, self._inbox.ended(p))
            numbers += map(float, flags)
        for source, c in self._pairs:
            mine = c == lane
            numbers += [consumed[source] * mine, skipped[source] * mine]
        numbers += self._news()
        return self._cloud.sum(torch.tensor(numbers, dtype=torch.float64))

    def _news(self) -> tuple[float, float]:
        """The first rank's word, and a checkpoint that all ranks have agreed on."""
        if self._checkpoints is None or not self._leads:
            return 0.0, 0.0
        agreed, self._feeding.agreed_step = self._feeding.agreed_step, 0
        return float(self._checkpoints.decide(self._step)), float(agreed)

    def _move_on(self, agreed: Tensor) -> None:
        num = len(self._names)
        self._word, agreed_step = Signal(int(agreed[-2])), int(agreed[-1])
        if agreed_step and not self._leads and self._checkpoints is not None:
            self._checkpoints.hear_agreed(agreed_step)
        agreed = agreed[:-2]
        flags = agreed[: 3 * num].view(num, 3).long()
        counts = agreed[3 * num :].view(len(self._pairs), 2).long()
        consumed, skipped = (
            {pair: int(n) for pair, n in zip(self._pairs, counts[:, i], strict=True)}
            for i in (0, 1)
        )
        ready, slow, dead = (flags[:, i].tolist() for i in range(3))
        changes = self.plan.end_step(Round(consumed, skipped, ready, slow, dead))
        if changes:
            self._taken.clear()
        for p, (before, now) in changes.items():
            why_gone = self._why_gone(p) if now is State.DEAD else ""
            self._events.changed(self._step, p, before, now, self.plan.active, why_gone)
            if now is State.DEAD:
                self._lose(p, before)
        if self.plan.is_exhausted:
            raise LinkClosed(
                f"no producer is left: {', '.join(self._names)} are gone (step {self._step})"
            )

    def _lose(self, p: int, before: State) -> None:
        reason = self._why_gone(p)
        self._feeding.lost.add(p)
        expected = self._inbox.was_refused(p) or self._inbox.was_ready(p)
        if self._leads and self._checkpoints is not None:
            for rank in self.layout.ranks_in(self._names[p]):
                self._checkpoints.lose(rank)
        if before is State.ABSENT and not expected:
            raise LinkClosed(f"producer {self._names[p]!r} was lost before it was ready: {reason}")
        if self.feed.on_dead == "stop":
            raise LinkClosed(
                f"producer {self._names[p]!r} is gone: {reason}. To go on without it set "
                "feed.on_dead=redistribute"
            )
        if self.feed.on_dead == "pause" and not self.plan.is_exhausted:
            with self._clock.during("wait"):
                if self._leads:
                    self._wait_for_user()
                self._cloud.barrier()

    def _why_gone(self, p: int) -> str:
        """In its own words where it has left them on this machine."""
        failures = (failure_of(self._run_dir, r) for r in self.layout.ranks_in(self._names[p]))
        own = [str(f["message"]) for f in failures if f is not None and not f["peer_lost"]]
        return (own[0] if own else self._inbox.end_of(p)) or "lost by another rank"

    def _wait_for_user(self) -> None:
        file = self._run_dir / GO_ON_FILE
        file.unlink(missing_ok=True)
        self._events.note(
            f"paused at step {self._step} (feed.on_dead=pause); to go on without it make the file "
            f"{file}, to end the run press Ctrl+C"
        )
        while not file.exists():
            time.sleep(_POLL_S)
        file.unlink()
        self._events.note("going on")

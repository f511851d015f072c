"""Checkpointing: when and how the ranks save what their run can resume from. The files are
record/checkpoint_files.py, resuming is resume.py.

Rank 0 decides after which update to save, and its control signal reaches every rank with the norm
of that update: no message of the pipeline is under way then that belongs to any rank's state. Each
rank copies its state between two updates, which is all that training waits for, writes it in the
background (saving.py) and reports to rank 0. A checkpoint is being saved until all ranks have
reported; then it is agreed, or lost where a rank could not copy or write its shard (no memory, a
full disk). Rank 0 tells everybody: older ones are deleted once a newer one is agreed; a lost one
is deleted, and the run continues with the older ones.

Replicas of a pipeline have no signal of rank 0 in every step: they save by the number of the step.
Rank 0 sends in advance how many steps lie between two checkpoints, where that follows from
minutes or from a slow disk. A rank that has not received it in time costs one checkpoint.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import torch

from xcloud.base.errors import FrameError, LinkError
from xcloud.comm.state import StateTree
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.control import Control, Signal
from xcloud.pipeline.hook import StepReport
from xcloud.rank.saving import CHECKPOINT_CARRIES, CheckpointMessage, Saver, code_of
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.reporter import Reporter

_MAX_OPEN = 16  # checkpoints of which a rank may report before all have


_OF_RANK_0 = (CheckpointMessage.EVERY, CheckpointMessage.AGREED, CheckpointMessage.LOST)


@dataclass
class Ledger:
    """The account that rank 0 keeps of the checkpoints that are being saved.

    Reports come in any thread, also before rank 0 itself begins.
    """

    _lock: threading.Lock = field(default_factory=threading.Lock)
    # The ranks that save, by step.
    _expected: dict[int, frozenset[int]] = field(default_factory=dict)
    # By step and rank: whether it has its part.
    _reports: dict[int, dict[int, bool]] = field(default_factory=dict)

    def begin(self, step: int, ranks: Collection[int]) -> None:
        """Expect reports of these ranks on the checkpoint of this step."""
        with self._lock:
            self._expected[step] = frozenset(ranks)

    @property
    def missing(self) -> dict[int, frozenset[int]]:
        """The ranks that have not reported, by the steps that are being saved."""
        with self._lock:
            return {
                step: ranks - self._reports.get(step, {}).keys()
                for step, ranks in sorted(self._expected.items())
            }

    def report(self, rank: int, step: int, is_written: bool) -> dict[int, bool]:
        """Take a rank's report. Return whether each rank has its shard, once all have reported;
        empty until then."""
        with self._lock:
            reports = self._reports.setdefault(step, {})
            reports[rank] = is_written
            if sum(rank in who for who in self._reports.values()) > _MAX_OPEN:
                raise FrameError(f"rank {rank} reports more than {_MAX_OPEN} open checkpoints")
            # Before rank 0 has begun this step nobody knows who saves it: rank -1 never reports.
            if not self._expected.get(step, frozenset({-1})) <= reports.keys():
                return {}
            # Every rank reports its steps in their order: nothing more comes of earlier ones.
            self._reports = {later: who for later, who in self._reports.items() if later > step}
            self._expected = {later: who for later, who in self._expected.items() if later > step}
        return reports


class Checkpointer(Saver):
    """The hook of one rank that saves its state.

    parts: the state to save, by name.
    asked: a stop signal from outside.
    among: the ranks that save; None = all.
    is_told: true if rank 0's signal comes with every step; otherwise all ranks go by the step.
    """

    def __init__(
        self,
        timing: Timing,
        writer: CheckpointWriter,
        control: Control | None,
        parts: StateTree,
        reporter: Reporter,
        asked: StopSignal | None = None,
        among: Collection[int] | None = None,
        is_told: bool = True,
    ) -> None:
        self.timing = timing
        self.writer = writer
        self.rank = writer.rank
        self._control = control
        self._among = among
        self._parts = parts
        self.notes = Notes(reporter)
        self.asked = asked or StopSignal()
        self.ledger = Ledger()
        self._stops = False
        self._is_told = is_told
        self._num_updates = timing.saved_step  # that the state which is saved next has
        if control is not None:
            # Called in the threads of the links; what it does to files runs in the thread that
            # writes.
            control.listener = lambda peer, frame: self.take_report(
                peer, frame.key.step, code_of(frame, peer)
            )

    def before_update(self, step: int) -> None:
        # Where nothing could be saved, a signal to stop ends the process at once.
        self.asked.is_armed = self._is_told and self.timing.settings.are_made

    def signal(self, step: int) -> Signal:
        """Decide in rank 0 what all ranks do after this update."""
        if not self._is_told:
            return self._signal_by_step(step)
        if self._stops or self.asked.was_asked:
            return Signal.STOP
        if self.timing.look(step):
            self._note_if_slow(step)
        # Never two under way: they would be held in memory twice. One that stays due is made
        # after the first step at which the last one is agreed or lost.
        is_free = self.timing.is_due and not self.is_pending
        return Signal.CHECKPOINT if is_free else Signal.GO_ON

    def _signal_by_step(self, step: int) -> Signal:
        """Decide by the number of the step alone, so that all ranks decide alike."""
        is_multiple = self.timing.is_multiple(step)
        if self.rank == 0:
            # Rank 0 alone measures seconds. What it changes reaches the others before the next
            # multiple, or costs them one checkpoint, which is then lost and deleted.
            every = self.timing.better_every(step)
            if is_multiple and self.is_pending:
                self._note_if_slow(step)
                every = 2 * (every or self.timing.every)  # a multiple, or they might never meet
            if every is not None:
                self.timing.every = every
                for peer in self._others:
                    self._tell(peer, step=every, message=CheckpointMessage.EVERY)
        return Signal.CHECKPOINT if is_multiple else Signal.GO_ON

    def after_update(self, step: int, report: StepReport) -> None:
        # The pause is reported by its own event (pause_s) and is no part of a step's seconds.
        with report.clock.paused():
            self.after(step, report.signal)

    def after(self, step: int, signal: Signal) -> bool:
        """Do between two updates what the signal says. Return whether this rank ends here."""
        self._num_updates = step
        is_last = step >= self.timing.final_step
        self.notes.flush()
        if self.asked.was_asked and not self.asked.is_reported:
            self.asked.is_reported = True
            if self.rank != 0:
                self._tell(0, step=step, message=CheckpointMessage.STOP)
        if signal is Signal.GO_ON:
            # Half way to the next checkpoint there is time to get new memory, page by page, in the
            # background: the first pause of a copy of 6 GB was 11.8 s with memory that was new,
            # 1.5 to 1.8 s with memory that was there.
            if self.timing.is_half_way(step):
                self.writer.prepare(self._parts)
        elif signal is Signal.CHECKPOINT and self.writer.is_writing and not is_last:
            # Only replicas come here, which save by the number of the step: with rank 0's signal
            # none is due before all have reported. A second copy would need the memory of the
            # first once more.
            self.fail(step, reason=f"that of step {self.timing.saved_step} is still being written")
        else:
            self.save(step)
        return signal is Signal.STOP

    def save(self, step: int) -> None:
        """Copy the state and have it written. Every rank calls it after the same update."""
        self.writer.wait()  # for the last one, which would be held in memory twice
        started_s = time.monotonic()
        self.timing.saved(step)
        if self.rank == 0:
            self.ledger.begin(step, ranks={0, *self._others})
        self.notes.reporter.flush()  # what was reported of these steps must not be lost
        try:
            state = self.writer.copy(self._parts)
        except (RuntimeError, MemoryError) as error:  # there is no room for the copy
            # The other ranks have copied theirs: they learn by rank 0's verdict that it is lost.
            return self._lack(step, why=error)
        pause_s = time.monotonic() - started_s

        def written(outcome: int | Exception, write_s: float) -> None:
            if isinstance(outcome, Exception):
                return self._lack(step, why=outcome)
            self.notes.later(
                partial(
                    self.notes.reporter.event,
                    "checkpoint",
                    step=step,
                    num_bytes=outcome,
                    pause_s=round(pause_s, 4),
                    write_s=round(write_s, 3),
                )
            )
            self._tell(0, step=step, message=CheckpointMessage.DONE)

        self.writer.write(step, state, written)

    def fail(self, step: int, reason: str) -> None:
        """Report, in place of `save`, that this rank cannot."""
        # `saved_step` stays, so that `finish` saves the last step if this was it.
        self.timing.saved(step, is_complete=False)
        if self.rank == 0:
            self.ledger.begin(step, ranks={0})
        self._lack(step, why=reason)

    def finish(self) -> None:
        """Save the state after the last update, however short the run."""
        if self.timing.settings.are_made and self.timing.saved_step != self._num_updates:
            self.save(self._num_updates)

    @property
    def is_pending(self) -> bool:
        """True in rank 0 while not all ranks have reported on the last checkpoint."""
        return bool(self.ledger.missing)

    def lose(self, peer: int) -> None:
        """Count a rank as gone that the run continues without. Only rank 0 calls it."""
        # No report of it will come: what it was to save counts as lost, or nothing is agreed any
        # more.
        for step, ranks in self.ledger.missing.items():
            if peer in ranks:
                self.take_report(peer, step, CheckpointMessage.FAILED)

    def settle(self, is_urgent: bool = True) -> None:
        """Block until this rank has written what it began; see CheckpointWriter.wait."""
        self.writer.wait(is_urgent)
        self.notes.flush()

    def close(self, is_finished: bool) -> None:
        """Block until what was begun and agreed is written.

        The ranks have met before. Of a finished run only what training longer could resume from is
        kept.
        """
        self.writer.close()
        self.notes.flush()
        if is_finished:
            with contextlib.suppress(OSError):
                self.writer.folder.prune(self.rank, keep=1, places=self.writer.places)

    @property
    def _others(self) -> frozenset[int]:
        peers = frozenset(self._control.out if self._control is not None else ())
        return peers if self._among is None else peers & frozenset(self._among)

    def _tell(self, peer: int, step: int, message: CheckpointMessage) -> None:
        if peer == self.rank:
            self.take_report(peer, step, message)
        elif self._control is not None and (out := self._control.out.get(peer)):  # else it is gone
            told = torch.tensor([message], dtype=torch.uint8)
            out.send(MessageKey(kind=Kind.CHECKPOINT, step=step), (told,), CHECKPOINT_CARRIES)

    def _lack(self, step: int, why: Exception | str) -> None:
        self.notes.later(partial(self.notes.lost, step, why))
        failed = CheckpointMessage.FAILED
        self.writer.later(lambda: self._tell(0, step=step, message=failed))

    def take_report(self, peer: int, step: int, code: int) -> None:
        """Act on a message. Called in a link's thread, or in the one that writes."""
        # A link's thread must go on reading: files are touched in the thread that writes
        # (`writer.later`), and events are written by the training thread (`Notes.flush`).
        message = CheckpointMessage(code)
        if message is CheckpointMessage.STOP:
            if self.rank == 0 and not (self._stops or self.asked.was_asked):
                self.notes.later(partial(self.notes.reporter.event, "stop_asked", of=peer))
            self._stops = True
        # From any other rank these would delete checkpoints in rank 0's name.
        elif self.rank == 0 and message in _OF_RANK_0:
            raise FrameError(
                f"rank {peer} sends a decision on checkpoint {step} that only rank 0 makes"
            )
        elif message is CheckpointMessage.EVERY:
            self.timing.every = step
        elif message is CheckpointMessage.AGREED:
            self.writer.later(lambda: self._agree(step))
        elif message is CheckpointMessage.LOST:
            self.writer.later(partial(self.writer.folder.delete_lost, step, self.rank))
        elif reports := self.ledger.report(
            peer, step, is_written=message is CheckpointMessage.DONE
        ):
            if all(reports.values()):
                verdict = CheckpointMessage.AGREED
                others = frozenset(reports)
                self.writer.later(lambda: self._agree(step, held_by=others))
            else:
                verdict = CheckpointMessage.LOST
                others = self._others
                self.writer.later(partial(self.writer.folder.delete_lost, step, self.rank))
            for other in sorted(others - {0}):
                with contextlib.suppress(LinkError):  # it is gone, and its part is there
                    self._tell(other, step=step, message=verdict)

    def _agree(self, step: int, held_by: Collection[int] = ()) -> None:
        folder = self.writer.folder
        later = self.notes.later
        if self.rank not in folder.ranks(step):  # or what is there would be pruned for nothing
            return later(partial(self.notes.lost, step, "agreed on, but its part is not here"))
        try:
            # A mark first, then the older ones go: a crash between the two leaves one too many,
            # never one too few. `held_by` tells a resumed one-way job which producers were lost
            # before.
            folder.mark_agreed(step, rank=self.rank, facts={"held_by": sorted(held_by)})
        except OSError as error:
            return later(partial(self.notes.lost, step, error))
        try:
            folder.prune(self.rank, keep=self.timing.settings.keep, places=self.writer.places)
        except OSError as error:
            text = f"old checkpoints cannot be deleted ({error}) and fill the disk"
            later(partial(self.notes.once, text, "prune"))

    def _note_if_slow(self, step: int) -> None:
        for begun, ranks in self.ledger.missing.items():
            self.notes.once(
                f"at step {step} a checkpoint is due, and that of step {begun} is still being "
                f"written by rank {', '.join(map(str, sorted(ranks)))}; they are made as often "
                "as the disk allows",
                what="slow",
            )


@dataclass
class Notes:
    """The reports of a rank on its checkpoints, made by the training thread only."""

    reporter: Reporter
    _calls: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)
    _noted: set[str] = field(default_factory=set)

    def later(self, call: Callable[[], None]) -> None:
        """Have `flush` make the call. May be called in any thread."""
        self._calls.put(call)

    def flush(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def lost(self, step: int, why: Exception | str) -> None:
        """Report that a checkpoint could not be written."""
        # Of an OSError without the file, which is nobody else's matter.
        if isinstance(why, OSError) and why.strerror:
            why = why.strerror
        reason = (why if isinstance(why, str) else repr(why))[:200]
        text = f"the checkpoint of step {step} could not be written ({reason}); "
        self.once(text + "the run continues, older checkpoints stay", what="lost")
        self.reporter.event("lost_checkpoint", step=step, reason=reason)

    def once(self, text: str, what: str) -> None:
        """Report the first failure of a kind: what fails now will fail again."""
        if what not in self._noted:
            self._noted.add(what)
            self.reporter.note(text)

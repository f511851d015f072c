"""When and how the ranks save what their run can go on from. The files are record/checkpoints.py,
going on is resume.py.

Rank 0 decides after which update to save, and its word reaches every rank with the norm of that
update: no message of the pipeline is under way then that belongs to any rank's state. Each rank
copies its state between two updates, which is all that training waits for, and writes it in the
background. The memory of the copy is kept; it is made in the background, half way to the first
checkpoint, as new memory would stop training for longer than the copy itself. Each tells rank 0
once its part is on the disk; when all are, rank 0 tells everybody that the checkpoint counts, and
only then older ones are deleted. A rank that cannot copy or write its part (no memory, a full
disk) says so, the others delete theirs, and the run goes on with the older ones.

Replicas of a pipeline have no word of rank 0's in every step: they save by the number of the step.
Rank 0 tells every how many, ahead, where that follows from minutes or from a slow disk. A rank
that has not heard it in time costs one checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

from xcloud.base.errors import FrameError, LinkError
from xcloud.comm.state import SnapshotBuffer, State, Stateful, bytes_to_copy, states_of
from xcloud.comm.step_clock import StepClock
from xcloud.parallel.control import Signal
from xcloud.parallel.part import Part, StepReport
from xcloud.record.checkpoints import CheckpointFolder
from xcloud.record.reporter import Reporter
from xcloud.training.settings import Checkpoints

_MOST_OPEN = 16  # checkpoints of which a rank may tell before all have
_NICENESS = 10  # of the thread that writes


class News(IntEnum):
    """What ranks tell each other of a checkpoint."""

    DONE = 1  # to rank 0: my part is on the disk
    FAILED = 2  # to rank 0: I have none
    AGREED = 3  # from rank 0: every rank has its part
    STOP = 4  # to rank 0: I was asked to end
    SAVE = 5  # from rank 0, where the word does not come with the step (one-way jobs)
    SAVE_AND_STOP = 6
    LOST = 7  # from rank 0: some rank has no part
    EVERY = 8  # from rank 0, in place of a step: replicas save at multiples of this number


class Post(Protocol):
    """Carries news between rank 0 and the others."""

    def listen(self, take: Callable[[int, int, int], None]) -> None:
        """From now on `take` is called with the peer, the step and the code of what one tells, in
        a link's thread."""

    @property
    def peers(self) -> Sequence[int]:
        """Rank 0: all others that still take part; elsewhere rank 0."""

    def tell(self, peer: int, step: int, code: int) -> None:
        """Does not wait. Raises LinkError if the peer is gone."""


class StopSignal:
    """Whether this process was asked to end. SIGUSR1 asks, and in ranks that no launcher watches
    (torchrun) SIGTERM and SIGINT do; while nothing can be saved, and for the second time, the
    process ends at once."""

    _TWICE_WITHIN_S = 0.5  # a terminal and torchrun may both pass on one Ctrl+C

    def __init__(self) -> None:
        self.is_armed = False
        self._asked_at_s: float | None = None

    @property
    def was_asked(self) -> bool:
        return self._asked_at_s is not None

    def install(self, *numbers: signal.Signals, exit_code: int) -> None:
        def take(number: int, frame: object) -> None:
            now_s = time.monotonic()
            again = self._asked_at_s is not None and (
                now_s - self._asked_at_s > self._TWICE_WITHIN_S
            )
            if again or not self.is_armed:
                os._exit(128 + number if again else exit_code)
            self._asked_at_s = self._asked_at_s or now_s

        for number in numbers:
            signal.signal(number, take)


class Checkpointer:
    """One rank's. `decide` is asked in rank 0 before the end of every update, `after` called in
    all ranks after it.

    parts: what is saved, by name. about: facts for whoever goes on from it; "attempt" tells parts
    of one attempt at a step from those of another. from_step: of the checkpoint that this attempt
    goes on from, 0 for none. last_step: of the run. asked: a stop from outside. clock: seconds.
    among: ranks that save; None = all.
    """

    def __init__(
        self,
        settings: Checkpoints,
        folder: CheckpointFolder,
        rank: int,
        post: Post | None,
        parts: Mapping[str, Stateful],
        about: Mapping[str, Any],
        reporter: Reporter,
        asked: StopSignal | None = None,
        from_step: int = 0,
        last_step: int = sys.maxsize,
        clock: Callable[[], float] = time.monotonic,
        among: Collection[int] | None = None,
    ) -> None:
        self.settings, self.folder, self.rank = settings, folder, rank
        self._post, self._among, self._parts, self._about = post, among, parts, dict(about)
        self._reporter, self._asked = reporter, asked or StopSignal()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._said: set[str] = set()
        self._lock = threading.Lock()
        # By step, while it is not known whether all have their part; rank 0 only.
        self._expected: dict[int, frozenset[int]] = {}
        self._heard: dict[int, dict[int, News]] = {}
        self._stop = self._has_told_stop = self._is_due = self._is_writing = False
        self._clock, self._every = clock, settings.every_steps
        self._begun_s = self._last_s = clock()
        self._first_step = self._last_step = from_step
        self._next_estimate_s = 30 * settings.every_minutes
        self._final_step = last_step
        self._buffer, self._is_prepared = SnapshotBuffer(), False
        self._is_needed_now = threading.Event()  # the buffer, however far it is
        if post is not None:
            post.listen(self._take)
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def decide(self, step: int) -> Signal:
        """What all ranks do after this update."""
        if self._stop or self._asked.was_asked:
            return Signal.STOP
        minutes, waited_s = self.settings.every_minutes, self._clock() - self._last_s
        if self._is_multiple(step) or (minutes and waited_s > 60 * minutes):
            self._is_due = True
            self._say_if_slow(step)
        # Never two under way: they would be held in memory twice.
        return Signal.CHECKPOINT if self._is_due and not self.is_pending else Signal.GO_ON

    def decide_by_step(self, step: int) -> Signal:
        """The same where the replicas of a pipeline have no word of each other in every step: by
        the number of the step alone, so that all of them decide alike."""
        if self.rank == 0:
            self._estimate(step)
            if self._is_multiple(step) and self.is_pending:
                self._say_if_slow(step)
                self._tell_every(2 * self._every)  # a multiple, or replicas might never meet again
        return Signal.CHECKPOINT if self._is_multiple(step) else Signal.GO_ON

    def _is_multiple(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0

    def _estimate(self, step: int) -> None:
        """The steps in `every_minutes`, from those so far: after half of that time, and each time
        when twice as long has passed."""
        minutes, elapsed_s = self.settings.every_minutes, self._clock() - self._begun_s
        if minutes and elapsed_s >= self._next_estimate_s:
            self._next_estimate_s = 2 * elapsed_s
            every = max(1, round(60 * minutes * (step - self._first_step) / elapsed_s))
            every = min(every, self.settings.every_steps or every)
            if not 0.8 * self._every <= every <= 1.25 * self._every:  # each change may cost one
                self._tell_every(every)

    def _tell_every(self, every: int) -> None:
        self._every = every
        for peer in self._others:
            self._tell(peer, every, News.EVERY)

    @property
    def _others(self) -> frozenset[int]:
        peers = frozenset(self._post.peers if self._post is not None else ())
        return peers if self._among is None else peers & frozenset(self._among)

    def _tell(self, peer: int, step: int, news: News) -> None:
        if self._post is not None:
            self._post.tell(peer, step, news)

    def after(self, step: int, word: Signal) -> bool:
        """Between two updates; whether this rank ends here."""
        self._tell_news()
        if self._asked.was_asked and not self._has_told_stop:
            self._has_told_stop = True
            if self.rank != 0:
                self._tell(0, step, News.STOP)
        if word is Signal.CHECKPOINT and self._is_writing and step < self._final_step:
            self.fail(step, f"that of step {self._last_step} is still being written")
        elif word is not Signal.GO_ON:
            self.save(step)
        elif not self._is_prepared and self._is_half_way(step):
            self._prepare()
        return word is Signal.STOP

    def _is_half_way(self, step: int) -> bool:
        """To the next checkpoint. One by steps may come after the end of the run."""
        every, minutes = self._every, self.settings.every_minutes
        since = step % every if every else 0
        if every and 2 * since >= every - 1 and step - since + every <= self._final_step:
            return True
        return bool(minutes) and self._clock() - self._last_s >= 30 * minutes

    def _prepare(self) -> None:
        self._is_prepared = True
        with contextlib.suppress(RuntimeError, MemoryError):  # the copy itself will say so
            num_bytes = bytes_to_copy(lambda: states_of(self._parts))
            self._is_needed_now.clear()
            self._jobs.put(lambda: self._buffer.enlarge(num_bytes, self._is_needed_now))

    def save(self, step: int) -> None:
        """Copy the state and have it written. Every rank calls it after the same update."""
        self.wait()  # for the last one, which would be held in memory twice
        started_s = time.monotonic()
        self._last_s, self._is_due = self._clock(), False
        self._last_step, self._is_prepared = step, False
        self._expect(step, self._others)
        self._reporter.flush()  # what was told of these steps must not be lost if they are not
        try:
            with self._buffer.snapshot():
                state = states_of(self._parts)
        except (RuntimeError, MemoryError) as error:  # there is no room for the copy
            return self._lack(step, error)
        pause_s, self._is_writing = time.monotonic() - started_s, True
        self._jobs.put(lambda: self._write(step, state, pause_s))

    def wait(self, is_urgent: bool = True) -> None:
        """Until this rank has written what it began, and otherwise also prepared the next copy."""
        if is_urgent:
            self._is_needed_now.set()
        written = threading.Event()
        self._jobs.put(written.set)
        written.wait()
        self._tell_news()

    def save_last(self) -> None:
        """After the last update, however short the run."""
        if self.settings.are_made and self._last_step != self._final_step:
            self.save(self._final_step)

    @property
    def is_pending(self) -> bool:
        """Rank 0: not all ranks have been heard of the last one."""
        return bool(self._expected)

    def fail(self, step: int, reason: str) -> None:
        """In place of `save`, where this rank cannot."""
        self._last_s, self._is_due = self._clock(), False
        self._expect(step, ())
        self._lack(step, reason)

    def _expect(self, step: int, peers: Collection[int]) -> None:
        if self.rank == 0:
            with self._lock:
                self._expected[step] = frozenset({0, *peers})

    def _lack(self, step: int, why: Exception | str) -> None:
        self._news.put(partial(self._tell_loss, step, why))
        self._jobs.put(lambda: self._tell_rank_0(step, News.FAILED))

    def lose(self, peer: int) -> None:
        """Rank 0: a rank is gone, and the run goes on without it."""
        for step in sorted(self._expected):
            if peer not in self._heard.get(step, {}):
                self._take(peer, step, News.FAILED)

    def close(self) -> None:
        """Wait until this rank has written what it began and heard of. Call it after a meeting,
        and all ranks have."""
        self._is_needed_now.set()
        self._jobs.put(None)
        self._thread.join()
        self._tell_news()

    def keep_newest(self) -> None:
        """Once the run has come to its end: only what training longer could go on from."""
        with contextlib.suppress(OSError):
            self.folder.prune(self.rank, 1)

    # --- in the thread that writes

    def _work(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (job := self._jobs.get()) is not None:
            # A link's failure is met by the training loop itself, on the next message. A part that
            # cannot be deleted goes with the next `prune`.
            with contextlib.suppress(LinkError, OSError):
                job()
            del job  # or it would hold its state until the next one comes

    def _write(self, step: int, state: State, pause_s: float) -> None:
        started_s, news = time.monotonic(), News.DONE
        try:
            num_bytes = self.folder.write(step, self.rank, state, self._about)
            self._news.put(partial(
                self._reporter.event, "checkpoint", step=step, num_bytes=num_bytes,
                pause_s=round(pause_s, 4), write_s=round(time.monotonic() - started_s, 3),
            ))  # fmt: skip
        except Exception as error:  # of a GPU, too: it must not end this thread, which is awaited
            self._news.put(partial(self._tell_loss, step, error))
            news = News.FAILED
        self._is_writing = False
        self._tell_rank_0(step, news)

    def _tell_rank_0(self, step: int, news: News) -> None:
        if self.rank == 0:
            self._take(0, step, news)
        else:
            self._tell(0, step, news)

    def _agree(self, step: int, held_by: Collection[int] = ()) -> None:
        try:
            self.folder.mark_agreed(step, self.rank, {"held_by": sorted(held_by)})
        except OSError as error:
            return self._news.put(partial(self._tell_loss, step, error))
        try:
            self.folder.prune(self.rank, self.settings.keep)
        except OSError as error:
            said = f"old checkpoints cannot be deleted ({error}) and fill the disk"
            self._news.put(partial(self._say_once, said, "prune"))

    # --- in a link's thread, too

    def _take(self, peer: int, step: int, code: int) -> None:
        news = News(code)
        if news is News.STOP:
            self._stop = True
        elif self.rank == 0 and news in (News.EVERY, News.AGREED, News.LOST):
            raise FrameError(f"rank {peer} tells rank 0 what rank 0 decides of checkpoint {step}")
        elif news is News.EVERY:
            self._every = step
        elif news is News.AGREED:
            self._jobs.put(lambda: self._agree(step))
        elif news is News.LOST:
            self._jobs.put(partial(self.folder.delete, step, self.rank))
        elif heard := self._all_heard(peer, step, news):
            if all(one is News.DONE for one in heard.values()):
                verdict, others = News.AGREED, frozenset(heard)
                self._jobs.put(lambda: self._agree(step, others))
            else:
                verdict, others = News.LOST, self._others
                self._jobs.put(partial(self.folder.delete, step, self.rank))
            for other in sorted(others - {0}):
                with contextlib.suppress(LinkError):  # it is gone, and its part is there
                    self._tell(other, step, verdict)

    def _all_heard(self, peer: int, step: int, news: News) -> dict[int, News]:
        """By rank, once all ranks have told of their part; empty until then. Others may be heard
        before this rank has saved its own."""
        with self._lock:
            heard = self._heard.setdefault(step, {})
            heard[peer] = news
            if sum(peer in who for who in self._heard.values()) > _MOST_OPEN:
                raise FrameError(f"rank {peer} tells of more than {_MOST_OPEN} open checkpoints")
            if not self._expected.get(step, frozenset({-1})) <= heard.keys():
                return {}
            # Every rank tells of its steps in their order: of earlier ones nothing more will come.
            self._heard = {later: who for later, who in self._heard.items() if later > step}
            self._expected = {later: who for later, who in self._expected.items() if later > step}
        return heard

    # --- in the training thread

    def _tell_news(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._news.get_nowait()()

    def _tell_loss(self, step: int, why: Exception | str) -> None:
        reason = f"{why if isinstance(why, OSError | str) else repr(why)!s:.200}"
        said = f"the checkpoint of step {step} could not be written ({reason}); "
        self._say_once(said + "the run goes on, older checkpoints stay", "lost")
        self._reporter.event("lost_checkpoint", step=step, reason=reason)

    def _say_if_slow(self, step: int) -> None:
        with self._lock:
            awaited = {s: who - self._heard.get(s, {}).keys() for s, who in self._expected.items()}
        for begun, ranks in awaited.items():
            self._say_once(
                f"at step {step} a checkpoint is due, and that of step {begun} is still being "
                f"written by rank {', '.join(map(str, sorted(ranks)))}; they are made as often "
                "as the disk allows", "slow",
            )  # fmt: skip

    def _say_once(self, text: str, what: str) -> None:
        """What fails now will fail again."""
        if what not in self._said:
            self._said.add(what)
            self._reporter.note(text)


class CheckpointPart(Part):
    """A Checkpointer around a pipeline's updates. is_told: rank 0's signal comes with every step;
    else this rank goes by the step alone."""

    def __init__(
        self, checkpoints: Checkpointer, asked: StopSignal, is_told: bool, clock: StepClock
    ) -> None:
        self._checkpoints, self._asked, self._is_told = checkpoints, asked, is_told
        self._clock = clock

    def before_update(self, step: int) -> None:
        self._asked.is_armed = self._is_told and self._checkpoints.settings.are_made

    def signal(self, step: int) -> Signal:
        checkpoints = self._checkpoints
        return checkpoints.decide(step) if self._is_told else checkpoints.decide_by_step(step)

    def after_update(self, step: int, report: StepReport) -> None:
        with self._clock.paused():
            self._checkpoints.after(step, report.signal)

    def finish(self) -> None:
        self._asked.is_armed = False
        self._checkpoints.save_last()

    def settle(self) -> None:
        self._checkpoints.wait()

    def close(self, is_finished: bool) -> None:
        self._checkpoints.close()
        if is_finished:
            self._checkpoints.keep_newest()

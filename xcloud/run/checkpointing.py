"""When and how the ranks save what their run can go on from. The files are record/checkpoints.py,
going on is resume.py.

Rank 0 decides after which update to save, and its word reaches every rank with the norm of that
update: no message of the pipeline is under way then that belongs to any rank's state. Each rank
copies its state between two updates, which is all that training waits for, and writes it in the
background. The memory of the copy is kept; it is made in the background, half way to the first
checkpoint, as new memory would stop training for longer than the copy itself. Each tells rank 0
once its part is on the disk; when all are, rank 0 tells everybody that the checkpoint counts, and
only then older ones are deleted. A rank that cannot write (full disk) says so, and the run goes on
with the older ones.
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
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from xcloud.comm.memory import State, Stateful, states_of
from xcloud.comm.snapshot import SnapshotBuffer, bytes_to_copy
from xcloud.errors import FrameError, LinkError
from xcloud.parallel.control import Word
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


@dataclass(frozen=True)
class PostWithin:
    """The same between fewer ranks."""

    post: Post
    ranks: Collection[int]

    def listen(self, take: Callable[[int, int, int], None]) -> None:
        self.post.listen(take)

    @property
    def peers(self) -> Sequence[int]:
        return [peer for peer in self.post.peers if peer in self.ranks]

    def tell(self, peer: int, step: int, code: int) -> None:
        self.post.tell(peer, step, code)


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
    goes on from, 0 for none. last_step: of the run. asked: a stop from outside.
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
    ) -> None:
        self.settings, self.folder, self.rank = settings, folder, rank
        self._post, self._parts, self._about = post, parts, dict(about)
        self._reporter, self._asked = reporter, asked or StopSignal()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._heard: dict[int, dict[int, News]] = {}  # by step and rank; rank 0 only
        self._pending: int | None = None  # the step that not all have been heard of; rank 0 only
        self._expected = {rank}  # to be heard of it
        self._stop = self._has_told_stop = self._has_failed = self._is_due = False
        self._last_s, self._last_step, self._has_any = time.monotonic(), from_step, from_step > 0
        self._final_step = last_step
        self._buffer, self._is_prepared = SnapshotBuffer(), False
        self._is_needed_now = threading.Event()  # the buffer, however far it is
        if post is not None:
            post.listen(self._take)
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def decide(self, step: int) -> Word:
        """What all ranks do after this update."""
        every, minutes = self.settings.every_steps, self.settings.every_minutes
        if self._stop or self._asked.was_asked:
            return Word.STOP
        waited_s = time.monotonic() - self._last_s
        if (every and step % every == 0) or (minutes and waited_s > 60 * minutes):
            self._is_due = True
        # Never two under way: they would be held in memory twice.
        return Word.CHECKPOINT if self._is_due and self._pending is None else Word.GO_ON

    def decide_by_step(self, step: int) -> Word:
        """The same where the replicas of a pipeline have no word of each other in every step: by
        the number of the step alone, so that all of them decide alike."""
        every = self.settings.every_steps
        return Word.CHECKPOINT if every and step % every == 0 else Word.GO_ON

    def after(self, step: int, word: Word) -> bool:
        """Between two updates; whether this rank ends here."""
        self._tell_news()
        if self._asked.was_asked and not self._has_told_stop:
            self._has_told_stop = True
            if self.rank != 0 and self._post is not None:
                self._post.tell(0, step, News.STOP)
        if word is not Word.GO_ON:
            self.save(step)
        elif not self._is_prepared and self._is_half_way(step):
            self._prepare()
        return word is Word.STOP

    def _is_half_way(self, step: int) -> bool:
        """To the next checkpoint. One by steps may come after the end of the run."""
        every, minutes = self.settings.every_steps, self.settings.every_minutes
        since = step % every if every else 0
        if every and 2 * since >= every - 1 and step - since + every <= self._final_step:
            return True
        return bool(minutes) and time.monotonic() - self._last_s >= 30 * minutes

    def _prepare(self) -> None:
        self._is_prepared = True
        num_bytes = bytes_to_copy(lambda: states_of(self._parts))
        self._is_needed_now.clear()
        self._jobs.put(lambda: self._buffer.enlarge(num_bytes, self._is_needed_now))

    def save(self, step: int) -> None:
        """Copy the state and have it written. Every rank calls it after the same update."""
        self.wait()  # for the last one, which would be held in memory twice
        started_s = time.monotonic()
        self._last_s, self._is_due = started_s, False
        self._last_step, self._has_any, self._is_prepared = step, True, False
        if self.rank == 0:
            self._expected = {0, *(self._post.peers if self._post is not None else ())}
            self._pending = step
        self._reporter.flush()  # what was told of these steps must not be lost if they are not
        with self._buffer.snapshot():
            state = states_of(self._parts)
        pause_s = time.monotonic() - started_s
        self._jobs.put(lambda: self._write(step, state, pause_s))

    def wait(self, is_urgent: bool = True) -> None:
        """Until this rank has written what it began, and otherwise also prepared the next copy."""
        if is_urgent:
            self._is_needed_now.set()
        written = threading.Event()
        self._jobs.put(written.set)
        written.wait()

    def save_last(self, step: int) -> None:
        """After the last update: where there are checkpoints, the last of them is of its end. A
        short run makes none."""
        if self._has_any and self._last_step != step:
            self.save(step)

    @property
    def is_pending(self) -> bool:
        """Rank 0: not all ranks have been heard of the last one."""
        return self._pending is not None

    def fail(self, step: int, reason: str) -> None:
        """In place of `save`, where this rank cannot."""
        self._last_s, self._is_due = time.monotonic(), False
        self._news.put({"event": "lost_checkpoint", "step": step, "reason": reason})
        if self.rank == 0:
            self._expected, self._pending = {0}, step
        self._jobs.put(lambda: self._tell_rank_0(step, News.FAILED))

    def lose(self, peer: int) -> None:
        """Rank 0: a rank is gone, and the run goes on without it."""
        if self._pending is not None and peer not in self._heard.get(self._pending, {}):
            self._take(peer, self._pending, News.FAILED)

    def hear_agreed(self, step: int) -> None:
        """For a rank to which `Post` does not carry it."""
        self._take(0, step, News.AGREED)

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
            # A link's failure is met by the training loop itself, on the next message.
            with contextlib.suppress(LinkError):
                job()
            del job  # or it would hold its state until the next one comes

    def _write(self, step: int, state: State, pause_s: float) -> None:
        started_s, news = time.monotonic(), News.DONE
        try:
            num_bytes = self.folder.write(step, self.rank, state, self._about)
            self._news.put({
                "event": "checkpoint", "step": step, "num_bytes": num_bytes,
                "pause_s": round(pause_s, 4), "write_s": round(time.monotonic() - started_s, 3),
            })  # fmt: skip
        except Exception as error:  # of a GPU, too: it must not end this thread, which is awaited
            news, what = News.FAILED, "" if isinstance(error, OSError) else f"{error!r:.200}"
            reason = what or str(error)
            self._news.put({"event": "lost_checkpoint", "step": step, "reason": reason})
        self._tell_rank_0(step, news)

    def _tell_rank_0(self, step: int, news: News) -> None:
        if self.rank == 0:
            self._take(0, step, news)
        elif self._post is not None:
            self._post.tell(0, step, news)

    def _agree(self, step: int, held_by: Collection[int] = ()) -> None:
        try:
            if self.rank == 0 or not self.folder.is_agreed(step):
                facts = {"held_by": sorted(held_by)} if held_by else {}
                self.folder.mark_agreed(step, self.rank, facts)
            self.folder.prune(self.rank, self.settings.keep)
        except OSError as error:
            self._news.put({"event": "lost_checkpoint", "step": step, "reason": str(error)})

    # --- in a link's thread, too

    def _take(self, peer: int, step: int, code: int) -> None:
        news = News(code)
        if news is News.STOP:
            self._stop = True
        elif news is News.AGREED:
            if self.rank == 0:
                raise FrameError(f"rank {peer} tells rank 0 that all have checkpoint {step}")
            self._jobs.put(lambda: self._agree(step))
        elif self._is_whole(peer, step, news):
            held_by = frozenset(self._expected)
            self._jobs.put(lambda: self._agree(step, held_by))
            for other in sorted(held_by - {0}):
                assert self._post is not None
                with contextlib.suppress(LinkError):  # it is gone, and its part is there
                    self._post.tell(other, step, News.AGREED)

    def _is_whole(self, peer: int, step: int, news: News) -> bool:
        """Whether all ranks have their part now. Others may be heard before this rank has saved
        its own."""
        with self._lock:
            heard = self._heard.setdefault(step, {})
            heard[peer] = news
            if sum(peer in who for who in self._heard.values()) > _MOST_OPEN:
                raise FrameError(f"rank {peer} tells of more than {_MOST_OPEN} open checkpoints")
            if self._pending != step or not self._expected <= heard.keys():
                return False
            self._heard = {later: who for later, who in self._heard.items() if later > step}
            self._pending = None
        return all(one is News.DONE for one in heard.values())

    # --- in the training thread

    def _tell_news(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                news = self._news.get_nowait()
                if news["event"] == "lost_checkpoint":
                    self._tell_loss(news)
                self._reporter.event(**news)

    def _tell_loss(self, news: Mapping[str, Any]) -> None:
        """Once: what fails now will fail again."""
        if not self._has_failed:
            self._has_failed = True
            self._reporter.note(
                f"the checkpoint of step {news['step']} could not be written ({news['reason']}); "
                "the run goes on, older checkpoints stay"
            )

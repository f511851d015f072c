"""When one rank saves its state, and the thread that writes it. It knows no other rank."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from xcloud import __version__
from xcloud.base.errors import LinkError
from xcloud.base.project import commit
from xcloud.comm.snapshot import SnapshotBuffer, bytes_to_copy
from xcloud.comm.state import State, StateTree, states_of
from xcloud.job.strategy import ModelPlacement
from xcloud.pipeline.settings import Checkpoints
from xcloud.rank.saving import InputDigests
from xcloud.record.checkpoint_files import CheckpointFolder

_NICENESS = 10  # of the thread that writes


class Timing:
    """The schedule by which one rank saves.

    from_step: the step of the checkpoint that this attempt resumes from, 0 for none.
    last_step: the last step of the run.
    clock: a function that returns seconds.
    every: the number of steps between two checkpoints, as rank 0 last reported it.
    """

    def __init__(
        self,
        settings: Checkpoints,
        from_step: int = 0,
        last_step: int = sys.maxsize,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.final_step = last_step
        self.saved_step = from_step
        self.every = settings.every_steps
        self.is_due = False
        self._first_step = from_step
        self._clock = clock
        self._begun_s = self._saved_s = clock()
        # Half of `every_minutes`, in seconds.
        self._next_estimate_s = 30 * settings.every_minutes

    def is_multiple(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def look(self, step: int) -> bool:
        """Note whether a checkpoint has become due now, and return it. It stays due until one is
        made."""
        minutes = self.settings.every_minutes
        waited_s = self._clock() - self._saved_s
        # `|=`: with one under way a checkpoint is not made when it becomes due, but is not
        # forgotten.
        is_new = self.is_multiple(step) or (minutes > 0 and waited_s > 60 * minutes)
        self.is_due |= is_new
        return is_new

    def saved(self, step: int, is_complete: bool = True) -> None:
        """Note that a checkpoint was begun; is_complete: and copied."""
        self._saved_s = self._clock()
        self.is_due = False
        if is_complete:
            self.saved_step = step

    def better_every(self, step: int) -> int | None:
        """Estimate how many steps fit into `every_minutes`, from those so far.

        The estimate is made after half of that time, and each time when twice as long has passed.
        Returns None if `every` is near it.
        """
        minutes = self.settings.every_minutes
        elapsed_s = self._clock() - self._begun_s
        if not minutes or elapsed_s < self._next_estimate_s:
            return None
        # Each time twice as late: a run of days makes a handful of estimates.
        self._next_estimate_s = 2 * elapsed_s
        every = max(1, round(60 * minutes * (step - self._first_step) / elapsed_s))
        # Whichever comes first, steps or minutes.
        every = min(every, self.settings.every_steps or every)
        # Each change may cost a checkpoint.
        if 0.8 * self.every <= every <= 1.25 * self.every:
            return None
        return every

    def is_half_way(self, step: int) -> bool:
        """Return whether this is half of the way to the next checkpoint. One by steps may come
        after the end of the run."""
        every = self.every
        minutes = self.settings.every_minutes
        # Of replicas each rank goes by the step alone; `>= every - 1` as with every=1 or 2 there
        # is no step in the middle.
        since = step % every if every else 0
        if every and 2 * since >= every - 1 and step - since + every <= self.final_step:
            return True
        return bool(minutes) and self._clock() - self._saved_s >= 30 * minutes


def about_part(
    places: ModelPlacement, settings: Mapping[str, str], attempt: int, facts: InputDigests
) -> dict[str, Any]:
    """Return what a rank writes beside its state, for whoever resumes from it.

    settings: the settings as the ranks compare them.
    attempt: a key that distinguishes parts of one attempt at a step from those of another.
    facts: the facts that must stay the same.
    """
    return {
        "release": __version__,
        "commit": commit(),
        "attempt": attempt,
        "places": asdict(places),
        "settings": dict(settings),
        "facts": {kind: dict(digests) for kind, digests in facts.items()},
    }


class CheckpointWriter:
    """A writer of one rank's state, in a thread of its own.

    The memory of the copy is kept; it is made in that thread, half way to the first checkpoint, as
    new memory would stop training for longer than the copy itself.
    about: see about_part.
    """

    def __init__(self, folder: CheckpointFolder, rank: int, about: Mapping[str, Any]) -> None:
        self.folder = folder
        self.rank = rank
        self.places = about.get("places")
        self._about = dict(about)
        self.buffer = SnapshotBuffer()
        self.is_writing = self._is_prepared = False
        self._is_needed_now = threading.Event()  # the buffer, however far it is
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def prepare(self, parts: StateTree) -> None:
        """Have the memory for the next copy made in the background."""
        if self._is_prepared:
            return
        self._is_prepared = True
        with contextlib.suppress(RuntimeError, MemoryError):  # the copy itself will say so
            num_bytes = bytes_to_copy(lambda: states_of(parts))
            self._is_needed_now.clear()
            self.later(lambda: self.buffer.enlarge(num_bytes, stop=self._is_needed_now))

    def copy(self, parts: StateTree) -> State:
        """Copy the state. Raises RuntimeError or MemoryError where there is no room for it."""
        self._is_prepared = False
        # Inside, whatever `states_of` reads goes into the buffer of the last copy, which must be
        # written by now (`Checkpointer.save` waits for it).
        with self.buffer.snapshot():
            return states_of(parts)

    def write(
        self, step: int, state: State, then: Callable[[int | Exception, float], None]
    ) -> None:
        """Have a state written. Returns at once.

        then: a function that is called in the thread with the bytes, or the reason why there are
            none, and the seconds that it took.
        """
        self.is_writing = True

        def write() -> None:
            started_s = time.monotonic()
            try:
                outcome: int | Exception = self.folder.write(step, self.rank, state, self._about)
            except Exception as error:  # of a GPU, too: it must not end this thread
                outcome = error
            self.is_writing = False
            then(outcome, time.monotonic() - started_s)

        self.later(write)

    def later(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def wait(self, is_urgent: bool = True) -> None:
        """Block until the thread has done what it was given.

        is_urgent: do not wait until the room of the next copy is prepared.
        """
        if is_urgent:
            self._is_needed_now.set()
        done = threading.Event()
        self.later(done.set)
        while not done.wait(1.0):
            assert self._thread.is_alive(), "the thread that writes checkpoints has failed"

    def close(self) -> None:
        self._is_needed_now.set()
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                # On Linux the priority is of a thread, not of its process: training keeps its own.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while (job := self._jobs.get()) is not None:
            # A link's failure is met by the training loop itself, on the next message. A part that
            # cannot be deleted goes with the next `prune`.
            with contextlib.suppress(LinkError, OSError):
                job()
            del job  # or it would hold its state until the next one comes

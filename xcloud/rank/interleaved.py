"""Steps in turns with other points of a sweep, so that a noisy machine disturbs all alike
(hydra.launcher.timing=together). A rank's end; sweep/interleaving.py gives the turns.

A rank that waits sends a message of JSON, with the times of the turn that it has made if there is
one; any answer is its next turn. Once the other end has closed, no rank waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from multiprocessing.connection import Client, Connection
from pathlib import Path

from xcloud.base.errors import ConfigError
from xcloud.job.job import Job
from xcloud.parallel.part import Part, StepReport
from xcloud.record.rank_state import RankState

ADDRESS = "XCLOUD_TURNS"  # environment variable: the server's socket
STEPS_PER_TURN = 4  # the first is not counted: caches are cold and threads asleep
MIN_ROUNDS = 6  # with fewer there is no interval of 95 %
_MIN_STEPS = STEPS_PER_TURN * (MIN_ROUNDS + 1)  # the first turn is the run's warm-up


class InterleavedClient(Part):
    """Of a point among others: STEPS_PER_TURN steps, then the others have theirs."""

    def __init__(
        self, connection: Connection, who: dict[str, object], state: RankState | None
    ) -> None:
        self._connection, self._who, self._state = connection, who, state
        self._is_over = self._has_begun = False
        self._made: list[tuple[float, float]] = []  # in this turn

    def before_update(self, step: int) -> None:
        if not self._has_begun or len(self._made) == STEPS_PER_TURN:
            self._wait()

    def after_update(self, step: int, report: StepReport) -> None:
        self.note(time.monotonic(), report.step_s)

    def note(self, ended_s: float, step_s: float) -> None:
        self._made.append((ended_s, step_s))

    def finish(self) -> None:
        self.before_update(0)

    def close(self, is_finished: bool = False) -> None:
        self._connection.close()

    def _wait(self) -> None:
        if self._is_over:
            return
        message = json.dumps({**self._who, "made": self._made}).encode()
        self._has_begun, self._made, self._is_over = True, [], True
        self._enter("waiting for its turn")
        with contextlib.suppress(ConnectionError, EOFError):
            self._connection.send_bytes(message)
            self._connection.recv_bytes()
            self._is_over = False
        self._enter("training")

    def _enter(self, phase: str) -> None:
        if self._state is not None:
            self._state.enter(phase)


def join_turns(run_dir: Path, rank: int, num_ranks: int, state: RankState | None) -> Part:
    """Of this process: waits for its turn if a sweep that times its points together started it."""
    address = os.environ.get(ADDRESS)
    if address is None:
        return Part()
    who = {"point": str(run_dir.resolve()), "rank": rank, "num_ranks": num_ranks}
    return InterleavedClient(Client(address, "AF_UNIX"), who, state)


def check_takes_turns(job: Job) -> None:
    """Raises ConfigError for a job whose steps cannot be timed in turns."""
    asked = "hydra.launcher.timing=together"
    if job.why_not_in_turns:
        raise ConfigError(f"{asked}: {job.why_not_in_turns}; use timing=alone")
    if job.max_steps < _MIN_STEPS:
        raise ConfigError(
            f"{asked} needs training.max_steps of at least {_MIN_STEPS}, for a warm-up and "
            f"{MIN_ROUNDS} rounds of {STEPS_PER_TURN} steps; got {job.max_steps}"
        )

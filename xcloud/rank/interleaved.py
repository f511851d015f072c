"""The turns in which the points of a sweep make their steps, so that a noisy machine disturbs all
alike (hydra.launcher.timing=together). A rank's end; sweep/conductor.py says whose turn it is.

On the socket: a rank that waits sends a line of JSON, with the times of the turn it has made if
there is one; a byte from the other end is its next turn. Once that end has closed, no rank waits.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from xcloud.base.errors import ConfigError
from xcloud.job.experiment import Experiment
from xcloud.job.job import Job
from xcloud.parallel.part import Part, StepReport
from xcloud.record.rank_state import RankState

ADDRESS = "XCLOUD_TURNS"  # environment variable: the conductor's socket
STEPS_PER_TURN = 4  # the first is not counted: caches are cold and threads asleep
MIN_ROUNDS = 6  # with fewer there is no interval of 95 %
_MIN_STEPS = STEPS_PER_TURN * (MIN_ROUNDS + 1)  # the first turn is the run's warm-up


class InterleavedClient(Part):
    """Of a point among others: STEPS_PER_TURN steps, then the others have theirs."""

    def __init__(
        self, connection: socket.socket, run_dir: Path, rank: int, num_ranks: int,
        state: RankState | None = None,
    ) -> None:  # fmt: skip
        self._connection, self._state = connection, state
        self._who = {"point": str(run_dir.resolve()), "rank": rank, "num_ranks": num_ranks}
        self._is_over = self._has_begun = False
        self._made: list[tuple[float, float]] = []  # in this turn

    def before_update(self, step: int) -> None:
        self.wait()

    def after_update(self, step: int, report: StepReport) -> None:
        self.note(time.monotonic(), report.step_s)

    def finish(self) -> None:
        self.wait()

    def close(self, is_finished: bool = False) -> None:
        self._connection.close()

    def wait(self) -> None:
        """Between two steps, and after the last; returns when this rank may go on."""
        if self._is_over or (self._has_begun and len(self._made) < STEPS_PER_TURN):
            return
        line = json.dumps({**self._who, "made": self._made}) + "\n"
        self._has_begun, self._made = True, []
        self._enter("waiting for its turn")
        try:
            self._connection.sendall(line.encode())
            self._is_over = not self._connection.recv(1)
        except ConnectionError:
            self._is_over = True
        self._enter("training")

    def note(self, ended_s: float, step_s: float) -> None:
        """A step was made: when it ended, and how long it took this rank."""
        self._made.append((ended_s, step_s))

    def _enter(self, phase: str) -> None:
        if self._state is not None:
            self._state.enter(phase)


def join_turns(run_dir: Path, rank: int, num_ranks: int, state: RankState | None) -> Part:
    """Of this process: waits for its turn if a sweep that times its points together started it."""
    address = os.environ.get(ADDRESS)
    if address is None:
        return Part()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return InterleavedClient(connection, run_dir, rank, num_ranks, state)


def check_takes_turns(job: Job) -> None:
    """Raises ConfigError for a job whose steps cannot be timed in turns."""
    asked = "hydra.launcher.timing=together"
    if not isinstance(job, Experiment):
        raise ConfigError(
            f"{asked} is for pipelines: the producers of a one-way job run ahead of their "
            "consumer, and would go on while others are timed; use timing=alone"
        )
    if job.strategy.is_apart:
        raise ConfigError(
            f"{asked}: strategy={job.strategy.name} averages between some steps and sends beside "
            f"others, which turns of {STEPS_PER_TURN} steps would miss or hide; use timing=alone "
            "and compare samples_per_s"
        )
    if job.max_steps < _MIN_STEPS:
        raise ConfigError(
            f"{asked} needs training.max_steps of at least {_MIN_STEPS}, for a warm-up and "
            f"{MIN_ROUNDS} rounds of {STEPS_PER_TURN} steps; got {job.max_steps}"
        )

"""Step times that compare on a noisy machine: runs that make their steps in turns.

    python -m benchmarks.in_turns +exp=abnet_iwslt compression=none,int8,int4 [seed=1,2] ...

All combinations, as in a sweep. All runs start, one after another up to their first step; then
they take turns: 4 steps of the first, 4 of the second and so on, there and back, while the ranks
of the others sleep between two of their steps and go on sending heartbeats. So noise hits all
alike. Each trains as it would alone, with the threads that it would have alone; waiting for a turn
is in no step's time. All must fit into the memory side by side.

Printed, and written to OUT/ratios.json: seconds of a turn / those of the first run's in the same
round, the median over the rounds, and its 95 % interval: that of the sign test, which assumes
nothing of how the noise is distributed: the l-th smallest to the l-th largest of n ratios, with
the largest l for which P(Binomial(n, 1/2) < l) <= 2.5 %. It needs 6 rounds. The first round
(warm-up) and the first step of every turn (cold caches) do not count.

Not for one-way jobs (their producers run ahead), nor for strategies that average between some
steps: compare samples_per_s there. The median says nothing of what only few steps do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

from xcloud.base.settings import settings
from xcloud.pipeline.hook import Hook, StepReport
from xcloud.record.events import update_s

ADDRESS = "XCLOUD_TURNS"  # environment variable: the server's socket
STEPS_PER_TURN = 4  # the first is not counted: caches are cold and threads asleep
MIN_ROUNDS = 6  # with fewer there is no interval of 95 %
HOOK = "+hooks.turns._target_=benchmarks.in_turns.Turns"
_LOOK_S = 0.1  # how often to ask whether a run has ended

Rounds = Mapping[int, float]  # seconds of a run's turn, by the number of the round


@settings("hooks.turns")
class Turns:
    """The settings of a run among others: a hook of every rank (job.hooks)."""

    def join(self, context: Any) -> InterleavedClient:
        who = {
            "run": str(context.run_dir.resolve()),
            "rank": context.rank,
            "num_ranks": context.job.cluster.num_ranks,
        }
        return InterleavedClient(Client(os.environ[ADDRESS], "AF_UNIX"), who)


class InterleavedClient(Hook):
    """A rank that waits sends a message of JSON, with the times of the turn that it has made if
    there is one; any answer is its next turn. Once the other end has closed, no rank waits."""

    def __init__(self, connection: Connection, who: dict[str, object]) -> None:
        self._connection, self._who = connection, who
        self._is_over = self._has_begun = False
        self._made: list[tuple[float, float]] = []  # in this turn

    def before_update(self, step: int) -> None:
        if not self._is_over and (not self._has_begun or len(self._made) == STEPS_PER_TURN):
            message = json.dumps({**self._who, "made": self._made}).encode()
            self._has_begun, self._made, self._is_over = True, [], True
            with contextlib.suppress(ConnectionError, EOFError):
                self._connection.send_bytes(message)
                self._connection.recv_bytes()
                self._is_over = False

    def after_update(self, step: int, report: StepReport) -> None:
        self.note(time.monotonic(), report.step_s)

    def note(self, ended_s: float, step_s: float) -> None:
        self._made.append((ended_s, step_s))

    def finish(self) -> None:
        self.before_update(0)

    def close(self, is_finished: bool) -> None:
        self._connection.close()


class InterleavingServer:
    """`with InterleavingServer() as server:`; ranks find it at `address`. When it closes, no rank
    waits any more.

    has_ended, below: of the run. Ranks of a run may go and others come in their place.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="xcloud-")
        self.address = str(Path(self._folder.name, "turns"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(128)
        self._messages: dict[Connection, dict[str, Any]] = {}  # the last one of each rank
        self._waiting: set[Connection] = set()

    def __enter__(self) -> InterleavingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._messages:
            rank.close()
        self._messages.clear()
        self._socket.close()
        self._folder.cleanup()

    def await_ready(self, run_dir: Path, has_ended: Callable[[], bool]) -> None:
        """Return when all ranks of the run wait for a turn, or it has ended."""
        while not has_ended() and not self._ready(run_dir):
            for one in wait([self._socket, *self._messages], _LOOK_S):
                if isinstance(one, Connection):
                    self._receive(one)
                else:
                    self._messages[Connection(self._socket.accept()[0].detach())] = {}

    def turn(self, run_dir: Path, has_ended: Callable[[], bool]) -> float | None:
        """Let the run make its steps. Returns the seconds of all but the first, as a run counts
        them; None if it has ended instead, or its ranks were started again."""
        self.await_ready(run_dir, has_ended)
        began = self._ready(run_dir)
        self._waiting -= began
        for rank in began:
            try:
                rank.send_bytes(b"turn")
            except OSError:
                self._drop(rank)
        self.await_ready(run_dir, has_ended)
        if not began or self._ready(run_dir) != began:
            return None
        by_step = list(zip(*(self._messages[rank]["made"] for rank in began), strict=True))
        return sum(map(update_s, by_step[1:]), 0.0)

    def _ready(self, run_dir: Path) -> set[Connection]:
        """The run's ranks if all are there and wait, else none."""
        run = str(run_dir.resolve())
        ranks = {rank: m for rank, m in self._messages.items() if m.get("run") == run}
        num_ranks = next((message["num_ranks"] for message in ranks.values()), 0)
        is_whole = {message["rank"] for message in ranks.values()} == {*range(num_ranks)}
        return {*ranks} if is_whole and ranks.keys() <= self._waiting else set()

    def _receive(self, rank: Connection) -> None:
        try:
            self._messages[rank] = json.loads(rank.recv_bytes())
            self._waiting.add(rank)
        except (EOFError, OSError):
            self._drop(rank)

    def _drop(self, rank: Connection) -> None:
        del self._messages[rank]
        self._waiting.discard(rank)
        rank.close()


@dataclass(frozen=True)
class StepRatio:
    """low, high: of the 95 % interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, own: Rounds, reference: Rounds) -> StepRatio | None:
        """None with fewer than MIN_ROUNDS rounds in common."""
        common = own.keys() & reference.keys()
        ratios = sorted(own[number] / reference[number] for number in common)
        if len(ratios) < MIN_ROUNDS:
            return None
        below, outer = 0, 0  # P(Binomial < outer) * 2**n
        while (below := below + math.comb(len(ratios), outer)) <= 0.025 * 2 ** len(ratios):
            outer += 1
        return cls(statistics.median(ratios), ratios[outer - 1], ratios[-outer], len(ratios))


def combinations(words: Sequence[str]) -> dict[str, list[str]]:
    """The words of each run, by those in which the runs differ."""
    options = [
        [f"{key}={one}" for one in values.split(",")] if values[:1] not in "[{'\"" else [word]
        for word in words
        for key, _, values in [word.partition("=")]
    ]
    runs = [list(run) for run in itertools.product(*options)]
    return {" ".join(set(run) - set.intersection(*map(set, runs))) or "run": run for run in runs}


def timed(runs: Mapping[str, Sequence[str]], out: Path) -> dict[str, dict[int, float]]:
    """Seconds of each run's turns, by round; its folder is OUT/NUMBER. Raises RuntimeError if one
    of them fails."""
    out.mkdir(parents=True, exist_ok=True)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    rounds: dict[str, dict[int, float]] = {name: {} for name in runs}
    folders = {name: out / str(number) for number, name in enumerate(runs)}
    has_ended = {name: (lambda n=name: processes[n].poll() is not None) for name in runs}
    with InterleavingServer() as server:
        try:
            for name, words in runs.items():
                command = [sys.executable, "run.py", *words, HOOK, "tracker=none"]
                with open(out / f"{folders[name].name}.log", "wb") as log:
                    processes[name] = subprocess.Popen(
                        [*command, f"hydra.run.dir={folders[name]}"],
                        stdout=log, stderr=subprocess.STDOUT,
                        env={**os.environ, ADDRESS: server.address, "PYTHONPATH": os.getcwd()},
                    )  # fmt: skip
                server.await_ready(folders[name], has_ended[name])
            for number in itertools.count():
                left = [name for name in runs if not has_ended[name]()]
                if not left:
                    break
                for name in left[:: -1 if number % 2 else 1]:  # a steady drift favours none
                    seconds = server.turn(folders[name], has_ended[name])
                    if seconds is not None and number > 0:  # the first is the warm-up
                        rounds[name][number] = seconds
        finally:
            server.close()
            for process in processes.values():
                if process.poll() is None:
                    process.terminate()
            codes = {name: process.wait() for name, process in processes.items()}
    if failed := [name for name, code in codes.items() if code]:
        raise RuntimeError(f"{', '.join(failed)}: see {out}/*.log")
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="+", help="of run.py; values with commas are combined")
    parser.add_argument("--out", type=Path, default=Path("outputs", "in_turns"))
    given = parser.parse_args()
    runs = combinations(given.words)
    rounds = timed(runs, given.out.absolute() / time.strftime("%Y-%m-%d_%H-%M-%S"))
    first = next(iter(runs))
    found = {name: StepRatio.of(own, rounds[first]) for name, own in rounds.items()}
    for name, ratio in found.items():
        shown = "fewer than 6 rounds" if ratio is None else (
            f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), {ratio.rounds} rounds"
        )  # fmt: skip
        print(f"{name:<40} {shown}")
    text = {name: asdict(ratio) if ratio else None for name, ratio in found.items()}
    (given.out / "ratios.json").write_text(json.dumps({"to": first, "ratios": text}, indent=1))


if __name__ == "__main__":
    main()

"""Faults for benchmarks/chaos.py. Each is a function that disturbs a run and returns what repairs
it before the run is gone on with, or None. It raises NotInjected if there is nothing to disturb.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos_runs import Machines, Run, pid_of_monitor
from benchmarks.namespaces import cut, join
from xcloud.record.checkpoint_files import CheckpointFolder

Repair = Callable[[], None] | None


class NotInjected(Exception):
    """There was no process, file or disk to disturb."""


@dataclass
class Target:
    """What a fault may disturb. lost_after_s: cluster.liveness of the run. store: MLflow's folder,
    if the run is tracked. is_last: no fault comes after this one. undo: what ends faults that
    last, and when; length_s: of the last one of these."""

    run: Run
    rank: int
    dice: random.Random
    lost_after_s: float
    store: Path | None = None
    is_last: bool = False
    length_s: float = 0.0
    undo: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.run.first

    def pid(self) -> int:
        pid = self.run.pid_of_rank(self.rank)
        if pid is None:
            raise NotInjected(f"rank {self.rank} has no process")
        return pid

    def later(self, seconds: float, undo: Callable[[], None]) -> None:
        """What the fault does lasts for so long."""
        self.length_s = seconds
        self.undo.append((time.monotonic() + seconds, undo))

    def undo_due(self, until_s: float) -> None:
        due = [(at_s, undo) for at_s, undo in self.undo if at_s <= until_s]
        self.undo = [one for one in self.undo if one not in due]
        for _, undo in due:
            with contextlib.suppress(NotInjected):  # it has ended meanwhile
                undo()


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise NotInjected(f"process {pid} has just ended") from None


def kill_rank(target: Target) -> None:
    _send(target.pid(), signal.SIGKILL)


def kill_all_ranks(target: Target) -> None:
    """A machine without power, but for the launcher."""
    for rank in range(target.run.num_ranks):
        if (pid := target.run.pid_of_rank(rank)) is not None:
            with contextlib.suppress(NotInjected):
                _send(pid, signal.SIGKILL)


def kill_launcher(target: Target) -> None:
    if target.dice.random() < 0.3:  # with a rank that cannot handle a signal
        _send(target.pid(), signal.SIGSTOP)
    target.run.send(signal.SIGKILL)


def pause_rank(target: Target) -> None:
    _pause(target, target.pid(), 0.3 + 0.7 * (target.lost_after_s - 2) * target.dice.random())


def stop_rank(target: Target) -> None:
    """For good, or, where nobody ends it, for longer than lost_after_s."""
    if isinstance(target.run, Machines):
        _pause(target, target.pid(), target.lost_after_s * (1.5 + target.dice.random()))
    else:
        _send(target.pid(), signal.SIGSTOP)


def pause_launcher(target: Target) -> None:
    (process,) = target.run.processes
    _pause(target, process.pid, 3 * target.dice.random())


def _pause(target: Target, pid: int, seconds: float) -> None:
    _send(pid, signal.SIGSTOP)
    target.later(seconds, lambda: _send(pid, signal.SIGCONT))


def term(target: Target) -> None:
    target.run.send(signal.SIGTERM)


def usr1(target: Target) -> None:
    target.run.send(signal.SIGUSR1)


def term_twice(target: Target) -> None:
    target.run.send(signal.SIGTERM)
    target.later(0.3 * target.dice.random(), lambda: target.run.send(signal.SIGTERM))


def term_rank(target: Target) -> None:
    """The notice of one machine alone."""
    _send(target.pid(), signal.SIGTERM)


def _damage(path: Path, truncates: bool, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if truncates:
        del data[dice.randrange(len(data)) :]
    else:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _damaged(how_many: str, truncates: bool) -> Callable[[Target], Repair]:
    def fault(target: Target) -> Repair:
        if not target.run.agreed_steps():
            raise NotInjected("there is no checkpoint yet")
        target.run.send(signal.SIGKILL)

        def damage() -> None:
            for step in target.run.agreed_steps()[: None if how_many == "all" else 1]:
                folders = [CheckpointFolder(folder) for folder in target.run.folders]
                parts = [part for f in folders for part in f.step_dir(step).glob("rank-*")]
                _damage(target.dice.choice(sorted(parts)), truncates, target.dice)

        return damage

    return fault


def fill_disk(target: Target) -> Repair:
    """For a while; the last fault of a run stays until the run has ended."""
    filler = target.run_dir / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    if target.is_last and target.dice.random() < 0.5:
        return lambda: filler.unlink(missing_ok=True)
    target.later(0.2 + 3 * target.dice.random(), lambda: filler.unlink(missing_ok=True))
    return None


def out_of_memory(target: Target) -> None:
    """No more than it has, and soon it needs more."""
    pid = target.pid()
    try:
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))
        (target.run_dir.parent / f"memory.{pid}").write_text("")
    except ProcessLookupError:
        raise NotInjected("the rank has just ended") from None


def kill_monitor(target: Target) -> None:
    pid = pid_of_monitor(target.run)
    if pid is None:
        raise NotInjected("there is no monitor")
    _send(pid, signal.SIGKILL)


def lose_mlflow(target: Target) -> None:
    """Its folder becomes a file; the next such fault brings it back."""
    store = target.store
    assert store is not None
    away = store.with_suffix(".away")
    try:
        if away.exists():
            store.unlink()
            away.rename(store)
        else:
            store.rename(away)
            store.write_text("")
    except OSError as error:
        raise NotInjected(f"the store is not there yet: {error}") from error


def nan(target: Target) -> None:
    (target.run_dir.parent / "nan").write_text("")


def cut_briefly(target: Target) -> None:
    """TCP tries again at doubling intervals, so silence lasts up to twice as long as the cut."""
    _cut(target, (target.lost_after_s / 2 - 0.5) * target.dice.random())


def cut_long(target: Target) -> None:
    """Rarely for up to a minute."""
    max_s = 60.0 if target.dice.random() < 0.1 else 3 * target.lost_after_s
    min_s = target.lost_after_s + 1.5
    _cut(target, min_s + (max_s - min_s) * target.dice.random())


def _cut(target: Target, seconds: float) -> None:
    hosts = target.run.hosts if isinstance(target.run, Machines) else ()
    if target.undo:
        raise NotInjected("the line is still cut")
    cut(hosts)
    target.later(seconds, lambda: join(hosts))


LAUNCHED: dict[str, Callable[[Target], Repair]] = {
    "kill rank": kill_rank, "kill all ranks": kill_all_ranks, "kill launcher": kill_launcher,
    "pause rank": pause_rank, "stop rank": stop_rank, "pause launcher": pause_launcher,
    "SIGTERM": term, "SIGUSR1": usr1, "SIGTERM twice": term_twice,
    "truncated checkpoint": _damaged("newest", True),
    "flipped bit in a checkpoint": _damaged("newest", False),
    "all checkpoints damaged": _damaged("all", False), "disk full": fill_disk,
    "out of memory": out_of_memory, "MLflow gone or back": lose_mlflow, "NaN": nan,
}  # fmt: skip
TORCHRUN: dict[str, Callable[[Target], Repair]] = {
    "kill rank": kill_rank, "kill monitor": kill_monitor, "kill torchrun": kill_launcher,
    "stop rank": stop_rank, "SIGTERM": term,
}  # fmt: skip
MACHINES: dict[str, Callable[[Target], Repair]] = {
    "line cut, briefly": cut_briefly, "line cut for longer than lost_after_s": cut_long,
    "kill rank": kill_rank, "kill monitor": kill_monitor, "pause rank": pause_rank,
    "stop rank": stop_rank, "SIGTERM of one machine": term_rank,
}  # fmt: skip
FAULTS = {"launcher": LAUNCHED, "torchrun": TORCHRUN, "machines": MACHINES}
WEIGHTS = {  # how often each kind is drawn; others: once
    "kill rank": 5, "kill launcher": 3, "pause rank": 2, "SIGTERM": 2, "truncated checkpoint": 2,
    "flipped bit in a checkpoint": 2, "disk full": 2, "out of memory": 2, "line cut, briefly": 5,
    "line cut for longer than lost_after_s": 2,
}  # fmt: skip

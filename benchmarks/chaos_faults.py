"""Faults for benchmarks/chaos.py. Each is a function that disturbs a run and returns what repairs
it before the run is gone on with, or None.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.chaos_runs import Forked, pid_of_monitor, pid_of_rank
from xcloud.record.checkpoints import CheckpointFolder


def _send(pid: int | None, number: int) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_rank(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    _send(pid_of_rank(run_dir, rank), signal.SIGKILL)


def kill_again(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    for _again in range(2):
        _send(pid_of_rank(run_dir, rank), signal.SIGKILL)
        until_s = time.monotonic() + 2 + 6 * dice.random()
        while time.monotonic() < until_s and launcher.poll() is None:
            time.sleep(0.05)


def kill_launcher(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    if dice.random() < 0.3:  # with a rank that cannot handle a signal
        _send(pid_of_rank(run_dir, rank), signal.SIGSTOP)
    launcher.kill()
    launcher.wait()


def pause_rank(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    pid = pid_of_rank(run_dir, rank)
    _send(pid, signal.SIGSTOP)
    time.sleep(0.5 + 2.5 * dice.random())
    _send(pid, signal.SIGCONT)


def stop_rank(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    _send(pid_of_rank(run_dir, rank), signal.SIGSTOP)


def pause_launcher(
    run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any
) -> None:
    launcher.send_signal(signal.SIGSTOP)
    time.sleep(3 * dice.random())
    launcher.send_signal(signal.SIGCONT)


def term(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    launcher.send_signal(signal.SIGTERM)


def usr1(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    launcher.send_signal(signal.SIGUSR1)


def term_twice(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.3 * dice.random())
    launcher.send_signal(signal.SIGTERM)


def _damage(path: Path, truncates: bool, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if truncates:
        del data[dice.randrange(len(data)) :]
    else:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _damaged(how_many: str, truncates: bool) -> Callable[..., Callable[[], None]]:
    def fault(
        run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any
    ) -> Callable[[], None]:
        launcher.kill()
        launcher.wait()

        def damage() -> None:
            folder = CheckpointFolder(run_dir)
            for step in folder.agreed_steps()[: None if how_many == "all" else 1]:
                parts = sorted(folder.step_dir(step).glob("rank-*"))
                _damage(dice.choice(parts), truncates, dice)

        return damage

    return fault


def fill_disk(
    run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any
) -> Callable[[], None]:
    filler = run_dir / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    if dice.random() < 0.5:  # it lasts for a while only
        time.sleep(0.5)
        filler.unlink()
    return lambda: filler.unlink(missing_ok=True)


def out_of_memory(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    pid = pid_of_rank(run_dir, rank)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))


def kill_monitor(run_dir: Path, launcher: Forked, rank: int, dice: random.Random, _: Any) -> None:
    _send(pid_of_monitor(run_dir), signal.SIGKILL)


def lose_mlflow(
    run_dir: Path, launcher: Forked, rank: int, dice: random.Random, store: Path
) -> None:
    """Its folder becomes a file."""
    with contextlib.suppress(OSError):
        store.rename(store.with_suffix(".away"))
        store.write_text("")


FAULTS: dict[str, Callable[..., Callable[[], None] | None]] = {
    "kill rank": kill_rank, "kill launcher": kill_launcher, "pause rank": pause_rank,
    "stop rank": stop_rank, "pause launcher": pause_launcher, "SIGTERM": term, "SIGUSR1": usr1,
    "SIGTERM twice": term_twice, "truncated checkpoint": _damaged("newest", True),
    "flipped bit in a checkpoint": _damaged("newest", False),
    "all checkpoints damaged": _damaged("all", False), "disk full": fill_disk,
    "out of memory": out_of_memory, "kill and kill again": kill_again, "MLflow gone": lose_mlflow,
    "kill monitor": kill_monitor,
}  # fmt: skip

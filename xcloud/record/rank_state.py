"""What a rank does at the moment, in a small file of its run folder: rankN.state.json. Written by
a thread of the rank, read by `python -m xcloud status`. A rank that is stopped or dead leaves an
old one, so the age of the file is that of its last heartbeat. The launcher has one too, as long
as it runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xcloud.cluster.liveness import PeerLife
from xcloud.record.segments import replace_text

WRITE_EVERY_S = 1.0
LAUNCHER_FILE = "launcher.state.json"
SAMPLES_FILE = "samples.txt"
SCORES_FILE = "scores.jsonl"  # beside summary.json; of the samples of the test set


def ready_file(run_dir: Path, rank: int) -> Path:
    """Created by a dispensable rank; from then on the run survives its loss."""
    return run_dir / f"rank{rank}.ready"


def error_file(run_dir: Path, rank: int) -> Path:
    """Written by launch/rank_process.py in a rank that fails."""
    return run_dir / f"rank{rank}.error.json"


def failure_of(run_dir: Path, rank: int) -> dict[str, Any] | None:
    """The error report of a rank that failed on this machine: message, peer_lost, expected."""
    try:
        return dict(json.loads(error_file(run_dir, rank).read_text()))
    except (OSError, ValueError):
        return None


def state_file(run_dir: Path, rank: int) -> Path:
    return run_dir / f"rank{rank}.state.json"


def note_attempt(run_dir: Path, restarts_left: int) -> None:
    """By the launcher, which begins to start all ranks."""
    with contextlib.suppress(OSError):  # a full disk must not end a run
        facts = {
            "pid": os.getpid(), "host": socket.gethostname(), "started": time.time(),
            "restarts_left": restarts_left,
        }  # fmt: skip
        replace_text(run_dir / LAUNCHER_FILE, json.dumps(facts))


def forget_launcher(run_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (run_dir / LAUNCHER_FILE).unlink(missing_ok=True)


class RankState:
    """`lives` is set once the rank has links: their ends note there what they wait for.

    phase: what the rank does, or how it has ended. step: of its last finished update. torchrun:
    it has started the rank. says: each phase on standard output.
    """

    def __init__(
        self, run_dir: Path, rank: int, torchrun: bool = False, says: bool = False
    ) -> None:
        self.lives: Mapping[int, PeerLife] = {}
        self._path, self._rank, self.says = state_file(run_dir, rank), rank, says
        self._facts: dict[str, Any] = {"torchrun": torchrun}
        self.may_leave = False  # the run can do without this rank, which may come back
        self.enter("joining the others")
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="state", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        self._facts |= {"phase": phase, "phase_since": time.time()}
        if self.says:
            print(f"rank {self._rank}: {phase}", flush=True)

    def hear(self, event: str, fields: Mapping[str, Any]) -> None:
        """Each event that the rank reports."""
        if event == "phase":
            self.enter(str(fields["name"]))
        elif event in ("step", "fed") and "step" in fields:
            self._facts |= {"step": fields["step"], "step_at": time.time()}

    def close(self, ending: str) -> None:
        """ending: how the rank has ended."""
        self.enter(ending)
        self._closing.set()
        self._thread.join(WRITE_EVERY_S)

    def _work(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk must not end a rank
                self._write()
            if self._closing.is_set():
                return
            self._closing.wait(WRITE_EVERY_S)

    def _write(self) -> None:
        waits = [
            {"rank": peer, "message": str(key), "since": time.time() - seconds}
            for peer, life in list(self.lives.items())
            if (awaited := life.awaited) is not None
            for key, seconds in [awaited]
        ]
        heard = {peer: round(life.silent_s, 1) for peer, life in list(self.lives.items())}
        facts = {
            "rank": self._rank, "pid": os.getpid(), "host": socket.gethostname(),
            "written": time.time(), "ended": self._closing.is_set(), **self._facts,
            "may_leave": self.may_leave, "waits_for": waits,
            "silent_s": {peer: s for peer, s in heard.items() if s < float("inf")},
        }  # fmt: skip
        replace_text(self._path, json.dumps(facts))

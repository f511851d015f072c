"""Files of a run's folder: their names; which checkpoints there are; the bytes of its event log.
No events here."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import socket
import time
import zlib
from pathlib import Path
from typing import Any, Literal

from xcloud.base.bounded import parsed_json

EVENTS_FILE = "events.jsonl"
LAUNCHER_FILE = "launcher.state.json"
SAMPLES_FILE = "samples.txt"
SCORES_FILE = "scores.jsonl"  # beside summary.json; of the samples of the test set
TRACKABLE_FILE = "may_be_tracked.json"  # whether a tracker may have these two, by name
CHECKPOINTS_DIR = "checkpoints"
TOKENIZERS_DIR = "tokenizers"  # that the run has trained, of the fields that ranks here see
AGREED_FILE = "AGREED"  # in the folder of a checkpoint
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)  # by reading a compressed log
CHUNK_BYTES = 8 << 20


def note_trackable(run_dir: Path, **may: bool) -> None:
    """Write which files of samples a tracker may have. Called before they are written, by the rank
    that writes them: it alone knows what is in them."""
    # Called by two writers, each with its own names.
    known = read_json(run_dir / TRACKABLE_FILE)
    replace_text(run_dir / TRACKABLE_FILE, text=json.dumps({**known, **may}))


def files_of_samples(run_dir: Path) -> list[str]:
    """Return the files of single samples that a tracker may have: those that their writer has
    allowed it."""
    allowed = read_json(run_dir / TRACKABLE_FILE)
    return [name for name in (SCORES_FILE, SAMPLES_FILE) if allowed.get(name) is True]


RankFile = Literal["ready", "state.json", "error.json"]


def rank_file(run_dir: Path, rank: int, what: RankFile) -> Path:
    """Return a file that a rank writes for its launcher: what it does now, why it failed, or that
    the run survives its loss from now on ("ready", of a rank that others can do without)."""
    return run_dir / f"rank{rank}.{what}"


def failure_of(run_dir: Path, rank: int) -> dict[str, Any] | None:
    """Return the error report of a rank that failed on this machine: kind, message, peer_lost,
    expected, may_quote. None if there is none."""
    return read_json(rank_file(run_dir, rank, "error.json")) or None


def may_quote_data(run_dir: Path) -> bool:
    """Return whether a rank has failed here with a message that may quote its data."""
    failures = [read_json(path) for path in run_dir.glob("rank*.error.json")]
    return any(failure.get("may_quote", True) for failure in failures)


def note_attempt(run_dir: Path, restarts_left: int) -> None:
    """Note, for the launcher, that it begins to start all ranks."""
    # A full disk must not end a run: whoever looks at the folder then knows nothing of its
    # launcher.
    with contextlib.suppress(OSError):  # a full disk must not end a run
        facts = {
            "pid": os.getpid(), "host": socket.gethostname(), "started": time.time(),
            "restarts_left": restarts_left,
        }  # fmt: skip
        replace_text(run_dir / LAUNCHER_FILE, text=json.dumps(facts))


def forget_launcher(run_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (run_dir / LAUNCHER_FILE).unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that one of these files holds; empty if it is missing or holds none."""
    # Whoever reads may look while a writer is at work, or long after the run.
    try:
        with open(path, encoding="utf-8", opener=no_link) as file:
            found = parsed_json(file.read())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def no_link(path: str, flags: int) -> int:
    """Open a file as `open` does, whose opener this is, but never through a symbolic link: in a
    folder from elsewhere it would lead to a file that is none of the run's."""
    # The mode is what `open` itself gives, less the umask.
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def has_events(run_dir: Path) -> bool:
    return any(run_dir.glob("events*.jsonl*"))


class CheckpointSteps:
    """The steps of which a run has checkpoints on this machine."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / CHECKPOINTS_DIR

    def step_dir(self, step: int) -> Path:
        return self.path / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps that have any file, newest first."""
        return sorted(numbers(self.path, pattern=r"step-(\d+)"), reverse=True)

    def is_agreed(self, step: int) -> bool:
        return (self.step_dir(step) / AGREED_FILE).exists()

    def agreed_steps(self) -> list[int]:
        """Return the steps that every rank of the run has completed, newest first."""
        return [step for step in self.steps() if self.is_agreed(step)]


def numbers(folder: Path, pattern: str) -> list[int]:
    """Return the numbers in the names of what is in a folder, which may not exist."""
    try:
        # A folder that does not exist, or goes while ranks delete checkpoints.
        names = os.listdir(folder)
    except OSError:
        return []
    return [int(match[1]) for name in names if (match := re.fullmatch(pattern, name))]


def read(log: Path, offset: int) -> bytes:
    """Return at most CHUNK_BYTES of a file of a log; empty if there is none. Raises one of
    DAMAGED."""
    try:
        with open(log, "rb", opener=no_link) as file:
            # A packed log is read from its beginning up to the offset each time.
            opened = gzip.GzipFile(fileobj=file) if log.suffix == ".gz" else file
            opened.seek(offset)
            return opened.read(CHUNK_BYTES)
    except FileNotFoundError:
        return b""


def replace_text(path: Path, text: str) -> None:
    # A reader sees the old text or the new one, never half of it.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)

"""Why a run has failed: what a rank leaves of its failure, and which of several is the cause. Also
which clouds, of a run that can do without them, may restart, and what no run can begin with."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError, DataError, FrameError, LinkError, XcloudError
from xcloud.base.terminal import say
from xcloud.net.rendezvous import Ending
from xcloud.record.files import failure_of, rank_file

START_EACH_CLOUD = (
    "each owner starts the ranks of their own cloud: python -m xcloud join FILE --cloud NAME "
    "(docs/several-machines.md)"
)
EXIT_FAILED = 1
EXIT_PEER_LOST = 3  # the cause is elsewhere: another rank went away first
EXIT_COMES_AGAIN = 78  # EX_CONFIG of sysexits.h: an error that xcloud raises on purpose
EXIT_START_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: asked to end, and can go on where it was
ENDINGS = "XCLOUD_ENDINGS"  # folder in which the ranks of a machine leave how they have ended
# Who loses a peer often ends before the cause itself has.
_SETTLE_S = 1.5  # how long after the first failure to look for an earlier cause


def check_gpu(cloud: str) -> None:
    """Raise ConfigError unless this machine has the GPU that a cloud asks for."""
    import torch  # not for a launcher that only asks why a run has failed

    if not torch.cuda.is_available():
        raise ConfigError(
            f"cluster.clouds.{cloud}.device is cuda, but torch finds no GPU on this machine; auto "
            "takes one where there is one"
        )


def write_failure(run_dir: Path, rank: int, error: BaseException) -> int:
    """Write what went wrong here to a file; return the exit code of the rank.

    The exit code alone says whether a restart can help, because on a full disk there is no file.
    If another thread has written the first cause, that file stays and the code is that of its
    cause.
    """
    text = str(error)
    # Who refuses a frame has lost nobody: the refusal is the cause.
    # A frame that is refused comes from a peer that lives.
    is_lost = isinstance(error, LinkError) and not isinstance(error, FrameError)
    # A collective inside a cloud breaks with a bare RuntimeError when a peer goes away.
    peer_lost = is_lost or (
        isinstance(error, RuntimeError)
        and any(sign in text for sign in ("Connection closed by peer", "Connection reset by peer"))
    )
    expected = isinstance(error, XcloudError)
    message = (text if expected else f"{type(error).__name__}: {text}").strip()
    lines = traceback.format_exception(error)
    failure: dict[str, Any] = {
        "kind": type(error).__name__,
        "message": message,
        "peer_lost": peer_lost,
        "expected": expected,
    }
    # An error of a corpus may quote it, and what nobody expected may say anything.
    failure["may_quote"] = isinstance(error, DataError) or not expected
    if first := failure_of(run_dir, rank):
        failure = first
    else:
        # On a full disk the log is all that is left, or not even that: the exit code must not
        # suffer.
        with contextlib.suppress(OSError):
            told = json.dumps(failure | {"traceback": lines})
            rank_file(run_dir, rank, "error.json").write_text(told)
        with contextlib.suppress(OSError):
            shown = f"xcloud: rank {rank}: {message}\n" if expected else "".join(lines)
            say(shown, error=True, end="")
    if failure["peer_lost"]:
        return EXIT_PEER_LOST
    return EXIT_COMES_AGAIN if failure["expected"] else EXIT_FAILED


def failed(error: BaseException) -> str:
    """Return how a rank has ended, for python -m xcloud status."""
    return f"has failed: {str(error)[:300]}"


def leave_ending(rank: int, ending: Ending) -> None:
    """Tell the torchrun of this machine, if it is ours, how a rank has ended before its time."""
    if folder := os.environ.get(ENDINGS):
        with contextlib.suppress(OSError):
            (Path(folder) / str(rank)).write_text(ending.value)


def own_failures(codes: Mapping[int, int]) -> list[int]:
    """Return the ranks whose failure is not just the loss of another rank, by exit codes."""
    return [rank for rank, code in codes.items() if code != EXIT_PEER_LOST]


def first_cause(
    run_dir: Path,
    clouds: Mapping[int, str],
    failed: Callable[[], Mapping[int, int]],
    suspended: Mapping[int, float],
) -> str:
    """Return why a run has failed, in words: the first failure with a cause of its own.

    A rank that lost its peer fails too, often before the peer's exit is noticed, so this waits a
    moment for ranks that still run.

    clouds: the cloud of each rank.
    failed: returns the present exit codes by rank.
    suspended: seconds of suspension after which a rank was ended, by rank.
    """
    settled_at_s = time.monotonic() + _SETTLE_S
    codes = failed()
    # Until somebody has a reason of its own, or all have ended.
    while time.monotonic() < settled_at_s and not own_failures(codes) and len(codes) < len(clouds):
        time.sleep(0.05)
        codes = failed()
    # A rank with an error of its own, else the first that ended.
    rank = (own_failures(codes) or [*codes])[0]
    code = codes[rank]
    failure = failure_of(run_dir, rank)
    log = run_dir / f"rank{rank}.log"
    if failure is not None:
        what = failure["message"]
    # It can't have written anything.
    elif rank in suspended:
        what = f"was stopped (SIGSTOP) for more than {suspended[rank]:g} s and is given up"
    elif code < 0:
        names = {known.value: known.name for known in signal.Signals}
        what = f"was ended by signal {-code} ({names.get(-code, 'real-time')})"
    else:
        lines = log.read_text(errors="replace").strip().splitlines() or [
            "its log is empty; is the disk full?"
        ]
        what = f"ended with exit code {code}: {lines[-1]}"
    return f"rank {rank} of cloud {clouds[rank]!r}: {what} (log: {log})"


def lost_clouds(run_dir: Path, clouds: Sequence[str], codes: Mapping[int, int]) -> set[str]:
    """Return the clouds that have lost a rank, by a signal or with another rank, and may begin
    again: none with an error of its own, and none once nothing is left to come back to.

    codes: exit codes of the ranks that have ended before their time.
    """
    lost = {clouds[rank] for rank in codes}
    with contextlib.suppress(OSError, ValueError, KeyError):  # rank 0 has not said what it does
        state = rank_file(run_dir, 0, "state.json")
        phase = parsed_json(state.read_text())["phase"] if lost else ""
        # At the end there is nothing left that a cloud could come back to.
        if phase == "evaluation":
            return set()
    own_errors = (EXIT_FAILED, EXIT_COMES_AGAIN)
    return lost - {clouds[rank] for rank, code in codes.items() if code in own_errors}

"""Start the process of a sweep's point, from the sweep or from a job of a cluster. A job stays
beside its point to the end, so this module does not import torch, which takes seconds and 250 MB.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xcloud.base.project import module_paths, python_command

OUTPUT_FILE = "run.log"


def start_point(
    run_dir: Path, threads: str, output: int | IO[bytes] = subprocess.PIPE
) -> subprocess.Popen[str]:
    command = python_command("xcloud.study.runner", str(run_dir))
    own = {**os.environ, **module_paths(), "OMP_NUM_THREADS": threads}
    own["PYTHONIOENCODING"] = "utf-8"
    own.pop("FORCE_COLOR", None)  # a notebook sets it; a log takes no colors
    # In a session of its own: Ctrl+C reaches the sweep alone.
    return subprocess.Popen(
        [*command, "--parent", str(os.getpid())], stdin=subprocess.DEVNULL,
        stdout=output, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        env=own, start_new_session=True,
    )  # fmt: skip


@dataclass
class PointJob:
    """A job: runs the point of a folder in a process of its own. submitit calls it on the node."""

    run_dir: str
    threads: str
    _process: subprocess.Popen[str] | None = None

    def __call__(self) -> int:
        """Return the exit code of the run."""
        with open(Path(self.run_dir, OUTPUT_FILE), "ab", buffering=0) as log:
            self._process = start_point(Path(self.run_dir), threads=self.threads, output=log)
            return self._process.wait()

    def checkpoint(self) -> Any:
        """Save the step under way. submitit asks this before the job is queued again."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            self._process.terminate()
            # Popen.wait would wait for ever: this runs in a signal's handler, while the same
            # thread is in __call__'s wait and has its lock. WNOWAIT leaves the exit code to it.
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(PointJob(self.run_dir, self.threads))

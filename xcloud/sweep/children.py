"""Run points of a sweep in parallel, each as a process: python -m xcloud.sweep.children RUN_DIR

A point's output goes to output.log in its folder, and up to its closing table to the screen,
prefixed with the point's name.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from xcloud.base.errors import XcloudError
from xcloud.cluster.transport import num_cores
from xcloud.job.config import EXPERIMENT_FILE, read_config
from xcloud.record.summary import SUMMARY_FILE
from xcloud.sweep.points import Point

OUTPUT_FILE = "output.log"
END_WITHIN_S = 60.0  # a run ends its ranks, writes its summary and closes its MLflow run


class Children:
    """`run` blocks: call it from one thread per point. `end` ends all of them. parallel: points
    that compute at once."""

    def __init__(self, parallel: int, say: Callable[[str], None]) -> None:
        self.parallel, self._say = parallel, say
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, point: Point, run_dir: Path) -> str | None:
        """Run the point whose experiment file is in run_dir. Returns why it failed, or None."""
        num_ranks = point.experiment.cluster.num_processes
        threads = max(1, num_cores() // (num_ranks * self.parallel))
        command = [sys.executable, "-m", "xcloud.sweep.children", str(run_dir)]
        process = subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env={
                "OMP_NUM_THREADS": str(threads),
                **os.environ,
                "PYTHONIOENCODING": "utf-8",
            },
            start_new_session=True,  # Ctrl+C reaches the sweep alone
        )
        self._processes.append(process)
        last, is_whole = "", True
        assert process.stdout is not None
        with process.stdout, open(run_dir / OUTPUT_FILE, "wb", buffering=0) as log:
            for line in process.stdout:
                try:
                    log.write(line.encode())
                except OSError as error:  # a full disk ends no point
                    if is_whole:
                        self._say(f"[{point.name}] {OUTPUT_FILE} lacks lines: {error}")
                    is_whole = False
                last = line.strip() or last
                if line.strip() and not (run_dir / SUMMARY_FILE).exists():
                    self._say(f"[{point.name}] {line.rstrip()}")
        code = process.wait()
        if code == 0:
            return None
        return last.removeprefix("xcloud: ") or f"it ended with exit code {code}"

    def end(self) -> None:
        """Terminate all runs; kill those that do not end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a second Ctrl+C
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> int:
    """Run one point. Ctrl+C is handled by the sweep."""
    parser = argparse.ArgumentParser(prog="python -m xcloud.sweep.children", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process id of the sweep")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the sweep
        if os.getppid() != arguments.parent:
            return 1
    from xcloud.launch.local import run
    from xcloud.survive.resume import check_can_go_on

    try:
        file = arguments.run_dir / EXPERIMENT_FILE
        run(read_config(file), arguments.run_dir, resumes=check_can_go_on)  # a point may
    except XcloudError as error:
        print(f"xcloud: {error}", flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

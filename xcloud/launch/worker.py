"""One rank as a process: it joins the others, compares with them what is to run, plays its role
(rank/roles.py), and leaves its last words and its record of what it sent. Here its command line.

READ THIS FIRST. A run on one machine starts this module once per rank (launch.py):
    python -m xcloud worker RUN_DIR --rank R --parent PID
On several machines torchrun starts the same module in each cloud (docs/several-machines.md):
    python -m xcloud torchrun --nnodes 2 --node-rank 0 ... -m xcloud worker experiment.yaml
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from xcloud.job import config as configs
from xcloud.launch.processes import end_with_parent
from xcloud.launch.rank_process import RankProcess
from xcloud.launch.several_machines import TorchrunProcess


def main(words: Sequence[str] | None = None) -> None:
    """Ends the process itself."""
    parser = argparse.ArgumentParser(
        prog="python -m xcloud worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", type=Path, help="run folder or experiment file")
    parser.add_argument("--rank", type=int, help="set by the launcher; torchrun sets it itself")
    parser.add_argument("--parent", type=int, help="process to end with; set by the launcher")
    parser.add_argument(
        "--cloud", help="torchrun: refuse to start if this rank is in another cloud"
    )
    parser.add_argument("--run-dir", type=Path, help="where to write (default: beside the file)")
    arguments = parser.parse_args(words)
    if arguments.rank is None and "RANK" not in os.environ:
        parser.error("start me with torchrun, or use run.py")
    if arguments.parent is not None:
        _tie_to_parent(arguments.parent)
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks would go on without it
        end_with_parent()
    file = arguments.experiment
    file = file / configs.EXPERIMENT_FILE if file.is_dir() else file
    run_dir = (arguments.run_dir or file.parent).resolve()
    if arguments.rank is not None:
        RankProcess(file, run_dir, arguments.rank).main()
    TorchrunProcess(file, run_dir, int(os.environ["RANK"]), arguments.cloud).main()


def _tie_to_parent(parent: int) -> None:
    """End with the parent, whatever ends it; leave Ctrl+C to the parent, which ends all ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    if sys.platform == "linux" and os.getppid() != parent:
        sys.exit("the parent is gone")

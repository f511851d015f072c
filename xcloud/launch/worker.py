"""`python -m xcloud worker`: the command that starts one rank."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from xcloud.job.config import EXPERIMENT_FILE
from xcloud.launch.joined_rank import join_rank
from xcloud.launch.rank_process import RankProcess, tie_to_parent
from xcloud.launch.several_machines import run_under_torchrun


def main(words: Sequence[str] | None = None) -> None:
    """Run one rank of a run, then end the process."""
    parser = argparse.ArgumentParser(prog="python -m xcloud worker", description=main.__doc__)
    parser.add_argument("experiment", type=Path, help="run folder or experiment file")
    parser.add_argument("--rank", type=int, help="set by the launcher; torchrun sets it itself")
    parser.add_argument("--parent", type=int, help="process to end with; set by the launcher")
    parser.add_argument("--attempt", type=int, help="set by python -m xcloud join")
    parser.add_argument("--listen", help="set by python -m xcloud join")
    parser.add_argument("--meet-at", help="set by python -m xcloud join")
    parser.add_argument("--cloud", help="refuse to start if this rank is in another cloud")
    parser.add_argument("--run-dir", type=Path, help="where to write; needed with a file")
    parser.add_argument(
        "--roll-back", action="store_true",
        help="delete agreed checkpoints that are later than the one all ranks resume from",
    )  # fmt: skip
    arguments = parser.parse_args(words)
    if arguments.parent is not None:
        tie_to_parent(arguments.parent)
    given: Path = arguments.experiment
    file = given / EXPERIMENT_FILE if given.is_dir() else given
    run_dir = (arguments.run_dir or file.parent).resolve()
    if arguments.attempt is not None:
        join_rank(
            file,
            run_dir,
            rank=arguments.rank,
            attempt=arguments.attempt,
            listen=arguments.listen,
            meet_at=arguments.meet_at,
            roll_back=arguments.roll_back,
        )
    if arguments.rank is not None:
        RankProcess(file, run_dir, rank=arguments.rank).main()
    if "RANK" not in os.environ:
        parser.error("start me with torchrun, or use run.py")
    if arguments.run_dir is None and not given.is_dir():
        parser.error(
            f"give --run-dir: the run is written there and may read there, and {file} may lie in "
            "any folder"
        )
    run_under_torchrun(file, run_dir, cloud=arguments.cloud, roll_back=arguments.roll_back)

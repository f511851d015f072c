"""The paper's formulas (1) to (3) beside the simulator and real steps.

    python -m experiments.formulas.study OUT [--rounds 3] [--stages 2 4 8]
        [--micro-batches 1 2 4 8 16 32]

A cloud for each stage, one rank in each, GPipe. Ranks sleep instead of computing (30 ms a
micro-batch forward, 60 ms backward), so that a busy machine does as well; messages, lines, frames
and the agreement of each update are real. Over a free line (1) is to hold; over one on which a
message takes 15 ms, (2'), as transfers overlap with computing. (2) is of transfers that block,
which no run does: it stands beside a simulator of such (benchmarks/paper_step.py). (3): bytes
between two clouds, counted on the links. Rows go to OUT/rows.jsonl. Columns
with _off: seconds or bytes over what the formula gives, less one.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.machine import run_quietly
from benchmarks.paper_step import UniformCosts, simulate
from benchmarks.sleeping_job import WARM_UP, Job
from benchmarks.sleeping_model import SAMPLE_BYTES, read_usage
from experiments.claims.reproduce import StudyRows
from tests import warm_ranks
from xcloud.launch import processes as launch
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.link_profile import line_bytes
from xcloud.pipeline.schedule import GPipe
from xcloud.simulator import formulas

FORWARD_S, BACKWARD_S, TRANSFER_S = 0.03, 0.06, 0.015  # of a micro-batch, which is one sample
STEPS = 5  # timed, of each run
LINES = {"free": 0.0, "15 ms a message": TRANSFER_S}


class Case(NamedTuple):
    """p stages, m micro-batches of one sample; tt: seconds of a message on the line."""

    p: int
    m: int
    tt: float

    @property
    def formula(self) -> float:
        """(1), or (2') as a bubble ratio."""
        if not self.tt:
            return formulas.bubble_of_a_free_link(self.p, self.m)
        step_s = formulas.step_of_overlapped_transfers(
            self.p, self.m, FORWARD_S, BACKWARD_S, self.tt
        )
        return self.bubble(step_s)

    @property
    def blocking(self) -> float:
        """(2)."""
        return formulas.bubble_of_blocking_transfers(
            self.p, self.m, FORWARD_S, BACKWARD_S, self.tt
        )

    def simulated(self, blocks: bool = False) -> float:
        clouds = ClusterLayout({f"c{i}": Cloud() for i in range(self.p)}, "free")
        costs = UniformCosts(FORWARD_S, BACKWARD_S, self.tt)
        return simulate(GPipe(self.m), clouds, costs, transfers_block=blocks).bubble_ratio

    def bubble(self, step_s: float) -> float:
        """Idle over computing time, of a step that takes so long."""
        return step_s / (self.m * (FORWARD_S + BACKWARD_S)) - 1

    def real(self, folder: Path) -> tuple[float, float]:
        """Seconds of a step, median of STEPS, and bytes in it over the first boundary."""
        line: Any = "free"
        if self.tt:
            rate = 8 * line_bytes(SAMPLE_BYTES) / self.tt
            line = {"_target_": "xcloud.net.link_profile.LinkProfile",
                    "bandwidth_bits_per_s": rate}  # fmt: skip
        job = Job([1] * self.p, self.m, self.m, sample_s=FORWARD_S, line=line)
        summary = run_quietly(job.config(WARM_UP + STEPS + 1), folder)
        sent = summary["wan_bytes_per_step"]
        usage = read_usage(folder, 0)
        num_bytes = (sent["forward"] + sent["backward"]) / (self.p - 1)
        return usage.step_s(self.m, WARM_UP), num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    given = parser.parse_args()
    rows = StudyRows(given.out.resolve())
    with mock.patch.object(launch, "start_process", warm_ranks.start):
        try:
            rounds = range(1, given.rounds + 1)
            for number, p, m, line in product(rounds, given.stages, given.micro_batches, LINES):
                measure(rows, Case(p, m, LINES[line]), line, number)
        finally:
            warm_ranks.close()


def measure(rows: StudyRows, case: Case, line: str, number: int) -> None:
    about = {"row": f"p = {case.p}, m = {case.m}", "line": line, "round": number}
    if rows.has(about):
        return
    print(f"{about['row']}, {line}, round {number}", flush=True)
    folder = rows.work / f"p{case.p}m{case.m}"
    step_s, num_bytes = case.real(folder)
    rows.keep_files(about, folder)
    simulated, blocking = case.simulated(), case.simulated(blocks=True)
    num_formula = 2 * case.m * SAMPLE_BYTES
    rows.write({
        **about, "formula": case.formula, "simulated": simulated, "real": case.bubble(step_s),
        "step_s": step_s, "step_off": (1 + case.bubble(step_s)) / (1 + case.formula) - 1,
        "simulator_off": (1 + simulated) / (1 + case.formula) - 1,
        "blocking": case.blocking, "blocking_simulated": blocking,
        "blocking_off": (1 + blocking) / (1 + case.blocking) - 1,
        "bytes": num_bytes, "bytes_formula": num_formula, "bytes_off": num_bytes / num_formula - 1,
    })  # fmt: skip


if __name__ == "__main__":
    main()

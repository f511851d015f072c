"""The board: what each codec costs in the twin of Protocol NanoGPT, in bytes a token, in steps to
the target and in time. docs/board.md is written from records/board, and says how it is read.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.claims.claims import ResultRow
from xcloud.net.link_profile import InboundWire
from xcloud.show.tables import rendered

BOARD = Path("docs", "board.md")
DENSE = "BF16"
"""The row that times are relative to."""
NUM_STAGES = 8
WIDTH_RATIO = 1024 / 64
"""Features of the benchmark for one of the twin: its tokens take as many times the bytes."""
WINDOW_TOKENS = 1024
BATCH_WINDOWS = 512
MICRO_BATCHES = (8, 16, 32, 64, 128)
LINES: Mapping[str, InboundWire] = {
    "1 Gbit/s, 10 ms": InboundWire(1e9, 0.010),
    "200 Mbit/s, 50 ms": InboundWire(200e6, 0.050),
    "20 Mbit/s, 100 ms": InboundWire(20e6, 0.100),
}


def step_s(bytes_per_token: float, line: InboundWire) -> float:
    """Return the seconds of a step of the benchmark's size by the law of its clock, with the
    number of micro-batches that is best.

    bytes_per_token: of one boundary in one direction.
    """
    seconds = []
    for num in MICRO_BATCHES:
        tokens = BATCH_WINDOWS * WINDOW_TOKENS / num
        message_s = line.line_s(round(bytes_per_token * tokens))
        seconds.append((2 * num + 2 * (NUM_STAGES - 2)) * message_s)
    return min(seconds)


def board_page(rows: Sequence[ResultRow]) -> str:
    """Return the text of docs/board.md. Raises KeyError if no run of DENSE reached the target."""
    names = dict.fromkeys(row["row"] for row in rows)
    entries = {name: [row for row in rows if row["row"] == name] for name in names}
    means = {name: _means(of) for name, of in entries.items()}

    def wide_step_s(num_bytes: float, line: InboundWire) -> float:
        return step_s(WIDTH_RATIO * num_bytes, line)

    dense_bytes, dense_steps = means[DENSE]
    assert dense_steps is not None, "a target that dense training does not reach is none"
    lines = []
    for name, of in entries.items():
        num_bytes, steps = means[name]
        reached = [str(int(row["steps_to_target"])) for row in of if "steps_to_target" in row]
        missed = ["not reached"] * (len(of) - len(reached))
        times = ["–"] * len(LINES)
        if steps is not None:
            shares = (
                wide_step_s(num_bytes, line) / wide_step_s(dense_bytes, line)
                for line in LINES.values()
            )
            times = [f"{steps / dense_steps * share:.3f}" for share in shares]
        lines.append((num_bytes, [name, f"{num_bytes:.1f}", ", ".join(reached + missed), *times]))
    return rendered(
        Path(__file__).with_name("board.md"),
        lines=[*LINES],
        rows=[cells for _, cells in sorted(lines, key=lambda line: -line[0])],
    )


def _means(rows: Sequence[ResultRow]) -> tuple[float, float | None]:
    """Return the bytes a token of a boundary and direction, and the steps to the target; None if
    a run did not reach it."""
    boundaries = 2 * (NUM_STAGES - 1)
    num_bytes = statistics.fmean(row["bytes_per_token"] / boundaries for row in rows)
    if not all("steps_to_target" in row for row in rows):
        return num_bytes, None
    return num_bytes, statistics.fmean(row["steps_to_target"] for row in rows)

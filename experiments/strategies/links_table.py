"""The tables of README.md from what links.py wrote:

    python -m experiments.strategies.links_table OUT.jsonl

One for each line and number of updates. Mean step: the median of a row's rounds; the rest is the
latest round's. Of a free line: the row's mean step at --mbit 0, with as many updates, over that on
this line. Seconds to the loss: until the mean of the last 20 training losses is within 1 % of what
FP32 gradients (torch DDP FP32) have at the end.
"""

import json
import math
import statistics
import sys
from pathlib import Path

OVER = 20
ABSENT = "–"


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    tables: dict[tuple[float, int], dict[str, list[dict]]] = {}
    for row in rows:
        of_line = tables.setdefault((row["mbit"] or math.inf, row["steps"]), {})
        of_line.setdefault(row["name"], []).append(row)
    for (mbit, steps), table in sorted(tables.items(), reverse=True):
        free = tables.get((math.inf, steps), {})
        reference = table.get("torch DDP FP32")
        goal = 1.01 * smoothed(reference[-1]["curve"])[-1][1] if reference else None
        line = "free" if math.isinf(mbit) else f"{mbit:g} Mbit/s"
        print(f"\n| {line}, {steps} updates | mean step | of a free line | sent an update | "
              "perplexity | seconds to the loss |")  # fmt: skip
        print("|---|---|---|---|---|---|")
        for name, rounds in table.items():
            latest, step_s = rounds[-1], mean_step_s(rounds)
            share = ABSENT
            if name in free:
                share = f"{100 * mean_step_s(free[name]) / step_s:.0f} %"
            sent = latest.get("counted_bytes_per_step", latest["line_bytes"] / steps)
            losses = smoothed(latest["curve"])[OVER:]
            reached = [at_s for at_s, loss in losses if goal is not None and loss <= goal]
            print(f"| {name} | {step_s:.3f} s | {share} | {sent / 1e3:,.0f} kB | "
                  f"{latest['perplexity']:.2f} | "
                  f"{f'{reached[0]:.1f}' if reached else ABSENT} |")  # fmt: skip


def mean_step_s(rounds: list[dict]) -> float:
    return statistics.median(row["training_s"] / row["steps"] for row in rounds)


def smoothed(curve: list[list[float]]) -> list[tuple[float, float]]:
    losses = [loss for _, loss in curve]
    return [
        (at_s, statistics.mean(losses[max(0, i - OVER + 1) : i + 1]))
        for i, (at_s, _) in enumerate(curve)
    ]


if __name__ == "__main__":
    main()

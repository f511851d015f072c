"""The table of README.md from what links.py wrote:

    python experiments/strategies/links_table.py OUT.jsonl

Seconds to the loss: until the mean of the last 20 training losses is within 1 % of what FP32
gradients (torch DDP FP32) have at the end.
"""

import json
import statistics
import sys
from pathlib import Path

OVER = 20


def smoothed(curve: list[list[float]]) -> list[tuple[float, float]]:
    losses = [loss for _, loss in curve]
    return [
        (at_s, statistics.mean(losses[max(0, i - OVER + 1) : i + 1]))
        for i, (at_s, _) in enumerate(curve)
    ]


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    lines = sorted({(row["mbit"], row["rtt_ms"]) for row in rows}, reverse=True)
    for line in lines:
        found = {r["name"]: r for r in rows if (r["mbit"], r["rtt_ms"]) == line}  # the latest
        reference = found.get("torch DDP FP32")
        goal = 1.01 * smoothed(reference["curve"])[-1][1] if reference else None
        print(f"\n{line[0]:g} Mbit/s, {line[1]:g} ms\n")
        print("| row | updates | mean step, s | sent an update | perplexity | s to the loss |")
        print("|---|---|---|---|---|---|")
        for name, row in found.items():
            reached = [at for at, loss in smoothed(row["curve"])[OVER:] if goal and loss <= goal]
            counted = row.get("counted_bytes_per_step", row["line_bytes"] / row["steps"])
            print(f"| {name} | {row['steps']} | {row['training_s'] / row['steps']:.3f} | "
                  f"{counted / 1e3:,.0f} kB | {row['perplexity']:.2f} | "
                  f"{f'{reached[0]:.1f}' if reached else '–'} |")  # fmt: skip


if __name__ == "__main__":
    main()

"""A table of README.md from what study.py wrote:

    python -m experiments.strategies.study_table OUT/rows.jsonl

Percentages are of data parallel in FP32 of the same seed.
"""

import json
import statistics
import sys
from pathlib import Path

FP32 = "data parallel, FP32"


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    by_name: dict[str, dict[int, dict]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        by_name.setdefault(row["row"], {})[row["seed"]] = row
    if FP32 not in by_name:
        sys.exit(f"{sys.argv[1]} has no row {FP32!r}, which the others are compared with")
    plain = by_name[FP32]
    print("| row | perplexity | against FP32 | bytes an update | fewer than FP32 data parallel |")
    print("|---|---|---|---|---|")
    for name, by_seed in by_name.items():
        told = ", ".join(f"{row['perplexity']:.2f}" for row in by_seed.values())
        pairs = [(by_seed[s]["perplexity"], plain[s]["perplexity"]) for s in by_seed if s in plain]
        more = (f"{100 * (own / fp32 - 1):+.1f} %" for own, fp32 in pairs)
        against = ", ".join(more) if name != FP32 else ""
        sent = statistics.mean(row["bytes"] for row in by_seed.values())
        fewer = f"{plain[min(plain)]['bytes'] / sent:,.0f}" if sent else ""
        print(f"| {name} | {told} | {against} | {sent:,.0f} | {fewer} |")


if __name__ == "__main__":
    main()

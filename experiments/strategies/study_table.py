"""A table of README.md from what study.py wrote:

    python -m experiments.strategies.study_table OUT.jsonl

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
    for row in rows:
        by_name.setdefault(row["name"], {})[row["seed"]] = row["summary"]
    if FP32 not in by_name:
        sys.exit(f"{sys.argv[1]} has no row {FP32!r}, which the others are compared with")
    plain = by_name[FP32]
    print("| row | perplexity | against FP32 | bytes an update | fewer than FP32 data parallel |")
    print("|---|---|---|---|---|")
    for name, by_seed in by_name.items():
        seeds = sorted(by_seed)
        told = ", ".join(f"{perplexity(by_seed[seed]):.2f}" for seed in seeds)
        more = [perplexity(by_seed[s]) / perplexity(plain[s]) - 1 for s in seeds if s in plain]
        against = ", ".join(f"{100 * share:+.1f} %" for share in more) if name != FP32 else ""
        sent = statistics.mean(map(num_bytes, by_seed.values()))
        fewer = f"{num_bytes(plain[min(plain)]) / sent:,.0f}" if sent else ""
        print(f"| {name} | {told} | {against} | {sent:,.0f} | {fewer} |")


def perplexity(summary: dict) -> float:
    return float(summary["quality"]["perplexity"])


def num_bytes(summary: dict) -> int:
    return sum(value or 0 for value in summary["wan_bytes_per_step"].values())


if __name__ == "__main__":
    main()

"""A search beside a grid of as many runs: which finds the better front of quality and bytes?

    python -m benchmarks.search_against_grid --out outputs/search      half an hour on two cores

Both train a small causal model with LoRA on the demo's stories, cut between two clouds. The grid
has each compression of COMPRESSIONS with each rate of RATES. The search may choose the same
compressions and any rate from the least to the largest of these, as a user would ask, and as many
runs. Objectives are perplexity through the compressed link, and bytes a token that cross it.

The figure is the area that a front dominates (hypervolume) from a corner set beforehand: the loss
and the bytes of a run without compression that makes two updates. The area is of loss, the
logarithm of perplexity, and of the logarithm of bytes, as each compression is a factor of the one
before. Beside it stands the area of perplexity and bytes as they are. Bar: the search reaches no
less than the grid in any of three seeds (of training and of the sampler). A command that was
interrupted is repeated: runs that have finished are kept. Processes start warm, as those of tests:
importing takes longer than these runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ran_on
from tests import warm_ranks
from xcloud.record.summary import read_summary
from xcloud.study.points import read_points

RATE = "training.optimizer.learning_rate"
COMPRESSIONS = ("int8", "int4", "int2", "topk")
RATES = (1e-3, 4.5e-3, 2e-2)
DEMO = (
    "+exp=lora_clm", "cluster/wan=free", "tracker=none",
    "+model.own.num_texts=2000", "+model.own.hidden=64", "+model.own.num_layers=2",
    "+model.own.feed_forward=128", "model.own.pretraining.steps=200",
    "model.own.pretraining.warmup_steps=20", "task.tokenizer.vocab_size=800",
    "+task.data.num_train=400", "+task.data.num_dev=16", "+task.data.num_test=160",
    "training.batch_size=8", "training.optimizer.warmup_steps=4", "training.evaluate_every=0",
    "training.precision=fp32",
)  # fmt: skip
UPDATES = 40

Front = Sequence[tuple[float, float]]  # of each run: bytes a token, perplexity


def sweep(folder: Path, *words: str) -> list[tuple[float, float]]:
    """Run a sweep, or what is left of it; return bytes a token and perplexity of each run."""
    warm_ranks.command(
        "run.py", "-m", *DEMO, *words, f"cache_dir={folder.parent}/cache",
        f"hydra.sweep.dir={folder}", f"sweep={folder.name}", log=folder.with_suffix(".log"),
    ).wait()  # fmt: skip
    found = []
    for name in read_points(folder):
        summary = read_summary(folder / name)
        if summary.get("status") == "finished":
            quality = summary["quality"]["perplexity"]
            found.append((summary["bytes_per_token"]["total"], quality))
    return found


def area(found: Front, corner: tuple[float, float]) -> float:
    """Return the area that points dominate from a corner; less is better in both directions."""
    total = 0.0
    lowest = corner[1]
    for cost, loss in sorted(found):
        if cost < corner[0] and loss < lowest:
            total += (corner[0] - cost) * (lowest - loss)
            lowest = loss
    return total


def on_log_scale(found: Front) -> list[tuple[float, float]]:
    return [(math.log2(num_bytes), math.log(quality)) for num_bytes, quality in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=["grid", "search"], help="run one of the two")
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    warm_ranks.import_first(
        "transformers.models.llama.modeling_llama", "peft", "xcloud.models.causal",
        "xcloud.tasks.language_modelling", "optuna",
    )  # fmt: skip
    corner = sweep(out / "none", "compression=none", "training.max_steps=2", "seed=1")
    shared = (f"training.max_steps={UPDATES}", f"compression={','.join(COMPRESSIONS)}")
    num_runs = len(COMPRESSIONS) * len(RATES)
    table: dict[str, Any] = {**ran_on(), "corner": corner[0], "runs": num_runs, "seeds": {}}
    for seed in given.seeds:
        words = {
            "grid": [f"{RATE}={','.join(f'{rate:g}' for rate in RATES)}"],
            "search": [
                "hydra/sweeper=search", f"hydra.sweeper.runs={num_runs}",
                f"hydra.sweeper.sampler_seed={seed}",
                f"{RATE}=tag(log, interval({RATES[0]:g},{RATES[-1]:g}))",
            ],
        }  # fmt: skip
        row: dict[str, Any] = {}
        for name in [given.only] if given.only else words:
            row[name] = sweep(out / f"{name}{seed}", *shared, *words[name], f"seed={seed}")
            row[f"{name}_log_area"] = area(on_log_scale(row[name]), on_log_scale(corner)[0])
            row[f"{name}_area"] = area(row[name], corner[0])
        if not given.only:
            for kind in ("log_area", "area"):
                row[f"ratio_{kind}"] = row[f"search_{kind}"] / row[f"grid_{kind}"]
        table["seeds"][seed] = row
        print(seed, json.dumps({k: v for k, v in row.items() if k not in words}), flush=True)
        (out / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    rows = table["seeds"].values()
    sys.exit(0 if all(row.get("ratio_log_area", 0.0) >= 1.0 for row in rows) else 1)


if __name__ == "__main__":
    main()

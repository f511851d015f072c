"""Perplexity against bytes: every strategy fine-tunes the same model on the same tokens.

    python experiments/strategies/study.py BASE DATA OUT.jsonl [--seeds 1 2 3] [--at-once 2]
        [--steps 300] [--batch-size 32] [--learning-rate 1e-3] [--only NAME ...]

BASE: folder of base_model.py. DATA: train.txt, dev.txt, test.txt. Each run is two clouds of a rank
on an emulated link; a line of JSON each; runs that OUT holds already are left out. Runs at once
share the processors, so their times mean nothing: bytes and perplexity do. For times see links.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LOCAL = "strategy=local_updates"
ROWS = {
    "one process": ["cluster=local", "compression=none"],
    "data parallel, FP32": ["strategy=data_parallel", "compression=none"],
    "data parallel, FP16": ["strategy=data_parallel", "compression=fp16"],
    "data parallel, INT4": ["strategy=data_parallel", "compression=int4"],
    "data parallel, sign": ["strategy=data_parallel", "compression=sign"],
    "data parallel, PowerSGD 4": ["strategy=data_parallel", "compression=powersgd"],
    "data parallel, CocktailSGD": ["strategy=data_parallel", "compression=cocktail"],
    "pipeline, FP32": ["compression=none"],
    "pipeline, INT4": ["compression=int4"],
    "pipeline, INT4+INT2": ["compression=int4", "compression.backward.int4.bits=2"],
    "local updates of 15, FP32": [LOCAL, "strategy.averaging.every=15", "compression=none"],
    "local updates of 15, INT4": [LOCAL, "strategy.averaging.every=15", "compression=int4"],
    "local updates of 50, INT4": [LOCAL, "strategy.averaging.every=50", "compression=int4"],
    "local updates of 50, sign": [LOCAL, "strategy.averaging.every=50", "compression=sign"],
    "local updates of 15, CocktailSGD": [
        LOCAL, "strategy.averaging.every=15", "compression=cocktail",
    ],
    "FedAvg every 15, INT4": [
        "strategy=fedavg", "strategy.averaging.every=15", "compression=int4",
    ],
    "FedAvg every 60, INT4": [
        "strategy=fedavg", "strategy.averaging.every=60", "compression=int4",
    ],
    "streaming, every 16, INT4": [
        "strategy=streaming", "strategy.averaging.every=16", "compression=int4",
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    given = parser.parse_args()
    done = set()
    if given.out.exists():
        found = map(json.loads, given.out.read_text().splitlines())
        done = {(row["name"], row["seed"]) for row in found}
    wanted = [(name, seed) for seed in given.seeds for name in given.only]
    setting = [
        "+exp=lora_clm", "profile=files", "model.lora=null", "tracker=none",
        f"model.checkpoint={given.base.resolve()}", f"task.path={given.data.resolve()}",
        "task.document=line", "task.max_length=64", "cluster/wan=free",
        f"training.batch_size={given.batch_size}",
        "schedule.num_micro_batches=4", f"training.max_steps={given.steps}",
        f"training.optimizer.learning_rate={given.learning_rate}", "training.eval_batch_size=32",
    ]  # fmt: skip

    def run(name: str, seed: int) -> dict[str, object]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "run.py", *setting, *ROWS[name], f"seed={seed}",
                       f"hydra.run.dir={folder}/run"]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            if ended.returncode:
                raise RuntimeError(
                    f"{name}, seed {seed}: {ended.stdout[-800:]}{ended.stderr[-800:]}"
                )
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return {"name": name, "seed": seed, "steps": given.steps, "summary": summary}

    with ThreadPoolExecutor(given.at_once) as pool, given.out.open("a") as out:
        for row in pool.map(lambda one: run(*one), [one for one in wanted if one not in done]):
            print(json.dumps(row), file=out, flush=True)
            quality = row["summary"]["quality"]  # type: ignore[index]
            print(row["name"], row["seed"], quality, flush=True)


if __name__ == "__main__":
    main()

"""Memory of a rank and time of a step by strategy, for one causal model; then the same model where
a rank may not have the memory of a whole one.

python -m benchmarks.memory_by_strategy [--width 640] [--blocks 8] [--steps 2] [--limit-mb 1250]
python -m benchmarks.memory_by_strategy --lora --only-limit --width 1024 --blocks 16 \\
    --limit-mb 1450

All weights of a Llama of random weights are trained with AdamW in FP32, two stages, links without
a limit; the C library gives back freed memory at once. `limit` is RLIMIT_DATA of every process of
a run: Linux refuses it more private memory, as a smaller device would. With --lora adapters are
trained, so that the frozen weights alone may be more than one process can hold. The base is made
once, without a limit. About ten minutes on two cores, and three with --lora; figures:
docs/causal-language-models.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file

from benchmarks.machine import say_where

PAIR = ["cluster=local", "cluster.clouds.local.num_ranks=2"]
STRATEGIES = {
    "one process": ["cluster=local"],
    "two replicas": PAIR,
    "FSDP, two ranks": [*PAIR, "+cluster.clouds.local.shard=true"],
    "split over two clouds": ["cluster=two_clouds", "cluster/wan=free"],
    "split, checkpointing": [
        "cluster=two_clouds", "cluster/wan=free", "model.activation_checkpointing=true",
    ],
}  # fmt: skip
KINDS = ("peak", "parameters", "gradients", "optimizer", "activations")
MB = 1e6


def run(
    given: argparse.Namespace, folder: Path, overrides: list[str], limit_mb: int | None
) -> dict[str, Any] | str:
    """The run's summary, or the first line of why it failed."""
    words = [
        sys.executable, "run.py", "+exp=lora_clm", "tracker=none", "compression=none",
        "model.lora.dropout=0" if given.lora else "model.lora=null",
        f"model.own.hidden={given.width}", "model.own.pretraining.steps=0",
        f"model.own.num_layers={given.blocks}", f"model.own.num_heads={given.width // 64}",
        f"model.own.num_kv_heads={given.width // 64}", "model.own.num_texts=200",
        f"model.own.feed_forward={3 * given.width}", "training.precision=fp32",
        f"training.max_steps={given.steps}", "training.batch_size=2", "task.max_length=32",
        "schedule.num_micro_batches=2", "task.data.num_train=60", "task.data.num_dev=2",
        "task.data.num_test=2",
        "training.eval_batch_size=1", f"cache_dir={given.cache}", f"hydra.run.dir={folder}",
        *overrides,
    ]  # fmt: skip

    def limit() -> None:
        if limit_mb is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_mb * 10**6, limit_mb * 10**6))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(
        words, env=environment, preexec_fn=limit, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return found
    failures = sorted(folder.glob("rank*.error.json"))
    if not failures:
        return f"failed: {done.stderr.strip().splitlines()[-1][:200]}"
    said = str(json.loads(failures[0].read_text())["message"]).splitlines()
    return f"failed: {next((line for line in said if 'alloc' in line), said[0])[:110]}"


def cut_bases(cache: Path) -> None:
    """Into files of 64 MB: Linux counts a file that safetensors maps as private memory."""
    for path in cache.glob("causal/*/model.safetensors"):
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        save_torch_state_dict(tensors, path.parent, max_shard_size="64MB")


def row(name: str, summary: dict[str, Any]) -> str:
    fullest = {kind: max(rank[kind] for rank in summary["memory"]) / MB for kind in KINDS}
    cells = "".join(f"{fullest[kind]:12.0f}" for kind in KINDS)
    return f"{name:24}{cells}{summary['step_time_s']['median']:10.2f}{summary['final_loss']:12.6f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--limit-mb", type=int, default=1250)
    parser.add_argument("--lora", action="store_true", help="train adapters beside the weights")
    parser.add_argument("--only-limit", action="store_true", help="leave out the first table")
    parser.add_argument("--rows", nargs="+", choices=STRATEGIES, default=[*STRATEGIES])
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "xcloud-memory"
    )
    given = parser.parse_args()
    chosen = {name: STRATEGIES[name] for name in given.rows}
    say_where()
    with tempfile.TemporaryDirectory() as folder:
        if given.only_limit:  # the base must be there
            run(given, Path(folder) / "base", STRATEGIES["one process"], None)
        else:
            print(f"{'MB of the fullest rank':24}" + "".join(f"{kind:>12}" for kind in KINDS)
                  + f"{'s / step':>10}{'loss':>12}", flush=True)  # fmt: skip
            for number, (name, overrides) in enumerate(chosen.items()):
                found = run(given, Path(folder) / str(number), overrides, None)
                print(found if isinstance(found, str) else row(name, found), flush=True)
        cut_bases(given.cache)
        print(f"\nno process may have more than {given.limit_mb} MB of private memory", flush=True)
        for number, (name, overrides) in enumerate(chosen.items()):
            found = run(given, Path(folder) / f"limit{number}", overrides, given.limit_mb)
            said = found if isinstance(found, str) else f"trains, loss {found['final_loss']:.6f}"
            print(f"{name:24}{said}", flush=True)


if __name__ == "__main__":
    main()

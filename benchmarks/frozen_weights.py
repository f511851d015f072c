"""Frozen weights in 32, 16, 8 and 4 bits beside LoRA over two clouds: perplexity of a small
trained model; memory, what `plan=show` says of it, and speed of a model of drawn weights in the
shape of Qwen2.5-0.5B with fewer blocks.

python -m benchmarks.frozen_weights [--seeds 3] [--steps 40] [--blocks 4] [--json FILE]

The small model learns public sentences first, once, then stories by adapters, with fp16_int8 on
the line. The drawn one is a checkpoint in bfloat16 in a temporary folder, without compression;
its speed is that of one thread, in one process, in tokens a second of CPU time, which other work
on the machine hardly changes. Products are computed in FP32. About ten minutes on two quiet cores;
figures: docs/causal-language-models.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ran_on
from xcloud.models.causal_network import (
    Lora,
    Part,
    config_of,
    draw_weights,
    laid_out,
    load_weights,
    network_of,
    read_config,
    write_checkpoint,
)
from xcloud.models.causal_stage import CausalStage
from xcloud.models.frozen_weights import Kind
from xcloud.models.stages import LABEL, TEXT, TYPES

KINDS: tuple[Kind, ...] = ("float32", "bfloat16", "int8", "nf4")
PREDICTED = ("parameters", "gradients", "optimizer", "activations", "queued")
COMMON = [
    "+exp=lora_clm", "tracker=none", "cluster=two_clouds", "cluster/wan=free",
    "training.precision=fp32",
]  # fmt: skip
MB = 1e6


def run(folder: Path, file: str, *overrides: str) -> dict[str, Any]:
    """Return what a run leaves in this file of its folder."""
    words = [sys.executable, "run.py", *COMMON, f"hydra.run.dir={folder}", *overrides]
    # Freed memory goes back at once, so that a peak is what was held.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((folder / file).read_text())
    return found


def whole_of(config: Any) -> Part:
    return Part(blocks=range(config.num_hidden_layers), is_first=True, is_last=True)


def write_drawn(folder: Path, blocks: int) -> None:
    """Write a checkpoint of random weights in the shape of Qwen2.5-0.5B."""
    config = config_of(
        {
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": blocks, "num_attention_heads": 14, "num_key_value_heads": 2,
            "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        }
    )  # fmt: skip
    network = network_of(config, part=whole_of(config))
    draw_weights(network, seed=0)
    write_checkpoint(network.to(torch.bfloat16), folder=folder)


def tokens_per_cpu_s(kind: Kind, checkpoint: Path, length: int = 128) -> float:
    """Return how fast forward and backward of the whole drawn model are, two samples at a time."""
    config = read_config(str(checkpoint))
    network = laid_out(config, part=whole_of(config))
    Lora().add_to(network, part=whole_of(config))
    load_weights(
        network, str(checkpoint), weights=kind,
        end_block=lambda prefix, block: Lora().draw(prefix, block=block, seed=0),
    )  # fmt: skip
    stage = CausalStage(
        network=network, part=whole_of(config), chunk=8192, architecture={"lora": True}
    )
    text = torch.randint(config.vocab_size, (2, length))
    batch = {TEXT: text, TYPES: torch.zeros_like(text), LABEL: text}
    took = []
    for _ in range(3):
        began_at_s = time.process_time()
        stage(None, batch).loss.backward()
        took.append(time.process_time() - began_at_s)
    return text.numel() / min(took)


def measured_memory(kind: Kind, folder: Path, checkpoint: Path) -> dict[str, float]:
    """Return figures of the fullest rank, in MB."""
    given = [
        "model.own=null", f"model.checkpoint={checkpoint}", f"model.weights={kind}",
        "compression=none", "task.max_length=16", "task.num_train=64", "task.num_dev=2",
        "task.num_test=2", "training.eval_batch_size=1", "training.batch_size=4",
        "schedule.num_micro_batches=2", "model.lora.targets=[q_proj,v_proj]",
        f"cache_dir={folder}/cache",
    ]  # fmt: skip
    summary = run(folder / "run", "summary.json", *given, "training.max_steps=6")
    plan = run(
        folder / "plan", "plan.json", *given, "plan=show", "plan.search=[split]",
        "plan.trial_steps=3",
    )  # fmt: skip
    predicted = plan["own"]["memory_bytes"]
    errors = {
        rank["cloud"]: predicted[rank["cloud"]] / sum(rank[name] for name in PREDICTED) - 1
        for rank in summary["memory"]
    }
    fullest = max(summary["memory"], key=lambda rank: rank["peak"])
    return {
        "peak": fullest["peak"] / MB,
        "over program": max(rank["peak"] - rank["program"] for rank in summary["memory"]) / MB,
        "weights": max(rank["parameters"] for rank in summary["memory"]) / MB,
        "predicted": max(predicted.values()) / MB,
        "worst error %": 100 * max(errors.values(), key=abs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write all figures here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    where = ran_on()
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    rows: dict[str, dict[str, float]] = {}
    perplexities: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_drawn(folder / "drawn", given.blocks)
        for kind in KINDS:
            rows[kind] = measured_memory(kind, folder / kind, folder / "drawn")
            rows[kind]["tokens / CPU s"] = tokens_per_cpu_s(kind, folder / "drawn")
            figures = "".join(f"  {what} {value:,.1f}" for what, value in rows[kind].items())
            print(f"{kind:9}{figures}", flush=True)
        for seed in range(given.seeds):
            for kind in KINDS:
                summary = run(
                    folder / f"{kind}-{seed}", "summary.json", f"model.weights={kind}",
                    f"seed={seed}", f"training.max_steps={given.steps}",
                    f"cache_dir={folder}/cache",
                )  # fmt: skip
                perplexities[kind].append(math.exp(summary["quality"]["loss"]))
                print(f"{kind:9} seed {seed}: {perplexities[kind][-1]:.3f}", flush=True)
    for kind, found in perplexities.items():
        pairs = zip(found, perplexities["float32"], strict=True)
        changes = [100 * (one / other - 1) for one, other in pairs]
        rows[kind]["perplexity"] = statistics.mean(found)
        rows[kind]["change %"] = statistics.mean(changes)
        print(f"{kind:9} perplexity {statistics.mean(found):.3f}, "
              f"change {', '.join(f'{change:+.2f}' for change in changes)} %")  # fmt: skip
    if given.json:
        table = {**where, "rows": rows, "perplexities": perplexities}
        given.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

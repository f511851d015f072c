"""Frozen weights in 32, 16, 8 and 4 bits beside LoRA over two clouds: perplexity of a small
trained model; memory, what `plan=show` says of it, and speed of a model of drawn weights in the
shape of a known one.

python -m benchmarks.frozen_weights [--shape qwen2.5-0.5b] [--blocks N] [--kinds int8 nf4]
    [--seeds 3] [--steps 40] [--keep FOLDER] [--json FILE]

The small model learns public sentences first, once, then stories by adapters, with fp16_int8 on
the line. The drawn one is a checkpoint in bfloat16, trained on one sample of 32 tokens an update
without compression; its speed is that of one thread, in one process with a rank's settings of
memory, in tokens a second of CPU time, which other work on the machine hardly changes. Products
are computed in FP32. A run writes its loss to 0.0001, which is 0.01 %.

Each kind has a run of four updates, a pass forward and backward, and a trial for plan=show; then
come runs of the demo, of each seed and kind (--seeds 0: none). A figure is printed, and written to
FILE, as soon as it is known. The drawn checkpoint and the trials of a command that was cut off are
used again by the next one with the same --keep. Figures: docs/causal-language-models.md.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import ran_on
from xcloud.launch.processes import LIBRARY_SETTINGS
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
from xcloud.models.frozen_weights import WeightFormat
from xcloud.models.stages import LABEL, TEXT, TYPES

KINDS: tuple[WeightFormat, ...] = ("float32", "bfloat16", "int8", "nf4")
KINDS_OF_MEMORY = ("parameters", "gradients", "optimizer", "activations", "queued")
COMMON = [
    "+exp=lora_clm", "tracker=none", "cluster=two_clouds", "cluster/wan=free",
    "training.precision=fp32",
]  # fmt: skip
# A trial tries each compressor of the planner's in further updates.
WITHOUT_COMPRESSORS = [
    f"~compression@plan.compressors.{name}" for name in ("fp16_int8", "int8", "int4_int8", "int4")
]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
MB = 1e6


def run(folder: Path, file: str, *overrides: str) -> dict[str, Any]:
    """Return what a run leaves in this file of its folder."""
    words = [sys.executable, "run.py", *COMMON, f"hydra.run.dir={folder}", *overrides]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((folder / file).read_text())
    return found


def alone(function: Callable[..., Any], *given: Any) -> Any:
    """Return what a function does, called in a process of its own that takes no memory along."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *given).result()


def whole_of(config: Any) -> Part:
    return Part(blocks=range(config.num_hidden_layers), is_first=True, is_last=True)


def write_drawn(folder: Path, shape: str, blocks: int | None) -> None:
    """Write a checkpoint of random weights, in this shape but for its number of blocks."""
    if folder.exists():
        return
    given = dict(SHAPES[shape])
    if blocks is not None:
        given["num_hidden_layers"] = blocks
    config = config_of(given)
    network = network_of(config, part=whole_of(config))
    draw_weights(network, seed=0)
    draft = folder.parent / f"{folder.name}.draft"
    write_checkpoint(network.to(torch.bfloat16), folder=draft)
    draft.rename(folder)


def tokens_per_cpu_s(kind: WeightFormat, checkpoint: Path, length: int = 128) -> float:
    """Return how fast forward and backward of the whole drawn model are, two samples at a time."""
    torch.set_num_threads(1)
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
    stage(None, {name: rows[:, :8] for name, rows in batch.items()}).loss.backward()  # warms up
    began_at_s = time.process_time()
    stage(None, batch).loss.backward()
    return text.numel() / (time.process_time() - began_at_s)


def settings_of(kind: WeightFormat, checkpoint: Path) -> list[str]:
    """Return the overrides of a run of the drawn model."""
    return [
        "model.own=null", f"model.checkpoint={checkpoint}", f"model.weights={kind}",
        "compression=none", "task.max_length=32", "task.data.num_train=64", "task.data.num_dev=1",
        "task.data.num_test=1", "training.eval_batch_size=1", "training.batch_size=1",
        "schedule.num_micro_batches=1", "model.lora.targets=[q_proj,v_proj]",
        f"cache_dir={checkpoint}.cache",
    ]  # fmt: skip


def measured_memory(kind: WeightFormat, folder: Path, checkpoint: Path) -> list[dict[str, Any]]:
    """Return what each rank held in a run of four updates, in bytes."""
    summary = run(
        folder, "summary.json", *settings_of(kind, checkpoint=checkpoint), "training.max_steps=4"
    )
    ranks: list[dict[str, Any]] = summary["memory"]
    return ranks


def predicted_memory(
    kind: WeightFormat, folder: Path, checkpoint: Path
) -> tuple[dict[str, float], float]:
    """Return what `plan=show` says that each rank will take, in bytes by cloud, and how much of it
    is no kind of its own."""
    plan = run(
        folder, "plan.json", *settings_of(kind, checkpoint=checkpoint), "plan=show",
        "plan.search=[split]", "plan.trial_steps=1", *WITHOUT_COMPRESSORS,
    )  # fmt: skip
    return plan["own"]["memory_bytes"], plan["profile"]["other_bytes"]


def fullest(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Return figures of the fullest rank, in MB."""
    return {
        "peak": max(rank["peak"] for rank in ranks) / MB,
        "over program": max(rank["peak"] - rank["program"] for rank in ranks) / MB,
        "weights": max(rank["parameters"] for rank in ranks) / MB,
    }


def off(predicted: dict[str, float], ranks: list[dict[str, Any]], names: Sequence[str]) -> float:
    """Return by how many percent the worst prediction is off what a rank has of these figures."""
    held = {rank["cloud"]: sum(rank[name] for name in names) for rank in ranks}
    errors = [100 * (predicted[cloud] / num_bytes - 1) for cloud, num_bytes in held.items()]
    return max(errors, key=abs)


def say(kind: WeightFormat, figures: dict[str, float]) -> None:
    named = "".join(f"  {what} {value:,.2f}" for what, value in figures.items())
    print(f"{kind:9}{named}", flush=True)


def print_table(rows: dict[WeightFormat, dict[str, float]]) -> None:
    names = next(iter(rows.values())).keys()
    print("".join(f"{name:>16}" for name in ("model.weights", *names)))
    for kind, figures in rows.items():
        print(f"{kind:>16}" + "".join(f"{figures[name]:16,.2f}" for name in names))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--blocks", type=int, help="fewer than the shape has")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--keep", type=Path, help="keep the drawn checkpoint and trials here")
    parser.add_argument("--json", type=Path, help="write all figures here")
    given = parser.parse_args()
    # What starts from here has a rank's settings of memory, with which it keeps its pages.
    os.environ.update(LIBRARY_SETTINGS, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    where = ran_on()
    print(", ".join(f"{name} {value}" for name, value in where.items()), flush=True)
    rows: dict[WeightFormat, dict[str, float]] = {kind: {} for kind in given.kinds}
    perplexities: dict[WeightFormat, list[float]] = {kind: [] for kind in given.kinds}

    def note(kind: WeightFormat, figures: dict[str, float]) -> None:
        rows[kind] |= figures
        say(kind, figures=figures)
        if given.json:
            table = {**where, "rows": rows, "perplexities": perplexities}
            given.json.write_text(json.dumps(table, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = (given.keep or folder).resolve()
        drawn = kept / f"{given.shape}-{given.blocks or 'all'}"
        alone(write_drawn, drawn, given.shape, given.blocks)
        for kind in given.kinds:
            ranks = measured_memory(kind, folder=folder / f"{kind}-run", checkpoint=drawn)
            note(kind, figures=fullest(ranks))
            note(kind, figures={"tokens / CPU s": alone(tokens_per_cpu_s, kind, drawn)})
            predicted, other = predicted_memory(
                kind, folder=folder / f"{kind}-plan", checkpoint=drawn
            )
            kinds = {cloud: num_bytes - other for cloud, num_bytes in predicted.items()}
            plan = {
                "predicted": max(predicted.values()) / MB,
                "off peak %": off(predicted, ranks=ranks, names=["peak"]),
                "off kinds %": off(kinds, ranks=ranks, names=KINDS_OF_MEMORY),
            }
            note(kind, figures=plan)
        for seed in range(given.seeds):
            for kind in given.kinds:
                summary = run(
                    folder / f"{kind}-{seed}", "summary.json", f"model.weights={kind}",
                    f"seed={seed}", f"training.max_steps={given.steps}",
                    f"cache_dir={folder}/cache",
                )  # fmt: skip
                perplexities[kind].append(math.exp(summary["quality"]["loss"]))
                note(kind, figures={"perplexity": statistics.mean(perplexities[kind])})
    if given.seeds and "float32" in perplexities:
        for kind, found in perplexities.items():
            pairs = zip(found, perplexities["float32"], strict=True)
            changes = [100 * (one / other - 1) for one, other in pairs]
            print(f"{kind:9} change {', '.join(f'{change:+.2f}' for change in changes)} %")
            note(kind, figures={"worst change %": max(changes, key=abs)})
    print_table(rows)


if __name__ == "__main__":
    main()

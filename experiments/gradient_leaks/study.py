"""What averaged gradients and weight changes tell of a text:

    python -m experiments.gradient_leaks.study > results.csv

A small Llama on the demo's stories; see README.md. About ten minutes on one core.
"""

from __future__ import annotations

import copy
import csv
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.gradient_leaks.gradient_attacks import (
    Victim,
    attack_layers,
    changed_rows,
    f1_of_sets,
    rouge,
)
from experiments.gradient_leaks.gradient_matching import (
    gradient_distance,
    improve_by_swaps,
    match_gradients,
    nearest_words,
    soft_word_gradients,
)
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.contracts.model import NO_LABEL, Batch, BuildContext, Stage
from xcloud.experiment import Experiment
from xcloud.features.privacy.noise import clip_factor
from xcloud.job.config import Settings
from xcloud.models.causal_network import run as run_network
from xcloud.rank.task_data import load

CONF = Path(__file__).parents[2] / "conf"
BASE = (
    "+exp=lora_clm", "cluster=local", "tracker=none", "model.own.hidden=64",
    "model.own.num_layers=2", "model.own.num_texts=2000", "model.own.pretraining.steps=300",
)  # fmt: skip
SEEDS = (1, 2, 3)
RATE = 2e-3
EMBEDDINGS = "network.model.embed_tokens.weight"
LORA = {"full": ("model.lora=null",), "LoRA r=16": ("model.lora.r=16",)}

Changes = dict[str, Tensor]


@cache
def prepared(length: int, kind: str) -> tuple[Experiment, Any, Stage]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=[*BASE, f"task.max_length={length}", *LORA[kind]])
    job = Settings.of(config).job
    assert isinstance(job, Experiment)
    data = load(job, 0, None)
    context = BuildContext(
        seed=0, device=torch.device("cpu"), cache_dir=job.cache_path, report=lambda line: None,
        vocabularies=data.vocabularies, sentences=data.sentences, max_length=length,
    )  # fmt: skip
    stage = job.model.build_stage(0, 1, context)
    if "LoRA" in kind:  # B is zero at the start, and nothing but its own gradient tells then
        optimizer = torch.optim.AdamW(trained(stage).values(), RATE)
        for step in range(10):
            train(stage, optimizer, data.batch("train", torch.arange(4 * step, 4 * step + 4)))
    return job, data, stage


def trained(stage: Stage) -> dict[str, Tensor]:
    return {name: p for name, p in stage.named_parameters() if p.requires_grad}


def gradient(stage: Stage, batch: Batch) -> Changes:
    stage.zero_grad()
    loss = stage(None, batch).loss
    assert loss is not None
    (loss / float((batch["label"] != NO_LABEL).sum())).backward()
    return {name: p.grad.clone() for name, p in trained(stage).items() if p.grad is not None}


def train(stage: Stage, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    gradient(stage, batch)
    optimizer.step()


def batches(data: Any, seed: int, size: int, count: int) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randperm(data.num_samples("train"), generator=draw)[: size * count]
    return [data.batch("train", piece) for piece in ids.split(size)]


def texts_in(*found: Batch) -> list[list[int]]:
    """Documents, as attention sees them."""
    texts: dict[tuple[int, int, int], list[int]] = {}
    for number, batch in enumerate(found):
        for row, (tokens, types) in enumerate(zip(batch["text"], batch["types"], strict=True)):
            for token, kind in zip(tokens.tolist(), types.tolist(), strict=True):
                if token >= 0:
                    texts.setdefault((number, row, kind), []).append(token)
    return list(texts.values())


def frequent(data: Any, count: int) -> list[int]:
    tokens = torch.tensor([t for s in data.sentences("text")[-300:] for t in s])
    values, counts = torch.unique(tokens, return_counts=True)
    return values[counts.argsort(descending=True)][:count].tolist()


def attack(
    stage: Stage, data: Any, changes: Changes, length: int, *found: Batch, decays: bool = False
) -> dict[str, float]:
    true = texts_in(*found)
    words = sorted({token for text in true for token in text})
    vocabulary = torch.arange(data.vocabularies["text"].size)

    def run(ids_NS: Tensor) -> None:
        zeros = torch.zeros_like(ids_NS)
        stage(
            None, {"ids": zeros[:, 0], "text": ids_NS, "types": zeros, "label": zeros + NO_LABEL}
        )

    rows: list[int] = []
    if EMBEDDINGS in changes:
        before = dict(stage.named_parameters())[EMBEDDINGS].detach() if decays else None
        rows = changed_rows(changes[EMBEDDINGS], before).tolist()
    layers = attack_layers(Victim(stage, run, vocabulary, length), changes)
    return {
        "tokens": float(sum(map(len, true))),
        "words": float(len(words)),
        "embedding rows F1": f1_of_sets(rows, words),
        "layer inputs F1": f1_of_sets(layers.tokens.tolist(), words),
        "order ROUGE-2": rouge(layers.texts, true, 2),
        "baseline F1": f1_of_sets(frequent(data, len(words)), words),
    }


def by_batch() -> Iterator[tuple[str, str, dict[str, float]]]:
    for kind in LORA:
        for length, size in ((16, 1), (16, 2), (64, 1), (64, 4), (64, 16)):
            for seed in SEEDS:
                _, data, stage = prepared(length, kind)
                (batch,) = batches(data, seed, size, 1)
                found = attack(stage, data, gradient(stage, batch), length, batch)
                yield f"{kind}, {size} x {length}", "gradient", found


def by_compressor() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Of the third message: what the two before it left out is in it."""
    for kind, length, size in (("full", 64, 4), ("LoRA r=16", 16, 1)):
        for name in ("none", "fp16", "int8", "int4", "topk", "powersgd", "sign", "cocktail"):
            for seed in SEEDS:
                _, data, stage = prepared(length, kind)
                with initialize_config_dir(str(CONF), version_base="1.3"):
                    config = compose("config", overrides=[*BASE, f"compression={name}"])
                compression = Settings.of(config).job.compression  # type: ignore[attr-defined]
                shapes = {n: p.shape for n, p in trained(stage).items()}
                codec = TensorCodec(shapes, compression.for_tensor, 1, feedback=True)
                for batch in batches(data, seed, size, 3):
                    changes = gradient(stage, batch)
                    _, seen = codec.encode([changes[n] for n in shapes])
                decoded = dict(zip(shapes, seen, strict=True))
                found = attack(stage, data, decoded, length, batch)
                yield f"{kind}, {size} x {length}", name, found


def by_local_steps() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Of the second merge: Adam's moments move rows of the first one's words, too."""
    for kind, length, size in (("full", 64, 4), ("LoRA r=16", 16, 1)):
        for make, label in ((torch.optim.SGD, "SGD"), (torch.optim.AdamW, "AdamW")):
            for steps in (1, 4, 16):
                for seed in SEEDS:
                    _, data, start = prepared(length, kind)
                    stage = copy.deepcopy(start)
                    rate = 0.1 if label == "SGD" else RATE
                    optimizer = make(trained(stage).values(), lr=rate, weight_decay=0.0)
                    rounds = batches(data, seed, size, 2 * steps)
                    for batch in rounds[:steps]:
                        train(stage, optimizer, batch)
                    anchor = copy.deepcopy(stage)
                    for batch in rounds[steps:]:
                        train(stage, optimizer, batch)
                    before = trained(anchor)
                    changes = {
                        n: before[n].detach() - p.detach() for n, p in trained(stage).items()
                    }
                    found = attack(anchor, data, changes, length, *rounds[steps:], decays=True)
                    yield f"{kind}, {size} x {length}", f"{steps} steps of {label}", found


def by_noise() -> Iterator[tuple[str, str, dict[str, float]]]:
    """DP-SGD with clip 0.1, below the norm of every sample's gradient here."""
    clip = 0.1
    for kind, length, size in (("full", 64, 4), ("LoRA r=16", 16, 1)):
        for noise in (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0):
            for seed in SEEDS:
                _, data, stage = prepared(length, kind)
                (batch,) = batches(data, seed, size, 1)
                total: Changes = {}
                for row in range(size):
                    own = gradient(stage, {n: value[row : row + 1] for n, value in batch.items()})
                    factor = clip_factor(own.values(), clip)
                    for name, value in own.items():
                        total[name] = total.get(name, torch.zeros_like(value)) + factor * value
                draw = torch.Generator().manual_seed(seed)
                noised = {
                    n: v + noise * clip * torch.randn(v.shape, generator=draw)
                    for n, v in total.items()
                }
                found = attack(stage, data, noised, length, batch)
                yield f"{kind}, {size} x {length}", f"noise {noise:g}", found


def by_matching() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Texts of 6 tokens from the gradient of LoRA's adapters, of all words of the vocabulary."""
    for seed in SEEDS:
        _, data, stage = prepared(16, "LoRA r=16")
        (batch,) = batches(data, seed, 1, 1)
        text = batch["text"][:, :6]
        network: Any = stage.network
        parameters = [p for p in network.parameters() if p.requires_grad]
        table = network.get_input_embeddings().weight.detach()
        places = torch.arange(6)[None]
        norm = float(table.norm(dim=1).mean())
        everything = torch.arange(len(table))

        def logits_of(rows: Tensor, network: Any = network, places: Tensor = places) -> Tensor:
            return network.lm_head(run_network(network, places, None, rows))

        with sdpa_kernel(SDPBackend.MATH):
            loss = torch.nn.functional.cross_entropy(logits_of(table[text])[0, :-1], text[0, 1:])
            target = [g.detach() for g in torch.autograd.grad(loss, parameters)]
            gradients_of = soft_word_gradients(logits_of, parameters, table)
            start = torch.randn(
                1, 6, table.shape[1], generator=torch.Generator().manual_seed(seed)
            )
            start *= norm / table.shape[1] ** 0.5
            rows = match_gradients(gradients_of, target, start, norm, 300, 0.05)
            first = nearest_words(rows, table, everything)

            def distance(
                ids: Tensor, g: Any = gradients_of, t: Any = target, e: Tensor = table
            ) -> float:
                return float(gradient_distance(g(e[ids]), t).detach())

            better = improve_by_swaps(first, distance, everything, 300)
        true = text.tolist()
        for how, ids in (("matched", first), ("and swapped", better)):
            yield "LoRA r=16, 1 x 6", how, {
                "ROUGE-1": rouge(ids.tolist(), true, 1),
                "order ROUGE-2": rouge(ids.tolist(), true, 2),
            }  # fmt: skip


def main() -> None:
    columns = ["tokens", "words", "embedding rows F1", "layer inputs F1", "order ROUGE-2",
               "ROUGE-1", "baseline F1"]  # fmt: skip
    out = csv.writer(sys.stdout)
    out.writerow(["study", "setting", "what", *columns])
    for study in (by_batch, by_compressor, by_local_steps, by_noise, by_matching):
        rows: dict[tuple[str, str], list[dict[str, float]]] = {}
        for setting, what, found in study():
            rows.setdefault((setting, what), []).append(found)
        for (setting, what), found_in in rows.items():
            means = [
                f"{sum(f[c] for f in found_in) / len(found_in):.3g}" if c in found_in[0] else ""
                for c in columns
            ]
            out.writerow([study.__name__.removeprefix("by_"), setting, what, *means])
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Bytes of weight patches beside whole weights in BF16, at learning rates that people use.

python -m benchmarks.weight_patches [--steps 40] [--rates 1e-6 1e-5 1e-4] [--mbits 100]
    [--json FILE]

A causal model of 10 million weights in the shape of a small Qwen2 learns sentences of a made-up
language with AdamW (betas 0.9 and 0.95, clipped to 1), as one stage: first at 1e-3 for --warm
updates, then at each rate. After each update its patch is coded against the weights of the update
before, in memory; and every ten updates one against the weights ten updates before, which is
decoded again, to the bit. Then, at each rate, updates that write a patch each are timed in turns
with updates that write none; what they write takes as long as on a line of --mbits. About three
minutes on two quiet cores; figures: docs/follow-weights.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import ran_on
from xcloud.features.weight_patches.codec import bits_of
from xcloud.features.weight_patches.objects import decode, encode
from xcloud.features.weight_patches.store import PatchStore, plain
from xcloud.features.weight_patches.writer import PatchWriter, WriteTiming, WrittenStage
from xcloud.line.mailbox import ObjectStore
from xcloud.models.causal_network import Part, config_of, draw_weights, network_of
from xcloud.models.causal_stage import CausalStage
from xcloud.models.stages import LABEL, TEXT, TYPES
from xcloud.net.link import LinkRecord
from xcloud.pipeline.settings import AdamW

VOCABULARY, LENGTH, BATCH = 4096, 64, 8
EVERY = (1, 10)
TURN = 5  # updates that write a patch each, then as many that write none


def stage_of_ten_million() -> CausalStage:
    config = config_of(
        {
            "model_type": "qwen2", "hidden_size": 320, "intermediate_size": 864,
            "num_hidden_layers": 7, "num_attention_heads": 5, "num_key_value_heads": 5,
            "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
            "tie_word_embeddings": True,
        }
    )  # fmt: skip
    part = Part(blocks=range(7), is_first=True, is_last=True)
    network = network_of(config, part=part)
    draw_weights(network, seed=0)
    about = {"lora": False, "max_length": LENGTH}
    return CausalStage(network=network, part=part, chunk=VOCABULARY, architecture=about)


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield sentences in which a token follows from the two before, one time in four by chance."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draw)
        by_chance = torch.rand(BATCH, LENGTH + 1, generator=draw) < 0.25
        for place in range(2, LENGTH + 1):
            follows = (7 * text[:, place - 1] + text[:, place - 2]) % 1021
            text[:, place] = torch.where(by_chance[:, place], text[:, place] % 1021, follows)
        ids = text[:, :-1]
        yield {TEXT: ids, TYPES: torch.zeros_like(ids), LABEL: text[:, 1:]}


def train(stage: CausalStage, rate: float, steps: int, seed: int) -> Iterator[float]:
    """Yield the loss of each update, once it is made."""
    optimizer = AdamW(stage.parameters(), rate, (0.9, 0.95))
    for _, batch in zip(range(steps), batches(seed), strict=False):
        loss = stage(None, batch).loss / batch[LABEL].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        yield float(loss.detach())


def measured(stage: CausalStage, rate: float, steps: int) -> list[dict[str, Any]]:
    """Return a row for each number of updates between two patches."""
    kept = {every: {n: bits_of(t) for n, t in stage.exported().items()} for every in EVERY}
    found: dict[int, list[tuple[int, int, float]]] = {every: [] for every in EVERY}
    num_values = sum(bits.size for bits in kept[1].values())
    losses = []
    for step, loss in enumerate(train(stage, rate, steps, seed=2), start=1):
        losses.append(loss)
        for every in EVERY:
            if step % every == 0:
                now = {n: bits_of(t) for n, t in stage.exported().items()}
                found[every].append(coded(kept[every], now, is_checked=every > 1))
                kept[every] = now
    return [
        {
            "rate": rate,
            "every": every,
            "loss_from": round(losses[0], 3),
            "loss_to": round(losses[-1], 3),
            "changed_share": statistics.median(one[0] for one in rows) / num_values,
            "patch_bytes": round(statistics.median(one[1] for one in rows)),
            "whole_bytes": 2 * num_values,
            "encode_s": round(statistics.median(one[2] for one in rows), 3),
        }
        for every, rows in found.items()
    ]


def coded(before: dict[str, Any], now: dict[str, Any], is_checked: bool) -> tuple[int, int, float]:
    """Return values changed, bytes of the object, and seconds of this thread to code it.

    is_checked: it is decoded again, and must give the same bits.
    """
    about = {"run": "benchmark", "attempt": 1, "stage": 0, "is_last": False}
    since_s = time.thread_time()
    data = encode(now, before, {}, {}, step=2, base=1, **about)
    took_s = time.thread_time() - since_s
    if is_checked:
        whole = decode(encode(before, None, {}, {}, step=1, base=None, **about), before=None)
        found = decode(data, before=whole)
        assert all((found.tensors[name] == bits).all() for name, bits in now.items())
    num_changed = sum(int((before[name] != bits).sum()) for name, bits in now.items())
    return num_changed, len(data), took_s


class LineStore(ObjectStore):
    """A folder whose objects take as long to write as on a line."""

    def __init__(self, folder: str, mbits: float) -> None:
        super().__init__(folder)
        self._bytes_per_s = mbits * 1e6 / 8

    def put(self, name: str, data: bytes) -> None:
        time.sleep(len(data) / self._bytes_per_s)
        super().put(name, data)


def held(stage: CausalStage, rate: float, steps: int, mbits: float) -> dict[str, float]:
    """Return how long updates take that write a patch each, in turns with others."""
    with tempfile.TemporaryDirectory() as folder:
        writer = PatchWriter(
            [WrittenStage(0, stage)],
            plan=WriteTiming(every=1, whole_every=10 * steps, last_step=-1),
            store=PatchStore(LineStore(folder, mbits), plain),
            about={"run": "benchmark", "attempt": 1},
            data=SimpleNamespace(save_tokenizers=lambda folder: None),  # type: ignore[arg-type]
            reporter=SimpleNamespace(event=lambda *given, **fields: None),  # type: ignore[arg-type]
            record=LinkRecord(to="followers"),
        )
        writer.write(0)
        writer.settle()  # the snapshot
        update_s: dict[bool, list[float]] = {True: [], False: []}
        pause_s = []
        since_s = time.monotonic()
        for step, _ in enumerate(train(stage, rate, 2 * steps, seed=2), start=1):
            writes = (step - 1) // TURN % 2 == 0
            if writes:
                before_s = time.monotonic()
                writer.write(step)
                pause_s.append(time.monotonic() - before_s)
            update_s[writes].append(time.monotonic() - since_s)
            if step % TURN == 0:
                writer.settle()  # no update of the next turn waits for it
            since_s = time.monotonic()
    return {
        "rate": rate,
        "pause_s": round(statistics.median(pause_s), 4),
        "update_with_s": round(statistics.median(update_s[True]), 3),
        "update_without_s": round(statistics.median(update_s[False]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="updates at each rate")
    parser.add_argument("--warm", type=int, default=40, help="updates before, at 1e-3")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--mbits", type=float, default=100, help="of the line to the bucket")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    stage = stage_of_ten_million()
    for loss in train(stage, 1e-3, given.warm, seed=1):
        warm_loss = loss
    print(
        f"{sum(p.numel() for p in stage.parameters()):,} weights, loss {warm_loss:.3f}; {ran_on()}"
    )
    rows = []
    for rate in given.rates:
        for row in measured(copy.deepcopy(stage), rate, given.steps):
            rows.append(row)
            share = row["patch_bytes"] / row["whole_bytes"]
            print(
                f"{rate:.0e} every {row['every']:>2}: {100 * row['changed_share']:.2f} % changed, "
                f"{row['patch_bytes']:,} of {row['whole_bytes']:,} bytes ({100 * share:.2f} %, "
                f"1/{1 / share:.1f}), {row['encode_s']} s; loss {row['loss_from']} to "
                f"{row['loss_to']}",
                flush=True,
            )
    for rate in given.rates:
        row = held(copy.deepcopy(stage), rate, given.steps, mbits=given.mbits)
        rows.append(row)
        print(
            f"{rate:.0e} at {given.mbits:g} Mbit/s: an update takes {row['update_with_s']} s with "
            f"a patch and {row['update_without_s']} s without; it is held for {row['pause_s']} s",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

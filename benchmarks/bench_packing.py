"""CPU time and memory of a training step on samples of packed documents.

python -m benchmarks.bench_packing [--lengths 128 2048 8192] [--width 64] [--blocks 2]     a minute

A Llama of drawn weights in one stage, forward and backward of one micro-batch in FP32, one thread.
Memory is the most that tensors take at once, counted where they are made. Last measured:
docs/causal-language-models.md.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.machine import say_where
from xcloud.contracts.model import NO_LABEL, Batch
from xcloud.models.causal_network import Part, config_of, draw_weights, network_of
from xcloud.models.causal_stage import CausalStage
from xcloud.rank.peak_bytes import PeakBytes
from xcloud.rank.reports import SavedTensors

WORDS = 1000
ROWS = 1024  # tokens of a micro-batch, or one sample
SHARES = (1.0, 0.37, 0.04)  # of a sample, the longest document; the shortest has a sixth of that


def packed(length: int, longest: int, draw: torch.Generator) -> Batch:
    """Return samples of documents of unequal lengths."""
    num_samples = max(1, ROWS // length)
    text_BS = torch.randint(3, WORDS, (num_samples, length), generator=draw)
    types_BS = torch.zeros_like(text_BS)
    for types_S in types_BS if longest < length else ():
        start = 0
        while start < length:
            size = int(torch.randint(max(1, longest // 6), longest + 1, (1,), generator=draw))
            types_S[start + size :] += 1
            start += size
    label_BS = text_BS.roll(-1, 1)
    label_BS[:, -1] = NO_LABEL
    return {
        "ids": torch.arange(num_samples),
        "text": text_BS,
        "types": types_BS,
        "label": label_BS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 2048, 8192])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    given = parser.parse_args()
    say_where()
    torch.set_num_threads(1)
    config = config_of(
        {
            "model_type": "llama", "vocab_size": WORDS, "hidden_size": given.width,
            "num_hidden_layers": given.blocks, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 2 * given.width, "max_position_embeddings": max(given.lengths),
        }
    )  # fmt: skip
    part = Part(blocks=range(given.blocks), is_first=True, is_last=True)
    network = network_of(config, part=part)
    draw_weights(network, seed=0)
    stage = CausalStage(network=network, part=part, chunk=8192, architecture={"lora": False})

    def step(batch: Batch) -> None:
        loss = stage(None, batch).loss
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]

    for length in given.lengths:
        for share in SHARES:
            draw = torch.Generator().manual_seed(0)
            batch = packed(length, longest=max(1, int(share * length)), draw=draw)
            step(batch)
            times_s = []
            for _ in range(3):
                started_at_s = time.process_time()
                step(batch)
                times_s.append(time.process_time() - started_at_s)
            saved = SavedTensors()
            with PeakBytes() as most, saved:
                step(batch)
            num_documents = int((batch["types"].amax(1) + 1).sum())
            print(
                f"{len(batch['ids'])} x {length} tokens, {num_documents} documents: "
                f"{min(times_s):.3f} s, {most.peak / 1e6:.1f} MB at once, of them "
                f"{saved.peak_bytes / 1e6:.1f} MB kept for the backward",
                flush=True,
            )


if __name__ == "__main__":
    main()

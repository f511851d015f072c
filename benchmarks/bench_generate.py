"""Tokens per second of `python -m xcloud generate` with and without kept keys and values.

python -m benchmarks.bench_generate [--width 256] [--blocks 8] [--tokens 256]     about a minute

A Llama of random weights in two stages in one process, no compressor, a prompt of 16 tokens. Both
ways write the same tokens. Last measured: docs/causal-language-models.md.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

import torch

from benchmarks.machine import say_where
from xcloud.models.causal_network import Part, config_of, draw_weights, network_of
from xcloud.models.causal_stage import CausalStage
from xcloud.use import Choice, following

PROMPT = list(range(16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    say_where()
    torch.set_num_threads(1)
    config = config_of(
        {
            "model_type": "llama", "vocab_size": 8000, "hidden_size": given.width,
            "num_hidden_layers": given.blocks, "num_attention_heads": given.width // 32,
            "intermediate_size": 3 * given.width, "max_position_embeddings": 4096,
        }
    )  # fmt: skip
    half = given.blocks // 2
    parts = Part(range(half), True, False), Part(range(half, given.blocks), False, True)
    stages = []
    for part in parts:
        network = network_of(config, part)
        draw_weights(network, seed=0)
        stages.append(CausalStage(network, part, 8192, {"lora": False}).eval())

    found, rates = [], []
    for cached in (True, False):
        tokens = following(stages, lambda stage, message: message, PROMPT, Choice(), cached)
        next(tokens)  # the prompt
        started_at_s = time.perf_counter()
        found.append(list(islice(tokens, given.tokens)))
        rates.append(given.tokens / (time.perf_counter() - started_at_s))
        print(f"{'kept' if cached else 'anew'}: {rates[-1]:8.1f} tokens/s", flush=True)
    assert found[0] == found[1], "both ways write the same"
    print(f"ratio: {rates[0] / rates[1]:.1f} over {given.tokens} tokens")


if __name__ == "__main__":
    main()

"""How long replicas take to encode, decode and merge their tensors, against casting them to FP16.

python -m benchmarks.averaging_codecs [--threads 1] [--millions 4] [--only powersgd]

Tensors: float32 matrices [2048, 512] and a vector of 512 for each, `millions` million values in
all, as in the layers of a transformer; Gaussian. A row is the median of 3 rounds after a first.
encode: with error feedback, so what the message lost is known after it. decode: one message.
merge: two contributions. "x FP16": encode + decode against a plain cast to FP16 and back, which is
little more than a copy and is timed in the same round, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.machine import say_where
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import PowerSgd
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.sparsify import RandomK, RandomTopK, TopK
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.merging import Contribution, weighted_sum

ROWS, COLUMNS, ROUNDS = 2048, 512, 3


def compressors() -> Iterator[tuple[str, Compressor]]:
    yield "none", Chain()
    yield "fp16", Cast("float16")
    yield "bf16", Cast("bfloat16")
    yield "int8", BlockInt(8)
    yield "int4", BlockInt(4)
    yield "int4 stochastic", BlockInt(4, stochastic=True)
    yield "sign", BlockInt(1, block=1024)
    yield "topk 1 %, fp16", Chain(topk=TopK(0.01), fp16=Cast("float16"))
    yield "randomk 1 %, fp16", Chain(randomk=RandomK(0.01), fp16=Cast("float16"))
    yield "cocktail", Chain(cocktail=RandomTopK(0.1, 0.1), int4=BlockInt(4))
    yield "powersgd 4, fp16", Chain(powersgd=PowerSgd(4), fp16=Cast("float16"))
    yield "powersgd 32, fp16", Chain(powersgd=PowerSgd(32), fp16=Cast("float16"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--millions", type=int, default=4)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    say_where()
    layers = max(1, args.millions * 10**6 // (ROWS * COLUMNS))
    shapes = {
        f"{layer}.{name}": torch.Size(shape)
        for layer in range(layers)
        for name, shape in (("weight", (ROWS, COLUMNS)), ("bias", (COLUMNS,)))
    }
    tensors = [torch.randn(shape) for shape in shapes.values()]
    num_values = sum(tensor.numel() for tensor in tensors)
    print(
        f"{num_values / 1e6:.1f} million values in {len(tensors)} tensors, {args.threads} "
        f"thread(s), torch {torch.__version__}\n"
    )
    print("| compressor | bits per value | cast ms | encode ms | decode ms | merge ms | x FP16 |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, compressor in compressors():
        if args.only in name:
            print(row(name, compressor, shapes, tensors), flush=True)


def row(
    name: str, compressor: Compressor, shapes: dict[str, torch.Size], tensors: list[Tensor]
) -> str:
    codec = TensorCodec(shapes, lambda name, shape: compressor, 1, True)
    parts, _ = codec.encode(tensors)
    two = [Contribution(codec.decode(parts), 1.0), Contribution(codec.decode(parts), 1.0)]
    calls: list[Callable[[], object]] = [
        lambda: [tensor.half().float() for tensor in tensors],
        lambda: codec.encode(tensors),
        lambda: codec.decode(parts),
        lambda: weighted_sum(two),
    ]
    rounds = [[elapsed_s(call) for call in calls] for _ in range(ROUNDS + 1)][1:]
    times = " | ".join(
        f"{1e3 * statistics.median(column):.1f}" for column in zip(*rounds, strict=True)
    )
    ratio = statistics.median((encode + decode) / cast for cast, encode, decode, _ in rounds)
    bits = 8 * codec.max_bytes / (codec.raw_bytes / 4)
    return f"| {name} | {bits:.3g} | {times} | {ratio:.1f} |"


def elapsed_s(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

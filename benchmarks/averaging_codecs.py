"""How long replicas take to encode, decode and merge their tensors, against casting them to FP16.

python benchmarks/averaging_codecs.py [--threads 1] [--millions 4] [--only powersgd]

Tensors: float32 matrices [2048, 512] and a vector of 512 for each, `millions` million values in
all, as in the layers of a transformer; Gaussian. A row is the median of 3 rounds after a first.
encode: with error feedback, so what the message lost is known after it. decode: one message.
merge: two contributions. "x FP16": encode + decode against a plain cast to FP16 and back in the
same run, which is little more than a copy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from xcloud.comm.cast import Cast, Nothing
from xcloud.comm.chain import Chain
from xcloud.comm.compressor import Compressor
from xcloud.comm.power_sgd import PowerSgd
from xcloud.comm.quantize import BlockInt
from xcloud.comm.sparsify import RandomK, RandomTopK, TopK
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.merging import Contribution, weighted_sum

ROWS, COLUMNS, ROUNDS = 2048, 512, 3


def compressors() -> Iterator[tuple[str, Compressor]]:
    yield "none", Nothing()
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
    layers = max(1, args.millions * 10**6 // (ROWS * COLUMNS))
    shapes = {
        f"{layer}.{name}": torch.Size(shape)
        for layer in range(layers)
        for name, shape in (("weight", (ROWS, COLUMNS)), ("bias", (COLUMNS,)))
    }
    tensors = [torch.randn(shape) for shape in shapes.values()]
    cast_s = median_s(lambda: [tensor.half().float() for tensor in tensors])
    num_values = sum(tensor.numel() for tensor in tensors)
    print(
        f"{num_values / 1e6:.1f} million values in {len(tensors)} tensors, {args.threads} "
        f"thread(s), torch {torch.__version__}; cast to FP16 and back: {1e3 * cast_s:.1f} ms\n"
    )
    print("| compressor | bits per value | encode ms | decode ms | merge ms | x FP16 |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, compressor in compressors():
        if args.only in name:
            print(row(name, compressor, shapes, tensors, cast_s), flush=True)


def row(
    name: str,
    compressor: Compressor,
    shapes: dict[str, torch.Size],
    tensors: list[Tensor],
    cast_s: float,
) -> str:
    codec = TensorCodec(shapes, lambda name, shape: compressor, 1, True)
    parts, _ = codec.encode(tensors)
    encode_s = median_s(lambda: codec.encode(tensors))
    decode_s = median_s(lambda: codec.decode(parts))
    two = [Contribution(codec.decode(parts), 1.0), Contribution(codec.decode(parts), 1.0)]
    merge_s = median_s(lambda: weighted_sum(two))
    bits = 8 * codec.max_bytes / (codec.raw_bytes / 4)
    return (
        f"| {name} | {bits:.3g} | {1e3 * encode_s:.1f} | {1e3 * decode_s:.1f} "
        f"| {1e3 * merge_s:.1f} | {(encode_s + decode_s) / cast_s:.1f} |"
    )


def median_s(call: Callable[[], object]) -> float:
    call()
    elapsed_s = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        call()
        elapsed_s.append(time.perf_counter() - started)
    return statistics.median(elapsed_s)


if __name__ == "__main__":
    main()

"""How fast the compressors are, how much they save, and on which links they pay.

    python -m benchmarks.bench_codecs [--threads 1] [--rows 2048] [--features 768] [--only NAME]

Tensor: float32 [rows, features], columns of decaying size in a random basis (singular values
~ 1/i), each call another tensor of the same basis, as micro-batches are. Times are medians.
"MB/s" is of encoding and decoding one after the other; of memcpy, of two copies.
"pays below": the bandwidth at which the seconds saved on the wire equal those of encoding and
decoding; on a faster link the plain tensor arrives earlier.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.machine import say_where
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import Svd
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.rotation import Eden
from xcloud.comm.sparsify import RandomK, TopK
from xcloud.comm.transform import Transform
from xcloud.net.frame import Tensors, TensorSpec

ROUNDS = 7


def compressors() -> Iterator[tuple[str, Compressor]]:
    plain: list[Compressor] = [Chain(), Cast("float16"), Cast("bfloat16")]
    plain += [BlockInt(bits) for bits in (8, 6, 4, 3, 2, 1)]
    plain += [BlockInt(4, stochastic=True)]
    plain += [TopK(0.01), TopK(0.1), TopK(0.5), RandomK(0.1)]
    plain += [Chain(topk=TopK(0.1), fp16=Cast("float16"))]
    for compressor in plain:
        yield compressor.label, compressor
    for rate in (1 / 12, 0.2, 0.6):
        yield f"svd({rate:.3g}) exact", Svd(rate, method="exact")
        yield f"svd({rate:.3g})", Svd(rate)
        yield f"svd({rate:.3g}) 2 iterations", Svd(rate, iterations=2)
    yield "fp16(svd(0.6))", Chain(svd=Svd(0.6), fp16=Cast("float16"))
    for bits in (1, 2, 4):
        yield f"eden{bits}", Eden(bits)
    for step in (0.8, 1.6, 3.2):
        yield f"transform({step})", Transform(step)
    yield "int8(svd(0.2))", Chain(svd=Svd(0.2), int8=BlockInt(8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--only", default="", help="those whose name has this in it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    say_where()
    tensors = sample_tensors(args.rows, args.features)
    spec = TensorSpec.of(tensors[0])
    print(
        f"float32 [{args.rows}, {args.features}], {spec.num_bytes / 1e6:.2f} MB, "
        f"{args.threads} thread(s), torch {torch.__version__}\n"
    )
    copied = torch.empty_like(tensors[0])
    copy_s = median_s([lambda x=x: copied.copy_(x) for x in tensors])
    print(f"memcpy: {spec.num_bytes / (2 * copy_s) / 1e6:,.0f} MB/s\n")
    print(
        "| compressor | bytes | ratio | encode ms | decode ms | MB/s | rel. error | pays below |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, compressor in compressors():
        if args.only not in name:
            continue
        print(row(name, compressor.compress, compressor, tensors, spec), flush=True)
    name = "transform(3.2) of gradients"
    if args.only in name:
        shaping = Transform(3.2)
        activations = torch.randn(spec.shape)
        compress = partial(shaping.compress_gradient, activations=activations)
        print(row(name, compress, shaping, tensors, spec), flush=True)


def sample_tensors(num_rows: int, num_features: int) -> list[Tensor]:
    basis = torch.linalg.qr(torch.randn(num_features, num_features)).Q
    sizes = 1 / torch.arange(1, num_features + 1)
    return [(torch.randn(num_rows, num_features) * sizes) @ basis.T for _ in range(ROUNDS)]


def row(
    name: str,
    compress: Callable[[Tensor], Tensors],
    compressor: Compressor,
    tensors: list[Tensor],
    spec: TensorSpec,
) -> str:
    """One line of the table."""
    parts = [compress(tensor) for tensor in tensors[:2]]  # warm start, caches
    num_bytes = sum(part.nbytes for part in parts[1])
    error = relative_error(tensors[1], compressor.decompress(parts[1], spec))
    encode_s = median_s([lambda x=x: compress(x) for x in tensors])
    decode_s = median_s([lambda: compressor.decompress(parts[1], spec)] * ROUNDS)
    saved_bits = 8 * (spec.num_bytes - num_bytes)
    pays = "never"
    if saved_bits > 0:
        pays = f"{saved_bits / (encode_s + decode_s) / 1e9:.2f} Gbit/s"
    return (
        f"| {name} | {num_bytes:,} | {spec.num_bytes / num_bytes:.1f} | {1e3 * encode_s:.2f} "
        f"| {1e3 * decode_s:.2f} | {spec.num_bytes / (encode_s + decode_s) / 1e6:,.0f} "
        f"| {error:.4f} | {pays} |"
    )


def relative_error(tensor: Tensor, seen: Tensor) -> float:
    return float((tensor - seen).norm() / tensor.norm())


def median_s(calls: list[Callable[[], object]]) -> float:
    elapsed_s = []
    for call in calls:
        started = time.perf_counter()
        call()
        elapsed_s.append(time.perf_counter() - started)
    return statistics.median(elapsed_s)


if __name__ == "__main__":
    main()

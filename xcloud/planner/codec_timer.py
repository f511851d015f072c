"""Time what compressing costs on a device: messages over a boundary, and what replicas average. By
itself, so a run takes somewhat longer; memories are left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.comm.channel import Codec
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phased
from xcloud.comm.compressor import Compressor
from xcloud.comm.memory import NoMemory
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.merging import Contribution, by_tensor, weighted_sum
from xcloud.features.replicas.outer import OuterOptimizer, OuterParameters
from xcloud.net.frame import (
    Kind,
    MessageKey,
    TensorSpec,
    decode_frame,
    encode_frame,
    frame_bytes,
    seal_frame,
)
from xcloud.pipeline.exchange import FlatBuffer, RankGroup
from xcloud.simulator.costs import AveragingCodec, Direction

BUDGET_S = 0.1
MOST_TIMES = 5
OTHER_BYTES = 32 << 20


def median_s(once: Callable[[], object], device: torch.device) -> float:
    """Median seconds of 2 to MOST_TIMES times, up to BUDGET_S; the first is left out. Before each,
    other memory is used, as by what a rank computes in between: little is left in a processor's
    caches."""

    def now_s() -> float:
        """Once the device has done all that it was given."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    once()
    found: list[float] = []
    other = torch.ones(OTHER_BYTES // 4 if device.type == "cpu" else 0)
    while len(found) < 2 or (sum(found) < BUDGET_S and len(found) < MOST_TIMES):
        other.add_(1.0)
        started_s = now_s()
        once()
        found.append(now_s() - started_s)
    return statistics.median(found)


def time_codec(
    compressor: Compressor, specs: Sequence[TensorSpec], device: torch.device
) -> Direction:
    """A message of such tensors, of random numbers: bytes of the whole frame, seconds of
    compressing with framing, and of decompressing."""
    generator = torch.Generator().manual_seed(0)
    codecs = [Codec(compressor, NoMemory()) for _ in specs]  # what they remember must not mix
    values = []
    for codec, spec in zip(codecs, specs, strict=True):
        codec.compressor.use_stream(0)
        value = torch.randn(spec.shape, generator=generator, dtype=spec.dtype)
        values.append(value.to(device))

    def encode() -> Tensor:
        each = zip(codecs, values, strict=True)
        parts = (part for codec, value in each for part in codec.compressor.compress(value))
        return encode_frame(MessageKey(Kind.ACTIVATION), tuple(parts), 0)

    frame = encode()
    seal_frame(frame, 0.0)
    parts = decode_frame(frame, "this process").parts

    def decode() -> None:
        rest = iter(parts)
        for codec, spec in zip(codecs, specs, strict=True):
            number = len(codec.compressor.wire_specs(spec))
            codec.compressor.decompress(tuple(islice(rest, number)), spec)

    return Direction(len(frame), median_s(encode, device), median_s(decode, device))


def time_averaging(
    trained: Mapping[str, nn.Parameter], compression: Compression | Phased
) -> AveragingCodec | None:
    """Of all values of `trained`: encoding with framing; decoding and adding it to one's own. None
    for a compressor that replicas cannot average with."""
    if not trained:
        return AveragingCodec(0)
    first = next(iter(trained.values()))
    shapes = {name: p.shape for name, p in trained.items()}
    try:
        codec = TensorCodec(shapes, compression.for_tensor, 0, True, first.dtype, first.device)
    except ConfigError:
        return None
    generator = torch.Generator(first.device).manual_seed(0)
    tensors = [
        1e-3 * torch.randn(p.shape, generator=generator, device=p.device) for p in trained.values()
    ]
    parts, own = codec.encode(tensors)
    key = MessageKey(Kind.AVERAGING)

    def merge() -> None:
        weighted_sum([Contribution(own, 1.0), Contribution(codec.decode(parts), 1.0)])

    return AveragingCodec(
        frame_bytes(codec.wire_specs),
        median_s(lambda: encode_frame(key, codec.encode(tensors)[0], 0), first.device),
        median_s(merge, first.device),
    )


def time_around_averaging(trained: Mapping[str, nn.Parameter]) -> tuple[float, float]:
    """What an exchange of all trained values takes beside its codec: of gradients, and of changes
    after local updates."""
    parameters = [*trained.values()]
    if not parameters:
        return 0.0, 0.0
    buffer, device = FlatBuffer(parameters), parameters[0].device
    merged = [torch.zeros_like(p) for p in parameters]

    def gradients() -> None:
        """As features/replicas/gradient_averaging.py."""
        buffer.is_finite()
        for parameter, tensor in zip(parameters, merged, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(tensor).mul_(1)

    shares = by_tensor({name: parameter.shape for name, parameter in trained.items()}, 1)
    outer = OuterParameters(trained, shares, RankGroup.alone(), OuterOptimizer())

    def changes() -> None:
        """As features/replicas/local_updates.py."""
        outer.gradient()
        outer.move(merged)
        outer.take()

    return median_s(gradients, device), median_s(changes, device)

"""Time what compressing costs on a device: messages over a boundary, and what replicas average. By
itself, so a run takes somewhat longer; memories are left out.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.cluster.frame import (
    Kind,
    MessageKey,
    TensorSpec,
    decode_frame,
    encode_frame,
    frame_bytes,
    seal_frame,
)
from xcloud.comm.boundary import BoundaryField
from xcloud.comm.channel import Codec
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phased
from xcloud.comm.compressor import Compressor
from xcloud.comm.memory import NoMemory
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.exchange import FlatBuffer, RankGroup
from xcloud.parallel.merging import Contribution, by_tensor, weighted_sum
from xcloud.parallel.outer_parameters import OuterOptimizer, OuterParameters
from xcloud.plan.costs import Direction
from xcloud.plan.profile import AveragingCodec

BUDGET_S = 0.1
MOST_TIMES = 5
OTHER_BYTES = 32 << 20


@dataclass(frozen=True)
class Stopwatch:
    device: torch.device

    def median_s(self, once: Callable[[], object]) -> float:
        """Median seconds of 2 to MOST_TIMES times, up to BUDGET_S; the first is left out. Before
        each, other memory is used, as by what a rank computes in between: little is left in a
        processor's caches."""
        once()
        found: list[float] = []
        while len(found) < 2 or (sum(found) < BUDGET_S and len(found) < MOST_TIMES):
            if self.device.type == "cpu":
                _other().add_(1.0)
            started_s = self._now_s()
            once()
            found.append(self._now_s() - started_s)
        return statistics.median(found)

    def _now_s(self) -> float:
        """Once the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@cache
def _other() -> Tensor:
    return torch.ones(OTHER_BYTES // 4)


def time_codec(
    compressor: Compressor, fields: Sequence[BoundaryField], num_rows: int, device: torch.device
) -> Direction:
    """A message of these fields with so many rows, of random numbers: bytes of the whole frame,
    seconds of compressing with framing, and of decompressing."""
    watch, codec = Stopwatch(device), Codec(compressor, NoMemory())
    codec.use_stream(0)
    generator = torch.Generator().manual_seed(0)
    entries: list[tuple[Compressor | None, TensorSpec, Tensor]] = []
    for entry in fields:
        spec = entry.spec(num_rows)
        if entry.dtype.is_floating_point:  # what a compressor remembers must not mix
            values = torch.randn(spec.shape, generator=generator, dtype=spec.dtype).to(device)
            entries.append((copy.deepcopy(codec.compressor), spec, values))
        else:
            entries.append((None, spec, torch.zeros(spec.shape, dtype=spec.dtype, device=device)))

    def encode() -> Tensor:
        parts: list[Tensor] = []
        for made, _, values in entries:
            parts += (values,) if made is None else made.compress(values)
        return encode_frame(MessageKey(Kind.ACTIVATION), tuple(parts), 0)

    frame = encode()
    seal_frame(frame, 0.0)
    parts = decode_frame(frame, "this process").parts

    def decode() -> None:
        start = 0
        for made, spec, _ in entries:
            end = start + (1 if made is None else len(made.wire_specs(spec)))
            if made is not None:
                made.decompress(tuple(parts[start:end]), spec)
            start = end

    return Direction(len(frame), watch.median_s(encode), watch.median_s(decode))


def time_averaging(
    trained: Mapping[str, nn.Parameter], compression: Compression | Phased, watch: Stopwatch
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
        watch.median_s(lambda: encode_frame(key, codec.encode(tensors)[0], 0)),
        watch.median_s(merge),
    )


def time_around_averaging(
    trained: Mapping[str, nn.Parameter], watch: Stopwatch
) -> tuple[float, float]:
    """What an exchange of all trained values takes beside its codec: of gradients, and of changes
    after local updates."""
    parameters = [*trained.values()]
    if not parameters:
        return 0.0, 0.0
    buffer = FlatBuffer(parameters)
    merged = [torch.zeros_like(p) for p in parameters]

    def gradients() -> None:
        """As parallel/gradient_averaging.py."""
        buffer.is_finite()
        for parameter, tensor in zip(parameters, merged, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(tensor).mul_(1)

    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    shares = by_tensor({name: parameter.shape for name, parameter in named.items()}, 1)
    outer = OuterParameters(named, shares, RankGroup.alone(), OuterOptimizer())

    def changes() -> None:
        """As parallel/local_updates.py."""
        outer.gradient()
        outer.move(merged)
        outer.take()

    return watch.median_s(gradients), watch.median_s(changes)

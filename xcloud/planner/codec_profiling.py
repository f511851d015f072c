"""Measure what a compressor costs in one process: over a boundary of stages, and when replicas
average. No models; profiling.py runs the stages whose messages are compressed here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
from xcloud.comm.boundary import Boundary, BoundaryField, Message
from xcloud.comm.channel import Codec
from xcloud.comm.compression import Compression, Phased
from xcloud.comm.compressor import Compressor
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.exchange import FlatBuffer
from xcloud.parallel.merging import Contribution, weighted_sum
from xcloud.parallel.outer_parameters import OuterOptimizer, OuterParameters
from xcloud.parallel.partition import by_tensor
from xcloud.parallel.rank_group import RankGroup
from xcloud.plan.profile import AveragingCodec, BoundaryCodec, Curve, Way
from xcloud.plan.stopwatch import Stopwatch


def boundary_codec(
    boundary: Boundary,
    compression: Compression,
    messages: Mapping[int, Message],
    gradients: Mapping[int, Message],
    watch: Stopwatch,
) -> BoundaryCodec:
    """messages, gradients: what crosses, by samples of a micro-batch."""
    forward = Codec(compression.forward, compression.forward_memory)
    backward = Codec(compression.backward, compression.backward_memory)
    return BoundaryCodec(
        _way(forward, boundary.fields, messages, watch),
        _way(backward, boundary.gradient_fields, gradients, watch)
        if boundary.gradient_returns
        else None,
    )


@dataclass(frozen=True)
class _End:
    """One end of a direction. compressors: by floating field; each has its own, as on a channel,
    for what they remember must not mix. specs: of the same fields."""

    fields: Sequence[BoundaryField]
    compressors: Mapping[str, Compressor]
    specs: Mapping[str, TensorSpec]

    def encode(self, message: Message) -> Tensor:
        """The frame, uint8 [num_bytes]."""
        parts: list[Tensor] = []
        for entry in self.fields:
            tensor, made = message[entry.name].detach(), self.compressors.get(entry.name)
            parts += (tensor,) if made is None else made.compress(tensor)
        return encode_frame(MessageKey(Kind.ACTIVATION), tuple(parts), 0)

    def decode(self, parts: Sequence[Tensor]) -> None:
        start = 0
        for entry in self.fields:
            spec = self.specs.get(entry.name)
            if spec is None:
                start += 1
                continue
            made = self.compressors[entry.name]
            end = start + len(made.wire_specs(spec))
            made.decompress(tuple(parts[start:end]), spec)
            start = end


def _way(
    codec: Codec,
    fields: Sequence[BoundaryField],
    messages: Mapping[int, Message],
    watch: Stopwatch,
) -> Way:
    """Compressing with framing, and decompressing, as the main thread of a rank does them.
    Memories are left out."""
    num_bytes, compress_s, decompress_s = [], [], []
    codec.use_stream(0)
    for b, message in sorted(messages.items()):
        floating = [f for f in fields if f.dtype.is_floating_point]
        specs = {f.name: f.spec(len(message[f.name])) for f in floating}
        compressors = {name: copy.deepcopy(codec.compressor) for name in specs}
        end = _End(fields, compressors, specs)
        frame = end.encode(message)
        seal_frame(frame, 0.0)
        parts = decode_frame(frame, "this process").parts
        num_bytes.append((b, len(frame)))
        compress_s.append((b, watch.median_s(partial(end.encode, message), cold=True)))
        decompress_s.append((b, watch.median_s(partial(end.decode, parts), cold=True)))
    return Way(Curve(num_bytes), Curve(compress_s), Curve(decompress_s))


def averaging_codec(
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
        watch.median_s(lambda: encode_frame(key, codec.encode(tensors)[0], 0), cold=True),
        watch.median_s(merge, cold=True),
    )


def around_averaging_s(
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

    alone = RankGroup.alone()
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    shares = by_tensor({name: parameter.shape for name, parameter in named.items()}, 1)
    outer = OuterParameters(named, shares, alone, OuterOptimizer())
    outer.set()

    def changes() -> None:
        """As parallel/local_updates.py."""
        outer.gradient()
        outer.move(merged)
        outer.take()

    found = watch.median_s(gradients, cold=True), watch.median_s(changes, cold=True)
    for parameter in parameters:
        parameter.grad = None
    return found

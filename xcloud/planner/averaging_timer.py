"""Time what replicas spend on averaging, on a device: their codec, and the work beside it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phased
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.merging import Contribution, by_tensor, weighted_sum
from xcloud.features.replicas.outer_optimizer import OuterOptimizer, OuterParameters
from xcloud.net.frame import Kind, MessageKey, encode_frame, frame_bytes
from xcloud.pipeline.exchange import FlatBuffer, RankGroup
from xcloud.simulator.codec_timer import median_s
from xcloud.simulator.costs import AveragingCodec


def time_averaging(
    trained: Mapping[str, nn.Parameter], compression: Compression | Phased
) -> AveragingCodec | None:
    """Return the costs of averaging all values of `trained`; None for a compressor that cannot.

    They are those of encoding with framing, and of decoding a message and adding it to one's own
    values.
    """
    if not trained:
        return AveragingCodec(0)
    first = next(iter(trained.values()))
    shapes = {name: p.shape for name, p in trained.items()}
    try:
        codec = TensorCodec(
            shapes,
            choose=compression.for_tensor,
            identity=0,
            feedback=True,
            dtype=first.dtype,
            device=first.device,
        )
    except ConfigError:
        return None
    generator = torch.Generator(first.device).manual_seed(0)
    tensors = [
        # Of the size of changes of weights.
        1e-3 * torch.randn(p.shape, generator=generator, device=p.device)
        for p in trained.values()
    ]
    parts, own = codec.encode(tensors)
    key = MessageKey(Kind.AVERAGING)

    return AveragingCodec(
        num_bytes=frame_bytes(codec.wire_specs),
        encode_s=median_s(
            lambda: encode_frame(key, parts=codec.encode(tensors)[0], sequence=0),
            device=first.device,
        ),
        decode_s=median_s(
            lambda: weighted_sum([Contribution(own, 1.0), Contribution(codec.decode(parts), 1.0)]),
            device=first.device,
        ),
    )


def time_around_averaging(trained: Mapping[str, nn.Parameter]) -> tuple[float, float]:
    """Return the seconds that an exchange of all trained values takes beside its codec.

    The first is that of gradients, the second that of changes after local updates.
    """
    parameters = [*trained.values()]
    if not parameters:
        return 0.0, 0.0
    # Makes gradients too, as views of one vector: what the exchange works on.
    buffer = FlatBuffer(parameters)
    device = parameters[0].device
    merged = [torch.zeros_like(p) for p in parameters]

    def gradients() -> None:
        """Do as features/replicas/gradient_averaging.py does."""
        buffer.is_finite()
        for parameter, tensor in zip(parameters, merged, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(tensor).mul_(1)

    shares = by_tensor(
        {name: parameter.shape for name, parameter in trained.items()}, num_shares=1
    )
    outer = OuterParameters(
        parameters=trained, shares=shares, group=RankGroup.alone(), optimizer=OuterOptimizer()
    )

    def changes() -> None:
        """Do as features/replicas/local_updates.py does."""
        outer.gradient()
        outer.move(merged, round_number=1)
        outer.take()

    return median_s(gradients, device), median_s(changes, device)

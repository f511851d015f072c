"""A decoder-only Transformer that nobody has measured, as a profile: seconds from floating-point
operations, bytes from shapes. Runs nothing and holds no weights.

Letters: S tokens of a sample, H hidden width, V vocabulary, P weights of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.cluster.frame import TensorSpec, frame_bytes
from xcloud.cluster.link_profile import LinkProfile
from xcloud.comm.boundary import Boundary, BoundaryField
from xcloud.comm.compression import Compression, Phased
from xcloud.comm.compressor import Compressor
from xcloud.plan.profile import (
    AveragingCodec,
    BoundaryCodec,
    CompressorCosts,
    Curve,
    DirectionCurves,
    Piece,
    Profile,
)

MANY = 64  # samples at which a message is counted beside that of one; between them a straight line
WEIGHT_BYTES = 4  # FP32 weights, gradients and two moments: 16 bytes, as of mixed precision
ACTIVATION_BYTES = (
    34  # of a token and hidden feature in 16 bits (arXiv:2205.05198, without scores)
)
SHARE_OF_FIRST = 2  # backward takes so many times the forward


Above0 = Annotated[float, Field(gt=0.0)]


@settings("codecs")
class Speed:
    """Of a codec, in bytes of FP32 values a second. null: it takes no time."""

    compress_bytes_per_s: Above0 | None = None
    decompress_bytes_per_s: Above0 | None = None

    def seconds(self, num_bytes: float) -> tuple[float, float]:
        """Of compressing, of decompressing."""
        rates = self.compress_bytes_per_s, self.decompress_bytes_per_s
        first, second = (0.0 if rate is None else num_bytes / rate for rate in rates)
        return first, second


@settings("model")
class Decoder:
    """`model` of a what-if plan.

    flop_per_s: of a rank at its best; utilisation: the share of it that computing reaches.
    seconds_per_layer: in place of both, forward of one sample through one layer.
    parameters_per_layer: null = 12 hidden². checkpointing: a layer's activations are computed
        again in the backward, and only its input is kept.
    trained_share: of the weights, as 0.005 with LoRA; the others take no gradient, no moments and
        cross in no average.
    """

    layers: Positive
    hidden: Positive
    vocabulary: Positive
    sequence_length: Positive
    flop_per_s: Above0 | None = None
    utilisation: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seconds_per_layer: Above0 | None = None
    parameters_per_layer: Positive | None = None
    checkpointing: bool = False
    trained_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0

    def __post_init__(self) -> None:
        if (self.flop_per_s is None) == (self.seconds_per_layer is None):
            raise ConfigError("model needs either flop_per_s or seconds_per_layer")

    @property
    def layer_parameters(self) -> int:
        return self.parameters_per_layer or 12 * self.hidden**2

    @property
    def parameters(self) -> int:
        """Embeddings and head are two matrices."""
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden

    @property
    def layer_flop(self) -> float:
        """Forward of one sample: 2P a token, and 4SH for the scores and what they weigh."""
        per_token = 2 * self.layer_parameters + 4 * self.sequence_length * self.hidden
        return float(self.sequence_length * per_token)

    @property
    def head_flop(self) -> float:
        return 2.0 * self.sequence_length * self.hidden * self.vocabulary

    @property
    def step_flop(self) -> float:
        """Forward and backward of one sample; what checkpointing computes again does not count."""
        return (1 + self.backward_share) * (self.layers * self.layer_flop + self.head_flop)

    @property
    def backward_share(self) -> float:
        """Of the forward: gradients of what a layer reads, and of what is trained of it."""
        return (SHARE_OF_FIRST - 1) + self.trained_share

    def profile(
        self,
        compressions: Mapping[str, Compression | Phased],
        codecs: Mapping[str, Speed],
        lines: Mapping[str, LinkProfile],
    ) -> Profile:
        """codecs: by compressor, "*" for all others."""
        boundary = Boundary(
            (
                BoundaryField("counts", (), torch.int16),
                BoundaryField("places", (), torch.int16, "counted"),
                BoundaryField("hidden", (self.hidden,), torch.float32, "counted"),
            ),
            self.sequence_length,
        )
        return Profile(
            [self._piece(i) for i in range(self.layers)],
            {
                name: self._costs(found, boundary, codecs.get(name, codecs.get("*", Speed())))
                for name, found in compressions.items()
            },
            lines=lines,
            tokens_per_sample=float(self.sequence_length),
        )

    def _piece(self, i: int) -> Piece:
        """The first has the embeddings before it, the last the head behind it."""
        is_last = i == self.layers - 1
        if self.flop_per_s is not None:
            layer_s = self.layer_flop / (self.flop_per_s * self.utilisation)
        else:
            assert self.seconds_per_layer is not None
            layer_s = self.seconds_per_layer
        head_s = layer_s * self.head_flop / self.layer_flop if is_last else 0.0
        share = self.backward_share
        backward_s = (share + self.checkpointing) * layer_s + share * head_s
        outer = (i == 0) + is_last
        weights = self.layer_parameters + outer * self.vocabulary * self.hidden
        kept = (2 if self.checkpointing else ACTIVATION_BYTES) * self.sequence_length * self.hidden
        return Piece(
            f"layer {i}", Curve([(1, layer_s + head_s)]), Curve([(1, backward_s)]),
            None if is_last else 0, WEIGHT_BYTES * weights,
            round(WEIGHT_BYTES * weights * self.trained_share),
            Curve([(1, kept)]), blocks=1,
        )  # fmt: skip

    def _costs(
        self, compression: Compression | Phased, boundary: Boundary, speed: Speed
    ) -> CompressorCosts:
        last = compression.at(1 << 60)  # of phases the last one
        ways = (
            self._way(last.forward, boundary.fields, speed),
            self._way(last.backward, boundary.gradient_fields, speed),
        )
        sent = 0
        for name, shape in self._tensors():
            matrix = TensorSpec(tuple(shape), torch.float32)
            specs = compression.for_tensor(name, torch.Size(shape)).wire_specs(matrix)
            copies = 1 if name in ("embeddings", "head") else self.layers
            sent += copies * sum(spec.num_bytes for spec in specs)
        sent, trained = round(sent * self.trained_share), self.parameters * self.trained_share
        is_identity = last.backward.family == "none" and last.averaging is None
        encode_s, decode_s = (0.0, 0.0) if is_identity else speed.seconds(4 * trained)
        # Who encodes also decodes, for error feedback.
        averaging = AveragingCodec(sent, encode_s + decode_s, decode_s)
        return CompressorCosts(compression.label, [BoundaryCodec(*ways)], averaging)

    def _way(
        self, codec: Compressor, fields: tuple[BoundaryField, ...], speed: Speed
    ) -> DirectionCurves:
        sizes, first_s, second_s = [], [], []
        for b in (1, MANY):
            specs: list[TensorSpec] = []
            raw = 0
            for entry in fields:
                spec = entry.spec(b if entry.rows == "samples" else b * self.sequence_length)
                specs += codec.wire_specs(spec) if spec.is_floating else [spec]
                raw += spec.num_bytes * spec.is_floating
            sizes.append((b, frame_bytes(tuple(specs))))
            took = (0.0, 0.0) if codec.family == "none" else speed.seconds(raw)
            first_s.append((b, took[0]))
            second_s.append((b, took[1]))
        return DirectionCurves(Curve(sizes), Curve(first_s), Curve(second_s))

    def _tensors(self) -> list[tuple[str, tuple[int, int]]]:
        """The matrices of a layer, four of attention and what remains, and those of the ends."""
        h = self.hidden
        rest = self.layer_parameters - 4 * h * h
        each = [("attention", (h, h))] * 4 if rest > 0 else []
        each.append(("feed forward", (max(1, (rest if each else self.layer_parameters) // h), h)))
        return [*each, ("embeddings", (self.vocabulary, h)), ("head", (self.vocabulary, h))]

"""A file that describes clouds, lines between them, prices and a model, for a what-if plan; and
the profile of such a model: seconds from floating-point operations, bytes from shapes. Takes plain
containers; reads no files, runs nothing and holds no weights.

Letters: S tokens of a sample, H hidden width, V vocabulary, P weights of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from itertools import permutations
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegativeFloat, Positive, PositiveFloat, settings
from xcloud.base.wording import unknown_key
from xcloud.comm.channel import Boundary, BoundaryField
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phased
from xcloud.comm.compressor import Compressor
from xcloud.net.frame import TensorSpec, frame_bytes
from xcloud.net.link_profile import LinkProfile
from xcloud.simulator.costs import (
    AveragingCodec,
    BoundaryCodec,
    CompressorCosts,
    Curve,
    DirectionCurves,
    ModelPiece,
    Profile,
    from_table,
)

MANY = 64  # samples at which a message is counted beside that of one; between them a straight line
WEIGHT_BYTES = 4  # FP32 weights, gradients and two moments: 16 bytes, as of mixed precision
KEPT_BYTES = {"bfloat16": 2, "int8": 1, "nf4": 0.5625}  # of a frozen weight, with nf4's scales
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
    parameters_per_layer: null = 12 hidden².
    active_per_layer: those of them that a token passes through, where each takes a few of many
        experts; null = all.
    checkpointing: a layer's activations are computed again in the backward, and only its input is
        kept.
    trained_share: of the weights, as 0.005 with LoRA; the others take no gradient, no moments and
        cross in no average.
    weights: what those others are kept as, as model.weights of a run: float32, bfloat16, int8 or
        nf4; embeddings and head beside the last three have 2 bytes a weight.
    """

    layers: Positive
    hidden: Positive
    vocabulary: Positive
    sequence_length: Positive
    flop_per_s: Above0 | None = None
    utilisation: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    seconds_per_layer: Above0 | None = None
    parameters_per_layer: Positive | None = None
    active_per_layer: Positive | None = None
    checkpointing: bool = False
    trained_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    weights: Literal["float32", "bfloat16", "int8", "nf4"] = "float32"

    def __post_init__(self) -> None:
        if self.trained_share == 1 and self.weights != "float32":
            raise ConfigError(
                f"model.weights={self.weights} is for frozen weights: give model.trained_share too"
            )
        if (self.active_per_layer or 0) > self.layer_parameters:
            raise ConfigError(
                f"model.active_per_layer={self.active_per_layer} must be at most the "
                f"{self.layer_parameters} parameters of a layer"
            )
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
        active = self.active_per_layer or self.layer_parameters
        per_token = 2 * active + 4 * self.sequence_length * self.hidden
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

    def _piece(self, i: int) -> ModelPiece:
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
        trained_bytes = round(WEIGHT_BYTES * weights * self.trained_share)
        held_bytes = WEIGHT_BYTES * weights
        if self.weights != "float32":
            ends_bytes = 2 * outer * self.vocabulary * self.hidden
            held_bytes = round(KEPT_BYTES[self.weights] * self.layer_parameters) + ends_bytes
            held_bytes += trained_bytes  # adapters beside what is frozen
        return ModelPiece(
            f"layer {i}", Curve([(1, layer_s + head_s)]), Curve([(1, backward_s)]),
            None if is_last else 0, held_bytes, trained_bytes,
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


StrategyName = Literal["pipeline", "data_parallel", "hybrid", "local_updates"]
COMPRESSORS = ("none", "fp16_int8", "int8", "int4_int8", "int4")
ALL = "*"
MAX_CLOUDS = 64


@settings("clouds")
class WhatIfCloud:
    """slowdown: how many times longer its ranks compute than the model says. memory_gb: of a rank;
    null = enough."""

    ranks: Positive = 1
    slowdown: Annotated[float, Field(ge=1.0, le=1000.0)] = 1.0
    memory_gb: Annotated[float, Field(gt=0.0)] | None = None


@settings("prices")
class Prices:
    """In any currency. rank_hour: by cloud. egress_per_gb: by pair, else by the cloud it leaves,
    else "*"; a GB is 10^9 bytes."""

    rank_hour: Mapping[str, NotNegativeFloat] = field(default_factory=dict)
    egress_per_gb: Mapping[str, NotNegativeFloat] = field(default_factory=dict)

    def hour_of(self, cloud: str) -> float:
        return self.rank_hour.get(cloud, self.rank_hour.get(ALL, 0.0))

    def egress_of(self, here: str, there: str) -> float:
        found = (self.egress_per_gb.get(name) for name in (f"{here}-{there}", here, ALL))
        return next((price for price in found if price is not None), 0.0)


Counts = Annotated[Sequence[Positive], Field(min_length=1)]


@settings("search")
class Search:
    """What is tried. stages_inside: stages that each cloud holds, one for each part of its ranks;
    null = powers of two that divide every cloud's ranks. replicas: of hybrid; null = every divisor
    of the number of clouds. every: of local updates. micro_batches: null = as many as leave no
    rank without work, and multiples."""

    strategies: Annotated[Sequence[StrategyName], Field(min_length=1)] = (
        "pipeline", "data_parallel", "hybrid", "local_updates"
    )  # fmt: skip
    compressors: Annotated[Sequence[str], Field(min_length=1)] = COMPRESSORS
    stages_inside: Counts | None = None
    replicas: Counts | None = None
    every: Counts = (50,)
    micro_batches: Counts | None = None


@settings()
class WhatIf:
    """A file, read. model: None where a profile came with it. links: by pair of clouds, or "*";
    inside: by cloud, or "*". tokens: of the whole run, to say what all of it takes."""

    clouds: Annotated[Mapping[str, WhatIfCloud], Field(min_length=1, max_length=MAX_CLOUDS)]
    batch_size: Positive
    tokens: PositiveFloat | None = None
    model: Decoder | None = None
    profile: str | None = None
    links: Mapping[str, LinkProfile] = field(default_factory=dict)
    inside: Mapping[str, LinkProfile] = field(default_factory=dict)
    prices: Prices = field(default_factory=Prices)
    codecs: Mapping[str, Speed] = field(default_factory=dict)
    search: Search = field(default_factory=Search)

    def __post_init__(self) -> None:
        clouds = list(self.clouds)
        pairs = [f"{a}-{b}" for a, b in permutations(clouds, 2)]
        if pairs and not self.links:
            raise ConfigError('links is missing: give "*", or each pair of clouds as a-b')
        prices = self.prices
        for where, given, names in (
            ("links", self.links, pairs),
            ("inside", self.inside, clouds),
            ("prices.rank_hour", prices.rank_hour, clouds),
            ("prices.egress_per_gb", prices.egress_per_gb, [*clouds, *pairs]),
        ):
            for key in given:
                if key not in (ALL, *names):
                    raise ConfigError(unknown_key(where, key, [ALL, *names]))
        for where, lines in (("links", self.links), ("inside", self.inside)):
            for key, line in lines.items():
                if line.trace or line.outages or line.outage_every_s:
                    raise ConfigError(
                        f"{where}.{key}: a what-if plan has one bandwidth for a line; leave trace "
                        "and outages out"
                    )
        _ = self.lines  # each pair has one

    @property
    def num_ranks(self) -> int:
        return sum(cloud.ranks for cloud in self.clouds.values())

    @property
    def lines(self) -> dict[str, LinkProfile]:
        """By "a-b", and inside a cloud by "a-a"."""
        found = {}
        for name in self.clouds:
            if inside := self.inside.get(name, self.inside.get(ALL)):
                found[f"{name}-{name}"] = inside
        for a, b in permutations(self.clouds, 2):
            keys = (f"{a}-{b}", f"{b}-{a}", ALL)
            line = next((self.links[key] for key in keys if key in self.links), None)
            if line is None:
                raise ConfigError(f'links has neither {a}-{b} nor "*"')
            found[f"{a}-{b}"] = line
        return found


def what_if_from(table: Any) -> WhatIf:
    """From plain containers. Raises ConfigError naming the key."""
    given = dict(table) if isinstance(table, Mapping) else {"clouds": table}
    if "model" not in given:
        raise ConfigError("model is missing; `python -m experiments.what_if --help` shows a file")
    if isinstance(clouds := given.get("clouds"), Mapping):
        shared = clouds.get(ALL) or {}
        given["clouds"] = {n: {**shared, **(c or {})} for n, c in clouds.items() if n != ALL}
    if isinstance(model := given["model"], Mapping) and "profile" in model:
        if len(model) > 1:
            others = ", ".join(key for key in model if key != "profile")
            raise ConfigError(
                f"model.profile says all of the model; leave {others} out, or profile"
            )
        given |= {"model": None, "profile": model["profile"]}
    return from_table("", WhatIf, given)


def with_lines(what_if: WhatIf, profile: Profile) -> Profile:
    """A profile that was read from a file, over the lines given here. Raises ConfigError."""
    asked = what_if.search.compressors
    missing = [name for name in asked if name not in profile.compressors]
    if len(missing) == len(asked):
        raise ConfigError(
            f"search.compressors: model.profile has {', '.join(profile.compressors)}, and none of "
            f"{', '.join(missing)}"
        )
    if not profile.tokens_per_sample:
        raise ConfigError("model.profile: tokens_per_sample is missing, for costs per token")
    return replace(profile, lines=what_if.lines)

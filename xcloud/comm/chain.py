"""Apply compressors in sequence. Defines which may follow which and how their parts nest; the
compressors themselves are elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.cluster.frame import TensorSpec
from xcloud.comm.compressor import Compressor, Family, Feedback, Parts, Randomized, seed_from
from xcloud.comm.precision import Nothing
from xcloud.comm.state import Stateful, StatefulParts, stateful

_ORDER: tuple[Family, ...] = ("low_rank", "sparse", "precision")
_STRONGEST_FIRST: tuple[Feedback, ...] = ("harmful", "needed", "useful")


class Chain(StatefulParts):
    """Named compressors; each compresses the floating-point parts of the previous one's output.

    Integer parts pass unchanged: members send what must not be compressed again (positions,
    scales, seeds) as integers. Families come in the order low_rank, sparse, precision, each at
    most once. An empty chain sends the tensor itself.

        Chain(svd=Svd(0.6), fp16=Cast("float16")).label == "fp16(svd(0.6))"

    Wire: each floating-point part is replaced by the next member's parts; integer parts keep
    their place.
    """

    def __init__(self, **members: Compressor) -> None:
        for name, member in members.items():
            if not isinstance(member, Compressor):
                raise ConfigError(
                    f"Chain member {name!r} must be a compressor, got {member!r}; in YAML give it "
                    "a _target_, such as xcloud.comm.precision.Cast"
                )
            if isinstance(member, Chain):
                raise ConfigError(
                    f"Chain member {name!r} is itself a chain ({member.label}); name its members "
                    "in the outer chain instead"
                )
            if member.family == "none" and len(members) > 1:
                raise ConfigError(
                    f"Chain member {name!r} sends the tensor unchanged and has no place among "
                    f"others ({', '.join(members)}); leave it out"
                )
        self.members = dict(members)
        used = [member for member in members.values() if member.family != "none"]
        for earlier, later in pairwise(used):
            if _ORDER.index(later.family) <= _ORDER.index(earlier.family):
                raise ConfigError(
                    f"Chain: {later.label} cannot come after {earlier.label}: "
                    + _why_not(earlier, later)
                )
        self._members = tuple(used)

    @property
    def family(self) -> Family:
        return self._members[-1].family if self._members else "none"

    @property
    def feedback(self) -> Feedback:
        """The strongest of its members'."""
        kinds = {member.feedback for member in self._members}
        return next((kind for kind in _STRONGEST_FIRST if kind in kinds), "needless")

    @property
    def label(self) -> str:
        """The paper's notation, the first member innermost."""
        label = ""
        for member in self._members:
            label = f"{member.label}({label})" if label else member.label
        return label or Nothing().label

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return self._specs_after_each(spec)[-1]

    def compress(self, tensor: Tensor) -> Parts:
        parts: Parts = Nothing().compress(tensor)
        for member in self._members:
            parts = tuple(
                made
                for part in parts
                for made in (member.compress(part) if part.is_floating_point() else (part,))
            )
        return parts

    def decompress(self, parts: Parts, spec: TensorSpec) -> Tensor:
        specs = self._specs_after_each(spec)
        for member, before in reversed(list(zip(self._members, specs, strict=False))):
            remaining = list(parts)
            decoded = []
            for part_spec in before:
                size = len(member.wire_specs(part_spec)) if part_spec.is_floating else 1
                taken, remaining = tuple(remaining[:size]), remaining[size:]
                decoded.append(
                    member.decompress(taken, part_spec) if part_spec.is_floating else taken[0]
                )
            parts = tuple(decoded)
        return parts[0]

    def parts(self) -> Mapping[str, Stateful]:
        return stateful(self.members)

    def use_stream(self, stream: int) -> None:
        """Give every member a random stream of its own."""
        for name, member in self.members.items():
            if isinstance(member, Randomized):
                member.use_stream(seed_from(stream, name))

    def __repr__(self) -> str:
        return f"Chain({', '.join(f'{name}={member}' for name, member in self.members.items())})"

    def _specs_after_each(self, spec: TensorSpec) -> list[tuple[TensorSpec, ...]]:
        """Specs before the first member, and after each."""
        specs: list[tuple[TensorSpec, ...]] = [(spec,)]
        for member in self._members:
            specs.append(
                tuple(
                    made
                    for part in specs[-1]
                    for made in (member.wire_specs(part) if part.is_floating else (part,))
                )
            )
        return specs


def _why_not(earlier: Compressor, later: Compressor) -> str:
    if later.family == earlier.family == "precision":
        return "its codes are already as short as requested; keep one, with fewer bits"
    if later.family == earlier.family:
        return f"both are {later.family}; keep one, with the product of their rates"
    if earlier.family == "precision":
        return f"it leaves no floating-point part; put {later.label} first"
    return (
        f"{later.label} needs the matrix, and {earlier.label} leaves a list of values; put "
        f"{later.label} first"
    )

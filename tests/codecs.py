"""Every compressor that ships, and the largest error each may make."""

import textwrap
from pathlib import Path

from torch import Tensor

from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import PowerSgd, Svd
from xcloud.comm.precision import BlockInt, Cast
from xcloud.comm.rotation import Eden
from xcloud.comm.sparsify import RandomK, RandomTopK, TopK, TopRows
from xcloud.comm.transform import Transform
from xcloud.net.frame import Tensors, TensorSpec

PAGE = Path(__file__).parent.parent / "docs" / "add-a-compressor.md"

# compressor, largest relative error it may make on Gaussian values [96, 40]
ERRORS: list[tuple[Compressor, float]] = [
    (Chain(), 0.0),
    (Cast("float16"), 3e-4),
    (Cast("bfloat16"), 2.5e-3),
    (BlockInt(8), 0.0075),
    (BlockInt(7), 0.015),
    (BlockInt(6), 0.03),
    (BlockInt(5), 0.055),
    (BlockInt(4), 0.1),
    (BlockInt(3), 0.19),
    (BlockInt(2), 0.38),
    (BlockInt(1), 0.62),
    (BlockInt(4, block=32), 0.09),
    (BlockInt(4, stochastic=True), 0.18),
    (BlockInt(1, stochastic=True), 2.8),
    (TopK(0.5), 0.28),
    (TopK(0.05), 0.87),
    (TopRows(0.5), 0.75),
    (RandomK(0.5), 0.75),
    (RandomK(0.5, unbiased=True), 1.1),
    (Svd(0.5, method="exact"), 0.56),
    (Svd(0.1), 0.93),
    (RandomTopK(0.5, 0.5), 0.87),
    (PowerSgd(4), 0.96),
    (PowerSgd(40), 1e-6),
    (Chain(svd=Svd(0.6), fp16=Cast("float16")), 0.48),
    (Chain(topk=TopK(0.3), int8=BlockInt(8)), 0.5),
    (Chain(topk=TopK(1 / 64), int1=BlockInt(1)), 0.95),
    (Chain(rows=TopRows(0.5), int8=BlockInt(8)), 0.75),
    (Chain(svd=Svd(1.0), topk=TopK(0.9), int4=BlockInt(4)), 0.2),
    (Chain(randomk=RandomK(0.5), int8=BlockInt(8)), 0.75),
    (Chain(cocktail=RandomTopK(0.5, 0.5), int4=BlockInt(4)), 0.87),
    (Chain(powersgd=PowerSgd(4), int8=BlockInt(8)), 0.96),
    (Eden(1), 0.63),
    (Eden(2), 0.36),
    (Eden(4), 0.11),
    (Transform(0.25), 0.075),
    (Transform(1.6), 0.5),
    (Transform(0.8, gradients="evened"), 0.5),
    (Chain(rows=TopRows(0.5), transform=Transform(0.5)), 0.75),
]
# The skeleton of docs/add-a-compressor.md, as a newcomer would copy it.
exec(textwrap.dedent(PAGE.read_text().split("```python\n")[1].split("```")[0]), globals())
ERRORS.append((Fp8Rows(), 0.03))  # type: ignore[name-defined]  # noqa: F821


def admitted(compressor: Compressor, spec: TensorSpec, parts: Tensors) -> bool:
    """Return whether a receiver of a tensor of this spec takes the parts."""
    promised = compressor.wire_specs(spec)
    pairs = zip(promised, parts, strict=True)
    return all(one.admits(TensorSpec.of(part)) for one, part in pairs)


def arrives(compressor: Compressor, tensor: Tensor) -> Tensor:
    return compressor.decompress(compressor.compress(tensor), TensorSpec.of(tensor))


def relative_error(tensor: Tensor, seen: Tensor) -> float:
    return float((tensor.double() - seen.double()).norm() / tensor.double().norm())


def rounding(compressor: Compressor) -> float:
    """The largest error of a single value: three times that of Gaussian ones, for the formats that
    round; at least 2 %, at most 30 %."""
    if isinstance(compressor, Eden):  # after its rotation equal values are like any others
        return next(bound for known, bound in ERRORS if known == compressor)
    parts = compressor.members.values() if isinstance(compressor, Chain) else [compressor]
    errors = [bound for known, bound in ERRORS if known in parts and known.family == "precision"]
    return min(0.3, max([0.02, *(3 * error for error in errors)]))


def kind_of(compressor: Compressor) -> tuple[object, ...]:
    """Return the classes of a compressor and its members, with the settings that choose a way
    through their code: switches and names, not numbers."""
    if isinstance(compressor, Chain):
        return (Chain, *(kind_of(member) for member in compressor.members.values()))
    chosen = [value for value in vars(compressor).values() if isinstance(value, bool | str)]
    return (type(compressor), *chosen)


# Where only the way through the code matters: the first of each kind.
ONE_OF_EACH = [*{kind_of(compressor): compressor for compressor, _ in reversed(ERRORS)}.values()]

# What holds for 1, 2, 4, 5 and 8 bits holds between them; test_precision.py packs every width.
COMPRESSORS = [c for c, _ in ERRORS if c not in (BlockInt(3), BlockInt(6), BlockInt(7))]

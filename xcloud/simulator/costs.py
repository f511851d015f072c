"""The costs of a step (Costs) and of a job (Profile). Numbers only.

Costs are what the simulator takes: seconds of work, bytes of messages and lines between clouds. A
Profile is what a trial run recorded (planner/trial.py) or a file says: pieces of a model between
which it may be cut, codecs of its boundaries and of what replicas average. measured.py reads
either from recorded steps, pricing.py makes Costs of a Profile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, NotNegativeFloat, PositiveFloat, Seconds, settings
from xcloud.base.wording import unknown_key
from xcloud.layout import ClusterLayout
from xcloud.net.link_profile import LinkProfile, Wan
from xcloud.pipeline.schedule import Action

FREE = LinkProfile(1e18)  # as good as no time


def line_of(
    layout: ClusterLayout, given: Mapping[str, LinkProfile], here: str, there: str
) -> LinkProfile:
    """Return the line from a cloud to another, or inside one.

    given: the lines by "a-b", or "*" for all between clouds. They override those of the layout.
    Raises ConfigError for a real network, which has no numbers.
    """
    if here == there:
        return given.get(f"{here}-{here}", FREE)
    names = (f"{here}-{there}", f"{there}-{here}", "*")
    wan: Wan = next((given[n] for n in names if n in given), layout.wan_of(here, there))
    if not wan.has_numbers:
        raise ConfigError(
            f"bandwidth and latency of the real network from {here!r} to {there!r} are unknown; "
            "choose a profile (cluster/wan=…), or give plan.profile a file whose `lines` name "
            f"'{here}-{there}' or \"*\""
        )
    return wan if isinstance(wan, LinkProfile) else FREE


def lines_of(
    layout: ClusterLayout, given: Mapping[str, LinkProfile], bandwidth: float | None = None
) -> dict[str, LinkProfile]:
    """Return the lines between every two clouds, by "a-b", and those given inside one, by "a-a".

    bandwidth: the bits per second of every line between clouds, in place of its own.
    Raises ConfigError as line_of does.
    """
    lines = {f"{a}-{a}": given[f"{a}-{a}"] for a in layout.clouds if f"{a}-{a}" in given}
    for here, there in permutations(layout.clouds, 2):
        line = line_of(layout, given=given, here=here, there=there)
        if bandwidth is not None:
            # A trace would put its own rates in the place of this one.
            line = replace(line, bandwidth_bits_per_s=bandwidth, trace=())
        lines[f"{here}-{there}"] = line
    return lines


NORM = "norm"


class TransferCost(NamedTuple):
    """A message between two ranks.

    direction: "forward" for an activation, "backward" for a gradient, NORM for the agreement.
    boundary: the number of the stage before it.
    micro_batch: its number within the update.
    """

    direction: str
    boundary: int
    micro_batch: int
    sender: int
    receiver: int


@dataclass(frozen=True)
class Update:
    """The seconds that one rank spends on a step outside the schedule.

    fetch_s: the seconds before each pass, to fetch its samples.
    average_s: the seconds of the all-reduce with the other ranks of its stage, once all are there.
    norm_s: the seconds up to the agreement on the gradient norm.
    optimizer_s: the seconds after that agreement, clipping included.
    """

    fetch_s: float = 0.0
    average_s: float = 0.0
    norm_s: float = 0.0
    optimizer_s: float = 0.0


@dataclass(frozen=True)
class Direction:
    """The cost of what goes one way over one boundary, for each micro-batch."""

    num_bytes: int = 0
    compress_s: float = 0.0
    decompress_s: float = 0.0

    def times(self, factor: float) -> Direction:
        """Return the costs of a message so many times as large."""
        size = round(factor * self.num_bytes)
        return Direction(
            num_bytes=size,
            compress_s=factor * self.compress_s,
            decompress_s=factor * self.decompress_s,
        )


NOTHING = Direction()


@dataclass(frozen=True)
class Costs:
    """The costs of a step's actions and messages, the same for every micro-batch.

    A backward includes the part that may be put off. Bytes are those of full frames, and
    compressing includes framing. A cost that is missing is 0.

    forward_s, backward_s: the seconds of each stage.
    forward, backward: the costs of each boundary. Those of gradients are in `backward`.
    updates: the costs of each stage. Those of a rank with several stages add up.
    weights_s: the seconds, in each stage, of the part of backward_s that may be put off.
    slowdown: the factor by which each rank computes and updates more slowly; 1 for a rank that is
        not named.
    control_bytes: the size of a message of the agreement on the gradient norm.
    lines: the lines, as line_of names them. A line carries one message at a time, first come,
        first served; time 0 is the start of the simulation.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    forward: Sequence[Direction] = ()
    backward: Sequence[Direction] = ()
    updates: Sequence[Update] = ()
    slowdown: Mapping[int, float] = field(default_factory=dict)
    lines: Mapping[str, LinkProfile] = field(default_factory=dict)
    control_bytes: int = 128
    weights_s: Sequence[float] = ()

    def action_s(self, rank: int, action: Action) -> float:
        table: Sequence[float] = getattr(self, f"{action.kind}_s")
        if not table:
            return 0.0
        return table[action.stage] * self.slowdown.get(rank, 1.0)

    def direction(self, message: TransferCost) -> Direction:
        if message.direction == NORM:
            return Direction(self.control_bytes)
        table = self.forward if message.direction == "forward" else self.backward
        return table[message.boundary] if table else NOTHING

    def line(self, layout: ClusterLayout, here: str, there: str) -> LinkProfile:
        return line_of(layout, given=self.lines, here=here, there=there)

    def update_s(self, what: str, rank: int, stages: Sequence[int]) -> float:
        """Return the seconds of one thing that a rank does outside the schedule.

        what: "fetch", "average", "norm" or "optimizer".
        """
        if not self.updates:
            return 0.0
        # An all-reduce takes as long as its line, however slowly its ranks compute.
        factor = self.slowdown.get(rank, 1.0) if what != "average" else 1.0
        each_s: list[float] = [getattr(self.updates[stage], f"{what}_s") for stage in stages]
        return factor * sum(each_s)


# Of a job.


@settings("curve")
class Curve:
    """A quantity of a micro-batch over its number of samples, piecewise linear.

    Straight lines join the points and go on beyond them. One point alone is a quantity that grows
    in proportion.
    """

    points: Sequence[tuple[PositiveFloat, float]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "points", tuple(self.points))
        if any(a[0] >= b[0] for a, b in pairwise(self.points)):
            raise ConfigError(
                f"a curve needs points with more and more samples, got {self.points}"
            )

    def at(self, samples: float) -> float:
        """Return the quantity for so many samples, never below 0."""
        return max(0.0, self.change_at(samples))

    def change_at(self, samples: float) -> float:
        """Return the value for so many samples, which may be below 0."""
        points = self.points
        if not points:
            return 0.0
        if len(points) == 1:
            return points[0][1] * samples / points[0][0]
        index = 1
        while index < len(points) - 1 and samples > points[index][0]:
            index += 1
        (x0, y0) = points[index - 1]
        (x1, y1) = points[index]
        return y0 + (y1 - y0) * (samples - x0) / (x1 - x0)


def _curve(given: Any) -> Any:
    """Make a curve of a bare list of points, as a file has them; return anything else as it is."""
    points = given.get("points") if isinstance(given, Mapping) else given
    if not isinstance(points, list):
        return given
    return Curve([tuple(point) if isinstance(point, list) else point for point in points])


def _not_negative(curve: Curve) -> Curve:
    if any(value < 0 for _, value in curve.points):
        raise ConfigError(f"a curve of times or bytes is never below 0, got {curve.points}")
    return curve


Change = Annotated[Curve, BeforeValidator(_curve)]
OfSamples = Annotated[Change, AfterValidator(_not_negative)]


@settings("piece")
class ModelPiece:
    """A consecutive part of a model's work; times and activations are those of a micro-batch.

    boundary: the number of the boundary that it ends at; None where the model cannot be cut after
        it.
    weights_s: the seconds of the part of backward_s that may be put off.
    deferred_bytes: the bytes that are kept until then.
    splitting_s: the seconds that splitting the backward adds to a forward and a backward together;
        below 0 it saves.
    parameter_bytes: the bytes of all weights.
    trained_bytes: the bytes of the weights that are trained.
    optimizer_s: the seconds of an update.
    blocks: the number of the model's blocks that it holds, for the setting that splits the model.
    """

    name: str
    forward_s: OfSamples
    backward_s: OfSamples
    boundary: int | None = None
    parameter_bytes: NotNegative = 0
    trained_bytes: NotNegative = 0
    activation_bytes: OfSamples = Curve()
    optimizer_s: Seconds = 0.0
    blocks: NotNegative = 0
    weights_s: OfSamples = Curve()
    deferred_bytes: OfSamples = Curve()
    splitting_s: Change = Curve()


@settings("direction")
class DirectionCurves:
    """The curves of a Direction over a boundary, by samples of a micro-batch."""

    num_bytes: OfSamples
    compress_s: OfSamples = Curve()
    decompress_s: OfSamples = Curve()

    def at(self, samples: float) -> Direction:
        return Direction(
            num_bytes=round(self.num_bytes.at(samples)),
            compress_s=self.compress_s.at(samples),
            decompress_s=self.decompress_s.at(samples),
        )


@settings("boundary")
class BoundaryCodec:
    """A compressor's costs at one boundary.

    backward: the costs of the gradient; None where no gradient returns.
    """

    forward: DirectionCurves
    backward: DirectionCurves | None = None


@settings("averaging")
class AveragingCodec:
    """The cost of encoding and decoding all trained values of the model together, once."""

    num_bytes: NotNegative
    encode_s: Seconds = 0.0
    decode_s: Seconds = 0.0


@settings("compressor")
class CompressorCosts:
    """All that one compressor costs.

    label: a description of what it does to values.
    boundaries: the costs by number of the boundary, as pieces name it.
    averaging: the costs of averaging; None for a compressor that replicas cannot average with.
    """

    label: str
    boundaries: Sequence[BoundaryCodec]
    averaging: AveragingCodec | None = None


@settings("profile")
class Profile:
    """The parts of a step, piece by piece, as they were measured or written by hand.

    of: a description of what was recorded where (machine, torch, model …).
    fetch_s: the seconds of fetching the samples of a micro-batch.
    lines: the line that joins two clouds, by "a-b", or "*" for all. They override those of the
        layout.
    tokens_per_sample: the number of tokens that are computed in a sample, for costs per token.
    other_bytes: the bytes of memory that a rank takes beside what is counted, on the device that
        it computes on, for the program and its work space; 0 = not known.
    around_gradients_s, around_changes_s: the seconds that an exchange of all trained values takes
        beside its codec, of gradients and after local updates.
    train_samples: the number of samples of an epoch; 0 = not known.
    stage_forward_s, stage_backward_s: the seconds of calling a stage, whatever its pieces.
    """

    pieces: Annotated[Sequence[ModelPiece], Field(min_length=1)]
    compressors: Annotated[Mapping[str, CompressorCosts], Field(min_length=1)]
    of: Mapping[str, str] = field(default_factory=dict)
    measured_at_s: float = 0.0
    fetch_s: OfSamples = Curve()
    lines: Mapping[str, LinkProfile] = field(default_factory=dict)
    control_bytes: NotNegative = 128
    tokens_per_sample: NotNegativeFloat = 0.0
    other_bytes: NotNegative = 0
    around_gradients_s: Seconds = 0.0
    around_changes_s: Seconds = 0.0
    train_samples: NotNegative = 0
    stage_forward_s: OfSamples = Curve()
    stage_backward_s: OfSamples = Curve()
    version: Literal[2] = 2

    def __post_init__(self) -> None:
        boundaries = {piece.boundary for piece in self.pieces[:-1]} - {None}
        for name, costs in self.compressors.items():
            if any(boundary not in range(len(costs.boundaries)) for boundary in boundaries):
                raise ConfigError(
                    f"profile: compressors.{name}.boundaries has {len(costs.boundaries)} entries, "
                    f"but pieces name boundaries {sorted(b for b in boundaries if b is not None)}"
                )

    @property
    def measured_on(self) -> str:
        if not self.measured_at_s:
            return "written by hand"
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.measured_at_s))

    @property
    def trained_bytes(self) -> int:
        return sum(piece.trained_bytes for piece in self.pieces)

    def differs_from(self, of: Mapping[str, str]) -> list[str]:
        """Return why the profile may not hold for a job; empty if it does.

        of: a description of what would be recorded now.
        """
        return [
            f"{name} was {self.of[name]!r}, now {value!r}"
            for name, value in of.items()
            if name in self.of and self.of[name] != value
        ]


def write_profile(path: Path, profile: Profile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """Return the profile that a file holds.

    Raises ConfigError, naming the file, for anything that is no profile.
    """
    try:
        return from_table(
            "profile", kind=Profile, table=parsed_json(path.read_text(encoding="utf-8"))
        )
    except OSError as error:
        raise ConfigError(f"plan.profile: {path} cannot be read: {error.strerror}") from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"plan.profile: {path}: {error}") from None


T = TypeVar("T")


def from_table(name: str, kind: type[T], table: object) -> T:
    """Build settings from plain containers, checked against their annotations.

    name: the key of the table, for messages.
    kind: a settings class.
    Raises ConfigError that names the key, after `name`.
    """
    try:
        # As JSON: strict checks take a list for a tuple only there.
        return TypeAdapter(kind).validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        first = error.errors()[0]
    *inside, last = [str(part) for part in first["loc"] if part != "points"] or [""]
    path = ".".join(filter(None, [name, *inside]))
    key = ".".join(filter(None, [path, last]))
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):  # of __post_init__
        raise raised
    if "missing" in first["type"]:
        raise ConfigError(f"{key} is missing")
    if first["type"] == "unexpected_keyword_argument":
        known = [] if inside else [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
        raise ConfigError(unknown_key(path, name=last, known=known))
    what = first["msg"].removeprefix("Input should be ").replace("valid array", "list")
    raise ConfigError(f"{key} must be {what}, got {first['input']!r}")

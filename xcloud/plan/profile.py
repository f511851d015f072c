"""What a job's work costs on one machine, as measured or as written in a file: pieces of a model
between which it may be cut, codecs of its boundaries, codecs of what replicas average. Numbers
only; planner/profiling.py and planner/codec_profiling.py measure them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from xcloud.base.checks import check_choice, check_int, check_number
from xcloud.base.errors import ConfigError
from xcloud.cluster.link_profile import LinkProfile
from xcloud.plan.from_tables import build, listed, table_of

VERSION = 1
DAY_S = 86_400.0
OFF_SPEED = 0.1  # share by which a machine's speed may differ without a word
MOST_FACTOR = 100.0  # of a WorkFactor


@dataclass(frozen=True)
class Curve:
    """A quantity of a micro-batch over its number of samples: straight lines between the points,
    going on beyond them. One point is a quantity that grows in proportion. Never below 0."""

    points: Sequence[Sequence[float]] = ()

    def __post_init__(self) -> None:
        found = []
        for point in listed("a curve", self.points):
            if not isinstance(point, list | tuple) or len(point) != 2:
                raise ConfigError(f"a curve needs points [samples, value], got {point!r}")
            check_number("a curve: samples", point[0], 0.0, above=True)
            check_number("a curve: value", point[1], 0.0)
            found.append((float(point[0]), float(point[1])))
        if any(a[0] >= b[0] for a, b in pairwise(found)):
            raise ConfigError(f"a curve needs points with more and more samples, got {found}")
        object.__setattr__(self, "points", tuple(found))

    def at(self, samples: float) -> float:
        points = self.points
        if not points:
            return 0.0
        if len(points) == 1:
            return points[0][1] * samples / points[0][0]
        index = 1
        while index < len(points) - 1 and samples > points[index][0]:
            index += 1
        (x0, y0), (x1, y1) = points[index - 1], points[index]
        return max(0.0, y0 + (y1 - y0) * (samples - x0) / (x1 - x0))


@dataclass(frozen=True)
class Piece:
    """Consecutive work of a model. What leaves it is of boundary number `boundary`; None where the
    model cannot be cut behind it. forward_s, backward_s, activation_bytes: of a micro-batch.
    weights_s: the part of backward_s that may be put off; put_off_bytes: kept until then;
    splitting_s: what that adds to a forward and a backward together.
    parameter_bytes: of all weights; trained_bytes: of those that are trained. optimizer_s: of an
    update. blocks: of the model's blocks it holds so many; for the setting that cuts it."""

    name: str
    forward_s: Curve
    backward_s: Curve
    boundary: int | None = None
    parameter_bytes: int = 0
    trained_bytes: int = 0
    activation_bytes: Curve = Curve()
    optimizer_s: float = 0.0
    blocks: int = 0
    weights_s: Curve = Curve()
    put_off_bytes: Curve = Curve()
    splitting_s: Curve = Curve()

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "trained_bytes", "blocks"):
            check_int(f"pieces.{self.name}.{name}", getattr(self, name), 0)
        check_number(f"pieces.{self.name}.optimizer_s", self.optimizer_s, 0.0)


@dataclass(frozen=True)
class Way:
    """One direction over a boundary, of a micro-batch: bytes of the whole frame, seconds of the
    sender's and of the receiver's main thread."""

    num_bytes: Curve
    compress_s: Curve = Curve()
    decompress_s: Curve = Curve()


@dataclass(frozen=True)
class BoundaryCodec:
    """backward: None where no gradient returns."""

    forward: Way
    backward: Way | None = None


@dataclass(frozen=True)
class AveragingCodec:
    """Of all trained values of the model together, once."""

    num_bytes: int
    encode_s: float = 0.0
    decode_s: float = 0.0

    def __post_init__(self) -> None:
        check_int("averaging: num_bytes", self.num_bytes, 0)
        check_number("averaging: encode_s", self.encode_s, 0.0)
        check_number("averaging: decode_s", self.decode_s, 0.0)


@dataclass(frozen=True)
class CompressorCosts:
    """boundaries: by number, as pieces name them. label: what it does to values."""

    label: str
    boundaries: Sequence[BoundaryCodec]
    averaging: AveragingCodec | None = None


@dataclass(frozen=True)
class WorkFactor:
    """How many times longer work takes in a run than in the process that measured it.

    source: given (plan.work_factor), trial, file (plan.profile) or none, where nobody knows.
    trial: what was run, and what came of it. num_ranks: that shared the machine in it."""

    value: float = 1.0
    source: str = "file"
    trial: str = ""
    num_ranks: int = 0

    def __post_init__(self) -> None:
        check_number("work_factor.value", self.value, 0.0, MOST_FACTOR, above=True)
        check_choice("work_factor.source", self.source, ("given", "trial", "file", "none"))
        check_int("work_factor.num_ranks", self.num_ranks, 0)


@dataclass(frozen=True)
class Profile:
    """of: what was measured where (machine, torch, model, shapes …), in words. fetch_s: of the
    samples of a micro-batch. lines: "a-b", or "*" for all, to what joins two clouds; they come
    before the layout's own. tokens_per_sample: for costs per token. around_gradients_s,
    around_changes_s: what an exchange of all trained values takes beside its codec, of gradients
    and after local updates. reference_s: what the machine took for planner/reference.py's work at
    the time; train_samples: of an epoch; 0 = not known. work_factor: None = not known; see
    as_in_runs."""

    pieces: Sequence[Piece]
    compressors: Mapping[str, CompressorCosts]
    of: Mapping[str, str] = field(default_factory=dict)
    measured_at_s: float = 0.0
    fetch_s: Curve = Curve()
    lines: Mapping[str, LinkProfile] = field(default_factory=dict)
    control_bytes: int = 128
    tokens_per_sample: float = 0.0
    around_gradients_s: float = 0.0
    around_changes_s: float = 0.0
    reference_s: float = 0.0
    train_samples: int = 0
    work_factor: WorkFactor | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(
                f"this profile is of version {self.version}, and {VERSION} is read here: measure "
                "it again"
            )
        for name in ("around_gradients_s", "around_changes_s", "reference_s"):
            check_number(f"profile: {name}", getattr(self, name), 0.0)
        check_int("profile: train_samples", self.train_samples, 0)
        if not self.pieces:
            raise ConfigError("a profile needs at least one piece of a model")
        if not self.compressors:
            raise ConfigError("a profile needs at least one of compressors")
        boundaries = {piece.boundary for piece in self.pieces[:-1]} - {None}
        for name, costs in self.compressors.items():
            if any(boundary not in range(len(costs.boundaries)) for boundary in boundaries):
                raise ConfigError(
                    f"profile: compressors.{name}.boundaries has {len(costs.boundaries)} "
                    "entries, but "
                    f"pieces name boundaries {sorted(b for b in boundaries if b is not None)}"
                )

    @property
    def measured_on(self) -> str:
        if not self.measured_at_s:
            return "written by hand"
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.measured_at_s))

    @property
    def trained_bytes(self) -> int:
        return sum(piece.trained_bytes for piece in self.pieces)

    def stale_because(self, of: Mapping[str, str], max_age_days: float) -> list[str]:
        """Why it may not hold for a job; empty if it does. of: what would be measured now."""
        found = [
            f"{name} was {self.of[name]!r}, now {value!r}"
            for name, value in of.items()
            if name in self.of and self.of[name] != value
        ]
        age_days = (time.time() - self.measured_at_s) / DAY_S
        if self.measured_at_s and age_days > max_age_days:
            found.append(f"it is {age_days:.0f} days old (plan.max_age_days is {max_age_days:g})")
        return found

    def off_speed_because(self, reference_s: float) -> list[str]:
        """Why its seconds may not hold on the machine where it was measured; empty if they do.
        reference_s: what planner/reference.py's work takes there now."""
        ratio = reference_s / self.reference_s if self.reference_s else 1.0
        if abs(ratio - 1) <= OFF_SPEED:
            return []
        return [
            f"this machine now takes {ratio:.2f} times as long as when it was measured, so steps "
            "may too; is something else running here?"
        ]


def write_profile(path: Path, profile: Profile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(profile), indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> Profile:
    """Raises ConfigError, naming the file, for anything that is no profile."""
    try:
        return profile_from(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"plan.profile: {path} cannot be read: {error.strerror}") from None
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"plan.profile: {path}: {error}") from None


def profile_from(table: object) -> Profile:
    """From plain containers. Raises ConfigError."""
    given = dict(table_of("profile", table))
    given["pieces"] = tuple(
        build(f"pieces[{i}]", Piece, _with_curves(f"pieces[{i}]", entry))
        for i, entry in enumerate(listed("pieces", given.get("pieces", [])))
    )
    given["compressors"] = {
        name: _compressor(f"compressors.{name}", entry)
        for name, entry in table_of("compressors", given.get("compressors", {})).items()
    }
    if "fetch_s" in given:
        given["fetch_s"] = _curve("fetch_s", given["fetch_s"])
    given["lines"] = {
        name: build(f"lines.{name}", LinkProfile, entry)
        for name, entry in table_of("lines", given.get("lines", {})).items()
    }
    factor = given.get("work_factor")
    if factor is not None:
        table = factor if isinstance(factor, Mapping) else {"value": factor}
        given["work_factor"] = build("work_factor", WorkFactor, table)
    return build("profile", Profile, given)


def as_in_runs(profile: Profile) -> Profile:
    """With the seconds that its work takes in a run, by its work factor."""
    return (
        profile if profile.work_factor is None else stretched(profile, profile.work_factor.value)
    )


def stretched(profile: Profile, factor: float) -> Profile:
    """With all seconds of work multiplied; lines stay."""
    if factor == 1.0:
        return profile
    lines = {"lines": asdict(profile)["lines"]}
    return profile_from(_multiplied(asdict(profile), factor) | lines)


def _multiplied(value: Any, factor: float, name: str = "") -> Any:
    is_time = name.endswith("_s") and name not in ("measured_at_s", "reference_s")
    if isinstance(value, dict) and "points" in value:
        return [[b, y * factor if is_time else y] for b, y in value["points"]]
    if isinstance(value, dict):
        return {k: _multiplied(v, factor, k) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_multiplied(entry, factor) for entry in value]
    return value * factor if is_time else value


_CURVES = ("forward_s", "backward_s", "weights_s", "splitting_s", "activation_bytes",
           "put_off_bytes", "num_bytes", "compress_s", "decompress_s")  # fmt: skip


def _with_curves(name: str, table: object) -> dict[str, Any]:
    given = dict(table_of(name, table))
    return {k: _curve(f"{name}.{k}", v) if k in _CURVES else v for k, v in given.items()}


def _curve(name: str, value: object) -> Curve:
    """Also a bare list of points."""
    points = value.get("points", ()) if isinstance(value, Mapping) else value
    try:
        return Curve(listed(name, points))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _compressor(name: str, table: object) -> CompressorCosts:
    given = dict(table_of(name, table))
    boundaries = []
    for i, entry in enumerate(listed(f"{name}.boundaries", given.get("boundaries", []))):
        ways = {
            way: None if found is None else build(name, Way, _with_curves(name, found))
            for way, found in table_of(f"{name}.boundaries[{i}]", entry).items()
        }
        boundaries.append(build(f"{name}.boundaries[{i}]", BoundaryCodec, ways))
    given["boundaries"] = tuple(boundaries)
    if given.get("averaging") is not None:
        given["averaging"] = build(f"{name}.averaging", AveragingCodec, given["averaging"])
    return build(name, CompressorCosts, given)

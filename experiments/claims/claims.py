"""claims.toml: what is claimed, where that is published, how it is shown, and by which rule it
counts as reproduced. Reads and checks; runs nothing.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
from pydantic import TypeAdapter, ValidationError

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, Positive, settings
from xcloud.base.wording import worded

FILE = "claims.toml"
PATTERNS = ("rules", "cells", "quotes")  # may stand for several: _each
UNKNOWN = "unknown"

REPEATS = ("seed", "round", "run")
"""What tells the rows of one name apart, and pairs those of two: a seed of the training; a round
of timing, of one seed; the number of a run of faults."""

OF_TARGET = ("steps_to_target",)
"""Columns that a row has only if its run reached its target."""

ResultRow = Mapping[str, Any]
"""One run of one row: "row", one of REPEATS, what it was run on, and its figures by name."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error, over seeds or what else REPEATS has. The error of a single
    one is over its test samples, or None."""

    mean: float
    error: float | None
    num: int
    repeats: str = "seed"

    @classmethod
    def of(cls, values: Sequence[float], repeats: str = "seed") -> Estimate:
        if not all(map(math.isfinite, values)):
            return cls(math.nan, None, len(values), repeats)
        error = None
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(statistics.fmean(values), error, len(values), repeats)

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "not finite"
        digits = 2 if abs(self.mean) >= 2 else 3
        error = ""
        if self.error is not None:
            error = f" ± {self.error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}{self._counted}"

    @property
    def _counted(self) -> str:
        """Say how many there were, unless it is three seeds or more."""
        if self.num > 2 and self.repeats == "seed":
            return ""
        count = {1: "one", 2: "two", 3: "three"}.get(self.num, str(self.num))
        return f" ({count} {self.repeats}{'s' * (self.num != 1)})"


@settings("claim.figure")
class Figure:
    """A number of the rows: the column of `row`, minus that of the row `minus`, or over that of
    the row `over`, paired by seed.

    where: the values that other columns of the rows must have.
    """

    row: str
    column: str
    minus: str | None = None
    over: str | None = None
    where: Mapping[str, str] = field(default_factory=dict)

    def of(self, rows: Sequence[ResultRow]) -> Estimate | None:
        """Return the estimate; None without any seed that has what is needed.

        The error of one seed is over its test samples; of a difference as if the two were drawn
        apart, which is wider than it is.
        """
        values = self.values(rows)
        repeats = repeats_of(rows)
        if len(values) != 1 or self.over:
            return Estimate.of(values, repeats) if values else None
        sides = [side for side in (self.row, self.minus) if side]
        column = f"{self.column}_error"
        errors = [
            e for s in sides for e in Figure(row=s, column=column, where=self.where).values(rows)
        ]
        error = None
        if len(errors) == len(sides):
            error = math.hypot(*errors)
        return Estimate(mean=values[0], error=error, num=1, repeats=repeats)

    def is_missed(self, rows: Sequence[ResultRow]) -> bool:
        """Return whether a run that the figure is of did not reach its target. Without it the
        others would be taken for all of them."""
        names = {self.row, self.minus or self.over}
        return self.column in OF_TARGET and any(
            row["row"] in names and self.column not in row
            for row in rows
            if all(row.get(key) == value for key, value in self.where.items())
        )

    def values(self, rows: Sequence[ResultRow]) -> list[float]:
        """Return the figure of each seed, in their order."""
        own, other = (
            self._by_seed(rows, name=name) for name in (self.row, self.minus or self.over)
        )
        if self.minus or self.over:
            own, other = own.align(other, join="inner")
        if self.minus:
            paired = own - other
        else:
            paired = own / other if self.over else own
        return list(paired.sort_index())

    def _by_seed(self, rows: Sequence[ResultRow], name: str | None) -> pd.Series:
        """Return the column by seed. A run that came to none, such as the loss of one that
        diverged, has not a number."""
        wanted = {"row": name, **self.where}
        repeats = repeats_of(rows)
        chosen = [row for row in rows if all(row.get(k) == v for k, v in wanted.items())]
        found = {row.get(repeats): row[self.column] for row in chosen if self.column in row}
        return pd.Series(found, dtype=float)


def repeats_of(rows: Sequence[ResultRow]) -> str:
    """Return which of REPEATS the rows of a study have."""
    return next((name for name in REPEATS if any(name in row for row in rows)), "seed")


@settings("claim.rules")
class ClaimRule:
    """A bound on a figure. says: the rule in words, stated before the run that is judged.

    It is met where the mean of the figure is not below at_least, nor above at_most. It is
    undecided where the mean is less than one standard error away from either bound, on whichever
    side: other seeds could well have come to the opposite.
    """

    says: str
    figure: Figure
    at_least: float = -math.inf
    at_most: float = math.inf

    def __post_init__(self) -> None:
        if (self.at_least, self.at_most) == (-math.inf, math.inf):
            raise ConfigError(f"claim.rules: {self.says!r} needs at_least or at_most")

    def judge(self, found: Estimate) -> Literal["yes", "no", "undecided"]:
        distance = min(abs(found.mean - self.at_least), abs(found.mean - self.at_most))
        if found.error is not None and distance < found.error:
            return "undecided"
        if self.at_least <= found.mean <= self.at_most:
            return "yes"
        return "no"


@settings("claim.cells")
class Cell:
    """A cell of a published table or figure: what is printed there, or what a published formula
    gives for our rows; ours for the same setting, and the same setting made better."""

    table: str
    cell: str
    published: str | Figure = UNKNOWN
    ours: Figure | None = None
    better: Figure | None = None


@settings("claim.quotes")
class Quote:
    """A figure that README or docs quote.

    text: the text of the file, with {} in place of the figure.
    form: the statistic that is quoted: the mean; each seed's value; the mean and the standard
        deviation over seeds, or its standard error; or by how many percent the mean exceeds 1.
    """

    file: str
    text: str
    figure: Figure
    decimals: NotNegative = 1
    form: Literal["mean", "each", "deviation", "error", "more"] = "mean"

    def filled(self, rows: Sequence[ResultRow]) -> str:
        values = self.figure.values(rows)
        digits = f".{self.decimals}f"
        mean = statistics.fmean(values)
        deviation = 0.0
        if len(values) > 1:
            deviation = statistics.stdev(values)
        shown = {
            "mean": f"{mean:{digits}}",
            "each": ", ".join(f"{value:{digits}}" for value in values),
            "deviation": f"{mean:{digits}} ± {deviation:{digits}}",
            "error": f"{mean:{digits}} ± {deviation / math.sqrt(len(values)):{digits}}",
            "more": f"{100 * (mean - 1):+{digits}} %",
        }
        return self.text.replace("{}", shown[self.form])


@settings("claim.picture")
class Drawn:
    """The figures that a claim's picture shows of its rows: y, and x beside it. Without x rows
    whose names end in a number, such as a block, are the points of a line, others a list."""

    y: str
    x: str | None = None
    log: bool = False
    where: Mapping[str, str] = field(default_factory=dict)


@settings("claim")
class Claim:
    """A claim: what is said, how it is run, and the rules that judge it.

    source: the publication that makes the claim.
    means: the claim's meaning in this code base.
    runs: the settings of run.py, by row. DATA stands for the folder of data, OUT for the record's,
        SEED for the seed.
    module: a module to run in place of `runs`, with these words. It writes OUT/rows.jsonl.
    needs: the things that must be present, such as a folder of data.
    quick: the settings of a run that takes minutes.
    leaves_out: the questions that the quick run cannot answer.
    unlike: the differences between the two sides of a cell beside the one that is compared.
    withdrawn: the date on which the claim was taken back, and its result until then. A withdrawn
        claim counts as not reproduced.
    """

    name: str
    title: str
    source: str
    means: str
    human_minutes: NotNegative
    machine_minutes: Positive
    rules: Sequence[ClaimRule]
    cells: Sequence[Cell] = ()
    quotes: Sequence[Quote] = ()
    picture: Drawn | None = None
    runs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    module: Sequence[str] = ()
    common: Sequence[str] = ()
    seeds: Sequence[int] = (1, 2, 3)
    needs: Sequence[str] = ()
    quick: Sequence[str] = ()
    leaves_out: str = ""
    expected: str = UNKNOWN
    missing: str = ""
    unlike: str = ""
    withdrawn: str = ""

    def __post_init__(self) -> None:
        if bool(self.runs) == bool(self.module):
            raise ConfigError(f"claim {self.name}: give either runs or module")
        if not self.rules:
            raise ConfigError(f"claim {self.name}: needs at least one rule")

    @property
    def command(self) -> str:
        return f"python -m xcloud reproduce {self.name}{' --data DIR' * bool(self.needs)}"


class Judged(NamedTuple):
    """A rule with what it came to. met: "yes", "no", "undecided" (Rule), "not reached" where a run
    did not reach its target, or "not run" where the rows do not hold the rule's figure."""

    says: str
    found: Estimate | None
    met: str


def judge(claim: Claim, rows: Sequence[ResultRow]) -> list[Judged]:
    judged = []
    for rule in claim.rules:
        is_missed = rule.figure.is_missed(rows)
        found = None if is_missed else rule.figure.of(rows)
        without = "not reached" if is_missed else "not run"
        met = without if found is None else rule.judge(found)
        judged.append(Judged(says=rule.says, found=found, met=met))
    return judged


def read_claims(path: Path) -> dict[str, Claim]:
    """Return the claims by name, in the order of the file.

    Raises ConfigError that names the claim.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return {name: _claim(name, entry=entry) for name, entry in data.items()}


def _each(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Expand entries: one with for = {block = [0, 5]} stands for as many as it has values, each
    with its value in place of {block}."""
    made = []
    for entry in entries:
        names = entry.get("for", {})
        for values in product(*names.values()):
            text = json.dumps({key: value for key, value in entry.items() if key != "for"})
            for name, value in zip(names, values, strict=True):
                text = text.replace(f"{{{name}}}", str(value))
            made.append(parsed_json(text))
    return made


def _claim(name: str, entry: Mapping[str, Any]) -> Claim:
    entry = {key: _each(v) if key in PATTERNS else v for key, v in entry.items()}
    try:
        return TypeAdapter(Claim).validate_json(json.dumps({"name": name, **entry}))
    except ValidationError as error:
        raise ConfigError(
            f"{FILE}: claim {name!r}: {worded(error, cls=Claim, path='claim')}"
        ) from None

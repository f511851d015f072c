"""What the tests that look at all features alike know of each. It stands in a file of the feature,
features/NAME_rows.py, so that no shared test has a feature's names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from tests import features
from xcloud.record.feature_figures import FeatureFigure, Row


@dataclass(frozen=True)
class Shown:
    """What the closing table and the tracker have of a summary, to the letter."""

    summary: Mapping[str, Any]
    rows: Sequence[Row] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """What becomes of a feature's events.

    summed: their part of the summary.
    notices: lines that a user sees as they come.
    marks: words in the picture of step times, by step.
    calls: what the user's own command is called for, and the step.
    """

    events: Sequence[Mapping[str, Any]]
    summed: Mapping[str, Any]
    notices: Sequence[str] = ()
    marks: Sequence[tuple[int, str]] = ()
    calls: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True)
class Factor:
    """A factor of combinations.py.

    key: the setting, of a job or of `security`.
    levels: its values by name, first the one that means none.
    named: how a refusal names it, as a pattern.
    draws: the levels with which no two runs are alike.
    """

    key: str
    levels: Mapping[str, object]
    named: str
    draws: Collection[str]


@dataclass(frozen=True, kw_only=True)
class FeatureRows:
    """The rows of one feature in tables that tests share.

    shown: the first is of a run that has whatever any run can have.
    of_rank_0: the fields of events that nobody but rank 0 reports.
    whole_run: its events are of the whole run, also after it has gone back to an earlier step.
    settings: what its settings take and their defaults, by class, as settings.json has those of
        the core; those that it adds to a class of the core stand under that class.
    groups: the classes of its settings, by key.
    misfits: overrides that fit alone and not together, and what is said of them.
    left_out_of_trials: the values that mean that a trial runs without it.
    parsers: what it reads of others, for fuzzing: honest messages, and the parser.
    owners: jobs of several owners with it, each the arguments of test_owners_features.Row.
    factors: what it adds to combinations of all features.
    golden: rows of the golden table: the settings of `security`, and the other factors.
    """

    figure: FeatureFigure | None = None
    shown: Sequence[Shown] = ()
    told: Sequence[Told] = ()
    of_rank_0: Mapping[str, str] = field(default_factory=dict)
    whole_run: bool = False
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    groups: Mapping[str, type] = field(default_factory=dict)
    misfits: Mapping[str, tuple[list[str], str]] = field(default_factory=dict)
    left_out_of_trials: Mapping[str, object] = field(default_factory=dict)
    parsers: Mapping[str, Callable[[], tuple[list[Any], Callable[[Any], object]]]] = field(
        default_factory=dict
    )
    owners: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    factors: Mapping[str, Factor] = field(default_factory=dict)
    golden: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]] = field(default_factory=dict)


@cache
def feature_rows() -> Mapping[str, FeatureRows]:
    """Return the rows of all features, by the name of a feature's folder."""
    ending = "_rows"
    return {
        module.name.removesuffix(ending): import_module(f"tests.features.{module.name}").ROWS
        for module in iter_modules(features.__path__)
        if module.name.endswith(ending)
    }


def rows_of(figure: FeatureFigure) -> FeatureRows:
    """Return the rows of the feature that has the figure."""
    return next(rows for rows in feature_rows().values() if rows.figure is figure)

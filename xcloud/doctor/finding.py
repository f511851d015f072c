"""A finding of the doctor: what one check saw, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class FindingState(StrEnum):
    """How bad a finding is. With a red one the run would fail, or not do what its owner wants."""

    OK = "ok"
    WARN = "warn"
    RED = "red"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    advice: one sentence that says what to do; empty where nothing is to be done.
    figures: numbers behind the fact, for a program.
    """

    name: str
    state: FindingState
    fact: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def ok(name: str, fact: str, **figures: float) -> Finding:
    return Finding(name=name, state=FindingState.OK, fact=fact, figures=figures)


def warn(name: str, fact: str, advice: str, **figures: float) -> Finding:
    return Finding(name=name, state=FindingState.WARN, fact=fact, advice=advice, figures=figures)


def red(name: str, fact: str, advice: str, **figures: float) -> Finding:
    return Finding(name=name, state=FindingState.RED, fact=fact, advice=advice, figures=figures)

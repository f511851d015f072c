"""Settings as checked dataclasses: what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegative, Positive, settings


@settings("outer.inner")
class Inner:
    bits: Annotated[int, Field(ge=2, le=8)] = 8

    def __post_init__(self) -> None:
        if self.bits == 7:
            raise ConfigError("outer.inner.bits: 7 is not packed")


@settings("outer")
class Outer:
    steps: Positive
    rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    inner: Inner = dataclasses.field(default_factory=Inner)
    limit: NotNegative | None = None
    mode: Literal["show", "apply"] = "show"
    is_on: bool = True
    counts: Sequence[Positive] = ()
    by_name: Mapping[str, Inner] = dataclasses.field(default_factory=dict)


@settings("outer", kw_only=True)
class Below(Outer):
    more: NotNegative = 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": 0}, "outer.steps must be a whole number >= 1, got 0"),
        ({"steps": "8"}, "outer.steps must be a whole number >= 1, got '8'"),
        ({"steps": True}, "outer.steps must be a whole number >= 1, got True"),
        ({"rate": 0.0}, "outer.rate must be a number in (0, 1], got 0.0"),
        ({"rate": float("nan")}, "outer.rate must be a number in (0, 1], got nan"),
        ({"inner": 3}, "outer.inner must be an Inner, got 3"),
        ({"limit": -1}, "outer.limit must be a whole number >= 0 or null, got -1"),
        ({"mode": "run"}, "outer.mode must be one of show, apply, got 'run'"),
        ({"is_on": 1}, "outer.is_on must be one of True, False, got 1"),
        ({"counts": [1, 0]}, "outer.counts[1] must be a whole number >= 1, got 0"),
        (
            {"counts": "12"},
            "outer.counts must be a list of which each is a whole number >= 1, got '12'",
        ),
        ({"by_name": {"a": 1}}, "outer.by_name.a must be an Inner, got 1"),
    ],
)
def test_a_bad_value_is_refused_with_its_key(changed: dict[str, Any], message: str) -> None:
    for kind in (Outer, Below):
        with pytest.raises(ConfigError) as refused:
            kind(**({"steps": 1} | changed))
        assert str(refused.value) == message


def test_what_several_fields_must_meet_keeps_its_words() -> None:
    with pytest.raises(ConfigError, match=r"outer\.inner\.bits: 7 is not packed"):
        Inner(7)
    with pytest.raises(ConfigError, match=r"outer\.inner\.bits must be 2\.\.8, got 9"):
        dataclasses.replace(Inner(), bits=9)


def test_settings_are_dataclasses_that_compare_and_hash() -> None:
    assert Outer(2, rate=1) == Outer(2, rate=1.0) != Outer(3)
    assert hash(Inner(4)) == hash(Inner(4))
    assert list(inspect.signature(Outer).parameters)[:2] == ["steps", "rate"]
    assert dataclasses.is_dataclass(Outer)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Inner().bits = 3  # type: ignore[misc]


def test_what_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(TypeError, match="Outer: setting 'steps' is missing"):
        Outer()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Inner: setting 'bit' is unknown"):
        Inner(bit=3)  # type: ignore[call-arg]

"""Settings as typed, frozen dataclasses: the annotation of a field is its check, made when the
object is built. Not a schema language: what several fields must meet stands in __post_init__.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from xcloud.base.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NotNegativeFloat = Annotated[float, Field(ge=0.0)]
Seconds = NotNegativeFloat

T = TypeVar("T")
_NO_INSTANCE = ("is_instance_of", "dataclass_type", "dataclass_exact_type")
_CONFIG = ConfigDict(
    strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, extra="forbid"
)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(
    path: str = "", *, kw_only: bool = False, frozen: bool = True
) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose fields are held to their annotations, without
    conversions: "8" is no int, True no number; an int is a float.

    path: the key of these settings in a config, such as "training.checkpoint"; named in messages.
    frozen: false for what also keeps a state of its own, such as a warm start.
    Bounds are given as Annotated[int, Field(ge=1, le=8)]. Building one raises ConfigError that
    names the key, what came and what is allowed, and the `advice` of a class that is expected.
    """

    def make(cls: type[T]) -> type[T]:
        made: Any = checked_dataclass(frozen=frozen, kw_only=kw_only, config=_CONFIG)(cls)
        build = made.__init__

        @functools.wraps(build)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                build(self, *args, **kwargs)
            except ValidationError as error:
                raise _worded(error, type(self), path) from None

        made.__init__ = init
        return cast(type[T], made)

    return make


def nothing() -> None:
    """For configs: what may be left out is (plan=none, security/meter=none)."""


def between(least: int, most: int) -> Any:
    """A whole number, for `check`."""
    return Annotated[int, Field(ge=least, le=most)]


def check(name: str, value: object, annotation: Any) -> None:
    """Raise ConfigError unless a value that is no field of settings is held by an annotation."""
    adapter = TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))
    try:
        adapter.validate_python(value)
    except ValidationError:
        raise ConfigError(f"{name} must be {allowed(annotation)}, got {value!r}") from None


def _worded(error: ValidationError, cls: type, path: str) -> Exception:
    first = error.errors()[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, Exception):  # of __post_init__
        return raised
    if first["type"] in ("missing", "missing_argument", "unexpected_keyword_argument"):
        name = first["loc"][-1]
        what = "is missing" if "missing" in first["type"] else "is unknown"
        return TypeError(f"{cls.__name__}: setting {name!r} {what}")
    names = list(inspect.signature(cls).parameters)
    where = first["loc"]
    field = names[where[0]] if isinstance(where[0], int) else str(where[0])
    annotation, key = get_type_hints(cls, include_extras=True)[field], field
    for part in where[1:]:  # an index, a key, or the name that a member of a union goes by
        inside = _inside(annotation, part)
        if inside is not None:
            annotation = inside
            key += f"[{part}]" if isinstance(part, int) else f".{part}"
    key = f"{path}.{key}" if path else key
    words = f"{key} must be {allowed(annotation)}, got {first['input']!r}"
    advice = next((m.advice for m in _members(annotation) if hasattr(m, "advice")), "")
    if first["type"] in _NO_INSTANCE and isinstance(first["input"], Mapping | str):
        words += f"; {advice or 'in YAML give it a _target_'}"
    return ConfigError(words)


def _inside(annotation: Any, part: int | str) -> Any | None:
    """What a list holds at an index, a mapping under a key; None if there is neither."""
    kind: type = Sequence if isinstance(part, int) else Mapping
    for member in _members(annotation):
        if get_origin(member) is Annotated:
            member = get_args(member)[0]
        origin = get_origin(member)
        if isinstance(origin, type) and issubclass(origin, kind):
            return get_args(member)[-1]
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def allowed(annotation: Any) -> str:
    """What a field takes, in words: "a whole number >= 1 or null"."""
    return " or ".join(dict.fromkeys(_one(member) for member in _members(annotation)))


def _one(annotation: Any) -> str:
    limits: tuple[Any, ...] = ()
    if get_origin(annotation) is Annotated:
        annotation, *rest = get_args(annotation)
        limits = tuple(m for r in rest for m in getattr(r, "metadata", [r]))
        if len(_members(annotation)) > 1:
            return allowed(annotation)
    origin = get_origin(annotation)
    if annotation is type(None) or annotation is None:
        return "null"
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if annotation is bool:
        return "one of True, False"
    if annotation is int:
        return _whole(limits)
    if annotation is float:
        return _number(limits)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list{_length(limits)} of which each is {allowed(get_args(annotation)[0])}"
    if annotation is str:
        return "a text"
    name = getattr(annotation, "__name__", str(annotation))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _length(limits: Sequence[Any]) -> str:
    least, most = _limit(limits, MinLen), _limit(limits, MaxLen)
    if least is None and most is None:
        return ""
    return f" of {least if most == least else f'{least or 0}..{most}' if most else f'{least}+'},"


def _whole(limits: Sequence[Any]) -> str:
    least, most = _limit(limits, Ge), _limit(limits, Le)
    if least is not None and most is not None:
        return f"{least}..{most}"
    return "a whole number" + (f" >= {least}" if least is not None else "")


def _number(limits: Sequence[Any]) -> str:
    above, least, most = _limit(limits, Gt), _limit(limits, Ge), _limit(limits, Le)
    if above is None and least is None and most is None:
        return "a number"
    low = f"({above:g}" if above is not None else f"[{least:g}" if least is not None else "(-inf"
    return f"a number in {low}, {f'{most:g}]' if most is not None else 'inf)'}"


def _limit(limits: Sequence[Any], kind: type[Any]) -> Any | None:
    name = {Ge: "ge", Gt: "gt", Le: "le", MinLen: "min_length", MaxLen: "max_length"}[kind]
    return next((getattr(limit, name) for limit in limits if isinstance(limit, kind)), None)

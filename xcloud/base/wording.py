"""How a refused setting is worded: which key, what it takes, what came."""

from __future__ import annotations

import difflib
import inspect
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from xcloud.base.errors import ConfigError
from xcloud.base.project import conf_dir

MAX_NAME_BYTES = 140  # of what becomes a file's name; encrypted home folders take 143
MAX_QUOTED = 80  # characters of foreign data in a message
_NO_INSTANCE = ("is_instance_of", "dataclass_type", "dataclass_exact_type")
_LIMITS = ("gt", "ge", "le", "min_length", "max_length")


def quoted(value: object) -> str:
    """Return a value of foreign data for a message: its repr, cut to MAX_QUOTED characters."""
    # Cut before its repr is made, which of gigabytes would fill the memory.
    if isinstance(value, str | bytes):
        value = value[: MAX_QUOTED + 1]
    return _cut(repr(value), max_length=MAX_QUOTED)


def listed(names: Iterable[object]) -> str:
    """Return names of foreign data for a message, "none" for none: each cut to MAX_QUOTED / 2
    characters, all of them to three times MAX_QUOTED."""
    each = [_cut(str(name), max_length=MAX_QUOTED // 2) for name in names]
    return _cut(", ".join(each), max_length=3 * MAX_QUOTED) or "none"


def _cut(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[:max_length]}…"


def worded(error: ValidationError, cls: type, path: str) -> Exception:
    """Return the error to raise for settings that do not fit their annotations: which key, what it
    takes and what came.

    path: the key of these settings in a config.
    """
    # One error is enough: the user mends it and tries again.
    first = error.errors()[0]
    # Errors of __post_init__ are worded already.
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, Exception):  # of __post_init__
        return raised
    if first["type"] in ("missing", "missing_argument", "unexpected_keyword_argument"):
        name = first["loc"][-1]
        # Raised where a class is built by hand; of a file check_keys has said it before.
        what = "is missing" if "missing" in first["type"] else "is unknown"
        return TypeError(f"{cls.__name__}: setting {name!r} {what}")
    names = list(inspect.signature(cls).parameters)
    # pydantic gives the place of an argument, or its name.
    where = first["loc"]
    field = names[where[0]] if isinstance(where[0], int) else str(where[0])
    annotation = get_type_hints(cls, include_extras=True)[field]
    key = field
    # Into lists and mappings, so that the entry that is wrong is named with what it takes.
    for part in where[1:]:  # an index, a key, or the name that a member of a union goes by
        inside = _inside(annotation, part=part)
        if inside is not None:
            annotation = inside
            if isinstance(part, int):
                key += f"[{part}]"
            else:
                key += f".{part}"
    if path:
        key = f"{path}.{key}"
    words = f"{key} must be {allowed(annotation)}, got {first['input']!r}"
    # Words of a command line come as surrogates where their bytes are no UTF-8.
    if first["type"] == "string_unicode":
        return ConfigError(f"{words}; it has bytes that are no UTF-8: set LANG or PYTHONUTF8=1")
    advice = next((m.advice for m in _members(annotation) if hasattr(m, "advice")), "")
    # A word or a mapping in place of an object: somebody wrote the name of an option without its
    # group.
    given = first["input"]
    if first["type"] in _NO_INSTANCE and isinstance(given, Mapping | str):
        group = key.replace(".", "/")
        is_option = isinstance(given, str) and (conf_dir() / group / f"{given}.yaml").is_file()
        how = f"choose it as {group}={given}" if is_option else "in YAML give it a _target_"
        words += f"; {advice or how}"
    return ConfigError(words)


def _inside(annotation: Any, part: int | str) -> Any | None:
    """Return the annotation of what a list or a mapping holds; None if it is neither."""
    kind: type = Sequence if isinstance(part, int) else Mapping
    for member in _members(annotation):
        # Bounds of a list stand around it.
        bare = get_args(member)[0] if get_origin(member) is Annotated else member
        origin = get_origin(bare)
        if isinstance(origin, type) and issubclass(origin, kind):
            return get_args(bare)[-1]
    return None


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def check(name: str, value: object, annotation: Any) -> None:
    """Raise ConfigError unless a value that is no field of settings is held by an annotation."""
    adapter = TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))
    try:
        adapter.validate_python(value)
    except ValidationError:
        raise ConfigError(f"{name} must be {allowed(annotation)}, got {value!r}") from None


def allowed(annotation: Any) -> str:
    """Say what a field takes, in words: "a whole number >= 1 or null"."""
    return " or ".join(dict.fromkeys(_one(member) for member in _members(annotation)))


def _one(annotation: Any) -> str:
    limits: dict[str, Any] = {}
    if get_origin(annotation) is Annotated:
        annotation, *rest = get_args(annotation)
        for limit in (m for r in rest for m in getattr(r, "metadata", [r])):
            limits |= {name: getattr(limit, name) for name in _LIMITS if hasattr(limit, name)}
        # Bounds around a union are those of its members.
        if len(_members(annotation)) > 1:
            return allowed(annotation)
    origin = get_origin(annotation)
    if annotation is type(None) or annotation is None:
        return "null"
    if origin is Literal or annotation is bool:
        return f"one of {', '.join(map(str, get_args(annotation) or (True, False)))}"
    if annotation is int and limits.get("ge") is None:
        return "a whole number"
    if annotation is int:
        most = limits.get("le")
        return f"a whole number >= {limits['ge']}" if most is None else f"{limits['ge']}..{most}"
    if annotation is float:
        return _number(limits.get("gt"), minimum=limits.get("ge"), maximum=limits.get("le"))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        length = _length(limits.get("min_length"), maximum=limits.get("max_length"))
        return f"a list{length} of which each is {allowed(get_args(annotation)[0])}"
    if annotation is str:
        return "a text"
    name = getattr(annotation, "__name__", str(annotation))
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def _length(minimum: int | None, maximum: int | None) -> str:
    if minimum is None and maximum is None:
        return ""
    if minimum == maximum:
        return f" of {minimum},"
    if maximum:
        return f" of {minimum or 0}..{maximum},"
    return f" of {minimum}+,"


def _number(above: float | None, minimum: float | None, maximum: float | None) -> str:
    if above is None and minimum is None and maximum is None:
        return "a number"
    low = "(-inf"
    if above is not None:
        low = f"({above:g}"
    elif minimum is not None:
        low = f"[{minimum:g}"
    high = "inf)" if maximum is None else f"{maximum:g}]"
    return f"a number in {low}, {high}"


def meant(name: str, known: Sequence[str]) -> str:
    """Return the end of a message that names the nearest of the known names, if one is near."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else "."


_DTYPES = (
    "model.weights is what the frozen weights beside adapters are kept as; trained weights are "
    "FP32, and training.precision=bf16 computes in bf16"
)
_FOUR_BITS = "it is model.weights=nf4, of the frozen weights beside adapters"
# Settings of other programs that one may wish for: what there is instead. Names that are near
# theirs would mislead.
WISHED = {
    "dtype": _DTYPES,
    "torch_dtype": _DTYPES,
    "load_in_4bit": _FOUR_BITS,
    "load_in_8bit": "it is model.weights=int8, of the frozen weights beside adapters",
    "qlora": _FOUR_BITS,
    "dpo": "it is task=preferences, as in +exp=dpo_reviews",
    "gradient_checkpointing": "it is model.activation_checkpointing=true, of causal models",
}


def unknown_key(path: str, name: str, known: Sequence[str], elsewhere: str = "") -> str:
    """Return the line that names the nearest of the known settings, and all of them.

    elsewhere: a setting of another part that may be meant if none of these is.
    """
    where = f"{path}.{name}" if path else name
    # Names that other programs have: what is near them here would mislead.
    if name in WISHED:
        return f"unknown setting {where!r}: {WISHED[name]}"
    there = ", ".join(known)
    said = meant(name, known)
    if elsewhere and said == ".":
        # Only if nothing here is near.
        said = f"; did you mean {elsewhere!r}?"
    if there:
        said += f" Allowed here: {there}"
    # The setting that newcomers look for.
    if where in ("task.path", "task.data.path"):
        said += "; with profile=files task.data.path is the folder of your corpus"
    return f"unknown setting {where!r}{said}"


def check_name(what: str, name: object, spoken: bool = False) -> str:
    """Return a name. Refuse one that could lead out of a folder, into a shell or into another
    command.

    Clouds and sweeps become parts of file names, tags and commands that are shown.
    spoken: letters of any language and spaces may be in it. Raises ConfigError.
    """
    if spoken:
        fits = re.fullmatch(r"\w[\w .+-]*", str(name))
        more = ", '+' and spaces"
    else:
        fits = re.fullmatch(r"\w[\w.-]*", str(name), re.ASCII)
        more = ""
    if fits is None:
        raise ConfigError(
            f"{what} must be a name of letters, digits, '_', '-', '.'{more}, as it becomes part "
            "of file names and commands: remove '/' and control characters, quotes and '$'; "
            f"got {name!r}"
        )
    if (num_bytes := len(str(name).encode())) > MAX_NAME_BYTES:
        raise ConfigError(
            f"{what} must have at most {MAX_NAME_BYTES} bytes, for it becomes part of file names; "
            f"got {num_bytes}: {quoted(name)}"
        )
    return str(name)


def check_label(what: str, text: str) -> str:
    """Return a text that only describes. Raises ConfigError for one that a shell or a terminal
    would act upon, wherever it is shown."""
    # A dollar or a backquote runs a command where a label is pasted into a shell.
    if not text.isprintable() or set(text) & set("$`"):
        raise ConfigError(
            f"{what} must be a text without control characters, '$' and '`'; got {text!r}"
        )
    return text


NO_REFERENCE = (
    "'${' begins a reference to another setting, also in a path: rename the file or folder, or "
    "give a symbolic link to it"
)


def does_not_fit(message: str, settings: Mapping[str, object]) -> str:
    """For a setting that follows from one of another group, where the chosen option lacks it.
    message: OmegaConf's. settings: by dotted name, not resolved."""
    # OmegaConf quotes the key that it did not find.
    source = message.split("'")[1] if "'" in message else ""
    taking = [key for key, value in settings.items() if f"${{{source}}}" in str(value)]
    group = source.split(".")[0]
    if not taking:
        return message
    if group == source:
        value = settings[taking[0]]
        return f"{taking[0]} is {value!r}, but there is no setting {source!r}; {NO_REFERENCE}"
    chosen = str(settings.get(f"{group}._target_")).rsplit(".", 1)[-1]
    taker = taking[0].split(".")[0]
    return (
        f"{taking[0]} follows from {source}, which the chosen {group} ({chosen}) does not have: "
        f"this {taker} and this {group} do not fit together; choose another of the two"
    )

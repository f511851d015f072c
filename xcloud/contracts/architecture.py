"""The schema of a stage's architecture, which stands in a snapshot or in a file of a stage.

Another owner's rank may have written it, so whoever reads one checks it here first. Each key that
a model of xcloud reads has a type and a range; keys of other models are plain, bounded JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xcloud.base.errors import DataError

MAX_LAYERS = 1_024
MAX_EXPERTS = 1_024
MAX_MATRICES_OF_EXPERTS = 2**17
"""Layers times experts: a network is laid out matrix by matrix."""
_MAX_SIZE = 2**31 - 1
_MAX_DEPTH = 8
_MAX_VALUES = 20_000
_MAX_TEXT = 1_000

OWN_FOLDER = "causal/[0-9a-f]{32}"
"""Where the cache keeps a base that a run has made (models.causal_stage.OwnCausal)."""

T = TypeVar("T")
_Size = Annotated[int, Field(ge=1, le=_MAX_SIZE)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]


class _Known(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Head(_Known):
    kind: Literal["classes", "value", "span"]
    num_outputs: Annotated[int, Field(ge=1, le=100_000)]


class StageArchitecture(BaseModel):
    """The keys of an architecture that models of xcloud read. None has a default: a model that
    needs one which is missing says so.

    own_base: a folder of the cache that the run has made, never one elsewhere.
    config: the configuration of the transformers model; see check_sizes.
    backbone: an EncoderConfig, which checks its own values.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    lora: bool = False
    max_length: Annotated[int, Field(ge=1, le=2**24)] = 1
    bases: Annotated[dict[str, _Digest], Field(max_length=10_000)] = {}
    own_base: Annotated[str, Field(pattern=f"^{OWN_FOLDER}$")] | None = None
    config: dict[str, Any] = {}
    backbone: dict[str, Any] = {}
    source_hidden: _Size = 1
    hidden: _Size = 1
    head: _Head | None = None


class GivenArchitecture(dict[str, Any]):
    """An architecture that was read. A key that a model needs and that is missing is a DataError
    of the file, no fault of ours."""

    def __missing__(self, key: str) -> Any:
        raise DataError(f"the stage's architecture has no {key!r}; was it written by xcloud?")


def checked_architecture(value: object) -> GivenArchitecture:
    """Return an architecture that keeps to the schema, unchanged. Raises DataError."""
    check_is_plain(value, "an architecture")
    if not isinstance(value, dict):
        raise DataError("an architecture is a mapping")
    try:
        StageArchitecture.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"its architecture: {where:.100}: {first['msg']:.200}") from None
    check_sizes(value.get("config", {}), "its architecture: config")
    return GivenArchitecture(value)


def tensors_of(
    parts: Iterable[Mapping[str, T]], are_equal: Callable[[T, T], bool]
) -> dict[str, T]:
    """Return the tensors of all stages by name.

    are_equal: tells whether two tensors have the same values.

    Raises DataError where two stages hold different tensors of one name: each owner answers for
    the stages of its cloud, and may not replace a tensor of another one.
    """
    found: dict[str, T] = {}
    for number, part in enumerate(parts):
        for name, tensor in part.items():
            if name in found and not are_equal(found[name], tensor):
                raise DataError(
                    f"stage {number} holds {name!r:.100}, which an earlier stage holds with other "
                    "values: each stage has its own tensors"
                )
            found.setdefault(name, tensor)
    return found


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a network that costs more to lay out than any has."""
    most = {"layer": MAX_LAYERS, "expert": MAX_EXPERTS}
    found = dict.fromkeys(most, 1)
    for key, value in config.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if abs(value) > _MAX_SIZE:
            raise DataError(f"{where}.{key} is {value}; at most {_MAX_SIZE} is taken")
        for word in (word for word in most if word in key):
            found[word] = max(found[word], value)
            if value > most[word]:
                raise DataError(f"{where}.{key} is {value}; at most {most[word]} is taken")
    if math.prod(found.values()) > MAX_MATRICES_OF_EXPERTS:
        raise DataError(
            f"{where} has {found['layer']} layers of {found['expert']} experts; at most "
            f"{MAX_MATRICES_OF_EXPERTS} together are taken"
        )


def check_is_plain(value: object, what: str) -> None:
    """Raise DataError unless a value read from JSON is small and flat."""
    rest = [(value, 0)]
    num_values = 0
    while rest:
        node, depth = rest.pop()
        num_values += 1
        if depth > _MAX_DEPTH or num_values > _MAX_VALUES:
            raise DataError(
                f"{what} has at most {_MAX_VALUES} values, {_MAX_DEPTH} inside each other"
            )
        if isinstance(node, dict):
            rest += [(entry, depth + 1) for pair in node.items() for entry in pair]
        elif isinstance(node, list):
            rest += [(entry, depth + 1) for entry in node]
        elif isinstance(node, str) and len(node) > _MAX_TEXT:
            raise DataError(f"{what} has texts of at most {_MAX_TEXT} characters")
        elif isinstance(node, int) and abs(node) >= 1 << 63:
            raise DataError(f"{what} has whole numbers of at most 63 bits")
        elif isinstance(node, float) and not math.isfinite(node):
            raise DataError(f"{what} has a number that is not finite")

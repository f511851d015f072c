"""`python -m xcloud settings GROUP`: what may be set, with types, defaults and meanings.

Each setting is documented in its class, by a string below it or in the docstring as "name: what it
means". This module reads it there, so nothing is said twice.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any

from omegaconf import DictConfig, OmegaConf

from xcloud.base.errors import ConfigError
from xcloud.base.project import conf_dir
from xcloud.base.settings import defaults_of
from xcloud.base.terminal import say
from xcloud.base.walk import walk
from xcloud.base.wording import allowed, meant
from xcloud.job.config import fill_in
from xcloud.job.given import composed

NOT_SHOWN = ("_target_", "hydra", "follow_up")


@dataclass(frozen=True)
class Setting:
    """A setting of a group.

    key: the setting's name as it is written on the command line.
    takes: the setting's type and bounds, as a phrase.
    default: the default of its class, as it is written on the command line; "" where a value must
        be given.
    value: its value in the composed experiment.
    means: its meaning according to the docstring of its class.
    """

    key: str
    takes: str
    default: str
    value: str
    means: str


def settings_of(config: DictConfig, group: str) -> list[Setting]:
    """Return the settings of a group, nested ones included. Raises ConfigError if unknown."""
    known = _all_settings(config)
    # A point behind both: "train" is no group of "training.max_steps".
    found = [one for one in known if f"{one.key}.".startswith(f"{group}.")]
    if not found and OmegaConf.select(config, group) is None:
        groups = _groups(config, known)
        near = meant(group, known=groups)
        raise ConfigError(f"there is no group {group!r}{near} There are: {', '.join(groups)}")
    return found


def _all_settings(config: DictConfig) -> list[Setting]:
    """Return the settings of an experiment, and what else its config holds. The settings of a
    group stand before those of groups within it."""
    found: list[Setting] = []
    # Unresolved: a value that refers to another one is shown so.
    filled = fill_in(OmegaConf.to_container(config, resolve=False), by_position=True)
    for node in walk(filled):
        value = node.value
        # Settings of a group first, then those of groups within it, as walk() comes to them.
        if isinstance(value, dict) and "_target_" in value:
            found += _own_settings(value, node.path)
        elif not value or not isinstance(value, dict):
            node.is_closed = True
            # A setting of a class is shown by its class, with what it takes and means.
            if not node.is_of_owner:
                found.append(
                    Setting(node.path, takes="", default="", value=_word(value), means="")
                )
    return [one for one in found if one.key.split(".")[0] not in NOT_SHOWN]


def _groups(config: DictConfig, known: Sequence[Setting]) -> list[str]:
    """Return the names of groups, those without a setting among them."""
    names = {one.key.split(".")[0] for one in known} | {str(key) for key in config}
    return sorted(names.difference(NOT_SHOWN))


def _own_settings(given: Mapping[str, Any], path: str) -> Iterator[Setting]:
    """Yield the settings that a constructor takes itself."""
    target = resolve_name(str(given["_target_"]))
    meanings = _meanings(target)
    defaults = {name: _word(default) for name, default in defaults_of(target).items()}
    try:
        # Without its hints a class shows the annotations as they are written.
        hints = typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError):  # names that only a type checker imports
        hints = {}
    for name, parameter in inspect.signature(target).parameters.items():
        value = given.get(name)
        # A group within this one has settings of its own.
        if isinstance(value, dict) and value.keys() - {"_target_"}:
            continue
        yield Setting(
            key=f"{path}.{name}" if path else name,
            takes=allowed(hints.get(name, parameter.annotation)),
            default=defaults.get(name, ""),
            value=_word(value) if name in given else "",
            means=meanings.get(name, ""),
        )


def _meanings(target: type) -> dict[str, str]:
    """Return what a class and its bases say of each of its settings, in their docstrings or in a
    string below the setting."""
    names = {name for name in inspect.signature(target).parameters}
    meanings: dict[str, str] = {}
    # Bases first, so that what a class says of an inherited setting counts.
    for cls in reversed(inspect.getmro(target) if inspect.isclass(target) else [target]):
        text = " ".join(inspect.cleandoc(cls.__doc__ or "").split())
        # "name: meaning", at the beginning or behind the end of another one; names that share a
        # meaning stand before one colon.
        heads = [
            match
            for match in re.finditer(
                r"(?:(?<=^)|(?<=[.;)] )|(?<=: ))([\w]+(?:, \w+)*):(?= )", text
            )
            # A colon in a sentence is no setting, so one of the names must be one.
            if names.intersection(match[1].split(", "))
        ]
        for index, head in enumerate(heads):
            end = heads[index + 1].start() if index + 1 < len(heads) else len(text)
            for name in head[1].split(", "):
                meanings[name] = text[head.end() : end].strip()
        meanings |= _below_fields(cls)
    return meanings


@cache
def _below_fields(cls: type) -> dict[str, str]:
    """Return the strings that stand below the fields of a class, by field."""
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):  # a built-in class, or one made while the program runs
        return {}
    # The source alone knows which string stands below which field: Python keeps none of them.
    (definition,) = ast.parse(textwrap.dedent(source)).body
    body = getattr(definition, "body", [])
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


def _word(value: object) -> str:
    """Write a value as on the command line; a group by the name of its class."""
    if isinstance(value, dict) and "_target_" in value:
        return str(value["_target_"]).rpartition(".")[2]
    if value is None or isinstance(value, bool | int | float | list | tuple | dict):
        return json.dumps(value, default=str)
    if isinstance(value, str):
        return value
    return type(value).__name__


def main(words: Sequence[str] | None = None) -> int:
    """List the settings of a group, as the experiment has them that the overrides describe."""
    parser = argparse.ArgumentParser("python -m xcloud settings", description=main.__doc__)
    parser.add_argument("group", nargs="?", help="such as training, or training.optimizer")
    parser.add_argument("overrides", nargs="*", help="such as +exp=lora_clm; default: the demo")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    given = parser.parse_args(words)
    overrides = given.overrides or ["+exp=abnet_iwslt"]
    config = composed(overrides, conf_dir())
    if given.group is None:
        for name in _groups(config, known=_all_settings(config)):
            node = config.get(name)
            if isinstance(node, DictConfig):
                node = str(node.get("_target_", "")).rpartition(".")[2]
            say(f"{name:<12} {'' if node is None else _word(node)}".rstrip())
        say("\npython -m xcloud settings GROUP   lists the settings of one")
        return 0
    entries = settings_of(config, group=given.group)
    if given.json:
        say(json.dumps([dataclasses.asdict(entry) for entry in entries], indent=1))
        return 0
    options = sorted(
        path.stem
        # An option whose name begins with _ is a part of others.
        for path in (conf_dir() / given.group.replace(".", "/")).glob("*.yaml")
        if not path.stem.startswith("_")
    )
    if options:
        say(f"{given.group}=  one of {', '.join(options)}")
    for entry in entries:
        say(f"\n{entry.key}={entry.value}")
        facts = ", ".join(
            filter(None, (entry.takes, f"default {entry.default}" if entry.default else ""))
        )
        for text in filter(None, (facts, entry.means)):
            say(textwrap.indent(textwrap.fill(text, 92), "    "))
    return 0

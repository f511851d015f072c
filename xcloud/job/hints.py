"""What to say of a command line that does not compose: the setting or option that was meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException


def explained(error: Exception, overrides: Sequence[str], conf_dir: Path) -> list[str]:
    """Lines for the user, of what Hydra raised. Ends the Hydra that is initialised."""
    return hints(overrides, conf_dir) or [in_one_line(error)]


def in_one_line(error: Exception) -> str:
    """Hydra's words; where a group lacks an option, with the nearest one and all there are."""
    lines = str(error).strip().splitlines()[:1]
    lines += str(error.__cause__ or "").strip().splitlines()[:1]
    said = " ".join(dict.fromkeys(lines))
    _, found, below = str(error).partition("Available options in ")
    options = [line.strip() for line in below.splitlines()[1:] if line.startswith("\t")]
    options = list(takewhile(lambda option: "provider=" not in option, options))
    if not found or not options:
        return said
    wrong = said.split("'")[-2]  # group/option
    near = _meant(difflib.get_close_matches(wrong.rpartition("/")[2], options, 1))
    return f"there is no {wrong}{near or '.'} There are: {', '.join(options)}"


def hints(overrides: Sequence[str], conf_dir: Path) -> list[str]:
    """For each override that sets a key the chosen groups do not have, a line that names the
    nearest and all that stand beside it. Empty if the groups themselves cannot be composed.
    Ends the Hydra that is initialised."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir.absolute()), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            parsed = OverridesParser.create().parse_overrides(list(overrides))
            keys = [
                override.get_key_element()
                for override in parsed
                if not (override.is_add() or override.is_delete() or override.is_sweep_override())
                and not loader.get_group_options(override.key_or_group)
            ]
            chosen = [
                override.input_line or ""
                for override in parsed
                if override.is_add() or loader.get_group_options(override.key_or_group)
            ]
            config = compose("config", overrides=chosen)
    except (HydraException, OmegaConfBaseException):
        return []
    finally:
        GlobalHydra.instance().clear()
    return [line for key in keys if not key.startswith("hydra.") for line in hint(config, key)]


def hint(config: DictConfig, key: str) -> Iterator[str]:
    """A line if the config has no such key: the nearest one beside it, or else anywhere."""
    node: object = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig):
            return
        if part not in node.keys():  # "in" is False for what has no value yet
            beside = [str(name) for name in node if name != "_target_"]
            target = node.get("_target_")
            known = inspect.signature(get_object(target)).parameters if target else ()
            optional = [name for name in known if name not in beside]
            where = ".".join(parts[: depth + 1])
            if part in optional:
                yield f"{where} is optional and not set yet: write +{key}=VALUE"
                return
            near = difflib.get_close_matches(part, [*beside, *optional], 1)
            allowed = ", ".join([*beside, *(f"+{name}" for name in optional)])
            meant = _meant(near or _elsewhere(config, key)) or "."
            yield f"unknown setting {where!r}{meant} Allowed here: {allowed}"
            return
        node = node._get_node(part)


def _meant(near: Sequence[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else ""


def _elsewhere(config: DictConfig, key: str) -> list[str]:
    """Settings anywhere whose last name is nearly that of `key`: the one most like it."""
    last = key.rpartition(".")[2]
    names = list(_names(config, ""))
    near = difflib.get_close_matches(last, {name.rpartition(".")[2] for name in names}, 1, 0.85)
    found = [name for name in names if name.rpartition(".")[2] in near]
    return difflib.get_close_matches(key, found, 1, 0.0)


def _names(node: DictConfig, path: str) -> Iterator[str]:
    for name in map(str, node):
        yield f"{path}{name}"
        if isinstance(below := node._get_node(name), DictConfig) and not below._is_none():
            yield from _names(below, f"{path}{name}.")

"""What Hydra does not say of a key that the config lacks: the keys it has at that place."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException


def hints(overrides: Sequence[str], conf_dir: Path) -> list[str]:
    """For each override that sets a key the chosen groups do not have, a line that names the
    nearest and all that stand beside it. Empty if the groups themselves cannot be composed:
    Hydra lists the options then. Ends the Hydra that is initialised."""
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
    return [line for key in keys if not key.startswith("hydra.") for line in _hint(config, key)]


def _hint(config: DictConfig, key: str) -> Iterator[str]:
    node: object = config
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig):
            return
        if part not in node:
            beside = [str(name) for name in node if name != "_target_"]
            near = difflib.get_close_matches(part, beside, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            where = ".".join(parts[: depth + 1])
            yield f"unknown setting {where!r}{hint} Allowed here: {', '.join(beside)}"
            return
        node = node._get_node(part)

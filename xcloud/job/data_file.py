"""Read a YAML file as data, whoever wrote it. Not a place for what its keys mean.

No anchors and aliases (292 bytes can stand for a million values), no tags, no interpolation (which
reads environment variables of this machine), and bounds that large experiments keep by far.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xcloud.base.errors import ConfigError

MAX_BYTES = 128_000  # the largest experiment of conf/ has 7,000
MAX_VALUES = 4_000  # keys included; it has 500. OmegaConf takes 0.1 ms for each
MAX_LENGTH = 10_000  # characters of one value
MAX_DEPTH = 32  # it has 7


def read_data(path: Path) -> Any:
    """Mappings, lists, strings and numbers, as OmegaConf holds them. Raises ConfigError naming the
    file and, where a value is the reason, its line."""
    if not path.is_file():  # a pipe might never end
        raise ConfigError(f"there is no file {path}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is longer than {MAX_BYTES} bytes")
        text = data.decode()
        _check(text, path)
        return OmegaConf.load(io.StringIO(text))
    except ConfigError:
        raise
    except (OSError, yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None


def _check(text: str, path: Path) -> None:
    """Look at one value after the other, before any is built."""
    depth = num_values = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        num_values += isinstance(event, yaml.NodeEvent)
        value = event.value if isinstance(event, yaml.ScalarEvent) else ""
        for is_there, what in (
            (getattr(event, "anchor", None), "an anchor or alias (& or *)"),
            (getattr(event, "tag", None), "a tag (!)"),
            ("${" in value, "an interpolation (${...}; run.py --resolve writes without)"),
            (depth > MAX_DEPTH, f"more than {MAX_DEPTH} values in each other"),
            (num_values > MAX_VALUES, f"more than {MAX_VALUES} keys and values"),
            (len(value) > MAX_LENGTH, f"more than {MAX_LENGTH} characters in a value"),
        ):
            if is_there:
                line = event.start_mark.line + 1
                raise ConfigError(f"{path}, line {line}: {what} is not read; plain values are")

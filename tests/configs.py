"""Configs of conf/ as Hydra composes them."""

from __future__ import annotations

import copy
import hashlib
import marshal
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list as hydra_defaults
from omegaconf import DictConfig, OmegaConf

from xcloud.base.overrides import for_hydra, groups_of, read, sets_value
from xcloud.experiment import Experiment
from xcloud.job import config as configs

SHARED_FOLDER = "XCLOUD_TESTS_COMPOSED"  # the environment variable that conftest.py sets
CONF = Path(__file__).parent.parent / "conf"


def composed(*overrides: str) -> DictConfig:
    """A copy of its own. Composing takes a quarter of a second, so Hydra does it once for equal
    choices of groups; values are set afterwards, as Hydra would (tests/job/test_conf.py)."""
    values = [one for one in overrides if is_value(one)]
    config = by_hydra(*(one for one in overrides if one not in values)).copy()
    for found in map(read, values):
        OmegaConf.update(config, found.key_or_group, found.value(), merge=True, force_add=True)
    return config


def is_value(word: str) -> bool:
    """Return whether a word sets a value that is no mapping, and chooses and deletes nothing."""
    found = read(word)
    if found is None or found.is_delete() or found.is_sweep_override():
        return False
    is_plain = not isinstance(found.value(), dict) and not found.key_or_group.endswith("_target_")
    return is_plain and sets_value(found, is_group=groups_of(CONF))


@cache
def by_hydra(*overrides: str) -> DictConfig:
    """With the defaults of classes, as a run has them. What one process of xdist has
    composed the others read from its file."""
    shared = os.environ.get(SHARED_FOLDER)
    file = Path(shared, hashlib.sha256(repr(overrides).encode()).hexdigest()) if shared else None
    if file is not None and file.exists():
        return OmegaConf.create(marshal.loads(file.read_bytes()))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = compose("config", overrides=for_hydra(overrides, groups_of(CONF)))
    config = configs.fill_in(OmegaConf.to_container(found))
    if file is not None:
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(marshal.dumps(config))
        part.replace(file)
    return OmegaConf.create(config)


def load_once(file: Any, load: Callable[[Any], Any] = OmegaConf.load) -> Any:
    """Parse each file again only if it has changed."""
    if isinstance(file, str | Path):
        return load(file)
    about = os.fstat(file.fileno())
    key = (file.name, about.st_ino, about.st_mtime_ns, about.st_size)
    if key not in _loaded:
        _loaded[key] = load(file)
    return copy.deepcopy(_loaded[key])


_loaded = dict[tuple[object, ...], Any]()


def choices_if_named(
    overrides: Any,
    defaults: Sequence[Any],
    self_added: bool,
    build: Callable[..., DictConfig] = hydra_defaults._create_interpolation_map,
) -> DictConfig | None:
    """Hydra builds this for every file, and reads it only where a default names another choice."""
    if not any(one.is_interpolation() for one in defaults):
        return None
    return build(overrides, defaults, self_added)


# Composing takes half as long with these two, also where the package composes.
mock.patch.object(OmegaConf, "load", load_once).start()
mock.patch.object(hydra_defaults, "_create_interpolation_map", choices_if_named).start()


def build(*overrides: str) -> Experiment:
    return configs.Settings.of(composed(*overrides)).job

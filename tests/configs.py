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
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.default_element import ResultDefault
from hydra.plugins.config_source import ConfigResult
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


def load_once(
    repository: ConfigRepository,
    config_path: str,
    load: Callable[..., ConfigResult | None] = ConfigRepository.load_config,
) -> ConfigResult | None:
    """Read and parse each file of conf/ once. Hydra writes into the entries of a defaults list."""
    folders = {one.path for one in repository.sources if one.scheme() == "file"}
    if folders != {str(CONF)}:
        return load(repository, config_path)
    if config_path not in _loaded:
        _loaded[config_path] = load(repository, config_path)
    found = copy.copy(_loaded[config_path])
    if found is not None and found.defaults_list is not None:
        found.defaults_list = [copy.copy(one) for one in found.defaults_list]
    return found


_loaded = dict[str, ConfigResult | None]()


def embed_copied(
    found: ConfigResult,
    package: str | None,
    embed: Callable[..., ConfigResult] = ConfigLoaderImpl._embed_result_config,
) -> ConfigResult:
    """Hydra copies a config that goes below a package, and writes into one that does not."""
    result = embed(found, package)
    if result is found:
        result = copy.copy(found)
        result.config = copy.deepcopy(found.config)
    return result


def copy_of_repository(caching: CachingConfigRepository, repository: ConfigRepository) -> None:
    """Hydra copies deeply what only has its list of sources replaced."""
    caching.delegate = copy.copy(repository)
    caching.cache = {}


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


MERGED_BY_HYDRA: Any = ConfigLoaderImpl._compose_config_from_defaults_list


class NotPlain(Exception):
    """A config that merges into a reference, which only OmegaConf can do."""


def merged_as_plain(
    loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: ConfigRepository
) -> DictConfig:
    """Hydra merges configs node by node, which takes half of its time. All but its own settings
    have no types, and are merged as dictionaries."""
    if {one.path for one in loader.repository.sources if one.scheme() == "file"} != {str(CONF)}:
        return MERGED_BY_HYDRA(loader, defaults, repo)
    own: list[tuple[ResultDefault, str, Any]] = []  # what is Hydra's, in its order
    found: dict[Any, Any] = {}
    for default in defaults:
        path, package = str(default.config_path), default.package
        if path.startswith("hydra/") or (package or "").partition(".")[0] == "hydra":
            own.append((default, f"{path} at {package}", None))
            continue
        result = repo.load_config(path)
        assert result is not None
        plain = as_plain(path, result.config)
        if package is None:
            package = result.header["package"]
        for name in filter(None, reversed((package or "").split("."))):
            plain = {name: plain}
        if "hydra" in plain:
            own.append((default, path, plain.pop("hydra")))
        try:
            merge(found, plain)
        except NotPlain:
            return MERGED_BY_HYDRA(loader, defaults, repo)
    key = tuple(repr((path, settings)) for _, path, settings in own)
    if key not in _hydras_own:
        config = OmegaConf.create()
        for default, _, settings in own:
            if settings is None:
                config.merge_with(loader._load_single_config(default, repo).config)
            else:
                config.merge_with({"hydra": settings})
        _hydras_own[key] = config.hydra
    return DictConfig({**found, "hydra": copy.deepcopy(_hydras_own[key])})


_hydras_own = dict[tuple[str, ...], Any]()


def as_plain(path: str, config: DictConfig) -> dict[Any, Any]:
    """A copy of its own of a config that `load_once` has read."""
    if path not in _plain or _plain[path][0] is not config:
        _plain[path] = config, marshal.dumps(OmegaConf.to_container(config))
    plain: dict[Any, Any] = marshal.loads(_plain[path][1])
    if config._get_flag("HYDRA_REMOVE_TOP_LEVEL_DEFAULTS"):
        plain.pop("defaults", None)
    return plain


_plain = dict[str, tuple[DictConfig, bytes]]()


def merge(into: dict[Any, Any], plain: dict[Any, Any]) -> None:
    for key, value in plain.items():
        before = into.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            merge(before, value)
        elif key not in into or value != "???":
            if isinstance(value, dict) and isinstance(before, str) and "${" in before:
                raise NotPlain
            into[key] = value


# Composing takes a fifth as long with these five, also where the package composes.
for owner, name, ours in (
    (ConfigRepository, "load_config", load_once),
    (ConfigLoaderImpl, "_embed_result_config", staticmethod(embed_copied)),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list", merged_as_plain),
    (CachingConfigRepository, "__init__", copy_of_repository),
    (hydra_defaults, "_create_interpolation_map", choices_if_named),
):
    mock.patch.object(owner, name, ours).start()


def build(*overrides: str) -> Experiment:
    return configs.Settings.of(composed(*overrides)).job

"""Configs of conf/ as Hydra composes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from unittest import mock

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from xcloud.base.overrides import for_hydra, groups_of
from xcloud.experiment import Experiment
from xcloud.job import config as configs

CONF = Path(__file__).parent.parent / "conf"


PLAIN_VALUE = re.compile(r"([a-z][\w.]*)=[\w.-]+")


def composed(*overrides: str) -> DictConfig:
    """A copy of its own. Composing takes a quarter of a second, so Hydra does it once for equal
    choices of groups; plain values are set afterwards, as Hydra would (tests/test_conf.py)."""
    values = [one for one in overrides if is_plain_value(one)]
    config = by_hydra(*(one for one in overrides if one not in values)).copy()
    for key, value in (one.split("=", 1) for one in values):
        OmegaConf.update(config, key, OmegaConf.from_dotlist([f"value={value}"]).value)
    return config


def is_plain_value(override: str) -> bool:
    match = PLAIN_VALUE.fullmatch(override)
    return match is not None and not (CONF / match[1]).is_dir()


@cache
def by_hydra(*overrides: str) -> DictConfig:
    """With the defaults of classes, as a run has them. Reads each file once."""
    with (
        initialize_config_dir(str(CONF), version_base="1.3"),
        mock.patch.object(OmegaConf, "load", lambda file: read_once(file.name).copy()),
    ):
        found = compose("config", overrides=for_hydra(overrides, groups_of(CONF)))
    return OmegaConf.create(configs.fill_in(OmegaConf.to_container(found)))


@cache
def read_once(path: str, read: Callable[[str], DictConfig] = OmegaConf.load) -> DictConfig:
    return read(path)


def build(*overrides: str) -> Experiment:
    return configs.Settings.of(composed(*overrides)).job

"""Configs of conf/ as Hydra composes them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from xcloud.job import config as configs
from xcloud.job.experiment import Experiment

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
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def build(*overrides: str) -> Experiment:
    return configs.job_from_config(composed(*overrides))

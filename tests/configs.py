"""Configs of conf/ as Hydra composes them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from xcloud.job import config as configs
from xcloud.job.experiment import Experiment

CONF = Path(__file__).parent.parent / "conf"


def composed(*overrides: str) -> DictConfig:
    """A copy of its own: composing takes a quarter of a second, so equal ones are made once."""
    return _composed(overrides).copy()


@cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def build(*overrides: str) -> Experiment:
    return configs.job_from_config(composed(*overrides))

"""The experiment that goes on with what another one leaves: fine-tunes what was pre-trained."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xcloud.errors import ConfigError
from xcloud.experiment import job_from_config

KEPT = ("seed", "cache_dir", "tracker")  # of the first experiment


def compose_follow_up(config: DictConfig, conf_dir: Path, run_dir: Path) -> DictConfig | None:
    """What `follow_up` of this experiment asks for, to be run after it, or None.

    It has the first one's seed, tracker and cache, and reads what the first one's run will have
    left in run_dir. Raises ConfigError if it cannot be composed, before anything runs.
    """
    experiment = job_from_config(config)
    if not experiment.follow_up:
        return None
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir.absolute()), version_base="1.3"):
            following = compose("config", overrides=list(experiment.follow_up))
            OmegaConf.set_struct(following, False)
            for key in KEPT:
                following[key] = config[key]
            for key, value in experiment.leaves(run_dir).items():
                OmegaConf.update(following, key, value)
            job_from_config(following)
    except (HydraException, OmegaConfBaseException, ConfigError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"follow_up={list(experiment.follow_up)} makes no experiment: {lines[0]}; [] runs none"
        ) from error
    finally:
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().hydra = outer
    return following

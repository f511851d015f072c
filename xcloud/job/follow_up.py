"""The experiment that goes on with what another one leaves: fine-tunes what was pre-trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xcloud.base.errors import ConfigError, DataError
from xcloud.electra.model import MultilingualElectra
from xcloud.job.config import job_from_config, plain_settings, this_clouds_policy
from xcloud.job.experiment import Experiment
from xcloud.job.job import Job
from xcloud.job.one_way import OneWayExperiment

KEPT = ("seed", "cache_dir", "tracker")  # of the first experiment, unless an override names them


def compose_follow_up(
    config: DictConfig, conf_dir: Path, run_dir: Path, own: bool = True
) -> DictConfig | None:
    """What `follow_up` of this experiment asks for, to be run after it, or None.

    It has the first one's seed, tracker and cache, and reads what the first one's run will have
    left in run_dir, but for settings that its overrides name. Raises ConfigError, before anything
    runs, if it cannot be composed or what it reads beside that is missing. own: config was
    composed here; what a file asks for is checked as by read_job.
    """
    experiment = job_from_config(config)
    if not experiment.next_experiment:
        return None
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir.absolute()), version_base="1.3"):
            following = compose("config", overrides=list(experiment.next_experiment))
            OmegaConf.set_struct(following, False)
            named = _named(experiment.next_experiment)
            for key in KEPT:
                if not _names(named, key):
                    following[key] = config[key]
            leaves = experiment.leaves(run_dir)
            read = {key: value for key, value in leaves.items() if not _names(named, key)}
            for key, value in read.items():
                OmegaConf.update(following, key, value)
            if not own:
                this_clouds_policy().check_build(plain_settings(following))
            job = job_from_config(following)
            if read and isinstance(job, Experiment):
                job.task.check()  # all but the checkpoint, which is not there yet
                _check_length(experiment, job)
            else:
                job.check()
    except (HydraException, OmegaConfBaseException, ConfigError, DataError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"follow_up={list(experiment.next_experiment)} makes no experiment that can run: "
            f"{lines[0]}; [] runs none"
        ) from error
    finally:
        GlobalHydra.instance().clear()
        if outer is not None:
            GlobalHydra.instance().hydra = outer
    return following


def _named(overrides: Sequence[str]) -> list[str]:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [override.key_or_group for override in parsed]


def _names(named: Sequence[str], key: str) -> bool:
    """Whether one of these is this setting, a part of it or what holds it; task=xnli chooses a
    file, so a name without a dot holds none.
    """
    return any(
        name == key or name.startswith(f"{key}.") or ("." in name and key.startswith(f"{name}."))
        for name in named
    )


def _check_length(experiment: Job, following: Experiment) -> None:
    model = experiment.model if isinstance(experiment, OneWayExperiment) else None
    most = model.max_positions if isinstance(model, MultilingualElectra) else None
    if most is not None and following.task.max_length > most:
        raise ConfigError(
            f"task.max_length is {following.task.max_length}, but the pre-trained encoder will "
            f"have {most} positions (model.text.max_length)"
        )

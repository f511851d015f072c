"""Hydra's door to xcloud.study: composes the points of a sweep. What a sweep is, runs and says is
in xcloud/study/runner.py; keep this file thin.

Hydra finds it because run.py puts xcloud/_hydra on the path. It is imported for tab completion
too, so nothing heavy at the top.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


def sweep_name(given: str | None) -> str:
    """The name on the command line, or the time."""
    from datetime import datetime

    return given or datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")[:-3]


OmegaConf.register_new_resolver("sweep_name", sweep_name, use_cache=True, replace=True)


class SweepSweeper(BasicSweeper):
    """The grid of all combinations. SweepLauncher checks the points itself, and says which one is
    wrong and why."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size=None, params=params)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        if not isinstance(self.launcher, SweepLauncher):
            super().validate_batch_is_legal(batch)


class SweepLauncher(Launcher):
    """Settings: conf/hydra/launcher/xcloud.yaml."""

    def __init__(self, also: Mapping[str, object] | None = None, **given: object) -> None:
        self.given: dict[str, Any] = {**given, "also": None if also is None else dict(also)}

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        from xcloud.base.errors import ConfigError
        from xcloud.study.runner import LauncherSettings, check_name, refuse

        self.context = hydra_context
        self.config = config
        try:
            check_name(config.get("sweep"))
            self.settings = LauncherSettings(**self.given)
        except ConfigError as error:  # before Hydra makes a folder of that name
            sys.exit(refuse(str(error)))

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from xcloud.study.points import with_also
        from xcloud.study.runner import Processes, Sweep, command_again, signals_as_ctrl_c

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        folder = Path(str(self.config.hydra.sweep.dir)).absolute()
        also = self.settings.also or {}
        asked = with_also([tuple(overrides) for overrides in job_overrides], also=also)
        name = self.config.get("sweep") or folder.name
        sweep = Sweep(
            name=name,
            folder=folder,
            settings=self.settings,
            processes=Processes(self.settings.parallel),
            again=command_again(name),
        )
        with signals_as_ctrl_c():
            code = sweep.run(asked, self._compose)
        if code:
            sys.exit(code)  # Hydra itself would show the first failure's traceback, and exit 1
        return [JobReturn(status=JobStatus.COMPLETED)] * len(asked)

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the config of a point. Raises ConfigError with one line."""
        from xcloud.base.errors import ConfigError
        from xcloud.base.project import conf_dir
        from xcloud.job.given import completed, explained, in_one_line

        load = self.context.config_loader.load_sweep_config
        try:
            return load(self.config, list(overrides))
        except (HydraException, OmegaConfBaseException) as error:
            with_plus = completed(overrides, conf_dir=conf_dir())
            if with_plus == [*overrides]:
                said = explained(error, overrides=overrides, conf_dir=conf_dir())
                raise ConfigError("; ".join(said)) from error
        try:
            return load(self.config, with_plus)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(in_one_line(error)) from error

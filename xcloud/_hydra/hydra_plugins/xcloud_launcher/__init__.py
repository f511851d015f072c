"""Hydra's door to xcloud.study: composes the points of a sweep. What a sweep is, runs and says is
in xcloud/study/runner.py; keep this file thin.

Hydra finds it because run.py puts xcloud/_hydra on the path. It is imported for tab completion
too, so nothing heavy at the top.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from xcloud.job.given import Composer
    from xcloud.study.runner import Sweep


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


class SearchSweeper(Sweeper):
    """A search over settings: xcloud/study/search.py. Settings: conf/hydra/sweeper/search.yaml."""

    def __init__(self, params: Mapping[str, str] | None = None, **given: Any) -> None:
        self.params = dict(params or {})
        self.given = {**given, "objectives": list(given.get("objectives") or ())}

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Run the search, and print the table of all its points."""
        from xcloud.base.errors import ConfigError, XcloudError
        from xcloud.study.runner import INTERRUPTED, refuse, signals_as_ctrl_c
        from xcloud.study.search import Search, SearchSettings, SearchSpace

        words = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        launcher = self.launcher
        try:
            if not isinstance(launcher, SweepLauncher):
                raise ConfigError("hydra/sweeper=search runs with hydra/launcher=xcloud only")
            chosen = SearchSettings(**self.given)
            search = Search(
                space=SearchSpace.of([word.removeprefix("++") for word in words]),
                settings=chosen,
                run=launcher.outcomes,
                compose=launcher.composer,
                batch=max(1, launcher.settings.parallel // chosen.seeds),
            )
            with signals_as_ctrl_c():
                search.go_on(launcher.folder)
                launcher.close()
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except XcloudError as error:
            sys.exit(refuse(str(error)))


class SweepLauncher(Launcher):
    """Settings: conf/hydra/launcher/xcloud.yaml."""

    def __init__(self, also: Mapping[str, object] | None = None, **given: object) -> None:
        self.given: dict[str, Any] = {**given, "also": None if also is None else dict(also)}
        if given.get("job") is not None:
            self.given["job"] = dict(given["job"])  # type: ignore[call-overload]
        self.last: Sweep | None = None

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
        """Run the points. With our own sweeper the process exits if some failed, as Hydra would
        show the first failure's traceback and exit with 1; any other sweeper is told of each point
        what became of it."""
        from xcloud.study.runner import INTERRUPTED, signals_as_ctrl_c

        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        given = [tuple(word.removeprefix("++") for word in words) for words in job_overrides]
        is_ours = str(self.config.hydra.sweeper.get("_target_", "")).startswith(__name__)
        with signals_as_ctrl_c():
            sweep, code = self.run_points(given, drops_invalid=not is_ours)
        if is_ours and code:
            sys.exit(code)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return [_returned(sweep, words) for words in given]

    def run_points(
        self, given: Sequence[tuple[str, ...]], drops_invalid: bool, closes: bool = True
    ) -> tuple[Sweep, int]:
        """Run the points of these words, and return their sweep and its exit code."""
        from xcloud.base.errors import ConfigError
        from xcloud.study.cluster import runner_of
        from xcloud.study.points import with_also
        from xcloud.study.runner import Sweep, command_again, refuse

        folder = self.folder
        name = self.config.get("sweep") or folder.name
        try:
            processes = runner_of(self.settings, folder=folder)
        except ConfigError as error:
            sys.exit(refuse(str(error)))
        sweep = Sweep(
            name=name,
            folder=folder,
            settings=self.settings,
            processes=processes,
            drops_invalid=drops_invalid,
            closes=closes,
            again=command_again(name),
        )
        self.last = sweep
        return sweep, sweep.run(with_also(given, also=self.settings.also or {}), self.composer)

    @property
    def folder(self) -> Path:
        """The folder of the sweep."""
        return Path(str(self.config.hydra.sweep.dir)).absolute()

    def outcomes(self, given: Sequence[tuple[str, ...]]) -> list[Mapping[str, Any] | str]:
        """Run the points of these words; return the figures of each, or why there are none."""
        from xcloud.base.errors import RunFailed
        from xcloud.study.runner import INTERRUPTED

        if not given:
            return []
        sweep, code = self.run_points(given, drops_invalid=True, closes=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        found: list[Mapping[str, Any] | str] = []
        for words in given:
            try:
                found.append(sweep.summary_of(words))
            except RunFailed as error:
                found.append(str(error))
        return found

    def close(self) -> None:
        """Print the table of all points that have run, and make its pictures."""
        if self.last is not None and self.last.tracker is not None:
            from xcloud.study.report import close_sweep

            close_sweep(self.folder, tracker=self.last.tracker)

    @cached_property
    def composer(self) -> Composer:
        """The composer of a point, with all places that Hydra looks in."""
        from xcloud.job.given import Composer

        loader = self.context.config_loader

        def load(words: Sequence[str]) -> DictConfig:
            config = loader.load_sweep_config(self.config, list(words))
            return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])

        return Composer(load, is_group=lambda key: bool(loader.get_group_options(key)))


def _returned(sweep: Sweep, words: tuple[str, ...]) -> JobReturn:
    """Return what a sweeper of Hydra reads of a point: its main score, of which less is better, or
    why it has none."""
    from xcloud.base.errors import XcloudError
    from xcloud.record.summary import main_score

    job = JobReturn(overrides=words, status=JobStatus.COMPLETED)
    try:
        job.return_value = main_score(sweep.summary_of(words))
    except XcloudError as error:
        job.status = JobStatus.FAILED
        job.return_value = error
    return job

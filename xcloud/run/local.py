"""One run on this machine, from a composed config to summary.json."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from xcloud.errors import ConfigError, RunFailed
from xcloud.job import config as configs
from xcloud.record.events import EVENTS_FILE
from xcloud.record.summary import SUMMARY_FILE
from xcloud.run.launch import LocalRanks
from xcloud.run.monitor import Monitor


def run(config: DictConfig, run_dir: Path) -> dict[str, Any]:
    """Returns the summary. Raises ConfigError before anything starts, RunFailed naming the first
    cause when a rank fails, KeyboardInterrupt on Ctrl+C or SIGTERM; every rank is gone by then and
    summary.json says what happened."""
    experiment = configs.job_from_config(config)
    experiment.check()
    if (run_dir / EVENTS_FILE).exists():
        raise ConfigError(
            f"{run_dir} holds an earlier run; give another hydra.run.dir, or move it away"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    configs.write(config, run_dir / configs.EXPERIMENT_FILE)
    print(experiment.headline, flush=True)

    monitor = Monitor(experiment, configs.flatten(config), run_dir)
    layout = experiment.cluster
    clouds = [layout.placement(rank).cloud for rank in range(layout.num_ranks)]
    ranks = LocalRanks(run_dir, clouds, experiment.essential_ranks, experiment.restart_s)
    cause: str | None = "the run was ended from outside"
    try:
        with sigterm_as_interrupt():
            ranks.start()
            monitor.start()
            ranks.wait(meanwhile=monitor.poll)
        cause = None
    except RunFailed as error:
        cause = str(error)
        raise
    except KeyboardInterrupt:
        cause = "interrupted (Ctrl+C or SIGTERM)"
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise
    finally:
        ranks.end()
        summary = monitor.finish(cause)
    print(run_dir / SUMMARY_FILE, flush=True)
    return summary


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A terminated run ends its ranks and says so, like an interrupted one."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread (a launcher of sweeps): its owner handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""Sweeps of the toy task without processes: a point "runs" by writing the files of a run. Results
of sweeps over the layer and the rank of a split, which no model has made."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tests.toy import toy_config
from xcloud.base.errors import ConfigError, RunFailed
from xcloud.base.project import file_digest
from xcloud.job import config as configs
from xcloud.record.summary import write_summary
from xcloud.study.points import Point
from xcloud.study.results import PointResult
from xcloud.study.runner import LauncherSettings, Sweep
from xcloud.tracking import mlflow_store
from xcloud.tracking.mlflow_store import Store, prepare_environment

_CONFIGS: dict[tuple[str, ...], DictConfig] = {}


def compose(overrides: Sequence[str]) -> DictConfig:
    key = tuple(overrides)
    if key not in _CONFIGS:
        try:
            _CONFIGS[key] = OmegaConf.create(toy_config("two_clouds", list(overrides)))
        except Exception as error:
            raise ConfigError(str(error).splitlines()[0]) from error
    return _CONFIGS[key].copy()


def points(*grid: str) -> list[Point]:
    """ "a=1 b=2" -> a point."""
    return [Point.of(tuple(one.split()), compose(one.split())) for one in grid]


def summary_of(
    bleu: float | None = 30.0,
    step_s: float | None = 0.5,
    ratio: float | None = 2.0,
    status: str = "finished",
    **more: Any,
) -> dict[str, Any]:
    return {
        "name": "toy",
        "status": status,
        "commit": "1a2b3c4",
        "quality": {} if bleu is None else {"bleu": bleu},
        "step_time_s": {"median": step_s, "p90": step_s},
        "compute_s": {"cloud_a": 0.1, "cloud_b": 0.2},
        "codec_s": {"cloud_a": 0.05, "cloud_b": 0.05},
        "waiting_s": {"cloud_a": 0.3, "cloud_b": 0.2},
        "sync_s": {"cloud_a": 0.0, "cloud_b": 0.0},
        "compression_ratio": {"forward": ratio, "backward": ratio, "total": ratio},
        "compression": "none",
        **more,
    }


def write_run(run_dir: Path, config: DictConfig | configs.Settings, **figures: Any) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    made = config if isinstance(config, configs.Settings) else configs.Settings.of(config)
    made.write(run_dir / configs.EXPERIMENT_FILE)
    label = made.job.labels.compression
    write_summary(run_dir / "summary.json", summary_of(**{"compression": label, **figures}))


class FakeRuns:
    """Stands in for Processes: counts what ran; points whose name is in `fail` do."""

    def __init__(self, fail: Sequence[str] = ()) -> None:
        self.fail, self.names = set(fail), []  # type: ignore[var-annotated]

    def run(self, point: Point, run_dir: Path) -> None:
        self.names.append(point.name)
        if point.name in self.fail:
            write_run(run_dir, point.named, status="failed", bleu=None, cause="asked to fail")
            raise RunFailed("asked to fail")
        if "interrupt" in self.fail:
            raise KeyboardInterrupt
        write_run(run_dir, point.named, bleu=30.0 + point.experiment.seed)

    def is_running(self, run_dir: Path) -> bool:
        return False

    def end(self) -> None: ...


def run_sweep(folder: Path, grid: Sequence[str], runs: FakeRuns, **settings: Any) -> int:
    asked = [tuple(one.split()) for one in grid]
    sweep = Sweep(
        folder.name,
        folder,
        LauncherSettings(**settings),
        runs,
        again=f"xcloud run sweep={folder.name}",
    )
    return sweep.run(asked, compose)


@cache
def _blank_database() -> Path:
    prepare_environment()
    made_by = f"{version('mlflow')}-{file_digest(Path(mlflow_store.__file__))}-{os.getuid()}"
    store = Store(Path(tempfile.gettempdir(), f"blank-{made_by}"))
    store.open()
    return store.database


def blank_store(root: Path) -> Store:
    """An MLflow store without runs. Its tables, which take MLflow ten seconds, are made once, for
    all processes of tests and later ones."""
    store = Store(root)
    root.mkdir(parents=True, exist_ok=True)
    shutil.copy(_blank_database(), store.database)
    return store


def split_run(
    layer: int | None,
    rank: int | None = 8,
    seed: int = 1,
    accuracy: float = 85.0,
    name: str = "bert_split_sst2",
    summary: dict[str, object] | None = None,
    **settings: object,
) -> PointResult:
    """settings: further ones, "__" for ".": model__split__method="pca"."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    label = "unsplit" if layer is None else f"layer={layer} rank={rank}"
    found = {
        "name": name,
        "seed": seed,
        "label": label,
        "model.split": "LowRankSplit",
        "model.split.layer": layer,
        "model.split.rank": rank,
        "cluster.name": "two_clouds",
        **dotted,
    }
    figures = summary_of(quality={"accuracy": accuracy}, **(summary or {}))
    return PointResult("s", Path("nowhere"), found, figures)


def fig_9() -> list[PointResult]:
    """Two ranks at three layers, two seeds; accuracies that a reader can work out."""
    runs = [split_run(None, 8, seed, 90 + 2 * (seed - 1)) for seed in (1, 2)]
    for layer in (0, 2, 4):
        for rank in (8, 16):
            for seed in (1, 2):
                accuracy = 70 + 2 * layer + 0.1 * rank + 2 * (seed - 1)
                runs.append(split_run(layer, rank, seed, accuracy))
    return runs

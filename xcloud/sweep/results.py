"""Results of a sweep: one Result per run, one Row per setting over its seeds.
Read from the run folders, or from MLflow if these are gone; published figures beside them. Prints
and draws nothing.
"""

from __future__ import annotations

import math
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from xcloud.base.errors import ConfigError
from xcloud.base.project import project_root
from xcloud.base.units import LEAKS, LESS_IS_BETTER
from xcloud.job.config import EXPERIMENT_FILE, flatten, read_config
from xcloud.record.mlflow_store import Store
from xcloud.record.summary import SUMMARY_FILE, read_summary
from xcloud.sweep.interleaving import KEY, StepRatio
from xcloud.sweep.points import (
    UNCOMPRESSED,
    Settings,
    identity,
    is_unsplit,
    reference_key,
    setting_key,
    varying,
    workload_key,
)
from xcloud.sweep.state import EARLIER_DIR, STATE_FILE, read_points

ONE_CLOUD = "one_cloud"  # cluster.name of the reference: all ranks in one cloud
_NUM_RANKS = r"cluster\.clouds\.[^.]+\.num_ranks"
RATES = ("samples_per_s", "tokens_per_s")
PUBLISHED = Path("experiments", "published.toml")  # and which rows its figures belong to


@dataclass(frozen=True)
class Result:
    """One run. `run_dir` has its experiment.yaml and, unless it was killed, summary.json."""

    sweep: str
    run_dir: Path
    settings: Settings
    summary: dict[str, Any]
    at_once: int = 1  # points that ran concurrently

    @property
    def label(self) -> str:
        return str(self.settings.get("label") or self.summary.get("compression", "-"))

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "unfinished"))


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; std is None for a single seed. error: of a
    score, the standard error over test samples, mean of the runs."""

    mean: float
    std: float | None
    num: int
    error: float | None = None

    @classmethod
    def of(
        cls, values: Sequence[float | None], errors: Sequence[float | None] = ()
    ) -> Spread | None:
        known = [value for value in values if value is not None]
        if not known:
            return None
        std = statistics.stdev(known) if len(known) > 1 else None
        over_samples = [error for error in errors if error is not None]
        error = statistics.fmean(over_samples) if over_samples else None
        return cls(statistics.fmean(known), std, len(known), error)

    @property
    def plus_minus(self) -> float | None:
        """What is shown after the mean: the spread over seeds, or the error of a single run."""
        return self.error if self.std is None else self.std


@dataclass
class Row:
    """All runs of one setting."""

    label: str
    results: list[Result]
    quality: dict[str, Spread] = field(default_factory=dict)
    step_time_s: Spread | None = None
    compression_ratio: Spread | None = None
    rates: dict[str, Spread] = field(default_factory=dict)  # samples and tokens per second
    step_ratio: StepRatio | None = None  # of runs that were timed together
    share: float | None = None  # step time / that of the uncompressed runs of the same sweep
    share_std: float | None = None  # from both spreads over seeds
    # Of each rate: this row's / that of the runs in one cloud of the same sweep.
    share_of_one_cloud: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        finished = self.finished
        scores = [_scores(summary) for summary in finished]
        names = dict.fromkeys(name for own in scores for name in own)
        errors = [summary.get("quality_error", {}) for summary in finished]
        for name in names:
            spread = Spread.of([s.get(name) for s in scores], [e.get(name) for e in errors])
            if spread:
                self.quality[name] = spread
        self.step_time_s = Spread.of([s["step_time_s"]["median"] for s in finished])
        self.compression_ratio = Spread.of([s["compression_ratio"]["total"] for s in finished])
        rates = {name: Spread.of([s.get(name) for s in finished]) for name in RATES}
        self.rates = {name: spread for name, spread in rates.items() if spread}
        if finished and all(s.get(KEY) for s in finished):
            self.step_ratio = StepRatio.over_seeds([StepRatio(**s[KEY]) for s in finished])

    @property
    def finished(self) -> list[dict[str, Any]]:
        """Summaries of the finished runs."""
        return [result.summary for result in self.results if result.status == "finished"]

    @property
    def num_finished(self) -> int:
        return len(self.finished)

    @property
    def sweep(self) -> str:
        return self.results[0].sweep

    @property
    def settings(self) -> Settings:
        return self.results[0].settings

    @property
    def compression(self) -> str:
        names = (result.summary.get("compression") for result in self.results)
        return str(next((name for name in names if name), "-"))

    @property
    def cluster(self) -> str:
        return str(self.settings.get("cluster.name", "-"))

    @property
    def num_ranks(self) -> int:
        counts = (v for k, v in self.settings.items() if re.fullmatch(_NUM_RANKS, k))
        return sum(count for count in counts if isinstance(count, int))

    @property
    def score(self) -> Spread | None:
        """The first score of the task: BLEU, accuracy, …"""
        return next(iter(self.quality.values()), None)

    def parts_s(self, kind: str) -> dict[str, float]:
        """Mean over seeds of "compute_s", "codec_s", "waiting_s" or "sync_s", by cloud."""
        finished = [summary.get(kind) or {} for summary in self.finished]
        clouds = dict.fromkeys(cloud for parts in finished for cloud in parts)
        means = {cloud: Spread.of([parts.get(cloud) for parts in finished]) for cloud in clouds}
        return {cloud: spread.mean for cloud, spread in means.items() if spread}


def from_folder(folder: Path) -> list[Result]:
    """All points of the sweep in multirun/NAME, run by any launcher."""
    recorded = read_points(folder)
    results = []
    for path in sorted(folder.glob(f"*/{EXPERIMENT_FILE}")):
        run_dir = path.parent
        if run_dir.name != EARLIER_DIR:
            at_once = int(recorded.get(run_dir.name, {}).get("at_once", 1))
            results.append(_result(folder.name, run_dir, at_once))
    return results


def from_store(store: Store, sweep: str) -> list[Result]:
    """The runs in MLflow with this sweep's tag; of a point that ran twice, the latest."""
    latest: dict[str, Result] = {}
    for folder in store.artifacts_of_sweep(sweep):
        if (folder / EXPERIMENT_FILE).exists() and (folder / SUMMARY_FILE).exists():
            result = _result(sweep, folder, 1)
            latest[identity(result.settings)] = result
    return list(latest.values())


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Group runs that differ only in their seed; best score first."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.sweep, setting_key(result.settings)), []).append(result)
    rows = [Row(group[0].label, group) for group in groups.values()]
    _tell_apart(rows)
    uncompressed = {
        (row.sweep, reference_key(row.settings)): row.step_time_s
        for row in rows
        if row.compression == UNCOMPRESSED and row.step_time_s
    }
    for row in rows:
        reference, own = (
            uncompressed.get((row.sweep, reference_key(row.settings))),
            row.step_time_s,
        )
        if own and reference:
            row.share = own.mean / reference.mean
            noises = [spread.std / spread.mean for spread in (own, reference) if spread.std]
            row.share_std = (
                row.share * math.hypot(*noises) if noises and own != reference else None
            )
    _share_of_one_cloud(rows)
    return sorted(rows, key=_by_score)


def _share_of_one_cloud(rows: Sequence[Row]) -> None:
    """Compare with the same work in one cloud; compression is not applied there."""
    alone: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row.cluster == ONE_CLOUD:
            key = (row.sweep, workload_key(row.settings))
            alone.setdefault(key, []).extend(row.finished)
    for row in rows:
        same_work = alone.get((row.sweep, workload_key(row.settings)), [])
        for name, rate in row.rates.items():
            if reference := Spread.of([summary.get(name) for summary in same_work]):
                row.share_of_one_cloud[name] = rate.mean / reference.mean


def known_sweeps(newest: int | None = None) -> list[str]:
    """Of multirun/, a line each, the newest last: name, date, points."""
    states = sorted(
        Path("multirun").glob(f"*/{STATE_FILE}"), key=lambda path: path.stat().st_mtime
    )
    lines = []
    for path in states[-newest if newest else 0 :]:
        date = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        num = len([*path.parent.glob(f"*/{EXPERIMENT_FILE}")])
        lines.append(f"{path.parent.name}  {date}  {num} points")
    return lines


def open_sweep(name: str, store: Store | None = None) -> tuple[Path, list[Result]]:
    """Folder and runs of a sweep, given its name or folder. Raises ConfigError if unknown."""
    folder = Path(name) if Path(name).is_dir() else Path("multirun") / name
    results = from_folder(folder) if folder.is_dir() else []
    if not results and store is not None:
        results = from_store(store, folder.name)
    if not results:
        known = known_sweeps(10)
        hint = f"known sweeps: {'; '.join(known)}" if known else "there are none yet"
        raise ConfigError(f"no run of a sweep {name!r} in multirun/ or in MLflow; {hint}")
    return folder, results


def _scores(summary: dict[str, Any]) -> dict[str, float | None]:
    """Quality by name, and leak figures if measured."""
    leaks = {name: summary[name] for name in LEAKS if isinstance(summary.get(name), int | float)}
    return {**summary["quality"], **leaks}


def _result(sweep: str, run_dir: Path, at_once: int) -> Result:
    settings = flatten(read_config(run_dir / EXPERIMENT_FILE))
    return Result(sweep, run_dir, settings, read_summary(run_dir), at_once)


def _tell_apart(rows: Sequence[Row]) -> None:
    """Extend equal labels (from different commands) with the settings that differ."""
    counts = Counter((row.sweep, row.label) for row in rows)
    for name, count in counts.items():
        alike = [row for row in rows if (row.sweep, row.label) == name]
        if count > 1:
            keys = [key for key in varying([row.settings for row in alike]) if key != "seed"]
            for row in alike:
                parts = (f"{key.rsplit('.', 1)[-1]}={row.settings.get(key)}" for key in keys[:3])
                row.label = " ".join((row.label, *parts))


def _by_score(row: Row) -> tuple[bool, float, float]:
    name, score = next(iter(row.quality.items()), ("", None))
    mean = score.mean if score else 0.0
    by_score = mean if name in LESS_IS_BETTER else -mean
    return score is None, by_score, row.step_time_s.mean if row.step_time_s else 0.0


@dataclass(frozen=True)
class Published:
    """quality: as printed there. share: of the uncompressed step time. ratio: of traffic.
    of_one_cloud: throughput across clouds. notes: remarks to show with it."""

    quality: str = ""
    share: float | None = None
    ratio: float | None = None
    of_one_cloud: float | None = None
    notes: tuple[str, ...] = ()


Where = dict[str, str | bool | list[str]]


def published_for(row: Row) -> Published | None:
    """The first matching entry; None without one, or without the file."""
    for where, figures in entries(project_root() / PUBLISHED):
        if all(_fits(row, key, wanted) for key, wanted in where.items()):
            return figures if figures.notes else None
    return None


@cache
def entries(path: Path) -> list[tuple[Where, Published]]:
    """(conditions, figures) of the file. Raises ConfigError if it is malformed."""
    if not path.is_file():
        return []
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return [(entry.pop("where"), Published(**{
            **entry, "notes": tuple(data["notes"][name] for name in entry.get("notes", ())),
        })) for entry in data["published"]]  # fmt: skip
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a list of published figures: {error!r}") from error


def _fits(row: Row, key: str, wanted: str | bool | list[str]) -> bool:
    if key == "unsplit":
        return is_unsplit(row.settings) == wanted
    value = str(row.compression if key == "compression" else row.settings.get(key))
    options = wanted if isinstance(wanted, list) else [str(wanted)]
    return any(fnmatchcase(value, option) for option in options)

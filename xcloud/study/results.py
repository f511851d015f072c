"""Results of a sweep, read from its run folders, or from MLflow if these are gone, as data frames:
a line for each run, a line for each setting over its seeds, and the lines of a picture over a
setting that varies. Prints and draws nothing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from xcloud.base.errors import ConfigError
from xcloud.base.project import project_root
from xcloud.base.run_folder import refuse_links
from xcloud.base.units import (
    LEAKS,
    LESS_IS_BETTER,
    UNKNOWN,
    human_percent,
    human_seconds,
    score_text,
    shown_scores,
)
from xcloud.feature_list import FIGURES
from xcloud.job.config import EXPERIMENT_FILE
from xcloud.job.given import settings_of
from xcloud.record.evaluation import evaluation_metrics
from xcloud.record.run_record import RunRecord
from xcloud.record.summary import SUMMARY_FILE, read_summary
from xcloud.study.points import (
    STATE_FILE,
    UNCOMPRESSED,
    PointSettings,
    deciding,
    identity,
    is_number,
    is_unsplit,
    read_points,
    varying,
)
from xcloud.tracking.mlflow_store import Store, legal

COMPUTE = "compute_s_"  # and a cloud: seconds of a step
ONE_CLOUD = "one_cloud"  # cluster.name of the reference: all ranks in one cloud
RATES = ("samples_per_s", "tokens_per_s")
LARGEST_DRIFT = 0.1  # of computing, between settings whose step times are compared
NO_MATTER = 0.01  # of a step: what computing may always drift by
COSTS = ("step_time_s", "compression_ratio")
PUBLISHED = Path("experiments", "published.toml")  # and which rows its figures belong to


@dataclass(frozen=True)
class PointResult:
    """One run. `run_dir` has its experiment.yaml and, unless it was killed, summary.json.
    at_once: the number of points that ran concurrently."""

    sweep: str
    run_dir: Path
    settings: PointSettings
    summary: dict[str, Any]
    at_once: int = 1

    @property
    def label(self) -> str:
        return str(self.settings.get("label") or self.summary.get("compression", "-"))

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "unfinished"))

    @property
    def span_s(self) -> tuple[float, float] | None:
        """When it began and ended, in seconds; None if that is not known, or the run was resumed
        in between. Starts are recorded by the second, so of its end a second is left out."""
        begun = self.summary.get("started_at")
        took_s = self.summary.get("wall_s")
        # A resumed run has a gap in between.
        if not begun or not took_s or self.summary.get("num_resumes"):
            return None
        began_s = datetime.fromisoformat(str(begun)).timestamp()
        # Its start has been cut to the second, so it may have begun up to one later.
        return began_s, began_s + max(0.0, float(took_s) - 1.0)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Its numbers that tables compare, by the names that MLflow has."""
        # The same numbers as the tracker shows, under the same names.
        return legal(RunRecord(self.summary, FIGURES).metrics)

    @property
    def scores(self) -> list[str]:
        """Names, the task's main score first; leaks and what `evaluate` measured, if it did. Empty
        unless the run has finished."""
        if self.status != "finished":
            return []
        # Leaks count as scores: a defence is judged by them.
        values = self.summary["quality"] | {name: self.summary.get(name) for name in LEAKS}
        evaluated = evaluation_metrics(self.summary)
        values |= {name: value for name, value in evaluated if not name.endswith("_error")}
        return [name for name, value in values.items() if is_number(value)]


class Results:
    """Runs of one sweep or of several.

    rows: a line for each setting, best score first; its index counts in the order of appearance.
        Of every figure (`bleu`, `step_time_s`, `waiting_s_cloud_a`) the mean over the finished
        runs and, in `bleu_std`, the sample standard deviation; NaN where there is none.
        `bleu_error` is the mean of the runs' standard errors over test samples.
    share: the step time divided by that of the uncompressed runs of the same sweep and link. None
        where the machine computed at another speed: then `share_left_out` says so.
    SCORE_share_of_one_cloud: rate / that of the same work in one cloud of the same sweep.
    """

    def __init__(self, runs: Sequence[PointResult]) -> None:
        self.runs = list(runs)
        self.sweeps = list(dict.fromkeys(run.sweep for run in runs))
        self.scores = list(dict.fromkeys(name for run in runs for name in run.scores))

    @cached_property
    def points(self) -> pd.DataFrame:
        """A line for each run, failed ones included, with the settings that vary."""
        keys = [key for key in varying([run.settings for run in self.runs]) if key != "seed"]
        lines = [
            {
                "sweep": run.sweep,
                "label": run.label,
                "seed": run.settings.get("seed"),
                "status": run.status,
                "commit": run.summary.get("commit"),
                "identity": identity(run.settings),
                **{key: run.settings.get(key) for key in keys},
                **run.metrics,
                "cause": run.summary.get("cause"),
                "folder": str(run.run_dir),
            }
            for run in self.runs
        ]
        return pd.DataFrame(lines, dtype=object)

    @cached_property
    def of_row(self) -> list[list[PointResult]]:
        """The runs of each setting, by the index of `rows`."""
        groups: dict[tuple[str, str], list[PointResult]] = {}
        for run in self.runs:
            # Seeds of a setting are one row.
            groups.setdefault((run.sweep, identity(run.settings, "seed")), []).append(run)
        return list(groups.values())

    @cached_property
    def rows(self) -> pd.DataFrame:
        rows = pd.DataFrame([_row(runs) for runs in self.of_row])
        _tell_apart(rows)
        figures = pd.DataFrame(
            {**run.metrics, "row": number}
            for number, runs in enumerate(self.of_row)
            for run in runs
            if run.status == "finished"
        )
        if len(figures):
            # Of figures that only some runs have, others are NaN and no part of a mean.
            by_row = figures.astype(float).groupby("row").agg(["mean", "std"])
            by_row.columns = [name + "_std" * (what == "std") for name, what in by_row.columns]
            # The spread of an error says nothing.
            rows = rows.join(by_row.drop(columns=by_row.filter(regex="_error_std$")))
        # Columns that the rest relies on, of sweeps of which no run has them.
        needed = [f"{name}{end}" for name in COSTS for end in ("", "_std")]
        rows = rows.reindex(columns=rows.columns.union(needed, sort=False))
        rows = _share_of_uncompressed(rows)
        for name in rows.columns.intersection(RATES):
            # The mean over the rows with all ranks in one cloud and the same work is the
            # reference.
            alone = rows[name].where(rows.cluster == ONE_CLOUD)
            there = alone.groupby([rows.sweep, rows.workload]).transform("mean")
            rows[f"{name}_share_of_one_cloud"] = rows[name] / there
        return rows.loc[sorted(rows.index, key=lambda number: _by_score(rows.loc[number]))]

    @cached_property
    def num_at_once(self) -> int:
        """How many points ran at once, at most: as their launcher says, or as their times show."""
        changes: list[tuple[float, int]] = []
        # How many runs overlap: +1 where one begins, -1 where one ends, summed up in time.
        for run in self.runs:
            if run.span_s is not None:
                changes += [(run.span_s[0], 1), (run.span_s[1], -1)]
        running = np.cumsum([change for _, change in sorted(changes)])
        # A launcher that was killed has recorded nothing; times show what ran beside each other.
        return max([1, *(run.at_once for run in self.runs), *map(int, running)])

    @property
    def labels(self) -> pd.Series:
        """Label the rows of a picture; with the sweep if there are several."""
        rows = self.rows
        if len(self.sweeps) > 1:
            return rows.setting + " @" + rows.sweep
        return rows.setting


def known(row: Any, name: str) -> float | None:
    """Return a figure of a row; None where there is none."""
    value = row.get(name)
    return None if value is None or pd.isna(value) else float(value)


def spread_text(row: Any, score: str) -> str:
    """Write a score as 41.92 ± 0.31."""
    return spread(row, name=score, text=partial(score_text, score))


def spread(row: Any, name: str, text: Callable[[float], str]) -> str:
    """Write mean ± standard deviation, of a single run's score its error; the unit once:
    450 ± 71 ms."""
    mean = known(row, name=name)
    if mean is None:
        return UNKNOWN
    std = known(row, name=f"{name}_std")
    if std is None:
        std = known(row, name=f"{name}_error")
    if std is None:
        return text(mean)
    # The unit stands once, so the spread is in the unit of the mean.
    number, _, unit = text(mean).partition(" ")
    if unit not in ("ms", "s"):
        return f"{number} ± {text(std)}"
    if unit == "ms":
        std *= 1000
    # As many decimals as the mean has.
    digits = len(number.partition(".")[2])
    return f"{number} ± {std:.{digits}f} {unit}"


def plus_minus(rows: pd.DataFrame, score: str) -> pd.Series:
    """Return what is shown after a score: its spread over seeds, its error if there is one run."""
    std = rows[f"{score}_std"]
    return std.fillna(rows[f"{score}_error"]) if f"{score}_error" in rows else std


def _row(runs: Sequence[PointResult]) -> dict[str, Any]:
    """Return what the runs of a setting have in common."""
    settings = runs[0].settings
    finished = [run for run in runs if run.status == "finished"]
    # A run that failed before its summary has no label of compression.
    compressions = (run.summary.get("compression") for run in runs)
    compression = str(next(filter(None, compressions), "-"))
    return {
        "sweep": runs[0].sweep,
        "setting": runs[0].label,
        "compression": compression,
        "runs": len(runs),
        "finished": len(finished),
        "score": next((run.scores[0] for run in finished if run.scores), None),
        "cluster": str(settings.get("cluster.name", "-")),
        "settings": settings,
        # Equal where step times compare, and where the same work is done, on any cluster.
        "reference": identity(settings, "seed", "compression"),
        "workload": identity(settings, "seed", "compression", "cluster"),
        "published": published_for(settings, compression),
    }


def _share_of_uncompressed(rows: pd.DataFrame) -> pd.DataFrame:
    """Add share, share_std from the spreads of both over their seeds, and share_left_out."""
    keys = ["sweep", "reference"]
    base = rows[(rows.compression == UNCOMPRESSED) & rows.step_time_s.notna()]
    # Of several uncompressed rows the last one, which is the newest.
    base = base.drop_duplicates(keys, keep="last").set_index(keys)
    there = rows[keys].join(base.drop(columns=keys, errors="ignore"), on=keys)
    share = rows.step_time_s / there.step_time_s
    reasons = [drift_of(rows.loc[number], other=there.loc[number]) for number in rows.index]
    left_out = pd.Series(reasons, rows.index, dtype=object)
    share = share.where(left_out.isna())
    # Relative spreads of two independent means add by their squares.
    own, others = (one.step_time_s_std / one.step_time_s for one in (rows, there))
    noise = np.hypot(own.fillna(0.0), others.fillna(0.0))
    # The reference has no spread against itself.
    is_known = (noise > 0) & (share != 1.0)
    share_std = (share * noise).where(is_known)
    return rows.assign(share=share, share_std=share_std, share_left_out=left_out)


def drift_of(row: Any, other: Any) -> str | None:
    """Say by how much the machine computed faster or slower for `row` than for `other`, which
    differs in nothing that is computed; None where that is too little to spoil a comparison of
    their step times."""
    step_s = known(other, name="step_time_s")
    worst = LARGEST_DRIFT
    said = None
    for name in row.index:
        # Both figures of computing in each cloud, of the row and of its reference.
        if not name.startswith(COMPUTE) or name.endswith("_std"):
            continue
        here_s = known(row, name=name)
        there_s = known(other, name=name)
        # Cannot be told, so nothing is held against the comparison.
        if step_s is None or here_s is None or not there_s:
            continue
        drift = here_s / there_s - 1
        # A cloud that hardly computes may double its time without a matter.
        if abs(drift) > worst and abs(here_s - there_s) > NO_MATTER * step_s:
            worst = abs(drift)
            times = f"{human_seconds(here_s)} against {human_seconds(there_s)} a step"
            speed = "less" if drift < 0 else "more"
            where = name.removeprefix(COMPUTE)
            said = f"{human_percent(worst)} {speed} time computing ({times} in {where})"
    return said


def _tell_apart(rows: pd.DataFrame) -> None:
    """Extend equal labels (from different commands) with the settings that differ."""
    # Labels come from the points of one command; another one may have chosen the same.
    for _, alike in rows.groupby(["sweep", "setting"]):
        keys = [key for key in varying(list(alike.settings)) if key != "seed"][:3]
        for number, settings in alike.settings.items():
            parts = (f"{_short(key)}={settings.get(key)}" for key in keys)
            rows.loc[number, "setting"] = " ".join((alike.setting[number], *parts))


def _by_score(row: pd.Series) -> tuple[bool, float, float]:
    """Return the key to sort by: best first, then the fastest; without a score last."""
    step_s = float(np.nan_to_num(row.step_time_s))
    if not isinstance(row.score, str):
        return True, 0.0, step_s
    if row.score in LESS_IS_BETTER:
        return False, row[row.score], step_s
    # Ascending order: of a score of which more is better the negative.
    return False, -row[row.score], step_s


def _short(key: str) -> str:
    return key.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Swept:
    """Quality over a setting that a sweep varied, beside the rows without it, such as the unsplit
    model.

    setting: the dotted name of the setting.
    scores: the scores to show, the task's main score first.
    rows: the rows of the results, each with its `value` of the setting and its `line`, which says
        what else varies.
    beside: the rows without the setting, best first.
    """

    setting: str
    scores: list[str]
    rows: pd.DataFrame
    beside: pd.DataFrame

    @property
    def name(self) -> str:
        return _short(self.setting)

    @property
    def lines(self) -> list[str]:
        return list(self.rows.line.unique())


def swept_of(results: Results) -> Swept | None:
    """Choose the numeric setting with the most values while everything else is equal; None if
    there is none."""
    scored = results.rows[results.rows.score.notna()]
    # Only settings that vary, the seed aside: that is what repeats are of.
    keys = [key for key in varying(list(scored.settings)) if key != "seed"]
    found = [[deciding(settings).get(key) for key in keys] for settings in scored.settings]
    values = pd.DataFrame(found, scored.index, keys, dtype=object)
    # Texts, as lists are not hashable.
    words = values.map(repr).assign(sweep=scored.sweep)
    # For each setting, of the rows that have it as a number: the most that differ in it alone.
    alike = {
        key: words[values[key].map(is_number)].groupby([*words.columns.drop(key)]).size().max()
        for key in keys
    }
    most = pd.Series(alike, dtype=float)
    # Two values at least; NaN if there is none.
    if not most.max() >= 2:
        return None
    setting = str(most.idxmax())
    shown = scored[values[setting].map(is_number)]
    others = [key for key in varying(list(shown.settings)) if key not in ("seed", setting)]
    several = shown.sweep.nunique() > 1
    lines = [
        _line(row, setting=setting, others=others, several=several) for _, row in shown.iterrows()
    ]
    # Each row of the picture belongs to a line, which says what else varies.
    shown = shown.assign(value=values[setting][shown.index].astype(float), line=lines)
    shown = shown.sort_values("line", key=lambda labels: labels.map(_natural), kind="stable")
    names = shown_scores(name for name in results.scores if shown[name].notna().any())
    return Swept(setting, scores=names, rows=shown, beside=scored.drop(shown.index))


def _line(row: Any, setting: str, others: Sequence[str], several: bool) -> str:
    settings = deciding(row.settings)
    parts = []
    for key in others:
        # Of a group the label is shown, not each of its settings.
        head = key.split(".")[0]
        value = settings.get(key)
        if head in ("compression", "cluster") and head != setting.split(".")[0]:
            parts.append(row[head])
        elif value is not None:
            parts.append(f"{_short(key)}={value}")
    if several:
        parts.append(f"@{row.sweep}")
    return " ".join(dict.fromkeys(parts)) or "runs"


def _natural(label: str) -> str:
    """Return a key that sorts rank=8 before rank=16."""
    # Numbers are padded, so that texts sort as numbers do.
    return re.sub(r"\d+\.?\d*", lambda number: f"{float(number[0]):020.6f}", label)


def from_folder(folder: Path) -> list[PointResult]:
    """Return all points of the sweep in multirun/NAME, run by any launcher."""
    recorded = read_points(folder)
    return [
        _result(
            folder.name,
            run_dir=path.parent,
            at_once=int(recorded.get(path.parent.name, {}).get("at_once", 1)),
        )
        for path in sorted(folder.glob(f"*/{EXPERIMENT_FILE}"))
    ]


def from_store(store: Store, sweep: str) -> list[PointResult]:
    """Return the runs in MLflow with this sweep's tag; of a point that ran twice, the latest."""
    found = [
        _result(sweep, run_dir=folder, at_once=1)
        for folder in store.artifacts_of_sweep(sweep)
        if (folder / EXPERIMENT_FILE).exists() and (folder / SUMMARY_FILE).exists()
    ]
    # The same point in one sweep: the later run is the one that counts.
    return list({identity(result.settings): result for result in found}.values())


def _result(sweep: str, run_dir: Path, at_once: int) -> PointResult:
    settings = settings_of(run_dir / EXPERIMENT_FILE)
    return PointResult(sweep, run_dir, settings, summary=read_summary(run_dir), at_once=at_once)


def known_sweeps() -> list[str]:
    """Describe the sweeps in multirun/, a line each, the newest last: name, date, points."""
    made_s = {path: path.stat().st_mtime for path in Path("multirun").glob(f"*/{STATE_FILE}")}
    return [
        f"{path.parent.name}  {datetime.fromtimestamp(made_s[path]):%Y-%m-%d %H:%M}  "
        f"{len([*path.parent.glob(f'*/{EXPERIMENT_FILE}')])} points"
        for path in sorted(made_s, key=lambda path: made_s[path])
    ]


def open_sweep(name: str, store: Store | None = None) -> tuple[Path, list[PointResult]]:
    """Return the folder and the runs of a sweep, given its name or folder.

    Raises ConfigError if it is unknown.
    """
    given = Path(name)
    # A name with a separator, or a folder with runs in it, is meant as a path.
    is_path = len(given.parts) > 1 or any(given.glob(f"*/{EXPERIMENT_FILE}"))
    folder = given if is_path else Path("multirun") / name
    if folder.is_dir():
        refuse_links(folder)  # into which the tables are written
    results = from_folder(folder)
    # Folders may be gone where MLflow still has what was logged.
    if not results and store is not None:
        results = from_store(store, sweep=folder.name)
    if not results:
        hint = "there are none yet"
        if newest := known_sweeps()[-10:]:
            hint = f"known sweeps: {'; '.join(newest)}"
        raise ConfigError(f"no run of a sweep {name!r} in multirun/ or in MLflow; {hint}")
    return folder, results


def published_for(settings: PointSettings, compression: str) -> dict[str, Any]:
    """Return what the paper has for this setting: the first entry that fits, of figures as texts
    (quality, share, ratio, of_one_cloud) and `notes` to show with them."""
    data = _published()
    for entry in data["published"]:
        # The first entry that fits, as in a table of exceptions followed by rules.
        if all(_fits(settings, compression, *one) for one in entry["where"].items()):
            return {**entry, "notes": [data["notes"][name] for name in entry.get("notes", ())]}
    return {"notes": []}


@cache
def _published() -> dict[str, Any]:
    path = project_root() / PUBLISHED
    # Wheels have no experiments.
    if not path.is_file():
        return {"published": []}
    return tomllib.loads(path.read_text("utf-8"))


def _fits(
    settings: PointSettings, compression: str, key: str, wanted: str | bool | list[str]
) -> bool:
    if key == "unsplit":
        return is_unsplit(settings) == wanted
    value = settings.get(key)
    if key == "compression":
        value = compression
    options = wanted if isinstance(wanted, list) else [str(wanted)]
    return any(fnmatchcase(str(value), option) for option in options)

"""A record of a run outside of its folder: what keeps it offers, and is given; names and values of
metrics and parameters, and how many points of a curve a store gets. Sends nothing: MLflow's
tracker is mlflow_tracker.py.

Curves over steps are `train/…`, `wan/…`, `dev/…`, `test/…`; final values have plain names (`bleu`,
`step_time_s`), so a table of runs shows one value each and charts are grouped by prefix.

A store can only append, so curves are thinned to a bounded number of points: of so many steps the
smallest, the largest and the last value, each at its own step. Where such a bucket ends follows
from the number of the step alone, so a run that resumes, or a store that comes back, gets the same
points again.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from xcloud.base.settings import settings
from xcloud.record.events import MEMORY, TIMES, Event, StepCollector, StepTotals

Status = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is to record.

    params: by dotted names. run_dir: where events.jsonl is written. steps:
    a fresh collector of the run's job. num_steps: that are planned.
    """

    name: str
    params: Mapping[str, object]
    tags: Mapping[str, str]
    run_dir: Path
    steps: StepCollector
    num_steps: int


class Recording:
    """artifact … → finish → places, from one thread; nothing raises. This one keeps nothing."""

    def artifact(self, path: Path) -> None:
        """Keep a file or folder; it must not change until `finish` returns."""

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """The run has ended."""

    def places(self) -> Mapping[str, str]:
        """Where the run was recorded, how to see it, and what the record lacks: label -> text."""
        return {}


class Tracker:
    """Settings; `start` begins the record of a run. store: where runs of a sweep are recorded
    together, if there is such a place."""

    store: ClassVar[Any] = None

    def start(self, run: TrackedRun) -> Recording:
        return Recording()


@settings("tracker")
class NullTracker(Tracker):
    """Keep no record outside the run folder."""


# Limits of MLflow 3.17 (mlflow/utils/validation.py).
MAX_KEY_CHARACTERS = 250
MAX_VALUE_CHARACTERS = 6000

# Of summary.json, what has the same name in a table of runs.
AS_THEY_ARE = (
    "label_leak_auc", "label_leak_auc_gradient", "label_leak_auc_activation", "token_recovery",
    "averaging_token_recovery", "token_recovery_baseline", "averaging_token_recovery_baseline",
    "averaging_order_recovery", "predicted_step_time_s", "final_loss", "bubble_ratio",
    "samples_per_s", "tokens_per_s", "num_steps",
)  # fmt: skip
OF_RESUMED = ("num_resumes", "num_steps_done_twice", "goodput")


def step_metrics(totals: StepTotals) -> dict[str, float]:
    """The values of one step for the curves of training."""
    metrics: dict[str, float] = {"train/step_s": totals.step_s}
    for name in ("loss", "learning_rate", "grad_norm"):
        if (value := getattr(totals, name)) is not None:
            metrics[f"train/{name}"] = value
    for name, value in totals.values.items():
        metrics[f"train/{name}"] = value
    for kind in ("compute_s", "codec_s", "waiting_s"):
        for cloud, seconds in totals.mean_s(kind).items():
            metrics[f"train/{kind}_{cloud}"] = seconds
    for kind, num_bytes in totals.sums("sent").items():
        if num_bytes:
            metrics[f"wan/bytes_{kind}"] = num_bytes
    return _legal(metrics)


def quality_metrics(event: Event) -> dict[str, float]:
    """The curve of a split's scores, from a "quality" event; its step is event["step"]."""
    return _legal({f"{event['split']}/{name}": value for name, value in event["values"].items()})


def is_score(key: str) -> bool:
    """Whether a curve is one of quality_metrics."""
    return "/" in key and not key.startswith(("train/", "wan/", "system/"))


def final_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The values of summary.json that a table of runs compares, without nulls."""
    step_time_s = summary.get("step_time_s", {})
    ratio = summary.get("compression_ratio", {})
    metrics = {
        **summary.get("quality", {}),
        **{f"{name}_error": error for name, error in summary.get("quality_error", {}).items()},
        "step_time_s": step_time_s.get("median"),
        "step_time_p90_s": step_time_s.get("p90"),
        "wan_bytes_per_step": sum(n or 0 for n in summary.get("wan_bytes_per_step", {}).values()),
        "compression_ratio": ratio.get("total"),
        **{f"compression_ratio_{kind}": ratio[kind] for kind in ratio if kind != "total"},
    }
    metrics |= {name: summary.get(name) for name in AS_THEY_ARE}
    metrics["epsilon"] = (summary.get("privacy") or {}).get("epsilon")
    if summary.get("num_resumes"):
        metrics |= {name: summary.get(name) for name in OF_RESUMED}
    metrics["num_skipped_updates"] = summary.get("num_skipped_updates") or None
    for name in (*TIMES, "wan_bytes_per_step", "link_utilisation"):
        for part, value in summary.get(name, {}).items():
            metrics[f"{name}_{part}"] = value
    for rank in summary.get("memory", ()):
        for name in MEMORY:
            metrics[f"memory_{name}_rank{rank['rank']}"] = rank.get(name)
    for name in ("bytes_per_token", "num_skipped"):
        metrics[name] = summary.get("feed", {}).get(name)
    return _legal({name: value for name, value in metrics.items() if value is not None})


def legal_name(name: str) -> str:
    """The closest name that MLflow accepts: letters, digits, `_ - . / space`, no path tricks.

    No colon either, which it refuses on Windows.
    """
    legal = posixpath.normpath(re.sub(r"[^\w\-. /]", "_", name)).strip("/ ")
    legal = re.sub(r"^\.+", "_", legal)  # "." and ".." would be folders
    return legal[:MAX_KEY_CHARACTERS].rstrip("/ ") or "_"


def _legal(metrics: Mapping[str, float]) -> dict[str, float]:
    return {legal_name(name): float(value) for name, value in metrics.items()}


class Point(NamedTuple):
    """One value of one curve."""

    key: str
    value: float
    at_s: float
    step: int


class Thinner:
    """At most `points` points of a curve of num_steps. `feed` the values of each step, in order;
    it returns the points that are known by then."""

    def __init__(self, points: int, num_steps: int) -> None:
        # Three points a bucket, and one bucket may be short.
        self._width = 3 * num_steps // (points - 3) + 1 if num_steps > points else 1
        self._points: dict[str, list[Point]] = {}  # smallest, largest, last
        self._open = -1  # the bucket of these points

    def feed(self, step: int, values: Mapping[str, float], at_s: float) -> list[Point]:
        bucket, points = step // self._width, []
        if bucket != self._open:
            points = self.close()
            self._open = bucket
        for key, value in values.items():
            point = Point(key, value, at_s, step)
            low, high, _ = self._points.get(key, (point, point, point))
            low, high = min(low, point, key=_height), max(high, point, key=_height)
            self._points[key] = [low, high, point]
        return points + (self.close() if (step + 1) // self._width != bucket else [])

    def close(self) -> list[Point]:
        """The rest, by step; of the last step in the order in which the values were given."""
        points = [p for points in self._points.values() for p in dict.fromkeys(points)]
        self._points.clear()
        return sorted(points, key=lambda point: point.step)


def _height(point: Point) -> float:
    """Not a number counts as the largest: it must be seen."""
    return math.inf if math.isnan(point.value) else point.value

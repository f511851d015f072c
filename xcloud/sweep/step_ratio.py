"""Step time of a point / that of its reference, from turns that they made in the same rounds.

The ratio of each round is of two times a moment apart, on the same machine in the same mood. The
figure is the median over the rounds; its interval is that of the sign test, which assumes nothing
of how the noise is distributed: the l-th smallest to the l-th largest of n ratios, with the
largest l for which P(Binomial(n, 1/2) < l) <= 2.5 %. So it has at least 95 %, and needs 6 rounds.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from xcloud.rank.interleaved import MIN_ROUNDS
from xcloud.record.mlflow_tracker import TRACKED_FILE
from xcloud.record.summary import SUMMARY_FILE, read_summary, write_summary
from xcloud.record.tracked_values import ratio_metrics
from xcloud.record.tracking import Tracker
from xcloud.sweep.points import UNCOMPRESSED, Point, reference_key

KEY = "step_time_ratio"  # in summary.json

Rounds = Mapping[int, float]  # seconds of a point's turn, by the number of the round

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRatio:
    """low, high: of the 95 % interval. to: the reference, as the table calls it."""

    ratio: float
    low: float
    high: float
    rounds: int
    to: str

    @classmethod
    def of(cls, own: Rounds, reference: Rounds, to: str) -> StepRatio | None:
        """None with fewer than MIN_ROUNDS rounds in common."""
        common = own.keys() & reference.keys()
        ratios = sorted(own[number] / reference[number] for number in common)
        if len(ratios) < MIN_ROUNDS:
            return None
        outer = _num_outside(len(ratios))
        low, high = ratios[outer - 1], ratios[-outer]
        return cls(statistics.median(ratios), low, high, len(ratios), to)

    @classmethod
    def over_seeds(cls, found: Sequence[StepRatio]) -> StepRatio:
        """Geometric mean; the seeds' intervals are independent."""
        mean = statistics.fmean(math.log(one.ratio) for one in found)
        below = math.hypot(*(math.log(one.ratio / one.low) for one in found)) / len(found)
        above = math.hypot(*(math.log(one.high / one.ratio) for one in found)) / len(found)
        names = " or ".join(dict.fromkeys(one.to for one in found))
        figures = (math.exp(mean), math.exp(mean - below), math.exp(mean + above))
        return cls(*figures, sum(one.rounds for one in found), names)

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"


def _num_outside(count: int) -> int:
    """The largest l with P(Binomial(count, 1/2) < l) <= 2.5 %."""
    below, number = 0, 0
    while (below := below + math.comb(count, number)) <= 0.025 * 2**count:
        number += 1
    return number


def reference_of(point: Point, points: Sequence[Point]) -> Point:
    """The uncompressed one of the same settings, or else the first; of the same seed if it can."""
    alike = [p for p in points if reference_key(p.settings) == reference_key(point.settings)]
    uncompressed = [p for p in alike if p.experiment.compression_in_force == UNCOMPRESSED]
    found = uncompressed or list(points)
    return next((p for p in found if p.experiment.seed == point.experiment.seed), found[0])


def record(timed: Sequence[tuple[Point, Path, Rounds]]) -> list[str]:
    """Write each finished point's ratio into its summary.json and its run in MLflow. timed: the
    finished points with their run folders. Returns what is to be said."""
    said = []
    rounds = {id(point): found for point, _, found in timed}
    points = [point for point, _, _ in timed]
    for point, run_dir, own in timed:
        reference = reference_of(point, points)
        ratio = StepRatio.of(own, rounds[id(reference)], reference.label)
        if ratio is None:
            said.append(
                f"{point.name}: no step time ratio; fewer than {MIN_ROUNDS} rounds in common with "
                f"{reference.name}"
            )
            continue
        write_summary(run_dir / SUMMARY_FILE, {**read_summary(run_dir), KEY: asdict(ratio)})
        try:
            _track(point.experiment.tracker, run_dir)
        except Exception as error:  # MLflow may be down or refuse; the sweep goes on.
            said.append(f"MLflow: {point.name} is without its step time ratio: {error}")
            log.debug("no step time ratio of %s", point.name, exc_info=True)
    return said


def _track(tracker: Tracker, run_dir: Path) -> None:
    store = tracker.store
    if store is None:
        return
    run_id = json.loads((run_dir / TRACKED_FILE).read_text("utf-8"))["run_id"]
    client = store.client()
    for name, value in ratio_metrics(read_summary(run_dir)).items():
        client.log_metric(run_id, name, value)
    client.log_artifact(run_id, str(run_dir / SUMMARY_FILE))

"""Points that are timed together: who makes steps when, and the step time of a point / that of its
reference, from turns that they made in the same rounds. A rank's end is rank/interleaved.py.

The ratio of each round is of two times a moment apart, on the same machine in the same mood. The
figure is the median over the rounds; its interval is that of the sign test, which assumes nothing
of how the noise is distributed: the l-th smallest to the l-th largest of n ratios, with the
largest l for which P(Binomial(n, 1/2) < l) <= 2.5 %. So it has at least 95 %, and needs 6 rounds.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from xcloud.rank.interleaved import MIN_ROUNDS
from xcloud.record.events import update_s
from xcloud.record.mlflow_tracker import TRACKED_FILE
from xcloud.record.summary import SUMMARY_FILE, read_summary, write_summary
from xcloud.record.tracking import Tracker, ratio_metrics
from xcloud.sweep.points import UNCOMPRESSED, Point, reference_key

KEY = "step_time_ratio"  # in summary.json
_LOOK_S = 0.1  # how often to ask whether a run has ended

Rounds = Mapping[int, float]  # seconds of a point's turn, by the number of the round

log = logging.getLogger(__name__)


class InterleavingServer:
    """`with InterleavingServer() as server:`; ranks find it at `address`. When it closes, no rank
    waits any more.

    has_ended, below: of the point's run. Ranks of a run may go and others come in their place.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="xcloud-")
        self.address = str(Path(self._folder.name, "turns"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(128)
        self._messages: dict[Connection, dict[str, Any]] = {}  # the last one of each rank
        self._waiting: set[Connection] = set()

    def __enter__(self) -> InterleavingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for rank in self._messages:
            rank.close()
        self._messages.clear()
        self._socket.close()
        self._folder.cleanup()

    def await_ready(self, run_dir: Path, has_ended: Callable[[], bool]) -> None:
        """Return when all ranks of the point wait for a turn, or its run has ended."""
        while not has_ended() and not self._ready(run_dir):
            for one in wait([self._socket, *self._messages], _LOOK_S):
                if isinstance(one, Connection):
                    self._receive(one)
                else:
                    self._messages[Connection(self._socket.accept()[0].detach())] = {}

    def turn(self, run_dir: Path, has_ended: Callable[[], bool]) -> float | None:
        """Let the point make its steps. Returns the seconds of all but the first, as a run counts
        them; None if the run has ended instead, or its ranks were started again."""
        self.await_ready(run_dir, has_ended)
        began = self._ready(run_dir)
        self._waiting -= began
        for rank in began:
            try:
                rank.send_bytes(b"turn")
            except OSError:
                self._drop(rank)
        self.await_ready(run_dir, has_ended)
        if not began or self._ready(run_dir) != began:
            return None
        by_step = list(zip(*(self._messages[rank]["made"] for rank in began), strict=True))
        return sum(map(update_s, by_step[1:]), 0.0)

    def _ready(self, run_dir: Path) -> set[Connection]:
        """The point's ranks if all are there and wait, else none."""
        point = str(run_dir.resolve())
        ranks = {rank: m for rank, m in self._messages.items() if m.get("point") == point}
        num_ranks = next((message["num_ranks"] for message in ranks.values()), 0)
        is_whole = {message["rank"] for message in ranks.values()} == {*range(num_ranks)}
        return {*ranks} if is_whole and ranks.keys() <= self._waiting else set()

    def _receive(self, rank: Connection) -> None:
        try:
            self._messages[rank] = json.loads(rank.recv_bytes())
            self._waiting.add(rank)
        except (EOFError, OSError):
            self._drop(rank)

    def _drop(self, rank: Connection) -> None:
        del self._messages[rank]
        self._waiting.discard(rank)
        rank.close()


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
        below, outer = 0, 0  # P(Binomial < outer) * 2**n
        while (below := below + math.comb(len(ratios), outer)) <= 0.025 * 2 ** len(ratios):
            outer += 1
        low, high = ratios[outer - 1], ratios[-outer]
        return cls(statistics.median(ratios), low, high, len(ratios), to)

    @classmethod
    def over_seeds(cls, ratios: Sequence[StepRatio]) -> StepRatio:
        """Geometric mean; the seeds' intervals are independent."""
        mean = statistics.fmean(math.log(one.ratio) for one in ratios)
        below = math.hypot(*(math.log(one.ratio / one.low) for one in ratios)) / len(ratios)
        above = math.hypot(*(math.log(one.high / one.ratio) for one in ratios)) / len(ratios)
        names = " or ".join(dict.fromkeys(one.to for one in ratios))
        figures = (math.exp(mean), math.exp(mean - below), math.exp(mean + above))
        return cls(*figures, sum(one.rounds for one in ratios), names)


def reference_of(point: Point, points: Sequence[Point]) -> Point:
    """The uncompressed one of the same settings, or else the first; of the same seed if it can."""
    alike = [p for p in points if reference_key(p.settings) == reference_key(point.settings)]
    uncompressed = [p for p in alike if p.experiment.compression_in_force == UNCOMPRESSED]
    choice = uncompressed or list(points)
    return next((p for p in choice if p.experiment.seed == point.experiment.seed), choice[0])


def record(timed: Sequence[tuple[Point, Path, Rounds]]) -> list[str]:
    """Write each finished point's ratio into its summary.json and its run in MLflow. timed: the
    finished points with their run folders. Returns remarks for the user."""
    remarks = []
    rounds = {id(point): own for point, _, own in timed}
    points = [point for point, _, _ in timed]
    for point, run_dir, own in timed:
        reference = reference_of(point, points)
        ratio = StepRatio.of(own, rounds[id(reference)], reference.label)
        if ratio is None:
            remarks.append(
                f"{point.name}: no step time ratio; fewer than {MIN_ROUNDS} rounds in common with "
                f"{reference.name}"
            )
            continue
        write_summary(run_dir / SUMMARY_FILE, {**read_summary(run_dir), KEY: asdict(ratio)})
        try:
            _track(point.experiment.tracker, run_dir)
        except Exception as error:  # MLflow may be down or refuse; the sweep continues.
            remarks.append(f"MLflow: {point.name} is without its step time ratio: {error}")
            log.debug("no step time ratio of %s", point.name, exc_info=True)
    return remarks


def _track(tracker: Tracker, run_dir: Path) -> None:
    if (store := tracker.store) is None:
        return
    run_id = json.loads((run_dir / TRACKED_FILE).read_text("utf-8"))["run_id"]
    client = store.client()
    for name, value in ratio_metrics(read_summary(run_dir)).items():
        client.log_metric(run_id, name, value)
    client.log_artifact(run_id, str(run_dir / SUMMARY_FILE))

"""Copy a run to MLflow: one flat MLflow run for all ranks, filled from the run's events.jsonl.
What is logged, and under which names, comes from tracked_values.py, and how many points of a curve
from thinning.py.

A tracker never delays or ends training. A background thread imports MLflow, opens the store and
sends; it reads the event file itself, and that file is the only backlog. While the store is down
the thread stops reading; once the store answers again it resumes with the first event that has
not arrived. There is one warning; what MLflow still lacks at the end of the run is listed in
`Recorded.missing` and remains in events.jsonl and summary.json.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from xcloud.checks import check_int, check_number
from xcloud.errors import ConfigError
from xcloud.project import project_root
from xcloud.record.events import EVENTS_FILE, Event, EventReader
from xcloud.record.mlflow_store import Store, prepare_environment
from xcloud.record.summary import RunStatistics
from xcloud.record.thinning import Buckets, Point, Thinner
from xcloud.record.tracked_values import (
    MAX_VALUE_CHARACTERS,
    final_metrics,
    flatten,
    is_score,
    legal_name,
    quality_metrics,
    step_metrics,
)

Status = Literal["finished", "failed", "stopped"]

MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
MAX_PER_BATCH = 100  # params or tags
MAX_METRICS_PER_BATCH = 1000
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST"}

RETRY_AFTER_S = 5.0
TRACKED_FILE = "mlflow_run.json"  # in the run folder: which run in MLflow it is
_STEP_CURVE = "train/step_s"  # has a value for every bucket's last step
FINISH_ATTEMPTS = 3
MIN_POINTS = 500

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is to record.

    params: may be nested; keys are joined by dots. run_dir: where events.jsonl is written.
    statistics: a fresh one of the run's kind of job; joins the ranks' reports. view: the page
    of all runs to prepare in a store on this machine, if any. A run that goes on in its folder
    goes on in MLflow too, found by TRACKED_FILE there. num_steps: that are planned.
    """

    name: str
    params: Mapping[str, object]
    tags: Mapping[str, str]
    run_dir: Path
    statistics: RunStatistics
    num_steps: int
    view: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Recorded:
    """Where a run was recorded.

    run_id, experiment_id: MLflow's; None and "" if the store has never answered. uri: of the
    tracking server; None for a store in the folder `root`. missing: a description of what MLflow
    lacks; empty if everything has arrived.
    """

    run_id: str | None
    experiment_id: str
    uri: str | None
    root: str
    sweep: str | None
    missing: str


class Tracker(Protocol):
    """start → artifact … → finish → recorded, from one thread; nothing raises after start."""

    def start(self, run: TrackedRun) -> None: ...
    def artifact(self, path: Path) -> None: ...
    def finish(self, status: Status, summary: Mapping[str, Any]) -> None: ...
    def recorded(self) -> Recorded | None:
        """None if there is no record outside the run folder."""


@dataclass(frozen=True)
class NullTracker:
    """Keep no record outside the run folder."""

    def start(self, run: TrackedRun) -> None:
        pass

    def artifact(self, path: Path) -> None:
        pass

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        pass

    def recorded(self) -> Recorded | None:
        return None


@dataclass
class MlflowTracker:
    """One MLflow run, in `<root>/mlflow.db` and `<root>/artifacts` or on a tracking server.

    Holds only settings until `start`, so that an Experiment with a tracker can be copied and
    pickled.
    """

    root: str = "mlruns"  # relative to the project
    experiment: str = "xcloud"
    uri: str | None = None  # of a tracking server; nothing is kept under root then
    flush_s: float = 1.0  # how often to send
    finish_timeout_s: float = 30.0  # how long `finish` may wait for the store
    points: int = 2000  # of a curve, at most, for all steps of a run

    def __post_init__(self) -> None:
        if not self.root or not self.experiment:
            raise ConfigError("tracker.root and tracker.experiment must not be empty")
        if self.uri is not None and "://" not in self.uri:
            raise ConfigError(
                f"tracker.uri must be the address of a tracking server, such as "
                f"http://host:5000, got {self.uri!r}. For another folder set tracker.root."
            )
        check_number("tracker.flush_s", self.flush_s, 0, 600, above=True)
        check_number("tracker.finish_timeout_s", self.finish_timeout_s, 0, 3600, above=True)
        check_int("tracker.points", self.points, MIN_POINTS, 10**6)
        self._sender: _Sender | None = None
        self._sweep: str | None = None

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the store has given one."""
        return self._sender.run_id if self._sender else None

    def start(self, run: TrackedRun) -> None:
        assert self._sender is None, "a tracker records one run; make another for the next"
        prepare_environment()
        store = Store(project_root() / self.root, self.experiment, self.uri)
        self._sender = sender = _Sender(store, run, self.flush_s, self.points)
        self._sweep = run.tags.get("sweep")
        sender.put("tags", sender.log_tags, run.tags)
        sender.start()

    def artifact(self, path: Path) -> None:
        """Log a file or folder; it must not change until `finish` returns."""
        sender = self._started()
        sender.put(Path(path).name, sender.log_artifact, Path(path).absolute())

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Send the rest and the final values; takes at most `finish_timeout_s`."""
        sender = self._started()
        facts = {key: summary.get(key) for key in ("commit", "profile", "cause")}
        tags = {key: value for key, value in facts.items() if value is not None}
        sender.put("final tags", sender.log_tags, {"status": status, **tags})
        num_steps = int(summary.get("num_steps") or 0)
        final = _points(final_metrics(summary), time.time(), num_steps)
        sender.put("final values", sender.log_metrics, final)
        sender.close(MLFLOW_STATUS[status], self.finish_timeout_s)

    def recorded(self) -> Recorded | None:
        if (sender := self._sender) is None:
            return None
        return Recorded(
            sender.run_id, sender.experiment_id, self.uri, self.root, self._sweep, sender.missing
        )

    def _started(self) -> _Sender:
        assert self._sender is not None, "start() comes first"
        return self._sender


class _Sender(threading.Thread):
    """Sends queued values and the event file's curves; the only thread that uses MLflow."""

    def __init__(self, store: Store, run: TrackedRun, flush_s: float, points: int) -> None:
        super().__init__(name="tracking", daemon=True)
        self.run_id: str | None = None
        self.experiment_id = ""  # with the run_id
        self._store, self._run, self._flush_s = store, run, flush_s
        # The monitor reads the file too and warns about lines that are not events.
        self._events = EventReader(run.run_dir / EVENTS_FILE, warn=False)
        self._client: Any = None
        self._read_step = -1  # the last one of the curves of training
        self._scored: dict[str, set[int]] = {}  # steps of the scores' curves
        self._started_at_s = time.time()
        self._closing = threading.Event()
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()
        self._thinner = Thinner(Buckets(points, run.num_steps))
        self._unsent: list[Point] = []  # read from the event file, not yet taken by MLflow
        self._last_step = 0  # whose values MLflow has
        self._refused: list[str] = []
        self._trouble = ""  # why the last attempt failed
        self._warned = self._complete = False

    def put(self, what: str, send: Callable[[Any], object], value: object) -> None:
        """Queue send(value). what: names it in messages, should it be refused."""
        self._waiting.append((what, partial(send, value)))

    def close(self, status: str, timeout_s: float) -> None:
        """Send the rest and end the MLflow run, within timeout_s."""
        self._status, self._ended_at_s = status, time.time()
        self._closing.set()
        self.join(timeout_s)
        if self.is_alive():
            self._warn(f"no answer within {timeout_s:g} s")

    @property
    def missing(self) -> str:
        """After `close`: a description of what MLflow lacks; empty if nothing."""
        parts = [f"{what}, which it refused" for what in self._refused]
        if not self._complete:
            late = f"all after step {self._last_step}" if self.run_id else "everything"
            parts.append(f"{late} ({self._trouble})")
        return "; ".join(parts)

    def run(self) -> None:
        retry_at_s = 0.0
        while not self._closing.wait(self._flush_s):
            if time.monotonic() >= retry_at_s and not self._deliver():
                retry_at_s = time.monotonic() + RETRY_AFTER_S
        # One more attempt if the store is known to be down, three for a hiccup at the very end.
        for attempts_left in reversed(range(1 if self._trouble else FINISH_ATTEMPTS)):
            if self._deliver(last=True):
                return
            if attempts_left:
                time.sleep(1.0)

    def _deliver(self, last: bool = False) -> bool:
        """Send everything pending; False if the store is down, in which case nothing is lost."""
        try:
            if self.run_id is None:
                self._create_run()
            self._send_figures()  # left over from when the store was down
            for event in self._events:  # after an outage there are many
                self._unsent += self._curves(event)
                if len(self._unsent) > MAX_METRICS_PER_BATCH:
                    self._send_figures()
            if last:
                self._unsent += self._thinner.close()
            self._send_figures()
            while self._waiting:
                self._attempt(*self._waiting[0])
                self._waiting.popleft()
            if last:
                ended_ms = int(1000 * self._ended_at_s)
                self._client.set_terminated(self.run_id, self._status, ended_ms)
                self._complete = True
        except Exception as error:  # Whatever MLflow raises, the run goes on.
            self._warn(f"{type(error).__name__}: {error}")
            return False
        self._trouble = ""
        return True

    def _create_run(self) -> None:
        client, experiment_id = self._store.open(self._run.view)
        earlier = self._earlier_run()
        if earlier is not None and self._reopen(client, earlier):
            self._client, self.experiment_id, self.run_id = client, experiment_id, earlier
            return
        started_ms, tags = int(1000 * self._started_at_s), {"mlflow.user": _user()}
        run = client.create_run(experiment_id, started_ms, tags, run_name=self._run.name)
        self._client, self.experiment_id = client, experiment_id
        self.run_id = run.info.run_id
        # Not those of a later attempt: MLflow cannot change a parameter.
        params = partial(self.log_params, flatten(self._run.params))
        self._waiting.appendleft(("parameters", params))
        with contextlib.suppress(OSError):  # a later attempt will have a run of its own there
            tracked = {"run_id": self.run_id, "store": self._store.tracking_uri}
            (self._run.run_dir / TRACKED_FILE).write_text(json.dumps(tracked), encoding="utf-8")

    def _earlier_run(self) -> str | None:
        """Id of the record of an earlier attempt in this store, if there is one."""
        try:
            tracked = json.loads((self._run.run_dir / TRACKED_FILE).read_text("utf-8"))
            return str(tracked["run_id"]) if tracked["store"] == self._store.tracking_uri else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _reopen(self, client: Any, run_id: str) -> bool:
        """Go on with an earlier record, after its last step; False if the store has it no more."""
        try:
            client.update_run(run_id, status="RUNNING")
            steps = {
                key: {metric.step for metric in client.get_metric_history(run_id, key)}
                for key in client.get_run(run_id).data.metrics
                if key == _STEP_CURVE or is_score(key)
            }
        except Exception as error:
            if not _is_refusal(error):
                raise
            return False
        self._read_step = max(steps.pop(_STEP_CURVE, ()), default=-1)
        self._last_step, self._scored = max(self._read_step, 0), steps
        return True

    def _curves(self, event: Event) -> list[Point]:
        # Of steps that were done again MLflow keeps the first values: it cannot replace one.
        found = []
        totals = self._run.statistics.feed(event)
        if totals is not None and totals.step > self._read_step:
            self._read_step = totals.step
            values = step_metrics(totals)
            # It comes last, so once MLflow has it, MLflow has all of the bucket.
            values[_STEP_CURVE] = values.pop(_STEP_CURVE)
            found = self._thinner.feed(totals.step, values, event["t"])
        if event["event"] == "quality":
            for point in _points(quality_metrics(event), event["t"], event["step"]):
                if point.step not in (steps := self._scored.setdefault(point.key, set())):
                    steps.add(point.step)
                    found.append(point)
        return found

    def _send_figures(self) -> None:
        while batch := self._unsent[:MAX_METRICS_PER_BATCH]:
            steps = f"steps {batch[0].step} to {batch[-1].step}"
            self._attempt(steps, partial(self.log_metrics, batch))
            self._last_step = batch[-1].step
            del self._unsent[: len(batch)]

    def _attempt(self, what: str, send: Callable[[], object]) -> None:
        """Note and drop what MLflow refuses; raise any other error, which may pass."""
        try:
            send()
        except Exception as error:
            if not _is_refusal(error):
                raise
            self._refused.append(what)
            self._warn(f"{what}: {error}")

    def log_metrics(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(p.key, p.value, int(1000 * p.at_s), p.step) for p in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        for some in _cut([Param(*pair) for pair in params.items()]):
            self._client.log_batch(self.run_id, params=some)

    def log_tags(self, tags: Mapping[str, object]) -> None:
        from mlflow.entities import RunTag

        pairs = [(legal_name(key), str(tags[key])[:MAX_VALUE_CHARACTERS]) for key in tags]
        for some in _cut([RunTag(*pair) for pair in pairs]):
            self._client.log_batch(self.run_id, tags=some)

    def log_artifact(self, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), path.name)
        else:
            self._client.log_artifact(self.run_id, str(path))

    def _warn(self, reason: str) -> None:
        """Warn once, however many attempts fail."""
        self._trouble = reason[:400]
        if not self._warned:
            self._warned = True
            log.warning(
                "MLflow at %s does not accept what is logged (%s). The run continues; what MLflow "
                "lacks is sent again from %s until the run ends.",
                *(self._store.tracking_uri, self._trouble, EVENTS_FILE),
            )


def _points(metrics: Mapping[str, float], at_s: float, step: int) -> list[Point]:
    return [Point(key, value, at_s, step) for key, value in metrics.items()]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # In a container the user id may have no name.
        return "unknown"


def _is_refusal(error: Exception) -> bool:
    """Whether a retry is pointless; otherwise the store may be down, and sending is retried."""
    # An artifact that is gone or unreadable; no server error has these types.
    if isinstance(error, FileNotFoundError | PermissionError):
        return True
    return getattr(error, "error_code", None) in REFUSALS


def _cut(entries: list[Any]) -> list[list[Any]]:
    return [entries[i : i + MAX_PER_BATCH] for i in range(0, len(entries), MAX_PER_BATCH)]

"""Copy a run to MLflow: one flat MLflow run for all ranks, filled from the run's events.jsonl.
What is logged, under which names, and how many points of a curve: tracking.py.

A tracker never delays or ends training. A background thread imports MLflow, opens the store and
sends; it reads the event file itself, and that file is the only backlog. While the store is down
the thread stops reading; once the store answers again it resumes with the first event that has
not arrived. There is one warning; what MLflow still lacks at the end of the run is listed in
`Recorded.missing` and remains in events.jsonl and summary.json.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.project import project_root
from xcloud.base.settings import settings
from xcloud.record.events import EVENTS_FILE, Event, EventReader
from xcloud.record.mlflow_store import (
    ALL_RUNS,
    COSTS,
    Store,
    prepare_environment,
    ui_command,
    view_of_sweep,
)
from xcloud.record.tracking import (
    MAX_VALUE_CHARACTERS,
    Point,
    Recording,
    Status,
    Thinner,
    TrackedRun,
    Tracker,
    final_metrics,
    is_score,
    legal_name,
    quality_metrics,
    step_metrics,
)

MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
MAX_PER_BATCH = 100  # params
MAX_METRICS_PER_BATCH = 1000
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST"}
RETRY_AFTER_S = 5.0
SYSTEM_EVERY_S = 10.0
MODEL_FIGURES = (*COSTS, "compression_ratio")  # of a model, beside its scores
TRACKED_FILE = "mlflow_run.json"  # in the run folder: which run in MLflow it is
REPLACED_FILE = "mlflow_run_replaced.json"  # which one it takes the place of, if it begins again
FINISH_ATTEMPTS = 3
_STEP_CURVE = "train/step_s"  # has a value for every bucket's last step

log = logging.getLogger(__name__)


@settings("tracker")
class MlflowTracker(Tracker):
    """One MLflow run, in `<root>/mlflow.db` and `<root>/artifacts` or on a tracking server.

    root: relative to the project. uri: of a tracking server; nothing is kept under root then.
    flush_s: how often to send. finish_timeout_s: how long `finish` may wait for the store. points:
    of a curve, at most, for all steps of a run.
    """

    root: Annotated[str, Field(min_length=1)] = "mlruns"
    experiment: Annotated[str, Field(min_length=1)] = "xcloud"
    uri: str | None = None
    flush_s: Annotated[float, Field(gt=0, le=600)] = 1.0
    finish_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    points: Annotated[int, Field(ge=500, le=10**6)] = 2000

    def __post_init__(self) -> None:
        if self.uri is not None and "://" not in self.uri:
            raise ConfigError(
                f"tracker.uri must be the address of a tracking server, such as "
                f"http://host:5000, got {self.uri!r}. For another folder set tracker.root."
            )

    @property
    def store(self) -> Store:
        return Store(project_root() / self.root, self.experiment, self.uri)

    def start(self, run: TrackedRun) -> Sender:
        sender = Sender(self, run)
        sender.start()
        return sender


class Sender(threading.Thread, Recording):
    """Sends queued values and the event file's curves; the only thread that uses MLflow."""

    def __init__(self, tracker: MlflowTracker, run: TrackedRun) -> None:
        super().__init__(name="tracking", daemon=True)
        self.run_id: str | None = None  # None until the store has given one
        self.experiment_id = ""  # with the run_id
        self._tracker, self._store, self._run = tracker, tracker.store, run
        # The monitor reads the file too and warns about lines that are not events.
        self._events = EventReader(run.run_dir / EVENTS_FILE, warn=False)
        self._client: Any = None
        self._until: dict[str, int] = {}  # the last step that was read, of each curve
        self._started_at_s = time.time()
        self._load_due_s = 0.0  # since the start
        self._closing = threading.Event()
        self._thinner = Thinner(tracker.points, run.num_steps)
        self._unsent: list[Point] = []  # read from the event file, not yet taken by MLflow
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()  # sent after those
        self._last_step = 0  # whose values MLflow has
        self._refused: list[str] = []
        self._trouble = ""  # why the last attempt failed
        self._warned = self._complete = False
        self._put("tags", self._log_tags, run.tags)

    def _put(self, what: str, send: Callable[..., object], *values: object) -> None:
        """Queue send(*values). what: names it in messages, should it be refused."""
        self._waiting.append((what, partial(send, *values)))

    def artifact(self, path: Path) -> None:
        path = path.absolute()
        self._put(path.name, lambda: self._store.keep(self._client, str(self.run_id), path))

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Send the rest and the final values; takes at most `finish_timeout_s`."""
        facts = ("commit", "profile", "cause")
        tags = {key: summary[key] for key in facts if summary.get(key) is not None}
        self._put("final tags", self._log_tags, {"status": status, **tags})
        num_steps, now_s = int(summary.get("num_steps") or 0), time.time()
        self._put(
            "final values", self._log_metrics, points_of(final_metrics(summary), now_s, num_steps)
        )
        if status == "finished":
            self._put("the model", self._log_model, summary, now_s)
        self._status, self._ended_at_s = MLFLOW_STATUS[status], now_s
        self._closing.set()
        self.join(self._tracker.finish_timeout_s)
        if self.is_alive():
            self._warn(f"no answer within {self._tracker.finish_timeout_s:g} s")

    def places(self) -> dict[str, str]:
        missing, store = self.missing, self._store
        lacks = {"MLflow lacks": missing} if missing else {}
        if self.run_id is None:
            return lacks
        sweep, run_id = self._run.tags.get("sweep"), self.run_id
        view = view_of_sweep(sweep) if sweep else ALL_RUNS
        link = {"compare at": store.pages(self.experiment_id).runs(view)}
        if store.uri is not None:
            return {**lacks, "MLflow run": f"{run_id} at {store.uri}", **link}
        return {**lacks, "MLflow run": run_id, "see it with": ui_command(store.root), **link}

    @property
    def missing(self) -> str:
        """After `finish`: a description of what MLflow lacks; empty if nothing."""
        parts = [f"{what}, which it refused" for what in self._refused]
        if not self._complete:
            late = f"all after step {self._last_step}" if self.run_id else "everything"
            parts.append(f"{late} ({self._trouble})")
        return "; ".join(parts)

    def run(self) -> None:
        prepare_environment()
        retry_at_s = 0.0
        while not self._closing.wait(self._tracker.flush_s):
            if time.monotonic() >= retry_at_s and not self._deliver():
                retry_at_s = time.monotonic() + RETRY_AFTER_S
        # One more attempt if the store is known to be down, three for a hiccup at the very end.
        for attempt in range(1 if self._trouble else FINISH_ATTEMPTS):
            time.sleep(min(attempt, 1))
            if self._deliver(last=True):
                return

    def _deliver(self, last: bool = False) -> bool:
        """Send everything pending; False if the store is down, in which case nothing is lost."""
        try:
            if self.run_id is None:
                self._create_run()
            self._unsent += self._load()
            self._send_curves()  # left over from when the store was down
            for event in self._events:  # after an outage there are many
                self._unsent += self._curves(event)
                if len(self._unsent) > MAX_METRICS_PER_BATCH:
                    self._send_curves()
            self._unsent += self._thinner.close() if last else []
            self._send_curves()
            while self._waiting:
                self._attempt(*self._waiting[0])
                self._waiting.popleft()
            if last:
                ended_ms = int(1000 * self._ended_at_s)
                self._client.set_terminated(self.run_id, self._status, ended_ms)
                self._complete = True
        except Exception as error:  # Whatever MLflow raises, the run continues.
            self._warn(f"{type(error).__name__}: {error}")
            return False
        self._trouble = ""
        return True

    def _create_run(self) -> None:
        client, self.experiment_id = self._store.open()
        earlier = self._recorded_in(TRACKED_FILE)
        if earlier is not None and self._reopen(client, earlier):
            self._client, self.run_id = client, earlier
            return
        started_ms = int(1000 * self._started_at_s)
        tags = {"mlflow.user": psutil.Process().username()}
        run = client.create_run(self.experiment_id, started_ms, tags, run_name=self._run.name)
        self._client, self.run_id = client, run.info.run_id
        if (replaced := self._recorded_in(REPLACED_FILE)) is not None:
            self._put("the earlier run", client.delete_run, replaced)
        # Not those of a later attempt: MLflow cannot change a parameter.
        params = partial(self._log_params, self._run.params)
        self._waiting.appendleft(("parameters", params))
        with contextlib.suppress(OSError):  # a later attempt will have a run of its own there
            tracked = {"run_id": self.run_id, "store": self._store.tracking_uri}
            (self._run.run_dir / TRACKED_FILE).write_text(json.dumps(tracked), encoding="utf-8")

    def _recorded_in(self, file: str) -> str | None:
        """Id of the run in this store that the file names, if there is one."""
        try:
            tracked = json.loads((self._run.run_dir / file).read_text("utf-8"))
            return str(tracked["run_id"]) if tracked["store"] == self._store.tracking_uri else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _reopen(self, client: Any, run_id: str) -> bool:
        """Resume an earlier record, after its last step; False if the store has it no more."""
        try:
            client.update_run(run_id, status="RUNNING")
            data = client.get_run(run_id).data
            for tag in {"status", "cause"} & data.tags.keys():  # of how it ended before
                client.delete_tag(run_id, tag)
            self._until = {
                key: max(metric.step for metric in client.get_metric_history(run_id, key))
                for key in data.metrics
                if key == _STEP_CURVE or is_score(key)
            }
        except Exception as error:
            if not _is_refusal(error):
                raise
            return False
        self._last_step = self._until.get(_STEP_CURVE, 0)
        return True

    def _load(self) -> list[Point]:
        """Of the machine, now and then, as MLflow's page of system metrics names it; a step is a
        second since the start."""
        now_s = time.time()
        second = now_s - self._started_at_s
        if second < self._load_due_s:
            return []
        self._load_due_s = second + SYSTEM_EVERY_S
        memory = psutil.virtual_memory()
        load = {
            "system/cpu_utilization_percentage": psutil.cpu_percent(),
            "system/system_memory_usage_megabytes": memory.used / 1e6,
            "system/system_memory_usage_percentage": memory.percent,
        }
        return points_of(load, now_s, int(second))

    def _curves(self, event: Event) -> list[Point]:
        if event["event"] == "data":
            self._put("data sets", self._log_data, event)
        points = []
        totals = self._run.steps.feed(event)
        if totals is not None and self._is_new(_STEP_CURVE, totals.step):
            values = step_metrics(totals)
            # It comes last, so once MLflow has it, MLflow has all of the bucket.
            values[_STEP_CURVE] = values.pop(_STEP_CURVE)
            points = self._thinner.feed(totals.step, values, event["t"])
        if event["event"] == "quality":
            scores = points_of(quality_metrics(event), event["t"], event["step"])
            points += [point for point in scores if self._is_new(point.key, point.step)]
        return points

    def _is_new(self, key: str, step: int) -> bool:
        """Of steps that were done again MLflow keeps the first values: it cannot replace one."""
        is_new = step > self._until.get(key, -1)
        self._until[key] = max(step, self._until.get(key, -1))
        return is_new

    def _send_curves(self) -> None:
        while batch := self._unsent[:MAX_METRICS_PER_BATCH]:
            steps = f"steps {batch[0].step} to {batch[-1].step}"
            self._attempt(steps, partial(self._log_metrics, batch))
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

    def _log_metrics(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(p.key, p.value, int(1000 * p.at_s), p.step) for p in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _log_params(self, params: Mapping[str, object]) -> None:
        """Long values are cut: the complete file is logged as an artifact."""
        from mlflow.entities import Param

        texts = {k: json.dumps(v) if isinstance(v, list) else str(v) for k, v in params.items()}
        entries = [Param(legal_name(k), v[:MAX_VALUE_CHARACTERS]) for k, v in texts.items()]
        for i in range(0, len(entries), MAX_PER_BATCH):
            self._client.log_batch(self.run_id, params=entries[i : i + MAX_PER_BATCH])

    def _log_tags(self, tags: Mapping[str, object]) -> None:
        from mlflow.entities import RunTag

        said = [RunTag(legal_name(k), str(v)[:MAX_VALUE_CHARACTERS]) for k, v in tags.items()]
        self._client.log_batch(self.run_id, tags=said)

    def _log_data(self, event: Event) -> None:
        """The splits of the corpus as the run's inputs, from a "data" event. The digest is of
        settings, sizes and what the corpus is known by, not of private text."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        if self._client.get_run(self.run_id).inputs.dataset_inputs:
            return  # an earlier attempt's
        given = self._run.params.items()
        source = json.dumps({k: v for k, v in given if k.startswith(("task.", "model.text."))})
        # How many texts the producers of a one-way job have, only they know.
        for split, num in (event["rows"] or {"train": None}).items():
            profile, name = json.dumps({"num_rows": num}), f"{event['name']}, {split}"[:500]
            data = Dataset(name, event["digest"], "xcloud", source, profile=profile)
            tags = [InputTag("mlflow.data.context", split)]
            self._client.log_inputs(self.run_id, [DatasetInput(data, tags)])

    def _log_model(self, summary: Mapping[str, Any], at_s: float) -> None:
        """The finished model with its scores, what a step took, and where its record lies. at_s:
        the time of the run's final values, so that none is in the run twice."""
        from mlflow.entities import Metric

        run, scores, data = self._run, summary.get("quality", {}), summary.get("data") or {}
        corpus, folder = data.get("name", ""), str(run.run_dir.absolute())
        note = f"Record: `{folder}` (experiment.yaml, summary.json, events.jsonl)"
        model = self._client.create_logged_model(
            self.experiment_id, re.sub(r"""[/:.%"'\s]+""", "_", run.name),
            source_run_id=self.run_id, params={"corpus": corpus[:500]}, model_type="xcloud",
            tags={**run.tags, "corpus": corpus, "run_folder": folder, "mlflow.note.content": note},
        )  # fmt: skip
        tested = {"dataset_name": f"{corpus}, test"[:500], "dataset_digest": data.get("digest")}
        metrics = [
            Metric(
                name, value, int(1000 * at_s), int(summary["num_steps"]), model.model_id,
                run_id=self.run_id, **(tested if data and name in scores else {}),
            )
            for name, value in final_metrics(summary).items()
            if name in (*scores, *MODEL_FIGURES)
        ]  # fmt: skip
        self._client.log_batch(self.run_id, metrics=metrics)
        self._client.finalize_logged_model(model.model_id, "READY")

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


def points_of(metrics: Mapping[str, float], at_s: float, step: int) -> list[Point]:
    return [Point(key, value, at_s, step) for key, value in metrics.items()]


def _is_refusal(error: Exception) -> bool:
    """Whether a retry is pointless; otherwise the store may be down, and sending is retried."""
    # An artifact that is gone or unreadable; no server error has these types.
    is_lost = isinstance(error, FileNotFoundError | PermissionError)
    return is_lost or getattr(error, "error_code", None) in REFUSALS

"""The record of a run outside of its folder: none, or one MLflow run for all ranks, filled from
the run's events.jsonl. Names and points of curves, and where MLflow keeps them: mlflow_store.py.

A tracker never delays or ends training. A background thread imports MLflow, opens the store and
sends; it reads the event file itself, and that file is the only backlog. While the store is down
the thread stops reading; once the store answers again it resumes with the first event that has
not arrived. There is one warning; what MLflow still lacks at the end is said with the places.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import secrets
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import psutil
from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.project import project_root
from xcloud.base.settings import Address, WritePath, settings
from xcloud.base.terminal import printable
from xcloud.record.events import EVENTS_FILE, Event, EventReader, StepCollector, moment
from xcloud.record.files import read_json, replace_text
from xcloud.record.run_record import RunRecord
from xcloud.record.summary import read_summary
from xcloud.tracking.mlflow_store import (
    COSTS,
    LOAD,
    PROCESS_TAG,
    STEPS_PER_ATTEMPT,
    CurvePoint,
    Store,
    Thinner,
    check_no_password,
    final_step,
    final_values,
    legal_name,
    points_of,
    prepare_environment,
    quality_metrics,
    step_metrics,
    this_process,
    ui_command,
    without_password,
)

Status = Literal["finished", "failed", "stopped"]
MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
MAX_VALUE_CHARACTERS = 6000  # of MLflow 3.17 (mlflow/utils/validation.py)
POINTS_PER_CALL = 1000
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST"}
RETRY_AFTER_S = 5.0
SYSTEM_EVERY_S = 10.0
TRACKED_FILE = "mlflow_run.json"  # in the run folder: which run in MLflow it is
REPLACED_FILE = "mlflow_run_replaced.json"  # which one it takes the place of, if it begins again
TOKEN_TAG = "run_folder_token"  # which a run in MLflow and the file that names it have in common
RESUMED_TAG = "resumed."  # before a parameter that another attempt has changed
NOTE_TAG = "mlflow.note.content"  # shown above everything else, as Markdown
FINISH_ATTEMPTS = 3
_STEP_CURVE = "train/step_s"  # has a value for every bucket's last step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """A run that a tracker is to record.

    params: the settings by dotted names.
    steps: a fresh collector of the run's job.
    num_steps: the number of planned steps.
    files: the files that the record has from its beginning.
    """

    name: str
    params: Mapping[str, object]
    tags: Mapping[str, str]
    run_dir: Path
    steps: StepCollector
    num_steps: int
    files: Sequence[Path] = ()


class Recording:
    """artifact … → finish → places, from one thread; nothing raises. This one keeps nothing."""

    def artifact(self, path: Path) -> None:
        """Keep a file; it must not change until `finish` returns."""

    def finish(self, status: Status, record: RunRecord, note: str = "") -> None:
        """End the record of a run. note: what a reader is to see first, as Markdown."""

    def places(self) -> Mapping[str, str]:
        """Return where the run was recorded, how to see it, and what the record lacks, by
        label."""
        return {}


class Tracker:
    """Settings; `start` begins the record of a run. store: where runs of a sweep are recorded
    together, if there is such a place."""

    store: ClassVar[Any] = None

    def check(self) -> None:
        """Raise ConfigError if the place of the records would refuse all of a run."""

    def start(self, run: TrackedRun) -> Recording:
        return Recording()


@settings("tracker")
class NullTracker(Tracker):
    """Keep no record outside the run folder."""


@settings("tracker")
class MlflowTracker(Tracker):
    """One MLflow run, in `<root>/mlflow.db` and `<root>/artifacts` or on a tracking server.

    experiment: the name of MLflow's experiment that the runs are listed under.
    root: the folder of the store, relative to the project.
    uri: the address of a tracking server. Nothing is kept under root then.
    flush_s: the seconds between two calls that send events.
    finish_timeout_s: the seconds that `finish` may wait for the store.
    points: the largest number of points of a curve, for all steps of a run.
    """

    root: WritePath = "mlruns"
    experiment: Annotated[str, Field(min_length=1, max_length=500)] = "xcloud"
    uri: Address | None = None
    flush_s: Annotated[float, Field(gt=0, le=600)] = 1.0
    finish_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    points: Annotated[int, Field(ge=500, le=10**6)] = 2000

    def __post_init__(self) -> None:
        if self.uri is not None and "://" not in self.uri:
            raise ConfigError(
                f"tracker.uri must be the address of a tracking server, such as "
                f"http://host:5000, got {self.uri!r}. For another folder set tracker.root."
            )
        check_no_password("tracker.uri", uri=self.uri)

    @property
    def store(self) -> Store:
        return Store(root=project_root() / self.root, experiment=self.experiment, uri=self.uri)

    def check(self) -> None:
        self.store.check()

    def start(self, run: TrackedRun) -> MlflowSender:
        sender = MlflowSender(tracker=self, run=run)
        sender.start()
        return sender


class MlflowSender(threading.Thread, Recording):
    """Sends queued values and the event file's curves; the only thread that uses MLflow."""

    def __init__(self, tracker: MlflowTracker, run: TrackedRun) -> None:
        super().__init__(name="tracking", daemon=True)
        self.run_id: str | None = None  # None until the store has given one
        self.experiment_id = ""  # with the run_id
        self._tracker = tracker
        self._store = tracker.store
        self._run = run
        # The monitor reads the file too and warns about lines that are not events.
        self._events = EventReader(path=run.run_dir / EVENTS_FILE, warn=False)
        self._client: Any = None
        self._until: dict[str, int] = {}  # the last step that was read, of each curve
        self._started_at_s = time.time()
        self._load_due_s = 0.0
        # Set by `finish`, from the thread that follows the run.
        self._closing = threading.Event()
        self._thinner = Thinner(points=tracker.points, num_steps=run.num_steps)
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()
        self._ending: list[tuple[str, Callable[[], object]]] = []  # sent after all events
        self._last_step = 0  # whose values MLflow has
        self._refused: list[str] = []
        self._trouble = ""  # why the last attempt failed
        self._warned = self._complete = False
        self._waiting.append(("tags", partial(self._log, tags=run.tags)))
        for file in run.files:
            self.artifact(file)

    def artifact(self, path: Path) -> None:
        keep = self._store.keep
        path = path.absolute()
        self._waiting.append((path.name, lambda: keep(self._client, str(self.run_id), path)))

    def finish(self, status: Status, record: RunRecord, note: str = "") -> None:
        """Send the rest and the final values; takes at most `finish_timeout_s`."""
        summary = record.summary
        tags = {k: v for k in ("commit", "profile", "cause") if (v := summary.get(k)) is not None}
        if note:
            tags[NOTE_TAG] = note
        now_s = time.time()
        self._ending = [
            ("final tags", partial(self._log, tags={"status": status, **tags})),
            ("final values", partial(self._log_final, record, now_s)),
        ]
        if status == "finished":
            self._ending.append(("the model", partial(self._log_model, record, now_s)))
        self._ended = MLFLOW_STATUS[status], int(1000 * now_s)
        self._closing.set()
        self.join(self._tracker.finish_timeout_s)
        if self.is_alive():
            self._warn(f"no answer within {self._tracker.finish_timeout_s:g} s")

    def places(self) -> dict[str, str]:
        lacks = [f"{what}, which it refused" for what in self._refused]
        if not self._complete:
            late = f"all after step {self._last_step}" if self.run_id else "everything"
            lacks.append(f"{late} ({self._trouble})")
        places = {"MLflow lacks": "; ".join(lacks)} if lacks else {}
        store = self._store
        if self.run_id is None:
            return places
        if store.uri is not None:
            places["MLflow run"] = f"{self.run_id} at {store.uri}"
        else:
            places |= {"MLflow run": self.run_id, "see it with": ui_command(store.root)}
        return places | {
            "compare at": store.runs(self.experiment_id, sweep=self._run.tags.get("sweep"))
        }

    def run(self) -> None:
        prepare_environment()
        # Its first value is of no time at all.
        psutil.cpu_percent()  # each call is of the time since the thread's one before
        retry_at_s = 0.0
        while not self._closing.wait(self._tracker.flush_s):
            # While the store is down the thread reads no events: the file is the backlog.
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
            self._read_load()
            # What waits is sent first, in order; then more is read.
            while self._waiting or self._read(last):
                what, send = self._waiting[0]
                try:
                    send()
                except Exception as error:
                    if not _is_refusal(error):  # else it is noted and dropped
                        raise
                    # A refusal comes again however often it is sent.
                    self._refused.append(what)
                    self._warn(f"{what}: {error}")
                self._waiting.popleft()
            if last:
                self._client.set_terminated(self.run_id, *self._ended)
                self._complete = True
        except Exception as error:  # Whatever MLflow raises, the run continues.
            self._warn(f"{type(error).__name__}: {error}", is_final=_is_refusal(error))
            return False
        self._trouble = ""
        return True

    def _create_run(self) -> None:
        self._client, self.experiment_id = self._store.open()
        self._store.end_lost_runs(self._client, experiment_id=self.experiment_id)
        earlier = run_named_by(
            self._run.run_dir / TRACKED_FILE, store=self._store, client=self._client
        )
        if "run_id" in earlier and self._reopen(self._client, run_id=earlier["run_id"]):
            self.run_id = earlier["run_id"]
            self._note_changes(earlier.get("params", {}))
            return
        origin = {  # what MLflow's own client says of a run
            "mlflow.user": psutil.Process().username(),
            "mlflow.source.name": Path(sys.argv[0]).name,
            "mlflow.source.type": "LOCAL",
            PROCESS_TAG: this_process(),
        }
        self.run_id = self._client.create_run(
            self.experiment_id, int(1000 * self._started_at_s), origin, run_name=self._run.name
        ).info.run_id
        replaced = run_named_by(
            self._run.run_dir / REPLACED_FILE, store=self._store, client=self._client
        )
        if replaced != {}:
            drop = partial(self._client.delete_run, replaced["run_id"])
            self._waiting.append(("the earlier run", drop))
        token = secrets.token_hex(16)
        params = dict(_entries(self._run.params))
        self._waiting.appendleft(("parameters", partial(self._log, params=params)))
        self._waiting.appendleft(("its token", partial(self._log, tags={TOKEN_TAG: token})))
        tracked = {
            "run_id": self.run_id,
            "store": self._store.tracking_uri,
            "token": token,
            "params": params,
        }
        with contextlib.suppress(OSError):  # a later attempt will have a run of its own there
            replace_text(self._run.run_dir / TRACKED_FILE, text=json.dumps(tracked))

    def _note_changes(self, first: Mapping[str, str]) -> None:
        """Tag the run with the settings that differ from its parameters, which are those of the
        first attempt and which MLflow cannot change."""
        now = dict(_entries(self._run.params))
        changed = {
            f"{RESUMED_TAG}{name}": now.get(name, "not set")
            for name in first.keys() | now.keys()
            if first.get(name) != now.get(name)
        }
        for tag in self._client.get_run(self.run_id).data.tags.keys() - changed.keys():
            if tag.startswith(RESUMED_TAG):
                self._client.delete_tag(self.run_id, tag)
        self._waiting.append(("changed settings", partial(self._log, tags=changed)))

    def _log_final(self, record: RunRecord, at_s: float) -> None:
        """Log the final values, and "not a number" for those that only an earlier attempt had."""
        values = final_values(record, at_s)
        step = final_step(record.summary)
        there = self._client.get_run(self.run_id).data.metrics if step > STEPS_PER_ATTEMPT else {}
        old = {key for key in there if "/" not in key} - {value.key for value in values}
        self._log([*values, *points_of(dict.fromkeys(sorted(old), math.nan), at_s, step)])

    def _reopen(self, client: Any, run_id: str) -> bool:
        """Resume an earlier record, after its last step; False if the store has it no more."""
        try:
            client.set_tag(run_id, PROCESS_TAG, this_process())  # before another one asks for it
            client.update_run(run_id, status="RUNNING")
            data = client.get_run(run_id).data
            for tag in {"status", "cause"} & data.tags.keys():  # of how it ended before
                client.delete_tag(run_id, tag)
            self._until = {
                key: max(metric.step for metric in client.get_metric_history(run_id, key))
                for key in data.metrics
                if key == _STEP_CURVE or key.startswith("dev/")
            }
        except Exception as error:
            if not _is_refusal(error):
                raise
            return False
        self._last_step = self._until.get(_STEP_CURVE, 0)
        return True

    def _read_load(self) -> None:
        """Read the load of the machine, named as on MLflow's page of system metrics; steps are
        seconds."""
        second = int(time.time() - self._started_at_s)
        if second < self._load_due_s:
            return
        self._load_due_s = second + SYSTEM_EVERY_S
        memory = psutil.virtual_memory()
        load = {LOAD: psutil.cpu_percent(),
                "system/system_memory_usage_megabytes": memory.used / 1e6,
                "system/system_memory_usage_percentage": memory.percent}  # fmt: skip
        points = points_of(load, at_s=time.time(), step=second)
        self._waiting.append(("the machine's load", partial(self._log, points)))

    def _read(self, last: bool) -> bool:
        """Queue the values of the next events, about as many as fit into a call; False if there
        are none. last: and once there are no more what ends the record."""
        points = []
        for event in self._events:
            points += self._values(event)
            if len(points) > POINTS_PER_CALL:
                break
        else:
            points += self._thinner.close() if last else []
            self._waiting.extend(self._ending)
            self._ending = []
        if points:
            steps = f"steps {points[0].step} to {points[-1].step}"
            self._waiting.appendleft((steps, partial(self._log, points)))
        return bool(self._waiting)

    def _values(self, event: Event) -> list[CurvePoint]:
        if event["event"] == "data":
            self._waiting.append(("data sets", partial(self._log_data, event)))
        points = []
        totals = self._run.steps.feed(event)
        if totals is not None and self._is_new(_STEP_CURVE, step=totals.step):
            values = points_of(step_metrics(totals), at_s=moment(event), step=totals.step)
            points = self._thinner.feed(values)
        # The test's are final values: a curve of one point would stand above the loss.
        if event["event"] == "quality" and event["split"] == "dev":
            scores = points_of(quality_metrics(event), at_s=moment(event), step=event["step"])
            points += [point for point in scores if self._is_new(point.key, step=point.step)]
        return points

    def _is_new(self, key: str, step: int) -> bool:
        """Note the step of a curve; return whether it is new to MLflow, which keeps the first
        values of steps that were repeated."""
        is_new = step > self._until.get(key, -1)
        self._until[key] = max(step, self._until.get(key, -1))
        return is_new

    def _log(self, points: Sequence[CurvePoint] = (), **texts: Mapping[str, object]) -> None:
        """texts: params and tags."""
        from mlflow.entities import Metric, Param, RunTag

        self._client.log_batch(
            self.run_id,
            [Metric(*point) for point in points],
            [Param(*entry) for entry in _entries(texts.get("params", {}))],
            [RunTag(*entry) for entry in _entries(texts.get("tags", {}))],
        )
        self._last_step = max([self._last_step, *(p.step for p in points if p.key == _STEP_CURVE)])

    def _log_data(self, event: Event) -> None:
        """The splits of the corpus as the run's inputs, from a "data" event. The digest is of
        settings, sizes and what the corpus is known by, not of private text."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        # A run's data sets stay what they were.
        if self._client.get_run(self.run_id).inputs.dataset_inputs:
            return  # an earlier attempt's
        given = self._run.params.items()
        source = json.dumps({k: v for k, v in given if k.startswith(("task.", "model.text."))})
        # How many texts the producers of a one-way job have, only they know.
        for split, num in (event["rows"] or {"train": None}).items():
            profile = json.dumps({"num_rows": num})
            name = f"{event['name']}, {split}"[:500]
            data = Dataset(name, event["digest"], "xcloud", source, profile=profile)
            tags = [InputTag("mlflow.data.context", split)]
            self._client.log_inputs(self.run_id, [DatasetInput(data, tags)])

    def _log_model(self, record: RunRecord, at_s: float) -> None:
        """Log the finished model with its scores, what a step took, and where its record lies.
        at_s: the time of the final values, so that none is in the run twice."""
        from mlflow.entities import LoggedModelOutput, Metric

        run = self._run
        summary = record.summary
        scores = summary.get("quality", {})
        data = summary.get("data") or {}
        corpus = data.get("name", "")
        folder = str(run.run_dir.absolute())
        note = f"Record: `{folder}` (experiment.yaml, summary.json, events.jsonl)"
        model = self._client.create_logged_model(
            self.experiment_id, re.sub(r"""[/:.%"'\s]+""", "_", run.name),
            source_run_id=self.run_id, params={"corpus": corpus[:500]}, model_type="xcloud",
            tags={**run.tags, "corpus": corpus, "run_folder": folder, "mlflow.note.content": note},
        )  # fmt: skip
        test_set = (f"{corpus}, test"[:500], data.get("digest")) if data else (None, None)
        metrics = []
        for value in final_values(record, at_s):
            # Only scores are of the test set.
            name, digest = test_set if value.key in scores else (None, None)
            if value.key in (*scores, *COSTS, "compression_ratio"):
                metrics.append(Metric(*value, model.model_id, name, digest, self.run_id))
        self._client.log_batch(self.run_id, metrics=metrics)
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(
            self.run_id, [LoggedModelOutput(model.model_id, final_step(summary))]
        )

    def _warn(self, reason: str, is_final: bool = False) -> None:
        """Warn once, however many attempts fail. is_final: sending again will not help."""
        self._trouble = reason[:400]
        if not self._warned:
            self._warned = True
            again = f"what MLflow lacks is sent again from {EVENTS_FILE} until the run ends"
            if is_final:
                again = f"its record is in the run folder alone. {self._store.remedy}"
            log.warning(
                "MLflow at %s does not accept what is logged (%s). The run continues; %s.",
                *(self._store.tracking_uri, self._trouble, again),
            )


def _entries(texts: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Long values are cut: the complete file is logged as an artifact."""
    for name, value in texts.items():
        text = json.dumps(value) if isinstance(value, list) else str(value)
        yield legal_name(name), without_password(text)[:MAX_VALUE_CHARACTERS]


def run_named_by(file: Path, store: Store, client: Any) -> dict[str, Any]:
    """Return what a file in a run folder says of a run in this store; empty if it names none.

    A run folder may come from elsewhere and name any run: what counts is a run that has the token
    which was made for both.
    """
    tracked = read_json(file)
    # A folder from elsewhere may name a run of somebody else.
    if tracked.get("store") != store.tracking_uri or not tracked.get("token"):
        return {}
    try:
        tags = client.get_run(tracked["run_id"]).data.tags
    except Exception as error:
        if not _is_refusal(error):
            raise
        return {}
    return tracked if tags.get(TOKEN_TAG) == tracked["token"] else {}


def note_of(record: RunRecord, run_dir: Path) -> str:
    """Return what a tracker shows first of a run, as Markdown: why it ended early, its closing
    table, its command, its code and where its record lies. MLflow folds all but a few lines."""
    # A command of the user's may name a secret address.
    words = [word for word in sys.argv[1:] if not word.lstrip("+").startswith("launch.on_event=")]
    command = shlex.join([Path(sys.argv[0]).name or "python", *words])
    if Path(sys.argv[0]).name == "run.py":
        command = f"python {command}"
    summary = record.summary
    lines = [
        record.markdown,
        f"`{printable(command)}`",
        f"commit {summary.get('commit')}, run folder `{run_dir.absolute()}`",
    ]
    # The reason first, as MLflow folds the note behind a few lines.
    if summary.get("cause"):
        lines.insert(0, f"{summary['status']}: {summary['cause']}")
    return "\n\n".join(filter(None, lines))


def add_figures(run_dir: Path, tracker: Tracker, figures: Mapping[str, float]) -> str:
    """Add figures that were measured after a run to its record. Return why MLflow lacks them; ""
    if it has them, or if the run was never recorded."""
    store = tracker.store
    file = run_dir / TRACKED_FILE
    if store is None or not file.exists():
        return ""
    prepare_environment()
    try:
        client = store.client()
        tracked = run_named_by(file, store=store, client=client)
        if not tracked:
            return f"{store.tracking_uri} does not have the run that {file} names"
        step = final_step(read_summary(run_dir))
        for name, value in figures.items():
            key = legal_name(name)
            there = client.get_metric_history(tracked["run_id"], key)
            # Behind the last value that is there, so that a table shows this one.
            last = max([step, *(metric.step for metric in there)])
            client.log_metric(tracked["run_id"], key, value, step=last)
    except Exception as error:  # whatever MLflow raises: the scores are in the run folder
        return f"{type(error).__name__}: {error}"
    return ""


def _is_refusal(error: Exception) -> bool:
    """Return whether a retry is pointless; otherwise the store may be down, and sending is
    retried."""
    is_lost = isinstance(error, FileNotFoundError | PermissionError)  # an artifact; no server's
    return is_lost or getattr(error, "error_code", None) in REFUSALS

"""Records of runs that outlive them: one flat MLflow run for all ranks of an experiment.
Not a place for measuring or naming: what is logged comes ready from tracked_values.py.

A tracker never delays training and never ends it. MLflow is imported, and its store opened, in
a background thread; a call of `MlflowTracker` only puts an item in a list. When the store is
down or refuses, there is one warning, and what it did not take is written to
`tracking_backlog.jsonl` in the run folder. It is tried again; the file goes when all arrived.
"""

import getpass
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from xcloud.checks import check_number
from xcloud.errors import ConfigError
from xcloud.mlflow_store import UI_HOST, UI_PORT, Store, prepare_environment
from xcloud.mlflow_view import VIEW_KEY, page, sweep_key
from xcloud.project import project_root
from xcloud.tracked_values import MAX_VALUE_CHARACTERS, final_metrics, flatten, legal_name

Status = Literal["finished", "failed", "stopped"]
Item = dict[str, Any]  # to deliver: "kind" (tags, params, metrics, artifact, status), "t", …

MLFLOW_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
MAX_PER_BATCH = 100  # params or tags
MAX_METRICS_PER_BATCH = 1000
REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST"}

RETRY_AFTER_S = 5.0
FINISH_ATTEMPTS = 3

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """start → log, artifact … → finish → places, from one thread; raises nothing after start."""

    def start(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        run_dir: Path | None = None,
    ) -> None: ...
    def log(self, metrics: Mapping[str, float], step: int) -> None: ...
    def artifact(self, path: Path) -> None: ...
    def finish(self, status: Status, summary: Mapping[str, Any]) -> None: ...
    def places(self) -> dict[str, str]:
        """Where the record lies and how to see it, label -> text; for the final table."""


@dataclass(frozen=True)
class NullTracker:
    """Keeps no record beyond the run folder."""

    def start(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        run_dir: Path | None = None,
    ) -> None:
        pass

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def artifact(self, path: Path) -> None:
        pass

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        pass

    def places(self) -> dict[str, str]:
        return {}


@dataclass
class MlflowTracker:
    """One MLflow run, in `<root>/mlflow.db` and `<root>/artifacts` or on a tracking server.

    Only settings live here until `start`, so that an Experiment which holds a tracker can be
    copied and pickled.
    """

    root: str = "mlruns"  # relative to the project
    experiment: str = "xcloud"
    uri: str | None = None  # of a tracking server; then nothing is kept under root
    flush_s: float = 1.0  # how often what was logged is sent
    finish_timeout_s: float = 30.0  # how long `finish` may wait for the store

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
        self._sender: _Sender | None = None
        self._sweep: str | None = None  # then comparisons are within it

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the store has given one."""
        return self._sender.run_id if self._sender else None

    def start(
        self,
        name: str,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        run_dir: Path | None = None,
    ) -> None:
        """params: may be nested, keys are joined by dots. run_dir: where a backlog would go."""
        assert self._sender is None, "a tracker records one run; make another for the next"
        prepare_environment()
        store = Store(project_root() / self.root, self.experiment, self.uri)
        self._sender = _Sender(store, name, Path(run_dir or Path.cwd()), self.flush_s)
        self._sweep = tags.get("sweep")
        self._sender.put(kind="tags", values=_tags(tags))
        self._sender.put(kind="params", values=flatten(params))
        self._sender.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = {legal_name(key): float(value) for key, value in metrics.items()}
        self._started().put(kind="metrics", step=step, values=values)

    def artifact(self, path: Path) -> None:
        """Keep a file or a folder; it must stay as it is until `finish` returns."""
        self._started().put(kind="artifact", path=str(Path(path).absolute()))

    def finish(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Log the final values and end the run; takes `finish_timeout_s` at most."""
        facts = {key: summary.get(key) for key in ("commit", "profile", "cause")}
        tags = {key: value for key, value in facts.items() if value is not None}
        self._started().put(kind="tags", values=_tags({"status": status, **tags}))
        self.log(final_metrics(summary), int(summary.get("num_steps") or 0))
        self._started().put(kind="status", status=MLFLOW_STATUS[status])
        self._started().close(self.finish_timeout_s)

    def places(self) -> dict[str, str]:
        sender = self._sender
        if sender is None:
            return {}
        if sender.backlog.exists():
            return {"MLflow": f"incomplete; what it did not take is in {sender.backlog}"}
        if sender.run_id is None:
            return {"MLflow": "not recorded"}
        sweep = sweep_key(self._sweep) if self._sweep else None
        if self.uri is not None:
            link = page(self.uri, sender.experiment_id, sweep)
            return {"MLflow run": f"{sender.run_id} at {self.uri}", "compare at": link}
        link = page(f"http://{UI_HOST}:{UI_PORT}", sender.experiment_id, sweep or VIEW_KEY)
        return {"MLflow run": sender.run_id, "see it with": self.ui_command, "compare at": link}

    @property
    def ui_command(self) -> str:
        """What serves a store on this machine."""
        return "python -m xcloud.ui" + ("" if self.root == "mlruns" else f" --root {self.root}")

    def _started(self) -> "_Sender":
        assert self._sender is not None, "start() comes first"
        return self._sender


class _Sender(threading.Thread):
    """Delivers items in order, batched; the only one to touch MLflow."""

    def __init__(self, store: Store, name: str, run_dir: Path, flush_s: float) -> None:
        super().__init__(name="tracking", daemon=True)
        self.run_id: str | None = None
        self.experiment_id = ""  # with the run_id
        self.backlog = _free_path(run_dir / "tracking_backlog.jsonl")
        self._store = store
        self._run_name = name
        self._flush_s = flush_s
        self._client: Any = None
        self._closing = threading.Event()
        self._guard = threading.Lock()  # for all below; never held during a call of MLflow
        self._pending: list[Item] = []
        self._num_in_backlog = 0  # how many of the pending items, from the first, are in the file
        self._backlog_is_stale = False  # it holds items that have arrived since
        self._refused: list[Item] = []
        self._warned = False
        self._abandoned = False

    def put(self, **item: object) -> None:
        with self._guard:
            self._pending.append({**item, "t": time.time()})

    def close(self, timeout_s: float) -> None:
        """Deliver what is left, or leave it in the backlog when that takes longer."""
        self._closing.set()
        self.join(timeout_s)
        with self._guard:
            if self.is_alive():
                self._abandoned = True
                self._keep_pending(f"no answer within {timeout_s:g} s")

    def run(self) -> None:
        retry_at_s = 0.0
        while not self._closing.wait(self._flush_s):
            if time.monotonic() >= retry_at_s and not self._deliver():
                retry_at_s = time.monotonic() + RETRY_AFTER_S
        # A store known to be down gets one more chance, a hiccup at the very end gets three.
        for attempts_left in reversed(range(1 if self._num_in_backlog else FINISH_ATTEMPTS)):
            if self._deliver() or self._abandoned:
                break
            if attempts_left:
                time.sleep(1.0)

    def _deliver(self) -> bool:
        """Send all that is pending; False when the store is down, and then it is all kept."""
        try:
            if self.run_id is None:
                self._create_run()
            while batch := self._next_batch():
                self._send_or_refuse(batch)
        except Exception as error:  # Whatever MLflow raises, the run goes on.
            with self._guard:
                self._keep_pending(f"{type(error).__name__}: {error}")
            return False
        with self._guard:
            self._forget_delivered()
        return True

    def _create_run(self) -> None:
        client, experiment_id = self._store.open()
        started_at_ms = int(1000 * self._pending[0]["t"])
        tags = {"mlflow.user": _user()}
        run = client.create_run(experiment_id, started_at_ms, tags, run_name=self._run_name)
        self._client, self.experiment_id = client, experiment_id
        self.run_id = run.info.run_id

    def _next_batch(self) -> list[Item]:
        """The first pending items that fit in one call: metrics of many steps, else one item."""
        with self._guard:
            if self._abandoned or not self._pending:
                return []
            length, num_metrics = 0, 0
            for item in self._pending:
                if item["kind"] != "metrics":
                    break
                num_metrics += len(item["values"])
                if num_metrics > MAX_METRICS_PER_BATCH:
                    break
                length += 1
            return self._pending[: max(length, 1)]

    def _send_or_refuse(self, batch: list[Item]) -> None:
        refusal = None
        try:
            self._send(batch)
        except Exception as error:
            if not _is_refusal(error):
                raise
            refusal = error
        with self._guard:
            if self._abandoned:  # All that was pending is in the backlog; leave it as it is.
                return
            if refusal is not None:
                self._refused += batch
                self._keep(batch[self._num_in_backlog :], refusal)
            elif self._num_in_backlog:
                self._backlog_is_stale = True
            del self._pending[: len(batch)]
            self._num_in_backlog = max(0, self._num_in_backlog - len(batch))

    def _send(self, batch: list[Item]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        item, log_batch = batch[0], self._client.log_batch
        if item["kind"] == "metrics":
            metrics = [
                Metric(key, value, int(1000 * step["t"]), step["step"])
                for step in batch
                for key, value in step["values"].items()
            ]
            for some in _cut(metrics, MAX_METRICS_PER_BATCH):
                log_batch(self.run_id, metrics=some)
        elif item["kind"] == "params":
            for some in _cut([Param(*pair) for pair in item["values"].items()], MAX_PER_BATCH):
                log_batch(self.run_id, params=some)
        elif item["kind"] == "tags":
            for some in _cut([RunTag(*pair) for pair in item["values"].items()], MAX_PER_BATCH):
                log_batch(self.run_id, tags=some)
        elif item["kind"] == "artifact":
            path = Path(item["path"])
            keep = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
            keep(self.run_id, str(path), path.name if path.is_dir() else None)
        else:
            assert item["kind"] == "status", item
            self._client.set_terminated(self.run_id, item["status"], int(1000 * item["t"]))

    def _keep_pending(self, reason: object) -> None:
        self._keep(self._pending[self._num_in_backlog :], reason)
        self._num_in_backlog = len(self._pending)

    def _keep(self, items: Sequence[Item], reason: object) -> None:
        """Append to the backlog; warn the first time."""
        if not self._warned:
            self._warned = True
            log.warning(
                "MLflow at %s does not take what is logged (%s). The run goes on; it is kept in "
                "%s and tried again.",
                *(self._store.tracking_uri, str(reason)[:400], self.backlog),
            )
        try:
            is_new = not self.backlog.exists()
            with self.backlog.open("a", encoding="utf-8") as file:
                head = {"run": self._run_name, "experiment": self._store.experiment}
                for item in [head, *items] if is_new else items:
                    file.write(json.dumps(item, ensure_ascii=False, default=str) + "\n")
        except OSError as error:
            log.warning("could not write %s: %s", self.backlog, error)

    def _forget_delivered(self) -> None:
        """All arrived in the end: only what was refused stays in the backlog."""
        if self._backlog_is_stale:
            self._backlog_is_stale = False
            self.backlog.unlink(missing_ok=True)
            if self._refused:
                self._keep(self._refused, "refused")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # A container may run under a number that has no name.
        return "unknown"


def _is_refusal(error: Exception) -> bool:
    """Whether another try is in vain; else the store may be down, and things are sent again."""
    # An artifact that went away, or may not be read. No answer of a server has these types.
    if isinstance(error, FileNotFoundError | PermissionError):
        return True
    return getattr(error, "error_code", None) in REFUSALS


def _tags(tags: Mapping[str, object]) -> dict[str, str]:
    return {legal_name(key): str(value)[:MAX_VALUE_CHARACTERS] for key, value in tags.items()}


def _cut(entries: list[Any], size: int) -> list[list[Any]]:
    return [entries[start : start + size] for start in range(0, len(entries), size)]


def _free_path(path: Path) -> Path:
    """`path`, or with a number when a run before this one left its own there."""
    number = 2
    free = path
    while free.exists():
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
        number += 1
    return free

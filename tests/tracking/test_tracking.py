"""A tracker whose store hangs, fails or refuses never delays or ends the run."""

import json
import logging
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.event_lines import append_event, append_step
from tests.logged import Log
from tests.runs import wait_for
from xcloud.base.errors import ConfigError
from xcloud.record.events import EVENTS_FILE, StepCollector
from xcloud.record.run_record import RunRecord
from xcloud.study.report import main as report_command
from xcloud.tracking.mlflow_store import Store
from xcloud.tracking.tracker import (
    REPLACED_FILE,
    TOKEN_TAG,
    TRACKED_FILE,
    MlflowSender,
    MlflowTracker,
    NullTracker,
    TrackedRun,
    Tracker,
)

pytestmark = pytest.mark.xdist_group("mlflow")  # one process imports it, not each

CONF = Path(__file__).parents[2] / "conf" / "tracker"
SUMMARY = {"commit": "1a2b3c4", "num_steps": 3, "quality": {"bleu": 41.92}}


def tracked(run_dir: Path, **more: Any) -> TrackedRun:
    """A run of one rank."""
    told = {"params": {"rate": 0.6}, "tags": {"sweep": "s"}, "num_steps": 10, **more}
    return TrackedRun("a", run_dir=run_dir, steps=StepCollector(1), **told)


class FakeClient:
    """Takes what MlflowClient would take; `refuse` may raise instead."""

    def __init__(self, refuse: Callable[[str, Any], None] = lambda call, value: None) -> None:
        self.refuse = refuse
        self.calls: list[tuple[str, Any]] = []
        self.tags: dict[str, str] = {}

    def create_run(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="id-of-the-run"))

    def search_runs(self, experiment_ids: list[str], chosen: str) -> list[Any]:
        return []

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.tags[key] = value

    def update_run(self, run_id: str, status: str) -> None:
        assert run_id == "id-of-the-run", "there is no other"
        self._take("reopened", status)

    def get_run(self, run_id: str) -> Any:
        latest = {name: value for batch in self.taken("metrics") for name, _, value in batch}
        inputs = SimpleNamespace(dataset_inputs=self.taken("inputs"))
        data = SimpleNamespace(metrics=latest, tags=self.tags)
        return SimpleNamespace(data=data, inputs=inputs)

    def delete_tag(self, run_id: str, key: str) -> None:
        del self.tags[key]

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return [SimpleNamespace(step=step) for step, _ in self.curve(key)]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        self._take("metrics", [(metric.key, metric.step, metric.value) for metric in metrics])
        self._take("params", [(param.key, param.value) for param in params])
        self._take("tags", [(tag.key, tag.value) for tag in tags])
        self.tags |= {tag.key: tag.value for tag in tags}

    def log_artifact(self, run_id: str, path: str, artifact_path: str | None = None) -> None:
        self._take("artifact", Path(path).read_text() and path)

    def create_logged_model(self, experiment_id: str, name: str, **more: Any) -> Any:
        self._take("model", name)
        return SimpleNamespace(model_id="m-1")

    def finalize_logged_model(self, model_id: str, status: str) -> None:
        self._take("model", status)

    def log_outputs(self, run_id: str, models: Any) -> None:
        self._take("outputs", [(one.model_id, one.step) for one in models])

    def log_inputs(self, run_id: str, datasets: Any) -> None:
        self._take("inputs", [one.dataset.name for one in datasets])

    def set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        self._take("status", status)

    def _take(self, call: str, value: Any) -> None:
        if value:
            self.refuse(call, value)
            self.calls.append((call, value))

    def taken(self, call: str) -> list[Any]:
        return [value for name, value in self.calls if name == call]

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(step, value) in the order in which they came."""
        found = [entry for batch in self.taken("metrics") for entry in batch]
        return [(step, value) for name, step, value in found if name == key]


def refuse_while(is_down: threading.Event) -> Callable[[str, Any], None]:
    """What a store does that is down now and then."""

    def refuse(call: str, value: Any) -> None:
        if is_down.is_set():
            raise ConnectionError("down")

    return refuse


def open_with(client: FakeClient) -> Callable[..., tuple[FakeClient, str]]:
    return lambda store: (client, "1")


def test_store_that_hangs_delays_no_call_and_what_it_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    answered, gave_up = threading.Event(), threading.Event()

    def hang(store: Store) -> Any:
        if not answered.wait(60):
            gave_up.set()
        raise RuntimeError("too late to matter")

    monkeypatch.setattr(Store, "open", hang)
    tracker = MlflowTracker(uri="http://down:1", flush_s=0.01, finish_timeout_s=0.3).start(
        tracked(tmp_path)
    )
    append_step(tmp_path, 1, 1.0)
    tracker.artifact(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        tracker.finish("failed", RunRecord(SUMMARY))
    assert not gave_up.is_set(), "a call waited for the store"
    said = tracker.places()
    answered.set()
    for thread in threading.enumerate():  # else it goes on with the store of another test
        if thread.name == "tracking":
            thread.join(30)
    assert said == {"MLflow lacks": "everything (no answer within 0.3 s)"}
    assert len(caplog.records) == 1 and "no answer within 0.3 s" in caplog.text


def test_what_a_store_missed_arrives_once_and_in_order_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    """Down from the second step to the fourth, so the event file is all that is left of them."""
    is_down = threading.Event()
    failed = threading.Semaphore(0)

    def refuse(call: str, value: Any) -> None:
        if is_down.is_set():
            failed.release()
            raise ConnectionError("down")

    client = FakeClient(refuse)
    monkeypatch.setattr(Store, "open", open_with(client))
    monkeypatch.setattr("xcloud.tracking.tracker.RETRY_AFTER_S", 0.01)
    with caplog.at_level(logging.WARNING):
        tracker = MlflowTracker(uri="http://down:1", flush_s=0.01).start(tracked(tmp_path))
        append_step(tmp_path, 1, 1.0)
        wait_for(lambda: client.curve("train/loss") == [(1, 1.0)])
        is_down.set()
        for number in (2, 3, 4):
            append_step(tmp_path, number, float(number))
            assert failed.acquire(timeout=30)
        is_down.clear()
        wait_for(lambda: len(client.curve("train/loss")) == 4)
        append_step(tmp_path, 5, 5.0)
        tracker.finish("finished", RunRecord(SUMMARY))

    assert len(caplog.records) == 1  # one warning for many failed attempts
    assert client.curve("train/loss") == [(number, float(number)) for number in range(1, 6)]
    assert client.taken("params") == [[("rate", "0.6")]]
    assert client.calls[-1] == ("status", "FINISHED")
    assert tracker.places()["MLflow run"].startswith("id-of-the-run")
    assert "MLflow lacks" not in tracker.places()


def test_a_store_that_stays_down_lacks_what_came_after_the_last_step_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_down = threading.Event()
    client = FakeClient(refuse_while(is_down))
    monkeypatch.setattr(Store, "open", open_with(client))
    monkeypatch.setattr("xcloud.tracking.tracker.FINISH_ATTEMPTS", 1)
    tracker = MlflowTracker(uri="http://down:1", flush_s=0.01).start(tracked(tmp_path))
    append_step(tmp_path, 1, 1.0)
    wait_for(lambda: len(client.curve("train/loss")) == 1)
    is_down.set()
    append_step(tmp_path, 2, 2.0)
    tracker.finish("finished", RunRecord(SUMMARY))

    said = tracker.places()
    assert said["MLflow lacks"] == "all after step 1 (ConnectionError: down)"
    assert said["MLflow run"] == "id-of-the-run at http://down:1"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "events.jsonl", "mlflow_run.json"
    ]  # fmt: skip


def test_refused_value_and_lost_file_are_said_and_the_rest_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    class Refusal(Exception):
        error_code = "INVALID_PARAMETER_VALUE"

    def refuse(call: str, value: Any) -> None:
        if call == "params":
            raise Refusal("changing param values is not allowed")

    client = FakeClient(refuse)
    monkeypatch.setattr(Store, "open", open_with(client))
    tracker = MlflowTracker(uri="http://down:1", flush_s=0.02).start(tracked(tmp_path))
    tracker.artifact(tmp_path / "never written")
    append_step(tmp_path, 1, 1.0)
    with caplog.at_level(logging.WARNING):
        tracker.finish("stopped", RunRecord(SUMMARY))

    lacks = "parameters, which it refused; never written, which it refused"
    assert tracker.places()["MLflow lacks"] == lacks
    assert len(caplog.records) <= 1
    assert client.curve("train/loss") == [(1, 1.0)]
    assert client.calls[-1] == ("status", "KILLED")


def test_failed_run_has_its_cause_as_a_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()
    monkeypatch.setattr(Store, "open", open_with(client))
    tracker = MlflowTracker(uri="http://down:1", flush_s=0.02).start(tracked(tmp_path, tags={}))
    tracker.finish("failed", RunRecord({"cause": "rank 1 died", "num_steps": 0}))

    tags = dict(pair for batch in client.taken("tags") for pair in batch)
    assert len(tags.pop(TOKEN_TAG)) == 32
    assert tags == {"status": "failed", "cause": "rank 1 died"}
    assert client.calls[-1] == ("status", "FAILED")


def test_the_first_load_is_measured_and_the_run_lists_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[int] = set()

    def cpu_percent() -> float:  # as psutil's, whose first answer to a thread means nothing
        is_first = threading.get_ident() not in asked
        asked.add(threading.get_ident())
        return 0.0 if is_first else 50.0

    client = FakeClient()
    monkeypatch.setattr(Store, "open", open_with(client))
    monkeypatch.setattr("xcloud.tracking.tracker.psutil.cpu_percent", cpu_percent)
    tracker = MlflowTracker(uri="http://down:1", flush_s=0.02).start(tracked(tmp_path))
    tracker.finish("finished", RunRecord(SUMMARY))

    assert [load for _, load in client.curve("system/cpu_utilization_percentage")][:1] == [50.0]
    assert client.taken("outputs") == [[("m-1", 3)]]


def test_many_steps_travel_in_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    monkeypatch.setattr(Store, "open", open_with(client))
    params = {str(index): index for index in range(250)}
    tracker = MlflowTracker(uri="http://down:1", flush_s=0.2).start(
        tracked(tmp_path, params=params)
    )
    values = {str(index): 0.0 for index in range(7)}
    for number in range(500):
        append_step(tmp_path, number, None, values=values)
    tracker.finish("finished", RunRecord(SUMMARY))

    assert [len(batch) for batch in client.taken("params")] == [250]  # MLflow cuts them up
    curves = [
        [entry for entry in batch if not entry[0].startswith("system/")]
        for batch in client.taken("metrics")[:-1]  # the last one is of the model
    ]
    sizes = [len(batch) for batch in curves]
    assert max(sizes) <= 1100 and len(sizes) <= 14
    assert len(client.curve("train/3")) == 500
    num_of_a_step = 7 + len(("step_s", "compute_s", "codec_s", "waiting_s"))
    assert sum(sizes) == 500 * num_of_a_step + len(RunRecord(SUMMARY).metrics)


@pytest.mark.parametrize("name", ["mlflow", "none"])
def test_config_file_is_one_constructor_call(name: str) -> None:
    from omegaconf import OmegaConf

    from xcloud.job.config import build

    tracker: Tracker = build(OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml")))
    assert tracker == {"mlflow": MlflowTracker(), "none": NullTracker()}[name]
    assert pickle.loads(pickle.dumps(tracker)) == tracker


@pytest.mark.parametrize(
    "settings",
    [
        {"uri": "some/folder"},
        {"experiment": ""},
        {"flush_s": 0},
        {"finish_timeout_s": "long"},
        {"points": 10},
    ],
)
def test_setting_that_makes_no_sense_is_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"tracker.{next(iter(settings))}|tracker.experiment"):
        MlflowTracker(**settings)


def test_importing_the_readers_imports_neither_mlflow_nor_torch() -> None:
    modules = "record.events record.summary show.tables tracking.tracker base.project __main__"
    code = f"""
import importlib, sys
for name in {modules.split()}:
    importlib.import_module("xcloud." + name)
heavy = {{"mlflow", "torch", "rich", "rich.table"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_that_goes_on_does_so_in_its_own_mlflow_run_without_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()
    monkeypatch.setattr("xcloud.tracking.mlflow_store.Store.open", lambda *_: (client, "1"))

    def attempt(*steps: int, resume: int | None = None, rate: float = 0.6) -> MlflowSender:
        tracker = MlflowTracker(uri="http://down:1", flush_s=0.01).start(
            tracked(tmp_path, params={"rate": rate})
        )
        if resume is not None:
            append_event(tmp_path / EVENTS_FILE, "resume", rank=0, cloud="c", step=resume)
        for number in steps:
            append_step(tmp_path, number, float(number))
            scores = {"split": "dev", "step": number, "values": {"bleu": 1.0}}
            append_event(tmp_path / EVENTS_FILE, "quality", rank=0, cloud="c", **scores)
        scores["split"] = "test"
        append_event(tmp_path / EVENTS_FILE, "quality", rank=0, cloud="c", **scores)
        stopped = {"cause": "interrupted"} if resume is None else {}
        tracker.finish("stopped" if stopped else "finished", RunRecord({**SUMMARY, **stopped}))
        return tracker

    attempt(1, 2, 3)
    assert client.tags["cause"] == "interrupted"
    second = attempt(3, 4, resume=2, rate=0.7)
    assert client.tags["status"] == "finished" and "cause" not in client.tags

    assert second.run_id == "id-of-the-run" and client.taken("reopened") == ["RUNNING"]
    assert client.curve("train/loss") == [(n, float(n)) for n in (1, 2, 3, 4)]
    assert [n for n, _ in client.curve("dev/bleu")] == [1, 2, 3, 4]
    assert not client.curve("test/bleu"), "it is a final value: a chart of one point hid the loss"
    assert client.taken("params") == [[("rate", "0.6")]]


def test_a_resumed_run_shows_the_last_attempts_figures_and_what_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow shows the value of the highest step as the latest, and cannot change a parameter."""
    client = FakeClient()
    monkeypatch.setattr("xcloud.tracking.mlflow_store.Store.open", lambda *_: (client, "1"))

    def attempt(number: int, params: dict[str, Any], **figures: Any) -> None:
        run = tracked(tmp_path, params=params)
        tracker = MlflowTracker(uri="http://down:1", flush_s=0.01).start(run)
        record = RunRecord({"num_resumes": number, "quality": {}, **figures})
        tracker.finish("stopped", record, f"note {number}")

    attempt(0, {"rate": 0.6, "steps": 30}, num_steps=30, final_loss=6.0, quality={"bleu": 1.0})
    attempt(1, {"rate": 0.1, "steps": 30, "codec": "int4"}, num_steps=20, final_loss=2.8)
    latest = {name: max(client.curve(name))[1] for name in ("num_steps", "final_loss")}
    assert latest == {"num_steps": 20, "final_loss": 2.8}
    assert math.isnan(client.curve("bleu")[-1][1])
    assert client.taken("params") == [[("rate", "0.6"), ("steps", "30")]]
    resumed = {tag: text for tag, text in client.tags.items() if tag.startswith("resumed.")}
    assert resumed == {"resumed.rate": "0.1", "resumed.codec": "int4"}
    assert client.tags["mlflow.note.content"] == "note 1"

    attempt(2, {"rate": 0.6, "steps": 30}, num_steps=25, final_loss=2.5)
    assert not [tag for tag in client.tags if tag.startswith("resumed.")]
    assert max(client.curve("num_steps"))[1] == 25


@pytest.mark.parametrize("token", ["", "guessed"])
def test_a_file_from_elsewhere_cannot_name_somebody_elses_run(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()
    client.tags[TOKEN_TAG] = "the victim's"
    client.delete_run = lambda run_id: pytest.fail("deleted")  # type: ignore[attr-defined]
    monkeypatch.setattr("xcloud.tracking.mlflow_store.Store.open", lambda *_: (client, "1"))
    tracker = MlflowTracker(uri="http://down:1", flush_s=0.01)
    for file in (TRACKED_FILE, REPLACED_FILE):
        named = {"run_id": "id-of-the-run", "store": tracker.store.tracking_uri, "token": token}
        (tmp_path / file).write_text(json.dumps(named))
    sender = tracker.start(tracked(tmp_path))
    sender.finish("finished", RunRecord(SUMMARY))
    assert "MLflow lacks" not in sender.places()
    assert client.taken("reopened") == []  # a run of its own was made


@pytest.mark.parametrize("uri", ["http://user:pa55word@mlflow.here:5000", "https://token@here/x"])
def test_an_address_with_a_password_is_refused_without_repeating_it(uri: str) -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        MlflowTracker(uri=uri)
    assert "pa55word" not in str(refused.value) and "token@" not in str(refused.value)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD"):
        report_command(["some", "--uri", uri])


def test_a_long_run_has_few_points_the_same_ones_after_an_outage_and_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_down = threading.Event()

    def attempt(client: FakeClient, folder: Path, steps: range, is_killed: bool) -> None:
        monkeypatch.setattr(Store, "open", open_with(client))
        tracker = MlflowTracker(uri="http://down:1", flush_s=0.01, points=500).start(
            tracked(folder, num_steps=1500)
        )
        for step in steps:
            loss = 99.0 if step in (650, 1221) else 1.0 / step
            append_step(folder, step, loss, t=float(step))
        if is_killed:  # else MLflow would hear of an end
            wait_for(lambda: is_down.is_set() or tracker._until.get("train/step_s") == steps[-1])
            is_down.set()
        tracker.finish("finished", RunRecord(SUMMARY))

    monkeypatch.setattr("xcloud.tracking.tracker.FINISH_ATTEMPTS", 1)
    whole, broken = FakeClient(refuse_while(is_down)), FakeClient(refuse_while(is_down))
    (tmp_path / "whole").mkdir()
    attempt(whole, tmp_path / "whole", range(1, 1501), is_killed=False)
    attempt(broken, tmp_path, range(1, 634), is_killed=True)
    attempt(broken, tmp_path, range(634, 877), is_killed=True)  # MLflow is down all the time
    is_down.clear()
    attempt(broken, tmp_path, range(877, 1501), is_killed=False)

    curve = whole.curve("train/loss")
    assert 200 < len(curve) <= 500 and dict(curve)[650] == dict(curve)[1221] == 99.0
    assert curve[-1] == (1500, 1.0 / 1500)
    assert broken.curve("train/loss") == curve

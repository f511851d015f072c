"""The record of a run in MLflow, and that it never delays or ends the run."""

import json
import logging
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xcloud.errors import ConfigError
from xcloud.mlflow_store import VIEW_TAG, Store
from xcloud.tracked_values import final_metrics
from xcloud.tracking import MlflowTracker, NullTracker, Tracker

CONF = Path(__file__).parent.parent / "conf" / "tracker"
SUMMARY = {"commit": "1a2b3c4", "num_steps": 3, "quality": {"bleu": 41.92}}


def query(root: Path, text: str) -> list[tuple[Any, ...]]:
    database = sqlite3.connect(root / "mlflow.db")
    try:
        return database.execute(text).fetchall()
    finally:
        database.close()


def backlog_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "tracking_backlog.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


class FakeClient:
    """Takes what MlflowClient would take; `refuse` may raise instead."""

    def __init__(self, refuse: Callable[[str, Any], None] = lambda call, value: None) -> None:
        self.refuse = refuse
        self.calls: list[tuple[str, Any]] = []

    def create_run(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="id-of-the-run"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        self._take("metrics", [(metric.key, metric.step, metric.value) for metric in metrics])
        self._take("params", [(param.key, param.value) for param in params])
        self._take("tags", [(tag.key, tag.value) for tag in tags])

    def log_artifact(self, run_id: str, path: str, artifact_path: str | None = None) -> None:
        self._take("artifact", Path(path).read_text() and path)

    def set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        self._take("status", status)

    def _take(self, call: str, value: Any) -> None:
        if value:
            self.refuse(call, value)
            self.calls.append((call, value))

    def taken(self, call: str) -> list[Any]:
        return [value for name, value in self.calls if name == call]


def open_with(client: FakeClient) -> Callable[[Store], tuple[FakeClient, str]]:
    return lambda store: (client, "1")


# The real store


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MlflowTracker]:
    """A finished run in a store made for it, in a folder with a blank in its name."""
    os.environ["MLFLOW_RUN_ID"] = "of another tool"
    root = tmp_path_factory.mktemp("my runs") / "mlruns"
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "samples.txt").write_text("hola -> hello")
    tracker = MlflowTracker(root=str(root), flush_s=0.05)
    tracker.start(
        "fp16_svd@0.6",
        {"compression": {"forward": {"rate": 0.6}}, "long": "x" * 10_000},
        {"sweep": "s1"},
        run_dir,
    )
    for step in range(1, 4):
        tracker.log({"train/loss": 1 / step, "train/step_s": 0.1}, step)
    tracker.artifact(run_dir / "samples.txt")
    tracker.artifact(run_dir)
    tracker.finish("finished", {**SUMMARY, "profile": "demo"})
    assert not list(run_dir.glob("tracking_backlog*"))
    return root, tracker


def test_run_is_in_the_store_with_parameters_tags_curves_and_final_values(
    recorded: tuple[Path, MlflowTracker],
) -> None:
    root, tracker = recorded
    assert query(root, "SELECT run_uuid, name, status FROM runs") == [
        (tracker.run_id, "fp16_svd@0.6", "FINISHED")
    ]
    params = dict(query(root, "SELECT key, value FROM params"))
    assert params == {"compression.forward.rate": "0.6", "long": "x" * 6000}
    tags = dict(query(root, "SELECT key, value FROM tags"))
    assert tags["sweep"] == "s1" and tags["status"] == "finished"
    assert tags["commit"] == "1a2b3c4" and tags["profile"] == "demo"
    curve = query(root, "SELECT step, value FROM metrics WHERE key = 'train/loss' ORDER BY step")
    assert curve == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert query(root, "SELECT step, value FROM metrics WHERE key = 'bleu'") == [(3, 41.92)]


def test_artifacts_lie_in_the_folder_of_the_store(recorded: tuple[Path, MlflowTracker]) -> None:
    root, tracker = recorded
    folder = root / "artifacts" / str(tracker.run_id) / "artifacts"
    assert (folder / "samples.txt").read_text() == "hola -> hello"
    assert len(list(folder.glob("*/samples.txt"))) == 1  # the folder under its own name


def test_table_is_told_the_run_and_the_command_to_see_it(
    recorded: tuple[Path, MlflowTracker],
) -> None:
    root, tracker = recorded
    page = "http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning"
    assert tracker.places() == {
        "MLflow run": tracker.run_id,
        "see it with": f"python -m xcloud.ui --root {root}",
        "compare at": f"{page}&viewStateShareKey=sweep-s1",
    }


def test_environment_is_clean_and_telemetry_off(recorded: object) -> None:
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert "MLFLOW_RUN_ID" not in os.environ


def test_view_with_our_columns_is_prepared(recorded: tuple[Path, MlflowTracker]) -> None:
    tags = dict(query(recorded[0], "SELECT key, value FROM experiment_tags"))
    assert "metrics.`bleu`" in json.loads(tags[VIEW_TAG])["selectedColumns"]


def test_artifacts_are_found_again_after_the_project_has_moved(
    recorded: tuple[Path, MlflowTracker], tmp_path: Path
) -> None:
    old, tracker = recorded
    new = tmp_path / "moved"
    new.mkdir()
    (new / "mlflow.db").write_bytes((old / "mlflow.db").read_bytes())

    Store(new).follow_move()
    location = (new / "artifacts").as_uri()
    assert query(new, "SELECT artifact_location FROM experiments WHERE name = 'xcloud'") == [
        (location,)
    ]
    assert query(new, "SELECT artifact_uri FROM runs") == [
        (f"{location}/{tracker.run_id}/artifacts",)
    ]
    assert Store(new).experiments() == {"1": "xcloud"}


START_A_RUN = """
import sys
from pathlib import Path
from xcloud.tracking import MlflowTracker

root, number = sys.argv[1:]
tracker = MlflowTracker(root=root, finish_timeout_s=120)
tracker.start(f"run {number}", {"number": number}, {"sweep": "s"}, Path(root).parent)
tracker.log({"train/loss": float(number)}, 1)
tracker.finish("finished", {"num_steps": 1})
assert tracker.run_id, "not recorded"
"""


@pytest.mark.slow
def test_four_runs_may_create_the_store_at_the_same_time(tmp_path: Path) -> None:
    root = tmp_path / "mlruns"
    command = [sys.executable, "-c", START_A_RUN, str(root)]
    runs = [subprocess.Popen([*command, str(number)]) for number in range(4)]

    assert [run.wait(200) for run in runs] == [0, 0, 0, 0]
    assert query(root, "SELECT name, status FROM runs ORDER BY name") == [
        (f"run {number}", "FINISHED") for number in range(4)
    ]
    assert not list(tmp_path.glob("tracking_backlog*"))


# A store in trouble


def test_store_that_hangs_delays_no_call_and_leaves_all_in_the_backlog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered, gave_up = threading.Event(), threading.Event()

    def hang(store: Store) -> Any:
        if not answered.wait(60):
            gave_up.set()
        raise RuntimeError("too late to matter")

    monkeypatch.setattr(Store, "open", hang)
    tracker = MlflowTracker(flush_s=0.01, finish_timeout_s=0.3)
    tracker.start("a", {"rate": 0.6}, {}, tmp_path)
    tracker.log({"train/loss": 1.0}, 1)
    tracker.artifact(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        tracker.finish("failed", SUMMARY)
    assert not gave_up.is_set(), "a call waited for the store"
    answered.set()
    kinds = [item.get("kind", "head") for item in backlog_of(tmp_path)]
    assert kinds == ["head", *("tags params metrics artifact tags metrics status".split())]
    assert len(caplog.records) == 1 and "no answer within 0.3 s" in caplog.text
    assert "incomplete" in tracker.places()["MLflow"]


def test_what_a_store_missed_arrives_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_down = True
    seen_backlog = False

    def refuse(call: str, value: Any) -> None:
        nonlocal seen_backlog
        seen_backlog = seen_backlog or (tmp_path / "tracking_backlog.jsonl").exists()
        if is_down:
            raise ConnectionError("down")

    client = FakeClient(refuse)
    monkeypatch.setattr(Store, "open", open_with(client))
    monkeypatch.setattr("xcloud.tracking.RETRY_AFTER_S", 0.05)
    tracker = MlflowTracker(flush_s=0.02)
    with caplog.at_level(logging.WARNING):
        tracker.start("a", {"rate": 0.6}, {"sweep": "s"}, tmp_path)
        for step in range(1, 4):
            tracker.log({"train/loss": float(step)}, step)
            time.sleep(0.1)
        is_down = False
        tracker.finish("finished", SUMMARY)

    assert len(caplog.records) == 1  # one warning for many failed attempts
    assert seen_backlog and not (tmp_path / "tracking_backlog.jsonl").exists()
    assert client.taken("params") == [[("rate", "0.6")]]
    metrics = [entry for batch in client.taken("metrics") for entry in batch]
    assert metrics[:3] == [("train/loss", step, float(step)) for step in (1, 2, 3)]
    assert client.calls[-1] == ("status", "FINISHED")
    assert tracker.places()["MLflow run"] == "id-of-the-run"


def test_refused_value_and_lost_file_stay_in_the_backlog_and_the_rest_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusal(Exception):
        error_code = "INVALID_PARAMETER_VALUE"

    def refuse(call: str, value: Any) -> None:
        if call == "params":
            raise Refusal("changing param values is not allowed")

    client = FakeClient(refuse)
    monkeypatch.setattr(Store, "open", open_with(client))
    tracker = MlflowTracker(flush_s=0.02)
    tracker.start("a", {"rate": 0.6}, {"sweep": "s"}, tmp_path)
    tracker.artifact(tmp_path / "never written")
    tracker.log({"train/loss": 1.0}, 1)
    with caplog.at_level(logging.WARNING):
        tracker.finish("stopped", SUMMARY)

    kinds = [item.get("kind", "head") for item in backlog_of(tmp_path)]
    assert kinds == ["head", "params", "artifact"]
    assert len(caplog.records) <= 1
    assert client.taken("metrics")[0] == [("train/loss", 1, 1.0)]
    assert client.calls[-1] == ("status", "KILLED")


def test_backlog_of_an_earlier_run_in_the_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tracking_backlog.jsonl").write_text("of the run before\n")
    monkeypatch.setattr(Store, "open", open_with(FakeClient()))
    tracker = MlflowTracker(flush_s=0.02)
    tracker.start("a", {}, {}, tmp_path)
    tracker.finish("finished", SUMMARY)

    assert (tmp_path / "tracking_backlog.jsonl").read_text() == "of the run before\n"
    assert "MLflow run" in tracker.places()


def test_failed_run_has_its_cause_as_a_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()
    monkeypatch.setattr(Store, "open", open_with(client))
    tracker = MlflowTracker(flush_s=0.02)
    tracker.start("a", {}, {}, tmp_path)
    tracker.finish("failed", {"cause": "rank 1 died", "num_steps": 0})

    tags = dict(pair for batch in client.taken("tags") for pair in batch)
    assert tags == {"status": "failed", "cause": "rank 1 died"}
    assert client.calls[-1] == ("status", "FAILED")


def test_many_steps_travel_in_few_calls_of_a_size_that_mlflow_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()
    monkeypatch.setattr(Store, "open", open_with(client))
    tracker = MlflowTracker(flush_s=0.2)
    tracker.start("a", {str(index): index for index in range(250)}, {}, tmp_path)
    for step in range(500):
        tracker.log({f"train/{index}": 0.0 for index in range(7)}, step)
    tracker.finish("finished", SUMMARY)

    assert [len(batch) for batch in client.taken("params")] == [100, 100, 50]
    sizes = [len(batch) for batch in client.taken("metrics")]
    assert max(sizes) <= 1000 and len(sizes) <= 7
    assert sum(sizes) == 500 * 7 + len(final_metrics(SUMMARY))


# Settings


@pytest.mark.parametrize("name", ["mlflow", "none"])
def test_config_file_is_one_constructor_call(name: str) -> None:
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    tracker: Tracker = instantiate(OmegaConf.load(CONF / f"{name}.yaml"))
    assert tracker == {"mlflow": MlflowTracker(), "none": NullTracker()}[name]
    assert tracker.places() == {}
    assert pickle.loads(pickle.dumps(tracker)) == tracker


@pytest.mark.parametrize(
    "settings",
    [{"uri": "some/folder"}, {"experiment": ""}, {"flush_s": 0}, {"finish_timeout_s": "long"}],
)
def test_setting_that_makes_no_sense_is_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"tracker.{next(iter(settings))}|tracker.experiment"):
        MlflowTracker(**settings)


def test_importing_the_readers_imports_neither_mlflow_nor_torch() -> None:
    modules = "events progress summary report_table tracking tracked_values ui project".split()
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module("xcloud." + name)
heavy = {{"mlflow", "torch", "rich", "rich.table"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)

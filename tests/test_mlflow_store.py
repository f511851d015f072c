"""The record of a run in a real MLflow store."""

import json
import os
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.event_lines import append_event, append_step
from tests.runs import command
from tests.sweep_runs import blank_store
from xcloud.record.events import EVENTS_FILE, StepCollector
from xcloud.tracking.mlflow_store import VIEW_TAG, Store, links, view_of
from xcloud.tracking.tracker import (
    REPLACED_FILE,
    TRACKED_FILE,
    MlflowSender,
    MlflowTracker,
    TrackedRun,
)

pytestmark = pytest.mark.xdist_group("mlflow")  # one process imports it, not each

SUMMARY: dict[str, Any] = {
    "commit": "1a2b3c4",
    "num_steps": 3,
    "quality": {"bleu": 41.92},
    "profile": "demo",
    "data": {"name": "stories", "digest": "d1", "rows": {"train": 8, "test": 2}},
}


def query(root: Path, text: str) -> list[tuple[Any, ...]]:
    database = sqlite3.connect(root / "mlflow.db")
    try:
        return database.execute(text).fetchall()
    finally:
        database.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MlflowSender]:
    """A finished run in a store made for it, in a folder whose name no URL can hold as it is."""
    os.environ["MLFLOW_RUN_ID"] = "of another tool"
    root = tmp_path_factory.mktemp("my runs") / "50%20 ü? #1" / "mlruns"
    blank_store(root)
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "samples.txt").write_text("hola -> hello")
    tracker = MlflowTracker(root=str(root), flush_s=0.05).start(
        TrackedRun(
            "fp16_svd@0.6",
            {"compression.forward.rate": 0.6, "layers": [1, 2], "long": "x" * 10_000},
            {"sweep": "s1"},
            run_dir,
            StepCollector(1),
            9,
        )
    )
    append_event(run_dir / EVENTS_FILE, "data", rank=0, cloud="c", **SUMMARY["data"])
    for number in range(1, 4):
        append_step(run_dir, number, 1 / number)
    scores = {"split": "dev", "step": 3, "values": {"bleu": 40.0}}
    append_event(run_dir / EVENTS_FILE, "quality", rank=0, cloud="c", **scores)
    tracker.artifact(run_dir / "samples.txt")
    tracker.finish("finished", SUMMARY)
    assert "MLflow lacks" not in tracker.places()
    return root, tracker


def test_run_is_in_the_store_with_parameters_tags_curves_and_final_values(
    recorded: tuple[Path, MlflowSender],
) -> None:
    root, tracker = recorded
    assert query(root, "SELECT run_uuid, name, status FROM runs") == [
        (tracker.run_id, "fp16_svd@0.6", "FINISHED")
    ]
    params = dict(query(root, "SELECT key, value FROM params"))
    assert params == {
        "compression.forward.rate": "0.6", "layers": "[1, 2]", "long": "x" * 6000
    }  # fmt: skip
    tags = dict(query(root, "SELECT key, value FROM tags"))
    assert tags["sweep"] == "s1" and tags["status"] == "finished"
    assert tags["commit"] == "1a2b3c4" and tags["profile"] == "demo"
    curve = query(root, "SELECT step, value FROM metrics WHERE key = 'train/loss' ORDER BY step")
    assert curve == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert query(root, "SELECT step, value FROM metrics WHERE key = 'bleu'") == [(3, 41.92)]
    assert query(root, "SELECT step, value FROM metrics WHERE key = 'dev/bleu'") == [(3, 40.0)]


def test_the_corpus_is_an_input_and_the_model_has_its_scores(
    recorded: tuple[Path, MlflowSender],
) -> None:
    root, tracker = recorded
    client = Store(root, "xcloud").client()
    splits = client.get_run(tracker.run_id).inputs.dataset_inputs
    assert {(i.dataset.name, i.dataset.digest, i.tags[0].value) for i in splits} == {
        ("stories, train", "d1", "train"), ("stories, test", "d1", "test"),
    }  # fmt: skip
    (model,) = client.search_logged_models([tracker.experiment_id], "metrics.bleu > 41")
    assert model.source_run_id == tracker.run_id and model.tags["corpus"] == "stories"
    assert model.tags["run_folder"] in model.tags["mlflow.note.content"], "its page shows it"
    assert {m.key: (m.value, m.dataset_name) for m in model.metrics}["bleu"] == (
        41.92, "stories, test",
    )  # fmt: skip


def test_artifacts_lie_in_the_folder_of_the_store(recorded: tuple[Path, MlflowSender]) -> None:
    root, tracker = recorded
    folder = root / "artifacts" / str(tracker.run_id) / "artifacts"
    assert (folder / "samples.txt").read_text() == "hola -> hello"


def test_table_is_told_the_run_and_the_command_to_see_it(
    recorded: tuple[Path, MlflowSender],
) -> None:
    root, tracker = recorded
    page = "http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning"
    assert tracker.places() == {
        "MLflow run": tracker.run_id,
        "see it with": f"python -m xcloud ui --root {root}",
        "compare at": f"{page}&viewStateShareKey=sweep-s1",
    }


def test_environment_is_clean_and_telemetry_off(recorded: object) -> None:
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert "MLFLOW_RUN_ID" not in os.environ


def test_view_with_our_columns_is_prepared(recorded: tuple[Path, MlflowSender]) -> None:
    tags = dict(query(recorded[0], "SELECT key, value FROM experiment_tags"))
    assert "metrics.`bleu`" in json.loads(tags[VIEW_TAG + view_of(None)])["selectedColumns"]


def test_artifacts_are_found_again_after_the_project_has_moved(
    recorded: tuple[Path, MlflowSender], tmp_path: Path
) -> None:
    old, tracker = recorded
    new = shutil.copytree(old, tmp_path / "moved")

    location = f"mlflow-artifacts:/{tracker.run_id}/artifacts"  # relative to the server
    assert query(new, "SELECT artifact_uri FROM runs") == [(location,)]
    (folder,) = Store(new).artifacts_of_sweep("s1")
    assert (folder / "samples.txt").read_text() == "hola -> hello"


def test_a_point_that_begins_again_is_one_row(tmp_path: Path) -> None:
    root, rows = tmp_path / "mlruns", []
    blank_store(root)
    for name in ("first", "again"):
        run_dir = tmp_path / name
        run_dir.mkdir()
        if rows:
            (run_dir / REPLACED_FILE).write_text((tmp_path / "first" / TRACKED_FILE).read_text())
        run = TrackedRun("int8 s1", {}, {"sweep": "s"}, run_dir, StepCollector(1), 9)
        tracker = MlflowTracker(root=str(root)).start(run)
        append_step(run_dir, 1, 0.5)
        tracker.finish("finished" if rows else "stopped", SUMMARY)
        assert "MLflow lacks" not in tracker.places()
        client, experiment_id = Store(root).open()
        rows = [run.info.run_id for run in client.search_runs([experiment_id])]
        assert rows == [tracker.run_id]


START_A_RUN = """
import sys
from pathlib import Path
from tests.event_lines import append_event
from xcloud.record.events import StepCollector
from xcloud.tracking.tracker import MlflowTracker, TrackedRun

root, number = sys.argv[1:]
run_dir = Path(root).parent / number
run_dir.mkdir()
run = TrackedRun(f"run {number}", {"number": number}, {"sweep": "s"}, run_dir, StepCollector(1), 9)
tracker = MlflowTracker(root=root, finish_timeout_s=120).start(run)
append_event(run_dir / "events.jsonl", "step", rank=0, cloud="c", step=1, loss=float(number))
tracker.finish("finished", {"num_steps": 1})
assert tracker.run_id and "MLflow lacks" not in tracker.places(), tracker.places()
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_two_runs_may_create_the_store_at_the_same_time(tmp_path: Path) -> None:
    root = tmp_path / "mlruns"
    words = ("-c", START_A_RUN, str(root))
    runs = [command(*words, str(number), log=tmp_path / f"log{number}") for number in range(2)]

    assert [run.wait(200) for run in runs] == [0, 0]
    assert query(root, "SELECT name, status FROM runs ORDER BY name") == [
        (f"run {number}", "FINISHED") for number in range(2)
    ]


def test_the_five_latest_sweeps_have_links_the_latest_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a client that gives the latest runs first, as MLflow does."""
    tags = (
        [{"sweep": f"s{n}"} for n in (7, 7, 6, 5)] + [{}] + [{"sweep": f"s{n}"} for n in (4, 3, 2)]
    )
    runs = [SimpleNamespace(data=SimpleNamespace(tags=one)) for one in tags]
    client = SimpleNamespace(
        search_experiments=lambda order_by: [SimpleNamespace(experiment_id="1", name="xcloud")],
        search_runs=lambda *given, **named: runs,
    )
    monkeypatch.setattr(Store, "client", lambda store: client)
    said = list(links(Store(tmp_path)))
    assert said[0] == "xcloud:"
    sweeps = [line for line in said if line.startswith("sweep ")]
    assert sweeps == [f"sweep s{n}:" for n in (3, 4, 5, 6, 7)]

"""The record of a run in a real MLflow store: names, parameters, curves of bounded length."""

import json
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import closing, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.event_lines import append_event, append_step
from tests.runs import command
from tests.sweep_runs import blank_store
from xcloud.base.errors import ConfigError
from xcloud.record.events import EVENTS_FILE, StepCollector, StepTotals
from xcloud.record.run_record import RunRecord
from xcloud.tracking import mlflow_store
from xcloud.tracking.mlflow_store import (
    KIND_TAG,
    LOAD,
    PROCESS_TAG,
    VIEW_TAG,
    CurvePoint,
    Store,
    Thinner,
    legal_name,
    links,
    points_of,
    prepare_environment,
    quality_metrics,
    show_first,
    step_metrics,
    this_process,
    view_of,
)
from xcloud.tracking.tracker import (
    REPLACED_FILE,
    TOKEN_TAG,
    TRACKED_FILE,
    MlflowSender,
    MlflowTracker,
    TrackedRun,
    add_figures,
    final_step,
)

pytestmark = pytest.mark.xdist_group("mlflow")  # one process imports it, not each

SUMMARY: dict[str, Any] = {
    "commit": "1a2b3c4",
    "num_steps": 3,
    "quality": {"bleu": 41.92},
    "profile": "demo",
    "data": {"name": "stories", "digest": "d1", "rows": {"train": 8, "test": 2}},
    "step_time_s": {"median": 0.4, "p90": 0.5},
    "compression_ratio": {"forward": 4.0, "total": 3.0},
    "wan_bytes_per_step": {"forward": 10},
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
    (run_dir / "experiment.yaml").write_text("name: stories")
    tracker = MlflowTracker(root=str(root), flush_s=0.05).start(
        TrackedRun(
            "fp16_svd@0.6",
            {
                "compression.forward.rate": 0.6,
                "layers": [1, 2],
                "long": "x" * 10_000,
                "task.name": "stories",
            },
            {"sweep": "s1"},
            run_dir,
            StepCollector(1),
            9,
            [run_dir / "experiment.yaml"],
        )
    )
    append_event(run_dir / EVENTS_FILE, "data", rank=0, cloud="c", **SUMMARY["data"])
    for number in range(1, 4):
        append_step(run_dir, number, 1 / number)
    scores = {"split": "dev", "step": 3, "values": {"bleu": 40.0}}
    append_event(run_dir / EVENTS_FILE, "quality", rank=0, cloud="c", **scores)
    tracker.artifact(run_dir / "samples.txt")
    tracker.finish("finished", RunRecord(SUMMARY))
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
        "compression.forward.rate": "0.6", "layers": "[1, 2]", "long": "x" * 6000,
        "task.name": "stories",
    }  # fmt: skip
    tags = dict(query(root, "SELECT key, value FROM tags"))
    assert tags["sweep"] == "s1" and tags["status"] == "finished"
    assert tags["commit"] == "1a2b3c4" and tags["profile"] == "demo"
    assert tags["mlflow.source.name"] == Path(sys.argv[0]).name
    assert tags["mlflow.source.type"] == "LOCAL"
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
    sizes = {i.dataset.name: json.loads(i.dataset.profile) for i in splits}
    assert sizes == {"stories, train": {"num_rows": 8}, "stories, test": {"num_rows": 2}}
    assert {i.dataset.source for i in splits} == {json.dumps({"task.name": "stories"})}
    (model,) = client.search_logged_models([tracker.experiment_id], "metrics.bleu > 41")
    assert model.source_run_id == tracker.run_id and model.tags["corpus"] == "stories"
    assert model.tags["run_folder"] in model.tags["mlflow.note.content"], "its page shows it"
    assert model.status == "READY" and model.params == {"corpus": "stories"}
    assert {m.key: (m.value, m.dataset_name, m.dataset_digest) for m in model.metrics} == {
        "bleu": (41.92, "stories, test", "d1"), "step_time_s": (0.4, None, None),
        "compression_ratio": (3.0, None, None), "wan_bytes_per_step": (10.0, None, None),
    }  # fmt: skip
    total_mb = psutil.virtual_memory().total / 1e6
    load = dict(query(root, "SELECT key, value FROM metrics WHERE key LIKE 'system/%'"))
    assert len(load) == 3
    assert total_mb / 1000 < load["system/system_memory_usage_megabytes"] < total_mb
    assert 0 <= load["system/system_memory_usage_percentage"] <= 100


def test_artifacts_lie_in_the_folder_of_the_store(recorded: tuple[Path, MlflowSender]) -> None:
    root, tracker = recorded
    folder = root / "artifacts" / str(tracker.run_id) / "artifacts"
    assert (folder / "samples.txt").read_text() == "hola -> hello"
    assert (folder / "experiment.yaml").read_text() == "name: stories"


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
    assert tags[KIND_TAG] == "custom_model_development"


def test_the_kind_that_someone_gave_an_experiment_stays(tmp_path: Path) -> None:
    blank_store(tmp_path)
    store = Store(tmp_path)
    client, key = store.open()
    client.set_experiment_tag(key, KIND_TAG, "finetuning")
    store.open()
    assert client.get_experiment(key).tags[KIND_TAG] == "finetuning"


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
        tracker.finish("finished" if rows else "stopped", RunRecord(SUMMARY))
        assert "MLflow lacks" not in tracker.places()
        client, experiment_id = Store(root).open()
        rows = [run.info.run_id for run in client.search_runs([experiment_id])]
        assert rows == [tracker.run_id]


START_A_RUN = """
import sys
from pathlib import Path
from tests.event_lines import append_event
from xcloud.record.events import StepCollector
from xcloud.record.run_record import RunRecord
from xcloud.tracking.tracker import MlflowTracker, TrackedRun

root, number = sys.argv[1:]
run_dir = Path(root).parent / number
run_dir.mkdir()
run = TrackedRun(f"run {number}", {"number": number}, {"sweep": "s"}, run_dir, StepCollector(1), 9)
tracker = MlflowTracker(root=root, finish_timeout_s=120).start(run)
append_event(run_dir / "events.jsonl", "step", rank=0, cloud="c", step=1, loss=float(number))
tracker.finish("finished", RunRecord({"num_steps": 1}))
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


def thinned(curve: dict[int, float], points: int, num_steps: int) -> list[CurvePoint]:
    thinner, found = Thinner(points, num_steps), []
    for step, value in curve.items():
        found += thinner.feed(points_of({"loss": value}, 0.0, step))
    return found + thinner.close()


@pytest.mark.parametrize("points", [500, 2001])
def test_a_run_of_any_length_has_at_most_so_many_points(points: int) -> None:
    zigzag = random.Random(0)
    for num_steps in (1, points - 1, points, points + 1, 2 * points, 7 * points + 3):
        curve = {step: zigzag.random() for step in range(1, num_steps + 1)}
        found = thinned(curve, points, num_steps)
        assert len(found) <= points
        assert found[-1].step == num_steps
        if num_steps <= points:
            assert [(p.step, p.value) for p in found] == list(curve.items())
            continue
        for share in (0.1, 0.5, 1.0):  # much is left of a run that ends early, too
            early = [p for p in found if p.step <= share * num_steps]
            assert len(early) >= share * points / 3


def test_extremes_and_the_last_value_are_kept_in_order_each_once() -> None:
    curve = {step: 1.0 / step for step in range(1, 20_001)}
    curve |= {7_000: 50.0, 7_001: -50.0, 12_345: math.nan, 19_999: math.inf}
    found = thinned(curve, 500, 20_000)

    steps = [p.step for p in found]
    assert steps == sorted(set(steps))
    assert {7_000, 7_001, 12_345, 19_999, 20_000} <= set(steps)
    assert all(repr(p.value) == repr(curve[p.step]) for p in found)


def test_what_begins_after_a_bucket_gets_the_points_of_one_that_saw_everything() -> None:
    curve = {step: math.sin(step) for step in range(1, 9_001)}
    whole = thinned(curve, 500, 9_000)
    later = thinned({s: v for s, v in curve.items() if s > whole[200].step}, 500, 9_000)
    assert later[-50:] == whole[-50:]


def test_every_name_we_make_is_legal_in_mlflow() -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    wild = ["a@b", "x(%)", "/abs", "../up", ".", "", "a//b", "a/", "año", "a:b", "y" * 300, "/"]
    for name in wild:
        _validate_metric_name(legal_name(name))
        _validate_param_name(legal_name(name))
    assert legal_name("train/loss") == "train/loss"
    assert legal_name("compute_s_cloud A-1.x") == "compute_s_cloud A-1.x"


def test_curves_and_final_values_do_not_share_a_name() -> None:
    totals = StepTotals(
        3,
        step_s=0.5,
        loss=2.0,
        numbers={
            ("num_ranks", "source"): 2,
            ("waiting_s", "source"): 0.4,
            ("sent", "forward"): 10,
            ("sent", "backward"): 0,
        },
        grad_norm=1.5,
    )
    curves = step_metrics(totals)
    assert curves == {
        "train/step_s": 0.5,
        "train/loss": 2.0,
        "update/grad_norm": 1.5,
        "wall_time/waiting_s_source": 0.2,
        "wan/bytes_forward": 10,
    }
    names = list(curves)
    assert (names[0], names[-1]) == ("train/loss", "train/step_s"), "as MLflow shows them"
    dev = quality_metrics({"split": "dev", "values": {"bleu": 30.0}})
    assert dev == {"dev/bleu": 30.0}

    record = RunRecord(
        {
            "quality": {"bleu": 41.92, "chrf": None},
            "quality_error": {"bleu": 0.81},
            "step_time_s": {"median": 0.4, "p90": 0.5},
            "compression_ratio": {"forward": 4.0, "backward": None, "total": 3.0},
            "waiting_s": {"source": 0.2},
            "wan_bytes_per_step": {"forward": 10, "backward": 0, "other": 2},
        }
    )
    final = record.metrics
    assert final == {
        "bleu": 41.92,
        "bleu_error": 0.81,
        "step_time_s": 0.4,
        "step_time_p90_s": 0.5,
        "wan_bytes_per_step": 12.0,
        "compression_ratio": 3.0,
        "compression_ratio_forward": 4.0,
        "waiting_s_source": 0.2,
        "wan_bytes_per_step_forward": 10,
        "wan_bytes_per_step_backward": 0,
        "wan_bytes_per_step_other": 2,
    }
    assert not set(final) & (set(curves) | set(dev))


def test_a_loss_that_is_no_number_stays_in_a_thinned_curve() -> None:
    thinner = Thinner(points=500, num_steps=10_000)
    kept = []
    for step in range(1, 10_001):
        loss = math.nan if step == 5_003 else 1.0 + step % 7
        kept += thinner.feed([CurvePoint("train/loss", loss, at_ms=0, step=step)])
    kept += thinner.close()

    assert [point.step for point in kept if math.isnan(point.value)] == [5_003]
    assert len(kept) <= 500


@pytest.mark.parametrize(("score", "ascending"), [("bleu", False), ("perplexity", True)])
def test_a_sweep_is_listed_best_first_in_mlflow(score: str, ascending: bool) -> None:
    tags = {}
    client = SimpleNamespace(set_experiment_tag=lambda key, tag, text: tags.update({tag: text}))

    show_first(client, experiment_id="1", metrics=[score, "step_time_s"], sweep="s")

    (state,) = map(json.loads, tags.values())
    assert state["orderByKey"] == f"metrics.`{score}`" and state["orderByAsc"] is ascending


def test_what_is_measured_after_a_run_that_went_on_is_shown(tmp_path: Path) -> None:
    """MLflow shows the value of the highest step; what is outdated is NaN there."""
    tracker = MlflowTracker(root=str(tmp_path))
    client, key = blank_store(tmp_path).open()
    run_id = client.create_run(key, tags={TOKEN_TAG: "t"}).info.run_id
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    named = {"run_id": run_id, "store": tracker.store.tracking_uri, "token": "t"}
    (run_dir / TRACKED_FILE).write_text(json.dumps(named))

    assert add_figures(run_dir, tracker, {"eval_acc": 0.5}) == ""
    attempt = final_step({"num_resumes": 1, "num_steps": 20})
    client.log_metric(run_id, "eval_acc", math.nan, step=attempt)
    assert add_figures(run_dir, tracker, {"eval_acc": 0.7}) == ""

    assert client.get_run(run_id).data.metrics["eval_acc"] == 0.7


def test_a_store_that_would_refuse_everything_is_said_before_the_start(tmp_path: Path) -> None:
    tracker = MlflowTracker(root=str(tmp_path))
    tracker.check()  # nothing is there yet
    client, key = blank_store(tmp_path).open()
    tracker.check()

    client.delete_experiment(key)
    remedy = r"'xcloud' is deleted.*restore.*tracker.experiment=NAME"
    with pytest.raises(ConfigError, match=remedy):
        tracker.check()
    MlflowTracker(root=str(tmp_path), experiment="another").check()
    client.restore_experiment(key)
    tracker.check()

    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'f00'")
    with pytest.raises(ConfigError, match=r"another release of MLflow \(schema 'f00'\)"):
        tracker.check()

    (tmp_path / "mlflow.db").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match=r"is no store of MLflow.*tracker.root=FOLDER"):
        tracker.check()
    (tmp_path / "mlflow.db").unlink()
    (tmp_path / "mlflow.db").mkdir()
    with pytest.raises(ConfigError, match="is no store of MLflow"):
        tracker.check()


@pytest.mark.parametrize(
    ("answer", "named", "header"),
    [
        ("deleted", {}, None),
        ("active", {"TOKEN": "t", "USERNAME": "u", "PASSWORD": "p"}, "Bearer t"),
        (401, {"USERNAME": "u", "PASSWORD": "p"}, "Basic dTpw"),
        (403, {"USERNAME": "u"}, "Basic dTo="),
        (404, {}, None),
        ("nothing", {}, None),
    ],
)
def test_a_server_that_would_refuse_everything_is_said_too(
    answer: str | int,
    named: dict[str, str],
    header: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TOKEN", "USERNAME", "PASSWORD"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    for name, value in named.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
    asked: list[tuple[str, str | None]] = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            experiment = {"experiment": {"lifecycle_stage": answer}}
            self.wfile.write(b"" if answer == "nothing" else json.dumps(experiment).encode())

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        tracker = MlflowTracker(uri=f"http://127.0.0.1:{server.server_port}")
        refused = answer in ("deleted", 401, 403)
        with pytest.raises(ConfigError, match="would refuse") if refused else nullcontext():
            tracker.check()
        thread.join()
    page = "/api/2.0/mlflow/experiments/get-by-name?experiment_name=xcloud"
    assert asked == [(page, header)]
    tracker.check()  # a server that is down may come back


def test_a_run_whose_process_was_killed_is_ended_by_the_next_one(tmp_path: Path) -> None:
    store = Store(root=tmp_path)
    client, key = store.open()
    gone = subprocess.Popen(["true"])
    gone.wait()
    machine, number, since_s = this_process().rsplit(" ", 2)
    recorded_by = {
        "gone": f"{machine} {gone.pid} {since_s}",
        "its number is another process's now": f"{machine} {number} 1000",
        "living": this_process(),
        "of another machine": f"elsewhere pid:[1] {gone.pid} {since_s}",
    }
    runs = {
        name: client.create_run(key, 1000, {PROCESS_TAG: process}).info.run_id
        for name, process in recorded_by.items()
    }
    client.log_metric(runs["gone"], LOAD, 1.0, timestamp=5000)
    store.end_lost_runs(client, experiment_id=key)
    found = {name: client.get_run(run_id) for name, run_id in runs.items()}
    status = {name: run.info.status for name, run in found.items()}
    assert [*status.values()] == ["FAILED", "FAILED", "RUNNING", "RUNNING"]
    assert found["gone"].info.end_time == 5000  # the last that was heard of it, not now
    assert "killed" in found["gone"].data.tags["cause"]


def test_the_environment_of_mlflow_keeps_what_the_user_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"MLFLOW_RUN_ID": "of another tool", "MLFLOW_HTTP_REQUEST_TIMEOUT": "7"}
    monkeypatch.setattr(mlflow_store, "os", SimpleNamespace(environ=found))
    with warnings.catch_warnings():
        prepare_environment()
    assert found == {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "7",
    }


@pytest.mark.parametrize(
    ("process", "is_gone"),
    [
        (lambda own, ended: own, False),
        (lambda own, ended: " ".join([*own.split()[:-1], "1"]), True),  # its number came again
        (lambda own, ended: f"{own.rsplit(' ', 2)[0]} {ended} 1", True),
        (lambda own, ended: f"elsewhere {ended} 1", False),
        (lambda own, ended: f"{own.rsplit(' ', 2)[0]} no 1", False),
        (lambda own, ended: "", False),
    ],
)
def test_a_process_of_this_machine_is_known_to_be_gone(
    process: Callable[[str, int], str], is_gone: bool
) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    assert mlflow_store._is_gone(process(mlflow_store.this_process(), ended.pid)) is is_gone

"""The monitor of a run that torchrun started, which may begin after the ranks have."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
from omegaconf import OmegaConf

from tests.toy import toy_config
from xcloud.base.errors import ConfigError, DataError, LinkClosed, RunFailed
from xcloud.experiment import Experiment
from xcloud.features.checkpoints.resume import check_can_go_on
from xcloud.job import config as configs
from xcloud.job import given
from xcloud.launch import local, several_machines
from xcloud.launch.failures import write_failure
from xcloud.launch.processes import LocalRanks
from xcloud.record.events import EVENTS_FILE
from xcloud.record.files import rank_file
from xcloud.record.summary import SUMMARY_FILE, read_summary
from xcloud.security.audit import audit_file
from xcloud.show.following import main
from xcloud.show.monitor import Attempt, Monitor
from xcloud.tracking.tracker import Recording


def monitor_after(events: list[tuple[str, int]], run_dir: Path) -> Monitor:
    more = {"cloud": "a", "t": 1.0, "num_steps": 2, "name": "training"}
    lines = (json.dumps({"event": event, "rank": rank, **more}) for event, rank in events)
    (run_dir / EVENTS_FILE).write_text("\n".join(lines) + "\n")
    config = OmegaConf.create(toy_config("two_clouds"))
    configs.Settings.of(config).write(run_dir / configs.EXPERIMENT_FILE)
    monitor = Monitor(configs.Settings.of(config), run_dir)
    monitor.start()
    return monitor


def test_a_run_that_ended_before_its_monitor_began_has_finished(tmp_path: Path) -> None:
    assert monitor_after([("finish", 0), ("finish", 1)], tmp_path).attempt.finished_ranks == {0, 1}


def test_an_attempt_is_what_its_ranks_said_since_they_were_last_started() -> None:
    attempt = Attempt()

    def take(kind: str, **more: object) -> dict[str, object]:
        attempt.take({"event": kind, **more})
        return {name: value for name, value in vars(attempt).items() if name != "reports"}

    begun = {"finished_ranks": set(), "is_stopped": False, "trains": False, "has_step": False,
             "stop_asked_of": None, "stops_count": True}  # fmt: skip
    assert take("phase", name="loading") == begun
    assert take("phase", name="training") == take("phase", name="end") == begun | {"trains": True}
    for kind in ("step", "fed"):
        attempt.has_step = False
        assert take(kind)["has_step"]
    assert take("stop_asked", of=2)["stop_asked_of"] == 2
    assert take("stop", rank=1) == begun | {
        "trains": True, "has_step": True, "stop_asked_of": 2, "finished_ranks": {1},
        "is_stopped": True,
    }  # fmt: skip
    assert take("finish", rank=0)["is_stopped"] is False
    assert attempt.finished_ranks == {0, 1}
    assert take("resume") == begun
    attempt.stops_count = False
    assert take("stop", rank=1) == begun | {"stops_count": False}
    assert take("finish", rank=1)["finished_ranks"] == {1}
    assert take("resume")["stops_count"] is True


def test_a_run_that_never_trained_has_no_links_to_compare_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"compare at": "http://"}
    monkeypatch.setattr(Recording, "places", lambda recording: places)
    monitor_after([("start", 0)], tmp_path).finish("no column es")
    said = capsys.readouterr().out
    assert "cause: no column es" in said and "compare at" not in said


def test_a_table_leaves_the_cause_to_whoever_raises_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = monitor_after([("start", 0)], tmp_path).finish("no column es", is_raised=True)
    assert summary["cause"] == "no column es"
    assert "no column es" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("allowed", "wanted"),
    [
        ({"samples.txt": True, "scores.jsonl": True}, {"samples.txt", "scores.jsonl"}),
        ({"samples.txt": False, "scores.jsonl": True}, {"scores.jsonl"}),
        ({"samples.txt": "yes"}, set()),
        (None, set()),
    ],
)
def test_of_single_samples_a_tracker_has_what_their_writer_has_allowed(
    allowed: object, wanted: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the files look like says nothing: a score of language modelling has no text, and the
    samples beside it are whole documents."""
    kept: list[str] = []
    monkeypatch.setattr(Recording, "artifact", lambda recording, path: kept.append(path.name))
    (tmp_path / "samples.txt").write_text("text  a whole document")
    (tmp_path / "scores.jsonl").write_text(json.dumps({"id": 0, "loss": 3.2, "tokens": 17}))
    if allowed is not None:
        (tmp_path / "may_be_tracked.json").write_text(json.dumps(allowed))
    monitor_after([], tmp_path).finish("why")
    assert wanted == {name for name in kept if name in ("samples.txt", "scores.jsonl")}


@pytest.mark.parametrize(
    ("error", "is_public", "is_told"),
    [
        (DataError("the label 'secret' is not a number"), False, False),
        (DataError("the label 'secret' is not a number"), True, True),
        (ValueError("could not convert 'secret'"), False, False),
        (LinkClosed("rank 1 of 'secret' is gone"), False, True),
        (ConfigError("task.data.path 'secret' is not set"), False, True),
    ],
)
def test_a_cause_that_may_quote_private_data_stays_in_the_run_folder(
    error: Exception,
    is_public: bool,
    is_told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracked: list[str] = []
    monkeypatch.setattr(Recording, "artifact", lambda recording, path: tracked.append(path.name))
    monkeypatch.setattr(
        Recording,
        "finish",
        lambda recording, status, record, note: tracked.append(json.dumps([record.summary, note])),
    )
    monkeypatch.setattr(Experiment, "has_public_texts", is_public)
    write_failure(tmp_path, 0, error)
    monitor_after([], tmp_path).finish(str(error))

    assert "secret" in (tmp_path / "summary.json").read_text()
    assert ("summary.json" in tracked) == is_told
    assert ("secret" in tracked[-1]) == is_told
    assert is_told or "see summary.json in the run folder" in tracked[-1]


def test_ranks_that_stopped_in_an_earlier_attempt_have_not_finished(tmp_path: Path) -> None:
    monitor = monitor_after([("stop", 0), ("stop", 1)], tmp_path)
    assert monitor.attempt.finished_ranks == set() and not monitor.attempt.is_stopped


def test_a_step_of_an_earlier_attempt_is_none_of_this_one(tmp_path: Path) -> None:
    assert not monitor_after([("fed", 0)], tmp_path).attempt.has_step


class FakeRanks(LocalRanks):
    """They do what `events` say, then fail."""

    events: ClassVar[list[dict[str, object]]] = []

    def start(self) -> None:
        with open(self.run_dir / EVENTS_FILE, "a") as file:
            for event in self.events:
                file.write(json.dumps({"rank": 0, "cloud": "a", "t": 1.0, **event}) + "\n")

    def wait(self, meanwhile: Callable[[], bool]) -> None:
        meanwhile()
        raise RunFailed("a rank failed")


@pytest.mark.parametrize(
    ("phases", "expected"), [((), 8), (("loading",), 8), (("loading", "training"), 12)]
)
def test_the_experiment_file_is_replaced_once_the_ranks_have_taken_the_state_over(
    phases: Sequence[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor_after([("phase", 0)], tmp_path)
    file = tmp_path / configs.EXPERIMENT_FILE
    resumed = [{"event": "resume", "step": 4}] * bool(phases)
    told = [{"event": "phase", "name": name} for name in phases]
    monkeypatch.setattr(FakeRanks, "events", resumed + told)
    monkeypatch.setattr(local, "LocalRanks", FakeRanks)
    longer = configs.Settings.of(toy_config("two_clouds", ["training.max_steps=12"]))
    with pytest.raises(RunFailed):
        local.run(longer, tmp_path, resumes=partial(check_can_go_on, anew=True))
    assert given.read_settings(file).job.max_steps == expected
    assert list(tmp_path.glob("*.yaml")) == [file]


def test_a_monitor_outlives_the_signals_that_torchrun_sends_to_rank_0_and_its_children(
    tmp_path: Path,
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit, match="missing"):
            main([str(tmp_path), "--experiment", str(tmp_path / "missing"), "--parent", "1"])
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.timeout(60)  # it waited for ever, and rank 0 for it
def test_a_rank_that_is_lost_at_its_end_is_not_waited_for_once_rank_0_has_closed_its_links(
    tmp_path: Path,
) -> None:
    monitor_after([("finish", 0)], tmp_path)
    audit_file(tmp_path, 0).write_text("{}")
    file = tmp_path / configs.EXPERIMENT_FILE
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        words = [str(tmp_path), "--experiment", str(file), "--parent", str(os.getppid())]
        assert main([*words, "--again"]) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert read_summary(tmp_path)["cause"] == "the run ended before rank 1 had finished"


@pytest.mark.timeout(60)
def test_what_rank_0_says_after_its_links_have_closed_is_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor_after([("step", 0)], tmp_path)
    audit_file(tmp_path, 0).write_text("{}")

    sleep = time.sleep

    def write_later(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():  # of an earlier test
            return sleep(seconds)
        for rank, lost in ((0, True), (1, False)):
            failure = {"message": f"said by {rank}", "peer_lost": lost, "expected": True}
            rank_file(tmp_path, rank, "error.json").write_text(json.dumps(failure))

    monkeypatch.setattr("xcloud.show.following.time.sleep", write_later)
    monkeypatch.setattr("xcloud.show.following.signal.signal", lambda number, handler: None)
    words = [str(tmp_path), "--experiment", str(tmp_path / configs.EXPERIMENT_FILE)]
    assert main([*words, "--parent", str(os.getppid())]) == 1
    assert read_summary(tmp_path)["cause"] == "rank 1: said by 1"  # who has lost nobody


def test_steps_that_a_resumed_run_does_again_count_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = monitor_after([], tmp_path)
    step = {"event": "step", "cloud": "a", "t": 1.0, "step_s": 1.0}
    events = [{**step, "rank": rank, "step": n} for n in range(1, 40) for rank in (0, 1)]
    events.append({"event": "resume", "rank": 0, "cloud": "a", "t": 9.0, "step": 10})
    events += [{**step, "rank": rank, "step": 11} for rank in (0, 1)]
    with open(tmp_path / EVENTS_FILE, "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)

    monitor.poll()
    summary = monitor.finish("stopped here")
    assert (summary["num_steps"], summary["num_steps_done_twice"]) == (11, 29)
    assert summary["lost_event_lines"] == 0
    assert "29 steps done before are repeated" in capsys.readouterr().out


def test_a_local_run_drops_the_end_of_the_attempt_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(ranks: LocalRanks) -> None:
        raise RunFailed("enough")

    summary, seen = tmp_path / SUMMARY_FILE, []
    summary.write_text('{"status": "finished"}')
    monkeypatch.setattr(Monitor, "start", lambda monitor: seen.append(summary.exists()))
    monkeypatch.setattr(LocalRanks, "start", fail)
    with pytest.raises(RunFailed, match="enough"):
        local.run(configs.Settings.of(toy_config("two_clouds")), tmp_path)
    assert seen == [False]


def test_no_earlier_summary_stands_for_a_run_whose_monitor_is_lost_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    summary, seen = tmp_path / SUMMARY_FILE, []
    summary.write_text('{"status": "failed"}')
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: seen.append(summary.exists()))
    several_machines.start_monitor(tmp_path, tmp_path / configs.EXPERIMENT_FILE)
    assert seen == [False]


@pytest.mark.parametrize("trains", [False, True])
def test_a_finished_runs_record_is_touched_once_another_attempt_has_taken_its_state_over(
    trains: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []
    monkeypatch.setattr(Recording, "artifact", lambda recording, path: kept.append(path.name))
    earlier = {"status": "finished", "num_steps": 2}
    (tmp_path / SUMMARY_FILE).write_text(json.dumps(earlier))
    monitor = monitor_after([("finish", 0), ("finish", 1)], tmp_path)
    with (tmp_path / EVENTS_FILE).open("a") as file:
        for event in ("resume", *["phase"] * trains):
            fields = {"event": event, "rank": 0, "cloud": "a", "t": 2.0, "step": 2}
            file.write(json.dumps({**fields, "name": "training"}) + "\n")
    summary = monitor.finish("the state of a module does not fit")
    assert (summary == earlier) == (not trains)
    assert (read_summary(tmp_path)["status"] == "failed") == trains
    assert bool(kept) == trains

"""A log that cannot be written costs lines, never the run; a model that cannot be is an error."""

import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from tests.logged import Log
from tests.toy import toy_config
from xcloud.base.errors import RunFailed
from xcloud.contracts.model import Stage
from xcloud.job import config as configs
from xcloud.launch.failures import EXIT_FAILED, write_failure
from xcloud.launch.local import run
from xcloud.layout import Cloud, ClusterLayout
from xcloud.rank.export import export_stage
from xcloud.record.events import EVENTS_FILE, LOST_LINES_FILE, EventReader
from xcloud.record.files import replace_text
from xcloud.record.reporter import EventFile, Reporter
from xcloud.record.summary import SUMMARY_FILE
from xcloud.security.audit import write_rank_audit
from xcloud.show.monitor import Monitor

full_device = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has"
)


class SmallDisk:
    """In place of a file: takes `at_once` bytes a write while there is room, then refuses."""

    def __init__(self, path: Path, room: int, at_once: int = 7) -> None:
        self._path, self.room, self.at_once = path, room, at_once

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        part = data[: min(self.room, self.at_once)]
        self.room -= len(part)
        with open(self._path, "ab") as file:
            return file.write(part)

    def close(self) -> None: ...


def on(disk: SmallDisk, path: Path) -> EventFile:
    events = EventFile(path)
    events.file.close()
    events.file = disk  # type: ignore[assignment]
    return events


def line(text: str, event: str = "note") -> bytes:
    return json.dumps({"event": event, "rank": 1, "text": text}, separators=(",", ":")).encode()


def lost(folder: Path) -> Any:
    return json.loads((folder / LOST_LINES_FILE).read_text())


def test_a_full_disk_costs_lines_and_is_said_once(tmp_path: Path, caplog: Log) -> None:
    events = on(SmallDisk(tmp_path / EVENTS_FILE, room=0), tmp_path / EVENTS_FILE)
    reporter = Reporter(0, "a", events.append)
    for text in ("one", "two", "three"):
        reporter.note(text)
    reporter.event("finish", now=True)
    events.close()

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    assert lost(tmp_path) == {"lines": 4, "finished_ranks": [0]}


def test_short_writes_still_make_whole_lines(tmp_path: Path) -> None:
    events = on(SmallDisk(tmp_path / EVENTS_FILE, room=10_000), tmp_path / EVENTS_FILE)
    events.append(line("one") + b"\n" + line("two") + b"\n")
    events.close()

    found = list(EventReader(tmp_path / EVENTS_FILE))
    assert [event["text"] for event in found] == ["one", "two"]
    assert not (tmp_path / LOST_LINES_FILE).exists()


@pytest.mark.parametrize("room", range(0, 100, 3))
def test_a_torn_line_spoils_no_other_once_there_is_space(
    room: int, tmp_path: Path, caplog: Log
) -> None:
    disk = SmallDisk(tmp_path / EVENTS_FILE, room)
    events = on(disk, tmp_path / EVENTS_FILE)
    size = len(line("one")) + 1
    events.append(line("one") + b"\n" + line("two") + b"\n")
    events.append(line("end", "finish") + b"\n")
    disk.room = 10_000
    events.append(line("four") + b"\n")
    events.close()

    arrived = min(room // size, 3)
    found = [event["text"] for event in list(EventReader(tmp_path / EVENTS_FILE))]
    assert found[-1] == "four"
    assert set(["one", "two", "end"][:arrived]) <= set(found)
    if arrived == 2 and room == 2 * size:
        assert found == ["one", "two", "four"]
    if room < 2 * size:
        assert lost(tmp_path) == {"lines": 3 - arrived, "finished_ranks": [1]}


def test_a_failure_that_cannot_be_written_keeps_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Full())
    assert write_failure(tmp_path / "no such folder", 0, ValueError("x")) == EXIT_FAILED


def test_files_beside_the_run_are_warnings_and_counted(tmp_path: Path, caplog: Log) -> None:
    events = EventFile(tmp_path / EVENTS_FILE)
    reporter = Reporter(0, "a", events.append)
    with reporter.may_lose("samples.txt"):
        (tmp_path / "no such folder" / "samples.txt").write_text("x")
    reporter.flush()
    events.close()
    write_rank_audit(tmp_path / "no such folder", 0, ClusterLayout({"a": Cloud()}), [], {})

    assert len(caplog.records) == 2
    (event,) = list(EventReader(tmp_path / EVENTS_FILE))
    assert (event["event"], event["name"]) == ("lost_file", "samples.txt")


class StageThatDoesNothing(Stage):
    def forward(self, message: Any, batch: Any) -> Any:
        raise AssertionError("nothing is computed here")


def test_a_model_that_cannot_be_written_is_an_error_that_names_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spare := tmp_path / "spare").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))

    class Data:
        failure = (28, "No space left on device")

        def save_tokenizers(self, folder: Path) -> None:
            raise OSError(*self.failure)

    said = "model could not be written to .*model"
    with pytest.raises(RunFailed, match=f"{said}.*MB free"):
        export_stage(tmp_path, 0, StageThatDoesNothing(), {}, None, Data())  # type: ignore[arg-type]
    Data.failure = (27, "File too large")
    with pytest.raises(RunFailed, match=f"{said}.*a limit of this user's"):
        export_stage(tmp_path, 0, StageThatDoesNothing(), {}, None, Data())  # type: ignore[arg-type]
    (tmp_path / "model" / "stage0.safetensors").mkdir()
    Data.save_tokenizers = lambda self, folder: None  # type: ignore[method-assign]
    weight = torch.ones(2)
    with pytest.raises(RunFailed, match=r"could not be written .* copy it there") as failed:
        export_stage(tmp_path, 0, StageThatDoesNothing(), {"w": weight}, None, Data())  # type: ignore[arg-type]
    (saved,) = spare.glob("*/stage0.safetensors")
    assert str(saved.parent) in str(failed.value) and torch.equal(load_file(saved)["w"], weight)


def test_a_log_that_cannot_be_written_says_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(logging, "raiseExceptions", True)
    config = OmegaConf.create(toy_config("local"))
    configs.Settings.of(config).write(tmp_path / configs.EXPERIMENT_FILE)
    Monitor(configs.Settings.of(config), tmp_path).start()
    (logger := logging.Logger("full")).addHandler(logging.StreamHandler(Full()))
    logger.warning("a line")
    assert "Logging error" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "event",
    [
        {"event": "step", "rank": 0, "cloud": "local"},
        {"event": "step", "rank": 0, "cloud": "local", "step": 1, "step_s": "x"},
        {"event": "step", "rank": [], "cloud": "local", "step": 1, "step_s": 1.0},
        {"event": "quality", "rank": 0, "values": 3},
        {"event": "note"},
        {"event": "finish"},
        {"event": "phase", "rank": 0},
        {"event": ["step"]},
    ],
    ids=json.dumps,
)
def test_a_malformed_event_does_not_end_the_monitor(
    event: dict[str, Any], tmp_path: Path, caplog: Log
) -> None:
    config = OmegaConf.create(toy_config("local"))
    monitor = Monitor(configs.Settings.of(config), tmp_path)
    good = {"event": "finish", "rank": 0, "cloud": "local", "t": 1.0}
    text = "\n".join(map(json.dumps, (event, event, good)))
    (tmp_path / EVENTS_FILE).write_text(text + "\n")

    assert monitor.poll()
    assert monitor.attempt.finished_ranks == {0}
    summary = monitor.finish(None)
    assert summary["lost_event_lines"] == 2
    assert len(caplog.records) <= 1


def test_a_summary_that_cannot_be_written_is_named_and_the_run_has_finished(
    tmp_path: Path, caplog: Log
) -> None:
    monitor = Monitor(configs.Settings.of(OmegaConf.create(toy_config("local"))), tmp_path)
    (tmp_path / SUMMARY_FILE).mkdir()

    assert monitor.finish(None)["status"] == "finished"
    assert f"{tmp_path / SUMMARY_FILE} could not be written" in caplog.text


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_on_a_full_disk_finishes_and_counts_what_it_lost(tmp_path: Path) -> None:
    config: dict[str, Any] = toy_config("local", ["training.max_steps=60"])
    config["model"] = {"_target_": "tests.toy.ToyModelOnAFullDisk"}
    summary = run(configs.Settings.of(config), tmp_path)

    assert summary["status"] == "finished"
    assert summary["lost_event_lines"] > 20 and 0 < summary["num_steps"] < 60
    assert "cannot write to" in (tmp_path / "rank0.log").read_text()
    assert json.loads((tmp_path / "summary.json").read_text())["lost_event_lines"] > 20
    assert (tmp_path / "model" / "stage0.safetensors").exists()


@pytest.mark.slow
def test_a_run_that_cannot_export_fails_and_says_where(tmp_path: Path) -> None:
    config: dict[str, Any] = toy_config("local")
    config["model"] = {"_target_": "tests.toy.ToyModelOnAFullDisk", "max_bytes": 800}
    with pytest.raises(RunFailed, match="the trained model could not be written to"):
        run(configs.Settings.of(config), tmp_path)


@full_device
def test_what_cannot_be_written_leaves_what_was_there_and_no_draft(tmp_path: Path) -> None:
    replace_text(tmp_path / "experiment.yaml", "seed: 1\n")
    (tmp_path / f".experiment.yaml.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "experiment.yaml", "seed: 2\n")
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.yaml"]
    assert (tmp_path / "experiment.yaml").read_text() == "seed: 1\n"

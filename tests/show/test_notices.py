"""`launch.on_event`: which events call the user's command, and what the command cannot do."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

from tests.feature_rows import feature_rows
from tests.logged import Log
from tests.nightly import first_daily
from tests.runs import wait_for
from tests.toy import toy_config
from xcloud.base.errors import ConfigError, TrainingDiverged
from xcloud.job import config as configs
from xcloud.job.given import read_settings, read_shared, with_overrides
from xcloud.launch.failures import write_failure
from xcloud.record.events import EVENTS_FILE
from xcloud.record.run_record import RunRecord
from xcloud.security.policy import Policy
from xcloud.show import notices
from xcloud.show.monitor import Monitor
from xcloud.tracking.tracker import note_of

KEEP = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write(sys.stdin.read() + '\\n')"
ABSENT = {"event": "absence", "absent": "b", "ranks": [1], "what": "left", "step": 3}
CALLS = [
    (one.events, one.calls)
    for rows in feature_rows().values()
    for one in rows.told[:1]
    if one.calls
]
"""What features call the command for."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the command a minute: beside other load Python alone has taken ten seconds to start."""
    monkeypatch.setattr(notices, "LIMIT_S", 60.0)


def command(*words: object) -> str:
    return shlex.join([sys.executable, "-c", *map(str, words)])


def monitor(run_dir: Path, on_event: str | None) -> Monitor:
    config = OmegaConf.create(toy_config("two_clouds"))
    config.launch.on_event = on_event
    return Monitor(configs.Settings.of(config), run_dir)


def follow(run_dir: Path, events: list[dict[str, Any]], cause: str | None = None) -> list[Any]:
    """Return what the command was called with, for a run that reports these events."""
    kept = run_dir / "kept"
    one = monitor(run_dir, command(KEEP, kept))
    one.start()
    with open(run_dir / EVENTS_FILE, "a") as file:
        for event in events:
            print(json.dumps({"rank": 0, "cloud": "a", "t": 1.0, **event}), file=file)
    one.finish(cause)
    return [json.loads(line) for line in kept.read_text().splitlines()]


@pytest.mark.parametrize(
    ("events", "told"),
    first_daily(
        [
            ([], []),
            ([{"event": "skipped_update", "step": 4}], [("diverged", 4)]),
            ([{"event": "skipped_update", "step": step} for step in (4, 5)], [("diverged", 4)]),
            ([ABSENT], [("cloud_lost", 3)]),
            ([{**ABSENT, "what": "back"}], []),
            (
                [{"event": "producer", "producer": "es", "state": "dead", "step": 7}],
                [("cloud_lost", 7)],
            ),
            ([{"event": "producer", "producer": "es", "state": "slow", "step": 7}], []),
            ([{"event": "resume", "step": 2}], [("resumed", 2)]),
            *CALLS,
            (
                [
                    {"event": "skipped_update", "step": 4},
                    {"event": "resume", "step": 2},
                    {"event": "skipped_update", "step": 4},
                ],
                [("diverged", 4), ("resumed", 2), ("diverged", 4)],
            ),
        ],
        count=5,
    ),
)
def test_the_command_is_called_for_what_concerns_the_whole_run(
    events: list[dict[str, Any]], told: list[tuple[str, int]], tmp_path: Path
) -> None:
    *before, end = follow(tmp_path, events)
    assert [(one["event"], one["step"]) for one in before] == told
    assert end["event"] == "ended" and end["status"] == "finished" and end["cause"] is None
    assert {one["run_dir"] for one in (*before, end)} == {str(tmp_path)}


def test_a_run_that_ends_because_it_diverged_says_both(tmp_path: Path) -> None:
    write_failure(tmp_path, 1, TrainingDiverged("the loss is not finite"))
    told = follow(tmp_path, [], cause="rank 1: the loss is not finite")
    assert [one["event"] for one in told] == ["diverged", "ended"]
    assert told[1]["status"] == "failed" and "not finite" in told[1]["cause"]


def test_what_an_earlier_attempt_reported_is_not_told_again(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text(
        json.dumps({**ABSENT, "rank": 0, "cloud": "a", "t": 1.0}) + "\n"
    )
    assert [one["event"] for one in follow(tmp_path, [])] == ["ended"]


def test_the_event_is_no_word_of_the_command(tmp_path: Path) -> None:
    """A cause may hold what another cloud wrote."""
    kept = tmp_path / "words"
    text = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(repr(sys.argv[2:]))"
    one = monitor(tmp_path, command(text, kept, "$(touch x)", "; true"))
    one.start()
    one.finish("$(touch y)")
    assert kept.read_text() == "['$(touch x)', '; true']"


def test_a_command_that_hangs_is_ended_and_never_holds_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    monkeypatch.setattr(notices, "LIMIT_S", 2.0)
    file = tmp_path / "pid"
    script = f"echo $$ >> {shlex.quote(str(file))}; exec sleep 600"  # starts sooner than a Python
    one = monitor(tmp_path, f"sh -c {shlex.quote(script)}")
    one.start()
    one.notices.send("diverged", step=0)
    wait_for(lambda: file.exists() and file.read_text().endswith("\n"))
    for step in range(1, 100):
        one.notices.send("diverged", step=step)  # returns at once, also with a full queue
    assert one.finish(None)["status"] == "finished"
    assert "slower than events come" in caplog.text
    assert "was not done within" in caplog.text and "was ended" in caplog.text
    assert not any(psutil.pid_exists(int(pid)) for pid in file.read_text().split())


@pytest.mark.parametrize(
    ("on_event", "said"),
    [
        ("/nowhere/notify", "No such file"),
        (command("raise SystemExit(3)"), "ended with code 3"),
        ("notify 'half a quotation", "No closing quotation"),
        (command("pass"), ""),  # reads nothing
    ],
)
def test_a_command_that_fails_costs_a_warning(
    on_event: str, said: str, tmp_path: Path, caplog: Log
) -> None:
    one = monitor(tmp_path, on_event)
    one.start()
    assert one.finish(None)["status"] == "finished"
    assert said in caplog.text
    if not said:
        assert "on_event" not in caplog.text


def test_no_file_and_no_tracker_has_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OmegaConf.create(toy_config("two_clouds"))
    config.launch.on_event = "curl https://notices.here/SECRET"
    configs.Settings.of(config).write(tmp_path / "experiment.yaml")
    assert "SECRET" not in (tmp_path / "experiment.yaml").read_text()
    assert "SECRET" not in str(configs.Settings.of(config).flat)
    assert configs.Settings.of(config).job.launch.on_event is not None, "the run keeps it"
    monkeypatch.setattr(sys, "argv", ["run.py", "+exp=x", f"launch.on_event={config.launch}"])
    record = RunRecord({"status": "finished", "num_steps": 0})
    assert "SECRET" not in note_of(record, tmp_path)
    assert "+exp=x" in note_of(record, tmp_path)


@pytest.mark.parametrize(
    "read", [read_settings, lambda file: read_shared(file, file.parent),
             lambda file: with_overrides(file, [], Path("conf"))]
)  # fmt: skip
def test_a_file_from_elsewhere_names_no_command(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever this cloud's policy allows otherwise, and wherever in the file it stands."""
    policy = Policy(constructors=["tests.toy.ToyTask", "tests.toy.ToyModel"])
    monkeypatch.setattr("xcloud.job.given.this_clouds_policy", lambda: policy)
    file = tmp_path / "experiment.yaml"
    configs.Settings.of(toy_config("two_clouds")).write(file)
    read(file)
    text = file.read_text()
    assert "on_event: null" in text
    file.write_text(text.replace("on_event: null", "on_event: touch here"))
    with pytest.raises(ConfigError, match=r"launch.on_event is 'touch here'.*no policy allows"):
        read(file)
    without = text.replace("_target_: xcloud.job.job.Launch\n", "")
    file.write_text(without.replace("on_event: null", "on_event: touch here"))
    with pytest.raises(ConfigError):
        read_settings(file)


def test_the_command_can_be_given_again_to_resume(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    configs.Settings.of(toy_config("two_clouds")).write(file)
    changed = OmegaConf.load(file)
    changed.task = {"_target_": "xcloud.base.settings.nothing"}
    changed.model = {"_target_": "xcloud.base.settings.nothing"}
    OmegaConf.save(changed, file)
    found = with_overrides(file, ["launch.on_event='notify me'"], Path("conf").absolute())
    assert found.launch.on_event == "notify me"


def test_a_command_that_works_has_done_so_before_the_run_is_over(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    one = monitor(tmp_path, command(f"import time; time.sleep(0.3); {KEEP}", kept))
    one.start()
    began_s = time.monotonic()
    one.finish(None)
    assert kept.exists() and time.monotonic() - began_s < notices.LIMIT_S

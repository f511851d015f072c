"""A run folder has one owner, and nothing in it leads out of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from tests import as_written
from tests.owners import TwoOwners
from tests.runs import ROOT, cloud, command, layout, read, wait_for
from tests.sweep_runs import points
from tests.toy import toy_config
from xcloud import __main__ as commands
from xcloud.base import run_folder
from xcloud.base.errors import ConfigError
from xcloud.base.locks import LockTaken, locked
from xcloud.base.run_folder import owned, refuse_links
from xcloud.base.terminal import signals_to_stop
from xcloud.features.checkpoints.resume import check_can_go_on
from xcloud.job import config as configs
from xcloud.launch import join, local, several_machines
from xcloud.planner.planning import planned
from xcloud.record.events import EventReader
from xcloud.record.reporter import EventFile
from xcloud.study.points import Decision, SweepState
from xcloud.tracking.mlflow_store import Store

Writer = Callable[[Path], object]


def torchrun_worker(run_dir: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        several_machines.run_under_torchrun(run_dir / configs.EXPERIMENT_FILE, run_dir, None)


def joined(run_dir: Path) -> None:
    """Start the first cloud of two owners in this folder."""
    owners = run_dir.parent / "owners"
    owners.mkdir()
    run = TwoOwners(owners, changed={"cluster.clouds.cloud_b.address": "127.0.0.1:7001"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XCLOUD_POLICY", str(owners / "owner_cloud_a" / "policy.yaml"))
        join.main([str(run.file), "--run-dir", str(run_dir)])


def sweep_point(verdict: str) -> Writer:
    def begin(run_dir: Path) -> None:
        (point,) = points("seed=1")
        SweepState(run_dir.parent).begin(Decision(point, verdict, run_dir.name), 1)  # type: ignore[arg-type]

    return begin


def config() -> configs.Settings:
    return configs.Settings.of(toy_config("local"))


def cli(*words: str) -> Writer:
    def call(run_dir: Path) -> None:
        if commands.main([word.replace("RUN", str(run_dir)) for word in words]):
            raise ConfigError("said on standard error")

    return call


# Whoever writes into a run folder. A new command stands here or among READERS.
WRITERS: dict[str, Writer] = {
    "run.py in a folder of an earlier run": lambda run_dir: local.run(config(), run_dir),
    "run.py resume=": lambda run_dir: local.run(config(), run_dir, check_can_go_on),
    "run.py plan=show": lambda run_dir: planned(
        configs.Settings.of(toy_config("two_clouds", ["plan=show"])), run_dir
    ),
    "a sweep that resumes a point": sweep_point("resume"),
    "a sweep that runs a point again": sweep_point("again"),
    "worker": torchrun_worker,
    "join": joined,
    "monitor": cli("monitor", "RUN", "--experiment", "RUN/experiment.yaml", "--again"),
    "wire-audit": cli("wire-audit", "RUN"),
    "leak-meter": cli("leak-meter", "RUN"),
    "evaluate": cli("evaluate", "RUN", "--tasks", "task.yaml"),
}
# export needs a trained language model: tests/runs/test_causal_run.py.
READERS = {
    "run", "settings", "ui", "report", "claims", "reproduce", "site", "translate", "generate",
    "export", "policy", "torchrun", "status", "train-tokenizer", "keys", "approve", "follow",
    "doctor", "relay", "invite", "accept",
}  # fmt: skip


def test_every_command_is_known_to_write_into_a_run_folder_or_not() -> None:
    assert {name for name in WRITERS if name in commands.COMMANDS} | READERS == {
        *commands.COMMANDS
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "a run"
    folder.mkdir()
    config().write(folder / configs.EXPERIMENT_FILE)
    event = {"event": "phase", "rank": 0, "cloud": "a", "t": 0.0, "name": "training"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    for name in ("rendezvous", "rank0.ready", "rank0.error.json", "summary.json"):
        (folder / name).write_text("{}")
    return folder


def left_in(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != run_folder.LOCK_FILE
    }


@pytest.mark.parametrize("writer", WRITERS)
def test_nobody_writes_into_the_folder_of_a_living_run(
    writer: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with owned(run_dir):
        before = left_in(run_dir)
        with pytest.raises(ConfigError) as refused:
            WRITERS[writer](run_dir)
        assert left_in(run_dir) == before

    said = str(refused.value) + capsys.readouterr().err
    assert f"is in use by process {os.getpid()} on " in said
    assert f"python -m xcloud status '{run_dir}'" in said


OF_A_RUN = {
    "monitor": ["RUN", "--experiment", "x.yaml"], "wire-audit": ["RUN"], "leak-meter": ["RUN"],
    "status": ["RUN"],
    "evaluate": ["RUN", "--tasks", "task.yaml"], "translate": ["RUN", "a text"],
    "generate": ["RUN", "a text"], "export": ["RUN"], "follow": ["RUN", "--as", "served"],
}  # fmt: skip


def test_a_command_says_what_it_misses_in_a_folder_that_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    found = {}
    before = {number: signal.getsignal(number) for number in signals_to_stop()}
    for name, words in OF_A_RUN.items():
        for folder in ("nowhere", "empty", "file"):
            given = [word.replace("RUN", str(tmp_path / folder)) for word in words]
            code = commands.main([name, *given])
            said = "".join(capsys.readouterr()).replace(str(tmp_path), "FOLDER").strip()
            found[f"{name}: {folder}"] = [code, said]
    for number, handler in before.items():  # as `monitor` leaves to the ranks to save
        signal.signal(number, handler)
    as_written.check("commands without a run", found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


@pytest.mark.parametrize("writer", WRITERS)
def test_nobody_follows_a_link_in_a_run_folder(
    writer: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (run_dir / "deep").mkdir()
    (run_dir / "deep" / "link").symlink_to(mine)
    with pytest.raises(ConfigError) as refused:
        WRITERS[writer](run_dir)
    assert "deep/link is a symbolic link" in str(refused.value) + capsys.readouterr().err
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    "words", [("status", "RUN"), ("translate", "RUN", "a"), ("export", "RUN")]
)
def test_who_only_reads_follows_no_link_either(
    words: tuple[str, ...], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "link").symlink_to("/dev/zero")
    with pytest.raises(ConfigError):
        cli(*words)(run_dir)
    assert "link is a symbolic link" in capsys.readouterr().err


def test_an_event_log_that_is_a_link_is_neither_written_nor_read(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text('{"event": "note", "rank": 0}\n')
    (tmp_path / "events.jsonl").symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"):
        EventFile(tmp_path / "events.jsonl")
    with pytest.raises(OSError, match="symbolic links"):
        list(EventReader(tmp_path / "events.jsonl", warn=False))


def test_a_pipe_in_a_run_folder_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(ConfigError, match="is no plain file"):
        refuse_links(tmp_path)


def test_a_run_folder_may_be_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").symlink_to(tmp_path / "there")
    with owned(tmp_path / "here"), pytest.raises(ConfigError, match="is in use"):
        with owned(tmp_path / "there"):
            pass


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from xcloud.base.run_folder import owned\n"
    program += "with owned(Path(sys.argv[1])): print('has it', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"has it\n"
        with pytest.raises(ConfigError, match=f"process {owner.pid} on "), owned(tmp_path):
            pass
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        with owned(tmp_path):
            pass


def test_who_waits_for_a_lock_gets_it_when_it_is_given_back(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        with pytest.raises(LockTaken), locked(tmp_path / "lock", wait_s=0.1):
            pass
    with locked(tmp_path / "lock", wait_s=0.1):
        pass


def test_ranks_beside_the_first_one_wait_until_it_owns_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        text = json.dumps({"parent": os.getppid() if len(asked) > 2 else 1})
        (tmp_path / run_folder.LOCK_FILE).write_text(text)

    # Not the sleep of `time` itself: threads of other tests may still wait.
    monkeypatch.setattr(run_folder, "time", SimpleNamespace(sleep=sleep))
    run_folder.check_owned_by_parent(tmp_path)
    assert len(asked) == 3


@pytest.mark.slow
def test_a_second_command_does_not_disturb_a_living_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    given = toy_config("local", ["training.max_steps=100000"])
    given["model"]["step_s"] = 0.02  # type: ignore[index]
    (tmp_path / "job.json").write_text(json.dumps(given))
    program = (
        "import json, sys; from pathlib import Path; from xcloud.job.config import Settings\n"
        "from xcloud.launch.local import run; folder = Path(sys.argv[1])\n"
        "from xcloud.features.checkpoints.resume import check_can_go_on\n"
        "config = Settings.of(json.loads((folder / 'job.json').read_text()))\n"
        "run(config, folder / 'run', check_can_go_on if sys.argv[2:] else None)\n"
    )
    first = command("-c", program, str(tmp_path), log=tmp_path / "first.log")
    try:
        wait_for(lambda: '"event":"step"' in read(run_dir / "events.jsonl"))
        second = command("-c", program, str(tmp_path), "again", log=tmp_path / "second.log")
        assert second.wait(120) == 1
        assert "is in use by process" in read(tmp_path / "second.log")
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGTERM)
        first.wait(60)
    events = [json.loads(line) for line in read(run_dir / "events.jsonl").splitlines()]
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == [*range(1, len(steps) + 1)]


BAD_NAMES = ["$(touch x)", "`id`", "../up", "a/b", " a", "", "a;b", "a'b", "-rf", "\x1b[2J"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_leads_neither_out_of_a_folder_nor_into_a_shell(name: str, tmp_path: Path) -> None:
    """Of clouds and sweeps; what only describes a run may have more characters."""
    one = {"_target_": "xcloud.layout.Cloud"}
    for key, value in {
        "cluster": {**layout(a=cloud(1)), "clouds": {name: one}},
        "sweep": name,
    }.items():
        given = {**toy_config("local"), key: value}
        with pytest.raises(ConfigError, match="must be a name of letters, digits"):
            configs.Settings.of(given)
    if name:
        store = Store(tmp_path)
        with pytest.raises(ConfigError, match="sweep must be a name of"):
            store.artifacts_of_sweep(name)


@pytest.mark.parametrize("key", ["name", "label", "profile"])
@pytest.mark.parametrize("text", ["$(touch x)", "`id`", "\x1b[2J", "two\nlines"])
def test_what_a_run_is_called_by_is_no_command(key: str, text: str) -> None:
    given = {**toy_config("local"), key: text}
    with pytest.raises(ConfigError, match=f"{key} must be a text without control characters"):
        configs.Settings.of(given)
    job = configs.Settings.of(OmegaConf.create({**given, key: "stanford/sst2 (two) 50 %"})).job
    assert getattr(job, key) == "stanford/sst2 (two) 50 %"

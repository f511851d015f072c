"""What `python -m xcloud status` says of a run that goes on, hangs, or has ended."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runs import start, wait_for
from tests.toy import toy_config
from xcloud.base.errors import ConfigError
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.memory_transport import MemoryWorld
from xcloud.net.peer import Peer
from xcloud.pipeline.exchange import RankGroup
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.files import (
    LAUNCHER_FILE,
    forget_launcher,
    note_attempt,
    rank_file,
)
from xcloud.record.reporter import RankState
from xcloud.show.status import culprits, describe, main, ranks_of


def write(run_dir: Path, rank: int, **facts: Any) -> None:
    now = time.time()
    state = {
        "rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "written": now,
        "ended": False, "phase": "training", "phase_since": now - 60, "waits_for": [],
        "silent_s": {}, **facts,
    }  # fmt: skip
    rank_file(run_dir, rank, "state.json").write_text(json.dumps(state))


def wait(rank: int, message: str, seconds: float = 12.0) -> dict[str, object]:
    return {"rank": rank, "message": message, "since": time.time() - seconds}


def test_who_waits_for_whom_leads_to_the_rank_that_hangs(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        os.kill(sleeper.pid, signal.SIGSTOP)
        message = "gradient of step 8, micro-batch 1"
        write(tmp_path, 0, waits_for=[wait(1, message)], step=7, step_at=time.time() - 13)
        write(tmp_path, 1, waits_for=[wait(2, message)])
        write(tmp_path, 2, pid=sleeper.pid, written=time.time() - 12)
        wait_for(lambda: ranks_of(tmp_path)[2].process == "stopped", 5)
        said = describe(tmp_path)
    finally:
        sleeper.kill()
        sleeper.wait()

    assert culprits(ranks_of(tmp_path)) == {2: [0, 1]}
    assert "degraded: rank 2 is stopped (SIGSTOP)" in said
    assert "rank 0: training for 60 s, step 7 done 13 s ago; waits for gradient of" in said
    assert "step 8, micro-batch 1 from rank 1 for 12 s" in said
    assert "rank 2 is waited for by ranks 0, 1" in said
    assert "no checkpoint yet" in said
    assert "rank 2 is gone" in describe(tmp_path)  # it was killed


def test_a_program_reads_all_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0, step=7, waits_for=[wait(1, "a", 3.0), wait(1, "b", 9.0)])
    write(tmp_path, 1, pid=1, host="elsewhere", lines_down=["line to c down for 4 s"])
    write(tmp_path, 2, ended=True, phase="has finished", waits_for=[wait(0, "a")])

    def told() -> Any:
        assert main([str(tmp_path), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert told()["checkpoint_step"] is None
    checkpoints = CheckpointFolder(tmp_path)
    for step in (4, 6, 8):
        checkpoints.write(step, 0, {"x": 1}, {})
        if step < 8:
            checkpoints.mark_agreed(step, 0, {})
    found = told()
    assert (found["run_dir"], found["checkpoint_step"]) == (str(tmp_path), 6)
    assert found["state"] == "degraded: rank 2 is gone" and found["waited_for_by"] == {"1": [0]}
    first, second, third = found["ranks"]
    waits = [(one["rank"], one["message"], round(one["for_s"])) for one in first["waits_for"]]
    assert waits == [(1, "b", 9), (1, "a", 3)], "the longest first"
    assert (first["rank"], first["phase"], first["step"]) == (0, "training", 7)
    assert (first["process"], first["has_ended"]) == ("running", False)
    assert second["process"] == "unknown" and second["lines_down"] == ["line to c down for 4 s"]
    assert (third["process"], third["has_ended"], third["waits_for"]) == ("gone", True, [])
    assert all(0 <= one["silent_s"] < 60 for one in found["ranks"])


@pytest.mark.parametrize(("silent_s", "is_well"), [(4.5, True), (5.5, False)])
def test_a_rank_that_has_written_nothing_for_five_seconds_is_not_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_s: float, is_well: bool
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    write(tmp_path, 0, written=now - silent_s)
    assert ranks_of(tmp_path)[0].is_well is is_well


def test_lanes_in_a_collective_wait_for_the_one_that_is_not_in_it(tmp_path: Path) -> None:
    """Three consumers of a one-way job; the second one waits for its producer, rank 3."""
    what = "the sum of 3 ranks"
    write(tmp_path, 0, waits_for=[wait(2, what, 9.0), wait(1, what, 9.0)])
    write(tmp_path, 1, waits_for=[wait(3, "batch 8")])
    write(tmp_path, 2, waits_for=[wait(0, what), wait(1, what)])
    write(tmp_path, 3)
    said = describe(tmp_path)
    assert "rank 0: training for 60 s; waits for the sum of 3 ranks from rank 1 for 9 s" in said
    assert "rank 2: training for 60 s; waits for the sum of 3 ranks from rank 1 for 12 s" in said
    assert culprits(ranks_of(tmp_path)) == {3: [0, 1, 2]}


def test_a_rank_in_a_collective_notes_whom_it_waits_for(tmp_path: Path) -> None:
    state, lives = RankState(tmp_path, 0), {1: Peer(), 2: Peer()}
    state.peers = lives
    world = MemoryWorld()
    group, other = (
        RankGroup(rank, (0, 1), world.transport(rank).group((0, 1)), lives if not rank else {})
        for rank in (0, 1)
    )
    calls = {
        "sum": lambda one: one.sum(torch.ones(1)),
        "barrier": RankGroup.barrier,
        "sum in the background": lambda one: one.start_sum(torch.ones(1))(),
        "broadcast": lambda one: one.from_leader(torch.ones(1)),
        "gathering": lambda one: one.gather(torch.ones(1)),
    }
    for name, call in calls.items():
        waiting = threading.Thread(target=call, args=(group,))
        waiting.start()
        said = f"the {name.split(' in ')[0]} of 2 ranks"
        wait_for(lambda: said == str((lives[1].awaited or [""])[0]), 10)  # noqa: B023
        call(other)
        waiting.join()
    assert lives[2].awaited is None
    state.close("has finished")


def test_a_rank_elsewhere_is_judged_by_its_last_sign_of_life(tmp_path: Path) -> None:
    write(tmp_path, 0, host="another machine")
    assert ": running\n" in describe(tmp_path)
    write(tmp_path, 0, host="another machine", written=time.time() - 30)
    assert "rank 0 sent no heartbeat for 30 s" in describe(tmp_path)


def test_of_an_ended_run_the_cause_is_shown(tmp_path: Path) -> None:
    write(tmp_path, 0, ended=True, phase="has failed: no data")
    assert f"to resume: python run.py resume={tmp_path}" in describe(tmp_path)
    (tmp_path / "summary.json").write_text('{"status": "failed", "cause": "rank 0: no data"}')
    mark = tmp_path / "checkpoints" / "step-000012" / "AGREED"
    mark.parent.mkdir(parents=True)
    mark.touch()
    said = describe(tmp_path)
    assert "ended, failed: rank 0: no data" in said and "has failed: no data for 60 s" in said
    assert "last checkpoint: step 12, 0 s ago" in said


def test_a_rank_that_has_ended_waits_for_nobody(tmp_path: Path) -> None:
    """Its last state still names the barrier that it ended in."""
    waits = [wait(1, "barrier of step 5")]
    write(tmp_path, 0, ended=True, waits_for=waits, lines_down=["the line is down"])
    write(tmp_path, 1, waits_for=waits)
    first, second = (one.as_json() for one in ranks_of(tmp_path))
    assert (first["waits_for"], first["lines_down"]) == ([], [])
    assert [one["message"] for one in second["waits_for"]] == ["barrier of step 5"]


def test_a_rank_that_may_leave_is_away_and_the_run_well(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, ended=True, phase="has failed: killed", may_leave=True)
    assert ": running; rank 1 is away and may come back\n" in describe(tmp_path)


def test_another_clouds_folder_says_whether_its_part_is_done(tmp_path: Path) -> None:
    write(tmp_path, 1, ended=True, phase="has finished", torchrun=True)
    assert "this cloud's part is done" in describe(tmp_path)
    write(tmp_path, 1, ended=True, phase="has failed: rank 0 is gone", torchrun=True)
    assert "give the same torchrun command again" in describe(tmp_path)
    assert "run.py" not in describe(tmp_path)


def test_between_the_death_of_a_rank_and_its_restart_the_run_is_starting_again(
    tmp_path: Path,
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()

    def said(restarts_left: int, since_s: float = 0.0, **facts: Any) -> str:
        """Of a run whose last attempt began 9 s ago, since_s after what its rank wrote last."""
        now = time.time()
        write(tmp_path, 0, **{"pid": dead.pid, "written": now - 9 - since_s, **facts})
        note_attempt(tmp_path, restarts_left)
        path = tmp_path / LAUNCHER_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | {"started": now - 9}))
        return describe(tmp_path).splitlines()[0].partition(": ")[2]

    ends, starts = "ended; run.py is writing the record", "starting again from step 12"
    assert said(3, -4) == ends  # there is no checkpoint
    assert said(3, 4) == "starting"
    mark = tmp_path / "checkpoints" / "step-000012" / "AGREED"
    mark.parent.mkdir(parents=True)
    mark.touch()
    (tmp_path / "summary.json").write_text('{"status": "failed"}')  # before a resumption
    assert said(3, -4) == starts
    assert said(0, -4) == ends
    assert said(0, 4) == starts  # the last attempt has begun
    assert said(3, -4, ended=True, phase="has finished") == ends
    for is_expected, what in ((False, starts), (True, ends)):
        rank_file(tmp_path, 0, "error.json").write_text(json.dumps({"expected": is_expected}))
        assert said(3, -4, ended=True) == what
    forget_launcher(tmp_path)
    assert "ended, failed" in describe(tmp_path) and not list(tmp_path.glob("launcher*"))


def test_a_launcher_that_was_killed_starts_nothing_again(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write(tmp_path, 0, pid=dead.pid)
    note_attempt(tmp_path, 3)
    path = tmp_path / LAUNCHER_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": dead.pid}))
    assert "ended without a summary; to resume: python run.py resume=" in describe(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        describe(tmp_path)
    assert main([str(tmp_path)]) == 1


def test_a_rank_writes_what_it_waits_for(tmp_path: Path) -> None:
    state, life = RankState(tmp_path, 3), Peer()
    state.peers = {1: life}
    state.on_event("phase", {"name": "training"})
    state.on_event("step", {"step": 4})
    with life.awaiting(MessageKey(Kind.GRADIENT, 5, 1)):
        wait_for(lambda: bool(ranks_of(tmp_path) and ranks_of(tmp_path)[0].waits), 5)
    found = ranks_of(tmp_path)[0]
    assert found.waits[0][:2] == (1, "gradient of step 5, micro-batch 1")
    assert (found.phase, found.step, found.process) == ("training", 4, "running")
    state.close("has finished")
    assert ranks_of(tmp_path)[0].has_ended and not list(tmp_path.glob(".*"))


@pytest.mark.slow
@pytest.mark.nightly
def test_the_status_of_a_real_run_names_the_rank_that_is_stopped(tmp_path: Path) -> None:
    config = toy_config("two_clouds", ["training.max_steps=60"])
    config["model"] |= {"step_s": 0.02}  # type: ignore[operator]
    running = threading.Thread(target=start, args=(tmp_path, config))
    running.start()
    wait_for(lambda: [one.step is not None for one in ranks_of(tmp_path)] == [True, True])
    assert ": running\n" in describe(tmp_path)
    pid = json.loads(rank_file(tmp_path, 1, "state.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: "rank 1 is waited for by rank 0" in describe(tmp_path), 20)
    said = describe(tmp_path)
    os.kill(pid, signal.SIGCONT)
    assert "rank 1 is stopped (SIGSTOP)" in said
    assert "rank 0: training" in said and "; waits for " in said and " from rank 1 for" in said
    running.join()
    assert "ended, finished" in describe(tmp_path)


def test_a_rank_that_no_monitor_tells_of_says_its_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = RankState(tmp_path, 1, says=True)
    state.on_event("phase", {"name": "training"})
    state.close("has finished")
    said = capsys.readouterr().out.splitlines()
    assert said == [f"rank 1: {x}" for x in ("joining the others", "training", "has finished")]

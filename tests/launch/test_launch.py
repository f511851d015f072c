"""Starting ranks, what is made of those that fail, and signals while the record is written."""

import inspect
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests import as_written
from tests.event_lines import append_event
from tests.toy import toy_config
from xcloud.base.errors import ConfigError, DataError, FrameError, LinkClosed, RunFailed
from xcloud.base.terminal import signals_to_stop
from xcloud.job.config import EXPERIMENT_FILE, Settings
from xcloud.launch import failures, local
from xcloud.launch import processes as launch
from xcloud.launch.failures import (
    EXIT_COMES_AGAIN,
    EXIT_PEER_LOST,
    first_cause,
    lost_clouds,
    own_failures,
    write_failure,
)
from xcloud.launch.processes import LocalRanks, RunStopped, num_threads
from xcloud.launch.rank_process import end_with_parent
from xcloud.net.link_profile import Liveness
from xcloud.record.files import (
    AGREED_FILE,
    EVENTS_FILE,
    LAUNCHER_FILE,
    CheckpointSteps,
    failure_of,
    note_attempt,
    rank_file,
)
from xcloud.record.summary import SUMMARY_FILE


def test_memory_settings_reach_the_ranks_and_the_users_own_win(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[dict[str, str]] = []

    monkeypatch.setattr(
        launch, "start_process", lambda command, environment, log: started.append(environment)
    )
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "5")
    LocalRanks(tmp_path, ["a", "b"]).start()
    assert [env["LOCAL_RANK"] for env in started] == ["0", "1"]
    assert {env["LRU_CACHE_CAPACITY"] for env in started} == {"5"}
    assert {env["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] for env in started} == {"16"}


def test_ranks_that_are_asked_to_stop_while_they_are_started_all_hear_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = LocalRanks(tmp_path, ["a", "b"])

    def start(command: list[str], environment: dict[str, str], log: Path) -> object:
        process = subprocess.Popen(["sleep", "1000"])
        ranks.ask_to_stop()  # as a signal does, before the process is known
        return process

    monkeypatch.setattr(launch, "start_process", start)
    ranks.start()
    with pytest.raises(RunStopped):
        ranks.wait(lambda: False)
    assert {process.returncode for process in ranks.processes} == {-signal.SIGUSR1}


def test_a_stop_before_all_have_met_does_not_wait_for_ranks_that_cannot_hear_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Python's handlers do not run while the main thread waits in torch for a rank."""
    monkeypatch.setattr(launch, "END_WITHIN_S", 0.2)
    ranks = LocalRanks(tmp_path, ["a", "b"])
    deaf = "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print(flush=True)"
    deaf = f"{deaf}; time.sleep(1000)"
    ranks.processes = [
        subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE),
        subprocess.Popen(["sleep", "1000"]),
    ]
    assert ranks.processes[0].stdout is not None
    with ranks.processes[0].stdout as told:
        told.readline()
    ranks.ask_to_stop()
    with pytest.raises(RunStopped):
        ranks.wait(lambda: False)
    assert ranks.processes[0].returncode == -signal.SIGTERM


def test_a_rank_may_tell_its_last_steps_after_another_has_failed(tmp_path: Path) -> None:
    ranks = LocalRanks(tmp_path, ["a", "b"])
    ranks.log(1).touch()
    told = tmp_path / "told"
    ranks.processes = [
        subprocess.Popen(["sh", "-c", f"sleep 0.5; touch {told}"]),
        subprocess.Popen(["sh", "-c", "exit 1"]),
    ]

    with pytest.raises(RunFailed, match="rank 1 of cloud 'b': ended with exit code 1"):
        ranks.wait(lambda: True)
    assert told.exists()


@pytest.fixture
def _nobody_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still there after a failure has nothing to say, so it is waited for in vain."""
    monkeypatch.setattr(launch, "_FINAL_REPORTS_S", 0.2)
    monkeypatch.setattr(failures, "_SETTLE_S", 0.2)


@pytest.mark.usefixtures("_nobody_reports")
def test_a_rank_that_does_not_notice_is_ended(tmp_path: Path) -> None:
    ranks = LocalRanks(tmp_path, ["a", "b"])
    ranks.log(1).touch()
    ranks.processes = [
        subprocess.Popen(["sleep", "1000"]),
        subprocess.Popen(["sh", "-c", "exit 1"]),
    ]

    with pytest.raises(RunFailed, match="rank 1"):
        ranks.wait(lambda: True)
    assert ranks.processes[0].returncode == -signal.SIGTERM


@pytest.mark.usefixtures("_nobody_reports")
@pytest.mark.parametrize("was_ready", [False, True])
def test_a_rank_that_may_be_lost_must_have_been_ready(was_ready: bool, tmp_path: Path) -> None:
    ranks = LocalRanks(tmp_path, ["a", "b"], essential=frozenset({0}))
    (tmp_path / "rank1.error.json").write_text(
        json.dumps({"message": "no data", "peer_lost": False, "expected": True})
    )
    if was_ready:
        rank_file(tmp_path, 1, "ready").touch()
    fails = subprocess.Popen(["sh", "-c", "exit 1"])
    fails.wait()
    ranks.processes = [subprocess.Popen(["sleep", "0" if was_ready else "1000"]), fails]

    if was_ready:
        ranks.wait(lambda: False)  # nor must the launcher have read that all have joined
    else:
        with pytest.raises(RunFailed, match="rank 1 of cloud 'b': no data"):
            ranks.wait(lambda: True)
    assert not rank_file(tmp_path, 1, "ready").exists()


def test_who_refuses_a_frame_has_lost_nobody(tmp_path: Path) -> None:
    assert write_failure(tmp_path, 0, FrameError("another tokenizer")) == EXIT_COMES_AGAIN
    assert write_failure(tmp_path, 1, LinkClosed("rank 0 is gone")) == EXIT_PEER_LOST
    found = [failure_of(tmp_path, rank) for rank in range(3)]
    assert [f and f["peer_lost"] for f in found] == [False, True, None]


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize(
    ("error", "is_own", "is_repeated"),
    [
        (ConfigError("training.batch_size is 3"), True, True),
        (DataError("no such file"), True, True),
        (FrameError("another tokenizer"), True, True),
        (LinkClosed("rank 0 is gone"), False, False),
        (RuntimeError("Connection reset by peer"), False, False),
        (RuntimeError("out of memory"), True, False),
    ],
)
def test_whether_an_error_comes_again_is_told_without_its_file(
    error: Exception, is_own: bool, is_repeated: bool, has_room: bool, tmp_path: Path
) -> None:
    """has_room: false stands for a full disk, on which no rank can leave its message."""
    run_dir = tmp_path if has_room else tmp_path / "no such folder"
    codes = {4: write_failure(run_dir, 4, error)}
    assert (failure_of(run_dir, 4) is not None) == has_room
    assert (EXIT_COMES_AGAIN in codes.values()) == is_repeated
    assert bool(own_failures(codes)) == is_own
    assert lost_clouds(run_dir, ["a"] * 4 + ["b"], codes) == (set() if is_own else {"b"})


def test_the_first_cause_of_a_rank_gives_its_exit_code(tmp_path: Path) -> None:
    """What follows from it in another thread has lost a peer."""
    write_failure(tmp_path, 0, ConfigError("another seed"))
    assert write_failure(tmp_path, 0, LinkClosed("rank 1 is gone")) == EXIT_COMES_AGAIN


def test_a_cloud_that_is_lost_in_the_evaluation_does_not_begin_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[int] = []
    monkeypatch.setattr(LocalRanks, "start_rank", lambda self, rank: started.append(rank))
    ranks = LocalRanks(tmp_path, ["a", "b"], frozenset({0}))
    ranks.log(1).touch()
    ranks.processes = [subprocess.Popen(["true"]), subprocess.Popen(["sh", "-c", "exit 3"])]
    for process in ranks.processes:
        process.wait()
    for phase, expected in (("evaluation", []), ("training", [1])):
        rank_file(tmp_path, 0, "state.json").write_text(json.dumps({"phase": phase}))
        ranks.start_lost_clouds(0.0)
        assert started == expected


def test_a_lost_cloud_begins_again_but_not_one_with_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cloud b loses one of its two ranks: both begin again. Cloud c has failed by itself."""
    started: list[str] = []
    all_started = tmp_path / "all_started"

    def start(command: list[str], environment: dict[str, str], log: Path) -> object:
        started.append(environment["LOCAL_RANK"])
        if len(started) == 2:
            all_started.touch()
        return subprocess.Popen(["sleep", "0.2"])

    monkeypatch.setattr(launch, "start_process", start)
    ranks = LocalRanks(tmp_path, ["a", "b", "b", "c"], frozenset({0}), restart_s=0.3)
    for rank in range(1, 4):
        rank_file(tmp_path, rank, "ready").touch()
        ranks.log(rank).touch()
    ranks.processes = [
        # Half a second more, in which cloud c must not begin again.
        subprocess.Popen(
            ["sh", "-c", f"until [ -e {all_started} ]; do sleep 0.05; done; sleep 0.5"]
        ),
        subprocess.Popen(["sh", "-c", "kill -9 $$"]),
        subprocess.Popen(["sleep", "1000"]),
        subprocess.Popen(["sh", "-c", f"exit {EXIT_COMES_AGAIN}"]),
    ]
    ranks.wait(lambda: True)

    assert started == ["1", "2"]
    assert (tmp_path / "rank1.before.log").exists()


@pytest.mark.parametrize(("lost_for_s", "starts"), [(0.0, []), (15.0, []), (30.0, [0])])
def test_a_lost_cloud_is_started_again_after_its_time_and_not_before(
    lost_for_s: float, starts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is killed before the first look."""
    started: list[int] = []
    monkeypatch.setattr(LocalRanks, "start_rank", lambda self, rank: started.append(rank))
    ranks = LocalRanks(tmp_path, ["a"])
    ranks.processes = [subprocess.Popen(["sh", "-c", "kill -9 $$"])]
    ranks.processes[0].wait()
    ranks.log(0).touch()
    ranks.since_s["a"] = time.monotonic() - lost_for_s
    ranks.start_lost_clouds(after_s=30.0)
    assert started == starts


@pytest.mark.parametrize(("since_s", "is_over"), [(0.0, False), (14.0, False), (16.0, True)])
def test_a_rank_that_the_run_can_do_without_may_end_a_little_late(
    since_s: float, is_over: bool, tmp_path: Path
) -> None:
    ranks = LocalRanks(tmp_path, ["a", "b"], essential=frozenset({0}))
    done, late = subprocess.Popen(["true"]), subprocess.Popen(["sleep", "1000"])
    done.wait()
    ranks.processes = [done, late]
    ranks.since_s["end"] = time.monotonic() - since_s
    try:
        assert ranks.is_over(have_joined=True) is is_over
    finally:
        late.kill()
        late.wait()


class FailingRanks:
    """Ranks whose attempts end as `script` says, one after the other, and then well.

    An entry is the exit codes, and the step that all have agreed on by then; None: no new one.
    """

    def __init__(self, folder: Path, script: Sequence[tuple[dict[int, int], int | None]]) -> None:
        self.run_dir = folder
        self.failed: dict[int, int] = {}
        self.noted_as_left: list[int] = []
        self.max_restarts = 3
        self._script = [*script]

    def start(self) -> None:
        noted = json.loads((self.run_dir / LAUNCHER_FILE).read_text())
        self.noted_as_left.append(noted["restarts_left"])

    def wait(self, meanwhile: Callable[[], bool]) -> None:
        if not self._script:
            return
        self.failed, step = self._script.pop(0)
        if step is not None:
            folder = CheckpointSteps(self.run_dir).step_dir(step)
            folder.mkdir(parents=True)
            (folder / AGREED_FILE).touch()
        raise RunFailed("it failed")


HERE, ELSEWHERE = {0: -9, 1: EXIT_PEER_LOST}, {0: EXIT_PEER_LOST}
RESTARTS: dict[str, tuple[list[tuple[dict[int, int], int | None]], bool]] = {
    "one more than may be": ([(HERE, 10), *3 * [(HERE, None)]], False),
    "with progress each time": ([(HERE, step) for step in range(10, 80, 10)], True),
    "of others with progress": ([(ELSEWHERE, step) for step in range(10, 80, 10)], True),
    "counted apart": ([(HERE, 10), *3 * [(ELSEWHERE, None)], (HERE, None), (HERE, None)], True),
    "of others without progress": ([(HERE, 10), *4 * [(ELSEWHERE, None)]], False),
    "in vain, then with progress": ([(HERE, 10), *2 * [(HERE, None)], (HERE, 20)], True),
    "an error of its own": ([(HERE, 10), ({0: EXIT_COMES_AGAIN}, None)], False),
    "no checkpoint": ([(HERE, None)], False),
    "no checkpoint, others lost": ([(ELSEWHERE, None)], False),
}


@pytest.mark.parametrize("case", RESTARTS)
def test_restarts_are_counted_from_one_checkpoint_to_the_next(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, ends_well = RESTARTS[case]
    ranks: Any = FailingRanks(tmp_path, script)
    attempts: list[None] = []
    if ends_well:
        local.train(ranks, next_attempt=lambda: attempts.append(None), follow=lambda: True)
    else:
        with pytest.raises(RunFailed):
            local.train(ranks, next_attempt=lambda: attempts.append(None), follow=lambda: True)
    assert len(ranks.noted_as_left) == len(script) + ends_well == len(attempts) + 1
    said = capsys.readouterr().out
    as_written.check(f"restarts: {case}", {"left": ranks.noted_as_left, "said": said})


def test_a_run_without_a_checkpoint_begins_again_with_a_peer_that_has(tmp_path: Path) -> None:
    said = {"message": "rank 1 of cloud_b has begun the run again", "peer_lost": True}
    rank_file(tmp_path, 0, "error.json").write_text(json.dumps(said))
    ranks: Any = FailingRanks(tmp_path, [(ELSEWHERE, None)])
    local.train(ranks, next_attempt=lambda: None, follow=lambda: True)
    assert len(ranks.noted_as_left) == 2


@pytest.mark.usefixtures("_nobody_reports")
def test_ranks_that_are_ended_with_one_that_lost_its_peer_have_not_failed(tmp_path: Path) -> None:
    ranks = LocalRanks(tmp_path, ["a", "a"])
    ranks.log(1).touch()
    ranks.processes = [
        subprocess.Popen(["sleep", "1000"]),
        subprocess.Popen(["sh", "-c", f"exit {EXIT_PEER_LOST}"]),
    ]
    with pytest.raises(RunFailed):
        ranks.wait(lambda: False)
    assert ranks.processes[0].returncode == -signal.SIGTERM
    assert ranks.failed == {1: EXIT_PEER_LOST}


def test_nothing_begins_again_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "start_process", lambda *_: pytest.fail("it was started again"))
    ranks = LocalRanks(tmp_path, ["a", "b"], frozenset({0}))
    rank_file(tmp_path, 1, "ready").touch()
    ranks.processes = [
        subprocess.Popen(["sleep", "0.5"]),
        subprocess.Popen(["sh", "-c", "kill -9 $$"]),
    ]
    ranks.wait(lambda: True)


@pytest.mark.usefixtures("_nobody_reports")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_rank_that_stays_stopped_is_ended_and_named_and_one_that_goes_on_is_not(
    tmp_path: Path,
) -> None:
    """Where no link looks for heartbeats: while ranks join, and in a collective."""

    def ranks_of(
        *scripts: str, lost_after_s: float, essential: frozenset[int] | None = None
    ) -> LocalRanks:
        liveness = Liveness(0.1, lost_after_s=lost_after_s)
        ranks = LocalRanks(tmp_path, ["a", "b"], essential, liveness=liveness)
        ranks.processes = [subprocess.Popen(["sh", "-c", text]) for text in scripts]
        return ranks

    stopped = ("sleep 1000", "kill -STOP $$; sleep 1000")
    said = r"rank 1 of cloud 'b': was stopped .* more than 0.5 s"
    with pytest.raises(RunFailed, match=said):
        ranks_of(*stopped, lost_after_s=0.5).wait(lambda: True)
    with pytest.raises(RunFailed, match=said):  # before all have met
        ranks_of(*stopped, lost_after_s=0.5, essential=frozenset({0})).wait(lambda: False)
    goes_on = "(sleep 0.4; kill -CONT $$) & kill -STOP $$"
    ranks_of("sleep 0.8", goes_on, lost_after_s=1.0).wait(lambda: True)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_rank_ends_with_the_process_that_has_started_it() -> None:
    """With the function alone: importing its module takes seconds, for torch."""
    rank = (
        f"import ctypes, os, signal, sys, time\n{inspect.getsource(end_with_parent)}\n"
        "end_with_parent(); os.write(1, b'up'); time.sleep(20); os.write(1, b'late')"
    )
    starter = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.read(2) == b"up"
        parent.kill()
        assert parent.stdout.read() == b""  # closed at both ends


def test_a_run_starts_where_nobody_tells_which_cores_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, whose Python has no os.sched_getaffinity."""
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ranks = LocalRanks(tmp_path, ["a", "b"])
    given: list[str] = []
    monkeypatch.setattr(
        launch, "start_process", lambda command, here, log: given.append(here["OMP_NUM_THREADS"])
    )
    ranks.start()

    assert given == ["4", "4"]


def test_a_number_of_threads_is_used_as_it_is_set_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for given in ("1", "9999", "4,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert num_threads(num_processes=3) == given
    for given in ("", " "):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert num_threads(num_processes=10**6) == "1"
    for given in ("0", "abc", "-3", "1.5", "4,", "4,0", "9" * 20):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS is '{given}', not a number"):
            num_threads(num_processes=1)


def test_nobody_is_waited_for_where_every_rank_has_lost_another(tmp_path: Path) -> None:
    looks: list[int] = []

    def failed() -> dict[int, int]:
        looks.append(1)
        return {0: EXIT_PEER_LOST, 1: EXIT_PEER_LOST}

    (tmp_path / "rank0.log").touch()
    first_cause(tmp_path, {0: "a", 1: "a"}, failed, {})
    assert len(looks) == 1


def test_any_signal_that_ends_a_rank_is_named(tmp_path: Path) -> None:
    for number, name in ((signal.SIGRTMIN + 1, "real-time"), (signal.SIGKILL, "SIGKILL")):
        cause = first_cause(tmp_path, ["a"], lambda number=number: {0: -number}, {})
        assert f"was ended by signal {int(number)} ({name})" in cause


def test_a_rank_that_dies_at_once_is_not_taken_for_what_failed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"message": "no data", "peer_lost": False, "expected": True}
    rank_file(tmp_path, 0, "error.json").write_text(json.dumps(old))

    def start(command: list[str], environment: dict[str, str], log: Path) -> object:
        log.touch()
        return subprocess.Popen(["sh", "-c", "kill -9 $$"])

    monkeypatch.setattr(launch, "start_process", start)
    ranks = LocalRanks(tmp_path, ["a"])
    ranks.start()
    with pytest.raises(RunFailed, match="rank 0 of cloud 'a': was ended by signal 9"):
        ranks.wait(lambda: False)
    assert EXIT_COMES_AGAIN not in ranks.failed.values()


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., dict[str, Any]]]:
    """A run without ranks that gets so many signals while its record is written."""

    class Record:
        def __init__(self, *_: object, **named: object) -> None: ...

        def start(self) -> None: ...

        def next_attempt(self) -> None: ...

        def finish(self, cause: str | None, is_stopped: bool, is_raised: bool) -> dict[str, Any]:
            assert is_raised == (cause is not None)
            for _ in range(num_signals):
                signal.raise_signal(signal.SIGTERM)
            (tmp_path / "written").touch()
            return {"cause": cause}

    num_signals = 0

    def one(
        signals: int, error: Exception | None = None, more_follows: bool = False
    ) -> dict[str, Any]:
        nonlocal num_signals
        num_signals = signals

        def train(*_: object, **named: object) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(local, "Monitor", Record)
        monkeypatch.setattr(local, "train", train)
        asked = Settings.of(toy_config("two_clouds"))
        return local.run(asked, tmp_path, more_follows=more_follows)

    def nobody_waits(number: int, frame: object) -> None:
        raise AssertionError("in a real process nothing would have been written")

    before = signal.signal(signal.SIGTERM, nobody_waits)
    yield one
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_lets_the_record_be_written_and_changes_nothing_else(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    assert run(signals=1) == {"cause": None}
    with pytest.raises(RunFailed, match="rank 1 is gone"):
        run(signals=1, error=RunFailed("rank 1 is gone"))
    assert (tmp_path / "written").exists()


def test_the_second_signal_ends_at_once(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        run(signals=2)
    assert raised.type is KeyboardInterrupt and not (tmp_path / "written").exists()


@pytest.mark.parametrize("error", [None, RunFailed("rank 1 is gone")])
def test_what_would_have_followed_does_not_begin(
    error: Exception | None, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(RunStopped, match="rank 1 is gone" if error else "The run finished"):
        run(signals=1, error=error, more_follows=True)
    assert (tmp_path / "written").exists()


ENDS: dict[str, BaseException | None] = {
    "well": None,
    "by a rank": RunFailed("rank 1 is gone"),
    "by an error of this process": ValueError("no such thing"),
    "from outside": SystemExit(3),
    "stopped": RunStopped(),
    "interrupted": KeyboardInterrupt(),
}


def told_by_a_run(error: BaseException | None, folder: Path, resumes: bool) -> list[Any]:
    """Return which file its ranks read, what its record is told, and what the caller gets."""
    told: list[Any] = []

    def train(ranks: Any, **named: object) -> None:
        note_attempt(folder, restarts_left=0)
        told.append(ranks.experiment_file.name)
        if error is not None:
            raise error

    monitor = Mock(attempt=SimpleNamespace(stop_asked_of=None))
    monitor.finish.side_effect = lambda *given, **named: told.append([*given, named])
    asked = Settings.of(toy_config("two_clouds"))
    folder.mkdir()
    for file in ("rank0.wire.json", "rank1.wire.json", "rank0.wire.earlier.json", SUMMARY_FILE):
        (folder / file).write_text("{}")
    may_resume = None
    if resumes:
        append_event(folder / EVENTS_FILE, "start", rank=0, cloud="a")
        asked.write(folder / EXPERIMENT_FILE)
        with pytest.raises(ConfigError) as refused:
            local.run(asked, folder)
        told.append(str(refused.value))
        may_resume = Mock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "Monitor", Mock(return_value=monitor))
        patch.setattr(local, "train", train)
        try:
            local.run(asked, folder, resumes=may_resume)
        except BaseException as raised:
            assert type(raised) is type(error)
            told.append(repr(raised))
    assert may_resume is None or may_resume.call_args.args == (asked, folder)
    return told


@pytest.mark.parametrize("resumes", [False, True])
def test_how_a_run_ends_is_said_and_what_lies_in_its_folder_then(
    resumes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name, error in ENDS.items():
        told = told_by_a_run(error, tmp_path / name, resumes)
        files = sorted(path.name for path in (tmp_path / name).iterdir())
        found[name] = [*told, capsys.readouterr().out, files]
    text = json.dumps(found).replace(str(tmp_path), "FOLDER")
    as_written.check(f"ends of a run that {'goes on' if resumes else 'is new'}", json.loads(text))


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_closes_ends_a_run_but_not_one_under_nohup(
    is_ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    asked: list[bool] = []
    try:
        signals = local.StopSignals(lambda: asked.append(True))
        with signals.handled():
            signal.raise_signal(signal.SIGHUP) if not is_ignored else None
            taken = signal.getsignal(signal.SIGHUP)
        assert asked == [True] * (not is_ignored)
        assert (taken is signal.SIG_IGN) == is_ignored
    finally:
        signal.signal(signal.SIGHUP, before)


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_every_command_that_waits_takes_every_signal_to_stop(number: signal.Signals) -> None:
    """Each of them asks the same function, so a signal that is added there is added everywhere."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert number in signals_to_stop()
    finally:
        signal.signal(number, before)


def test_a_policy_that_is_missing_is_told_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XCLOUD_POLICY", str(tmp_path / "policy.yaml"))
    with pytest.raises(ConfigError, match=r"there is no file .*policy\.yaml"):
        local.run(Settings.of(toy_config("two_clouds", [])), tmp_path / "run")
    assert not list(tmp_path.glob("run/rank*.log"))

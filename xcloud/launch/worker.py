"""One rank as a process: it joins the others, compares with them what is to run, plays its role
(roles.py), and leaves its last words and its record of what it sent.

READ THIS FIRST. A run on one machine starts this module once per rank (launch.py):
    python -m xcloud worker RUN_DIR --rank R --parent PID
On several machines torchrun starts the same module in each cloud (docs/several-machines.md):
    python -m xcloud torchrun --nnodes 2 --node-rank 0 ... -m xcloud worker experiment.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from xcloud.base.errors import ConfigError, FrameError, LinkError, XcloudError
from xcloud.base.project import MODEL_DIR
from xcloud.cluster.memory_transport import MemoryTransport, MemoryWorld
from xcloud.cluster.transport import PairTransport
from xcloud.job import config as configs
from xcloud.job.job import Job
from xcloud.join import elastic
from xcloud.join.agreement import Agreed, agree, agree_alone, rank_name
from xcloud.join.failure_detector import FailureDetector
from xcloud.join.meeting_store import attempt_of
from xcloud.launch.processes import EXIT_START_AGAIN, end_with_parent
from xcloud.rank.interleaved import join_turns
from xcloud.rank.role import RankContext, Role, is_needed
from xcloud.rank.roles import role_of
from xcloud.record.events import EVENTS_FILE
from xcloud.record.intake import Intake
from xcloud.record.rank_state import RankState, error_file
from xcloud.record.reporter import EventFile, Reporter
from xcloud.record.segments import has_events
from xcloud.record.summary import read_summary
from xcloud.security.wire_audit import audit_file, write_rank_audit
from xcloud.survive.resume import RankCheckpoints
from xcloud.survive.saving import StopSignal

EXIT_FAILED = 1
EXIT_PEER_LOST = 3  # the cause is elsewhere: another rank went away first
MONITOR_NOTE_S = 60.0  # how often to say that the monitor still writes the run's record
LAST_WORDS_S = 0.3
DONE, STOPPED = "has done its part", "has stopped as it was asked to, and saved its last step"
TABLE_WITHIN_S = 30.0  # of a run that has failed
_SETUP_TIMEOUT = timedelta(hours=12)  # one cloud may pretrain its backbone while others wait

Monitoring = subprocess.Popen[bytes] | None


def live(
    job: Job,
    rank: int,
    run_dir: Path,
    agreed: Agreed,
    holder: RankCheckpoints,
    asked: StopSignal,
    transport: PairTransport | None = None,
    state: RankState | None = None,
    failure_detector: FailureDetector | None = None,
    memory: MemoryTransport | None = None,
) -> bool:
    """One rank's life, whatever its role, once its process group is there (a lone rank needs none)
    and the ranks have compared what they run. Returns whether the run has ended early, as asked.
    """
    layout = job.cluster
    cloud = layout.cloud_of(rank)
    is_resumed = has_events(run_dir)
    events = EventFile(run_dir / EVENTS_FILE) if rank == 0 else None
    intake = Intake(events, layout.cloud_of, job.max_steps, job.may_report) if events else None
    # The role is there before anything is reported.
    reporter = Reporter(
        rank, cloud, events.append if events else lambda lines: role.report(lines), state
    )
    context = RankContext(
        job, rank, run_dir, _device(layout.clouds[cloud].device), reporter,
        intake.take if intake else lambda peer, frame: None, agreed.verdict,
        holder, asked, is_resumed, transport, join_turns(run_dir, rank, layout.num_ranks, state),
        memory,
    )  # fmt: skip
    role: Role[Any] = role_of(job, rank)(context)

    def write_audit() -> None:
        records = [*agreed.records, *role.records]
        write_rank_audit(
            run_dir, rank, layout, records, reporter.contents, role.received, job.is_elastic
        )

    def last_words() -> None:
        with contextlib.suppress(LinkError):
            reporter.flush()
            time.sleep(LAST_WORDS_S)
        write_audit()

    if failure_detector is not None:
        failure_detector.met(role.needs, role.lives, last_words)
    if state is not None:
        state.lives = role.lives
    try:
        if agreed.verdict.kind == "refused":
            raise ConfigError(agreed.verdict.text)
        if rank == 0 and agreed.verdict.text and not agreed.verdict.refused:
            reporter.note(agreed.verdict.text)
        with role.alive():
            role.run()
            reporter.flush()
            role.close()
        if failure_detector is not None:
            failure_detector.leave()
        return role.is_stopped
    except BaseException:
        if failure_detector is not None:
            failure_detector.stand_aside()
        # Say what was not said yet, if rank 0 still listens; the threads end with this process.
        with contextlib.suppress(LinkError):
            reporter.flush()
            time.sleep(LAST_WORDS_S)
        raise
    finally:
        context.turns.close(is_finished=False)
        if events is not None and intake is not None:
            intake.close()
            events.close()
        write_audit()


def live_in_threads(
    job: Job, settings: Mapping[str, Any], run_dir: Path, asked: StopSignal, state: RankState
) -> bool:
    """All ranks in this process, each in a thread, over links in memory; as `live`. state: of
    rank 0. Raises what the first rank that fails raises; threads of the others may go on."""
    world, ended = MemoryWorld(), queue.SimpleQueue[bool | BaseException]()
    ranks = range(job.cluster.num_ranks)
    holders = [RankCheckpoints.of(job, rank, run_dir, settings) for rank in ranks]
    agreed = agree_alone(job, settings, [holder.table() for holder in holders])

    def work(rank: int) -> None:
        own = RankState(run_dir, rank) if rank else state
        try:
            transport, holder = world.transport(rank), holders[rank]
            is_stopped = live(
                job, rank, run_dir, agreed, holder, asked, state=own, memory=transport
            )
            if rank:
                own.close(STOPPED if is_stopped else DONE)
            ended.put(is_stopped)
        except BaseException as error:
            ended.put(error)

    for rank in ranks:
        threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True).start()
    is_stopped = False
    for _ in ranks:
        found = ended.get()
        if isinstance(found, BaseException):
            raise found
        is_stopped = found
    return is_stopped


def _device(wanted: str) -> torch.device:
    """The device of this rank; "auto" takes a GPU if there is one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("a cloud asks for device 'cuda', but torch finds no GPU on this machine")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(job: Job, rank: int, run_dir: Path, failure_detector: FailureDetector | None) -> None:
    """Form the process group. On one machine a file in the run folder is the meeting point, and
    the launcher looks after the ranks. failure_detector: of ranks under torchrun."""
    num_ranks = job.cluster.num_processes
    if failure_detector is not None:
        join_within_s = job.cluster.liveness.join_within_s
        size = int(os.environ["WORLD_SIZE"])

        def connect(timeout_s: float) -> Store:
            store: Store = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0]
            failure_detector.ask(store)
            return store

        store = attempt_of(connect, rank, size, failure_detector.watch, join_within_s)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=_SETUP_TIMEOUT
        )
    elif num_ranks > 1:
        # Not by its URL, which would end at a '#' or '?' in the path.
        store = FileStore(str(run_dir.resolve() / "rendezvous"), num_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=_SETUP_TIMEOUT
        )


def _check_started(job: Job) -> None:
    """After the ranks have agreed on the file: its number of ranks is then the same in all."""
    started, num_ranks = int(os.environ["WORLD_SIZE"]), job.cluster.num_processes
    if started != num_ranks:
        raise ConfigError(
            f"torchrun started {started} ranks in all, but the clouds of this experiment have "
            f"{num_ranks}; set --nproc-per-node of each cloud to its num_ranks"
        )


def _check_unfinished(job: Job, run_dir: Path) -> None:
    """torchrun starts a run that was interrupted again with the same command, so it goes on; one
    that has come to its end must not."""
    summary = read_summary(run_dir)
    if summary.get("status") == "finished" and summary.get("num_steps", 0) >= job.max_steps:
        raise ConfigError(
            f"{run_dir} holds a finished run; give another --run-dir, or raise "
            "training.max_steps in every cloud's experiment file to train it longer"
        )


def _tie_to_parent(parent: int) -> None:
    """End with the parent, whatever ends it; leave Ctrl+C to the parent, which ends all ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    if sys.platform == "linux" and os.getppid() != parent:
        sys.exit("the parent is gone")


def _write_failure(run_dir: Path, rank: int, error: BaseException) -> int:
    """Say in a file what went wrong here; returns the exit code."""
    text = str(error)
    # Who refuses a frame has lost nobody: the refusal is the cause.
    is_lost = isinstance(error, LinkError) and not isinstance(error, FrameError)
    # A collective inside a cloud breaks with a bare RuntimeError when a peer goes away.
    peer_lost = is_lost or (
        isinstance(error, RuntimeError)
        and any(sign in text for sign in ("Connection closed by peer", "Connection reset by peer"))
    )
    expected = isinstance(error, XcloudError)
    message = (text if expected else f"{type(error).__name__}: {text}").strip()
    lines = traceback.format_exception(error)
    failure = {"message": message, "peer_lost": peer_lost, "expected": expected}
    if error_file(run_dir, rank).exists():  # another thread has named the first cause
        return EXIT_PEER_LOST if peer_lost else EXIT_FAILED
    # On a full disk the log is all that is left, or not even that: the exit code must not suffer.
    with contextlib.suppress(OSError):
        error_file(run_dir, rank).write_text(json.dumps(failure | {"traceback": lines}))
    with contextlib.suppress(OSError):
        said = f"xcloud: rank {rank}: {message}\n" if expected else "".join(lines)
        print(said, end="", file=sys.stderr, flush=True)
    return EXIT_PEER_LOST if peer_lost else EXIT_FAILED


def main(words: Sequence[str] | None = None) -> None:
    """Ends the process itself."""
    parser = argparse.ArgumentParser(
        prog="python -m xcloud worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("experiment", type=Path, help="run folder or experiment file")
    parser.add_argument("--rank", type=int, help="set by the launcher; torchrun sets it itself")
    parser.add_argument("--parent", type=int, help="process to end with; set by the launcher")
    parser.add_argument(
        "--cloud", help="torchrun: refuse to start if this rank is in another cloud"
    )
    parser.add_argument("--run-dir", type=Path, help="where to write (default: beside the file)")
    arguments = parser.parse_args(words)
    under_torchrun = arguments.rank is None
    if under_torchrun and "RANK" not in os.environ:
        parser.error("start me with torchrun, or use run.py")
    if arguments.parent is not None:
        _tie_to_parent(arguments.parent)
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's ranks would go on without it
        end_with_parent()

    file = arguments.experiment
    file = file / configs.EXPERIMENT_FILE if file.is_dir() else file
    run_dir = (arguments.run_dir or file.parent).resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ["RANK"]) if under_torchrun else arguments.rank
    for stale in (error_file(run_dir, rank), audit_file(run_dir, rank)):
        stale.unlink(missing_ok=True)  # of an earlier run in this folder
    is_first_here = under_torchrun and os.environ.get("LOCAL_RANK", "0") == "0"
    # The monitor tells of rank 0; in every other cloud its first rank says what it does.
    state = RankState(run_dir, rank, under_torchrun, says=is_first_here and rank != 0)
    ending = DONE
    code, failure_detector = 0, None
    monitor: Monitoring = None
    asked = StopSignal()
    ends = (signal.SIGTERM, signal.SIGINT) if under_torchrun else ()
    asked.install(signal.SIGUSR1, *ends, exit_code=EXIT_START_AGAIN)
    try:
        _set_threads()
        config = configs.read_config(file)
        # The launcher of this machine has composed or checked what it gives its ranks.
        job = (
            configs.shared_job(config, run_dir)
            if under_torchrun
            else configs.job_from_config(config)
        )
        _check_cloud(job, rank, arguments.cloud)
        state.may_leave = rank not in job.essential_ranks
        settings, transport = configs.plain_settings(config), None
        holder = RankCheckpoints.of(job, rank, run_dir, settings)
        held = holder.table()  # reads whole files: before the others wait for this rank
        if under_torchrun:
            failure_detector = FailureDetector(
                rank, lambda r: rank_name(job, r), job.cluster.liveness.lost_after_s,
                lambda error: _end_alone(run_dir, rank, state, error, monitor),
                partial(is_needed, job, rank) if job.is_elastic else bool,
            )  # fmt: skip
        if job.is_elastic:
            transport, agreed = elastic.join(job, settings, rank, run_dir, held, failure_detector)
        else:
            _join(job, rank, run_dir, failure_detector)
            agreed = agree(job, settings, rank, held)
        is_shared = job.cluster.num_processes < job.cluster.num_ranks
        if under_torchrun:
            _check_started(job)
            _check_unfinished(job, run_dir)
        if is_first_here:
            _keep_experiment(file, config, run_dir)
            print(job.headline, flush=True)
        if under_torchrun and rank == 0:
            monitor = _start_monitor(run_dir, file)
        if is_shared:
            is_stopped = live_in_threads(job, settings, run_dir, asked, state)
        else:
            is_stopped = live(
                job, rank, run_dir, agreed, holder, asked, transport, state, failure_detector
            )
        if is_stopped:
            ending = STOPPED
            code = EXIT_START_AGAIN
        elif is_first_here and rank != 0 and (run_dir / MODEL_DIR).is_dir():
            print(f"this cloud's part of the model: {(run_dir / MODEL_DIR).resolve()}", flush=True)
        if monitor is not None:
            state.enter("waiting for the monitor")
            if _await_monitor(monitor) < 0:
                print("the monitor was killed; another one writes the run's record", flush=True)
                _await_monitor(_start_monitor(run_dir, file, "--again"))
    except BaseException as error:
        code, ending, state.says = EXIT_FAILED, _failed(error), False
        if failure_detector is not None:
            failure_detector.close()
        code = _write_failure(run_dir, rank, error)
        _await_table(monitor)
    finally:
        state.close(ending)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # Background threads of a failed rank may sit in a receive for ever: do not wait for them.
        os._exit(code)


def _keep_experiment(file: Path, config: Any, run_dir: Path) -> None:
    """For `export` and the tracker, once all ranks have agreed to run it."""
    kept = run_dir / configs.EXPERIMENT_FILE
    with contextlib.suppress(OSError):  # a full disk: the monitor says what it cannot write
        if file.resolve() != kept:
            configs.write(config, kept)


def _failed(error: BaseException) -> str:
    return f"has failed: {str(error)[:300]}"


def _end_alone(
    run_dir: Path, rank: int, state: RankState, error: LinkError, monitor: Monitoring
) -> None:
    """From another thread: the main one may wait for a rank that is gone, inside torch."""
    code = _write_failure(run_dir, rank, error)
    state.close(_failed(error))
    _await_table(monitor)
    os._exit(code)


def _await_table(monitor: Monitoring) -> None:
    """Of a run that has failed, before the command that started the ranks ends."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if monitor is not None:
            monitor.wait(TABLE_WITHIN_S)


def _start_monitor(run_dir: Path, file: Path, *more: str) -> subprocess.Popen[bytes]:
    """On several machines no launcher watches the run: rank 0's machine follows its events."""
    command = [sys.executable, "-m", "xcloud", "monitor", str(run_dir), "--experiment", str(file)]
    return subprocess.Popen([*command, "--parent", str(os.getpid()), *more])


def _await_monitor(monitor: subprocess.Popen[bytes], note_s: float = MONITOR_NOTE_S) -> int:
    """However long it measures, draws and stores: the run itself has ended well. Returns its exit
    code, below 0 for a signal."""
    while True:
        try:
            return monitor.wait(note_s)
        except subprocess.TimeoutExpired:
            print(f"the run is done; process {monitor.pid} still writes its record", flush=True)


def _check_cloud(job: Job, rank: int, cloud: str | None) -> None:
    if cloud is None or rank >= job.cluster.num_ranks:
        return  # too many ranks are refused when all have joined, whatever file they read
    found = job.cluster.placement(rank).cloud
    if cloud != found:
        raise ConfigError(
            f"this is rank {rank}, which belongs to cloud {found!r}, not {cloud!r}; start the "
            f"clouds with --node-rank in this order: {', '.join(job.cluster.clouds)}"
        )


def _set_threads() -> None:
    """Each rank takes its share of this machine's cores; OMP_NUM_THREADS overrides."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(
            max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        )

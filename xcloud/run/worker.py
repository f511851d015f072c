"""What one rank does: build its part of the model, train it with the others, evaluate, export.

READ THIS FIRST. A run on one machine starts this module once per rank (launch.py):
    python -m xcloud worker RUN_DIR --rank R --parent PID
On several machines torchrun starts the same module in each cloud (docs/several-machines.md):
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 ... -m xcloud worker experiment.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from xcloud.comm.step_clock import StepClock
from xcloud.errors import ConfigError, FrameError, LinkError, XcloudError
from xcloud.job.config import EXPERIMENT_FILE, job_from_config, plain_settings, read_config
from xcloud.job.experiment import Experiment
from xcloud.job.job import Job
from xcloud.job.one_way import OneWayExperiment
from xcloud.models.split import BuildContext
from xcloud.parallel.pipeline import Pipeline
from xcloud.parallel.stage import Batch
from xcloud.project import project_root
from xcloud.record.events import EVENTS_FILE
from xcloud.record.reporter import EventFile, Reporter
from xcloud.run.agreement import Agreed, agree
from xcloud.run.evaluation import Evaluator
from xcloud.run.export import export_stage
from xcloud.run.loading import load
from xcloud.run.one_way.worker import run_one_way
from xcloud.run.typical_step import KEEP_STEPS, report_typical_step
from xcloud.run.wan_meter import WanMeter
from xcloud.run.wiring import Wiring, wire
from xcloud.security.observer import OBSERVATIONS_DIR, Observer
from xcloud.security.wire_audit import write_rank_audit
from xcloud.tasks.task import TaskData
from xcloud.training.settings import autocast_for
from xcloud.training.trainer import Trainer

EXIT_FAILED = 1
EXIT_PEER_LOST = 3  # the cause is elsewhere: another rank went away first
MONITOR_NOTE_S = 60.0  # how often to say that the monitor still writes the run's record
LAST_WORDS_S = 0.3
_SETUP_TIMEOUT = timedelta(hours=12)  # one cloud may pretrain its backbone while others wait


def run(experiment: Job, rank: int, run_dir: Path, agreed: Agreed) -> None:
    """One rank's whole life, once its process group is there (a lone rank needs none) and the
    ranks have compared what they run."""
    if isinstance(experiment, OneWayExperiment):  # a one-way job has a loop of its own
        cloud = experiment.cluster.placement(rank).cloud
        device = _device(experiment.cluster.clouds[cloud].device)
        run_one_way(experiment, rank, run_dir, device, agreed)
        return
    assert isinstance(experiment, Experiment)
    layout = experiment.cluster
    placement = layout.placement(rank)
    device = _device(layout.clouds[placement.cloud].device)
    clock = StepClock(
        record_from=max(1, experiment.training.max_steps - KEEP_STEPS + 1),
        slowdown=layout.clouds[placement.cloud].slowdown,
    )
    events = EventFile(run_dir / EVENTS_FILE) if rank == 0 else None

    wiring = wire(
        rank, layout, experiment.borders, experiment.compression, experiment.max_micro_batch,
        device, clock, run_dir,
        on_report=events.append_frame if events is not None else lambda frame: None,
        schedule=experiment.schedule,
        defences=experiment.security.defences,
        seed=experiment.seed,
    )  # fmt: skip
    wiring.wan_records.extend(agreed.records)
    control = wiring.control
    if events is not None:
        reporter = Reporter(rank, placement.cloud, events.append)
        if agreed.verdict.text:
            reporter.note(agreed.verdict.text)
    else:
        assert control is not None
        reporter = Reporter(rank, placement.cloud, control.report)
    try:
        _train(experiment, rank, run_dir, device, clock, wiring, reporter)
    except BaseException:
        # Say what was not said yet, if rank 0 still listens; the threads end with this process.
        with contextlib.suppress(LinkError):
            reporter.flush()
            time.sleep(LAST_WORDS_S)
        if events is not None:
            events.close()
        write_rank_audit(run_dir, rank, layout, wiring.wan_records, reporter.contents)
        raise
    reporter.flush()
    wiring.close()
    if events is not None:
        events.close()
    write_rank_audit(run_dir, rank, layout, wiring.wan_records, reporter.contents)


def _train(
    experiment: Experiment,
    rank: int,
    run_dir: Path,
    device: torch.device,
    clock: StepClock,
    wiring: Wiring,
    reporter: Reporter,
) -> None:
    """From an empty rank that is joined to the others to an exported stage."""
    layout, control = experiment.cluster, wiring.control
    placement = layout.placement(rank)
    reporter.event("phase", now=True, name="loading")

    # 1. Load what this cloud may see, and agree on the rest.
    data = load(experiment, rank, control)
    if rank == 0:
        reporter.note(data.describe())

    # 2. Build the stages.
    cache_dir = Path(experiment.cache_dir)
    cache_dir = cache_dir if cache_dir.is_absolute() else project_root() / cache_dir
    stages = {}
    for stage in placement.stages:
        ranks = layout.ranks_of(stage)
        context = BuildContext(
            seed=experiment.seed,
            device=device,
            cache_dir=cache_dir,
            vocabularies={name: data.vocabulary(name) for name in data.text_fields},
            sentences=data.sentences,
            samples=partial(_spread, data),
            max_length=experiment.task.max_length,
            lane=ranks.index(rank),
            barrier=wiring.lanes[stage].barrier,
            report=reporter.note,
            head=data.head,
        )
        stages[stage] = experiment.model.build_stage(stage, layout.num_stages, context).to(device)
    pipeline = Pipeline(
        rank, stages, layout.num_stages, wiring.ports, layout.owner,
        {s: (layout.ranks_of(s).index(rank), len(layout.ranks_of(s))) for s in stages},
        device, experiment.seed, clock, autocast_for(experiment.training.precision, device),
        observer := _observer(experiment, rank, data),
    )  # fmt: skip
    if layout.num_ranks > 1:
        dist.barrier()  # a cloud may prepare longer than a message may take
    pipeline.hand_over()

    # 3. Train.
    last = layout.num_stages - 1
    trainer = Trainer(
        rank, pipeline, experiment.schedule, experiment.training,
        experiment.batch_plan(data.num_samples("train")),
        wiring.lanes, control, lambda ids: _on(device, data.batch("train", ids)),
        data.weight if last in stages else None,
    )  # fmt: skip
    evaluator = Evaluator(
        experiment.training, rank, pipeline, wiring.lanes, data,
        lambda split, ids: _on(device, data.batch(split, ids)), reporter, run_dir,
    )  # fmt: skip
    meter = WanMeter(wiring)
    reporter.event("phase", now=True, name="training")
    for step in range(1, experiment.training.max_steps + 1):
        report = trainer.update(step)
        reporter.event("step", **meter.describe(report))
        if report.skipped is not None and rank == 0:  # every rank knows
            reporter.event("skipped_update", step=step)
            reporter.note(report.skipped)
        every = experiment.training.evaluate_every
        if every and step % every == 0:
            with wiring.alive():
                evaluator.evaluate("dev", step)
                wiring.meet()  # or the next step would wait for another cloud's decoding
            meter.forget()
    if observer is not None:
        with reporter.may_lose(OBSERVATIONS_DIR):
            observer.write(run_dir)
    report_typical_step(clock, layout.num_ranks, reporter)

    # 4. Export, evaluate through the same link, say goodbye.
    with wiring.alive():
        for stage, module in stages.items():
            if wiring.lanes[stage].leads:
                export_stage(run_dir, stage, module, data)
        wiring.meet()  # an evaluation that fails ends all ranks: only once all have exported
        reporter.event("phase", now=True, name="evaluation")
        evaluator.evaluate("test", experiment.training.max_steps)
        wiring.meet()
    reporter.event("finish", num_steps=experiment.training.max_steps)


def _observer(experiment: Experiment, rank: int, data: TaskData) -> Observer | None:
    """Who takes notes for the leak meter, if it is on and there is another cloud to see."""
    meter, layout = experiment.security.meter, experiment.cluster
    if meter is None or not layout.crosses_clouds:
        return None
    cloud = layout.placement(rank).cloud
    vocabularies = {name: data.vocabulary(name) for name in data.text_fields}
    token_fields = {name: (ids.pad, (ids.bos, ids.eos)) for name, ids in vocabularies.items()}
    return Observer(
        rank, cloud, layout.num_ranks, meter, experiment.training.max_steps, token_fields,
        experiment.fields_of_cloud(cloud),
    )  # fmt: skip


def _spread(data: TaskData, count: int) -> Batch:
    """So many training samples from all over the file, which may be sorted."""
    num_samples = data.num_samples("train")
    ids = torch.arange(0, num_samples, max(1, num_samples // count))[:count]
    return data.batch("train", ids)


def _on(device: torch.device, batch: Batch) -> Batch:
    """The batch on the rank's device; sample ids stay where Python reads them."""
    return {name: value if name == "ids" else value.to(device) for name, value in batch.items()}


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


def _join(experiment: Job, rank: int, run_dir: Path, under_torchrun: bool) -> None:
    """Form the process group. On one machine a file in the run folder is the meeting point."""
    num_ranks = experiment.cluster.num_ranks
    if under_torchrun:
        dist.init_process_group("gloo", timeout=_SETUP_TIMEOUT)
    elif num_ranks > 1:
        store = f"file://{run_dir.resolve() / 'rendezvous'}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=_SETUP_TIMEOUT
        )


def _check_started(experiment: Job) -> None:
    """After the ranks have agreed on the file: its number of ranks is then the same in all."""
    started, num_ranks = int(os.environ["WORLD_SIZE"]), experiment.cluster.num_ranks
    if started != num_ranks:
        raise ConfigError(
            f"torchrun started {started} ranks in all, but the clouds of this experiment have "
            f"{num_ranks}; set --nproc-per-node of each cloud to its num_ranks"
        )


def _tie_to_parent(parent: int) -> None:
    """End with the parent, whatever ends it; leave Ctrl+C to the parent, which ends all ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
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
    message = text if expected else f"{type(error).__name__}: {text}"
    failure = {"message": message.strip(), "peer_lost": peer_lost, "expected": expected}
    # On a full disk the log is all that is left, or not even that: the exit code must not suffer.
    with contextlib.suppress(OSError):
        (run_dir / f"rank{rank}.error.json").write_text(json.dumps(failure))
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
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

    file = arguments.experiment
    file = file / EXPERIMENT_FILE if file.is_dir() else file
    run_dir = arguments.run_dir or file.resolve().parent
    run_dir.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ["RANK"]) if under_torchrun else arguments.rank
    code, monitor = 0, None
    try:
        _set_threads()
        config = read_config(file)
        experiment = job_from_config(config)
        _check_cloud(experiment, rank, arguments.cloud)
        _join(experiment, rank, run_dir, under_torchrun)
        agreed = agree(experiment, plain_settings(config), rank)
        if under_torchrun:
            _check_started(experiment)
        if under_torchrun and rank == 0:
            monitor = _start_monitor(run_dir, file)
            print(experiment.headline, flush=True)
        run(experiment, rank, run_dir, agreed)
        if monitor is not None:
            _await_monitor(monitor)
    except BaseException as error:
        code = EXIT_FAILED
        code = _write_failure(run_dir, rank, error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # Background threads of a failed rank may sit in a receive for ever: do not wait for them.
        os._exit(code)


def _start_monitor(run_dir: Path, file: Path) -> subprocess.Popen[bytes]:
    """On several machines no launcher watches the run: rank 0's machine follows its events."""
    command = [sys.executable, "-m", "xcloud", "monitor", str(run_dir), "--experiment", str(file)]
    return subprocess.Popen([*command, "--parent", str(os.getpid())])


def _await_monitor(monitor: subprocess.Popen[bytes], note_s: float = MONITOR_NOTE_S) -> None:
    """However long it measures, draws and stores: the run itself has ended well."""
    while True:
        try:
            monitor.wait(note_s)
            return
        except subprocess.TimeoutExpired:
            print(f"the run is done; process {monitor.pid} still writes its record", flush=True)


def _check_cloud(experiment: Job, rank: int, cloud: str | None) -> None:
    if cloud is None or rank >= experiment.cluster.num_ranks:
        return  # too many ranks are refused when all have joined, whatever file they read
    found = experiment.cluster.placement(rank).cloud
    if cloud != found:
        raise ConfigError(
            f"this is rank {rank}, which belongs to cloud {found!r}, not {cloud!r}; start the "
            f"clouds with --node-rank in this order: {', '.join(experiment.cluster.clouds)}"
        )


def _set_threads() -> None:
    """Each rank takes its share of this machine's cores; OMP_NUM_THREADS overrides."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(
            max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        )

"""A trial run: a few steps of the job as configured, over a free line, beside what is predicted of
them. Work takes longer in a run than in the process that measured it; the ratio is the profile's
work factor. Searches nothing.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from xcloud.base.errors import RunFailed
from xcloud.base.units import human_seconds
from xcloud.comm.compression import Phased
from xcloud.job import config as configs
from xcloud.job.experiment import Experiment
from xcloud.launch.local import run
from xcloud.launch.processes import RunStopped
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.plan.plans import Arranged, Plan
from xcloud.plan.pricing import Pricer
from xcloud.plan.profile import MOST_FACTOR, Profile, WorkFactor
from xcloud.plan.settings import Planning
from xcloud.record.events import EVENTS_FILE
from xcloud.record.summary import read_run

WARM_UP = 2  # steps that are not counted
USUAL = (0.5, 1.5)  # factors beyond these have another cause


def why_none(job: Experiment, plan: Planning) -> str:
    """Why no trial can tell the work factor; empty if one can."""
    if plan.profile is not None:
        return "plan.profile is a file, which may be of other machines"
    if not plan.trial_steps:
        return "plan.trial_steps is 0"
    wants_gpu = any(cloud.device == "cuda" for cloud in job.cluster.clouds.values())
    if wants_gpu and not torch.cuda.is_available():
        return "a cloud asks for device 'cuda', and this machine has no GPU"
    return ""


def work_factor(
    job: Experiment, own: Plan, profile: Profile, num_steps: int, measure_s: Callable[[], float]
) -> WorkFactor:
    """own: the job's settings as a plan. measure_s: see `measured_s`. On a free line a step is
    made of work alone, so its prediction grows in proportion to the factor."""
    what = f"{num_steps} steps of the job as configured"
    print(f"trial: {what}, over a free line … ", end="", flush=True)
    try:
        found_s = measure_s()
    except BaseException:
        print(flush=True)
        raise
    foreseen_s = predicted_s(job, own, profile)
    value = min(found_s / foreseen_s, MOST_FACTOR)
    result = f"a step took {human_seconds(found_s)}, {human_seconds(foreseen_s)} predicted"
    print(f"{result}: work factor {value:.3g}", flush=True)
    label = f"{own.strategy}, m = {own.micro_batches}, {own.schedule_label}, {own.compression}"
    return WorkFactor(value, "trial", f"{what} ({label}): {result}", job.cluster.num_ranks)


def unusual_because(factor: WorkFactor | None) -> list[str]:
    """Why a factor that was found may not hold; empty if it does."""
    least, most = USUAL
    if factor is None or factor.source == "given" or least <= factor.value <= most:
        return []
    return [
        f"work is said to take {factor.value:.3g} times as long in a run as by itself "
        f"({factor.source}), and {least:g} to {most:g} is usual: were there more ranks than "
        "processors, or was something else running? To measure anew: plan.max_age_days=0"
    ]


def predicted_s(job: Experiment, plan: Plan, profile: Profile) -> float:
    """The step that `measured_s` measures."""
    strategy = job.strategy
    if isinstance(strategy.averaging, LocalUpdates):
        never = replace(strategy.averaging, every=10**9, fragments=1)
        strategy = replace(strategy, averaging=never)
    layout, training = replace(job.cluster, wan="free", links={}), job.training
    arranged = {plan.strategy: Arranged(strategy, layout)}
    return Pricer(profile, arranged, training.batch_size, training.accumulate_steps).step_s(plan)


def measured_s(config: Any, job: Experiment, num_steps: int) -> float:
    """The median step of a run of `trial_config`, without the first ones, and
    without the last one of local updates, which merges. Leaves nothing behind, but for the logs of
    a run that fails. Raises RunFailed, RunStopped."""
    folder, is_kept = Path(tempfile.mkdtemp(prefix="xcloud-trial-")), False
    try:
        steps_s = steps_of_run(trial_config(config, job, num_steps), folder)
    except RunFailed as error:
        is_kept = True
        raise RunFailed(
            f"{error}; that was the trial run of plan, which plan.trial_steps=0 leaves out"
        ) from None
    except RunStopped:
        raise RunStopped(
            "the trial run was interrupted (Ctrl+C, SIGTERM or SIGUSR1), so nothing is planned; "
            "the profile is kept"
        ) from None
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
    last = num_steps - isinstance(job.strategy.averaging, LocalUpdates)
    return statistics.median(s for step, s in steps_s.items() if WARM_UP < step <= last)


def trial_config(config: Any, job: Experiment, num_steps: int) -> Any:
    """The job as configured, without what no step's prediction holds: lines, merges of local
    updates (but at the end), kept rows, phases of compression but the last; and without all that
    stands around the steps."""
    settings = {
        "plan": None,
        "tracker": {"_target_": "xcloud.record.tracking.NullTracker"},
        "launch.max_restarts": 0,
        "cluster.wan": "free",
        "cluster.links": {},
        "security.meter": None,
        "training.max_steps": num_steps,
        "training.evaluate_every": 0,
        "training.eval_samples": 1,
        "training.activation_cache_mb": 0,
        "training.checkpoint.every_steps": 0,
        "training.checkpoint.every_minutes": 0,
    }
    if isinstance(job.strategy.averaging, LocalUpdates):
        rarely = {"every": num_steps, "fragments": 1, "overlap": 0, "most_s": None,
                  "most_tokens": None}  # fmt: skip
        settings |= {f"strategy.averaging.{name}": value for name, value in rarely.items()}
    if isinstance(job.compression, Phased):
        last = list(job.compression.phases)[-1]
        settings["compression"] = config.compression[last].compression
    return configs.changed(config, settings)


def steps_of_run(config: Any, run_dir: Path) -> dict[int, float]:
    """Run it without a word on stdout. Seconds of each step, as its summary counts them."""
    with contextlib.redirect_stdout(io.StringIO()):
        run(config, run_dir, more_follows=True)
    steps = read_run(run_dir / EVENTS_FILE).steps
    return dict(zip(steps.step, steps["step_s"], strict=True))

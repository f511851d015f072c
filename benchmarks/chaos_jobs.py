"""Small jobs for benchmarks/chaos.py: toy tasks through the real launcher. No faults here."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.one_way_toy import cloud, feed_config
from tests.runs import weights
from tests.toy import ToyModel, ToyStage, toy_config
from xcloud.comm.channel import Message
from xcloud.contracts.model import Batch, BuildContext, Stage, StageOutput
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.record.summary import read_run

EVERY = 3  # steps from a checkpoint to the next
LOST_AFTER_S = 5.0
_COMMON = [
    f"training.checkpoint.every_steps={EVERY}", "training.evaluate_every=16",
    "cluster.liveness.interval_s=1", f"cluster.liveness.lost_after_s={LOST_AFTER_S:g}",
    "launch.max_restarts=1000",
]  # fmt: skip
BAD_SAMPLE = 13


@dataclass(frozen=True)
class ModelInTrouble(ToyModel):
    """The loss of a batch is NaN if it has the sample `bad_sample`. Whoever makes the file `nan`
    in `trouble` makes one more NaN, and with `memory.PID` that process needs a GB more."""

    bad_sample: int | None = None
    trouble: str = ""

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 * context.seed + stage)
            return StageInTrouble(self, stage, num_stages)


class StageInTrouble(ToyStage):
    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        output, model = super().forward(received, batch), self.model
        assert isinstance(model, ModelInTrouble)
        if _take(model, f"memory.{os.getpid()}"):
            torch.empty(1 << 30, dtype=torch.uint8)
        if output.loss is None:
            return output
        is_bad = model.bad_sample is not None and bool((batch["ids"] == model.bad_sample).any())
        if is_bad or _take(model, "nan"):
            return StageOutput(loss=output.loss * torch.nan)
        return output


def _take(model: ModelInTrouble, name: str) -> bool:
    """Whether somebody has made that file, which is then gone."""
    file = Path(model.trouble) / name
    if not model.trouble or not file.exists():
        return False
    file.unlink(missing_ok=True)
    return True


def _pipeline(cluster: str, *overrides: str) -> dict[str, Any]:
    config: dict[str, Any] = toy_config(cluster, [*_COMMON, *overrides])
    config["model"] |= {
        "_target_": "benchmarks.chaos_jobs.ModelInTrouble", "step_s": 0.01,
    }  # fmt: skip
    return config


def _svd() -> dict[str, Any]:
    config = _pipeline("two_clouds", "compression=svd_fp16_int8")
    config["compression"]["forward_memory"] = {"_target_": "xcloud.comm.memory.ErrorFeedback"}
    return config


def _nan() -> dict[str, Any]:
    config = _pipeline("two_clouds", "training.on_divergence=skip")
    config["model"]["bad_sample"] = BAD_SAMPLE
    return config


def _one_way() -> dict[str, Any]:
    clouds = {"disc": cloud(1), "one": cloud(1, 2.0), "two": cloud(1, 1.0)}
    training = {
        "checkpoint": {
            "_target_": "xcloud.pipeline.settings.Checkpoints",
            "every_steps": EVERY, "every_minutes": 10, "keep": 2,
        },
    }  # fmt: skip
    config = feed_config(
        clouds,
        model={"step_s": 0.04},
        feed={"on_dead": "stop"},
        training=training,
        more={"launch": {"_target_": "xcloud.job.job.Launch", "max_restarts": 1000}},
    )
    liveness = {"_target_": "xcloud.net.link_profile.Liveness"}
    config["cluster"]["liveness"] = {
        **liveness,
        "interval_s": 1.0,
        "lost_after_s": LOST_AFTER_S,
    }  # type: ignore[index]
    return config


LANES = [
    "cluster.clouds.cloud_a.num_ranks=2", "cluster.clouds.cloud_b.num_ranks=2",
    "training.accumulate_steps=2", "schedule.num_micro_batches=4", "training.batch_size=16",
]  # fmt: skip
JOBS = {
    "pipeline fp32": lambda: _pipeline("two_clouds"),
    "int4, delta memory": lambda: _pipeline("two_clouds", "compression=delta_int4"),
    "svd, error feedback": _svd,
    "2x2 lanes, accumulated": lambda: _pipeline("two_clouds", *LANES),
    "u-shape": lambda: _pipeline("u_shape"),
    "one-way": _one_way,
    "data parallel int8": lambda: _pipeline(
        "two_clouds", "strategy=data_parallel", "compression=int8"
    ),
    "local updates": lambda: _pipeline(
        "two_clouds", "strategy=local_updates", "strategy.averaging.every=4"
    ),
    "nan batch skipped": _nan,
}


def config_of(
    name: str,
    steps: int,
    mlflow: Path | None = None,
    trouble: Path | None = None,
    on_machines: bool = False,
) -> dict[str, Any]:
    """mlflow: the folder of its store; None: untracked. on_machines: over real links."""
    config = JOBS[name]()
    config["training"]["max_steps"] = steps
    if mlflow is not None:
        config["tracker"] = {
            "_target_": "xcloud.tracking.tracker.MlflowTracker",
            "root": str(mlflow), "experiment": "chaos", "uri": None, "flush_s": 0.2,
            "finish_timeout_s": 10.0,
        }  # fmt: skip
    if trouble is not None and name != "one-way":
        config["model"]["trouble"] = str(trouble)
    if on_machines:
        config["cluster"]["wan"] = "real"
    return config


def num_ranks(name: str) -> int:
    return {"2x2 lanes, accumulated": 4, "one-way": 3}.get(name, 2)


def num_on_first(name: str) -> int:
    """Ranks of the first cloud."""
    return 2 if name == "2x2 lanes, accumulated" else 1


def fits(job: str, kind: str, phase: str = "step") -> bool:
    """Whether a job can meet a fault, in that phase."""
    if job == "one-way":  # its model makes no trouble, and it evaluates at its end only
        return kind not in ("NaN", "out of memory") and phase != "evaluation"
    return kind != "NaN" or job != "nan batch skipped"


def weights_of(name: str, folders: list[Path]) -> str:
    """A digest of the trained model, of all clouds' folders: equal bits, equal digest."""
    digest = hashlib.sha256()
    found = {key: value for folder in folders for key, value in weights(folder).items()}
    for key, value in sorted(found.items()):
        # A producer runs ahead as far as the timing of the end lets it.
        if name != "one-way" or key.startswith("consumer"):
            digest.update(key.encode())
            digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def losses_of(run_dir: Path) -> dict[str, list[str]]:
    """Everything that was told of a loss, by step and rank; of steps done twice, too."""
    losses: dict[str, set[str]] = {}
    for event in list(EventReader(run_dir / EVENTS_FILE, warn=False)):
        if event["event"] == "step" and "loss" in event:
            key = f"step {event['step']}, rank {event['rank']}"
            losses.setdefault(key, set()).add(repr(event["loss"]))
    return {key: sorted(told) for key, told in losses.items()}


def resumes_of(run_dir: Path) -> tuple[int, int]:
    """How often the run went on from a checkpoint, and how many steps were done twice by that."""
    again = [one["steps_again"] for one in read_run(run_dir / EVENTS_FILE).resumes]
    return len(again), sum(again)

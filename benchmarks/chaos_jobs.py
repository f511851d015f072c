"""Small jobs for benchmarks/chaos.py: toy tasks through the real launcher. No faults here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.one_way_toy import cloud, feed_config
from tests.runs import weights
from tests.toy import ToyModel, ToyStage, toy_config
from xcloud.comm.border import Message
from xcloud.contracts.split_model import BuildContext
from xcloud.contracts.stage import Batch, Stage, StageOutput
from xcloud.record.events import EVENTS_FILE, EventReader

STEPS, EVERY = 24, 3
_COMMON = [
    f"training.max_steps={STEPS}", f"training.checkpoint.every_steps={EVERY}",
    "training.evaluate_every=8",
    "cluster.liveness.interval_s=1", "cluster.liveness.lost_after_s=5",
]  # fmt: skip
BAD_SAMPLE = 13


@dataclass(frozen=True)
class ModelWithABadSample(ToyModel):
    """The loss of every batch with BAD_SAMPLE is NaN."""

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 * context.seed + stage)
            return StageWithABadSample(self, stage, num_stages)


class StageWithABadSample(ToyStage):
    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        output = super().forward(received, batch)
        if output.loss is not None and BAD_SAMPLE in batch["ids"]:
            return StageOutput(loss=output.loss * torch.nan)
        return output


def _pipeline(cluster: str, *overrides: str) -> dict[str, Any]:
    config: dict[str, Any] = toy_config(cluster, [*_COMMON, *overrides])
    config["model"] |= {"step_s": 0.01}
    return config


def _svd() -> dict[str, Any]:
    config = _pipeline("two_clouds", "compression=svd_fp16_int8")
    config["compression"]["forward_memory"] = {"_target_": "xcloud.comm.memory.ErrorFeedback"}
    return config


def _nan() -> dict[str, Any]:
    config = _pipeline("two_clouds", "training.on_divergence=skip")
    config["model"]["_target_"] = "benchmarks.chaos_jobs.ModelWithABadSample"
    return config


def _one_way() -> dict[str, Any]:
    clouds = {"disc": cloud(1), "one": cloud(1, 2.0), "two": cloud(1, 1.0)}
    training = {
        "max_steps": STEPS,
        "checkpoint": {
            "_target_": "xcloud.training.settings.Checkpoints",
            "every_steps": EVERY, "every_minutes": 10, "keep": 2,
        },
    }  # fmt: skip
    config = feed_config(
        clouds, model={"step_s": 0.04}, feed={"on_dead": "stop"}, training=training
    )
    liveness = {"_target_": "xcloud.cluster.liveness.Liveness"}
    config["cluster"]["liveness"] = {**liveness, "interval_s": 1.0, "lost_after_s": 5.0}  # type: ignore[index]
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


def config_of(name: str, mlflow: Path | None = None) -> dict[str, Any]:
    """mlflow: the folder of its store; None: untracked."""
    config = JOBS[name]()
    if mlflow is not None:
        config["tracker"] = {
            "_target_": "xcloud.record.tracking.MlflowTracker",
            "root": str(mlflow), "experiment": "chaos", "uri": None, "flush_s": 0.2,
            "finish_timeout_s": 10.0,
        }  # fmt: skip
    return config


def num_ranks(name: str) -> int:
    return {"2x2 lanes, accumulated": 4, "one-way": 3}.get(name, 2)


def result_of(name: str, run_dir: Path) -> dict[str, str]:
    """Digests of what a run has come to: equal bits, equal result."""
    digest = hashlib.sha256()
    for key, value in sorted(weights(run_dir).items()):
        # A producer runs ahead as far as the timing of the end lets it.
        if name != "one-way" or key.startswith("consumer"):
            digest.update(key.encode())
            digest.update(value.contiguous().numpy().tobytes())
    told = EventReader(run_dir / EVENTS_FILE, warn=False).poll()
    steps = [e for e in told if e["event"] == "step" and "loss" in e]
    losses = {(e["step"], e["rank"]): e["loss"] for e in steps}
    curve = sorted(losses.items())
    return {
        "weights": digest.hexdigest()[:16],
        "losses": hashlib.sha256(repr(curve).encode()).hexdigest()[:16],
        "num_losses": str(len(curve)),
    }

"""Toy runs whose settings are drawn from all features at once: what fits together runs here, over
links in memory or, where clouds may leave, over gloo, each rank in a thread.

A row names a level of every factor of FACTORS. `experiment` builds it, or the product refuses it;
`covering_rows` finds few rows that are allowed and hold every allowed pair of levels.
"""

from __future__ import annotations

import itertools
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import FileStore

from tests.event_lines import steps_done
from tests.feature_rows import feature_rows
from tests.pipelines import in_threads
from tests.toy import LENGTH, VOCABULARY, ToyTask
from xcloud.base.errors import ConfigError
from xcloud.comm.channel import Boundary, BoundaryField, Message
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import PerBoundary, Phase, Phased
from xcloud.comm.compressor import Chain
from xcloud.comm.low_rank import PowerSgd, Svd
from xcloud.comm.memory import DeltaCache, ErrorFeedback, NoMemory
from xcloud.comm.precision import BlockInt
from xcloud.comm.sparsify import TopK
from xcloud.contracts.model import Batch, BuildContext, Stage, StageOutput
from xcloud.experiment import Experiment
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.features.checkpoints.resume import RankCheckpoints
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.late import GoOn
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.features.replicas.merging import Median
from xcloud.features.replicas.outer_optimizer import OuterOptimizer
from xcloud.features.two_buffered.schedule import TwoBuffered
from xcloud.job.config import Settings
from xcloud.job.job import Job
from xcloud.job.strategy import Strategy
from xcloud.launch import one_rank
from xcloud.launch.one_rank import join
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.gloo_link import GlooTransport
from xcloud.net.memory_transport import MemoryWorld
from xcloud.net.transport import Rendezvous, Transport
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Checkpoints, Optimizer, Training
from xcloud.rank.agreement import Verdict, table_of
from xcloud.rank.restarts import rendezvous_at_any_time
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.events import EventReader
from xcloud.security.defences import GaussianNoise, MaxNorm
from xcloud.security.policy import Visibility
from xcloud.tracking.tracker import NullTracker

HIDDEN, STEPS, SAVED = 8, 6, 3
_PROCESSES_WITHIN_S = 120.0  # a run that hangs is found by this


class PairStage(Stage):
    """Learns to give each source token plus one. Draws its weights from a generator of its own."""

    def __init__(self, model: PairModel, stage: int, num_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.is_frozen = stage < model.num_frozen
        self.ties = model.ties_ends(num_stages)
        if self.is_first or (self.is_last and self.ties):
            self.words = nn.Parameter(_drawn(99, VOCABULARY, HIDDEN))
        if not (self.is_last and self.ties):
            width = VOCABULARY if self.is_last else HIDDEN
            self.layer = nn.Parameter(_drawn(stage, HIDDEN, width))
        if self.is_frozen:
            self.requires_grad_(False)

    def tied(self) -> nn.Parameter | None:
        return self.words if self.ties and (self.is_first or self.is_last) else None

    def forward(self, received: Message | None, batch: Batch) -> StageOutput:
        output = self._compute(received, batch)
        if self.is_last:
            target = batch["target"].flatten()
            return StageOutput(loss=F.cross_entropy(output, target, reduction="sum"))
        size = len(batch["ids"])
        counts = received["counts"] if received else torch.full((size,), LENGTH, dtype=torch.int16)
        return StageOutput(send={"counts": counts, "hidden": torch.tanh(output)})

    def predict(self, received: Message | None, batch: Batch) -> list[list[int]]:
        return self._compute(received, batch).argmax(1).view(-1, LENGTH).tolist()

    def _compute(self, received: Message | None, batch: Batch) -> Tensor:
        rows = self.words[batch["source"].flatten()] if received is None else received["hidden"]
        if self.is_frozen:  # value by value: a row's bits do not depend on others
            return rows * self.layer[0]
        return rows @ (self.words.T if self.is_last and self.ties else self.layer)


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 2


@dataclass(frozen=True)
class PairModel:
    """tied: first and last stage train one matrix. num_frozen: stages that are not trained."""

    tied: bool = False
    num_frozen: int = 0

    def describe(self) -> str:
        return "pair model"

    def ties_ends(self, num_stages: int) -> bool:
        return self.tied and num_stages > 1 and not self.num_frozen

    def fields(self, stage: int, num_stages: int) -> frozenset[str]:
        first, last = stage == 0, stage == num_stages - 1
        return frozenset({"source"} if first else set()) | frozenset({"target"} if last else set())

    def boundary(self, stage: int, num_stages: int, max_length: int) -> Boundary:
        counts = BoundaryField("counts", (), torch.int16)
        hidden = BoundaryField("hidden", (HIDDEN,), torch.float32, "counted")
        frozen = stage < self.num_frozen
        boundary = Boundary((counts, hidden), max_length)
        return replace(boundary, gradient_returns=not frozen, is_constant=frozen)

    def build_stage(self, stage: int, num_stages: int, context: BuildContext) -> Stage:
        return PairStage(self, stage, num_stages)


INT4 = Chain(int4=BlockInt(4, block=8, stochastic=True))
DELTA = Compression(INT4, INT4, DeltaCache(), DeltaCache())
FEEDBACK = Compression(Chain(topk=TopK(0.3)), INT4, ErrorFeedback(), ErrorFeedback())
WARM = Compression(Chain(svd=Svd(0.5)), INT4, ErrorFeedback(), NoMemory())
PLAIN = Compression()

Row = Mapping[str, str]

OF_FEATURES = {n: one for rows in feature_rows().values() for n, one in rows.factors.items()}
FACTORS: dict[str, dict[str, Any]] = {
    "clouds": {
        "two": {"a": Cloud(), "b": Cloud()},
        "lanes": {"a": Cloud(2), "b": Cloud()},
        "both lanes": {"a": Cloud(2), "b": Cloud(2)},
        "u": {"a": Cloud(1, [0, 2]), "b": Cloud(1, [1])},
        "three": {"a": Cloud(), "b": Cloud(), "c": Cloud()},
        "four": {name: Cloud() for name in "abcd"},
    },
    "strategy": {
        "pipeline": Strategy(),
        "data_parallel": Strategy("data_parallel", None, GradientAveraging(check_every=2)),
        "late gradients": Strategy("data_parallel", None, GradientAveraging(delay=1)),
        "median": Strategy("data_parallel", None, GradientAveraging(merge=Median())),
        "hybrid": Strategy("hybrid", 2, GradientAveraging(feedback=False)),
        "local_updates": Strategy("local_updates", None, LocalUpdates(every=2)),
        "fedavg": Strategy(
            "fedavg", None,
            LocalUpdates(every=3, outer=OuterOptimizer(1.0, 0.0, nesterov=False), weigh="tokens"),
        ),
        "streaming": Strategy(
            "streaming", None, LocalUpdates(every=4, fragments=2, overlap=1, mix=0.2)
        ),
        "elastic": Strategy("local_updates", None, LocalUpdates(every=2, late=GoOn())),
    },
    "schedule": {
        "gpipe": GPipe, "1f1b": OneForwardOneBackward, "zero_bubble": ZeroBubble,
        "two_buffered": TwoBuffered,
    },
    "micro_batches": {"4": 4, "3": 3, "8": 8},
    "compression": {
        "none": PLAIN,
        "int4": Compression(INT4, INT4),
        "delta": DELTA,
        "feedback": FEEDBACK,
        "svd": WARM,
        "powersgd": Compression(INT4, INT4, averaging=PowerSgd(2)),
        "phases": Phased(early=Phase(2, WARM), late=Phase(None, DELTA)),
        "per_boundary": PerBoundary(default=FEEDBACK, boundary_0=DELTA),
    },
    "accumulate": {"1": 1, "2": 2},
    "clip": {"none": 0.0, "0.5": 0.5},
    "ends": {"untied": False, "tied": True},
    "frozen": {"nothing": 0, "kept": 1},
    "defences": {
        "none": {},
        "gaussian": {"forward": GaussianNoise(1.0, 0.01)},
        "max_norm": {"backward": MaxNorm()},
    },
    "on_divergence": {"stop": "stop", "skip": "skip"},
    "evaluate_every": {"0": 0, "2": 2},
    "stages": {"whole": False, "sharded": True},
    **{name: factor.levels for name, factor in OF_FEATURES.items()},
}  # fmt: skip

FIRST = {factor: next(iter(levels)) for factor, levels in FACTORS.items()}

# How a refusal may name a factor.
NAMES = {
    "clouds": r"cluster|clouds?\b|micro_batches|boundary",
    "strategy": r"strategy|averaging|replica|merge",
    "schedule": r"schedule|zero_bubble|zero bubble",
    "micro_batches": r"num_micro_batches|micro-batch",
    "compression": r"compress|powersgd",
    "accumulate": r"accumulate_steps",
    "clip": r"clip_norm",
    "ends": r"embeddings=tie",
    "frozen": r"activation_cache_mb",
    "defences": r"security[./]defences",
    "on_divergence": r"on_divergence",
    "evaluate_every": r"evaluate_every",
    "stages": r"shard",
    **{name: factor.named for name, factor in OF_FEATURES.items()},
}


def experiment(row: Row, max_steps: int = STEPS) -> Experiment:
    """Raises ConfigError for a row that the product refuses."""
    chosen = {factor: FACTORS[factor][{**FIRST, **row}[factor]] for factor in FACTORS}
    of_features: dict[str, dict[str, Any]] = {"": {}, "security": {}}
    for name, factor in OF_FEATURES.items():
        group, _, key = factor.key.rpartition(".")
        of_features[group][key] = chosen[name]
    found = Experiment(
        **of_features[""],
        name="combination",
        cluster=ClusterLayout(_dealt(chosen["clouds"], chosen["stages"]), "free"),
        tracker=NullTracker(),
        task=ToyTask(),
        model=PairModel(chosen["ends"], chosen["frozen"]),
        schedule=chosen["schedule"](chosen["micro_batches"]),
        compression=chosen["compression"],
        strategy=chosen["strategy"],
        security=Visibility(defences=chosen["defences"], **of_features["security"]),
        training=Training(
            max_steps,
            batch_size=8,
            accumulate_steps=chosen["accumulate"],
            precision="fp32",
            evaluate_every=chosen["evaluate_every"],
            eval_batch_size=8,
            activation_cache_mb=chosen["frozen"],
            on_divergence=chosen["on_divergence"],
            optimizer=Optimizer(0.05, 1, clip_norm=chosen["clip"]),
            checkpoint=Checkpoints(every_steps=SAVED, every_minutes=0, keep=9),
        ),
    )
    found.check()
    return found


def _dealt(clouds: Mapping[str, Cloud], is_sharded: bool) -> dict[str, Cloud]:
    """With stages sharded in every cloud of several ranks; in the first, if there is none."""
    several = [name for name, cloud in clouds.items() if cloud.num_ranks > 1] or [*clouds][:1]
    return {
        name: replace(cloud, shard=is_sharded and name in several)
        for name, cloud in clouds.items()
    }


def refusal(row: Row) -> str:
    """Why the product refuses a row; empty if it does not."""
    try:
        experiment(row)
    except ConfigError as error:
        return str(error)
    return ""


def random_rows(seed: int, wanted: int) -> Iterator[dict[str, str]]:
    """Rows that are allowed, far from the first levels."""
    draw = random.Random(seed)
    for _ in range(wanted):
        factor = draw.choice(["clouds", "strategy"])
        row = _allowed({factor: draw.choice([*FACTORS[factor]])}, draw)
        others = [factor for factor in FACTORS if factor != "stages"]  # a process for each rank
        for factor in draw.sample(others, len(others)):
            row = _first_allowed([{**row, factor: level} for level in _mixed(factor, draw)], row)
        yield row


def _mixed(factor: str, draw: random.Random) -> list[str]:
    return draw.sample([*FACTORS[factor]], len(FACTORS[factor]))


def _first_allowed(rows: list[dict[str, str]], otherwise: dict[str, str]) -> dict[str, str]:
    return next((row for row in rows if not refusal(row)), otherwise)


def _allowed(part: Row, draw: random.Random) -> dict[str, str]:
    """An allowed row with these levels; {} if no clouds, strategy and micro-batches allow them."""
    return _first_allowed(draw.sample(rows := contexts(part), len(rows)), {})


def contexts(part: Row) -> list[dict[str, str]]:
    """Rows with these levels, in all clouds, strategies and numbers of micro-batches."""
    around = ("clouds", "strategy", "micro_batches")
    choices = [[part[f]] if f in part else [*FACTORS[f]] for f in around]
    return [
        {**FIRST, **part, **dict(zip(around, levels, strict=True))}
        for levels in itertools.product(*choices)
    ]


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(row: Row) -> set[Pair]:
    return set(itertools.combinations(sorted(row.items()), 2))  # type: ignore[arg-type]


def covering_rows(seed: int = 1) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Allowed rows that together hold every pair of levels that can be had; and the pairs that
    cannot."""
    draw, rows, refused = random.Random(seed), [], []
    wanted: set[Pair] = set()
    for one, other in itertools.combinations(sorted(FACTORS), 2):
        levels = itertools.product(FACTORS[one], FACTORS[other])
        wanted |= {((one, a), (other, b)) for a, b in levels}
    while wanted:
        pair = min(wanted)
        row = _allowed(dict(pair), draw)
        if not row:
            refused.append(dict(pair))
            wanted.discard(pair)
            continue
        for factor in draw.sample([f for f in FACTORS if f not in dict(pair)], len(FACTORS) - 2):
            rest = [{**row, factor: level} for level in FACTORS[factor]]
            others = sorted(rest, key=lambda one: -len(pairs_of(one) & wanted))
            row = _first_allowed(others, row)
        rows.append(row)
        wanted -= pairs_of(row)
    return rows, refused


def run(
    job: Job,
    run_dir: Path,
    patch: pytest.MonkeyPatch,
    carried: Callable[[Transport], Transport] = lambda in_memory: in_memory,
) -> None:
    """Run all ranks of a job in threads, from the newest checkpoint of the folder; in processes
    where stages are sharded, as torch's FSDP knows one rank in a process.

    carried: returns the transport of a rank, given the one in memory.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    world = MemoryWorld(job.cluster.num_ranks)
    patch.setattr(CheckpointFolder, "prune", lambda *of, **named: None)
    patch.delenv("MASTER_ADDR", raising=False)
    ranks = range(job.cluster.num_ranks)
    settings = Settings(job, {})
    held = {
        r: RankCheckpoints(CheckpointFolder(run_dir), r, job.places, settings.compared).table()
        for r in job.roster.saving
    }
    step, _ = newest_common(held, str)

    if any(getattr(cloud, "shard", False) for cloud in job.cluster.clouds.values()):
        return _run_processes(job, run_dir, step)

    def one(rank: int) -> None:
        transport = carried(world.transport(rank))
        verdict = Verdict(from_step=step, attempt=1)
        if job.roster.is_elastic:
            find = partial(rendezvous_at_any_time, job, rank, run_dir)
            rendezvous, verdict = join(job, table_of(settings.compared), rank, run_dir, find)
            transport = GlooTransport(rendezvous)
        process = one_rank.Process(StopSignal())
        one_rank.run_rank(settings, run_dir, verdict, process, transport)

    in_threads([partial(one, rank) for rank in ranks])


def _run_processes(job: Job, run_dir: Path, from_step: int) -> None:
    rendezvous = run_dir / f"rendezvous-{from_step}"
    (run_dir / "job").write_bytes(pickle.dumps(job))
    command = [sys.executable, "-m", "tests.combinations", str(run_dir), str(rendezvous)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, str(from_step), str(rank)], env=environment)
        for rank in range(job.cluster.num_ranks)
    ]
    try:
        codes = [rank.wait(_PROCESSES_WITHIN_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(codes), f"the ranks ended with {codes}"


def _rank_in_a_process(run_dir: Path, rendezvous: Path, from_step: int, rank: int) -> None:
    torch.set_num_threads(1)
    job: Job = pickle.loads((run_dir / "job").read_bytes())  # a test's own
    CheckpointFolder.prune = lambda *of, **named: None  # type: ignore[method-assign]
    store = FileStore(str(rendezvous), job.cluster.num_ranks)
    transport = GlooTransport(Rendezvous(rank, job.cluster.num_ranks, store))
    process = one_rank.Process(StopSignal())
    verdict = Verdict(from_step=from_step, attempt=1)
    one_rank.run_rank(Settings(job, {}), run_dir, verdict, process, transport)
    os._exit(0)


def losses(run_dir: Path) -> dict[tuple[int, int], float]:
    """By step and rank."""
    events = steps_done(EventReader(run_dir / "events.jsonl"))
    return {(e["step"], e["rank"]): e["loss"] for e in events if e.get("loss") is not None}


def state(run_dir: Path, step: int) -> dict[str, Tensor]:
    """What all ranks saved after a step."""
    folder = run_dir / "checkpoints" / f"step-{step:06}"
    parts = sorted(folder.glob("rank-*.safetensors"))
    return {f"{part.stem} {k}": v for part in parts for k, v in load_file(part).items()}


def interrupted(run_dir: Path, other: Path) -> None:
    """A folder as it was after the first checkpoint."""
    name = f"step-{SAVED:06}"
    shutil.copytree(run_dir / "checkpoints" / name, other / "checkpoints" / name)


def whole(row: Row) -> Experiment:
    """The same training in one process."""
    own = experiment(row)
    layout = ClusterLayout({"local": Cloud(1, [*range(own.cluster.num_stages)])}, "free")
    return replace(own, cluster=layout, strategy=Strategy())


if __name__ == "__main__":
    # By its name: what was pickled is of that module, not of this one.
    from tests import combinations

    combinations._rank_in_a_process(
        Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    )

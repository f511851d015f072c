"""Jobs that stop and go on, and attempts at a run whose ranks save while they train: threads over
links in memory, as they are wired in a run, with their checkpoints in one folder."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.pipelines import in_threads
from tests.trainers import Rank, ranks
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phase, Phased
from xcloud.comm.compressor import Chain
from xcloud.comm.low_rank import Svd
from xcloud.comm.memory import DeltaCache, ErrorFeedback, NoMemory
from xcloud.comm.precision import BlockInt
from xcloud.comm.sparsify import RandomK, TopK
from xcloud.comm.state import State, load_states, states_of
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.features.checkpoints.resume import RankCheckpoints
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing, about_part
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import ModelPlacement, Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.control import Signal
from xcloud.pipeline.hook import Hooks
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward
from xcloud.pipeline.pinned_batches import PinnedBatchPlan
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.pipeline.settings import Checkpoints, Optimizer, Training
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.reporter import Reporter


class Shape(NamedTuple):
    """group_size: groups of ranks that keep their samples; 0: each group is one rank. layout: as
    the strategy arranges it."""

    layout: ClusterLayout
    schedule: Schedule
    passes: int = 1
    group_size: int = 0
    strategy: Strategy = Strategy()


LATE = Strategy("data_parallel", None, GradientAveraging(delay=1, check_every=2))


APART = Strategy(
    "local_updates", 2, LocalUpdates(every=4, fragments=2, overlap=1, mix=0.2, feedback=0.9)
)


SHAPES = {
    "two clouds, GPipe": Shape(ClusterLayout({"a": Cloud(), "b": Cloud()}), GPipe(2)),
    "U-shape, 1F1B, accumulated": Shape(
        ClusterLayout({"a": Cloud(1, [0, 2]), "b": Cloud(1, [1])}), OneForwardOneBackward(2), 2
    ),
    "2x2 lanes, 1F1B": Shape(
        ClusterLayout({"a": Cloud(2), "b": Cloud(2)}), OneForwardOneBackward(4), 1, 2
    ),
    "2 lanes to 1, GPipe, accumulated": Shape(
        ClusterLayout({"a": Cloud(2), "b": Cloud()}), GPipe(2), 2, 2
    ),
    "3 replicas, one update late": Shape(
        ClusterLayout({"a": Cloud(2), "b": Cloud(), "c": Cloud()}), GPipe(4), 1, 6, LATE
    ),
    "2 pipelines apart, fragments under way": Shape(
        ClusterLayout({name: Cloud() for name in "abcd"}), GPipe(2), 2, 2, APART
    ),
}


INT4 = Chain(int4=BlockInt(4, stochastic=True))


SVD = Chain(svd=Svd(0.4), int8=BlockInt(8, stochastic=True))


CODECS = {
    "plain": Compression(),
    "int4, delta": Compression(INT4, INT4, DeltaCache(), DeltaCache("bfloat16")),
    "topk and randomk, error feedback": Compression(
        Chain(topk=TopK(0.2)), RandomK(0.3), ErrorFeedback(), ErrorFeedback(0.9)
    ),
    "svd with warm start, int4": Compression(SVD, INT4, ErrorFeedback(), NoMemory()),
    "randomk, delta": Compression(RandomK(0.5), SVD, DeltaCache()),
    "phases": Phased(
        early=Phase(4, Compression(SVD, INT4, ErrorFeedback(), NoMemory())),
        late=Phase(None, Compression(INT4, INT4, DeltaCache(), DeltaCache())),
    ),
}


TRAINING = {"batch_size": 8, "optimizer": Optimizer(0.05, 3, weight_decay=0.1, clip_norm=1.0)}


def job(shape: Shape, compression: Compression | Phased) -> list[Rank]:
    training = Training(9, accumulate_steps=shape.passes, **TRAINING)  # type: ignore[arg-type]
    plan = BatchPlan(16, training.batch_size, 1)
    if shape.group_size:
        num_pieces = shape.passes * shape.schedule.num_micro_batches
        lanes = [number % shape.group_size for number in range(num_pieces)]
        plan = PinnedBatchPlan(16, training.batch_size, 1, lanes)
    return ranks(shape.layout, training, compression, shape.schedule, plan, shape.strategy)


SETTINGS = {"seed": "1", "training.max_steps": "9", "compression": "a", "cluster.clouds": "two"}
READ = {"data": {"texts of train": "1"}}
EVERY_2 = Checkpoints(2, 0, 2)
LAST = 9

# A pipeline, replicas that average in every step, and those that merge from time to time.
STRATEGIES = (
    "two clouds, GPipe", "3 replicas, one update late", "2 pipelines apart, fragments under way",
)  # fmt: skip


@dataclass
class Attempt:
    """At a run: every rank with its checkpoints in one folder. settings: as the ranks compare.
    step_s: on the clock of the checkpoints; None: the machine's. slow_until: up to this step
    nobody waits for what rank 1 writes. has_passed: set after that step."""

    run_dir: Path
    ranks: list[Rank]
    schedule: Checkpoints = EVERY_2
    settings: dict[str, str] = field(default_factory=lambda: dict(SETTINGS))
    asked: StopSignal = field(default_factory=StopSignal)
    step_s: float | None = None
    slow_until: int = 0
    has_passed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.lines: list[bytes] = []
        self.folder = CheckpointFolder(self.run_dir)
        self.holders = [
            RankCheckpoints(self.folder, r.number, places_of(r), self.settings) for r in self.ranks
        ]
        tables = {h.rank: h.table() for h in self.holders}
        self.from_step, self.note = newest_common(tables, lambda rank: f"rank {rank}")
        self.attempt = time.time_ns()
        self.checkpointers: dict[int, Checkpointer] = {}
        self.ready = threading.Barrier(len(self.ranks))

    def train(self, until_step: int = LAST, lost: Sequence[int] = ()) -> None:
        """lost: ranks that write no more from their last update on, as if they were killed."""
        in_threads([lambda r=rank: self._train(r, until_step, lost) for rank in self.ranks])

    def _train(self, rank: Rank, until_step: int, lost: Sequence[int]) -> None:
        number, trainer = rank.number, rank.trainer
        holder = self.holders[number]
        parts = rank.stateful
        if self.from_step:
            state, _ = holder.restore(self.from_step, states_of(parts), READ)
            load_states(parts, state, "a rank")
        if self.from_step:
            self.folder.delete_after(self.from_step, number, self.attempt, roll_back=True)
        about = about_part(holder.places, holder.settings, self.attempt, READ)
        clock, step_s = time.monotonic, self.step_s
        if step_s is not None:
            clock = lambda: step_s * trainer.num_updates  # noqa: E731
        made = self.checkpointers[number] = Checkpointer(
            Timing(self.schedule, self.from_step, LAST, clock),
            CheckpointWriter(self.folder, number, about),
            rank.wiring.control,
            parts,
            Reporter(number, "a", self.lines.append),
            self.asked,
            is_told=trainer.pipeline.layout.num_replicas == 1,
        )
        rank.hooks.append(made)
        self.ready.wait(60)
        for step in range(trainer.num_updates + 1, until_step + 1):
            signal = trainer.update(step, Hooks(rank.hooks)).signal
            if step == until_step and number in lost:
                signal = Signal.GO_ON
            made.after(step, signal)
            if signal is Signal.STOP:
                break
            self.ready.wait(60)
            if step == self.slow_until:
                self.has_passed.set()
            if step >= self.slow_until or number != 1:
                made.settle()  # or a step that comes too soon is not saved
            while step >= self.slow_until and made.is_pending and not lost:
                time.sleep(0.001)
            self.ready.wait(60)
        else:
            if until_step == LAST:
                made.finish()
        made.settle()
        rank.wiring.barrier()
        made.close(is_finished=False)
        made.notes.reporter.flush()

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for lines in self.lines for line in lines.splitlines()]

    @property
    def state(self) -> Any:
        return [rank.state_dict() for rank in self.ranks]

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def notes(self) -> list[str]:
        return [event["text"] for event in self.told("note")]


def places_of(rank: Rank) -> ModelPlacement:
    layout = rank.wiring.ends.layout
    assert isinstance(layout, ClusterLayout)
    return ModelPlacement.held(layout, rank.strategy, LAST)


def changed(tmp_path: Path, shape: str, codec: str, **settings: str) -> Attempt:
    settings = {name.replace("__", "."): value for name, value in settings.items()}
    return Attempt(tmp_path, job(SHAPES[shape], CODECS[codec]), settings={**SETTINGS, **settings})


def whole(shape: Shape, codec: str = "plain", until_step: int = LAST) -> list[State]:
    """The states of an undisturbed run without checkpoints."""
    attempt = Attempt(Path("no folder"), job(shape, CODECS[codec]), Checkpoints(0, 0))
    attempt.train(until_step)
    return attempt.state


@cache
def undisturbed(shape: str, codec: str = "plain") -> list[State]:
    """For tests that do not change it."""
    return whole(SHAPES[shape], codec)

"""Small jobs that stop and go on: codecs with a state, shapes of cluster and schedule."""

from __future__ import annotations

from typing import NamedTuple

from tests.trainers import Rank, ranks
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phase, Phased
from xcloud.comm.compressor import Chain
from xcloud.comm.low_rank import Svd
from xcloud.comm.memory import DeltaCache, ErrorFeedback, NoMemory
from xcloud.comm.precision import BlockInt
from xcloud.comm.sparsify import RandomK, TopK
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward
from xcloud.pipeline.pinned_batches import PinnedBatchPlan
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.pipeline.settings import Optimizer, Training


class Shape(NamedTuple):
    """group_size: groups of ranks that keep their samples; 0: each group is one rank. layout: as
    the strategy arranges it."""

    layout: ClusterLayout
    schedule: Schedule
    passes: int = 1
    group_size: int = 0
    strategy: Strategy = Strategy()


LATE = Strategy("data_parallel", None, GradientAveraging(delay=1, check_every=2))


APART = Strategy("local_updates", 2, LocalUpdates(every=4, fragments=2, overlap=1, mix=0.2))


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

"""Replicas of a small model in threads that train alone and merge from time to time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.pipelines import in_threads
from xcloud.base.errors import FrameError, LinkClosed, LinkTimeout
from xcloud.cluster.frame import MessageKey, TensorSpec
from xcloud.cluster.link import Parts
from xcloud.cluster.memory_transport import MemoryWorld
from xcloud.comm.chain import Chain
from xcloud.comm.compressor import Compressor
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.averaging import AllToAll, Averager
from xcloud.parallel.exchange import AllReduce, FlatBuffer
from xcloud.parallel.local_rounds import LocalRounds, MakeAverager, local_exchanges
from xcloud.parallel.local_updates import LocalUpdates
from xcloud.parallel.merging import weighted_mean
from xcloud.parallel.outer_optimizer import OuterOptimizer
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.step_budget import StepBudget

PATIENCE_S = 20.0
ALONE = RankGroup.alone()
MEAN = OuterOptimizer(1.0, 0.0, False)
DILOCO = OuterOptimizer(0.7, 0.9)


@dataclass
class Post:
    """What replicas in threads have sent each other, in order."""

    num_replicas: int
    queues: dict[tuple[int, int], list[tuple[MessageKey, Parts]]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def links(self, replica: int) -> PostLinks:
        return PostLinks(self, replica)

    def end(self, replica: int) -> None:
        """As if its process had been killed: what it sent before still arrives."""
        with self.changed:
            self.gone.add(replica)
            self.changed.notify_all()

    def begin_again(self, replica: int) -> None:
        with self.changed:
            self.gone.discard(replica)
            for ends in list(self.queues):
                if replica in ends:
                    del self.queues[ends]


@dataclass
class PostLinks:
    """One replica's ReplicaLinks; receiving waits."""

    post: Post
    replica: int
    num_bytes: int = 0

    @property
    def num_replicas(self) -> int:
        return self.post.num_replicas

    def send(
        self,
        to_replica: int,
        key: MessageKey,
        parts: Parts,
        carries: Sequence[str],
        raw_bytes: int,
    ) -> None:
        assert len(carries) == len(parts)
        with self.post.changed:
            if to_replica in self.post.gone:
                raise LinkClosed(f"replica {to_replica} is gone")
            copies = tuple(part.clone() for part in parts)
            self.post.queues.setdefault((self.replica, to_replica), []).append((key, copies))
            self.post.changed.notify_all()
        self.num_bytes += sum(TensorSpec.of(part).num_bytes for part in parts)

    def recv(
        self,
        from_replica: int,
        key: MessageKey,
        specs: Sequence[TensorSpec] | None = None,
        wait_s: float | None = None,
    ) -> Parts:
        deadline_s = time.monotonic() + (PATIENCE_S if wait_s is None else wait_s)
        with self.post.changed:
            while not (queue := self.post.queues.get((from_replica, self.replica), [])):
                if from_replica in self.post.gone:
                    raise LinkClosed(f"replica {from_replica} is gone")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self.post.changed.wait(left_s):
                    raise LinkTimeout(f"no {key} from replica {from_replica}")
            found, parts = queue.pop(0)
        if found != key or (
            specs is not None and tuple(map(TensorSpec.of, parts)) != tuple(specs)
        ):
            raise FrameError(f"expected {key}, got {found} {[TensorSpec.of(p) for p in parts]}")
        return parts


def groups(num_ranks: int) -> list[RankGroup]:
    """What joins the ranks of one cloud."""
    world, ranks = MemoryWorld(), tuple(range(num_ranks))
    return [RankGroup(rank, ranks, world.transport(rank).group(ranks)) for rank in ranks]


def model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)
        )


def batch(replica: int, step: int, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + step)
    return (
        torch.randn(size, 6, generator=generator),
        torch.randn(size, 3, generator=generator) + replica,
    )


def inner(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 0.02, (0.9, 0.98), weight_decay=0.1)


def loss_of(module: nn.Module, replica: int, step: int) -> Tensor:
    x, y = batch(replica, step)
    return ((module(x) - y) ** 2).mean()


def averagers(
    links: PostLinks, compressor: Compressor | None = None, feedback: bool = False
) -> MakeAverager:
    def make(shapes: Mapping[str, torch.Size], number: int) -> Averager:
        codec = TensorCodec(shapes, lambda *_: compressor or Chain(), 7 + number, feedback)
        made = AllToAll(links, codec, weighted_mean, number)
        made.most_weight = lambda num_steps: 100.0 * num_steps
        return made

    return make


class Replica:
    """One rank with the whole model. work: samples of each step."""

    def __init__(
        self,
        replica: int,
        links: PostLinks,
        settings: LocalUpdates,
        last_step: int,
        *,
        make_averager: MakeAverager | None = None,
        inside: RankGroup = ALONE,
        num_shares: int = 0,
        work: Callable[[int], float] = lambda step: 1.0,
        pace: StepBudget | None = None,
        seed: int = 0,
    ) -> None:
        self.replica, self.links, self.module = replica, links, model(seed)
        self.optimizer = inner(self.module)
        self.buffer = FlatBuffer(self.module.parameters())
        self.rounds = LocalRounds(
            settings,
            dict(self.module.named_parameters()),
            inside,
            num_shares or inside.num_lanes,
            make_averager or averagers(links),
            last_step,
            work,
            pace or StepBudget(settings.every, inside),
        )
        self.exchange = local_exchanges({0: AllReduce(inside)}, self.rounds)[0]
        self.num_made = 0

    def step(self, step: int) -> None:
        self.buffer.zero()
        if self.rounds.is_idle(step):
            return self.exchange.after_update(step, self.buffer)
        loss = loss_of(self.module, self.replica, step)
        loss.backward()
        self.exchange.before_update(step, self.buffer, loss.detach())
        self.optimizer.step()
        self.num_made += 1
        self.exchange.after_update(step, self.buffer)

    def run(self, last_step: int, first_step: int = 1) -> None:
        for step in range(first_step, last_step + 1):
            self.step(step)

    @property
    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


def run_together(replicas: Sequence[Replica], last_step: int, first_step: int = 1) -> None:
    in_threads([lambda r=r: r.run(last_step, first_step) for r in replicas])


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def furthest(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def reference(
    count: int,
    rounds: Sequence[Sequence[int]],
    outer: tuple[float, float, bool],
    weights: Sequence[float],
) -> list[Tensor]:
    """DiLoCo as in arXiv:2311.08105, algorithm 1, in one process: the outer optimizer is torch's.
    rounds: the steps of each."""
    shared = model()
    rate, momentum, nesterov = outer
    outer_optimizer = torch.optim.SGD(
        shared.parameters(), rate, momentum=momentum, nesterov=nesterov
    )
    workers = [model() for _ in range(count)]
    optimizers = [inner(worker) for worker in workers]
    for steps in rounds:
        for replica, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            worker.load_state_dict(shared.state_dict())
            for step in steps:
                optimizer.zero_grad()
                loss_of(worker, replica, step).backward()
                optimizer.step()
        for parameters in zip(
            shared.parameters(), *(w.parameters() for w in workers), strict=True
        ):
            anchor, *values = parameters
            gradients = [anchor.detach() - value.detach() for value in values]
            anchor.grad = sum(
                (w * g for w, g in zip(weights, gradients, strict=True)), torch.zeros_like(anchor)
            ) / sum(weights)
        outer_optimizer.step()
    return [p.detach() for p in shared.parameters()]

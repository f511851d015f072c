"""Replicas of a small model, or of one number, in threads that train alone and merge from time to
time; some are late, leave and come back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.pipelines import in_threads
from tests.replicas import Post, PostLinks
from xcloud.comm.compressor import Chain, Compressor
from xcloud.features.replicas.averaging_server import AveragingServer
from xcloud.features.replicas.local_updates import LocalRounds, LocalUpdates
from xcloud.features.replicas.outer_optimizer import OuterOptimizer
from xcloud.features.replicas.replicas import Replicas
from xcloud.net.memory_transport import MemoryWorld
from xcloud.pipeline.exchange import FlatBuffer, RankGroup, Work
from xcloud.record.reporter import Reporter

ALONE = RankGroup.alone()
MEAN = OuterOptimizer(1.0, 0.0, False)
DILOCO = OuterOptimizer(0.7, 0.9)
_drawing = threading.Lock()  # threads share torch's generator


def rounds_of(
    links: PostLinks,
    module: nn.Module,
    settings: LocalUpdates,
    last_step: int,
    group: RankGroup = ALONE,
    compressor: Compressor | None = None,
) -> LocalRounds:
    """Without elastic merges all replicas call it at once: they compare their parameters."""
    reporter = Reporter(links.replica, f"c{links.replica}", lambda lines: None)
    replicas = Replicas(
        links,
        group,
        {0: module},
        lambda *_: compressor or Chain(),
        7,
        last_step,
        num_samples=[100] * links.num_replicas,
        weight=lambda replica, step: 100.0,
        reporter=reporter,
    )
    joined = settings.join(replicas)
    assert isinstance(joined, LocalRounds)
    return joined


def groups(num_ranks: int) -> list[RankGroup]:
    """What joins the ranks of one cloud."""
    world, ranks = MemoryWorld(), tuple(range(num_ranks))
    return [RankGroup(rank, ranks, world.transport(rank).group(ranks)) for rank in ranks]


def model(seed: int = 0) -> nn.Module:
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
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


class Replica:
    """One rank with the whole model. work: of each step."""

    def __init__(
        self,
        replica: int,
        links: PostLinks,
        settings: LocalUpdates,
        last_step: int,
        *,
        work: Callable[[int], Work] = lambda step: Work(1, 1.0),
        **options: Any,
    ) -> None:
        self.replica, self.links, self.module, self.work = replica, links, model(), work
        self.optimizer = inner(self.module)
        self.buffer = FlatBuffer(self.module.parameters())
        self.exchange = rounds_of(links, self.module, settings, last_step, **options)
        self.num_made = 0

    def step(self, step: int) -> None:
        self.buffer.zero()
        if self.exchange.is_idle(step):
            return self.exchange.after_update(step, Work(0, 0.0))
        loss = loss_of(self.module, self.replica, step)
        loss.backward()
        self.exchange.before_update(step, {0: self.buffer}, {0: loss.detach()})
        self.optimizer.step()
        self.num_made += 1
        self.exchange.after_update(step, self.work(step))

    def run(self, last_step: int, first_step: int = 1) -> None:
        for step in range(first_step, last_step + 1):
            self.step(step)

    @property
    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


def replicas(
    settings: LocalUpdates, last_step: int, count: int = 2, **options: Any
) -> list[Replica]:
    post = Post(count)
    return in_threads(
        [
            lambda r=r: Replica(r, post.links(r), settings, last_step, **options)
            for r in range(count)
        ]
    )


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
    cut_short: Sequence[int] = (),
) -> list[Tensor]:
    """DiLoCo as in arXiv:2311.08105, algorithm 1, in one process: the outer optimizer is torch's.
    rounds: the steps of each. cut_short: those of a last one, of which the mean is taken."""
    shared = model()
    rate, momentum, nesterov = outer
    outer_optimizer = torch.optim.SGD(
        shared.parameters(), rate, momentum=momentum, nesterov=nesterov
    )
    workers = [model() for _ in range(count)]
    optimizers = [inner(worker) for worker in workers]
    for steps in [*rounds, cut_short]:
        for replica, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            worker.load_state_dict(shared.state_dict())
            for step in steps:
                optimizer.zero_grad()
                loss_of(worker, replica, step).backward()
                optimizer.step()
        for parameters in zip(
            shared.parameters(), *(w.parameters() for w in workers), strict=True
        ):
            outer_value, *values = parameters
            gradients = [outer_value.detach() - value.detach() for value in values]
            outer_value.grad = sum(
                (w * g for w, g in zip(weights, gradients, strict=True)),
                torch.zeros_like(outer_value),
            ) / sum(weights)
            if steps is cut_short:
                outer_value.data -= outer_value.grad
        if steps is not cut_short:
            outer_optimizer.step()
    return [p.detach() for p in shared.parameters()]


class Diary:
    """The hub's reporter, which tests read. weights: of the replicas, by the step of a merge.
    words: the replicas that were absent or came back, in order."""

    def __init__(self) -> None:
        self.weights: dict[int, tuple[float, ...]] = {}
        self.words: list[tuple[int, str]] = []
        self.hub_step = 0  # that it has begun
        self.changed = threading.Condition()

    def event(self, kind: str, *, step: int, now: bool = False, **fields: Any) -> None:
        with self.changed:
            if kind == "absence":
                self.words.append((*fields["ranks"], fields["what"]))
            else:
                self.weights[step] = tuple(fields["weights"].values())
                assert (kind == "merge") == all(self.weights[step])
            self.changed.notify_all()

    def note(self, line: str) -> None: ...

    def begin(self, step: int) -> None:
        with self.changed:
            self.hub_step = step
            self.changed.notify_all()

    def wait_for(self, found: Callable[[Diary], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: found(self), 20), (self.weights, self.words)


def end_of(rounds: LocalRounds) -> Any:
    """The hub or a member."""
    (fragment,) = rounds.fragments
    return fragment.averager


class Scalar:
    """A replica of one number, which each step changes by a known amount."""

    def __init__(
        self,
        replica: int,
        post: Post,
        settings: LocalUpdates,
        last_step: int,
        diary: Diary,
        change: float = 1.0,
        is_newcomer: bool = False,
        **options: Any,
    ) -> None:
        module = nn.ParameterDict({"weight": torch.zeros(1)})
        self.parameter = module["weight"]
        self.change, self.replica, self.is_newcomer = change, replica, is_newcomer
        self.made: list[int] = []
        self.rounds = rounds_of(post.links(replica), module, settings, last_step, **options)
        self.end = end_of(self.rounds)
        if isinstance(self.end, AveragingServer):
            self.end.reporter = diary  # type: ignore[assignment]

    def run(
        self, first: int, last: int, before: Callable[[int], None] = lambda step: None
    ) -> None:
        if self.is_newcomer:
            first = self.rounds.resume(0) + 1
        for step in range(first, last + 1):
            if not self.rounds.is_idle(step):
                self.rounds.before_update(step, {}, {})
                before(step)
                self.parameter.data += self.change
                self.made.append(step)
            self.rounds.after_update(step, Work(1, 1.0))

    @property
    def value(self) -> float:
        return float(self.parameter.detach())


def asked(post: Post, diary: Diary, replica: int, at: int) -> Callable[[int], None]:
    """For the hub, which waits in step `at` until a message of this replica lies in its box."""

    def before(step: int) -> None:
        diary.begin(step)
        with post.changed:
            assert step != at or post.changed.wait_for(lambda: post.queues.get((replica, 0)), 20)

    return before

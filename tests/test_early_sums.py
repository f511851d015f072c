"""Sums over the ranks of a cloud that begin in the backward: the same sums, only earlier."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.local_replicas import groups
from tests.pipelines import ToyStage, in_threads
from tests.trainers import SKIP, Rank, ranks, spoil
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.exchange import FlatBuffer, RankGroup
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.overlapped_sums import OverlappedSums
from xcloud.pipeline.schedule import GPipe

AVERAGED = Strategy("data_parallel", None, GradientAveraging())
LOCAL = Strategy("local_updates", None, LocalUpdates(every=2))
JOBS: dict[str, dict[str, Any]] = {
    "several clouds": {"layout": {"a": Cloud(2), "b": Cloud(), "c": Cloud(2)}},
    "all stages in each rank": {"layout": {"a": Cloud(2, [0, 1, 2])}},
    "more lanes than micro-batches": {"layout": {"a": Cloud(3, [0, 1])}},
    "one forward one backward": {
        "layout": {"a": Cloud(2, [0, 2]), "b": Cloud(2, [1])},
        "schedule": OneForwardOneBackward(4, 1),
    },
    "weights put off": {
        "layout": {"a": Cloud(2, [0, 2]), "b": Cloud(2, [1])}, "schedule": ZeroBubble(4),
    },
    "replicas": {"layout": {"a": Cloud(2), "b": Cloud(2)}, "strategy": AVERAGED},
    "local updates": {"layout": {"a": Cloud(2), "b": Cloud(2)}, "strategy": LOCAL},
}  # fmt: skip


class TwoLayers(ToyStage):
    """Another parameter for another bucket."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, num_stages)
        self.layer = nn.Sequential(self.layer, nn.Linear(8, 8))
        self.layer[1].weight = nn.Parameter(torch.eye(8) * 0.9)
        self.layer[1].bias = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize("job", JOBS.values(), ids=list(JOBS))
def test_updates_are_bit_equal_to_those_summed_after_the_backward(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulated over two passes, clipped, and one update skipped for what one lane computed."""
    small = partial(OverlappedSums, bucket_bytes=1)
    monkeypatch.setattr("xcloud.pipeline.overlapped_sums.OverlappedSums", small)
    began: list[bool] = []
    finish = OverlappedSums._finish

    def finishing(self: OverlappedSums, stage: int) -> None:
        began.append(self._num_started > 0)
        finish(self, stage)

    monkeypatch.setattr(OverlappedSums, "_finish", finishing)
    training = replace(
        SKIP, max_steps=4, accumulate_steps=2, batch_size=16,
        optimizer=replace(SKIP.optimizer, clip_norm=1.0),
    )  # fmt: skip
    options = {"schedule": GPipe(2)} | job
    layout = ClusterLayout(options.pop("layout"))
    both = [
        ranks(layout, training, toy=TwoLayers, are_early=early, **options)
        for early in (False, True)
    ]

    def trained(job: list[Rank]) -> list[Tensor]:
        for step in range(1, 5):
            spoiled = spoil(job, 0, torch.nan) if step == 3 else None
            in_threads([partial(r.update, step) for r in job])
            if spoiled is not None:
                spoiled.remove()
        modules = [m for r in job for m in r.trainer.pipeline.stages.values()]
        return [p.detach() for module in modules for p in module.parameters()]

    after, during = map(trained, both)

    assert any(began)
    assert not torch.equal(after[0], next(TwoLayers(0, 2).parameters()))
    for one, other in zip(after, during, strict=True):
        assert torch.equal(one, other)


def test_what_only_some_ranks_compute_is_summed_too() -> None:
    """A rank without gradients for the last layer holds back all buckets, and starts them in the
    same order at the end."""

    def rank(group: RankGroup) -> Tensor:
        layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
        for layer in layers:
            nn.init.eye_(layer.weight)
        buffer = FlatBuffer(layers.parameters())
        early = OverlappedSums({0: buffer}, {0: group}, lambda: {0: 1}, bucket_bytes=1)
        for _ in range(2):
            buffer.zero()
            early.begin(1)
            used = layers[: 3 - group.group_rank]
            (nn.Sequential(*used)(torch.ones(1, 3)) * 10.0**group.group_rank).sum().backward()
            assert len(early._waits) == (3 if group.group_rank == 0 else 0)
            loss = buffer.sum_over(group, torch.tensor(2.0))
            assert float(loss) == 4.0
        return buffer.flat

    first, second = in_threads([partial(rank, group) for group in groups(2)])

    expected = torch.cat([torch.full((18,), 11.0), torch.ones(9), torch.tensor([4.0])])
    assert torch.equal(first, expected) and torch.equal(second, expected)


def test_a_second_gradient_after_the_sum_is_an_error() -> None:
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    buffer = FlatBuffer(layers.parameters())
    collectives: Any = SimpleNamespace(start_sum=lambda values: lambda: None)
    group = RankGroup(0, (0, 1), collectives)
    early = OverlappedSums({0: buffer}, {0: group}, lambda: {0: 1}, bucket_bytes=1)
    early.begin(1)
    layers[1](torch.ones(1, 1)).sum().backward()

    with pytest.raises(RuntimeError, match=r"a second gradient .* use_reentrant=False"):
        layers[1](torch.ones(1, 1)).sum().backward()


def test_a_stage_that_fits_one_bucket_is_summed_with_its_loss() -> None:
    buffer = FlatBuffer(nn.Linear(3, 3).parameters())
    OverlappedSums({0: buffer}, {0: groups(2)[0]}, {0: 1})
    assert buffer.finish_sum is None

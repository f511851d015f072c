"""Gradients in one buffer, sums that begin in the backward, and the seam around an update."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.local_replicas import groups
from tests.nightly import first_daily
from tests.pipelines import ToyStage, in_threads
from tests.trainers import LAYOUTS, SKIP, Rank, ranks, spoil, update
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.pipeline.exchange import AllReduce, Exchange, FlatBuffer, RankGroup, Work, squared_norm
from xcloud.pipeline.hook import StepReport
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward, ZeroBubble
from xcloud.pipeline.overlapped_sums import OverlappedSums
from xcloud.pipeline.schedule import GPipe

SKIP_AND_CLIP = replace(SKIP, optimizer=replace(SKIP.optimizer, clip_norm=1.0))
ALONE = RankGroup.alone()


def test_gradients_live_in_one_buffer_that_autograd_fills() -> None:
    module = nn.Linear(3, 2)
    buffer = FlatBuffer(module.parameters())

    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()

    assert torch.equal(buffer.gradients, torch.full((8,), 2.0))
    assert buffer.squared_norm() == pytest.approx(32.0)
    buffer.gradients.mul_(0.5)
    assert torch.equal(module.weight.grad, torch.ones(2, 3))
    buffer.zero()
    assert float(module.weight.grad.abs().sum()) == 0.0


def test_the_loss_travels_with_the_gradients_and_stays_out_of_the_norm() -> None:
    buffer = FlatBuffer(nn.Linear(3, 2).parameters())

    loss = buffer.sum_over(ALONE, torch.tensor(5.0))

    assert float(loss) == 5.0
    assert buffer.squared_norm() == 0.0
    buffer.zero()
    assert float(loss) == 5.0


def test_a_stage_that_trains_nothing_has_norm_zero() -> None:
    module = nn.Linear(3, 2).requires_grad_(False)
    buffer = FlatBuffer(module.parameters())

    assert float(buffer.sum_over(ALONE, torch.tensor(2.0))) == 2.0
    assert buffer.squared_norm() == 0.0


def test_a_gradient_that_is_no_number_shows_in_the_norm() -> None:
    module = nn.Linear(1, 1)
    buffer = FlatBuffer(module.parameters())
    (module(torch.ones(1, 1)) * math.nan).sum().backward()

    assert buffer.squared_norm() == pytest.approx(math.nan, nan_ok=True)


def test_an_all_reduce_carries_nothing_and_takes_over_nothing() -> None:
    reduce = AllReduce({0: ALONE})
    reduce.load_state_dict(reduce.state_dict())
    with pytest.raises(ValueError, match=r"AllReduce contains 'residual'"):
        reduce.load_state_dict({"residual": torch.zeros(3)})


class Spy(Exchange):
    """Halves gradients, and pulls parameters to zero after every update that it hears of."""

    def __init__(self, inner: Exchange) -> None:
        self.inner, self.calls = inner, list[tuple[str, int]]()

    def before_update(self, step: int, buffers: Any, losses: Any) -> Any:
        self.calls.append(("before", step))
        self.buffers = buffers
        for buffer in buffers.values():
            buffer.gradients.mul_(0.5)
        return self.inner.before_update(step, buffers, losses)

    def after_update(self, step: int, work: Work) -> None:
        self.calls.append(("after", step))
        for buffer in self.buffers.values():
            for parameter in buffer.parameters:
                parameter.data.zero_()


def spied(job: list[Rank]) -> list[Spy]:
    spies = []
    for trainer in (rank.trainer for rank in job):
        trainer.exchange = Spy(trainer.exchange)
        spies.append(trainer.exchange)
    return spies


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_the_trainer_asks_around_every_update_and_the_norm_is_of_what_came_back(
    layout: Any,
) -> None:
    plain, other = (ranks(layout, SKIP_AND_CLIP) for _ in range(2))
    spies = spied(other)
    norms = [
        next(r.grad_norm for r in update(job, 1) if isinstance(r, StepReport))
        for job in (plain, other)
    ]

    assert norms[0] is not None and norms[1] == pytest.approx(norms[0] / 2)
    assert all(spy.calls == [("before", 1), ("after", 1)] for spy in spies)
    for module in (module for rank in other for module in rank.trainer.pipeline.stages.values()):
        assert not any(p.any() for p in module.parameters())


def test_a_skipped_update_is_told_to_the_exchange_too() -> None:
    job = ranks(LAYOUTS["three clouds"], SKIP)
    spies = spied(job)
    spoil(job, 1, math.nan)
    update(job, 1)

    assert all(spy.calls == [("before", 1), ("after", 1)] for spy in spies)


def test_a_buffer_whose_gradients_another_end_counts_has_no_norm_below_0() -> None:
    buffer = FlatBuffer(nn.Linear(3, 2).parameters())
    buffer.squares_elsewhere = -1e-17
    assert buffer.squared_norm() == 0.0
    buffer.squares_elsewhere = math.nan
    assert math.isnan(buffer.squared_norm())


def test_the_squared_norm_is_that_of_float64_whatever_the_size() -> None:
    for size in (0, 1, 70_000, 2 * 65_536):
        values = torch.randn(size, generator=torch.Generator().manual_seed(size))
        # Sums of so many terms in two orders; float32 would be 1e-7 off.
        rounding = max(1, size) * 2.0**-53
        exact = float(values.double().square().sum())
        assert squared_norm(values) == pytest.approx(exact, rounding)
    broken = torch.ones(300, 300)
    broken[299, 299] = torch.inf
    assert math.isinf(squared_norm(broken))
    assert math.isnan(squared_norm(broken - broken))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_squared_norm_on_a_gpu_is_that_on_a_cpu() -> None:
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(1))
    rounding = len(values) * 2.0**-53
    assert squared_norm(values.cuda()) == pytest.approx(squared_norm(values), rounding)


def test_the_loss_of_a_stage_that_trains_nothing_lies_on_its_device() -> None:
    frozen = nn.Parameter(torch.ones(3, device="meta"), requires_grad=False)
    assert FlatBuffer([frozen]).flat.device == frozen.device
    assert torch.equal(FlatBuffer([]).flat, torch.zeros(1))


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


@pytest.mark.parametrize("job", first_daily([*JOBS.values()], count=3), ids=list(JOBS))
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

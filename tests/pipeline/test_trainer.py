"""What a trainer carries from update to update, by the names of parameters."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.channels import same_state, stored
from tests.trainers import LAYOUTS, SKIP, ranks, spoil, update
from xcloud.base.errors import DataError
from xcloud.pipeline.settings import Optimizer
from xcloud.pipeline.trainer import TrainedModule


def trained(**changes: Any) -> TrainedModule:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return TrainedModule(module, Optimizer(0.1, 1, **changes).build(module))


def learn(part: TrainedModule, num_updates: int) -> None:
    for number in range(num_updates):
        assert part.optimizer is not None
        part.optimizer.zero_grad()
        part.module(torch.full((2, 3), 0.1 * number) + torch.eye(2, 3)).sum().backward()
        part.optimizer.step()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_sample_of_an_update_is_counted_by_one_rank(layout: str) -> None:
    job = ranks(LAYOUTS[layout], SKIP)
    reports = update(job, 1)
    assert sum(report.num_samples for report in reports) == SKIP.batch_size  # type: ignore[union-attr]


def test_a_module_goes_on_with_the_moments_and_buffers_of_another() -> None:
    original, restored = trained(), trained()
    learn(original, 3)
    state = original.state_dict()
    kept = stored(state)
    learn(original, 2)
    restored.load_state_dict(state)
    learn(restored, 2)

    assert same_state([state], [kept])  # a snapshot, at both sides
    assert same_state([restored.state_dict()], [original.state_dict()])


@pytest.mark.parametrize("left_out", ["moments.exp_avg.", "moments.step.", "values.1.running"])
def test_each_kind_of_value_matters(left_out: str) -> None:
    original, restored = trained(), trained()
    learn(original, 3)
    state, fresh = original.state_dict(), trained()
    learn(fresh, 1)
    others = {k: v for k, v in fresh.state_dict().items() if k.startswith(left_out)}
    assert others
    restored.load_state_dict(state | others)
    for part in (original, restored):
        learn(part, 1)

    assert not same_state([restored.state_dict()], [original.state_dict()])


def test_moments_are_found_by_name_though_the_optimizer_groups_parameters_by_shape() -> None:
    """Matrices before biases: 2.weight is second for the optimizer, fifth in the module."""
    part = trained()
    learn(part, 1)
    state = part.state_dict()

    assert {key for key in state if key.startswith("moments.exp_avg.")} == {
        f"moments.exp_avg.{name}" for name, _ in part.module.named_parameters()
    }
    for name, parameter in part.module.named_parameters():
        moment = state[f"moments.exp_avg.{name}"]
        assert isinstance(moment, torch.Tensor) and moment.shape == parameter.shape
        assert parameter.grad is not None
        torch.testing.assert_close(moment, 0.1 * parameter.grad)


def test_a_state_before_the_first_update_forgets_later_moments() -> None:
    part = trained()
    state = part.state_dict()
    learn(part, 2)
    part.load_state_dict(state)

    assert same_state([part.state_dict()], [state])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values.0.weight": torch.zeros(5, 3)}, "does not fit it: 0.weight missing, unknown or"),
        ({"values.9.weight": torch.zeros(1)}, "does not fit it: 9.weight"),
        (
            {"moments.exp_avg.9": torch.zeros(1)},
            r"optimizer does not fit it: .* 9 missing or unknown",
        ),
        ({"other.x": 1}, r"contains 'other.x'"),
    ],
)
def test_a_state_of_another_module_is_refused(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained().load_state_dict(trained().state_dict() | change)


def test_a_state_without_the_moments_of_one_parameter_is_refused() -> None:
    part = trained()
    learn(part, 1)
    state = {k: v for k, v in part.state_dict().items() if "exp" not in k or "2.bias" not in k}
    del state["moments.step.2.bias"]
    with pytest.raises(ValueError, match=r"optimizer does not fit it: 2\.bias"):
        trained().load_state_dict(state)


def test_what_is_frozen_is_not_kept_and_another_one_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    part = TrainedModule(module, Optimizer(0.1, 1).build(module))
    state = part.state_dict()
    assert set(state) == {"frozen", "values.1.weight", "values.1.bias"}
    same, other = copy.deepcopy(module), copy.deepcopy(module)
    with torch.no_grad():
        same[1].weight.zero_()
        other[0].weight[0, 0] += 1
    TrainedModule(same, None).load_state_dict(state)
    assert torch.equal(same[1].weight, module[1].weight)
    with pytest.raises(DataError, match="the frozen parameters are not those"):
        TrainedModule(other, None).load_state_dict(state)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_skips_in_a_row_are_counted_on(layout: Any) -> None:
    training = replace(SKIP, max_skips_in_a_row=2)
    original, restored = ranks(layout, training), ranks(layout, training)
    update(original, 1)
    for job in (original, restored):
        spoil(job, 0, math.nan)
    for step in (2, 3):
        update(original, step)
    for before, after in zip(original, restored, strict=True):
        after.load_state_dict(stored(before.state_dict()))

    assert all(rank.trainer.num_updates == 3 for rank in restored)
    assert all("after 2 skipped updates in a row" in str(r) for r in update(restored, 4))


def test_the_state_of_another_rank_is_refused() -> None:
    trainers = [rank.trainer for rank in ranks(LAYOUTS["three clouds"], SKIP)]
    with pytest.raises(ValueError, match=r"a Trainer contains 'stage 0\.values"):
        trainers[1].load_state_dict(trainers[0].state_dict())
    with pytest.raises(ValueError, match="whole number 'num_updates'"):
        trainers[1].load_state_dict({})

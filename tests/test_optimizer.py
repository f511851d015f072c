import sys

import pytest
import torch
from torch import nn

from xcloud.base.errors import ConfigError
from xcloud.pipeline.settings import Optimizer


def test_inverse_sqrt_rises_to_the_peak_and_falls() -> None:
    rates = [Optimizer(1e-3, warmup_steps=100).learning_rate_at(s, 999) for s in (1, 50, 100, 400)]

    assert rates == pytest.approx([1e-5, 5e-4, 1e-3, 5e-4])


def test_linear_decay_ends_just_above_zero_at_the_last_step() -> None:
    optimizer = Optimizer(1.0, warmup_steps=10, decay="linear")

    assert optimizer.learning_rate_at(10, 109) == pytest.approx(1.0)
    assert optimizer.learning_rate_at(109, 109) == pytest.approx(0.01)


def test_frozen_parameters_are_left_out() -> None:
    frozen, trained = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(3))

    built = Optimizer().build([frozen, trained])

    assert [p is trained for group in built.param_groups for p in group["params"]] == [True]


def test_training_does_not_import_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost 2 s of every rank's start."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer(learning_rate=0.5).build([weight])
    for _ in range(2):
        weight.grad = torch.ones(2, 2)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())

    torch.testing.assert_close(weight.detach(), torch.zeros(2, 2))


def test_weight_decay_spares_biases_and_norms_and_nothing_else() -> None:
    parts = {"words": nn.Embedding(4, 3), "layer": nn.Linear(3, 2), "norm": nn.LayerNorm(2)}
    module = nn.ModuleDict(parts)
    for parameter in module.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)

    Optimizer(0.1, weight_decay=0.5).build(module.parameters()).step()

    values = {name: p.detach().unique().tolist() for name, p in module.named_parameters()}
    decayed = pytest.approx([1 - 0.1 * 0.5])
    assert values == {
        "words.weight": decayed, "layer.weight": decayed,
        "layer.bias": [1.0], "norm.weight": [1.0], "norm.bias": [1.0],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0), ("learning_rate", "1e-3x"), ("warmup_steps", 1.5),
        ("decay", "cosine"), ("betas", [0.9]), ("betas", [0.9, 1.0]), ("clip_norm", -1),
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.{name}"):
        Optimizer(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("warmup", "max_steps"), [(20, 10), (11, 10), (10, 10), (0, 10), (5, 10)])
@pytest.mark.parametrize("decay", ["inverse_sqrt", "linear", "constant"])
def test_no_step_however_late_is_above_the_peak(decay: str, warmup: int, max_steps: int) -> None:
    optimizer = Optimizer(1.0, warmup_steps=warmup, decay=decay)  # type: ignore[arg-type]

    assert all(0 <= optimizer.learning_rate_at(s, max_steps) <= 1 for s in range(1, 100))

"""What `training` sets: precision, optimizer, learning rates, clipping over all stages."""

import sys
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.pipelines import ToyStage, samples
from tests.trainers import LAYOUTS, ranks, update
from xcloud.base.errors import ConfigError
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.settings import (
    Optimizer,
    Training,
    autocast_for,
    is_emulated,
    resolve_precision,
)

CPU = torch.device("cpu")


def attend() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What attention gives, and its gradients by queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 16, 8, generator=generator) for _ in range(3))
    q.requires_grad_()
    k.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v)
    out.float().square().sum().backward()  # type: ignore[no-untyped-call]
    assert q.grad is not None and k.grad is not None
    return out, q.grad, k.grad


def test_bf16_on_cpus_leaves_out_the_fused_attention_and_keeps_its_values() -> None:
    exact = attend()
    with autocast_for("bf16", CPU)():
        assert not torch.backends.cuda.flash_sdp_enabled()
        rounded = attend()
    assert torch.backends.cuda.flash_sdp_enabled()
    assert rounded[0].dtype == torch.bfloat16
    for one, other in zip(exact, rounded, strict=True):
        torch.testing.assert_close(other.float(), one, rtol=0.05, atol=0.1)
        assert not torch.equal(other.float(), one)


def test_fp32_is_no_autocast() -> None:
    with autocast_for("fp32", CPU)():
        assert attend()[0].dtype == torch.float32


def test_an_unknown_precision_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"training\.precision must be one of fp32, bf16, auto"):
        Training(max_steps=1, optimizer=Optimizer(learning_rate=1e-3), precision="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_is_called_emulated_only_where_the_processor_has_none(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: fast)
    assert is_emulated("bf16", CPU) is not fast
    assert not is_emulated("fp32", CPU) and not is_emulated("auto", CPU)
    assert not is_emulated("bf16", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: not fast)
    here, there = ("bf16", "fp32") if fast else ("fp32", "bf16")
    assert resolve_precision("auto", CPU) == here
    assert resolve_precision("auto", torch.device("cuda")) == there
    assert [resolve_precision(given, CPU) for given in ("fp32", "bf16")] == ["fp32", "bf16"]


def test_inverse_sqrt_rises_to_the_peak_and_falls() -> None:
    rates = [Optimizer(1e-3, warmup_steps=100).learning_rate_at(s, 999) for s in (1, 50, 100, 400)]

    assert rates == pytest.approx([1e-5, 5e-4, 1e-3, 5e-4])
    first = [Optimizer(1.0, warmup_steps=n).learning_rate_at(1, 999) for n in (0, 1, 2, 4)]
    assert first == [1.0, 1.0, 0.5, 0.25]


def test_linear_decay_ends_just_above_zero_at_the_last_step() -> None:
    optimizer = Optimizer(1.0, warmup_steps=10, decay="linear")

    assert optimizer.learning_rate_at(10, 109) == pytest.approx(1.0)
    assert optimizer.learning_rate_at(109, 109) == pytest.approx(0.01)


def test_frozen_parameters_are_left_out() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)

    built = Optimizer().build(layer)

    assert [p is layer.weight for group in built.param_groups for p in group["params"]] == [True]


def test_training_does_not_import_torchs_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost 2 s of every rank's start."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    layer = nn.Linear(2, 2, bias=False)
    weight = nn.init.ones_(layer.weight)
    optimizer = Optimizer(learning_rate=0.5).build(layer)
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

    Optimizer(0.1, weight_decay=0.5).build(module).step()

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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("clip_norm", "num_passes"), [(0.05, 1), (1e6, 1), (1e6, 2)])
def test_the_norm_over_all_stages_is_that_of_torch(
    layout: str, clip_norm: float, num_passes: int
) -> None:
    plan = BatchPlan(40, 8, 1)
    stages = [ToyStage(stage, 3) for stage in range(3)]
    batch = samples(plan.ids(1))
    message = None
    for stage in stages:
        output = stage(message, batch)
        message = output.send
    assert output.loss is not None
    (output.loss / 8).backward()
    parameters = [*chain.from_iterable(stage.parameters() for stage in stages)]
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    assert (norm > clip_norm) == (clip_norm < 1), "one of the two is clipped"
    expected = [[p.grad for p in stage.parameters()] for stage in stages]

    optimizer = Optimizer(0.1, 1, clip_norm=clip_norm)
    training = Training(1, batch_size=8, accumulate_steps=num_passes, optimizer=optimizer)
    job = ranks(LAYOUTS[layout], training, plan=plan)
    reports = update(job, 1)

    norms = [report.grad_norm for report in reports]  # type: ignore[union-attr]
    assert norms == [pytest.approx(float(norm), rel=1e-5)] * len(norms)
    for rank in job:
        for number, held in rank.trainer.pipeline.stages.items():
            for found, wanted in zip(held.parameters(), expected[number], strict=True):
                torch.testing.assert_close(found.grad, wanted, rtol=1e-4, atol=1e-7)

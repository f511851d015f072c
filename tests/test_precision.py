"""training.precision: what a stage computes in."""

import pytest
import torch
import torch.nn.functional as F

from xcloud.base.errors import ConfigError
from xcloud.pipeline.settings import Optimizer, Training, autocast_for, is_emulated

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

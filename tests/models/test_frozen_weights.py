"""Frozen weights in fewer bits: products and gradients are those of the dense matrix, what is read
is what is kept, and a model beside them is cut, scored and trained as any other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.causal_models import (
    KINDS,
    batch_of,
    build,
    folder_in,
    loss_of,
    next_words,
    saved,
    where,
    words,
)
from tests.nightly import each_once, first_daily
from xcloud.base.errors import ConfigError
from xcloud.comm import devices
from xcloud.comm.devices import scratch, scratch_bytes
from xcloud.models import causal_network, frozen_weights
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.models.frozen_weights import NF4_VALUES, FrozenEmbedding, FrozenMatrix
from xcloud.pipeline.exchange import digest
from xcloud.rank.peak_bytes import PeakBytes
from xcloud.rank.reports import SavedTensors, bytes_of

BATCH = batch_of([words(9, 1)], [words(4, 2), words(5, 3)])
ALL = ["bfloat16", "float16", "int8", "nf4"]


def kept(linear: nn.Module, kind: Any) -> FrozenMatrix:
    matrix = FrozenMatrix(linear, kind)
    matrix.bias = None  # the one of `linear`, which must keep its values
    matrix.to_empty(device="cpu", recurse=False)
    matrix.bias = linear.bias
    with torch.no_grad():
        matrix.fill(linear.weight)
    return matrix


def model_of(folder: Path, **settings: Any) -> CausalLM:
    return CausalLM(checkpoint=str(folder), **({"lora": Lora(r=2)} | settings))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("make", [nn.Linear, lambda i, o: Conv1D(o, i)], ids=["Linear", "Conv1D"])
def test_product_and_gradient_are_those_of_the_dense_matrix(kind: str, make: Any) -> None:
    torch.manual_seed(0)
    linear = make(70, 12)
    matrix = kept(linear, kind)
    rows = torch.randn(2, 5, 70, requires_grad=True)
    dense = matrix.stored().requires_grad_()
    theirs = make(70, 12)
    theirs.weight = nn.Parameter(dense.detach().contiguous())
    theirs.bias = linear.bias
    expected = theirs(rows)
    (slope,) = torch.autograd.grad(expected.square().sum(), rows)

    waiting = SavedTensors()
    with waiting:
        found = matrix(rows)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), rows)[0], slope)
    assert waiting.peak_bytes == 0, "no dense matrix waits for the backward"


@pytest.mark.parametrize(
    ("kind", "bound", "num_bytes"),
    [("bfloat16", 2**-8, 2.0), ("float16", 2**-11, 2.0), ("int8", 0.012, 1.0), ("nf4", 0.11, 0.5)],
)
def test_what_is_kept_is_near_and_small(kind: str, bound: float, num_bytes: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(256, 64, bias=False)
    linear.weight.data.normal_(std=0.02)
    matrix = kept(linear, kind)
    error = (matrix.stored() - linear.weight).norm() / linear.weight.norm()
    assert 0 < error < bound
    scales = {"int8": 4 * 64, "nf4": 4 * 256}.get(kind, 0)
    assert bytes_of(matrix.parameters()) == num_bytes * 256 * 64 + scales
    assert not any(p.requires_grad for p in matrix.parameters())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_zeros_one_value_and_huge_and_tiny_ones_come_back(kind: str) -> None:
    for value in (0.0, 3.0, 1e30, 1e-30):
        linear = nn.Linear(1, 1, bias=False)
        linear.weight.data.fill_(value)
        torch.testing.assert_close(kept(linear, kind).stored(), linear.weight.detach())
    matrix = nn.Linear(64, 3, bias=False)
    matrix.weight.data[1] = 0
    assert not kept(matrix, kind).stored()[1].any() and kept(matrix, kind).stored()[0].any()


@pytest.mark.parametrize("kind", ALL)
def test_products_under_autocast_are_in_its_dtype_and_of_the_dense_matrix(kind: str) -> None:
    """Whose float32 and bfloat16 forms do not share a scratch."""
    torch.manual_seed(0)
    matrix = kept(nn.Linear(70, 12, bias=False), kind)
    rows = torch.randn(5, 70)
    dense = matrix.stored()
    assert torch.equal(matrix.dense(torch.bfloat16), dense.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        found = matrix(rows)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, rows.bfloat16() @ dense.bfloat16().T)
    assert torch.equal(matrix.dense(torch.float32), dense)


def test_rows_of_a_frozen_embedding_have_its_scale() -> None:
    """That of Gemma 3, which multiplies its embeddings by the root of their width."""
    table = nn.Embedding(5, 4)
    table.scalar_embed_scale = 2.0  # type: ignore[assignment]
    frozen = FrozenEmbedding(table, "bfloat16").to_empty(device="cpu")
    with torch.no_grad():
        frozen.weight.copy_(table.weight)
    found = frozen(torch.tensor([1, 3]))
    assert torch.equal(found, 2 * table.weight.detach()[[1, 3]].bfloat16().float())


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(12, 70), (37, 65), (5, 7), (64, 128)])
def test_what_is_kept_is_near_bitsandbytes_whatever_the_dtype(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """nf4 to the bit; int8, which is rounded to 16 bits first there, within one code."""
    bnb = pytest.importorskip("bitsandbytes", reason="not installed: import it by hand")
    torch.manual_seed(0)
    weight = (torch.randn(shape) * 0.02).to(dtype)
    linear = nn.Linear(shape[1], shape[0], bias=False)
    linear.weight.data = weight
    matrix = kept(linear, "nf4")
    how = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": False}
    packed, state = bnb.functional.quantize_4bit(weight, **how)
    assert torch.equal(matrix.scales, state.absmax.float())
    theirs = bnb.functional.dequantize_4bit(packed, state).float()
    assert torch.equal(matrix.stored().to(dtype), theirs.to(dtype))
    codes, _, _ = bnb.functional.int8_vectorwise_quant(weight.half())
    matrix = kept(linear, "int8")
    away = (matrix.weight.int() - codes.int()).abs()
    assert away.max() <= 1 and (away > 0).float().mean() < 0.03


@pytest.mark.slow
@pytest.mark.nightly
def test_codes_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes", reason="not installed: import it by hand")
    functional = functional.functional
    torch.manual_seed(0)
    linear = nn.Linear(70, 12, bias=False)
    codes, scales, _ = functional.int8_vectorwise_quant(linear.weight.detach())
    matrix = kept(linear, "int8")
    assert torch.equal(matrix.weight, codes) and torch.equal(matrix.scales, scales)
    packed, state = functional.quantize_4bit(linear.weight.detach(), quant_type="nf4")
    matrix = kept(linear, "nf4")
    ours = matrix.weight.flatten()[: len(packed)]
    assert torch.equal(matrix.scales, state.absmax)
    assert (ours != packed[:, 0]).sum() <= 1, "but for values in the middle between two"
    matrix.weight.data.flatten()[: len(packed)] = packed[:, 0]
    assert torch.equal(matrix.stored(), functional.dequantize_4bit(packed, state))


def test_each_weight_in_nf4_is_the_nearest_of_16_values_of_its_block() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 5, bias=False)
    blocks = nn.functional.pad(linear.weight.detach().flatten(), (0, 32)).view(-1, 64)
    values = blocks.abs().amax(1)[:, None, None] * torch.tensor(NF4_VALUES)
    nearest = values.squeeze(1).gather(1, (blocks[:, :, None] - values).abs().argmin(2))
    assert torch.equal(kept(linear, "nf4").stored().flatten(), nearest.flatten()[: 96 * 5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_in_nf4_is_made_dense_a_few_blocks_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are those of all at once, and memory hardly more than that of the dense matrix."""
    torch.manual_seed(0)
    matrix = kept(nn.Linear(250, 401, bias=False), "nf4")
    expected = matrix.dense(torch.float32).to(dtype)
    monkeypatch.setattr(frozen_weights, "NF4_BLOCKS_AT_ONCE", 40)
    with PeakBytes() as held:
        found = matrix.dense(dtype)
    assert torch.equal(found, expected)
    assert held.peak < bytes_of(matrix.parameters()) + 1.2 * bytes_of([found])


@pytest.mark.parametrize("kind", first_daily([*KINDS], count=2))
def test_weights_as_stored_give_the_bits_of_float32(tmp_path: Path, kind: str) -> None:
    """In FP32: what a checkpoint holds in 16 bits is made dense without loss."""
    folder_in(kind, tmp_path, torch.bfloat16)
    found = []
    for weights in (None, "bfloat16", "float32"):
        stages = build(model_of(tmp_path, weights=weights), 2, where(tmp_path))
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if "lora_B" in name:
                    parameter.data.fill_(0.1)
        loss = loss_of(stages, BATCH)
        loss.backward()
        slopes = [p.grad for s in stages for p in s.parameters() if p.requires_grad]
        found.append((loss.detach(), next_words(stages, BATCH), *slopes))
        sizes = {p.dtype for s in stages for n, p in s.named_parameters() if "proj" in n}
        assert torch.bfloat16 in sizes or weights == "float32" or kind.startswith("gpt")
    for one, other, expected in zip(*found, strict=True):
        assert torch.equal(one, expected) and torch.equal(other, expected)


@pytest.mark.parametrize(
    ("weights", "kind"), each_once(["int8", "nf4"], ["llama", "gpt2"], count=2)
)
def test_blocks_are_packed_and_compute_as_their_dense_weights(
    tmp_path: Path, kind: str, weights: str
) -> None:
    """transformers' model of the dense weights gives the logits that the packed stages give."""
    network = folder_in(kind, tmp_path, torch.bfloat16)
    stages = build(model_of(tmp_path, weights=weights), 2, where(tmp_path))
    for stage in stages:
        for name, value in merged_of(stage).items():
            network.get_parameter(name).data.copy_(value)
    line = words(9, 1)
    expected = network(torch.tensor([line])).logits[0, -1].detach()
    found = next_words(stages, batch_of([line]))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    packed = [m for s in stages for m in s.modules() if isinstance(m, FrozenMatrix)]
    assert len(packed) == (4 * 7 if kind == "llama" else 4 * 4)
    ends = {p.dtype for s in stages for n, p in s.named_parameters() if "wte" in n or "embed" in n}
    assert ends == {torch.bfloat16}, "as the checkpoint has them"


def merged_of(stage: Any) -> dict[str, torch.Tensor]:
    return dict(causal_network.merged_weights(stage.network))


def test_a_block_is_packed_before_the_next_is_read(tmp_path: Path) -> None:
    """int8: at no time more than the packed weights, one block and the ends in FP32."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 64}
    network = saved("llama", tmp_path, **sizes)
    block = bytes_of(network.model.layers[0].parameters())
    model = model_of(tmp_path, weights="int8")
    at = where(tmp_path)
    build(model, 1, at)  # imports
    with PeakBytes() as peak:
        (stage,) = build(model, 1, at)
    assert peak.peak < bytes_of(stage.parameters()) + 1.5 * block < 4 * block


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": None, "weights": "nf4"}, r"weights=nf4 is for frozen weights.*model\.lora"),
        ({"lora": None, "weights": "bfloat16"}, "weights=bfloat16 is for frozen weights"),
        ({"weights": "int4"}, "weights must be one of .*nf4.*got 'int4'"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        model_of(Path("x"), **changes)


def test_another_kind_than_the_checkpoint_was_made_with_is_noticed(tmp_path: Path) -> None:
    """The digest of frozen weights is that of codes and scales."""
    folder_in("llama", tmp_path, torch.bfloat16)
    digests = set()
    for weights in ("bfloat16", "float32", "int8", "int8"):
        (stage,) = build(model_of(tmp_path, weights=weights), 1, where(tmp_path))
        digests.add(bytes(digest(p for p in stage.parameters() if not p.requires_grad).tolist()))
    assert len(digests) == 3
    scales = next(p for n, p in stage.named_parameters() if n.endswith("scales"))
    scales.data[0] *= 2
    digests.add(bytes(digest(p for p in stage.parameters() if not p.requires_grad).tolist()))
    assert len(digests) == 4


def test_scratch_memory_is_used_again_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's own, for each use; matrices that are made dense in turn share one."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(devices, "_rooms", threading.local())
    first = scratch("dense", (10, 10), torch.float32, device=cpu)
    again = scratch("dense", (5,), torch.bfloat16, device=cpu)
    other = scratch("codes", (5,), torch.int8, device=cpu)
    assert again.data_ptr() == first.data_ptr() != other.data_ptr()
    assert (again.shape, again.dtype) == ((5,), torch.bfloat16)
    assert scratch_bytes() == 405
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(scratch_bytes).result() == 0
    scratch("dense", (20, 10), torch.float32, device=cpu)
    assert scratch_bytes() == 805

    for kind in ("bfloat16", "int8", "nf4"):
        made = [FrozenMatrix(nn.Linear(size, 8), kind=kind) for size in (64, 128)]
        matrices = [matrix.to_empty(device="cpu") for matrix in made]
        for matrix in matrices:
            matrix.fill(torch.randn(8, matrix.shape[1]))
        places = [matrix.dense(torch.float32).data_ptr() for matrix in matrices[::-1] * 2]
        assert len({*places}) == 1, kind
        assert matrices[0].stored().data_ptr() not in places, "what is merged is kept"
        before = scratch_bytes()
        matrices[0](torch.randn(3, 64, requires_grad=True)).sum().backward()
        assert scratch_bytes() == before

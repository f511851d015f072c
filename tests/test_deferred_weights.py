"""Gradients of weights that are computed after the others, with autograd's own as reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.causal_models import batch_of, build, loss_of, saved, where, words
from tests.translation_models import batch_of as pairs_of
from tests.translation_models import build as build_parts
from tests.translation_models import context, run_joined, texts
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.models.transformer import Transformer
from xcloud.pipeline.one_forward_one_backward import DeferredWeights, can_wait
from xcloud.rank.reports import SavedTensors

Gradients = dict[str, Tensor]


def gradients(module: nn.Module) -> Gradients:
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def both(
    module: nn.Module, run: Callable[[], Tensor], passes: int = 2
) -> tuple[Gradients, Gradients, Gradients]:
    """Gradients of a plain backward; of a split one, and what it had before the weights.
    passes: added up, as micro-batches are."""
    found = []
    for defers in (False, True):
        module.zero_grad()
        waiting = []
        for number in range(passes):
            deferred = DeferredWeights(can_wait(module))
            torch.manual_seed(number)  # of dropout
            with deferred if defers else nullcontext():
                loss = run()
                loss.backward()
            waiting.append(deferred)
        found.append(gradients(module))
        for deferred in waiting:
            deferred.compute()
    before, after = found[1], gradients(module)
    return found[0], after, before


def check_equal(plain: Gradients, split: Gradients) -> None:
    assert plain.keys() == split.keys()
    assert all(torch.equal(plain[name], split[name]) for name in plain)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_causal_model_gets_the_same_bits_and_its_matrices_late(
    tmp_path: Path, kind: str
) -> None:
    """gpt2 multiplies by addmm, and its words are tied to the head."""
    saved(kind, tmp_path, tie_word_embeddings=kind == "gpt2")
    (stage,) = build(CausalLM(str(tmp_path)), 1, where(tmp_path))
    batch = batch_of([words(9)], [words(5, 1), words(4, 2)])

    plain, split, before = both(stage.train(), lambda: loss_of([stage], batch))

    check_equal(plain, split)
    late = plain.keys() - before.keys()
    blocks = {name for name in plain if ".layers." in name or ".h." in name}
    matrices = {name for name in blocks if plain[name].ndim == 2}
    assert matrices <= late <= blocks


@pytest.mark.parametrize("checkpointing", [False, True])
def test_of_a_frozen_base_only_the_adapters_wait(tmp_path: Path, checkpointing: bool) -> None:
    saved("llama", tmp_path)
    lora = Lora(r=2, dropout=0.1)
    model = CausalLM(str(tmp_path), lora=lora, activation_checkpointing=checkpointing)
    (stage,) = build(model, 1, where(tmp_path))
    batch = batch_of([words(9)], [words(5, 1)])

    plain, split, before = both(stage.train(), lambda: loss_of([stage], batch))

    check_equal(plain, split)
    assert plain and all(".lora_" in name for name in plain)
    # Nothing below the first block is trained, so no gradient goes back beyond its adapters.
    assert all(".layers.0." in name and "lora_A" in name for name in before)


def test_a_translation_model_with_a_tied_head_gets_the_same_bits(tmp_path: Path) -> None:
    model = Transformer(16, 2, 2, 2, 32)
    stages = nn.ModuleList(build_parts(model, 2, context(tmp_path)))
    batch = pairs_of(texts(6), texts(6, seed=1))

    plain, split, before = both(stages.train(), lambda: run_joined([*stages], batch))

    check_equal(plain, split)
    assert len(before) < len(plain)


def test_under_autocast_sums_are_those_of_autocast() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))
    x = torch.randn(3, 5, 8, requires_grad=True)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = net(x)
        assert found.requires_grad and net[0](x).dtype == torch.float32
        return found.square().sum()

    plain, split, before = both(net, run)

    check_equal(plain, split)
    assert before.keys() == {"3.weight", "3.bias"}
    assert split["0.weight"].dtype == torch.float32


class Shapes(nn.Module):
    """What else may come: one matrix used twice, a matrix made of another, a single row, an
    expanded gradient, a bias without a trained weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.single = nn.Linear(6, 6), nn.Linear(6, 6)
        self.biased = nn.Linear(6, 6)
        self.biased.weight.requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(torch.tanh(self.twice(x)).transpose(0, 1))
        y = torch.nn.functional.linear(y, weight=self.narrow[:6])
        return self.biased(y).sum() + self.single(x[0, 0]).sum()


def test_other_uses_of_linear_layers_get_the_same_bits() -> None:
    net, x = Shapes(), torch.randn(3, 5, 6, requires_grad=True)

    plain, split, before = both(net, lambda: net(x))

    check_equal(plain, split)
    assert plain.keys() - before.keys() == {"twice.weight", "twice.bias"}


def test_nothing_is_put_off_where_nothing_is_differentiated() -> None:
    net = nn.Linear(4, 4)
    deferred = DeferredWeights(can_wait(net))
    with deferred, torch.no_grad():
        found = net(torch.randn(2, 4, requires_grad=True))
    deferred.compute()
    assert not found.requires_grad and net.weight.grad is None


def test_what_waits_counts_as_activations_until_it_is_computed() -> None:
    net, kb = nn.Linear(256, 256, bias=False), 1024
    saved_bytes = SavedTensors()
    with saved_bytes:
        deferred = DeferredWeights(can_wait(net))
        with deferred:
            # tanh keeps its output, the layer its input: 1 kB each.
            loss = torch.tanh(net(torch.ones(1, 256, requires_grad=True))).sum()
            assert saved_bytes.num_bytes == 2 * kb
            loss.backward()
        assert saved_bytes.num_bytes == 2 * kb, "input and output gradient of the layer"
        deferred.compute()
        assert not saved_bytes.num_bytes
    assert saved_bytes.peak_bytes <= 3 * kb

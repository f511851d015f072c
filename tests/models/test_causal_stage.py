"""The loss in pieces of the vocabulary, and a cut at which few features of a token cross."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.causal_models import (
    WIDTH,
    batch_of,
    build,
    loss_of,
    next_words,
    saved,
    through,
    where,
    words,
)
from tests.nightly import first_daily
from tests.understanding_models import RandomText
from xcloud.base.errors import ConfigError
from xcloud.contracts.model import NO_TOKEN, BuildContext, Stage, TokenIds
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.models.causal_stage import (
    CausalStage,
    LogitCap,
    RootCap,
    TanhCap,
    chunked_cross_entropy,
)
from xcloud.models.split_point import Projection, Split

ROWS, FEATURES, WORDS = 7, 16, 50


def made(words: int = WORDS) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, FEATURES, generator=draw, requires_grad=True)
    matrix = torch.randn(words, FEATURES, generator=draw, requires_grad=True)
    return rows, matrix, torch.randint(words, (ROWS,), generator=draw)


def plain(
    rows: Tensor,
    words: Tensor,
    labels: Tensor,
    cap: LogitCap | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    logits = F.linear(rows, words, bias)
    if isinstance(cap, TanhCap):
        logits = cap.bound * torch.tanh(logits / cap.bound)
    if isinstance(cap, RootCap):
        logits = logits / (1 + (logits / cap.bound) ** 2).sqrt()
    return F.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("cap", [None, TanhCap(3.0), RootCap(3.0)])
@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 1000])
def test_loss_and_gradients_equal_the_plain_ones(chunk: int, cap: LogitCap | None) -> None:
    weight = torch.linspace(0.5, 2, ROWS)  # another gradient for each row
    results = []
    for function in (plain, lambda *given: chunked_cross_entropy(*given[:3], chunk, *given[3:])):
        rows, words, labels = made()
        bias = None
        if isinstance(cap, RootCap):
            bias = torch.linspace(-1, 1, WORDS).requires_grad_()
        losses = function(rows, words, labels, cap, bias)
        (losses * weight).sum().backward()
        to_bias = words.new_zeros(0) if bias is None else bias.grad
        results.append((losses.detach(), rows.grad, words.grad, to_bias))

    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # of values about 1


def test_huge_logits_do_not_overflow() -> None:
    rows, words, labels = made()
    losses = chunked_cross_entropy(rows * 1e4, words, labels, 8)
    losses.sum().backward()

    assert losses.isfinite().all() and rows.grad is not None and rows.grad.isfinite().all()
    torch.testing.assert_close(losses, plain(rows * 1e4, words, labels))


def test_under_autocast_products_are_in_its_dtype_backwards_too() -> None:
    found = []
    for precision in (torch.float32, torch.bfloat16):
        rows, words, labels = made()
        given = rows.to(precision), words.to(precision)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.float32):
            losses = chunked_cross_entropy(*given, labels, 7)
        losses.sum().backward()
        found.append((losses.detach(), rows.grad, words.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_frozen_words_get_no_gradient_and_no_rows_are_no_loss() -> None:
    rows, words, labels = made()
    words.requires_grad_(False)
    chunked_cross_entropy(rows, words, labels, 8).sum().backward()
    assert rows.grad is not None and words.grad is None

    none = chunked_cross_entropy(rows[:0], words, labels[:0], 8)
    assert none.shape == (0,) and float(none.detach().sum()) == 0


def test_products_are_in_the_dtype_of_autocast_and_losses_are_float32() -> None:
    rows, words, labels = made()
    with torch.autocast("cpu", torch.bfloat16):
        losses = chunked_cross_entropy(rows, words, labels, 8)
    losses.sum().backward()

    assert losses.dtype == rows.grad.dtype == words.grad.dtype == torch.float32
    torch.testing.assert_close(losses, plain(rows, words, labels), rtol=0.05, atol=0.1)
    assert not torch.equal(losses, plain(rows, words, labels))


class Largest(TorchDispatchMode):
    """Notes the most words of any tensor [rows, words] that an operation makes."""

    words = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for found in made if isinstance(made, tuple | list) else (made,):
            if isinstance(found, Tensor) and found.dim() == 2 and found.shape[0] == ROWS:
                self.words = max(self.words, found.shape[1])
        return made


def test_a_quarter_of_a_million_words_never_have_all_their_logits_at_once() -> None:
    rows, words, labels = made(250_000)
    words.requires_grad_(False)
    with Largest() as largest:
        chunked_cross_entropy(rows, words, labels, 4096).sum().backward()
    assert largest.words == 4096

    with Largest() as largest:
        plain(rows, words, labels)
    assert largest.words == 250_000


LINES = [[words(9, 1), words(4, 2)], [words(5, 4)], [words(2, 6), words(1, 7), words(3, 8)]]
IDS = TokenIds(24, NO_TOKEN, 1, 2, NO_TOKEN)


def cut(folder: Path, method: str = "pca", rank: int | None = 5, **settings: Any) -> CausalLM:
    model = {name: settings.pop(name) for name in ("lora", "public_text") if name in settings}
    split = Split(1, rank, method, **settings)
    return CausalLM(checkpoint=str(folder), **({"lora": Lora(r=2), "split": split} | model))


def at(folder: Path) -> BuildContext:
    """Its own text is three packed samples."""
    return where(folder / "cache", samples=lambda count: batch_of(*LINES))


def stages_of(model: CausalLM, folder: Path, num: int = 2) -> list[CausalStage]:
    """As they are when training begins."""
    place = replace(at(folder), vocabularies={"text": IDS})
    stages: list[Stage] = [model.build_stage(n, num, place) for n in range(num)]
    if handed := stages[0].handed_over:
        stages[1].take_over(handed)
    return [stage for stage in stages if isinstance(stage, CausalStage)]


@pytest.mark.parametrize("method", first_daily(["pca", "orthogonal", "identity"], count=2))
def test_with_all_features_kept_it_is_the_uncut_model(tmp_path: Path, method: str) -> None:
    saved("llama", tmp_path)
    batch = batch_of(*LINES)
    plain = CausalLM(checkpoint=str(tmp_path), lora=Lora(r=2), blocks_per_stage=[2])
    expected = next_words(build(plain, 2, where(tmp_path)), batch)
    found = next_words(stages_of(cut(tmp_path, method, WIDTH), tmp_path), batch)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("calibration", ["own", "public"])
def test_what_crosses_is_narrow_and_starts_at_the_principal_components(
    tmp_path: Path, calibration: Any
) -> None:
    """OuterParameters, of the block's own rows, which packed documents do not mix."""
    saved("llama", tmp_path)
    text = RandomText(9)
    model = cut(tmp_path, calibration=calibration, calibration_texts=3, public_text=text)
    boundary = model.boundary(0, 2, 16)
    stages = stages_of(model, tmp_path)
    batch = batch_of(*LINES)
    if calibration == "public":
        lines = [[IDS.bos, *line, IDS.eos] for line in text.sentences(3, tmp_path)]
        batch = batch_of(*([line] for line in lines))
    sent = through(stages, batch)
    assert sent is not None and sent["hidden"].shape[1] == 5
    assert boundary.fields[2].features == (5,) and boundary.fields[2].replaces == WIDTH
    shapes = [tuple(tensor.shape) for tensor in stages[0].handed_over]
    assert shapes == [spec.shape for spec in boundary.start]
    assert bool(shapes) is (calibration == "own")

    plain = CausalLM(checkpoint=str(tmp_path), lora=Lora(r=2), blocks_per_stage=[2])
    message = through(build(plain, 2, where(tmp_path)), batch)
    assert message is not None
    rows = message["hidden"].detach()
    around = rows - rows.mean(0)
    _, _, components = torch.linalg.svd(around.double(), full_matrices=False)
    best = (around.double() @ components[:5].T @ components[:5]).float() + rows.mean(0)
    top = stages[1].cut
    assert isinstance(top, Projection)
    torch.testing.assert_close(top(sent["hidden"], None).detach(), best, rtol=1e-3, atol=1e-3)


def test_the_projections_are_trained_beside_adapters_and_a_frozen_base(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    for freeze in (False, True):
        model = cut(tmp_path, "orthogonal", freeze_bottom=freeze)
        stages = [stage.train() for stage in stages_of(model, tmp_path, 3)]
        loss_of(stages, batch_of(*LINES)).backward()
        trained = [{n for n, p in s.named_parameters() if p.grad is not None} for s in stages]
        assert model.boundary(0, 3, 16).gradient_returns is not freeze
        assert any("cut.linear" in name for name in trained[0]) is not freeze
        assert any("cut.linear" in name for name in trained[1]) and "cut.shift" in trained[1]
        assert bool(trained[0]) is not freeze and all("cut" not in name for name in trained[2])
        assert all("lora_" in name or "cut." in name for names in trained for name in names)
        assert stages[0].training is not freeze


def test_a_trained_cut_is_read_back_from_its_parts(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    for lora in (Lora(r=2), None):
        model = cut(tmp_path, "orthogonal", lora=lora)
        stages = stages_of(model, tmp_path)
        with torch.no_grad():
            for stage in stages:
                for parameter in stage.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.1 * torch.randn_like(parameter))
        base = replace(at(tmp_path), vocabularies={"text": IDS}, samples=lambda count: {})
        if lora is None:  # whole: from nothing but the file
            shutil.rmtree(tmp_path)
        again = [
            model.build_stage(n, 2, replace(base, architecture=stage.architecture))
            for n, stage in enumerate(stages)
        ]
        for made, stage in zip(again, stages, strict=True):
            made.load_exported({n: t.clone() for n, t in stage.exported().items()})
        batch = batch_of(*LINES)
        assert torch.equal(next_words(again, batch), next_words(stages, batch))


def test_the_first_stage_ends_behind_the_cut_block_and_the_others_share_the_rest(
    tmp_path: Path,
) -> None:
    saved("llama", tmp_path)
    sizes = []
    for stage in stages_of(cut(tmp_path, rank=None), tmp_path, 3):
        blocks = {n.split(".layers.")[1].split(".")[0] for n, _ in stage.named_parameters()
                  if ".layers." in n}  # fmt: skip
        sizes.append(len(blocks))
    assert sizes == [2, 1, 1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "svd"}, r"svd replaces a sub-layer together with its skip connection"),
        ({"head_rank": 3}, r"head_rank is for encoders: leave it out"),
        ({"calibration": "public"}, r"needs model.public_text"),
        ({"rank": 17}, r"rank is 17, but the model has 16"),
        ({"layer": 4}, r"model.split.layer must be 0..3"),
    ],
)
def test_a_cut_that_a_decoder_cannot_have_is_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    saved("llama", tmp_path)
    with pytest.raises(ConfigError, match=said):
        CausalLM(
            checkpoint=str(tmp_path), split=Split(**({"layer": 1, "method": "pca"} | settings))
        ).boundary(0, 2, 16)
    with pytest.raises(ConfigError, match=r"remove model\.blocks_per_stage"):
        CausalLM(checkpoint="x", split=Split(1, 4, "pca"), blocks_per_stage=[2])
    with pytest.raises(ConfigError, match="this cluster has one"):
        cut(tmp_path).build_stage(0, 1, at(tmp_path))

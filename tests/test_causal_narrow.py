"""A causal model cut so that few features of each token cross."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.understanding_models import RandomText
from xcloud.base.errors import ConfigError
from xcloud.contracts.model import NO_TOKEN, BuildContext, Stage, TokenIds
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.models.causal_stage import CausalStage
from xcloud.models.split_point import Projection, Split

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
    if handed := stages[0].hand_over():
        stages[1].take_over(handed)
    return [stage for stage in stages if isinstance(stage, CausalStage)]


@pytest.mark.parametrize("method", ["pca", "orthogonal", "identity"])
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
    shapes = [tuple(tensor.shape) for tensor in stages[0].hand_over()]
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
    with pytest.raises(ConfigError, match=r"leave out model\.blocks_per_stage"):
        CausalLM(checkpoint="x", split=Split(1, 4, "pca"), blocks_per_stage=[2])
    with pytest.raises(ConfigError, match="this cluster has one"):
        cut(tmp_path).build_stage(0, 1, at(tmp_path))

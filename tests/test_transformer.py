"""The Transformer from scratch, and its cut."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.translation_models import (
    IDS,
    backward_split,
    batch_of,
    build,
    context,
    gradients,
    predict,
    reversing,
    run_joined,
    target_scores,
    texts,
    train,
)
from xcloud.base.errors import ConfigError
from xcloud.contracts.model import SplitModel
from xcloud.models.transformer import Beam, Transformer, sinusoids

MODEL = Transformer(
    hidden=16,
    num_encoder_layers=3,
    num_decoder_layers=2,
    num_heads=2,
    feed_forward=32,
    dropout=0.0,
)
BATCH = batch_of(texts(6, seed=1), texts(6, seed=2))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_split_gradients_equal_those_of_the_whole(tmp_path: Path, num_stages: int) -> None:
    where = context(tmp_path)
    whole, split = build(MODEL, num_stages, where), build(MODEL, num_stages, where)
    loss = run_joined(whole, BATCH)
    loss.backward()
    assert torch.equal(backward_split(split, BATCH), loss.detach())
    for expected, got in zip(gradients(whole), gradients(split), strict=True):
        for name, gradient in expected.items():
            assert gradient is not None and got[name] is not None, name
            assert torch.equal(gradient, got[name]), name


def test_the_layout_changes_neither_start_weights_nor_loss(tmp_path: Path) -> None:
    model: SplitModel = MODEL
    assert model.describe() == "Transformer from scratch, 3 + 2 layers x 16"
    expected = run_joined(build(model, 2, context(tmp_path)), BATCH)
    for layers in (None, [1, 2], [2, 1]):
        split = dataclasses.replace(MODEL, encoder_layers_per_stage=layers)
        stages = [
            split.build_stage(stage, 3, context(tmp_path, vocabularies=known))
            for stage, known in ((0, {"source": IDS}), (1, {}), (2, {"target": IDS}))
        ]
        assert torch.equal(run_joined(stages, BATCH), expected)
    assert [sorted(model.fields(stage, 3)) for stage in range(3)] == [["source"], [], ["target"]]
    other = build(model, 2, context(tmp_path, seed=1))
    assert not torch.equal(run_joined(other, BATCH), expected)


def test_what_comes_later_does_not_change_earlier_scores(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    inputs = torch.randint(4, IDS.size, (6, 7))
    changed = inputs.clone()
    changed[:, 4] = 4 + (changed[:, 4] - 3) % (IDS.size - 4)
    before, after = (target_scores(stages, BATCH, ids) for ids in (inputs, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(2).all()


def test_decoding_with_cache_equals_decoding_without(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    found = predict(stages, BATCH)
    for i, text in enumerate(found):
        one = {name: tensor[i : i + 1] for name, tensor in BATCH.items()}
        scores = target_scores(stages, one, torch.tensor([[IDS.bos, *text]]))[0]
        scores[:, [IDS.pad, IDS.bos, IDS.mask]] = -torch.inf
        assert scores.argmax(1)[: len(text)].tolist() == text


@pytest.mark.slow
def test_a_small_reversing_task_is_learned(tmp_path: Path) -> None:
    model = Transformer(48, 2, 2, 4, 96, dropout=0.0)
    stages = build(model, 2, context(tmp_path))
    train(stages, [reversing(64, 4, seed=100 + i) for i in range(100)], 6e-3)
    test = reversing(64, 4, seed=1)
    wanted = [[w for w in line.tolist()[1:] if w not in (0, 2)] for line in test["target"]]
    for stage in stages:
        stage.eval()
    for decoding in (model.decoding, Beam(size=3)):
        stages[1].settings = dataclasses.replace(stages[1].settings, decoding=decoding)  # type: ignore[type-var, assignment]
        found = predict(stages, test)
        assert sum(a == b for a, b in zip(found, wanted, strict=True)) > 0.6 * 64


def test_positions_are_those_of_the_paper() -> None:
    table = sinusoids(10, 8)
    for position in (0, 3, 9):
        for feature in range(0, 8, 2):
            angle = position / 10_000 ** (feature / 8)
            assert table[position, feature].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, feature + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert sinusoids(4, 5).shape == (4, 5)


def test_a_stage_is_saved_without_its_sinusoids_and_built_again(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    again = []
    for number, stage in enumerate(stages):
        state = stage.state_dict()
        assert "embeddings.positions" not in state
        save_file(state, tmp_path / f"{number}.safetensors")
        known = {("source", "target")[number]: IDS}
        where = context(tmp_path, vocabularies=known, architecture={})
        empty = MODEL.build_stage(number, 2, where)
        empty.load_state_dict(load_file(tmp_path / f"{number}.safetensors"))
        again.append(empty)
    assert torch.equal(run_joined(again, BATCH), run_joined(stages, BATCH))


def test_a_text_longer_than_the_task_allows_is_refused(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path, max_length=8))
    with pytest.raises(ValueError, match=r"supports at most 8: lower task.max_length"):
        run_joined(stages, batch_of([[5] * 9], [[5]]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 17}, "Transformer.num_heads must divide the hidden size 17"),
        ({"num_decoder_layers": 0}, "Transformer.num_decoder_layers must be"),
        ({"dropout": "0.1"}, "Transformer.dropout must be a number"),
        (
            {"encoder_layers_per_stage": 3},
            "must be a list of which each is a whole number >= 1 or null, got 3",
        ),
        ({"decoding": None}, "Transformer.decoding must be a Greedy or a Beam"),
    ],
)
def test_settings_are_checked_when_given(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(MODEL, **change)

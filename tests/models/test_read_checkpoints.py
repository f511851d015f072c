"""What a folder of a causal language model holds that is not read: refused where it changes the
model, named where it does not. And what is read: finite, in its own dtype."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.causal_models import BLOCKS, KINDS, batch_of, build, loss_of, saved, where, words
from tests.nightly import each_once
from xcloud.base.errors import ConfigError, DataError, XcloudError
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora, check_checkpoint, read_config
from xcloud.pretrained import generation_config

Weights = dict[str, Tensor]
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
BUFFER = torch.ones(2)
HEAD = "lm_head.weight"
WORDS_IN = "model.embed_tokens.weight"
Q = "model.layers.1.self_attn.q_proj"


def changed(folder: Path, change: Callable[[Weights], Any], **config: Any) -> None:
    """Rewrite a checkpoint's weights, and settings of its config."""
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | config))


def model_of(folder: Path, **settings: Any) -> CausalLM:
    return CausalLM(checkpoint=str(folder), **({"lora": Lora(r=2)} | settings))


def eight_bits(weights: Weights) -> None:
    weights[f"{Q}.weight"] = weights[f"{Q}.weight"].to(torch.float8_e4m3fn)


def prefixed(prefix: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        for name in list(weights):
            weights[f"{prefix}{name}"] = weights.pop(name)

    return change


def added(name: str, *shape: int) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: torch.ones(shape or (2,))})


REFUSED: dict[str, tuple[Callable[[Weights], Any], dict[str, Any], str]] = {
    "scales": (added(f"{Q}.weight_scale_inv", 1, 1), {}, "which scales or packs other weights"),
    "zero points": (added(f"{Q}.qzeros"), {}, "which scales or packs other weights"),
    "adapters": (added(f"{Q}.lora_A.weight"), {}, "which scales or packs other weights"),
    "float8": (eight_bits, {}, "q_proj.weight is stored as F8_E4M3, which is packed"),
    "more blocks": (lambda w: None, {"num_hidden_layers": 3}, r"lies in block 3, and .* says 3"),
    "fewer blocks": (lambda w: None, {"num_hidden_layers": 5}, r"no weights model\.layers\.4\."),
    "a bias": (added(f"{Q}.bias", 16), {}, "is no part of a block of this model"),
    "a norm": (added("model.layers.0.self_attn.q_norm.weight"), {}, "is no part of a block"),
    "compiled": (prefixed("_orig_mod."), {}, r"but _orig_mod\..* inside torch.compile"),
    "wrapped": (prefixed("module."), {}, r"but module\..* a wrapper for several GPUs"),
    "no norm": (lambda w: w.pop("model.norm.weight"), {}, r"no weights model\.norm\.weight"),
    "rope": (lambda w: None, {"rope_scaling": {"rope_type": "lama3", "factor": 8.0}},
             "config.json: rope_scaling: rope_type 'lama3' is not one of default, dynamic"),
    "rope's numbers": (lambda w: None, {"rope_parameters": {"rope_type": "yarn"}}, "config.json"),
    "heads": (lambda w: None, {"num_attention_heads": 0}, "config.json"),
    "tied": (lambda w: None, {"tie_word_embeddings": True}, "are one matrix .* differ"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_make_another_model_is_refused_before_a_run_starts(
    case: str, tmp_path: Path
) -> None:
    change, config, said = REFUSED[case]
    saved("llama", tmp_path)
    changed(tmp_path, change, **config)
    with pytest.raises(XcloudError, match=said):
        model_of(tmp_path).check_files(num_stages=2, max_length=16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_of_a_checkpoint_of_transformers_is_read(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    saved(kind, tmp_path, tie_word_embeddings=tied)
    assert check_checkpoint(str(tmp_path)) == []


def test_what_changes_nothing_is_named_once(tmp_path: Path) -> None:
    """A value head is; what the network computes by itself is not."""
    saved("llama", tmp_path)
    more = {"v_head.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": BUFFER}
    changed(tmp_path, lambda weights: weights.update(more))
    said: list[str] = []
    build(model_of(tmp_path), 2, where(tmp_path, report=said.append))
    assert [line for line in said if "not read" in line] == [
        f"{tmp_path}: not read are v_head.weight"
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [(None, {}), ('{"top_k": 5}', {"top_k": 5}), ("[5]", "holds no settings"), ("{", "JSON")],
)
def test_how_a_checkpoint_writes_on_is_read_or_named(
    text: str | None, found: Any, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    if isinstance(found, str):
        with pytest.raises(DataError, match=found):
            generation_config(str(tmp_path))
    else:
        assert generation_config(str(tmp_path)) == found
        (tmp_path / "config.json").write_text('{"eos_token_id": [7, 9], "hidden_size": 4}')
        ends = {"eos_token_id": [7, 9]} if text is None else found
        assert generation_config(str(tmp_path)) == ends, "as in transformers"


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("kept", [WORDS_IN, HEAD])
def test_of_a_tied_pair_either_name_will_do(num_stages: int, kept: str, tmp_path: Path) -> None:
    """Savers that leave out shared tensors keep the first name or the last."""
    network = saved("llama", tmp_path, tie_word_embeddings=True)
    words_in = network.model.embed_tokens.weight.detach()

    def change(weights: Weights) -> None:
        weights.pop(WORDS_IN, None)
        weights[kept] = words_in.clone()

    changed(tmp_path, change)
    model = model_of(tmp_path)
    model.check_files(num_stages, max_length=16)
    stages = build(model, num_stages, where(tmp_path))
    assert torch.equal(stages[0].network.get_input_embeddings().weight, words_in)
    assert torch.equal(stages[-1].network.lm_head.weight, words_in)


def test_two_sets_of_weights_and_a_shard_that_is_missing_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    shard = "model-00001-of-00001.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"holds two sets of weights, model\.safetensors \(which"):
        model_of(tmp_path).check_files(2, max_length=16)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(DataError, match=f"has no {shard}, which {INDEX} names"):
        model_of(tmp_path).check_files(2, max_length=16)
    save_file(weights, tmp_path / shard, {"format": "pt"})
    model_of(tmp_path).check_files(2, max_length=16)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(DataError, match="holds an adapter beside its weights"):
        model_of(tmp_path).check_files(2, max_length=16)


@pytest.mark.parametrize(
    ("settings", "max_length", "said"),
    [
        ({}, 33, "task.max_length is 33, but .* has 32 positions"),
        ({"blocks_per_stage": [5]}, 16, "add up to 4 blocks"),
        ({"lora": Lora(targets=["query"])}, 16, "has no query"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_named_before_a_run_starts(
    settings: dict[str, Any], max_length: int, said: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    with pytest.raises(ConfigError, match=said):
        model_of(tmp_path, **settings).check_files(2, max_length=max_length)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_named_as_they_are_read(
    odd: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    norm = "model.layers.0.input_layernorm.weight"

    def change(weights: Weights) -> None:
        weights[norm] = weights[norm].to(dtype)
        weights[norm][3] = odd

    changed(tmp_path, change)
    with pytest.raises(DataError, match=f"{norm} holds 1 value that is not finite"):
        build(model_of(tmp_path), 2, where(tmp_path))


@pytest.mark.parametrize(
    ("case", "kind"),
    each_once(["mixed", "tied", "headless names"], ["llama", "gpt_neox", "mixtral"]),
)
def test_merged_weights_are_those_of_the_checkpoint_each_in_its_dtype(
    kind: str, case: str, tmp_path: Path
) -> None:
    """Beside transformers' own, which loads what was merged: adapters that add nothing."""
    from transformers import AutoModelForCausalLM

    network = saved(kind, tmp_path, tie_word_embeddings=case == "tied")
    prefix = f"{network.base_model_prefix}."

    def change(weights: Weights) -> None:
        for number, name in enumerate(sorted(weights)):
            if case == "mixed" and number % 3:
                weights[name] = weights[name].to([torch.bfloat16, torch.float16][number % 2])
            if case == "headless names" and name.startswith(prefix):
                weights[name.removeprefix(prefix)] = weights.pop(name)

    changed(tmp_path, change)
    expected = {n.removeprefix(prefix): t for n, t in load_file(tmp_path / WEIGHTS).items()}
    model = model_of(tmp_path)
    stages = [stage.eval() for stage in build(model, 2, where(tmp_path))]
    out = tmp_path / "merged"
    model.merge(stages, context=where(tmp_path), out=out)

    found = {}
    for file in out.glob("*.safetensors"):
        found |= {n.removeprefix(prefix): t for n, t in load_file(file).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert read_config(str(out)).dtype == read_config(str(tmp_path)).dtype
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.tensor([words(9, 1)])
        loss = theirs(ids, labels=ids).loss * 8
        assert float(loss_of(stages, batch_of([words(9, 1)]))) == pytest.approx(
            float(loss), rel=1e-4
        )
    assert BLOCKS == theirs.config.num_hidden_layers
    assert theirs.config.use_cache, "it writes on token by token"

"""What a stage's file or a snapshot says of its architecture keeps to a schema."""

from __future__ import annotations

import ast
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.causal_models import KINDS, SIZES, own, where
from tests.runs import ROOT
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.architecture import StageArchitecture, checked_architecture
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora, config_of, config_of_stage
from xcloud.models.encoder import EncoderConfig

DIGESTS = {"base model: config.json": "0" * 64}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"own_base": "/home/bob/private-model"}, "own_base"),
        ({"own_base": "causal/../../secret"}, "own_base"),
        ({"own_base": "causal/" + "a" * 32 + "/../x"}, "own_base"),
        ({"own_base": "causal/" + "a" * 32 + "\n"}, "own_base"),
        ({"own_base": ["causal"]}, "own_base"),
        ({"max_length": 10**9}, "max_length"),
        ({"max_length": "8"}, "max_length"),
        ({"bases": {"base model: config.json": 7}}, "bases"),
        ({"bases": {"base model: config.json": "../x"}}, "bases"),
        ({"bases": {str(n): "0" * 64 for n in range(10_001)}}, "values|bases"),
        ({"config": {"num_hidden_layers": 10**6}}, "num_hidden_layers"),
        ({"config": {"n_layer": 10**6}}, "n_layer"),
        ({"config": {"num_local_experts": 10**6}}, "num_local_experts"),
        ({"config": {"num_hidden_layers": 1000, "num_experts": 1000}}, "layers of 1000 experts"),
        ({"config": {"hidden_size": 2**40}}, "hidden_size"),
        ({"config": {"layer_types": ["full_attention"] * 30_000}}, "values"),
        ({"head": {"kind": "classes", "num_outputs": 10**9}}, "num_outputs"),
        ({"head": {"kind": "classes", "num_outputs": 2, "more": 1}}, "head"),
        ({"of_another_model": deep(20)}, "inside each other"),
        ({"of_another_model": "x" * 2000}, "characters"),
        ({"of_another_model": 2**70}, "63 bits"),
        ({"of_another_model": float("inf")}, "finite"),
    ],
)
def test_what_does_not_keep_to_the_schema_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        checked_architecture({"lora": True, "max_length": 8, "bases": DIGESTS, **change})


def test_a_key_that_is_missing_is_told_as_a_fault_of_the_file() -> None:
    with pytest.raises(DataError, match="no 'config'"):
        checked_architecture({"lora": False})["config"]
    with pytest.raises(DataError, match="mapping"):
        checked_architecture([1])


def test_every_key_that_a_model_reads_is_in_the_schema() -> None:
    """A model that writes or reads a further key gives it a type and a range first."""
    known = StageArchitecture.model_fields.keys()
    names = {"about", "given", "architecture", "made"}
    constants = {"BASES": "bases", "OWN_BASE": "own_base"}
    found = set[str]()
    for file in sorted((ROOT / "xcloud" / "models").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Subscript):
                holder, key = node.value, node.slice
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get":
                holder, key = getattr(node.func, "value", node), node.args[0]
            else:
                continue
            name = getattr(holder, "id", getattr(holder, "attr", ""))
            if name in names and isinstance(key, ast.Constant | ast.Name):
                text = key.value if isinstance(key, ast.Constant) else constants.get(key.id)
                if isinstance(text, str):
                    found.add(text)
    assert {"config", "own_base", "bases", "backbone", "head", "hidden"} <= found
    assert found - {"max_epochs"} <= known  # a setting of pretraining, also called "given"


@pytest.mark.parametrize(
    "change",
    [
        {"auto_map": {"AutoModelForCausalLM": "owner/name--modeling.Model"}},
        {"quantization_config": {"quant_method": "awq"}},
        {"custom_pipelines": {}},
        {"attn_implementation": "kernels-community/x"},
        {"to_dict": 3},
        {"model_type": "bert"},
        {"model_type": None},
        {"rope_parameters": 7},
        {"num_attention_heads": "four"},
    ],
)
def test_a_config_of_a_stage_names_no_code_and_breaks_no_method(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        config_of_stage({"model_type": "llama", "hidden_size": 8, "vocab_size": 8, **change})


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stage_of_every_kind_says_makes_the_same_config(kind: str) -> None:
    config = config_of(SIZES | KINDS[kind] | {"model_type": kind})
    about = checked_architecture({"config": json.loads(config.to_json_string())})
    assert config_of_stage(about["config"]).to_dict() == config.to_dict()


def test_an_encoder_has_sizes_that_a_machine_can_lay_out() -> None:
    sizes = dict(vocab_size=8, hidden=8, num_layers=1, num_heads=1, feed_forward=8)
    for name in ("vocab_size", "hidden", "num_layers", "feed_forward", "max_positions"):
        with pytest.raises(ConfigError, match=name):
            EncoderConfig(**{"max_positions": 8, **sizes, name: 10**9})


def test_a_base_of_the_run_is_copied_from_the_cache_alone_and_only_its_checkpoint(
    tmp_path: Path,
) -> None:
    """The folder, the way to it, its digests and what is copied: each is checked."""
    model = CausalLM(own=own(), lora=Lora(r=2))
    at = where(tmp_path / "cache")
    about = dict(model.build_stage(1, 2, at).architecture)
    made = at.cache_dir / about["own_base"]
    elsewhere = tmp_path / "private"
    shutil.copytree(made, elsewhere)
    (at.cache_dir / "causal" / ("f" * 32)).symlink_to(elsewhere)
    for change, said in (
        ({"own_base": str(elsewhere)}, "lies in"),
        ({"own_base": "../private"}, "lies in"),
        ({"own_base": None}, "lies in"),
        ({"own_base": "causal/" + "0" * 32}, "is not here"),
        ({"own_base": "causal/" + "f" * 32}, "link"),
        ({"bases": {}}, "differs"),
        ({"bases": {**about["bases"], "base model: model.safetensors": "0" * 64}}, "differs"),
    ):
        with pytest.raises(DataError, match=said):
            model.write_beside({**about, **change}, at, tmp_path / "served")
        with pytest.raises(DataError, match=said):
            model.build_stage(1, 2, replace(at, architecture={**about, **change}))
    for digest in [key for key in about["bases"] if key.startswith("base model")]:
        less = {key: value for key, value in about["bases"].items() if key != digest}
        with pytest.raises(DataError, match="differs"):
            model.write_beside({**about, "bases": less}, at, tmp_path / "served")
    (made / "notes.txt").write_text("salaries")
    model.write_beside(about, at, tmp_path / "served")
    there = {path.name for path in (tmp_path / "served" / "base").iterdir()}
    assert there == {"config.json", "model.safetensors"}

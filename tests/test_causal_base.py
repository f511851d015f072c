"""A small causal model made on the spot: learned, kept, alike for all, loaded by transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.causal_models import batch_of, next_words, where
from tests.translation_models import IDS
from tests.understanding_models import RandomText
from xcloud.base.errors import ConfigError, DataError
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.models.causal_stage import NextTokenPretraining, OwnCausal


def own(**changes: Any) -> OwnCausal:
    steps = changes.pop("steps", 3)
    sizes = {"num_texts": 40, "hidden": 16, "num_layers": 2, "num_heads": 2, "feed_forward": 32}
    pretraining = NextTokenPretraining(steps=steps, batch_size=4, length=12, warmup_steps=1)
    return OwnCausal(RandomText(), **(sizes | {"pretraining": pretraining} | changes))


@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"kind": "qwen2"}, {"kind": "mistral"}])
def test_transformers_loads_what_was_made(tmp_path: Path, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    at = where(tmp_path)
    model = CausalLM(own=own(**changes), lora=Lora(r=2))
    stages = [model.build_stage(n, 2, at) for n in range(2)]
    whole = AutoModelForCausalLM.from_pretrained(own(**changes).folder(at)).eval()
    line = [5, 9, 7, 11]

    expected = whole(torch.tensor([line])).logits[0, -1].detach()
    torch.testing.assert_close(next_words(stages, batch_of([line]))[0], expected)


def test_it_is_made_once_whatever_the_seed_of_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    at = where(tmp_path, report=said.append)
    first = own().folder(at)
    assert any("pretraining on 40 public texts" in line for line in said)
    written = (first / "model.safetensors").stat().st_mtime_ns
    said.clear()

    assert own().folder(replace(at, seed=5)) == first and not said
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert own(steps=4).folder(at) != first
    other = own().folder(where(tmp_path / "elsewhere"))
    assert (other / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_pretraining_learns(tmp_path: Path) -> None:
    losses = []
    for steps in (3, 60):
        said: list[str] = []
        own(steps=steps).folder(where(tmp_path, report=said.append))
        losses.append(float(said[-1].split("loss ")[1].split()[0]))
    assert losses[1] < losses[0] - 0.3


def test_ranks_wait_for_the_first_one_and_name_a_cache_that_is_not_shared(tmp_path: Path) -> None:
    waited: list[int] = []
    with pytest.raises(DataError, match=r"rank 1 .* does not find .* share one cache folder"):
        own().folder(where(tmp_path, group_rank=1, barrier=lambda: waited.append(1)))
    assert waited == [1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "gpt2"}, "must be one of llama, mistral, qwen2, got 'gpt2'"),
        ({"num_heads": 3}, "must divide the hidden size"),
        ({"num_kv_heads": 3}, "must divide num_heads 2"),
        ({"tied": 1}, r"OwnCausal\.tied must be one of True, False"),
        ({"text": "x"}, "OwnCausal.text must be a PublicTexts"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(own(), **changes)


def test_too_little_text_and_another_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fewer than a window"):
        own(num_texts=1).folder(where(tmp_path))
    larger = {"text": replace(IDS, size=IDS.size + 1)}
    with pytest.raises(ConfigError, match="has 24 token ids, but the task's tokenizer has 25"):
        CausalLM(own=own()).build_stage(0, 2, replace(where(tmp_path), vocabularies=larger))

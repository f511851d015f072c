"""Causal language models of transformers, cut behind any block; small ones made on the spot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.causal_models import (
    BLOCKS,
    KINDS,
    WIDTH,
    batch_of,
    build,
    loss_of,
    next_words,
    own,
    saved,
    through,
    where,
    words,
)
from tests.nightly import each_once, first_daily
from tests.translation_models import IDS
from tests.understanding_models import RandomText
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import NOT_FINITE
from xcloud.models import causal_network
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Elsewhere, Lora
from xcloud.models.causal_stage import NextTokenPretraining, OwnCausal
from xcloud.models.split_point import Split
from xcloud.pipeline.settings import autocast_for
from xcloud.rank.export import export_stage, whole
from xcloud.rank.reports import SavedTensors

UNEVEN = [[words(9, 1)], [words(4, 2)], [words(1, 3)]]
PACKED = [[words(5, 4), words(4, 5)], [words(2, 6), words(1, 7), words(3, 8)]]


def trained(folder: Path, **settings: Any) -> CausalLM:
    return CausalLM(checkpoint=str(folder), **({"lora": Lora(r=2)} | settings))


UNLIKE_FIRST = first_daily(
    sorted(KINDS, key=lambda kind: kind not in ("llama", "gemma3_text", "gpt2", "qwen3_moe")),
    count=4,
)


@pytest.mark.parametrize("kind", UNLIKE_FIRST)
def test_the_cut_model_is_the_model_of_transformers(tmp_path: Path, kind: str) -> None:
    """Samples of unequal lengths: their padding changes nothing."""
    network = saved(kind, tmp_path)
    expected = [network(torch.tensor([line])).logits[0, -1].detach() for [line] in UNEVEN]
    for cuts in ([0], [4], [2, 1]):
        stages = build(trained(tmp_path, blocks_per_stage=cuts), len(cuts) + 1, where(tmp_path))
        found = next_words(stages, batch_of(*UNEVEN))
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", UNLIKE_FIRST)
def test_nothing_leaks_between_the_documents_of_a_sample(tmp_path: Path, kind: str) -> None:
    """The loss of packed documents is that of each one alone."""
    network = saved(kind, tmp_path)
    stages = [stage.eval() for stage in build(trained(tmp_path), 2, where(tmp_path))]
    alone = 0.0
    for document in (document for sample in PACKED for document in sample):
        logits = network(torch.tensor([document])).logits[0, :-1].detach()
        alone += float(
            F.cross_entropy(logits, torch.tensor(document[1:], dtype=torch.int64), reduction="sum")
        )

    assert float(loss_of(stages, batch_of(*PACKED)).detach()) == pytest.approx(alone, rel=1e-5)
    joined = [[[token for document in sample for token in document]] for sample in PACKED]
    assert float(loss_of(stages, batch_of(*joined)).detach()) != pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize(
    ("checkpointing", "num_stages"), each_once([False, True], [1, 2, 3], count=3)
)
def test_gradients_of_all_weights_are_those_of_the_whole_model(
    tmp_path: Path, num_stages: int, checkpointing: bool
) -> None:
    network = saved("llama", tmp_path)
    model = trained(tmp_path, lora=None, activation_checkpointing=checkpointing)
    stages = [stage.train() for stage in build(model, num_stages, where(tmp_path))]
    batch = batch_of(*UNEVEN)
    loss_of(stages, batch).backward()
    for [line] in UNEVEN[:2]:
        ids = torch.tensor([line])
        (network(ids, labels=ids).loss * (len(line) - 1)).backward()

    found = {
        name: parameter.grad
        for stage in stages
        for name, parameter in stage.network.named_parameters()
    }
    expected = {name: parameter.grad for name, parameter in network.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", first_daily([*KINDS], count=2))
def test_activation_checkpointing_keeps_less_and_gives_the_same_bits(
    tmp_path: Path, kind: str
) -> None:
    """Dropout on, in adapters and, where the kind has it, in attention: drawn alike both times."""
    saved(kind, tmp_path, attention_dropout=0.3, attn_pdrop=0.3, resid_pdrop=0.3)
    kept, gradients = [], []
    for checkpointing in (False, True):
        lora = Lora(r=2, dropout=0.3)
        model = trained(tmp_path, lora=lora, activation_checkpointing=checkpointing)
        stages = [stage.train() for stage in build(model, 2, where(tmp_path))]
        torch.manual_seed(5)
        memory = SavedTensors()
        with memory:
            loss_of(stages, batch_of(*UNEVEN, *PACKED)).backward()
        kept.append(memory.peak_bytes)
        gradients.append([p.grad for s in stages for p in s.parameters() if p.grad is not None])

    assert kept[1] < kept[0] / 2
    assert len(gradients[0]) == len(gradients[1]) >= 2 * BLOCKS
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(gradient.any() for gradient in gradients[0])


@pytest.mark.parametrize("kind", first_daily([*KINDS], count=2))
def test_a_stage_holds_its_own_parts_only(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reads no other tensor, nor gives memory to one."""
    saved(kind, tmp_path)
    files = causal_network.WeightFiles
    in_file = causal_network.KINDS[kind].in_file
    whole = {*files(str(tmp_path)), in_file("lm_head.weight")}  # a tied head is in no file
    read: list[str] = []
    real = files.tensor
    monkeypatch.setattr(files, "tensor", lambda self, name: read.append(name) or real(self, name))
    sizes = []
    for stage in build(trained(tmp_path), 2, where(tmp_path)):
        held = {
            in_file(name.replace("base_layer.", ""))
            for name, _ in stage.network.named_parameters()
            if "lora_" not in name
        }
        assert held < whole
        assert not any(parameter.is_meta for parameter in stage.parameters())
        assert sum(isinstance(m, Elsewhere) for m in stage.network.modules()) >= BLOCKS // 2
        sizes.append(len(held))

    assert len(read) == sum(sizes) == len(whole)


def test_tied_words_at_two_ends_are_refused_where_they_would_be_trained_apart_unasked(
    tmp_path: Path,
) -> None:
    saved("llama", tmp_path, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"one matrix \(tied\).*model.embeddings=freeze"):
        trained(tmp_path, lora=None).boundary(0, 2, 16)

    for settings in ({}, {"lora": None, "embeddings": "freeze"}):
        stages = build(trained(tmp_path, **settings), 2, where(tmp_path))
        words_in = stages[0].network.model.embed_tokens.weight
        words_out = stages[1].network.lm_head.weight
        assert torch.equal(words_in, words_out)
        assert not words_in.requires_grad and not words_out.requires_grad
    untied = build(trained(tmp_path, lora=None, embeddings="untie"), 2, where(tmp_path))
    assert untied[0].network.model.embed_tokens.weight.requires_grad
    assert untied[1].network.lm_head.weight.requires_grad
    assert untied[1].architecture["config"]["tie_word_embeddings"] is False


def test_blocks_are_computed_again_in_bf16_to_the_same_gradients(tmp_path: Path) -> None:
    """Whose attention on CPUs is not that of float32, in the backward no more than before."""
    saved("llama", tmp_path)
    for samples in (UNEVEN, PACKED):
        found = []
        for again in (False, True):
            model = trained(tmp_path, activation_checkpointing=again)
            stages = [stage.train() for stage in build(model, 2, where(tmp_path))]
            with autocast_for("bf16", torch.device("cpu"))():
                loss = loss_of(stages, batch_of(*samples))
            loss.backward()
            gradients = [p.grad for s in stages for p in s.parameters() if p.requires_grad]
            assert all(g is not None for g in gradients)
            assert any(g.count_nonzero() for g in gradients)
            found.append([loss, *gradients])
        for kept, repeated in zip(*found, strict=True):
            assert torch.equal(kept, repeated)


def test_one_stage_trains_and_exports_tied_words_as_one(tmp_path: Path) -> None:
    saved("llama", tmp_path, tie_word_embeddings=True)
    [stage] = build(trained(tmp_path, lora=None), 1, where(tmp_path))
    assert stage.network.model.embed_tokens.weight is stage.network.lm_head.weight
    [untied] = build(trained(tmp_path, lora=None, embeddings="untie"), 1, where(tmp_path))
    assert untied.network.model.embed_tokens.weight is not untied.network.lm_head.weight
    found = ["lm_head.weight" in one.exported() for one in (stage, untied)]
    assert found == [False, True]


@pytest.mark.parametrize("kind", first_daily(["llama", "gemma", "gpt2"], count=2))
def test_one_stage_of_tied_words_is_exported_and_read_again(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    saved(kind, tmp_path, tie_word_embeddings=True)
    [stage], [other] = (
        build(trained(tmp_path, lora=None), 1, where(tmp_path / name)) for name in ("a", "b")
    )
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(1.0)
    no_tokenizers = SimpleNamespace(save_tokenizers=lambda folder: None)
    path = export_stage(tmp_path, 0, stage, whole(stage.exported(), True), None, no_tokenizers)
    other.load_exported(load_file(path))

    assert all(map(torch.equal, stage.state_dict().values(), other.state_dict().values()))
    assert other.network.get_input_embeddings().weight is other.network.lm_head.weight

    architecture = stage.architecture
    trained(tmp_path, lora=None).join(
        load_file(path), architecture, where(tmp_path), tmp_path / "j"
    )
    joined = AutoModelForCausalLM.from_pretrained(tmp_path / "j").eval()
    expected = joined(torch.tensor(UNEVEN[0])).logits[:, -1].detach()
    torch.testing.assert_close(next_words([stage], batch_of(UNEVEN[0])), expected)
    assert joined.config.use_cache, "it writes on token by token"


@pytest.mark.parametrize(
    ("settings", "returns"),
    [
        ({}, True),
        ({"lora": Lora(r=2, layers=[2, 3])}, False),
        ({"lora": Lora(r=2, layers=[1])}, True),
        ({"lora": None}, True),
        ({"lora": None, "embeddings": "freeze"}, True),
        ({"lora": None, "embeddings": "freeze", "blocks_per_stage": [0]}, False),
    ],
)
def test_gradients_come_back_only_where_something_below_is_trained(
    tmp_path: Path, settings: dict[str, Any], returns: bool
) -> None:
    saved("llama", tmp_path)
    model = trained(tmp_path, **settings)
    bottom = build(model, 2, where(tmp_path))[0]

    boundary = model.boundary(0, 2, 16)
    assert boundary.gradient_returns is returns
    assert boundary.is_constant is not returns
    assert any(parameter.requires_grad for parameter in bottom.parameters()) is returns


def test_rows_are_not_constant_where_dropout_is_active(tmp_path: Path) -> None:
    for rate in (0.0, 0.1):
        saved("gpt2", tmp_path, attn_pdrop=rate)
        model = trained(tmp_path, lora=Lora(r=2, layers=[2, 3]))
        boundary = model.boundary(0, 2, 16)
        assert not boundary.gradient_returns
        assert boundary.is_constant is (rate == 0)
        frozen = Split(1, rank=None, method="pca", freeze_bottom=True)
        assert trained(tmp_path, lora=Lora(r=2), split=frozen).boundary(0, 2, 16).is_constant


def test_what_crosses_is_what_the_boundary_says(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    model = trained(tmp_path)
    message = through(build(model, 2, where(tmp_path)), batch_of(*UNEVEN, *PACKED))
    assert message is not None
    boundary = model.boundary(0, 2, 16)
    assert list(message) == [field.name for field in boundary.fields]
    for field in boundary.fields:
        rows = 5 if field.rows == "samples" else 9 + 4 + 1 + 9 + 6
        assert message[field.name].shape == (rows, *field.features)
        assert message[field.name].dtype == field.dtype
    assert message["places"].tolist()[-6:] == [0, 1, 0, 0, 1, 2]
    assert model.boundary(0, 2, 16).fields[2].features == (WIDTH,)


def test_a_model_is_called_by_its_checkpoint_and_what_is_trained() -> None:
    assert CausalLM("some/model").describe() == "some/model, all weights"
    assert CausalLM("some/model", lora=Lora(r=4)).describe() == "some/model, LoRA r=4"


def test_the_first_stage_reads_the_text_and_the_last_the_labels(tmp_path: Path) -> None:
    model = CausalLM(checkpoint=str(tmp_path))
    assert [model.fields(n, 3) for n in range(3)] == [{"text", "types"}, set(), {"label"}]
    assert model.fields(0, 1) == {"text", "types", "label"}
    assert [model.parts(n, 2) for n in range(2)] == [{"embeddings", "layers"}, {"layers", "head"}]


def test_scores_are_the_nats_and_the_tokens_of_each_document(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    stages = [stage.eval() for stage in build(trained(tmp_path), 2, where(tmp_path))]
    batch = batch_of(*UNEVEN, *PACKED)
    found = stages[1].predict(through(stages, batch), batch)

    assert [sample[1::2] for sample in found] == [[8], [3], [0], [4, 3], [1, 0, 2]]
    total = float(loss_of(stages, batch).detach())
    assert sum(sum(sample[::2]) for sample in found) / 1e6 == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("odd", first_daily([torch.nan, torch.inf], count=1))
def test_a_loss_that_is_no_number_is_told_as_such(tmp_path: Path, odd: float) -> None:
    """Not as the best one, nor as a number of 305 digits."""
    saved("llama", tmp_path)
    stages = [stage.eval() for stage in build(trained(tmp_path), 2, where(tmp_path))]
    batch = batch_of(*UNEVEN)
    received = through(stages, batch)
    received["hidden"] = received["hidden"] * odd
    found = stages[1].predict(received, batch)
    assert [sample[0] for sample in found] == [NOT_FINITE, NOT_FINITE, 0]


@pytest.mark.parametrize("kind", first_daily(["llama", "gpt2"], count=1))
def test_adapters_start_alike_however_the_blocks_are_spread(tmp_path: Path, kind: str) -> None:
    saved(kind, tmp_path)
    model, other = trained(tmp_path), trained(tmp_path, blocks_per_stage=[3])
    parts = [
        {name: t for stage in build(m, n, where(tmp_path)) for name, t in stage.exported().items()}
        for m, n in ((model, 1), (model, 3), (other, 2))
    ]
    assert parts[0] and all(part.keys() == parts[0].keys() for part in parts)
    for name, tensor in parts[0].items():
        assert all(torch.equal(part[name], tensor) for part in parts[1:])
    drawn = [t for name, t in parts[0].items() if "lora_A" in name]
    assert not torch.equal(drawn[0], drawn[1]) and len(parts[0]) == 2 * BLOCKS * (
        2 if kind == "llama" else 1
    )


def test_a_base_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    network = saved("llama", tmp_path / "one")
    network.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    ours = [
        next_words(build(trained(tmp_path / name), 2, where(tmp_path)), batch_of(*UNEVEN))
        for name in ("one", "many")
    ]
    assert torch.equal(ours[0], ours[1])


def test_the_head_of_gpt_neox_is_found_under_its_old_name(tmp_path: Path) -> None:
    from safetensors import safe_open

    saved("gpt_neox", tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "embed_out.weight" in file.keys()
    build(trained(tmp_path), 2, where(tmp_path))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"checkpoint": None}, "one of model.checkpoint"),
        ({"embeddings": "freeze"}, "model.embeddings=freeze is for training without LoRA: leave"),
        ({"lora": None, "embeddings": "share"}, "model.embeddings must be one of"),
        ({"blocks_per_stage": [-1]}, r"model.blocks_per_stage\[0\] must be"),
        ({"vocabulary_chunk": 0}, "model.vocabulary_chunk"),
    ],
)
def test_a_wrong_setting_is_named_at_once(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CausalLM(**({"checkpoint": "x", "lora": Lora()} | settings))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"blocks_per_stage": [5]}, "1 counts .* add up to 4 blocks at most"),
        ({"blocks_per_stage": [1, 1]}, "must be 1 counts"),
        ({"lora": Lora(targets=["query"])}, "has no query; its matrices are down_proj"),
        ({"lora": Lora(layers=[4])}, "model.lora.layers must be 0..3"),
        ({"lora": None, "embeddings": "untie"}, "two matrices already"),
    ],
)
def test_a_cut_that_the_model_cannot_have_is_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    saved("llama", tmp_path)
    with pytest.raises(ConfigError, match=said):
        trained(tmp_path, **settings).boundary(0, 2, 16)
    with pytest.raises(ConfigError, match="max_length is 33"):
        trained(tmp_path).boundary(0, 2, 33)


@pytest.mark.parametrize("kind", first_daily(KINDS, count=5))
def test_adapters_are_held_against_one_block_of_the_model(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laying out all blocks took a tenth of a second for 48 of them, at each boundary."""
    network = saved(kind, tmp_path)
    whole, sizes = causal_network.laid_out, []

    def counted(config: Any, part: Any) -> Any:
        sizes.append(config.num_hidden_layers)
        return whole(config, part=part)

    monkeypatch.setattr(causal_network, "laid_out", counted)
    trained(tmp_path).boundary(0, 2, 16)
    assert set(sizes) == {1}  # of the config's own check, and of the adapters'
    config = causal_network.read_config(str(tmp_path))
    assert config.num_hidden_layers == network.config.num_hidden_layers == BLOCKS


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text"])
def test_a_model_whose_tokens_see_later_ones_is_refused(tmp_path: Path, kind: str) -> None:
    saved(kind, tmp_path, use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="see later ones, so it is no causal language model"):
        trained(tmp_path).boundary(0, 2, 16)


def test_rows_of_longrope_depend_on_no_longer_document_beside_them(tmp_path: Path) -> None:
    """So it is trained and asked up to the length at which its other table would begin."""
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [3.0, 5.0],
            "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1e4}  # fmt: skip
    network = saved("llama", tmp_path, rope_parameters=rope)
    assert causal_network.positions_of(network.config) == 8
    for described, positions in ((100, 100), (10**6, 2**15 - 1)):  # places cross as int16
        plain = SimpleNamespace(max_position_embeddings=described)
        assert causal_network.positions_of(plain) == positions
    trained(tmp_path).boundary(0, 2, 8)
    with pytest.raises(ConfigError, match=r"max_length is 9, .* has 8 positions for short texts"):
        trained(tmp_path).boundary(0, 2, 9)

    documents = [words(8, 1), words(4, 2), words(5, 3)]
    stages = build(trained(tmp_path), 2, where(tmp_path, max_length=8))
    with torch.no_grad():
        alone = sum(float(loss_of(stages, batch_of([one]))) for one in documents)
        assert float(loss_of(stages, batch_of(documents))) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("embeddings", first_daily([None, "freeze"], count=1))
def test_an_own_model_can_keep_its_embeddings_frozen(tmp_path: Path, embeddings: Any) -> None:
    model = CausalLM(own=own(steps=0), embeddings=embeddings)
    [stage, _] = build(model, 2, where(tmp_path))
    words_in = stage.network.model.embed_tokens.weight
    assert words_in.requires_grad == (embeddings is None)
    assert (tmp_path / stage.architecture["own_base"]).is_dir()


def test_a_checkpoint_of_another_kind_or_without_a_tensor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="is of type 'bert'; causal language models"):
        trained(tmp_path).boundary(0, 2, 16)

    saved("llama", tmp_path)
    from safetensors.torch import save_file

    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for stage in (0, 1):  # also where the missing weights are another stage's
        with pytest.raises(DataError, match=r"has no weights model\.norm\.weight"):
            trained(tmp_path).build_stage(stage, 2, where(tmp_path))


@pytest.mark.parametrize("kind", first_daily(["llama", "gpt2"], count=1))
def test_an_adapter_adds_alpha_over_r_times_b_a_x(tmp_path: Path, kind: str) -> None:
    """By hand, from the tensors alone (Hu et al., arXiv:2106.09685, section 4.1): injection,
    export and peft's own loading take their scale from one place."""
    saved(kind, tmp_path)
    lora = Lora(r=2, alpha=7)
    [stage] = build(trained(tmp_path, lora=lora), 1, where(tmp_path))
    _, block = next(causal_network.blocks_of(stage.network))
    name, adapted = next((n, m) for n, m in block.named_modules() if hasattr(m, "lora_A"))
    plain, weights = adapted.base_layer, dict(adapted.named_parameters())
    down, up = weights["lora_A.default.weight"], weights["lora_B.default.weight"]
    with torch.no_grad():
        up.normal_(std=0.5)
        rows = torch.randn(5, down.shape[1])
        matrix = plain.weight if kind == "gpt2" else plain.weight.T  # [in, out]
        shift = 0 if plain.bias is None else plain.bias
        added = adapted(rows) - rows @ matrix - shift
    assert down.shape[0] == 2 and added.abs().max() > 0.1, name
    torch.testing.assert_close(added, 3.5 * (rows @ down.T @ up.T), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes", first_daily([{}, {"tied": True}, {"kind": "qwen2"}, {"kind": "mistral"}], count=2)
)
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


def test_a_base_has_no_length_of_training_that_nobody_chose() -> None:
    for missing, given in (("steps", {"warmup_steps": 1}), ("warmup_steps", {"steps": 1})):
        with pytest.raises(TypeError, match=f"setting '{missing}' is missing"):
            NextTokenPretraining(**given)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="OwnCausal: setting 'pretraining' is missing"):
        OwnCausal(RandomText())  # type: ignore[call-arg]


def test_too_little_text_and_another_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fewer than a window"):
        own(num_texts=1).folder(where(tmp_path))
    larger = {"text": replace(IDS, size=IDS.size + 1)}
    with pytest.raises(ConfigError, match="has 24 token ids, but the task's tokenizer has 25"):
        CausalLM(own=own()).build_stage(0, 2, replace(where(tmp_path), vocabularies=larger))

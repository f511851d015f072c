"""Whole runs of a causal language model: equality over clouds, what peft and transformers load."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tests import warm_ranks
from tests.causal_models import SMALL
from tests.configs import composed
from tests.runs import in_threads, losses, weights
from xcloud import use
from xcloud.base.errors import ConfigError, DataError, RunFailed
from xcloud.base.run_folder import owned
from xcloud.evaluate.command import evaluate
from xcloud.features.checkpoints.resume import check_can_go_on
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.models.following import Choice
from xcloud.show.monitor import Monitor
from xcloud.tracking.tracker import Recording
from xcloud.use import TextGenerator

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("causal_run")]
PROMPTS = ["Ana", "The doctor has"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform == "linux":
        warm_ranks.import_first(
            "transformers.models.llama.modeling_llama", "peft", "xcloud.models.causal",
            "xcloud.tasks.language_modelling",
        )  # fmt: skip
    return tmp_path_factory.mktemp("cache")


def config_of(cache: Path, *overrides: str) -> DictConfig:
    return OmegaConf.create(
        OmegaConf.to_container(composed(*SMALL, f"cache_dir={cache}", *overrides))
    )


def start(run_dir: Path, cache: Path, *overrides: str) -> dict:
    return run(Settings.of(config_of(cache, *overrides)), run_dir)


@pytest.fixture(scope="module")
def two_clouds(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Whichever cloud comes first makes the base: to transformers rank 1 is no main process."""
    folder = tmp_path_factory.mktemp("two_clouds")
    start(folder, cache, "cluster/wan=free")
    return folder


@pytest.fixture(scope="module")
def all_weights(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("all_weights")
    start(folder, cache, "cluster/wan=free", "model.lora=null")
    return folder


def test_adapters_are_bit_equal_to_one_process(
    two_clouds: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP32, no compression, dropout on, gradients clipped over both clouds."""
    in_threads(tmp_path, config_of(cache, "cluster=local"), monkeypatch)

    assert losses(tmp_path) == losses(two_clouds)
    ours, theirs = weights(two_clouds), weights(tmp_path)
    assert ours.keys() == theirs.keys() and len(ours) == 4 * 7 * 2
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(tensor.any() for name, tensor in ours.items() if "lora_B" in name), "all trained"


@pytest.mark.nightly
def test_all_weights_are_bit_equal_to_one_process(
    all_weights: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_threads(tmp_path, config_of(cache, "cluster=local", "model.lora=null"), monkeypatch)

    assert losses(tmp_path) == losses(all_weights)
    ours, theirs = weights(all_weights), weights(tmp_path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.nightly
def test_stages_dealt_over_the_ranks_of_a_cloud_train_as_whole_ones(
    all_weights: Path, cache: Path, tmp_path: Path
) -> None:
    """In one of two clouds; clipped over both; blocks computed again in the backward. Three pieces
    are scored, so one rank has one more to do."""
    summary = start(
        tmp_path, cache, "cluster=two_clouds_dp", "cluster/wan=free", "model.lora=null",
        "+cluster.clouds.cloud_b.shard=true", "model.activation_checkpointing=true",
        "training.eval_batch_size=4", "task.data.num_test=10"
    )  # fmt: skip
    assert losses(tmp_path) == pytest.approx(losses(all_weights), rel=1e-5)
    ours, theirs = weights(tmp_path), weights(all_weights)
    assert ours.keys() == theirs.keys(), "whole tensors under the usual names"
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-5)
    expected = json.loads((all_weights / "summary.json").read_text())["quality"]
    assert summary["quality"] == pytest.approx(expected, rel=1e-4)
    memory = {rank["rank"]: rank for rank in summary["memory"]}
    whole = json.loads((all_weights / "summary.json").read_text())["memory"][1]
    for kind in ("parameters", "gradients", "optimizer"):
        assert memory[2][kind] + memory[3][kind] == pytest.approx(whole[kind], rel=1e-3)
        assert memory[2][kind] < 0.6 * whole[kind]


@pytest.mark.nightly
def test_pipelines_whose_first_stage_is_dealt_are_averaged_as_one_model(
    all_weights: Path, cache: Path, tmp_path: Path
) -> None:
    """Hybrid: a, b | c, d. a and c deal their stage over two ranks; each of these averages what
    it holds. Replicas are compared after every update."""
    shards = (f"+cluster.clouds.cloud_{name}.shard=true" for name in "ac")
    others = (
        f"+cluster.clouds.cloud_{name}={{_target_:xcloud.layout.Cloud,num_ranks:{ranks}}}"
        for name, ranks in (("c", 2), ("d", 1))
    )
    start(
        tmp_path, cache, "cluster=two_clouds", "cluster/wan=free", "model.lora=null", *others,
        "cluster.clouds.cloud_a.num_ranks=2", *shards, "schedule.num_micro_batches=8",
        "strategy=hybrid", "strategy.averaging.check_every=1",
    )  # fmt: skip
    assert losses(tmp_path) == pytest.approx(losses(all_weights), rel=1e-5)
    ours, theirs = weights(tmp_path), weights(all_weights)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-5)


@pytest.mark.nightly
def test_an_owner_of_text_and_labels_trains_over_another_cloud(
    two_clouds: Path, cache: Path, tmp_path: Path
) -> None:
    summary = start(
        tmp_path, cache, "cluster=u_shape", "cluster/wan=free", "compression=int8",
        "security=owner_keeps_text_and_labels", "model.lora.layers=[1,2,3]",
        "security/meter=attack",
    )  # fmt: skip
    assert 1 < summary["quality"]["perplexity"] < 400
    assert summary["status"] == "finished"
    assert 0 <= summary["token_recovery"] <= 1, "rows that cross are matched with their tokens"
    assert summary["wan_bytes_per_step"]["backward"] > 0


MARK = "xylophone"
OWN_TEXTS = {
    "_target_": "xcloud.tasks.language_modelling.LanguageModelling",
    "tokenizer": {"_target_": "xcloud.tasks.tokenizer.TrainedTokenizer", "vocab_size": 400},
    "max_length": 64,
    "dev_share": 8,
    "test_share": 8,
}


@pytest.mark.parametrize(
    ("whose", "holders", "wanted"),
    [
        pytest.param("public", {}, {"samples.txt", "scores.jsonl"}, marks=pytest.mark.nightly),
        ("held", {"text": ["cloud_a"], "label": ["cloud_b"]}, {"scores.jsonl"}),
        ("own", {}, set()),
    ],
)
def test_no_file_that_goes_to_the_tracker_has_a_text_that_may_not(
    whose: str,
    holders: dict[str, list[str]],
    wanted: set[str],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("transformers.models.llama.modeling_llama", "peft.tuners.lora"):
        importlib.import_module(module)  # two threads at once may wait for each other
    (run_dir := tmp_path / "run").mkdir()
    config = config_of(cache, "cluster/wan=free", "training.max_steps=1")
    config.security.holders = holders
    if whose != "public":
        documents = [f"the {MARK} of number {n} is here" for n in range(80)]
        (tmp_path / "train.txt").write_text("\n\n".join(documents))
        folder = {"_target_": "xcloud.tasks.sources.Folder", "path": str(tmp_path)}
        config.task = {**OWN_TEXTS, "data": folder, "cache_dir": str(cache)}
    in_threads(run_dir, config, monkeypatch)
    kept: dict[str, str] = {}
    monkeypatch.setattr(
        Recording,
        "artifact",
        lambda recording, path: kept.update({path.name: path.read_text("utf-8", "replace")}),
    )
    Monitor(Settings.of(config), run_dir).finish(None)

    assert "summary.json" in kept and wanted == kept.keys() & {"samples.txt", "scores.jsonl"}
    if whose != "public":
        assert MARK in (run_dir / "samples.txt").read_text()
        assert not any(MARK in text for text in kept.values())


def test_perplexity_tokens_per_second_and_bytes_are_in_the_summary(two_clouds: Path) -> None:
    summary = json.loads((two_clouds / "summary.json").read_text())
    assert summary["quality"].keys() == {"perplexity", "loss"}
    assert summary["tokens_per_s"] > summary["learned_tokens_per_s"] > 0, "first tokens are given"
    assert summary["wan_bytes_per_step"]["forward"] > 0
    memory = summary["memory"]
    assert [rank["cloud"] for rank in memory] == ["cloud_a", "cloud_b"]
    for rank in memory:
        assert rank["parameters"] > rank["gradients"] > 0 and rank["activations"] > 0
        assert rank["optimizer"] >= 2 * rank["gradients"] and rank["peak"] > rank["parameters"]
    assert (two_clouds / "samples.txt").read_text().count("text       ") == 5, "one a document"


def written_on(model: torch.nn.Module, folder: Path) -> list[str]:
    """Greedily, by transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(f"{tokenizer.bos_token}{prompt}", add_special_tokens=False)
        found = model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)),
            do_sample=False, max_new_tokens=12, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        texts.append(tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True))
    return texts


# peft asks transformers under a name that is going away.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_peft_loads_the_adapter_and_writes_on_as_the_stages_do(
    two_clouds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    use.export([str(two_clouds), "--out", str(tmp_path / "joined")])
    folder = tmp_path / "joined"
    assert capsys.readouterr().out == f"{folder}\n"
    about = json.loads((folder / "adapter_config.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(about["base_model_name_or_path"])
    model = PeftModel.from_pretrained(base, folder).eval()

    adapters = {n: t for n, t in model.state_dict().items() if "lora_" in n}
    assert len(adapters) == len(weights(two_clouds))
    assert all(t.any() for n, t in adapters.items() if "lora_B" in n), "none is left at its start"
    generator = TextGenerator(two_clouds, compressed=False)
    expected = written_on(model, folder)
    assert ["".join(generator.pieces(prompt, 12, Choice())) for prompt in PROMPTS] == expected
    assert all(expected)


def test_transformers_loads_all_weights_and_writes_on_as_the_stages_do(
    all_weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM

    TextGenerator(all_weights).join(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = written_on(model, tmp_path)
    monkeypatch.setattr(use, "is_emulated", lambda *_, **__: True)
    use.generate([str(all_weights), *PROMPTS, "--max-new-tokens", "12", "--uncompressed"])

    said = "".join(f"{p}{text}\n" for p, text in zip(PROMPTS, expected, strict=True))
    told = capsys.readouterr()
    assert told.out == said
    assert "bf16, in which the run was measured: this processor multiplies" in told.err


def test_export_writes_into_no_folder_that_another_command_owns(
    two_clouds: Path, tmp_path: Path
) -> None:
    with owned(two_clouds):
        with pytest.raises(ConfigError, match="is in use by process"):
            use.export([str(two_clouds)])
        assert not (two_clouds / "joined").exists()
        use.export([str(two_clouds), "--out", str(tmp_path / "out")])  # it is only read
    assert any((tmp_path / "out").iterdir())


def test_a_missing_part_or_another_kind_of_run_is_named(two_clouds: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(two_clouds, tmp_path / "half")
    (tmp_path / "half" / "model" / "stage1.safetensors").unlink()
    with pytest.raises(DataError, match=r"there is no .*stage1\.safetensors.*several machines"):
        TextGenerator(tmp_path / "half").join(tmp_path / "out")
    other = composed("+exp=abnet_iwslt")
    (tmp_path / "experiment.yaml").write_text(OmegaConf.to_yaml(other, resolve=True))
    with pytest.raises(ConfigError, match="no run of a causal language model"):
        TextGenerator(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("weights_in", "changed"), [("int8", "compression=int4"), ("nf4", "compression=fp16_int8")]
)
def test_adapters_beside_packed_weights_go_on_with_another_compressor_and_are_merged(
    weights_in: str, changed: str, two_clouds: Path, cache: Path, tmp_path: Path
) -> None:
    """transformers writes on with the merged model as the packed stages do with their adapters."""
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    run_dir = tmp_path / "run"
    given = (f"model.weights={weights_in}", "cluster/wan=free", "compression=int8")
    start(run_dir, cache, *given, "training.max_steps=2", "training.checkpoint.every_steps=2")
    config = config_of(cache, *given[:2], changed)
    summary = run(Settings.of(config), run_dir, resumes=check_can_go_on)

    assert len(losses(run_dir)) == 4
    memory = json.loads((two_clouds / "summary.json").read_text())["memory"]
    for packed, dense in zip(summary["memory"], memory, strict=True):
        assert packed["parameters"] < 0.8 * dense["parameters"]
    generator = TextGenerator(run_dir, compressed=False)
    use.export([str(run_dir), "--merge"])
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "merged").eval()
    expected = written_on(merged, run_dir / "merged")
    assert ["".join(generator.pieces(prompt, 12, Choice())) for prompt in PROMPTS] == expected
    layer = next(m for m in generator.stages[0].modules() if isinstance(m, LoraLayer))
    folded = merged.model.layers[0].self_attn.q_proj.weight
    adapted = layer.base_layer.stored() + layer.get_delta_weight("default")
    torch.testing.assert_close(folded.detach(), adapted.detach())
    assert not torch.equal(folded, layer.base_layer.stored())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ([], 1e-4),
        (["training.precision=bf16", "compression=int4"], 2e-3),  # other threads, other bits
        (["security/defences/forward=gaussian_noise", "security.defences.forward.sigma=0.1"], 0.1),
    ],
    ids=["plain", "bf16 and int4", "noise"],
)
def test_a_file_is_scored_as_if_it_were_the_runs_test_set(
    given: list[str], bound: float, cache: Path, tmp_path: Path
) -> None:
    start(run_dir := tmp_path / "run", cache, "cluster/wan=free", *given)
    task = TextGenerator(run_dir).experiment.task
    texts = task.read(frozenset({"text"})).splits["test"].texts["text"]
    (folder := tmp_path / "other").mkdir()
    (folder / "mine.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))

    evaluate([str(run_dir), "--texts", str(folder / "mine.jsonl")])
    evaluate([str(run_dir), "--texts", str(folder / "mine.jsonl"), "--uncompressed"])

    summary = json.loads((run_dir / "summary.json").read_text())
    through, without = (
        {n: s["value"] for n, s in summary["evaluation"][name]["metrics"].items()}
        for name in ("other_mine", "other_mine_uncompressed")
    )
    assert through["loss"] == pytest.approx(summary["quality"]["loss"], rel=bound)
    if given:
        away = abs(without["loss"] - summary["quality"]["loss"])
        assert away > 3 * abs(through["loss"] - summary["quality"]["loss"])


@pytest.mark.nightly
@pytest.mark.parametrize("weights_in", ["int8", "nf4"])
def test_packed_weights_with_other_features(weights_in: str, cache: Path, tmp_path: Path) -> None:
    """Losses of one process; kept rows of frozen blocks; a resume in another kind is refused."""
    kept = f"model.weights={weights_in}"
    start(tmp_path / "one", cache, kept, "cluster=local")
    start(tmp_path / "three", cache, kept, "cluster=u_shape", "cluster/wan=free")
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "three"), rel=1e-4)
    start(
        tmp_path / "rows", cache, kept, "cluster/wan=free", "model.lora.layers=[2,3]",
        "training.activation_cache_mb=10", "model.lora.dropout=0", "training.max_steps=16",
        "model.activation_checkpointing=true", "training.checkpoint.every_steps=8",
    )  # fmt: skip
    assert losses(tmp_path / "rows")[-1] < losses(tmp_path / "rows")[0]
    other = config_of(
        cache, "cluster/wan=free", "model.lora.layers=[2,3]", "training.activation_cache_mb=10",
        "model.lora.dropout=0", "training.max_steps=20", "model.activation_checkpointing=true",
    )  # fmt: skip
    with pytest.raises((ConfigError, DataError, RunFailed), match=r"model\.weights|frozen"):
        run(Settings.of(other), tmp_path / "rows", resumes=check_can_go_on)


def test_packed_weights_are_not_dealt_out(cache: Path) -> None:
    config = config_of(
        cache, "cluster=two_clouds_dp", "+cluster.clouds.cloud_b.shard=true", "model.weights=int8"
    )
    with pytest.raises(ConfigError, match=r"shard.*model\.weights=int8 packs.*choose model\.weig"):
        Settings.of(config).job.check()


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["gpipe", "two_buffered"])
def test_means_of_tokens_go_on_bit_for_bit_from_a_checkpoint(
    schedule: str, cache: Path, tmp_path: Path
) -> None:
    """Both ends keep them; with two_buffered a checkpoint waits until nothing is on its way."""
    given = (
        "compression=transform_tokens", "model.text_everywhere=true", "cluster/wan=free",
        f"schedule={schedule}", "schedule.num_micro_batches=2", "training/optimizer=muon",
        "training.optimizer.decay=constant", "training.checkpoint.every_steps=4",
    )  # fmt: skip
    start(tmp_path / "whole", cache, *given, "training.max_steps=8")
    start(tmp_path / "cut", cache, *given, "training.max_steps=4")
    config = config_of(cache, *given, "training.max_steps=8")
    run(Settings.of(config), tmp_path / "cut", resumes=check_can_go_on)

    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    kept, expected = weights(tmp_path / "cut"), weights(tmp_path / "whole")
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)

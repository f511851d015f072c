"""Public text: the same everywhere, from the demo texts or from a file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from xcloud.base.errors import ConfigError, DataError
from xcloud.tasks.text_sources import PublicText
from xcloud.tasks.tokenizer import TrainedTokenizer

TOKENIZER = TrainedTokenizer(400, "bpe")


def test_the_demo_texts_give_what_was_asked_for_and_always_the_same(tmp_path: Path) -> None:
    found = PublicText(TOKENIZER).sentences(20, tmp_path / "a")

    assert found == PublicText(TOKENIZER).sentences(20, tmp_path / "b")
    assert len(found) == 20 and all(found)
    size = PublicText(TOKENIZER).token_ids(tmp_path / "a").size
    assert max(map(max, found)) < size <= 400


def test_the_lines_of_a_file_are_drawn_at_random_and_always_the_same(tmp_path: Path) -> None:
    lines = [f"line number {n}" for n in range(30)]
    for name, content in (("x.txt", "\n\n".join(lines).encode()), ("x.txt.gz", None)):
        raw = content or gzip.compress("\n".join(lines).encode())
        (tmp_path / name).write_bytes(raw)
    plain = PublicText(TOKENIZER, str(tmp_path / "x.txt"))
    packed = PublicText(TOKENIZER, str(tmp_path / "x.txt.gz"))

    assert plain.sentences(10, tmp_path) == packed.sentences(10, tmp_path)
    assert sorted(plain._texts(30)) == sorted(lines)
    with pytest.raises(DataError, match=r"has 30 lines, but 31 are needed: lower model\.split"):
        plain.sentences(31, tmp_path)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"public_text\.path .*nowhere.* cannot be read"):
        PublicText(TOKENIZER, str(tmp_path / "nowhere")).sentences(1, tmp_path)
    with pytest.raises(ConfigError, match=r"public_text\.path must be a text or null"):
        PublicText(TOKENIZER, 7)  # type: ignore[arg-type]

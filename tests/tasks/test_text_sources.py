"""Public text: the same everywhere, from the demo texts or from a file."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from xcloud.base.errors import ConfigError, DataError
from xcloud.tasks import text_sources
from xcloud.tasks.text_sources import DemoText, FolderText, HubText, PublicText
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


def test_the_hub_is_asked_for_the_set_of_a_language_or_a_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def load_hub(name: str, config: str | None, **given: Any) -> Any:
        asked.append((name, config, given))
        raise DataError("no network")

    monkeypatch.setattr(text_sources, "load_hub", load_hub)
    own = HubText("owner/wiki", config="2023.{language}", pairs_name="owner/opus", revision="abc")
    plain = HubText("owner/wiki", config=None, pairs_name="owner/opus", split="validation")
    for source in (own, plain):
        for part in ("es", "es-en"):
            with pytest.raises(DataError, match="no network"):
                list(source.read(part))
    train = {"streaming": True, "revision": "abc", "split": "train"}
    validation = {"streaming": True, "revision": None, "split": "validation"}
    assert asked == [
        ("owner/wiki", "2023.es", train), ("owner/opus", "es-en", train),
        ("owner/wiki", None, validation), ("owner/opus", "es-en", validation),
    ]  # fmt: skip
    known = [one.identity(part, tmp_path) for one in (own, plain) for part in ("es", "es-en")]
    assert len(set(known)) == 4 and known[0] == own.identity("es", tmp_path)


def test_demo_texts_have_both_sides_in_the_order_of_the_pair(tmp_path: Path) -> None:
    demo = DemoText(50)
    both = list(demo.read("es-en"))
    assert len(both) == 50 and [(es,) for es, _ in both] == list(demo.read("es"))
    assert [(en, es) for es, en in both] == list(demo.read("en-es"))
    assert [*demo.public_texts()] == [text for pair in both for text in pair]
    known = [DemoText(n).identity(part, tmp_path) for n in (50, 51) for part in ("es", "es-en")]
    assert len(set(known)) == 4 and known[1] == demo.identity("es-en", tmp_path)


UNREAD = {
    "languages that are asked for, and held-out files": ([], None),
    "another form": (["more.csv"], "more.csv"),
    "a backup": (["train.es.bak"], "train.es.bak"),
    "another language": (["de.txt"], "de.txt"),
    "no data": (["README.md", "._es.txt"], None),
}


@pytest.mark.parametrize(("names", "said"), UNREAD.values(), ids=UNREAD)
def test_files_of_a_folder_of_text_that_nobody_reads_are_named(
    names: list[str], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ["es.txt", "en.txt", "train.es", "train.en", "dev.es", "test_2016.en", *names]:
        (tmp_path / name).write_text("a text\n")
    FolderText(str(tmp_path)).check(["es", "en", "es-en"])
    expected = [] if said is None else [f"{tmp_path}: not read, beside what is: {said}"]
    assert [record.getMessage() for record in caplog.records] == expected

"""Data sets in the hub's form, from local folders; and no waiting for a hub that is not there."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from xcloud import pretrained as hub_access
from xcloud.base.errors import DataError
from xcloud.tasks.rows import Corpus
from xcloud.tasks.translation import HubTranslation

datasets = pytest.importorskip("datasets")
BOTH = frozenset({"source", "target"})
ROWS = [{"translation": {"es": f"hola {i}", "en": f"hello {i}"}} for i in range(40)]


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path, visible: frozenset[str] = BOTH, **settings: object) -> Corpus:
    return HubTranslation(path=str(path), **settings).read(visible)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "validation.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "test.jsonl", ROWS[3:5])
    return tmp_path


def test_translation_dicts_in_a_local_folder_without_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)  # whoever asks for an address dies
    corpus = read(folder)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [40, 3, 2]
    assert corpus.splits["test"].texts == {
        "source": ["hola 3", "hola 4"],
        "target": ["hello 3", "hello 4"],
    }


def test_parquet_with_columns_of_other_names(tmp_path: Path) -> None:
    rows = {"spanish": ["uno", None, "tres"] * 10, "english": ["one", "two", "three"] * 10}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "train-00000-of-00001.parquet"))
    columns = {"source_column": "spanish", "target_column": "english"}
    corpus = read(tmp_path, dev_share=3, test_share=3, **columns)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [24, 3, 3]
    assert set(corpus.splits["train"].texts["source"]) == {"uno", "", "tres"}
    held_out = ["dev held out of train", "test held out of train"]
    assert corpus.remarks[:2] == held_out
    assert "train: 7 empty cells of source are kept" in corpus.remarks
    with pytest.raises(DataError, match=r"no column en, es; it has spanish, english"):
        read(tmp_path)


def test_only_the_visible_side_is_kept_and_rows_are_counted_without(folder: Path) -> None:
    whole = read(folder)
    seen = read(folder, frozenset({"target"}))
    assert seen.splits["train"].texts == {"target": whole.splits["train"].texts["target"]}
    assert seen.agreed == whole.agreed
    nothing = read(folder, frozenset())
    assert [rows.num_rows for rows in nothing.splits.values()] == [40, 3, 2]


def test_split_names_may_be_chosen_and_must_exist(folder: Path) -> None:
    corpus = read(folder, dev="test", test="validation")
    assert (corpus.splits["dev"].num_rows, corpus.splits["test"].num_rows) == (2, 3)
    with pytest.raises(DataError, match=r"nothing for task\.test=tst; found: train"):
        read(folder, test="tst")


def test_a_language_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="no column fr; it has es, en"):
        read(folder, frozenset({"source"}), source="fr")


def test_a_hub_that_does_not_answer_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(*args: object, **kwargs: object) -> socket.socket:
        tried.append(args)
        raise socket.gaierror("no network in this test")

    from huggingface_hub import constants

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for key in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(key, raising=False)
    hub_access.go_offline_if_unreachable.cache_clear()
    try:
        with pytest.raises(DataError, match=r"nobody/nothing: the hub cannot be reached.*folder"):
            HubTranslation(path="nobody/nothing").read(BOTH)
    finally:
        hub_access.go_offline_if_unreachable.cache_clear()
    assert len(tried) == 1  # left alone the library retries for 23 s

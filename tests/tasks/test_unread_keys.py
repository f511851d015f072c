"""Whoever reads rows says what of them is not used: one table of all readers, which a new reader
has to join."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import given
from tests.logged import Log
from tests.small_tokenizer import SmallTokenizer
from xcloud import tasks
from xcloud.tasks import text_sources
from xcloud.tasks.classification import Classification, CrossLingual, LanguageFolder, LanguageHub
from xcloud.tasks.language_modelling import LanguageModelling
from xcloud.tasks.preferences import Preferences
from xcloud.tasks.question_answering import QuestionAnswering
from xcloud.tasks.rows import Demo, Source
from xcloud.tasks.sources import Folder, Hub
from xcloud.tasks.text_sources import TextSource
from xcloud.tasks.text_task import TextTask
from xcloud.tasks.translation import Translation
from xcloud.tasks.wit3 import Wit3

PAIR = {"es": "hola", "en": "hello"}
LABELLED = {"sentence": "a film", "label": "good"}
INFERENCE = {"premise": "a", "hypothesis": "b", "label": "neutral"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
ANSWERS = {"prompt": "a", "chosen": "b", "rejected": "c"}
QUESTION = {"context": "a b", "question": "c", "answers": {"text": ["b"], "answer_start": [2]}}

ROWS: dict[str, tuple[type[TextTask], type[Source], dict[str, Any]]] = {
    "translation, folder": (Translation, Folder, PAIR),
    "translation, hub": (Translation, Hub, PAIR),
    "classification, folder": (Classification, Folder, LABELLED),
    "classification, hub": (Classification, Hub, LABELLED),
    "cross-lingual, folder": (CrossLingual, LanguageFolder, INFERENCE),
    "cross-lingual, hub": (CrossLingual, LanguageHub, INFERENCE),
    "language modelling, folder": (LanguageModelling, Folder, CHAT),
    "language modelling, hub": (LanguageModelling, Hub, {"text": "a text"}),
    "preferences, folder": (Preferences, Folder, ANSWERS),
    "preferences, hub": (Preferences, Hub, ANSWERS),
    "question answering, folder": (QuestionAnswering, Folder, QUESTION),
    "question answering, hub": (QuestionAnswering, Hub, QUESTION),
}
TEXTS: dict[type[TextSource], dict[str, Any]] = {
    text_sources.FolderText: {"text": "a text"},
    text_sources.HubText: {"text": "a text"},
}
WITHOUT_KEYS = {Wit3}  # lines of text and of XML


def concrete(base: type) -> Iterator[type]:
    for below in base.__subclasses__():
        if not inspect.isabstract(below) and below.__module__.startswith("xcloud."):
            yield below
        yield from concrete(below)


def test_every_reader_of_rows_is_in_the_tables_above() -> None:
    for module in pkgutil.iter_modules(tasks.__path__, "xcloud.tasks."):
        importlib.import_module(module.name)
    sources = {one for one in concrete(Source) if not issubclass(one, Demo)} - WITHOUT_KEYS
    assert sources == {source for _, source, _ in ROWS.values()}
    assert {*concrete(TextTask)} == {task for task, _, _ in ROWS.values()}
    texts = {one for one in concrete(TextSource) if one is not text_sources.DemoText}
    assert texts == {*TEXTS}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `datasets` would load: rows by split, or one split, of which nothing else is asked."""
    import datasets

    held: dict[str, Any] = {}

    def load(name: str, config: str | None, split: str = "", **_: object) -> Any:
        made = {one: datasets.Dataset.from_list(rows) for one, rows in held.items()}
        return made[split] if split else made

    for module in ("sources", "classification", "text_sources"):
        monkeypatch.setattr(f"xcloud.tasks.{module}.load_hub", load)
    return held


@pytest.mark.parametrize("reader", ROWS)
def test_keys_of_rows_that_are_not_used_are_named_once_with_their_files(
    reader: str, hub: dict[str, Any], tmp_path: Path
) -> None:
    kind, source, row = ROWS[reader]
    rows = [{**row, "extra": "x"}, {**row, "extra": "y"}, {**row, "extra": "z"}, {**row}]
    for split in ("train", "validation", "test"):
        hub[split] = rows
        lines = "".join(json.dumps(one) + "\n" for one in rows)
        language = ".en" if kind is CrossLingual else ""
        (tmp_path / f"{split}{language}.jsonl").write_text(lines)
    settings: dict[str, Any] = {"path": str(tmp_path), "tokenizer": SmallTokenizer()}
    if kind is Translation:
        del settings["tokenizer"]
    if kind is CrossLingual:
        settings["languages"] = ["en"]
    if "hub" in reader:
        settings["dataset"] = "owner/name" if kind is CrossLingual else settings["path"]
        del settings["path"]
    task: Any = given(kind, source, **settings)
    remarks = [one for one in task.read(frozenset(task.fields)).remarks if "not used" in one]
    counted = "" if "hub" in reader else " of 9 rows"
    [remark] = remarks
    assert remark.endswith(f"not used: 'extra'{counted}")
    assert "train" in remark and "test" in remark


@pytest.mark.parametrize("reader", TEXTS, ids=lambda one: one.__name__)
def test_texts_for_pre_training_say_in_the_own_log_what_of_their_rows_is_not_used(
    reader: Any, hub: dict[str, Any], tmp_path: Path, caplog: Log
) -> None:
    rows = [{**TEXTS[reader], "extra": "x"}]
    hub["train"] = rows
    (tmp_path / "train.es.jsonl").write_text(json.dumps(rows[0]))
    source = reader(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert list(source.read("es")) == [("a text",)]
    assert "not used: 'extra'" in caplog.text


def test_a_key_without_anything_under_it_is_no_key_that_is_left_out(tmp_path: Path) -> None:
    rows = [{**CHAT, "tools": [], "images": None, "id": ""}] * 4
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = given(LanguageModelling, Folder, path=str(tmp_path))
    assert not any("not used" in one for one in task.read(frozenset(task.fields)).remarks)


def test_many_keys_are_cut_and_long_ones_too(tmp_path: Path) -> None:
    row = {**LABELLED, **{f"key {n} " + "x" * 500: 1 for n in range(30)}}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 4)
    task = given(Classification, Folder, path=str(tmp_path), classes=["good", "bad"])
    remarks = task.read(frozenset(task.fields)).remarks
    [remark] = [one for one in remarks if "not used" in one]
    assert remark.endswith(", 22 more") and len(remark) < 1500


def test_keys_outside_of_a_translation_are_named_too(tmp_path: Path) -> None:
    row = {"translation": {**PAIR, "fr": "bonjour"}, "score": 1}
    (tmp_path / "train.jsonl").write_text((json.dumps(row) + "\n") * 4)
    task = given(Translation, Folder, path=str(tmp_path))
    [remark] = [o for o in task.read(frozenset(task.fields)).remarks if "not used" in o]
    assert "'score' of 4 rows" in remark and "'fr' of 4 rows" in remark

"""Data by name: `task.data.dataset` reads a data set of the hub, a folder of parquet and what
save_to_disk wrote by the same words, in all five forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import given
from tests.nightly import first_daily
from tests.small_tokenizer import SmallTokenizer
from xcloud.base.errors import ConfigError, DataError
from xcloud.tasks.classification import Classification
from xcloud.tasks.language_modelling import LanguageModelling
from xcloud.tasks.preferences import Preferences
from xcloud.tasks.sources import Hub
from xcloud.tasks.translation import Translation

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
FORMS: dict[str, tuple[type[Any], dict[str, Any], str]] = {
    "chats": (LanguageModelling, {"messages": CHAT}, "messages"),
    "texts": (LanguageModelling, {"text": "  a text"}, "text"),
    "preferences": (Preferences, {"prompt": "a", "chosen": "b", "rejected": "c"}, "chosen"),
    "classification": (Classification, {"text": "a", "label": "good"}, "first"),
    "translation": (Translation, {"translation": {"es": "hola", "en": "hello"}}, "source"),
}
CELLS = {"chats": CHAT, "texts": "  a text", "preferences": "b", "classification": "a",
         "translation": "hola"}  # fmt: skip


def saved(folder: Path, rows: list[dict[str, Any]], place: str) -> None:
    import datasets

    made = datasets.Dataset.from_list(rows)
    folder.mkdir()
    if place == "parquet":
        for split in ("train", "validation", "test"):
            made.to_parquet(str(folder / f"{split}.parquet"))
    elif place == "saved, by split":
        parts = datasets.DatasetDict(train=made, validation=made, test=made)
        parts.save_to_disk(str(folder))
    else:
        made.save_to_disk(str(folder))


@pytest.mark.parametrize("place", ["parquet", "saved, by split", "saved, one set"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_from_a_folder_by_the_same_word(
    form: str, place: str, tmp_path: Path
) -> None:
    kind, row, column = FORMS[form]
    saved(tmp_path / "set", [row] * 9, place)
    settings: dict[str, Any] = {"dataset": str(tmp_path / "set"), "dev_share": 2, "test_share": 3}
    if form == "classification":
        settings |= {"classes": ["good", "bad"], "tokenizer": SmallTokenizer()}
    task = given(kind, Hub, **settings)
    task.check()
    corpus = task.read(frozenset(task.fields))
    counts = [4, 2, 3] if place == "saved, one set" else [9, 9, 9]
    assert list(corpus.counts.values()) == counts
    assert corpus.splits["train"].texts[column][0] == CELLS[form]
    assert not task.is_public, "files of a folder are somebody's own"


def test_a_data_set_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.data\.dataset must name a data set"):
        given(LanguageModelling, Hub)


@pytest.mark.parametrize("name", ["../elsewhere.arrow", "/etc/passwd", "missing.arrow"])
def test_a_saved_set_that_names_files_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "set", [{"text": "a"}] * 9, "saved, one set")
    state = tmp_path / "set" / "state.json"
    content = json.loads(state.read_text())
    content["_data_files"] = [{"filename": name}]
    state.write_text(json.dumps(content))
    task = given(LanguageModelling, Hub, dataset=str(tmp_path / "set"))
    with pytest.raises(DataError, match=r"no file beside it|is missing"):
        task.read(frozenset(task.fields))


OLD, NEW = "a" * 40, "b" * 40
SHARED = """
import json, os, sys
from tests.hub_server import HubServer
sets, asked = json.load(sys.stdin)
server = HubServer({
    name: {c: {f: rows.encode() for f, rows in files.items()} for c, files in commits.items()}
    for name, commits in sets.items()
})
def read(form, revision):
    from tests.corpora import given
    from tests.tasks.test_data_by_name import FORMS, SmallTokenizer
    from xcloud.tasks.sources import Hub
    settings = {"classes": ["good", "bad"], "tokenizer": SmallTokenizer()}
    settings = settings if form == "classification" else {}
    task = given(FORMS[form][0], Hub, dataset=f"own/{form}", revision=revision, **settings)
    task.check()
    corpus = task.read(frozenset(task.fields))
    said = [one for one in corpus.remarks if "commit" in one]
    print(json.dumps([form, revision, corpus.splits["train"].texts[FORMS[form][2]], said]))
with server.started():
    os.environ["HF_ENDPOINT"] = server.url  # read when the hub's library is imported
    for one in asked:
        read(*one)
"""


@pytest.mark.slow
@pytest.mark.parametrize("forms", first_daily([["chats"], [*FORMS]], 1), ids=len)
def test_a_form_is_read_from_a_server_of_the_hub_and_its_commit_is_said(
    tmp_path: Path, forms: list[str]
) -> None:
    sets = {}
    for form in forms:
        _, row, _ = FORMS[form]
        rows = f"{json.dumps(row)}\n"
        splits = {f"{split}.jsonl": 9 * rows for split in ("train", "validation", "test")}
        old = {**splits, "train.jsonl": 4 * rows}
        sets[f"own/{form}"] = {OLD: old, NEW: splits}
    asked: list[tuple[str, str | None]] = [*((form, None) for form in forms), ("chats", OLD)]
    done = subprocess.run(
        [sys.executable, "-c", SHARED], input=json.dumps([sets, asked]), text=True,
        capture_output=True, cwd=Path(__file__).parents[2], timeout=200, check=False,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_PROGRESS_BARS": "1",
             "HF_HUB_OFFLINE": "0"},  # an earlier test may have found no hub
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for (form, commit), (*_, cells, said) in zip(asked, found, strict=True):
        assert cells == (4 if commit else 9) * [CELLS[form]]
        assert said == [f"own/{form} is read at commit {commit or NEW}"]

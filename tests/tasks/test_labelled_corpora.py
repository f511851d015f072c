"""Labelled texts from folders and the hub's form: columns, splits, parts, what is not kept."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.corpora import given
from tests.nightly import first_daily
from xcloud import pretrained as hub_access
from xcloud.base.errors import ConfigError, DataError
from xcloud.tasks.classification import Classification, CrossLingual, LanguageFolder, LanguageHub
from xcloud.tasks.question_answering import QuestionAnswering
from xcloud.tasks.rows import Corpus, Rows, interleaved
from xcloud.tasks.sources import Folder, Hub

ALL, TEXT, LABEL = frozenset({"text", "label"}), frozenset({"text"}), frozenset({"label"})
SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data sets in {SHARED}")


def write_tsv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    text = "\n".join("\t".join(cells) for cells in [header, *rows]) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def singles(name: str, num: int) -> list[list[str]]:
    return [[f"{name} {i}", str(i % 2)] for i in range(num)]


def cells(corpus: Corpus, split: str, column: str) -> list[str]:
    return list(corpus.splits[split].texts[column])  # type: ignore[index]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, num in (("train", 100), ("dev", 10), ("test", 5)):
        write_tsv(tmp_path / f"{name}.tsv.gz", ["sentence", "label"], singles(name, num))
    return tmp_path


def test_all_splits_as_they_are(folder: Path) -> None:
    corpus = given(Classification, Folder, path=str(folder)).read(ALL)
    assert cells(corpus, "train", "first") == [f"train {i}" for i in range(100)]
    assert cells(corpus, "test", "label") == ["0", "1", "0", "1", "0"]
    assert list(corpus.remarks) == ["columns sentence → label"]


@pytest.mark.parametrize("visible", [TEXT, LABEL, frozenset[str]()], ids=sorted)
def test_only_visible_columns_are_kept(folder: Path, visible: frozenset[str]) -> None:
    corpora: list[Classification] = [
        given(Classification, Folder, path=str(folder)),
        given(Classification, Hub, dataset=str(folder / "hub")),
    ]
    (folder / "hub").mkdir()
    for name in ("train", "validation", "test"):
        line = json.dumps({"sentence": "secret", "label": 1})
        (folder / "hub" / f"{name}.jsonl").write_text((line + "\n") * 3)
    for corpus in corpora:
        found = corpus.read(visible)
        for rows in found.splits.values():
            assert set(rows.texts) == {"first" if v == "text" else v for v in visible}
            assert rows.num_rows > 2
        assert found.agreed == corpus.read(ALL).agreed


def test_without_labelled_test_the_dev_set_is_the_test(folder: Path) -> None:
    write_tsv(folder / "test.tsv.gz", ["index", "sentence"], [["0", "hidden"]])
    corpus = given(Classification, Folder, path=str(folder), dev_share=8).read(ALL)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [92, 8, 10]
    assert cells(corpus, "test", "first") == [f"dev {i}" for i in range(10)]
    train, dev = cells(corpus, "train", "first"), cells(corpus, "dev", "first")
    assert not set(train) & set(dev) and len({*train, *dev}) == 100
    assert "test: the dev set, as there is no labelled test set" in corpus.remarks
    assert "test.tsv.gz has no column label: not used" in corpus.remarks
    with pytest.raises(DataError, match="no column label, so it cannot be scored"):
        given(Classification, Folder, path=str(folder), test_file="test").read(ALL)


def test_a_set_that_is_empty_is_not_passed_over(folder: Path) -> None:
    (folder / "test.tsv.gz").unlink()
    (folder / "test.tsv").touch()
    with pytest.raises(DataError, match=r"test\.tsv is empty"):
        given(Classification, Folder, path=str(folder)).check()
    write_tsv(folder / "test.tsv", ["sentence", "label"], [])
    with pytest.raises(DataError, match="the set of test has no rows"):
        given(Classification, Folder, path=str(folder)).read(ALL)


def test_columns_are_found_by_usual_names_or_named(tmp_path: Path) -> None:
    header = ["id", "question", "answer", "hypothesis", "premise", "relatedness", "gold_label"]
    write_tsv(tmp_path / "train.tsv", header, [["0", "q", "a", "h", "p", "2.5", "yes"]] * 200)

    def read(**choice: object) -> Mapping[str, Sequence[str]]:
        task = given(Classification, Folder, path=str(tmp_path), **choice)
        return task.read(ALL).splits["train"].texts

    assert {key: found[0] for key, found in read().items()} == {
        "first": "p", "second": "h", "label": "yes"
    }  # fmt: skip
    assert read(name="sst2")["first"][0] == "q"
    assert read(kind="value")["label"][0] == "2.5"
    named = read(text_columns=["question", "answer"], label_column="id")
    assert (named["second"][0], named["label"][0]) == ("a", "0")
    for choice, said in [
        ({"text_columns": ["questoin"]}, "no questoin"),
        ({"label_column": "x"}, r"has the columns id, question, .*no x"),
    ]:
        with pytest.raises(DataError, match=said):
            read(**choice)
    for choice, said in [
        ({"text_columns": ["a", "b", "c"]}, "task.text_columns must be"),
        ({"text_columns": ["a"], "name": "mrpc"}, "must name 2 columns"),
        ({"kind": "clases"}, "classes, value"),
    ]:
        with pytest.raises(ConfigError, match=said):
            read(**choice)


def test_a_folder_of_no_usual_columns_lists_them(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", ["x", "y"], [["1", "2"]])
    with pytest.raises(
        DataError, match=r"has the columns x, y by its first line, .*task.text_columns"
    ):
        given(Classification, Folder, path=str(tmp_path)).check()
    write_tsv(tmp_path / "train.tsv", ["text", "y"], [["1", "2"]])
    with pytest.raises(DataError, match=r"none has a usual label name.*task.label_column"):
        given(Classification, Folder, path=str(tmp_path)).check()
    with pytest.raises(DataError, match="none has a usual name for 2 text"):
        given(Classification, Folder, name="mrpc", path=str(tmp_path)).check()
    with pytest.raises(DataError, match=r"does not exist; task.data.path must be a folder"):
        given(Classification, Folder, path=str(tmp_path / "nowhere")).check()


def test_languages_in_file_names(tmp_path: Path) -> None:
    for language in ("en", "de"):
        for split in ("train", "dev", "test"):
            write_tsv(tmp_path / f"{split}.{language}.tsv", ["text", "label"], [[language, "1"]])
    for language in ("en", "de"):
        corpus = given(Classification, Folder, path=str(tmp_path), language=language).read(ALL)
        assert cells(corpus, "train", "first") == cells(corpus, "test", "first") == [language]
    with pytest.raises(DataError, match="no training set"):
        given(Classification, Folder, path=str(tmp_path), language="fr").check()


def test_cola_and_mnli_name_their_files_in_their_own_way(tmp_path: Path) -> None:
    for name, num in (("in_domain_train", 200), ("in_domain_dev", 4), ("out_of_domain_dev", 3)):
        write_tsv(tmp_path / "cola" / f"{name}.tsv", ["sentence", "label"], singles(name, num))
    corpus = given(Classification, Folder, name="cola", path=str(tmp_path / "cola")).read(ALL)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [196, 4, 7]
    assert "part" not in corpus.splits["test"].texts
    pairs = ["sentence1", "sentence2", "gold_label"]
    for name, num in (("train", 200), ("dev_matched", 3), ("dev_mismatched", 3)):
        write_tsv(tmp_path / "mnli" / f"{name}.tsv", pairs, [[name, "b", "neutral"]] * num)
    corpus = given(Classification, Folder, name="mnli", path=str(tmp_path / "mnli")).read(ALL)
    assert cells(corpus, "test", "part") == ["matched", "mismatched"] * 3
    assert cells(corpus, "test", "first")[:2] == ["dev_matched", "dev_mismatched"]


def test_json_lines_may_hold_numbers(tmp_path: Path) -> None:
    rows = [{"text": f"t{i}", "label": i % 3} for i in range(200)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = given(Classification, Folder, path=str(tmp_path)).read(ALL)
    assert set(cells(corpus, "train", "label")) == {"0", "1", "2"}
    (tmp_path / "train.jsonl").write_text('{"text": 5, "label": 1}\n{"label": 0}\n')
    with pytest.raises(DataError, match=r"line 2: no text under 'text'.*task.text_columns"):
        given(Classification, Folder, path=str(tmp_path)).read(TEXT)


def test_parts_are_interleaved_and_sampled_alike() -> None:
    sets = {"a": Rows(3, {"first": ["a0", "a1", "a2"]}), "b": Rows(2, {"first": ["b0", "b1"]})}
    rows = interleaved(sets)
    assert rows.texts["first"] == ["a0", "b0", "a1", "b1", "a2"]
    assert rows.texts["part"] == ["a", "b", "a", "b", "a"]


def by_language(folder: Path) -> None:
    pairs = ["premise", "hypothesis", "label"]
    for language in ("en", "de", "zh"):
        rows = [[f"{language}{i}", "h", "neutral"] for i in range(30)]
        write_tsv(folder / f"test.{language}.tsv", pairs, rows)
        write_tsv(folder / f"dev.{language}.tsv", pairs, rows[:20])


def test_one_language_is_learned_and_every_one_tested(tmp_path: Path) -> None:
    by_language(tmp_path)
    corpus = given(CrossLingual, LanguageFolder, path=str(tmp_path), dev_share=5).read(ALL)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [15, 5, 90]
    assert "no training file: dev.en.tsv is the training set" in corpus.remarks
    assert cells(corpus, "test", "part")[:4] == ["en", "de", "zh", "en"]
    write_tsv(tmp_path / "train.en.tsv", ["premise", "hypothesis", "label"], [["p", "h", "x"]] * 9)
    task = given(
        CrossLingual,
        LanguageFolder,
        path=str(tmp_path),
        languages=["zh", "de"],
        max_eval_samples=4,
    )
    corpus = task.read(TEXT)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [9, 4, 8]
    first = cells(corpus, "test", "first")
    assert [x.removeprefix("zh") for x in first[::2]] == [
        x.removeprefix("de") for x in first[1::2]
    ]
    assert "label" not in corpus.splits["test"].texts
    for arguments, said in [
        ({"train_language": "fr"}, "no train.fr.tsv and no dev.fr.tsv"),
        ({"languages": ["fr"]}, "no test.fr.tsv"),
    ]:
        with pytest.raises(DataError, match=said):
            given(CrossLingual, LanguageFolder, path=str(tmp_path), **arguments).check()
    write_tsv(tmp_path / "dev.de.tsv.gz", ["premise", "hypothesis", "label"], [])
    with pytest.raises(DataError, match=r"dev\.de\.tsv and dev\.de\.tsv\.gz are both dev\.de"):
        given(CrossLingual, LanguageFolder, path=str(tmp_path)).check()
    with pytest.raises(ConfigError, match=r"task\.languages must be a list"):
        given(CrossLingual, LanguageFolder, path=str(tmp_path), languages="de")


def test_every_tested_language_must_have_labels(tmp_path: Path) -> None:
    by_language(tmp_path)
    write_tsv(tmp_path / "test.de.tsv", ["premise", "hypothesis"], [["p", "h"]])
    with pytest.raises(DataError, match=r"test\.de\.tsv: no column label.*task\.languages"):
        given(CrossLingual, LanguageFolder, path=str(tmp_path)).check()


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.max_train_samples must be"):
        given(Classification, Folder, name="sst2", path=str(tmp_path), max_train_samples=0)
    with pytest.raises(ConfigError, match=r"task.name must be one of sst2, cola"):
        given(Classification, Folder, name="sst3", path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"task.data.path must be a text"):
        given(Classification, Folder, path="")


def hub_folder(folder: Path, test_label: int = -1) -> Path:
    folder.mkdir()
    for name, num, label in (("train", 100, 1), ("validation", 4, 0), ("test", 3, test_label)):
        rows = [{"sentence": f"{name} {i}", "label": label, "idx": i} for i in range(num)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_glue_in_the_hubs_form_is_tested_on_its_dev_set(tmp_path: Path) -> None:
    corpus = given(
        Classification,
        Hub,
        dataset=str(hub_folder(tmp_path / "hub")),
        name="sst2",
        config="default",
    ).read(ALL)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [98, 2, 4]
    assert Counter(cells(corpus, "test", "label")) == {"0": 4}
    asked = given(Classification, Hub, dataset=str(tmp_path / "hub"), test="validation").read(ALL)
    assert cells(asked, "test", "first") == cells(corpus, "test", "first")
    with pytest.raises(DataError, match=r"nothing for task\.data\.test=tset; found: train"):
        given(Classification, Hub, dataset=str(tmp_path / "hub"), test="tset").read(ALL)


def test_a_hub_set_without_test_labels_is_tested_on_its_dev_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = {
        name: datasets.Dataset.from_dict({"sentence": [name] * 100, "label": [0, 1] * 50})
        for name in ("train", "validation", "test")
    }
    loaded["test"] = loaded["test"].remove_columns("label")
    monkeypatch.setattr("xcloud.tasks.sources.load_hub", lambda *arguments, **which: loaded)
    corpus = given(Classification, Hub, dataset="owner/name").read(ALL)
    assert cells(corpus, "test", "first") == ["validation"] * 100
    with pytest.raises(DataError, match=r"cannot be scored; choose another task\.data\.test"):
        given(Classification, Hub, dataset="owner/name", test="test").read(ALL)


def test_a_hub_that_cannot_be_reached_is_said_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_access, "_answers", lambda url: False)
    hub_access.go_offline_if_unreachable.cache_clear()
    for corpus in (
        given(Classification, Hub, dataset="nyu-mll/glue", name="mrpc"),
        given(CrossLingual, LanguageHub, languages=["de"]),
        given(QuestionAnswering, Hub, dataset="rajpurkar/squad"),
    ):
        with pytest.raises(
            DataError, match="the hub cannot be reached and no copy is in the cache"
        ):
            corpus.check()


def test_a_data_set_by_language_is_that_of_the_language_that_is_trained() -> None:
    form: Any = SimpleNamespace(train_language="de")
    assert LanguageHub(dataset="owner/name").data_set(form) == "de"


REAL = {
    "trec": (partial(given, Classification, Folder), (5_343, 109, 500)),
    "sick": (partial(given, Classification, Folder, kind="value"), (4_500, 500, 4_927)),
    "mrpc": (partial(given, Classification, Folder, name="mrpc"), (3_576, 500, 1_725)),
    "squad_v1": (partial(given, QuestionAnswering, Folder), (6_731, 151, 1_774)),
    "pawsx": (partial(given, CrossLingual, LanguageFolder, name="pawsx"), (1_960, 40, 13_824)),
    "sst2": (partial(given, Classification, Folder, name="sst2"), (66_003, 1_346, 872)),
    "qnli": (partial(given, Classification, Folder, name="qnli"), (41_114, 839, 957)),
    "cola": (partial(given, Classification, Folder, name="cola"), (8_380, 171, 1_043)),
    "stsb_multi": (partial(given, Classification, Folder, name="stsb"), (5_749, 1_500, 1_379)),
    "xnli": (partial(given, CrossLingual, LanguageFolder, name="xnli"), (2_441, 49, 75_150)),
}


@needs_shared
@pytest.mark.parametrize(("task", "rows"), first_daily([*REAL.values()], count=2), ids=REAL)
def test_real_corpora_are_read(
    task: Callable[..., Classification | QuestionAnswering],
    rows: tuple[int, int, int],
    request: pytest.FixtureRequest,
) -> None:
    made = task(path=str(SHARED / request.node.callspec.id))
    corpus = made.read(LABEL)
    assert tuple(corpus.splits[s].num_rows for s in ("train", "dev", "test")) == rows

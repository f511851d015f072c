"""Files of other forms, and what stands in place of data: refused by name before anything starts,
in one line that repeats little of what they hold."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import causal_models
from tests.corpora import given
from tests.small_tokenizer import SmallTokenizer
from xcloud.base.errors import DataError
from xcloud.base.placeholders import HEAD, check_is_json, check_is_safetensors, check_is_text
from xcloud.models.backbone import PretrainedBackbone
from xcloud.models.causal import CausalLM
from xcloud.pretrained import WeightFiles, check_checkpoints
from xcloud.tasks.classification import Classification
from xcloud.tasks.language_modelling import LanguageModelling
from xcloud.tasks.question_answering import QuestionAnswering
from xcloud.tasks.rows import Source
from xcloud.tasks.sources import Folder, Hub, HubTable, load_hub, read_lines
from xcloud.tasks.text_sources import FolderText, HubText, PublicText
from xcloud.tasks.text_task import TextTask
from xcloud.tasks.tokenizer import FileTokenizer, PretrainedTokenizer
from xcloud.tasks.translation import Translation

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0c\nsize 1012\n"
ROWS = [f"a film number {i}\t{i % 2}" for i in range(40)]
TABLE = "\n".join(["text\tlabel", *ROWS])
OBJECTS = [{"text": text, "label": label} for text, label in (row.split("\t") for row in ROWS)]
SHARES = {"dev_share": 4, "test_share": 4}


def labelled(folder: Path) -> Classification:
    return given(Classification, Folder, path=str(folder), tokenizer=SmallTokenizer(), **SHARES)


BY_DATASETS: dict[str, tuple[str, bytes, str]] = {
    "semicolons": ("train.csv", b"text;label\na;1\n", "has semicolons between names"),
    "tabs": ("train.csv", b"text\tlabel\na\t1\n", "has tabs between names"),
    "Latin-1": ("train.csv", "text,label\nni\u00f1o,1".encode("latin-1"), "is not UTF-8.*iconv"),
    "UTF-16": ("train.csv", "text,label\na,1".encode("utf-16"), "UTF-16 text.*iconv"),
    "a cell more": (
        "train.csv",
        b"text,label\n1,a,1\n2,b,2\n",
        "names 2 columns, and its first row has 3",
    ),
}


@pytest.mark.parametrize("case", BY_DATASETS)
def test_what_datasets_would_refuse_in_its_words_or_take_is_refused_in_ours(
    case: str, tmp_path: Path
) -> None:
    name, content, message = BY_DATASETS[case]
    (tmp_path / name).write_bytes(content)
    task = given(Classification, Hub, dataset=str(tmp_path), tokenizer=SmallTokenizer(), **SHARES)
    with pytest.raises(DataError, match=message):
        task.check()
        task.read(frozenset(task.fields))


def test_cells_of_a_csv_are_texts_as_they_stand(tmp_path: Path) -> None:
    """Where pandas would find numbers and gaps."""
    texts = ["NA", "None", "null", "nan", "007", "1e5", "2020-01-01", " x"]
    labels = ["1.1", "1.10", "01", "True", "1.1", "1.10", "01", "True"]
    rows = "".join(f"{text},{label}\n" for text, label in zip(texts, labels, strict=True))
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}")
    found = [*load_hub(str(tmp_path), None)["train"]]
    assert [row["text"] for row in found] == texts
    assert [row["label"] for row in found] == labels


def test_a_header_in_the_middle_of_a_table_of_datasets_is_no_sample() -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a", "text"], "label": ["1", "label"]})
    table = HubTable(dataset=rows, where="set, split train")
    with pytest.raises(DataError, match="this row repeats the names"):
        list(table.rows(["text", "label"], keys="none"))
    assert list(table.rows(["label"], keys="none")) == [("1",), ("label",)]  # it may be a class


REFUSED: dict[str, tuple[str, bytes, str]] = {
    "a pointer": ("train.tsv", POINTER, r"is a Git LFS pointer.*git lfs pull"),
    "a packed pointer": ("train.tsv.gz", POINTER, r"is a Git LFS pointer.*git lfs pull"),
    "a pointer of git-annex": ("train.tsv", b"/annex/objects/MD5E-s1--0", "git-annex pointer"),
    "a page": ("train.jsonl", b"\n<!DOCTYPE html>\n<html>", "is a web page.*download it again"),
    "a packed page": ("train.jsonl.gz", gzip.compress(b"<html>"), "is a web page"),
    "a bucket's error": ("train.tsv", b"<?xml version='1'?>\n<Error><Code>", "server's error"),
    "the hub's answer": ("train.tsv", b"Entry not found", "the hub's answer"),
    "nothing": ("train.tsv", b"", "is empty"),
    "nothing, packed": ("train.tsv.gz", gzip.compress(b""), "is empty once it is unpacked"),
    "half a gzip": ("train.tsv.gz", gzip.compress(TABLE.encode())[:40], "truncated or damaged"),
    "not packed": ("train.tsv.gz", TABLE.encode(), "no gzip, as its name says"),
    "packed without saying": ("train.tsv", gzip.compress(b"text\tlabel"), "ends in .gz"),
    "UTF-16": ("train.tsv", TABLE.encode("utf-16"), "UTF-16 text.*iconv"),
    "a zip archive": ("train.tsv", b"PK\x03\x04" + bytes(30), "a zip archive; unpack it"),
    "parquet": ("train.jsonl", b"PAR1" + bytes(30), "a parquet file"),
    "an array": ("train.json", json.dumps(OBJECTS).encode(), "a JSON array is no object.*jq"),
    "an array in lines": ("train.json", json.dumps(OBJECTS, indent=1).encode(), "a JSON array"),
    "one indented object": ("train.jsonl", json.dumps(OBJECTS[0], indent=1).encode(), "not JSON"),
    "only CR": ("train.tsv", TABLE.replace("\n", "\r").encode(), "carriage return only"),
    "only CR, JSON": ("train.jsonl", b'{"text": "a", "label": 0}\r' * 30, "carriage return only"),
    "quoted names": ("train.tsv", b'"text"\t"label"\n"a"\t"0"\n', "in quotes"),
    "UTF-16 without a mark": ("train.tsv", TABLE.encode("utf-16-le"), "holds zero bytes"),
    "Latin-1": ("train.tsv", "text\tlabel\nniño\t1".encode("latin-1"), "is not UTF-8.*iconv"),
    "missing labels": ("train.tsv", f"{TABLE}\na\t".encode(), "1 of 41 rows have no label"),
    "two files with marks of order, joined": (
        "train.tsv", 2 * f"{TABLE}\n".encode("utf-8-sig"), "this row repeats the names",
    ),
    "a zero byte far behind": (
        "train.tsv", f"{TABLE}\n{'a' * 99_999}\0\t1".encode(), "line 42: a zero byte",
    ),
    "csv": ("train.csv", TABLE.replace("\t", ",").encode(), r"not read: train\.csv"),
    "parquet by name": ("train.parquet", b"PAR1", r"not read: train\.parquet"),
    "bzip2 by name": ("train.tsv.bz2", b"BZh9", r"not read: train\.tsv\.bz2"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_data_is_refused_by_name_before_anything_starts(
    case: str, tmp_path: Path
) -> None:
    name, content, message = REFUSED[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        labelled(tmp_path).check()
    said = str(raised.value)
    assert name in said and "\n" not in said and len(said) < 300 + len(str(tmp_path))


READ: dict[str, tuple[str, bytes]] = {
    "plain": ("train.tsv", TABLE.encode()),
    "a mark of byte order": ("train.tsv", TABLE.encode("utf-8-sig")),
    "lines as on Windows": ("train.tsv", TABLE.replace("\n", "\r\n").encode()),
    "lines of both kinds": ("train.tsv", TABLE.replace("\n", "\r\n", 7).encode()),
    "empty lines at the end": ("train.tsv", TABLE.encode() + b"\n\n\n"),
    "lines of spaces at the end": ("train.tsv", TABLE.encode() + b"\n \n  \n"),
    "empty lines as on Windows": ("train.tsv", TABLE.encode() + b"\r\n\r\n"),
    "packed": ("train.tsv.gz", gzip.compress(TABLE.encode())),
    "objects": ("train.jsonl", "\n".join(map(json.dumps, OBJECTS)).encode()),
    "objects, a mark of byte order": (
        "train.jsonl", "\n\n".join(map(json.dumps, OBJECTS)).encode("utf-8-sig"),
    ),
    "objects, a mark before each": (
        "train.jsonl", b"".join(f"{json.dumps(one)}\n".encode("utf-8-sig") for one in OBJECTS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_every_form_of_a_file_gives_the_same_rows(case: str, tmp_path: Path) -> None:
    name, content = READ[case]
    (tmp_path / name).write_bytes(content)
    task = labelled(tmp_path)
    task.check()
    rows = task.read(frozenset({"text", "label"})).train_set
    assert [*zip(rows.texts["first"], rows.texts["label"], strict=True)] == [
        tuple(row.split("\t")) for row in ROWS
    ]


def test_a_test_set_of_a_form_that_is_not_read_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(TABLE)
    (tmp_path / "test.csv").write_text("text,label\n")
    with pytest.raises(DataError, match=r"test\.csv is of a form that is not read"):
        labelled(tmp_path).check()


def test_a_line_pair_of_pointers_is_refused_on_either_side(tmp_path: Path) -> None:
    for name in ("train.es", "train.en"):
        (tmp_path / name).write_text("".join(f"{i}\n" for i in range(30)))
    task = given(Translation, Folder, path=str(tmp_path), dev_share=2, test_share=2)
    task.check()
    (tmp_path / "train.en").write_bytes(POINTER)
    with pytest.raises(DataError, match=r"train\.en is a Git LFS pointer"):
        task.check()


def test_a_link_to_a_file_that_is_not_here_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text(TABLE)
    labelled(tmp_path).check()
    (tmp_path / "test.tsv").symlink_to(tmp_path / ".git" / "annex" / "MD5E-s1--0")
    with pytest.raises(DataError, match=r"test\.tsv is a link to a file that is not here"):
        labelled(tmp_path).check()


def test_a_character_on_the_border_of_what_is_looked_at_is_text(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a" * (HEAD - 1) + "ñ\n" * 9)
    check_is_text(tmp_path / "train.txt")


OTHER_FILES: dict[str, Callable[[str], object]] = {
    "further texts": lambda path: given(
        Translation, Folder, path=str(Path(path).parent), source_monolingual_file=path
    ).check(),
    "a multilingual text": lambda path: FolderText(str(Path(path).parent)).check(["es"]),
    "a folder of the hub's form": lambda path: HubText(str(Path(path).parent)).check(["es"]),
    "public text": lambda path: PublicText(SmallTokenizer(), path).sentences(1, Path()),
    "a tokenizer": lambda path: FileTokenizer(path).check(),
}


@pytest.mark.parametrize("case", OTHER_FILES)
def test_every_other_file_that_is_read_is_looked_at(case: str, tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("es\ten\n" + "a\tb\n" * 200)
    (tmp_path / "es.txt").write_bytes(POINTER)
    with pytest.raises(DataError, match=r"es\.txt is a Git LFS pointer"):
        OTHER_FILES[case](str(tmp_path / "es.txt"))


@pytest.mark.parametrize("source", [Folder, Hub])
def test_a_column_called_translation_may_hold_texts(
    source: Callable[..., Source], tmp_path: Path
) -> None:
    rows = [{"source": f"uno {i}", "translation": f"one {i}"} for i in range(30)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = Translation(
        data=source(**{"path" if source is Folder else "dataset": str(tmp_path)}),
        source_column="source", target_column="translation", dev_share=2, test_share=2
    )  # fmt: skip
    task.check()
    found = task.read(frozenset({"source", "target"})).train_set
    assert found.texts["target"] == [f"one {i}" for i in range(30)]


@pytest.mark.parametrize("cell", [None, float("nan"), -1, "", "-"])
def test_a_missing_label_in_a_data_set_of_the_hub_is_refused(cell: object, tmp_path: Path) -> None:
    good = [{"text": f"film {i}", "label": str(i % 2)} for i in range(20)]
    bad = {"text": "film", "label": cell if isinstance(cell, str | None) else str(cell)}
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, [*good, bad])))
    task = given(Classification, Hub, dataset=str(tmp_path), tokenizer=SmallTokenizer(), **SHARES)
    with pytest.raises(DataError, match="1 of 21 rows have no label; the first is row 21"):
        task.read(frozenset({"label"}))


def test_a_pointer_among_files_of_the_hubs_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000.parquet").write_bytes(POINTER)
    with pytest.raises(DataError, match=r"train-00000\.parquet is a Git LFS pointer"):
        given(Translation, Hub, dataset=str(tmp_path)).check()


LONG = "lorem ipsum " * 10_000


def quoting(folder: Path, name: str, content: object) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text + "\n")


def asked(folder: Path) -> QuestionAnswering:
    return given(QuestionAnswering, Folder, path=str(folder), tokenizer=SmallTokenizer(), **SHARES)


def spoken(folder: Path) -> LanguageModelling:
    return given(LanguageModelling, Folder, path=str(folder), **SHARES)


def translated(folder: Path) -> Translation:
    return given(Translation, Folder, path=str(folder), **SHARES)


QUOTING: dict[str, tuple[Callable[[Path], TextTask], str, object]] = {
    "a string for an object": (translated, "train.jsonl", LONG.join('""')),
    "a list for a text": (translated, "train.jsonl", {"es": [LONG], "en": "a"}),
    "long keys": (translated, "train.jsonl", {LONG: "a", "en": "a"}),
    "many keys": (translated, "train.jsonl", {f"key {i}": "a" for i in range(9_999)}),
    "a long header": (translated, "train.tsv", LONG),
    "many columns": (translated, "train.tsv", "\t".join(f"c{i}" for i in range(9_999))),
    "columns of texts": (labelled, "train.tsv", f"{LONG}\t{LONG}"),
    "labels": (labelled, "train.tsv", f"text\tlabel\na\t{LONG}\nb\t{LONG[1:]}\nc\t1"),
    "one label": (labelled, "train.tsv", "text\tlabel\n" + f"a\t{LONG}\n" * 30),
    "a question": (asked, "train.jsonl",
                   {"context": "a", "qas": [{"question": LONG, "answers": []}]}),
    "a question of no text": (asked, "train.jsonl",
                              {"context": "a", "qas": [{"question": [LONG], "answers": ["a"]}]}),
    "an answer": (asked, "train.jsonl",
                  {"context": "a", "qas": [{"question": "a", "answers": [LONG]}]}),
    "an answer's place": (asked, "train.jsonl",
                          {"context": "a", "qas": [{"question": "a", "answers": [{LONG: 1}]}]}),
    "a paragraph of no words": (asked, "train.jsonl",
                                {"context": " " * 99_999,
                                 "qas": [{"question": "a", "answers": [" "]}]}),
    "an article": (asked, "train.json", {"data": [{LONG: 1}]}),
    "no chat": (spoken, "train.jsonl", {"messages": [{"role": LONG, "content": 1}]}),
    "no document": (spoken, "train.jsonl", {LONG: LONG}),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTING)
def test_no_message_repeats_more_than_some_words_of_the_data(case: str, tmp_path: Path) -> None:
    make, name, content = QUOTING[case]
    quoting(tmp_path, name, content)
    task = make(tmp_path)
    with pytest.raises(DataError) as raised:
        task.check()
        task.load(frozenset(task.fields), 1)
    said = str(raised.value).replace(str(tmp_path), "")
    assert len(said) < 600 and said.count("lorem") < 30 and "\n" not in said


def test_weights_that_are_cut_off_or_a_placeholder_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    whole = path.read_bytes()
    check_is_safetensors(path)
    for content, message in {
        whole[:-1]: "is truncated: it has .* bytes",
        whole[:20]: "is no safetensors file, or its beginning is damaged",
        POINTER: "is a Git LFS pointer",
        b"": "is empty",
        b"<html>no</html>": "is a web page",
        whole[:8] + b"{]" + whole[10:]: "the header of its tensors is damaged",
    }.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=re.escape(str(path)) + ".*" + message):
            check_is_safetensors(path)


def test_settings_that_are_cut_off_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"vocab": {"a": 0')
    with pytest.raises(DataError, match=r"tokenizer\.json is no complete JSON"):
        check_is_json(path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_checkpoint_with_a_placeholder_is_refused_before_anything_starts(
    name: str, tmp_path: Path
) -> None:
    causal_models.saved("llama", tmp_path)
    check_checkpoints(CausalLM(checkpoint=str(tmp_path)))
    (tmp_path / name).write_bytes(POINTER)
    for settings in (
        CausalLM(checkpoint=str(tmp_path)), {"a": PretrainedBackbone(str(tmp_path))},
    ):  # fmt: skip
        with pytest.raises(DataError, match=rf"{name} is a Git LFS pointer"):
            check_checkpoints(settings)


def test_a_shard_that_is_cut_off_is_named_when_it_is_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(100)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    two = tmp_path / "two.safetensors"
    two.write_bytes(two.read_bytes()[:-4])
    files = WeightFiles(str(tmp_path))
    assert len(files.tensor("a")) == 100
    with pytest.raises(DataError, match=r"two\.safetensors is truncated"):
        files.tensor("b")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(DataError, match="is no complete JSON"):
        WeightFiles(str(tmp_path))


def test_a_tokenizer_beside_a_placeholder_of_weights_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(POINTER)
    PretrainedTokenizer(str(tmp_path)).check()
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    for read in (PretrainedTokenizer.check, PretrainedTokenizer.load):
        with pytest.raises(DataError, match=r"tokenizer\.json is no complete JSON"):
            read(PretrainedTokenizer(str(tmp_path)))


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("one\ntwo\n",))
    writer.start()
    assert list(read_lines(tmp_path / "pipe")) == ["one", "two"]
    writer.join()


def test_a_long_page_may_be_a_text(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("<html> is how a page begins.\n" * 50_000)
    check_is_text(path)

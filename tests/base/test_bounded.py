"""Files that a stranger may give: nothing is kept or parsed before its size is bounded, nothing
elsewhere is opened because a file says so."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.corpora import given
from tests.small_tokenizer import small_tokenizer
from xcloud.base import bounded, placeholders
from xcloud.base.bounded import bounded_lines
from xcloud.base.errors import DataError
from xcloud.models.backbone import PretrainedBackbone
from xcloud.pretrained import (
    WeightFiles,
    check_checkpoints,
    check_tokenizer_files,
    generation_config,
    on_hub,
    raw_config,
)
from xcloud.tasks.language_modelling import LanguageModelling
from xcloud.tasks.language_modelling import read_chats as to_answer
from xcloud.tasks.question_answering import QuestionAnswering
from xcloud.tasks.sources import Hub, list_files, read_lines
from xcloud.tasks.text_reader import TextReader
from xcloud.tasks.tokenizer import Tokenizer as OurTokenizer

DEEP = "[" * 100_000


def read_chats(path: Path) -> object:
    [file] = list_files(path.parent, LanguageModelling.form)
    return list(file.rows(("messages",), "task.data.path"))


def read_squad(path: Path) -> object:

    [file] = list_files(path.parent, QuestionAnswering.form)
    return list(file.rows(("context",), "task.data.path"))


def read_generation_config(path: Path) -> object:
    return generation_config(str(path.parent))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "corpus of objects": ("train.jsonl", read_chats),
    "corpus of one value": ("train.json", read_squad),
    "our tokenizer": ("tokenizer.json", OurTokenizer.load),
    "their tokenizer": ("tokenizer.json", lambda path: check_tokenizer_files(path.parent)),
    "chats to answer": ("chats.jsonl", to_answer),
    "generation config": (
        "generation_config.json",
        lambda path: generation_config(str(path.parent)),
    ),
    "config": ("config.json", lambda path: raw_config(str(path.parent))),
    "index": ("model.safetensors.index.json", lambda path: WeightFiles(str(path.parent))),
}


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_json_too_deep_is_an_error_that_names_the_file(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / name).write_text('{"a": ' + DEEP)
    with pytest.raises(DataError, match=name):
        read(tmp_path / name)


@pytest.mark.parametrize(("name", "read"), READERS.values(), ids=READERS)
def test_a_key_that_stands_twice_in_an_object_is_an_error_that_names_the_file(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    """Python's own reader keeps the last of two values: every label was the other one."""
    (tmp_path / name).write_text('{"a": {"label": 0, "label": 1}}')
    with pytest.raises(DataError, match=f"(?s){name}.*'label' stands twice"):
        read(tmp_path / name)


def test_every_json_is_read_by_the_reader_that_refuses_keys_that_stand_twice() -> None:
    root = Path(bounded.__file__).parents[1]
    found = [
        str(path.relative_to(root))
        for path in sorted(root.rglob("*.py"))
        if re.search(r"\bjson\.loads?\(|import loads?\b", path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "name", [key for key in READERS if "corpus" not in key and "chats" not in key]
)
def test_json_too_large_is_not_even_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = READERS[name]
    monkeypatch.setattr(bounded, "MAX_JSON", 1000)
    (tmp_path / file).write_text(json.dumps({"a": "b" * 1000}))
    monkeypatch.setattr(Path, "read_bytes", None)
    with pytest.raises(DataError, match=r"at most 1,000 are read"):
        read(tmp_path / file)


@pytest.mark.parametrize("stands_for", ["pipe", "device"])
@pytest.mark.parametrize(
    "name", [key for key in READERS if "corpus" not in key and "chats" not in key]
)
def test_what_never_ends_is_not_opened_for_a_file(
    name: str, stands_for: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe waits for its writer, and a device has size 0 and no end."""
    file, read = READERS[name]
    if stands_for == "pipe":
        os.mkfifo(tmp_path / file)
    else:
        (tmp_path / file).symlink_to("/dev/zero")
    monkeypatch.setattr(Path, "read_bytes", None)
    if name == "generation config":  # which a checkpoint need not have
        assert read(tmp_path / file) == {}
        return
    with pytest.raises(DataError):
        read(tmp_path / file)


def test_a_line_without_end_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "train.es.gz"
    with gzip.open(path, "wb", 9) as file:
        for _ in range(100):
            file.write(b"a" * (1 << 20))
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"train.es.gz has a line of more than 16,777,216 char"):
        list(read_lines(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 90_000


@pytest.mark.slow
@pytest.mark.nightly
def test_a_file_may_not_unpack_to_many_times_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.txt.gz"
    with gzip.open(path, "wt", compresslevel=9) as file:
        for _ in range(120):
            file.write(("a" * 1023 + "\n") * 1024)
    with pytest.raises(DataError, match="unpacks to more than 200 times its size"):
        for _ in read_lines(path):
            pass
    monkeypatch.setattr(bounded, "MAX_UNPACKED", 2000)
    assert sum(1 for _ in read_lines(path)) == 120 * 1024


def test_what_a_packed_file_holds_is_counted_and_what_a_plain_one_holds_is_not(
    tmp_path: Path,
) -> None:
    """64 MB and 200 times its own ten bytes; a line of 16 M characters is the longest."""
    block = "a" * (8 << 20)

    def lengths(name: str, *sizes: int) -> list[int]:
        path = tmp_path / name
        path.write_bytes(b"0123456789")
        left = [*sizes]
        file: Any = SimpleNamespace(readline=lambda most: block[: left.pop(0)] if left else "")
        return [len(line) for line in bounded_lines(file, path)]

    full = [8 << 20] * 8
    assert lengths("a.gz", *full, 2000) == [*full, 2000]
    with pytest.raises(DataError, match="unpacks to more than 200 times its size"):
        lengths("a.gz", *full, 2000, 1)
    assert lengths("a.txt", *full, 2001) == [*full, 2001]
    longest: Any = SimpleNamespace(readline=lambda most: "a" * most)
    with pytest.raises(DataError, match="a line of more than 3 characters"):
        next(bounded_lines(longest, tmp_path / "a.txt", max_line=3))
    fits: Any = SimpleNamespace(readline=lambda most: "a" * (most - 1))
    assert next(bounded_lines(fits, tmp_path / "a.txt", max_line=3)) == "aaa"


def test_the_header_of_tensors_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((200_000_000).to_bytes(8, "little") + b"{")
        file.truncate(200_000_100)  # takes no space
    with pytest.raises(DataError, match="no safetensors file"):
        placeholders.check_is_safetensors(path)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", 1]
)
def test_an_index_names_files_beside_it_only(name: object, tmp_path: Path) -> None:
    index = {"weight_map": {"x": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="weight_map names"):
        WeightFiles(str(tmp_path))


def test_a_tokenizer_names_no_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_file": "/etc/passwd"}')
    with pytest.raises(DataError, match="tokenizer_file names a file elsewhere"):
        check_tokenizer_files(tmp_path)


@pytest.mark.parametrize("pattern", ["a", Regex("")])
def test_a_tokenizer_makes_no_text_a_thousand_times_as_long(pattern: object) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence([normalizers.Replace(pattern, "a" * 9)] * 8)
    with pytest.raises(DataError, match="times as long, which would fill the memory"):
        TextReader(backend, ())
    TextReader(small_tokenizer().backend, ())


@pytest.mark.parametrize(
    "step",
    [
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Replace("_", " ")]),
        pre_tokenizers.Split(Regex("a+"), "isolated"),
        pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed")]),
        normalizers.Prepend("a" * 500),
        normalizers.Replace("a" * 200, "a" * 2_000),
    ],
)
def test_what_replaces_little_or_nothing_is_taken(step: Any) -> None:
    """A content or a pattern alone is no replacement."""
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    kind = type(step).__module__.rpartition(".")[2].removesuffix("s")
    setattr(backend, kind, step)
    TextReader(backend, ())


def test_a_tokenizer_s_own_padding_is_not_applied(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    tokenizer.save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    content["tokenizer"]["padding"] = {
        "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert len(OurTokenizer.load(tmp_path / "t.json").encode(["a text"])[0]) < 10


@pytest.mark.parametrize("place", ["elsewhere", "up", "own"])
def test_a_data_set_lists_its_own_files_only(place: str, tmp_path: Path) -> None:
    secret, folder = tmp_path / "hr", tmp_path / "dataset"
    secret.mkdir()
    folder.mkdir()
    (secret / "salaries.jsonl").write_text('{"text": "Ann earns 91000"}\n' * 3)
    for name in ("own", "dev", "test"):
        (folder / f"{name}.jsonl").write_text('{"text": "x"}\n' * 3)
    train = {"elsewhere": f"{secret}/salaries.jsonl", "up": "../hr/salaries.jsonl"}
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        f"  - {{split: train, path: {train.get(place, 'own.jsonl')}}}\n"
        "  - {split: validation, path: dev.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )
    task = given(LanguageModelling, Hub, dataset=str(folder), column="text", max_length=32)
    if place == "own":
        assert task.read(frozenset({"text"})).splits["train"].num_rows == 3
        return
    with pytest.raises(DataError, match=r"salaries\.jsonl', no file of its own"):
        task.read(frozenset({"text"}))


def test_a_name_on_the_hub_may_say_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert on_hub("owner/name@1a2b") == ("owner/name", {"revision": "1a2b"})
    assert on_hub("owner/name@refs/pr/7") == ("owner/name", {"revision": "refs/pr/7"})
    assert on_hub("owner/name") == ("owner/name", {})
    (tmp_path / "run@home").mkdir()
    assert on_hub("run@home") == ("run@home", {})


def test_a_checkpoint_is_looked_at_that_settings_name_otherwise(tmp_path: Path) -> None:
    """A backbone names it in `name_or_path`."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json"):
        check_checkpoints({"encoder": PretrainedBackbone(str(tmp_path))})

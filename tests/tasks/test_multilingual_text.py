"""Texts of several languages: files, mixing, the shared tokenizer."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.electra_reference import feed_context
from xcloud.base.errors import ConfigError, DataError
from xcloud.models.backbone import PretrainedBackbone, export
from xcloud.models.electra.model import MultilingualElectra
from xcloud.models.electra.parts import Generator
from xcloud.models.encoder import Encoder, EncoderConfig
from xcloud.tasks.multilingual_text import MultilingualText, TextStream
from xcloud.tasks.text_sources import DemoText, FolderText, HubText
from xcloud.tasks.text_task import TokenTable
from xcloud.tasks.tokenizer import FileTokenizer, PretrainedTokenizer, Tokenizer, TrainedTokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"
TEXTS = [f"the cat number {i} sleeps in the house" for i in range(50)]


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return TrainedTokenizer(400).prepare(TEXTS, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One language in each of the forms, beside held-out and other files."""
    path = tmp_path / "texts"
    path.mkdir()
    (path / "train.es.txt").write_text("uno\ndos\n")
    with gzip.open(path / "wiki.en.jsonl.gz", "wt") as file:
        file.write('{"text": "one", "source": "x"}\n\n{"text": "two\\nthree"}\n')
    with gzip.open(path / "train.de.gz", "wt") as file:
        file.write("eins\nzwei\n")
    (path / "train.en").write_text("one\ntwo\n")
    (path / "all.tsv").write_text("lang\ttext\ten\nfr\tun\tone\nit\tdue\ttwo\nfr\ttrois\tthree\n")
    (path / "dev.es.txt").write_text("tres\n")
    (path / "test_2016.es").write_text("cuatro\n")
    (path / "test.tsv").write_text("de\ten\nvier\tfour\n")
    return path


def test_texts_are_found_by_the_names_of_their_files(folder: Path) -> None:
    source = FolderText(str(folder))

    assert list(source.read("es")) == [("uno",), ("dos",)]
    assert sorted(source.read("en")) == [("one",), ("one",), ("two",), ("two\nthree",)]
    assert list(source.read("de")) == [("eins",), ("zwei",)]
    assert list(source.read("fr")) == [("un",), ("trois",)]
    assert list(source.read("de-en")) == [("eins", "one"), ("zwei", "two")]
    assert list(source.read("fr-en")) == [("un", "one"), ("trois", "three")]
    assert list(source.read("en-fr")) == [("one", "un"), ("three", "trois")]


def test_a_table_with_both_languages_is_parallel_text(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("es\tid\ten\nuno\t1\tone\n")

    assert list(FolderText(str(tmp_path)).read("en-es")) == [("one", "uno")]


FOR_PT = (
    r"no text of 'pt'; expected pt\.txt, train\.pt\.txt, train\.pt\.jsonl, or a \.tsv with the "
    r"columns lang and text"
)
FOR_ES_PT = (
    r"no text of 'es-pt'; expected train\.es and train\.pt, or a \.tsv with the columns es and pt"
)


def test_what_is_missing_or_malformed_is_said_in_words(folder: Path) -> None:
    source = FolderText(str(folder))
    (folder / "all.tsv").unlink()
    with pytest.raises(DataError, match=FOR_PT):
        source.check(["es", "pt"])
    with pytest.raises(DataError, match=FOR_ES_PT):
        source.check(["es-pt"])
    with pytest.raises(DataError, match="does not exist"):
        FolderText(str(folder / "nowhere")).check(["es"])
    (folder / "x.es.jsonl").write_text('{"body": "uno"}\n')
    with pytest.raises(DataError, match=r"x\.es\.jsonl, line 1: no text under 'text'"):
        list(source.read("es"))
    (folder / "train.de.gz").unlink()
    (folder / "train.de").write_text("eins\n")
    with pytest.raises(DataError, match="the sides of a line pair differ in lines"):
        list(source.read("de-en"))
    with pytest.raises(ConfigError, match="has es, en and the pair es-en, got 'fr'"):
        DemoText().check(["es", "fr"])
    with pytest.raises(ConfigError, match="pairs_name"):
        HubText("owner/name").check(["es", "en-es"])


def test_the_hub_streams_a_local_folder_too(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = [{"text": "uno", "id": 1}, {"text": "dos", "id": 2}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = HubText(str(tmp_path), config=None)

    assert list(source.read("es")) == [("uno",), ("dos",)]
    with pytest.raises(DataError, match="no column body; it has text, id"):
        list(HubText(str(tmp_path), config=None, column="body").read("es"))


def test_long_texts_are_cut_into_samples_and_nothing_is_lost(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    long = " ".join(TEXTS[:20])
    (folder / "train.es.txt").write_text(f"{long}\n\n{TEXTS[0]}\n")
    text = MultilingualText(FolderText(str(folder)), FileTokenizer("x"), max_length=32)
    table = text.table("es", tokenizer, tmp_path, quiet)
    samples = list(table)

    assert max(map(len, samples)) == 30
    assert [i for s in samples for i in s] == [
        i for ids in tokenizer.encode([long, TEXTS[0]]) for i in ids
    ]


def test_a_pair_is_one_sample_with_eos_between_its_sides(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "train.tsv").write_text(f"es\ten\nthe cat\tthe house\n{TEXTS[1] * 9}\tthe cat\n")
    text = MultilingualText(FolderText(str(tmp_path)), FileTokenizer("x"), max_length=16)
    short, cut = list(text.table("es-en", tokenizer, tmp_path / "cache", quiet))
    the_cat, the_house = tokenizer.encode(["the cat", "the house"])

    assert short == [*the_cat, tokenizer.token_ids.eos, *the_house]
    assert len(cut) == 14 and cut[-len(the_cat) :] == the_cat  # the long side gives way


def test_tokens_are_made_once_and_again_when_the_file_changes(
    tmp_path: Path, folder: Path, tokenizer: Tokenizer
) -> None:
    said: list[str] = []
    text = MultilingualText(FolderText(str(folder)), FileTokenizer("x"), max_length=32)
    for _ in range(2):
        assert len(text.table("es", tokenizer, tmp_path, said.append)) == 2
    assert len(said) == 1
    (folder / "train.es.txt").write_text("uno\ndos\ntres\n")
    assert len(text.table("es", tokenizer, tmp_path, said.append)) == 3
    few = MultilingualText(FolderText(str(folder)), FileTokenizer("x"), 32, max_texts=1)
    assert len(few.table("es", tokenizer, tmp_path, said.append)) == 1
    assert len(said) == 3
    (folder / "train.es.txt").write_text("\n")
    with pytest.raises(DataError, match="there is no text of 'es', or all is empty"):
        text.table("es", tokenizer, tmp_path, said.append)


def rewritten(path: Path, text: str) -> None:
    """As if a minute later: a clock may be too coarse to tell."""
    later_ns = path.stat().st_mtime_ns + 60 * 10**9
    path.write_text(text)
    os.utime(path, ns=(later_ns, later_ns))


def test_tokens_of_a_pair_are_made_again_when_either_side_changes(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = MultilingualText(FolderText(str(tmp_path)), FileTokenizer("x"), max_length=32)
    (tmp_path / "train.en").write_text("the cat\n")
    (tmp_path / "train.es").write_text("the house\n")

    def sample() -> list[int]:
        return next(iter(text.table("es-en", tokenizer, tmp_path / "cache", quiet)))

    for side, other in (("es", "en"), ("en", "es")):
        before = sample()
        rewritten(tmp_path / f"train.{side}", f"the sleeps {other}\n")
        assert sample() != before


def test_folders_whose_files_look_alike_have_tokens_of_their_own(tmp_path: Path) -> None:
    for folder, word in (("a", "uno"), ("b", "dos")):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "train.es.txt"
        path.write_text(word)
        os.utime(path, ns=(10**18, 10**18))
    one, other = (FolderText(str(tmp_path / folder)) for folder in ("a", "b"))

    before = one.identity("es", tmp_path)
    assert before != other.identity("es", tmp_path)
    assert before == FolderText(f"{tmp_path}/b/../a").identity("es", tmp_path)
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "moved" / "train.es.txt").touch()
    assert before == FolderText(str(tmp_path / "moved")).identity("es", tmp_path), "by contents"


def test_a_local_folder_of_the_hub_is_told_by_its_files_and_named_without_its_path(
    tmp_path: Path,
) -> None:
    for folder in ("texts", "pairs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text("{}\n")
    source = HubText(str(tmp_path / "texts"), None, pairs_name=str(tmp_path / "pairs"))
    for part, folder in (("es", "texts"), ("es-en", "pairs")):
        before = source.identity(part, tmp_path / "cache")
        assert source.identity(part, tmp_path / "cache") == before
        rewritten(tmp_path / folder / "train.jsonl", "[]\n")
        assert source.identity(part, tmp_path / "cache") != before

    assert source.label == "files in texts"
    assert HubText("owner/name").label == "owner/name"


def test_what_is_reported_names_no_folder(tmp_path: Path, folder: Path) -> None:
    (folder / "train.es.txt").write_text("\n".join(TEXTS))
    tokenizer = TrainedTokenizer(400).prepare(TEXTS, tmp_path)
    tokenizer.save(tmp_path / "shared.json")
    special = tokenizer.token_ids
    export(
        Encoder(EncoderConfig(special.size, 32, 1, 2, 64, max_positions=32, dropout=0.0)),
        tmp_path / "private_place" / "encoder",
        special.pad,
    )
    network = PretrainedBackbone(str(tmp_path / "private_place" / "encoder"))
    spanish = Generator(["es"], backbone=network, batch_size=4)
    text = MultilingualText(
        FolderText(str(folder)), FileTokenizer(str(tmp_path / "shared.json")), max_length=32
    )
    said: list[str] = []
    context = feed_context(tmp_path / "cache", report=said.append, cloud="es")
    MultilingualElectra(text, {"es": spanish}).producer(context)

    num_tokens = sum(map(len, tokenizer.encode(TEXTS)))
    assert said == [
        "texts of 'es': tokenising",
        f"texts: es 50 samples, {num_tokens} tokens, 100%",
        "backbone for 'generator': reading encoder",
    ]


def numbered(sizes: dict[str, int], first: int = 10) -> dict[str, TokenTable]:
    """Sample i of all parts together is the one token first + i."""
    tables, at = {}, first
    for name, size in sizes.items():
        tables[name] = TokenTable([at + i] for i in range(size))
        at += size
    return tables


def drawn(streams: list[TextStream], numbers: range) -> list[int]:
    return [int(i) for n in numbers for s in streams for i in s.batch(n)[0][1::3]]


def test_languages_are_mixed_by_the_power_of_their_sizes(tokenizer: Tokenizer) -> None:
    tables = numbered({"es": 100, "en": 900})
    for power, share in ((1.0, 0.1), (0.5, 0.25), (0.0, 0.5)):
        lines = drawn([TextStream(tables, tokenizer.token_ids, power, 1, 50)], range(1, 61))
        assert sum(i < 110 for i in lines) / len(lines) == pytest.approx(share, abs=0.03)


def test_every_sample_comes_once_before_any_comes_again_over_all_lanes(
    tokenizer: Tokenizer,
) -> None:
    tables = numbered({"es": 40})
    lanes = [TextStream(tables, tokenizer.token_ids, 1.0, 1, 5, lane, 2) for lane in range(2)]
    first, second = drawn(lanes, range(1, 5)), drawn(lanes, range(5, 9))

    assert Counter(first) == Counter(second) == Counter(range(10, 50))
    assert first != second


def test_a_batch_depends_on_seed_and_number_not_on_what_was_asked_before(
    tokenizer: Tokenizer,
) -> None:
    tables = numbered({"es": 30, "en": 50})
    turn, other = (TextStream(tables, tokenizer.token_ids, 0.7, s, 8) for s in (1, 2))
    batches = [turn.batch(n) for n in range(1, 8)]
    late = TextStream(tables, tokenizer.token_ids, 0.7, 1, 8)

    for number in (7, 2, 5):
        for mine, theirs in zip(late.batch(number), batches[number - 1], strict=True):
            assert torch.equal(mine, theirs)
    assert not torch.equal(other.batch(1)[0], batches[0][0])


def test_samples_come_with_their_ends_and_lengths(tokenizer: Tokenizer) -> None:
    special = tokenizer.token_ids
    tables = {"es": TokenTable([[7, 8, 9], [special.pad, 6]])}  # a pad inside a text is text
    ids_R, counts_B = TextStream(tables, special, 1.0, 0, 2).batch(1)

    lines = {tuple(line.tolist()) for line in ids_R.split(counts_B.tolist())}
    assert lines == {
        (special.bos, 7, 8, 9, special.eos),
        (special.bos, special.pad, 6, special.eos),
    }


def test_an_exported_tokenizer_is_the_same_in_transformers(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    special = tokenizer.token_ids
    tokenizer.save_pretrained(tmp_path, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    lines = ["the cat sleeps", "Ünïcode  ¿qué? 漢字", ""]
    encoded = tokenizer.encode(lines)

    for line, ids in zip(lines, encoded, strict=True):
        assert theirs(line)["input_ids"] == [special.bos, *ids, special.eos]
    assert theirs("the", "cat")["input_ids"] == [
        special.bos, *tokenizer.encode(["the"])[0], special.eos,
        *tokenizer.encode(["cat"])[0], special.eos,
    ]  # fmt: skip
    assert "token_type_ids" not in theirs("the cat")
    ours = PretrainedTokenizer(str(tmp_path)).prepare((), tmp_path)
    assert ours.token_ids == special
    assert ours.encode(lines) == encoded
    assert theirs.model_max_length == 64


def test_a_tokenizer_cannot_be_trained_where_each_cloud_sees_other_text(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"python -m xcloud train-tokenizer"):
        MultilingualText(FolderText(str(folder)), TrainedTokenizer(400))
    missing = MultilingualText(FolderText(str(folder)), FileTokenizer(str(folder / "x.json")))
    with pytest.raises(DataError, match=r"no tokenizer file .*x\.json; make it with"):
        missing.check(["es"])
    demo = MultilingualText(DemoText(100), TrainedTokenizer(400))
    with pytest.raises(ConfigError, match=r"text\.tokenizer cannot be trained"):
        demo.of(FolderText(str(folder)))


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data sets in {SHARED}")
def test_real_folders_are_read() -> None:
    wiki = FolderText(str(SHARED / "wiki_paragraphs"))
    wiki.check(["es", "en", "sw", "zh"])
    assert len(next(wiki.read("sw"))[0]) > 20
    tatoeba = FolderText(str(SHARED / "tatoeba_112"))
    assert next(tatoeba.read("afr-en")) == (
        "Haar Engels is uitstekend.",
        "Her English is excellent.",
    )
    assert sum(1 for _ in tatoeba.read("deu")) == 1000

"""Tokenizers: nothing is lost, the same everywhere, where words begin, how one is trained."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tests.corpora import given
from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.model import SPLITS, TokenIds
from xcloud.demo import pairs as demo_pairs
from xcloud.tasks.language_modelling import CausalTokenizer
from xcloud.tasks.multilingual_text import (
    POWER,
    MultilingualText,
    draw_texts,
    mixed,
    train_tokenizer,
)
from xcloud.tasks.sources import Folder
from xcloud.tasks.tokenizer import (
    FileTokenizer,
    PretrainedTokenizer,
    RunsTokenizer,
    Tokenizer,
    TokenizerChoice,
    TrainedTokenizer,
    begins_unspaced,
    keep_tokenizers,
    rejoin_marks,
)
from xcloud.tasks.translation import Translation

TEXTS = [es for es, _ in demo_pairs(400)]
HARD = [
    "Ve.",
    "¿Qué? ¡Ñandú!",
    "  dos  espacios ",
    "[EOS] y [MASK]",
    "漢字 😀",
    "e\u0301 \u2028 x",
]


@pytest.fixture
def bpe(tmp_path: Path) -> Tokenizer:
    return TrainedTokenizer(500).prepare(TEXTS, tmp_path)


def test_bpe_gives_back_every_byte(bpe: Tokenizer) -> None:
    for text in [*TEXTS, *HARD, ""]:
        assert bpe.decode(bpe.encode([text])[0]) == text


def test_special_ids_are_fixed_and_never_come_from_text(bpe: Tokenizer) -> None:
    ids = bpe.token_ids
    assert (ids.size, ids.pad, ids.bos, ids.eos, ids.mask) == (500, 0, 1, 2, 3)
    used = {token for sentence in bpe.encode([*TEXTS, *HARD]) for token in sentence}
    assert used <= set(range(5, 500))


def test_decoding_stops_at_eos_and_hides_special_ids(bpe: Tokenizer) -> None:
    ids = bpe.token_ids
    inside = bpe.encode(["Hola."])[0]
    assert bpe.decode([ids.bos, *inside, ids.mask, ids.eos, *inside, ids.pad]) == "Hola."
    assert bpe.decode([]) == bpe.decode([ids.eos]) == ""


def test_wordpiece_rejoins_words_and_marks(tmp_path: Path) -> None:
    for texts in zip(*demo_pairs(2000), strict=True):
        tokenizer = TrainedTokenizer(800, "wordpiece").prepare(texts, tmp_path)
        back = [tokenizer.decode(ids) for ids in tokenizer.encode(texts)]
        assert sum(a != b for a, b in zip(texts, back, strict=True)) <= 0.005 * len(texts)
        assert tokenizer.decode(tokenizer.encode(["漢"])[0]) == ""  # unknown, and not shown


@pytest.mark.parametrize(
    "text",
    ["Ve.", "¿Qué es «esto», Ana?", "It costs 1,250.5 euros (don't ask)!", "On May 9, 1955.",
     "twenty-one girls' books and Ana's, l'eau", "It is 3:15; wait… no."],
)  # fmt: skip
def test_marks_come_back_to_their_words(text: str) -> None:
    spaced = "".join(c if c.isalnum() or c == " " else f" {c} " for c in text)
    assert rejoin_marks(" ".join(spaced.split())) == text


@pytest.mark.nightly
@pytest.mark.slow
def test_training_is_the_same_in_every_process(tmp_path: Path) -> None:
    # tokenizers numbers some pieces by the order of a hash table that is seeded in each process.
    program = (
        "import sys, pathlib; from xcloud.tasks.tokenizer import TrainedTokenizer;"
        "from xcloud.demo import pairs as demo_pairs;"
        "texts = [es for es, _ in demo_pairs(400)];"
        "[TrainedTokenizer(500, kind).prepare(texts, pathlib.Path(sys.argv[1]))"
        " for kind in ('bpe', 'wordpiece')]"
    )
    for kind in ("bpe", "wordpiece"):
        TrainedTokenizer(500, kind).prepare(TEXTS, tmp_path / "here")  # type: ignore[arg-type]
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "there")], check=True)
    here, there = (
        {path.name: path.read_bytes() for path in (tmp_path / p / "tokenizers").glob("*.json")}
        for p in ("here", "there")
    )
    assert here == there and len(here) == 2


def test_cache_is_used_again_and_keyed_by_text_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = TrainedTokenizer(500).prepare(TEXTS, tmp_path)
    assert TrainedTokenizer(501).prepare(TEXTS, tmp_path).token_ids.size == 501
    TrainedTokenizer(500).prepare(TEXTS[1:], tmp_path)
    TrainedTokenizer(500, lowercase=True).prepare(TEXTS, tmp_path)
    assert len(list((tmp_path / "tokenizers").glob("*.json"))) == 4
    monkeypatch.setattr(TrainedTokenizer, "_train", None)
    again = TrainedTokenizer(500).prepare(TEXTS, tmp_path)
    assert again.encode(TEXTS) == first.encode(TEXTS)


def test_lowercase_is_a_choice(tmp_path: Path) -> None:
    tokenizer = TrainedTokenizer(500, lowercase=True).prepare(TEXTS, tmp_path)
    assert tokenizer.decode(tokenizer.encode(["Él VIO Ávila"])[0]) == "él vio ávila"


def test_saved_and_loaded_is_the_same(bpe: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "source_tokenizer.json"
    bpe.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.token_ids == bpe.token_ids
    assert loaded.encode(HARD) == bpe.encode(HARD)
    assert [loaded.decode(ids) for ids in bpe.encode(HARD)] == HARD
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", ["", "{}", '{"format": "another"}', "[]"])
def test_a_broken_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"no xcloud tokenizer 1 file .*No such file"):
        Tokenizer.load(path)
    path.write_text(content)
    with pytest.raises(DataError, match="no xcloud tokenizer 1 file"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 260}, "whole number >= 261"),
        ({"vocab_size": "many"}, "must be a whole number"),
        ({"kind": "words"}, "one of bpe, wordpiece"),
        ({"vocab_size": 5, "kind": "wordpiece"}, "whole number >= 6"),
    ],
)
def test_nonsense_is_refused_when_built(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainedTokenizer(**settings)  # type: ignore[arg-type]


def test_what_only_the_text_shows_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all empty"):
        TrainedTokenizer().prepare(["", ""], tmp_path)
    assert TrainedTokenizer(300).prepare(["", *TEXTS], tmp_path).encode(["a"])[0]
    with pytest.raises(ConfigError, match=r"too small: the text has .* set at least"):
        TrainedTokenizer(50, "wordpiece").prepare(TEXTS, tmp_path)


def bert_folder(folder: Path) -> Path:
    from transformers import BertTokenizerFast

    folder.mkdir()
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat s ##at is here . ' don t".split()
    (folder / "vocab.txt").write_text("\n".join(words))
    vocab = {word: i for i, word in enumerate(words)}
    BertTokenizerFast(vocab=vocab, do_lower_case=True).save_pretrained(folder)
    return folder


def roberta_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁Ve", "▁el", ".", "▁gato", "<mask>"]
    backend = Backend(models.Unigram([(piece, -1.0 - i) for i, piece in enumerate(pieces)], 3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    names = {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "cls": "<s>", "sep": "</s>"}
    tokens = {f"{name}_token": token for name, token in names.items()}
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", mask_token="<mask>", **tokens
    ).save_pretrained(folder)
    return folder


def test_a_bert_tokenizer_from_a_folder(tmp_path: Path) -> None:
    choice: TokenizerChoice = PretrainedTokenizer(str(bert_folder(tmp_path / "bert")))
    tokenizer = choice.prepare([], tmp_path)
    ids = tokenizer.token_ids
    assert (ids.size, ids.pad, ids.bos, ids.eos, ids.mask) == (15, 0, 2, 3, 4)
    assert tokenizer.num_separators == 1
    encoded = tokenizer.encode(["The cat sat. Don't", "the"])
    assert encoded == [[5, 6, 7, 8, 11, 13, 12, 14], [5]]
    assert tokenizer.decode([ids.bos, *encoded[0], ids.eos, ids.pad]) == "the cat sat. don't"
    tokenizer.save(tmp_path / "saved.json")
    loaded = Tokenizer.load(tmp_path / "saved.json")
    assert loaded.encode(["the cat"]) == [[5, 6]]
    for one in (tokenizer, loaded):  # a text that names special tokens holds none
        assert {*one.encode(["the [PAD] cat [SEP]"])[0]}.isdisjoint({ids.pad, ids.eos, ids.mask})


def test_an_xlm_roberta_like_tokenizer_from_a_folder(tmp_path: Path) -> None:
    tokenizer = PretrainedTokenizer(str(roberta_folder(tmp_path / "xlmr"))).prepare([], tmp_path)
    ids = tokenizer.token_ids
    assert (ids.size, ids.pad, ids.bos, ids.eos, ids.mask) == (9, 1, 0, 2, 8)
    assert tokenizer.num_separators == 2
    tokenizer.save(tmp_path / "saved.json")
    assert Tokenizer.load(tmp_path / "saved.json").num_separators == 2
    assert tokenizer.encode(["Ve el gato."]) == [[4, 5, 7, 6]]
    assert tokenizer.decode([0, 4, 5, 7, 6, 2]) == "Ve el gato."


@pytest.mark.parametrize(
    ("named", "replaced"),
    [
        ("PreTrainedTokenizerFast", ""),
        ("GPT2TokenizerFast", ""),
        ("Qwen2TokenizerFast", "normalizer, pre_tokenizer of tokenizer.json not used"),
        ("BertTokenizerFast", "normalizer, pre_tokenizer, decoder of tokenizer.json not used"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # transformers remarks on some of these classes itself
def test_rules_that_transformers_replaces_are_told(
    named: str, replaced: str, tmp_path: Path
) -> None:
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: number for number, sign in enumerate([*signs, "<end>"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": named} | dict.fromkeys(
        ("eos_token", "pad_token", "cls_token", "sep_token", "mask_token"), "<end>"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    choice = PretrainedTokenizer(str(tmp_path))
    for remark in (choice.prepare([], tmp_path).remark, CausalTokenizer.load(tmp_path).remark):
        assert remark.startswith(replaced)
        assert bool(remark) == bool(replaced)


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path) -> None:
    folder = roberta_folder(tmp_path / "xlmr")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["mask_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="has no mask token"):
        PretrainedTokenizer(str(folder)).prepare([], tmp_path)


def test_a_model_that_is_not_there_fails_at_once_and_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xcloud.pretrained._answers", lambda url: False)
    from huggingface_hub import constants

    from xcloud import pretrained as hub_access

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub_access.go_offline_if_unreachable.cache_clear()
    try:
        with pytest.raises(DataError, match="no-such-model: the hub cannot be reached") as caught:
            PretrainedTokenizer("nobody/no-such-model").prepare([], tmp_path)
    finally:
        hub_access.go_offline_if_unreachable.cache_clear()
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="give a folder with tokenizer"):
        (tmp_path / "empty").mkdir()
        PretrainedTokenizer(str(tmp_path / "empty")).prepare([], tmp_path)
    with pytest.raises(ConfigError, match="name_or_path"):
        PretrainedTokenizer("")


def corpus(folder: Path, word: str) -> str:
    folder.mkdir(exist_ok=True)
    for split in SPLITS:
        rows = [f"la {word} {n}\tthe {word} {n} is here" for n in range(30)]
        (folder / f"{split}.tsv").write_text("\n".join(["es\ten", *rows]))
    return str(folder)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_run_that_goes_on_takes_its_own_tokenizer_from_the_run(
    goes_on: bool, tmp_path: Path
) -> None:
    """And nothing of what another cloud alone may see is made or kept."""
    small: dict[str, Any] = dict.fromkeys(
        ("source_tokenizer", "target_tokenizer"), TrainedTokenizer(300)
    )

    def load(word: str, goes_on: bool) -> str:
        where: dict[str, Any] = {
            "path": corpus(tmp_path / word, word),
            "cache_dir": str(tmp_path / "cache"),
        }
        task = given(
            Translation, Folder, source="es", target="en", max_length=20, **where, **small
        )
        own = keep_tokenizers(task, tmp_path / "run", goes_on)
        view = own.load(frozenset({"source"}), 1)
        assert view.fingerprint() == task.load(frozenset({"source"}), 1).fingerprint()
        digests: dict[str, str] = view.own_digests()
        assert view.shared_digests() == {}, "each cloud may have tokenizers of its own"
        return digests["the source tokenizer"]

    first = load("casa", goes_on=False)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["source_tokenizer.json"]
    assert load("casa", goes_on=goes_on) == first
    assert (load("perro", goes_on=goes_on) == first) == goes_on


def test_a_run_that_cannot_keep_its_tokenizer_trains_it_again(tmp_path: Path) -> None:
    (blocked := tmp_path / "run").write_text("no folder")
    own = RunsTokenizer(TrainedTokenizer(500), blocked / "tokenizer.json", goes_on=True)
    assert (
        own.prepare(TEXTS, tmp_path).digest
        == TrainedTokenizer(500).prepare(TEXTS, tmp_path).digest
    )


NUMBERED = [f"the cat number {i} sleeps in the house" for i in range(50)]
THAI, CHINESE = "แมวนอนอยู่ในบ้าน", "猫在房子里睡觉。"


def bytes_of(*texts: str) -> Callable[[Path], Tokenizer]:
    """Byte-level pieces, learned from these texts."""
    return lambda folder: TrainedTokenizer(700).prepare(texts * 9, folder)


def words_of(*texts: str) -> Callable[[Path], Tokenizer]:
    return lambda folder: TrainedTokenizer(200, "wordpiece").prepare(texts * 9, folder)


def characters_of(*texts: str) -> Callable[[Path], Tokenizer]:
    """As SentencePiece has them, without the marks that begin a text."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    def make(folder: Path) -> Tokenizer:
        pieces = ["<unk>", "▁", *sorted({sign for text in texts for sign in text})]
        backend = Backend(models.Unigram([(piece, -1.0) for piece in pieces], 0))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        backend.decoder = decoders.Metaspace()
        token_ids = TokenIds(len(pieces), pad=0, bos=0, eos=0, mask=0)
        return Tokenizer(backend, token_ids, [0], rejoin=False)

    return make


def starts_in(tokenizer: Tokenizer, text: str) -> list[bool]:
    starts = tokenizer.word_starts()
    assert len(starts) == tokenizer.token_ids.size
    return [starts[i] for i in tokenizer.encode([text])[0]]


def test_words_begin_where_spaces_were(tmp_path: Path) -> None:
    """No space stands in front of the first word."""
    assert (
        sum(starts_in(bytes_of(*NUMBERED)(tmp_path), "the cat sleeps")) == 2
    )  # no space before it
    pieces = TrainedTokenizer(60, "wordpiece").prepare(NUMBERED, tmp_path)
    starts = starts_in(pieces, "the cat sleeps")
    assert len(starts) > 3 and sum(starts) == 3


@pytest.mark.parametrize(
    ("make", "text", "words"),
    [
        (bytes_of(*NUMBERED), CHINESE, 8),  # each character is three pieces, its bytes
        (bytes_of(CHINESE), "房子猫猫", 3),
        (bytes_of(THAI), "นอนบ้าน", 3),
        (words_of("ねこはねこだ"), "ねはだ", 3),
        (words_of(THAI), "ในวน", 4),
        (characters_of(CHINESE), CHINESE, 8),
        (characters_of(THAI), THAI, 16 - 3),  # three marks above or below begin nothing
    ],
    ids=["bytes", "chinese", "thai", "kana words", "thai words", "characters", "marks"],
)
def test_in_scripts_without_spaces_a_piece_is_a_word(
    tmp_path: Path, make: Callable[[Path], Tokenizer], text: str, words: int
) -> None:
    assert sum(starts_in(make(tmp_path), text)) == words


@pytest.mark.parametrize("text", [" naïve", " Москва", " हिन्दी", " 한국어", " Ελλάδα", " 😀"])
def test_in_scripts_with_spaces_a_word_begins_behind_one_only(tmp_path: Path, text: str) -> None:
    for make in (bytes_of(*NUMBERED), bytes_of(text), characters_of(text)):
        first, *others = starts_in(make(tmp_path), text)
        assert first and not any(others)


def test_a_part_of_a_character_counts_if_all_that_it_can_be_do() -> None:
    thai, hindi, chinese, rare = "ม".encode(), "ह".encode(), "猫".encode(), "𠀀".encode()
    assert all(begins_unspaced(text) for text in (thai[:2], chinese[:1], chinese[:2], rare[:2]))
    unclear = (b"", thai[:1], hindi[:1], hindi[:2], thai[1:], chinese[2:] + thai, rare[:1])
    assert not any(begins_unspaced(text) for text in unclear)


def test_the_command_makes_a_file_that_all_clouds_can_load(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.es.txt").write_text("uno\n\ndos\n")
    (tmp_path / "train.en").write_text("one\ntwo\n")
    out = tmp_path / "shared.json"

    def run(*languages: str) -> None:
        options = ["--out", str(out), "--vocab-size", "300", "--languages", *languages]
        train_tokenizer([str(tmp_path), *options])

    run("es", "en")
    digests = {FileTokenizer(str(out)).prepare((), tmp_path).digest for _ in range(2)}
    assert f"digest {digests.pop():08x}; copy it to every cloud" in capsys.readouterr().out
    assert not digests
    with pytest.raises(DataError, match=r"no text of 'pt'"):
        run("pt")


def test_what_a_small_language_lacks_goes_to_the_others() -> None:
    assert mixed({"es": 900, "en": 100}, 100, 1.0) == {"es": 90, "en": 10}
    assert mixed({"es": 900, "en": 900}, 100, 0.7) == {"es": 50, "en": 50}
    assert mixed({"a": 10, "b": 900, "c": 900}, 110, 0.0) == {
        "a": 10, "b": 50, "c": 50
    }  # fmt: skip
    few = {"es": 7, "en": 3, "fr": 1}
    assert mixed(few, 500, 0.7) == few
    quarter = mixed({"es": 16, "en": 1600}, 110, 0.5)
    assert quarter == {"es": 10, "en": 100}


def test_texts_are_drawn_from_all_rows_of_a_language() -> None:
    seen, kept = draw_texts(map(str, range(4000)), 1000, random.Random(0))

    assert seen == 4000 and len(kept) == len(set(kept)) == 1000
    assert sum(map(int, kept)) / 1000 == pytest.approx(2000, abs=150)
    assert draw_texts(["a", "b"], 5, random.Random(0)) == (2, ["a", "b"])


def test_the_shared_tokenizer_is_trained_on_the_mix_that_power_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "es.txt").write_text("uno\n" * 1600)
    (tmp_path / "en.txt").write_text("one\n" * 16)
    given: list[Counter[str]] = []
    prepare = TrainedTokenizer.prepare

    def counted(self: TrainedTokenizer, texts: list[str], cache_dir: Path) -> Tokenizer:
        given.append(Counter(texts))
        return prepare(self, texts, cache_dir)

    monkeypatch.setattr(TrainedTokenizer, "prepare", counted)
    options = ["--out", str(tmp_path / "t.json"), "--vocab-size", "300", "--max-texts", "110"]
    options += ["--languages", "es", "en", "--power"]
    for power in ("0.5", "0"):
        monkeypatch.setattr("sys.argv", ["train_tokenizer", str(tmp_path), *options, power])
        train_tokenizer()
    assert given == [Counter(uno=100, one=10), Counter(uno=94, one=16)]
    monkeypatch.setattr("sys.argv", ["train_tokenizer", str(tmp_path), *options, "2"])
    with pytest.raises(ConfigError, match=r"--power must be a number in \[0, 1\]"):
        train_tokenizer()
    assert POWER == MultilingualText.language_power

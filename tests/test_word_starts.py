"""Which pieces begin a word, in scripts with spaces and in those without."""

from collections.abc import Callable
from pathlib import Path

import pytest

from xcloud.contracts.model import TokenIds
from xcloud.tasks.tokenizer import Tokenizer, TrainedTokenizer, begins_unspaced

TEXTS = [f"the cat number {i} sleeps in the house" for i in range(50)]
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
    assert sum(starts_in(bytes_of(*TEXTS)(tmp_path), "the cat sleeps")) == 2  # no space before it
    pieces = TrainedTokenizer(60, "wordpiece").prepare(TEXTS, tmp_path)
    starts = starts_in(pieces, "the cat sleeps")
    assert len(starts) > 3 and sum(starts) == 3


@pytest.mark.parametrize(
    ("make", "text", "words"),
    [
        (bytes_of(*TEXTS), CHINESE, 8),  # each character is three pieces, its bytes
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
    for make in (bytes_of(*TEXTS), bytes_of(text), characters_of(text)):
        first, *others = starts_in(make(tmp_path), text)
        assert first and not any(others)


def test_a_part_of_a_character_counts_if_all_that_it_can_be_do() -> None:
    thai, hindi, chinese, rare = "ม".encode(), "ह".encode(), "猫".encode(), "𠀀".encode()
    assert all(begins_unspaced(text) for text in (thai[:2], chinese[:1], chinese[:2], rare[:2]))
    unclear = (b"", thai[:1], hindi[:1], hindi[:2], thai[1:], chinese[2:] + thai, rare[:1])
    assert not any(begins_unspaced(text) for text in unclear)

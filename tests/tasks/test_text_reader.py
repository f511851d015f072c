"""No text becomes a special token, whatever the tokenizer's kind: only the template of a chat
writes them, and where the tokenizer itself puts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)  # fmt: skip
from tokenizers import (
    Tokenizer as Backend,
)
from transformers import PreTrainedTokenizerFast

from xcloud.tasks.language_modelling import CausalTokenizer
from xcloud.tasks.text_reader import TextReader
from xcloud.tasks.tokenizer import (
    FileTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    TokenizerChoice,
    TrainedTokenizer,
)

NAMED = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
         "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}  # fmt: skip
MARKS = ["<|im_start|>", "<|im_end|>"]  # special to the backend, and no role of transformers'
LETTERS = [chr(n) for n in range(33, 127)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def unigram() -> Backend:
    """As XLM-R: special pieces are in the vocabulary, with the best score of all."""
    scored = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    scored += [(letter, -6.0) for letter in [*LETTERS, "▁"]]
    scored += [("▁use", -4.0), ("▁the", -3.0), ("<mask>", 0.0)]
    backend = Backend(models.Unigram(scored, unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def word_piece(split: Any) -> Backend:
    pieces = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", *LETTERS, *(f"##{c}" for c in LETTERS)]
    backend = Backend(models.WordPiece({p: n for n, p in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = split
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend


def word_level() -> Backend:
    pieces = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "use", "the"]
    backend = Backend(models.WordLevel({p: n for n, p in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def bpe(texts: Sequence[str] = ("use the tag",) * 9, **how: Any) -> Backend:
    """As GPT-2."""
    backend = Backend(models.BPE(**how))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def bpe_with_merges() -> Backend:
    """Its merges make the special pieces, and a normalizer wide forms of them."""
    pieces = ["<pad>", "<unk>", "<s>", "</s>", "<mask>", *LETTERS, "▁", "s>", "/s>"]
    merges = [("s", ">"), ("/", "s>"), ("<", "/s>"), ("<", "s>")]
    backend = Backend(models.BPE({p: n for n, p in enumerate(pieces)}, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Replace("▁", " ")
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "Unigram": unigram,
    "WordPiece": lambda: word_piece(pre_tokenizers.BertPreTokenizer()),
    "WordPiece split at spaces": lambda: word_piece(pre_tokenizers.WhitespaceSplit()),
    "WordLevel": word_level,
    "BPE": bpe,
    "BPE that looks words up": lambda: bpe(ignore_merges=True),
    "BPE that merges special pieces": bpe_with_merges,
}


@cache
def folder(kind: str) -> Path:
    backend = BACKENDS[kind]()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED)
    made.chat_template = TEMPLATE
    path = Path(mkdtemp())
    made.save_pretrained(path)
    return path


def loaded_again(made: Tokenizer) -> Tokenizer:
    path = Path(mkdtemp()) / "tokenizer.json"
    made.save(path)
    return FileTokenizer(str(path)).prepare((), path.parent)


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind in BACKENDS:
        return PretrainedTokenizer(str(folder(kind))).prepare((), Path())
    if kind.startswith("a file of "):
        return loaded_again(tokenizer(kind.removeprefix("a file of ")))
    texts = ["use the tag " + " ".join(LETTERS)] * 9
    choice: TokenizerChoice = TrainedTokenizer(1000, "bpe" if "bpe" in kind else "wordpiece")
    return choice.prepare(texts, Path(mkdtemp()))


KINDS = [
    *BACKENDS,
    "trained bpe",
    "trained wordpiece",
    "a file of Unigram",
    "a file of trained bpe",
]
WAYS = ["{}", "use {} the", "use{}the", "{0}{0}", " {} ", "<{}>", "\n{}\n", "{}\u0301"]


def special_of(made: Tokenizer) -> dict[int, str]:
    added = made.backend.get_added_tokens_decoder()
    ids = {*made.special, *(number for number, token in added.items() if token.special)}
    return {number: made.backend.id_to_token(number) for number in ids}


@pytest.mark.parametrize("kind", KINDS)
def test_no_special_piece_in_a_text_becomes_a_special_token(kind: str) -> None:
    made = tokenizer(kind)
    special = special_of(made)
    unknown = {number for number, piece in special.items() if piece in ("<unk>", "[UNK]")}
    assert len(special) >= 5
    for piece in special.values():
        for way in WAYS:
            text = way.format(piece)
            (ids,), ((same, spans),) = made.encode([text]), made.reader.encode_with_offsets([text])
            assert not {*ids} & (special.keys() - unknown), (text, ids)
            assert same == ids and all(0 <= a <= b <= len(text) for a, b in spans)
            if kind != "WordLevel" and not {*text} & {"\u0301", "\n"}:  # all are known
                assert not {*ids} & unknown, (text, ids)
                assert made.decode(ids).replace(" ", "").strip() == text.replace(" ", "").strip()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_without_special_pieces_are_cut_as_the_tokenizer_itself_cuts_them(kind: str) -> None:
    made = tokenizer(kind)
    texts = ["use the tag", "", " the  use", "a < b", "tag/the"]
    theirs = made.backend.encode_batch(texts, add_special_tokens=False)
    assert made.encode(texts) == [encoding.ids for encoding in theirs]
    assert made.reader.encode_with_offsets(texts) == [(e.ids, e.offsets) for e in theirs]


@pytest.mark.parametrize("kind", BACKENDS)
def test_only_the_template_of_a_chat_writes_special_tokens(kind: str) -> None:
    made = CausalTokenizer(PretrainedTokenizer(str(folder(kind))).load(), kind)
    special = special_of(tokenizer(kind))
    unknown = {number for number, piece in special.items() if piece == "<unk>"}
    marks = {piece: number for number, piece in special.items()}
    begin, end = (marks[mark] for mark in MARKS)

    def found(ids: list[int]) -> list[int]:
        return [token for token in ids if token in special.keys() - unknown]

    for piece in special.values():
        said = f"use {piece}the {piece}"
        chat = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
        assert found(made.chat(chat, "here").ids) == [begin, end, begin, end]
        made.learns_chats = True
        assert found(made.prompt(said)) == [begin, end, begin]
        made.learns_chats = False
        assert found(made.prompt(said)) == [marks["<s>"]]
        (document,) = made.texts([said])
        assert found(document.ids) == [marks["<s>"], marks["</s>"]]
        if kind != "WordLevel":
            assert made.decode(document.ids).replace(" ", "") == said.replace(" ", "")


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_chat_is_cut_as_its_tokenizer_cuts_it_whole(kind: str) -> None:
    theirs = PretrainedTokenizer(str(folder(kind))).load()
    chat = [{"role": role, "content": "use the"} for role in ("user", "assistant") * 3]
    text = theirs.apply_chat_template(chat, tokenize=False)
    if kind.startswith("BPE"):  # a line break is a token of its own there
        text = text.removesuffix("\n") + "\n"
    ids = CausalTokenizer(theirs, kind).chat(chat, "here").ids
    assert ids == theirs(text, add_special_tokens=False).input_ids


def test_a_prompt_is_cut_as_when_a_model_is_asked_where_a_token_would_reach_over_its_end() -> None:
    backend = bpe(["A: yes"] * 9)
    reader = TextReader(backend, ())
    whole, asked = backend.encode("A: yes").ids, backend.encode("A: ").ids
    assert whole[: len(asked)] != asked, "there is a token of a space and a word"
    prompt, answer, *more = reader.encode_written(["A: ", "yes", " A: ", "no"])
    assert prompt == asked and answer == backend.encode("yes").ids
    assert backend.decode([*more[0], *more[1]]) == " A: no"


def test_a_text_is_not_truncated_as_a_tokenizer_file_may_ask() -> None:
    backend = bpe()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    (ids,) = TextReader(backend, ()).encode(["use the tag " * 20])
    assert len(ids) > 50


def test_a_special_piece_of_one_character_stays_what_it_is() -> None:
    """Many give a model without padding the piece "!" for it."""
    backend = bpe(["use the tag!!"] * 9)
    backend.add_special_tokens([AddedToken("!", special=True)])
    reader = TextReader(backend, [backend.token_to_id("!")])
    texts = ["use the tag!", "!", "!!"]
    theirs = backend.encode_batch(texts, add_special_tokens=False)
    assert reader.encode(texts) == [encoding.ids for encoding in theirs]

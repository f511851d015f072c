"""Tokenizers of another owner that would fill the memory or take for ever are refused before they
encode or decode anything."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from xcloud.base.errors import DataError
from xcloud.tasks.tokenizer import PretrainedTokenizer, Tokenizer
from xcloud.tasks.tokenizer_bounds import MAX_PIECE, NORMALIZERS, check_growth

WORDS = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "[UNK]": 4, "a": 5, "b": 6, "c": 7}


def charsmap(text: str) -> str:
    trie = struct.pack("<4I", 1, 2, 3, 4)
    return base64.b64encode(
        struct.pack("<I", len(trie)) + trie + b"x\0" + text.encode() + b"\0"
    ).decode()


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(*normalizers: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


def precompiled(length: int) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap("y" * length)}


def template(*parts: str) -> dict[str, Any]:
    pieces = [{"Sequence": {"id": part, "type_id": 0}} for part in parts]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {}}


BOMBS: dict[str, dict[str, Any]] = {
    "two replacements": {
        "normalizer": sequence(replace("a", "b" * 100_000), replace("b", "c" * 100_000))
    },
    "a regular expression": {"normalizer": replace("", "b" * 2000, kind="Regex")},
    "a charsmap": {"normalizer": precompiled(5000)},
    "two charsmaps": {"normalizer": sequence(precompiled(2000), precompiled(2000))},
    "a charsmap and a replacement": {
        "normalizer": sequence(precompiled(100), replace("y", "z" * 100))
    },
    "no charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "%%"}},
    "a prepended text": {"normalizer": {"type": "Prepend", "prepend": "x" * 5000}},
    "a normalizer that is not known": {"normalizer": sequence({"type": "Repeat", "times": 9})},
    "many that grow by half": {"normalizer": sequence(*[replace("aa", "aaa")] * 20)},
    "a decoder": {"decoder": replace("a", "b" * 5000)},
    "a piece of 4 MB": {"model": {"vocab": {**WORDS, "z" * (MAX_PIECE + 1): 8}}},
    "a piece of a Unigram": {"model": {"vocab": [["z" * (MAX_PIECE + 1), 0.0]]}},
    "an added token": {"added_tokens": [{"content": "z" * (MAX_PIECE + 1)}]},
    "templates that double": {
        "post_processor": {"type": "Sequence", "processors": [template("A", "A", "B")] * 20}
    },
    "a long template": {"post_processor": template(*["A"] * 200)},
    "a special token of many ids": {
        "post_processor": {"special_tokens": {"x": {"ids": [1] * 1000}}}
    },
    "a pattern that takes long": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"(?:a+)+$"}}
    },
    "another": {"normalizer": replace(r"(a|aa)*b", "", kind="Regex")},
    # The same, as the engine of `tokenizers` reads it too.
    **{
        f"spelled {pattern}": {"normalizer": replace(pattern, "", kind="Regex")}
        for pattern in (
            "(a{1,9}){1,99}b",
            "(a+){20}b",
            "(a+)?+b",
            "(?x)(a+) +b",
            "(?ix:(a+) +)b",
            "(a+)(?#x)+b",
            r"(?<x>a+){0}\g<x>+b",
        )
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_makes_a_text_enormous_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="this tokenizer"):
        check_growth({"model": {"vocab": WORDS}, **BOMBS[name]})


def test_a_text_may_become_a_thousand_times_as_long_and_a_piece_have_ten_thousand_letters() -> (
    None
):
    """Where steps follow each other they multiply."""

    def grown(*factors: int) -> dict[str, Any]:
        return {"normalizer": sequence(*(replace("a", "b" * factor) for factor in factors))}

    check_growth(grown(10, 100))
    with pytest.raises(DataError, match="1,001 times as long"):
        check_growth(grown(7, 11, 13))
    check_growth({"model": {"vocab": {"z" * 10_000: 0}}})


def test_what_is_common_is_taken() -> None:
    gpt = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    llama = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s*[\r\n]+|\s+(?!\S)|\s+"
    bloom = " ?[^(\\s|[.,!?\u2026])]+"
    thousands = r"\d{1,3}(?=(?:\d{3})+\b)"
    for pattern in (gpt, llama, bloom, thousands, " {2,}"):
        check_growth({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}}})
    albert = sequence(
        replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"},
        {"type": "Lowercase"}, precompiled(18), replace(" {2,}", " ", kind="Regex"),
    )  # fmt: skip
    check_growth({"normalizer": albert, "decoder": {"type": "WordPiece", "prefix": "##"}})
    for kind in NORMALIZERS - {"Precompiled"}:
        check_growth({"normalizer": {"type": kind}})


def test_nothing_is_encoded_before_a_tokenizer_has_been_looked_at(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordPiece(dict(WORDS), unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]",
        unk_token="[UNK]", mask_token="[MASK]",
    )  # fmt: skip
    made.save_pretrained(tmp_path / "good")
    kept = PretrainedTokenizer(str(tmp_path / "good")).prepare([], tmp_path)
    file = tmp_path / "good" / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **BOMBS["two replacements"]}))
    with pytest.raises(DataError, match="this tokenizer"):
        PretrainedTokenizer(str(tmp_path / "good")).prepare([], tmp_path)

    own = tmp_path / "own.json"
    kept.save(own)
    content = json.loads(own.read_text())
    for change in (
        {"tokenizer": {**content["tokenizer"], **BOMBS["a charsmap"]}},
        {"num_separators": 10**9},
        {"num_separators": 0},
    ):
        own.write_text(json.dumps({**content, **change}))
        with pytest.raises(DataError, match="no xcloud tokenizer"):
            Tokenizer.load(own)

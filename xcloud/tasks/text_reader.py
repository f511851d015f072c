"""Texts into token ids such that no text becomes a special token: only who writes them by id, or a
chat template, does."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import DataError
from xcloud.tasks.tokenizer_bounds import check_growth

RARE = ("\U00010348", "\U00010375")  # letters of dead scripts, which no vocabulary has


class TextReader:
    """A copy of a tokenizer in which special pieces go by names that no text holds.

    A literal "</s>" in a text is then cut like any other word, whatever the tokenizer's kind: also
    where the piece is in the model's vocabulary (SentencePiece), is found before any merge (BPE of
    Llama 3), or results from a normalizer. Ids are those of the original. Nothing is truncated.
    A special piece of one character, such as a pad_token "!", stays what it is.

    backend: the tokenizer of `tokenizers`.
    special: special ids besides those that the backend itself marks as special.
    """

    def __init__(self, backend: Any, special: Collection[int]) -> None:
        from tokenizers import AddedToken

        content = parsed_json(backend.to_str())
        check_growth(content)
        added = content["added_tokens"]
        # Both what the checkpoint calls special and what the caller does: checkpoints leave some
        # out.
        own = {token["id"] for token in added if token["special"]}
        pieces = {number: backend.id_to_token(number) for number in sorted(own | {*special})}
        secret = secrets.token_hex(8)  # no text can know it
        # U+FDD0 and U+FDD1 are no characters by Unicode's own rule, so no normalizer changes them.
        self._names = {
            piece: f"\ufdd0{secret}.{number}\ufdd1"
            for number, piece in pieces.items()
            # A piece such as "!" is a pad token in some checkpoints; without it texts would lose
            # their exclamation marks.
            if piece and len(piece) > 1
        }
        self._literals = sorted(self._names, key=len, reverse=True)  # the longest is found first
        self._literal = re.compile("|".join(map(re.escape, self._literals)) or r"(?!)")
        self._veil = f"\ufdd0{secret}:"
        self._veiled = re.compile(rf"{self._veil}(\d+)\ufdd1")
        self._cut = f"\ufdd0{secret}.cut\ufdd1"

        # Not normalized: names are looked for in a text as it stands, before a normalizer changes
        # it.
        for token in added:
            if token["content"] in self._names:
                token |= {"content": self._names[token["content"]], "normalized": False}
        # A checkpoint's truncation would cut texts here, before anybody counts them.
        content |= {"truncation": None, "padding": None}
        _rename(content["model"], names=self._names)
        renamed = json.dumps(content)
        del content  # a quarter of a million pieces take a lot of room as Python objects
        self._backend = type(backend).from_str(renamed)
        known = {token["content"] for token in added}
        # Pieces of the model that were no added tokens become some under their name, so that they
        # are found whole.
        self._backend.add_special_tokens(
            [
                AddedToken(name, normalized=False)
                for name in (*self._names.values(), self._cut)
                if name not in known
            ]
        )
        self._cut_id = self._backend.token_to_id(self._cut)
        for number, piece in pieces.items():
            # A vocabulary may hold a piece twice, as a word and as an added token. Which of the
            # two a template means nobody knows.
            name = self._names.get(piece)
            if name is not None and self._backend.token_to_id(name) != number:
                raise DataError(f"tokenizer: its special piece {piece!r} has two ids")

    @cached_property
    def unknown(self) -> int | None:
        """The id of what the vocabulary lacks; None where bytes stand for that, or nothing."""
        # Letters that no vocabulary has, both encoded alike: then what they end in is the unknown
        # token.
        first, second = self.encode(RARE)
        return first[-1] if first and first == second else None

    def lost(self, texts: Iterable[str]) -> Counter[str]:
        """Return the characters of texts that no token stands for, with how often they come.
        Nothing is counted where a token for unknown characters, or bytes, stand for all."""
        if any(self.encode(RARE)):
            return Counter()
        # Each kind of character is encoded once, however long the texts are.
        counts = Counter(chain.from_iterable(texts))
        found = [char for char in counts if not char.isspace()]
        encoded = zip(found, self.encode(found), strict=True)
        return Counter({char: counts[char] for char, ids in encoded if not ids})

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, none of them special unless for what is unknown."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return ids, and for each its half-open character span in the text."""
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def escape(self, value: Any) -> Any:
        """Return the content of a message such that a template that writes it writes no special
        token: each special piece in it is replaced, until `encode_written` puts it back."""
        if isinstance(value, str):
            # A number instead of the piece, which itself would be found again.
            return self._literal.sub(
                lambda match: f"{self._veil}{self._literals.index(match[0])}\ufdd1", value
            )
        if isinstance(value, list):
            return [self.escape(one) for one in value]
        if isinstance(value, dict):
            return {self.escape(key): self.escape(one) for key, one in value.items()}
        return value

    def encode_written(self, segments: Sequence[str]) -> list[list[int]]:
        """Return the ids of each segment of what a template has written: prompts and answers in
        turn, of which the first begins the chat. Special pieces in them are special tokens, but
        for escaped ones.

        Each prompt is cut as it is when a model is asked: whole, from the beginning of the chat.
        Only where a token would reach over the border of two segments both are cut apart there.
        """
        # Each beginning of the chat is encoded as a whole. If the ids of a shorter one are those
        # that the whole begins with, no token reaches over a border.
        named = [self._literal.sub(lambda match: self._names[match[0]], s) for s in segments]
        named = [self._veiled.sub(lambda match: self._literals[int(match[1])], s) for s in named]
        grown = self.encode([*accumulate(named)])
        whole = grown[-1]
        if all(ids == whole[: len(ids)] for ids in grown):
            return [whole[a:b] for a, b in pairwise([0, *map(len, grown)])]
        found: list[list[int]] = [[]]
        # An added token at each border keeps others from reaching over it, and is taken out again.
        for token in self.encode([self._cut.join(named)])[0]:
            if token == self._cut_id:
                found.append([])
            else:
                found[-1].append(token)
        return found


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Give these pieces of a model in the form of tokenizer.json other names, in place."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
        return
    # WordPiece, BPE and WordLevel have a number for each piece.
    model["vocab"] = {names.get(piece, piece): number for piece, number in vocabulary.items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:  # of BPE; a merge that made a special piece makes none any more
        prefix = model.get("continuing_subword_prefix") or ""
        # Older files write a merge as one text with a space.
        merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
        model["merges"] = [
            merge
            for merge in merges
            if names.keys().isdisjoint((*merge, merge[0] + merge[1].removeprefix(prefix)))
        ]

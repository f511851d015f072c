"""Bounds of a tokenizer that another owner may have written, in the form of tokenizer.json.

Nothing is encoded or decoded by one that has not been looked at here: a few kilobytes can make
gigabytes of a letter, and end the process by it.
"""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from xcloud.base.errors import DataError

MAX_GROWTH = 1000
MAX_PIECE = 10_000
"""Characters of a piece of the vocabulary, which decoding may write for each id."""
MAX_TEMPLATE = 100
"""Pieces that a post-processor adds to a text."""
NORMALIZERS = frozenset(
    "Sequence Replace Prepend Precompiled NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents "
    "BertNormalizer ByteLevel".split()
)
"""Those whose growth is known: of what is not Replace, Prepend or Precompiled a letter at most 18
times, and once more is no more."""
_QUANTIFIED_GROUP = re.compile(r"\)\??(?:[*+]|\{\d*,?\d*\})")
_QUANTIFIER = re.compile(r"[*+]|\{\d*,\d*\}")  # a fixed number is taken in one way
_UNSEEN = re.compile(r"\\[gk][<']|\(\?#|\(\?[a-wyz-]*x")
"""What has a group again elsewhere, or lets a repetition stand apart from its group: calls,
references by name, comments, and patterns with blanks."""


def check_growth(content: Mapping[str, Any]) -> None:
    """Raise DataError for a tokenizer that could make a text many times as long, before it cuts it
    or when it writes it, or whose patterns could take long."""
    # Factors multiply, as each step works on what the one before has made.
    grown = 1
    for step in ("normalizer", "pre_tokenizer", "decoder"):
        for factor in _factors(content.get(step)):
            grown *= factor
    for factor in _template_factors(content.get("post_processor")):
        grown *= factor
    if grown > MAX_GROWTH:
        raise DataError(
            f"this tokenizer may make a text {grown:,} times as long, which would fill the "
            f"memory; at most {MAX_GROWTH:,} are taken"
        )
    _check_normalizers(content.get("normalizer"))
    # A piece may be longer than any text that was encoded: decoding writes it for each of its ids.
    longest = max(map(len, _pieces(content)), default=0)
    if longest > MAX_PIECE:
        raise DataError(
            f"this tokenizer has a piece of {longest:,} characters; at most {MAX_PIECE:,} are "
            "taken"
        )


def _factors(step: Any) -> Iterator[int]:
    """Yield by how much each replacement in a step, or in those that it is made of, makes a text
    longer."""
    if isinstance(step, dict):
        pattern = step.get("pattern")
        replaced = step.get("content")
        # A pattern stands only where something is replaced or split.
        if isinstance(pattern, dict):
            if "Regex" in pattern:
                _check_pattern(str(pattern["Regex"]))
            if isinstance(replaced, str):
                # A regular expression may match between any two characters.
                text = str(pattern.get("String", ""))
                yield len(replaced) + 1 if text == "" else max(1, -(-len(replaced) // len(text)))
        # The key stands in some files without the type.
        if step.get("type") == "Precompiled" or "precompiled_charsmap" in step:
            yield _charsmap_factor(step.get("precompiled_charsmap"))
        # Texts that a step writes in front of a text, or in place of a space.
        for name in ("prepend", "replacement", "prefix", "suffix"):
            if isinstance(step.get(name), str):
                yield max(1, len(step[name]))
        # Steps nest: a Sequence has others in a list under any key.
        for part in step.values():
            yield from _factors(part)
    elif isinstance(step, list):
        for part in step:
            yield from _factors(part)


def _charsmap_factor(given: Any) -> int:
    """Return the longest text that a map of SentencePiece has for a character: a size, a trie of
    that many bytes, and behind it the texts, each with a zero."""
    if not given:
        return 1
    try:
        data = base64.b64decode(given if isinstance(given, str) else bytes(given))
        # Little-endian, as SentencePiece writes it.
        (size,) = struct.unpack_from("<I", data)
    except (ValueError, TypeError, struct.error, binascii.Error):
        raise DataError("this tokenizer has a precompiled_charsmap that cannot be read") from None
    return max(
        1, *(len(text.decode("utf-8", "replace")) for text in data[4 + size :].split(b"\0"))
    )


def _template_factors(step: Any) -> Iterator[int]:
    """Yield how often the templates of a post-processor write a text."""
    if isinstance(step, list):
        for part in step:
            yield from _template_factors(part)
    if not isinstance(step, dict):
        return
    for name in ("single", "pair"):
        template = step.get(name)
        if isinstance(template, list):
            if len(template) > MAX_TEMPLATE:
                raise DataError(
                    f"this tokenizer adds {len(template):,} pieces to a text; at most "
                    f"{MAX_TEMPLATE} are taken"
                )
            # The text itself may stand several times in a template; pieces beside it are bounded
            # by their number.
            texts = [
                str(part) for part in template if isinstance(part, dict) and "Sequence" in part
            ]
            yield max([1, *(texts.count(text) for text in texts)])
    special = step.get("special_tokens")
    if isinstance(special, dict):
        for one in special.values():
            ids = one.get("ids") if isinstance(one, dict) else None
            # A special token may stand for several ids.
            if isinstance(ids, list) and len(ids) > MAX_TEMPLATE:
                raise DataError(
                    f"this tokenizer has a special token of {len(ids):,} ids; at most "
                    f"{MAX_TEMPLATE} are taken"
                )
    yield from _template_factors(step.get("processors"))


def _check_normalizers(step: Any) -> None:
    if not isinstance(step, dict):
        return
    if step.get("type") not in NORMALIZERS:
        raise DataError(
            f"this tokenizer has a normalizer {step.get('type')!r:.50}, of which it is not known "
            f"how long it makes a text; those known are {', '.join(sorted(NORMALIZERS))}"
        )
    # Each of a Sequence is looked at, as one that is not known may hide among them.
    for part in step.get("normalizers") or ():
        _check_normalizers(part)


def _pieces(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts that an id may stand for."""
    for token in content.get("added_tokens") or ():
        # A form that is not expected has no text here; what builds the tokenizer refuses it.
        yield str(token.get("content", "")) if isinstance(token, dict) else ""
    model = content.get("model")
    if not isinstance(model, dict):
        return
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        yield str(model.get(name) or "")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        yield from vocabulary
    elif isinstance(vocabulary, list):
        # Unigram has [piece, score].
        yield from (str(one[0]) for one in vocabulary if isinstance(one, list) and one)


def _check_pattern(pattern: str) -> None:
    """Raise DataError for a group that is repeated and repeats something itself, which may take
    longer than anybody waits."""
    if unseen := _UNSEEN.search(pattern):
        raise DataError(
            f"this tokenizer has a pattern that may take long: {pattern!r:.100} has "
            f"{unseen[0]!r}, behind which a group may be repeated unseen"
        )
    opened: list[int] = []
    is_in_set = False
    place = 0
    while place < len(pattern):
        letter = pattern[place]
        # A backslash takes the meaning of the next character, whatever that is.
        if letter == "\\":
            place += 2
            continue
        if letter == "[":
            is_in_set = True
        elif letter == "]":
            is_in_set = False
        elif letter == "(" and not is_in_set:
            opened.append(place)
        elif letter == ")" and not is_in_set and opened:
            inside = pattern[opened.pop() + 1 : place]
            again = _QUANTIFIED_GROUP.match(pattern, place)
            # (a+)+, (a|b)* and (a?b?)* can try exponentially many ways before they fail. "?"
            # behind the opening is a kind of group, (?:, and no repetition.
            if again and (_QUANTIFIER.search(inside) or "|" in inside or "?" in inside[1:]):
                raise DataError(
                    f"this tokenizer has a pattern that may take long: {pattern!r:.100} repeats "
                    "a group that repeats something itself"
                )
        place += 1

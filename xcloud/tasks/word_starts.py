"""Which pieces start a word, for whole-word masking. Knows pieces, not ids or models.

Scripts written without spaces do not mark words: each piece counts as a word.
"""

from __future__ import annotations

import unicodedata

UNSPACED = (
    (0x0E00, 0x109F),  # Thai, Lao, Tibetan, Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x1AAF),  # Tai scripts, Khmer symbols
    (0x2E80, 0xA4CF),  # Chinese, Japanese, Yi, and their marks
    (0xAA60, 0xAADF),  # Myanmar, Tai Viet
    (0xF900, 0xFAFF),  # Chinese, compatibility forms
    (0xFE30, 0xFE4F),
    (0xFF00, 0xFFEF),  # full width
    (0x1B000, 0x1B16F),  # kana
    (0x20000, 0x3FFFF),  # Chinese
)
# Bytes that GPT-2's alphabet maps to themselves; the others are mapped to U+0100 and up.
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTE_OF = {chr(b): b for b in _SHOWN} | {chr(0x100 + i): b for i, b in enumerate(_HIDDEN)}


def begins_word(piece: str, continuation: str | None, byte_level: bool) -> bool:
    """continuation: the prefix of word-internal pieces, "##" in WordPiece. None: spaces are marked
    instead, by "▁" (SentencePiece) or "Ġ" (byte_level: pieces are bytes in GPT-2's alphabet).
    """
    if continuation is not None:
        inside = piece.startswith(continuation)
        return not inside or begins_unspaced(piece.removeprefix(continuation).encode())
    if piece.startswith(("Ġ", "▁")):
        return True
    if byte_level and all(sign in BYTE_OF for sign in piece):
        return begins_unspaced(bytes(BYTE_OF[sign] for sign in piece))
    return begins_unspaced(piece.encode())


def begins_unspaced(text: bytes) -> bool:
    """Whether UTF-8 text starts with a character of an unspaced script, combining marks excluded.
    For an incomplete character: whether its first and last possible values both are.
    """
    if not text:
        return False
    leading_ones = 8 - (~text[0] & 0xFF).bit_length()
    first = text[: max(1, leading_ones)]
    missing = max(1, leading_ones) - len(first)
    if not missing and unicodedata.category(_character(first)).startswith("M"):
        return False
    ends = (_character(first + filler * missing) for filler in (b"\x80", b"\xbf"))
    return all(any(low <= ord(end) <= high for low, high in UNSPACED) for end in ends)


def _character(text: bytes) -> str:
    """Decode one character; U+FFFD, in no unspaced script, if invalid."""
    return text.decode(errors="replace")[0]

"""Which pieces begin a word, so that words can be masked whole. Knows pieces, not ids or models.

Scripts written without spaces have no mark of a word: there each piece is a word of its own.
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
# The bytes that GPT-2's alphabet shows as themselves; the others follow from U+0100 on.
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTE_OF = {chr(b): b for b in _SHOWN} | {chr(0x100 + i): b for i, b in enumerate(_HIDDEN)}


def begins_word(piece: str, goes_on: str | None, byte_level: bool) -> bool:
    """goes_on: the mark of a piece inside a word, "##" in WordPiece. None: spaces are marked, as
    "▁" (SentencePiece) or as "Ġ" (byte_level: pieces are bytes in GPT-2's alphabet).
    """
    if goes_on is not None:
        inside = piece.startswith(goes_on)
        return not inside or begins_unspaced(piece.removeprefix(goes_on).encode())
    if piece.startswith(("Ġ", "▁")):
        return True
    if byte_level and all(sign in BYTE_OF for sign in piece):
        return begins_unspaced(bytes(BYTE_OF[sign] for sign in piece))
    return begins_unspaced(piece.encode())


def begins_unspaced(text: bytes) -> bool:
    """Whether UTF-8 begins with a character of such a script that is no combining mark. Of a part
    of a character: whether both the first and the last that it can be are of such a script.
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
    """U+FFFD, which is of no such script, for what is no character."""
    return text.decode(errors="replace")[0]

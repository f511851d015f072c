"""Write the demo texts: python -m experiments.demo_grammar

A change of a text changes every number that was measured on it: commit new files only on purpose.
Needs about ten seconds. Every kind has the seed that all measured runs have had.
"""

from __future__ import annotations

import bz2
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.demo_grammar import corpora
from xcloud import demo

FOLDER = Path(demo.__file__).parent / "texts"
SEED = 7
PUBLIC_SEED = 0  # of the public sentences


def made() -> Iterator[tuple[str, str]]:
    """Return each kind of text with its lines, as they stand in its file before compression."""
    rows: dict[str, Sequence[Any]] = {
        "pairs": corpora.pairs(demo.NUM_ROWS["pairs"], SEED),
        "reviews": corpora.reviews(demo.NUM_ROWS["reviews"], SEED),
        "answers": corpora.answers(demo.NUM_ROWS["answers"], SEED),
        "inferences": [
            (texts["en"], texts["es"], relation)
            for texts, relation in corpora.inferences(demo.NUM_ROWS["inferences"], SEED)
        ],
        "stories": [
            (story.text, story.questions)
            for story in corpora.stories(demo.NUM_ROWS["stories"], SEED)
        ],
        "public_sentences": [
            (text,)
            for text in corpora.public_sentences(demo.NUM_ROWS["public_sentences"], PUBLIC_SEED)
        ],
    }
    for name, those in rows.items():
        lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in those)
        yield name, "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in made():
        file = FOLDER / f"{name}.jsonl.bz2"
        file.write_bytes(bz2.compress(text.encode()))
        print(f"{file.name}: {text.count(chr(10)):,} rows, {file.stat().st_size:,} bytes")

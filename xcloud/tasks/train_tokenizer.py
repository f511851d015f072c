"""Train the tokenizer that all clouds of a one-way job share, on public text:
    python -m xcloud train-tokenizer FOLDER --languages es en --out tokenizer.json

FOLDER has the format of a run's text.source.path (corpus/multilingual.py, FolderText). The file
reveals which word pieces the texts use: train on text that may be public, then copy the file to
every cloud and set model.text.tokenizer.path.

At most --max-texts texts are used, sampled per language in proportion to n ** power, n the number
of texts in the language; what a small language cannot fill goes to the others. Training uses the
same formula (model.text.language_power), but within each cloud, and n counts samples: pieces of
text of at most max_length tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from xcloud.base.errors import DataError, XcloudError
from xcloud.base.settings import Fraction, Positive, check
from xcloud.tasks.corpus.multilingual import FolderText
from xcloud.tasks.tokenizer import Tokenizer, TrainedTokenizer

POWER = 0.7  # the recipes' language_power


def train(
    folder: str,
    languages: list[str],
    settings: TrainedTokenizer,
    max_texts: int,
    power: float = POWER,
) -> Tokenizer:
    """Train on at most max_texts texts, mixed by n ** power. Raises DataError if a language is
    missing.
    """
    check("--max-texts", max_texts, Positive)
    check("--power", power, Fraction)
    source = FolderText(folder)
    source.check(languages)
    draw = random.Random(0)
    sizes: dict[str, int] = {}
    drawn: dict[str, list[str]] = {}
    for name in languages:
        texts = (row[0] for row in source.read(name))
        sizes[name], drawn[name] = draw_texts(texts, max_texts, draw)
    if empty := [name for name, side in drawn.items() if not any(side)]:
        raise DataError(f"{folder}: there is no text of {empty[0]!r}, or all is empty")
    chosen = [
        text
        for name, num in mixed(sizes, max_texts, power).items()
        for text in draw.sample(drawn[name], num)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        return settings.prepare(chosen, Path(scratch))


def draw_texts(texts: Iterable[str], most: int, draw: random.Random) -> tuple[int, list[str]]:
    """The number of texts and a uniform sample of at most `most` of them (reservoir sampling:
    Vitter, ACM TOMS 1985, algorithm R).
    """
    seen = 0
    kept: list[str] = []
    for text in texts:
        seen += 1
        if len(kept) < most:
            kept.append(text)
        elif (place := draw.randrange(seen)) < most:
            kept[place] = text
    return seen, kept


def mixed(sizes: Mapping[str, int], most: int, power: float) -> dict[str, int]:
    """Texts to use per language: `most` in all, proportional to size ** power, capped by size."""
    left = dict(sizes)
    numbers: dict[str, int] = {}
    while left:
        room = most - sum(numbers.values())
        total = sum(size**power for size in left.values())
        shares = {name: room * (size**power / total) for name, size in left.items()}
        full = [name for name, size in left.items() if size <= shares[name]]
        for name in full:
            numbers[name] = left.pop(name)
        if not full:
            return numbers | {name: int(share) for name, share in shares.items()}
    return numbers


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m xcloud train-tokenizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="folder of public texts")
    parser.add_argument("--languages", nargs="+", required=True, help="such as es en")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--kind", choices=("bpe", "wordpiece"), default="bpe")
    parser.add_argument("--lowercase", action="store_true")
    parser.add_argument("--max-texts", type=int, default=200_000, help="over all languages")
    parser.add_argument("--power", type=float, default=POWER, help=f"0 to 1, usually {POWER}")
    arguments = parser.parse_args(words)
    try:
        settings = TrainedTokenizer(arguments.vocab_size, arguments.kind, arguments.lowercase)
        tokenizer = train(
            arguments.folder,
            arguments.languages,
            settings,
            arguments.max_texts,
            arguments.power,
        )
        tokenizer.save(arguments.out)
    except XcloudError as error:
        sys.exit(f"xcloud: {error}")
    print(
        f"{arguments.out}: {tokenizer.token_ids.size:,} pieces, digest {tokenizer.digest:08x}; "
        "copy it to every cloud"
    )

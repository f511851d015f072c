"""Make the tokenizer that all clouds of a one-way job share, from public text:
    python -m xcloud.train_tokenizer FOLDER --languages es en --out tokenizer.json

FOLDER is read as text.source.path of a run is (xcloud/tasks/corpus/text_folder.py). Whoever gets
the file learns which pieces of words the texts use: train it on text that may be known, then copy
the file to every cloud and set model.text.tokenizer.path. Languages are mixed like in training.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from itertools import islice
from pathlib import Path

from xcloud.errors import DataError, XcloudError
from xcloud.tasks.corpus.text_folder import FolderText
from xcloud.tasks.tokenizer import Tokenizer, TrainedTokenizer


def train(
    folder: str,
    languages: list[str],
    settings: TrainedTokenizer,
    max_texts: int,
    power: float = 0.5,
) -> Tokenizer:
    """From at most max_texts texts of the languages, in proportion to their sizes ** power.
    Raises DataError if a language is not there.
    """
    source = FolderText(folder)
    source.check(languages)
    texts = {name: [row[0] for row in islice(source.read(name), max_texts)] for name in languages}
    if empty := [name for name, side in texts.items() if not any(side)]:
        raise DataError(f"{folder}: there is no text of {empty[0]!r}, or all is empty")
    weights = {name: len(side) ** power for name, side in texts.items()}
    draw = random.Random(0)
    chosen: list[str] = []
    for name, side in texts.items():
        wanted = round(max_texts * weights[name] / sum(weights.values()))
        chosen += side if len(side) <= wanted else draw.sample(side, wanted)
    with tempfile.TemporaryDirectory() as scratch:
        return settings.prepare(chosen, Path(scratch))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m xcloud.train_tokenizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="folder of public texts")
    parser.add_argument("--languages", nargs="+", required=True, help="such as es en")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--kind", choices=("bpe", "wordpiece"), default="bpe")
    parser.add_argument("--lowercase", action="store_true")
    parser.add_argument("--max-texts", type=int, default=200_000)
    arguments = parser.parse_args()
    try:
        settings = TrainedTokenizer(arguments.vocab_size, arguments.kind, arguments.lowercase)
        tokenizer = train(arguments.folder, arguments.languages, settings, arguments.max_texts)
        tokenizer.save(arguments.out)
    except XcloudError as error:
        sys.exit(f"xcloud: {error}")
    print(
        f"{arguments.out}: {tokenizer.token_ids.size:,} pieces, digest {tokenizer.digest:08x}; "
        "copy it to every cloud"
    )


if __name__ == "__main__":
    main()

"""Multilingual text as token ids for pre-training: which texts are read, how they are mixed, and
the command that trains a shared tokenizer. Sources are in text_sources.py; masking is in
models/pretraining.py.

Shapes: B samples of a batch, R tokens of a batch, L parts (languages and language pairs),
N samples of a batch over all ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Fraction, Positive, settings
from xcloud.base.terminal import say
from xcloud.base.wording import check
from xcloud.contracts.model import Cut, DataSplit, NumCut, TokenIds
from xcloud.pretrained import kept_digest, key_of, make_once
from xcloud.tasks.text_sources import FolderText, TextSource, languages_of
from xcloud.tasks.text_task import TokenTable, write_table
from xcloud.tasks.tokenizer import Tokenizer, TokenizerChoice, TrainedTokenizer

FORMAT = "xcloud tokens 3"
CHUNK = 1000  # texts tokenised at a time
POWER = 0.7  # the recipes' language_power


@settings("text")
class MultilingualText:
    """Texts of `source`, cut into samples of at most max_length tokens, special ids included: a
    language as `bos text eos`, a pair as `bos text eos translation eos` (TLM, Lample & Conneau,
    arXiv:1901.07291).

    tokenizer: the tokenizer, which must be the same in all clouds: a FileTokenizer, a
        PretrainedTokenizer or, if the source is public (the demo), a TrainedTokenizer that each
        cloud trains on its own.
    language_power: the power in p ~ n**power, by which parts are drawn, with n samples in the
        part; 1 = proportional, 0 = uniform. XLM uses 0.7, XLM-R 0.3.
    max_texts: the number of texts of each part that are used, from its start; null = all.
    max_length: the largest number of tokens of a sample, special ids included.
    source: the source of its texts.
    """

    source: TextSource
    tokenizer: TokenizerChoice
    max_length: Annotated[int, Field(ge=8)] = 128
    language_power: Fraction = POWER
    max_texts: Positive | None = None

    def __post_init__(self) -> None:
        # Each cloud would train another tokenizer on its own languages.
        if self.tokenizer.is_trained and self.source.public_texts() is None:
            raise ConfigError(
                "text.tokenizer cannot be trained within this run: each cloud reads only its own "
                "languages, but all need the same tokenizer. Train it first with "
                "`python -m xcloud train-tokenizer --out FILE …` and set "
                "text.tokenizer={_target_: xcloud.tasks.tokenizer.FileTokenizer, path: FILE}"
            )

    @property
    def label(self) -> str:
        return self.source.label

    def check(self, parts: Sequence[str]) -> None:
        self.source.check(parts)
        self.tokenizer.check()

    def of(self, source: TextSource | None) -> MultilingualText:
        """The same settings for another source; None: this one."""
        return self if source is None else replace(self, source=source)

    def load_tokenizer(self, cache_dir: Path) -> Tokenizer:
        texts = self.source.public_texts() if self.tokenizer.is_trained else None
        return self.tokenizer.prepare(texts or (), cache_dir)

    def token_ids(self, cache_dir: Path) -> TokenIds:
        return self.load_tokenizer(cache_dir).token_ids

    def sentences(self, num: int, cache_dir: Path) -> Sequence[Sequence[int]]:
        """Token ids of the first `num` public texts, for a PublicBackbone."""
        texts = self.source.public_texts()
        if texts is None:
            raise ConfigError(f"{self.label} is not public, so other clouds may not read it")
        if len(texts) < num:
            raise DataError(f"{self.label} has {len(texts):,} public texts, not {num:,}")
        return self.load_tokenizer(cache_dir).encode(list(texts[:num]))

    def table(
        self, part: str, tokenizer: Tokenizer, cache_dir: Path, report: Callable[[str], None]
    ) -> TokenTable:
        """Return the samples of a part without their outer special ids. They are tokenised once,
        then memory-mapped from cache_dir/tokens.

        report: may be shown in another cloud, so it must not name folders.
        """
        # Whatever changes the samples is part of the key, so that a table of other texts or
        # settings is never taken.
        limits = f"{tokenizer.digest} {self.max_length} {self.max_texts}"
        key = key_of(
            {
                "format": FORMAT,
                "texts": self.source.identity(part, cache_dir=cache_dir),
                "limits": limits,
            }
        )
        folder = cache_dir / "tokens"
        tokens = folder / f"{key}.tokens"
        offsets = folder / f"{key}.offsets"
        counts = folder / f"{key}.counts"

        def make(offsets_part: Path) -> None:
            report(f"texts of {part!r}: tokenising")
            # Tokens go straight to their file; the offsets, 8 bytes a sample, are written behind
            # them.
            found = Counter(num_texts=0, num_cut=0, num_left_out=0)
            write_table(self._samples(part, tokenizer, found), tokens, offsets=offsets_part)
            counts.write_text(json.dumps(found))

        make_once(offsets, make)  # the last to be written: they mark the table complete
        if tokens.stat().st_size == 0:
            raise DataError(f"{self.label}: there is no text of {part!r}, or all is empty")
        table = TokenTable.mapped(tokens, offsets)
        # Of the files, not of the texts: what a run resumes with must be what it began with,
        # wherever the table came from.
        table.digest = key_of({"files": [kept_digest(f, cache_dir) for f in (tokens, offsets)]})
        found = parsed_json(counts.read_text())
        table.num_texts = found["num_texts"]
        table.num_cut = found["num_cut"]
        table.num_left_out = found["num_left_out"]
        return table

    def _samples(
        self, part: str, tokenizer: Tokenizer, found: Counter[str]
    ) -> Iterator[list[int]]:
        """Yield the samples of a part. found: is told how many texts there are, how many pairs are
        cut, and how many texts are left out because they are empty, or one of a pair is."""
        rows = islice(self.source.read(part), self.max_texts)
        # bos and eos are added when a batch is made.
        room = self.max_length - 2
        # Read in chunks: the tokenizer is quick for many texts at once, and a corpus need not fit
        # into memory.
        eos = tokenizer.token_ids.eos
        while chunk := list(islice(rows, CHUNK)):
            if len(languages_of(part)) == 1:
                # A line is a text of its own, as in a file of lines.
                lines = [line for (text,) in chunk for line in text.split("\n")]
                found["num_texts"] += len(lines)
                for ids in tokenizer.encode(lines):
                    found["num_left_out"] += not ids
                    yield from (ids[start : start + room] for start in range(0, len(ids), room))
                continue
            found["num_texts"] += len(chunk)
            first, second = (tokenizer.encode(side) for side in zip(*chunk, strict=True))
            for a, b in zip(first, second, strict=True):
                # A pair with an empty side teaches nothing of translating.
                if not (a and b):
                    found["num_left_out"] += 1
                    continue
                # With eos between the two texts.
                found["num_cut"] += len(a) + 1 + len(b) > room
                # The first text gets half of the room, and what the second leaves of it.
                cut = a[: max((room - 1) // 2, room - 1 - len(b))]
                yield [*cut, eos, *b[: room - 1 - len(cut)]]


@dataclass
class TextStream:
    """Endless batches of one cloud's texts. Batch `number` of a rank depends only on seed, number
    and texts. The ranks of a cloud share one order, in which every sample of a part appears once
    per epoch."""

    tables: Mapping[str, TokenTable]
    special: TokenIds
    power: float
    seed: int
    batch_size: int
    group_rank: int = 0
    group_size: int = 1

    def __post_init__(self) -> None:
        sizes_L = torch.tensor([len(table) for table in self.tables.values()], dtype=torch.float64)
        self._shares_L = sizes_L**self.power / (sizes_L**self.power).sum()
        self._next = 1
        self._used = Counter[str]()  # samples of each part before batch _next
        self._orders: dict[str, tuple[int, Tensor]] = {}

    def describe(self) -> str:
        shares = zip(self.tables.items(), self._shares_L.tolist(), strict=True)
        lines = []
        for (name, table), share in shares:
            lines.append(
                f"{name} {len(table):,} samples, {table.num_tokens:,} tokens, {share:.0%}"
            )
        return ", ".join(lines)

    def num_cut(self, cloud: str) -> NumCut:
        """Return how many pairs were cut, and how many texts were left out as there was nothing in
        them. cloud: whose texts they are, for the names."""
        found: dict[str, Mapping[DataSplit, Cut]] = {}
        for part, table in self.tables.items():
            if table.num_cut:
                cut = Cut(num=table.num_cut, of=table.num_texts, setting="model.text.max_length")
                found[f"{part} pairs cut in {cloud}"] = {"train": cut}
            if table.num_left_out:
                empty = Cut(num=table.num_left_out, of=table.num_texts, setting="they are empty")
                found[f"{part} texts left out in {cloud}"] = {"train": empty}
        return found

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """int64 [R], each sample as bos, tokens, eos; and int64 [B], their lengths."""
        # A batch before the last one: counts begin anew, as only draws tell them.
        if number < self._next:
            self._next = 1
            self._used = Counter()
        while self._next < number:
            # Nothing is read for the batches between, only drawn.
            self._take()
        # All ranks of a cloud draw the same batch of N samples, and each takes its own share of
        # it.
        first = self.group_rank * self.batch_size
        mine = self._take()[first : first + self.batch_size]
        lines = [[self.special.bos, *self._row(*turn), self.special.eos] for turn in mine]
        lengths = torch.tensor([len(line) for line in lines])
        return torch.tensor([token for line in lines for token in line]), lengths

    def _take(self) -> list[tuple[str, int]]:
        """Return for each of the N samples of the next batch its part, and how many of that came
        before."""
        draw = torch.Generator().manual_seed(_seed(self.seed, name="parts", number=self._next))
        num = self.batch_size * self.group_size
        names = list(self.tables)
        # Drawn for the whole cloud by the seed and the batch's number alone.
        turns = []
        parts_N = torch.multinomial(self._shares_L, num, replacement=True, generator=draw)
        for name in (names[part] for part in parts_N.tolist()):
            turns.append((name, self._used[name]))
            self._used[name] += 1
        self._next += 1
        return turns

    def _row(self, name: str, turn: int) -> list[int]:
        """The sample at this position of a part's endless order."""
        # Each epoch of a part has an order of its own, kept until the next one begins: an order
        # takes 8 bytes a sample.
        epoch, place = divmod(turn, len(self.tables[name]))
        if self._orders.get(name, (-1,))[0] != epoch:
            draw = torch.Generator().manual_seed(_seed(self.seed, name, number=epoch))
            self._orders[name] = (epoch, torch.randperm(len(self.tables[name]), generator=draw))
        return self.tables[name][int(self._orders[name][1][place])]


def _seed(seed: int, name: str, number: int) -> int:
    digest = hashlib.sha256(repr((seed, name, number)).encode()).digest()
    # torch takes seeds of 63 bits.
    return int.from_bytes(digest[:8], "big") >> 1


def train_tokenizer(words: Sequence[str] | None = None) -> None:
    """Train the tokenizer that all clouds of a one-way job share, on public text.

    FOLDER has the format of a run's text.source.path. The file reveals which word pieces the texts
    use: train on text that may be public, then copy the file to every cloud and set
    model.text.tokenizer.path.

    At most --max-texts texts are used, sampled per language in proportion to n ** power, n the
    number of texts in the language; what a small language cannot fill goes to the others. Training
    uses the same formula (model.text.language_power), but within each cloud, and n counts samples:
    pieces of text of at most max_length tokens.
    """
    parser = argparse.ArgumentParser("python -m xcloud train-tokenizer")
    parser.description = train_tokenizer.__doc__
    parser.add_argument("folder", help="folder of public texts")
    parser.add_argument("--languages", nargs="+", required=True, help="such as es en")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--kind", choices=("bpe", "wordpiece"), default="bpe")
    parser.add_argument("--lowercase", action="store_true")
    parser.add_argument("--max-texts", type=int, default=200_000, help="over all languages")
    parser.add_argument("--power", type=float, default=POWER, help=f"0 to 1, usually {POWER}")
    asked = parser.parse_args(words)
    check("--max-texts", value=asked.max_texts, annotation=Positive)
    check("--power", value=asked.power, annotation=Fraction)
    choice = TrainedTokenizer(
        vocab_size=asked.vocab_size, kind=asked.kind, lowercase=asked.lowercase
    )
    source = FolderText(asked.folder)
    draw = random.Random(0)
    source.check(asked.languages)
    sizes: dict[str, int] = {}
    drawn: dict[str, list[str]] = {}
    for name in asked.languages:
        texts = (row[0] for row in source.read(name))
        sizes[name], drawn[name] = draw_texts(texts, most=asked.max_texts, draw=draw)
        # A tokenizer cannot be trained on nothing, and one language alone would be missing in it
        # without a word.
        if not any(drawn[name]):
            raise DataError(f"{asked.folder}: there is no text of {name!r}, or all is empty")
    numbers = mixed(sizes, most=asked.max_texts, power=asked.power)
    chosen = [t for name, side in drawn.items() for t in draw.sample(side, numbers[name])]
    with tempfile.TemporaryDirectory() as scratch:
        # The cache of trained tokenizers is not wanted beside a file that is named.
        tokenizer = choice.prepare(chosen, Path(scratch))
    tokenizer.save(asked.out)
    say(
        f"{asked.out}: {tokenizer.token_ids.size:,} pieces, digest {tokenizer.digest:08x}; "
        "copy it to every cloud"
    )


def draw_texts(texts: Iterable[str], most: int, draw: random.Random) -> tuple[int, list[str]]:
    """The number of texts and a uniform sample of at most `most` of them (reservoir sampling:
    Vitter, ACM TOMS 1985, algorithm R)."""
    seen = 0
    kept: list[str] = []
    for seen, text in enumerate(texts, start=1):
        if len(kept) < most:
            # The i-th text is kept with probability most / i, in place of one that was kept
            # before.
            kept.append(text)
        elif (place := draw.randrange(seen)) < most:
            kept[place] = text
    return seen, kept


def mixed(sizes: Mapping[str, int], most: int, power: float) -> dict[str, int]:
    """Texts to use per language: `most` in all, proportional to size ** power, capped by size."""
    numbers: dict[str, int] = {}
    weights = {name: sizes[name] ** power for name in sorted(sizes, key=sizes.__getitem__)}
    for name, weight in weights.items():  # a small one that is used up leaves more to the others
        total = sum(weights[other] for other in weights if other not in numbers)
        room = most - sum(numbers.values())
        numbers[name] = min(sizes[name], int(room * weight / total))
    return numbers

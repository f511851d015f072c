"""IWSLT'14 TED talks from the original WIT3 archive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import unescape

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import settings
from xcloud.base.wording import listed
from xcloud.contracts.model import DataSplit
from xcloud.tasks.rows import Form, SplitTables, Tables
from xcloud.tasks.sources import InFolder, TextFile, read_lines

# Metadata lines. The rule must be the same on both sides, or the rows would be misaligned.
TAGGED = re.compile(
    r"\s*</?(url|keywords|speaker|talkid|title|description|reviewer|translator|doc|transcript)\b",
    re.IGNORECASE,
)
SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)
QUOTES = {"&quot;": '"', "&apos;": "'"}


@settings("task.data", kw_only=True)
class Wit3(InFolder):
    """IWSLT'14 TED talks from the original, unpacked WIT3 archive; `path` is the folder of the
    language pair, or the one above it. A folder such as es-en/ of the release "2014-01" holds
        train.tags.es-en.es, train.tags.es-en.en       text lines mixed with tagged ones (<url>)
        IWSLT14.TED.dev2010.es-en.es.xml, …tst2010…  <seg id="1"> text </seg>, bare & allowed
    Later releases (IWSLT15.TED.…, TEDX) have the same format.

    fairseq's preparation takes every 23rd training row as dev and dev2010 + tst2010..2012 as test,
    so its BLEU is not comparable.

    dev, test: the sets to join, by the file name after IWSLT14.TED. (dev2010). An empty dev or
        test is held out of train.
    """

    rows = "sentence pairs"
    title = "IWSLT (WIT3)"
    dev: Sequence[str] = ("dev2010",)
    test: Sequence[str] = ("tst2010", "tst2011", "tst2012")

    def check(self, form: Form) -> None:
        super().check(form)
        for name in (*form.languages, *self.dev, *self.test):
            if not re.fullmatch(r"[\w.-]+", name):
                raise ConfigError(
                    f"task.data: {name!r} is part of a file name, so without / and spaces"
                )

    def find(self, form: Form) -> SplitTables:
        top, (a, b) = Path(self.where(form)), form.languages
        names = (f"{a}-{b}", f"{b}-{a}")
        # Both orders of the pair occur, and `path` may be the folder itself or the one above it.
        for folder, pair in [(place, name) for name in names for place in (top, top / name)]:
            sides = {side: folder / f"train.tags.{pair}.{side}" for side in (a, b)}
            # One side is enough: a cloud may hold only the language that it sees.
            if train := {side: path for side, path in sides.items() if path.exists()}:
                break
        else:
            raise DataError(
                f"{top}: no train.tags.{names[0]}.{a} (nor .{names[1]}.) here. Unpack {names[0]} "
                'of release "2014-01" from the WIT3 site of FBK (wit3.fbk.eu), and set '
                "task.data.path to the folder with train.tags.*; nothing is downloaded"
            )
        train_file = TextFile(
            name=f"train.tags.{pair}",
            kind="lines",
            paths=train,
            read=lambda path: (clean(s) for s in read_lines(path) if not TAGGED.match(s)),
        )
        tables: Tables = {"train": {"": [train_file]}}
        # An empty list leaves a split to be held out of train.
        chosen: dict[DataSplit, Sequence[str]] = {"dev": self.dev, "test": self.test}
        for split, sets in chosen.items():
            if sets:
                tables[split] = {"": [_set(folder, name, pair) for name in sets]}
        return SplitTables(tables, facts={"dev": list(self.dev), "test": list(self.test)})


def _set(folder: Path, name: str, pair: str) -> TextFile:
    """Return a set with the sides that are there."""
    paths: dict[str, Path] = {}
    for side in pair.split("-"):
        # The release's year is part of the name, so it is left open.
        files = sorted(folder.glob(f"IWSLT*.{name}.{pair}.{side}.xml"))
        if len(files) > 1:
            several = f"several files for the set {name}: {listed(p.name for p in files)}"
            raise DataError(f"{folder}: {several}; choose one, as in TED.{name}")
        if files:
            paths[side] = files[0]
    if not paths:
        raise DataError(
            f"{folder / f'IWSLT14.TED.{name}.{pair}'}.*.xml is missing, a part of the WIT3 "
            "archive (release 2014-01). To omit a set remove it from dev or test of task.data"
        )
    return TextFile(name=f"{name}.{pair}", kind="lines", paths=paths, read=_segments)


def _segments(path: Path) -> list[str]:
    # A segment may reach over a line's end, so the file is read whole.
    texts = [clean(text) for text in SEGMENT.findall("\n".join(read_lines(path)))]
    if not texts:
        raise DataError(f"{path}: no <seg id=…> text </seg> in it")
    return texts


def clean(text: str) -> str:
    # Entities of the .xml stand in train.tags, too. Runs of spaces are one, on both sides alike.
    return " ".join(unescape(text, QUOTES).split())

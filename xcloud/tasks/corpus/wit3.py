"""IWSLT'14 from the original, unpacked WIT3 archive. Not for other XML.

A folder such as es-en/ of the release "2014-01" holds
    train.tags.es-en.es, train.tags.es-en.en         text lines mixed with tagged ones (<url>)
    IWSLT14.TED.dev2010.es-en.es.xml, …tst2010…      <seg id="1"> text </seg>, a bare & is allowed
Later releases (IWSLT15.TED.…, TEDX) have the same format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcloud.base.errors import DataError
from xcloud.base.settings import settings
from xcloud.contracts.task import Split
from xcloud.tasks.corpus.folder import InFolder, read_lines
from xcloud.tasks.corpus.rows import Form, SplitTables, Table

# Metadata lines. The rule must be the same on both sides, or the rows would be misaligned.
TAGGED = re.compile(
    r"\s*</?(url|keywords|speaker|talkid|title|description|reviewer|translator|doc|transcript)\b",
    re.IGNORECASE,
)
SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)
ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}


@dataclass(frozen=True)
class TalkTable:
    """A Table of sentence pairs: train.tags.*, or the set `name` (dev2010) of the archive."""

    folder: Path
    pair: str
    name: str | None = None

    @property
    def where(self) -> str:
        return f"{self.folder}: " + (
            f"the set {self.name}" if self.name else f"train.tags.{self.pair}"
        )

    def columns(self) -> list[str]:
        return self.pair.split("-")

    def rows(self, columns: Sequence[str], keys: str) -> Iterator[tuple[Any, ...]]:
        """See Table. Opens the files of these sides only; one that sees neither counts the rows of
        a side that its cloud has."""
        sides = columns or [
            s for s in self.columns() if (self.folder / f"train.tags.{self.pair}.{s}").exists()
        ]
        texts = {side: self._texts(side) for side in sides}
        if len({len(lines) for lines in texts.values()}) > 1:
            counts = sorted((side, len(lines)) for side, lines in texts.items())
            listed = " and ".join(f"{side} {count:,}" for side, count in counts)
            raise DataError(
                f"{self.where}: the sides differ in rows: {listed}; is the archive complete?"
            )
        rows = zip(*texts.values(), strict=True)
        return rows if columns else (() for _ in rows)

    def _texts(self, side: str) -> list[str]:
        if self.name is None:
            lines = read_lines(_existing(self.folder / f"train.tags.{self.pair}.{side}"))
            return [_clean(line) for line in lines if not TAGGED.match(line)]
        paths = sorted(self.folder.glob(f"IWSLT*.{self.name}.{self.pair}.{side}.xml"))
        if len(paths) > 1:
            raise DataError(
                f"{self.folder}: several files for the set {self.name}: "
                f"{', '.join(path.name for path in paths)}; choose one, as in TED.{self.name}"
            )
        usual = self.folder / f"IWSLT14.TED.{self.name}.{self.pair}.{side}.xml"
        path = paths[0] if paths else _existing(usual)
        texts = [_clean(text) for text in SEGMENT.findall("\n".join(read_lines(path)))]
        if not texts:
            raise DataError(f"{path}: no <seg id=…> text </seg> in it")
        return texts


@settings("task", kw_only=True)
class Wit3(InFolder):
    """IWSLT'14 TED talks; `path` is the folder of the language pair, or the one above it.

    dev, test: sets to join, by the file name after IWSLT14.TED. (dev2010). An empty dev or test is
    held out of train. fairseq's preparation takes every 23rd training row as dev and dev2010 +
    tst2010..2012 as test, so its BLEU is not comparable.
    """

    dev: Sequence[str] = ("dev2010",)
    test: Sequence[str] = ("tst2010", "tst2011", "tst2012")

    def source_name(self) -> str:
        return "IWSLT (WIT3)"

    def find(self, form: Form) -> SplitTables:
        folder, pair = self._folder(*form.languages)
        tables: dict[Split, dict[str, Sequence[Table]]] = {
            "train": {"": [TalkTable(folder, pair)]}
        }
        chosen: dict[Split, Sequence[str]] = {"dev": self.dev, "test": self.test}
        for split, names in chosen.items():
            if names:
                tables[split] = {"": [TalkTable(folder, pair, name) for name in names]}
        return SplitTables(tables, {"dev": list(self.dev), "test": list(self.test)})

    def _folder(self, source: str, target: str) -> tuple[Path, str]:
        top = Path(self.where)
        pairs = (f"{source}-{target}", f"{target}-{source}")
        for pair in pairs:
            for folder in (top, top / pair):
                if any(
                    (folder / f"train.tags.{pair}.{side}").exists() for side in pair.split("-")
                ):
                    return folder, pair
        raise DataError(
            f"{top}: no train.tags.{pairs[0]}.{source} (nor .{pairs[1]}.) here. Get the texts "
            f'{pairs[0]} of release "2014-01" from the WIT3 site of FBK (wit3.fbk.eu), unpack '
            "them, and set task.path to the folder with train.tags.*; nothing is downloaded"
        )


def _existing(path: Path) -> Path:
    if not path.exists():
        raise DataError(
            f"{path} is missing; it is part of the WIT3 archive (release 2014-01). "
            "To omit a dev or test set remove it from task.dev or task.test"
        )
    return path


def _clean(text: str) -> str:
    for entity, character in ENTITIES.items():
        text = text.replace(entity, character)
    return " ".join(text.split())

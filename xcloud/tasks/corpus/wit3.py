"""IWSLT'14 from the original, unpacked WIT3 archive. Not for other XML.

A folder such as es-en/ of the release "2014-01" holds
    train.tags.es-en.es, train.tags.es-en.en         text lines mixed with tagged ones (<url>)
    IWSLT14.TED.dev2010.es-en.es.xml, …tst2010…      <seg id="1"> text </seg>, a bare & is allowed
Later releases (IWSLT15.TED.…, TEDX) have the same format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xcloud.base.errors import ConfigError, DataError
from xcloud.contracts.task import Split
from xcloud.tasks.corpus.files import read_lines
from xcloud.tasks.corpus.text import Parallel, Rows, Sampling

# Metadata lines. The rule must be the same on both sides, or the rows would be misaligned.
TAGGED = re.compile(
    r"\s*</?(url|keywords|speaker|talkid|title|description|reviewer|translator|doc|transcript)\b",
    re.IGNORECASE,
)
SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>", re.DOTALL | re.IGNORECASE)
ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'"}


@dataclass(frozen=True)
class Wit3:
    """IWSLT'14 TED talks; `path` is the folder of the language pair, or the one above it.

    dev, test: sets to join, by the file name after IWSLT14.TED. (dev2010). An empty dev or test is
    held out of train by `sampling`. fairseq's preparation takes every 23rd training row as dev and
    dev2010 + tst2010..2012 as test, so its BLEU is not comparable.
    """

    path: str = ""
    dev: Sequence[str] = ("dev2010",)
    test: Sequence[str] = ("tst2010", "tst2011", "tst2012")
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("task.path must name the folder with train.tags.es-en.es")
        for name in ("dev", "test"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"task.{name} must be a list of sets such as [tst2010, tst2011]")

    def describe(self) -> str:
        return "IWSLT (WIT3)"

    def check(self, source: str, target: str) -> None:
        self._find(source, target)

    def read(self, source: str, target: str, visible: frozenset[str]) -> Parallel:
        folder, pair = self._find(source, target)
        # A rank that sees neither side counts the rows of any side its cloud has.
        sides = sorted(visible) or [
            side for side in (source, target) if (folder / f"train.tags.{pair}.{side}").exists()
        ]
        train = {side: _train_lines(folder / f"train.tags.{pair}.{side}") for side in sides}
        splits: dict[Split, Rows] = {
            "train": _rows(train, visible, f"{folder}: train.tags.{pair}")
        }
        names: tuple[tuple[Split, Sequence[str]], ...] = (("dev", self.dev), ("test", self.test))
        for split, sets in names:
            if sets:
                splits[split] = Rows.joined(
                    _read_set(folder, name, pair, sides, visible) for name in sets
                )
        splits, remarks = self.sampling.apply(splits, str(folder))
        agreed = {"dev": list(self.dev), "test": list(self.test), "sampling": repr(self.sampling)}
        return Parallel(self.describe(), splits, remarks, agreed)

    def _find(self, source: str, target: str) -> tuple[Path, str]:
        top = Path(self.path).expanduser()
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


def _train_lines(path: Path) -> list[str]:
    _require(path)
    return [_clean(line) for line in read_lines(path) if not TAGGED.match(line)]


def _read_set(
    folder: Path, name: str, pair: str, sides: Sequence[str], visible: frozenset[str]
) -> Rows:
    texts = {}
    for side in sides:
        found = sorted(folder.glob(f"IWSLT*.{name}.{pair}.{side}.xml"))
        if len(found) > 1:
            raise DataError(
                f"{folder}: several files for the set {name}: {', '.join(f.name for f in found)}; "
                f"choose one, as in TED.{name}"
            )
        path = found[0] if found else folder / f"IWSLT14.TED.{name}.{pair}.{side}.xml"
        _require(path)
        texts[side] = [_clean(text) for text in SEGMENT.findall("\n".join(read_lines(path)))]
        if not texts[side]:
            raise DataError(f"{path}: no <seg id=…> text </seg> in it")
    return _rows(texts, visible, f"{folder}: the set {name}")


def _require(path: Path) -> None:
    if not path.exists():
        raise DataError(
            f"{path} is missing; it is part of the WIT3 archive (release 2014-01). "
            "To omit a dev or test set remove it from task.dev or task.test"
        )


def _rows(texts: dict[str, list[str]], visible: frozenset[str], where: str) -> Rows:
    counts = {side: len(lines) for side, lines in texts.items()}
    if len(set(counts.values())) > 1:
        said = " and ".join(f"{side} {count:,}" for side, count in sorted(counts.items()))
        raise DataError(f"{where}: the sides differ in rows: {said}; is the archive complete?")
    return Rows(next(iter(counts.values())), {side: texts[side] for side in visible})


def _clean(text: str) -> str:
    for entity, character in ENTITIES.items():
        text = text.replace(entity, character)
    return " ".join(text.split())

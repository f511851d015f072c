"""Corpora in a folder that several tests read."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from xcloud.tasks.rows import Source

T = TypeVar("T")

SPLIT_SIZES = {"train": 40, "dev": 5, "test": 5}
HEAD = "<url>http://www.ted.com/talks/{n}</url>\n<keywords>talks, science</keywords>\n"
SIDE_ONLY = {"es": "<reviewer>Ana</reviewer>\n<translator>Luis</translator>\n", "en": ""}
SETS = ("dev2010", "tst2010", "tst2011", "tst2012")


def write_archive(folder: Path, pair: str = "es-en", release: str = "IWSLT14.TED") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for side in ("es", "en"):
        talks = []
        for n in range(5):
            tags = HEAD.format(n=n) + SIDE_ONLY[side] + f"<talkid>{n}</talkid>\n"
            tags += f"<title>Talk {n}</title>\n<description>About {n}</description>\n"
            talks.append(tags + "".join(f"{side} {n}.{i} Q&amp;A <laughs>\n" for i in range(10)))
        (folder / f"train.tags.{pair}.{side}").write_text("".join(talks))
        for name in SETS:
            segments = "".join(f'<seg id="{i}"> {side} R&D {i}  \n x </seg>\n' for i in (1, 2, 3))
            (folder / f"{release}.{name}.{pair}.{side}.xml").write_text(
                f'<?xml version="1.0" encoding="UTF-8"?>\n<mteval>\n<refset setid="{name}">\n'
                f"<doc>\n<title>T & U</title>\n{segments}</doc>\n</refset>\n</mteval>\n"
            )
    return folder


def corpus(kind: str, folder: Path) -> None:
    """Of 40 rows to train on. In every form the texts say "secret", and the labels or the other
    side "hidden"."""
    if kind == "wit3":
        write_archive(folder)
        return
    folder.mkdir()
    for split, num in SPLIT_SIZES.items():
        rows = [(f"secret {i}", f"hidden{i % 2}") for i in range(num)]
        if kind == "lines":
            for side, texts in zip(("es", "en"), zip(*rows, strict=True), strict=True):
                (folder / f"{split}.{side}").write_text("\n".join(texts) + "\n")
                (folder / f"more.{side}").write_text("\n".join(texts) + f"\nfurther {side}\n")
        elif kind == "table":
            lines = [f"{a}\t{b}" for a, b in rows]
            (folder / f"{split}.tsv").write_text("\n".join(["es\ten", *lines]) + "\n")
        elif kind == "pairs":
            lines = [f"{a}\tsecret\t{b}" for a, b in rows]
            text = "\n".join(["premise\thypothesis\tlabel", *lines]) + "\n"
            (folder / f"{split}.en.tsv").write_text(text)
        else:
            asked = [
                {"context": f"secret {b}", "qas": [{"question": a, "answers": [b]}], "text": a}
                for a, b in rows
            ]
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, asked)) + "\n")


def given(task: Callable[..., T], source: Callable[..., Source], /, **settings: Any) -> T:
    """Build a task that has a source. The settings of both stand beside each other."""
    names = inspect.signature(source).parameters
    of_source = {name: settings.pop(name) for name in [*settings] if name in names}
    return task(data=source(**of_source), **settings)

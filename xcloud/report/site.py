"""Pages that need no server and no network: a front page and one page a study, as plain HTML."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

TEMPLATE = Path(__file__).with_suffix(".html")
_NUMBER = re.compile(r"[-+−]?\d[\d.,]*\s*(%|±.*|\(one seed\))?$")


class Picture(NamedTuple):
    """file: copied beside the pages. text: what it shows, for those who cannot see it too."""

    file: str
    text: str
    link: str = ""


@dataclass(frozen=True)
class Table:
    """links: of the cells of the first column, if they are links."""

    title: str
    cells: pd.DataFrame
    links: Sequence[str] = ()

    @property
    def rows(self) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
        """For each line its link, and its cells: the text, and whether it is a number."""
        texts = self.cells.map(cell_text)
        for link, row in zip_longest(self.links, texts.itertuples(index=False), fillvalue=""):
            yield link, [(text, bool(_NUMBER.match(text))) for text in row]


@dataclass(frozen=True)
class Page:
    """name: of the file, without .html. facts: (what, text), such as ("Verdict", "reproduced").
    up: what the link to the front page says; none on the front page, whose pictures are links."""

    name: str
    title: str
    facts: Sequence[tuple[str, str]] = ()
    command: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    up: str = ""


def cell_text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def rendered(template: Path, **values: Any) -> str:
    """A page of HTML or Markdown from its template, with these values."""
    from jinja2 import Environment, StrictUndefined  # only who writes a page pays for it

    environment = Environment(
        autoescape=template.suffix == ".html", undefined=StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def write_site(front: Page, studies: Sequence[Page], folder: Path) -> Path:
    """Write index.html and a page for each study, with copies of their pictures; returns the
    index. The folder may hold an older site, whose files of the same names are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in (replace(front, name="index"), *studies):
        pictures = [_copied(picture, page.name, folder) for picture in page.pictures]
        text = rendered(TEMPLATE, page=replace(page, pictures=pictures))
        (folder / f"{page.name}.html").write_text(text, encoding="utf-8")
    return folder / "index.html"


def _copied(picture: Picture, page: str, folder: Path) -> Picture:
    source = Path(picture.file)
    target = folder / f"{page}-{source.name}"
    shutil.copyfile(source, target)
    return picture._replace(file=target.name)

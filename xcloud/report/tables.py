"""Tables on a terminal or in a file, and pages that need no server and no network: a front page
and one page a study, as plain HTML. What they show is decided elsewhere; rich and jinja2 are
imported when the first one is made."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

WIDTH_OF_A_FILE = 100
PAGE = Path(__file__).with_name("page.html")
_NUMBER = re.compile(r"[-+−]?\d[\d.,]*\s*(%|±.*|\(one seed\))?$")


class Column(NamedTuple):
    """wraps: long cells take several lines, else they are cut."""

    heading: str
    right: bool = True
    wraps: bool = False
    dim: bool = False


def console_of(width_of_a_file: int = WIDTH_OF_A_FILE) -> Console:
    """As wide as the terminal, or as given where output goes to a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width_of_a_file)


def say(console: Console, text: str, style: str = "") -> None:
    """A line of its own, never wrapped: a wrapped path cannot be copied."""
    from rich.text import Text

    console.print(Text(text, style=style), soft_wrap=True)


def print_table(
    console: Console,
    columns: Sequence[Column | str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    heads: bool = True,
) -> None:
    """A column that is only named stands to the right, but for the first. heads: with a line of
    headings."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=heads, pad_edge=False, title_justify="left")
    table.title = title or None
    for index, column in enumerate(columns):
        if isinstance(column, str):
            column = Column(column, right=index > 0)
        table.add_column(
            Text(column.heading),
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold" if column.wraps else "ellipsis",
            style="dim" if column.dim else None,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


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
        text = rendered(PAGE, page=replace(page, pictures=pictures))
        (folder / f"{page.name}.html").write_text(text, encoding="utf-8")
    return folder / "index.html"


def _copied(picture: Picture, page: str, folder: Path) -> Picture:
    source = Path(picture.file)
    target = folder / f"{page}-{source.name}"
    shutil.copyfile(source, target)
    return picture._replace(file=target.name)

"""Tables on a terminal or in a file, the closing table of a run, and pages that need no server and
no network: a front page and one page a study, as plain HTML. What pages show is decided elsewhere;
rich and jinja2 are imported when the first one is made."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xcloud.base.terminal import is_terminal, printable
from xcloud.base.units import human_duration
from xcloud.record.run_record import RunRecord

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

WIDTH_OF_A_FILE = 10_000  # characters: nothing is wrapped where output goes on to a program
PAGE = Path(__file__).with_name("page.html")
_GAP = 3  # between two columns
_WRAPPED = 12  # characters that a column of long texts needs at least
_WRAPPED_NAME = 16  # and the first one, which names the rows
_NUMBER = re.compile(r"[-+−]?\d[\d.,]*(e[-+]\d+)?x?\s*(%|m?s|[kMGT]?B|±.*|\(one seed\))?$")


class Column(NamedTuple):
    """A column of a table.

    wraps: True if long cells take several lines.
    spare: number by which a narrow window drops columns. The highest goes first, and of equal ones
        the last column.
    """

    heading: str
    right: bool = True
    wraps: bool = False
    dim: bool = False
    spare: int = 0


def console_of() -> Console:
    """Return a console as wide as the terminal; in a file or a pipe no line is wrapped."""
    from rich.console import Console

    # In a file nothing is cut: whoever reads it has other means.
    return Console(width=None if is_terminal(sys.stdout) else WIDTH_OF_A_FILE)


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line of its own, never wrapped: a wrapped path cannot be copied."""
    from rich.text import Text

    console.print(Text(printable(text), style=style), soft_wrap=True)


def print_table(
    console: Console,
    columns: Sequence[Column | str],
    rows: Iterable[Sequence[str]],
    title: str = "",
    heads: bool = True,
) -> None:
    """Print a table. A column of which only the name is given is aligned right, except the first.

    If the window has no room for all columns, the first one, which names the rows, is shown in
    full. Others are left out and named below.

    heads: True to print a line of headings.
    """
    from rich import box
    from rich.table import Table

    # A text from elsewhere may hold control characters, and marks of rich.
    from rich.text import Text

    given = [
        Column(heading=column, right=index > 0) if isinstance(column, str) else column
        for index, column in enumerate(columns)
    ]
    lines = [[printable(cell) for cell in row] for row in rows]
    # Columns that have no room are left out, instead of all being squeezed.
    kept = _with_room(given, lines, width=console.width)
    table = Table(box=box.SIMPLE, show_header=heads, pad_edge=False, title_justify="left")
    table.title = title or None
    for index in kept:
        column = given[index]
        wraps = column.wraps or index == 0  # the first one where it alone is too wide
        table.add_column(
            Text(printable(column.heading)),
            justify="right" if column.right else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
            style="dim" if column.dim else None,
        )
    for line in lines:
        table.add_row(*(Text(line[index]) for index in kept))
    console.print(table)
    left_out = [column.heading for i, column in enumerate(given) if i not in kept]
    if any(left_out):
        say(console, text=f"no room here for: {', '.join(left_out)}", style="dim")


def _with_room(
    columns: Sequence[Column], lines: Sequence[Sequence[str]], width: int
) -> Sequence[int]:
    """Return which columns fit into a window, the first one always."""
    # Characters of some languages take two cells.
    from rich.cells import cell_len

    needed = []
    for index, column in enumerate(columns):
        texts = [column.heading, *(line[index] for line in lines)]
        most = max(map(cell_len, texts))
        least = _WRAPPED if index else _WRAPPED_NAME
        # A column that wraps needs only a few characters; others all of their longest cell.
        needed.append(min(most, least) if column.wraps else most)
    kept = list(range(len(columns)))
    # Two cells of the table's own, and a gap between each two columns.
    while len(kept) > 1 and 2 + sum(_GAP + needed[index] for index in kept) - _GAP > width:
        kept.remove(max(kept[1:], key=lambda index: (columns[index].spare, index)))
    return kept


def print_report(
    record: RunRecord, places: Mapping[str, object], console: Console | None = None
) -> None:
    """places: where things were written, label -> text, in print order: the run folder, the
    exported model, what the tracker recorded."""
    console = console or console_of()
    summary = record.summary
    heading = f"{summary['name']}: {summary['status']}, {summary['num_steps']} steps"
    if (wall_s := summary.get("wall_s")) is not None:
        heading += f", {human_duration(wall_s)}"
    # Times are of all attempts, so the first one's start is said.
    if summary.get("num_resumes") and summary.get("started_at"):
        heading += f", first started {summary['started_at']}"
    console.print()
    say(console, text=heading, style="bold")
    if summary.get("cause"):
        say(console, text=f"cause: {summary['cause']}", style="red")
    if summary["num_steps"]:
        remark = Column(heading="", right=False, wraps=True, dim=True)
        columns = [Column(heading="", right=False, wraps=True), Column(""), remark]
        print_table(console, columns, rows=record.rows, heads=False)
        for title, headings, lines in record.tables:
            print_table(console, headings, lines, title=title)
    margin = max(map(len, places), default=0)
    for label, place in places.items():
        say(console, text=f"{label:<{margin}}  {place}")


def write_csv(table: pd.DataFrame, path: Path, **more: Any) -> Path:
    """Write a table for spreadsheets. more: further arguments of `DataFrame.to_csv`.

    A text that a spreadsheet would take for a formula gets a ' in front of it, so that labels and
    messages of a run from elsewhere stay text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = table.map(no_formula).rename(columns=no_formula)
    texts.to_csv(path, index=False, **more)
    return path


def no_formula(cell: Any) -> Any:
    """Return a cell as it is, unless a spreadsheet would compute it."""
    # A cell that a spreadsheet would compute.
    if not isinstance(cell, str) or not re.match(r"\s*[=+\-@\t\r].", cell, re.DOTALL):
        return cell
    # Numbers may begin with a sign.
    return cell if _NUMBER.match(cell) else f"'{cell}"


# Pages.


class Picture(NamedTuple):
    """A picture on a page.

    file: path of the picture. It is copied beside the pages if it is elsewhere.
    text: a description of what it shows, also for readers who cannot see it.
    """

    file: Path
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
        """For each line its link, and its cells: the text, and whether its column has numbers."""
        # The texts decide, as they are what a reader sees.
        texts = self.cells.map(cell_text)
        is_number = [False] * texts.shape[1]
        for index in range(texts.shape[1]):
            # Cells without a value are in columns of either kind.
            known = [text for text in texts.iloc[:, index] if text not in ("–", "-", "")]
            is_number[index] = bool(known) and all(map(_NUMBER.match, known))
        for link, row in zip_longest(self.links, texts.itertuples(index=False), fillvalue=""):
            yield (
                link,
                [
                    (text, bool(known and _NUMBER.match(text)))
                    for text, known in zip(row, is_number, strict=True)
                ],
            )


@dataclass(frozen=True)
class Page:
    """A page of a site of studies.

    name: name of the file, without .html.
    facts: (name, text), such as ("Verdict", "reproduced").
    up: text of the link to the front page. "": this is the front page, whose pictures are links.
    notes: texts below that a reader may open. If there are any, tables come before pictures.
    """

    name: str
    title: str
    facts: Sequence[tuple[str, str]] = ()
    command: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    up: str = ""
    notes: Sequence[str] = ()


def cell_text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def rendered(template: Path, **values: Any) -> str:
    """Return a page of HTML or Markdown made of a template and values."""
    from jinja2 import Environment, StrictUndefined  # only who writes a page pays for it

    # StrictUndefined: a name that the page lacks is an error and no gap.
    environment = Environment(
        autoescape=template.suffix == ".html", undefined=StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)


def write_site(front: Page, studies: Sequence[Page], folder: Path) -> Path:
    """Write the front page and a page for each study, with copies of their pictures; returns the
    front page. The folder may hold an older site, whose files of the same names are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in (front, *studies):
        for picture in page.pictures:
            # Pictures of a sweep lie there already.
            if picture.file.parent.resolve() != folder.resolve():
                shutil.copy(picture.file, folder)
        (folder / f"{page.name}.html").write_text(rendered(PAGE, page=page), encoding="utf-8")
    return folder / f"{front.name}.html"

"""Tables on a terminal or in a file. What they show is decided elsewhere; rich is imported when
the first one is printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OF_A_FILE = 100


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

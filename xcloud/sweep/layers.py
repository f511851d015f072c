"""What a sweep over the layer and the rank of a low-rank split came to: quality over the layer, a
line for each rank ([N] fig. 9), and a table with a row for each layer and a column for each rank
([N] table 3). Draws nothing: layer_picture.py does.

[N] Pan, Hou, Yang, Yu, Xiang, ZTE Technology Journal 2023(4), section 2.2.2.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xcloud.record.scores import score_name, shown_scores
from xcloud.sweep.points import CUT_LAYER, CUT_RANK, SPLIT, is_unsplit, varying
from xcloud.sweep.results import Row, Spread
from xcloud.sweep.table import console_of_sweeps, spread_text

if TYPE_CHECKING:
    from rich.console import Console

LAYERS_FILE = "layers_and_ranks.csv"


@dataclass(frozen=True)
class Line:
    """Rows of one rank, and of one value of whatever else varies, by the layer of the cut."""

    rank: object
    variant: str  # the method, compression, …; empty where nothing else varies
    rows: dict[int, Row]

    @property
    def label(self) -> str:
        return f"r = {self.rank}" + (f", {self.variant}" if self.variant else "")


@dataclass(frozen=True)
class Layers:
    """scores: which of them to show, the task's own first. unsplit: rows of the whole model."""

    scores: list[str]
    layers: list[int]
    lines: list[Line]
    unsplit: list[Row]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(line.variant for line in self.lines))

    @property
    def ranks(self) -> list[object]:
        return list(dict.fromkeys(line.rank for line in self.lines))

    @property
    def num_seeds(self) -> str:
        """3, or 1 to 3 where some runs are missing."""
        rows = [row for line in self.lines for row in line.rows.values()] + self.unsplit
        counts = sorted({row.num_finished for row in rows})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def layers_of(rows: Sequence[Row]) -> Layers | None:
    """None unless several layers or several ranks have a result."""
    scored = [row for row in rows if row.score]
    split = [row for row in scored if isinstance(row.settings.get(CUT_LAYER), int)]
    layers = sorted({_layer(row) for row in split})
    ranks = {row.settings.get(CUT_RANK) for row in split}
    if len(layers) < 2 and len(ranks) < 2:
        return None
    others = [key for key in varying([row.settings for row in split])
              if key not in ("seed", CUT_LAYER, CUT_RANK)]  # fmt: skip
    several = len({row.sweep for row in split}) > 1
    lines: dict[tuple[object, str], dict[int, Row]] = {}
    for row in split:
        variant = _variant(row, others) + (f" @{row.sweep}" if several else "")
        lines.setdefault((row.settings.get(CUT_RANK), variant.strip()), {})[_layer(row)] = row
    ordered = sorted(lines.items(), key=lambda line: (line[0][1], _in_order(line[0][0])))
    return Layers(
        scores=shown_scores(name for row in split for name in row.quality),
        layers=layers,
        lines=[Line(rank, variant, found) for (rank, variant), found in ordered],
        unsplit=[row for row in scored if is_unsplit(row.settings)],
    )


def print_layers(found: Layers, console: Console | None = None) -> None:
    """The table on the screen, one for each score."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = console or console_of_sweeps()
    for score in found.scores:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="dim")
        table.title = f"{score_name(score)} by layer of the cut and rank"
        table.add_column("layer", justify="right", no_wrap=True)
        for line in found.lines:
            table.add_column(Text(line.label), justify="right", no_wrap=True)
        for layer, cells in table_of(found, score):
            table.add_row(*(Text(cell) for cell in (layer, *cells)))
        console.print(table)


def table_of(found: Layers, score: str) -> list[tuple[str, list[str]]]:
    """(layer, a cell for each line), the unsplit model last, beside every line."""
    cells = [
        (str(layer), [_cell(score, line.rows.get(layer)) for line in found.lines])
        for layer in found.layers
    ]
    for row in found.unsplit:
        cells.append((unsplit_name(found, row), [_cell(score, row)] * len(found.lines)))
    return cells


def unsplit_name(found: Layers, row: Row) -> str:
    return "unsplit" if len(found.unsplit) == 1 else f"unsplit ({row.label}, {row.sweep})"


def write_layers(folder: Path, found: Layers) -> Path:
    """layers_and_ranks.csv: a line for each score, layer, rank and variant."""
    path = folder / LAYERS_FILE
    folder.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["score", "layer", "rank", "variant", "mean", "std", "seeds"])
        for score in found.scores:
            for layer in found.layers:
                for line in found.lines:
                    if spread := _spread(score, line.rows.get(layer)):
                        writer.writerow([score, layer, line.rank, line.variant, *_numbers(spread)])
            for row in found.unsplit:
                if spread := _spread(score, row):
                    name = "" if len(found.unsplit) == 1 else row.label
                    writer.writerow([score, "unsplit", "", name, *_numbers(spread)])
    return path


def _layer(row: Row) -> int:
    layer = row.settings[CUT_LAYER]
    assert isinstance(layer, int)
    return layer


def _in_order(rank: object) -> tuple[bool, float, str]:
    """Numbers by size, then the rest (a rank may be null where a method has none)."""
    number = rank if isinstance(rank, int | float) else 0
    return not isinstance(rank, int | float), number, str(rank)


def _variant(row: Row, others: Sequence[str]) -> str:
    """What a row has beside layer and rank, in few words."""
    parts = []
    for key in others:
        head, value = key.split(".")[0], row.settings.get(key)
        if head in ("compression", "cluster"):
            parts.append(row.compression if head == "compression" else row.cluster)
        elif value is not None and (key == SPLIT or key.endswith(".method")):
            parts.append(str(value))
        elif value is not None:
            parts.append(f"{key.rsplit('.', 1)[-1]}={value}")
    return " ".join(dict.fromkeys(parts))


def _spread(score: str, row: Row | None) -> Spread | None:
    return row.quality.get(score) if row else None


def _cell(score: str, row: Row | None) -> str:
    return spread_text(score, _spread(score, row))


def _numbers(spread: Spread) -> tuple[float, float | str, int]:
    std = "" if spread.std is None else round(spread.std, 6)
    return round(spread.mean, 6), std, spread.num

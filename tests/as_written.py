"""Texts, tables and pictures that tests hold to the letter: a row of as_written.json for each.

A row that is meant to change is written anew by XCLOUD_TESTS_WRITE=1 and read before it is
committed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

_FILE = Path(__file__).with_suffix(".json")


def check(name: str, found: Any) -> None:
    """Compare what was found with the row `name`. A text is held as its lines."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    found = json.loads(json.dumps(_plain(found)))
    if os.environ.get("XCLOUD_TESTS_WRITE"):
        rows[name] = found
        _FILE.write_text(_written(rows), encoding="utf-8")
    assert found == rows.get(name), f"if this is meant, write the row {name!r} of {_FILE.name}"


def _written(rows: dict[str, Any]) -> str:
    """Return the file: a line for each short part."""

    def of(part: Any, depth: int) -> str:
        line = json.dumps(part, ensure_ascii=False)
        if len(line) < 96 - depth or not part or not isinstance(part, dict | list):
            return line
        begin = "\n" + " " * (depth + 1)
        if isinstance(part, list):
            inner = ("," + begin).join(of(one, depth + 1) for one in part)
            return f"[{begin}{inner}]"
        inner = ("," + begin).join(
            f"{json.dumps(key, ensure_ascii=False)}: {of(one, depth + 1)}"
            for key, one in part.items()
        )
        return "{" + begin + inner + "}"

    return of(dict(sorted(rows.items())), 0) + "\n"


def _plain(found: Any) -> Any:
    if isinstance(found, str) and "\n" in found:
        return [line.rstrip() for line in found.split("\n")]
    if isinstance(found, float):
        return None if math.isnan(found) else float(f"{found:.5g}")
    if isinstance(found, dict):
        return {str(key): _plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return found


def keep_figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Return what is drawn from now on, by the name of its file; nothing is painted."""
    kept = {}

    def save(figure: Figure, path: Path) -> None:
        kept[Path(path).name] = _described(figure)
        Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", save)
    return kept


def _numbers(values: Any) -> list[float]:
    """Return few numbers as they are, and of many their count, ends and sum."""
    found = [float(value) for value in np.asarray(values, dtype=float).ravel()]
    return found if len(found) <= 24 else [len(found), found[0], found[-1], sum(found)]


def _colour(colour: Any) -> Any:
    return (
        to_hex(colour, keep_alpha=True) if len(np.shape(colour)) < 2 else [*map(_colour, colour)]
    )


def _described(figure: Figure) -> list[Any]:
    """Return the size, texts, legends and panels of a picture, each with what lies in it."""
    title = figure.get_suptitle()
    legends = [*map(_legend, figure.legends)]
    return [_numbers(figure.get_size_inches()), title, legends, *map(_panel, figure.axes)]


def _legend(legend: Any) -> dict[str, Any]:
    labels = [text.get_text() for text in legend.get_texts()]
    return {
        "columns": legend._ncols, "labels": labels, "framed": legend.get_frame_on(),
        "size": legend.prop.get_size(),
    }  # fmt: skip


def _marks(axis: Any) -> list[str]:
    """Return what stands at the numbers of an axis: a grid across, ticks."""
    return [name for name, is_on in axis.get_tick_params().items() if is_on is True]


def _panel(axes: Any) -> dict[str, Any]:
    about: dict[str, Callable[[Any], Any]] = {
        "lines": lambda line: [
            line.get_label(), _colour(line.get_color()), line.get_linestyle(), line.get_marker(),
            [line.get_linewidth(), line.get_markersize(), line.get_alpha(), line.get_zorder()],
            _numbers(line.get_xdata()), _numbers(line.get_ydata()),
        ],
        "patches": lambda patch: [
            patch.get_label(), _colour(patch.get_facecolor()), _colour(patch.get_edgecolor()),
            patch.get_linewidth(),
            _numbers(patch.get_path().get_extents(patch.get_patch_transform()).bounds),
        ],
        "collections": lambda one: [
            one.get_label(), _colour(one.get_facecolor()),
            [_numbers(path.get_extents().bounds) for path in one.get_paths()],
        ],
        "texts": lambda text: [
            text.get_text(), *_numbers(text.get_position()), text.get_fontsize(),
            text.get_rotation(), _colour(text.get_color()), text.get_ha(), text.get_va(),
        ],
    }  # fmt: skip
    legend = axes.get_legend()
    return {
        "title": [axes.get_title(), axes.get_title(loc="left")],
        "axes": [axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale()],
        "limits": _numbers([axes.get_xlim(), axes.get_ylim()]),
        "ticks": [label.get_text() for label in axes.get_yticklabels() if label.get_text()],
        "legend": legend and _legend(legend),
        "sides": [side for side, spine in axes.spines.items() if spine.get_visible()],
        "marks": [name for one in (axes.xaxis, axes.yaxis) for name in _marks(one)],
        **{name: [say(one) for one in getattr(axes, name)] for name, say in about.items()},
    }

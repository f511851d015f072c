"""Colours and text settings that all pictures share. Needs no matplotlib."""

from __future__ import annotations

import textwrap

# Okabe and Ito's colours, safe for colour-blind readers (jfly.uni-koeln.de/color); light where a
# rank is, or may be, idle: averaging begins with waiting for the other ranks of the stage.
COLOURS = {
    "forward": "#0072B2",
    "backward": "#E69F00",
    "weights": "#F0E442",
    "codec": "#CC79A7",
    "waiting": "#E3E3E3",
    "averaging": "#8FD3BE",
    "optimizer": "#6B4C3B",
    "other": "#FFFFFF",
}
# For lines and marks that stand for settings.
LINES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#6B4C3B")
INK, FAINT = "#222222", "#8A8A8A"
DPI = 110
TITLE_POINTS = 10
_CHARACTERS_PER_IN = 11.5  # at that size


def ink_on(colour: str) -> str:
    """Black or white, whichever is more legible on `colour` ("#RRGGBB")."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "#FFFFFF"


def wrapped(title: str, width_in: float) -> str:
    """The title, wrapped to a figure of this width."""
    return "\n".join(textwrap.wrap(title, int(_CHARACTERS_PER_IN * width_in)))

"""timeline.png: one step, with a lane for each rank and each direction between two clouds.

Clouds from top to bottom, the links of a cloud below its ranks. Boxes carry micro-batch numbers
where they fit. Waiting is light: the light parts of the ranks' lanes are the bubble.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from xcloud.record.timeline import Box, Flight, Lane, Timeline, rows_of
from xcloud.report.figures import (
    COLOURS,
    FAINT,
    INK,
    TITLE_POINTS,
    canvas,
    column,
    ink_on,
    plain,
    save,
)

# what -> (colour, name in the legend)
KINDS = {
    "forward": (COLOURS["forward"], "forward"),
    "backward": (COLOURS["backward"], "backward"),
    "weights": (COLOURS["weights"], "gradients of weights"),
    "compress": (COLOURS["codec"], "compress, decompress"),
    "decompress": (COLOURS["codec"], "compress, decompress"),
    "wait": (COLOURS["waiting"], "waiting"),
    "average": (COLOURS["averaging"], "averaging, waiting for peers"),
    "clip": (COLOURS["optimizer"], "optimizer, clipping, data"),
    "optimizer": (COLOURS["optimizer"], "optimizer, clipping, data"),
    "fetch": (COLOURS["optimizer"], "optimizer, clipping, data"),
}
# A message has the colour of the action that made it, lighter.
FLIGHTS = {
    "activation": "#8FC1DE", "gradient": "#F6D28F", "averaging": COLOURS["averaging"]
}  # fmt: skip
OTHER_FLIGHT = "#BDBDBD"

_WIDTH_IN, _LANE_IN, _MARGIN_IN = 13.0, 0.42, 1.75
_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_CHARACTER_IN = 0.075  # at 8 points, generously
_NARROW_IN = 0.03


def write_timeline(
    path: Path, timeline: Timeline, title: str, predicted: Timeline | None = None
) -> Path:
    """predicted: a step that a plan foresaw, drawn above at the same scale."""
    shown = [timeline] if predicted is None else [predicted, timeline]
    lanes = [list(_lanes(one)) for one in shown]
    longest_us = max(one.until_us for one in shown)
    per_us, unit = (1e-3, "ms") if longest_us < 2e7 else (1e-6, "s")
    height_in = _MARGIN_IN + sum(_LANE_IN * len(rows) + 0.3 for rows in lanes)
    figure = canvas(title, _WIDTH_IN, height_in)
    panels = column(figure, [len(rows) + 0.7 for rows in lanes])
    for axes, one, rows in zip(panels, shown, lanes, strict=True):
        painter = _Painter(axes, per_us, 0.85 * _WIDTH_IN / max(per_us * longest_us, 1e-9))
        for y, (_, content) in enumerate(rows):
            if isinstance(content, Lane):
                painter.rank(y, content)
            else:
                painter.link(y, content)
        axes.set_title(_headed(one, one is predicted), fontsize=TITLE_POINTS, loc="left")
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlim(0, per_us * longest_us)
        plain(axes, "x")
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False)
    panels[-1].set_xlabel(f"{unit} since the step began ({timeline.clocks})")
    handles = {handle.get_label(): handle for one in shown for handle in _legend(one)}
    figure.legend(
        handles=list(handles.values()), loc="outside lower center",
        ncols=math.ceil(len(handles) / 2), frameon=False, fontsize=8,
    )  # fmt: skip
    return save(figure, path)


def _headed(timeline: Timeline, is_predicted: bool) -> str:
    took = f"{1e-3 * timeline.step_us:.4g} ms"
    text = f"predicted: {took}" if is_predicted else f"step {timeline.step}: {took}"
    bubble = timeline.bubble_ratio
    if bubble is None:
        return text
    more = "" if is_predicted else " (waiting / computing, averaging left out)"
    return f"{text}, bubble ratio {bubble:.2f}{more}"


def _lanes(timeline: Timeline) -> Iterator[tuple[str, Lane | Sequence[Flight]]]:
    """Links between a pair of clouds come below the ranks of the upper one; links without a
    boundary come last."""
    clouds = timeline.clouds
    minor = []
    for position, cloud in enumerate(clouds):
        for lane in timeline.lanes:
            if lane.cloud == cloud:
                several = len({box.stage for box in lane.boxes if box.direction}) > 1
                yield f"{cloud}  rank {lane.rank}" + "\n(small: stage)" * several, lane
        for other in clouds[position + 1 :]:
            for here, there in ((cloud, other), (other, cloud)):
                flights = timeline.flights.get((here, there), ())
                if any(flight.kind in FLIGHTS for flight in flights):
                    yield f"{here} → {there}", flights
                elif flights:
                    minor.append((f"{here} → {there}", flights))
    yield from minor


def _legend(timeline: Timeline) -> Iterator[Patch]:
    used = {box.what for lane in timeline.lanes for box in lane.boxes}
    named = dict.fromkeys(entry for what, entry in KINDS.items() if what in used)
    for colour, label in named:
        yield Patch(facecolor=colour, edgecolor=FAINT, linewidth=0.5, label=label)
    yield Patch(facecolor="white", edgecolor=FAINT, linewidth=0.5, label="none of these")
    kinds = {flight.kind for flights in timeline.flights.values() for flight in flights}
    for kind, colour in FLIGHTS.items():
        if kind in kinds:
            yield Patch(facecolor=colour, label=f"{kind} on the link")
    if kinds - FLIGHTS.keys():
        yield Patch(facecolor=OTHER_FLIGHT, label=", ".join(sorted(kinds - FLIGHTS.keys())))


class _Painter:
    """Draws lanes. inches_per_unit: scale of the time axis."""

    def __init__(self, axes: Axes, per_us: float, inches_per_unit: float) -> None:
        self._axes, self._per_us, self._inches_per_unit = axes, per_us, inches_per_unit

    def rank(self, y: int, lane: Lane) -> None:
        begin, end = self._per_us * lane.from_us, self._per_us * lane.until_us
        self._axes.broken_barh([(begin, end - begin)], (y - 0.36, 0.72), facecolor="white",
                               edgecolor=FAINT, linewidth=0.5)  # fmt: skip
        several = len({box.stage for box in lane.boxes if box.direction}) > 1
        for what, (colour, _) in KINDS.items():
            boxes = [box for box in lane.boxes if box.what == what]
            is_action = what in ("forward", "backward", "weights")
            edge = "white" if is_action else "none"
            self._boxes(y, 0.72, boxes, colour, edge)
            if is_action:
                for box in boxes:
                    small = str(box.stage).translate(_SUBSCRIPT) if several else ""
                    self._number(y, box, f"{box.micro_batch}{small}", ink_on(colour))

    def link(self, y: int, flights: Sequence[Flight]) -> None:
        """Boxes on the line, with a thin tail until the message arrived."""
        rows = rows_of(flights)
        height = 0.6 / len(rows)
        for index, row in enumerate(rows):
            middle = y - 0.3 + height * (index + 0.5)
            for kind in dict.fromkeys(flight.kind for flight in row):
                some = [flight for flight in row if flight.kind == kind]
                colour = FLIGHTS.get(kind, OTHER_FLIGHT)
                self._boxes(middle, height, some, colour, "white")
                self._axes.hlines(
                    [middle + 0.38 * height] * len(some),
                    [self._per_us * flight.until_us for flight in some],
                    [self._per_us * flight.arrived_us for flight in some],
                    colors=colour, linewidth=1.5,
                )  # fmt: skip
            if len(rows) <= 2:
                for flight in row:
                    if flight.kind in FLIGHTS:
                        self._number(middle, flight, str(flight.micro_batch), INK)

    def _boxes(
        self, y: float, height: float, entries: Sequence[Box | Flight], colour: str, edge: str
    ) -> None:
        spans = [
            (self._per_us * e.from_us, self._per_us * (e.until_us - e.from_us)) for e in entries
        ]
        # An edge would hide a very narrow box.
        is_narrow = [width * self._inches_per_unit < _NARROW_IN for _, width in spans]
        for narrow, line in ((True, "none"), (False, edge)):
            some = [span for span, own in zip(spans, is_narrow, strict=True) if own == narrow]
            self._axes.broken_barh(
                some, (y - height / 2, height), facecolor=colour, edgecolor=line, linewidth=0.4
            )

    def _number(self, y: float, entry: Box | Flight, text: str, colour: str) -> None:
        width = self._per_us * (entry.until_us - entry.from_us) * self._inches_per_unit
        if width > _CHARACTER_IN * len(text) + 0.03:
            middle = self._per_us * (entry.from_us + entry.until_us) / 2
            self._axes.text(middle, y, text, ha="center", va="center", fontsize=8, color=colour)

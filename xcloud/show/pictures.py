"""The pictures of a run: loss.png, step_time.png and timeline.png.

The timeline is of one step, with a lane for each rank and each direction between two clouds:
clouds from top to bottom, the links of a cloud below its ranks. Boxes carry micro-batch numbers
where they fit. Waiting is light: the light parts of the ranks' lanes are the bubble.

matplotlib takes half a second to import, so whoever follows a run imports this at its end, and a
rank never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from xcloud.base.units import human_seconds
from xcloud.record.events import OWN
from xcloud.record.run_record import RunRecord
from xcloud.record.summary import num_warmup_steps
from xcloud.record.timeline import Flight, Lane, Timeline, read_predicted
from xcloud.show.canvas import (
    COLOURS,
    FAINT,
    INK,
    PARTS,
    TITLE_POINTS,
    canvas,
    column,
    ink_on,
    over_steps,
    plain,
    save,
    smoothed,
    stacked,
)

LOSS_PICTURE = "loss.png"
STEP_TIME_PICTURE = "step_time.png"
TIMELINE_PICTURE = "timeline.png"

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
FLIGHTS = {"activation": "#8FC1DE", "gradient": "#F6D28F", "averaging": COLOURS["averaging"]}
OTHER_FLIGHT = "#BDBDBD"

_WIDTH_IN = 13.0
_LANE_IN = 0.42
_MARGIN_IN = 1.75
_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_CHARACTER_IN = 0.075  # at 8 points, generously


def write_pictures(
    run_dir: Path,
    run: RunRecord,
    title: str,
    each: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> list[Path]:
    """Draw what there is to draw. Return the files.

    each: returns a context for a picture, by its name, which may keep an error from the others.
    """
    drawn: list[Path | None] = []
    with each(TIMELINE_PICTURE):
        if run.timeline is not None:
            file = run_dir / TIMELINE_PICTURE
            predicted = read_predicted(run_dir)
            drawn.append(write_timeline(file, run.timeline, title, predicted))
    # The others may have nothing to show.
    with each(LOSS_PICTURE):
        drawn.append(write_loss(run_dir / LOSS_PICTURE, run, title))
    with each(STEP_TIME_PICTURE):
        drawn.append(write_step_time(run_dir / STEP_TIME_PICTURE, run, title))
    return [path for path in drawn if path is not None]


def write_loss(path: Path, run: RunRecord, title: str) -> Path | None:
    """Loss over steps, raw and smoothed; dev quality below it. None if there is no loss yet."""
    step = np.asarray(run.steps.step)
    # A loss that is not finite is no point.
    loss = np.asarray(run.steps["loss"])
    known = np.isfinite(loss)
    if not known.any():
        return None
    step = step[known]
    loss = loss[known]
    quality = run.dev_quality
    figure = canvas(title, width_in=8, height_in=6.4 if quality else 4.2)
    panels = column(figure, heights=[2, 1] if quality else [1])
    # Single steps scatter; the mean over a fiftieth of the run shows the way.
    mean, window = smoothed(loss)
    if window > 1:
        panels[0].plot(step, loss, color="#9CC3DD", linewidth=0.6, label="each step")
        panels[0].plot(step, mean, color=COLOURS["forward"], label=f"mean of {window} steps")
        panels[0].legend(frameon=False)
    else:
        panels[0].plot(step, loss, color=COLOURS["forward"], marker=".", linewidth=1)
    panels[0].set_ylabel("training loss")
    if quality:
        kinds = ("forward", "backward", "codec", "optimizer")
        panels[1].set_prop_cycle(color=[COLOURS[kind] for kind in kinds])
        for metric, points in quality.items():
            at, scores, errors = zip(*points, strict=True)
            panels[1].errorbar(at, scores, errors, marker="o", ms=3, elinewidth=0.7, label=metric)
        panels[1].set_ylabel("dev quality")
        panels[1].legend(frameon=False)
    panels[-1].set_xlabel("step")
    for axes in panels:
        over_steps(axes)
    return save(figure, path=path)


def write_step_time(path: Path, run: RunRecord, title: str) -> Path | None:
    """How each cloud spent a step, and step time over the run. None without steps."""
    num_steps = len(run.steps.step)
    if not num_steps:
        return None
    # The first steps are slow and would set the scale.
    skip = num_warmup_steps(num_steps)
    clouds = run.steps.below(OWN)
    step = np.asarray(run.steps.step)[skip:]
    step_s = np.asarray(run.steps["step_s"])[skip:]
    figure = canvas(title, width_in=11, height_in=3.2 + 0.4 * len(clouds))
    left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
    unit, per_s = ("ms", 1e3) if np.median(step_s) < 1 else ("s", 1.0)
    _draw_parts(left, run, skip, per_s=per_s)
    left.set_xlabel(f"{unit} of a step (mean of {len(step)} steps, ranks of a cloud)")
    draw_times(right, step, taken=per_s * step_s, unit=unit)
    top = right.get_ylim()[1]
    for at_step, text in run.marks:
        # Behind the step, as what an event changes begins with the next one.
        after = at_step + 0.5
        right.axvline(after, color=INK, linewidth=0.8, linestyle=":")
        right.text(after, 0.02 * top, f" {text}", fontsize=7, rotation=90, va="bottom")
    return save(figure, path=path)


def draw_times(axes: Axes, step: NDArray[np.int64], taken: NDArray[np.float64], unit: str) -> None:
    """Draw the step time over the run. taken: the time of each step, in `unit`."""
    # Two thousand points are all that a picture of this width can show.
    every = math.ceil(len(step) / 2000)
    axes.plot(step, taken, ".", markersize=4, markevery=every, color=INK, alpha=0.5)
    low, median, high = np.percentile(taken, [10, 50, 90])
    axes.axhline(median, color=COLOURS["forward"], label=f"median {short(median)} {unit}")
    spread = f"10 % to 90 %: {short(low)} to {short(high)} {unit}"
    axes.axhspan(low, high, color=COLOURS["forward"], alpha=0.12, linewidth=0, label=spread)
    # One hiccup of a minute must not flatten everything else; it is noted in the corner.
    # Room above the slowest usual step.
    top = 1.25 * max(np.percentile(taken, 99), high)
    axes.set_ylim(0, top)
    if num_above := int((taken > top).sum()):
        text = f"{num_above} above, up to {short(taken.max())} {unit}"
        axes.text(0.99, 0.99, text, ha="right", va="top", fontsize=8, transform=axes.transAxes)
    axes.set(xlabel="step", ylabel=f"step time in {unit}")
    axes.legend(ncols=2, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    over_steps(axes)


def _draw_parts(axes: Axes, run: RunRecord, skip: int, per_s: float) -> None:
    """A bar for each cloud, as long as its ranks' steps; "other" is the unaccounted rest."""

    clouds = run.steps.below(OWN)

    def mean(kind: str) -> NDArray[np.float64]:
        seconds, ranks = (run.steps.sums(name, first=skip) for name in (kind, "num_ranks"))
        return per_s * np.array([seconds[cloud] / ranks[cloud] for cloud in clouds])

    whole = mean(OWN)
    parts = [(label, mean(kind), colour) for kind, (label, colour) in PARTS.items()]
    # What no part explains; clocks of parts may add up to a little more than the whole.
    rest = np.maximum(whole - sum(values for _, values, _ in parts), 0)
    for bars, values in stacked(
        axes, labels=clouds, parts=[*parts, ("other", rest, COLOURS["other"])]
    ):
        # No text where it would not fit.
        texts = [short(value) if value > 0.08 * whole.max() else "" for value in values]
        ink = ink_on(to_hex(bars[0].get_facecolor()))
        axes.bar_label(bars, texts, label_type="center", fontsize=8, color=ink)
    axes.set_xlim(0, 1.005 * whole.max())  # room for the edge of the last box
    axes.legend(ncols=5, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1),
                handlelength=1, columnspacing=1, borderaxespad=0.2)  # fmt: skip
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def short(value: float) -> str:
    """Three digits, without exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def write_timeline(
    path: Path, timeline: Timeline, title: str, predicted: Timeline | None = None
) -> Path:
    """predicted: a step that a plan foresaw, drawn above at the same scale."""
    shown = [timeline] if predicted is None else [predicted, timeline]
    lanes = [list(lanes_of(one)) for one in shown]
    # Both on one scale, so that prediction and step can be compared.
    longest_us = max(one.until_us for one in shown)
    per_us, unit = (1e-3, "ms") if longest_us < 1e7 else (1e-6, "s")
    height_in = _MARGIN_IN + sum(_LANE_IN * len(rows) + 0.3 for rows in lanes)
    figure = canvas(title, width_in=_WIDTH_IN, height_in=height_in)
    panels = column(figure, heights=[len(rows) + 0.7 for rows in lanes])
    for axes, one, rows in zip(panels, shown, lanes, strict=True):
        bars = list[Bar]()
        # Lanes from top to bottom.
        for y, (_, content) in enumerate(rows):
            if isinstance(content, Lane):
                bars += _bars_of_rank(y, lane=content)
            else:
                bars += bars_of_link(y, rows=content)
        draw_bars(
            axes,
            bars=bars,
            per_us=per_us,
            inches_per_unit=0.85 * _WIDTH_IN / max(per_us * longest_us, 1e-9),
        )
        axes.set_title(
            heading_of(one, is_predicted=one is predicted), fontsize=TITLE_POINTS, loc="left"
        )
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        # Downwards, with half a lane around.
        axes.set_ylim(len(rows) - 0.45, -0.55)
        axes.set_xlim(0, 1.01 * per_us * longest_us)  # a bar does not touch the edge
        plain(axes, grid="x")
        axes.spines["left"].set_visible(False)
        axes.tick_params(left=False)
    panels[-1].set_xlabel(f"{unit} since the step began ({timeline.clocks})")
    # Each colour once, whichever of the two has it.
    handles = {handle.get_label(): handle for one in shown for handle in legend_of(one)}
    figure.legend(
        handles=list(handles.values()), loc="outside lower center",
        ncols=math.ceil(len(handles) / 2), frameon=False, fontsize=8,
    )  # fmt: skip
    return save(figure, path=path)


def heading_of(timeline: Timeline, is_predicted: bool) -> str:
    named = f"step {timeline.step}" if not is_predicted else "predicted"
    text = f"{named}: {human_seconds(1e-6 * timeline.step_us)}"
    if timeline.bubble_ratio is None:
        return text
    more = "" if is_predicted else " (waiting / computing, averaging left out)"
    return f"{text}, bubble ratio {timeline.bubble_ratio:.2f}{more}"


def lanes_of(timeline: Timeline) -> Iterator[tuple[str, Lane | Sequence[Sequence[Flight]]]]:
    """Links between a pair of clouds come below the ranks of the upper one; links without a
    boundary come last."""
    clouds = timeline.clouds
    minor = []
    for position, cloud in enumerate(clouds):
        for lane in timeline.lanes:
            # The rank's cloud, then the lines of this cloud to others below.
            if lane.cloud == cloud:
                several = len({box.stage for box in lane.boxes if box.direction}) > 1
                yield f"{cloud}  rank {lane.rank}" + "\n(small: stage)" * several, lane
        for other in clouds[position + 1 :]:
            for here, there in ((cloud, other), (other, cloud)):
                rows = timeline.rows.get((here, there), ())
                # Lines that carry neither activations nor gradients come last.
                if any(flight.kind in FLIGHTS for row in rows for flight in row):
                    yield f"{here} → {there}", rows
                elif rows:
                    minor.append((f"{here} → {there}", rows))
    yield from minor


def legend_of(timeline: Timeline) -> Iterator[Patch]:
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


class Bar(NamedTuple):
    """A bar of a picture.

    y: height of its middle.
    edge: colour of the edge, for a bar that is wide enough for one.
    text: the label, if it fits.
    """

    y: float
    height: float
    from_us: float
    until_us: float
    colour: str
    edge: str = "none"
    text: str = ""


def _bars_of_rank(y: int, lane: Lane) -> Iterator[Bar]:
    # The whole step in white, so that what nothing covers shows as idle.
    yield Bar(
        y, height=0.72, from_us=lane.from_us, until_us=lane.until_us, colour="white", edge=FAINT
    )
    # With several stages a rank the number alone tells micro-batches not apart.
    several = len({box.stage for box in lane.boxes if box.direction}) > 1
    # In the order of KINDS: waiting is drawn before what may lie over it.
    for box in sorted(lane.boxes, key=lambda box: list(KINDS).index(box.what)):
        bar = Bar(
            y, height=0.72, from_us=box.from_us, until_us=box.until_us, colour=KINDS[box.what][0]
        )
        if box.what in ("forward", "backward", "weights"):
            small = str(box.stage).translate(_SUBSCRIPT) if several else ""
            bar = bar._replace(edge="white", text=f"{box.micro_batch}{small}")
        yield bar


def bars_of_link(y: int, rows: Sequence[Sequence[Flight]]) -> Iterator[Bar]:
    """Boxes on the line, with a thin tail until the message arrived."""
    # Messages that overlap share the lane's height.
    height = 0.6 / len(rows)
    for index, row in enumerate(rows):
        middle = y - 0.3 + height * (index + 0.5)
        for flight in row:
            colour = FLIGHTS.get(flight.kind, OTHER_FLIGHT)
            # In narrow rows no number fits.
            text = str(flight.micro_batch) if len(rows) <= 2 and flight.kind in FLIGHTS else ""
            yield Bar(
                y=middle,
                height=height,
                from_us=flight.from_us,
                until_us=flight.until_us,
                colour=colour,
                edge="white",
                text=text,
            )
            # What it takes to arrive: the latency, thinner.
            tail = middle + 0.38 * height
            yield Bar(
                y=tail,
                height=0.05,
                from_us=flight.until_us,
                until_us=flight.arrived_us,
                colour=colour,
            )


def draw_bars(axes: Axes, bars: Sequence[Bar], per_us: float, inches_per_unit: float) -> None:
    """inches_per_unit: scale of the time axis."""
    rectangles = []
    edges = []
    for bar in bars:
        left = per_us * bar.from_us
        width = per_us * (bar.until_us - bar.from_us)
        rectangles.append(Rectangle((left, bar.y - bar.height / 2), width, bar.height))
        # An edge would hide a very narrow box.
        edges.append("none" if width * inches_per_unit < 0.03 else bar.edge)
        if bar.text and width * inches_per_unit > _CHARACTER_IN * len(bar.text) + 0.03:
            axes.text(left + width / 2, bar.y, bar.text, ha="center", va="center", fontsize=8,
                      color=ink_on(bar.colour))  # fmt: skip
    colours = [bar.colour for bar in bars]
    drawn = PatchCollection(rectangles, facecolors=colours, edgecolors=edges, linewidths=0.4)
    axes.add_collection(drawn)

"""Draw docs/tradeoff.png, the README's picture, from two records: BLEU and step time over bytes.

    python -m experiments.table2.tradeoff [FILE]

BLEU is of records/table2-tatoeba (three seeds, a bar for the standard error), step times are of
records/table2-steps: the same model over an emulated line of 1 Mbit/s, rows by turns.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.axes import Axes

from experiments.claims.claims import FILE, Estimate, Figure, read_claims
from experiments.claims.pages import read_records
from xcloud.base.project import project_root
from xcloud.base.terminal import say
from xcloud.show.canvas import FAINT, LINES, MARKERS, canvas, plain, save

QUALITY = "table2-tatoeba"
SPEED = "table2-steps"
KINDS = {  # label -> rows of the two records, a pair each
    "FP32": [("fp32+fp32", "wire FP32")],
    "BF16": [("bf16+bf16", "wire BF16")],
    "published: FP16 (SVD) + INT8": [
        (f"fp16(svd({rate}))+int8", f"fp16(svd({rate}))+int8") for rate in (0.2, 0.4, 0.6, 0.8)
    ],
    "INT8 + INT8, INT4 + INT8, INT4 + INT2": [
        (name, name) for name in ("int8+int8", "int4+int8", "int4+int2")
    ],
}
WITHOUT_A_LINK = {
    "ABNet-Local": "AB-Net without a link",
    "Transformer": "Transformer from scratch",
}


def draw(path: Path) -> Path:
    """Draw the picture and return its path."""
    records = read_records(read_claims(project_root() / FILE))
    figure = canvas("", 9.6, 3.8)
    quality, speed = figure.subplots(1, 2)
    for number, (label, rows) in enumerate(KINDS.items()):
        color = LINES[number]
        marker = MARKERS[number]
        for of_quality, of_speed in rows:
            in_legend = label if (of_quality, of_speed) == rows[0] else "_nolegend_"
            for axes, claim, name, column in (
                (quality, QUALITY, of_quality, "bleu"),
                (speed, SPEED, of_speed, "step_s"),
            ):
                num_bytes = _estimate(records[claim].rows, name, "bytes")
                value = _estimate(records[claim].rows, name, column)
                axes.errorbar(
                    num_bytes.mean / 1000, value.mean, yerr=value.error, fmt=marker,
                    color=color, capsize=3, label=in_legend,
                )  # fmt: skip
    for number, (name, label) in enumerate(WITHOUT_A_LINK.items()):
        level = _estimate(records[QUALITY].rows, name, "bleu").mean
        quality.axhline(level, color=FAINT, linestyle=("--", ":")[number])
        quality.annotate(label, (480, level), (0, 3), textcoords="offset points", fontsize=8,
                         color=FAINT, ha="right")  # fmt: skip
    quality.set_ylabel("BLEU, Tatoeba es-en")
    speed.set_ylabel("seconds of a step, line of 1 Mbit/s")
    speed.set_ylim(bottom=0)
    _finish(quality, speed)
    handles, labels = quality.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        unique.values(), unique.keys(), loc="outside lower center", ncols=4, fontsize=8,
        frameon=False,
    )  # fmt: skip
    return save(figure, path)


def _finish(*panels: Axes) -> None:
    """Give both panels the same axis of bytes."""
    for axes in panels:
        axes.set_xscale("log")
        ticks = (50, 100, 200, 500)
        axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("kB between clouds, an update")
        plain(axes, "both")


def _estimate(rows: object, name: str, column: str) -> Estimate:
    """Return the mean of a column over the seeds or rounds of a row."""
    found = Figure(name, column).of(rows)  # type: ignore[arg-type]
    if found is None:
        raise KeyError(f"the record has no {column} of {name!r}")
    return found


if __name__ == "__main__":
    default = project_root() / "docs" / "tradeoff.png"
    say(str(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else default)))

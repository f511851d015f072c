"""The record of a run: what table, tracker, pictures and pages show of it, made once. They get it
and ask nothing below them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from xcloud.base.terminal import printable
from xcloud.base.units import (
    UNKNOWN,
    human_bytes,
    human_number,
    human_percent,
    human_seconds,
    score_name,
    score_text,
    score_with_error,
)
from xcloud.record.events import MEMORY, OTHER_MEMORY, TIMES, Columns, Event
from xcloud.record.feature_figures import FeatureFigure, Row
from xcloud.record.timeline import Timeline, timeline_of

KINDS = {"compute_s": "computing", "codec_s": "compressing", "waiting_s": "waiting",
         "sync_s": "averaging"}  # fmt: skip
# Of summary.json, what has the same name in a table of runs.
AS_THEY_ARE = (
    "predicted_step_time_s", "final_loss", "bubble_ratio",
    "samples_per_s", "tokens_per_s", "learned_tokens_per_s", "num_steps",
)  # fmt: skip
_MAX_DRAWN = 1e100  # a score beyond it would stretch an axis that no picture has


@dataclass(frozen=True)
class RunRecord:
    """The record of a run that has ended. One that is read from an archive has numbers and no
    series.

    summary: its numbers, as summary.json has them.
    figures: the metrics that features add.
    steps: the numbers of each step.
    events: the events that figures are made of.
    """

    summary: Mapping[str, Any]
    figures: Sequence[FeatureFigure] = ()
    steps: Columns = field(default_factory=Columns)
    events: Sequence[Event] = ()

    def changed(self, **numbers: object) -> RunRecord:
        """Return the record with other numbers."""
        return replace(self, summary={**self.summary, **numbers})

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The lines of the closing table: label, value, remark."""
        # In the order in which a reader asks: how good, how long, how much, how fast.
        makers = (_quality_rows, _time_rows, _traffic_rows, *(one.rows for one in self.figures))
        return [row for make in (*makers, _speed_rows) for row in make(self.summary)]

    @cached_property
    def tables(self) -> Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """The tables below the closing one: title, headings, lines."""
        summary = self.summary
        tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = []
        # A run that made no step has no times.
        if summary["compute_s"]:
            times = [
                [cloud, *(human_seconds(summary.get(kind, {}).get(cloud)) for kind in KINDS)]
                for cloud in summary["compute_s"]
            ]
            title = "time in a step, mean of the ranks of a cloud"
            tables.append((title, ["cloud", *KINDS.values()], times))
        if memory := summary.get("memory"):
            in_use = sorted(memory, key=lambda rank: rank.get("gpu_peak", rank["peak"]))
            fullest = {rank["cloud"]: rank for rank in in_use}.values()
            by_rank = sorted(fullest, key=lambda rank: int(rank["rank"]))
            cells = [
                [kind.replace("_", " "), *(human_bytes(rank.get(kind)) for rank in by_rank)]
                for kind in (*MEMORY, OTHER_MEMORY)
                if any(kind in rank for rank in memory)
            ]
            headings = ["", *(rank["cloud"] for rank in by_rank)]
            tables.append(("memory of the fullest rank", headings, cells))
        return tables

    @property
    def markdown(self) -> str:
        """The closing table as Markdown; empty for a run without a step."""
        if not self.summary["num_steps"]:
            return ""
        lines = ["| | | |", "|---|---:|---|"]
        for row in self.rows:
            # A line feed or a bar would break the table.
            cells = (printable(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    @cached_property
    def timeline(self) -> Timeline | None:
        """What each rank did in one step; None for a run that ended before it."""
        return timeline_of(self.events)

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """The numbers that a table of runs compares."""
        found = _main_metrics(self.summary)
        for figure in self.figures:
            # Features may have figures of the same names, which count before those of parts.
            found |= dict(figure.metrics(self.summary))
        found |= _metrics_of_parts(self.summary)
        # A number that was not measured has no row.
        return {name: float(value) for name, value in found.items() if value is not None}

    @property
    def dev_quality(self) -> Mapping[str, Sequence[tuple[int, float, float]]]:
        """The curves of dev scores by name: step, score, its error."""
        curves: dict[str, list[tuple[int, float, float]]] = {}
        for event in self.events:
            if event["event"] != "quality" or event["split"] != "dev":
                continue
            for name, value in event["values"].items():
                # None of a model that has diverged, and what no axis has room for: no point.
                point = value if value is not None and abs(value) < _MAX_DRAWN else math.nan
                error = event["errors"].get(name) or 0.0
                error = error if 0 <= error < _MAX_DRAWN else 0.0
                curves.setdefault(name, []).append((event["step"], point, error))
        return curves

    @property
    def marks(self) -> Sequence[tuple[int, str]]:
        """What features mark on the curve of step times: step, word."""
        return [
            (event["step"], figure.mark(event))
            for figure in self.figures
            if figure.mark is not None
            for event in self.events
            if event["event"] in figure.kinds
        ]


def _main_metrics(summary: Mapping[str, Any]) -> dict[str, float | None]:
    step_time_s = summary.get("step_time_s", {})
    ratio = summary.get("compression_ratio", {})
    per_token = dict(summary.get("bytes_per_token") or {})
    # Boundaries are told apart by a name, so they are taken out before the rest is.
    at_boundaries = per_token.pop("boundaries", {})
    of_resumed = ("num_resumes", "num_steps_done_twice", "goodput")
    # Numbers of restarts in every row would say 0 almost everywhere.
    names = AS_THEY_ARE + (of_resumed if summary.get("num_resumes") else ())
    return {
        **summary.get("quality", {}),
        **{f"{name}_error": error for name, error in summary.get("quality_error", {}).items()},
        "step_time_s": step_time_s.get("median"),
        "step_time_p90_s": step_time_s.get("p90"),
        "wan_bytes_per_step": sum(n or 0 for n in summary.get("wan_bytes_per_step", {}).values()),
        "compression_ratio": ratio.get("total"),
        **{f"compression_ratio_{kind}": ratio[kind] for kind in ratio if kind != "total"},
        "bytes_per_token": per_token.pop("total", None),
        **{f"bytes_per_token_{kind}": value for kind, value in per_token.items()},
        **{f"bytes_per_token_boundary_{n}": value for n, value in at_boundaries.items()},
        **{name: summary.get(name) for name in names},
        # None and not 0: most runs skip no update, and the column is then left out.
        "num_skipped_updates": summary.get("num_skipped_updates") or None,
    }


def _metrics_of_parts(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of each cloud, direction and rank."""
    metrics: dict[str, float | None] = {}
    for name in (*TIMES, "wan_bytes_per_step", "link_utilisation"):
        metrics |= {f"{name}_{part}": value for part, value in summary.get(name, {}).items()}
    kinds = (*MEMORY, OTHER_MEMORY)
    for rank in summary.get("memory", ()):
        metrics |= {f"memory_{name}_rank{rank['rank']}": rank.get(name) for name in kinds}
    return metrics


def _speed_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    yield "samples per second", human_number(summary["samples_per_s"], form=",.1f"), ""
    if summary["tokens_per_s"] is not None:
        remark = "all that were computed"
        if (learned := summary.get("learned_tokens_per_s")) is not None:
            num_learned = human_number(learned, form=",.0f")
            remark = f"computed, of which {num_learned} are learned (in the loss)"
        yield "tokens per second", human_number(summary["tokens_per_s"], form=",.0f"), remark


def _quality_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """Scores and loss; what did not arrive, or did not count."""
    errors, before = (summary.get(key, {}) for key in ("quality_error", "quality_before"))
    # A run that was stopped is scored at its last step.
    at_step = f" at step {summary.get('quality_at_step')}" * ("quality_at_step" in summary)
    for name, value in summary["quality"].items():
        remark = f"test set{at_step}"
        if (started := before.get(name)) is not None:
            remark += f"; {score_text(name, value=started)} before training"
        yield score_name(name), score_with_error(name, value=value, error=errors.get(name)), remark
    loss = human_number(summary["final_loss"], form=".4f")
    yield "final loss", loss, "training loss of the last step"
    if num_skipped := summary.get("num_skipped_updates"):
        yield "updates skipped", str(num_skipped), "loss or gradient not finite"
    if lost := summary.get("lost_event_lines"):
        yield "event lines lost", str(lost), "figures are of the rest; see rank0.log"
    if lost_files := summary.get("lost_files"):
        yield "files lost", str(len(lost_files)), ", ".join(lost_files)


def _time_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    left_out = summary.get("num_warmup_steps_left_out")
    median_s = summary["step_time_s"]["median"]
    remark = ""
    if left_out:
        first = "the first step" if left_out == 1 else f"{left_out} first steps"
        remark = f"times and rates leave out {first}"
    yield "step time, median", human_seconds(median_s), remark
    if (predicted_s := summary.get("predicted_step_time_s")) is not None:
        # How far the plan was off.
        remark = f"{100 * (predicted_s / median_s - 1):+.0f} % of the median" if median_s else ""
        if epochs := summary.get("predicted_over_epochs"):  # the median is of either kind of step
            remark = f"on average: {epochs_text(epochs)}"
        yield "step time, predicted", human_seconds(predicted_s), remark
    yield "step time, p90", human_seconds(summary["step_time_s"]["p90"]), ""


def _traffic_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    sent = summary["wan_bytes_per_step"]
    use = summary.get("link_utilisation") or {}
    # With replicas the ranks wait for averages in another span.
    remark = ", without the waits of averaging" * ("averaging" in sent)
    if summary["bubble_ratio"] != 0:
        bubble = human_number(summary["bubble_ratio"], form=".3f")
        yield "bubble ratio", bubble, f"waiting / computing{remark}"
    for kind, num_bytes in sent.items():
        # Other kinds, and those of which nothing crossed, say nothing on a line of their own.
        if kind != "other" and num_bytes != 0:
            busy = use.get(kind)
            remark = f"link {human_percent(busy)} used" if busy is not None else ""
            yield f"sent {kind}, per step", human_bytes(num_bytes), remark
    if sent["other"]:
        yield "sent otherwise, per step", human_bytes(sent["other"]), "ids, lengths, control"
    per_token = summary.get("bytes_per_token") or {}  # runs of 0.2.0 have none
    if per_token.get("total") is not None:
        parts = {kind: n for kind, n in per_token.items() if kind not in ("total", "boundaries")}
        at = {f"boundary {name}": n for name, n in per_token.get("boundaries", {}).items()}
        remark = ", ".join(f"{kind} {n:,.1f}" for kind, n in (parts | at).items() if n is not None)
        yield "sent per token", f"{per_token['total']:,.1f} B", remark
    known = summary["compression_ratio"]
    ratios = {kind: UNKNOWN if r is None else f"{r:.2f}x" for kind, r in known.items()}
    total = ratios.pop("total")
    yield "compression ratio", total, ", ".join(f"{kind} {r}" for kind, r in ratios.items())


def epochs_text(epochs: Mapping[str, float]) -> str:
    """Describe the predicted steps of a run that keeps frozen rows. epochs: the values of
    OverEpochs (pricing.py)."""
    first = human_seconds(epochs["first_epoch_s"])
    later = human_seconds(epochs["later_epochs_s"])
    kept = epochs["kept_share"]
    return f"{first} in the first epoch, {later} in later ones with {kept:.0%} of the samples kept"

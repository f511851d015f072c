"""Print a run's closing table from its summary.

`places`: where things were written, label -> text, in print order: the run folder, the exported
model, what the tracker recorded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from xcloud.record.events import MEMORY
from xcloud.record.scores import score_name, score_text
from xcloud.report.progress import human_duration

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 100
UNKNOWN = "-"


def print_report(
    summary: Mapping[str, Any], places: Mapping[str, object], console: Console | None = None
) -> None:
    from rich.console import Console
    from rich.text import Text

    if console is None:
        width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
        console = Console(width=width)

    heading = f"{summary['name']}: {summary['status']}, {summary['num_steps']} steps"
    if summary.get("wall_s") is not None:
        heading += f", {human_duration(summary['wall_s'])}"
    if summary.get("num_resumes") and summary.get("started_at"):
        heading += f", first started {summary['started_at']}"
    console.print()
    console.print(Text(heading, style="bold"), soft_wrap=True)
    if summary.get("cause"):
        console.print(Text(f"cause: {summary['cause']}", style="red"), soft_wrap=True)

    if summary["num_steps"]:
        _print_figures(summary, console)

    # Outside a table: a wrapped path cannot be copied.
    margin = max((len(label) for label in places), default=0)
    for label, place in places.items():
        console.print(Text(f"{label:<{margin}}  {place}"), soft_wrap=True)


def _print_figures(summary: Mapping[str, Any], console: Console) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    figures = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    figures.add_column()
    figures.add_column(justify="right", no_wrap=True)
    figures.add_column(style="dim")
    for label, value, remark in _rows(summary):
        figures.add_row(label, Text(value), remark)
    console.print(figures)

    if summary["compute_s"]:
        clouds = Table(box=box.SIMPLE, pad_edge=False, title_justify="left")
        clouds.title = "time in a step, mean of the ranks of a cloud"
        clouds.add_column("cloud")
        for heading in ("computing", "compressing", "waiting", "averaging"):
            clouds.add_column(heading, justify="right")
        for cloud in summary["compute_s"]:
            kinds = ("compute_s", "codec_s", "waiting_s", "sync_s")
            times = [summary.get(kind, {}).get(cloud) for kind in kinds]
            clouds.add_row(Text(cloud), *(human_seconds(value) for value in times))
        console.print(clouds)

    if summary.get("memory"):
        memory = Table(box=box.SIMPLE, pad_edge=False, title_justify="left")
        memory.title = "memory in training, of the rank of each cloud that takes most"
        memory.add_column("cloud")
        shown = [kind for kind in MEMORY if any(kind in rank for rank in summary["memory"])]
        for heading in shown:
            memory.add_column(heading.replace("_", " "), justify="right")
        fullest: dict[str, Mapping[str, Any]] = {}
        for rank in sorted(summary["memory"], key=_in_use):
            fullest[rank["cloud"]] = rank
        for cloud in sorted(fullest, key=lambda name: fullest[name]["rank"]):
            cells = (human_bytes(fullest[cloud].get(kind)) for kind in shown)
            memory.add_row(Text(cloud), *cells)
        console.print(memory)


def _in_use(memory: Mapping[str, Any]) -> int:
    return int(memory.get("gpu_peak", memory["peak"]))


def human_bytes(num_bytes: float | None) -> str:
    """812 B, 393 kB, 1.57 MB: powers of 1000, three digits."""
    if num_bytes is None:
        return UNKNOWN
    if abs(num_bytes) < 999.5:
        return f"{num_bytes:.0f} B"
    power = min(int(math.log10(abs(num_bytes) * 1.0005) // 3), 4)
    return f"{_three_digits(num_bytes / 1000**power)} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def epochs_text(epochs: Mapping[str, float]) -> str:
    """Predicted steps of a run that keeps frozen rows. epochs: as of plan/kept.py."""
    first, later = human_seconds(epochs["first_epoch_s"]), human_seconds(epochs["later_epochs_s"])
    kept = epochs["kept_share"]
    return f"{first} in the first epoch, {later} in later ones with {kept:.0%} of the samples kept"


def human_seconds(seconds: float | None) -> str:
    """0.21 ms, 412 ms, 1.57 s: three digits."""
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995:
        return f"{_three_digits(1000 * seconds)} ms"
    return f"{_three_digits(seconds)} s"


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, value in summary["quality"].items():
        score = UNKNOWN if value is None else score_text(name, value)
        at_step = summary.get("quality_at_step")
        remark = "test set" + (f" at step {at_step}" if at_step else "")
        if (before := summary.get("quality_before", {}).get(name)) is not None:
            remark += f"; {score_text(name, before)} before training"
        yield score_name(name), score, remark
    yield "final loss", _number(summary["final_loss"], ".4f"), "training loss of the last step"
    left_out = summary.get("num_warmup_steps_left_out")
    remark = f"times and rates leave out {left_out} first steps" if left_out else ""
    if num_skipped := summary.get("num_skipped_updates"):
        yield "updates skipped", str(num_skipped), "loss or gradient not finite"
    if lost := summary.get("lost_event_lines"):
        yield "event lines lost", str(lost), "figures are of the rest; see rank0.log"
    if refused := summary.get("refused_reports"):
        senders = ", ".join(f"{num} of rank {rank}" for rank, num in refused.items())
        yield "reports refused", str(sum(refused.values())), f"{senders}; see the notes of the run"
    if lost_files := summary.get("lost_files"):
        yield "files lost", str(len(lost_files)), ", ".join(lost_files)
    if merges := summary.get("merges"):
        counts = [f"{merges[f'clouds_{what}']} {what}" for what in ("late", "lost", "back")]
        yield (
            "merges",
            str(merges["whole"] + merges["partial"]),
            (f"{merges['partial']} without a cloud; clouds: {', '.join(counts)}"),
        )
    yield "step time, median", human_seconds(summary["step_time_s"]["median"]), remark
    if (predicted_s := summary.get("predicted_step_time_s")) is not None:
        median_s, remark = summary["step_time_s"]["median"], ""
        if epochs := summary.get("predicted_over_epochs"):  # the median is of either kind of step
            remark = f"on average: {epochs_text(epochs)}"
        elif median_s:
            remark = f"{100 * (predicted_s / median_s - 1):+.0f} % of the median"
        yield "step time, predicted", human_seconds(predicted_s), remark
    yield "step time, p90", human_seconds(summary["step_time_s"]["p90"]), ""
    sent, ratio = summary["wan_bytes_per_step"], summary["compression_ratio"]
    remark = "waiting / computing"
    if "averaging" in sent:
        remark += ", without the waits of averaging"
    yield "bubble ratio", _number(summary["bubble_ratio"], ".3f"), remark
    use = summary.get("link_utilisation") or {}
    for kind, num_bytes in sent.items():
        if kind != "other":
            busy = use.get(kind)
            remark = f"link {100 * busy:.0f} % used" if busy is not None else ""
            yield f"sent {kind}, per step", human_bytes(num_bytes), remark
    if sent["other"]:
        yield "sent otherwise, per step", human_bytes(sent["other"]), "ids, lengths, control"
    remark = ", ".join(f"{kind} {_ratio(r)}" for kind, r in ratio.items() if kind != "total")
    yield "compression ratio", _ratio(ratio["total"]), remark
    if summary.get("label_leak_auc") is not None:
        yield "label leak, AUC", _number(summary["label_leak_auc"], ".3f"), _leak_remark(summary)
    if summary.get("token_recovery") is not None:
        remark = f"{100 * summary['token_recovery_baseline']:.1f} % without looking"
        yield "tokens recovered", f"{100 * summary['token_recovery']:.1f} %", remark
    if (privacy := summary.get("privacy")) is not None:
        yield "privacy, epsilon", _number(privacy["epsilon"], ".2f"), _privacy_remark(privacy)
    if (averaged := summary.get("averaging_token_recovery")) is not None:
        remark = f"{100 * summary['averaging_token_recovery_baseline']:.1f} % without looking"
        if (order := summary.get("averaging_order_recovery")) is not None:
            remark += f", word order {100 * order:.1f} %"
        yield "tokens read in averages", f"{100 * averaged:.1f} %", remark
    yield "samples per second", _number(summary["samples_per_s"], ",.1f"), ""
    if summary["tokens_per_s"] is not None:
        yield "tokens per second", _number(summary["tokens_per_s"], ",.0f"), ""
    if "feed" in summary:
        yield from _feed_rows(summary["feed"])


def _feed_rows(feed: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Rows of a one-way job: the consumer's scores and each producer's share."""
    for name in ("precision", "recall"):
        yield name, _number(feed[name], ".3f"), "replaced tokens, last 50 steps"
    yield "bytes per token", _number(feed["bytes_per_token"], ".2f"), "between clouds, counted"
    for name, found in feed["producers"].items():
        share = f"{100 * (found['share_taken'] or 0):.1f} %"
        remark = f"{found['num_batches']} batches, loss {_number(found['loss'], '.3f')}"
        for what in ("slow", "dead"):
            remark += f", {what}" if found["state"] == what else ""
        yield f"fed by {name}", share, remark
    if feed["num_skipped"]:
        yield "batches missed", str(feed["num_skipped"]), "of slow or lost producers"


def _privacy_remark(privacy: Mapping[str, Any]) -> str:
    remark = f"by {privacy['unit']}, delta {privacy['delta']:g}"
    if (sampled := privacy["epsilon_if_sampled"]) is not None:
        remark += f"; {sampled:.2f} if batches were random and secret"
    return remark


def _leak_remark(summary: Mapping[str, Any]) -> str:
    parts = [(kind, summary.get(f"label_leak_auc_{kind}")) for kind in ("gradient", "activation")]
    known = [f"{kind}s {value:.3f}" for kind, value in parts if value is not None]
    return ", ".join([*known, "0.5 = nothing leaks"])


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}x"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"

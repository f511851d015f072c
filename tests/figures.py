"""Every figure of a run, worked out anew from its event log: the definitions of
docs/architecture.md once more, in the plainest way, to compare summary, table and MLflow with."""

from __future__ import annotations

import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
from rich.console import Console

from xcloud.base.units import human_bytes, human_seconds
from xcloud.feature_list import FIGURES
from xcloud.record.events import StepTotals
from xcloud.record.run_record import RunRecord
from xcloud.show.tables import print_report
from xcloud.tracking.mlflow_store import step_metrics

Figures = dict[str, Any]
KINDS = ("compute_s", "codec_s", "waiting_s", "sync_s")


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def figures_of(events: Sequence[Mapping[str, Any]]) -> Figures:
    """Of a pipeline that was not interrupted, whose ranks all report every step."""
    told: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["event"] == "step":
            told[event["step"]].append(event)
    steps = [told[step] for step in sorted(told)]
    timed = steps[min(3, len(steps) // 10) :]
    took_s = [_wall_s(reports) for reports in timed]
    wall_s = sum(took_s)
    flat = [report for reports in timed for report in reports]
    clouds = dict.fromkeys(r["cloud"] for r in sorted(flat, key=lambda r: r["rank"]))
    raw, sent = _summed(steps, "raw"), _summed(steps, "sent")
    coded = [kind for kind in raw if raw[kind]]
    samples, tokens, learned = (
        sum(r.get(name, 0) for r in flat) for name in ("samples", "tokens", "learned")
    )
    busy: dict[str, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    for report in flat:
        for kind, lines in report.get("line_busy_s", {}).items():
            own = busy[kind]
            for to, seconds in lines.items():
                own[report["cloud"], to] += seconds
    scores = {e["split"]: e["values"] for e in events if e["event"] == "quality"}
    return {
        "num_steps": len(steps),
        "step_time_s.median": median(took_s),
        "step_time_s.p90": sorted(took_s)[math.ceil(0.9 * len(took_s)) - 1],
        **{
            f"{kind}.{cloud}": mean(r[kind] for r in flat if r["cloud"] == cloud)
            for kind in KINDS
            for cloud in clouds
        },
        "bubble_ratio": sum(r["waiting_s"] for r in flat) / sum(r["compute_s"] for r in flat),
        **{f"wan_bytes_per_step.{kind}": sent[kind] / len(steps) for kind in sent},
        **{f"compression_ratio.{kind}": _over(raw[kind], sent.get(kind, 0)) for kind in raw},
        "compression_ratio.total": _over(
            sum(raw[kind] for kind in coded), sum(sent[kind] for kind in coded)
        ),
        "samples_per_s": samples / wall_s,
        "tokens_per_s": tokens / wall_s,
        "learned_tokens_per_s": None if learned == samples else learned / wall_s,
        **{
            f"link_utilisation.{kind}": max(busy[kind].values(), default=0.0) / wall_s
            if busy
            else None
            for kind in raw
        },
        "final_loss": _loss([r for r in reports_with_loss(steps)[-1] if "loss" in r]),
        **{f"quality.{name}": value for name, value in scores.get("test", {}).items()},
        **{f"dev_quality.{name}": value for name, value in scores.get("dev", {}).items()},
    }


def check_figures(events: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """That summary, closing table and MLflow say what the events do."""
    wanted = figures_of(events)
    for name, value in wanted.items():
        wanted_here = value if value is None else _rounded(name, value)
        assert _at(summary, name) == wanted_here, (name, _at(summary, name), value)
    check_metrics(wanted, summary)
    check_curves(events)
    check_table(wanted, summary)


def check_metrics(wanted: Figures, summary: Mapping[str, Any]) -> None:
    """In MLflow a figure has its dotted name with underscores, but for the main ones."""
    metrics = RunRecord(summary, FIGURES).metrics
    short = {"step_time_s.median": "step_time_s", "step_time_s.p90": "step_time_p90_s",
             "compression_ratio.total": "compression_ratio"}  # fmt: skip
    for name, value in wanted.items():
        if name.startswith(("sync_s", "dev_quality")) or value is None:
            continue
        key = short.get(name, name.removeprefix("quality.").replace(".", "_"))
        assert metrics[key] == _rounded(name, value), key


def check_curves(events: Sequence[Mapping[str, Any]]) -> None:
    told: dict[int, dict[int, Any]] = defaultdict(dict)
    for event in events:
        if event["event"] == "step":
            told[event["step"]][event["rank"]] = event
    for step, reports in told.items():
        found, own = step_metrics(StepTotals.of(step, reports)), list(reports.values())
        assert found["train/step_s"] == pytest.approx(_wall_s(own), abs=2e-6)
        for kind, num_bytes in _summed([own], "sent").items():
            assert found.get(f"wan/bytes_{kind}", 0) == num_bytes
        for cloud in {report["cloud"] for report in own}:
            waits_s = [r["waiting_s"] for r in own if r["cloud"] == cloud]
            assert found[f"wall_time/waiting_s_{cloud}"] == pytest.approx(mean(waits_s))
        if with_loss := [r for r in own if "loss" in r]:
            assert found["train/loss"] == pytest.approx(_loss(with_loss))


def check_table(wanted: Figures, summary: Mapping[str, Any]) -> None:
    stream = io.StringIO()
    print_report(RunRecord(summary, FIGURES), {}, Console(file=stream, width=300))
    lines = [re.split(r"\s{2,}", line.strip()) for line in stream.getvalue().splitlines()]
    rows = {line[0]: line[1:] for line in lines}
    for kind, value in summary["step_time_s"].items():  # compared with wanted before
        assert rows[f"step time, {kind}"][0] == human_seconds(value)
    assert rows["final loss"][0] == f"{wanted['final_loss']:.4f}"
    bubble = rows.get("bubble ratio", ["0"])  # where nobody waits there is no row
    assert float(bubble[0]) == pytest.approx(wanted["bubble_ratio"], abs=2e-3)
    for name, unit in {"samples_per_s": "samples", "tokens_per_s": "tokens"}.items():
        if wanted[name] is not None:
            shown = float(rows[f"{unit} per second"][0].replace(",", ""))
            assert shown == pytest.approx(wanted[name], rel=2e-3, abs=0.6)
    for name, value in wanted.items():
        head, _, part = name.partition(".")
        if head == "wan_bytes_per_step" and part != "other":
            assert (f"sent {part}, per step" in rows) == bool(value)  # no row of nothing
            if not value:
                continue
            told = rows[f"sent {part}, per step"]
            assert told[0] == human_bytes(round(value))
            if (use := wanted.get(f"link_utilisation.{part}")) is not None:
                percent = int(re.findall(r"link (\d+) % used", told[1])[0])
                assert percent == pytest.approx(100 * use, abs=0.6)
        if head == "quality":
            assert any(row[:1] and row[-1] == "test set" for row in rows.values()), name
    total = wanted["compression_ratio.total"]
    assert rows["compression ratio"][0] == ("-" if total is None else f"{round(total, 3):.2f}x")
    for cloud, cells in rows.items():  # computing, compressing, waiting, averaging
        if f"compute_s.{cloud}" in wanted and len(cells) == 4:
            assert cells == [human_seconds(_at(summary, f"{k}.{cloud}")) for k in KINDS]


def _rounded(name: str, value: float) -> Any:
    """The value to as many digits as a summary has of it; steps of some milliseconds are kept in
    microseconds."""
    if name.startswith("wan_bytes"):
        return pytest.approx(value, abs=0.51)
    is_time = name.partition(".")[0] in (*KINDS, "step_time_s", "final_loss")
    return pytest.approx(value, abs=2e-6 if is_time else 6e-4, rel=1e-4)


def reports_with_loss(steps: Sequence[list[Mapping[str, Any]]]) -> list[list[Mapping[str, Any]]]:
    return [reports for reports in steps if any("loss" in report for report in reports)]


def _wall_s(reports: Sequence[Mapping[str, Any]]) -> float:
    """From when the last rank had ended the update before to when the last one ended this."""
    ended_s = max(report["t"] for report in reports)
    return float(ended_s - max(report["t"] - report["step_s"] for report in reports))


def _summed(steps: Sequence[list[Mapping[str, Any]]], name: str) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for report in (report for reports in steps for report in reports):
        for kind, value in report.get(name, {}).items():
            total[kind] += value
    return dict(total)


def _loss(reports: Sequence[Mapping[str, Any]]) -> float:
    weights = [report.get("learned", 1.0) for report in reports]  # one report alone needs none
    losses = [report["loss"] for report in reports]
    return float(sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights))


def _over(above: float, below: float) -> float | None:
    return above / below if above and below else None


def _at(summary: Mapping[str, Any], name: str) -> Any:
    head, _, part = name.partition(".")
    return summary[head][part] if part else summary[head]

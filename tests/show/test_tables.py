"""The final table: complete, readable without a terminal, paths whole; and what scores are called
and how they are quoted."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from tests.feature_rows import rows_of
from xcloud.base.units import human_bytes, human_seconds, score_name, score_text, shown_scores
from xcloud.feature_list import FIGURES
from xcloud.record.run_figures import OF_EVERY_RUN
from xcloud.record.run_record import RunRecord
from xcloud.record.summary import RunStatistics
from xcloud.record.usage import USAGE
from xcloud.show.tables import Column, print_report, print_table

SUMMARY: dict[str, Any] = {
    "name": "abnet [iwslt]",
    "status": "finished",
    "num_steps": 2000,
    "wall_s": 1234.0,
    "final_loss": 2.1038,
    "quality": {"bleu": 41.92, "chrf": 61.5},
    "quality_error": {"bleu": 0.814},
    "step_time_s": {"median": 0.4123, "p90": 0.5},
    "compute_s": {"source": 0.2, "target": 0.1},
    "codec_s": {"source": 0.02, "target": 0.0042},
    "waiting_s": {"source": 0.1, "target": 1.57},
    "sync_s": {"source": 0.0, "target": 0.0},
    "bubble_ratio": 0.75,
    "wan_bytes_per_step": {"forward": 393216, "backward": 98304, "other": 120},
    "compression_ratio": {"forward": 4.0, "backward": None, "total": 3.2},
    "link_utilisation": {"forward": 0.87, "backward": None},
    "samples_per_s": 77.6,
    "tokens_per_s": 12345.0,
    "learned_tokens_per_s": 678.0,
    "num_warmup_steps_left_out": 3,
}


def printed(summary: dict[str, Any], places: dict[str, object]) -> str:
    stream = io.StringIO()
    print_report(RunRecord(summary, FIGURES), places, Console(file=stream, width=100))
    return stream.getvalue()


EVERYTHING: dict[str, Any] = {
    **SUMMARY,
    "quality_before": {"bleu": 1.5},
    "quality_at_step": 1900,
    "num_resumes": 2,
    "num_steps_done_twice": 30,
    "goodput": 0.75,
    "num_skipped_updates": 4,
    "lost_event_lines": 5,
    "lost_files": ["loss.png", "timeline.json"],
    "predicted_step_time_s": 0.8246,
    "predicted_over_epochs": {"first_epoch_s": 1.0, "later_epochs_s": 0.5, "kept_share": 0.25},
    "wan_bytes_per_step": {"forward": 393216, "backward": 0, "averaging": 2e6, "other": 120},
    "bytes_per_token": {
        "total": 1234.5, "forward": 1000.0, "backward": None, "boundaries": {"0": 1000.0}
    },
    "memory": [{"rank": 1, "peak": 7, "parameters": 2}],
    "lines": [
        {"to": "b", "round_trip_s": 0.05, "bandwidth_bits_per_s": 2e8, "num_cuts": 3,
         "num_outages": 2, "outage_s": 65.0, "sent_again_bytes": 2048},
        {"to": "c", "round_trip_s": None, "bandwidth_bits_per_s": None, "num_cuts": 1},
        {"to": "d", "round_trip_s": 0.1, "bandwidth_bits_per_s": None, "num_outages": 1,
         "outage_s": 2.0, "sent_again_bytes": 0},
        {"to": "e", "round_trip_s": 0.1, "bandwidth_bits_per_s": None, "num_outages": 0},
    ],
    "refused_reports": {"1": 2, "3": 4},
    "evaluation": {
        "arc": {"metrics": {"acc": {"value": 0.5, "stderr": 0.0},
                            "f1": {"value": 0.25, "stderr": None}}}
    },
    "egress_bytes": {"source": 5e9, "target": 1e6},
    "rank_hours": {"source": 1.5, "target": 0.25},
    "cost": {"compute": {"source": 3.0}, "egress": {"source": 0.5}, "total": 3.5},
}  # fmt: skip
ROWS = [
    ("BLEU", "41.92 ± 0.81", "test set at step 1900; 1.50 before training"),
    ("chrF", "61.50", "test set at step 1900"),
    ("final loss", "2.1038", "training loss of the last step"),
    ("updates skipped", "4", "loss or gradient not finite"),
    ("event lines lost", "5", "figures are of the rest; see rank0.log"),
    ("files lost", "2", "loss.png, timeline.json"),
    ("step time, median", "412 ms", "times and rates leave out 3 first steps"),
    (
        "step time, predicted",
        "825 ms",
        "on average: 1.00 s in the first epoch, 500 ms in later ones with 25% of the samples kept",
    ),
    ("step time, p90", "500 ms", ""),
    ("bubble ratio", "0.750", "waiting / computing, without the waits of averaging"),
    ("sent forward, per step", "393 kB", "link 87 % used"),
    ("sent averaging, per step", "2.00 MB", ""),
    ("sent otherwise, per step", "120 B", "ids, lengths, control"),
    ("sent per token", "1,234.5 B", "forward 1,000.0, boundary 0 1,000.0"),
    ("compression ratio", "3.20x", "forward 4.00x, backward -"),
]
ROWS_OF_RUN = [
    (
        "line to b",
        "50 ms round trip",
        "200 Mbit/s while full; down 2 times, 65.0 s; "
        "sent 2.05 kB again after cuts, which the bytes above leave out",
    ),
    ("line to c", "round trip not measured", "never filled; 1 connections cut"),
    ("line to d", "100 ms round trip", "never filled; down once, 2.00 s"),
    ("line to e", "100 ms round trip", "never filled; never down"),
    ("reports refused", "6", "2 of rank 1, 4 of rank 3; see the notes of the run"),
]
ROWS_AT_THE_END = [
    ("left source", "5.00 GB", "in all attempts; its ranks ran 90 min together"),
    ("left target", "1.00 MB", "in all attempts; its ranks ran 15 min together"),
    ("cost", "3.5", "source 3 for ranks and 0.5 for bytes"),
    ("samples per second", "77.6", ""),
    ("tokens per second", "12,345", "computed, of which 678 are learned (in the loss)"),
]
METRICS = {
    "bleu": 41.92,
    "chrf": 61.5,
    "bleu_error": 0.814,
    "step_time_s": 0.4123,
    "step_time_p90_s": 0.5,
    "wan_bytes_per_step": 2393336.0,
    "compression_ratio": 3.2,
    "compression_ratio_forward": 4.0,
    "bytes_per_token": 1234.5,
    "bytes_per_token_forward": 1000.0,
    "bytes_per_token_boundary_0": 1000.0,
    "predicted_step_time_s": 0.8246,
    "final_loss": 2.1038,
    "bubble_ratio": 0.75,
    "samples_per_s": 77.6,
    "tokens_per_s": 12345.0,
    "learned_tokens_per_s": 678.0,
    "num_steps": 2000.0,
    "num_resumes": 2.0,
    "num_steps_done_twice": 30.0,
    "goodput": 0.75,
    "num_skipped_updates": 4.0,
    "line.b.round_trip_s": 0.05,
    "line.b.bandwidth_bits_per_s": 200000000.0,
    "line.b.num_cuts": 3.0,
    "line.b.num_outages": 2.0,
    "line.b.outage_s": 65.0,
    "line.b.sent_again_bytes": 2048.0,
    "line.c.num_cuts": 1.0,
    "line.d.round_trip_s": 0.1,
    "line.d.num_outages": 1.0,
    "line.d.outage_s": 2.0,
    "line.d.sent_again_bytes": 0.0,
    "line.e.round_trip_s": 0.1,
    "line.e.num_outages": 0.0,
    "eval_arc_acc": 0.5,
    "eval_arc_acc_error": 0.0,
    "eval_arc_f1": 0.25,
    "egress_bytes": 5001000000.0,
    "rank_hours": 1.75,
    "cost": 3.5,
    "compute_s_source": 0.2,
    "compute_s_target": 0.1,
    "codec_s_source": 0.02,
    "codec_s_target": 0.0042,
    "waiting_s_source": 0.1,
    "waiting_s_target": 1.57,
    "sync_s_source": 0.0,
    "sync_s_target": 0.0,
    "wan_bytes_per_step_forward": 393216.0,
    "wan_bytes_per_step_backward": 0.0,
    "wan_bytes_per_step_averaging": 2000000.0,
    "wan_bytes_per_step_other": 120.0,
    "link_utilisation_forward": 0.87,
    "memory_peak_rank1": 7.0,
    "memory_parameters_rank1": 2.0,
}


def test_every_row_and_metric_is_shown_to_the_letter() -> None:
    """Of a run that has whatever any run can have, from a pipeline's to a one-way job's."""
    has_run = OF_EVERY_RUN[0]
    before = FIGURES[: FIGURES.index(has_run)]
    after = [one for one in FIGURES if one not in (*before, *OF_EVERY_RUN, USAGE)]
    shown = {id(one): rows_of(one).shown[0] for one in (*before, *after) if rows_of(one).shown}
    summary, metrics = dict(EVERYTHING), dict(METRICS)
    for one in shown.values():
        summary |= one.summary
        metrics |= one.metrics
    record = RunRecord(summary, FIGURES)
    assert record.rows == [
        *ROWS,
        *(row for one in before if id(one) in shown for row in shown[id(one)].rows),
        *ROWS_OF_RUN,
        *(row for one in after if id(one) in shown for row in shown[id(one)].rows),
        *ROWS_AT_THE_END,
    ]
    assert record.metrics == metrics


EVENTS: list[dict[str, Any]] = [
    {"event": "line", "to": "b", "round_trip_s": 0.1, "bandwidth_bits_per_s": 1e8, "num_cuts": 1,
     "num_outages": 1, "outage_s": 5.0, "sent_again_bytes": 10},
    {"event": "line", "to": "c", "num_cuts": 0},
    {"event": "line", "to": "b", "round_trip_s": 0.2, "num_cuts": 2, "outage_s": 1.5},
    {"event": "refused_reports", "sender": 3, "num": 4.0},
]  # fmt: skip
SUMMED = {
    "lines": [
        {"to": "b", "round_trip_s": 0.2, "bandwidth_bits_per_s": 1e8, "num_cuts": 3,
         "num_outages": 1, "outage_s": 6.5, "sent_again_bytes": 10},
        {"to": "c", "round_trip_s": None, "bandwidth_bits_per_s": None, "num_cuts": 0},
    ],
    "refused_reports": {"3": 4},
}  # fmt: skip


def test_what_every_run_tells_is_summed() -> None:
    summed = dict[str, Any]()
    for figure in OF_EVERY_RUN:
        own = [event for event in EVENTS if event["event"] in figure.kinds]
        assert figure.notice is None
        summed |= figure.in_summary(own) if own else {}
    assert summed == SUMMED
    assert RunRecord({}, FIGURES, events=[*EVENTS, {"event": "step", "step": 6}]).marks == []


def test_the_table_says_how_a_run_ended_and_has_times_of_each_cloud() -> None:
    text = " ".join(printed(SUMMARY, {}).split())
    for piece in [
        "abnet [iwslt]: finished, 2000 steps, 21 min",
        "median 412 ms times and rates leave out 3 first steps",
        "backward, per step 98.3 kB",
        "source 200 ms 20.0 ms 100 ms 0.00 ms",
        "target 100 ms 4.20 ms 1.57 s 0.00 ms",
    ]:
        assert piece in text, f"{piece!r} missing in {text}"


def test_a_table_without_headings_has_no_line_below_them() -> None:
    figures, times = printed(SUMMARY, {}).split("time in a step, mean")
    assert "─" not in figures and "─" in times


@pytest.mark.parametrize("width", [22, 40, 60, 80, 120])
def test_a_narrow_window_leaves_out_columns_and_never_a_name(width: int) -> None:
    names = ["none", "affine8+affine8", "fp16(svd(0.6))+int8", "日本+int4"]
    columns = [
        Column("setting", right=False), Column("runs", spare=2), Column("BLEU"),
        Column("paper: BLEU", spare=3), Column("step time"), Column("share", spare=1),
    ]  # fmt: skip
    stream = io.StringIO()
    rows = [[name, "1", "41.92 ± 0.81", "39.60", "412 ms", "100 %"] for name in names]
    print_table(Console(file=stream, width=width), columns, rows)
    text = stream.getvalue()
    assert max(cell_len(line) for line in text.splitlines() if "no room" not in line) <= width
    heading = text.splitlines()[1]
    shown = [column.heading for column in columns if column.heading in heading]
    assert shown[0] == "setting" and "…" not in text
    for name in names:
        assert any(line.strip().startswith(name) for line in text.splitlines())
    order = ["setting", "BLEU", "step time", "share", "runs", "paper: BLEU"]
    assert {*shown} == {*order[: len(shown)]}, "in this order columns are left out"
    left_out = [column.heading for column in columns if column.heading not in shown]
    assert ("no room here for: " + ", ".join(left_out) in text) is bool(left_out)
    assert len(shown) == {22: 1, 40: 2, 60: 4, 80: 6, 120: 6}[width]


def test_a_name_wider_than_the_window_is_folded_and_not_cut() -> None:
    stream = io.StringIO()
    print_table(Console(file=stream, width=20), ["", "x"], [["abcdefghij" * 3, "1"]])
    assert "abcdefghij" * 3 in "".join(stream.getvalue().split())


def test_path_longer_than_the_window_stays_in_one_line() -> None:
    path = Path("/" + "long folder [name]/" * 12)
    lines = printed(SUMMARY, {"run folder": path, "summary": "s"}).splitlines()
    assert f"run folder  {path}" in lines and "summary     s" in lines


def test_without_a_terminal_the_table_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(RunRecord(SUMMARY, FIGURES), {})
    text = capsys.readouterr().out
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 100


def test_run_without_a_step_says_its_cause_and_shows_no_empty_table() -> None:
    summary = RunStatistics(2).summary(
        name="a", status="failed", commit="unknown", cause="rank 1 (target) died"
    )
    text = printed(summary, {})
    assert "a: failed, 0 steps" in text and "cause: rank 1 (target) died" in text
    assert "step time" not in text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        *((None, "-"), (0, "0 B"), (812, "812 B"), (999.6, "1.00 kB"), (393216, "393 kB")),
        *((99_949, "99.9 kB"), (99_950, "100 kB")),
        *((999_600, "1.00 MB"), (1_572_864, "1.57 MB"), (3e9, "3.00 GB"), (2e16, "20000 TB")),
    ],
)
def test_bytes_have_three_digits(num_bytes: float | None, text: str) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00021, "0.21 ms"), (0.0999, "99.9 ms"), (0.9996, "1.00 s"), (12.34, "12.3 s")],
)
def test_seconds_have_three_digits(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_memory_is_of_the_fullest_rank_of_each_cloud() -> None:
    sizes = {"parameters": 4e6, "activations": 1.5e6}
    memory = [
        {"rank": 0, "cloud": "source", "peak": 2e9, **sizes},
        {"rank": 1, "cloud": "source", "peak": 3e9, **sizes},
        {"rank": 2, "cloud": "target", "peak": 1e9, **sizes},
    ]
    text = " ".join(printed(SUMMARY | {"memory": memory}, {}).split())
    for part in ("source target", "peak 3.00 GB 1.00 GB", "parameters 4.00 MB 4.00 MB",
                 "activations 1.50 MB 1.50 MB"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("bleu", 0.4213, "0.42"), ("bleu", 41.92, "41.92"), ("accuracy", 92.231, "92.23"),
     ("label_leak_auc", 0.57312, "0.5731"), ("something", 2.5, "2.50"),
     ("loss", 3.21987, "3.2199"), ("replaced_loss", 0.352846, "0.3528")],
)  # fmt: skip
def test_decimals_follow_the_score_not_its_value(name: str, value: float, text: str) -> None:
    assert score_text(name, value) == text


def test_names_and_what_a_table_shows() -> None:
    assert (score_name("f1"), score_name("xx")) == ("F1", "xx")
    assert shown_scores(["bleu", "chrf"]) == ["bleu"]
    assert shown_scores(["exact_match", "f1", "exact_match"]) == ["exact_match", "f1"]
    assert shown_scores(["accuracy", "accuracy_de", "label_leak_auc"])[1:] == ["label_leak_auc"]
    assert shown_scores([]) == []

"""The figures of summary.json, from events made by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from experiments.claims.archive import figures_of
from xcloud.feature_list import FIGURES
from xcloud.layout import Price
from xcloud.record.evaluation import evaluation_metrics
from xcloud.record.feature_figures import FeatureFigure
from xcloud.record.run_figures import OF_EVERY_RUN
from xcloud.record.run_record import RunRecord
from xcloud.record.summary import RunStatistics, Summary, feed_log, other_memory, write_summary
from xcloud.record.usage import Usage

REQUIRED = {
    "bytes_per_token",
    *("name", "status", "seed", "commit", "profile", "final_loss", "quality", "step_time_s"),
    *("compute_s", "codec_s", "waiting_s", "bubble_ratio", "wan_bytes_per_step"),
    "wan_sent_again_bytes",
    *("compression_ratio", "samples_per_s", "tokens_per_s"),
    *("learned_tokens_per_s", "num_steps", "highest_learning_rate"),
}
ALLOWED = REQUIRED | {
    *("cause", "dev_quality", "signatures", "started_at", "wall_s", "sync_s"),
    *("link_utilisation", "xcloud_version", "num_warmup_steps_left_out"),
    *("num_skipped_updates", "lost_files", "num_lost_checkpoints", "memory"),
    *("egress_bytes", "rank_hours"),
    *("num_cut", "num_resumes", "num_steps_done_twice", "goodput"),
    *("quality_before", "quality_error", "dev_quality_error"),
}


def table_of(summary: Summary) -> str:
    return RunRecord(summary, FIGURES).markdown


def feed_step(statistics: RunStatistics, step: int, **fields: Any) -> None:
    """Two ranks: source sends 100 bytes forward of 400, target 50 backward of 400."""
    common = {"event": "step", "t": 1000.0 + step, "step": step, "compute_s": 0.2}
    source = {
        "sent": {"forward": 100, "backward": 0, "other": 6},
        "raw": {"forward": 400, "backward": 0},
        "step_s": 0.5,
        "waiting_s": 0.1,
    }
    target = {
        "sent": {"forward": 0, "backward": 50, "other": 4},
        "raw": {"forward": 0, "backward": 400},
        "step_s": 0.4,
        "waiting_s": 0.2,
        "loss": 5.0 - step,
        "samples": 8,
        "tokens": 100,
        "learned": 25,
    }
    source = {**common, "rank": 0, "cloud": "source", **source, **fields}
    for event in (source, {**common, "rank": 1, "cloud": "target", **target}):
        statistics.feed({**event, "t": event["t"] - 0.5 + event["step_s"]})  # both begin at once


def summarise(statistics: RunStatistics, **fields: Any) -> Summary:
    return statistics.summary(**{"name": "a", "status": "finished", "commit": "1a2b3c4", **fields})


def test_texts_that_were_cut_are_counted_by_what_became_of_them_and_by_split() -> None:
    statistics = RunStatistics(2)
    for _ in range(2):  # loaded again after a resume
        for split, num in (("train", 248), ("dev", 3)):
            cut = {"field": "source texts cut", "split": split, "num": num, "of": 300}
            statistics.feed({"event": "cut", "rank": 0, "cloud": "a", **cut})
    assert summarise(statistics)["num_cut"] == {"source texts cut": {"train": 248, "dev": 3}}
    assert summarise(RunStatistics(2))["num_cut"] == {}


def test_traffic_of_any_name_is_counted_and_has_a_ratio_where_it_carries_tensors() -> None:
    statistics = RunStatistics(2)
    sent = {"forward": 100, "averaging": 30, "votes": 2}
    feed_step(statistics, 1, sent=sent, raw={"forward": 400, "averaging": 240})
    summary = summarise(statistics)

    sums = {"forward": 100, "backward": 50, "other": 4, "averaging": 30, "votes": 2}
    assert summary["wan_bytes_per_step"] == sums
    ratios = {"forward": 4.0, "backward": 8.0, "averaging": 8.0, "total": 52 / 9}
    assert summary["compression_ratio"] == pytest.approx(ratios)
    assert summary["link_utilisation"].keys() == {"forward", "backward", "averaging"}


def test_bytes_per_token_are_counted_by_direction_and_of_each_boundary() -> None:
    statistics = RunStatistics(2)
    boundaries = {"0 forward": 60, "2 forward": 40, "10 forward": 0, "0 backward": 0}
    feed_step(statistics, 1, boundaries=boundaries)
    feed_step(statistics, 2, boundaries={**boundaries, "0 backward": 20})
    per_token = summarise(statistics)["bytes_per_token"]

    sums = {"forward": 1.0, "backward": 0.5, "total": 1.5}  # 200 tokens
    each = {"0 forward": 0.6, "0 backward": 0.1, "2 forward": 0.4, "10 forward": 0.0}
    assert per_token == {**sums, "boundaries": each}
    assert [*per_token["boundaries"]] == [*each]

    one = RunStatistics(2)
    feed_step(one, 1, boundaries={"1 forward": 100}, raw={"averaging": 9}, sent={"averaging": 30})
    per_token = summarise(one)["bytes_per_token"]
    assert per_token == {"forward": None, "backward": 0.5, "averaging": 0.3, "total": 0.8}
    assert summarise(RunStatistics(2))["bytes_per_token"]["total"] is None


def test_bytes_per_token_stand_in_the_table_and_the_tracker_and_are_no_must() -> None:
    statistics = RunStatistics(2)
    feed_step(statistics, 1, boundaries={"0 forward": 60, "1 forward": 40})
    summary = summarise(statistics)
    shown = "| sent per token | 1.5 B | forward 1.0, backward 0.5, boundary 0 forward 0.6"
    assert shown in table_of(summary)
    metrics = RunRecord(summary).metrics
    assert metrics["bytes_per_token"] == 1.5 and metrics["bytes_per_token_backward"] == 0.5
    assert metrics["bytes_per_token_boundary_1 forward"] == 0.4
    assert figures_of({**summary, "quality": {}})["bytes_per_token"] == 1.5

    del summary["bytes_per_token"]  # as in an archived run of 0.2.0
    assert "per token" not in table_of(summary)
    assert not [name for name in RunRecord(summary).metrics if "per_token" in name]
    assert "bytes_per_token" not in figures_of({**summary, "quality": {}})


def test_figures_of_two_equal_steps() -> None:
    statistics = RunStatistics(2)
    feed_step(statistics, 1)
    feed_step(statistics, 2)
    statistics.feed(
        {
            "event": "quality",
            "t": 1010.0,
            "rank": 0,
            "split": "test",
            "step": 2,
            "values": {"bleu": 41.9249, "accuracy": 92.2312},
            "errors": {"bleu": 0.8149, "accuracy": 1.0},
            "signature": {"bleu": "nrefs:1"},
        }
    )
    summary = summarise(statistics, seed=3, profile="full")

    assert summary["step_time_s"] == pytest.approx(
        {"median": 0.5, "p90": 0.5}
    )  # the slower rank's
    assert summary["compute_s"] == pytest.approx({"source": 0.2, "target": 0.2})
    assert summary["waiting_s"] == pytest.approx({"source": 0.1, "target": 0.2})
    assert summary["bubble_ratio"] == pytest.approx(0.75)  # (0.1 + 0.2) / (0.2 + 0.2)
    assert summary["wan_bytes_per_step"] == {"forward": 100, "backward": 50, "other": 10}
    assert summary["compression_ratio"] == {"forward": 4.0, "backward": 8.0, "total": 16 / 3}
    assert summary["samples_per_s"] == 16.0 and summary["tokens_per_s"] == 200.0
    assert summary["learned_tokens_per_s"] == 50.0
    assert summary["link_utilisation"] == {"forward": None, "backward": None}
    assert summary["final_loss"] == 3.0 and summary["num_steps"] == 2
    assert summary["quality"] == {"bleu": 41.9249, "accuracy": 92.2312}, "as measured"
    assert summary["quality_error"] == {"bleu": 0.8149, "accuracy": 1.0}
    assert summary["signatures"] == {"bleu": "nrefs:1"}
    assert summary["started_at"] == "1970-01-01T00:16:41+00:00" and summary["wall_s"] == 9.0
    assert (summary["seed"], summary["profile"], summary["commit"]) == (3, "full", "1a2b3c4")


def test_keys_are_the_agreed_ones() -> None:
    finished = summarise(RunStatistics(2))
    failed = summarise(RunStatistics(2), status="failed", cause="rank 1 died")
    assert set(finished) == ALLOWED - {"cause"}
    assert set(failed) == ALLOWED and failed["cause"] == "rank 1 died"


def test_what_was_scored_before_the_first_step_is_not_taken_for_the_result() -> None:
    statistics = RunStatistics(2)
    quality = {"event": "quality", "split": "test", "signature": {}}
    statistics.feed({**quality, "step": 0, "values": {"perplexity": 185.6}})
    assert summarise(statistics)["quality"] == {}
    statistics.feed({**quality, "step": 300, "values": {"perplexity": 95.2}})
    found = summarise(statistics)
    assert found["quality"] == {"perplexity": 95.2}
    assert found["quality_before"] == {"perplexity": 185.6}


@pytest.mark.parametrize(("num_steps", "left_out"), [(9, 0), (10, 1), (29, 2), (30, 3), (200, 3)])
def test_warm_up_steps_count_for_bytes_but_not_for_times(num_steps: int, left_out: int) -> None:
    statistics = RunStatistics(2)
    for step in range(1, num_steps + 1):
        slow = {"step_s": 9.0, "waiting_s": 9.0, "sent": {"forward": 100 + 10 * num_steps}}
        feed_step(statistics, step, **(slow if step <= left_out else {}))
    summary = summarise(statistics)

    assert summary["num_warmup_steps_left_out"] == left_out
    assert summary["step_time_s"] == pytest.approx({"median": 0.5, "p90": 0.5})
    assert summary["waiting_s"]["source"] == pytest.approx(0.1)
    assert summary["samples_per_s"] == pytest.approx(16.0)
    assert summary["wan_bytes_per_step"]["forward"] == 100 + 10 * left_out


def test_p90_is_the_nearest_rank() -> None:
    statistics = RunStatistics(2)
    for step in range(1, 10):
        feed_step(statistics, step, step_s=float(step))
    assert summarise(statistics)["step_time_s"] == {"median": 5.0, "p90": 9.0}


def test_run_that_failed_before_its_first_step_has_a_summary() -> None:
    statistics = RunStatistics(2)
    statistics.feed({"event": "start", "rank": 0, "cloud": "source", "t": 5.0, "headline": ""})
    summary = summarise(statistics, status="failed", cause="no data")

    assert summary["num_steps"] == 0 and summary["quality"] == {} and summary["compute_s"] == {}
    assert summary["step_time_s"] == {"median": None, "p90": None}
    assert summary["wan_bytes_per_step"] == {"forward": None, "backward": None, "other": None}
    assert summary["compression_ratio"] == {"forward": None, "backward": None, "total": None}
    assert summary["bubble_ratio"] is None and summary["samples_per_s"] is None


def test_steps_that_a_lost_rank_never_reported_do_not_count() -> None:
    statistics = RunStatistics(3)
    feed_step(statistics, 1)
    assert summarise(statistics, status="failed")["num_steps"] == 0


def test_ratio_is_null_where_nothing_crosses_and_total_needs_tensors() -> None:
    statistics = RunStatistics(1)
    statistics.feed(
        {
            "event": "step",
            "rank": 0,
            "cloud": "source",
            "t": 1.0,
            "step": 1,
            "step_s": 1.0,
            "sent": {"forward": 100, "backward": 0, "other": 900},
            "raw": {"forward": 400, "backward": 0},
        }
    )
    ratio = summarise(statistics)["compression_ratio"]
    assert ratio == {"forward": 4.0, "backward": None, "total": 4.0}


def test_a_links_use_is_that_of_the_busiest_line() -> None:
    """Of three clouds in a row and a way back: lines do not add up, ranks and steps do."""
    statistics = RunStatistics(2)
    for step in (1, 2):
        there = {"forward": {"target": 0.1 * step, "third": 0.05}, "backward": {"third": 0.01}}
        feed_step(statistics, step, line_busy_s=there)
    found = summarise(statistics)["link_utilisation"]
    assert found == pytest.approx({"forward": 0.3, "backward": 0.02})  # 0.3 s and 0.02 s of 1 s


def test_one_way_returns_the_totals_of_a_completed_step() -> None:
    statistics = RunStatistics(1)
    event = {"event": "step", "rank": 0, "cloud": "a", "t": 9.0, "step": 7, "step_s": 1.0}
    totals = statistics.feed(event)
    assert totals is not None and totals.step == 7


def test_summary_is_written_whole_and_readable_by_any_parser(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_summary(path, {"name": "año", "final_loss": math.nan, "list": [math.inf, 1]})

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    read = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    assert read == {"name": "año", "final_loss": None, "list": [None, 1]}
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_went_on_says_what_it_lost() -> None:
    statistics = RunStatistics(1)
    step = {"event": "step", "rank": 0, "cloud": "a", "step_s": 1.0, "loss": 1.0}
    events = [
        *({**step, "step": number, "t": 10.0 * number} for number in (1, 2, 3)),
        {"event": "resume", "rank": 0, "cloud": "a", "t": 50.0, "step": 2},
        {**step, "step": 3, "t": 60.0},
        {"event": "lost_checkpoint", "rank": 0, "cloud": "a", "t": 60.0, "step": 3},
    ]
    feed_log(statistics, events)
    found = statistics.summary(name="x", status="finished", commit="c")

    assert found["num_steps"] == 3 and found["wall_s"] == 50.0
    assert (found["num_resumes"], found["num_steps_done_twice"], found["goodput"]) == (1, 1, 0.4)
    assert found["num_lost_checkpoints"] == 1


def test_wall_time_leaves_out_what_lay_between_two_attempts_and_a_score_says_its_step() -> None:
    statistics = RunStatistics(1)
    rank_0 = {"rank": 0, "cloud": "a"}
    step = {**rank_0, "event": "step", "step_s": 1.0, "loss": 1.0}
    loading = {**rank_0, "event": "phase", "name": "loading"}
    test = {**rank_0, "event": "quality", "split": "test", "step": 1, "values": {"bleu": 1.0}}
    events = [
        {**loading, "t": 1000.0},
        {**step, "step": 1, "t": 1010.0},
        {**test, "t": 1012.0},
        {**loading, "t": 9000.0},
        {**rank_0, "event": "resume", "t": 9001.0, "step": 1},
        {**step, "step": 2, "t": 9005.0},
    ]
    feed_log(statistics, events)
    found = statistics.summary(name="x", status="failed", commit="c")

    assert found["wall_s"] == 12.0 + 5.0
    assert found["started_at"] == "1970-01-01T00:16:40+00:00"
    assert found["quality_at_step"] == 1


def test_a_figure_of_a_feature_is_written_down_once() -> None:
    """Summary, closing table and tracker show whatever stands in the one list of figures."""
    figure = FeatureFigure(
        kinds=("melt",),
        in_summary=lambda events: {"num_melts": len(events)},
        rows=lambda summary: iter([("melts", str(summary["num_melts"]), "of ice")]),
        metrics=lambda summary: iter([("num_melts", summary["num_melts"])]),
    )
    run = RunStatistics(2, (figure,))
    feed_step(run, 1)
    for _ in range(3):
        run.feed({"event": "melt", "rank": 0, "cloud": "a", "t": 1.0})
    summary = summarise(run)
    assert summary["num_melts"] == 3
    record = run.record(summary, (figure,))
    assert "| melts | 3 | of ice |" in record.markdown
    assert record.metrics["num_melts"] == 3.0


def test_the_closing_table_leaves_out_what_never_crosses() -> None:
    """Under local updates nothing goes forward, and nobody waits inside a step."""
    run = RunStatistics(2)
    feed_step(run, 1)
    summary = summarise(run)
    sent = {"forward": 0, "backward": 0, "averaging": 4000, "other": 0}
    shown = table_of({**summary, "wan_bytes_per_step": sent, "bubble_ratio": 0.0})
    assert "sent averaging" in shown
    for row in ("sent forward", "sent backward", "sent otherwise", "bubble ratio"):
        assert row not in shown
    crossing = {**sent, "forward": 1000}
    assert "sent forward" in table_of({**summary, "wan_bytes_per_step": crossing})


[LINES] = [figure for figure in OF_EVERY_RUN if "line" in figure.kinds]


def line_event(**fields: Any) -> dict[str, Any]:
    measured = {"round_trip_s": 0.1, "bandwidth_bits_per_s": None, "num_cuts": 54}
    return {"to": "rank 1 of b", **measured, "num_outages": 1, "outage_s": 20.0,
            "sent_again_bytes": 3_000_000, **fields}  # fmt: skip


def test_a_line_has_one_row_whose_outages_of_all_attempts_are_counted() -> None:
    first = line_event()
    resumed = line_event(
        round_trip_s=None, bandwidth_bits_per_s=48e6, num_cuts=0, num_outages=0, outage_s=0.0,
        sent_again_bytes=0,
    )  # fmt: skip
    summary = LINES.in_summary([first, resumed])
    assert summary == {"lines": [line_event(bandwidth_bits_per_s=48e6)]}
    [(label, value, remark)] = LINES.rows(summary)
    assert (label, value) == ("line to rank 1 of b", "100 ms round trip")
    assert remark == (
        "48 Mbit/s while full; down once, 20.0 s; sent 3.00 MB again after cuts, which the bytes "
        "above leave out"
    )
    assert dict(LINES.metrics(summary))["line.rank 1 of b.num_outages"] == 1

    steady = LINES.in_summary([resumed])
    assert next(LINES.rows(steady))[2] == "48 Mbit/s while full; never down"
    earlier = {"lines": [{"to": "b", "round_trip_s": None, "bandwidth_bits_per_s": None,
                          "num_cuts": 2}]}  # fmt: skip
    assert next(LINES.rows(earlier))[2] == "never filled; 2 connections cut"


def test_bytes_that_were_sent_again_are_summed_over_ranks_and_steps() -> None:
    run = RunStatistics(2)
    for step in (1, 2):
        for rank in (0, 1):
            again = {"sent_again": 1000 * step + rank} if step == 2 or rank == 0 else {}
            run.feed({"event": "step", "rank": rank, "cloud": "ab"[rank], "t": 1.0 * step,
                      "step": step, "step_s": 0.1, **again})  # fmt: skip
    assert run.summary(name="", status="finished")["wan_sent_again_bytes"] == 5001


def test_an_error_of_exactly_0_is_an_error_that_was_measured() -> None:
    metrics = {"acc": {"value": 1.0, "stderr": 0.0}, "f1": {"value": 0.5, "stderr": None}}
    found = dict(evaluation_metrics({"evaluation": {"copa": {"metrics": metrics}}}))
    assert [name for name in found if name.endswith("_error")] == ["eval_copa_acc_error"]
    assert found["eval_copa_acc_error"] == 0.0


def test_a_cost_counts_all_attempts_and_what_crosses_outside_steps() -> None:
    statistics = RunStatistics(2, prices={"source": Price(hour=36.0, gb_out=1e6)})
    for start in (1000.0, 2000.0):  # a second attempt repeats the only step
        for rank, cloud in enumerate(("source", "target")):
            loading = {"event": "phase", "name": "loading", "rank": rank, "cloud": cloud}
            statistics.feed({**loading, "t": start})
        if start == 2000.0:
            statistics.feed(
                {"event": "resume", "rank": 0, "cloud": "source", "t": start, "step": 0}
            )
        feed_step(statistics, int(start) - 999, sent_again=7)  # step ends at 2 * start - 998.5
    outside = {"event": "sent_outside", "rank": 0, "cloud": "source", "num_bytes": 80}
    statistics.feed({**outside, "t": 3010.0})
    found = summarise(statistics)

    assert found["num_steps"] == 1 and found["num_resumes"] == 1
    assert found["egress_bytes"] == {"source": 2 * (100 + 6 + 7) + 80, "target": 2 * (50 + 4)}
    hours = found["rank_hours"]["source"]
    assert hours == pytest.approx((1.0 + 1010.0) / 3600)
    assert found["cost"]["compute"] == {"source": pytest.approx(36 * hours)}
    assert found["cost"]["egress"] == {"source": pytest.approx(1e6 * 306 / 1e9)}
    assert found["cost"]["total"] == pytest.approx(36 * hours + 0.306)
    rows = table_of(found)
    assert "| left source | 306 B |" in rows and "| cost |" in rows


@pytest.mark.parametrize(
    ("rank", "other"),
    [
        ({"peak": 10, "program": 4, "parameters": 3, "checkpoint": 1}, {"other": 2}),
        ({"peak": 5, "parameters": 3, "activations": 4}, {"other": 0}),
        ({"peak": 5, "gpu_peak": 9, "program": 4, "parameters": 3, "queued": 1}, {"other": 5}),
        ({"parameters": 3}, {}),
    ],
)
def test_other_memory_is_what_of_the_peak_nothing_explains(
    rank: dict[str, int], other: dict[str, int]
) -> None:
    assert other_memory(rank) == other


def test_a_cost_is_that_of_all_clouds_with_a_price() -> None:
    usage = Usage({"a": Price(hour=3600.0, gb_out=1e9), "b": Price(hour=7200.0, gb_out=2e9)})
    for rank, cloud in enumerate(("a", "b", "c")):
        usage.feed({"event": "phase", "name": "loading", "rank": rank, "cloud": cloud, "t": 5.0})
        sent = {"event": "step", "rank": rank, "cloud": cloud, "sent": {"forward": 10}}
        usage.feed(sent | {"t": 7.0})
    found = usage.summary()
    assert found["egress_bytes"] == {"a": 10, "b": 10, "c": 10}
    assert found["cost"]["compute"] == pytest.approx({"a": 2.0, "b": 4.0})
    assert found["cost"]["egress"] == pytest.approx({"a": 10.0, "b": 20.0})
    assert found["cost"]["total"] == pytest.approx(36.0)


def test_a_run_without_prices_has_no_cost() -> None:
    statistics = RunStatistics(2)
    feed_step(statistics, 1)
    assert "cost" not in summarise(statistics)


MEASURED: dict[str, Any] = {
    "num_steps": 9, "quality": {"bleu": 31.25, "perplexity": 8.5}, "quality_error": {"bleu": 0.5},
    "quality_before": {"bleu": 2.0}, "quality_at_step": 7, "final_loss": 1.23456,
    "num_skipped_updates": 2, "lost_event_lines": 3, "lost_files": ["a", "b"],
    "num_warmup_steps_left_out": 2, "step_time_s": {"median": 0.5, "p90": 0.75},
    "predicted_step_time_s": 0.6, "bubble_ratio": 0.125, "link_utilisation": {"forward": 0.25},
    "wan_bytes_per_step": {"forward": 2000, "backward": 0, "averaging": 500, "other": 12},
    "bytes_per_token": {"total": 12.34, "forward": 10.0, "backward": None, "boundaries": {"1": 7}},
    "compression_ratio": {"forward": 4.0, "backward": None, "total": 3.5},
    "samples_per_s": 1234.56, "tokens_per_s": 5678.9, "learned_tokens_per_s": 1000.4,
    "compute_s": {"a": 0.1, "b": 0.2}, "codec_s": {"a": 0.01}, "waiting_s": {"b": 0.3},
    "memory": [
        {"rank": 0, "cloud": "a", "peak": 5e6, "parameters": 1e6, "gpu_peak": 1e6},
        {"rank": 1, "cloud": "a", "peak": 4e6, "parameters": 2e6, "gpu_peak": 2e6},
        {"rank": 2, "cloud": "b", "peak": 3e6, "parameters": 3e6},
    ],
}  # fmt: skip


def test_the_closing_table_says_what_was_measured_to_the_letter() -> None:
    record = RunRecord(MEASURED)
    assert record.rows == [
        ("BLEU", "31.25 ± 0.50", "test set at step 7; 2.00 before training"),
        ("perplexity", "8.50", "test set at step 7"),
        ("final loss", "1.2346", "training loss of the last step"),
        ("updates skipped", "2", "loss or gradient not finite"),
        ("event lines lost", "3", "figures are of the rest; see rank0.log"),
        ("files lost", "2", "a, b"),
        ("step time, median", "500 ms", "times and rates leave out 2 first steps"),
        ("step time, predicted", "600 ms", "+20 % of the median"),
        ("step time, p90", "750 ms", ""),
        ("bubble ratio", "0.125", "waiting / computing, without the waits of averaging"),
        ("sent forward, per step", "2.00 kB", "link 25 % used"),
        ("sent averaging, per step", "500 B", ""),
        ("sent otherwise, per step", "12 B", "ids, lengths, control"),
        ("sent per token", "12.3 B", "forward 10.0, boundary 1 7.0"),
        ("compression ratio", "3.50x", "forward 4.00x, backward -"),
        ("samples per second", "1,234.6", ""),
        ("tokens per second", "5,679", "computed, of which 1,000 are learned (in the loss)"),
    ]
    times, memory = record.tables
    assert times[2] == [["a", "100 ms", "10.0 ms", "-", "-"], ["b", "200 ms", "-", "300 ms", "-"]]
    # Of the ranks of a cloud with GPUs the one whose GPU is fullest counts.
    assert memory[1:] == (["", "a", "b"], [
        ["peak", "4.00 MB", "3.00 MB"],
        ["gpu peak", "2.00 MB", "-"],
        ["parameters", "2.00 MB", "3.00 MB"],
    ])  # fmt: skip


def test_the_closing_table_leaves_out_what_did_not_happen() -> None:
    kept = ("step_time_s", "compression_ratio", "samples_per_s", "tokens_per_s", "final_loss")
    few: dict[str, Any] = {name: MEASURED[name] for name in kept}
    epochs = {"first_epoch_s": 1.0, "later_epochs_s": 0.5, "kept_share": 0.75}
    few |= {
        "num_steps": 9, "quality": {}, "num_warmup_steps_left_out": 1, "bubble_ratio": 0,
        "wan_bytes_per_step": {"forward": None, "other": 0}, "compute_s": {},
        "predicted_step_time_s": 0.6, "predicted_over_epochs": epochs,
    }  # fmt: skip
    record = RunRecord(few)
    over = "1.00 s in the first epoch, 500 ms in later ones with 75% of the samples kept"
    assert record.rows == [
        ("final loss", "1.2346", "training loss of the last step"),
        ("step time, median", "500 ms", "times and rates leave out the first step"),
        ("step time, predicted", "600 ms", f"on average: {over}"),
        ("step time, p90", "750 ms", ""),
        ("sent forward, per step", "-", ""),
        ("compression ratio", "3.50x", "forward 4.00x, backward -"),
        ("samples per second", "1,234.6", ""),
        ("tokens per second", "5,679", "all that were computed"),
    ]
    assert not record.tables


def test_a_table_of_runs_compares_every_figure_under_its_name() -> None:
    found = RunRecord(MEASURED).metrics
    assert found.items() >= {
        "bleu": 31.25, "bleu_error": 0.5, "step_time_s": 0.5, "step_time_p90_s": 0.75,
        "wan_bytes_per_step": 2512.0, "compression_ratio": 3.5, "compression_ratio_forward": 4.0,
        "bytes_per_token": 12.34, "bytes_per_token_forward": 10.0, "num_skipped_updates": 2.0,
        "bytes_per_token_boundary_1": 7.0, "compute_s_b": 0.2, "waiting_s_b": 0.3,
        "wan_bytes_per_step_averaging": 500.0, "link_utilisation_forward": 0.25,
        "memory_gpu_peak_rank1": 2e6, "memory_parameters_rank2": 3e6,
    }.items()  # fmt: skip
    absent = {"compression_ratio_backward", "memory_gpu_peak_rank2", "goodput", "num_resumes"}
    assert not absent & found.keys()
    again = {"num_resumes": 1, "num_steps_done_twice": 3, "goodput": 0.5}
    resumed = RunRecord({**MEASURED, **again, "num_skipped_updates": 0}).metrics
    assert resumed.items() >= again.items() and "num_skipped_updates" not in resumed

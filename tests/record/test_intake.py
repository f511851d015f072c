"""Reports of other ranks are input: rank 0 writes down what an honest rank may tell, and nothing
else."""

import ast
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.event_lines import DEEP, MAX_STEPS, SCORERS, STEP, Desk
from tests.feature_rows import feature_rows
from tests.logged import Log
from tests.toy import toy_config
from xcloud.base.errors import FrameError
from xcloud.feature_list import FIGURES
from xcloud.job import config as configs
from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.record import intake
from xcloud.record.events import EVENTS_FILE, LOST_LINES_FILE, EventReader
from xcloud.record.intake import (
    BURST_BYTES,
    BYTES_PER_S,
    MAX_NAMES,
    MAX_SCORES,
    ReportIntake,
    kinds_of,
)
from xcloud.record.reporter import Reporter
from xcloud.record.summary import RunStatistics, read_summary
from xcloud.security.audit import audit_file
from xcloud.show import following
from xcloud.show.following import main
from xcloud.show.monitor import Monitor

OF_RANK_0 = {
    "data": "name digest rows",
    "resume": "step changed",
    "refused_reports": "sender num reason",
    "line": "to round_trip_s bandwidth_bits_per_s num_cuts num_outages outage_s sent_again_bytes",
    **{event: own for rows in feature_rows().values() for event, own in rows.of_rank_0.items()},
}
"""Fields of what nobody but rank 0 reports, of all."""
FINISH = {"event": "finish"}
TIMELINE = {
    "event": "timeline", "step": 1, "machine": "f", "started_us": 0, "unix_us": 0, "step_us": 1,
    "spans": [], "sent": [], "received": [],
}  # fmt: skip
STOP = {"event": "stop"}
XCLOUD = Path(following.__file__).parents[1]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    found = Desk(tmp_path)
    yield found
    found.file.close()


def test_rank_and_cloud_are_those_of_the_link_and_not_those_of_the_line(desk: Desk) -> None:
    desk.take(3, {**STEP, "rank": 0, "cloud": "a", "t": 9e10})

    (found,) = desk.written()
    assert (found["rank"], found["cloud"], found["step"]) == (3, "b", 3)
    assert found["t"] < 9e10  # not further off than clocks differ


@pytest.mark.parametrize(
    ("ahead_s", "kept"), [(3599.0, True), (-3599.0, True), (3601.0, False), (-3601.0, False)]
)
def test_a_clock_that_is_an_hour_off_is_not_believed(
    ahead_s: float, kept: bool, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "now_s", lambda: 1e9)
    desk.take(3, {**STEP, "t": 1e9 + ahead_s})
    (found,) = desk.written()
    assert found["t"] == (1e9 + ahead_s if kept else 1e9)
    assert found["arrived"] == 1e9


@pytest.mark.parametrize("ahead_s", [0.0, 1800.0, -1800.0, 7200.0])
@pytest.mark.parametrize("resumes", [False, True])
def test_durations_of_a_run_are_by_one_clock_however_far_the_others_are_off(
    ahead_s: float, resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps of a second in two clouds; or eight, a pause of 5 s and the last five, of which
    three are made again."""
    now = [1e9]
    monkeypatch.setattr(intake, "now_s", lambda: now[0])
    desk = Desk(tmp_path)

    def both(event: str, **fields: object) -> None:
        own = {"event": event, "rank": 0, "cloud": "a", "t": now[0], **fields}
        desk.file.append(json.dumps(own).encode() + b"\n")
        desk.take(3, {"event": event, "t": now[0] + ahead_s, **fields})

    both("phase", name="loading")
    for step in range(1, 9 if resumes else 11):
        now[0] += 1.0
        both("step", step=step, step_s=1.0)
    if resumes:
        now[0] += 5.0
        both("phase", name="loading")
        resume = {"event": "resume", "rank": 0, "cloud": "a", "t": now[0], "step": 5}
        desk.file.append(json.dumps(resume).encode() + b"\n")
        for step in range(6, 11):
            now[0] += 1.0
            both("step", step=step, step_s=1.0)
    both("finish", num_steps=10)
    desk.file.close()
    statistics = RunStatistics(2)
    for event in EventReader(tmp_path / EVENTS_FILE):
        statistics.feed(event)
    found = statistics.summary(name="x", status="finished", commit="-")
    assert found["step_time_s"]["median"] == 1.0 and found["num_steps"] == 10
    if not resumes:
        assert (found["wall_s"], found["goodput"]) == (10.0, 1.0)
    else:
        assert found["wall_s"] == 13.0
        assert found["goodput"] == pytest.approx(1 - 8 / 18, abs=1e-4)


@pytest.mark.parametrize(
    "line",
    [
        {"event": "quality", "step": 20, "split": "test", "values": {"bleu": 99.9},
         "signature": {}, "evaluation_s": 1.0},
        {**STEP, "loss": 0.0},
        {**STEP, "learned": 10**12},
        {**STEP, "values": {"bleu": 99.9}},
        {**STEP, "step": MAX_STEPS + 1},
        {**STEP, "step": 10**30},
        {**STEP, "step": True},
        {**STEP, "step": -1},
        {**STEP, "step": 2.0},
        {**STEP, "step_s": float("nan")},
        {**STEP, "step_s": float("inf")},
        {**STEP, "step_s": -1.0},
        {**STEP, "sent": {"forward": "x"}},
        {**STEP, "sent": [1]},
        {**STEP, "sent": {"\x1b[2J": 1}},
        {**STEP, "sent": {str(n): 1 for n in range(10_000)}},
        {**STEP, "more": 1},
        {"event": "step", "step_s": 1.0},
        {"event": "note", "text": "\x1b]0;owned\x07"},
        {"event": "note", "text": "two\nlines"},
        {"event": "note", "text": "\u202emirrored"},
        {"event": "note", "text": "x" * 10_000},
        {"event": "note", "text": ["x"]},
        {"event": "note"},
        {"event": "memory", "peak": 1e300},
        *({**TIMELINE, **fields} for fields in (
            {"spans": [["forward", "forward", 0, 0, 0]]},
            {"spans": [["forward", "forward", 0, 0, None, 1]]},
            {"spans": [["forward", "forward", 0, 0, 0, 10**14]]},
            {"spans": [["thinking", "forward", 0, 0, 0, 1]]},
            {"spans": [["forward", "sideways", 0, 0, 0, 1]]},
            {"spans": [["forward", "forward", None, 0, 0, 1]]},
            {"sent": [[0, 1, 0, r"$\frac{$", 0, 1, 0, 0, 1]]},
            {"sent": [[0, 1, 0, "activation", 0, 1, None, 0, 1]]},
            {"sent": [[0, None, 0, "activation", 0, 1, 0, 0, 1]]},
            {"sent": [[0, 1, 0, "activation", 0, -1, 0, 0, 1]]},
            {"received": [[0, 0, 0, None]]},
            {"started_us": None}, {"unix_us": None}, {"step_us": None}, {"step_us": 10**14},
        )),
        {"event": "resume", "step": 0, "changed": []},
        {"event": "absence", "absent": "a", "ranks": [0], "what": "left", "step": 1},
        {"event": "merge", "step": 1, "weights": {}},
        {"event": "refused_reports", "sender": 1, "num": 10**9, "reason": ""},
        {"event": "nothing of ours"},
        {"event": ["step"]},
        {"no": "event"},
        {"event": "finish", "num_steps": [[[[[[[[1]]]]]]]]},
        b"not JSON",
        b"3",
        b"\xff\xfe",
        b"1" * 5000,
        DEEP,
        b'{"event":' + DEEP,
        *(b'{"event":"note","text":' + b"[" * n + b"]" * n + b"}" for n in (20, 600, 900, 960)),
    ],
    ids=lambda line: repr(line)[:60],
)  # fmt: skip
def test_what_no_honest_rank_tells_is_refused_counted_and_shown_with_its_sender(
    line: bytes | dict[str, object], desk: Desk
) -> None:
    desk.take(1, STEP, line, {"event": "finish"})
    desk.intake.close()

    assert [e["event"] for e in desk.written("step", "finish")] == ["step", "finish"]
    assert desk.num_refused == {1: 1}
    (note,) = desk.written("note")
    assert note["rank"] == 0 and "refused a report of rank 1 (cloud a): " in note["text"]
    assert note["text"].isprintable() and len(note["text"]) < 400
    statistics = RunStatistics(2)
    for event in desk.written():
        statistics.feed(event)
    assert statistics.summary(name="x", status="finished")["refused_reports"] == {"1": 1}
    assert statistics.summary(name="x", status="finished")["quality"] == {}


def test_the_rank_that_scores_tells_losses_and_scores(desk: Desk) -> None:
    quality = {"event": "quality", "step": 20, "split": "test", "values": {"f1": float("nan")},
               "errors": {"f1": float("nan")}, "signature": {"f1": "v1"},
               "evaluation_s": 1.0}  # fmt: skip
    desk.take(2, {**STEP, "loss": 1.5, "learning_rate": 0.1, "learned": 9}, quality)

    assert [event["event"] for event in desk.written()] == ["step", "quality"]
    assert desk.num_refused == {}


def test_reports_are_bounded_in_bytes_a_second_for_each_sender(desk: Desk) -> None:
    line = json.dumps({"event": "note", "text": "x" * 3000}).encode() + b"\n"
    chunk = line * (BYTES_PER_S // len(line))

    for _ in range(2 * BURST_BYTES // len(chunk)):
        desk.take(1, chunk)
    desk.file.flush()
    burst = desk.path.stat().st_size
    assert BURST_BYTES / 2 < burst < 1.1 * BURST_BYTES and desk.num_refused[1] > 1
    desk.take(3, chunk)
    assert 3 not in desk.num_refused
    desk.file.flush()
    size = desk.path.stat().st_size
    desk.now_s += 1.0
    desk.take(1, chunk)
    desk.file.flush()
    assert desk.path.stat().st_size > size + len(chunk) / 2
    # 2 notes and a few counts, however much is refused.
    assert len(desk.written("refused_reports")) < 10


@pytest.mark.parametrize("field", ["sent", "raw", "taken", "skipped", "fed_bytes", "line_s"])
def test_a_step_has_figures_by_names_of_the_job_alone(field: str, tmp_path: Path) -> None:
    """Each name is a column in the memory of whoever follows the run."""
    desk = Desk(tmp_path)
    own = ReportIntake(
        desk.file, "aabb".__getitem__, MAX_STEPS, SCORERS, clouds=("a", "b"), num_boundaries=2
    )
    desk.intake = own
    for name in ("forward", "other", "averaging", "b"):
        desk.take(1, {**STEP, field: {name: 1}})
    for name in ("x", "Forward", "", "c"):
        desk.take(1, {**STEP, field: {"forward": 1, name: 1}})
    for name in ("forward", "2 forward", "01 forward", "0 averaging"):
        desk.take(1, {**STEP, "boundaries": {name: 1}})
    for busy in ({"forward": {"x": 1.0}}, {"x": {"a": 1.0}}):
        desk.take(1, {**STEP, "line_busy_s": busy})
    desk.take(1, {**STEP, "line_busy_s": {"forward": {"a": 1.0}}})
    desk.take(1, {**STEP, "boundaries": {"1 forward": 3, "0 backward": 1}})
    assert len(desk.written("step")) == 6 and desk.num_refused == {1: 10}
    desk.file.close()


def test_figures_that_a_task_names_are_bounded_over_the_whole_run(desk: Desk) -> None:
    for number in range(MAX_NAMES):
        desk.take(2, {**STEP, "values": {f"figure {number}": 1.0}})
    assert not desk.num_refused
    desk.take(2, {**STEP, "values": {"one more": 1.0}})
    desk.take(2, {**STEP, "values": {"figure 3": 2.0}})
    assert desk.num_refused == {2: 1} and len(desk.written("step")) == MAX_NAMES + 1
    quality = {"event": "quality", "step": 1, "split": "dev", "errors": {}, "signature": {},
               "evaluation_s": 1.0}  # fmt: skip
    for first in (0, MAX_SCORES):  # each event alone keeps to its bound
        names = range(first, first + MAX_SCORES)
        desk.take(2, {**quality, "values": {f"score {number}": 1.0 for number in names}})
    assert desk.num_refused == {2: 2} and len(desk.written("quality")) == 1


def test_reports_are_bounded_in_all_for_each_sender(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "BYTES_IN_ALL", 10_000)
    monkeypatch.setattr(intake, "BYTES_A_STEP", 100)  # 12,000 bytes for 20 steps
    for _ in range(20):
        desk.now_s += 60.0  # however slowly they come
        desk.take(1, {"event": "note", "text": "x" * 1000})
    assert len(desk.written("note")) == 11 + 1  # with that of the refusal
    desk.take(3, {"event": "note", "text": "y"})
    assert desk.num_refused == {1: 9}


def test_a_report_that_is_no_text_ends_the_link(desk: Desk) -> None:
    frame = Frame(MessageKey(Kind.REPORT), (torch.zeros(3),), 0, 0.0, 52)

    with pytest.raises(FrameError, match="report of rank 1"):
        desk.intake.take(1, frame)


def test_the_table_of_events_names_every_event_and_field_that_a_rank_reports() -> None:
    seen = set()
    kinds = kinds_of(FIGURES)
    for file in sorted(XCLOUD.rglob("*.py")):
        text = file.read_text()
        for call in ast.walk(ast.parse(text)) if ".event(" in text else ():
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            first = call.args[0] if call.args else None
            if call.func.attr != "event" or not isinstance(first, ast.Constant):
                continue
            if first.value in OF_RANK_0:
                known = {*OF_RANK_0[first.value].split()}
            else:
                known = kinds[first.value].model_fields.keys()
            fields = {k.arg for k in call.keywords if k.arg} - {"now", "cloud", "samples_text"}
            assert fields <= known, (file, first.value, fields)
            seen.add(first.value)
    assert {"step", "quality", "fed", "timeline", "absence", "resume"} <= seen


def test_a_log_on_disk_with_any_line_is_read_to_its_end(tmp_path: Path, caplog: Log) -> None:
    """As a disk may leave it."""
    config = OmegaConf.create(toy_config("local"))
    configs.Settings.of(config).write(tmp_path / configs.EXPERIMENT_FILE)
    head = {"rank": 0, "cloud": "local"}
    bad: list[bytes] = [
        DEEP, b'{"event":"note","text":' + DEEP, b"\xff", b'{"event":"step","step":1e999}',
        *(json.dumps({**head, **line}).encode() for line in (
            {"event": "step", "step": 1 << 80, "step_s": 1.0},
            {"event": "resume", "step": 1 << 80},
            {"event": "step", "step": 1, "step_s": 1.0, "loss": "x"},
            {"event": "note", "text": "x", "t": 1e300},
            {"event": "note", "text": "x", "t": "noon"},
        )),
    ]  # fmt: skip
    last = json.dumps({**head, "event": "finish", "t": 5.0}).encode()
    (tmp_path / EVENTS_FILE).write_bytes(b"\n".join([*bad, last]) + b"\n")

    monitor = Monitor(configs.Settings.of(config), tmp_path)
    monitor.start()
    monitor.poll()

    assert monitor.attempt.finished_ranks == {0}
    assert monitor.finish(None)["status"] == "finished"


def test_a_monitor_that_fails_still_leaves_a_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Log
) -> None:
    configs.Settings.of(toy_config("local")).write(tmp_path / configs.EXPERIMENT_FILE)
    audit_file(tmp_path, 0).write_text("{}")

    def fail(self: Monitor, is_again: bool = False) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(Monitor, "start", fail)
    monkeypatch.setattr(following.signal, "signal", lambda *_: None)
    caplog.set_level(logging.CRITICAL)
    file = tmp_path / configs.EXPERIMENT_FILE
    assert main([str(tmp_path), "--experiment", str(file), "--parent", "1"]) == 1
    summary = read_summary(tmp_path)
    assert summary["status"] == "failed" and "no more" in summary["cause"]


def test_a_reporter_s_own_lines_pass(desk: Desk) -> None:
    reporter = Reporter(1, "a", lambda data: desk.take(1, data))
    reporter.event("phase", name="loading")
    reporter.note("größer als zuvor")
    reporter.event("finish", now=True, num_steps=20)

    assert [event["event"] for event in desk.written()] == ["phase", "note", "finish"]
    assert desk.num_refused == {}


def test_a_disk_that_stands_still_holds_up_no_link_and_what_does_not_fit_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of the link brings its rank's heartbeats too."""
    monkeypatch.setattr("xcloud.record.reporter.MAX_WAITING_BYTES", 2000)
    desk = Desk(tmp_path)
    stands_still = threading.Event()
    goes_on = threading.Event()
    append = desk.file._append

    def slow(lines: bytes) -> None:
        stands_still.set()
        assert goes_on.wait(20.0)
        append(lines)

    monkeypatch.setattr(desk.file, "_append", slow)
    taking = threading.Thread(
        # What is still free after fifty steps may have room for a shorter line; then it is taken.
        target=lambda: [desk.take(1, event) for event in [*[STEP] * 50, *[STOP] * 20, FINISH]]
    )
    taking.start()
    assert stands_still.wait(20.0)
    taking.join(20.0)
    assert not taking.is_alive()
    goes_on.set()
    desk.file.append(json.dumps({"event": "finish", "rank": 0}).encode() + b"\n")
    written = desk.written()
    assert 1 < len(written) < 60 and written[-1]["rank"] == 0  # in the order of the calls
    desk.file.close()
    lost = json.loads((tmp_path / LOST_LINES_FILE).read_text())
    assert lost == {"lines": 72 - len(written), "finished_ranks": [1]}

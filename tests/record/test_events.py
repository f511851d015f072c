"""Following events.jsonl and joining the ranks' reports; the tokens of a step."""

import gzip
import json
import logging
import time
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.event_lines import append_event, steps_done
from tests.logged import Log
from tests.nightly import first_daily
from tests.runs import in_threads
from tests.toy import toy_config
from tests.toy_text import PAD, ToyTextTask, text_config
from xcloud.record.events import (
    EVENTS_FILE,
    EventReader,
    StepCollector,
    StepTotals,
    now_s,
    update_s,
)
from xcloud.record.files import has_events
from xcloud.record.summary import RunStatistics, feed_log


def step_event(rank: int, step: int, **fields: Any) -> dict[str, Any]:
    cloud = "source" if rank == 0 else "target"
    ended_s = fields.get("step_s", 0.0)  # all begin at once
    return {"event": "step", "rank": rank, "cloud": cloud, "t": ended_s, "step": step, **fields}


def test_reader_returns_each_event_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert list(reader) == []  # the file does not exist yet

    append_event(path, "note", rank=0, cloud="source", text="año")
    append_event(path, "note", rank=1, cloud="target", text="两")
    assert [event["text"] for event in list(reader)] == ["año", "两"]
    assert list(reader) == []

    append_event(path, "finish", rank=0, cloud="source", num_steps=3)
    (event,) = list(reader)
    assert event["event"] == "finish" and event["num_steps"] == 3 and event["t"] > 1e9


def test_a_log_that_an_earlier_release_cut_off_is_one_stream(tmp_path: Path, caplog: Log) -> None:
    """0.2.0 cut every 8 MB off and compressed it; some of it stays plain where that was killed."""
    texts = [*"abcdef"]
    first, second, third, rest = (
        "".join(f'{{"event": "note", "text": "{text}"}}\n' for text in some).encode()
        for some in ("ab", "c", "de", "f")
    )
    path = tmp_path / EVENTS_FILE
    (tmp_path / "events.0001.jsonl").write_bytes(first.removesuffix(b"\n"))  # the machine died
    (tmp_path / "events.0001.jsonl.gz").write_bytes(gzip.compress(first))
    (tmp_path / "events.0002.jsonl.gz").write_bytes(gzip.compress(second))
    (tmp_path / "events.0003.jsonl.gz").write_bytes(gzip.compress(third))
    path.write_bytes(rest)
    reader = EventReader(path)
    one_by_one = [event["text"] for event in islice(reader, 3)]
    assert one_by_one + [event["text"] for event in reader] == texts
    append_event(path, "note", rank=0, cloud="source", text="g")
    assert [event["text"] for event in reader] == ["g"] and has_events(tmp_path)

    damaged = tmp_path / "events.0002.jsonl.gz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        assert [event["text"] for event in EventReader(path)] == [*"abdefg"]
    (record,) = caplog.records
    assert "events.0002.jsonl.gz is damaged" in record.getMessage()


def test_line_cut_at_any_byte_is_read_when_it_is_whole(tmp_path: Path) -> None:
    line = (json.dumps({"event": "note", "text": "añ两"}, ensure_ascii=False) + "\n").encode()
    for cut in range(len(line)):
        path = tmp_path / f"{cut}.jsonl"
        reader = EventReader(path)
        path.write_bytes(line[:cut])
        assert list(reader) == []
        with path.open("ab") as file:
            file.write(line[cut:])
        assert [event["text"] for event in list(reader)] == ["añ两"]


def test_line_that_is_no_event_is_skipped_with_a_warning(tmp_path: Path, caplog: Log) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "st{"event": "note"}\n[1]\n\n{"event": "note"}\n')

    with caplog.at_level(logging.WARNING):
        assert list(EventReader(path)) == [{"event": "note"}]
    assert len(caplog.records) == 2


def test_step_is_complete_when_every_rank_has_reported_it() -> None:
    collector = StepCollector(num_ranks=2)
    assert collector.feed(step_event(0, 1, step_s=0.5, compute_s=0.2, samples=4)) is None
    assert collector.feed(step_event(0, 2, step_s=0.5)) is None  # a rank may run ahead
    assert collector.feed({"event": "note", "rank": 1}) is None

    totals = collector.feed(
        step_event(1, 1, step_s=0.7, compute_s=0.3, loss=2.5, sent={"backward": 10, "other": 1})
    )
    assert totals is not None
    assert (totals.step, totals.step_s, totals.loss) == (1, 0.7, 2.5)
    assert totals.numbers["samples",] == 4
    assert totals.mean_s("compute_s") == {"source": 0.2, "target": 0.3}
    assert totals.sums("sent") == {"backward": 10, "other": 1}


def taken_s(moments: Sequence[Sequence[float]], ahead_s: float = 0.0) -> list[float]:
    """moments: by rank, when it ended each update; the first is its start. ahead_s: how far the
    last rank's clock is ahead."""
    clocks = [0.0] * (len(moments) - 1) + [ahead_s]
    return [
        StepTotals.of(
            step,
            {
                rank: step_event(rank, step, t=own[step] + clock, step_s=own[step] - own[step - 1])
                for rank, (own, clock) in enumerate(zip(moments, clocks, strict=True))
            },
        ).step_s
        for step in range(1, len(moments[0]))
    ]


def test_ranks_that_are_ahead_in_turns_make_no_step_longer_than_it_was() -> None:
    """Two replicas that wait for each other: 0.13 and 0.32 s in turns, and an update each
    0.225 s."""
    a, b = [0.0], [0.095]
    for _ in range(9):
        a, b = [*a, b[-1] + 0.225], [*b, a[-1] + 0.225]
    own = [round(later - earlier, 3) for earlier, later in pairwise(a)]

    assert own[:2] == [0.32, 0.13], "of one rank"
    assert taken_s([a, b]) == pytest.approx([0.225] * 9)


@pytest.mark.parametrize("ahead_s", [-3600.0, -0.05, 0.0, 0.05, 3600.0])
def test_times_of_updates_add_up_to_what_a_clock_on_the_wall_shows(ahead_s: float) -> None:
    """One cloud makes its updates faster, and waits for the other at the end."""
    fast, slow = [0.0, 0.1, 0.2, 0.3, 0.4, 1.0], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    taken = taken_s([fast, slow], ahead_s)

    assert sum(taken) == pytest.approx(1.0)
    if not ahead_s:
        assert taken == pytest.approx([0.2] * 5)


def test_one_ranks_update_takes_what_its_own_clock_says() -> None:
    assert update_s([(1.7e9, 0.1)]) == 0.1


def test_seconds_are_means_over_the_ranks_of_a_cloud() -> None:
    collector = StepCollector(num_ranks=3)
    collector.feed(step_event(0, 1, waiting_s=0.3))
    collector.feed(step_event(1, 1, waiting_s=0.1))
    totals = collector.feed(step_event(2, 1, waiting_s=0.2))

    assert totals is not None
    assert totals.mean_s("waiting_s") == pytest.approx({"source": 0.3, "target": 0.15})


def at(t: float, event: str, step: int, **more: object) -> dict[str, object]:
    return {"event": event, "rank": 0, "cloud": "a", "t": t, "step": step, **more}


def resumes(events: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Steps done again and seconds lost, of each."""
    run = RunStatistics(1)
    assert feed_log(run, events) == 0
    return [(one["steps_again"], one["lost_s"]) for one in run.resumes]


def test_steps_that_were_done_again_count_once_and_so_does_the_time_they_cost() -> None:
    first = [at(float(step), "step", step, loss=1.0) for step in range(1, 8)]
    quality = at(6.5, "quality", 6, split="dev", values={"bleu": 1.0})
    lost = [quality, at(7.5, "skipped_update", 7), at(8.0, "timeline", 7)]
    again = [at(20.0 + step, "step", step, loss=2.0) for step in (5, 6)]
    events = [*first, *lost, at(20.0, "resume", 4), *again]
    run = RunStatistics(1)
    assert feed_log(run, events) == 0

    assert steps_done(events) == [*first[:4], *again]
    assert list(run.steps["loss"]) == [1.0] * 4 + [2.0] * 2
    assert run.events("quality", "skipped_update", "timeline") == []
    assert resumes(events) == [(3, 16.0)]
    assert resumes([*events, at(30.0, "resume", 4), at(31.0, "step", 5)]) == [(3, 0.0), (2, 26.0)]
    assert resumes([*events, at(30.0, "resume", 5)]) == [(3, 16.0), (1, 5.0)]


def test_a_run_that_began_anew_has_lost_everything_before() -> None:
    note = {"event": "note", "rank": 0, "t": 1.0, "text": "x"}
    assert resumes([note, at(3.0, "step", 1), at(9.0, "resume", 0)]) == [(1, 8.0)]
    assert resumes([note, at(3.0, "step", 1)]) == []


def absence(what: str, step: int) -> dict[str, Any]:
    fields = {"absent": "target", "ranks": [1], "what": what, "step": step}
    return {"event": "absence", "rank": 0, "cloud": "source", **fields}


def test_steps_are_complete_without_a_cloud_that_is_gone() -> None:
    """What its loss completes comes with the next events, in order; back, it is waited for."""
    collector, found = StepCollector(2), []

    def feed(event: dict[str, Any]) -> None:
        totals = collector.feed(event)
        found.append(
            None if totals is None else (totals.step, sum(totals.sums("num_ranks").values()))
        )

    for event in (step_event(0, 1), step_event(1, 1), step_event(0, 2), step_event(0, 3)):
        feed(event)
    feed(absence("late", 3))
    assert found == [None, (1, 2), None, None, None]
    found.clear()
    for event in (absence("left", 4), step_event(0, 4), step_event(0, 5)):
        feed(event)
    assert found == [(2, 1), (3, 1), (4, 1)]
    found.clear()
    events = (absence("back", 6), step_event(0, 6), step_event(0, 7), step_event(1, 4))
    for event in (*events, step_event(1, 7)):
        feed(event)
    assert found == [(5, 1), (6, 1), None, None, (7, 2)]  # what it tells of step 4 is too late


def test_a_cloud_that_was_only_late_is_waited_for_throughout() -> None:
    collector = StepCollector(2)
    events = [absence("late", 1), step_event(0, 1), absence("back", 2), step_event(0, 2)]
    assert [collector.feed(event) for event in events] == [None] * 4
    found = [collector.feed(event) for event in (step_event(1, 1), step_event(1, 2))]
    told = [(totals.step, sum(totals.sums("num_ranks").values())) for totals in found if totals]
    assert told == [(1, 2), (2, 2)]


def test_a_cloud_that_is_gone_before_it_has_told_of_a_step_is_not_waited_for() -> None:
    """What it was about to tell when it was killed is lost with it."""
    collector = StepCollector(2)
    events = [step_event(0, 1), absence("left", 1), step_event(0, 2), absence("back", 2)]
    found = [collector.feed(event) for event in (*events, step_event(0, 3), step_event(1, 3))]
    assert [totals.step for totals in found if totals] == [1, 2, 3]


def test_a_step_of_which_a_report_was_lost_is_not_remembered_for_ever() -> None:
    """On a full disk lines are lost; later steps say that the missing report will not come."""
    collector = StepCollector(2)
    steps = [step_event(0, step) for step in range(1, 100)] + [step_event(1, 99)]
    found = [collector.feed(event) for event in steps]
    assert found[-1] is not None and found[-1].step == 99
    assert not collector.reports


def test_a_run_that_goes_on_has_the_steps_that_a_lost_rank_did_not_tell() -> None:
    """Rank 1, gone in step 2, was back in 3 and was lost with the rank that it tells. After that
    it begins with the others."""
    collector = StepCollector(2)
    events = [step_event(0, 1), absence("left", 1), step_event(0, 2), absence("back", 2)]
    events += [step_event(0, 3), {"event": "resume", "step": 3}, step_event(0, 4)]
    found = [collector.feed(event) for event in (*events, step_event(1, 4), {"event": "note"})]
    told = [(totals.step, sum(totals.sums("num_ranks").values())) for totals in found if totals]
    assert told == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_an_update_that_one_replica_skipped_weighs_nothing_in_the_loss() -> None:
    """It reports what it computed, and no loss."""
    reports = [(1.0, 10), (None, 1000), (4.0, 20)]
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        events = {}
        for rank, number in enumerate(order):
            loss, learned = reports[number]
            told = {} if loss is None else {"loss": loss}
            events[rank] = step_event(rank, 1, learned=learned, **told)
        assert StepTotals.of(1, events).loss == pytest.approx((10 * 1.0 + 20 * 4.0) / 30)


FIELDS = frozenset({"text", "types", "label"})
NUM_SAMPLES = ToyTextTask().num_samples  # a whole epoch in eight updates of sixteen
LAYOUTS = {
    "one process": ("local", []),
    "two clouds": ("two_clouds", []),
    "two ranks a cloud": ("two_clouds_dp", []),
    "U-shape": ("u_shape", []),
    "replicas": ("two_clouds", ["strategy=data_parallel"]),
    "replicas apart": ("two_clouds", ["strategy=local_updates"]),
    "passes": ("two_clouds", ["training.accumulate_steps=2"]),
}


@pytest.mark.parametrize("layout", first_daily([*LAYOUTS], count=2))
def test_every_token_of_an_epoch_is_counted_once(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, overrides = LAYOUTS[layout]
    in_threads(tmp_path, text_config(cluster, ["training.max_steps=8", *overrides]), monkeypatch)

    texts = ToyTextTask().load(FIELDS, 1).texts
    assert texts is not None
    steps = [event for event in EventReader(tmp_path / EVENTS_FILE) if event["event"] == "step"]
    assert sum(step["tokens"] for step in steps) == int((texts != PAD).sum())
    assert sum(step["samples"] for step in steps) == NUM_SAMPLES


def test_of_a_translation_both_sides_are_computed_and_the_target_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = in_threads(tmp_path, toy_config("two_clouds"), monkeypatch)

    steps = [event for event in EventReader(tmp_path / EVENTS_FILE) if event["event"] == "step"]
    by_rank = [sum(step["tokens"] for step in steps if step["rank"] == rank) for rank in (0, 1)]
    learned = sum(step["learned"] for step in steps)
    assert all(by_rank) and 0 < learned <= by_rank[1] < sum(by_rank)
    assert summary["tokens_per_s"] > summary["learned_tokens_per_s"] > 0


def test_a_clock_that_is_set_during_a_run_moves_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    before_s = now_s()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= now_s() - before_s < 60

"""Events and clocks' differences to a timeline, to a trace; the last tests start real ranks."""

import json
import random
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.timelines import MS, assert_valid_trace, timeline, two_ranks
from tests.toy import toy_config
from xcloud.job.config import Settings
from xcloud.launch.local import run
from xcloud.record.events import EventReader
from xcloud.record.timeline import (
    MAX_ENTRIES,
    TRACE_FILE,
    MessagePassage,
    Timeline,
    chrome_trace,
    clock_offsets,
    rows_of,
    timeline_of,
    write_trace,
)

pytestmark = pytest.mark.usefixtures("pictures")


def test_ranks_of_one_machine_stand_on_one_clock_from_the_first_start_on() -> None:
    found = timeline()

    assert [(lane.rank, lane.cloud, lane.from_us, lane.until_us) for lane in found.lanes] == [
        (0, "a", 0, 60 * MS),
        (1, "b", 1 * MS, 61 * MS),
    ]
    assert found.lanes[1].boxes[1].from_us == 18 * MS
    assert found.clocks == "one machine, one clock"
    assert found.until_us == 61 * MS


def test_a_message_is_joined_from_what_both_its_ends_noted() -> None:
    found = timeline()

    assert list(found.flights) == [("a", "b"), ("b", "a")]
    (there,) = found.flights["a", "b"]  # the report was after the step
    (back,) = found.flights["b", "a"]
    assert (there.name, there.from_us, there.until_us) == ("F0", 11 * MS, 16 * MS)
    assert there.arrived_us == 18 * MS == found.lanes[1].boxes[0].until_us
    assert (back.name, back.from_us, back.until_us, back.arrived_us) == (
        "B0", 27 * MS, 32 * MS, 34 * MS,
    )  # fmt: skip


def test_on_a_real_network_a_message_takes_from_sending_to_receiving() -> None:
    events = two_ranks()
    for rank in events:
        for message in rank["sent"]:
            message[-1] = None

    (there,) = timeline(events).flights["a", "b"]

    assert (there.from_us, there.until_us, there.arrived_us) == (11 * MS, 18 * MS, 18 * MS)


def test_two_machines_are_joined_by_their_messages() -> None:
    """b's clock is 5 s ahead: nothing may be seen of it but in the note."""
    b, a = two_ranks(machine="n")
    b["started_us"] += 5_000_000

    found = timeline([a, b])

    # 7 ms there and 7 ms back: alike, so the offset is exact.
    assert [lane.from_us for lane in found.lanes] == [0, 1 * MS]
    assert found.flights == timeline().flights
    assert found.clocks == "clocks of 2 machines joined by messages both ways, off by 7 ms at most"


def test_bubble_ratio_is_waiting_over_computing() -> None:
    waiting, computing = 24 + 5 + 17, 10 + 10 + 10 + 8 + 1

    assert timeline().bubble_ratio == pytest.approx(waiting / computing)


def test_several_lines_of_one_rank_are_one_lane() -> None:
    b, a = two_ranks()
    rest = {**a, "spans": a["spans"][2:], "sent": [], "received": []}
    a["spans"] = a["spans"][:2]

    assert timeline([a, b, rest]) == timeline()


def test_a_run_that_ended_early_has_no_timeline() -> None:
    assert timeline_of([{"event": "phase", "rank": 0, "cloud": "a", "name": "training"}]) is None


def test_overlapping_entries_get_rows_of_their_own() -> None:
    there = timeline().flights["a", "b"][0]
    some = [
        there._replace(from_us=a, until_us=b) for a, b in ((0, 10), (10, 20), (5, 12), (12, 13))
    ]

    rows = rows_of(some)

    assert [[(e.from_us, e.until_us) for e in row] for row in rows] == [
        [(0, 10), (10, 20)],
        [(5, 12), (12, 13)],
    ]


def test_names_are_those_of_the_textbooks(tmp_path: Path) -> None:
    names = [box.name for box in timeline().lanes[0].boxes]

    assert names == ["F0", "compress F0", "wait for B0", "B0", "wait for norm", "optimizer"]


def test_the_trace_is_what_perfetto_reads(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", timeline(), {"schedule": "gpipe m=1"})
    trace = json.loads((tmp_path / "t.json").read_text())

    assert_valid_trace(trace)
    assert trace["otherData"]["schedule"] == "gpipe m=1"
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert threads == {
        (1, 0): "rank 0", (2, 1): "rank 1", (3, 1): "a to b", (3, 2): "b to a",
    }  # fmt: skip
    forward = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "forward"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in forward] == [
        ("F0", 1, 0, 0, 10 * MS),
        ("F0", 2, 1, 18 * MS, 8 * MS),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.nightly), "one_forward_one_backward"]
)
def test_a_real_run_leaves_a_timeline_of_all_it_did(schedule: str, tmp_path: Path) -> None:
    config = toy_config(
        "two_clouds",
        [
            "cluster/wan=office_100m", "cluster.wan.bandwidth_bits_per_s=2e6",
            "cluster.wan.latency_s=0.003", f"schedule={schedule}", "training.accumulate_steps=2",
            "compression=int8", "training.evaluate_every=3",
        ],
    )  # fmt: skip
    summary = run(Settings.of(config), tmp_path)

    trace = json.loads((tmp_path / TRACE_FILE).read_text())
    assert_valid_trace(trace)
    found = timeline_of(list(EventReader(tmp_path / "events.jsonl")))
    assert found is not None
    assert json.loads(json.dumps(chrome_trace(found, {})))["traceEvents"] == trace["traceEvents"]
    assert 1 < found.step <= summary["num_steps"]
    assert [(lane.rank, lane.cloud) for lane in found.lanes] == [(0, "cloud_a"), (1, "cloud_b")]
    for lane in found.lanes:
        computed = Counter(box.name for box in lane.boxes if box.what in ("forward", "backward"))
        assert computed == {f"{letter}{i}": 1 for letter in "FB" for i in range(8)}
        assert {box.stage for box in lane.boxes if box.direction} == {lane.rank}
        ends = [(box.from_us, box.until_us) for box in lane.boxes]
        assert all(a[1] <= b[0] for a, b in pairwise(ends))
        assert lane.from_us <= ends[0][0] and ends[-1][1] <= lane.until_us
        # The boxes are the whole story of a step: nothing a rank does for long is left out.
        # fetch: the weight of the update, and the batches of each pass.
        # decompress: each message once; nothing is watched where one machine plays all clouds.
        # average: the sum, the verdict, and what an exchange does after the update.
        assert Counter(box.what for box in lane.boxes) == {
            "fetch": 3, "forward": 8, "backward": 8, "compress": 8, "decompress": 8,
            "wait": 8 + 1, "average": 3, "clip": 1, "optimizer": 1,
        }  # fmt: skip
    assert_messages_fit(found)
    for name in ("timeline.png", "loss.png", "step_time.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def assert_messages_fit(found: Timeline) -> None:
    """Every message leaves after its computation, and its receiver waits until it is there."""
    sender, receiver = found.lanes
    there, back = found.flights["cloud_a", "cloud_b"], found.flights["cloud_b", "cloud_a"]
    assert [f.name for f in there if f.kind == "activation"] == [f"F{i}" for i in range(8)]
    assert [f.name for f in back if f.kind == "gradient"] == [f"B{i}" for i in range(8)]
    assert [f.kind for f in (*there, *back)].count("norm") == 2
    for lane, others, letter in ((sender, there, "F"), (receiver, back, "B")):
        other = receiver if lane is sender else sender
        for flight in others:
            if not flight.name.startswith(letter):
                continue
            computed = next(box for box in lane.boxes if box.name == flight.name)
            waited = next(box for box in other.boxes if box.name == f"wait for {flight.name}")
            assert computed.until_us <= flight.queued_us <= flight.from_us < flight.until_us
            assert flight.until_us + 2900 < flight.arrived_us <= waited.until_us


@pytest.mark.nightly
@pytest.mark.slow
def test_a_failed_run_leaves_the_pictures_of_the_steps_it_made(tmp_path: Path) -> None:
    config = toy_config("two_clouds")
    config["model"] |= {"fail_stage": 1, "fail_step": 20}
    config["training"]["max_steps"] = 100

    with pytest.raises(Exception, match="asked to fail"):
        run(Settings.of(config), tmp_path)

    assert json.loads((tmp_path / "summary.json").read_text())["num_steps"] > 0
    assert (tmp_path / "loss.png").exists() and (tmp_path / "step_time.png").exists()
    assert not (tmp_path / "timeline.png").exists()


UNIX = {"a": 5_000_000, "b": 3_000_000, "c": 0}


def passages(
    rng: random.Random, a: str, b: str, b_ahead_us: int, fastest_us: int
) -> list[MessagePassage]:
    """Both ways; at least one each way takes fastest_us, the others longer."""
    found = []
    for extra_us in [0, *(rng.randrange(5000) for _ in range(5))]:
        start = rng.randrange(10**6)
        delay = fastest_us + extra_us
        found.append(MessagePassage(a, b, start, start + delay + b_ahead_us))
        found.append(MessagePassage(b, a, start + b_ahead_us, start + delay))
    return found


def test_one_machine_needs_nothing() -> None:
    assert clock_offsets({"a": 17}, []) == ({"a": 0}, 0)


@pytest.mark.parametrize("b_ahead_us", [0, 123_456, -98_765_432])
def test_messages_both_ways_give_the_offset_exactly_if_delays_are_alike(b_ahead_us: int) -> None:
    found = clock_offsets({"a": 5, "b": 6}, passages(random.Random(1), "a", "b", b_ahead_us, 4000))

    assert found.shift_us == {"a": 0, "b": -b_ahead_us}
    assert found.error_us == 4000


def test_the_error_of_unlike_delays_stays_below_what_is_said() -> None:
    ahead = 1000
    found = clock_offsets(
        {"a": 5, "b": 6},
        [
            MessagePassage("a", "b", 0, 9000 + ahead),
            MessagePassage("b", "a", 50_000 + ahead, 50_200),
        ],
    )

    assert found.error_us is not None
    assert 0 < abs(found.shift_us["b"] + ahead) <= found.error_us == 4600


def test_a_third_machine_is_joined_through_the_second() -> None:
    rng = random.Random(2)
    both = passages(rng, "a", "b", 700, 300) + passages(rng, "b", "c", -40, 100)

    found = clock_offsets(UNIX, both)

    assert found.shift_us == {"a": 0, "b": -700, "c": -660}
    assert found.error_us == 400  # errors add up along the way


def test_without_messages_back_the_wall_clocks_are_believed_and_the_error_is_unknown() -> None:
    found = clock_offsets({"a": 5_000_000, "b": 3_000_000}, [MessagePassage("a", "b", 0, 10)])

    # What b's clock calls 2 s was 5 s by the wall clock, which a's clock calls 0.
    assert found.shift_us == {"a": 0, "b": -2_000_000}
    assert found.error_us is None


def test_many_overlapping_messages_are_drawn_in_bounded_time_and_what_is_left_out_is_said() -> (
    None
):
    """Each rank of another owner may report megabytes of them."""
    flights = [[0, 0, n, "activation", 0, 100, 0, 0, 1_000_000 - n % 7] for n in range(20_000)]
    head: dict[str, Any] = {
        "event": "timeline", "step": 5, "started_us": 0, "unix_us": 0, "step_us": 1_000_000,
        "received": [], "spans": [], "sent": [],
    }  # fmt: skip
    own = {**head, "rank": 0, "cloud": "a", "machine": "m0"}
    theirs = {**head, "rank": 1, "cloud": "b", "machine": "m1", "sent": flights}
    started_s = time.process_time()
    found = timeline_of([own, theirs])
    assert found is not None
    assert len(chrome_trace(found, {})["traceEvents"]) < 1_000
    assert time.process_time() - started_s < 2
    assert sum(map(len, found.flights.values())) == MAX_ENTRIES
    assert f"{20_000 - MAX_ENTRIES:,} entries left out" in found.clocks


def test_a_rank_that_reports_another_step_is_left_out_and_named() -> None:
    head: dict[str, Any] = {
        "event": "timeline", "started_us": 0, "unix_us": 0, "step_us": 9, "received": [],
        "spans": [], "sent": [], "machine": "m",
    }  # fmt: skip
    found = timeline_of(
        [
            {**head, "step": 5, "rank": 0, "cloud": "a"},
            {**head, "step": 6, "rank": 1, "cloud": "b"},
        ]
    )
    assert found is not None and [lane.rank for lane in found.lanes] == [0]
    assert "without rank 1" in found.clocks

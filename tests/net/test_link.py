"""How much may be under way on a link, and when an emulated one delivers it."""

import os
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.memory_group import MemoryGroup
from tests.nightly import each_once
from tests.pipelines import BORDER, D, wired
from tests.runs import wait_for
from xcloud.base.errors import ConfigError, LinkClosed
from xcloud.comm.channel import SendChannel
from xcloud.comm.compression import Compression
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net import link as links
from xcloud.net.frame import OF_A_STEP, Kind, MessageKey, TensorSpec, frame_bytes
from xcloud.net.gloo_link import GlooInLink, GlooOutLink
from xcloud.net.link import LinkClock, PostedReceives, Reservation
from xcloud.net.link_end import ByteQueue, EndSettings, InSettings, OutSettings
from xcloud.net.link_profile import BUDGET_BYTES, MIN_POSTED, LinkProfile, LinkWindow
from xcloud.pipeline.ends import FRAME_SLACK_BYTES
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward
from xcloud.pipeline.schedule import GPipe, Schedule, max_in_flight


def test_receives_cover_what_is_under_way_as_far_as_the_budget_goes() -> None:
    assert LinkWindow.covering(20, 10_000).num_posted == 20
    assert LinkWindow.covering(1000, 1_000_000, budget_bytes=40_000_000).num_posted == 40
    # However long the frames, the line does not idle between two of them.
    assert LinkWindow.covering(20, BUDGET_BYTES).num_posted == MIN_POSTED
    assert LinkWindow.covering(1, 10_000).num_posted == MIN_POSTED


def test_a_queue_holds_what_the_schedule_needs_even_beyond_the_budget() -> None:
    assert LinkWindow.covering(4, 1000, budget_bytes=1_000_000).max_queued_bytes == 1_000_000
    assert LinkWindow.covering(300, 50_000, budget_bytes=1000).max_queued_bytes == 15_000_000


def test_what_nobody_needs_ahead_stays_within_the_budget() -> None:
    window = LinkWindow.covering(2, 50_000, budget_bytes=1_000_000, num_ahead=32)
    assert (window.num_posted, window.max_queued_bytes) == (20, 1_000_000)
    window = LinkWindow.covering(300, 50_000, budget_bytes=1_000_000, num_ahead=32)
    assert (window.max_queued_bytes, window.max_evaluation_bytes) == (15_000_000, 1_000_000)


@pytest.mark.parametrize(
    ("budget", "returns", "kind"),
    each_once([1, 1_000_000], [True, False], [Kind.EVALUATION, Kind.ACTIVATION], count=2),
)
def test_an_evaluation_and_a_boundary_without_gradient_fill_the_budget_and_no_more(
    kind: Kind, returns: bool, budget: int
) -> None:
    """Whatever the schedule has in flight, of which a gradient must return for each."""
    num_samples, rows = 8, BORDER.max_rows_per_sample
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, "free", link_budget_bytes=budget)
    border = replace(BORDER, gradient_returns=returns, is_constant=not returns)
    ranks = wired(layout, {0: border}, Compression(), schedule=GPipe(40), max_samples=num_samples)
    out, incoming = (one.wiring.boundaries.ports[0] for one in ranks)
    samples = {"ids": torch.arange(num_samples)}
    message = {
        "counts": torch.full((num_samples,), rows, dtype=torch.int16),
        "hidden": torch.zeros(num_samples * rows, D),
    }
    frame = frame_bytes(tuple(map(TensorSpec.of, message.values())))
    needed = 40 if returns and kind is Kind.ACTIVATION else 1
    channel = out.forward_out[1]
    assert isinstance(channel, SendChannel)
    room = channel.link.settings.room_bytes(kind)
    assert budget <= room <= max(budget, needed * (frame + FRAME_SLACK_BYTES))
    keys = [MessageKey(kind, 1, number) for number in range(max(1, room // frame) + 1)]
    assert len(keys) > needed
    sent: list[MessageKey] = []

    def send() -> None:
        for key in keys:
            channel.send(key, message, samples)
            sent.append(key)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    wait_for(lambda: len(sent) >= len(keys) - 1, 20)
    thread.join(0.2)
    assert thread.is_alive(), "one more than there is room for"
    for key in keys:
        incoming.forward_in[0].recv(key, samples)
    thread.join(20)
    assert 0 < ranks[1].wiring.ends.queued.peak_bytes <= max(room, frame)


@pytest.mark.parametrize("budget", [0, -1, 1.5, "64 MB"])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget: object) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.link_budget_bytes"):
        ClusterLayout({"a": Cloud()}, link_budget_bytes=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (GPipe(16), 16),
        (OneForwardOneBackward(16), 2),
        (OneForwardOneBackward(16, 7), 7),
        (OneForwardOneBackward(400, 300), 300),
        (OneForwardOneBackward(4, 300), 4),
    ],
)
def test_in_flight_is_what_the_first_stage_starts_before_gradients_come(
    schedule: Schedule, expected: int
) -> None:
    found = max_in_flight(schedule.actions(0, 2), lambda i: None)
    assert found == {None: expected}


def test_in_flight_is_counted_for_each_pair_of_lanes() -> None:
    found = max_in_flight(GPipe(10).actions(0, 2), lambda i: i % 4)
    assert found == {0: 3, 1: 3, 2: 2, 3: 2}


def test_a_byte_queue_is_first_in_first_out_and_blocks_at_its_bound() -> None:
    queue: ByteQueue[str] = ByteQueue(100)
    queue.put("a", 60)
    queue.put("b", 40)
    assert not queue.put("c", 1, timeout_s=0.01)
    assert queue.put("end", 0, timeout_s=0.01)  # takes no room

    assert [queue.get(), queue.get(), queue.get()] == ["a", "b", "end"]
    assert not queue.wait(0.01)


def test_a_byte_queue_takes_one_item_that_is_longer_than_its_bound() -> None:
    queue: ByteQueue[int] = ByteQueue(10)
    queue.put(1, 1000, timeout_s=0.01)
    assert not queue.put(2, 1, timeout_s=0.01)
    assert queue.put(3, 0, timeout_s=0.01)  # an end is never held up
    assert queue.get() == 1


def test_a_get_lets_a_waiting_put_in() -> None:
    queue: ByteQueue[int] = ByteQueue(10)
    queue.put(0, 10)
    thread = threading.Thread(target=lambda: [queue.put(i, 10) for i in range(1, 50)], daemon=True)
    thread.start()
    assert [queue.get() for _ in range(50)] == list(range(50))


def deliveries(
    num_posted: int, num_messages: int, profile: LinkProfile, file: Path
) -> list[Reservation]:
    """Messages of 1,000 bytes that are all queued at time 0, over an emulated link."""
    clock, posted = LinkClock(profile, file), PostedReceives(num_posted, profile.latency_at)
    now = clock.started_at_s
    slots = []
    for _ in range(num_messages):
        slot = clock.reserve(1000, max(now, posted.known_at_s))
        posted.used(slot.deliver_at_s)
        slots.append(Reservation(*(moment - now for moment in slot)))
    return slots


def test_a_window_lets_so_many_messages_through_in_a_round_trip(tmp_path: Path) -> None:
    profile = LinkProfile(1e9, latency_s=0.05)
    line_s = profile.line_s(1000)

    slots = deliveries(3, 16, profile, tmp_path / "narrow")

    # Message k begins a round trip and its own time on the line after message k - 3.
    for k, slot in enumerate(slots):
        turn, place = divmod(k, 3)
        assert slot.start_s == pytest.approx(turn * (0.1 + line_s) + place * line_s)
        assert slot.deliver_at_s == pytest.approx(slot.start_s + line_s + 0.05)


def test_a_window_that_covers_all_leaves_the_line_to_its_bandwidth(tmp_path: Path) -> None:
    profile = LinkProfile(1e9, latency_s=0.05)

    slots = deliveries(16, 16, profile, tmp_path / "wide")

    assert slots[-1].deliver_at_s == pytest.approx(16 * profile.line_s(1000) + 0.05)


def test_on_a_slow_line_the_window_costs_nothing(tmp_path: Path) -> None:
    """Three messages keep the line busy for longer than a round trip."""
    profile = LinkProfile(1e5, latency_s=0.05)

    slots = deliveries(3, 16, profile, tmp_path / "slow")

    assert slots[-1].sent_s == pytest.approx(16 * profile.line_s(1000))


def ends(
    window: LinkWindow, clock: LinkClock | None = None
) -> tuple[MemoryGroup, GlooOutLink, GlooInLink]:
    group: Any = MemoryGroup()
    out = GlooOutLink(group, OutSettings("the receiver", 1000, window, clock=clock))
    settings = InSettings("the sender", 1000, window=window, is_emulated=clock is not None)
    return group, out, GlooInLink(group, settings)


def test_as_many_receives_are_posted_as_the_window_says_and_the_close_meets_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, out, incoming = ends(LinkWindow(num_posted=7))
    for i in range(20):
        out.send(MessageKey(Kind.ACTIVATION, 1, i), (torch.zeros(5),))
    for i in range(20):
        incoming.recv(MessageKey(Kind.ACTIVATION, 1, i), 10)

    out.close(10)
    incoming.close(10)

    assert group.max_posted == 7
    assert incoming.has_closed and not group.posted


def test_a_stage_that_starts_many_micro_batches_before_it_reads_does_not_deadlock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next stage answers each forward with a gradient that nobody reads yet."""
    window = LinkWindow.covering(300, 1000, budget_bytes=1)
    assert window.num_posted == MIN_POSTED  # what is under way waits in the queues
    _, forward_out, forward_in = ends(window)
    _, backward_out, backward_in = ends(window)

    def next_stage() -> None:
        for i in range(300):
            forward_in.recv(MessageKey(Kind.ACTIVATION, 1, i), 10)
            backward_out.send(MessageKey(Kind.GRADIENT, 1, i), (torch.zeros(5),))

    def first_stage() -> None:
        for i in range(300):
            forward_out.send(MessageKey(Kind.ACTIVATION, 1, i), (torch.zeros(5),))
        for i in range(300):
            backward_in.recv(MessageKey(Kind.GRADIENT, 1, i), 10)

    threads = [threading.Thread(target=work, daemon=True) for work in (next_stage, first_stage)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    for link in (forward_out, forward_in, backward_out, backward_in):
        link.close(10)


def test_an_emulated_link_delivers_a_window_in_each_round_trip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took_s = []
    for num_posted in (9, 3):
        clock = LinkClock(LinkProfile(1e9, latency_s=0.05), tmp_path / f"{num_posted}.clock")
        _, out, incoming = ends(LinkWindow(num_posted), clock)
        started = time.monotonic()
        for i in range(9):
            out.send(MessageKey(Kind.ACTIVATION, 1, i), (torch.zeros(5),))
        for i in range(9):
            incoming.recv(MessageKey(Kind.ACTIVATION, 1, i), 10)
        took_s.append(time.monotonic() - started)
        assert out.record.line_s[Kind.ACTIVATION] > 0
        out.close(10)

    # One way, and two round trips more. Never early; how late is a matter of the machine's load.
    assert took_s[0] >= 0.05 and took_s[1] >= 0.25


def test_a_link_whose_sending_thread_fails_says_so_to_whoever_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run folder that is deleted, or a disk that gives errors, under the emulated line."""
    clock = LinkClock(LinkProfile(1e9), tmp_path / "clock")

    def fail(*arguments: object) -> Reservation:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(clock, "reserve", fail)
    group: Any = MemoryGroup()
    out = GlooOutLink(group, OutSettings("the receiver", 1000, clock=clock))
    out.send(MessageKey(Kind.ACTIVATION, 1, 0), (torch.zeros(4),))
    with pytest.raises(LinkClosed, match=r"the link to the receiver broke: OSError\(5, 'Input"):
        out.close(5.0)


def test_two_senders_share_one_line(tmp_path: Path) -> None:
    profile = LinkProfile(1e6, latency_s=0.1)
    one, two = (LinkClock(profile, tmp_path / "a-b.clock") for _ in range(2))
    now = one.started_at_s

    first = one.reserve(10_000, now)
    second = two.reserve(10_000, now)

    assert first.deliver_at_s - now == pytest.approx(profile.transfer_s(10_000))
    assert second.start_s == first.sent_s
    assert second.deliver_at_s - now == pytest.approx(2 * profile.line_s(10_000) + 0.1)


def test_an_idle_line_starts_at_once(tmp_path: Path) -> None:
    clock = LinkClock(LinkProfile(1e6), tmp_path / "a-b.clock")
    now = clock.started_at_s
    clock.reserve(10_000, now)

    assert clock.reserve(10_000, now + 50).start_s == now + 50


def test_jitter_is_the_same_in_every_run_and_never_reorders(tmp_path: Path) -> None:
    def arrivals(name: str) -> list[float]:
        clock = LinkClock(LinkProfile(1e9, jitter_s=0.5), tmp_path / name)
        start = clock.started_at_s
        return [round(clock.reserve(100, start).deliver_at_s - start, 9) for _ in range(20)]

    one = arrivals("1")
    assert one == sorted(one)
    assert one[-1] > 0.2
    assert one == arrivals("2")


def test_latency_that_falls_reorders_nothing_and_notices_travel_at_that_of_their_time(
    tmp_path: Path,
) -> None:
    profile = LinkProfile(1e9, 0.5, trace=[[0, 1e9, 0.5], [1, 1e9, 0.01]])
    clock = LinkClock(profile, tmp_path / "clock")
    start_s = clock.started_at_s
    before, after = (clock.reserve(1000, start_s + s) for s in (0.9, 1.1))
    assert before.deliver_at_s == pytest.approx(start_s + 1.4, abs=1e-4)
    assert after.deliver_at_s == before.deliver_at_s, "it waits behind the one before"
    assert clock.reserve(1000, start_s + 2).deliver_at_s == pytest.approx(start_s + 2.01, abs=1e-4)
    assert (clock.latency_at(start_s + 0.5), clock.latency_at(start_s + 1.5)) == (0.5, 0.01)


def test_ranks_that_share_a_line_take_turns_from_when_its_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, int]] = []  # what was asked of the lock, and the bytes there by then

    def flock(file: int, how: str) -> None:
        turns.append((how, os.fstat(file).st_size))

    faked = SimpleNamespace(flock=flock, LOCK_EX="take", LOCK_UN="give")
    monkeypatch.setattr(links, "fcntl", faked)
    clock = LinkClock(LinkProfile(1e6), tmp_path / "a-b.clock")
    assert turns == [("take", 0), ("give", 32)]
    LinkClock(LinkProfile(1e6), tmp_path / "a-b.clock")
    assert turns[2:] == [("take", 32), ("give", 32)]
    clock.reserve(1000)
    assert turns[4:] == [("take", 32), ("give", 32)]


def test_reservations_of_many_threads_do_not_overlap(tmp_path: Path) -> None:
    clocks = [LinkClock(LinkProfile(1e6), tmp_path / "a-b.clock") for _ in range(4)]
    slots = []

    def work(clock: LinkClock) -> None:
        for _ in range(50):
            slots.append(clock.reserve(1000))

    threads = [threading.Thread(target=work, args=(clock,)) for clock in clocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    slots.sort()
    assert len(slots) == 200
    assert all(b.start_s >= a.sent_s for a, b in pairwise(slots))


@pytest.mark.parametrize("kind", Kind)
def test_a_message_of_a_step_moves_the_deadline_and_a_part_of_any_says_that_the_peer_lives(
    kind: Kind,
) -> None:
    heard: list[Any] = []
    progress: Any = SimpleNamespace(note=lambda *at_s: heard.append(at_s))
    peer: Any = SimpleNamespace(mark_alive=lambda: heard.append("alive"))
    window = LinkWindow(max_queued_bytes=2, max_evaluation_bytes=1)
    end = EndSettings("a", 8, window, peer=peer, progress=progress)
    end.note_progress(kind, at_s=3.0)
    assert heard == ([(3.0,)] if kind in OF_A_STEP else [])
    heard.clear()
    end.note_moving()
    assert heard == ["alive", ()]
    alone = EndSettings("a", 8, peer=peer)
    alone.note_progress(kind)
    alone.note_moving()
    assert heard == ["alive", (), "alive"]
    assert end.room_bytes(kind) == (1 if kind is Kind.EVALUATION else 2)

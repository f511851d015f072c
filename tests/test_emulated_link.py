import threading
from itertools import pairwise
from pathlib import Path

import pytest

from xcloud.net.link import LinkClock
from xcloud.net.link_profile import LinkProfile


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

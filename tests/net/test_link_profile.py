import math
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xcloud.base.errors import ConfigError
from xcloud.net.link_profile import (
    FREE,
    REAL,
    SEALED,
    InboundWire,
    LinkProfile,
    Liveness,
    Wan,
    line_bytes,
)
from xcloud.net.unsteady_line import jitter_share


def test_transfer_time_counts_packet_headers_and_latency() -> None:
    profile = LinkProfile(1e8, latency_s=0.01)

    assert line_bytes(1448) == 1514
    assert line_bytes(1449) == 1449 + 2 * 66
    assert profile.transfer_s(1448_000) == pytest.approx(0.01 + 8 * 1514_000 / 1e8)


def test_a_trace_changes_the_rate_in_the_middle_of_a_message() -> None:
    profile = LinkProfile(1e6, trace=[[0, 1e6], [1, 2e6]])
    bits = 8 * line_bytes(250_000)

    # One second at 1 Mbit/s, the rest at 2 Mbit/s.
    assert profile.sent_at(0.0, 250_000) == pytest.approx(1 + (bits - 1e6) / 2e6)


def test_a_trace_changes_the_latency_too_where_it_says_so() -> None:
    profile = LinkProfile(1e6, 0.02, trace=[[1, 2e6, 0.1], [2, 3e6]], trace_period_s=3)
    moments = (0.5, 1.0, 1.9, 2.5, 3.5, 4.5)
    assert [profile.latency_at(s) for s in moments] == [0.02, 0.1, 0.1, 0.02, 0.02, 0.1]
    assert profile.sent_at(1.0, 0) == 1.0 and LinkProfile(1e6, 0.02).latency_at(9.0) == 0.02


def test_a_trace_with_a_period_starts_again() -> None:
    profile = LinkProfile(1e6, trace=[[0, 1e6], [1, 4e6]], trace_period_s=2)

    assert profile.sent_at(10.0, 10_000) == pytest.approx(profile.sent_at(0.0, 10_000) + 10)
    assert profile.sent_at(11.0, 10_000) == pytest.approx(11 + 8 * line_bytes(10_000) / 4e6)
    assert [profile.rate_from(at_s)[0] for at_s in (0.5, 1.0, 2.5)] == [1e6, 4e6, 1e6]


def test_nothing_moves_during_an_outage() -> None:
    profile = LinkProfile(1e6, outages=[[0.5, 2.0]])
    free = LinkProfile(1e6)

    assert profile.sent_at(0.0, 10_000) == free.sent_at(0.0, 10_000)
    assert profile.sent_at(0.45, 25_000) == pytest.approx(free.sent_at(0.45, 25_000) + 2.0)
    assert profile.sent_at(1.0, 10_000) == pytest.approx(free.sent_at(2.5, 10_000))
    assert profile.rate_from(1.0)[0] == 0.0


def test_random_outages_are_there_whatever_was_sent_before() -> None:
    def profile() -> LinkProfile:
        return LinkProfile(1e6, outage_every_s=3, outage_lasting_s=1)

    asked_before, other = profile(), profile()
    asked_before.sent_at(0.0, 10_000_000)

    assert [asked_before.sent_at(at, 50_000) for at in range(60)] == [
        other.sent_at(at, 50_000) for at in range(60)
    ]


def test_a_message_ends_whichever_lap_of_a_trace_it_crosses() -> None:
    """6 * 7.3 + 7.3 is a little less than 7 * 7.3: the sixth lap had no end."""
    profile = LinkProfile(1e6, trace=[[0.1, 1e6], [2.2, 3e5], [5, 2e6]], trace_period_s=7.3)
    for lap in range(1, 200):
        assert profile.sent_at(7.3 * lap - 0.8, 250_000) < 7.3 * lap + 7.3


@settings(max_examples=60, deadline=None)
@given(
    start=st.floats(0, 100),
    size=st.integers(1, 300_000),
    period=st.sampled_from([0.0, 7.3]),
    outage=st.sampled_from([0.0, 5.0]),
)
def test_a_longer_message_never_arrives_earlier(
    start: float, size: int, period: float, outage: float
) -> None:
    profile = LinkProfile(
        1e6, trace=[[0.1, 1e6], [2.2, 3e5], [5, 2e6]], trace_period_s=period,
        outage_every_s=outage, outage_lasting_s=outage / 5,
    )  # fmt: skip

    sent = profile.sent_at(start, size)

    assert start < sent < math.inf
    assert profile.sent_at(start, size + 1) >= sent
    assert profile.sent_at(start + 0.5, size) >= sent


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"bandwidth_bits_per_s": 0}, "bandwidth_bits_per_s"),
        ({"bandwidth_bits_per_s": "fast"}, "bandwidth_bits_per_s"),
        ({"latency_s": -1}, "latency_s"),
        ({"trace": [[0, 0.0]]}, "trace"),
        ({"trace": [[0, 1e8], [60, 0]]}, "wan.trace ends with a bandwidth of 0"),
        ({"trace": [[0, 0.0], [6, 0]], "trace_period_s": 9}, "wan.trace ends with a bandwidth"),
        ({"trace": [[3, 1e6], [1, 1e6]]}, "order of time"),
        (
            {"trace": [1, 2]},
            r"wan\.trace\[0\] must be a list of 2\.\.3, of which each is a number",
        ),
        ({"trace": [[0, 1e6, -0.1]]}, r"wan\.trace\[0\]\[2\] must be a number in \[0, inf\)"),
        ({"trace": [[0, 1e6, 0.1, 7]]}, r"wan\.trace\[0\] must be a list of 2\.\.3,"),
        ({"trace": [[3, 1e6, 0.1], [1, 1e6]]}, "order of time"),
        ({"outages": [[1, 0]]}, "outages"),
        ({"outage_every_s": 5}, "go together"),
        ({"trace": [[0, 1e6], [5, 1e6]], "trace_period_s": 5}, "trace_period_s"),
    ],
)
def test_nonsense_is_refused_by_name(settings_: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LinkProfile(**{"bandwidth_bits_per_s": 1e6, **settings_})  # type: ignore[arg-type]


def test_random_outages_are_the_same_whoever_asks_and_how_many_do() -> None:
    """All links of a rank share one line, each from a thread of its own."""

    def outages(num_threads: int) -> list[tuple[float, float]]:
        line = LinkProfile(1e8, outage_every_s=10.0, outage_lasting_s=1.0)
        threads = [
            threading.Thread(target=lambda: [line.rate_from(25.0 * k) for k in range(400)])
            for _ in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return line._outage_draws[1]

    alone, before = outages(1), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert all(outages(3) == alone for _ in range(20))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("wan", "flags", "said"),
    [
        (REAL, "metered", "the network as it is"),
        (FREE, "numbers", "no limit"),
        (SEALED, "metered owners", "sealed lines between owners"),
        (LinkProfile(1e9), "emulated numbers", "emulated 1 Gbit/s, 0 ms round trip"),
        (
            LinkProfile(2e8, 0.05, 0.01, trace=[[0, 1e6]], outages=[[1, 1]]),
            "emulated numbers",
            "emulated 200 Mbit/s, 100 ms round trip, jitter 10 ms, trace of 1 rates, outages",
        ),
        (
            LinkProfile(1e6, 0.001, outage_every_s=5, outage_lasting_s=1),
            "emulated numbers",
            "emulated 1 Mbit/s, 2 ms round trip, outages",
        ),
        (
            InboundWire(8e7, 0.01),
            "emulated numbers inbound",
            "emulated inbound wire of each rank, 80 Mbit/s and 10 ms a message, one after the "
            "other",
        ),
    ],
)
def test_a_line_says_what_it_is_and_who_keeps_its_time(wan: Wan, flags: str, said: str) -> None:
    assert wan.describe() == said
    names = {
        "emulated": wan.emulated,
        "metered": wan.is_metered,
        "owners": wan.between_owners,
        "numbers": wan.has_numbers,
        "inbound": getattr(wan, "is_inbound", False),
    }
    assert [name for name, holds in names.items() if holds] == flags.split()
    is_profile = isinstance(wan, LinkProfile)
    expected_s = 10 * wan.transfer_s(1000) if is_profile else 0.0
    assert wan.allowance_s(1000) == expected_s


def test_a_message_on_an_inbound_wire_takes_its_bits_and_then_its_latency() -> None:
    wire = InboundWire(8e6, 0.25)
    assert wire.transfer_s(1024) == 0.0  # a heartbeat
    assert wire.transfer_s(2_000_000) == wire.line_s(2_000_000) == 2.25
    assert wire.sent_at(7.0, 2_000_000) == 9.25 and wire.sent_at(7.0, 8) == 7.0
    assert wire.beyond_s == wire.latency_at(9.25) == 0.0
    line = LinkProfile(8e6, 0.25)
    assert line.beyond_s == 0.25 and tuple(line.nominal) == (0.0, 8e6, 0.25)
    for unsteady in ({"jitter_s": 0.1}, {"outages": [[1, 1]]}, {"trace": [[0, 1e6]]}):
        with pytest.raises(ConfigError, match="the benchmark's own steady wire"):
            InboundWire(8e6, **unsteady)  # type: ignore[arg-type]


def test_chance_on_an_emulated_line_is_the_same_in_every_release() -> None:
    assert [round(jitter_share(number), 6) for number in range(3)] == [0.5847, 0.189412, 0.475235]
    line = LinkProfile(1e6, outage_every_s=10.0, outage_lasting_s=1.0)
    assert [round(start_s, 6) for start_s, _ in line.random_outages(20.0)] == [
        18.606071,
        33.792363,
    ]


def test_a_rank_is_lost_after_three_heartbeats_at_the_earliest() -> None:
    Liveness(interval_s=2.0, lost_after_s=6.0)
    with pytest.raises(ConfigError, match=r"lost_after_s \(5\.9\) must be at least three times"):
        Liveness(interval_s=2.0, lost_after_s=5.9)

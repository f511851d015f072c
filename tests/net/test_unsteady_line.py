"""What an emulated line does at a moment of its trace and of its outages."""

from xcloud.net.link_profile import LinkProfile


def test_a_trace_without_a_period_begins_with_the_nominal_line() -> None:
    line = LinkProfile(1e6, latency_s=0.1, trace=[[5.0, 2e6], [9.0, 3e6]])
    assert line.rate_from(4.0) == (1e6, 5.0)
    assert line.rate_from(5.0) == (2e6, 9.0)
    assert line.rate_from(1e4)[0] == 3e6


def test_a_trace_with_a_period_begins_its_second_lap_as_the_first_one_ended() -> None:
    line = LinkProfile(1e6, trace=[[5.0, 2e6], [9.0, 3e6]], trace_period_s=10.0)
    assert line.rate_from(4.0)[0] == 1e6
    assert line.rate_from(14.0)[0] == 3e6


def test_a_random_outage_under_way_stops_the_line_until_it_is_over() -> None:
    line = LinkProfile(1e6, outage_every_s=50.0, outage_lasting_s=20.0)
    [(start, lasting), *_] = line.random_outages(0.0)
    for moment in (start, start + lasting / 2):
        assert line.rate_from(moment) == (0.0, start + lasting)
    assert line.rate_from(start - 1e-6)[0] == 1e6

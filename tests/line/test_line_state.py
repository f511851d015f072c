"""What is known and said of a line and of a stream on it."""

from typing import Any

import pytest

from xcloud.base import terminal
from xcloud.base.errors import LinkClosed, LinkTimeout
from xcloud.line import line_state
from xcloud.line.line_state import Course, LineState
from xcloud.net.peer import Peer


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(line_state, "time", made)
    monkeypatch.setattr(terminal, "time", made)
    return made


def course_of(state: LineState, name: str = "forward", **changed: Any) -> Course:
    settings = {"first_within_s": 60.0, "reconnect_s": 10.0, **changed}
    return Course(name, state=state, peer=Peer(), **settings)


def test_a_line_over_which_only_greetings_pass_is_down_and_given_up(clock: Clock) -> None:
    """Its connections are made again and again, and never one carries anything."""
    said: list[str] = []
    state = LineState("b", say=said.append)
    course = course_of(state)
    for _ in range(9):
        course.met()
        clock.now_s += 1.1
        assert not course.ended(0, "no answer for 1 s")
    assert state.num_cuts == 0 and state.num_outages == 1
    assert state.down_s == pytest.approx(9.9)
    assert len(said) == 1 and "greetings pass, data do not (no answer" in said[0]
    course.met()
    clock.now_s += 1.1
    with pytest.raises(LinkClosed, match=r"greetings pass, data do not .* Lower the MTU"):
        course.ended(0, "no answer for 1 s")


def test_data_and_nothing_else_bring_a_line_back(clock: Clock) -> None:
    said: list[str] = []
    state = LineState("b", say=said.append)
    course = course_of(state)
    course.met()
    course.carries(0)
    assert state.text is None and not course.failed("later")
    clock.now_s += 50.0
    assert course.ended(0, "the connection was closed")  # down from here on, not from the start
    clock.now_s += 4.0
    course.failed("nobody dials")
    course.met()
    assert state.text == "line to b down for 4 s"
    course.carries(0)
    assert state.text is None
    assert (state.num_cuts, state.num_outages, state.outage_s) == (1, 1, 4.0)
    assert said == [
        "the line to b is down (nobody dials); dialling for 6 s",
        "the line to b is back after 4 s",
    ]


def test_an_outage_lasts_until_all_streams_carry_again(clock: Clock) -> None:
    state = LineState("b")
    streams = [course_of(state, name) for name in ("forward", "backward")]
    for number in (0, 1):
        for stream in streams:
            stream.met()
            stream.carries(number)
    assert streams[0].ended(0, "cut")
    assert state.num_outages == 0  # another connection of that stream carries on
    streams[0].ended(1, "cut")
    streams[1].ended(0, "cut")
    clock.now_s += 2.0
    streams[0].carries(0)
    streams[1].ended(1, "cut")
    clock.now_s += 3.0
    streams[1].carries(0)
    assert (state.num_cuts, state.num_outages, state.outage_s) == (4, 2, 5.0)


def test_a_peer_that_has_greeted_is_not_waited_for_as_one_that_never_came(clock: Clock) -> None:
    met, course = (course_of(LineState("b"), first_within_s=5.0) for _ in range(2))
    clock.now_s += 4.0
    assert not course.failed("nobody dials") and not met.failed("nobody dials")
    met.met()
    clock.now_s += 1.0
    assert not course.failed("nobody dials")
    clock.now_s += 1.0
    with pytest.raises(LinkTimeout, match=r"no line to b in 5 s"):
        course.failed("nobody dials")
    assert not met.failed("cut")
    clock.now_s += 8.0  # ten since it greeted
    assert not met.failed("cut")
    clock.now_s += 0.1
    with pytest.raises(LinkClosed, match=r"down for 10 s \(cluster.reconnect_s\): cut$"):
        met.failed("cut")


def test_a_rank_that_does_not_come_is_spoken_of_after_two_seconds_and_once_a_minute(
    clock: Clock,
) -> None:
    said: list[str] = []
    state = LineState("b", say=said.append)
    course = course_of(state, first_within_s=1e3)
    course.failed("nobody dials")
    clock.now_s += 1.9
    course.failed("nobody dials")
    assert said == []
    clock.now_s += 0.1
    course.failed("nobody dials")
    clock.now_s += 59.0
    course.failed("nobody dials")
    clock.now_s += 1.0
    course.failed("nobody dials")
    assert said == [f"waiting for b, {waited} s: nobody dials" for waited in (2, 62)]
    course.met()
    course.carries(0)
    state.lacks("2 of 3 are there")
    assert said[2:] == ["the line to b lacks connections: 2 of 3 are there"]
    state.waits("it begins again")
    clock.now_s += 2.0
    state.waits("it begins again")
    assert said[3:] == ["waiting for b, 2 s: it begins again"]


def test_a_peer_lives_while_its_line_is_awaited_and_only_then(clock: Clock) -> None:
    """A line that is down is no sign that the rank is; one that never came gives no sign."""
    peer = Peer()
    course = Course("forward", LineState("b"), peer, first_within_s=60.0, reconnect_s=10.0)
    course.failed("nobody dials")
    assert peer.silent_s == float("inf")
    course.met()
    assert peer.silent_s < 10.0
    peer.forget()
    course.carries(0)
    course.ended(0, "cut")
    assert peer.silent_s < 10.0


def test_what_a_connection_carried_is_forgotten_with_it(clock: Clock) -> None:
    """So the next ones of the same number count as empty until they carry, and a reason names
    packets that are too long only while nothing has passed since."""
    state = LineState("b")
    course = course_of(state)
    course.met()
    assert not course.ended(0, "cut") and not course.has_carried
    course.carries(0)
    assert course.has_carried
    assert course.ended(0, "cut")
    clock.now_s += 10.1
    with pytest.raises(LinkClosed, match=r"reconnect_s\): cut$"):  # and nothing of packets
        course.failed("cut")
    assert state.num_cuts == 1
    assert state.down_s == pytest.approx(10.1)
    state.is_down("another", since_s=clock.now_s - 30.0, until_s=clock.now_s, reason="cut")
    assert state.down_s == pytest.approx(30.0)  # of the stream that has waited longest
    state.sent_again(3)
    state.sent_again(4)
    assert state.sent_again_bytes == 7


def test_a_line_is_back_once_its_last_stream_is(clock: Clock) -> None:
    said: list[str] = []
    state = LineState("b", say=said.append)
    began_s = clock.now_s
    clock.now_s += 5.0
    for stream in ("one", "two"):
        state.is_down(stream, since_s=began_s, until_s=began_s + 90.0, reason="cut")
    assert said == ["the line to b is down (cut); dialling for 85 s"]
    clock.now_s += 20.0
    state.came_back("one")
    assert len(said) == 1 and state.outage_s == 0.0
    clock.now_s += 5.0
    state.came_back("two")
    assert said[1:] == ["the line to b is back after 30 s"]
    assert state.outage_s == pytest.approx(30.0)


def test_once_what_matters_is_done_the_end_of_a_connection_is_no_cut(clock: Clock) -> None:
    state = LineState("b")
    course = course_of(state)
    course.met()
    course.carries(0)
    course.linger_until_s = clock.now_s + 30.0
    course.ended(0, "the connection was closed")
    assert (state.num_cuts, state.num_outages) == (0, 0)
    clock.now_s += 29.0
    assert not course.failed("nobody dials")
    clock.now_s += 2.0
    assert course.failed("nobody dials")


def test_a_reason_is_said_once_a_minute_and_a_stranger_fills_no_memory(clock: Clock) -> None:
    said: list[str] = []
    speaks = terminal.OnceAMinute(said.append)
    speaks("a", reason="1")
    speaks("b", reason="1")
    clock.now_s += 61.0
    speaks("c", reason="1")
    assert said == ["a", "c"]
    for number in range(1000):
        speaks(f"stranger {number}")
        assert len(speaks._said_at_s) <= 100

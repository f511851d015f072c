import json

import pytest

from xcloud.comm.step_clock import Place, RecordedStep, Span
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.link import LinkName, MessageLog, ReceivedMessage, SentMessage
from xcloud.rank.reports import nearest_to_median, timeline_events

FORWARD = LinkName(0, 0, 1)
BACKWARD = LinkName(0, 1, 0)


def recorded(num_spans: int = 1, step: int = 7) -> RecordedStep:
    spans = [
        Span("forward", 100.0 + i * 1e-3, 100.0005 + i * 1e-3, Place("forward", 0, i))
        for i in range(num_spans)
    ]
    return RecordedStep(step, 99.9, 102.0, spans)


def sent(key: MessageKey, at_s: float, sequence: int = 0) -> SentMessage:
    return SentMessage(FORWARD, key, sequence, 640, at_s, at_s + 0.1, at_s + 0.2)


@pytest.mark.parametrize(
    ("steps", "step_s", "chosen"),
    [
        ([1], [9.0], 1),
        ([1, 2], [1.0, 9.0], 2),  # step 1 warms every cache
        ([1, 2, 3, 4], [9.0, 1.0, 2.0, 3.0], 3),
        ([5, 6, 7, 8], [1.0, 1.0, 7.0, 1.0], 8),  # the latest of equals
        ([5, 6, 7, 8], [1.0, 2.0, 2.9, 9.0], 7),  # nearest to 2.45
    ],
)
def test_the_typical_step_is_the_one_nearest_to_the_median(
    steps: list[int], step_s: list[float], chosen: int
) -> None:
    assert steps[nearest_to_median(steps, step_s)] == chosen


def test_moments_are_microseconds_since_the_ranks_own_start() -> None:
    log = MessageLog(1)
    log.sent.append(sent(MessageKey(Kind.ACTIVATION, 7, 3), 100.0))
    log.received.append(ReceivedMessage(BACKWARD, MessageKey(Kind.GRADIENT, 7, 3), 5, 101.0))

    (event,) = timeline_events(recorded(), log)

    assert event["step"] == 7
    assert event["started_us"] == 99_900_000
    assert event["step_us"] == 2_100_000
    assert event["spans"] == [["forward", "forward", 0, 0, 100_000, 100_500]]
    assert event["sent"] == [
        [0, 1, 0, "activation", 3, 640, 100_000, 200_000, 300_000],
    ]
    assert event["received"] == [[0, 1, 5, 1_100_000]]


def test_a_moment_that_two_ranks_share_is_the_same_microsecond_for_both() -> None:
    """Rounding each against its own start would make messages on one line overlap."""
    shared_s = 123.4567894999
    at = []
    for started_at_s in (123.4000004, 123.3999996, 120.1234567):
        step = RecordedStep(1, started_at_s, 124.0, [])
        log = MessageLog(1)
        log.sent.append(sent(MessageKey(Kind.ACTIVATION, 1, 0), shared_s))
        (event,) = timeline_events(step, log)
        at.append(event["started_us"] + event["sent"][0][6])

    assert len(set(at)) == 1


def test_messages_of_other_steps_are_left_out_and_reports_kept_by_time() -> None:
    log = MessageLog(1)
    for number, step in enumerate((6, 7, 8)):
        log.sent.append(sent(MessageKey(Kind.ACTIVATION, step, 0), 100.0, number))
    for number, at_s in enumerate((90.0, 99.0, 101.0, 110.0)):
        log.sent.append(sent(MessageKey(Kind.REPORT), at_s, 10 + number))

    (event,) = timeline_events(recorded(), log)

    assert [message[2] for message in event["sent"]] == [1, 11, 12]


def test_a_long_step_is_dealt_to_lines_that_the_report_link_can_carry() -> None:
    log = MessageLog(1)
    for number in range(1200):
        log.sent.append(sent(MessageKey(Kind.ACTIVATION, 7, number), 1e6 + number, number))

    events = list(timeline_events(recorded(num_spans=3000), log))

    assert len(events) > 3
    assert all(len(json.dumps(event)) < 1 << 17 for event in events)
    assert [s[3] for e in events for s in e["spans"]] == list(range(3000))
    assert [m[2] for e in events for m in e["sent"]] == list(range(1200))

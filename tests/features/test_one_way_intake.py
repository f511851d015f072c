"""What the consumer of a one-way job tells of its producers and of its steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xcloud.comm.step_clock import StepClock
from xcloud.contracts.one_way import SUMS
from xcloud.features.one_way import intake as intake_module
from xcloud.features.one_way.feed import ConsumptionPlan, Feed, Presence
from xcloud.features.one_way.intake import Arrived, Inbox, Intake
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.net.failure_detector import Peer
from xcloud.net.link_profile import FREE, LinkProfile

LINE = LinkProfile(1e6, 0.01)
CLOUDS = {"one": OneWayCloud(share=0.5), "two": OneWayCloud(share=0.5)}


class Told:
    """A rank of the consumer, and what it reports."""

    def __init__(self, group_rank: int = 0, link: LinkProfile | str = LINE, **feed: Any) -> None:
        clouds = {**CLOUDS, "d": OneWayCloud(num_ranks=1 + group_rank)}
        layout = OneWayLayout(clouds, link)
        settings = Feed(**feed)
        self.plan = ConsumptionPlan(layout, 4, settings)
        self.plan.state = [Presence.ACTIVE] * 2
        self.inbox = Inbox(layout, 100, {rank: Peer() for rank in range(layout.num_ranks)})
        self.events: list[dict[str, Any]] = []
        self.notes: list[str] = []
        reporter: Any = SimpleNamespace(
            event=lambda kind, **fields: self.events.append({"event": kind, **fields}),
            note=self.notes.append,
        )
        job: Any = SimpleNamespace(cluster=layout, feed=settings)
        self.clock = StepClock()
        self.intake = Intake(job, reporter, self.plan, self.inbox, group_rank, self.clock)


def test_a_producer_that_falls_silent_is_told_once_and_again_when_it_sends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake_module, "POLL_S", 0.0)
    silent_s = {0: 0.0, 1: 0.0}
    ranks = [Told(rank, slow_after_s=10.0) for rank in (0, 1)]
    for told in ranks:
        monkeypatch.setattr(told.inbox, "silent_s", silent_s.__getitem__)
    for step, seconds in enumerate([10.0, 10.5, 99.0, 0.0, 11.0], start=1):
        silent_s[1] = seconds
        for told in ranks:
            assert told.intake.collect(step, told.plan.round()) == []
    first, other = ranks
    assert [(e["event"], e["producer"], e["state"], e["step"]) for e in first.events] == [
        ("producer", "two", "slow", 2), ("producer", "two", "active", 4),
        ("producer", "two", "slow", 5),
    ]  # fmt: skip
    assert first.notes[0] == (
        "producer two has sent nothing for 10 s (feed.slow_after_s); waiting for it (step 2)"
    )
    assert first.notes[1] == "producer two sends again (step 4)"
    assert not other.events and not other.notes, "the first rank speaks for all"
    first.inbox.set_ended(1, "gone")
    first.intake.collect(6, first.plan.round())
    assert len(first.events) == 4 and first.events[3]["state"] == "active"


def test_who_has_nothing_to_take_waits_until_a_producer_is_ready_or_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    told.plan.state = [Presence.ABSENT, Presence.DEAD]
    ends: list[bool] = []

    def wait(timeout_s: float, until: Any) -> None:
        assert 0 < timeout_s < 1
        ends.append(until())
        told.inbox.set_ready(0)
        ends.append(until())

    monkeypatch.setattr(told.inbox, "wait", wait)
    told.inbox.set_ended(1, "gone long ago")
    assert told.intake.collect(1, told.plan.round()) == [] and ends == [False, True]


def test_a_step_takes_what_has_come_and_does_without_what_an_ended_producer_owes() -> None:
    told = Told()
    told.plan.orders()
    assert told.plan.step_slots(0) == [0, 1, 0, 1]
    box = told.inbox._boxes[0].waiting
    box.extend(Arrived(0, 0, number, torch.zeros(1), 30) for number in (1, 2))
    told.inbox.set_ended(0, "killed")
    told.inbox.set_ended(1, "killed")
    mine = told.plan.round(len(SUMS))
    assert [one.number for one in told.intake.collect(1, mine)] == [1, 2]
    assert mine.consumed.tolist() == [[2], [0]] and mine.skipped.tolist() == [[0], [2]]
    assert told.intake.skipped == {"two": 2}
    told.intake.await_ordered()
    told.intake.look(mine)
    assert mine.dead.tolist() == [1, 1] and mine.ready.tolist() == [0, 0]


def test_who_comes_and_goes_is_told_with_who_takes_over() -> None:
    go_on, stops = Told(), Told(on_dead="stop")
    go_on.intake.changed(3, 1, now=Presence.ACTIVE, why_gone="")
    go_on.intake.changed(4, 1, now=Presence.DEAD, why_gone="killed")
    stops.intake.changed(4, 1, now=Presence.DEAD, why_gone="killed")
    go_on.plan.state[0] = Presence.DEAD
    go_on.intake.changed(5, 1, now=Presence.DEAD, why_gone="killed")
    assert go_on.notes == [
        "producer two is ready (step 3)",
        "producer two is gone (killed); one take over its share (step 4)",
        "producer two is gone (killed); nobody else feeds (step 5)",
    ]
    assert stops.notes == ["producer two is gone (killed) (step 4)"]
    assert [event["state"] for event in go_on.events] == ["active", "dead", "dead"]


def test_a_step_is_told_with_what_was_fed_by_whom_and_what_it_taught() -> None:
    sums = dict(zip(SUMS, [12.0, 8.0, 2.0, 40.0, 3.0, 1.0, 2.0], strict=True))
    told = Told()
    told.clock.begin_step(3)
    told.intake.used = [
        Arrived(0, 0, 1, torch.zeros(1), 100), Arrived(0, 0, 2, torch.zeros(1), 50),
        Arrived(1, 1, 1, torch.zeros(1), 30),
    ]  # fmt: skip
    told.intake.skipped["two"] = 1
    told.intake.end_step(3, other_bytes=50, sums=sums, is_skipped=False)
    [event] = told.events
    seconds = {*told.clock.seconds, "step_s"}
    assert seconds <= event.keys()
    assert {name: value for name, value in event.items() if name not in seconds} == {
        "event": "step", "step": 3, "sent": {"forward": 180, "other": 50},
        "taken": {"one": 2, "two": 1}, "skipped": {"two": 1},
        "fed_bytes": {"one": 150, "two": 30},
        "line_s": {
            "one": pytest.approx(LINE.line_s(100) + LINE.line_s(50)),
            "two": pytest.approx(LINE.line_s(30)),
        },
        "samples": 2, "tokens": 40, "loss": 1.5, "values": {"precision": 0.75, "recall": 0.6},
    }  # fmt: skip

    told.clock.begin_step(4)
    told.intake.end_step(4, other_bytes=70, sums=sums, is_skipped=True)
    event = told.events[1]
    assert event["sent"] == {"forward": 0, "other": 20} and not event["taken"]
    assert not event["skipped"] and event["samples"] == 2
    assert not {"loss", "values"} & event.keys()
    free = Told(group_rank=1, link=FREE)
    free.clock.begin_step(1)
    free.intake.used = [Arrived(0, 0, 1, torch.zeros(1), 100)]
    free.intake.end_step(1, other_bytes=0, sums={}, is_skipped=False)
    [event] = free.events
    assert event["taken"] == {"one": 1} and not {"samples", "tokens", "loss"} & event.keys()


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ((3, 1, 9), {"precision": 0.75, "recall": 0.25}),
        ((0, 4, 2), {"precision": 0.0, "recall": 0.0}),
        ((0, 0, 2), {"recall": 0.0}),  # nothing was found, so no share of it was right
        ((0, 2, 0), {"precision": 0.0}),
        ((0, 0, 0), {}),
    ],
)
def test_precision_and_recall_are_shares_of_what_was_found_and_of_what_was_there(
    counts: tuple[int, int, int], found: dict[str, float]
) -> None:
    told = Told()
    told.clock.begin_step(1)
    sums = dict(zip(SUMS, map(float, (12, 8, 2, 40, *counts)), strict=True))
    told.intake.end_step(1, other_bytes=0, sums=sums, is_skipped=False)
    assert told.events[0]["values"] == found

"""The end of a one-way job, and its live line; no processes."""

import io
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.electra_reference import feed_context
from tests.one_way_toy import ToyConsumer, ToyFeed, ToyProducer, feed_config
from tests.one_way_toy import cloud as feed_cloud
from xcloud.base.errors import LinkError, LinkTimeout
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing
from xcloud.features.one_way.consumer import ConsumerRank, ConsumerRun
from xcloud.features.one_way.feed import NOBODY, Order
from xcloud.features.one_way.intake import Inbox
from xcloud.features.one_way.job import OneWayExperiment
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.features.one_way.producer import OrderBook, ProducerRank, ProducerRun
from xcloud.features.one_way.ranks import OneWayEnds
from xcloud.job.config import Settings
from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.net.link_end import ReceivingEnd, SendingEnd
from xcloud.net.memory_transport import MemoryWorld
from xcloud.net.peer import Peer
from xcloud.pipeline.exchange import RankGroup
from xcloud.pipeline.settings import Checkpoints
from xcloud.pipeline.trainer import DivergenceGuard
from xcloud.rank.reports import MemoryMeter
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.events import StepTotals
from xcloud.record.reporter import Reporter
from xcloud.show.display import ProgressLine


def test_a_producer_ends_with_the_stop_unless_its_ranks_must_end_together() -> None:
    rows = torch.tensor([[1, 0, 9], [2, 1, 9], [3, NOBODY, 9]], dtype=torch.int32)
    for may_drop, left in (
        (False, [Order(0, 2, 1, 9), Order(0, 3, NOBODY, 9), None]),
        (True, [None]),
    ):
        book = OrderBook(num_consumers=2)
        book.take_orders(frame(Kind.ORDER, rows))
        assert book.next(may_drop) == Order(0, 1, 0, 9)
        book.take_stop(frame(Kind.STOP))
        assert [book.next(may_drop) for _ in left] == left


def frame(kind: Kind, *parts: torch.Tensor) -> Frame:
    return Frame(MessageKey(kind), parts, 0, 0.0, 0)


@pytest.mark.parametrize(
    ("group_size", "frozen", "made"), [(1, False, 0), (2, False, 3), (2, True, 0)]
)
def test_what_is_ordered_and_not_begun_is_dropped_at_the_end_where_it_may_be(
    group_size: int, frozen: bool, made: int, tmp_path: Path
) -> None:
    book, lines = OrderBook(), []
    context = feed_context(Path(), num_steps=9, report=lines.append, producers=["a"], cloud="a")
    part = ToyProducer(ToyFeed(frozen=frozen), context)
    reporter = Reporter(1, "a", lines.append)
    rank = SimpleNamespace(
        group=RankGroup(1, (*range(1, 1 + group_size),)), reporter=reporter,
        divergence_guard=DivergenceGuard, memory=MemoryMeter(torch.device("cpu")),
        computing_in=lambda clock, what: nullcontext(), orders=book,
    )  # fmt: skip
    rows = torch.tensor([[number, NOBODY, 7] for number in (1, 2, 3)], dtype=torch.int32)
    book.take_orders(frame(Kind.ORDER, rows))
    book.take_stop(frame(Kind.STOP))

    run = ProducerRun(cast(ProducerRank, rank), part, "a")
    checkpoints = Checkpointer(
        Timing(Checkpoints(0, 0)),
        CheckpointWriter(CheckpointFolder(tmp_path), 1, {}),
        None,
        {},
        reporter,
    )
    run.feed(checkpoints)
    reporter.flush()
    told = [json.loads(line) for chunk in lines for line in chunk.splitlines()]
    assert sum(event["num_batches"] for event in told) == made
    assert part.num_steps == (7 if made else 9)


class Closing:
    """OneWayEnds that closes or fails, in an order that the test sees."""

    def __init__(self, closed: list[str], name: str, error: LinkError | None = None) -> None:
        self._closed, self._name, self._error = closed, name, error

    def close(self, timeout_s: float) -> None:
        self._closed.append(self._name)
        if self._error is not None:
            raise self._error


class ClosingOut(Closing, SendingEnd):
    def _put(self, item: object) -> None: ...


class ClosingIn(Closing, ReceivingEnd):
    has_closed = True


def test_the_consumer_takes_leave_before_it_waits_and_names_who_did_not(tmp_path: Path) -> None:
    """A producer waits for no evaluation, and one that is lost is no error at the end."""
    clouds = {"d": OneWayCloud(), "a": OneWayCloud(share=1.0), "b": OneWayCloud(share=1.0)}
    ends = OneWayEnds(MemoryWorld().transport(0), OneWayLayout(clouds, "free"), tmp_path)
    closed: list[str] = []
    lost = LinkTimeout("sent no heartbeat")
    for peer, error in ((1, lost), (2, None)):
        both = (ClosingIn(closed, f"from {peer}", error), ClosingOut(closed, f"to {peer}"))
        ends._ends += [(peer, end) for end in both]

    assert ends.part_from([1, 2], 60.0) == {1}
    assert closed == ["to 2", "to 1", "from 2", "from 1"]


def consumer(rank: int, clouds: dict[str, object], **feed: object) -> ConsumerRank:
    """Without links."""
    role, config = object.__new__(ConsumerRank), feed_config(clouds, feed=feed)
    role.rank, role.job = rank, cast(OneWayExperiment, Settings.of(config).job)
    lives = {rank: Peer() for rank in range(role.job.cluster.num_ranks)}
    role.inbox, role._outs = Inbox(role.job.cluster, 100, lives), []
    return role


def test_a_checkpoint_needs_a_lost_producer_until_the_plan_knows_of_its_loss() -> None:
    """Else the plan goes on from it counting on batches that nobody makes again."""
    clouds = {"disc": feed_cloud(1), "one": feed_cloud(1, 1.0), "two": feed_cloud(1, 1.0)}
    context = feed_context(Path(), num_steps=9)
    role = consumer(0, clouds)
    role.group, role.place = RankGroup.alone(), role.job.cluster.placement(0)
    role.context, role.reporter = SimpleNamespace(run_dir=Path()), Reporter(0, "disc", print)
    role.control = SimpleNamespace(out={1: None, 2: None})
    run, given_up = ConsumerRun(role, ToyConsumer(ToyFeed(), context)), []
    for source in (0, 1):
        role.inbox.set_ready(source)
    role.inbox.set_ended(1, "killed")
    assert [*role.control.out] == [1, 2]

    checkpoints = cast(Checkpointer, SimpleNamespace(lose=given_up.append))
    agreed = run.plan.round()
    agreed.ready[:], agreed.dead[1] = 1, 1
    run._move_on(1, agreed, checkpoints)
    assert [*role.control.out] == [1] and given_up == [2]


def test_the_live_line_shows_the_busiest_of_links_that_differ() -> None:
    line = ProgressLine(10, stream=(stream := io.StringIO()))
    event = {
        "event": "step", "rank": 0, "cloud": "d", "t": 9.0, "step": 1, "step_s": 2.0,
        "taken": {"a": 1},        "line_s": {"a": 0.5, "b": 0.1}, "sent": {"forward": 600},
    }  # fmt: skip
    line.update(StepTotals.of(1, {0: event, 1: event | {"rank": 1, "line_s": {"b": 0.9}}}))
    line.close()

    assert "link 50 %" in stream.getvalue()


def test_a_consumer_needs_a_producer_that_is_not_silent_as_long_as_it_is_fed() -> None:
    """Its first rank, which hears of all. What becomes of one that has ended the plan knows."""
    clouds = {"disc": feed_cloud(2), "one": feed_cloud(2, 1.0), "two": feed_cloud(1, 1.0)}

    def needed(role: ConsumerRank) -> list[bool]:
        return [role.needs(frozenset(lost)) for lost in ({1, 0}, {2, 3}, {2, 4})]

    role = consumer(0, clouds, on_slow="redistribute")
    assert needed(role) == [True, False, True]
    assert needed(consumer(0, clouds, on_slow="wait")) == [True, True, True]
    assert needed(consumer(1, clouds, on_slow="redistribute")) == [True, False, False]
    role.inbox.set_ended(0, "gone")
    assert needed(role) == [True, False, True] and not role.needs(frozenset({3}))
    role.send_stop()
    assert needed(role) == [True, False, False]
    producer = object.__new__(ProducerRank)
    producer.rank, producer.job = 2, role.job
    assert needed(producer) == [True, True, True] and not producer.needs(frozenset({4}))

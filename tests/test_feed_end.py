"""The end of a one-way job, and its live line; no processes."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch

from tests.feed_toy import ToyFeed, ToyProducer
from xcloud.cluster.frame import Frame, Kind, MessageKey
from xcloud.cluster.gloo_link import GlooInLink, GlooOutLink
from xcloud.errors import LinkTimeout
from xcloud.feed_producer import ProducerRun, feed
from xcloud.feed_wiring import CloudGroup, ConsumerWiring, ProducerWiring
from xcloud.parallel.feed_inbox import FeedInbox
from xcloud.parallel.feed_orders import NOBODY, OrderBook, Ordered
from xcloud.parallel.feed_parts import FeedContext
from xcloud.parallel.feed_plan import Source
from xcloud.record.events import StepTotals
from xcloud.report.feed_progress import FeedProgressLine
from xcloud.reporter import Reporter


def test_a_producer_ends_with_the_stop_unless_its_ranks_must_end_together() -> None:
    book = OrderBook()
    rows = torch.tensor([[1, 0, 9], [2, 1, 9]], dtype=torch.int32)
    book.take_orders(frame(Kind.ORDER, rows))
    assert book.next(may_drop=True) == Ordered(1, 0, 9)
    book.take_stop(frame(Kind.STOP, torch.tensor([3], dtype=torch.int32)))

    assert book.next(may_drop=False) == Ordered(2, 1, 9)
    assert book.next(may_drop=False) == Ordered(3, NOBODY, 9)
    assert book.next(may_drop=False) is None

    book.take_orders(frame(Kind.ORDER, rows))
    assert book.next(may_drop=True) is None


def frame(kind: Kind, *parts: torch.Tensor) -> Frame:
    return Frame(MessageKey(kind), parts, 0, 0.0, 0)


@pytest.mark.parametrize(
    ("num_lanes", "frozen", "made"), [(1, False, 0), (2, False, 3), (2, True, 0)]
)
def test_what_is_ordered_and_not_begun_is_dropped_at_the_end_where_it_may_be(
    num_lanes: int, frozen: bool, made: int
) -> None:
    book, lines = OrderBook(), []
    context = FeedContext(1, torch.device("cpu"), Path(), lambda: None, lines.append, 9)
    part, cloud = ToyProducer(ToyFeed(frozen=frozen), 0, "a", 0, context), CloudGroup(None, 0, 0)
    reporter = Reporter(1, "a", lines.append)
    wiring = ProducerWiring(cloud, [], [], cast(GlooOutLink, None), book, [])
    rows = torch.tensor([[1, NOBODY, 7], [2, NOBODY, 7]], dtype=torch.int32)
    book.take_orders(frame(Kind.ORDER, rows))
    book.take_stop(frame(Kind.STOP, torch.tensor([3], dtype=torch.int32)))

    feed(ProducerRun(part, cloud, num_lanes, "a", reporter), wiring)
    reporter.flush()
    told = [json.loads(line) for chunk in lines for line in chunk.splitlines()]
    assert sum(event["num_batches"] for event in told) == made
    assert part.num_steps == (7 if made else 9)


class ClosingLink:
    """Ends well at the third look; what comes meanwhile shows that its peer is there."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.said_goodbye, self._left, self._meanwhile = False, 2, meanwhile

    def close(self, timeout_s: float) -> None:
        if self._left:
            self._left -= 1
            self._meanwhile()
            raise LinkTimeout("did not say goodbye")
        self.said_goodbye = True


@pytest.mark.parametrize("still_sends", [True, False])
def test_the_end_of_a_producer_is_waited_for_while_it_sends(still_sends: bool) -> None:
    source = Source(0, 0)
    wiring = ConsumerWiring(CloudGroup(None, 0, 0), FeedInbox([source], 100))

    def hear() -> None:
        if still_sends:
            wiring.heard_at_s[source] = wiring.heard_at_s.get(source, 0.0) + 1.0

    wiring.ins = {source: cast(GlooInLink, ClosingLink(hear))}

    assert wiring.close(60.0, 3.0) == ({} if still_sends else {0: "did not say goodbye"})


def test_the_live_line_shows_the_busiest_of_links_that_differ() -> None:
    line = FeedProgressLine(10, stream=(stream := io.StringIO()))
    event = {
        "event": "step", "rank": 0, "cloud": "d", "step": 1, "step_s": 2.0, "taken": {"a": 1},
        "line_s": {"a": 0.5, "b": 0.1}, "sent": {"forward": 600},
    }  # fmt: skip
    line.show(event)
    line.show(event | {"rank": 1, "line_s": {"b": 0.9}})
    line.update(StepTotals.of(1, {0: event, 1: event | {"rank": 1}}))
    line.close()

    assert "link 50 %" in stream.getvalue()

"""The parts of a one-way job go on from the state of others, bit for bit."""

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.channels import same_state, stored
from tests.combinations import SAVED, interrupted, losses, run, state
from tests.electra_reference import Reference, feed_context, small_electra
from tests.golden import one_way
from tests.one_way_toy import ToyFeed
from tests.runs import wait_for
from xcloud.base.errors import FrameError
from xcloud.cluster.frame import Frame, Kind, MessageKey
from xcloud.cluster.liveness import PeerLife
from xcloud.cluster.one_way_layout import OneWayCloud, OneWayLayout
from xcloud.comm.state import State, Stateful
from xcloud.job.one_way import OneWayExperiment, OneWayTraining
from xcloud.parallel.one_way.feed import Feed
from xcloud.parallel.one_way.inbox import Inbox
from xcloud.parallel.one_way.orders import NOBODY, OrderBook, Ordered
from xcloud.parallel.one_way.plan import ConsumptionPlan, Order, Round, Source
from xcloud.parallel.rank_group import RankGroup
from xcloud.rank.one_way.consumer import ConsumerRun
from xcloud.rank.one_way.feeding import LocalFeeding
from xcloud.rank.one_way.producer import ProducerRun
from xcloud.record.reporter import Reporter
from xcloud.record.tracking import NullTracker
from xcloud.training.memory_meter import MemoryMeter
from xcloud.training.trainer import DivergenceGuard

CLOUDS = {"a": OneWayCloud(share=0.7), "b": OneWayCloud(share=0.3), "hub": OneWayCloud()}


class LocalJob:
    """Producers and consumer in turn, as with cluster=local; `state` is of all of them."""

    def __init__(self, order: Any) -> None:
        job = OneWayExperiment(
            name="toy", model=ToyFeed(), cluster=OneWayLayout(CLOUDS, form="local"),
            training=OneWayTraining(9, 4), tracker=NullTracker(), feed=Feed(order=order),
        )  # fmt: skip
        self.events: list[bytes] = []
        reporter, alone = Reporter(0, "hub", self.events.append), RankGroup.alone()
        self.parts = [job.model.producer(i, name, 0, 1, self.context()) for i, name in
                      enumerate(job.cluster.producers)]  # fmt: skip
        for part in self.parts:
            part.optimizer = torch.optim.Adam(part.net.parameters(), 0.1)  # one with moments
        self.producers = [
            ProducerRun(
                part, alone, 1, name, reporter, DivergenceGuard(), MemoryMeter(torch.device("cpu"))
            )
            for part, name in zip(self.parts, job.cluster.producers, strict=True)
        ]
        feeding = LocalFeeding(self.producers, job.model.max_payload_bytes)
        consumer = job.model.consumer(0, 1, self.context())
        self.consumer = ConsumerRun(
            job, feeding, consumer, 1, reporter, Path(), MemoryMeter(torch.device("cpu"))
        )

    def context(self) -> Any:
        return feed_context(Path(), num_steps=9)

    @property
    def stateful(self) -> list[Stateful]:
        return [self.consumer, *self.producers]

    @property
    def state(self) -> list[State]:
        return [part.state_dict() for part in self.stateful]


@pytest.mark.parametrize("order", ["fixed", "arrival"])
@pytest.mark.parametrize("num_steps", [0, 1, 4, 8])
def test_a_job_in_one_process_goes_on_bit_for_bit(order: str, num_steps: int) -> None:
    original, restored = LocalJob(order), LocalJob(order)
    original.consumer.train(num_steps)
    state = original.state
    kept = [stored(one) for one in state]
    original.consumer.train()
    for part, one in zip(restored.stateful, kept, strict=True):
        part.load_state_dict(one)
    restored.consumer.train()

    assert same_state(state, kept)
    assert same_state(restored.state, original.state)
    assert [part.num_steps for part in restored.parts] == [p.num_steps for p in original.parts]
    assert original.state[0]["step"] == 9
    assert len(original.state[0]["inbox.batches"]) > 0  # type: ignore[arg-type]


@pytest.mark.parametrize("left_out", ["inbox.", "part."])
def test_a_job_that_lacks_one_of_them_goes_on_with_something_else(left_out: str) -> None:
    restored = lacking(left_out)
    restored.consumer.train(5)
    original = LocalJob("fixed")
    original.consumer.train(5)

    assert not same_state(restored.state, original.state)


def test_a_job_that_lacks_its_plan_orders_what_it_has_had() -> None:
    with pytest.raises(FrameError, match="came after number"):
        lacking("plan.").consumer.train(5)


def lacking(left_out: str) -> LocalJob:
    """After four steps, with one part of the consumer's state as before the first."""
    original, restored, fresh = LocalJob("fixed"), LocalJob("fixed"), LocalJob("fixed")
    original.consumer.train(4)
    state, new = original.state, fresh.state
    state[0] |= {key: value for key, value in new[0].items() if key.startswith(left_out)}
    state[0] = {k: v for k, v in state[0].items() if not k.startswith(left_out) or k in new[0]}
    for part, one in zip(restored.stateful, state, strict=True):
        part.load_state_dict(one)
    return restored


def next_steps(plan: ConsumptionPlan, draws: random.Random, num_steps: int) -> list[list[Order]]:
    """With producers that are late, silent and lost now and then; as the draws say."""
    everyone, ordered = [plan.num_consumers] * len(plan.shares), []
    for _ in range(num_steps):
        ordered.append(plan.orders())
        consumed: dict[tuple[Source, int], int] = {}
        skipped: dict[tuple[Source, int], int] = {}
        for consumer in range(plan.num_consumers):
            ahead = plan.ordered - plan.consumed
            open_ = [source for source in plan.sources if ahead[source, consumer]]
            for source in plan.step_slots(consumer) or open_[: plan.per_consumer]:
                kept = skipped if draws.random() < 0.2 else consumed
                kept[source, consumer] = kept.get((source, consumer), 0) + 1
        slow = [int(draws.random() < 0.2) for _ in plan.shares]
        dead = [0] * (len(plan.shares) - 1) + [int(draws.random() < 0.05)]
        ready = everyone if draws.random() < 0.7 else [0] * len(plan.shares)
        plan.end_step(Round(consumed, skipped, ready, slow, dead))
    return ordered


@pytest.mark.parametrize("order", ["fixed", "arrival"])
@pytest.mark.parametrize("num_steps", [0, 1, 5, 23])
def test_a_plan_goes_on_with_the_same_orders(order: Any, num_steps: int) -> None:
    feed = Feed(8, order, on_slow="redistribute")
    original, restored = (
        ConsumptionPlan([0.5, 0.3, 0.2], [2, 1, 3], 2, 6, feed, 600) for _ in range(2)
    )
    next_steps(original, random.Random(1), num_steps)
    restored.load_state_dict(stored(original.state_dict()))
    ahead = [next_steps(plan, random.Random(2), 40) for plan in (original, restored)]

    assert ahead[0] == ahead[1] and sum(map(len, ahead[0])) > 100
    assert same_state([original.state_dict()], [restored.state_dict()])


def test_a_plan_of_other_producers_is_refused() -> None:
    plans = [ConsumptionPlan([1.0] * n, [1] * n, 1, 2, Feed(8)) for n in (2, 3)]
    with pytest.raises(ValueError, match=r"whole numbers 'counts' of shape \[3, 3\], got .*3, 2"):
        plans[1].load_state_dict(plans[0].state_dict())


SOURCES = [Source(0, 0), Source(0, 1), Source(1, 0)]


def batch(number: int, *payload: int) -> Frame:
    parts = (torch.tensor(payload, dtype=torch.uint8),)
    return Frame(MessageKey(Kind.BATCH, number), parts, number, 0.0, 100 + len(payload))


def test_an_inbox_goes_on_with_the_batches_that_were_waiting() -> None:
    original, restored = Inbox(SOURCES, 5), Inbox(SOURCES, 5)
    original.expect([Order(source, 1, 0, 9) for source in SOURCES])
    original.put(SOURCES[0], batch(1, 1, 2))
    original.put(SOURCES[0], batch(3))
    original.put(SOURCES[2], batch(2, 7))
    assert original.take(SOURCES[2]) is not None
    original.put(SOURCES[2], batch(4, 9, 9, 9))
    restored.load_state_dict(stored(original.state_dict()))

    assert same_state([restored.state_dict()], [original.state_dict()])
    assert [restored.is_due(p) for p in (0, 1)] == [original.is_due(p) for p in (0, 1)]
    with pytest.raises(Exception, match="came after number 4"):
        restored.put(SOURCES[2], batch(4))
    for source in SOURCES:
        while (expected := original.take(source)) is not None:
            found = restored.take(source)
            assert found is not None and torch.equal(found.payload, expected.payload)
            assert found._replace(payload=expected.payload) == expected
        assert restored.take(source) is None


def test_who_waits_for_batches_or_orders_says_for_which() -> None:
    lives = {source: PeerLife() for source in SOURCES}
    inbox, book = Inbox(SOURCES, 5, lives), OrderBook(lives[SOURCES[0]])

    def awaited() -> list[str]:
        found: list[str] = []

        def look() -> bool:
            found.extend(str(life.awaited[0]) for life in lives.values() if life.awaited)
            return True

        inbox.wait(0.0, look)
        time.sleep(0.6)  # so that it counts as over
        return found

    inbox.set_ready(SOURCES[0])
    assert awaited() == ["the word that it is ready"] * 2
    inbox.expect([Order(SOURCES[0], number, 0, 9) for number in (3, 5)])
    assert awaited() == ["batch 3"]
    inbox.put(SOURCES[0], batch(3))
    assert awaited() == ["batch 5"]

    waiting = threading.Thread(target=lambda: book.next(False))
    waiting.start()
    wait_for(lambda: lives[SOURCES[0]].awaited is not None, 10)
    assert lives[SOURCES[0]].awaited[0] == "orders after batch 0"  # type: ignore[index]
    rows = torch.tensor([[1, 0, 9]], dtype=torch.int32)
    book.take_orders(Frame(MessageKey(Kind.ORDER), (rows,), 0, 0.0, 0))
    waiting.join(10)


def test_what_was_ordered_for_nobody_may_still_be_ordered_for_a_rank() -> None:
    """Made to level the ranks of a cloud; also by a run that has gone on since."""
    book, again = OrderBook(), OrderBook()
    level, wanted = ([[2, consumer, 9]] for consumer in (NOBODY, 0))
    for rows in ([[1, 0, 9]], level, level, wanted):
        book.take_orders(orders(rows))
    assert [book.next(False) for _ in range(3)] == [
        Ordered(1, 0, 9), Ordered(2, NOBODY, 9), Ordered(2, 0, 9)
    ]  # fmt: skip
    again.begin_after(2, {2})
    again.take_orders(orders(wanted))
    assert again.next(False) == Ordered(2, 0, 9)
    for one in (book, again):
        with pytest.raises(FrameError, match="after number 2"):
            one.take_orders(orders(wanted))


def orders(rows: list[list[int]]) -> Frame:
    return Frame(MessageKey(Kind.ORDER), (torch.tensor(rows, dtype=torch.int32),), 0, 0.0, 0)


def test_ranks_of_a_producer_save_after_the_same_batch_and_go_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, of which one was ordered a batch more when the run saved: the other makes its
    own batch of that number, keeps it, and sends it once it is ordered."""
    job = one_way("clouds")
    run(job, tmp_path / "whole", monkeypatch)
    saved = state(tmp_path / "whole", SAVED)
    kept = [saved[f"rank-{rank} producer.kept"].tolist() for rank in (2, 3)]
    interrupted(tmp_path / "whole", tmp_path / "again")
    run(job, tmp_path / "again", monkeypatch)

    assert kept == [[], [[11, 56]]]
    parts = [name for name in saved if name.startswith("rank-2 producer.part")]
    assert parts
    for name in parts:
        assert torch.equal(saved[name], saved[name.replace("rank-2", "rank-3")]), name
    later = {key: loss for key, loss in losses(tmp_path / "whole").items() if key[0] > SAVED}
    assert losses(tmp_path / "again") == later and len(later) == 3


def test_an_order_book_wakes_who_waits_for_an_order() -> None:
    book, found = OrderBook(), []
    waiting = threading.Thread(target=lambda: found.append(book.next(False)))
    waiting.start()
    rows = torch.tensor([[1, 0, 9]], dtype=torch.int32)
    book.take_orders(Frame(MessageKey(Kind.ORDER), (rows,), 0, 0.0, 0))
    waiting.join(10)

    assert found == [Ordered(1, 0, 9)]


def test_generators_and_a_discriminator_go_on_bit_for_bit(tmp_path: Path) -> None:
    model = small_electra()
    generators = {name: replace(g, batch_size=8) for name, g in model.generators.items()}
    original, restored = (
        Reference(replace(model, generators=generators), feed_context(tmp_path)) for _ in range(2)
    )
    for _ in range(2):
        original.step()
    for before, after in zip(
        [original.consumer, *original.producers], [restored.consumer, *restored.producers],
        strict=True,
    ):  # fmt: skip
        after.load_state_dict(stored(before.state_dict()))
    restored.steps = original.steps

    assert [restored.step() for _ in range(2)] == [original.step() for _ in range(2)]
    assert restored.consumer.evaluate(0) == original.consumer.evaluate(0)
    with pytest.raises(ValueError, match="discriminator needs 'recent'"):
        restored.consumer.load_state_dict(restored.producers[0].state_dict())

"""How a one-way job goes on, ends, and is saved: the parts, bit for bit; no processes."""

import io
import json
import random
import shutil
import threading
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.channels import same_state, stored
from tests.combinations import SAVED, STEPS, interrupted, losses, run, state
from tests.electra_reference import Reference, feed_context, small_electra
from tests.golden import one_way
from tests.nightly import first_daily
from tests.one_way_toy import ToyConsumer, ToyFeed, ToyProducer, feed_config, feeding
from tests.one_way_toy import cloud as feed_cloud
from tests.runs import wait_for
from xcloud.base.errors import FrameError, LinkError, LinkTimeout
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing
from xcloud.features.one_way.consumer import ConsumerRank, ConsumerRun
from xcloud.features.one_way.feed import NOBODY, ConsumptionPlan, Feed, Order, unpacked
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


def whole_run(
    folder: Path, patch: pytest.MonkeyPatch, form: str, **training: Any
) -> OneWayExperiment:
    """A run of 6 steps that saves as said, or after the last one only."""
    saves = {"every_steps": 0, "every_minutes": 60.0, "keep": 9}
    made = {key: training.pop(key) for key in [*training] if key in saves}
    job = one_way(form)
    checkpoint = Checkpoints(**(saves | made))
    training = replace(job.training, checkpoint=checkpoint, **training)
    # A checkpoint is skipped while the one before it is being written.
    job = replace(job, training=training, model=ToyFeed(step_s=0.1))
    run(job, folder, patch)
    return job


def same_runs(one: Path, other: Path, step: int) -> bool:
    """In all that the ranks had saved after the step; not in how long a job was to be when a batch
    was ordered."""
    states = state(one, step), state(other, step)
    names = [name for name in states[0] if not name.endswith("plan.promised")]
    equal = [torch.equal(states[0][name], states[1][name]) for name in names]
    return states[0].keys() == states[1].keys() and len(equal) > 20 and all(equal)


@pytest.mark.parametrize("form", first_daily(["clouds", "local"], 1))
def test_a_job_goes_on_bit_for_bit_from_any_step(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = whole_run(tmp_path / "whole", monkeypatch, form, every_steps=1)
    names = sorted(path.name for path in (tmp_path / "whole/checkpoints").iterdir())
    # A step is passed over while an earlier one is still being written.
    assert len(names) > 1 and names[-1] == "step-000006"
    for name in names[:-1:2]:  # each takes a run, and all go one way
        again = tmp_path / f"from {name}"
        shutil.copytree(tmp_path / "whole/checkpoints" / name, again / "checkpoints" / name)
        run(job, again, monkeypatch)
        assert same_runs(tmp_path / "whole", again, STEPS)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("form", ["clouds", "local"])
def test_the_last_step_is_saved_too_so_that_the_job_can_be_trained_longer(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = whole_run(tmp_path / "short", monkeypatch, form)
    assert [path.name for path in (tmp_path / "short/checkpoints").iterdir()] == ["step-000006"]
    whole_run(tmp_path / "long", monkeypatch, form, max_steps=9)
    run(replace(job, training=replace(job.training, max_steps=9)), tmp_path / "short", monkeypatch)

    assert losses(tmp_path / "short") == losses(tmp_path / "long")
    assert same_runs(tmp_path / "short", tmp_path / "long", 9)


def test_a_job_that_makes_no_checkpoints_saves_no_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run(tmp_path, monkeypatch, "clouds", every_minutes=0.0)
    assert not (tmp_path / "checkpoints").exists()


def next_steps(plan: ConsumptionPlan, draws: random.Random, num_steps: int) -> list[list[Order]]:
    """With producers that are late, silent and lost now and then; as the draws say."""
    ordered = []
    for _ in range(num_steps):
        ordered.append(plan.orders())
        agreed = plan.round()
        for consumer in range(plan.num_consumers):
            open_ = (plan.ordered - plan.consumed)[:, consumer].nonzero()[0].tolist()
            for source in plan.step_slots(consumer) or open_[: plan.per_consumer]:
                kept = agreed.skipped if draws.random() < 0.2 else agreed.consumed
                kept[source, consumer] += 1
        agreed.dead[-1] = draws.random() < 0.05
        agreed.ready[:] = plan.num_consumers * (draws.random() < 0.7)
        plan.end_step(agreed)
    return ordered


@pytest.mark.parametrize("num_steps", [0, 1, 5, 23])
def test_a_plan_goes_on_with_the_same_orders(num_steps: int) -> None:
    feed = Feed(8)
    original, restored = (
        ConsumptionPlan(feeding([0.5, 0.3, 0.2], [2, 1, 3], 2), 6, feed, 600) for _ in range(2)
    )
    next_steps(original, random.Random(1), num_steps)
    restored.load_state_dict(stored(original.state_dict()))
    ahead = [next_steps(plan, random.Random(2), 40) for plan in (original, restored)]

    assert ahead[0] == ahead[1] and sum(map(len, ahead[0])) > 100
    assert same_state([original.state_dict()], [restored.state_dict()])


def test_a_plan_of_other_producers_is_refused() -> None:
    plans = [ConsumptionPlan(feeding([1.0] * n, [1] * n), 2, Feed(8)) for n in (2, 3)]
    with pytest.raises(ValueError, match="saved with other producers or ranks"):
        plans[1].load_state_dict(plans[0].state_dict())


TWO = feeding([0.5, 0.5], [2, 1])


def batch(number: int, *payload: int) -> Frame:
    parts = (torch.tensor(payload, dtype=torch.uint8),)
    return Frame(MessageKey(Kind.BATCH, number), parts, number, 0.0, 100 + len(payload))


def test_an_inbox_goes_on_with_the_batches_that_were_waiting() -> None:
    lives = defaultdict[int, Peer](Peer)
    original, restored = Inbox(TWO, 5, lives), Inbox(TWO, 5, lives)
    original.put(0, batch(1, 1, 2))
    original.put(0, batch(3))
    original.put(2, batch(2, 7))
    assert original.next_of([2]) is not None
    original.put(2, batch(4, 9, 9, 9))
    restored.load_state_dict(stored(original.state_dict()))

    assert same_state([restored.state_dict()], [original.state_dict()])
    with pytest.raises(Exception, match="came after number 4"):
        restored.put(2, batch(4))
    for source in range(3):
        while (expected := original.next_of([source])) is not None:
            found = restored.next_of([source])
            assert found is not None and torch.equal(found.payload, expected.payload)
            assert found._replace(payload=expected.payload) == expected
        assert restored.next_of([source]) is None


def test_who_waits_for_batches_or_orders_says_for_which() -> None:
    lives = {rank: Peer() for rank in (1, 2, 3)}
    inbox, book = Inbox(TWO, 5, lives), OrderBook(lives[1])

    def awaited() -> list[str]:
        found: list[str] = []

        def look() -> bool:
            found.extend(str(life.awaited[0]) for life in lives.values() if life.awaited)
            return True

        inbox.wait(0.0, look)
        time.sleep(0.6)  # so that it counts as over
        return found

    inbox.set_ready(0)
    assert awaited() == ["the message that it is ready"] * 2
    inbox.expect([Order(0, number, 0, 9) for number in (3, 5)])
    assert awaited() == ["batch 3"]
    inbox.put(0, batch(3))
    assert awaited() == ["batch 5"]

    waiting = threading.Thread(target=lambda: book.next(False))
    waiting.start()
    wait_for(lambda: lives[1].awaited is not None, 10)
    assert lives[1].awaited[0] == "orders after batch 0"  # type: ignore[index]
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
        Order(0, 1, 0, 9), Order(0, 2, NOBODY, 9), Order(0, 2, 0, 9)
    ]  # fmt: skip
    again.begin_after(2, {2})
    again.take_orders(orders(wanted))
    assert again.next(False) == Order(0, 2, 0, 9)
    for one in (book, again):
        with pytest.raises(FrameError, match="after number 2"):
            one.take_orders(orders(wanted))


def orders(rows: list[list[int]]) -> Frame:
    return Frame(MessageKey(Kind.ORDER), (torch.tensor(rows, dtype=torch.int32),), 0, 0.0, 0)


@pytest.mark.slow
@pytest.mark.nightly
def test_ranks_of_a_producer_save_after_the_same_batch_and_go_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, of which one was ordered a batch more when the run saved: the other makes its
    own batch of that number, keeps it, and sends it once it is ordered."""
    job = one_way("clouds")
    run(job, tmp_path / "whole", monkeypatch)
    saved = state(tmp_path / "whole", SAVED)
    kept = [unpacked(saved, f"rank-{rank} producer.kept") for rank in (2, 3)]
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

    assert found == [Order(0, 1, 0, 9)]


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
    assert restored.consumer.evaluate() == original.consumer.evaluate()
    with pytest.raises(ValueError, match="needs 'recent'"):
        restored.consumer.load_state_dict(restored.producers[0].state_dict())


@pytest.mark.slow
@pytest.mark.nightly
def test_a_batch_ordered_after_a_checkpoint_is_not_in_it_however_late_a_rank_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(own: Any, *rest: Any, of: Any = CheckpointWriter.copy) -> Any:
        time.sleep(0.3 if own.rank == 1 else 0.0)  # of the consumer
        return of(own, *rest)

    clouds = {"a": OneWayCloud(2), "b": OneWayCloud(1, 1.0), "c": OneWayCloud(1, 2.0)}
    job = replace(one_way("clouds"), cluster=OneWayLayout(clouds, "free"))
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "copy", copy)
        run(job, tmp_path / "first", monkeypatch)
    interrupted(tmp_path / "first", tmp_path / "second")
    run(job, tmp_path / "second", monkeypatch)

    first, second = (state(tmp_path / name, STEPS) for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert not [key for key in first if not torch.equal(first[key], second[key])]


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
        guard=DivergenceGuard(), memory=MemoryMeter(torch.device("cpu")),
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
    role.control, role.guard = SimpleNamespace(out={1: None, 2: None}), DivergenceGuard()
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

    role = consumer(0, clouds)
    assert needed(role) == [True, True, True]
    assert needed(consumer(1, clouds)) == [True, False, False]
    role.inbox.set_ended(0, "gone")
    assert needed(role) == [True, False, True] and not role.needs(frozenset({3}))
    role.send_stop()
    assert needed(role) == [True, False, False]
    producer = object.__new__(ProducerRank)
    producer.rank, producer.job = 2, role.job
    assert needed(producer) == [True, True, True] and not producer.needs(frozenset({4}))

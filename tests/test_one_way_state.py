"""The parts of a one-way job go on from the state of others, bit for bit."""

import random
import shutil
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.channels import same_state, stored
from tests.combinations import SAVED, STEPS, interrupted, losses, run, state
from tests.electra_reference import Reference, feed_context, small_electra
from tests.golden import one_way
from tests.one_way_toy import ToyFeed, feeding
from tests.runs import wait_for
from xcloud.base.errors import FrameError
from xcloud.features.one_way.feed import NOBODY, ConsumptionPlan, Feed, Order, unpacked
from xcloud.features.one_way.intake import Inbox
from xcloud.features.one_way.job import OneWayExperiment
from xcloud.features.one_way.producer import OrderBook
from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.net.peer import Peer
from xcloud.pipeline.settings import Checkpoints


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


@pytest.mark.parametrize("form", ["local", "clouds"])
def test_a_job_goes_on_bit_for_bit_from_any_step(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = whole_run(tmp_path / "whole", monkeypatch, form, every_steps=1)
    names = sorted(path.name for path in (tmp_path / "whole/checkpoints").iterdir())
    assert len(names) > 2 and names[-1] == "step-000006"
    for name in names[:-1]:
        again = tmp_path / f"from {name}"
        shutil.copytree(tmp_path / "whole/checkpoints" / name, again / "checkpoints" / name)
        run(job, again, monkeypatch)
        assert same_runs(tmp_path / "whole", again, STEPS)


@pytest.mark.parametrize("form", ["local", "clouds"])
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
        agreed.slow[:] = torch.tensor([draws.random() < 0.2 for _ in plan.state])
        agreed.dead[-1] = draws.random() < 0.05
        agreed.ready[:] = plan.num_consumers * (draws.random() < 0.7)
        plan.end_step(agreed)
    return ordered


@pytest.mark.parametrize("order", ["fixed", "arrival"])
@pytest.mark.parametrize("num_steps", [0, 1, 5, 23])
def test_a_plan_goes_on_with_the_same_orders(order: Any, num_steps: int) -> None:
    feed = Feed(8, order, on_slow="redistribute")
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

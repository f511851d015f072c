"""Orders, norms, facts, checkpoint news and merges of a peer that does not keep to its part."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.in_process_link import InProcessLink
from tests.local_replicas import MEAN, Diary, Scalar
from tests.replicas import Post, connected
from xcloud.base.errors import ConfigError, FrameError
from xcloud.comm.compressor import Chain
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing
from xcloud.features.one_way.feed import NOBODY, Order
from xcloud.features.one_way.intake import Inbox
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.features.one_way.producer import OrderBook
from xcloud.features.replicas.averaging import AllToAll, Terms
from xcloud.features.replicas.late import Skip
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.features.replicas.merging import weighted_mean
from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.net.peer import Peer
from xcloud.pipeline.control import (
    Signal,
    StageSums,
    reply_of,
)
from xcloud.pipeline.settings import Checkpoints
from xcloud.rank.agreement import compare_facts, decode_facts
from xcloud.rank.saving import CheckpointMessage, code_of
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.reporter import Reporter

ONE_WAY = OneWayLayout({"d": OneWayCloud(), "a": OneWayCloud(share=1.0)}, "free")


def frame(kind: Kind, *parts: Tensor, step: int = 0) -> Frame:
    return Frame(MessageKey(kind, step), parts, 0, 0.0, 64)


def rows(*numbers: tuple[int, int, int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# --- one-way jobs


@pytest.mark.parametrize(
    "part",
    [
        rows((1, 2, 9)),  # no such rank of the consumer
        rows((1, -2, 9)),
        rows((0, 0, 9)),
        rows((2, 0, 9), (2, 0, 9)),
        rows((101, 0, 9)),  # more than the job can need
        rows((1, 0, 101)),
        rows((1, 0, 0)),
        rows(*((n, 0, 9) for n in range(1, 20))),  # more than may wait
        rows((1, 0, 9)).long(),
        rows((1, 0, 9))[0],
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(1, 1, 3, dtype=torch.int32),
    ],
    ids=str,
)
def test_orders_that_no_consumer_gives_are_refused(part: Tensor) -> None:
    book = OrderBook(num_consumers=2, max_waiting=16, max_number=100)

    with pytest.raises(FrameError):
        book.take_orders(frame(Kind.ORDER, part))


def test_orders_for_nobody_do_not_fill_the_memory() -> None:
    book = OrderBook(max_waiting=16)
    with pytest.raises(FrameError):
        for number in range(1, 30):
            book.take_orders(frame(Kind.ORDER, rows((number, NOBODY, 9))))
            book.next(False)


def test_a_stop_with_parts_another_one_and_orders_after_it_are_refused() -> None:
    book = OrderBook()
    with pytest.raises(FrameError, match="a stop of 1 parts"):
        book.take_stop(frame(Kind.STOP, torch.zeros(1)))
    book.take_stop(frame(Kind.STOP))
    with pytest.raises(FrameError, match="a second one"):
        book.take_stop(frame(Kind.STOP))
    with pytest.raises(FrameError, match="a stop"):
        book.take_orders(frame(Kind.ORDER, rows((1, 0, 9))))


def test_batches_come_only_as_ordered_and_not_without_end() -> None:
    inbox = Inbox(ONE_WAY, 4, {1: Peer()}, max_waiting=8)
    payload = torch.zeros(4, dtype=torch.uint8)
    inbox.expect([Order(0, number, 0, 9) for number in (2, 5)])
    with pytest.raises(FrameError, match=r"batch 3 of producer 'a' .* was not ordered"):
        inbox.put(0, frame(Kind.BATCH, payload, step=3))
    inbox.put(0, frame(Kind.BATCH, payload, step=2))
    inbox.put(0, frame(Kind.BATCH, payload, step=5))
    inbox.put(0, frame(Kind.BATCH, payload, step=7))  # its order is not known here yet
    inbox.expect([Order(0, 7, 0, 9)])

    with pytest.raises(FrameError, match="8 wait here"):
        for number in range(8, 100):
            inbox.put(0, frame(Kind.BATCH, payload, step=number))


# --- control


def sums_of(*parts: Tensor, leader: int = 1) -> float:
    """What rank 0 of two stages makes of its own norm, 1.0, and of a message of rank 1."""
    there, back = InProcessLink("rank 1"), InProcessLink()
    there.send(MessageKey(Kind.NORM, 4), parts)
    sums = StageSums(0, (0, leader), {leader: back}, {leader: there}, 1.0)
    return sums.sum_over_stages(4, {0: 1.0}, lambda step: Signal.GO_ON).total


def norms(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_leader_tells_the_norm_of_its_own_stages_only() -> None:
    assert sums_of(norms(math.nan, 2.0)) == 3.0
    assert sums_of(norms(1e300, 2.0)) == 3.0
    assert math.isnan(sums_of(norms(math.nan, math.nan)))


@pytest.mark.parametrize(
    "parts",
    [
        (), (norms(1.0),), (norms(1.0, 1.0, 1.0),), (norms(1.0, -1.0),),
        (norms(1.0, 1.0).float(),),
        (norms(1.0, 1.0).view(1, 2),), (norms(1.0, 1.0), norms(1.0)),
    ],
    ids=str,
)  # fmt: skip
def test_norms_of_another_shape_or_below_0_are_refused(parts: tuple[Tensor, ...]) -> None:
    with pytest.raises(FrameError, match=r"rank 1 sent .* for the norms of 2 stages"):
        sums_of(*parts)


def test_an_answer_is_a_sum_and_a_word() -> None:
    byte = torch.tensor([1], dtype=torch.uint8)
    assert reply_of((norms(2.0),), 0) == (2.0, Signal.GO_ON)
    assert reply_of((norms(2.0), byte), 0) == (2.0, Signal.CHECKPOINT)
    bad = [(), (norms(1.0, 2.0),), (norms(1.0), byte + 8), (norms(1.0), byte[:0]),
           (norms(1.0), norms(1.0)), (norms(1.0), byte, byte), (byte,)]  # fmt: skip
    for parts in bad:
        with pytest.raises(FrameError, match="rank 0 sent"):
            reply_of(parts, 0)


def test_a_peer_that_tells_no_facts_of_the_data_is_refused() -> None:
    mine = {"the task's data": "ab", "the task's settings and sizes": "cd"}

    with pytest.raises(ConfigError, match=r"the task's data: ab here, nothing there"):
        compare_facts(mine, {}, 1)
    with pytest.raises(ConfigError, match="something: nothing here, 1 there"):
        compare_facts(mine, {**mine, "something": "1"}, 1)
    compare_facts(mine, {"the task's settings and sizes": "cd"}, 1, ["the task's data"])
    assert decode_facts(json.dumps(mine), 1) == mine


@pytest.mark.parametrize(
    "text", ["", "a=b", "[1]", '{"a": 1}', '{"a\\u001b": "b"}', json.dumps({"a": "b" * 300_000})]
)
def test_facts_that_are_no_names_and_values_are_refused(text: str) -> None:
    with pytest.raises(FrameError, match="rank 1 sent no names and values"):
        decode_facts(text, 1)


def test_checkpoint_news_are_one_code_and_of_few_steps(tmp_path: Path) -> None:
    for parts in ((), (torch.zeros(1),), (torch.zeros(2, dtype=torch.uint8),)):
        with pytest.raises(FrameError, match="rank 3 must carry one code"):
            code_of(frame(Kind.CHECKPOINT, *parts), 3)
    rank_0 = Checkpointer(
        Timing(Checkpoints()),
        CheckpointWriter(CheckpointFolder(tmp_path), 0, {}),
        None,
        {},
        Reporter(0, "a", print),
    )

    with pytest.raises(FrameError, match="rank 3 tells of more than 16 open checkpoints"):
        for step in range(10**6):
            rank_0._take(3, step, CheckpointMessage.DONE)
    with pytest.raises(FrameError, match="rank 3 tells rank 0 what rank 0 decides"):
        rank_0._take(3, 5, CheckpointMessage.AGREED)
    rank_0.close()


# --- merges


def hub_with(weights: list[float], every: int = 2) -> list[tuple[float, ...]]:
    """The weights of merges every 2 steps in which replica 1 claims these; replica 0 does a sample
    a step."""
    post, diary, settings = Post(2), Diary(), LocalUpdates(every, MEAN, late=Skip(5.0))
    hub = Scalar(0, post, settings, 99, diary)
    hub.end.max_weight = lambda replica, steps: float(len(steps))
    for number, weight in enumerate(weights):
        step, known = every * (number + 1), every * number
        head = torch.tensor([step, known, weight], dtype=torch.float64)
        key = MessageKey(Kind.AVERAGING, number, 0)
        post.links(1).send(0, key, (head, torch.ones(1)), ("head", "change"), 0)
        hub.run(step - every + 1, step)
    return list(diary.weights.values())


def test_a_replica_weighs_what_its_steps_allow() -> None:
    assert hub_with([2.0, 1.0, 2.0]) == [(2, 2), (2, 1), (2, 2)]


@pytest.mark.parametrize("weight", [1e300, 2.5, math.inf, math.nan, -1.0])
def test_a_weight_that_would_decide_a_merge_is_refused(weight: float) -> None:
    with pytest.raises(FrameError, match="replica 1 sent"):
        hub_with([2.0, weight])
    shapes = {"w": torch.Size([3])}
    links = connected(2)
    one, other = (
        AllToAll(own, TensorCodec(shapes, lambda *_: Chain(), 7, False), Terms(weighted_mean))
        for own in links
    )
    one.start(2, [torch.zeros(3)])
    other.start(2, [torch.zeros(3)], weight)
    with pytest.raises(FrameError, match="replica 1 sent a weight of"):
        one.finish(2)

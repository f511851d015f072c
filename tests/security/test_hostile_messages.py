"""What a peer sends is input: no message or part of one may do more than an honest one."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.channels import InProcessLink
from tests.local_replicas import MEAN, Diary, Scalar
from tests.memory_group import MemoryGroup
from tests.replicas import Post, connected
from xcloud.base.errors import ConfigError, FrameError
from xcloud.comm.channel import BoundaryField, Codec, Codecs, ReceiveChannel
from xcloud.comm.compression import ChannelId
from xcloud.comm.compressor import Chain, Compressor
from xcloud.comm.low_rank import Svd
from xcloud.comm.memory import NoMemory
from xcloud.comm.sparsify import RandomTopK, TopK, TopRows
from xcloud.comm.step_clock import StepClock
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
from xcloud.net.frame import Frame, Kind, MessageKey, TensorSpec, encode_frame, seal_frame
from xcloud.net.gloo_link import GlooInLink
from xcloud.net.link_end import InSettings
from xcloud.net.link_profile import LinkWindow, Liveness
from xcloud.net.peer import Peer
from xcloud.pipeline.control import (
    Signal,
    StageSums,
    reply_of,
)
from xcloud.pipeline.settings import Checkpoints
from xcloud.rank.agreement import compare_facts, decode_facts
from xcloud.rank.peak_bytes import PeakBytes
from xcloud.rank.saving import CheckpointMessage, code_of
from xcloud.record.checkpoint_files import CheckpointFolder
from xcloud.record.reporter import Reporter

KEY = MessageKey(Kind.ACTIVATION, 1, 0)
DAY_S = 86_400.0
MAX_ROWS, D = 6, 16


def sent_over(group: MemoryGroup, deliver_at_s: float) -> None:
    for sequence, key in enumerate((MessageKey(Kind.ALIVE), KEY)):
        frame = encode_frame(key, (torch.ones(3),), sequence)
        seal_frame(frame, deliver_at_s)
        group.isend(frame, sequence).wait()


def test_a_real_line_delivers_at_once_whatever_time_its_peer_writes() -> None:
    group, life = MemoryGroup(), Peer(Liveness(1.0, 3.0))
    settings = InSettings("rank 1", 4096, window=LinkWindow(2), peer=life)
    link = GlooInLink(group, settings)

    sent_over(group, time.monotonic() + DAY_S)

    assert link.recv(KEY, 5.0)[0].tolist() == [1, 1, 1]
    assert life.left_s(0.0, 0.0) <= 3.0  # no word of tomorrow


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), float("-inf")])
def test_a_frame_whose_time_is_no_moment_is_refused(time_s: float) -> None:
    group = MemoryGroup()
    link = GlooInLink(group, InSettings("rank 1", 4096, window=LinkWindow(2), is_emulated=True))

    sent_over(group, time_s)

    with pytest.raises(FrameError, match="frame from rank 1 is damaged: its time is"):
        link.recv(KEY, 5.0)


def received(compressor: Compressor, counts: list[int], parts: tuple[Tensor, ...]) -> Tensor:
    """Of rank 0, whose boundary has two samples of at most MAX_ROWS rows."""
    fields = (
        BoundaryField("counts", (), torch.int16),
        BoundaryField("places", (), torch.int16, "counted", most=MAX_ROWS - 1),
        BoundaryField("hidden", (D,), torch.float32, "counted"),
    )
    link = InProcessLink()
    channel = ReceiveChannel(
        link, fields, lambda: Codecs([(None, Codec(compressor, NoMemory()))]), StepClock(),
        ChannelId(7, 0, "forward", 3, 1), torch.device("cpu"), 5.0, MAX_ROWS,
    )  # fmt: skip
    link.send(KEY, (torch.tensor(counts, dtype=torch.int16), *parts))
    return channel.recv(KEY, {"ids": torch.arange(2)})["hidden"]


@pytest.mark.parametrize("counts", [[MAX_ROWS + 1, 1], [-1, 3], [-32768, 32767], [32767, 32767]])
def test_rows_beyond_what_the_boundary_promises_are_refused_before_anything_is_allocated(
    counts: list[int],
) -> None:
    """SVD makes of few bytes as many rows as `counts` say."""
    compressor = Svd(0.1)
    rows = max(0, sum(counts))
    spec = TensorSpec((rows, D), torch.float32)
    parts = [torch.zeros(s.shape, dtype=s.dtype) for s in compressor.wire_specs(spec)]

    with pytest.raises(FrameError, match=r"from rank 3: 'counts' from .*, allowed are 0 to 6"):
        received(compressor, counts, (torch.zeros(rows, dtype=torch.int16), *parts))


def test_refusing_a_message_of_many_rows_allocates_nothing_for_them() -> None:
    """Attack by counts: 1.5 MB became 584 MB."""
    compressor, num_rows = Svd(0.1), 60_000
    spec = TensorSpec((num_rows, D), torch.float32)
    parts = [torch.zeros(s.shape, dtype=s.dtype) for s in compressor.wire_specs(spec)]
    places = torch.zeros(num_rows, dtype=torch.int16)
    sent = sum(part.nbytes for part in parts) + places.nbytes
    with PeakBytes() as peak, pytest.raises(FrameError):
        received(compressor, [30_000, 30_000], (places, *parts))
    assert peak.peak < 3 * sent + 4096  # two copies of the frame; with the rows 9 times as much


@pytest.mark.parametrize("place", [-1, MAX_ROWS])
def test_places_outside_a_sample_are_refused(place: int) -> None:
    places = torch.tensor([0, 1, place], dtype=torch.int16)

    with pytest.raises(FrameError, match=r"'places' from .*, allowed are 0 to 5"):
        received(Chain(), [1, 2], (places, torch.zeros(3, D)))


@pytest.mark.parametrize("counts", [[0, 3], [MAX_ROWS, MAX_ROWS]])
def test_as_many_rows_as_promised_pass(counts: list[int]) -> None:
    rows = sum(counts)

    hidden = received(Chain(), counts, (torch.zeros(rows, dtype=torch.int16), torch.ones(rows, D)))

    assert hidden.shape == (rows, D)


SPARSE = [TopK(0.02), TopK(0.2), TopK(0.9), TopRows(0.1), TopRows(0.6), RandomTopK(0.5, 0.1)]


@pytest.mark.parametrize("compressor", SPARSE, ids=lambda c: c.label)
def test_positions_outside_the_tensor_or_too_many_name_their_sender(compressor: TopK) -> None:
    rows = 12
    tensor = torch.randn(rows, D, generator=torch.Generator().manual_seed(0))
    honest = list(compressor.compress(tensor))
    damaged = []
    for byte in (0x00, 0xFF):  # no position; every position, and the highest low bits
        parts = [part.clone() for part in honest]
        parts[1].fill_(byte)
        damaged.append(tuple(parts))
    places = torch.zeros(rows, dtype=torch.int16)

    assert received(compressor, [6, 6], (places, *honest)).count_nonzero() > 0
    for parts in damaged:
        with pytest.raises(FrameError, match=r"activation of step 1.*from rank 3: .*position"):
            received(compressor, [6, 6], (places, *parts))


def test_a_position_just_past_the_end_is_refused() -> None:
    """The upper bits fit, the lower ones do not: as many positions as promised, one outside."""
    tensor = torch.zeros(1000)
    tensor[[10, 990]] = 1.0
    compressor = TopK(0.002)
    values, packed = compressor.compress(tensor)
    spec = TensorSpec.of(tensor)
    assert compressor.decompress((values, packed), spec).nonzero().flatten().tolist() == [10, 990]
    refused = []
    for place in range(len(packed)):
        for bit in range(8):
            other = packed.clone()
            other[place] ^= 1 << bit
            try:
                assert compressor.decompress((values, other), spec).shape == (1000,)
            except FrameError as error:
                refused.append(str(error))
    assert any(line.startswith("position 10") for line in refused), refused
    assert any("1 positions" in line for line in refused)


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

    with pytest.raises(FrameError, match="rank 3 reports more than 16 open checkpoints"):
        for step in range(10**6):
            rank_0.take_report(3, step, CheckpointMessage.DONE)
    with pytest.raises(FrameError, match="rank 3 sends a decision on checkpoint"):
        rank_0.take_report(3, 5, CheckpointMessage.AGREED)
    rank_0.close(is_finished=False)


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

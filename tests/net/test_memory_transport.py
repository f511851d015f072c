"""Links and collectives in memory behave as those of a network do, time excepted."""

import threading
import time
from pathlib import Path

import pytest
import torch

from tests.one_way_toy import ToyFeed
from tests.pipelines import BORDER, in_threads, wired
from xcloud.base.errors import ConfigError, FrameError, LinkClosed, LinkTimeout
from xcloud.comm.compression import Compression
from xcloud.features.checkpoints.restored import restored
from xcloud.features.one_way.consumer import ConsumerRank
from xcloud.features.one_way.feed import Order
from xcloud.features.one_way.job import OneWayExperiment, OneWayTraining
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.features.one_way.producer import ProducerRank
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.net.link import LinkName, LinkRecord
from xcloud.net.link_end import InSettings, OutSettings
from xcloud.net.link_profile import LinkProfile, Liveness
from xcloud.net.memory_transport import MemoryWorld
from xcloud.net.memory_transport import in_threads as run_in_threads
from xcloud.net.peer import Peer
from xcloud.net.transport import Transport
from xcloud.pipeline.control import send_report
from xcloud.pipeline.exchange import RankGroup
from xcloud.rank.agreement import Verdict
from xcloud.rank.role import RankContext
from xcloud.rank.stop_signal import StopSignal
from xcloud.record.reporter import Reporter
from xcloud.tracking.tracker import NullTracker

TWO = ClusterLayout({"a": Cloud(2), "b": Cloud()})
KEY = MessageKey(Kind.ACTIVATION, 1, 0)


def test_frames_wait_for_the_receiving_end_and_are_counted_recorded_and_checked() -> None:
    world, record = MemoryWorld(), LinkRecord(LinkName(0, 0, 1), "b")
    out = world.transport(0).out("x", 1, OutSettings("rank 1", 200, record=record))
    for number in range(3):
        key = KEY._replace(micro_batch=number)
        out.send(key, (torch.tensor([float(number)]),), ("number",))
    incoming = world.transport(1).incoming("x", 0, InSettings("rank 0", 200))

    for number in range(3):
        (value,) = incoming.recv(KEY._replace(micro_batch=number), 5)
        assert value.tolist() == [number]
    assert out.record.num_messages[Kind.ACTIVATION] == 3
    assert out.record is record and record.num_bytes[Kind.ACTIVATION] > 3 * 40
    with pytest.raises(FrameError, match="promised at most 200"):
        out.send(KEY, (torch.zeros(100),))


def test_an_end_is_heard_by_reader_and_handler() -> None:
    world, heard = MemoryWorld(), []
    settings = InSettings("rank 0", 200, handlers={Kind.REPORT: print}, on_end=heard.append)
    incoming = world.transport(1).incoming("x", 0, settings)
    out = world.transport(0).out("x", 1, OutSettings("rank 1", 200))

    out.close(1.0)
    incoming.close(1.0)
    out.say_alive()

    assert incoming.has_closed and len(heard) == 1
    with pytest.raises(LinkClosed, match="rank 0 has closed its link"):
        incoming.recv(KEY, 1.0)


def test_what_a_handler_cannot_take_is_the_end_of_the_link_and_not_of_the_sender() -> None:
    def fail(frame: Frame) -> None:
        raise IndexError

    world = MemoryWorld()
    incoming = world.transport(1).incoming(
        "x", 0, InSettings("rank 0", 200, handlers={Kind.REPORT: fail})
    )
    out = world.transport(0).out("x", 1, OutSettings("rank 1", 200))
    out.send(MessageKey(Kind.REPORT), ())

    with pytest.raises(FrameError, match="from rank 0 cannot be handled: IndexError"):
        incoming.recv(KEY, 1.0)
    assert not incoming.has_closed


def test_a_peer_that_never_closes_its_link_is_a_timeout() -> None:
    life = Peer(Liveness(0.01, 0.05))
    incoming = MemoryWorld().transport(1).incoming("x", 0, InSettings("rank 0", 200, peer=life))

    with pytest.raises(LinkTimeout, match="rank 0 did not close its link"):
        incoming.close(0.05)


def test_collectives_give_every_rank_the_same() -> None:
    world, ranks = MemoryWorld(), (1, 4, 5)
    groups = [RankGroup(r, ranks, world.transport(r).group(ranks)) for r in ranks]

    def work(group: RankGroup) -> list[float]:
        mine = torch.tensor([float(group.rank)])
        found = [float(x) for x in group.gather(mine)]
        summed = float(group.sum(mine.clone()))
        told = float(group.from_leader(mine))
        group.barrier()
        return [*found, summed, told]

    assert in_threads([lambda g=group: work(g) for group in groups]) == [[1, 4, 5, 10, 1]] * 3
    assert world.transport(0).group(ranks) is None and world.transport(1).group((1,)) is None


def test_ranks_meet_report_and_close_over_the_real_wiring() -> None:
    reports: list[tuple[int, bytes]] = []
    ranks = wired(
        TWO, {0: BORDER}, Compression(),
        on_report=lambda peer, frame: reports.append((peer, bytes(frame.parts[0].tolist()))),
    )  # fmt: skip

    def work(rank: int) -> None:
        wiring = ranks[rank].wiring
        assert wiring.control is not None
        if rank:
            send_report(wiring.control.out[0], f"rank {rank}\n".encode())
        with wiring.control.detector.running():
            time.sleep(0.01 * rank)
            wiring.barrier()
        wiring.close()

    in_threads([lambda r=rank: work(r) for rank in range(3)])

    assert sorted(reports) == [(1, b"rank 1\n"), (2, b"rank 2\n")]
    away = ranks[2].wiring
    records = away.ends.records
    assert {record.to for record in records if record.num_messages} == {"a"}
    assert {record.to for record in records if record.arrived_messages} == {"b"}
    assert sum(record.num_bytes[Kind.REPORT] for record in records) > 0
    assert ranks[0].wiring.groups[0].group is not None


def test_work_in_threads_is_returned_as_it_ends_and_a_failure_is_raised() -> None:
    later = threading.Event()

    def rank_0_ends_last(transport: Transport) -> str:
        if transport.rank == 0:
            assert later.wait(30)
            return "last"
        later.set()
        return "first"

    assert sorted(run_in_threads(2, rank_0_ends_last)) == ["first", "last"]
    with pytest.raises(ZeroDivisionError):
        run_in_threads(2, lambda transport: 1 // transport.rank)


def test_a_line_with_a_speed_is_refused_in_memory(tmp_path: Path) -> None:
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, LinkProfile(1e6))

    with pytest.raises(ConfigError, match="links in memory emulate no line"):
        wired(layout, {0: BORDER}, Compression(), run_dir=tmp_path)


def test_a_one_way_job_is_wired_in_memory_too(tmp_path: Path) -> None:
    layout = OneWayLayout({"d": OneWayCloud(), "a": OneWayCloud(2, 1.0)}, "free")
    world = MemoryWorld()
    job = OneWayExperiment(
        name="toy", cluster=layout, model=ToyFeed(), training=OneWayTraining(2, 2),
        tracker=NullTracker(),
    )  # fmt: skip

    def context(rank: int) -> RankContext[OneWayExperiment]:
        return RankContext(
            job, {}, tmp_path, torch.device("cpu"), Reporter(rank, "", print), lambda *_: None,
            Verdict(), StopSignal(), world.transport(rank), restored,
        )  # fmt: skip

    consumer, *producers = (
        ConsumerRank(context(0)), ProducerRank(context(1)), ProducerRank(context(2))
    )  # fmt: skip
    for producer in producers:
        for out in producer.outs:
            out.send(MessageKey(Kind.READY), ())
    consumer.send_orders([Order(1, 1, 0, 9)])
    ordered = producers[1].orders.next(may_drop=True)
    assert ordered is not None and ordered.number == 1
    producers[1].send(0, 1, torch.arange(5, dtype=torch.uint8))
    arrived = consumer.inbox.next_of([1])

    assert consumer.inbox.was_ready(0) and arrived is not None
    assert arrived.payload.tolist() == [0, 1, 2, 3, 4]
    sent = sum(record.num_bytes[Kind.BATCH] for record in producers[1].records)
    assert sent == arrived.num_bytes
    assert consumer.received[2].num_bytes[Kind.BATCH] == arrived.num_bytes
    unheard = in_threads(
        [lambda: consumer.ends.part_from([1, 2], 1.0), *(p.ends.close for p in producers)]
    )
    assert unheard[0] == set()

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
import torch

from tests.pipelines import BORDER, D, in_threads, pipelines, samples, wired
from tests.runs import wait_for
from xcloud.comm.compression import Compression
from xcloud.comm.step_clock import NOWHERE, SUM_OF, Place, RecordedStep, StepClock
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Frame, Kind, MessageKey
from xcloud.net.gloo_link import GlooOutLink
from xcloud.net.link import LinkName, LinkRecord, MessageLog
from xcloud.net.link_end import OutSettings
from xcloud.net.link_profile import LinkWindow
from xcloud.pipeline.batch_plan import cut
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward
from xcloud.pipeline.pipeline import Pipeline
from xcloud.pipeline.schedule import GPipe, Schedule
from xcloud.rank.reports import GpuClock
from xcloud.train.building import step_clock


def test_every_span_is_counted_in_its_sum_and_nowhere_else() -> None:
    clock = StepClock(record_from=1)
    clock.begin_step(1)
    for what in SUM_OF:
        with clock.during(what):
            pass
    step_s = clock.end_step()

    (recorded,) = clock.recorded
    assert [span.what for span in recorded.spans] == list(SUM_OF)
    for name in ("compute_s", "codec_s", "waiting_s", "sync_s"):
        spans = [span for span in recorded.spans if SUM_OF[span.what] == name]
        seconds = sum(span.ended_at_s - span.started_at_s for span in spans)
        assert clock.seconds[name] == seconds > 0
    assert step_s == recorded.ended_at_s - recorded.started_at_s


def test_a_clock_that_is_not_asked_to_record_only_sums() -> None:
    clock = StepClock()
    clock.begin_step(1)
    with clock.during("forward"):
        pass
    clock.end_step()

    assert clock.seconds["compute_s"] > 0
    assert not clock.recorded
    assert clock.messages is None


def test_a_block_inside_another_one_interrupts_it() -> None:
    clock = StepClock(record_from=1)
    clock.begin_step(1)
    with clock.during("compress"):
        with clock.during("wait"):
            blocked_at_s = time.monotonic()
        resumed_at_s = time.monotonic()
    clock.end_step()

    spans = clock.recorded[0].spans
    assert [span.what for span in spans] == ["compress", "wait", "compress"]
    assert all(a.ended_at_s <= b.started_at_s for a, b in pairwise(spans)), "counted once"
    assert spans[1].started_at_s <= blocked_at_s <= spans[1].ended_at_s <= resumed_at_s


def test_a_sender_that_is_blocked_waits_and_does_not_compress() -> None:
    """A stage behind which no gradient returns runs ahead until the queues are full."""
    layout = ClusterLayout({"a": Cloud(), "b": Cloud()}, "free", link_budget_bytes=1)
    border = replace(BORDER, gradient_returns=False, is_constant=True)
    a, b = wired(layout, {0: border}, Compression(), record_from=1, max_samples=500)
    out, incoming = (one.wiring.boundaries.ports[0] for one in (a, b))
    ids = torch.arange(500)
    message = {"counts": torch.full((500,), 5, dtype=torch.int16), "hidden": torch.zeros(2500, D)}
    keys = [MessageKey(Kind.ACTIVATION, 1, number) for number in range(2)]

    def send() -> None:
        a.clock.begin_step(1)
        for key in keys:
            out.forward_out[1].send(key, message, {"ids": ids})
        a.clock.end_step()

    thread = threading.Thread(target=send)
    thread.start()
    wait_for(lambda: a.clock.doing == "wait")
    blocked_at_s = time.monotonic()
    for key in keys:
        incoming.forward_in[0].recv(key, {"ids": ids})
    thread.join()

    (during,) = (
        span.what
        for span in a.clock.recorded[0].spans
        if span.started_at_s <= blocked_at_s <= span.ended_at_s
    )
    assert during == "wait"


def test_a_full_queue_over_a_network_tells_its_sender_that_it_waits() -> None:
    class Slow:
        """A Pair whose peer takes nothing until it is told to."""

        def __init__(self) -> None:
            self.taken = threading.Event()

        def join(self) -> None: ...

        def isend(self, frame: torch.Tensor, tag: int) -> "Slow":
            return self

        def wait(self) -> None:
            assert self.taken.wait(60)

    clock, pair, ends = StepClock(record_from=1), Slow(), []
    clock.begin_step(1)

    @contextmanager
    def blocked() -> Iterator[None]:
        with clock.during("wait"):
            ends.append(time.monotonic())
            pair.taken.set()
            yield

    settings = OutSettings("rank 1", 4096, LinkWindow(1, 1), blocked=blocked)
    link = GlooOutLink(pair, settings)  # type: ignore[arg-type]
    with clock.during("compress"):
        for number in range(4):
            link.send(MessageKey(Kind.ACTIVATION, 1, number), ())
    clock.end_step()

    assert ends
    assert {"compress", "wait"} == {span.what for span in clock.recorded[0].spans}


def test_what_happens_between_steps_is_not_recorded() -> None:
    clock = StepClock(record_from=1)
    for step in (1, 2):
        clock.begin_step(step)
        with clock.during("backward"):
            pass
        clock.end_step()
        with clock.during("forward"):  # an evaluation
            pass

    assert [[s.what for s in step.spans] for step in clock.recorded] == [["backward"]] * 2


class Gpu:
    """Stands for torch.cuda and for time.monotonic: work is given to a stream in no time and done
    one after the other; an event is when all before it is done."""

    def __init__(self) -> None:
        self.now_s = self.busy_until_s = 0.0
        self.waits = 0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def compute(self, seconds: float) -> None:
        self.busy_until_s = max(self.now_s, self.busy_until_s) + seconds

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1
        self.now_s = max(self.now_s, self.busy_until_s)

    def event(self, enable_timing: bool) -> "Event":
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def record(self) -> None:
        self.at_s = max(self._gpu.now_s, self._gpu.busy_until_s)

    def elapsed_time(self, end: "Event") -> float:
        assert self._gpu.now_s >= end.at_s, "read before it has happened"
        return 1e3 * (end.at_s - self.at_s)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr("xcloud.comm.step_clock.time", found)
    monkeypatch.setattr("xcloud.rank.reports.time", found)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    return found


def test_a_gpus_work_is_counted_where_it_is_done_and_waited_for_once_a_step(gpu: Gpu) -> None:
    clock = GpuClock(torch.device("cuda"), record_from=1)
    gpu.now_s = 5.0
    clock.begin_step(1)
    with clock.during("forward"):
        gpu.compute(2.0)
    with clock.during("wait"):  # half of it while the forward is not done yet
        gpu.sleep(4.0)
    with clock.during("backward"):
        gpu.compute(3.0)
    assert (clock.seconds["compute_s"], gpu.waits) == (0.0, 0)
    step_s = clock.end_step()

    assert gpu.waits == 1
    assert (step_s, clock.seconds["compute_s"], clock.seconds["waiting_s"]) == pytest.approx(
        (7.0, 5.0, 2.0)
    )
    (recorded,) = clock.recorded
    moments = [moment for span in recorded.spans for moment in (span[1], span[2])]
    assert moments == pytest.approx([5.0, 7.0, 7.0, 9.0, 9.0, 12.0])


def test_who_looks_at_the_sums_within_a_step_settles_them_first(gpu: Gpu) -> None:
    clock = GpuClock(torch.device("cuda"))
    clock.begin_step(1)
    for _ in range(2):
        with clock.during("forward"):
            gpu.compute(1.0)
    clock.settle()
    assert clock.seconds["compute_s"] == pytest.approx(2.0)
    with clock.during("optimizer"):
        gpu.compute(0.5)
    clock.end_step()
    assert clock.seconds["compute_s"] == pytest.approx(2.5)


def test_a_slowed_gpu_is_waited_for_at_each_computing_span(gpu: Gpu) -> None:
    clock = GpuClock(torch.device("cuda"), slowdown=3.0)
    clock.begin_step(1)
    with clock.during("forward"):
        gpu.compute(2.0)
    with clock.during("wait"):
        gpu.sleep(1.0)

    assert clock.end_step() == pytest.approx(7.0)
    assert (clock.seconds["compute_s"], clock.seconds["waiting_s"]) == pytest.approx((6.0, 1.0))


def test_a_step_begins_where_the_one_before_ended_but_for_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [7.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    clock, took = StepClock(record_from=1), []
    for step, paused_s in ((1, 0.0), (2, 30.0), (3, 0.0)):
        clock.begin_step(step)
        now_s[0] += 2.0
        took.append(clock.end_step())
        now_s[0] += 0.5  # tells of it
        with clock.paused():
            now_s[0] += paused_s
    assert took == [2.0, 2.5, 2.5]
    assert [one.ended_at_s - one.started_at_s for one in clock.recorded] == took


def test_a_slow_device_stretches_computing_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", lambda s: now_s.__setitem__(0, now_s[0] + s))
    clock = StepClock(slowdown=4.0)
    clock.begin_step(1)
    for what in ("forward", "optimizer", "compress", "wait"):
        with clock.during(what):
            time.sleep(0.01)
    step_s = clock.end_step()

    assert clock.seconds["compute_s"] == pytest.approx(2 * 4 * 0.01)
    assert clock.seconds["codec_s"] == pytest.approx(0.01) and clock.seconds[
        "waiting_s"
    ] == pytest.approx(0.01)
    assert step_s == pytest.approx(0.1)


def test_a_block_that_raises_is_counted_too() -> None:
    clock = StepClock(record_from=1)
    clock.begin_step(1)
    with pytest.raises(RuntimeError), clock.during("wait"):
        raise RuntimeError

    assert clock.seconds["waiting_s"] > 0


def test_steps_before_the_first_wanted_one_leave_no_trace() -> None:
    clock = StepClock(record_from=4)
    assert clock.messages is not None
    record = LinkRecord(LinkName(0, 0, 1), "b", clock.messages)
    for step in range(1, 6):
        clock.begin_step(step)
        with clock.during("forward"):
            record.sending(MessageKey(Kind.ACTIVATION, step, 0), step, 100, 0.0)
            record.sending(MessageKey(Kind.REPORT), 100 + step, 100, 0.0)
        clock.end_step()
        assert clock.seconds["compute_s"] > 0

    assert [(recorded.step, len(recorded.spans)) for recorded in clock.recorded] == [
        (4, 1),
        (5, 1),
    ]
    assert [message.sequence for message in clock.messages.sent] == [4, 104, 5, 105]


@pytest.mark.parametrize(("max_steps", "first"), [(100, 93), (8, 1), (3, 1)])
def test_the_last_eight_steps_of_a_run_are_recorded(max_steps: int, first: int) -> None:
    clock = step_clock(MagicMock(max_steps=max_steps), rank=0, device=torch.device("cpu"))
    assert clock.messages is not None and clock.messages.from_step == first


def test_a_message_that_comes_before_its_step_is_noted() -> None:
    """Where nothing comes back a cloud may run many steps ahead of the next."""
    log = MessageLog(from_step=4)
    record = LinkRecord(LinkName(0, 0, 1), "b", log)
    for step in (3, 4, 5):
        key = MessageKey(Kind.ACTIVATION, step, 0)
        record.received(Frame(key, (), step, 0.0, 100))

    assert not log.is_open
    assert [message.key.step for message in log.received] == [4, 5]


def test_what_never_belongs_to_a_step_is_not_noted() -> None:
    log = MessageLog(from_step=1)
    log.is_open = True
    of_one_way_jobs = {Kind.BATCH, Kind.READY, Kind.ORDER, Kind.STOP}  # they keep no such log
    in_objects = {Kind.STORED}  # and in no message
    for kind in set(Kind) - of_one_way_jobs - in_objects:
        outside = (Kind.REPORT, Kind.CHOICE, Kind.CLOSE, Kind.START)
        step = 0 if kind in outside else 7
        record = LinkRecord(LinkName(0, 0, 1), "b", log)
        record.sending(MessageKey(kind, step), 0, 100, 0.0)

    assert {message.key.kind for message in log.sent} == {
        Kind.ACTIVATION, Kind.GRADIENT, Kind.NORM, Kind.REPORT, Kind.AVERAGING,
    }  # fmt: skip


@pytest.mark.parametrize("schedule", [GPipe(4), OneForwardOneBackward(4)], ids=lambda s: s.label)
@pytest.mark.parametrize(
    "layout",
    [
        ClusterLayout({"a": Cloud()}, "free"),
        ClusterLayout({"a": Cloud(), "b": Cloud(), "c": Cloud()}, "free"),
        ClusterLayout({"a": Cloud(2), "b": Cloud(1)}, "free"),
        ClusterLayout({"a": Cloud(1, [0, 2]), "b": Cloud(1, [1])}, "free"),
    ],
    ids=["one rank", "three clouds", "2 feeding 1", "owner"],
)
def test_a_pipeline_records_every_action_once_and_in_turn(
    layout: ClusterLayout, schedule: Schedule
) -> None:
    ranks = pipelines(layout, record_from=1)
    in_threads([lambda p=p: two_passes(p, schedule) for p in ranks])

    done: Counter[tuple[str, Place]] = Counter()
    for pipeline in ranks:
        (recorded,) = pipeline.clock.recorded
        assert_spans_fit(recorded)
        for span in recorded.spans:
            if span.what in ("forward", "backward"):
                assert span.what == span.place.direction
                assert span.place.stage in pipeline.stages
            done[span.what, span.place] += 1
        assert pipeline.clock.place == NOWHERE
    every = [
        Place(direction, stage, micro_batch)
        for direction in ("forward", "backward")
        for stage in range(layout.num_stages)
        for micro_batch in range(8)  # of both passes
    ]
    computed = {key: n for key, n in done.items() if key[0] in ("forward", "backward")}
    assert computed == {(place.direction, place): 1 for place in every}
    # What is sent is compressed once by the sender, waited for and decompressed once behind.
    waited = {key: n for key, n in done.items() if key[0] == "wait"}
    crossing = [p for p in every if crosses(layout, p)]
    assert waited == {("wait", place): 1 for place in crossing}
    assert sum(n for (what, _), n in done.items() if what == "compress") == len(crossing)
    assert sum(n for (what, _), n in done.items() if what == "decompress") == len(crossing)


def crosses(layout: ClusterLayout, place: Place) -> bool:
    """Whether the input of this action comes from another rank."""
    source = place.stage + (-1 if place.direction == "forward" else 1)
    if not 0 <= source < layout.num_stages:
        return False
    return layout.owner(source, place.micro_batch) != layout.owner(place.stage, place.micro_batch)


def two_passes(pipeline: Pipeline, schedule: Schedule) -> None:
    """One update of two accumulation passes of 4 micro-batches."""
    pieces = cut(torch.arange(16), 8)
    pipeline.clock.begin_step(1)
    for first in (0, 4):
        batches = {i: samples(pieces[first + i]) for i in range(4)}
        pipeline.step(schedule, batches, 1, 1.0, first)
    pipeline.clock.end_step()


def assert_spans_fit(recorded: RecordedStep) -> None:
    moments = [m for span in recorded.spans for m in (span.started_at_s, span.ended_at_s)]
    moments = [recorded.started_at_s, *moments, recorded.ended_at_s]
    assert all(a <= b for a, b in pairwise(moments))

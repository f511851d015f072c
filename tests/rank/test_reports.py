"""What a rank reports of itself: the memory of its training, and a typical step."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xcloud.comm.devices import scratch_bytes
from xcloud.comm.step_clock import Place, RecordedStep, Span
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.link import LinkName, MessageLog, ReceivedMessage, SentMessage
from xcloud.rank.reports import (
    MemoryMeter,
    SavedTensors,
    WorkSpace,
    nearest_to_median,
    optimizer_bytes,
    timeline_events,
)
from xcloud.record.reporter import without_paths
from xcloud.record.run_record import RunRecord
from xcloud.record.summary import RunStatistics

KB = 1024


class Squares(nn.Module):
    """Keeps its input [256] for the backward, 1 kB."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_activations_are_counted_once_and_while_they_are_kept() -> None:
    net = nn.Sequential(Squares(), Squares(), Squares())
    saved = SavedTensors()
    with saved:
        for _ in range(2):  # one after the other: the first is let go before the second
            net(torch.ones(256, requires_grad=True)).sum().backward()
        assert saved.peak_bytes == 3 * KB
        both = [net(torch.ones(256, requires_grad=True)).sum() for _ in range(2)]
        sum(both).backward()
    assert saved.peak_bytes == 6 * KB
    assert not saved.num_bytes, "nothing is kept any more"
    torch.ones(999, requires_grad=True).square().sum()
    assert saved.peak_bytes == 6 * KB, "what comes later does not count"


def test_parameters_are_no_activations_and_checkpoints_keep_inputs_only() -> None:
    net, x = nn.Linear(256, 256, bias=False), torch.ones(1, 256, requires_grad=True)
    kept = []
    for run in (
        lambda: net(net(x)),
        lambda: checkpoint(lambda y: net(net(y)), x, use_reentrant=False),
    ):
        saved = SavedTensors()
        with saved:
            run().sum().backward()
        kept.append(saved.peak_bytes)
    assert kept == [2 * KB, KB]


def test_counting_changes_no_gradient() -> None:
    found = []
    for meter in (MemoryMeter(torch.device("cpu")), None):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(8))
        x = torch.randn(4, 8)
        if meter is None:
            net(x).square().sum().backward()
        else:
            with meter.first_step():
                net(x).square().sum().backward()
        found.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_work_space_is_what_tensors_take_beside_what_was_there_and_what_is_kept() -> None:
    weight = torch.ones(256, 256)
    x = torch.ones(256, requires_grad=True)
    space = WorkSpace(torch.device("cpu"))
    torch.ones(10_000)  # before it begins
    space.begin()
    kept = Squares()(x)  # of 1 kB, which keeps x
    dense = weight.view(-1) * 2.0  # of 256 kB; the view has none
    del dense
    short = torch.ones(256 * 100)  # of 100 kB, when the other is gone
    kept.sum().backward()
    space.end()
    torch.ones(10**6)
    rooms_bytes = scratch_bytes()  # of other tests in this thread
    assert space.num_bytes - rooms_bytes == 256 * KB, "the result takes as much as is kept of x"
    del short


def test_the_planned_memory_of_a_rank_has_the_program() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    held = torch.ones(50_000_000)
    before = meter.bytes_beside(0)
    assert 1e7 < before - held.nbytes <= meter.bytes_beside(held.nbytes) + 1e7 < 1e11
    assert MemoryMeter(torch.device("cuda")).bytes_beside(0) == 0, "it is not on the GPU"


def test_a_rank_describes_its_weights_gradients_and_moments() -> None:
    net = nn.Linear(256, 2, bias=False)
    net.frozen = nn.Parameter(torch.zeros(256), requires_grad=False)
    trained = torch.optim.AdamW([net.weight])
    meter = MemoryMeter(torch.device("cpu"))
    for _ in range(2):
        with meter.first_step():
            net(torch.ones(1, 256)).sum().backward()
    trained.step()
    found = meter.describe([net, net], optimizer_bytes([trained]))

    assert found["parameters"] == 3 * KB and found["gradients"] == 2 * KB
    assert found["optimizer"] == 4 * KB + 4, "two moments and the number of steps"
    assert found["activations"] == KB
    assert 1e7 < found["program"] <= found["peak"] < 1e11 and "gpu_peak" not in found


@pytest.mark.parametrize(
    ("rank", "other"),
    [
        ({"peak": 900, "program": 600, "parameters": 50, "gradients": 20, "optimizer": 40,
          "activations": 30, "checkpoint": 60}, 100),
        ({"peak": 900, "gpu_peak": 400, "program": 600, "parameters": 50, "gradients": 20,
          "optimizer": 40, "activations": 30, "checkpoint": 60}, 260),
        ({"peak": 900, "program": 880, "parameters": 50}, 0),
    ],
    ids=["processor", "GPU", "not all at once"],
)  # fmt: skip
def test_the_columns_of_memory_add_up_to_its_peak(rank: dict[str, int], other: int) -> None:
    statistics = RunStatistics(1)
    statistics.feed({"event": "memory", "rank": 0, "cloud": "a", "t": 1.0, **rank})
    (shown,) = statistics.summary(name="x", status="finished", commit="1")["memory"]

    assert shown["other"] == other


def test_every_rank_is_in_the_summary_and_among_the_metrics() -> None:
    statistics = RunStatistics(2)
    for rank, cloud in ((1, "b"), (0, "a")):
        sizes = {"peak": 100 + rank, "parameters": 7}
        statistics.feed({"event": "memory", "rank": rank, "cloud": cloud, "t": 1.0, **sizes})
    summary = statistics.summary(name="x", status="finished", commit="1")

    assert summary["memory"] == [
        {"rank": 0, "cloud": "a", "peak": 100, "parameters": 7, "other": 93},
        {"rank": 1, "cloud": "b", "peak": 101, "parameters": 7, "other": 94},
    ]
    metrics = RunRecord(summary).metrics
    assert metrics["memory_peak_rank1"] == 101 and "memory_optimizer_rank0" not in metrics


FORWARD = LinkName(0, 0, 1)
BACKWARD = LinkName(0, 1, 0)


def recorded(num_spans: int = 1, step: int = 7) -> RecordedStep:
    spans = [
        Span("forward", 100.0 + i * 1e-3, 100.0005 + i * 1e-3, Place("forward", 0, i))
        for i in range(num_spans)
    ]
    return RecordedStep(step, 99.9, 102.0, spans)


def sent(key: MessageKey, at_s: float, sequence: int = 0) -> SentMessage:
    return SentMessage(FORWARD, key, sequence, 640, at_s, at_s + 0.1, at_s + 0.2)


@pytest.mark.parametrize(
    ("steps", "step_s", "chosen"),
    [
        ([1], [9.0], 1),
        ([1, 2], [1.0, 9.0], 2),  # step 1 warms every cache
        ([1, 2, 3, 4], [9.0, 1.0, 2.0, 3.0], 3),
        ([5, 6, 7, 8], [1.0, 1.0, 7.0, 1.0], 8),  # the latest of equals
        ([5, 6, 7, 8], [1.0, 2.0, 2.9, 9.0], 7),  # nearest to 2.45
    ],
)
def test_the_typical_step_is_the_one_nearest_to_the_median(
    steps: list[int], step_s: list[float], chosen: int
) -> None:
    assert steps[nearest_to_median(steps, step_s)] == chosen


def test_moments_are_microseconds_since_the_ranks_own_start() -> None:
    log = MessageLog(1)
    log.sent.append(sent(MessageKey(Kind.ACTIVATION, 7, 3), 100.0))
    log.received.append(ReceivedMessage(BACKWARD, MessageKey(Kind.GRADIENT, 7, 3), 5, 101.0))

    (event,) = timeline_events(recorded(), log)
    (other,) = timeline_events(recorded(), log, owner="cloud_b")

    assert other["machine"] == f"{event['machine']} of cloud_b", "two owners share no clock"
    assert event["step"] == 7
    assert event["started_us"] == 99_900_000
    behind_s = time.time() - time.monotonic()  # joins the clocks of machines
    assert event["unix_us"] / 1e6 == pytest.approx(behind_s, abs=60)
    assert event["step_us"] == 2_100_000
    assert event["spans"] == [["forward", "forward", 0, 0, 100_000, 100_500]]
    assert event["sent"] == [
        [0, 1, 0, "activation", 3, 640, 100_000, 200_000, 300_000],
    ]
    assert event["received"] == [[0, 1, 5, 1_100_000]]


def test_a_moment_that_two_ranks_share_is_the_same_microsecond_for_both() -> None:
    """Rounding each against its own start would make messages on one line overlap."""
    shared_s = 123.4567894999
    at = []
    for started_at_s in (123.4000004, 123.3999996, 120.1234567):
        step = RecordedStep(1, started_at_s, 124.0, [])
        log = MessageLog(1)
        log.sent.append(sent(MessageKey(Kind.ACTIVATION, 1, 0), shared_s))
        (event,) = timeline_events(step, log)
        at.append(event["started_us"] + event["sent"][0][6])

    assert len(set(at)) == 1


def test_messages_are_those_that_a_rank_sent_while_it_made_the_step() -> None:
    """Of the next step, too, whose forwards begin in it where updates overlap. What was received
    is joined with what was sent, so it may be more."""
    log = MessageLog(1)
    begun, own, next_one, later = ((7, 99.0), (7, 100.0), (8, 101.0), (8, 103.0))
    for number, (step, at_s) in enumerate((begun, own, next_one, later)):
        key = MessageKey(Kind.ACTIVATION, step, 0)
        log.sent.append(sent(key, at_s, number))
        log.received.append(ReceivedMessage(BACKWARD, key, number, at_s + 0.1))
    for number, at_s in enumerate((90.0, 99.0, 101.0, 110.0)):
        log.sent.append(sent(MessageKey(Kind.REPORT), at_s, 10 + number))
    early = MessageKey(Kind.ACTIVATION, 7, 1)  # its sender is many steps ahead
    log.received.append(ReceivedMessage(BACKWARD, early, 4, 10.0))

    (event,) = timeline_events(recorded(), log)

    assert [message[2] for message in event["sent"]] == [1, 2, 11, 12]
    assert [message[2] for message in event["received"]] == [0, 1, 2, 3, 4]


def test_a_long_step_is_dealt_to_lines_that_the_report_link_can_carry() -> None:
    log = MessageLog(1)
    for number in range(1200):
        log.sent.append(sent(MessageKey(Kind.ACTIVATION, 7, number), 100 + 1e-3 * number, number))

    events = list(timeline_events(recorded(num_spans=3000), log))

    assert len(events) > 3
    assert all(len(json.dumps(event)) < 1 << 17 for event in events)
    assert [s[3] for e in events for s in e["spans"]] == list(range(3000))
    assert [m[2] for e in events for m in e["sent"]] == list(range(1200))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/bob smith/Secret Project/salaries 2026.tsv", "(a path)"),
        ("cannot open '/data/Ann: salaries/2026.tsv'", "cannot open '(a path)'"),
        ("'/srv/Kunde Müller & Co/x' is missing", "'(a path)' is missing"),
        ("/data/Ann: salaries/2026.tsv", "(a path)"),
        ("/data/a,b/secret.tsv", "(a path)"),
        ("/data/(v2)/secret.tsv, line 3", "(a path), line 3"),
        ("~bob/secret/x", "(a path)"),
        ("$HOME/secret", "(a path)"),
        ("${HOME}/secret", "(a path)"),
        ("s3://company-b/secret/x: no such bucket", "(a path): no such bucket"),
        ("\\\\server\\share\\secret", "(a path)"),
        ("C:\\Users\\bob\\x y\\secret.txt", "(a path)"),
        ("path=/home/bob/x", "path=(a path)"),
        ("path:/home/bob/x", "(a path)"),
        ("file:///home/bob", "(a path)"),
        ("[Errno 2] No such file: '/a/b'", "[Errno 2] No such file: '(a path)'"),
        ("12 MB/s and 3 / 4, 5/6", "12 MB/s and 3 / 4, 5/6"),
        ("a relative/path stays", "a relative/path stays"),
    ],
)
def test_a_report_names_no_absolute_path_however_it_is_written(text: str, left: str) -> None:
    assert without_paths({"x": [text]}) == {"x": [left]}

"""What the memory of a rank's training is made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xcloud.rank.reports import MemoryMeter, SavedTensors, optimizer_bytes
from xcloud.record.summary import RunStatistics
from xcloud.tracking.mlflow_store import final_metrics

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
    metrics = final_metrics(summary)
    assert metrics["memory_peak_rank1"] == 101 and "memory_optimizer_rank0" not in metrics

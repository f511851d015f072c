"""Local updates in the real trainer and wiring, over links in memory."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.channels import stored
from tests.configs import build
from tests.pipelines import in_threads
from tests.strategy_jobs import clouds, values
from tests.trainers import Rank, ranks, spoil, update
from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression
from xcloud.comm.compressor import Chain
from xcloud.comm.precision import BlockInt
from xcloud.features.replicas.late import Skip
from xcloud.features.replicas.local_updates import LocalUpdates
from xcloud.features.replicas.outer_optimizer import OuterOptimizer
from xcloud.job.strategy import Strategy
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.frame import Kind
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Optimizer, Training

TRAINING = Training(8, batch_size=16, optimizer=Optimizer(0.05, 1, clip_norm=1.0))
INT4 = Compression(Chain(), Chain(), averaging=BlockInt(4))


def local(replicas: int | None = None, **settings: Any) -> Strategy:
    return Strategy("local_updates", replicas, LocalUpdates(**{"every": 4, **settings}))


def train(job: list[Rank], last: int = 8, first: int = 1) -> list[list[float | None]]:
    """The loss that each rank tells, by step. Ranks go their own pace."""

    def one(rank: Rank) -> list[float | None]:
        return [rank.update(step).loss for step in range(first, last + 1)]

    return in_threads([lambda r=rank: one(r) for rank in job])


def averaging_bytes(job: list[Rank]) -> list[int]:
    return [
        sum(link.num_bytes[Kind.AVERAGING] for link in rank.wiring.ends.records) for rank in job
    ]


STRATEGIES = {
    "diloco": (local(), clouds(2)),
    "three clouds": (local(), clouds(3)),
    "unequal clouds": (local(), clouds(2, (3, 2))),
    "pipelines": (local(2), clouds(4)),
    "streaming": (local(fragments=2, overlap=1, mix=0.5), clouds(2)),
    "a late one is skipped": (local(late=Skip()), clouds(3)),
    "late, with lanes": (local(late=Skip()), clouds(2, 2)),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_replicas_train_alone_and_end_equal(name: str) -> None:
    strategy, layout = STRATEGIES[name]
    job = ranks(layout, TRAINING, INT4, GPipe(8), BatchPlan(16, 16, 1), strategy)
    train(job, 7)
    for stage in (0, 1):
        found = values(job, stage)
        assert not all(torch.equal(found[0], other) for other in found)
    train(job, 8, 8)
    for stage in (0, 1):
        found = values(job, stage)
        assert all(torch.equal(found[0], other) for other in found)
    reports = [r for r in update(job, 9) if not isinstance(r, str)]
    assert sum(report.loss is not None for report in reports) >= 2  # each replica has its own


def test_the_loss_falls_as_far_as_with_averaged_gradients() -> None:
    strategy = local(outer=OuterOptimizer(1.0, 0.0, False))
    long = Training(40, batch_size=16, optimizer=Optimizer(0.02, 1, "constant"))
    job = ranks(clouds(2), long, schedule=GPipe(8), plan=BatchPlan(16, 16, 1), strategy=strategy)
    found = train(job, 40)
    alone = ranks(
        ClusterLayout({"local": Cloud(1, [0, 1])}, "free"), long, plan=BatchPlan(16, 16, 1)
    )
    (expected,) = train(alone, 40)

    means = [sum(x for x in losses if x is not None) / 2 for losses in zip(*found, strict=True)]
    assert means[0] == pytest.approx(expected[0], rel=1e-3)
    assert means[-1] < 1.15 * float(expected[-1] or 0) and means[-1] < 0.7 * means[0]


def test_only_merges_cross_between_replicas() -> None:
    job = ranks(clouds(2), TRAINING, INT4, GPipe(8), strategy=local())
    after = []
    for step in range(1, 9):
        train(job, step, step)
        after.append(averaging_bytes(job)[0])

    assert after[0] == after[1] == after[2] < after[3] == after[6] < after[7]
    assert all(not link.num_bytes[Kind.NORM] for r in job for link in r.wiring.ends.records)
    num_values = sum(v[0].numel() for v in (values(job, 0), values(job, 1)))
    assert after[6] - after[2] < 2 * num_values  # 4 bits, scales and a header; 4 bytes without


def test_a_job_goes_on_from_its_state_bit_for_bit() -> None:
    strategy = local(fragments=2, overlap=3, mix=0.5)

    def job() -> list[Rank]:
        return ranks(clouds(2), TRAINING, INT4, GPipe(8), BatchPlan(16, 16, 1), strategy)

    whole, first, second = job(), job(), job()
    train(whole)
    train(first, 5)
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(stored(old.state_dict()))
    train(second, 8, 6)

    for stage in (0, 1):
        assert all(
            torch.equal(a, b)
            for a, b in zip(values(whole, stage), values(second, stage), strict=True)
        )


def test_a_slow_cloud_leaves_out_steps_and_says_so() -> None:
    """16 tokens (here samples) a step over two clouds: 8 each."""
    job = ranks(clouds(2), TRAINING, INT4, GPipe(8), strategy=local(max_tokens=16))
    losses = train(job)

    assert [loss is None for loss in losses[0]] == [False, False, True, True] * 2
    assert torch.equal(*values(job, 0))


def test_the_hub_tells_of_every_merge() -> None:
    job = ranks(clouds(3), TRAINING, INT4, GPipe(9), strategy=local(late=Skip()))
    train(job)
    for rank in job:
        rank.reporter.flush()
    events = [json.loads(line) for line in b"".join(job[0].told).splitlines()]

    assert [(e["event"], e["step"]) for e in events] == [("merge", 4), ("merge", 8)]
    assert list(events[0]["weights"]) == ["c0", "c1", "c2"]
    assert sum(events[0]["weights"].values()) == 4 * 16
    assert not any(rank.told for rank in job[1:])


def test_updates_that_a_cloud_skipped_do_not_count_for_it() -> None:
    skipping = replace(TRAINING, on_divergence="skip")
    job = ranks(clouds(3), skipping, INT4, GPipe(9), strategy=local(late=Skip()))
    hook = spoil(job, 0, math.nan)  # in the first cloud
    train(job, 1)
    hook.remove()
    train(job, 4, 2)
    job[0].reporter.flush()
    (merge,) = [json.loads(line) for line in b"".join(job[0].told).splitlines()]

    assert merge["weights"] == {"c0": 3 * 6, "c1": 4 * 5, "c2": 4 * 5}


@pytest.mark.parametrize("settings", [{"late": Skip()}, {"max_s": 3.0}, {"weigh": "tokens"}])
def test_what_needs_whole_replicas_is_refused_for_pipelines(settings: Any) -> None:
    with pytest.raises(ConfigError, match="each rank must hold the whole model"):
        local(2, **settings).arrange(clouds(4))


def test_every_kind_of_local_updates_is_a_word() -> None:
    labels = {
        name: build("+exp=abnet_iwslt", f"strategy={name}").strategy.label
        for name in ("local_updates", "fedavg", "streaming")
    }
    assert labels["local_updates"] == "local_updates (every 50, nesterov(0.7, 0.9))"
    assert labels["fedavg"] == "fedavg (every 50, mean)"
    assert labels["streaming"].endswith("4 fragments, overlap 5, mix 0.5)")
    mean = OuterOptimizer(1.0, 0.0, False)
    said = LocalUpdates(9, mean, fragments=2, overlap=1, mix=0.25).label
    assert said == "every 9, mean, 2 fragments, overlap 1, mix 0.25"
    kept = build(
        "+exp=abnet_iwslt", "strategy=local_updates", "+strategy/averaging/late=go_on",
        "strategy.averaging.late.restart_s=2",
    )  # fmt: skip
    roster = kept.roster
    assert roster.is_elastic and roster.essential == frozenset({0}) and roster.restart_s == 2

"""Where stages may be dealt over the ranks of a cloud. That they train as whole ones is tested
with processes, in test_causal_run.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.causal_models import saved, where
from tests.configs import composed
from tests.nightly import NIGHTLY
from tests.pipelines import CPU, D, ToyStage, in_threads, samples
from tests.replicas import Post
from xcloud.base.errors import ConfigError
from xcloud.comm.compressor import Chain
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.features.replicas.replicas import Replicas
from xcloud.features.sharding import feature
from xcloud.features.sharding.feature import check_in_step
from xcloud.features.sharding.sharder import Sharder, is_sharded, whole_blocks
from xcloud.job.config import Settings
from xcloud.layout import Cloud, ClusterLayout
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora
from xcloud.net.gloo_groups import GlooCollectives
from xcloud.pipeline.exchange import FlatBuffer, RankGroup, Work, local_part
from xcloud.pipeline.one_forward_one_backward import OneForwardOneBackward
from xcloud.pipeline.schedule import GPipe
from xcloud.pipeline.settings import Optimizer
from xcloud.pipeline.trainer import TrainedModule
from xcloud.rank.export import whole
from xcloud.rank.peak_bytes import PeakBytes
from xcloud.record.reporter import Reporter

DEALT = ["+exp=lora_clm", "cluster=two_clouds_dp", "+cluster.clouds.cloud_a.shard=true"]


@pytest.mark.parametrize("schedule", [GPipe, OneForwardOneBackward])
@pytest.mark.parametrize("one_process", [False, True])
def test_ranks_compute_in_step_where_micro_batches_are_dealt_evenly(
    schedule: type, one_process: bool
) -> None:
    stages = [0, 1] if one_process else None
    clouds = {"a": Cloud(2, stages)} if one_process else {"a": Cloud(2), "b": Cloud(1)}
    layout = ClusterLayout(clouds)
    turns = [{s: layout.turn(s, rank) for s in layout.placement(rank).stages} for rank in (0, 1)]
    for even in (2, 4, 6):
        check_in_step(schedule(even), 2, turns, "cloud")
    for odd in (3, 5):
        with pytest.raises(ConfigError, match=r"cloud\.shard: .* a multiple of 2"):
            check_in_step(schedule(odd), 2, turns, "cloud")


def test_blocks_are_gathered_one_by_one_and_their_own_lists_with_them() -> None:
    block = nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(2, 2)])})
    stage = nn.Module()
    stage.network = nn.Module()
    stage.network.layers = nn.ModuleList([block, nn.Identity(), nn.Linear(2, 2)])
    stage.head = nn.Linear(2, 2)
    assert list(whole_blocks(stage)) == [block, stage.network.layers[2]]


@pytest.fixture
def alone() -> Iterator[RankGroup]:
    """A real process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield RankGroup(0, (0,), GlooCollectives(dist.new_group([0]), (0,)))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def first_of_four() -> Iterator[RankGroup]:
    """One rank of a process group whose others do not exist, nor does what it sends."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        ranks = (0, 1, 2, 3)
        yield RankGroup(0, ranks, GlooCollectives(dist.new_group(list(ranks)), ranks))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("gpt_neox", {"embeddings": "untie"}),
        pytest.param("gpt2", {"lora": Lora(2)}, marks=NIGHTLY),
        pytest.param("gemma2", {"lora": Lora(2)}, marks=NIGHTLY),
    ],
    ids=str,
)
def test_a_stage_is_dealt_block_by_block_as_it_is_read_and_starts_as_a_whole_one(
    first_of_four: RankGroup, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    """Never more at once than this rank's quarter of all, one whole block, and the ends."""
    saved(kind, tmp_path, num_hidden_layers=8, tie_word_embeddings="embeddings" in settings)
    model = CausalLM(checkpoint=str(tmp_path), **settings)

    def dealt(early: bool) -> tuple[nn.Module, int]:
        dealer, at = Sharder(first_of_four, CPU), where(tmp_path)
        with PeakBytes() as memory:
            stage = model.build_stage(0, 1, replace(at, deal=dealer.block) if early else at)
            dealer.rest(stage.to(CPU))
        return stage, memory.peak

    whole_stage = model.build_stage(0, 1, where(tmp_path))
    (stage, peak), (late_stage, late_peak) = dealt(True), dealt(False)
    num_bytes = [4 * sum(p.numel() for p in b.parameters()) for b in whole_blocks(whole_stage)]
    total = 4 * sum(p.numel() for p in whole_stage.parameters())
    ends = total - sum(num_bytes)
    assert peak < total / 4 + num_bytes[0] + ends + 4096 < total < late_peak

    expected = dict(whole_stage.named_parameters())
    for name, parameter in stage.named_parameters():
        own = expected.pop(name)
        assert parameter.requires_grad is own.requires_grad
        part = own.chunk(4)[0]
        assert torch.equal(local_part(parameter), part.detach()), name
    assert not expected and not any(True for _ in whole_blocks(stage))
    assert [n for n, _ in late_stage.named_parameters()] == [
        n for n, _ in stage.named_parameters()
    ]
    expected_buffers = dict(whole_stage.named_buffers())
    assert all(torch.equal(b, expected_buffers.pop(n)) for n, b in stage.named_buffers())
    assert not expected_buffers


def test_a_dealt_stage_makes_the_same_updates_and_is_restored_from_its_state(
    alone: RankGroup,
) -> None:
    """Several micro-batches forward before the first goes back, as GPipe has it."""
    training = Optimizer(0.1, 1, weight_decay=0.1)
    stages = [ToyStage(0, 2) for _ in range(3)]
    for stage in stages:
        stage.blocks = nn.ModuleList([nn.Linear(D, D, bias=False)])
        stage.blocks[0].weight = nn.Parameter(torch.eye(D))
        stage.layer = nn.Sequential(stage.layer, stage.blocks[0])
    for stage in stages[1:]:
        Sharder(alone, CPU).rest(stage)
    assert [is_sharded(stage) for stage in stages] == [False, True, True]
    buffers = [FlatBuffer(stage.parameters()) for stage in stages]
    optimizers = [training.build(stage) for stage in stages]

    def updated(number: int, step: int) -> float:
        buffer = buffers[number]
        buffer.zero()
        batches = [samples(torch.arange(4) + 4 * i) for i in range(3)]
        sent = [stages[number](None, batch).send["hidden"].square().sum() for batch in batches]
        for loss in sent:
            loss.backward()
        total = buffer.sum_over(alone, sent[0].detach())
        assert torch.equal(total, sent[0].detach()) and buffer.is_finite()
        norm = buffer.squared_norm()
        buffer.gradients.mul_(0.5)
        optimizers[number].step()
        return norm

    def values(number: int) -> list[torch.Tensor]:
        return list(whole(stages[number].state_dict(), keep=True).values())

    for step in (1, 2):
        assert updated(0, step) == pytest.approx(updated(1, step))
    assert all(torch.equal(a, b) for a, b in zip(values(0), values(1), strict=True))
    assert whole(stages[1].state_dict(), keep=False) == {}
    state = TrainedModule(stages[1], optimizers[1]).state_dict()
    assert all(type(v) is torch.Tensor for v in state.values() if isinstance(v, torch.Tensor))
    TrainedModule(stages[2], optimizers[2]).load_state_dict(state)
    for number in (0, 2):
        updated(number, 3)
    assert all(torch.equal(a, b) for a, b in zip(values(0), values(2), strict=True))


class OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


def test_tensors_on_gpus_go_over_nccl_where_each_rank_has_one(
    alone: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfTwo(GlooCollectives):
        def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
            return [values, values + torch.tensor([0, other_gpu])]

    assert isinstance(alone.group, GlooCollectives)
    gloo, gpu, on_gpu = (
        alone.group.group_for(torch.ones(1)),
        torch.device("cuda", 0),
        torch.ones(1).as_subclass(OnGpu),
    )
    asked = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **named: asked.append(named) or "nccl")
    other_gpu = 0
    shared = OfTwo(gloo, (0, 1), gpu)
    assert not asked and shared.group_for(on_gpu) is gloo
    with pytest.raises(ConfigError, match="two of them share one"):
        shared.mesh(gpu)
    other_gpu = 1
    apart = OfTwo(gloo, (0, 1), gpu)
    assert [named["backend"] for named in asked] == ["nccl"]
    assert apart.group_for(on_gpu) == "nccl" and apart.group_for(torch.ones(1)) is gloo


def test_a_gradient_that_is_not_finite_in_another_rank_is_seen(alone: RankGroup) -> None:
    buffer = FlatBuffer([nn.Parameter(torch.ones(3))])

    class OfTwo(GlooCollectives):
        def sum(self, values: torch.Tensor) -> None:
            values += torch.tensor([1.0, others], dtype=torch.float64)

    assert isinstance(alone.group, GlooCollectives)
    group = RankGroup(0, (0, 1), OfTwo(alone.group.group_for(torch.ones(1)), (0, 1)))
    for others in (16.0, math.nan, math.inf):
        buffer.parameters[0].grad.fill_(1.0)
        buffer.is_sharded = True
        assert float(buffer.sum_over(group, torch.tensor(2.0))) == 3.0
        assert buffer.is_finite() is math.isfinite(others)
        assert buffer.squared_norm() == pytest.approx(19.0) or not math.isfinite(others)


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_a_sharded_stage_is_averaged_over_clouds_as_a_whole_one(
    alone: RankGroup, value: float
) -> None:
    found = []
    for in_parts in (False, True):
        post, stages = Post(2), [ToyStage(0, 2) for _ in range(2)]
        if in_parts:
            Sharder(alone, CPU).rest(stages[0])

        def run(replica: int, post: Post = post, stages: Any = stages) -> Any:
            stage, reporter = stages[replica], Reporter(replica, "c", lambda lines: None)
            links, group = post.links(replica), RankGroup.alone()
            links.next = partial(links.next, wait_s=20.0)  # type: ignore[method-assign]
            replicas = Replicas(
                links, alone if replica == 0 else group, {0: stage}, lambda *_: Chain(), 7, 9,
                [4] * 2, lambda replica, step: 4.0, reporter,
            )  # fmt: skip
            exchange = GradientAveraging(check_every=1).join(replicas)
            buffer = FlatBuffer(stage.parameters())
            stage(None, samples(torch.arange(4))).send["hidden"].square().sum().backward()
            if replica == 0:
                buffer.gradients[3] *= value
            loss = exchange.before_update(1, {0: buffer}, {0: torch.tensor(2.0)})[0]
            exchange.after_update(1, Work(4, 4.0))
            return loss, buffer.flat, buffer.is_finite(), buffer.squares_elsewhere

        found.append(in_threads([partial(run, 0), partial(run, 1)])[0])

    (loss, flat, is_finite, _), (own_loss, own_flat, own_is_finite, elsewhere) = found
    assert torch.equal(flat, own_flat) or not is_finite
    assert is_finite is own_is_finite is math.isfinite(value)
    assert (float(loss), float(own_loss)) == (4.0, 4.0) or not is_finite
    assert elsewhere == 0.0 or not is_finite  # nobody else holds a part


def test_a_stage_can_be_dealt_in_one_cloud_and_in_both() -> None:
    Settings.of(composed(*DEALT))
    both = ["+cluster.clouds.cloud_b.shard=true", "strategy=data_parallel"]
    Settings.of(composed(*DEALT, *both))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.clouds.cloud_a.num_ranks=1"], "stage 0 is held by one rank"),
        (["schedule.num_micro_batches=3", "training.batch_size=15"], "a multiple of 2"),
        (["strategy=data_parallel"], r"stage 0 is held as .*cloud_b': \(False, 2\)"),
        (["strategy=local_updates"], r"strategy=local_updates averages full replicas"),
        (["model.lora=null", "model.own.tied=true", "model.embeddings=tie"], "embeddings=tie"),
        (
            ["schedule=zero_bubble", "+cluster.clouds.cloud_b.shard=true"],
            "zero bubble .* puts off",
        ),
        (["cluster.clouds.cloud_a.shard=2"], r"cloud\.shard must be one of"),
    ],
)
def test_a_stage_that_cannot_be_dealt_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Settings.of(composed(*DEALT, *overrides))


@pytest.mark.parametrize("is_sharded_here", [True, False])
def test_a_rank_deals_blocks_where_its_cloud_shards(
    is_sharded_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(
        feature, "sharding_clouds", lambda job: ["b"] if is_sharded_here else ["a"]
    )
    monkeypatch.setattr(
        feature, "return_freed_memory", lambda device, num_bytes: done.append(num_bytes)
    )
    made = SimpleNamespace(block="block", rest=lambda stage: done.append(stage))
    monkeypatch.setattr(feature, "Sharder", lambda *of, note: done.append((of, note)) or made)
    cluster = SimpleNamespace(cloud_of=lambda rank: "ab"[rank])
    context: Any = SimpleNamespace(
        rank=1,
        device="cpu",
        job=SimpleNamespace(cluster=cluster),
        reporter=SimpleNamespace(note=5),
    )
    at_rank: Any = feature.Sharding().at_rank(context)
    if not is_sharded_here:
        assert at_rank is None and done == []
        return
    built: Any = Dealt(deal=None)
    assert at_rank.build_context(3, "group", built).deal == "block"
    at_rank.complete(SimpleNamespace(stages={2: "other", 3: "stage"}), "pipeline")
    assert done == [feature._LARGE_BYTES, (("group", "cpu"), 5), "stage"]


@dataclass
class Dealt:
    deal: Any

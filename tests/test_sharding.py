"""Where stages may be dealt over the ranks of a cloud. That they train as whole ones is tested
with processes, in test_causal_run.py."""

from __future__ import annotations

import pytest
from torch import nn

from tests.test_conf import composed
from xcloud.cluster.layout import Cloud, ClusterLayout
from xcloud.errors import ConfigError
from xcloud.job.config import job_from_config
from xcloud.parallel.schedule import GPipe, OneForwardOneBackward
from xcloud.parallel.sharding import _blocks, check_in_step

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
    assert list(_blocks(stage)) == [block, stage.network.layers[2]]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.clouds.cloud_a.num_ranks=1"], "stage 0 is held by one rank"),
        (["schedule.num_micro_batches=3", "training.batch_size=15"], "a multiple of 2"),
        (["strategy=data_parallel"], "data_parallel exchanges whole ones"),
        (["model.lora=null", "model.own.tied=true", "model.embeddings=tie"], "embeddings=tie"),
        (["cluster.clouds.cloud_a.shard=2"], r"cloud\.shard must be one of"),
    ],
)
def test_a_stage_that_cannot_be_dealt_is_refused(overrides: list[str], said: str) -> None:
    job_from_config(composed(*DEALT))
    with pytest.raises(ConfigError, match=said):
        job_from_config(composed(*DEALT, *overrides))

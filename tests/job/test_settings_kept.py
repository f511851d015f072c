"""A setting is kept, or refused by name: nothing undoes one without a word."""

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.combinations import FACTORS, SAVED, experiment, losses, run
from tests.configs import composed
from xcloud.base.errors import ConfigError
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.features.replicas.late import GoOn
from xcloud.job import config as configs
from xcloud.layout import Cloud, ClusterLayout, Price
from xcloud.net.link_profile import InboundWire, LinkProfile, Liveness
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.pinned_batches import PinnedBatchPlan
from xcloud.security.policy import constructors

OF_A_CLOUD: dict[str, list[dict[str, Any]]] = {
    "num_ranks": [{"num_ranks": 2}],
    "stages": [{"stages": [0, 2]}, {"stages": [1, 0]}],
    "one_stage_per_rank": [
        {"one_stage_per_rank": True, "num_ranks": 2},
        {"one_stage_per_rank": True, "num_ranks": 2, "stages": [0, 1]},
    ],
    "device": [{"device": "cpu"}],
    "slowdown": [{"slowdown": 2.0}],
    "shard": [{"shard": True, "num_ranks": 2}],
    "replica": [{"replica": 1, "stages": [0]}],
    "address": [{"address": "192.0.2.7:7000"}],
    "price": [{"price": Price(2.0, 0.1)}],
}
"""configs.Settings of the first of two clouds, by what they are about."""
STRATEGIES = [name for name in FACTORS["strategy"] if name != "median"]  # which needs three


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OF_A_CLOUD)
def test_a_strategy_keeps_what_a_cloud_is_told_or_refuses_it(strategy: str, name: str) -> None:
    for given in OF_A_CLOUD[name]:
        own = Cloud(**given)
        left = sorted({0, 1, 2} - set(own.stages or [0])) if len(own.stages or ()) > 1 else None
        if name == "replica":
            own, left = replace(own, replica=0), [0]
        other = Cloud(1, left, replica=int(name == "replica"))
        try:
            wan = "sealed" if name == "address" else "free"
            layout = ClusterLayout({"a": own, "b": other}, wan)
            arranged = FACTORS["strategy"][strategy].arrange(layout)
        except ConfigError as error:
            assert "cluster" in str(error) or "strategy" in str(error)
            continue
        was, found = layout.clouds["a"], arranged.clouds["a"]
        kept = {field.name for field in fields(Cloud)} - {"stages", "replica"}
        assert {k: getattr(found, k) for k in kept} == {k: getattr(was, k) for k in kept}
        if own.stages is not None:
            assert found.stages == was.stages, (strategy, given)


def test_every_setting_of_a_cloud_is_asked_about() -> None:
    assert {field.name for field in fields(Cloud)} == OF_A_CLOUD.keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_keeps_everything_else_of_a_cluster(strategy: str) -> None:
    line, life = LinkProfile(1e6), Liveness(1.0, 9.0)
    clouds = {name: Cloud() for name in "abcd"}
    layout = ClusterLayout(clouds, "free", {"a-b": line}, "mine", life, 12_345)

    arranged = FACTORS["strategy"][strategy].arrange(layout)

    for field in fields(ClusterLayout):
        if field.name != "clouds":
            assert getattr(arranged, field.name) == getattr(layout, field.name), field.name


def test_a_pair_of_clouds_is_named_without_doubt() -> None:
    """'eu-west-us' is eu and west-us, and eu-west and us."""
    names = ["eu", "eu-west", "west-us", "us"]
    layout = {name: Cloud() for name in names}
    with pytest.raises(ConfigError, match="'eu' and 'west-us' and 'eu-west' and 'us'"):
        ClusterLayout(layout, "free", {"eu-west-us": LinkProfile(1e6)})

    slow = LinkProfile(1e6)
    found = ClusterLayout(layout, "free", {"us-eu": slow, "eu-west-west-us": slow})
    pairs = {(a, b) for a in names for b in names if a < b and found.wan_of(a, b) is slow}
    assert pairs == {("eu", "us"), ("eu-west", "west-us")}


def _numbers(values: object, path: str = "") -> list[str]:
    """The keys of all whole numbers of a config."""
    if isinstance(values, dict):
        return [key for name, v in values.items() for key in _numbers(v, f"{path}.{name}")]
    if isinstance(values, list):
        return []
    return [path[1:]] if isinstance(values, int) and not isinstance(values, bool) else []


def _set(values: dict[str, Any], key: str, number: int) -> None:
    *path, last = key.split(".")
    for name in path:
        values = values[name]
    values[last] = number


def test_a_whole_number_that_nothing_can_hold_is_refused_by_its_key() -> None:
    config = OmegaConf.to_container(composed("+exp=abnet_iwslt", "plan=show"), resolve=True)
    assert isinstance(config, dict)
    keys = _numbers(config)
    assert {"seed", "training.batch_size", "cluster.clouds.cloud_a.num_ranks"} <= set(keys)
    seconds = {
        "training.checkpoint.every_minutes",
        "plan.strategies.local_updates.averaging.late.wait_s",
    }
    for key in sorted({*keys} - seconds)[::8]:  # the checks are of the types, which are few
        changed = OmegaConf.to_container(OmegaConf.create(config))
        assert isinstance(changed, dict)
        _set(changed, key, 2**63)
        with pytest.raises(ConfigError, match=key.rpartition(".")[-1]):
            configs.Settings.of(changed)


def test_a_time_that_no_clock_can_wait_for_is_refused_by_its_key() -> None:
    known = (resolve_name(name) for name in constructors())
    times = [
        (one, field.name)
        for one in known
        if is_dataclass(one)
        for field in fields(one)
        if field.name.endswith("_s") and not field.name.endswith(("_per_s", "_at_s"))
    ]
    assert (Liveness, "join_within_s") in times and (GoOn, "restart_s") in times
    producer = {"d": OneWayCloud(), "a": OneWayCloud(share=1.0)}
    needed: dict[Any, dict[str, Any]] = {
        LinkProfile: {"bandwidth_bits_per_s": 1e12},
        InboundWire: {"bandwidth_bits_per_s": 1e12},
        ClusterLayout: {"clouds": {"a": Cloud(1, [0, 1])}},
        OneWayLayout: {"clouds": producer},
    }
    for one, name in times:
        with pytest.raises(ConfigError, match=name):
            one(**needed.get(one, {}), **{name: 1e10})
    assert LinkProfile(1e12).bandwidth_bits_per_s == 1e12


@pytest.mark.parametrize("seed", [2**31, 20261126170305, 2**63 - 1])
def test_a_date_or_the_largest_number_is_a_seed(seed: int) -> None:
    plans = [BatchPlan(10, 2, seed), PinnedBatchPlan(10, 2, seed, [0, 1])]
    for plan in plans:
        ids = [int(i) for step in range(1, 6) for i in plan.ids(step)]
        assert sorted(ids) == [*range(10)], "an epoch"


def test_a_run_takes_the_largest_number_as_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"clouds": "two", "compression": "feedback", "defences": "gaussian"}
    run(replace(experiment(rows, SAVED), seed=2**63 - 1), tmp_path, monkeypatch)

    assert {step for step, _ in losses(tmp_path)} == {*range(1, SAVED + 1)}

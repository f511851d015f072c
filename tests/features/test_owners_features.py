"""What a job may use beyond a plain pipeline of two clouds, where clouds have several owners."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from tests import combinations
from tests.causal_models import SMALL
from tests.combinations import FACTORS, experiment
from tests.combinations import losses as steps_of
from tests.configs import composed
from tests.feature_rows import feature_rows
from tests.line_links import Proxy
from tests.owners import Owners, address
from tests.runs import free_port, weights
from tests.toy import toy_config
from tests.toy_text import text_config
from xcloud.base.errors import ConfigError
from xcloud.features.checkpoints.resume import check_can_go_on
from xcloud.features.replicas.gradient_averaging import GradientAveraging
from xcloud.job.config import Settings
from xcloud.job.strategy import Strategy
from xcloud.launch.local import run
from xcloud.layout import Cloud, ClusterLayout
from xcloud.net.transport import Transport
from xcloud.record.events import EVENTS_FILE, EventReader

SIX = {name: Cloud(stages=[k % 3], replica=k // 3) for k, name in enumerate("abcdef")}
MIXED = {"a": Cloud(stages=[1]), "b": Cloud(stages=[0]), "c": Cloud(stages=[2])}


@pytest.mark.parametrize(
    ("clouds", "row"),
    [
        (SIX, {"strategy": "data_parallel"}),
        (FACTORS["clouds"]["four"], {"strategy": "hybrid"}),
        (FACTORS["clouds"]["three"], {"strategy": "local_updates"}),
        (FACTORS["clouds"]["u"], {"ends": "tied"}),
        (MIXED, {"ends": "tied"}),
    ],
    ids=["six", "hybrid", "local updates", "U", "tied"],
)
def test_all_messages_between_clouds_go_over_lines_that_the_layout_names(
    clouds: dict[str, Cloud], row: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each of these lines is used: an owner opens no port for nothing."""
    monkeypatch.setitem(FACTORS["clouds"], "these", clouds)
    job = experiment({**row, "clouds": "these", "micro_batches": "8"}, max_steps=1)
    used = set[frozenset[str]]()

    def carried(transport: Transport) -> Transport:
        out = transport.out

        def noted(line: str, peer: int, settings: Any) -> Any:
            used.add(frozenset(map(job.cluster.cloud_of, (transport.rank, peer))))
            return out(line, peer, settings)

        monkeypatch.setattr(transport, "out", noted)
        return transport

    combinations.run(job, tmp_path, monkeypatch, carried)
    assert {pair for pair in used if len(pair) > 1} == {frozenset(p) for p in job.cluster.lines}


@pytest.mark.parametrize(
    ("listen", "pair"), [("ab", "'c' and 'd'"), ("ac", "'b' and 'd'"), ("ad", "")]
)
def test_two_clouds_that_only_average_need_an_address_too(listen: str, pair: str) -> None:
    """Pipelines of a and b, and of c and d: stages of b and d are the same."""
    clouds = {
        name: Cloud(address=f"{name}.example:7000" if name in listen else None) for name in "abcd"
    }
    layout = Strategy("hybrid", 2, GradientAveraging()).arrange(ClusterLayout(clouds, "sealed"))
    if not pair:
        return layout.check_lines()
    with pytest.raises(ConfigError, match=f"a line between clouds {pair}, so one of them must"):
        layout.check_lines()


def test_a_file_in_which_nobody_can_be_reached_is_refused() -> None:
    with pytest.raises(ConfigError, match="between clouds 'cloud_a' and 'cloud_b', so one of"):
        Settings.of(toy_config("two_clouds", ["cluster/wan=sealed"]))


@dataclass(frozen=True)
class Row:
    """A job of several owners.

    cluster: its name in conf/cluster.
    listen: the clouds with an address; of nobody: there is a mailbox.
    changed: settings beside overrides, by dotted name.
    then: overrides with which all start again in the same folders.
    is_cut: whether the line between the first two clouds is cut again and again.
    alike: an event and its field that alone are as on one machine: noise is drawn from no seed.
    switches: an event at which all clouds begin to send what crosses in another form.
    """

    overrides: Sequence[str]
    cluster: str = "two_clouds"
    listen: Sequence[str] = ("cloud_a",)
    compose: Callable[[str, list[str]], Any] = toy_config
    changed: dict[str, Any] = field(default_factory=dict)
    then: Sequence[str] = ()
    is_cut: bool = False
    alike: tuple[str, str] | None = None
    switches: str = ""

    def config(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Return the config of the same job on this machine, as a run takes it."""
        # As a mailbox this is no emulated line, so messages are as large.
        wan = ["cluster/wan=free"] if self.listen else ["cluster/wan=real"]
        config = OmegaConf.create(self.compose(self.cluster, [*wan, *overrides]))
        for name, value in self.changed.items():
            OmegaConf.update(config, name, value, force_add=True)
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]


def four_clouds(cluster: str, overrides: list[str]) -> dict[str, object]:
    cloud_d = "+cluster.clouds.cloud_d._target_=xcloud.layout.Cloud"
    return toy_config("three_clouds", [cloud_d, *overrides])


def adapters(cluster: str, overrides: list[str]) -> Any:
    return OmegaConf.to_container(composed(*SMALL, *overrides), resolve=True)


LOCAL = ["strategy=local_updates", "strategy.averaging.every=2"]
THREE = ["schedule.num_micro_batches=3", "training.batch_size=9"]
SHARDED = [f"cluster.clouds.cloud_{name}.{one}" for name in "ab"
           for one in ("num_ranks=2", "shard=true")]  # fmt: skip
PAIR = "tests.combinations.PairModel"
LAST_TWO = ("cloud_b", "cloud_c")
# Noise is drawn from no seed, which other clouds know: where weights are compared it is next to
# none.
ROWS = {
    "three owners, tied ends, 1F1B": Row(
        ["schedule=one_forward_one_backward", "schedule.num_micro_batches=8"], "three_clouds",
        LAST_TWO, changed={"model": {"_target_": PAIR, "tied": True}},
    ),
    "U-shape, leak meter, noise": Row(
        ["security=owner_keeps_text_and_labels", "security/meter=attack",
         "security/defences/forward=gaussian_noise", "security.defences.forward.sigma=1e-30"],
        "u_shape", ["other"], text_config,
    ),
    "kept rows, evaluations": Row(
        ["training.activation_cache_mb=1", "training.evaluate_every=4"],
        changed={"model": {"_target_": PAIR, "num_frozen": 1}},
    ),
    "adapters": Row([], compose=adapters),
    "sharded pipeline": Row([*SHARDED, "schedule.num_micro_batches=4"]),
    "sharded replicas": Row(
        [*SHARDED, "schedule.num_micro_batches=4", "strategy=data_parallel"]
    ),
    "hybrid of four": Row(["strategy=hybrid"], listen=["cloud_a", "cloud_d"], compose=four_clouds),
    "median of three": Row(
        ["strategy=data_parallel", "+strategy/averaging/merge=median", *THREE], "three_clouds",
        LAST_TWO,
    ),
    "late gradients by PowerSGD": Row(
        ["strategy=data_parallel", "strategy.averaging.delay=1", "compression=powersgd"]
    ),
    "memories and passes, cut": Row(
        ["compression=delta_int4", "training.accumulate_steps=2", "training.max_steps=60"],
        is_cut=True,
    ),
    "mailbox, streaming": Row(
        ["strategy=streaming", "strategy.averaging.every=8", "compression=int4",
         "training.max_steps=16"], listen=(),
    ),
    "another compressor": Row([], then=["compression=int8", "training.max_steps=16"]),
    "more micro-batches": Row(
        ["compression=delta_int4"],
        then=["compression=delta_int4", "schedule.num_micro_batches=2", "training.max_steps=16"],
    ),
    "another compressor of averages": Row(
        LOCAL, then=[*LOCAL, "compression=int4", "training.max_steps=16"]
    ),
    **{name: Row(**row) for own in feature_rows().values() for name, row in own.owners.items()},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_several_owners_learn_what_one_machine_learns(name: str, tmp_path: Path) -> None:
    """The same losses and the same weights, bit for bit."""
    row = ROWS[name]
    whole = tmp_path / "whole"
    box = None
    if not row.listen:
        box = tmp_path / "box"
        box.mkdir()
    with reachable(row) as (addresses, words):
        for one in [row.overrides, row.then] if row.then else [row.overrides]:
            overrides = [f"cache_dir={tmp_path / 'cache'}", *one]
            owners = Owners(
                tmp_path, [*addresses, *overrides], row.changed, mailbox=box, cluster=row.cluster,
                compose=row.compose,
            )  # fmt: skip
            owners.finish(**words)
            run(Settings.of(row.config(overrides)), whole, resumes=check_can_go_on)
    first = owners.run_dir(owners.clouds[0])
    if row.alike is not None:
        event, name = row.alike
        [own], [theirs_too] = (told(folder, event) for folder in (first, whole))
        assert own[name] == theirs_too[name] > 0
        assert steps_of(first) != steps_of(whole)
        return
    if row.switches:
        assert told(first, row.switches)
        assert all(len(forms_sent(owners.run_dir(cloud))) > 1 for cloud in owners.clouds)
    assert steps_of(first) == steps_of(whole)
    ours = {n: one for cloud in owners.clouds for n, one in weights(owners.run_dir(cloud)).items()}
    theirs = weights(whole)
    assert ours.keys() == theirs.keys() and ours
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def told(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """Return the events of a kind that rank 0 has told."""
    return [one for one in EventReader(run_dir / EVENTS_FILE) if one["event"] == event]


def forms_sent(run_dir: Path) -> set[tuple[str, ...]]:
    """Return what activations and gradients that left a cloud were made of."""
    audits = [json.loads(file.read_text()) for file in run_dir.glob("rank*.wire.json")]
    return {
        tuple(part["carries"] for part in message["parts"])
        for audit in audits
        for message in audit["messages"]
        if message["kind"] in ("activation", "gradient")
    }


@contextmanager
def reachable(row: Row) -> Iterator[tuple[list[str], dict[str, list[str]]]]:
    """The settings of addresses, and further words of each cloud's command. Through the address of
    cloud_a, where lines are cut, goes a proxy that does so."""
    ports = [20_000 + (free_port() + 10 * k) % 10_000 for k in range(len(row.listen))]
    by_cloud = dict(zip(row.listen, ports, strict=True))
    if not row.is_cut:
        yield [address(cloud, port) for cloud, port in by_cloud.items()], {}
        return
    draw = random.Random(1)
    proxy = Proxy(by_cloud["cloud_a"], cut_after=lambda: draw.randrange(20_000, 60_000))
    words = {"cloud_a": ["--listen", f"127.0.0.1:{by_cloud['cloud_a']}"]}
    yield [address("cloud_a", proxy.port)], words
    proxy.close()
    assert proxy.num_cuts > 1

"""Network namespaces as machines, with torchrun or a part of an owner's cloud in each; the kernel
limits their links."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from benchmarks.namespaces import (
    WIREGUARD,
    available,
    block,
    several_hosts,
    wireguard,
    wireguard_available,
)
from benchmarks.several_machines import run_on_two_machines
from tests.owners import CLOUDS, Owners
from tests.runs import losses, rank_pid, start, wait_for, weights
from tests.toy import toy_config
from xcloud.net.link_profile import LinkProfile
from xcloud.record.files import CheckpointSteps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]


def test_a_run_on_two_machines_equals_one_process_bit_for_bit(tmp_path: Path) -> None:
    start(tmp_path / "local", toy_config("local"))
    config = toy_config("two_clouds", ["cluster/wan=real"])
    file = tmp_path / "experiment.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))

    summary = run_on_two_machines(file, tmp_path, LinkProfile(50e6), CLOUDS)

    assert summary["status"] == "finished"
    assert summary["wan_bytes_per_step"]["forward"] > 0
    assert losses(tmp_path / "cloud_a") == losses(tmp_path / "local")
    # Each machine keeps its own part of the model.
    ours = {**weights(tmp_path / "cloud_a"), **weights(tmp_path / "cloud_b")}
    theirs = weights(tmp_path / "local")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "summary.json" in (tmp_path / "cloud_a" / "machine.log").read_text().splitlines()[-1]


def test_clouds_started_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    config = toy_config("two_clouds", ["cluster/wan=real"])
    file = tmp_path / "experiment.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))

    with pytest.raises(RuntimeError, match="belongs to cloud 'cloud_a', not 'cloud_b'"):
        run_on_two_machines(file, tmp_path, None, ("cloud_b", "cloud_a"))

    failure = json.loads((tmp_path / "cloud_b" / "rank0.error.json").read_text())
    assert "--node-rank" in failure["message"]


@contextmanager
def firewall(hosts: Sequence[str]) -> Iterator[None]:
    block(hosts[0], "30000-65534")
    yield


@pytest.mark.skipif(wireguard_available() is not None, reason=str(wireguard_available()))
def test_clouds_joined_by_wireguard_need_its_address_and_nothing_else(tmp_path: Path) -> None:
    """The ranks find the interface, and no port but WireGuard's is let in."""
    file = tmp_path / "experiment.yaml"
    config = toy_config("two_clouds", ["cluster/wan=real"])
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))

    @contextmanager
    def sealed(hosts: Sequence[str]) -> Iterator[None]:
        with firewall(hosts), wireguard(hosts):
            yield

    summary = run_on_two_machines(
        file, tmp_path, None, CLOUDS, prepare=sealed, master=WIREGUARD[0]
    )
    assert summary["status"] == "finished"


def test_a_firewall_that_lets_only_the_store_in_is_named_with_the_port(tmp_path: Path) -> None:
    """In both clouds, though both reach the store."""
    file = tmp_path / "experiment.yaml"
    config = toy_config("two_clouds", ["cluster/wan=real"])
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))

    with pytest.raises(RuntimeError, match="the machines ended with"):
        run_on_two_machines(file, tmp_path, None, CLOUDS, prepare=firewall)

    for rank, cloud in enumerate(CLOUDS):
        failure = json.loads((tmp_path / cloud / f"rank{rank}.error.json").read_text())
        assert f"rank {1 - rank} (cloud {CLOUDS[1 - rank]})" in failure["message"]
        assert "both reach the store at 10.213.0.1:29500" in failure["message"]
        assert re.search(r"10\.213\.0\.[12]:\d+ \(no answer in 10 s\)", failure["message"])


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("spans", CLOUDS)
def test_a_cloud_of_two_machines_trains_as_one_process_does_also_after_one_died(
    spans: str, dies: int, tmp_path: Path
) -> None:
    """cloud_b listens. The other owner's rank starts again within seconds, also while it waits for
    a message of the dead machine, and not after cluster.reconnect_s."""
    more = ["training.max_steps=200", "training.checkpoint.every_steps=20",
            "schedule.num_micro_batches=2"]  # fmt: skip
    addresses = {"cloud_a": "10.213.0.3:7000", "cloud_b": "[10.213.0.1:7000,10.213.0.2:7000]"}
    where = f"+cluster.clouds.cloud_b.address={addresses[spans]}"
    owners = Owners(tmp_path, [where, f"cluster.clouds.{spans}.num_ranks=2", *more])
    meet = ["--nnodes", "2", "--master-addr", "10.213.0.1"]
    [other] = {*CLOUDS} - {spans}
    with several_hosts(3, 50e6) as hosts:

        def begin(machine: int) -> Any:
            words = [*meet, "--node-rank", str(machine)]
            return owners.start(spans, *words, machine=machine, host=hosts[machine])

        commands = [begin(0), begin(1), owners.start(other, host=hosts[2])]
        try:
            folder = CheckpointSteps(owners.run_dir(spans, dies))
            wait_for(lambda: len(folder.agreed_steps()) > 1, 120)
            theirs = rank_pid(owners.run_dir(other), 2 * CLOUDS.index(other))
            commands[dies].kill()
            wait_for(lambda: not Path(f"/proc/{theirs}").exists(), 60)  # before overdue_after_s
            commands[dies].wait()
            commands[dies] = begin(dies)
            codes = [process.wait(240) for process in commands]
        finally:
            for process in commands:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    said = owners.said(spans) + owners.said(spans, machine=1) + owners.said(other)
    assert codes == [0, 0, 0], said
    assert "all ranks start again from step" in owners.said(other)
    start(tmp_path / "local", toy_config("local", more))
    assert losses(owners.run_dir("cloud_a")) == losses(tmp_path / "local")
    expected = weights(tmp_path / "local")
    for run_dir in (*map(owners.run_dir, CLOUDS), owners.run_dir(spans, machine=1)):
        for name, value in weights(run_dir).items():
            assert torch.equal(expected.pop(name), value), name
    assert not expected

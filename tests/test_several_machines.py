"""Two network namespaces as two machines, torchrun in each, the kernel limits their link."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from benchmarks.namespaces import (
    WIREGUARD,
    available,
    block,
    wireguard,
    wireguard_available,
)
from benchmarks.several_machines import run_on_two_machines
from tests.runs import losses, start, weights
from tests.toy import toy_config
from xcloud.net.link_profile import LinkProfile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(available() is not None, reason=str(available())),
]
CLOUDS = ("cloud_a", "cloud_b")


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

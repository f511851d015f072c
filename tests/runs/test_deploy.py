"""What deploy/ promises, and the package as a wheel where there is nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.line_links import LABEL, NAME, RUN, listener
from tests.owners import keys_of
from tests.runs import free_port, wait_for
from xcloud.base.errors import LinkError
from xcloud.base.project import project_root
from xcloud.launch.join import labels_in_words
from xcloud.layout import Cloud, ClusterLayout
from xcloud.line.hello import Hello
from xcloud.line.pinned_tls import PinnedTls
from xcloud.line.ways import Dialler

DEPLOY = project_root() / "deploy"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.parametrize("cloud", ["a", "b"])
def test_a_pod_has_no_rights_and_no_network_but_the_line(cloud: str) -> None:
    found = {one["kind"]: one for one in documents(f"kubernetes/cloud_{cloud}.yaml")}
    assert {one["metadata"].get("namespace", "xcloud-" + cloud) for one in found.values()} == {
        f"xcloud-{cloud}"
    }
    pod = found["Job"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    (ranks,) = pod["containers"]
    assert ranks["args"][:4] == ["join", "/keys/experiment.yaml", "--cloud", f"cloud_{cloud}"]
    own = ranks["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    mounted = {one["name"]: one for one in ranks["volumeMounts"]}
    assert mounted.keys() == {one["name"] for one in pod["volumes"]}
    assert mounted["keys"]["readOnly"]
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == {} and policy["policyTypes"] == ["Ingress", "Egress"]
    line = policy["egress" if cloud == "a" else "ingress"][0]
    assert line["ports"] == [{"protocol": "TCP", "port": 7000}]
    assert not policy["ingress" if cloud == "a" else "egress"]


def test_a_job_group_may_stand_in_two_clouds() -> None:
    header, *tasks = documents("skypilot.yaml")
    assert header == {"name": "xcloud", "execution": "parallel", "inter_connection": False}
    assert len({task["resources"]["infra"] for task in tasks}) == len(tasks) == 2
    for task, cloud in zip(tasks, ("cloud_a", "cloud_b"), strict=True):
        assert f"--cloud {cloud} " in task["run"]


def test_the_image_runs_as_a_user_of_its_own() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert lines[-5].startswith("USER 10001") and "ENTRYPOINT" in lines[-2]
    assert not any("TOKEN=hf" in line for line in lines)


def test_the_batch_script_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / "xcloud.sbatch")], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "xcloud@cloud_b.service"
    text = (DEPLOY / "xcloud@.service").read_text()
    assert {"DynamicUser=yes", "ProtectHome=yes", "IPAddressDeny=any"} <= {*text.splitlines()}
    unit.write_text(text.replace("/opt/xcloud/bin/python", shutil.which("true") or ""))
    found = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in found.stderr.splitlines() if unit.name in line]
    assert not complaints and "Unknown" not in found.stderr


def test_join_says_by_which_names_an_ingress_finds_the_ranks() -> None:
    clouds = {"a": Cloud(), "b": Cloud(num_ranks=2, address="b.example:7000")}
    said = labels_in_words(ClusterLayout(clouds, "sealed"), "b")
    assert re.fullmatch(r".* rank 1 [0-9a-f]{32}, rank 2 [0-9a-f]{32}", said)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("haproxy") is None, reason="there is no haproxy")
def test_two_ranks_listen_behind_one_port_and_tls_stays_closed(tmp_path: Path) -> None:
    ranks = [listener(rank=rank) for rank in range(2)]
    port = free_port()
    text = (
        (DEPLOY / "haproxy.cfg").read_text().replace("bind :7000-7001", f"bind 127.0.0.1:{port}")
    )
    for rank in range(2):
        text = text.replace(f"LABEL_OF_RANK_{rank}", f"{rank}.{LABEL}")
        text = text.replace(f"127.0.0.1:{7101 + rank}", f"127.0.0.1:{ranks[rank].port}")
    (config := tmp_path / "haproxy.cfg").write_text(text)
    proxy = subprocess.Popen(["haproxy", "-db", "-f", str(config)])
    try:

        def dialled(label: str, rank: int) -> str:
            way = Dialler(
                ("127.0.0.1", port), "cloud_a", PinnedTls(keys_of("cloud_b", ["cloud_a"]), label)
            )
            hello = Hello(NAME._replace(sender=rank), RUN, attempt=1, connection=0, of=1)
            try:
                way.connect(hello, is_bulk=False, timeout_s=2.0, wake=lambda: None)
            except LinkError as error:
                return str(error)
            return "let in"

        wait_for(lambda: "not ready" in dialled(f"0.{LABEL}", 0))
        assert "not ready" in dialled(f"1.{LABEL}", 1)  # it has come through all of TLS
        assert "connection was closed" in dialled(f"1.{LABEL}", 0)  # that is rank 1
        assert "not ready" not in dialled(f"2.{LABEL}", 0)
    finally:
        proxy.kill()
        proxy.wait()
        for one in ranks:
            one.close()


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.nightly
def test_an_experiment_runs_from_a_wheel_in_an_empty_folder(tmp_path: Path) -> None:
    """Building it asks an index for setuptools, so this is no test for every day."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("xcloud-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    empty = tmp_path / "empty"
    empty.mkdir()

    words = ["+exp=abnet_iwslt", "model=transformer", "tracker=none", "task.data.num_pairs=2600",
             "training.max_steps=4", "training.batch_size=16"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "xcloud", "run", *words], cwd=empty, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "abnet_iwslt: finished, 4 steps" in done.stdout
    assert {path.name for path in empty.iterdir()} == {".cache", "outputs"}

"""Two owners train one pipeline: each starts their own cloud, and sealed lines alone join them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from tests.line_links import Proxy
from tests.nightly import each_once
from tests.owners import CLOUDS, TwoOwners, address
from tests.runs import ROOT, free_port, losses, start, wait_for, weights
from tests.toy import toy_config
from xcloud.base.errors import ConfigError
from xcloud.features.one_way.layout import OneWayCloud, OneWayLayout
from xcloud.job.config import Settings
from xcloud.launch import join
from xcloud.launch.join import Machine, main
from xcloud.launch.several_machines import TorchrunProcess
from xcloud.layout import Cloud, ClusterLayout, host_and_port
from xcloud.line import transport
from xcloud.line.keys import make_key
from xcloud.line.mailbox import Mailbox
from xcloud.record.events import EventReader
from xcloud.record.files import CheckpointSteps, rank_file
from xcloud.record.summary import read_summary
from xcloud.record.timeline import timeline_of
from xcloud.show.status import describe

TWO_RANKS = [
    "cluster.clouds.cloud_a.num_ranks=2", "cluster.clouds.cloud_b.num_ranks=2",
    "schedule.num_micro_batches=4",
]  # fmt: skip
A = "127.0.0.1:7001"


def layout(wan: Any = "sealed", **more: Any) -> ClusterLayout:
    clouds = {"a": Cloud(address=more.pop("a", None)), "b": Cloud(address=more.pop("b", None))}
    return ClusterLayout(clouds, wan, **more)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"'a' and 'b', so one .*\.a\.address=HOST:PORT; or both .* cluster\.relay=H"),
        ({"relay": A, "wan": "real"}, r"cluster\.relay is for sealed lines: set cluster/wan=seal"),
        ({"relay": A, "b": A}, r"every line here has a cloud with one: remove cluster\.relay"),
        ({"relay": "host"}, r"cluster\.relay is 'host', but must be HOST:PORT"),
        ({"a": A, "wan": "real"}, r"address is for sealed lines: set cluster/wan=sealed"),
        ({"a": "host"}, r"a\.address is 'host', but must be HOST:PORT"),
        ({"a": "::1:7000"}, "must be HOST:PORT"),
        ({"a": "host:70000"}, "must be HOST:PORT"),
        ({"b": A, "links": {"a-b": "free"}}, r"neither cluster\.links nor cluster\.carrier"),
        ({"b": A, "reconnect_s": 300.0}, r"must be below cluster\.liveness\.overdue_after_s"),
    ],
)
def test_lines_that_cannot_come_about_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layout(**given).check_lines()


@pytest.mark.parametrize(
    ("late", "wan"), each_once(["skip", "go_on"], ["sealed", "mailbox"], count=2)
)
def test_clouds_of_several_owners_that_may_leave_are_refused(late: str, wan: str) -> None:
    more = address("cloud_a") if wan == "sealed" else "cluster.wan.url=box"
    elastic = ["strategy=local_updates", f"+strategy/averaging/late={late}"]
    with pytest.raises(ConfigError, match=r"clouds that stay .* choose strategy/averaging/late=w"):
        Settings.of(toy_config("two_clouds", [f"cluster/wan={wan}", more, *elastic]))


@pytest.mark.parametrize("wan", ["sealed", Mailbox(url="box")])
def test_one_way_jobs_of_several_owners_are_refused(wan: Any) -> None:
    clouds = {"fed": OneWayCloud(), "feeds": OneWayCloud(share=1.0)}
    with pytest.raises(ConfigError, match=r"this is a one-way job: choose cluster/wan=real"):
        OneWayLayout(clouds, wan)


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings of a line between two owners, whose address this process's policy names."""
    listens = address("cloud_b")
    policy = yaml.safe_load((ROOT / "tests" / "policy.yaml").read_text())
    policy["addresses"] = [listens.partition("=")[2]]
    (tmp_path / "policy.yaml").write_text(yaml.safe_dump(policy))
    monkeypatch.setenv("XCLOUD_POLICY", str(tmp_path / "policy.yaml"))
    return ["cluster/wan=sealed", listens]


def test_a_plan_is_not_passed_over_where_several_machines_run_a_file(
    tmp_path: Path, sealed: list[str]
) -> None:
    config = toy_config("two_clouds", [*sealed, "plan=apply"])
    file = tmp_path / "experiment.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    with pytest.raises(ConfigError, match="plan= needs all clouds on one machine"):
        main([str(file), "--cloud", "cloud_a", "--run-dir", str(tmp_path / "run")])


def test_of_two_clouds_the_one_with_an_address_listens() -> None:
    assert layout(b=A).listener_of("a", "b") == layout(b=A).listener_of("b", "a") == "b"
    assert layout(a=A, b=A).listener_of("b", "a") == "a"
    assert host_and_port("[::1]:80") == ("::1", 80)
    clouds = {"a": Cloud(), "b": Cloud(num_ranks=3, address="b.example:7000")}
    found = [ClusterLayout(clouds, "sealed").address_of(rank) for rank in range(4)]
    assert found == [None, *(("b.example", 7000 + number) for number in range(3))]
    with pytest.raises(ConfigError, match="65534 to 65536"):
        clouds["b"] = Cloud(num_ranks=3, address="b.example:65534")
        ClusterLayout(clouds, "sealed")


def test_each_machine_of_a_cloud_has_an_address_and_as_many_ranks() -> None:
    clouds = {"a": Cloud(), "b": Cloud(num_ranks=4, address=["h1:7000", "[::1]:9000"])}
    two = ClusterLayout(clouds, "sealed")
    found = [two.address_of(rank) for rank in range(5)]
    assert found == [None, ("h1", 7000), ("h1", 7001), ("::1", 9000), ("::1", 9001)]
    assert Machine(0, 2).ranks_of(two, "b") == (1, 2)
    assert Machine(1, 2).ranks_of(two, "b") == (3, 4)
    with pytest.raises(ConfigError, match="address names 2 machines, and --nnodes is 4"):
        Machine(1, 4).ranks_of(two, "b")
    with pytest.raises(ConfigError, match=r"b\.address: 3 ranks cannot be dealt evenly to 2 mach"):
        ClusterLayout(
            {**clouds, "b": Cloud(num_ranks=3, address=["h1:7000", "h2:7000"])}, "sealed"
        )
    with pytest.raises(ConfigError, match="--nnodes: 1 ranks cannot be dealt evenly to 2"):
        Machine(0, 2).ranks_of(two, "a")


def test_ranks_of_one_owner_meet_over_gloo_and_those_of_two_over_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ways(name: str) -> dict[str, Any]:
        return {"out": lambda *_: f"to {name}", "incoming": lambda *_: f"from {name}"}

    monkeypatch.setattr(transport, "GlooTransport", lambda **_: SimpleNamespace(**ways("gloo")))
    place = SimpleNamespace(mates=[0, 1], is_mate=[0, 1].__contains__)
    lines = SimpleNamespace(place=place, **ways("the line"))
    sealed: Any = transport.SealedTransport(SimpleNamespace(rank=0, lines=lines))  # type: ignore[arg-type]

    assert [sealed.out("0.forward", peer, None) for peer in (1, 2)] == ["to gloo", "to the line"]
    found = [sealed.incoming("0.forward", peer, None) for peer in (1, 2)]
    assert found == ["from gloo", "from the line"]


@pytest.mark.slow
def test_two_owners_train_as_one_process_does_and_only_lines_join_them(tmp_path: Path) -> None:
    port = free_port()
    steps = ["training.max_steps=6", "training.evaluate_every=7"]
    owners = TwoOwners(tmp_path, [address("cloud_b", port), *steps])
    owners.finish()
    config = toy_config("two_clouds", steps)
    start(tmp_path / "gloo", config)
    assert losses(owners.run_dir("cloud_a")) == losses(tmp_path / "gloo")
    theirs = weights(tmp_path / "gloo")
    ours = {**weights(owners.run_dir("cloud_a")), **weights(owners.run_dir("cloud_b"))}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert f"this cloud dials cloud_b at 127.0.0.1:{port}" in owners.said("cloud_a")
    assert f"cloud_a dials port {port} here" in owners.said("cloud_b")
    misfit = "training.evaluate_every=7 is more than training.max_steps=6"
    assert all(misfit in owners.said(cloud) for cloud in owners.clouds)
    found = timeline_of(EventReader(owners.run_dir("cloud_a") / "events.jsonl"))
    assert found is not None and found.clocks.startswith("clocks of 2 machines joined by messages")
    (line,) = read_summary(owners.run_dir("cloud_a"))["lines"]
    assert line["to"] == "rank 1 of cloud_b"


@pytest.mark.slow
@pytest.mark.nightly
def test_several_ranks_a_cloud_meet_the_other_owner_at_the_listening_ports_alone(
    tmp_path: Path,
) -> None:
    """Whatever torch opens stays inside a cloud; the cloud that dials listens to nobody else."""
    port = 20_000 + free_port() % 10_000
    more = [*TWO_RANKS, "training.max_steps=300"]
    owners = TwoOwners(tmp_path, [address("cloud_a", port), *more])
    both = {cloud: owners.start(cloud) for cloud in CLOUDS}
    seen = dict[str, set[tuple[str, int, Any]]]()
    while both["cloud_a"].poll() is None:
        for cloud, process in both.items():
            found = seen.setdefault(cloud, set())
            found |= {(s.status, s.laddr.port, s.raddr) for s in sockets_below(process.pid)}
        time.sleep(0.1)
    assert [process.wait(60) for process in both.values()] == [0, 0], owners.said("cloud_a")
    start(tmp_path / "gloo", toy_config("two_clouds", more))
    assert losses(owners.run_dir("cloud_a")) == losses(tmp_path / "gloo")

    doors = {port, port + 1}
    ports = {cloud: {own for _, own, _ in found} for cloud, found in seen.items()}
    assert doors <= {own for status, own, _ in seen["cloud_a"] if status == "LISTEN"}
    across = [
        (own, there.port)
        for cloud, other in (CLOUDS, CLOUDS[::-1])
        for _, own, there in seen[cloud]
        if there and there.port in ports[other] - ports[cloud]
    ]
    assert len(across) > 8
    assert all(doors & {*pair} for pair in across)


def sockets_below(pid: int) -> list[Any]:
    """Return the internet sockets of a process and of all below it."""
    found: list[Any] = []
    with contextlib.suppress(psutil.Error):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                found += process.net_connections("inet")
    return found


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cloud_that_dials_listens_nowhere(tmp_path: Path) -> None:
    owners = TwoOwners(tmp_path, [address("cloud_b"), "training.max_steps=200"])
    both = {cloud: owners.start(cloud) for cloud in CLOUDS}
    statuses = set[str]()
    while both["cloud_a"].poll() is None:
        statuses |= {socket.status for socket in sockets_below(both["cloud_a"].pid)}
        time.sleep(0.1)
    assert [process.wait(60) for process in both.values()] == [0, 0], owners.said("cloud_a")
    assert "ESTABLISHED" in statuses and "LISTEN" not in statuses


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("is_silent", [False, True])
def test_cuts_in_the_middle_change_no_bit(is_silent: bool, tmp_path: Path) -> None:
    port = free_port()
    draw = random.Random(1)
    proxy = Proxy(port, cut_after=None if is_silent else lambda: draw.randrange(20_000, 90_000))
    steps = "training.max_steps=300"
    started_s = time.monotonic()
    owners = TwoOwners(tmp_path, [address("cloud_b", proxy.port), steps])
    both = [owners.start("cloud_a"), owners.start("cloud_b", "--listen", f"127.0.0.1:{port}")]
    if is_silent:
        wait_for(lambda: len(proxy.seen) > 300_000, 60)
        proxy.is_silent = True
        wait_for(lambda: "down for" in describe(owners.run_dir("cloud_a")), 20)
        wait_for(lambda: "the line to rank 1 of cloud_b is down" in owners.said("cloud_a"), 20)
        proxy.reset()
        proxy.is_silent = False
    codes = [process.wait(120) for process in both]
    proxy.close()
    assert codes == [0, 0], owners.said("cloud_a") + owners.said("cloud_b")
    assert is_silent or proxy.num_cuts > 5
    [line] = json.loads((owners.run_dir("cloud_a") / "summary.json").read_text())["lines"]
    assert line["to"] == "rank 1 of cloud_b" and line["num_cuts"] >= (1 if is_silent else 5)
    assert 0 < line["round_trip_s"] < (time.monotonic() - started_s) / 2
    assert "line to rank 1 of cloud_b" in owners.said("cloud_a").partition("final loss")[2]
    start(tmp_path / "gloo", toy_config("two_clouds", [steps]))
    assert losses(owners.run_dir("cloud_a")) == losses(tmp_path / "gloo")
    if is_silent:
        assert "the line to rank 1 of cloud_b is back after" in owners.said("cloud_a")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("listens", CLOUDS)
@pytest.mark.parametrize("killed", CLOUDS)
def test_both_clouds_go_on_from_the_last_checkpoint_after_a_rank_was_killed(
    killed: str, listens: str, tmp_path: Path
) -> None:
    more = ["training.max_steps=400", "training.checkpoint.every_steps=20", *TWO_RANKS]
    port = 20_000 + free_port() % 10_000
    owners = TwoOwners(tmp_path, [address(listens, port), *more])
    both = [owners.start(cloud) for cloud in CLOUDS]
    first = 2 * CLOUDS.index(killed)
    folder = CheckpointSteps(owners.run_dir(killed))
    wait_for(lambda: len(folder.agreed_steps()) > 1, 60)
    state = json.loads(rank_file(owners.run_dir(killed), first + 1, "state.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)
    codes = [process.wait(180) for process in both]
    assert codes == [0, 0], owners.said("cloud_a") + owners.said("cloud_b")
    assert "all ranks start again from step" in owners.said(killed)
    start(tmp_path / "gloo", toy_config("two_clouds", more))
    assert losses(owners.run_dir("cloud_a")) == losses(tmp_path / "gloo")


@pytest.mark.slow
@pytest.mark.nightly
def test_both_clouds_stop_when_one_is_asked_to_and_the_same_commands_go_on(
    tmp_path: Path,
) -> None:
    more = ["training.max_steps=400", "training.checkpoint.every_steps=20"]
    owners = TwoOwners(tmp_path, [address("cloud_a"), *more])
    both = [owners.start(cloud) for cloud in CLOUDS]
    wait_for(lambda: CheckpointSteps(owners.run_dir("cloud_b")).agreed_steps() != [], 60)
    both[1].send_signal(signal.SIGINT)
    codes = [process.wait(60) for process in both]
    assert codes == [75, 75], owners.said("cloud_a") + owners.said("cloud_b")
    for cloud in CLOUDS:
        last = owners.log(cloud).read_text().splitlines()[-1]
        assert last.startswith("xcloud: stopped by cloud_b") and "to resume from step" in last
        assert last.endswith("give the same command in every cloud")
    assert len(losses(owners.run_dir("cloud_a"))) < 400
    owners.finish()
    start(tmp_path / "gloo", toy_config("two_clouds", more))
    assert losses(owners.run_dir("cloud_a")) == losses(tmp_path / "gloo")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_certificate_that_the_other_does_not_know_is_said_in_both_terminals(
    tmp_path: Path,
) -> None:
    owners = TwoOwners(tmp_path, [address("cloud_b")])
    own = tmp_path / "owner_cloud_a"
    for name in ("cloud_a.key", "cloud_a.pem"):
        (own / name).unlink()
    make_key("cloud_a", own)
    both = [owners.start(cloud) for cloud in CLOUDS]
    wait_for(lambda: "does not accept the certificate of this cloud" in owners.said("cloud_a"), 60)
    wait_for(lambda: "its certificate is not accepted here" in owners.said("cloud_b"), 60)
    for process in both:
        process.send_signal(signal.SIGINT)
    assert [process.wait(60) for process in both] == [75, 75]


@pytest.mark.slow
@pytest.mark.nightly
def test_settings_that_differ_are_named_to_both_owners(tmp_path: Path) -> None:
    owners = TwoOwners(tmp_path, [address("cloud_b")])
    first = owners.start("cloud_a")
    owners.file = tmp_path / "other.yaml"
    text = (tmp_path / "experiment.yaml").read_text()
    owners.file.write_text(text.replace("max_steps: 8", "max_steps: 9"))
    second = owners.start("cloud_b")
    assert [first.wait(60), second.wait(60)] == [1, 1]
    for cloud in CLOUDS:
        assert "training.max_steps is 8 in rank 0 (cloud cloud_a), 9" in owners.said(cloud)


def test_what_is_wrong_with_a_certificate_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = TwoOwners(tmp_path, [address("cloud_b")])
    own = tmp_path / "owner_cloud_a"
    monkeypatch.setenv("XCLOUD_POLICY", str(own / "policy.yaml"))
    policy = (own / "policy.yaml").read_text()

    def refused(cloud: str = "cloud_a") -> str:
        with pytest.raises(ConfigError) as caught:
            main([str(owners.file), "--cloud", cloud, "--run-dir", str(tmp_path / "run")])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "--cloud is 'cloud_b', but the policy of this cloud says me: cloud_a" in refused(
        "cloud_b"
    )
    (own / "policy.yaml").write_text(policy.replace("cloud_b: [cloud_b.pem]", ""))
    assert "a line to cloud 'cloud_b', and this cloud's policy names no certificate" in refused()
    (own / "policy.yaml").write_text(policy)
    (own / "cloud_b.pem").unlink()
    assert f"the certificate of cloud_b: there is no file {own}/cloud_b.pem" in refused()
    (own / "old").mkdir()
    make_key("cloud_b", own / "old", valid_for=timedelta(minutes=-1))
    (own / "old/cloud_b.pem").rename(own / "cloud_b.pem")
    assert f"the certificate of cloud_b, {own}/cloud_b.pem, has expired" in refused()


def test_sealed_lines_are_started_by_each_owner(tmp_path: Path, sealed: list[str]) -> None:
    config = toy_config("two_clouds", sealed)
    said = "of their own cloud: python -m xcloud join FILE --cloud NAME"
    with pytest.raises(ConfigError, match=said):
        start(tmp_path / "run", config)
    file = tmp_path / "experiment.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    under_torchrun: Any = SimpleNamespace(file=file, run_dir=tmp_path / "run")
    with pytest.raises(ConfigError, match=said):
        TorchrunProcess.read(under_torchrun)
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(toy_config("two_clouds"))))
    with pytest.raises(ConfigError, match=r"has another cluster\.wan than those that join"):
        main([str(file), "--cloud", "cloud_a", "--run-dir", str(tmp_path / "run")])


def test_each_owner_is_told_which_end_of_a_line_dials_and_where() -> None:
    clouds = {
        "a": Cloud(num_ranks=3, address="h:7000"),
        "b": Cloud(address="i:8000"),
        "c": Cloud(),
    }
    layout: Any = SimpleNamespace(
        wan="sealed", clouds=clouds, relay="r:9",
        lines_of=lambda cloud: [other for other in clouds if other != cloud],
        is_relayed=lambda here, there: {here, there} == {"b", "c"},
        listener_of=lambda here, there: min(here, there),
        address_of=lambda rank: ("h", 7000 + rank),
    )  # fmt: skip

    def said(cloud: str, *ranks: int) -> str:
        return join.lines_in_words(layout, cloud, ranks)

    all_ports = "ports 7000 to 7002 here"
    assert said("a", 0, 1, 2) == f"cloud a: b dials {all_ports}; c dials {all_ports}"
    assert said("a", 1) == "cloud a: b dials port 7001 here; c dials port 7001 here"
    assert said("b", 3) == "cloud b: this cloud dials a at h:7000; it meets c at the relay r:9"
    layout.wan = Mailbox("/shared/box")
    assert said("b", 3) == "cloud b: the mailbox /shared/box"

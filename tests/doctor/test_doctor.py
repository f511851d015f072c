"""`python -m xcloud doctor`: what each owner sees before a run, alone and with the other's doctor
at the end of the line."""

from __future__ import annotations

import hashlib
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from tests.configs import composed
from tests.nightly import NIGHTLY
from tests.owners import TwoOwners, copy_keys, keys_of
from tests.runs import free_port
from xcloud.__main__ import main
from xcloud.base.errors import ConfigError, FrameError, LinkError
from xcloud.doctor import command, lines, machine, talk
from xcloud.doctor.case import Case
from xcloud.doctor.command import examine, read_case
from xcloud.doctor.finding import Finding, FindingState, ok
from xcloud.doctor.lines import LineTrial
from xcloud.doctor.talk import DoctorMessage, Facts, LineFigures, follow, lead
from xcloud.job.config import Settings
from xcloud.launch.join import ALONE, Machine
from xcloud.line.keys import make_key
from xcloud.line.mailbox import ObjectStore
from xcloud.line.relayed import Meeting
from xcloud.security.policy import Policy

CLOUDS = ("cloud_a", "cloud_b")
FACTS = Facts("0.2.0", code="c", torch="2", python="3", file="f")


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "BULK_S", 0.06)
    monkeypatch.setattr(lines, "PAUSE_S", 0.05)


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    """The same experiment in two clouds; cloud_b has the address."""
    return [case_of(cloud, tmp_path) for cloud in CLOUDS]


@cache
def experiment(num_machines: int = 1) -> Settings:
    """Two clouds, of which cloud_b has addresses at ports that were free."""
    listed = ",".join(f"127.0.0.{number + 1}:{free_port()}" for number in range(num_machines))
    address = f"cluster.clouds.cloud_b.address={listed if num_machines == 1 else f'[{listed}]'}"
    ranks = f"cluster.clouds.cloud_b.num_ranks={num_machines}"
    return Settings.of(
        composed("+exp=abnet_iwslt", "cluster/wan=sealed", "compression=int8", address, ranks)
    )


def case_of(cloud: str, folder: Path, machine: Machine = ALONE, num_machines: int = 1) -> Case:
    own = folder / cloud
    policy_file = copy_keys(own)
    file = folder / "experiment.yaml"
    settings = experiment(num_machines)
    settings.write(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    other = next(name for name in CLOUDS if name != cloud)
    policy = Policy(me=cloud, peers={other: [f"{other}.pem"]}, approved=[digest])
    return Case(
        file,
        digest=digest,
        settings=settings,
        refusal=None,
        cloud=cloud,
        policy=policy,
        policy_file=policy_file,
        run_dir=folder / "runs",
        machine=machine,
    )


def both(cases: list[Case], wait_s: float = 20.0) -> list[dict[str, Finding]]:
    """What doctors find that run at the same time, by name."""
    found: list[dict[str, Finding]] = [{} for _ in cases]

    def run(number: int) -> None:
        made = examine(cases[number], wait_s=wait_s)
        found[number] = {finding.name: finding for finding in made}

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def reds(found: dict[str, Finding]) -> list[str]:
    assert all(bool(one.advice) == (one.state is not FindingState.OK) for one in found.values())
    return [name for name, one in found.items() if one.state is FindingState.RED]


def test_two_owners_who_have_done_everything_right_see_nothing_red(cases: list[Case]) -> None:
    here, there = both(cases)
    assert reds(here) == reds(there) == []
    assert here["line to cloud_b"].fact.startswith("this cloud dials 127.0.0.1:")
    assert there["line to cloud_a"].fact.startswith("cloud_a dials 127.0.0.1:")
    ours = here["bandwidth to cloud_b"].figures
    theirs = there["bandwidth to cloud_a"].figures
    assert ours["sent_bytes_per_s"] == theirs["received_bytes_per_s"] > 1e5
    assert ours["received_bytes_per_s"] == theirs["sent_bytes_per_s"] > 1e5
    ahead_s = here["clock of cloud_b"].figures["clock_ahead_s"]
    assert there["clock of cloud_a"].figures["clock_ahead_s"] == -ahead_s
    assert abs(ahead_s) < 1.0
    # 4 micro-batches of activations, as `approve` shows them; what goes out here comes in there.
    [sent] = [m for m in cases[0].settings.job.leaving() if m.kind == "activation"]
    step = here["step over the line to cloud_b"].figures
    assert step["out_bytes"] == 4 * (sent.max_bytes or 0) > 0
    back = there["step over the line to cloud_a"].figures
    assert (back["out_bytes"], back["back_bytes"]) == (step["back_bytes"], step["out_bytes"])


def test_another_file_another_release_and_another_torch_are_seen_on_both_sides(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = lines.own_facts

    def own_facts(digest: str) -> Facts:
        facts = honest(digest)
        if digest == "0" * 64:
            facts = facts._replace(release="0.1.0", torch="1.0")
        return facts

    monkeypatch.setattr(lines, "own_facts", own_facts)
    cases[1] = replace(cases[1], digest="0" * 64, policy=replace(cases[1].policy, approved=None))
    for found, other in zip(both(cases), CLOUDS[::-1], strict=True):
        assert reds(found) == [f"release of {other}", f"file of {other}"]
        assert found[f"packages of {other}"].state is FindingState.WARN
        assert "copy one experiment file" in found[f"file of {other}"].advice
        assert "0.1.0" in found[f"release of {other}"].fact


@pytest.mark.parametrize("dials", [True, False])
def test_a_doctor_alone_says_what_to_ask_of_the_other_owner(
    dials: bool, cases: list[Case]
) -> None:
    case = cases[0] if dials else cases[1]
    other = CLOUDS[dials]
    found = {one.name: one for one in examine(case, wait_s=0.0)}
    assert reds(found) == [f"line to {other}"]
    line = found[f"line to {other}"]
    assert "no doctor" in line.fact
    assert f"doctor experiment.yaml --cloud {other}` at the same time" in line.advice
    assert "127.0.0.1:" in line.advice


@pytest.mark.parametrize(
    ("awake", "wait_s"), [([], 0.0), pytest.param([0, 2], 6.0, marks=NIGHTLY)]
)
def test_each_machine_of_a_cloud_that_listens_has_a_line_of_its_own(
    awake: list[int], wait_s: float, tmp_path: Path
) -> None:
    dials = case_of("cloud_a", tmp_path, num_machines=3)
    addresses = dials.layout.clouds["cloud_b"].addresses
    listens = [case_of("cloud_b", tmp_path, Machine(k, 3), num_machines=3) for k in awake]
    here, *there = both([dials, *listens], wait_s=wait_s)
    asleep = [number for number in range(3) if number not in awake]
    assert reds(here) == [f"line to cloud_b at {addresses[number]}" for number in asleep]
    for number in asleep:
        line = here[f"line to cloud_b at {addresses[number]}"]
        assert f"this cloud dials {addresses[number]}; no doctor of cloud_b was" in line.fact
        assert f"--cloud cloud_b --nnodes 3 --node-rank {number}` at the same" in line.advice
        assert f"{addresses[number]} is open" in line.advice
    for number, found in zip(awake, there, strict=True):
        assert reds(found) == []
        assert found["line to cloud_a"].fact == f"cloud_a dials {addresses[number]}"
        name = f"cloud_b at {addresses[number]}"
        sent = here[f"bandwidth to {name}"].figures["sent_bytes_per_s"]
        assert found["bandwidth to cloud_a"].figures["received_bytes_per_s"] == sent
        step = here[f"step over the line to {name}"].figures
        assert step["out_bytes"] == lines.bytes_per_step(dials, "cloud_b")[0] // 3 > 0


def renew(folder: Path, cloud: str, valid_for: timedelta = timedelta(days=90)) -> None:
    for suffix in ("key", "pem"):
        (folder / f"{cloud}.{suffix}").unlink()
    make_key(cloud, folder, valid_for=valid_for)


def expire(folder: Path, cloud: str) -> None:
    renew(folder, cloud, valid_for=timedelta(seconds=-60))


def remove(folder: Path, cloud: str) -> None:
    (folder / f"{cloud}.pem").unlink()


@pytest.mark.parametrize(
    ("change", "cloud", "name", "said"),
    [
        (expire, "cloud_a", "own key", "has expired on"),
        (expire, "cloud_b", "certificate of cloud_b", "has expired on"),
        (remove, "cloud_a", "own key", "there is no file"),
        (remove, "cloud_b", "certificate of cloud_b", "there is no file"),
    ],
)
def test_a_certificate_that_is_expired_or_missing_is_red_and_no_line_is_tried(
    change: Callable[[Path, str], None], cloud: str, name: str, said: str, cases: list[Case]
) -> None:
    change(cases[0].policy_file.parent, cloud)
    found = {one.name: one for one in examine(cases[0], wait_s=0.0)}
    assert reds(found) == [name]
    assert said in found[name].fact
    assert f"{cloud}.pem" in found[name].advice


def test_a_key_that_the_other_owner_does_not_know_is_told_on_both_sides(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They try until the one that dials has been refused, however long that takes here, and once
    more: what ends last finds the other's port closed."""
    trials: list[lines.LineTrial] = []
    real = lines.LineTrial.try_once

    def tried(trial: lines.LineTrial) -> None:
        trials.append(trial)
        if any(one.dials and lines.CERTIFICATE in one.reason for one in trials):
            for one in trials:
                one._until_s = 0.0
        real(trial)

    monkeypatch.setattr(lines.LineTrial, "try_once", tried)
    renew(cases[0].policy_file.parent, "cloud_a")
    for found, other in zip(both(cases, wait_s=60.0), CLOUDS[::-1], strict=True):
        assert reds(found) == [f"line to {other}"]
        assert "keys show" in found[f"line to {other}"].advice


LOCAL = ["strategy=local_updates", "compression=int4"]


def of_a_mailbox(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Finding]]:
    """Return what asks the doctor of cloud_a of a job whose clouds share a folder."""
    owners = TwoOwners(folder, LOCAL, mailbox=folder / "box")
    monkeypatch.setenv("XCLOUD_POLICY", str(folder / "owner_cloud_a/policy.yaml"))

    def found(**changed: Any) -> dict[str, Finding]:
        case = read_case(owners.file, cloud=None, run_dir=folder / "run")
        made = examine(replace(case, **changed), wait_s=0.0)
        return {finding.name: finding for finding in made}

    return found


def test_a_mailbox_is_written_listed_read_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No line is tried, and no descriptors are asked for one."""
    (box := tmp_path / "box").mkdir()
    found = of_a_mailbox(tmp_path, monkeypatch)()
    assert reds(found) == []
    assert found["mailbox"].fact.startswith(f"{box}: write ")
    assert found["mailbox"].figures.keys() == {"write_s", "list_s", "read_s", "delete_s"}
    assert not any("line" in name for name in found)
    assert "with 0 in other clouds" in found["open files"].fact
    assert not [file for file in box.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("call", "answer", "said"),
    [
        ("sizes", {}, "does not list an object that has just been written"),
        ("get", b"written by xcloud doctor", "gives other bytes of an object than were asked for"),
        ("delete", None, "keeps an object that has been deleted"),
    ],
)
def test_a_mailbox_that_does_something_else_than_a_run_needs_is_red(
    call: str, answer: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "box").mkdir()
    ask = of_a_mailbox(tmp_path, monkeypatch)
    monkeypatch.setattr(ObjectStore, call, lambda *given, **named: answer)
    found = ask()
    assert reds(found) == ["mailbox"] and said in found["mailbox"].fact


def test_a_mailbox_that_is_not_there_or_not_allowed_is_named_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = of_a_mailbox(tmp_path, monkeypatch)
    found = ask()
    assert reds(found) == ["mailbox"] and "there is no such folder" in found["mailbox"].fact
    assert not (tmp_path / "box").exists()
    found = ask(refusal=ConfigError("addresses: []"))
    assert reds(found) == ["file"] and found["mailbox"].fact == "not looked at"


@pytest.mark.parametrize(
    ("ahead_s", "state"),
    [(0.0, "ok"), (2.0, "ok"), (-2.0, "ok"), (2.1, "warn"), (-2.1, "warn"), (3600.0, "warn"),
     (3601.0, "red"), (-3601.0, "red")],
)  # fmt: skip
def test_a_clock_is_told_whichever_way_it_is_off(ahead_s: float, state: str) -> None:
    found = lines.clock_finding("cloud_b", ahead_s)
    assert found.state == state and ("behind" in found.fact) is (ahead_s <= 0)


NTP = "set both clocks by NTP (timedatectl set-ntp true)"
SAME = "install the same release of xcloud, unchanged, in both clouds"
REPEAT = "install the same versions in both clouds if results are to repeat bit for bit"
ASK = (
    "ask the owner of b to run `python -m xcloud doctor shared.yaml --cloud b{}` at the same time"
)
OPEN = ", and see that {} is open to the one who dials"
MET = [
    ("ok", "line to b", "this cloud dials h:9", ""),
    ("red", "release of b", "xcloud 0.2.0, whose files differ from here", SAME),
    ("warn", "packages of b", "torch 2 and Python 3 there, torch 2 and Python 4 here", REPEAT),
    ("ok", "file of b", "the same as here", ""),
    ("ok", "round trip to b", "100 ms", ""),
    ("warn", "clock of b", "3.00 s behind this one", NTP),
    ("ok", "bandwidth to b", "one connection sends 32 Mbit/s and receives 64 Mbit/s", ""),
    (
        "warn", "connections to b",
        "each carries at most 57.2 Mbit/s (1.00 MB of tcp_wmem over the round trip); the run "
        "opens 5 a direction, and 18 would fill 1 Gbit/s",
        'if the line is that fast, sysctl -w net.ipv4.tcp_wmem="4096 16384 3600000"',
    ),
    (
        "warn", "congestion control to b", "cubic, as this kernel has no bbr loaded or allowed",
        "modprobe tcp_bbr, which keeps its rate where packets are lost",
    ),
    (
        "ok", "step over the line to b",
        "at most 6.00 MB out and 8.00 MB back: 2.50 s of each step on one connection, beside "
        "round trips",
        "",
    ),
]  # fmt: skip
UNMET = "no doctor of b was met: no answer"


@pytest.mark.parametrize(
    ("addresses", "given", "findings"),
    [
        (["h:9"], {"is_met": True}, MET),
        (
            ["h:9", "h:8"], {"refused": ["x", "y"]},
            [("red", "line to b at h:8",
              f"this cloud dials h:8; {UNMET}; last refused here: y",
              ASK.format(" --nnodes 2 --node-rank 1") + OPEN.format("h:8"))],
        ),
        (["h:9"], {"dials": False},
         [("red", "line to b", f"b dials h:9; {UNMET}", ASK.format("") + OPEN.format("h:9"))]),
        ([], {},
         [("red", "line to b", f"both clouds dial the relay h:1; {UNMET}",
           ASK.format("") + OPEN.format("the relay h:1"))]),
    ],
    ids=["met", "one of two machines", "the other dials", "relay"],
)  # fmt: skip
def test_what_a_line_is_like_is_told_to_the_letter(
    addresses: list[str], given: dict[str, Any], findings: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """6 MB out at 4 MB/s and 8 MB back at 8 MB/s; a buffer that carries 7.15 MB/s."""
    found = LineFigures(
        peer=FACTS, round_trip_s=0.1, clock_ahead_s=-3.0, sent_bytes_per_s=4e6,
        received_bytes_per_s=8e6,
    )  # fmt: skip
    monkeypatch.setattr(lines, "own_facts", lambda digest: FACTS._replace(code="d", python="4"))
    monkeypatch.setattr(lines, "bytes_per_step", lambda case, peer: (6_000_000, 8_000_000))
    monkeypatch.setattr(lines, "_max_send_buffer", lambda: 1_000_000)
    clouds = {name: SimpleNamespace(addresses=addresses) for name in "ab"}
    layout = SimpleNamespace(clouds=clouds, relay="h:1")
    case: Any = SimpleNamespace(layout=layout, cloud="a", digest="f", file=Path("shared.yaml"))
    trial: Any = SimpleNamespace(
        peer="b", dials=given.get("dials", True), machine=1, reason="no answer",
        measured=found if given.get("is_met") else None, congestion_control="cubic",
    )  # fmt: skip
    told = lines.trial_findings(case, trial, refused=given.get("refused", ()))
    assert [(one.state, one.name, one.fact, one.advice) for one in told] == findings


def test_a_step_takes_each_way_at_the_rate_of_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """6 MB out at 1 MB/s and 8 MB back at 4 MB/s. More connections help only where each way fills
    one: where it carries what its buffer allows in a round trip."""
    found = LineFigures(
        peer=FACTS, round_trip_s=0.1, clock_ahead_s=0.0, sent_bytes_per_s=1e6,
        received_bytes_per_s=4e6,
    )  # fmt: skip
    step = lines.step_finding("cloud_b", out=6_000_000, back=8_000_000, found=found)
    assert step.figures["busy_s"] == 8.0
    monkeypatch.setattr(lines, "_max_send_buffer", lambda: 1_000_000)
    full = lines.stream_bytes(1_000_000) / 0.1
    for sent, received, fills in ((full, full, True), (full / 2, full, False)):
        one = found._replace(sent_bytes_per_s=sent, received_bytes_per_s=received)
        for rates in (one, one._replace(sent_bytes_per_s=received, received_bytes_per_s=sent)):
            fact = lines.step_finding("cloud_b", out=10**9, back=10**9, found=rates).fact
            assert ("of them down to" in fact) is fills


def test_a_clock_is_read_in_the_middle_of_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer takes a second to come, and the peer's clock is 5 s ahead."""
    now_s = [1000.0]
    monkeypatch.setattr(talk.time, "time", lambda: now_s[0])
    monkeypatch.setattr(talk.time, "perf_counter", lambda: now_s[0])

    class Peer:
        def send(self, kind: DoctorMessage) -> None:
            now_s[0] += 0.5

        def receive_numbers(self, kind: DoctorMessage) -> tuple[float, ...]:
            at_s = now_s[0] + 5.0
            now_s[0] += 0.5
            return (at_s,)

    peer: Any = Peer()
    assert talk.ping(peer) == pytest.approx((1.0, 5.0))


@pytest.mark.parametrize(
    ("moments", "rate"),
    [
        ([0.5, 1.5, 2.0, 3.5], 2 / 2.0),  # the first second does not count
        ([0.5, 1.0, 2.0], 1 / 1.0),
        ([0.5, 0.9, 2.0], 3 / 4.0),  # too few are left: all of them, over all the time
        ([0.5], 1 / 4.0),
    ],
)
def test_a_line_s_rate_is_that_of_what_comes_once_it_is_found(
    moments: list[float], rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk, "BULK_S", 3.0)
    now_s = [100.0]
    monkeypatch.setattr(talk, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    coming = iter(moments)

    class Peer:
        def receive_any(self, allowed: object, until_s: float) -> tuple[DoctorMessage, bytes]:
            assert until_s in (163.0, 167.0)  # three seconds and four answers
            at_s = next(coming, None)
            now_s[0] = 104.0 if at_s is None else 100.0 + at_s
            return DoctorMessage.END if at_s is None else DoctorMessage.BULK, b""

    peer: Any = Peer()
    assert talk.receive_bulk(peer) == pytest.approx(rate * 65_536)
    with pytest.raises(TimeoutError):
        talk.receive_bulk(peer)


def a_machine(monkeypatch: pytest.MonkeyPatch, folder: Path, **changed: Any) -> Any:
    """Return a case of two ranks, on a machine that is as `changed` says."""
    found = {
        "device": "auto", "gpus": 0, "cores": 2, "free": 5e9, "limit": "max", "disk": 20e9,
        "threads": None, "python": (3, 11, 4), "writable": True, "load": 1.5, **changed,
    }  # fmt: skip
    cuda = SimpleNamespace(
        device_count=lambda: found["gpus"],
        is_available=lambda: found["gpus"] > 0,
        get_device_properties=lambda number: SimpleNamespace(name="H", total_memory=80e9),
    )
    monkeypatch.setattr(machine, "torch", SimpleNamespace(cuda=cuda, __version__="2.13"))
    monkeypatch.setattr(machine, "num_cores", lambda: found["cores"])
    memory = SimpleNamespace(available=int(found["free"]))
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    (folder / "memory.max").write_text(f"{found['limit']}\n")
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", folder / "memory.max")
    usage = SimpleNamespace(free=int(found["disk"]))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda of: usage)
    monkeypatch.setattr(machine.os, "access", lambda of, how: found["writable"])
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (found["load"], 0.0, 0.0))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine.sys, "version_info", found["python"])
    monkeypatch.setattr(machine.platform, "python_version", lambda: "3.x")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if found["threads"] is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", found["threads"])
    cloud = SimpleNamespace(device=found["device"])
    return SimpleNamespace(
        cloud="a", num_ranks=2, layout=SimpleNamespace(clouds={"a": cloud}),
        run_dir=folder / "runs" / "one",
    )  # fmt: skip


FEWER = "give the cloud fewer ranks"
ROOM = "make room there, or name another folder with --run-dir"
FREE = "{} free; about 1.00 GB for 2 ranks without the model, for which plan=show has figures"
MACHINES: list[tuple[str, dict[str, Any], tuple[str, str, str, str]]] = [
    ("processors", {}, ("ok", "cores", "2 for 2 ranks; no GPU is used", "")),
    ("processors", {"cores": 1},
     ("warn", "cores", "1 for 2 ranks; no GPU is used", f"ranks share a core; {FEWER}")),
    ("processors", {"gpus": 2},
     ("ok", "GPU", "2 for 2 ranks: H 80.0 GB, H 80.0 GB", "")),
    ("processors", {"gpus": 1, "device": "cuda"},
     ("warn", "GPU", "1 for 2 ranks: H 80.0 GB", f"ranks share a GPU; {FEWER}")),
    ("processors", {"gpus": 2, "device": "cpu"},
     ("ok", "cores", "2 for 2 ranks; no GPU is used", "")),
    ("processors", {"device": "cuda"},
     ("red", "GPU", "cluster.clouds.a.device is cuda, and torch finds no GPU",
      "install a driver and a torch for CUDA, or write device: auto into the file")),
    ("load", {"load": 2.0}, ("ok", "load", "2.0 on 2 processors, before the run", "")),
    ("load", {"load": 2.1}, ("warn", "load", "2.1 on 2 processors, before the run",
                             "end other programs here, or each step takes as much longer")),
    ("memory", {"free": 1e9}, ("ok", "memory", FREE.format("1.00 GB"), "")),
    ("memory", {"free": 9e8}, ("red", "memory", FREE.format("900 MB"),
                               "end other programs, or take a larger machine")),
    ("memory", {"limit": 100_000_000}, ("red", "memory", FREE.format("100 MB"),
                                        "end other programs, or take a larger machine")),
    ("disk", {"disk": 10e9}, ("ok", "disk", "10.0 GB free in {}", "")),
    ("disk", {"disk": 9.9e9}, ("warn", "disk", "9.90 GB free in {}", ROOM)),
    ("disk", {"disk": 1e9}, ("warn", "disk", "1.00 GB free in {}", ROOM)),
    ("disk", {"disk": 9e8}, ("red", "disk", "900 MB free in {}", ROOM)),
    ("disk", {"writable": False}, ("red", "disk", "{} may not be written", ROOM)),
    ("versions", {}, ("ok", "versions", "Python 3.x, torch 2.13", "")),
    ("versions", {"python": (3, 11, 3)},
     ("warn", "versions", "Python 3.x, torch 2.13", "install Python 3.11.4 or later")),
    ("threads", {}, ("ok", "threads", "1 for each of 2 ranks", "")),
    ("threads", {"cores": 1}, ("ok", "threads", "1 for each of 2 ranks", "")),
    ("threads", {"threads": "1,4"},
     ("ok", "threads", "1,4 for each of 2 ranks, as OMP_NUM_THREADS says", "")),
    ("threads", {"threads": "2"},
     ("warn", "threads", "2 for each of 2 ranks, as OMP_NUM_THREADS says, 4 on 2 cores",
      "unset OMP_NUM_THREADS, and ranks share the cores")),
]  # fmt: skip


@pytest.mark.parametrize(("check", "changed", "finding"), MACHINES)
def test_what_a_machine_has_is_told_to_the_letter(
    check: str,
    changed: dict[str, Any],
    finding: tuple[str, str, str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    case = a_machine(monkeypatch, tmp_path, **changed)
    from xcloud.launch import processes

    monkeypatch.setattr(processes, "num_cores", machine.num_cores)
    told = getattr(machine, f"check_{check}")(case)
    state, name, fact, advice = finding
    assert (told.state, told.name, told.fact, told.advice) == (
        state, name, fact.format(tmp_path), advice
    )  # fmt: skip
    figures = {"GPU": "num_gpus", "cores": "num_cores", "load": "load", "memory": "free"}
    figures["disk"] = "free"
    has_figure = name in figures and not (name in ("GPU", "cores") and state != "ok")
    has_figure = has_figure and changed.get("writable", True)
    assert [*told.figures] == ([figures[name]] if has_figure else [])


def test_a_certificate_that_ends_within_a_month_is_told(cases: list[Case]) -> None:
    renew(cases[0].policy_file.parent, "cloud_b", valid_for=timedelta(days=9))
    found = {one.name: one for one in examine(cases[0], wait_s=0.0)}
    assert found["certificate of cloud_b"].state is FindingState.WARN
    assert "for 8 more days" in found["certificate of cloud_b"].fact


def test_a_file_that_is_not_approved_and_a_policy_of_another_cloud_are_red(
    cases: list[Case],
) -> None:
    policy = replace(cases[0].policy, me="cloud_c", approved=["0" * 64], peers={})
    found = {one.name: one for one in examine(replace(cases[0], policy=policy), wait_s=0.0)}
    assert reds(found) == ["file", "this cloud", "certificate of cloud_b"]
    assert "xcloud approve" in found["file"].advice
    assert "me: cloud_c" in found["this cloud"].fact
    assert "peers: {cloud_b: [cloud_b.pem]}" in found["certificate of cloud_b"].advice


def test_what_this_machine_lacks_is_red(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    missing = tmp_path / "texts"
    plain = {
        **cases[0].settings.plain,
        "task": {
            "_target_": "xcloud.tasks.translation.Translation",
            "data": {"_target_": "xcloud.tasks.sources.Folder", "path": str(missing)},
            "source": "es",
            "target": "en",
        },
    }
    case = replace(cases[0], settings=replace(cases[0].settings, plain=plain))
    found = {one.name: one for one in (check(case) for check in machine.CHECKS)}
    assert reds(found) == ["open files", "files to read", "threads"]
    needs = found["open files"].figures["needs"]
    assert found["open files"].advice == f"ulimit -n {needs}"
    assert str(missing) in found["files to read"].fact
    missing.mkdir()
    assert machine.check_files(case) == ok("files to read", fact=str(missing))
    plain["task"]["data"] = {"_target_": "xcloud.tasks.sources.Hub", "dataset": "own/set"}
    fact = "none is named; fetched from the hub if they are not here: own/set"
    assert machine.check_files(case) == ok("files to read", fact=fact)


def test_a_rank_needs_files_for_each_rank_of_every_other_cloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = {"b": [1], "c": [2, 3]}
    layout = SimpleNamespace(wan="sealed", ranks_in=ranks.__getitem__)
    case: Any = SimpleNamespace(layout=layout, peers=("b", "c"))
    needs = machine._OWN_FILES + 3 * machine._FILES_PER_PEER
    for limit, state in ((needs - 1, FindingState.RED), (needs, FindingState.OK)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        found = machine.check_descriptors(case)
        assert (found.state, found.figures) == (state, {"limit": limit, "needs": needs})
        assert f"may open {limit}, and needs up to {needs} with 3 in other clouds" in found.fact


def test_the_command_prints_a_table_or_json_and_fails_where_something_is_red(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = cases[0]
    policy = {"me": "cloud_a", "peers": {"cloud_b": ["cloud_b.pem"]}, "approved": [case.digest]}
    policy["addresses"] = [*case.layout.clouds["cloud_b"].addresses]
    case.policy_file.write_text(yaml.safe_dump(policy))
    monkeypatch.setenv("XCLOUD_POLICY", str(case.policy_file))
    words = ["doctor", str(case.file), "--run-dir", str(case.run_dir), "--wait", "0"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "red  line to cloud_b: ask the owner of cloud_b to run" in said
    assert said.endswith("1 red\n")
    assert main([*words, "--json"]) == 1
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed if one["state"] == "red"] == ["line to cloud_b"]
    assert main([*words, "--cloud", "cloud_x"]) == 1
    assert "no cloud 'cloud_x' among cloud_a, cloud_b" in capsys.readouterr().err
    assert main([*words, "--listen", "7000"]) == 1
    assert "--listen must be HOST:PORT" in capsys.readouterr().err
    assert main([*words, "--nnodes", "2", "--node-rank", "2"]) == 1
    assert "--node-rank must be from 0 to 1" in capsys.readouterr().err
    assert main([*words, "--nnodes", "2"]) == 1
    assert "--nnodes: 1 ranks cannot be dealt evenly to 2" in capsys.readouterr().err
    assert main([*words, "--wait", "nan"]) == 1
    assert "--wait must be a number of seconds from 0 on, got nan" in capsys.readouterr().err
    Settings.of(composed("+exp=abnet_iwslt")).write(case.file)
    assert main(words) == 1
    assert "write it with cluster/wan=sealed" in capsys.readouterr().err


@pytest.mark.parametrize(("states", "code"), [("", 0), ("ok warn", 0), ("ok red", 1), ("red", 1)])
def test_the_command_fails_where_a_finding_is_red_alone(
    states: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding(state, FindingState(state), fact="a fact") for state in states.split()]
    monkeypatch.setattr(command, "read_case", Mock())
    monkeypatch.setattr(command, "examine", lambda *_, **__: findings)
    assert main(["doctor", "experiment.yaml", "--json"]) == code


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def message(kind: int, content: bytes) -> bytes:
    return talk.HEAD.pack(kind, len(content)) + content


HONEST = message(DoctorMessage.FACTS, json.dumps(FACTS._asdict()).encode())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x09\x00\x00\x00\x00",  # no such kind
        talk.HEAD.pack(DoctorMessage.FACTS, 1 << 30),
        message(DoctorMessage.PING, b""),
        message(DoctorMessage.FACTS, b"[" * 2000),
        message(DoctorMessage.FACTS, b"{}"),
        message(DoctorMessage.FACTS, json.dumps({**FACTS._asdict(), "file": 1}).encode()),
        message(DoctorMessage.FACTS, json.dumps({**FACTS._asdict(), "torch": "\x1b[2J"}).encode()),
        HONEST + 10 * message(DoctorMessage.PONG, b"\x00" * 6 + b"\xf0\x7f"),  # infinite
        HONEST
        + 10 * message(DoctorMessage.PONG, bytes(8))
        + message(DoctorMessage.RATE, bytes(8)),
    ],
)  # fmt: skip
def test_a_peer_that_breaks_the_rules_is_refused_by_name(
    sent: bytes, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk, "BULK_S", 0.0)
    ends[1].sendall(sent)
    with pytest.raises(FrameError, match="the doctor of cloud_b"):
        lead(ends[0], "cloud_b", FACTS)


def test_a_peer_that_says_nothing_is_not_waited_for_without_end(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(talk, "ANSWER_S", 0.05)
    with pytest.raises(TimeoutError):
        follow(ends[0], "cloud_a", FACTS)


@pytest.mark.parametrize(
    ("errors", "reason", "num_tries", "is_measured"),
    [
        ([], "", 1, True),
        ([lines.LineDown("it is not there"), lines.LineDown("nor now")], "nor now", 3, True),
        (
            [lines.LineDown(f"{lines.CERTIFICATE} x"), lines.LineDown("closed")],
            lines.CERTIFICATE,
            3,
            True,
        ),
        ([LinkError("it breaks the rules")], "it breaks the rules", 1, False),
        ([OSError(104, "reset")], "cloud_b, while it was measured: ", 1, False),
        ([lines.LineDown("nobody")] * 9, "nobody", 4, False),
    ],
)
def test_a_line_is_tried_until_it_is_measured_refused_or_the_time_is_over(
    errors: list[Exception],
    reason: str,
    num_tries: int,
    is_measured: bool,
    cases: list[Case],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock goes on by the pause between two tries."""
    left = [*errors]
    asked: list[Any] = []
    now_s = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now_s[0], sleep=lambda s: now_s.append(now_s.pop() + s)
    )
    monkeypatch.setattr(lines, "time", clock)
    figures = LineFigures(FACTS, 0.1, 1.0, 2.0, 0.0)
    measure = lambda tls, peer, facts: asked.append((peer, facts)) or figures  # noqa: E731
    monkeypatch.setattr(lines, "lead", measure)

    class Way:
        def connect(self, wanted: Any, **given: Any) -> Any:
            asked.append((wanted, given))
            if left:
                raise left.pop(0)
            tls = Mock()
            tls.__enter__ = lambda tls: tls
            tls.__exit__ = lambda *of: None
            tls.getsockopt.return_value = b"cubic\0\0"
            return SimpleNamespace(tls=tls)

    trial = LineTrial(cases[0], "cloud_b", Way(), 0, 0.15, threading.Lock())  # type: ignore[arg-type]
    trial.thread.join(10)
    assert reason in trial.reason and len(asked) == num_tries + is_measured
    assert (trial.measured is figures) is is_measured
    wanted, given = asked[0]
    stream = wanted.stream
    assert (stream.sender_cloud, stream.receiver_cloud) == ("cloud_a", "cloud_b")
    assert given["is_bulk"] and given["timeout_s"] == 0.05
    assert trial.congestion_control == ("cubic" if is_measured else None)


def test_a_port_that_cannot_be_listened_at_is_red_with_what_to_do() -> None:
    error = OSError(98, "Address already in use (while attempting to bind)")
    found = lines.cannot_listen("cloud_a", ("10.0.0.1", 7000), error)
    assert found.state is FindingState.RED and found.name == "line to cloud_a"
    assert found.fact == "this machine cannot listen at 10.0.0.1:7000: Address already in use"
    assert "--listen 0.0.0.0:7000" in found.advice


def test_two_that_dial_a_relay_meet_in_the_same_rooms(cases: list[Case]) -> None:
    words = ("+exp=abnet_iwslt", "cluster/wan=sealed", "cluster.relay=relay.example:7100")
    here, there = (replace(case, settings=Settings.of(composed(*words))) for case in cases)
    assert here.dials("cloud_b") is not there.dials("cloud_a")
    dials, listens = (here, there) if here.dials("cloud_b") else (there, here)
    waits = listens.listens_at(keys_of(listens.cloud, [dials.cloud]), label="x")
    [calls] = dials.dialled_at(keys_of(dials.cloud, [listens.cloud]), listens.cloud, label="x")
    assert waits == calls
    assert isinstance(waits, Meeting) and len(waits.rooms) == 1

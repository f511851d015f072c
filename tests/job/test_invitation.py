"""`python -m xcloud invite` and `accept`: two owners who have nothing of each other yet."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.namespaces import available, inside, several_hosts, without_route
from tests.configs import composed
from tests.line_links import relay_running
from tests.owners import CLOUDS, folder_of_keys, relay_at
from tests.runs import command, losses, wait_for
from xcloud.base.errors import ConfigError, XcloudError
from xcloud.job import config as configs
from xcloud.job import invitation
from xcloud.job.invitation import Code, CodedConnection
from xcloud.job.invitation_words import WORDS
from xcloud.line.keys import read_line_keys
from xcloud.line.relayed import Side, enter
from xcloud.record.events import EVENTS_FILE

pytest.importorskip("spake2")

CODE = Code(7, words=("guitar", "orbit"))
FILE = "_target_: x\n# α"


def test_codes_are_read_as_people_type_them() -> None:
    assert len({*WORDS}) == 256 and all(word.isascii() and word.isalpha() for word in WORDS)
    assert Code.read(" 7-Guitar-ORBIT\n") == CODE and str(CODE) == "7-guitar-orbit"
    assert {Code.new() for _ in range(20)} != {Code.new()}
    for text, said in (
        ("7-guitar", "is no code"), ("x-guitar-orbit", "is no code"),
        ("7-guitar-orbitt", "'orbitt' is no word of a code"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            Code.read(text)


def both(
    port: int, codes: tuple[Code, Code], say: Callable[[CodedConnection, bool], Any]
) -> dict[bool, Any]:
    """Let both sides speak; return what came of each, by whether it invites."""
    came = dict[bool, Any]()

    def run(invites: bool) -> None:
        side = Side.ALONE if invites else Side.DIALS
        try:
            with enter(("127.0.0.1", port), room=CODE.room, side=side, within_s=20.0) as plain:
                exchange = CodedConnection(plain, code=codes[not invites], invites=invites)
                came[invites] = say(exchange, invites)
        except ConfigError as error:
            came[invites] = error

    thread = threading.Thread(target=run, args=(True,), daemon=True)
    thread.start()
    run(False)
    thread.join(20.0)
    return came


def test_what_one_side_says_the_other_hears_under_the_same_code() -> None:
    def say(exchange: CodedConnection, invites: bool) -> list[str]:
        exchange.send_message({"file": FILE, "me": str(invites)})
        return exchange.receive_message("file", "me")

    with relay_running() as port:
        assert both(port, (CODE, CODE), say) == {True: [FILE, "False"], False: [FILE, "True"]}


def test_a_wrong_word_ends_the_invitation_and_nothing_is_said() -> None:
    def say(exchange: CodedConnection, invites: bool) -> None:
        pytest.fail("they know different words")

    other = Code(7, words=("guitar", "onion"))
    with relay_running() as port:
        came = both(port, (CODE, other), say)
        assert "differ on the two sides" in str(came[True])
        with pytest.raises(Exception, match="nobody waits"):
            enter(("127.0.0.1", port), room=CODE.room, side=Side.DIALS, within_s=0.2)


def test_what_is_no_message_is_refused() -> None:
    for message in ({}, {"file": 3}, {"me": "x"}):

        def say(exchange: CodedConnection, invites: bool, message: Any = message) -> Any:
            exchange.send_message(message)
            return exchange.receive_message("file")

        with relay_running() as port:
            came = both(port, (CODE, CODE), say)
        assert all("that belongs to no invitation" in str(error) for error in came.values())


RELAY = "192.0.2.7:7100"


@pytest.fixture
def owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cloud_b's owner, who has nothing yet."""
    folder = tmp_path / "owner_b"
    monkeypatch.setenv("XCLOUD_POLICY", str(folder / "policy.yaml"))
    return folder


def written(folder: Path) -> Path:
    file = folder / "experiment.yaml"
    settings = ("cluster/wan=sealed", f"cluster.relay={RELAY}")
    configs.Settings.of(composed("+exp=abnet_iwslt", *settings)).write(file)
    return file


def pem_of(cloud: str) -> str:
    return (folder_of_keys() / f"{cloud}.pem").read_text()


def agree(file: Path, yes: bool = True, pem: str | None = None) -> int:
    pem = pem_of("cloud_a") if pem is None else pem
    with invitation.policy_of("cloud_b") as is_first:
        invitation.own_certificate("cloud_b")
        return invitation.agree(
            file, me="cloud_b", peer="cloud_a", pem=pem, is_first=is_first, yes=yes
        )


def test_an_owner_who_has_nothing_gets_a_key_and_a_policy_for_this_file_alone(
    tmp_path: Path, owner: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path)
    assert agree(file, yes=False) == 0
    said = capsys.readouterr().out
    own = invitation.own_certificate("cloud_b")
    assert f"dials     {RELAY} (relay)" in said and own.fingerprint[:4] in said
    assert "the first policy of this cloud:" in said and "cloud_a.pem" in said
    assert not (owner / "policy.yaml").exists(), "what nobody approved leaves no policy"

    assert agree(file) == 0
    policy = yaml.safe_load((owner / "policy.yaml").read_text())
    assert policy["me"] == "cloud_b" and policy["peers"] == {"cloud_a": ["cloud_a.pem"]}
    assert policy["approved"] == [hashlib.sha256(file.read_bytes()).hexdigest()]
    assert policy["addresses"] == [RELAY] and policy["constructors"] == []
    keys = read_line_keys("cloud_b", policy["peers"], owner / "policy.yaml")
    assert keys.own == own and keys.peers["cloud_a"][0].pem == pem_of("cloud_a")
    assert agree(file) == 0, "a policy that knows both stays as it is"


KEY = ["cloud_b.key", "cloud_b.pem"]
REFUSED: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "the owner says no": (lambda file: agree(file, yes=False), KEY),
    "another cloud's certificate": (lambda file: agree(file, pem=pem_of("cloud_c")), KEY),
    "no certificate": (lambda file: agree(file, pem="nonsense"), KEY),
    "a file that is none": (lambda file: agree(file.with_name("none.yaml")), KEY),
    "a file that cannot be read": (lambda file: agree(damaged(file)), KEY),
    "a cloud that the file has not": (
        lambda file: invitation.invite([str(file), "--cloud", "cloud_x"]), [],
    ),
    "a relay that is none": (
        lambda file: invitation.invite([str(file), "--cloud", "cloud_b", "--relay", "x"]), KEY,
    ),
    "an invitation of no file": (
        lambda file: invitation.invite([str(damaged(file)), "--cloud", "cloud_b"]), [],
    ),
}  # fmt: skip


def damaged(file: Path) -> Path:
    found = file.with_name("damaged.yaml")
    found.write_text(file.read_text()[:400])
    return found


@pytest.mark.parametrize(("refused", "left"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_leaves_no_policy_and_no_certificate_of_others(
    refused: Callable[[Path], Any], left: list[str], tmp_path: Path, owner: Path
) -> None:
    file = written(tmp_path)
    with suppress(XcloudError):
        refused(file)
    there = sorted(one.name for one in owner.iterdir()) if owner.exists() else []
    assert there == left
    assert owner.exists() == bool(left)


@pytest.mark.parametrize(
    ("me", "certificate", "said"),
    [
        ("cloud_b", "cloud_c", "is that of 'cloud_c'"),
        ("../b", "cloud_a", "the name of this cloud"),
    ],
)
def test_an_invitation_that_is_refused_leaves_nothing(
    me: str,
    certificate: str,
    said: str,
    tmp_path: Path,
    owner: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Inviting:
        def receive_message(self, *names: str) -> list[str]:
            return ["cloud_a", me, pem_of(certificate), FILE]

    monkeypatch.setattr(invitation, "enter", lambda *_, **__: nullcontext())
    monkeypatch.setattr(invitation, "CodedConnection", lambda *_, **__: Inviting())
    out = tmp_path / "experiment.yaml"
    with pytest.raises(ConfigError, match=said):
        invitation.accept([str(CODE), "--relay", RELAY, "--out", str(out)])
    assert not out.exists() and not owner.exists()


def test_what_does_not_fit_to_what_an_owner_has_is_said(tmp_path: Path, owner: Path) -> None:
    file = written(tmp_path)
    for pem, said in (
        (pem_of("cloud_c"), "is that of 'cloud_c', not of 'cloud_a'"),
        ("-----BEGIN NONSENSE-----", "holds no certificate of a cloud"),
    ):
        with pytest.raises(ConfigError, match=said):
            agree(file, pem=pem)
        assert not (owner / "cloud_a.pem").exists()
    with pytest.raises(ConfigError, match="the name of the other cloud"):
        invitation.keep_certificate("../cloud_a", pem=pem_of("cloud_a"))
    (owner / "cloud_a.pem").write_text(pem_of("other"))
    with pytest.raises(ConfigError, match="another certificate than cloud_a has now"):
        agree(file)
    (owner / "cloud_a.pem").unlink()
    policy = owner / "policy.yaml"
    policy.write_text("me: cloud_b\n")
    with pytest.raises(ConfigError, match=r"does not know cloud_a.*add \{peers: \{cloud_a"):
        agree(file)
    assert policy.read_text() == "me: cloud_b\n"
    policy.write_text("me: cloud_d\n")
    with pytest.raises(ConfigError, match="says that this cloud is 'cloud_d'"):
        agree(file)


def test_an_invitation_names_what_it_lacks(tmp_path: Path, owner: Path) -> None:
    file = str(written(tmp_path))
    for words, said in (
        (["--cloud", "cloud_x"], "--cloud is 'cloud_x'; the clouds are cloud_a, cloud_b"),
        (["--cloud", "cloud_a", "--peer", "x"], "--peer must be the other owner's cloud: cloud_b"),
        (["--cloud", "cloud_a", "--relay", "x"], "--relay must be HOST:PORT, got x"),
    ):
        with pytest.raises(ConfigError, match=said):
            invitation.invite([file, *words])
    with pytest.raises(ConfigError, match="is there already; move it away"):
        invitation.accept([str(CODE), "--relay", RELAY, "--out", file])


@pytest.mark.slow
def test_two_owners_agree_on_a_file_by_a_code_and_both_approve_it(tmp_path: Path) -> None:
    def said(cloud: str) -> str:
        return (tmp_path / cloud).read_text()

    def run(cloud: str, *words: str) -> Any:
        own = str(tmp_path / f"of_{cloud}" / "policy.yaml")
        return command("-m", "xcloud", *words, "--yes", log=tmp_path / cloud, XCLOUD_POLICY=own)

    with relay_running() as port:
        file = tmp_path / "experiment.yaml"
        settings = ("cluster/wan=sealed", f"cluster.relay=127.0.0.1:{port}")
        configs.Settings.of(composed("+exp=abnet_iwslt", *settings)).write(file)
        out = tmp_path / "came.yaml"
        invites = run("cloud_a", "invite", str(file), "--cloud", "cloud_a")
        wait_for(lambda: "--relay" in said("cloud_a"))
        told = said("cloud_a").split()
        accepts = run("cloud_b", *told[told.index("accept") :], "--out", str(out))
        codes = [process.wait(60) for process in (invites, accepts)]

    assert codes == [0, 0], said("cloud_a") + said("cloud_b")
    assert f"{out} came from the owner of cloud_a; this cloud is cloud_b" in said("cloud_b")
    assert out.read_bytes() == file.read_bytes()
    for cloud, other in (("cloud_a", "cloud_b"), ("cloud_b", "cloud_a")):
        folder = tmp_path / f"of_{cloud}"
        policy = yaml.safe_load((folder / "policy.yaml").read_text())
        assert (policy["me"], policy["peers"]) == (cloud, {other: [f"{other}.pem"]})
        assert policy["approved"] == [hashlib.sha256(file.read_bytes()).hexdigest()]
        theirs = tmp_path / f"of_{other}" / f"{other}.pem"
        assert (folder / f"{other}.pem").read_text() == theirs.read_text()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(available() is not None, reason=str(available()))
def test_from_nothing_to_step_1_without_a_route_within_a_minute(tmp_path: Path) -> None:
    relay = "10.213.0.3:7100"
    file = tmp_path / "experiment.yaml"
    settings = [
        "model=transformer", "recipe=transformer_demo", "training.max_steps=5",
        "cluster/wan=sealed", f"cluster.relay={relay}",
    ]  # fmt: skip
    configs.Settings.of(composed("+exp=abnet_iwslt", *settings)).write(file)

    def command(host: str, cloud: str, *words: str) -> subprocess.Popen[str]:
        folder = tmp_path / cloud
        folder.mkdir(exist_ok=True)
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1",
            "XCLOUD_POLICY": str(folder / "own" / "policy.yaml"),
        }  # fmt: skip
        return subprocess.Popen(
            [*inside(host), sys.executable, "-m", "xcloud", *words],
            cwd=folder, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    with several_hosts(3, 50e6) as hosts, ExitStack() as held:
        without_route(hosts)
        held.enter_context(relay_at(hosts[2], relay))
        started_s = time.monotonic()
        invites = command(hosts[0], "cloud_a", "invite", str(file), "--cloud", "cloud_a", "--yes")
        held.callback(invites.kill)
        assert invites.stdout is not None
        told = invites.stdout.readline().split()
        accepts = command(hosts[1], "cloud_b", *told[told.index("accept") :], "--yes")
        held.callback(accepts.kill)
        said = [process.communicate(timeout=120)[0] for process in (invites, accepts)]
        assert [invites.returncode, accepts.returncode] == [0, 0], said
        (tmp_path / "cloud_a" / "experiment.yaml").write_bytes(file.read_bytes())
        joins = [
            command(host, cloud, "join", "experiment.yaml", "--cloud", cloud, "--run-dir", "run")
            for host, cloud in zip(hosts[:2], CLOUDS, strict=True)
        ]
        for process in joins:
            held.callback(process.kill)
        events = tmp_path / "cloud_a" / "run" / EVENTS_FILE
        wait_for(lambda: events.exists() and bool(losses(events.parent)), 240)
        to_step_1_s = time.monotonic() - started_s
        said += [process.communicate(timeout=200)[0] for process in joins]
        assert [process.returncode for process in joins] == [0, 0], said
    assert to_step_1_s < 60.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

"""`python -m xcloud approve`: what a file asks of this cloud, its number, and its place in the
policy."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.configs import composed
from tests.owners import copy_keys, keys_of
from xcloud.base.errors import ConfigError
from xcloud.job import approval, given
from xcloud.job import config as configs
from xcloud.line.keys import describe
from xcloud.security.policy import MAX_BYTES

DIGEST = "4f1c" * 16
Approve = Callable[..., tuple[int, str]]


@pytest.fixture
def policy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "here" / "policy.yaml"
    file.parent.mkdir()
    file.write_text("# of this cloud\nme: cloud_b\n")
    monkeypatch.setenv("XCLOUD_POLICY", str(file))
    return file


@pytest.fixture
def approve(capsys: pytest.CaptureFixture[str]) -> Approve:
    def run(*words: object) -> tuple[int, str]:
        code = approval.main([*map(str, words)])
        return code, capsys.readouterr().out

    return run


def written(folder: Path, *overrides: str) -> Path:
    file = folder / "experiment.yaml"
    configs.Settings.of(composed("+exp=abnet_iwslt", *overrides)).write(file)
    return file


def test_what_a_file_asks_of_each_cloud_is_shown(
    tmp_path: Path, policy_file: Path, approve: Approve
) -> None:
    code, said = approve(written(tmp_path, "compression=int8"))
    assert code == 0 and "not approved: nobody can be asked here" in said
    here, there = said.split("\ncloud_a: ")[1].split("\ncloud_b: ")
    assert "reads the fields source; only here: source" in here
    assert (
        "sends cloud_b activation: counts int16 [B], hidden float32 [R, 128], compressed by int8; "
        "4 a step, at most " in here
    )
    assert "sends cloud_a gradient: hidden float32 [R, 128]" in there
    assert "sends cloud_a report: " in there


def test_a_mailbox_needs_no_port_and_a_missing_folder_is_named(
    tmp_path: Path, policy_file: Path, approve: Approve
) -> None:
    box = tmp_path / "box"
    policy_file.write_text(f"me: cloud_b\naddresses: [{box}]\n")
    words = ["+exp=lora_clm", "strategy=local_updates", "cluster/wan=mailbox"]
    file = tmp_path / "experiment.yaml"
    configs.Settings.of(composed(*words, f"cluster.wan.url={box}")).write(file)
    _, said = approve(file)
    assert "; no port open; waits for up to 12 h until all have joined" in said
    assert f"lacks     there is no folder {box} here: make it before you join" in said
    box.mkdir()
    _, said = approve(file)
    assert "lacks" not in said


def test_both_owners_are_shown_one_number_of_file_and_certificates_and_its_parts(
    tmp_path: Path, approve: Approve, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "cluster/wan=sealed", "cluster.clouds.cloud_a.address=host:7000")
    policy = copy_keys(tmp_path / "own")
    policy.write_text("me: cloud_b\npeers: {cloud_a: [cloud_a.pem]}\naddresses: ['host:7000']\n")
    monkeypatch.setenv("XCLOUD_POLICY", str(policy))
    code, said = approve(file)
    assert code == 0
    keys = keys_of("cloud_b", ["cloud_a"])
    for certificate in (keys.own, *keys.peers["cloud_a"]):
        assert f"certificate of {describe(certificate)}" in said
    assert "dials     host:7000 (cloud_a)\n" in said
    number = said.split("with the other owners:\n")[1].split("\nif it differs")[0]
    assert re.fullmatch(r"(\s+(\d{5} ){3}\d{5}){3}", number)
    policy.write_text("me: cloud_a\npeers: {cloud_b: [cloud_b.pem]}\naddresses: ['host:7000']\n")
    said = approve(file)[1]
    assert number in said, "the other owner reads the same number"
    assert "listens   host:7000 (cloud_a)\n" in said
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    both = [keys.own, *keys.peers["cloud_a"]]
    assert approval.number_of(digest, both) == number
    for odd in (both[:1], [both[0], keys_of("cloud_c", ["cloud_a"]).own]):
        assert approval.number_of(digest, odd) != number
    assert approval.number_of("0" * 64, both) != number
    policy.write_text("me: cloud_b\npeers: {cloud_a: [cloud_a.pem]}\naddresses: ['host:7000']\n")
    (policy.parent / "cloud_a.pem").unlink()
    code, said = approve(file)
    assert code == 0 and "certificates: the certificate of cloud_a: there is no" in said


def test_what_replicas_and_producers_send_is_shown(
    tmp_path: Path, policy_file: Path, approve: Approve
) -> None:
    _, said = approve(written(tmp_path, "strategy=local_updates"))
    assert "sends cloud_a averaging: weight changes of all that is trained in encoder" in said
    assert "once in 50 steps" in said and "only here: none" in said
    policy_file.write_text("me: discriminator\n")
    file = tmp_path / "experiment.yaml"
    configs.Settings.of(composed("+exp=electra_multilingual")).write(file)
    _, said = approve(file)
    assert "sends discriminator batch: token ids and labels" in said


def test_a_file_that_is_approved_runs_and_a_changed_one_does_not(
    tmp_path: Path, policy_file: Path, approve: Approve
) -> None:
    file = written(tmp_path)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    code, said = approve(file, "--yes")
    assert code == 0 and f"approved in {policy_file} now" in said
    shown = said.split("SHA-256 of experiment.yaml\n")[1].split("approved")[0]
    assert "".join(shown.split()) == digest
    assert policy_file.read_text().startswith("# of this cloud\nme: cloud_b\n")
    assert f"approved in {policy_file}\n" in approve(file)[1]
    given.read_shared(file, tmp_path)

    file.write_text(file.read_text() + "\n")
    with pytest.raises(ConfigError, match="is not approved in this cloud"):
        given.read_shared(file, tmp_path)
    approve(file, "--yes")
    given.read_shared(file, tmp_path)
    assert len(yaml.safe_load(policy_file.read_text())["approved"]) == 2


@pytest.mark.parametrize(("answer", "is_approved"), [("y", True), ("", False), ("no", False)])
def test_a_person_is_asked(
    answer: str,
    is_approved: bool,
    tmp_path: Path,
    policy_file: Path,
    approve: Approve,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    approve(written(tmp_path))
    assert ("approved" in policy_file.read_text()) == is_approved


def test_what_the_policy_would_refuse_is_not_approved(
    tmp_path: Path, policy_file: Path, approve: Approve
) -> None:
    policy_file.write_text("require: {seed: 7}\n")
    code, said = approve(written(tmp_path), "--yes")
    assert code == 1 and "would refuse it: seed is 1" in said
    assert policy_file.read_text() == "require: {seed: 7}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file"),
        (b"\xff\xfe", "can't decode"),
        (b"a: [", "experiment.yaml: while parsing"),
        (b"a: 1", "is not an experiment file"),
        (b"a: &b 1", "an anchor or alias"),
        (b"#" * (MAX_BYTES + 1), "is longer than"),
    ],
    ids=["missing", "binary", "broken", "other", "anchor", "long"],
)
def test_a_file_that_is_no_experiment_is_refused(
    content: bytes | None, said: str, tmp_path: Path, policy_file: Path, approve: Approve
) -> None:
    file = tmp_path / "experiment.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        approve(file, "--yes")
    assert "approved" not in policy_file.read_text()


@pytest.mark.parametrize(
    "policy",
    [
        "", "me: a", "approved:\n", "approved: []  # none\nme: a\n", "approved: null\n",
        "approved: ['{0}', \"{0}\" ] # x\nme: a", "approved:\n- '{0}'  # Bob\n\n# me\nme: a\n",
        "me: a\napproved:\n  - '{0}'",
    ],
)  # fmt: skip
def test_all_else_in_a_policy_stays(policy: str) -> None:
    text = policy.format("00" * 32)
    before = yaml.safe_load(text) or {}
    changed = approval.with_approved(text, DIGEST)
    after = yaml.safe_load(changed)
    assert after.pop("approved") == [*(before.pop("approved", None) or []), DIGEST]
    assert after == before
    assert [part for part in text.split() if part.startswith("#") and part not in changed] == []


def test_a_policy_is_made_where_there_is_none_and_a_strange_one_is_left_alone(
    tmp_path: Path,
) -> None:
    file = tmp_path / "new" / "policy.yaml"
    approval.approve(file, DIGEST)
    assert yaml.safe_load(file.read_text()) == {"approved": [DIGEST]}
    link = tmp_path / "policy.yaml"
    os.symlink(file, link)
    approval.approve(link, DIGEST)
    assert link.is_symlink()
    file.write_text("{me: a}")
    with pytest.raises(ConfigError, match="write approved: "):
        approval.approve(file, DIGEST)
    assert file.read_text() == "{me: a}"

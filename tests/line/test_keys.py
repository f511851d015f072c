"""Keys of clouds: made, read, refused, and what they seal and sign."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.owners import copy_keys, folder_of_keys, keys_of
from xcloud.__main__ import main
from xcloud.base.errors import ConfigError, SealError
from xcloud.job.config import this_clouds_keys, this_clouds_policy
from xcloud.line.keys import Certificate, make_key, read_certificate, read_key, read_line_keys
from xcloud.line.sealing import open_sealed, seal, seal_parts, sealed_bytes, sign, verify


def test_a_key_is_made_once_for_its_user_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "cloud_a", "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    key, pem = tmp_path / "cloud_a.key", tmp_path / "cloud_a.pem"
    made = read_certificate(pem)
    assert made.fingerprint in said.replace(" ", "")
    assert key.stat().st_mode & 0o777 == 0o600
    assert made.cloud == "cloud_a"
    valid_for = made.parsed.not_valid_after_utc - made.parsed.not_valid_before_utc
    assert valid_for == timedelta(days=365, hours=1)

    before = key.read_bytes(), pem.read_bytes()
    assert main(["keys", "new", "cloud_a", "--folder", str(tmp_path)]) == 1
    assert "cloud_a.key is there already" in capsys.readouterr().err
    assert before == (key.read_bytes(), pem.read_bytes())

    for file in (key, pem):
        assert main(["keys", "show", str(file)]) == 0
        assert made.fingerprint in capsys.readouterr().out.replace(" ", "")


def test_a_key_may_come_with_a_policy_that_names_the_other_cloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["keys", "new", "cloud_a", "--folder", str(tmp_path), "--peer"]
    policy = tmp_path / "policy.yaml"
    for peer, refusal in (("cloud_a", "this cloud itself"), ("../b", "the name of a cloud")):
        assert main([*words, peer]) == 1
        assert refusal in capsys.readouterr().err
        assert not list(tmp_path.iterdir())
    policy.write_text("me: cloud_a\n")
    assert main([*words, "cloud_b"]) == 1
    assert "cloud_b:\n  - cloud_b.pem" in capsys.readouterr().err
    assert [policy] == list(tmp_path.iterdir()), "no key was made"
    policy.unlink()

    assert main([*words, "cloud_b"]) == 0
    assert policy.stat().st_mode & 0o777 == 0o600
    assert "approved: []" in policy.read_text()  # no file runs before somebody has looked at it
    make_key("cloud_b", tmp_path)
    monkeypatch.setenv("XCLOUD_POLICY", str(policy))
    found = this_clouds_policy()
    assert found.me == "cloud_a"
    assert read_line_keys("cloud_a", found.peers, policy_file=policy)


@pytest.mark.parametrize("name", ["../cloud", "", "a b\n", "x" * 65, "\u4e0a" * 22])
def test_a_name_that_no_cloud_can_have_gets_no_key(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        make_key(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_name_is_as_long_as_its_bytes(tmp_path: Path) -> None:
    name = 21 * "\u4e0a"
    assert make_key(name, tmp_path).cloud == name
    with pytest.raises(ConfigError, match=r"at most 64 bytes in UTF-8, and .* takes 66: give the"):
        make_key(22 * "\u4e0a", tmp_path)


def changed(change: Callable[[Path], object], tmp_path: Path) -> str:
    """What reading the keys of cloud_a says, who knows cloud_b, after a change in their folder."""
    policy = copy_keys(tmp_path)
    change(tmp_path)
    with pytest.raises(ConfigError) as error:
        read_line_keys("cloud_a", {"cloud_b": ["cloud_b.pem"]}, policy_file=policy)
    message = str(error.value)
    assert "\n" not in message
    return message


def replace(name: str, source: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / source).read_bytes())


def renew(name: str, valid_for: timedelta) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / f"{name}.pem").unlink()
        (folder / f"{name}.key").unlink()
        make_key(name, folder, valid_for=valid_for)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "cloud_b.pem").unlink(), "there is no file"),
        (lambda folder: (folder / "cloud_b.pem").write_text("hello"), "holds no certificate"),
        (lambda folder: (folder / "cloud_b.pem").write_bytes(bytes(1 << 17)), "too long"),
        (replace("cloud_b.pem", "cloud_b.key"), "holds no certificate"),
        (replace("cloud_b.pem", "cloud_c.pem"), "is that of 'cloud_c'"),
        (replace("cloud_b.pem", "cloud_a.pem"), "this cloud's own key"),
        (renew("cloud_b", timedelta(minutes=-5)), "has expired on 20"),
    ],
)
def test_a_peers_certificate_that_will_not_do_is_named_with_its_file(
    change: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    message = changed(change, tmp_path)
    assert said in message, message
    assert "certificate of cloud_b" in message and str(tmp_path / "cloud_b.pem") in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "cloud_a.key").unlink(), "there is no file"),
        (lambda folder: (folder / "cloud_a.key").chmod(0o604), "chmod 600"),
        (replace("cloud_a.key", "cloud_a.pem"), "holds no private key"),
        (replace("cloud_a.key", "cloud_c.key"), "is not the certificate of"),
        (renew("cloud_a", timedelta(minutes=-5)), "has expired on 20"),
    ],
)
def test_this_clouds_own_key_must_be_private_and_its_certificate_valid(
    change: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    message = changed(change, tmp_path)
    assert said in message and f"{tmp_path}/cloud_a." in message, message


def test_a_policy_names_the_certificates_of_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = copy_keys(tmp_path)
    monkeypatch.setenv("XCLOUD_POLICY", str(policy))
    policy.write_text("me: cloud_a\npeers: {cloud_b: [cloud_b.pem], cloud_c: [./cloud_c.pem]}\n")
    keys = this_clouds_keys()
    assert keys.own == read_certificate(tmp_path / "cloud_a.pem")
    for cloud in ("cloud_b", "cloud_c"):
        assert keys.cloud_of(read_certificate(tmp_path / f"{cloud}.pem").der) == cloud
    assert keys.cloud_of(keys.own.der) is None

    for text, said in (
        ("peers: {cloud_b: [cloud_b.pem]}", "which cloud this is"),
        ("me: cloud_a\npeers: {cloud_b: []}", "must be one file, or two"),
        ("me: cloud_a\npeers: {cloud_b: [cloud_b.pem, cloud_b.pem, cloud_b.pem]}", "one file"),
        ("me: cloud_a\npeers: {cloud_a: [cloud_b.pem]}", "which is this cloud"),
        ("me: cloud_a\npeers: {cloud_b: cloud_b.pem}", "peers"),
    ):
        policy.write_text(text)
        with pytest.raises(ConfigError, match=said):
            this_clouds_keys()


def pair() -> tuple[Certificate, Certificate]:
    return keys_of("cloud_a", []).own, keys_of("cloud_b", []).own


@pytest.mark.parametrize("data", [b"", b"x", os.urandom(100_000)])
def test_what_is_sealed_opens_for_its_receiver_alone(data: bytes) -> None:
    a, b = pair()
    a_key, b_key, c_key = (
        read_key(folder_of_keys() / f"cloud_{name}.key") for name in ("a", "b", "c")
    )
    sealed = seal(data, b, a_key, context=b"round 3")
    assert len(sealed) <= sealed_bytes(len(data))
    assert not data or len(data) == 1 or data not in sealed
    assert open_sealed(sealed, b_key, b, sender=a, context=b"round 3") == data
    assert sealed != seal(data, b, a_key, context=b"round 3")

    for attempt in (
        lambda: open_sealed(sealed, b_key, b, sender=a, context=b"round 4"),
        lambda: open_sealed(sealed, c_key, b, sender=a, context=b"round 3"),
        lambda: open_sealed(sealed, b_key, b, sender=b, context=b"round 3"),
        lambda: open_sealed(sealed, a_key, a, sender=a, context=b"round 3"),
        lambda: open_sealed(
            seal(data, b, c_key, context=b"round 3"), b_key, b, sender=a, context=b"round 3"
        ),
    ):
        with pytest.raises(SealError, match=r"cloud_a|cloud_b"):
            attempt()


def test_no_byte_of_a_sealed_message_can_be_changed_left_out_or_added() -> None:
    a, b = pair()
    a_key, b_key = (read_key(folder_of_keys() / f"cloud_{name}.key") for name in ("a", "b"))
    sealed = seal(b"weights", b, a_key, context=b"")
    damaged = [sealed[:end] for end in range(len(sealed))]
    damaged += [sealed + b"\0"]
    for at in range(len(sealed)):
        damaged.append(sealed[:at] + bytes([sealed[at] ^ 0x41]) + sealed[at + 1 :])
    for one in damaged:
        with pytest.raises(SealError):
            open_sealed(one, b_key, b, sender=a, context=b"")


def test_sealing_and_opening_copy_a_message_once_each() -> None:
    a, b = pair()
    a_key, b_key = (read_key(folder_of_keys() / f"cloud_{name}.key") for name in ("a", "b"))
    num_bytes = 8_000_000
    data = memoryview(bytearray(num_bytes))
    tracemalloc.start()
    try:
        head, body = seal_parts(data, b, a_key, context=b"")
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 1.1 * num_bytes
        sealed = head + body
        del body
        tracemalloc.reset_peak()
        opened = open_sealed(sealed, b_key, b, sender=a, context=b"")
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 2.1 * num_bytes, "the sealed message, and the opened one"
    finally:
        tracemalloc.stop()
    assert opened == data


def test_a_message_that_an_earlier_release_has_sealed_is_named_as_such() -> None:
    a, b = pair()
    b_key = read_key(folder_of_keys() / "cloud_b.key")
    with pytest.raises(SealError, match="by an earlier release of xcloud: run one release in all"):
        open_sealed(b"XCS1" + bytes(300), b_key, b, sender=a, context=b"")


def test_a_signature_is_of_one_key_and_one_purpose() -> None:
    a, b = pair()
    a_key = read_key(folder_of_keys() / "cloud_a.key")
    signature = sign(b"audit", a_key)
    verify(b"audit", signature, a)
    for data, by in ((b"audi", a), (b"audit", b)):
        with pytest.raises(SealError):
            verify(data, signature, by)
    sealed = seal(b"x", b, a_key, context=b"")
    taken = sealed[5 : 5 + sealed[4]]  # a seal's signature, offered as an audit's
    with pytest.raises(SealError):
        verify(sealed[5 + sealed[4] :], taken, a)


def test_the_command_names_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "show", "/nowhere/cloud_a.pem"]) == 1
    assert capsys.readouterr().err == "xcloud: there is no file /nowhere/cloud_a.pem\n"


def test_a_key_is_made_only_in_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        make_key("cloud_a", tmp_path / "nowhere")


def test_certificates_of_authorities_and_of_a_hundred_years_are_refused(tmp_path: Path) -> None:
    make_key("cloud_a", tmp_path)
    for name, is_authority, days in (("ca", True, 30), ("hundred", False, 36_500)):
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cloud_b")])
        limits = x509.BasicConstraints(ca=is_authority, path_length=None)
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(1)
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(limits, critical=True)
            .sign(key, hashes.SHA256())
        )
        (tmp_path / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        said = "may issue others" if is_authority else "at most 400 are accepted"
        with pytest.raises(ConfigError, match=said):
            read_line_keys("cloud_a", {"cloud_b": [f"{name}.pem"]}, tmp_path / "policy.yaml")


@pytest.mark.parametrize(("mode", "is_taken"), [(0o600, True), (0o440, True), (0o660, False)])
def test_a_group_may_read_a_key_and_not_write_it(
    mode: int, is_taken: bool, tmp_path: Path
) -> None:
    make_key("cloud_a", tmp_path)
    (tmp_path / "cloud_a.key").chmod(mode)
    if is_taken:
        read_key(tmp_path / "cloud_a.key")
    else:
        with pytest.raises(ConfigError, match="can be changed by its group"):
            read_key(tmp_path / "cloud_a.key")

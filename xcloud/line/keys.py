"""The keys of clouds: each owner makes a pair, and gives the other the certificate.

Nothing else is trusted: there is no authority, and a cloud is known by the SHA-256 of its
certificate. A key lies beside policy.yaml, as cloud_a.key and cloud_a.pem.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import cast

import yaml  # type: ignore[import-untyped]
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from xcloud.base.errors import ConfigError
from xcloud.base.project import POLICY_FILE
from xcloud.base.terminal import say
from xcloud.base.wording import check_name

PrivateKey = ec.EllipticCurvePrivateKey

VALID_FOR = timedelta(days=365)
MAX_VALID_FOR = timedelta(days=400)
MAX_PER_PEER = 2  # the old and the new one, for the day of a change
_MAX_NAME_BYTES = 64  # of a common name, by X.509 as the library counts it
_MAX_FILE_BYTES = 1 << 16
_CLOCKS_DIFFER_BY = timedelta(hours=1)


@dataclass(frozen=True)
class Certificate:
    """The certificate of a cloud: its public key, its name, and until when it is valid.

    der: the certificate in binary form.
    """

    der: bytes

    @cached_property
    def parsed(self) -> x509.Certificate:
        return x509.load_der_x509_certificate(self.der)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in hexadecimal."""
        return hashlib.sha256(self.der).hexdigest()

    @property
    def cloud(self) -> str:
        [name] = self.parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return str(name.value)

    @property
    def public_key(self) -> ec.EllipticCurvePublicKey:
        return cast(ec.EllipticCurvePublicKey, self.parsed.public_key())

    @property
    def pem(self) -> str:
        return self.parsed.public_bytes(serialization.Encoding.PEM).decode()


@dataclass(frozen=True)
class LineKeys:
    """The key of this cloud, and the certificates by which it knows the others.

    key_file, pem_file: this cloud's own.
    peers: the certificates of each other cloud, one or two.
    """

    own: Certificate
    key_file: Path
    pem_file: Path
    peers: Mapping[str, Sequence[Certificate]]

    def cloud_of(self, der: bytes) -> str | None:
        """Return the cloud whose certificate this is; None for a stranger's."""
        for cloud, certificates in self.peers.items():
            # The whole certificate and not its name: anybody can make one with the same name.
            if any(known.der == der for known in certificates):
                return cloud
        return None


def make_key(cloud: str, folder: Path, valid_for: timedelta = VALID_FOR) -> Certificate:
    """Make a cloud's key and certificate: CLOUD.key, for its user alone, and CLOUD.pem.

    Raises ConfigError for a name that is none, and where a file is there already.
    """
    check_name("the name of a cloud", name=cloud, spoken=True)
    num_bytes = len(cloud.encode())
    if num_bytes > _MAX_NAME_BYTES:
        raise ConfigError(
            f"a certificate holds a name of at most {_MAX_NAME_BYTES} bytes in UTF-8, and "
            f"{cloud} takes {num_bytes}: give the cloud a shorter one"
        )
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    key_file, pem_file = _files_of(cloud, folder=folder)
    for file in (key_file, pem_file):
        # lexists: a link that leads nowhere yet would be written through.
        if os.path.lexists(file):
            raise ConfigError(f"{file} is there already; move it away to make another")

    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC).replace(microsecond=0)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, cloud)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER_BY)
        .not_valid_after(now + valid_for)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    signed = builder.sign(key, hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # The key first: a certificate without its key would be given away and never work.
    _write_new(key_file, data=secret, mode=0o600)
    _write_new(pem_file, data=signed.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return Certificate(signed.public_bytes(serialization.Encoding.DER))


def read_certificate(file: Path) -> Certificate:
    """Read a certificate as `make_key` makes them.

    Raises ConfigError for a file that is missing, or is something else.
    """
    data = _content_of(file)
    try:
        found = x509.load_pem_x509_certificate(data)
        certificate = Certificate(found.public_bytes(serialization.Encoding.DER))
        names = list(found.subject)
        has_curve = isinstance(found.public_key(), ec.EllipticCurvePublicKey) and isinstance(
            certificate.public_key.curve, ec.SECP256R1
        )
        if not has_curve or len(names) != 1 or names[0].oid != NameOID.COMMON_NAME:
            raise ValueError("it is not one that `xcloud keys new` makes")
        # Self-signed, and may issue nothing: each certificate is trusted for itself, so one that
        # could issue others would let its owner name further clouds.
        found.verify_directly_issued_by(found)
        if found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise ValueError("it may issue others, and no authority is trusted here")
    except (ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature) as error:
        raise ConfigError(
            f"{file} holds no certificate of a cloud: {str(error) or type(error).__name__:.200}"
        ) from None
    return certificate


def read_key(file: Path) -> PrivateKey:
    """Read a private key. Raises ConfigError for a file that is missing, is something else, or
    that other users may read, or the group write. A group may read it: in Kubernetes it must."""
    data = _content_of(file)
    mode = file.stat().st_mode
    if mode & 0o007:
        raise ConfigError(f"{file} can be read by every user of this machine: chmod 600 {file}")
    if mode & 0o030:
        raise ConfigError(f"{file} can be changed by its group: chmod 600 {file}")
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} holds no private key: {error!s:.200}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ConfigError(f"{file} holds a key of another kind than `xcloud keys new` makes")
    return key


def read_line_keys(
    me: str | None, peers: Mapping[str, Sequence[str]], policy_file: Path
) -> LineKeys:
    """Read this cloud's own key, which lies beside the policy, and the certificates of its peers.

    peers: files of each cloud, relative to the policy's folder.

    Raises ConfigError naming the cloud and the file for one that is missing, cannot be read, is
    not valid today, has another cloud's name or is this cloud's own.
    """
    if me is None:
        raise ConfigError(f"{policy_file} must say which cloud this is: me: cloud_a")
    folder = policy_file.parent
    key_file, pem_file = _files_of(me, folder=folder)
    key = read_key(key_file)
    own = _certificate_of(me, file=pem_file)
    if own.public_key.public_numbers() != key.public_key().public_numbers():
        raise ConfigError(f"{pem_file} is not the certificate of {key_file}")
    if me in peers:
        raise ConfigError(f"{policy_file}: peers has {me!r}, which is this cloud (me)")
    known: dict[str, list[Certificate]] = {}
    for cloud, files in peers.items():
        if not 1 <= len(files) <= MAX_PER_PEER:
            raise ConfigError(
                f"{policy_file}: peers.{cloud} must be one file, or two on the day of a change"
            )
        known[cloud] = [_certificate_of(cloud, file=folder / file, own=own) for file in files]
    return LineKeys(own=own, key_file=key_file, pem_file=pem_file, peers=known)


def describe(certificate: Certificate) -> str:
    """Return a certificate in words: whose, until when, and its fingerprint in groups of four."""
    digest = certificate.fingerprint
    groups = " ".join(digest[at : at + 4] for at in range(0, len(digest), 4))
    until = f"{certificate.parsed.not_valid_after_utc:%Y-%m-%d}"
    return f"{certificate.cloud}, valid until {until}\nSHA-256 {groups}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m xcloud keys", description="Make or show the key of a cloud."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="make CLOUD.key and CLOUD.pem")
    new.add_argument("cloud", help="its name in cluster.clouds")
    new.add_argument(
        "--folder", type=Path, default=Path(), help="of this cloud's policy.yaml (default: here)"
    )
    new.add_argument(
        "--peer",
        metavar="CLOUD",
        action="append",
        default=[],
        help="also write a policy.yaml that names this cloud and the other owner's (each of them)",
    )
    show = commands.add_parser("show", help="say whose key or certificate a file holds")
    show.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "new":
        # Made before the key, so that a wrong --peer leaves no key behind.
        policy = _policy_naming(given.cloud, peers=given.peer)
        policy_file = given.folder / POLICY_FILE
        if given.peer and os.path.lexists(policy_file):
            raise ConfigError(
                f"{policy_file} is there already: leave out --peer, and write into it:\n{policy}"
            )
        made = make_key(given.cloud, folder=given.folder)
        key_file, pem_file = _files_of(given.cloud, folder=given.folder)
        say(
            f"{describe(made)}\n{key_file} stays here; give {pem_file} to the owner of the other "
            "cloud, and compare the SHA-256 by phone"
        )
        if given.peer:
            _write_new(policy_file, data=policy.encode(), mode=0o600)
            theirs = ", ".join(f"{peer}.pem" for peer in given.peer)
            say(f"{policy_file} is written; put {theirs} of the other owner beside it")
    else:
        say(describe(_shown(given.file)))


def _policy_naming(cloud: str, peers: Sequence[str]) -> str:
    """Return a policy.yaml that says which cloud this is, and in which file the certificate of
    each peer will lie."""
    for peer in peers:
        check_name("--peer, the name of a cloud", name=peer, spoken=True)
        if peer == cloud:
            raise ConfigError(f"--peer={peer} is this cloud itself: name the other owner's")
    files = {peer: [f"{peer}.pem"] for peer in peers}
    text: str = yaml.safe_dump({"me": cloud, "peers": files}, sort_keys=False)
    return f"{text}approved: []  # `python -m xcloud approve` puts the files here that may run\n"


def _shown(file: Path) -> Certificate:
    """Return the certificate in a file, or the one that lies beside a key."""
    if b"PRIVATE KEY" not in _content_of(file):
        return read_certificate(file)
    key = read_key(file)
    certificate = read_certificate(file.with_suffix(".pem"))
    if certificate.public_key.public_numbers() != key.public_key().public_numbers():
        raise ConfigError(f"{file.with_suffix('.pem')} is not the certificate of {file}")
    return certificate


def _certificate_of(cloud: str, file: Path, own: Certificate | None = None) -> Certificate:
    """Read a certificate that must be this cloud's, and valid now."""
    whose = f"the certificate of {cloud}"
    try:
        found = read_certificate(file)
    except ConfigError as error:
        raise ConfigError(f"{whose}: {error}") from None
    now = datetime.now(UTC)
    # A copy of the own file in the place of the peer's: this cloud would then talk to itself.
    if own is not None and own.public_key.public_numbers() == found.public_key.public_numbers():
        raise ConfigError(f"{whose}, {file}, has this cloud's own key: ask its owner for theirs")
    if found.cloud != cloud:
        raise ConfigError(f"{whose}, {file}, is that of {found.cloud!r}")
    begins = found.parsed.not_valid_before_utc
    ends = found.parsed.not_valid_after_utc
    if now > ends:
        raise ConfigError(
            f"{whose}, {file}, has expired on {ends:%Y-%m-%d}; "
            f"its owner makes another with `python -m xcloud keys new {cloud}`"
        )
    if ends - begins > MAX_VALID_FOR:
        raise ConfigError(
            f"{whose}, {file}, is valid for {(ends - begins).days:,} days; "
            f"at most {MAX_VALID_FOR.days} are accepted: its owner makes another with "
            f"`python -m xcloud keys new {cloud}`"
        )
    if now < begins:
        raise ConfigError(
            f"{whose}, {file}, is valid from {begins:%Y-%m-%d %H:%M} UTC; "
            f"the clock here says {now:%Y-%m-%d %H:%M}"
        )
    return found


def _files_of(cloud: str, folder: Path) -> tuple[Path, Path]:
    """Return where the key and the certificate of a cloud lie."""
    return folder / f"{cloud}.key", folder / f"{cloud}.pem"


def _content_of(file: Path) -> bytes:
    if not file.is_file():  # a pipe might never end
        raise ConfigError(f"there is no file {file}")
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{file} is too long for a key or a certificate")
    return data


def _write_new(file: Path, data: bytes, mode: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as opened:
        # The mode of `open` is cut by the umask.
        os.fchmod(descriptor, mode)
        opened.write(data)

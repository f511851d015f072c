"""`python -m xcloud invite` and `accept`: two owners who have nothing of each other yet exchange
their certificates and the experiment file through a relay, by a code told over the phone.

The code is a number, which names a room of the relay, and two words, which SPAKE2 (RFC 9382)
turns into a key. Who does not know the words learns nothing of what is exchanged, and has one
guess of 65,536: a wrong one ends the invitation. After that both see what `approve` shows.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError, LinkError
from xcloud.base.terminal import say
from xcloud.base.wording import check_name
from xcloud.job import approval
from xcloud.job.config import policy_file, this_clouds_policy
from xcloud.job.given import read_settings
from xcloud.job.invitation_words import WORDS
from xcloud.job.strict_policy import HEADER, strict_policy
from xcloud.layout import host_and_port
from xcloud.line.keys import Certificate, make_key, read_certificate
from xcloud.line.pinned_tls import in_words
from xcloud.line.relayed import SAYS_EVERY_S, Side, enter
from xcloud.record.files import replace_text
from xcloud.security.policy import MAX_BYTES, Policy

# Between machines: the other side has to compute a few milliseconds.
_ANSWER_S = 20.0
# Short enough to be said; two invitations at once rarely meet.
_MAX_NUMBER = 999
_TRIED_NUMBERS = 5
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 8 * MAX_BYTES  # JSON writes some characters as six
_NONCE = bytes(12)  # each key seals one message
_NO_KEY = (
    "the words of the code differ on the two sides, so this invitation has ended: make a new "
    "one (somebody else who reaches the relay may have tried your number)"
)
_NO_SENSE = "the other owner's xcloud sent a message that belongs to no invitation"


@dataclass(frozen=True)
class Code:
    """The code of an invitation, such as 7-guitar-orbit."""

    number: int
    words: tuple[str, str]

    def __str__(self) -> str:
        return "-".join((str(self.number), *self.words))

    @property
    def room(self) -> bytes:
        # Public: who knows the number alone finds the room and still lacks the words.
        return hashlib.sha256(f"xcloud invitation {self.number}".encode()).digest()

    @classmethod
    def new(cls) -> Code:
        words = secrets.choice(WORDS), secrets.choice(WORDS)
        # The words are drawn apart from the number, 256 each: 65,536 ways.
        return cls(1 + secrets.randbelow(_MAX_NUMBER), words=words)

    @classmethod
    def read(cls, text: str) -> Code:
        """Read a code as somebody types it. Raises ConfigError."""
        # As people type what they hear: capitals and blanks around it do not count.
        number, *words = text.strip().lower().split("-")
        if not (number.isdecimal() and len(number) < 6 and len(words) == 2):
            raise ConfigError(f"{text!r} is no code such as 7-guitar-orbit")
        for word in words:
            if word not in WORDS:
                raise ConfigError(f"{word!r} is no word of a code: ask for it once more")
        return cls(int(number), words=(words[0], words[1]))


class CodedConnection:
    """A connection on which both know the words of a code.

    Raises ConfigError where the other side does not know them, before anything else is said.
    """

    def __init__(self, plain: socket.socket, code: Code, invites: bool) -> None:
        from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError

        plain.settimeout(_ANSWER_S)
        self._plain = plain
        self._me, self._other = (b"invite", b"accept") if invites else (b"accept", b"invite")
        # Each side has an element of its own, so that a message can't be sent back to its sender.
        side = (SPAKE2_A if invites else SPAKE2_B)(
            str(code).encode(), idA=b"xcloud invite", idB=b"xcloud accept"
        )
        # Two messages cross, after which both have a key, the same one only if their words were.
        self._send(side.start())
        try:
            self._key: bytes = side.finish(self._receive())
        except (SPAKEError, ValueError, AssertionError):
            raise ConfigError(_NO_KEY) from None
        # Who accepts shows first that it knows the words: a guess gets nothing to test others by.
        if invites:
            self._check()
            self._send(self._derived(self._me, purpose=b"knows the words"))
        else:
            self._send(self._derived(self._me, purpose=b"knows the words"))
            self._check()

    def send_message(self, message: Mapping[str, Any]) -> None:
        """Send the one message of this side."""
        data = json.dumps(message).encode()
        # Each side has a key of its own: with a fixed nonce a key may seal one message alone.
        key = self._derived(self._me, purpose=b"message")
        self._send(ChaCha20Poly1305(key).encrypt(_NONCE, data, None))

    def receive_message(self, *keys: str) -> list[str]:
        """Return the values of the other side's one message, which are texts."""
        key = self._derived(self._other, purpose=b"message")
        try:
            # Whoever knew the words may still send anything, so it is read as a stranger's.
            data = ChaCha20Poly1305(key).decrypt(_NONCE, self._receive(), None)
            found = parsed_json(data)
            values = [found[key] for key in keys]
        except (InvalidTag, ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(_NO_SENSE) from None
        if not all(isinstance(value, str) for value in values):
            raise ConfigError(_NO_SENSE)
        return values

    def _check(self) -> None:
        try:
            # A side with other words ends here, which looks like a line that breaks.
            told = self._receive()
        except ConfigError:
            raise ConfigError(_NO_KEY) from None
        # compare_digest takes as long for every wrong text.
        if not hmac.compare_digest(told, self._derived(self._other, purpose=b"knows the words")):
            raise ConfigError(_NO_KEY)

    def _derived(self, side: bytes, purpose: bytes) -> bytes:
        return hmac.digest(self._key, b"xcloud " + side + b" " + purpose, hashlib.sha256)

    def _send(self, data: bytes) -> None:
        try:
            self._plain.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise ConfigError(f"the other owner is gone: {in_words(error)}") from None

    def _receive(self) -> bytes:
        try:
            (num_bytes,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            # Before memory is reserved for it.
            if num_bytes > _MAX_MESSAGE_BYTES:
                raise ConfigError(_NO_SENSE)
            return self._exactly(num_bytes)
        except OSError as error:
            raise ConfigError(f"the other owner is gone: {in_words(error)}") from None

    def _exactly(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            # recv returns what there is, which may be a part.
            if not (more := self._plain.recv(min(num_bytes - len(data), 1 << 16))):
                raise ConfigError("the other owner is gone, or knew other words")
            data += more
        return bytes(data)


def invite(words: Sequence[str]) -> int:
    """Print a code by which the owner of another cloud gets this experiment file and this cloud's
    certificate, and gives theirs. Both then see what the file asks for, and approve it."""
    parser = argparse.ArgumentParser("python -m xcloud invite", description=invite.__doc__)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--cloud", required=True, help="the name of this cloud in it")
    parser.add_argument("--peer", help="the other owner's cloud, where there are more than two")
    parser.add_argument("--relay", help="HOST:PORT of a relay (default: cluster.relay)")
    parser.add_argument("--yes", action="store_true", help="approve it without a question")
    given = parser.parse_args(words)
    _check_library()
    with policy_of(given.cloud) as is_first:
        return _invite(given, is_first)


def _invite(given: argparse.Namespace, is_first: bool) -> int:
    found: list[bytes] = []
    # The bytes that were read are those that are sent.
    settings = read_settings(given.experiment, approve=lambda data, _: found.append(data))
    layout = settings.job.cluster
    others = [name for name in layout.clouds if name != given.cloud]
    if given.cloud not in layout.clouds:
        raise ConfigError(f"--cloud is {given.cloud!r}; the clouds are {', '.join(others)}")
    # Of two clouds the other one is clear; of more it has to be said.
    if given.peer not in others and (given.peer or len(others) > 1):
        raise ConfigError(f"--peer must be the other owner's cloud: {' or '.join(others)}")
    peer = given.peer or others[0]
    relay = given.relay or getattr(layout, "relay", None)
    if relay is None:
        raise ConfigError("the file has no cluster.relay: name a relay by --relay HOST:PORT")
    own = own_certificate(given.cloud)
    # The code is shown by _wait_at, then nothing happens until the other owner types it.
    plain, code = _wait_at(relay)
    with plain:
        exchange = CodedConnection(plain, code, invites=True)
        message = {"from": given.cloud, "for": peer, "certificate": own.pem}
        exchange.send_message({**message, "file": found[0].decode()})
        [certificate] = exchange.receive_message("certificate")
    return agree(
        given.experiment, given.cloud, peer, pem=certificate, is_first=is_first, yes=given.yes
    )


def accept(words: Sequence[str]) -> int:
    """Get an experiment file and the certificate of another owner by the code that they tell, and
    give them this cloud's. Both then see what the file asks for, and approve it."""
    parser = argparse.ArgumentParser("python -m xcloud accept", description=accept.__doc__)
    parser.add_argument("code", help="such as 7-guitar-orbit")
    parser.add_argument("--relay", required=True, help="HOST:PORT of the relay")
    parser.add_argument("--out", type=Path, default=Path("experiment.yaml"),
                        help="where to write the file (default: experiment.yaml)")  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="approve it without a question")
    given = parser.parse_args(words)
    _check_library()
    code = Code.read(given.code)
    # Asked before anybody is called: the code works once.
    if os.path.lexists(given.out):
        raise ConfigError(f"{given.out} is there already; move it away, or give --out")
    try:
        plain = enter(_address(given.relay), room=code.room, side=Side.DIALS)
    except LinkError as error:
        raise ConfigError(str(error)) from None
    # The relay's part ends with the exchange: what follows needs no connection.
    with plain:
        exchange = CodedConnection(plain, code, invites=False)
        peer, me, certificate, text = exchange.receive_message(
            "from", "for", "certificate", "file"
        )
        # From here on this cloud has a policy, which the key lies beside.
        with policy_of(me) as is_first:
            # First: nothing is kept of an owner whose certificate is refused.
            keep_certificate(peer, certificate)
            exchange.send_message({"certificate": own_certificate(me).pem})
            replace_text(given.out, text)
            say(f"{given.out} came from the owner of {peer}; this cloud is {me}\n")
            return agree(given.out, me, peer, pem=certificate, is_first=is_first, yes=given.yes)


def _check_library() -> None:
    try:
        import spake2  # noqa: F401
    except ImportError:
        raise ConfigError('invitations need spake2: pip install "xcloud[invite]"') from None


def _address(relay: str) -> tuple[str, int]:
    try:
        return host_and_port(relay)
    except ValueError:
        raise ConfigError(f"--relay must be HOST:PORT, got {relay}") from None


def _wait_at(relay: str) -> tuple[socket.socket, Code]:
    """Wait for the other owner at a relay, under a number that nobody else has there."""
    address = _address(relay)
    for tries_left in reversed(range(_TRIED_NUMBERS)):
        code = Code.new()
        say(f"the other owner runs: python -m xcloud accept {code} --relay {relay}")
        try:
            # A relay answers who waits every SAYS_EVERY_S; after three in vain it is gone.
            within_s = 3 * SAYS_EVERY_S
            return enter(address, room=code.room, side=Side.ALONE, within_s=within_s), code
        except LinkError as error:
            # A number that is taken is no error: another one is drawn.
            if not tries_left or "is taken" not in str(error):
                raise ConfigError(f"the other owner did not come: {error}") from None
            say(f"not so: {error}")
    raise AssertionError("the last try raises")


@contextmanager
def policy_of(me: str) -> Iterator[bool]:
    """Yield whether this cloud has no policy yet. Then it gets one that allows nothing, which goes
    again if no file is approved, with the certificates that came meanwhile and the folder if
    nothing else is in it. This cloud's own key stays, as the other owner may have its certificate.

    Raises ConfigError where it has the policy of another cloud.
    """
    check_name("the name of this cloud", name=me, spoken=True)
    where = policy_file()
    if os.path.lexists(where):
        named = this_clouds_policy().me
        if named not in (None, me):
            raise ConfigError(
                f"{where} says that this cloud is {named!r}, and the invitation calls it {me!r}: "
                "name another policy by XCLOUD_POLICY, or agree on one name"
            )
        yield False
        return
    folder = where.parent
    is_new_folder = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    before = {*folder.glob("*.pem"), folder / f"{me}.pem"}
    # A policy that allows nothing: if anything below fails, nothing runs by it.
    replace_text(where, text=yaml.safe_dump({"me": me, "approved": []}))
    try:
        yield True
    finally:
        # Nothing was approved, so the owner has no policy, as before.
        if not this_clouds_policy().approved:
            where.unlink()
            # A certificate of somebody who was refused would stand in the way of a later one.
            for file in {*folder.glob("*.pem")} - before:
                file.unlink()
            if is_new_folder and not any(folder.iterdir()):
                folder.rmdir()


def own_certificate(me: str) -> Certificate:
    """Return this cloud's certificate; its key is made where there is none."""
    folder = policy_file().parent
    # A key that is there may be known to others already.
    if os.path.lexists(folder / f"{me}.key"):
        return read_certificate(folder / f"{me}.pem")
    return make_key(me, folder)


def agree(file: Path, me: str, peer: str, pem: str, is_first: bool, yes: bool) -> int:
    """Keep the other cloud's certificate, show what `approve` shows, and ask.

    is_first: True if this cloud's policy is to allow this file and no other.
    Return the exit code of `approve`.
    """
    keep_certificate(peer, pem)
    where = policy_file()
    known = {"peers": {peer: [f"{peer}.pem"]}}
    if is_first:
        # Approved by `approve` below, once the owner has seen the file.
        keys = {**strict_policy(file, cloud=me), "approved": [], **known}
        text = HEADER.format(file=file.name) + yaml.safe_dump(keys, sort_keys=False)
        Policy.of(keys, where)
        replace_text(where, text)
        say(f"{where}, the first policy of this cloud:\n{text}")
    # A policy that its owner wrote is not changed by a stranger's certificate.
    elif peer not in this_clouds_policy().peers:
        more = yaml.safe_dump(known, default_flow_style=True).strip()
        raise ConfigError(
            f"{where} does not know {peer}, whose certificate lies beside it now: add {more}, "
            f"then python -m xcloud approve {file}"
        )
    return approval.main([str(file), *(["--yes"] if yes else [])])


def keep_certificate(peer: str, pem: str) -> None:
    """Write the certificate of another cloud beside the policy. Raises ConfigError for one that is
    none, or where another lies there."""
    check_name("the name of the other cloud", name=peer, spoken=True)
    file = policy_file().parent / f"{peer}.pem"
    # Another certificate under the same name may be an attack.
    if os.path.lexists(file) and file.read_text() != pem:
        raise ConfigError(
            f"{file} is another certificate than {peer} has now: ask its owner why, and move it "
            "away if that is right"
        )
    # Read before it is kept under the peer's name.
    with tempfile.TemporaryDirectory() as folder:
        tried = Path(folder) / file.name
        tried.write_text(pem)
        found = read_certificate(tried)
    if found.cloud != peer:
        raise ConfigError(f"the certificate that came is that of {found.cloud!r}, not of {peer!r}")
    replace_text(file, text=pem)

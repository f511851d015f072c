"""Seal bytes to the certificate of one cloud and sign them with the key of another, for whatever
lies on its way where others reach it: a mailbox, an audit, weights that are followed.

A sealed message: magic "XCS2" | length of the signature u8 | signature | what HPKE (RFC 9180) has
made of the data: its ephemeral public key (65 bytes), then AES-256-GCM with a tag of 16 bytes.

HPKE is that of `cryptography`, in base mode, with P-256, HKDF-SHA256 and AES-256-GCM. `context`
says what the message is for and in which place; both sides give it, it is not sent, and a message
of another context does not open. The signature (ECDSA, SHA-256) covers the context, the receiver
and all that follows it.

Nothing here copies the data but HPKE itself, once: a message may have 2 GB.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from xcloud.base.errors import SealError
from xcloud.line.keys import Certificate, PrivateKey

Data = bytes | memoryview

_MAGIC = b"XCS2"
_OLD_MAGIC = b"XCS1"
_POINT_BYTES = 65
_TAG_BYTES = 16
_HPKE = Suite(KEM.P256, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_ECDSA = ec.ECDSA(Prehashed(hashes.SHA256()))


def sealed_bytes(num_bytes: int) -> int:
    """Return the most bytes that a sealed message of num_bytes takes."""
    return len(_MAGIC) + 1 + 72 + _POINT_BYTES + num_bytes + _TAG_BYTES


def seal(data: Data, receiver: Certificate, sender: PrivateKey, context: bytes) -> bytes:
    """Return data that only the receiver can open, signed by the sender."""
    return b"".join(seal_parts(data, receiver=receiver, sender=sender, context=context))


def seal_parts(
    data: Data, receiver: Certificate, sender: PrivateKey, context: bytes
) -> tuple[bytes, bytes]:
    """Return a sealed message as `seal` does, in two parts: its head, and the long rest."""
    bound = _bound(context, receiver=receiver)
    # Encrypt, then sign: a receiver rejects a stranger's message before it decrypts anything. Base
    # mode, as HPKE's authenticated mode is not in the library (decision 33).
    body = _HPKE.encrypt(data, receiver.public_key, info=bound)
    signature = sender.sign(_digest(b"xcloud sealed 2", bound, body), _ECDSA)
    return _MAGIC + bytes([len(signature)]) + signature, body


def open_sealed(
    sealed: Data, key: PrivateKey, own: Certificate, sender: Certificate, context: bytes
) -> bytes:
    """Return the data of a message that `sender` sealed for this cloud.

    key, own: the receiver's.

    Raises SealError for a message of another sender, receiver or context, and for a damaged one.
    """
    view = memoryview(sealed)
    start = len(_MAGIC) + 1
    if view[: len(_MAGIC)] == _OLD_MAGIC:
        raise SealError(
            f"a message of {sender.cloud} was sealed by an earlier release of xcloud: run one "
            "release in all clouds"
        )
    # A view, so that the body of up to 2 GB is not copied.
    body_at = start + view[start - 1] if len(view) >= start else start
    if view[: len(_MAGIC)] != _MAGIC or len(view) < body_at + _POINT_BYTES + _TAG_BYTES:
        raise SealError(f"{len(view)} bytes that {sender.cloud} should have sealed are not")
    signature = bytes(view[start:body_at])
    body = view[body_at:]
    bound = _bound(context, receiver=own)
    try:
        # Nothing is decrypted that the sender has not signed.
        sender.public_key.verify(signature, _digest(b"xcloud sealed 2", bound, body), _ECDSA)
        return _HPKE.decrypt(body, key, info=bound)
    except (InvalidSignature, InvalidTag, ValueError):
        raise SealError(
            f"a message is not one that {sender.cloud} sealed for {own.cloud} as {context!r:.200}"
        ) from None


def sign(data: Data, key: PrivateKey) -> bytes:
    """Return this key's signature of data, 70 to 72 bytes."""
    return key.sign(_digest(b"xcloud signed 1", data), _ECDSA)


def verify(data: Data, signature: bytes, certificate: Certificate) -> None:
    """Raise SealError unless the owner of the certificate has signed this data."""
    try:
        certificate.public_key.verify(signature, _digest(b"xcloud signed 1", data), _ECDSA)
    except InvalidSignature:
        raise SealError(f"this is not what {certificate.cloud} has signed") from None


def _digest(purpose: bytes, *parts: Data) -> bytes:
    """Return the SHA-256 of what is signed: data of one purpose is never data of another."""
    running = hashes.Hash(hashes.SHA256())
    running.update(purpose + b"\0")
    for part in parts:
        running.update(part)
    return running.finalize()


def _bound(context: bytes, receiver: Certificate) -> bytes:
    """Return what a message is bound to besides its data."""
    head = b"xcloud sealed 2" + struct.pack("<I", len(context)) + context
    return head + bytes.fromhex(receiver.fingerprint)

"""Seal bytes to the certificate of one cloud and sign them with the key of another, for whatever
lies on its way where others reach it: a mailbox, an audit.

A sealed message: magic "XCS1" | length of the signature u8 | signature | ephemeral public key
(65 bytes, uncompressed) | AES-256-GCM of the data, with its tag of 16 bytes.

The key is ECDH on P-256 of the ephemeral key and the receiver's, through HKDF-SHA256. It seals one
message, so the nonce is constant. `context` says what the message is for and in which place; both
sides give it, it is not sent, and a message of another context does not open. The signature
(ECDSA, SHA-256) covers the context, the receiver and all that follows it.
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from xcloud.base.errors import SealError
from xcloud.line.keys import Certificate, PrivateKey

_MAGIC = b"XCS1"
_POINT_BYTES = 65
_TAG_BYTES = 16
_NONCE = bytes(12)
_ECDSA = ec.ECDSA(hashes.SHA256())


def sealed_bytes(num_bytes: int) -> int:
    """Return the most bytes that a sealed message of num_bytes takes."""
    return len(_MAGIC) + 1 + 72 + _POINT_BYTES + num_bytes + _TAG_BYTES


def seal(data: bytes, receiver: Certificate, sender: PrivateKey, context: bytes) -> bytes:
    """Return data that only the receiver can open, signed by the sender."""
    ephemeral = ec.generate_private_key(ec.SECP256R1())
    point = ephemeral.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
    )
    shared = ephemeral.exchange(ec.ECDH(), receiver.public_key)
    bound = _bound(context, receiver=receiver, point=point)
    body = point + _cipher(shared, bound=bound).encrypt(_NONCE, data, bound)
    signature = sender.sign(_signed(b"xcloud sealed 1", data=bound + body), _ECDSA)
    return _MAGIC + bytes([len(signature)]) + signature + body


def open_sealed(
    sealed: bytes, key: PrivateKey, own: Certificate, sender: Certificate, context: bytes
) -> bytes:
    """Return the data of a message that `sender` sealed for this cloud.

    key, own: the receiver's.

    Raises SealError for a message of another sender, receiver or context, and for a damaged one.
    """
    start = len(_MAGIC) + 1
    body_at = start + sealed[start - 1] if len(sealed) >= start else start
    if sealed[: len(_MAGIC)] != _MAGIC or len(sealed) < body_at + _POINT_BYTES + _TAG_BYTES:
        raise SealError(f"{len(sealed)} bytes that {sender.cloud} should have sealed are not")
    signature = sealed[start:body_at]
    body = sealed[body_at:]
    point = body[:_POINT_BYTES]
    bound = _bound(context, receiver=own, point=point)
    try:
        sender.public_key.verify(signature, _signed(b"xcloud sealed 1", data=bound + body), _ECDSA)
        ephemeral = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)
        shared = key.exchange(ec.ECDH(), ephemeral)
        return _cipher(shared, bound=bound).decrypt(_NONCE, body[_POINT_BYTES:], bound)
    except (InvalidSignature, InvalidTag, ValueError):
        raise SealError(
            f"a message is not one that {sender.cloud} sealed for {own.cloud} as {context!r:.200}"
        ) from None


def sign(data: bytes, key: PrivateKey) -> bytes:
    """Return this key's signature of data, 70 to 72 bytes."""
    return key.sign(_signed(b"xcloud signed 1", data=data), _ECDSA)


def verify(data: bytes, signature: bytes, certificate: Certificate) -> None:
    """Raise SealError unless the owner of the certificate has signed this data."""
    try:
        certificate.public_key.verify(signature, _signed(b"xcloud signed 1", data=data), _ECDSA)
    except InvalidSignature:
        raise SealError(f"this is not what {certificate.cloud} has signed") from None


def _signed(purpose: bytes, data: bytes) -> bytes:
    """Return what is signed: data of one purpose is never data of another."""
    return purpose + b"\0" + data


def _bound(context: bytes, receiver: Certificate, point: bytes) -> bytes:
    """Return what a message is bound to besides its data."""
    head = b"xcloud sealed 1" + struct.pack("<I", len(context)) + context
    return head + bytes.fromhex(receiver.fingerprint) + point


def _cipher(shared: bytes, bound: bytes) -> AESGCM:
    return AESGCM(HKDF(hashes.SHA256(), 32, salt=None, info=bound).derive(shared))

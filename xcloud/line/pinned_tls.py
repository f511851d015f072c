"""TLS between two clouds that know each other's certificates: TLS 1.3 only, both sides show
theirs, and a peer is who owns a certificate of this cloud's policy. There is no authority, and
host names mean nothing."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress

from xcloud.base.errors import LinkError
from xcloud.line.keys import Certificate, LineKeys

HANDSHAKE_S = 5.0
_HEARD_WITHIN_S = 0.5
_MAX_UNREAD = 4  # reads


class LineDown(LinkError):
    """A connection was cut or could not be made. It is tried again."""


class PinnedTls:
    """The two sides of TLS of one cloud.

    label: the name in the clear at the beginning of a connection, by which an ingress finds the
        rank. It says nothing of a cloud.
    """

    def __init__(self, keys: LineKeys, label: str) -> None:
        self._keys = keys
        self.label = label
        everyone = [one for peer in keys.peers.values() for one in peer]
        self._accepting = self._context(ssl.PROTOCOL_TLS_SERVER, certificates=everyone)
        # No session is resumed here: each connection shows both certificates.
        self._accepting.num_tickets = 0
        self._dialling = {
            cloud: self._context(ssl.PROTOCOL_TLS_CLIENT, certificates=certificates)
            for cloud, certificates in keys.peers.items()
        }

    def dial(self, plain: socket.socket, cloud: str) -> ssl.SSLSocket:
        """Return TLS over a connection that this cloud has made to `cloud`, whose certificate it
        shows. Raises LineDown; `plain` is closed then."""
        return self._shake_hands(
            plain, context=self._dialling[cloud], label=self.label, peer=cloud
        )[0]

    def accept(self, plain: socket.socket) -> tuple[ssl.SSLSocket, str]:
        """Return TLS over a connection that somebody has made to this cloud, and which cloud it
        is. Raises LineDown; `plain` is closed then."""
        return self._shake_hands(
            plain, context=self._accepting, label=None, peer="who has dialled"
        )

    def _context(
        self, protocol: ssl._SSLMethod, certificates: Iterable[Certificate]
    ) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Names mean nothing here: `_shake_hands` looks the peer's certificate up in the policy.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        # PARTIAL_CHAIN: each certificate is trusted itself, also one of two with the same name.
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_cert_chain(self._keys.pem_file, self._keys.key_file)
        for certificate in certificates:
            context.load_verify_locations(cadata=certificate.der)
        return context

    def _shake_hands(
        self, plain: socket.socket, context: ssl.SSLContext, label: str | None, peer: str
    ) -> tuple[ssl.SSLSocket, str]:
        try:
            plain.settimeout(HANDSHAKE_S)
            plain.getpeername()  # of one that was reset wrap_socket leaves a socket open
            tls = context.wrap_socket(
                plain,
                server_side=label is None,
                server_hostname=label,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=False,
            )
        except OSError as error:
            plain.close()
            raise LineDown(f"{peer}: {in_words(error)}") from None
        try:
            tls.do_handshake()
            # OpenSSL has proved the key and the dates by now. Which of the known certificates it
            # is decides who the peer is, so one peer cannot dial in the name of another.
            cloud = self._keys.cloud_of(tls.getpeercert(binary_form=True) or b"")
            if cloud is None or (label is not None and cloud != peer):
                raise LineDown(f"{peer} shows a certificate that is not its own in `peers`")
            return tls, cloud
        except OSError as error:
            _close_heard(tls)
            raise LineDown(f"{peer}: {in_words(error)}") from None
        except BaseException:
            tls.close()
            raise


def _close_heard(tls: ssl.SSLSocket) -> None:
    """Close a connection so that the peer reads why: closed while bytes of it are unread, it would
    be reset, and the alert of TLS lost."""
    with socket.socket(fileno=tls.detach()) as plain, suppress(OSError):
        plain.settimeout(_HEARD_WITHIN_S)
        plain.shutdown(socket.SHUT_WR)
        for _ in range(_MAX_UNREAD):
            if not plain.recv(1 << 14):
                break


def in_words(error: OSError) -> str:
    """Return what went wrong with a connection, for who has to mend it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate is not accepted here ({error.verify_message}): is the file in "
            "`peers` of policy.yaml the one that its owner uses now?"
        )
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nobody listens there"
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
        return "the connection was closed"
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ssl.SSLError):
        reason = error.reason or "no reason given"
        if "ALERT" in reason and ("CERT" in reason or "UNKNOWN_CA" in reason):
            # The peer's view, which came as an alert: its policy lacks the certificate of this
            # cloud.
            words = reason.lower().partition("alert_")[2].replace("_", " ")
            return (
                f"it does not accept the certificate of this cloud ({words}): has its owner the "
                "one that is used here now, in `peers` of policy.yaml?"
            )
        if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"):
            return "what came is no TLS"
        if reason in ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"):
            return "it does not speak TLS 1.3"
        return f"TLS failed: {reason.lower().replace('_', ' ')}"
    return error.strerror or str(error)

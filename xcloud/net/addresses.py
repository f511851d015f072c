"""Which address and interface of this machine face the others, and the store of the rendezvous.

Gloo listens on the interface that GLOO_SOCKET_IFNAME names, else on the address of the host's
name, which is a loopback address on many systems. The interface with the route to MASTER_ADDR is
the one that the other machines can reach.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import psutil
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from xcloud.base.errors import ConfigError
from xcloud.net.rendezvous import FOREVER, JOIN_WITHIN_S

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_BACKLOG = 1024


def choose_interface(host: str) -> str:
    """Have gloo listen on the interface that faces `host`; return this machine's address there.

    GLOO_SOCKET_IFNAME wins if it is set. Raises ConfigError if it names no interface of this
    machine, or if there is no route to `host`.
    """
    interfaces = psutil.net_if_addrs()
    if named := os.environ.get(INTERFACE_VARIABLE):
        name = named.split(",")[0]
        if name not in interfaces:
            raise ConfigError(
                f"{INTERFACE_VARIABLE} is {name}, which is no interface of this machine; it has "
                f"{', '.join(sorted(interfaces))}. Without the variable the one that faces "
                "--master-addr is taken"
            )
        return next((own for own in _addresses(name)), name)
    address = own_address(host)
    for name in interfaces:
        if address in _addresses(name):
            # Gloo reads it when a device is made, in this process and in those that it starts.
            os.environ[INTERFACE_VARIABLE] = name
            break
    return address


def own_address(host: str) -> str:
    """Return the address from which this machine reaches `host`, which is the same address if it
    is this machine's own. Sends nothing. Raises ConfigError if there is no route."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # A datagram socket only looks up the route.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"--master-addr is {host}, which this machine cannot reach: {error.strerror}"
        ) from None


def is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ip_address(address.partition("%")[0]).is_loopback
    return address == "localhost"


def port_range() -> str:
    """Return the ports from which the system chooses those of gloo, as "32768-60999"."""
    with contextlib.suppress(OSError, ValueError):
        low, high = _PORT_RANGE.read_text().split()
        return f"{low}-{high}"
    return "32768-60999"


def why_unreachable(host: str, port: int, within_s: float = 5.0) -> str | None:
    """Return why no connection to this port comes about, None if one does."""
    try:
        socket.create_connection((host, port), within_s).close()
    except TimeoutError:
        return f"no answer in {within_s:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def store_at(host: str, port: int, serves: bool, within_s: float = JOIN_WITHIN_S) -> TCPStore:
    """Return the store at this address. serves: this process is its server, on that address alone
    if it is this machine's own (behind a translation of addresses, on all). within_s: how long its
    server is waited for; calls on the store wait for ever, and a server that ends is noticed.

    Raises ConfigError for a port that is taken.
    """
    within = timedelta(seconds=within_s)
    try:
        # torch's own server would listen on every address of the machine. Whoever reaches it may
        # write.
        listening = _listen(host, port=port) if serves else None
        store = TCPStore(
            host, port, None, serves, within, wait_for_workers=False, master_listen_fd=listening
        )
    except (DistNetworkError, OSError) as error:
        is_taken = getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)
        if not is_taken:
            raise
        raise ConfigError(
            f"rank 0 serves the others on port {port}, which is taken (if ranks may restart under "
            "torchrun, it is the port after torchrun's own); give all clouds another port"
        ) from None
    store.set_timeout(FOREVER)
    return store


def _listen(host: str, port: int) -> int | None:
    """Return a descriptor that listens on this address alone, for the store to own; None if this
    machine does not have the address."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            raise
        listener.listen(_BACKLOG)
        return listener.detach()


def _addresses(interface: str) -> list[str]:
    """Return its addresses, those of IPv4 first."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [one for one in psutil.net_if_addrs()[interface] if one.family in families]
    return [one.address for one in sorted(found, key=lambda one: families.index(one.family))]

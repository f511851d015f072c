"""Network namespaces as hosts on one machine, joined by a veth pair that the kernel limits (tbf),
or by a line that also has a round trip (delay_line.c).

Needs root and iproute2; a line with a round trip needs gcc and /dev/net/tun as well. Traffic stays
on this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

INTERFACE = "xc-veth"
SOURCE = Path(__file__).with_name("delay_line.c")
ADDRESSES = ("10.213.0.1", "10.213.0.2")


def available() -> str | None:
    """None if namespaces can be made here, else why not."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} (iproute2) is not installed"
    probe = f"xc-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"namespaces are not allowed here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


def delay_available() -> str | None:
    """None if a line with a round trip can be made here, else why not."""
    if (reason := available()) is not None:
        return reason
    if shutil.which("gcc") is None:
        return "gcc, which builds the delaying line, is not installed"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"a delaying line needs TUN devices: {error}"
    return None


@contextmanager
def two_hosts(
    bandwidth_bits_per_s: float | None,
    round_trip_s: float | None = None,
    tcp: Mapping[str, str] = MappingProxyType({}),
    min_bits_per_s: float | None = None,
) -> Iterator[tuple[str, str]]:
    """Names of two namespaces whose link carries at most this rate each way (None: no limit).

    round_trip_s: of a delaying line in user space; None = a veth pair that the kernel limits.
    tcp: settings of both hosts in /proc/sys/net/ipv4 that differ from this machine's.
    min_bits_per_s: of all rates that `limit` will be given while the pair is in use.
    Prefix a command with `inside(name)` to run it there.
    """
    names = tuple(f"xc-{os.getpid()}-{side}" for side in "ab")
    line = None
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        if round_trip_s is None:
            _run("ip", "link", "add", INTERFACE, "netns", names[0], "type", "veth",
                 "peer", "name", INTERFACE, "netns", names[1])  # fmt: skip
        else:
            line = _start_delay_line(bandwidth_bits_per_s, round_trip_s, names)
        for name, address in zip(names, ADDRESSES, strict=True):
            _run(*inside(name), "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run(*inside(name), "ip", "link", "set", "lo", "up")
            _run(*inside(name), "ip", "link", "set", INTERFACE, "up")
            for setting, value in tcp.items():
                _run(*inside(name), "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")
            if line is not None:
                _run(*inside(name), "ip", "link", "set", INTERFACE, "txqueuelen", "10000")
            elif bandwidth_bits_per_s is not None:
                limit(name, bandwidth_bits_per_s)
                if min_bits_per_s is not None:
                    # tbf splits what is larger than its burst, but not what waits there already:
                    # that would block the line for good. TCP's largest packets, with headers:
                    size = round(_burst_bytes(min_bits_per_s) / 1.1)
                    _run(*inside(name), "ip", "link", "set", INTERFACE, "gso_max_size", str(size))
        yield names[0], names[1]
    finally:
        if line is not None:
            line.kill()
            line.communicate()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def several_hosts(count: int, bandwidth_bits_per_s: float) -> Iterator[tuple[str, ...]]:
    """Names of so many namespaces at one switch, at addresses 10.213.0.1, 10.213.0.2 and so on.

    bandwidth_bits_per_s: of each host's line to the switch, each way.
    """
    switch = f"xc-{os.getpid()}-switch"
    names = tuple(f"xc-{os.getpid()}-{number}" for number in range(count))
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            _run(*inside(name), "ip", "link", "set", "lo", "up")
        _run(*inside(switch), "ip", "link", "add", "switch", "type", "bridge")
        _run(*inside(switch), "ip", "link", "set", "switch", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth",
                 "peer", "name", port, "netns", switch)  # fmt: skip
            _run(*inside(switch), "ip", "link", "set", port, "master", "switch", "up")
            address = f"10.213.0.{number + 1}/24"
            _run(*inside(name), "ip", "addr", "add", address, "dev", INTERFACE)
            _run(*inside(name), "ip", "link", "set", INTERFACE, "up")
            limit(name, bandwidth_bits_per_s)
            limit(switch, bandwidth_bits_per_s, interface=port)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def limit(host: str, bandwidth_bits_per_s: float, interface: str = INTERFACE) -> None:
    """What the host's end of a veth pair sends from now on; what waits there is kept. A queue of
    1 s never drops what the sockets hand over."""
    _run(*inside(host), "tc", "qdisc", "replace", "dev", interface, "root", "tbf",
         "rate", f"{bandwidth_bits_per_s:.0f}bit",
         "burst", f"{_burst_bytes(bandwidth_bits_per_s)}b", "latency", "1s")  # fmt: skip


def _burst_bytes(bandwidth_bits_per_s: float) -> int:
    """What passes at once after a pause. Small, 4 ms of the line: with 64 kB of it a 10 Mbit/s
    link carries each message 50 ms faster than its bandwidth allows."""
    return max(3 * 1514, round(bandwidth_bits_per_s / 8 * 0.004))


def _start_delay_line(
    bandwidth_bits_per_s: float | None, round_trip_s: float, names: tuple[str, ...]
) -> subprocess.Popen[str]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "delay_line"
        _run("gcc", "-O2", "-pthread", "-o", str(program), str(SOURCE))
        mbit = (bandwidth_bits_per_s or 0.0) / 1e6
        command = [str(program), f"{mbit:g}", f"{1e3 * round_trip_s:g}", INTERFACE, *names]
        line = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert line.stdout is not None
        if line.stdout.readline() != "ready\n":
            raise RuntimeError(f"the delaying line ended with {line.wait()}: {command}")
    return line


_LOST = ("pref", "50", "iif", INTERFACE, "blackhole")


def cut(hosts: Sequence[str]) -> None:
    """Lose every packet between the hosts, without telling them."""
    for host in hosts:
        _heed_rules(host)
        _run(*inside(host), "ip", "rule", "add", *_LOST)


def block(host: str, ports: str) -> None:
    """Drop what comes to TCP ports of this host, "32768-60999", as a firewall does."""
    _heed_rules(host)
    rule = ("pref", "50", "iif", INTERFACE, "ipproto", "tcp", "dport", ports, "blackhole")
    _run(*inside(host), "ip", "rule", "add", *rule)


def without_route(hosts: Sequence[str]) -> None:
    """Lose what the first two of several hosts send to each other. Both still reach the others."""
    for host, other in zip(hosts[:2], reversed(ADDRESSES), strict=True):
        _run(*inside(host), "ip", "route", "add", "blackhole", f"{other}/32")


def _heed_rules(host: str) -> None:
    """Have rules decide on packets for this host itself, too."""
    for setting in ("ip_early_demux", "tcp_early_demux"):  # else connections skip the rules
        _run(*inside(host), "sh", "-c", f"echo 0 > /proc/sys/net/ipv4/{setting}")
    if _run(*inside(host), "ip", "rule").startswith("0:"):
        _run(*inside(host), "ip", "rule", "add", "pref", "100", "lookup", "local")
        _run(*inside(host), "ip", "rule", "del", "pref", "0")


def join(hosts: Sequence[str]) -> None:
    """End what `cut` began."""
    for host in hosts:
        _run(*inside(host), "ip", "rule", "del", *_LOST)


def inside(name: str) -> Sequence[str]:
    return ("ip", "netns", "exec", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


WIREGUARD = ("10.77.0.1", "10.77.0.2")


def wireguard_available() -> str | None:
    """None if two hosts can be joined by WireGuard in user space here, else why not."""
    if (reason := delay_available()) is not None:
        return reason
    missing = [tool for tool in ("wg", "wireguard-go") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


@contextmanager
def wireguard(hosts: Sequence[str]) -> Iterator[None]:
    """While the block lasts the hosts have the addresses WIREGUARD, as docs/several-machines.md
    sets them up; the second one calls the first."""
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        keys = [Path(folder) / side for side in "ab"]
        public = []
        for key in keys:
            key.write_text(_run("wg", "genkey"))
            key.chmod(0o600)
            public.append(_run("sh", "-c", f"wg pubkey < {key}").strip())
        try:
            for number, host in enumerate(hosts):
                interface = f"xc-wg{number}"
                command = [*inside(host), "wireguard-go", "-f", interface]
                processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
                while subprocess.run([*inside(host), "wg", "show", interface],
                                     capture_output=True).returncode:  # fmt: skip
                    time.sleep(0.1)
                other = WIREGUARD[1 - number]
                end = ["listen-port", "51820"] if number == 0 else []
                peer = ["peer", public[1 - number], "allowed-ips", f"{other}/32"]
                if number == 1:
                    peer += ["endpoint", f"{ADDRESSES[0]}:51820", "persistent-keepalive", "25"]
                _run(*inside(host), "wg", "set", interface, *end, "private-key",
                     str(keys[number]), *peer)  # fmt: skip
                _run(*inside(host), "ip", "addr", "add", f"{WIREGUARD[number]}/24",
                     "dev", interface)  # fmt: skip
                _run(*inside(host), "ip", "link", "set", interface, "mtu", "1420", "up")
            yield
        finally:
            for process in processes:
                process.kill()
                process.wait()

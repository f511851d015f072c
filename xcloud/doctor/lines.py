"""Checks of the lines to other clouds: another doctor must be running at the other end."""

from __future__ import annotations

import math
import platform
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

import xcloud
from xcloud.base.errors import LinkError
from xcloud.base.project import code_digests
from xcloud.base.terminal import say
from xcloud.base.units import human_bandwidth, human_bytes, human_duration, human_seconds
from xcloud.doctor.case import Case
from xcloud.doctor.finding import Finding, ok, red, warn
from xcloud.doctor.talk import Facts, LineFigures, follow, lead
from xcloud.job.compared import as_text, digest_of
from xcloud.line.hello import RUN_BYTES, Hello, StreamName
from xcloud.line.keys import LineKeys
from xcloud.line.pinned_tls import LineDown, PinnedTls, in_words
from xcloud.line.relayed import Meeting
from xcloud.line.ways import FAST_LINE, Dialler, Listener, Way, num_connections, stream_bytes
from xcloud.net.link_end import ignore

_LINE = "doctor"
# A run's own number is drawn when it starts; this one is of no run.
_RUN = b"xcloud doctor".ljust(RUN_BYTES, b"\0")  # of no training run
PAUSE_S = 0.3
CERTIFICATE = "certificate"
"""What is in the reason of a line that is down for a certificate."""
_CLOCKS_MAY_DIFFER_S = 2.0
_CERTIFICATES_ALLOW_S = 3600.0
_WMEM = Path("/proc/sys/net/ipv4/tcp_wmem")
# From this share of its limit on a connection counts as full: measurements stay below it.
_LIMIT_SHARE = 0.8


class LineTrial:
    """Tries the line to one peer, or to one of its machines, in a thread of its own.

    way: dials the peer, or waits for it to dial.
    machine: number of the machine that is dialled, in the cloud that listens.
    within_s: seconds to wait for the peer's doctor.
    turn: held for each try, so that lines to machines of one cloud are measured one by one.
    """

    def __init__(
        self, case: Case, peer: str, way: Way, machine: int, within_s: float, turn: threading.Lock
    ) -> None:
        self.peer = peer
        self.dials = case.dials(peer)
        self.machine = machine
        self.measured: LineFigures | None = None
        self.congestion_control: str | None = None
        self.reason = ""
        self._way = way
        # The same settings of release and file that ranks compare.
        self._facts = own_facts(case.digest)
        # Named from the end that dials, as both must know the stream by one name.
        ends = (case.cloud, peer) if self.dials else (peer, case.cloud)
        stream = StreamName(
            _LINE, sender_cloud=ends[0], sender=0, receiver_cloud=ends[1], receiver=machine
        )
        self._turn = turn
        self._wanted = Hello(stream, run=_RUN, attempt=1, connection=0, of=1)
        self._until_s = time.monotonic() + within_s
        # A daemon: a doctor that is interrupted does not wait for it.
        self.thread = threading.Thread(target=self._run, name=f"doctor {peer}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                # Lines to machines of one cloud share its link, so they are measured one by one.
                with self._turn:
                    return self.try_once()
            except LineDown as error:
                # Where certificates differ each further try only says that the line is down.
                if CERTIFICATE not in self.reason:  # a doctor that ends first closes its port
                    self.reason = str(error)
            except LinkError as error:  # the peer breaks the rules, and will again
                self.reason = str(error)
                # A peer that breaks the rules will do so again.
                return
            except OSError as error:
                self.reason = f"{self.peer}, while it was measured: {in_words(error)}"
                # It was met, so trying again would measure a line that breaks.
                return
            if time.monotonic() > self._until_s:
                return
            time.sleep(PAUSE_S)

    def try_once(self) -> None:
        """Connect, and measure the line. Raises LineDown while the peer's doctor is not there."""
        # A short try, over and over: the other doctor may start at any time.
        made = self._way.connect(self._wanted, is_bulk=True, timeout_s=PAUSE_S, wake=ignore)
        with made.tls as tls:
            # Asked while the connection is open.
            if hasattr(socket, "TCP_CONGESTION"):
                with suppress(OSError):
                    named = tls.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                    self.congestion_control = named.rstrip(b"\0").decode(errors="replace")
            measure = lead if self.dials else follow
            self.measured = measure(tls, self.peer, self._facts)


def check_lines(
    case: Case, keys: LineKeys, wait_s: float, listen: tuple[str, int] | None
) -> list[Finding]:
    """Talk to the doctor of each peer at the other end of the line, all at once, and measure.

    keys: the line keys. They hold only those peers whose certificates are valid.
    listen: host and port to listen at, if that is not the address that others dial.
    """
    findings = list[Finding]()
    tls = PinnedTls(keys=keys, label=_LINE)
    # Strangers may dial an open port as often as they like.
    refused = deque[str](maxlen=1)  # whoever dials, and however often
    # One port serves all peers that dial.
    listener: Listener | None = None
    trials = list[LineTrial]()
    try:
        # All at once, since both ends must be there at the same time.
        for peer in keys.peers:
            turn = threading.Lock()
            if case.dials(peer):
                for number, address in enumerate(case.dialled_at(keys, peer=peer, label=_LINE)):
                    dialler = Dialler(address=address, cloud=peer, tls=tls)
                    trials.append(
                        LineTrial(
                            case, peer, way=dialler, machine=number, within_s=wait_s, turn=turn
                        )
                    )
                continue
            at = listen or case.listens_at(keys, label=_LINE)
            try:
                # The peers that dial this machine share a listener.
                listener = listener or Listener(
                    address=at,
                    tls=tls,
                    cloud=case.cloud,
                    rank=case.machine.number,
                    run=_RUN,
                    attempt=1,
                    on_refused=refused.append,
                )
            except OSError as error:
                findings.append(cannot_listen(peer, at=at, error=error))
                continue
            trials.append(
                LineTrial(
                    case=case,
                    peer=peer,
                    way=listener,
                    machine=case.machine.number,
                    within_s=wait_s,
                    turn=turn,
                )
            )
        if trials:
            names = " and ".join(dict.fromkeys(trial.peer for trial in trials))
            say(f"trying the line to {names}, for up to {human_duration(wait_s)} …", error=True)
        for trial in trials:
            trial.thread.join()
            findings += trial_findings(case, trial=trial, refused=refused)
    finally:
        # Closed even if a trial failed: the run listens at the same port.
        if listener is not None:
            listener.close()
    return findings


def own_facts(digest: str) -> Facts:
    """Return what is compared with the other cloud. digest: of the experiment file."""
    # Digests of all files of the package, so that an edited one is found.
    code = digest_of(as_text(code_digests()).encode())
    return Facts(xcloud.__version__, code, torch.__version__, platform.python_version(), digest)


def trial_findings(case: Case, trial: LineTrial, refused: Sequence[str]) -> Iterator[Finding]:
    cloud = trial.peer
    addresses = case.layout.clouds[cloud if trial.dials else case.cloud].addresses
    relay = f"the relay {case.layout.relay}"
    # The address at which the machine listens, or the relay where nobody does.
    where = addresses[trial.machine if len(addresses) > 1 else 0] if addresses else relay
    peer = cloud  # as findings name it
    fact = f"{cloud} dials {where}"
    words = ""
    if not addresses:
        fact = f"both clouds dial {where}"
    elif trial.dials:
        fact = f"this cloud dials {where}"
        if len(addresses) > 1:
            # Several machines of a peer are several findings.
            peer = f"{cloud} at {where}"
            words = f" --nnodes {len(addresses)} --node-rank {trial.machine}"
    name = f"line to {peer}"
    if trial.measured is None:
        reason = trial.reason
        # Why a peer was refused here, which it cannot see itself.
        if refused:
            reason += f"; last refused here: {refused[-1]}"
        advice = (
            f"ask the owner of {cloud} to run `python -m xcloud doctor {case.file.name} --cloud "
            f"{cloud}{words}` at the same time, and see that {where} is open to the one who dials"
        )
        # The most frequent cause once a line exists.
        if CERTIFICATE in reason:
            advice = (
                "compare by phone what `python -m xcloud keys show FILE` says of both "
                "certificates, and put the right ones in place of the others"
            )
        yield red(name, fact=f"{fact}; no doctor of {cloud} was met: {reason}", advice=advice)
        return
    yield ok(name, fact=fact)
    found = trial.measured
    yield from _compared(peer, own=own_facts(case.digest), theirs=found.peer)
    yield ok(
        f"round trip to {peer}",
        fact=human_seconds(found.round_trip_s),
        round_trip_s=found.round_trip_s,
    )
    yield clock_finding(peer, found.clock_ahead_s)
    yield _bandwidth(peer, found=found)
    yield _connections(peer, found=found)
    yield _control(peer, used=trial.congestion_control)
    # A cloud of several machines shares what crosses.
    out, back = (
        num_bytes // max(1, len(addresses)) for num_bytes in bytes_per_step(case, peer=cloud)
    )
    yield step_finding(peer, out=out, back=back, found=found)


def _compared(peer: str, own: Facts, theirs: Facts) -> Iterator[Finding]:
    name = f"release of {peer}"
    advice = "install the same release of xcloud, unchanged, in both clouds"
    # Other releases may not understand each other's messages.
    if own.release != theirs.release:
        yield red(name, fact=f"xcloud {theirs.release} there, {own.release} here", advice=advice)
    elif own.code != theirs.code:
        yield red(name, fact=f"xcloud {own.release}, whose files differ from here", advice=advice)
    else:
        yield ok(name, fact=f"xcloud {own.release}, as here")
    versions = f"torch {theirs.torch} and Python {theirs.python} there"
    if (own.torch, own.python) == (theirs.torch, theirs.python):
        yield ok(f"packages of {peer}", fact=f"{versions}, as here")
    else:
        yield warn(
            f"packages of {peer}",
            fact=f"{versions}, torch {own.torch} and Python {own.python} here",
            advice="install the same versions in both clouds if results are to repeat bit for bit",
        )
    name = f"file of {peer}"
    if own.file == theirs.file:
        yield ok(name, fact="the same as here")
    else:
        yield red(
            name,
            fact=f"SHA-256 {theirs.file[:16]}… there, {own.file[:16]}… here",
            advice="copy one experiment file to both clouds, and approve it again in each",
        )


def clock_finding(peer: str, ahead_s: float) -> Finding:
    name = f"clock of {peer}"
    fact = f"{human_seconds(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} this one"
    advice = "set both clocks by NTP (timedatectl set-ntp true)"
    # A certificate may not be valid yet by a clock that is so far off.
    if abs(ahead_s) > _CERTIFICATES_ALLOW_S:
        return red(name, fact=fact, advice=advice, clock_ahead_s=ahead_s)
    if abs(ahead_s) > _CLOCKS_MAY_DIFFER_S:
        return warn(name, fact=fact, advice=advice, clock_ahead_s=ahead_s)
    return ok(name, fact=fact, clock_ahead_s=ahead_s)


def _bandwidth(peer: str, found: LineFigures) -> Finding:
    sent = human_bandwidth(8 * found.sent_bytes_per_s)
    received = human_bandwidth(8 * found.received_bytes_per_s)
    return ok(
        f"bandwidth to {peer}",
        fact=f"one connection sends {sent} and receives {received}",
        sent_bytes_per_s=found.sent_bytes_per_s,
        received_bytes_per_s=found.received_bytes_per_s,
    )


def _connections(peer: str, found: LineFigures) -> Finding:
    name = f"connections to {peer}"
    opens = num_connections(found.round_trip_s)
    limit_bytes = _max_send_buffer()
    if limit_bytes is None:
        return ok(name, fact=f"the run opens {opens} a direction", num_connections=opens)
    # A connection carries at most a buffer in each round trip.
    one_bytes_per_s = stream_bytes(limit_bytes) / found.round_trip_s
    fact = (
        f"each carries at most {human_bandwidth(8 * one_bytes_per_s)} "
        f"({human_bytes(limit_bytes)} of tcp_wmem over the round trip); the run opens {opens} a "
        "direction"
    )
    figures = {"one_bytes_per_s": one_bytes_per_s, "num_connections": opens}
    needed = math.ceil(FAST_LINE / one_bytes_per_s)
    # As many as the run opens suffice for a line of 1 Gbit/s.
    if needed <= opens:
        return ok(name, fact=fact, **figures)
    # The buffer grows in proportion to what is missing.
    wanted = round(limit_bytes * needed / opens)
    return warn(
        name,
        fact=f"{fact}, and {needed} would fill 1 Gbit/s",
        advice=f'if the line is that fast, sysctl -w net.ipv4.tcp_wmem="4096 16384 {wanted}"',
        **figures,
    )


def _control(peer: str, used: str | None) -> Finding:
    name = f"congestion control to {peer}"
    if used is None:
        return ok(name, fact="this system does not say")
    # Others take a lost packet for a full line, and slow down.
    if used == "bbr":
        return ok(name, fact="bbr")
    return warn(
        name,
        fact=f"{used}, as this kernel has no bbr loaded or allowed",
        advice="modprobe tcp_bbr, which keeps its rate where packets are lost",
    )


def step_finding(peer: str, out: int, back: int, found: LineFigures) -> Finding:
    """Say how long the line is busy in a step, from what the settings send at most.

    out, back: bytes of a step, each way.
    """
    name = f"step over the line to {peer}"
    if not out + back:
        return ok(name, fact="the settings do not tell how much crosses in a step")
    # Up and down one after the other, as if nothing overlapped.
    busy_s = out / found.sent_bytes_per_s + back / found.received_bytes_per_s
    fact = (
        f"at most {human_bytes(out)} out and {human_bytes(back)} back: {human_seconds(busy_s)} of "
        "each step on one connection, beside round trips"
    )
    limit_bytes = _max_send_buffer()
    opens = num_connections(found.round_trip_s)
    if limit_bytes is not None and opens > 1:
        # Only if a connection was full in the measurement do more of them help.
        filled = _LIMIT_SHARE * stream_bytes(limit_bytes) / found.round_trip_s
        if min(found.sent_bytes_per_s, found.received_bytes_per_s) > filled:
            fact += f"; on {opens} of them down to {human_seconds(busy_s / opens)}"
    return ok(name, fact=fact, out_bytes=out, back_bytes=back, busy_s=busy_s)


def bytes_per_step(case: Case, peer: str) -> tuple[int, int]:
    """Return the most bytes of content that a step sends to a peer, and gets from it, as far as
    the settings tell."""
    out = 0
    back = 0
    # Settings say the most that a message takes.
    for message in case.settings.job.leaving():
        num_bytes = message.num_per_step * (message.max_bytes or 0)
        if (message.sender, message.to) == (case.cloud, peer):
            out += num_bytes
        elif (message.sender, message.to) == (peer, case.cloud):
            back += num_bytes
    return out, back


def cannot_listen(peer: str, at: tuple[str, int] | Meeting, error: OSError) -> Finding:
    """Return why this machine cannot listen where the layout says, and what to do."""
    assert not isinstance(at, Meeting), "who meets at a relay opens no port"
    host, port = at
    # Python says the address again behind "(while".
    reason = (error.strerror or str(error)).partition(" (while")[0]
    return red(
        f"line to {peer}",
        fact=f"this machine cannot listen at {host}:{port}: {reason}",
        advice=f"end what uses the port, or, where {host} is not this machine's own address, give "
        f"--listen 0.0.0.0:{port}",
    )


def _max_send_buffer() -> int | None:
    """Return the largest send buffer that Linux gives a connection by itself, in bytes."""
    with suppress(OSError, ValueError):
        # The third number is the most that the kernel takes by itself.
        return int(_WMEM.read_text().split()[2])
    return None

"""The lines of a rank to other owners: where it listens, how it reaches each, how it leaves."""

from __future__ import annotations

import errno
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from xcloud.base.errors import ConfigError, LinkError
from xcloud.line import transport
from xcloud.line.relayed import Meeting
from xcloud.line.transport import SealedLines, SealedPlace

RUN = bytes(16)


class Heard:
    """A stand-in for a listener. told: clouds that have heard of a restart."""

    def __init__(self, address: Any, **given: Any) -> None:
        self.address = address
        self.given = given
        self.told: set[str] = set()
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Dials(SimpleNamespace):
    """A stand-in for a way that dials."""


def place(**changed: Any) -> SealedPlace:
    """Rank 1 of cloud b; a has an address, b and c have none, and c listens for nobody."""
    clouds = "abc"
    usual: dict[str, Any] = {
        "rank": 1,
        "num_ranks": 3,
        "run": RUN,
        "attempt": 7,
        "cloud_of": lambda rank: clouds[rank],
        "address_of": lambda rank: ("h", 7000) if rank == 0 else None,
        "listener_of": min,
        "listens_at": None,
        "first_within_s": 9.0,
        "reconnect_s": 3.0,
    }
    return SealedPlace(**{**usual, **changed})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes in sleep alone."""
    now_s = [0.0]
    passes = lambda seconds: now_s.append(now_s.pop() + seconds)  # noqa: E731
    monkeypatch.setattr(
        transport, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=passes)
    )
    return now_s


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(transport, "PinnedTls", lambda keys, label: label)
    monkeypatch.setattr(
        transport, "rooms_of", lambda keys, cloud, label: (f"room of {cloud} {label:.4}",)
    )
    monkeypatch.setattr(transport, "Listener", Heard)
    monkeypatch.setattr(transport, "Dialler", Dials)
    return SimpleNamespace(peers={"a": [], "c": []})


def test_a_rank_listens_for_clouds_that_dial_it_at_its_address_or_at_the_relay(keys: Any) -> None:
    def at(**changed: Any) -> Any:
        listener = SealedLines(place(**changed), keys, say=print).listener
        return listener and listener.address  # type: ignore[attr-defined]

    assert at(listens_at=("i", 8000)) == ("i", 8000)
    assert at() is None, "it has no address, and there is no relay"
    label = place().label_of(1)
    relayed = Meeting(("r", 9), rooms=(f"room of c {label:.4}",))
    assert at(relay=("r", 9)) == relayed
    assert at(relay=("r", 9), listens_at=("i", 8000)) == ("i", 8000)
    assert at(listener_of=max, cloud_of=lambda rank: "abd"[rank], relay=("r", 9)) == Meeting(
        ("r", 9), rooms=(f"room of a {label:.4}",)
    )
    assert at(listener_of=lambda *of: "x", listens_at=("i", 8000)) is None, "nobody dials it"
    found: Any = SealedLines(place(listens_at=("i", 8000)), keys, say=print).listener
    given = {key: found.given[key] for key in ("cloud", "rank", "run", "attempt", "tls")}
    assert given == {"cloud": "b", "rank": 1, "run": RUN, "attempt": 7, "tls": label}


@pytest.mark.parametrize(
    ("host", "errors", "tried", "waited_s"),
    [
        ("i", [OSError(errno.EADDRNOTAVAIL, "x")], ["i", ""], 0.0),
        ("i", [socket.gaierror(-2, "x")], ["i", ""], 0.0),
        ("i", [OSError(errno.EADDRINUSE, "x")] * 3, ["i"] * 4, 0.15),
        ("i", [OSError(errno.EADDRINUSE, "taken")] * 99, ["i"] * 81, None),
        ("", [OSError(errno.EADDRNOTAVAIL, "not here")], [""], None),
        ("i", [OSError(errno.EACCES, "not allowed")], ["i"], None),
    ],
)
def test_a_port_that_is_taken_for_a_moment_or_an_address_of_others_ends_no_rank(
    host: str,
    errors: list[OSError],
    tried: list[str],
    waited_s: float | None,
    keys: Any,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    left = [*errors]

    def listen(address: tuple[str, int], **given: Any) -> Heard:
        asked.append(address[0])
        if left:
            raise left.pop(0)
        return Heard(address)

    monkeypatch.setattr(transport, "Listener", listen)
    if waited_s is None:
        with pytest.raises(
            ConfigError, match=r"rank 1 of cloud b cannot listen at port 8000"
        ) as e:
            SealedLines(place(listens_at=(host, 8000)), keys, say=print)
        assert str(e.value).endswith(f"(cluster.clouds.b.address): {errors[-1].strerror}")
    else:
        SealedLines(place(listens_at=(host, 8000)), keys, say=print)
        assert clock[0] == pytest.approx(waited_s)
    assert asked[:81] == tried


def test_each_peer_is_reached_by_the_end_that_listens_or_at_the_relay(keys: Any) -> None:
    lines = SealedLines(place(listens_at=("i", 8000)), keys, say=print)
    assert lines.way_to(2) is lines.listener
    dialled: Any = lines.way_to(0)
    label = place().label_of(0)
    assert (dialled.address, dialled.cloud, dialled.tls) == (("h", 7000), "a", label)
    assert dialled.attempts is lines.attempts and lines.way_to(0) is dialled
    relayed = place(listener_of=lambda *of: "c", address_of=lambda rank: None, relay=("r", 9))
    dialled = SealedLines(relayed, keys, say=print).way_to(2)
    assert dialled.address == Meeting(("r", 9), rooms=(f"room of c {place().label_of(2):.4}",))
    del keys.peers["a"]
    with pytest.raises(ConfigError, match=r"no certificate of it: ask its owner for a\.pem"):
        SealedLines(place(), keys, say=print).way_to(0)


@pytest.mark.parametrize(("hears_after", "waited_s"), [(3, 0.06), (None, 2.0)])
def test_a_restart_is_told_to_who_listens_and_kept_a_moment_for_who_dials(
    hears_after: int | None,
    waited_s: float,
    keys: Any,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    thread = lambda target, args, daemon: SimpleNamespace(  # noqa: E731
        start=lambda: started.append((target, args, daemon))
    )
    monkeypatch.setattr(transport, "threading", SimpleNamespace(Thread=thread))
    lines = SealedLines(place(listens_at=("i", 8000)), keys, say=print)
    listener: Any = lines.listener

    def passes(seconds: float) -> None:
        clock.append(clock.pop() + seconds)
        if hears_after and clock[0] > 0.02 * hears_after - 0.01:
            listener.told.add("c")

    monkeypatch.setattr(transport.time, "sleep", passes)
    lines.tell_of_restart([0, 2])
    assert clock[0] == pytest.approx(waited_s, abs=0.03) and listener.is_closed
    ((target, (way, notice), daemon),) = started
    assert target is transport.dial_once and daemon and way is lines.way_to(0)
    assert (notice.stream.line, notice.stream.receiver, notice.attempt) == ("restart", 0, 7)
    dials = SealedLines(place(), keys, say=print)
    dials.tell_of_restart([0])
    assert len(started) == 2 and clock[0] == pytest.approx(waited_s, abs=0.03)


def test_who_dials_for_a_restart_alone_takes_no_for_an_answer() -> None:
    asked: list[Any] = []

    class Refuses:
        def connect(self, hello: Any, **given: Any) -> None:
            asked.append((hello, given))
            raise LinkError("not awaited")

    transport.dial_once(Refuses(), "hello")  # type: ignore[arg-type]
    ((hello, given),) = asked
    assert hello == "hello" and not given["is_bulk"] and given["timeout_s"] == 0.0


def test_a_rank_that_ends_early_waits_half_a_second_for_its_ends_to_say_so(
    keys: Any, clock: list[float]
) -> None:
    lines = SealedLines(place(), keys, say=print)
    heard: list[int] = []
    for number in range(2):
        over = SimpleNamespace(is_set=lambda: clock[0] > 0.05)
        end: Any = SimpleNamespace(abandon=lambda number=number: heard.append(number), over=over)
        lines.outs.append(end)
    lines.abandon()
    assert heard == [0, 1] and clock[0] == pytest.approx(0.06)
    end.over.is_set = lambda: False
    lines.abandon()
    assert clock[0] == pytest.approx(0.56, abs=0.03)


def test_words_are_closed_first_and_senders_may_ask_for_their_last_acknowledgement(
    keys: Any, clock: list[float]
) -> None:
    lines = SealedLines(place(), keys, say=print)
    done: list[Any] = []
    words: Any = SimpleNamespace(close=lambda: done.append("words"))
    incoming: Any = SimpleNamespace(
        connections=SimpleNamespace(join=lambda s: (done.append(s), clock.append(clock.pop() + 4)))
    )
    lines.words.append(words)
    lines.ins += [incoming] * 3
    lines.close()
    most = transport.LINGER_S
    assert done == ["words", most, max(0.0, most - 4), max(0.0, most - 8)]

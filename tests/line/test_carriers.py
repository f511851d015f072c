"""One battery over every carrier (carriers.py, whose docstring says how to add one): what a link
must do when messages are lost, repeated, slow or not there, whatever carries them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.carriers import CARRIERS, ENDS, MEETING_S, Carrier, begin_both, key, message, opened
from tests.runs import wait_for
from xcloud.base.errors import LinkError, LinkTimeout
from xcloud.net import gloo_link
from xcloud.net.frame import Kind
from xcloud.net.link_profile import LinkWindow

pytestmark = pytest.mark.slow

OVERDUE_S = 1.0


def over_carriers(case: Callable[..., None]) -> Any:
    """Run a case over every carrier that can have its fault."""
    able = [
        pytest.param(carrier, marks=carrier.marks, id=carrier.name)
        for carrier in CARRIERS
        if case.__name__ not in carrier.cannot
    ]
    return pytest.mark.parametrize("carrier", able)(case)


def sending(link: Carrier, *sizes: int, first: int = 0) -> threading.Thread:
    """Send a message of each size, in a thread."""
    out = link.out
    assert out is not None

    def work() -> None:
        with suppress(LinkError):  # told where the case looks for it
            for number, size in enumerate(sizes, first):
                out.send(key(number), (message(size, number),))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def check(link: Carrier, *sizes: int, first: int = 0, overdue_s: float = 20.0) -> None:
    """Receive a message of each size, in order."""
    assert link.incoming is not None
    for number, size in enumerate(sizes, first):
        (found,) = link.incoming.recv(key(number), overdue_s)
        assert torch.equal(found, message(size, number))


def close(link: Carrier) -> None:
    assert link.out is not None and link.incoming is not None
    link.out.close(5.0)
    link.incoming.close(5.0)
    assert link.incoming.has_closed and not link.lost


@over_carriers
def test_messages_of_any_size_arrive_in_order(carrier: type[Carrier], tmp_path: Path) -> None:
    sizes = (0, 1, 3_000, 1 << 18, 5_000_000, 5, 5, 1_000_000)
    with opened(carrier, tmp_path) as link:
        begin_both(link)
        sending(link, *sizes)
        check(link, *sizes)
        close(link)
        assert link.out is not None and link.incoming is not None
        num_bytes = link.out.record.num_bytes[Kind.AVERAGING]
        assert num_bytes > sum(sizes)
        assert link.incoming.settings.record.arrived_bytes[Kind.AVERAGING] == num_bytes


@over_carriers
def test_what_was_not_confirmed_arrives_once(carrier: type[Carrier], tmp_path: Path) -> None:
    """More often than the window has messages: none stays in it for good."""
    window = LinkWindow(max_queued_bytes=2_000_000)
    with opened(carrier, tmp_path, window=window) as link:
        begin_both(link)
        sending(link, 10)
        check(link, 10)
        for number in range(1, 9, 2):
            with link.unconfirmed():
                sending(link, 700_000, first=number)
                check(link, 700_000, first=number)
            sending(link, 10, first=number + 1)
            check(link, 10, first=number + 1)
        more = (700_000,) * 6
        thread = sending(link, *more, first=9)
        check(link, *more, first=9)
        thread.join(10.0)
        close(link)


@over_carriers
def test_a_reader_that_is_slow_loses_nothing(carrier: type[Carrier], tmp_path: Path) -> None:
    sizes = (300_000,) * 12
    with opened(carrier, tmp_path, window=LinkWindow(max_queued_bytes=600_000)) as link:
        begin_both(link)
        thread = sending(link, *sizes)
        time.sleep(0.5)
        check(link, *sizes)
        thread.join(10.0)
        close(link)


@over_carriers
def test_a_message_that_moves_is_not_overdue(
    carrier: type[Carrier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it takes longer than overdue_after_s: at the receiver, and where the sender waits."""
    monkeypatch.setattr(gloo_link, "FRAGMENT_BYTES", 1 << 20)  # of 0.3 s at this rate
    rate = 4_000_000.0
    size = 5_500_000
    with opened(carrier, tmp_path, window=LinkWindow(max_queued_bytes=4 << 20)) as link:
        begin_both(link)
        sending(link, 10)
        check(link, 10)
        overdue_s = 1.1  # of a message of 1.4 s
        assert link.out is not None
        object.__setattr__(link.out.settings, "overdue_s", overdue_s)
        failed: list[LinkError] = []

        def send() -> None:
            assert link.out is not None
            try:
                for number in (1, 2):
                    link.out.send(key(number), (message(size, number),))
            except LinkError as error:
                failed.append(error)

        with link.slow(rate):
            started_s = time.monotonic()
            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            check(link, size, first=1, overdue_s=overdue_s)
            assert time.monotonic() - started_s > overdue_s
        check(link, size, first=2)
        thread.join(10.0)
        assert not failed
        close(link)


@over_carriers
def test_a_message_that_does_not_move_is_overdue(carrier: type[Carrier], tmp_path: Path) -> None:
    """However alive its sender is, and however well its greetings pass."""
    with opened(carrier, tmp_path) as link:
        begin_both(link)
        sending(link, 10)
        check(link, 10)
        with link.without_data():
            sending(link, 1_000_000, first=1)
            started_s = time.monotonic()
            with pytest.raises(LinkTimeout, match="no averaging of step 1"):
                check(link, 1_000_000, first=1, overdue_s=OVERDUE_S)
            assert time.monotonic() - started_s < 10 * OVERDUE_S


@over_carriers
def test_a_line_that_is_dead_one_way_for_a_while_loses_nothing(
    carrier: type[Carrier], tmp_path: Path
) -> None:
    sizes = (10, 300_000, 10)
    with opened(carrier, tmp_path) as link:
        begin_both(link)
        with link.half_dead():
            sending(link, *sizes)
            with pytest.raises(LinkTimeout):
                check(link, *sizes, overdue_s=0.5)
        check(link, *sizes)
        close(link)


@over_carriers
def test_a_disk_that_is_full_for_a_while_loses_nothing(
    carrier: type[Carrier], tmp_path: Path
) -> None:
    sizes = (10, 300_000, 10)
    with opened(carrier, tmp_path) as link:
        begin_both(link)
        with link.full():
            sending(link, *sizes)
            with pytest.raises(LinkTimeout):
                check(link, *sizes, overdue_s=0.5)
        check(link, *sizes)
        close(link)


@pytest.mark.parametrize("killed", ENDS)
@over_carriers
def test_a_rank_that_is_killed_is_missed(
    carrier: type[Carrier], killed: Any, tmp_path: Path
) -> None:
    with opened(carrier, tmp_path) as link:
        link.reconnect_s = 1.0
        begin_both(link)
        sending(link, 10)
        check(link, 10)
        link.kill(killed)
        assert link.out is not None and link.incoming is not None
        with pytest.raises(LinkError):
            if killed == "out":
                link.incoming.recv(key(1), MEETING_S)
            else:
                for number in range(1, 10_000):
                    link.out.send(key(number), (message(1_000),))
                    time.sleep(0.01)


@pytest.mark.parametrize("killed", ENDS)
@over_carriers
def test_a_rank_that_is_killed_while_it_joins_is_met_when_it_comes_again(
    carrier: type[Carrier], killed: Any, tmp_path: Path
) -> None:
    """Either the other rank meets the new one, or it is told, begins again itself, and they
    meet."""
    with opened(carrier, tmp_path) as link:
        begin_both(link)
        link.kill(killed)
        attempt = 1
        until_s = time.monotonic() + MEETING_S
        met = threading.Event()
        while not met.is_set():
            assert time.monotonic() < until_s, "they have not met"
            attempt += 1
            if attempt == 2:
                beginning = threading.Thread(
                    target=link.begin, args=(killed, attempt), daemon=True
                )
                beginning.start()
                beginning.join(2.0)
            else:  # a launcher that is told starts all ranks of its cloud again
                link.lost.clear()
                begin_both(link, attempt)

            def receive() -> None:
                with suppress(LinkError):
                    check(link, 10, first=0)
                    met.set()

            sending(link, 10)
            receiving = threading.Thread(target=receive, daemon=True)
            receiving.start()
            wait_for(lambda: met.is_set() or bool(link.lost), MEETING_S)
            receiving.join(1.0)


def test_what_a_carrier_cannot_have_is_a_case_of_this_battery() -> None:
    cases = {name for name in vars(sys.modules[__name__]) if name.startswith("test_")}
    for carrier in CARRIERS:
        assert {*carrier.cannot} <= cases, carrier.name
        assert all(carrier.cannot.values())

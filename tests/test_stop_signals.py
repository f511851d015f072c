"""Signals to the launcher while it writes the record of a run whose ranks have ended."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.toy import toy_config
from xcloud.base.errors import RunFailed
from xcloud.base.terminal import signals_to_stop
from xcloud.job.config import Settings
from xcloud.launch import local
from xcloud.launch.processes import RunStopped


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., dict[str, Any]]]:
    """A run without ranks that gets so many signals while its record is written."""

    class Record:
        def __init__(self, *_: object, **named: object) -> None: ...

        def start(self) -> None: ...

        def next_attempt(self) -> None: ...

        def finish(self, cause: str | None, is_stopped: bool) -> dict[str, Any]:
            for _ in range(num_signals):
                signal.raise_signal(signal.SIGTERM)
            (tmp_path / "written").touch()
            return {"cause": cause}

    num_signals = 0

    def one(
        signals: int, error: Exception | None = None, more_follows: bool = False
    ) -> dict[str, Any]:
        nonlocal num_signals
        num_signals = signals

        def train(*_: object, **named: object) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(local, "Monitor", Record)
        monkeypatch.setattr(local, "train", train)
        asked = Settings.of(toy_config("two_clouds"))
        return local.run(asked, tmp_path, more_follows=more_follows)

    def nobody_waits(number: int, frame: object) -> None:
        raise AssertionError("in a real process nothing would have been written")

    before = signal.signal(signal.SIGTERM, nobody_waits)
    yield one
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_lets_the_record_be_written_and_changes_nothing_else(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    assert run(signals=1) == {"cause": None}
    with pytest.raises(RunFailed, match="rank 1 is gone"):
        run(signals=1, error=RunFailed("rank 1 is gone"))
    assert (tmp_path / "written").exists()


def test_the_second_signal_ends_at_once(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        run(signals=2)
    assert raised.type is KeyboardInterrupt and not (tmp_path / "written").exists()


@pytest.mark.parametrize("error", [None, RunFailed("rank 1 is gone")])
def test_what_would_have_followed_does_not_begin(
    error: Exception | None, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(RunStopped, match="rank 1 is gone" if error else "The run finished"):
        run(signals=1, error=error, more_follows=True)
    assert (tmp_path / "written").exists()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_closes_ends_a_run_but_not_one_under_nohup(
    is_ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    asked: list[bool] = []
    try:
        signals = local.StopSignals(lambda: asked.append(True))
        with signals.handled():
            signal.raise_signal(signal.SIGHUP) if not is_ignored else None
            taken = signal.getsignal(signal.SIGHUP)
        assert asked == [True] * (not is_ignored)
        assert (taken is signal.SIG_IGN) == is_ignored
    finally:
        signal.signal(signal.SIGHUP, before)


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_every_command_that_waits_takes_every_signal_to_stop(number: signal.Signals) -> None:
    """Each of them asks the same function, so a signal that is added there is added everywhere."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert number in signals_to_stop()
    finally:
        signal.signal(number, before)

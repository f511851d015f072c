"""What a rank says: events in whole lines, what waits for the disk, what its state file has."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runs import wait_for
from xcloud.net.peer import Peer
from xcloud.record import reporter as reporters
from xcloud.record.reporter import EventFile, RankState, Reporter


def told(sent: list[bytes]) -> list[list[str]]:
    return [[json.loads(line)["event"] for line in chunk.splitlines()] for chunk in sent]


def test_events_go_together_about_once_a_second_or_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(reporters, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    sent: list[bytes] = []
    reporter = Reporter(3, "a", sent.append)
    reporter.event("one", x=1)
    now_s[0] += 1.0
    reporter.event("two")
    assert sent == []
    now_s[0] += 0.1
    reporter.event("three", x=1, y=2)
    assert told(sent) == [["one", "two", "three"]]
    now_s[0] += 0.5
    reporter.event("four")
    reporter.event("five", now=True)
    assert told(sent)[1:] == [["four", "five"]]
    reporter.flush()
    assert len(sent) == 2
    reporter.note("text")
    first = json.loads(sent[0].splitlines()[0])
    assert first.pop("t") > 1e9 and first == {"event": "one", "rank": 3, "cloud": "a", "x": 1}
    assert reporter.contents["three"] == {"event", "rank", "cloud", "t", "x", "y"}
    assert reporter.contents.keys() == {"one", "two", "three", "four", "five", "note"}


def test_no_more_goes_at_once_than_a_link_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    reporter = Reporter(0, "a", sent.append)
    reporter.event("long", text="x" * 200_000)
    for number in range(3):
        reporter.event(f"e{number}", text="x" * 50_000)
    reporter.flush()
    assert told(sent) == [["long"], ["e0", "e1"], ["e2"]]
    assert len(sent[1]) <= 1 << 17


def test_what_waits_for_a_slow_disk_is_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporters, "MAX_WAITING_BYTES", 100)
    lines = EventFile(tmp_path / "events.jsonl")
    lines.append(b"first\n")
    assert lines.flush(within_s=0.0)
    with lines._lock:  # the disk stands still
        lines.append_later(b"a" * 59 + b"\n")
        lines.append_later(b"b" * 39 + b"\n")
        lines.append_later(b'c\n{"event":"finish","rank":4}\n\n')
        assert not lines.flush(within_s=0.0)
    assert lines.flush(within_s=20.0)
    lines.append_later(b"d\n")
    lines.append(b"last\n")
    lines.close()
    lines.append_later(b"too late\n")
    written = (tmp_path / "events.jsonl").read_bytes().split()
    assert written == [b"first", b"a" * 59, b"b" * 39, b"d", b"last"]
    lost = json.loads((tmp_path / reporters.LOST_LINES_FILE).read_text())
    assert lost == {"lines": 2, "finished_ranks": [4]}
    EventFile(tmp_path / "events.jsonl").close()
    assert not (tmp_path / reporters.LOST_LINES_FILE).exists()  # of an earlier run


def test_a_line_that_an_earlier_attempt_tore_is_ended_first(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for start, found in (
        (b"whole\n", b"whole\nnext\n"),
        (b"torn", b"torn\nnext\n"),
        (b"", b"next\n"),
    ):
        path.write_bytes(start)
        lines = EventFile(path)
        lines.append(b"next\n")
        lines.close()
        assert path.read_bytes() == found


def test_the_state_of_a_rank_says_what_it_does_whom_it_hears_and_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporters, "WRITE_EVERY_S", 0.5)
    state = RankState(tmp_path, 2, torchrun=True, says=True)
    wait_for(lambda: [*tmp_path.rglob("*2*.json")] != [], 20)
    (file,) = tmp_path.rglob("*2*.json")
    try:
        heard: list[tuple[str, Any]] = []
        state.listener = lambda event, fields: heard.append((event, fields))
        never, lately = Peer(), Peer()
        lately.mark_alive(age_s=7.0)
        state.peers = {0: lately, 1: never}
        state.lines = lambda: ["line to b down for 4 s"]
        state.may_leave = True
        reporter = Reporter(2, "a", lambda data: None, state=state)
        reporter.event("phase", name="training")
        reporter.event("step", step=7)
        reporter.event("fed")
        with never.awaiting("activation"):
            # The rank's own thread writes the file, whole each time.
            wait_for(lambda: '"activation"' in file.read_text(), 20)
            facts = json.loads(file.read_text())
        assert [event for event, _ in heard] == ["phase", "step", "fed"]
        assert (facts["rank"], facts["torchrun"], facts["ended"]) == (2, True, False)
        assert (facts["phase"], facts["step"], facts["may_leave"]) == ("training", 7, True)
        assert facts["lines_down"] == ["line to b down for 4 s"]
        assert facts["silent_s"] == {"0": pytest.approx(7.0, abs=1.0)}
        (waits,) = facts["waits_for"]
        assert (waits["rank"], waits["message"]) == (1, "activation")
        assert 0 <= facts["written"] - waits["since"] < 5
        assert facts["step_at"] >= facts["phase_since"]
    finally:
        state.close("finished")
    facts = json.loads(file.read_text())
    assert (facts["phase"], facts["ended"]) == ("finished", True)
    said = capsys.readouterr().out.splitlines()
    assert said == [f"rank 2: {p}" for p in ("joining the others", "training", "finished")]

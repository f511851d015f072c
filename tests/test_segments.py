"""Finished segments of an event log: one stream of events, whatever happens between the writes."""

import gzip
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xcloud.record import files
from xcloud.record.events import EVENTS_FILE, EventReader
from xcloud.record.reporter import EventFile


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SEGMENT_BYTES", 200)


def note(number: int) -> bytes:
    return json.dumps({"event": "note", "number": number}).encode() + b"\n"


def numbers(reader: EventReader) -> list[int]:
    return [event["number"] for event in list(reader)]


def settle(events: EventFile) -> None:
    if events._finishing.is_alive():
        events._finishing.join(30)


def write(path: Path, span: range) -> None:
    """An attempt at a run that tells these numbers."""
    events = EventFile(path)
    for number in span:
        events.append(note(number))
        settle(events)
    events.close()


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_long_log_is_one_stream_for_who_follows_and_for_who_comes_late(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    events, reader, followed = EventFile(path), EventReader(path), []
    for number in range(30):
        events.append(note(number))
        settle(events)
        if number % 3 == 0:
            followed += numbers(reader)
    events.close()
    write(path, range(30, 40))  # a further attempt

    assert followed + numbers(reader) == list(range(40)) == numbers(EventReader(path))
    finished = sorted(names(tmp_path) - {EVENTS_FILE})
    assert finished == [f"events.{n:04}.jsonl.gz" for n in range(1, len(finished) + 1)]
    assert len(finished) >= 4 and path.stat().st_size < 200


def test_events_that_are_read_one_by_one_are_not_lost_between(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    write(path, range(20))
    reader = EventReader(path)
    first = [event["number"] for event in itertools.islice(reader, 7)]
    assert first + numbers(reader) == list(range(20))


@pytest.mark.slow
@pytest.mark.nightly
def test_a_reader_keeps_up_with_a_writer_that_does_not_wait_for_it(tmp_path: Path) -> None:
    path, found, is_done = tmp_path / EVENTS_FILE, [], threading.Event()

    def follow() -> None:
        reader = EventReader(path)
        while not is_done.is_set():
            found.extend(numbers(reader))
        found.extend(numbers(reader))

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        events = EventFile(path)
        for number in range(2000):
            events.append(note(number))
        events.close()
    finally:
        is_done.set()
        thread.join()
    assert found == list(range(2000))
    assert len(names(tmp_path)) >= 2


def killed_before_a_new_log(path: Path) -> None:
    path.rename(path.with_name("events.0001.jsonl"))


def killed_while_compressing(path: Path) -> None:
    killed_before_a_new_log(path)
    path.touch()
    whole = gzip.compress(path.with_name("events.0001.jsonl").read_bytes())
    path.with_name(".events.0001.jsonl.gz.0").write_bytes(whole[:20])


def killed_before_the_plain_one_was_deleted(path: Path) -> None:
    killed_before_a_new_log(path)
    path.touch()
    plain = path.with_name("events.0001.jsonl")
    plain.with_name("events.0001.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))


@pytest.mark.parametrize(
    "kill",
    [killed_before_a_new_log, killed_while_compressing, killed_before_the_plain_one_was_deleted],
)
def test_a_process_that_dies_at_any_moment_leaves_each_event_once(
    kill: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / EVENTS_FILE
    path.write_bytes(b"".join(map(note, range(5))))
    reader = EventReader(path)
    assert numbers(reader) == list(range(5))
    kill(path)

    assert files.has_events(tmp_path)
    assert numbers(reader) == [] and numbers(EventReader(path)) == list(range(5))
    write(path, range(5, 20))
    assert numbers(reader) == list(range(5, 20))
    assert numbers(EventReader(path)) == list(range(20))
    assert "events.0001.jsonl" not in names(tmp_path)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_a_torn_line_is_no_end_of_a_segment(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    path.write_bytes(note(0) + b'{"event": "note", "te' + b"x" * 300)
    write(path, range(1, 9))
    assert numbers(EventReader(path, warn=False)) == list(range(9))


@pytest.mark.parametrize("broken", ["fsync", "rename"])
def test_a_disk_that_cannot_take_a_segment_costs_no_line(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / EVENTS_FILE
    with monkeypatch.context() as patch:
        if broken == "fsync":
            real = os.fsync  # the first is of the log, the second of the compressed segment
            answers = iter([real, refuse] * 50)
            patch.setattr(os, "fsync", lambda number: next(answers)(number))
        else:
            patch.setattr(Path, "rename", refuse)
        write(path, range(10))
        assert numbers(EventReader(path)) == list(range(10))
        assert not [name for name in names(tmp_path) if name.startswith(".") or "gz" in name]
    write(path, range(10, 30))
    assert numbers(EventReader(path)) == list(range(30))
    assert not [name for name in names(tmp_path) if name.endswith("1.jsonl")]


def test_a_damaged_segment_is_named_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / EVENTS_FILE
    write(path, range(30))
    whole = numbers(EventReader(path))
    second = tmp_path / "events.0002.jsonl.gz"
    second.write_bytes(second.read_bytes()[:-30])

    with caplog.at_level(logging.WARNING):
        found = numbers(EventReader(path))
    assert "segment 2" in caplog.text and len(caplog.records) == 1
    assert set(found) < set(whole) and {0, 29} <= set(found)

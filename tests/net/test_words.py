"""What ranks tell each other before they have links: in nobody else's name, bounded, and never by
the store of their rendezvous."""

import json
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.pipelines import in_threads
from tests.runs import wait_for
from xcloud.base.errors import FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.job.job import Job
from xcloud.net.transport import Rendezvous, rendezvous_store
from xcloud.net.words import (
    MAX_NAME_BYTES,
    MAX_TEXT_BYTES,
    MAX_WORDS,
    ControlMessage,
    JoinedLine,
    WordKind,
    WordsOfFirst,
    decode,
    encode,
    line_of,
)
from xcloud.rank.agreement import agree


def rendezvous(folder: Path, rank: int, within_s: float = 60.0, beginning: int = 0) -> Rendezvous:
    store = rendezvous_store(folder)
    return Rendezvous(rank, 3, store, within_s, is_open=beginning > 0, beginning=beginning or 1)


def test_every_rank_hears_rank_0_and_rank_0_hears_every_rank(tmp_path: Path) -> None:
    def first() -> list[str]:
        own = rendezvous(tmp_path, 0)
        heard = [own.read("table", rank) for rank in (2, 1)]
        own.write("verdict", "go " + " ".join(heard))
        return heard

    def other(rank: int) -> list[str]:
        own = rendezvous(tmp_path, rank)
        own.write("table", f"of {rank} ü")
        return [own.read("verdict", 0), own.read("table", rank)]

    found = in_threads([first, lambda: other(1), lambda: other(2)])
    verdict = "go of 2 ü of 1 ü"
    assert found == [["of 2 ü", "of 1 ü"], [verdict, "of 1 ü"], [verdict, "of 2 ü"]]


def test_rank_0_waits_until_those_who_joined_have_heard_and_are_gone(tmp_path: Path) -> None:
    """Rank 2 never comes, and is not waited for."""
    heard = list[str]()

    def first() -> list[str]:
        own = rendezvous(tmp_path, 0)
        own.read("table", 1)
        own.write("verdict", "stop")
        own.words.wait_for_leaving()
        return [*heard]

    def other() -> None:
        own = rendezvous(tmp_path, 1)
        own.write("table", "")
        time.sleep(0.5)
        heard.append(own.read("verdict", 0))

    assert in_threads([first, other])[0] == ["stop"]


@pytest.mark.parametrize("name", ["verdict", "word 0 verdict", "data", "run number", "table"])
def test_a_text_in_the_store_is_nobody_s_word(name: str, tmp_path: Path) -> None:
    """Whoever reaches the store can write any key before the rank does whose word it would be."""
    store = rendezvous_store(tmp_path)
    for key in (name, f"{name}.0", f"{name}.1"):
        store.set(key, json.dumps({"kind": "go", "from_step": 100, "attempt": 7}))

    def first() -> list[str]:
        own = rendezvous(tmp_path, 0)
        own.write(name, "mine")
        return [own.read(name, rank) for rank in (1, 2)]

    def other(rank: int) -> str:
        own = rendezvous(tmp_path, rank)
        own.write(name, f"of {rank}")
        return own.read(name, 0)

    found = in_threads([first, lambda: other(1), lambda: other(2)])
    assert found == [["of 1", "of 2"], "mine", "mine"]


@pytest.mark.parametrize("kind", ["stop", "go"])
def test_a_verdict_that_another_writes_into_the_store_is_not_followed(
    kind: str, tmp_path: Path
) -> None:
    told = {"kind": kind, "refused": [], "text": "cancelled", "from_step": 100, "attempt": 7}
    rendezvous_store(tmp_path).set("verdict", json.dumps(told))
    job = cast(Job, SimpleNamespace(roster=SimpleNamespace(saving=())))
    with pytest.raises(LinkTimeout, match="rank 0 has not come"):
        agree(job, rendezvous(tmp_path, 1, within_s=0.2), {"setting": {}}, {}, newest_common)


def test_a_rank_that_may_come_late_hears_what_rank_0_said_before_it_came(tmp_path: Path) -> None:
    first = rendezvous(tmp_path, 0, beginning=1)
    first.write("verdict", "go")
    for beginning in (1, 2):
        rendezvous_store(tmp_path).add("beginnings.2", 1)
        late = rendezvous(tmp_path, 2, beginning=beginning)
        assert late.read("verdict", 0) == "go"
        late.write("data", f"of beginning {beginning}")
        wait_for(lambda n=beginning: first.read("data", 2) == f"of beginning {n}", 20)


@pytest.mark.parametrize("trouble", ["twice", "too many", "answers", "garbage", "gone"])
def test_a_rank_that_breaks_the_rules_is_named_and_the_others_are_heard(
    trouble: str, tmp_path: Path
) -> None:
    first, good = rendezvous(tmp_path, 0), rendezvous(tmp_path, 2)

    def misbehave() -> None:
        line = JoinedLine(
            line_of(rendezvous_store(tmp_path), 1, 1, is_first=False, within_s=60.0), 0
        )
        if trouble == "garbage":
            line._pair.isend(torch.full((70,), 0xFF, dtype=torch.uint8), 0).wait()
        messages = {
            "twice": [ControlMessage(WordKind.TELL, "a", "1")] * 2,
            "too many": [ControlMessage(WordKind.TELL, f"{n}") for n in range(MAX_WORDS + 1)],
            "answers": [ControlMessage(WordKind.ANSWER, "verdict", "stop")],
        }
        for message in messages.get(trouble, ()):
            line.send(message)
        if trouble != "gone":
            done.wait(60)

    def hear() -> str:
        with pytest.raises(LinkClosed if trouble == "gone" else FrameError, match="rank 1"):
            first.read("what it never tells", 1)
        done.set()
        return first.read("table", 2)

    done = threading.Event()
    good_word = lambda: good.write("table", "good")  # noqa: E731
    assert in_threads([misbehave, hear, good_word])[1] == "good"


def test_a_word_comes_back_as_it_was_and_is_bounded() -> None:
    for text in ("", "x" * MAX_TEXT_BYTES, "é\n\0"):
        message = ControlMessage(WordKind.TELL, "n" * MAX_NAME_BYTES, text)
        longer = torch.cat([encode(message), torch.ones(9, dtype=torch.uint8)])
        assert decode(encode(message), "rank 1") == decode(longer, "rank 1") == message
    with pytest.raises(ValueError, match="262,145 bytes"):
        encode(ControlMessage(WordKind.TELL, "n", "x" * (MAX_TEXT_BYTES + 1)))


def _bytes(*parts: Any) -> torch.Tensor:
    data = b"".join(
        part if isinstance(part, bytes) else struct.pack("<BBI", *part) for part in parts
    )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    "buffer",
    [
        _bytes((0, 1, 0), b"a"), _bytes((4, 1, 0), b"a"), _bytes((1, 0, 1), b"a"),
        _bytes((1, MAX_NAME_BYTES + 1, 0), b"a" * 99), _bytes((1, 1, 1 << 31), b"ab"),
        _bytes((1, 2, 0), b"\xff\xff"), _bytes((1, 1, 1), b"a\xff"), _bytes((1, 1, 0), b"\x1b"),
        _bytes(b"\1\1"),
    ],
)  # fmt: skip
def test_what_is_no_word_is_refused_by_the_sender_s_name(buffer: torch.Tensor) -> None:
    with pytest.raises(LinkError, match="rank 7"):
        decode(buffer, "rank 7")


def test_only_rank_0_decides_so_nobody_asks_for_another_s_word(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        rendezvous(tmp_path, 1, within_s=0.1).read("table", 2)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_rank_whose_line_breaks_while_it_is_joined_is_gone_unless_it_may_come_again(
    is_open: bool,
) -> None:
    def join(rank: int, beginning: int, within_s: float) -> Any:
        raise RuntimeError("no such peer")

    words = WordsOfFirst(cast(Any, None), 1, join, within_s=0.0, is_open=False)
    words._is_open = is_open
    thread = words.start_joining(1, beginning=1, within_s=5.0)
    thread.join(10)
    assert thread.daemon and not thread.is_alive()
    if is_open:
        assert words.ended == {}
        with pytest.raises(LinkTimeout, match="rank 1 has not come in 0 s"):
            words.receive_text("table", 1)
    else:
        with pytest.raises(LinkClosed, match="rank 1 is gone: no such peer"):
            words.receive_text("table", 1)

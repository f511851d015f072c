"""Links through a mailbox: a whole job, a restart, a full mailbox, and all that others may do to
what lies there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from tests.combinations import experiment, interrupted, losses, run, state
from tests.owners import CLOUDS, TwoOwners, keys_of
from tests.runs import start, wait_for
from tests.toy import toy_config
from xcloud.base.errors import ConfigError, FrameError, LinkClosed, LinkError, LinkTimeout
from xcloud.job.config import Settings
from xcloud.launch.join import main
from xcloud.line import mailbox, mailbox_lines
from xcloud.line.mailbox import (
    Arrivals,
    LinkBox,
    MailboxInLink,
    MailboxOutLink,
    ObjectStore,
    pause_after,
    take,
)
from xcloud.line.mailbox_lines import MailboxLines, NoteKind
from xcloud.line.transport import SealedPlace
from xcloud.net.frame import Kind, MessageKey
from xcloud.net.link_end import InSettings, OutSettings, ReceivingEnd, SendingEnd
from xcloud.net.link_profile import LinkWindow
from xcloud.net.transport import CPU, Collectives, Transport
from xcloud.record.files import CheckpointSteps

BOX_CLOUDS = ("cloud_a", "cloud_b", "cloud_c")
RUN = bytes(range(16))
WITHIN_S = 20.0
_MAKING_KEYS = threading.Lock()  # they are made once, by whoever comes first


LOST: list[LinkError] = []


def lines(
    url: str | Path,
    rank: int,
    num_ranks: int = 2,
    run: bytes = RUN,
    within_s: float | None = None,
) -> MailboxLines:
    with _MAKING_KEYS:
        me = BOX_CLOUDS[rank]
        keys = keys_of(me, [cloud for cloud in BOX_CLOUDS if cloud != me])
    place = SealedPlace(
        rank,
        num_ranks,
        run,
        attempt=1,
        cloud_of=BOX_CLOUDS.__getitem__,
        address_of=lambda rank: None,
        listener_of=lambda here, there: here,
        listens_at=None,
        first_within_s=within_s or WITHIN_S,
        reconnect_s=WITHIN_S,
    )
    return MailboxLines(str(url), place, keys, on_lost=LOST.append)


class MailboxTransport(Transport):
    """A transport whose links all go through a mailbox."""

    def __init__(self, in_memory: Transport, url: str | Path) -> None:
        super().__init__(in_memory.rendezvous)
        self.computing = in_memory.computing
        self.lines = lines(url, self.rank, in_memory.rendezvous.num_ranks)

    def out(self, line: str, peer: int, settings: OutSettings) -> SendingEnd:
        return self.lines.out(line, peer, settings)

    def incoming(self, line: str, peer: int, settings: InSettings) -> ReceivingEnd:
        return self.lines.incoming(line, peer, settings)

    def group(self, ranks: Sequence[int], device: torch.device = CPU) -> Collectives | None:
        return None


def both(url: str | Path) -> list[MailboxLines]:
    """The lines of cloud_a and cloud_b, which have met."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(partial(lines, url), range(2)))


class Ends(NamedTuple):
    """Both ends of a link from cloud_a to cloud_b."""

    out: MailboxOutLink
    incoming: MailboxInLink
    of: list[MailboxLines]


@contextmanager
def linked(
    url: str | Path, capacity_bytes: int = 1 << 20, window: LinkWindow | None = None
) -> Iterator[Ends]:
    settings = (capacity_bytes, window or LinkWindow())
    of = both(url)
    out = of[0].out("control", 1, OutSettings("receiver", *settings))
    incoming = of[1].incoming("control", 0, InSettings("sender", *settings))
    try:
        yield Ends(out, incoming, of)
    finally:
        for one in of:
            one.stop()


def files_in(url: Path) -> list[Path]:
    """The objects of frames that lie in a mailbox."""
    return sorted(file for file in url.rglob("*") if file.is_file() and "note-" not in file.name)


def key(number: int) -> MessageKey:
    return MessageKey(Kind.AVERAGING, 1, micro_batch=number)


def send(out: MailboxOutLink, *values: float) -> None:
    for number, value in enumerate(values):
        out.send(key(number), (torch.full((300,), value),))


def taken(ends: Any, number: int) -> float:
    (found,) = ends.incoming.recv(key(number), 20.0)
    assert found.shape == (300,)
    return float(found[0])


def test_local_updates_over_a_mailbox_learn_the_same_and_leave_nothing_there(
    tmp_path: Path, monkeypatch: Any
) -> None:
    job = experiment({"strategy": "local_updates", "compression": "int4"})
    (url := tmp_path / "box").mkdir()
    run(job, tmp_path / "mail", monkeypatch, partial(MailboxTransport, url=url))
    run(job, tmp_path / "memory", monkeypatch)
    assert losses(tmp_path / "mail") == losses(tmp_path / "memory")
    last, same = (state(tmp_path / name, 6) for name in ("mail", "memory"))
    assert last and all(torch.equal(last[name], same[name]) for name in same)
    assert not files_in(url)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fedavg", "streaming", "local_updates"])
def test_a_run_that_begins_again_in_the_middle_ends_as_one_that_did_not(
    strategy: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """What the first attempt has left in the mailbox is of no use to the second one."""
    job = experiment({"strategy": strategy, "compression": "int4"})
    (url := tmp_path / "box").mkdir()
    monkeypatch.setattr(ObjectStore, "delete", lambda self, name: None)
    run(job, tmp_path / "first", monkeypatch, partial(MailboxTransport, url=url))
    monkeypatch.undo()
    assert len(files_in(url)) > 20
    interrupted(tmp_path / "first", tmp_path / "again")
    run(job, tmp_path / "again", monkeypatch, partial(MailboxTransport, url=url))
    last, same = (state(tmp_path / name, 6) for name in ("again", "first"))
    assert last and all(torch.equal(last[name], same[name]) for name in same)
    assert not files_in(url)


def test_a_full_mailbox_holds_the_sender_up_until_the_receiver_takes_something(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """By number here, and by bytes; what does not fit waits in the sender's queue."""
    monkeypatch.setattr(mailbox, "MAX_OBJECTS", 3)
    for max_bytes, fit in ((1 << 20, 3), (6000, 2)):
        (url := tmp_path / str(max_bytes)).mkdir()
        window = LinkWindow(max_queued_bytes=max_bytes)
        first, second = both(url)
        out = first.out("forward", 1, OutSettings("receiver", 1 << 20, window))
        sending = threading.Thread(target=send, args=(out, *range(9)), daemon=True)
        sending.start()
        wait_for(partial(holds, url, fit))
        assert [len(files_in(url)) for _ in range(20)] == 20 * [fit]
        incoming = second.incoming("forward", 0, InSettings("sender", 1 << 20))
        for number in range(9):
            (found,) = incoming.recv(key(number), 20.0)
            assert found[0] == number
        sending.join()
        out.close(20.0)
        incoming.close(20.0)
        assert incoming.has_closed and not files_in(url)
        first.stop()
        second.stop()


def holds(url: Path, num_objects: int) -> bool:
    return len(files_in(url)) == num_objects


def rename(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def flip_last_bit(file: Path) -> None:
    """Change the file for certain: a byte set to one value may have had it already."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


ATTACKS: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "cut short": (lambda f: f[0].write_bytes(f[0].read_bytes()[:-1]), "not one that cloud_a seal"),
    "empty": (lambda f: f[0].write_bytes(b""), "should have sealed are not"),
    "one bit": (lambda f: flip_last_bit(f[0]), "not one that cloud_a sealed"),
    "too long": (lambda f: os.truncate(f[0], 1 << 40), "bytes; at most 1,048,734 were promised"),
    "swapped": (lambda f: rename(f[0], f[1]), "not one that cloud_a sealed|should have sealed"),
    "repeated": (lambda f: shutil.copy(f[0], f[1]), "not one that cloud_a sealed for cloud_b"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_whoever_owns_the_mailbox_can_only_end_a_link_in_words(
    attack: str, tmp_path: Path
) -> None:
    change, said = ATTACKS[attack]
    first, second = both(tmp_path)
    out = first.out("forward", 1, OutSettings("receiver", 1 << 20))
    for number in range(2):
        out.send(key(number), (torch.ones(300),))
    wait_for(lambda: len(files_in(tmp_path)) == 2)
    names = [file.name for file in tmp_path.rglob("*")]
    assert not any("cloud" in name or "forward" in name for name in names)
    change(files_in(tmp_path))
    incoming = second.incoming("forward", 0, InSettings("sender", 1 << 20))
    with pytest.raises(FrameError, match=said):
        for number in range(2):
            incoming.recv(key(number), 20.0)
    first.stop()
    second.stop()


def test_names_that_are_no_objects_stay_as_they_are_and_links_are_not_followed(
    tmp_path: Path,
) -> None:
    (own := tmp_path / "own").write_text("mine")
    (url := tmp_path / "box").mkdir()
    with linked(url) as ends:
        send(ends.out, 1.0)
        assert taken(ends, 0) == 1.0
        for folder in {file.parent for file in url.rglob("note-*")}:
            (folder / "README").write_text("hello")
            (folder / ends.out.box.name(1)).symlink_to(own)
            (folder / "deep").mkdir()
        ends.out.send(key(1), (torch.full((300,), 2.0),))
        assert taken(ends, 1) == 2.0
        assert own.read_text() == "mine"
        ends.out.close(20.0)
        ends.incoming.close(20.0)
    first, second = both(url)
    assert len([*url.rglob("README")]) == 2
    assert {file.is_symlink() or file.name == "README" for file in files_in(url)} == {True}
    first.stop()
    second.stop()


@pytest.mark.parametrize("kind", ["pipe", "link", "link to a device"])
def test_what_is_no_ordinary_file_is_never_read_or_waited_for(kind: str, tmp_path: Path) -> None:
    """Notes are read by name, without a listing that would leave these out."""
    own = tmp_path / "own"
    own.write_text("private")
    box = tmp_path / "box"
    box.mkdir()
    make: dict[str, Callable[[Path], None]] = {
        "pipe": os.mkfifo,
        "link": lambda path: path.symlink_to(own),
        "link to a device": lambda path: path.symlink_to("/dev/zero"),
    }
    make[kind](box / "note")
    store = ObjectStore(str(box), patience_s=0.0)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LinkClosed, match="reading note fails"):
        store.get("note", max_bytes=100)
    assert len(os.listdir("/proc/self/fd")) == num_open
    store.put("note", b"theirs")  # over whatever stood there
    assert store.get("note", max_bytes=100) == b"theirs" and own.read_text() == "private"


def test_a_sender_that_ends_before_its_time_says_so(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        send(ends.out, 1.0)
        assert taken(ends, 0) == 1.0
        LOST.clear()
        ends.of[0].abandon()
        wait_for(lambda: LOST != [])  # though nobody reads
        with pytest.raises(LinkClosed, match="sender has ended without closing its link"):
            ends.incoming.recv(key(1), 20.0)
        assert str(LOST.pop()) == "sender has ended without closing its link"


def test_old_notes_are_no_meeting(tmp_path: Path, monkeypatch: Any) -> None:
    """The store shows each rank what the other had left for an earlier attempt."""
    for one in both(tmp_path):
        one.stop()
    monkeypatch.setattr("tests.line.test_mailbox.WITHIN_S", 0.3)
    with pytest.raises(LinkTimeout, match="rank 0 of cloud_a has not come"):
        lines(tmp_path, 1)
    with pytest.raises(LinkTimeout, match="rank 1 of cloud_b has not come"):
        lines(tmp_path, 0)


def test_a_note_in_another_clouds_name_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tests.line.test_mailbox.WITHIN_S", 0.3)
    with pytest.raises(LinkTimeout):
        lines(tmp_path, 0)
    (note,) = tmp_path.rglob("note-*")
    flip_last_bit(note)
    with pytest.raises(FrameError, match="rank 0 of cloud_a has not signed the note in its name"):
        lines(tmp_path, 1)


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for url, said in (
        (tmp_path / "none", "there is no such folder"),
        ("nosuch://bucket/box", "Protocol not known"),
    ):
        with pytest.raises(ConfigError, match=f"cluster.wan.url=.*{said}"):
            ObjectStore(str(url))


def test_a_store_that_fails_for_a_while_is_asked_again(tmp_path: Path, monkeypatch: Any) -> None:
    real = ObjectStore.put_once
    left = [2, 0]

    def put(self: ObjectStore, name: str, data: bytes) -> None:
        if left[0]:
            left[0] -= 1
            raise ConnectionError("the bucket sleeps")
        real(self, name, data)

    store = ObjectStore(str(tmp_path))
    monkeypatch.setattr(ObjectStore, "put_once", put)
    store.put("folder/one", b"data")
    assert store.get("folder/one", 10) == b"data" and store.sizes("folder") == {"one": 4}
    store.patience_s = 0.0
    left[0] = 9
    with pytest.raises(LinkClosed, match="cannot be reached: ConnectionError: the bucket sleeps"):
        store.put("folder/two", b"data")


def test_what_other_attempts_left_is_deleted_and_what_has_come_for_this_one_stays(
    tmp_path: Path,
) -> None:
    this, other = 32 * "a", 32 * "b"
    names = [f"{attempt}-{16 * '0'}-{1:010}" for attempt in (this, other)]
    store = ObjectStore(str(tmp_path))
    for name in (*names, "note"):
        store.put(f"folder/{name}", b"data")
    arrivals = Arrivals(store, folder="folder")
    arrivals.clean(this)
    arrivals.store.over.set()
    assert store.sizes("folder").keys() == {names[0], "note"}


def test_a_message_is_given_the_time_of_a_slow_line(tmp_path: Path) -> None:
    """Nothing shows that an object moves while it is written and read."""
    wan = mailbox.Mailbox(str(tmp_path))
    assert wan.allowance_s(375_000_000) == 3000.0


def test_a_sender_waits_while_its_bytes_lie_there_however_few_objects(tmp_path: Path) -> None:
    window = LinkWindow(max_queued_bytes=6000)
    with linked(tmp_path, window=window) as ends:
        out = ends.out
        for number in (0, 1):
            out.box.store.put(out.box.path(number), b"x" * 2500)
            out.untaken[number] = 2500
        done = threading.Event()

        def wait() -> None:
            out.await_room(3000)
            done.set()

        threading.Thread(target=wait, daemon=True).start()
        assert not done.wait(0.3)
        out.box.store.delete(out.box.path(0))
        assert done.wait(20.0)


def test_an_object_of_an_earlier_attempt_does_not_open_in_this_one(tmp_path: Path) -> None:
    with linked(tmp_path) as ends:
        box = ends.out.box
        mine = ends.incoming.keys
        sealed = b"".join(box.seal(3, b"data", ends.out.keys))
        assert box.open(3, sealed, mine, max_bytes=100) == b"data"
        for other in ({"attempt": 32 * "0"}, {"run": bytes(16)}, {"line": "forward"}):
            with pytest.raises(FrameError, match="not one that cloud_a sealed for cloud_b"):
                replace(box, **other).open(3, sealed, mine, max_bytes=100)


def test_who_waits_long_looks_seldom() -> None:
    assert [pause_after(quiet_s) for quiet_s in (0.0, 10.0, 1000.0)] == [0.02, 0.5, 5.0]


def test_who_listens_looks_often_after_news_seldom_without_and_checks_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each look comes three seconds after the one before, and the third finds something."""
    now_s = [1000.0]
    monkeypatch.setattr(mailbox, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    listed = iter([{}, {}, {"a": 1}, {"a": 1}, {"a": 1}])
    pauses: list[float] = []
    checked_at_s: list[float] = []

    def wait(pause_s: float) -> bool:
        pauses.append(pause_s)
        now_s[0] += 3.0
        return len(pauses) == 6

    over = SimpleNamespace(wait=wait, is_set=lambda: False)
    store: Any = SimpleNamespace(over=over, sizes=lambda folder: next(listed))
    lost: list[LinkError] = []
    arrivals = Arrivals(store, "f", lambda: checked_at_s.append(now_s[0]), on_lost=lost.append)
    with pytest.raises(LinkClosed, match="this rank has ended"):
        arrivals.wait("b", timeout_s=20.0)
    assert pauses == pytest.approx([0.0, 0.15, 0.3, 0.02, 0.15, 0.3])
    assert checked_at_s == [1003.0, 1009.0, 1015.0]
    wait_for(lambda: len(lost) == 1)


class OddStore(LocalFileSystem):  # type: ignore[misc]
    """A store of fsspec that orders and names arguments in its own way, as s3fs does."""

    def cat_file(self, path: str, version: Any = None, start: Any = None, end: Any = None) -> Any:
        assert version is None, "a number of bytes was given as a version"
        return super().cat_file(path, start=start, end=end)

    def pipe_file(self, path: str, data: bytes, chunksize: Any = None) -> None:
        Path(path).parent.mkdir(exist_ok=True)
        super().pipe_file(path, data)


def test_a_store_that_orders_its_arguments_otherwise_serves_as_well(tmp_path: Path) -> None:
    store = ObjectStore(str(tmp_path))
    store.fs = OddStore()
    store.is_local = False
    store.put("folder/one", (b"da", b"ta"))
    assert store.get("folder/one", max_bytes=2) == b"dat"
    assert store.sizes("folder") == {"one": 4}
    store.delete("folder/one")
    assert store.get("folder/one", max_bytes=2) is None


def test_an_object_that_cannot_be_read_is_told_from_a_store_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(str(tmp_path), patience_s=0.0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/one").mkdir()
    with pytest.raises(LinkClosed, match="can be listed, but reading folder/one fails: OSError"):
        store.get("folder/one", 10)
    monkeypatch.setattr(ObjectStore, "_list", lambda self, folder: 1 / 0)
    with pytest.raises(LinkClosed, match="cannot be reached: OSError"):
        store.get("folder/one", 10)


def test_a_full_disk_is_not_made_fuller_by_what_was_written_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(str(tmp_path), patience_s=0.0)

    def full(old: str, new: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(LinkClosed, match=r"writing folder/one fails: OSError.*No space left"):
        store.put("folder/one", b"data")
    assert not files_in(tmp_path)


def test_a_message_that_was_written_twice_leaves_nothing_and_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store writes each message, loses the confirmation, and is asked again once the message
    has been taken. The window holds four messages, of which each would take one for ever."""
    real = ObjectStore.put_once
    put: list[str] = []

    def unconfirmed(self: ObjectStore, name: str, data: Any) -> None:
        real(self, name, data)
        if re.search(r"-\d{10}$", name) and name not in put:  # a message, not a note
            put.append(name)
            wait_for(lambda: not (tmp_path / name).exists())  # until it has been taken
            raise TimeoutError("it was written, and the answer is lost")

    monkeypatch.setattr(ObjectStore, "put_once", unconfirmed)
    monkeypatch.setattr(mailbox, "_LONGEST_PAUSE_S", 0.1)
    with linked(tmp_path, window=LinkWindow(max_queued_bytes=4 * 2000)) as ends:
        sending = threading.Thread(target=send, args=(ends.out, *range(9)), daemon=True)
        sending.start()
        assert [taken(ends, number) for number in range(9)] == [*range(9)]
        sending.join(20.0)
        closing = threading.Thread(target=ends.out.close, args=(20.0,), daemon=True)
        closing.start()
        ends.incoming.close(20.0)
        closing.join(20.0)
        assert len(put) == 10
        wait_for(lambda: not files_in(tmp_path))


def test_what_is_listed_and_not_there_is_read_once_a_listing_and_named_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(str(tmp_path))
    box = LinkBox(store, bytes(16), 32 * "0", "control", ("cloud_a", 0), ("cloud_b", 1))
    num = {"listed": 0, "read": 0}

    def sizes(folder: str) -> dict[str, int]:
        num["listed"] += 1
        return {box.name(0): 100}

    def get(name: str, max_bytes: int) -> None:
        num["read"] += 1

    monkeypatch.setattr(store, "sizes", sizes)
    monkeypatch.setattr(store, "get", get)
    monkeypatch.setattr(mailbox, "MISSING_S", 0.5)
    arrivals = Arrivals(store, box.folder)
    keys: Any = None
    with pytest.raises(
        LinkClosed, match=r"object 0 of cloud_a is listed in the mailbox .* not th"
    ):
        take(arrivals, box, 0, keys, max_bytes=1000)
    assert 1 < num["read"] <= num["listed"]
    arrivals.store.over.set()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_was_killed_after_all_had_met_is_missed_when_it_comes_again(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could say nothing. The other one hears of it, begins again too, and both meet."""
    monkeypatch.setattr(mailbox, "_CHECK_EVERY_S", 0.1)
    of = both(tmp_path)
    waits = of[1 - killed].incoming("words", killed, InSettings("peer", 1 << 20))
    of[killed].stop()
    with ThreadPoolExecutor(2) as threads:
        again = threads.submit(lines, tmp_path, killed)
        with pytest.raises(LinkClosed, match=f"rank {killed} of cloud_. has begun the run again"):
            waits.recv(key(0), 20.0)
        of[1 - killed].stop()
        other = threads.submit(lines, tmp_path, 1 - killed)
        assert again.result().attempt == other.result().attempt
        again.result().stop()
        other.result().stop()


def test_a_rank_that_comes_again_before_all_have_met_is_met(tmp_path: Path) -> None:
    """Its first answer is of no use to rank 0, which still waits for another cloud."""
    with ThreadPoolExecutor(4) as threads:
        meeting = [threads.submit(lines, tmp_path, 0, num_ranks=3)]
        with pytest.raises(LinkTimeout, match="not all clouds have come"):
            lines(tmp_path, 1, num_ranks=3, within_s=0.5)
        (answer,) = (file for file in tmp_path.rglob("note-*") if is_answer(file))
        said = answer.read_bytes()
        meeting.append(threads.submit(lines, tmp_path, 1, num_ranks=3))
        wait_for(lambda: answer.read_bytes() != said)
        meeting.append(threads.submit(lines, tmp_path, 2, num_ranks=3))
        found = [one.result() for one in meeting]
    assert len({one.attempt for one in found}) == 1
    for one in found:
        one.stop()


def is_answer(note: Path) -> bool:
    data = note.read_bytes()
    return data[1 + data[0]] == NoteKind.ANSWER


def test_a_bucket_is_as_good_as_a_folder() -> None:
    """Objects of fsspec's store in memory, which has no folders and no renaming."""
    with linked("memory://box") as ends:
        send(ends.out, *range(20))
        assert [taken(ends, number) for number in range(20)] == [*range(20)]
        ends.out.close(20.0)
        ends.incoming.close(20.0)
        left = ends.of[0].store.sizes(ends.out.box.folder)
        assert [name[:4] for name in left] == ["note"]


LOCAL = ["strategy=local_updates", "strategy.averaging.every=2", "compression=int4"]


@pytest.mark.slow
@pytest.mark.nightly
def test_two_owners_train_through_a_folder(tmp_path: Path) -> None:
    """The same losses and weights as over gloo. Nothing of a link is left in the folder."""
    (url := tmp_path / "box").mkdir()
    owners = TwoOwners(tmp_path, [*LOCAL, "training.max_steps=6"], mailbox=url)
    owners.finish()
    config = toy_config("two_clouds", [*LOCAL, "training.max_steps=6", "cluster/wan=real"])
    start(tmp_path / "gloo", config)
    assert losses(owners.run_dir("cloud_a")) == losses(tmp_path / "gloo")
    assert not files_in(url)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cloud_that_was_stopped_goes_on_with_the_same_command(tmp_path: Path) -> None:
    """The other one hears that it has ended, begins again by itself, and waits for it."""
    (url := tmp_path / "box").mkdir()
    more = ["training.max_steps=200", "training.checkpoint.every_steps=20"]
    owners = TwoOwners(tmp_path, [*LOCAL, *more], mailbox=url)
    first, second = (owners.start(cloud) for cloud in CLOUDS)
    wait_for(lambda: CheckpointSteps(owners.run_dir("cloud_a")).agreed_steps() != [], 60)
    second.send_signal(signal.SIGINT)
    assert second.wait(60) == 75
    wait_for(lambda: "has ended without closing its link" in owners.said("cloud_a"), 60)
    again = owners.start("cloud_b")
    assert [first.wait(60), again.wait(60)] == [0, 0], owners.said("cloud_a")
    config = toy_config("two_clouds", [*LOCAL, *more, "cluster/wan=real"])
    start(tmp_path / "gloo", config)
    assert losses(owners.run_dir("cloud_a")) == losses(tmp_path / "gloo")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "strategy=pipeline passes activations from cloud to cloud in every step: choose"),
        (["strategy=data_parallel"], "averages gradients in every update: choose strategy=local"),
        ([*LOCAL, "+strategy/averaging/late=go_on"], "choose strategy/averaging/late=wait"),
    ],
)
def test_what_waits_within_a_step_is_refused(overrides: list[str], said: str) -> None:
    wan = ["cluster/wan=mailbox", "cluster.wan.url=box"]
    with pytest.raises(ConfigError, match=said):
        Settings.of(toy_config("two_clouds", [*wan, *overrides]))


def test_a_folder_that_is_missing_is_said_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = TwoOwners(tmp_path, LOCAL, mailbox=tmp_path / "box")
    monkeypatch.setenv("XCLOUD_POLICY", str(tmp_path / "owner_cloud_a/policy.yaml"))
    with pytest.raises(ConfigError, match=r"cluster\.wan\.url=.*there is no such folder"):
        main([str(owners.file), "--run-dir", str(tmp_path / "run")])
    assert not [*tmp_path.glob("run/rank*.log")]


def test_a_file_names_no_mailbox_that_the_policy_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = TwoOwners(tmp_path, LOCAL, mailbox=tmp_path)
    policy = tmp_path / "owner_cloud_a/policy.yaml"
    policy.write_text(policy.read_text().replace(f"[{tmp_path}]", "[]"))
    monkeypatch.setenv("XCLOUD_POLICY", str(policy))
    with pytest.raises(ConfigError, match=r"cluster\.wan\.url is .* addresses: \["):
        main([str(owners.file), "--run-dir", str(tmp_path / "run")])


def test_lines_through_a_mailbox_end_with_words_links_and_what_lies_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(mailbox_lines, "time", clock)

    def wait(seconds: float) -> None:
        done.append(seconds)
        now_s[0] += mailbox_lines._CLOSE_S / 2

    def clean(attempt: Any) -> None:
        done.append(("clean", attempt))
        raise LinkClosed("gone")

    lines: Any = object.__new__(MailboxLines)
    assert not lines.texts
    lines.words = [SimpleNamespace(close=lambda: done.append("words"))]
    lines.ins = [SimpleNamespace(wait=wait)] * 3
    lines._arrivals = SimpleNamespace(clean=clean)
    lines.stop = lambda: done.append("stopped")
    lines.close()
    most = mailbox_lines._CLOSE_S
    assert done == ["words", most, most / 2, 0.0, ("clean", None), "stopped"]


@pytest.mark.parametrize("refused", [set(), {"5"}])
def test_an_end_before_its_time_lies_at_the_next_number_and_behind_it(refused: set[str]) -> None:
    """Of a frame that is on its way the number may be taken."""
    put = list[str]()

    def put_once(path: str, sealed: bytes) -> None:
        if path in refused:
            raise OSError
        put.append(path)

    out = object.__new__(MailboxOutLink)
    out._num_put = 5
    out.keys = Mock()
    out.box = Mock(path=str, store=Mock(put_once=put_once))
    out.abandon()
    assert put == [number for number in ("5", "6") if number not in refused]

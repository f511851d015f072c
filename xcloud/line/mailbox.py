"""A mailbox between clouds of several owners, where nobody opens a port: a folder or bucket that
all of them can read and write, through fsspec. It is trusted for nothing.

An object is one frame, sealed to the certificate of the receiver's cloud and signed with the
sender's key (sealing.py). What it is sealed for names the attempt, the link and the number, so an
object that is moved, swapped or of an earlier attempt does not open. Where it lies:

  URL / receiver (16 hex digits) / attempt (32) - link (16) - number (10 digits)

All but the number are digests, so names of clouds and links are not seen. The receiver deletes an
object once its frame has been handed on, and before its first one whatever is left of earlier
attempts. A store that has written an object may fail to say so; the sender then writes it again,
perhaps after it was taken, and the receiver deletes it again. A rank that is started again begins
another attempt with all others (mailbox_lines.py): its state has gone back to a checkpoint, and so
have the numbers.

fsspec's stores do not order their arguments alike: what follows the path is given by name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import torch

from xcloud.base.errors import ConfigError, FrameError, LinkClosed, LinkError, SealError
from xcloud.base.settings import Address, settings
from xcloud.line.keys import Certificate, PrivateKey
from xcloud.line.sealing import Data, open_sealed, seal_parts, sealed_bytes
from xcloud.net.frame import Kind, seal_frame
from xcloud.net.link_end import (
    InSettings,
    OutSettings,
    ReceivingEnd,
    SendingEnd,
    ignore,
)
from xcloud.net.link_profile import Wan

T = TypeVar("T")
MAX_OBJECTS = 64
"""Objects of one link that may lie in the mailbox, so that a listing stays short."""
_MAX_LISTED = 10_000
_MAX_SEALED_BYTES = (1 << 31) - 1 - 4096  # AES-GCM of the library takes no more at once
_SHORTEST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 5.0
_PAUSE_SHARE = 0.05
"""A pause lasts this share of the time for which nothing has come: waiting costs few requests."""
SLOWEST_BITS_PER_S = 1e6
_CHECK_EVERY_S = 5.0
MISSING_S = 60.0
"""How long an object may be listed and not there when it is read."""
_ENDED = b""
"""What an object holds whose sender has ended before its time."""
_NAME = re.compile(r"([0-9a-f]{32}-[0-9a-f]{16})-([0-9]{10})(\.[0-9a-f]{16})?")

Parts = bytes | tuple[bytes, ...]
"""What an object is to hold: its bytes, or parts of them that are written one after the other."""


@settings("cluster.wan")
class Mailbox(Wan):
    """A mailbox between clouds, for jobs in which no rank waits for another cloud inside a step.

    url: a folder or bucket that fsspec knows: a path, file:///shared/box, s3://bucket/box. Clouds
        may reach it by different ones. Each run needs one of its own.
    """

    url: Address

    in_words = "a mailbox"
    is_metered = False
    between_owners = True

    def allowance_s(self, num_bytes: int) -> float:
        """Return the time of a message at 1 Mbit/s. An object is there in full or not at all, so
        nothing shows that it moves. A sender that has died is noticed by its heartbeats."""
        return 8 * num_bytes / SLOWEST_BITS_PER_S


def local_folder(url: str) -> str | None:
    """Return the folder of this machine that a URL names; None for a bucket."""
    folder = url.removeprefix("file://").removeprefix("local://")
    return None if "://" in folder else folder


class ObjectStore:
    """The objects of a mailbox. A call that fails is made again for patience_s.

    setting: name of the setting that gives the URL, for error messages.
    writes: True if objects are written too. Then one is written at once, as a test.

    Raises ConfigError for a place that cannot be written, or is no folder.
    """

    def __init__(
        self,
        url: str,
        patience_s: float = 60.0,
        setting: str = "cluster.wan.url",
        writes: bool = True,
    ) -> None:
        # Only ranks with a mailbox need the library.
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        self.url = url
        self.over = threading.Event()
        """Set: this rank has ended, and no call is made again."""
        self.patience_s = patience_s
        try:
            self.fs, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
            self._root = root.rstrip("/")
            self.is_local = isinstance(self.fs, LocalFileSystem)
            if self.is_local and not os.path.isdir(self._root):
                raise FileNotFoundError("there is no such folder")
            # A key that may read and not write would be noticed only at the first message
            # otherwise.
            if writes:
                probe = f"probe-{secrets.token_hex(8)}"
                self.put_once(probe, b"xcloud")
                self.fs.rm_file(f"{self._root}/{probe}")
        except Exception as error:  # whatever the store's own library raises
            can = "write to" if writes else "read"
            raise ConfigError(
                f"{setting}={url} is no folder or bucket that can be used: this process cannot "
                f"{can} it: {_words(error)}"
            ) from error

    def put(self, name: str, data: Parts) -> None:
        """Write an object. Nobody sees a part of it."""
        self.patiently(lambda: self.put_once(name, data), doing=f"writing {name}")

    def get(self, name: str, max_bytes: int) -> bytes | None:
        """Return at most max_bytes + 1 of an object; None if it is not there."""

        def read() -> bytes | None:
            try:
                if self.is_local:
                    return _ordinary(f"{self._root}/{name}", num_bytes=max_bytes + 1)
                # By name: s3fs takes a version where other stores take the first byte. One byte
                # more than is allowed is read, so that a longer object is noticed and never read
                # as a whole.
                data: bytes = self.fs.cat_file(f"{self._root}/{name}", start=0, end=max_bytes + 1)
                return data
            except FileNotFoundError:
                return None

        return self.patiently(read, doing=f"reading {name}")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each object in a folder. Raises FrameError if there are too many."""
        listed = self.patiently(lambda: self._list(folder), doing=f"listing {folder}")
        if len(listed) > _MAX_LISTED:
            raise FrameError(f"the mailbox {self.url} holds {len(listed):,} objects for one rank")
        return {
            str(one["name"]).rsplit("/", 1)[-1]: int(str(one["size"]))
            for one in listed
            # A link in a shared folder could lead to a file of this machine.
            if one["type"] == "file" and not one.get("islink")
        }

    def delete(self, name: str) -> None:
        def remove() -> None:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(f"{self._root}/{name}")

        self.patiently(remove, doing=f"deleting {name}")

    def _list(self, folder: str) -> list[dict[str, object]]:
        try:
            return list(self.fs.ls(f"{self._root}/{folder}".rstrip("/"), detail=True))
        except FileNotFoundError:
            return []

    def put_once(self, name: str, data: Parts) -> None:
        path = f"{self._root}/{name}"
        parts = (data,) if isinstance(data, bytes) else data
        if not self.is_local:
            # By position: the stores have several names for what is written.
            self.fs.pipe_file(path, parts[0] if len(parts) == 1 else b"".join(parts))
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        unfinished = f"{path}.{secrets.token_hex(8)}"
        try:
            with open(unfinished, "xb") as file:  # "x" follows no link that somebody has left
                for part in parts:
                    file.write(part)
            # The receiver lists by the final name, so it never sees half an object.
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(OSError):  # what a full disk holds of it makes it fuller
                os.unlink(unfinished)
            raise

    def patiently(self, call: Callable[[], T], doing: str) -> T:
        since_s = time.monotonic()
        pause_s = 0.1
        while True:
            try:
                return call()
            except Exception as error:
                # Whatever a store's library raises may pass: 503 and 429, a lost connection, a
                # full disk.
                if self.over.wait(pause_s):
                    raise LinkClosed("this rank has ended") from error
                if time.monotonic() - since_s > self.patience_s:
                    raise LinkClosed(self._failing(doing, error=error)) from error
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _failing(self, doing: str, error: Exception) -> str:
        """Return what is wrong, in words: one object, or the whole mailbox."""
        unreached = f"the mailbox {self.url} cannot be reached: {_words(error)}"
        if isinstance(error, ConnectionError | TimeoutError):
            return unreached
        try:
            # The root can be listed if only this object is at fault.
            self._list("")
        except Exception:
            return unreached
        return f"the mailbox {self.url} can be listed, but {doing} fails: {_words(error)}"


class Arrivals:
    """The objects that lie in the mailbox for one rank. A thread lists them for all its links.

    check: called now and then in that thread; it raises LinkError once nothing more can come.
    on_lost: called in that thread once nothing more can come, though this rank has not ended.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        check: Callable[[], object] = ignore,
        on_lost: Callable[[LinkError], object] = ignore,
    ) -> None:
        self.store = store
        self._folder = folder
        self._check = check
        self._on_lost = on_lost
        self._sizes = dict[str, int]()
        self._num_taken = dict[str, int]()  # by the name of a link's objects without the number
        self.failure: LinkError | None = None
        self._changed = threading.Condition()
        # One thread for all links of a rank: a listing costs a request, and covers the whole
        # folder.
        threading.Thread(target=self._run, name="mailbox", daemon=True).start()

    def wait(self, name: str, timeout_s: float | None = None) -> int | None:
        """Return the bytes of an object once it is there; None if it is not in time.

        Raises LinkError once nothing more can come.
        """
        with self._changed:
            self._changed.wait_for(lambda: name in self._sizes or self.failure, timeout_s)
            if self.failure is not None:
                raise self.failure
            return self._sizes.get(name)

    def miss(self, name: str) -> None:
        """Note that an object was listed and not there: `wait` waits for the next listing."""
        with self._changed:
            self._sizes.pop(name, None)

    def delete(self, name: str) -> None:
        """Delete an object of which nothing more is wanted, nor of those before it."""
        match = _NAME.fullmatch(name)
        assert match is not None, "it has the name of an object"
        with self._changed:
            self._num_taken[match[1]] = int(match[2]) + 1
        self.store.delete(f"{self._folder}/{name}")

    def clean(self, attempt: str | None) -> None:
        """Delete what is left of other attempts than this one; None: of all."""
        for name in self.store.sizes(self._folder):
            if _NAME.fullmatch(name) and not (attempt and name.startswith(attempt)):
                self.store.delete(f"{self._folder}/{name}")

    def _run(self) -> None:
        news_at_s = time.monotonic()
        check_at_s = news_at_s
        pause_s = 0.0
        seen = set[str]()
        try:
            while not self.store.over.wait(pause_s):
                # The notes of the rendezvous (mailbox_lines.py): the only sign of a rank that was
                # killed before it had sent a heartbeat and has been started again.
                if time.monotonic() >= check_at_s:
                    self._check()
                    check_at_s = time.monotonic() + _CHECK_EVERY_S
                with self._changed:
                    # Copied before the listing: what is taken while the store answers may stand in
                    # it rightly.
                    num_taken = dict(self._num_taken)
                sizes = self.store.sizes(self._folder)
                if sizes.keys() - seen:
                    news_at_s = time.monotonic()
                seen = {*sizes}
                with self._changed:
                    self._sizes = sizes
                    self._changed.notify_all()
                # A put that was made and not confirmed is made again by the sender, perhaps after
                # its object was taken. Nobody would ever delete it, and four of these filled a
                # window for good.
                for name in sizes:
                    match = _NAME.fullmatch(name)
                    if match and int(match[2]) < num_taken.get(match[1], 0):  # written again
                        self.store.delete(f"{self._folder}/{name}")
                pause_s = pause_after(time.monotonic() - news_at_s)
            raise LinkClosed("this rank has ended")
        except LinkError as error:
            with self._changed:
                self.failure = error
                self._changed.notify_all()
            if not self.store.over.is_set():
                # Outside the lock, as it may end the process.
                self._on_lost(error)


@dataclass(frozen=True)
class BoxKeys:
    """The keys at one end of a box: this cloud's own, and the certificate of the peer."""

    key: PrivateKey
    own: Certificate
    peer: Certificate


@dataclass(frozen=True)
class LinkBox:
    """One direction of one link in a mailbox.

    run: 16 bytes that are the same in all clouds of a run.
    line: the name of the link.
    sender, receiver: their clouds and ranks.
    """

    store: ObjectStore
    run: bytes
    attempt: str
    line: str
    sender: tuple[str, int]
    receiver: tuple[str, int]

    @property
    def folder(self) -> str:
        return folder_of(self.run, receiver=self.receiver)

    def name(self, number: int) -> str:
        """Return the name of an object in its receiver's folder."""
        link = digest((self.line, self.sender, self.receiver))
        return f"{self.attempt}-{link}-{number:010}"

    def path(self, number: int) -> str:
        return f"{self.folder}/{self.name(number)}"

    def seal(self, number: int, data: Data, keys: BoxKeys) -> tuple[bytes, ...]:
        """Return what an object holds that carries this data, in parts."""
        context = self.context(number)
        return seal_parts(data, receiver=keys.peer, sender=keys.key, context=context)

    def open(self, number: int, sealed: bytes, keys: BoxKeys, max_bytes: int) -> bytes:
        """Return what an object holds, at most max_bytes.

        Raises FrameError for anything that the sender has not put at this place.
        """
        self.check_size(number, num_bytes=len(sealed), max_bytes=max_bytes)
        context = self.context(number)
        try:
            return open_sealed(
                sealed, key=keys.key, own=keys.own, sender=keys.peer, context=context
            )
        except SealError as error:
            raise FrameError(f"object {number} in the mailbox: {error}") from error

    def check_size(self, number: int, num_bytes: int, max_bytes: int) -> None:
        """Raise FrameError for an object that is too long for what was promised."""
        if num_bytes > sealed_bytes(max_bytes):
            raise FrameError(
                f"object {number} of {self.sender[0]} in the mailbox has {num_bytes:,} bytes; at "
                f"most {sealed_bytes(max_bytes):,} were promised"
            )

    def context(self, number: int) -> bytes:
        place = (self.run.hex(), self.attempt, self.line, self.sender, self.receiver, number)
        return f"xcloud mailbox {place}".encode()


class MailboxOutLink(SendingEnd):
    """Puts frames into a mailbox. It waits while too many of its own lie there."""

    def __init__(self, box: LinkBox, keys: BoxKeys, settings: OutSettings) -> None:
        if settings.capacity_bytes > _MAX_SEALED_BYTES:
            raise ConfigError(
                f"a message for {settings.peer_name} may take {settings.capacity_bytes:,} bytes, "
                f"and an object of a mailbox holds at most {_MAX_SEALED_BYTES:,}: compress more, "
                "or merge in parts (strategy=streaming strategy.averaging.fragments=N)"
            )
        super().__init__(settings)
        self.box = box
        self.keys = keys
        self._num_put = 0
        self.untaken = dict[int, int]()  # bytes of objects that lay there when it looked last
        self._over = threading.Event()
        threading.Thread(target=self._run, name=f"to-{self.peer_name}", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        with self._sending:
            self._send_closes(1)
        self._await_end(self._over.wait, timeout_s, failing="has left no room in the mailbox")

    def abandon(self) -> None:
        """Tell the receiver that this rank has ended before its time, if that can be done at once.

        It takes no lock and asks no thread: a signal may have interrupted whoever holds one. Of
        the two objects one comes after a frame that may be on its way.
        """
        for number in (self._num_put, self._num_put + 1):
            sealed = self.box.seal(number, data=_ENDED, keys=self.keys)
            with contextlib.suppress(Exception):
                self.box.store.put_once(self.box.path(number), sealed)

    def _run(self) -> None:
        box = self.box
        keys = self.keys
        try:
            while True:
                key, sequence, frame, queued_at_s = self._queue.get()
                # What waits here is counted by the bytes of frames that lie in the mailbox and by
                # their number, as a listing grows with it.
                self.await_room(frame.numel())
                seal_frame(frame, deliver_at_s=-time.monotonic())
                self.record.sending(
                    key, sequence=sequence, num_bytes=frame.numel(), queued_at_s=queued_at_s
                )
                # Each object is sealed for its own number, so the store's owner cannot swap two of
                # them.
                sealed = box.seal(sequence, data=frame.numpy().data, keys=keys)
                del frame  # a message is held twice at most: here, or where a store copies it
                box.store.put(box.path(sequence), data=sealed)
                self.untaken[sequence] = sum(map(len, sealed))
                self._num_put = sequence + 1
                self.settings.note_progress(key.kind)
                if key.kind is Kind.CLOSE:
                    return
                del sealed  # not held until the next message
        except LinkError as error:
            self.failure = error
        except Exception as error:  # a thread that dies in silence loses what is sent
            self.failure = LinkClosed(f"the link to {self.peer_name} broke: {error!r}")
        finally:
            self._over.set()

    def await_room(self, num_bytes: int) -> None:
        """Wait until the receiver has taken enough of what lies in the mailbox."""
        room_bytes = self.settings.window.max_queued_bytes - num_bytes
        folder = self.box.folder
        since_s = time.monotonic()
        while self.untaken and (
            len(self.untaken) >= MAX_OBJECTS or sum(self.untaken.values()) > room_bytes
        ):
            # The receiver deletes what it has taken, so a listing is its acknowledgement.
            there = self.box.store.sizes(folder)
            for number in [n for n in self.untaken if self.box.name(n) not in there]:
                del self.untaken[number]
            if self.box.store.over.wait(pause_after(time.monotonic() - since_s)):
                raise LinkClosed("this rank has ended")


class MailboxInLink(ReceivingEnd):
    """Takes frames out of a mailbox, in the order of their numbers.

    on_lost: called in its thread when it has ended, though the sender has not closed it.
    """

    def __init__(
        self,
        box: LinkBox,
        keys: BoxKeys,
        arrivals: Arrivals,
        settings: InSettings,
        on_lost: Callable[[LinkError], object] = ignore,
    ) -> None:
        super().__init__(settings)
        self._on_lost = on_lost
        self.box = box
        self.keys = keys
        self._arrivals = arrivals
        threading.Thread(target=self._run, name=f"from-{self.peer_name}", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the sender has closed the link in this time, or it has ended."""
        return self._over.wait(timeout_s)

    def _run(self) -> None:
        box = self.box
        keys = self.keys
        max_bytes = self.settings.capacity_bytes
        try:
            for number in count():
                data = bytearray(
                    take(self._arrivals, box=box, number=number, keys=keys, max_bytes=max_bytes)
                )
                if data == _ENDED:
                    raise LinkClosed(f"{self.peer_name} has ended without closing its link")
                frame = self._open(torch.frombuffer(data, dtype=torch.uint8))
                if frame.key.kind is not Kind.CLOSE:
                    self._deliver(frame)
                # After the frame was handed on: a rank that is killed in between reads nothing
                # twice, as its next attempt has other names.
                self._arrivals.delete(box.name(number))
                if frame.key.kind is Kind.CLOSE:
                    return self._leave()
                del data, frame  # not held until the next message
        except LinkError as error:
            self._lose(error)
        except Exception as error:  # a thread that dies in silence leaves its reader waiting
            self._lose(LinkClosed(f"the link from {self.peer_name} broke: {error!r}"))

    def _lose(self, reason: LinkError) -> None:
        self._end(reason)
        self._on_lost(reason)


def take(arrivals: Arrivals, box: LinkBox, number: int, keys: BoxKeys, max_bytes: int) -> bytes:
    """Return what an object holds, once it is there. It stays there.

    Raises FrameError for anything that the sender has not put at this place.
    """
    name = box.name(number)
    missing_since_s: float | None = None
    while True:
        size = arrivals.wait(name)
        assert size is not None, "it waits for ever"
        box.check_size(number, num_bytes=size, max_bytes=max_bytes)
        sealed = box.store.get(box.path(number), max_bytes=sealed_bytes(max_bytes))
        if sealed is not None:
            return box.open(number, sealed, keys, max_bytes)
        now_s = time.monotonic()
        # A listing may be older than a deletion, or an object not readable yet. It is read once
        # for each listing: reading in a loop took 183 requests in 10 s, this takes 56.
        missing_since_s = missing_since_s or now_s
        if now_s - missing_since_s > MISSING_S:
            raise LinkClosed(
                f"object {number} of {box.sender[0]} is listed in the mailbox {box.store.url}, "
                f"and for {MISSING_S:.0f} s was not there when it was read"
            )
        arrivals.miss(name)


def _ordinary(path: str, num_bytes: int) -> bytes:
    """Return the beginning of a file. Raises OSError for a link, which could lead to a file of
    this machine, and for a pipe or device, which might never end.

    It looks at what it has opened: whoever shares the folder may replace a file at any time.
    """
    # Without NONBLOCK, opening a pipe waits until somebody writes.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no ordinary file")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(num_bytes)
    finally:
        os.close(descriptor)


def folder_of(run: bytes, receiver: tuple[str, int]) -> str:
    """Return the folder in which objects for a rank lie."""
    return digest((run.hex(), receiver))


def pause_after(quiet_s: float) -> float:
    """Return how long to pause before the next look, when nothing has come for quiet_s."""
    return min(max(_SHORTEST_PAUSE_S, _PAUSE_SHARE * quiet_s), _LONGEST_PAUSE_S)


def digest(place: object) -> str:
    return hashlib.sha256(repr(place).encode()).hexdigest()[:16]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"

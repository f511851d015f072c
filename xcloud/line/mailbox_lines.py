"""How the ranks of several owners find each other through a mailbox, and the links they then have.

Rank 0 and every other rank exchange three signed notes, which are overwritten in place:
  offer   rank 0 -> rank r   a number A that rank 0 has just drawn
  answer  rank r -> rank 0   A, a number B that rank r has just drawn, its certificate's digest
  begin   rank 0 -> rank r   A, and B and digest of every rank
So each side knows that the other has begun now, whatever old notes lie there, and the attempt is
the digest of all these numbers: no object of an earlier one belongs to it.

A rank that restarts also answers a "begin" of which it is no part. Rank 0 continues to read the
answers, and the others continue to read the messages of rank 0. A rank that finds another number
there than in its own attempt knows that some rank has restarted, even one that was killed and
could not report it.

A note: length of the signature u8 | signature | kind u8 | A (16 bytes) | for each rank that it
speaks of: its number (16 bytes) and the SHA-256 of its certificate (32).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from xcloud.base.errors import ConfigError, FrameError, LinkClosed, LinkError, SealError
from xcloud.line.keys import Certificate, LineKeys, PrivateKey, read_key
from xcloud.line.mailbox import (
    Arrivals,
    BoxKeys,
    LinkBox,
    MailboxInLink,
    MailboxOutLink,
    ObjectStore,
    digest,
    folder_of,
    pause_after,
)
from xcloud.line.sealing import sign, verify
from xcloud.line.transport import SealedPlace, SealedWordLine
from xcloud.net.link_end import InSettings, OutSettings, ignore
from xcloud.net.rendezvous import Waiting

_NUMBER_BYTES = 16
_DIGEST_BYTES = 32
_ENTRY_BYTES = _NUMBER_BYTES + _DIGEST_BYTES
_LOOK_EVERY_S = 2.0
_CLOSE_S = 10.0


class NoteKind(IntEnum):
    """The purpose of a note."""

    OFFER = 1
    ANSWER = 2
    BEGIN = 3


class Entry(NamedTuple):
    """A rank that has begun: the number that it has drawn, and its certificate's digest."""

    number: bytes
    fingerprint: str


class Note(NamedTuple):
    """A note between rank 0 and another rank. offer: the number A."""

    kind: NoteKind
    offer: bytes
    entries: Sequence[Entry] = ()


def encode_note(note: Note) -> bytes:
    entries = b"".join(one.number + bytes.fromhex(one.fingerprint) for one in note.entries)
    return bytes([note.kind]) + note.offer + entries


def decode_note(body: bytes, sender: str, max_entries: int) -> Note:
    """Return a note. Raises FrameError for anything but what `encode_note` makes."""
    rest = body[1 + _NUMBER_BYTES :]
    num_entries, over = divmod(len(rest), _ENTRY_BYTES)
    if len(body) < 1 + _NUMBER_BYTES or over or num_entries > max_entries:
        raise FrameError(f"{sender} has left a note of {len(body)} bytes in the mailbox")
    if body[0] not in [*NoteKind]:
        raise FrameError(f"{sender} has left a note of unknown kind {body[0]} in the mailbox")
    starts = range(0, len(rest), _ENTRY_BYTES)
    entries = [
        Entry(rest[at : at + _NUMBER_BYTES], rest[at + _NUMBER_BYTES : at + _ENTRY_BYTES].hex())
        for at in starts
    ]
    return Note(NoteKind(body[0]), body[1 : 1 + _NUMBER_BYTES], entries)


class MailboxRendezvous:
    """The notes of one rank, and the attempt that follows from them."""

    def __init__(
        self, store: ObjectStore, place: SealedPlace, keys: LineKeys, key: PrivateKey
    ) -> None:
        self.store = store
        self._place = place
        self._keys = keys
        self._key = key
        self._begin: Note | None = None

    def hold(self, say: Callable[[str], None]) -> tuple[str, list[Certificate]]:
        """Wait for all other ranks. Return the attempt, and the certificate of each rank.

        say: called once a minute with the ranks that are waited for.

        Raises LinkTimeout naming ranks that have not come, ConfigError for a certificate that is
        not one of its cloud's.
        """
        place = self._place
        mine = Entry(secrets.token_bytes(_NUMBER_BYTES), self._keys.own.fingerprint)
        waiting = Waiting(what="for the other clouds", within_s=place.first_within_s, say=say)
        if place.rank == 0:
            begin = self._gather(mine, waiting=waiting)
        else:
            begin = self._answer(mine, waiting)
        self._begin = begin
        # All ranks read the same "begin", so all get the same attempt, which nobody could know
        # before: every rank has put a fresh number into it.
        attempt = hashlib.sha256(encode_note(begin)).hexdigest()[:32]
        found = [
            self._certificate(rank, fingerprint=entry.fingerprint)
            for rank, entry in enumerate(begin.entries)
        ]
        return attempt, found

    def check(self) -> None:
        """Raise LinkClosed if a rank has begun the run again since `hold` returned."""
        begin = self._begin
        assert begin is not None, "the ranks have met"
        if self._place.rank == 0:
            for rank in range(1, self._place.num_ranks):
                answer = self._answer_of(rank)
                if answer is not None and answer.entries[0] != begin.entries[rank]:
                    raise LinkClosed(f"{self._name(rank)} has begun the run again")
        else:
            note = self._read(0, max_entries=self._place.num_ranks)
            if note is not None and note.offer != begin.offer:
                raise LinkClosed(f"{self._name(0)} has begun the run again")

    def _gather(self, mine: Entry, waiting: Waiting) -> Note:
        others = range(1, self._place.num_ranks)
        offer = Note(NoteKind.OFFER, mine.number)
        for rank in others:
            self._leave(rank, note=offer)
        entries = {0: mine}
        while True:
            # Everybody has answered at the same time once this loop ends, with the number that
            # rank 0 drew just now. Old notes hold another one and count for nothing.
            for rank in others:  # those that have answered too: a rank may have been restarted
                answer = self._answer_of(rank)
                if answer is not None and answer.offer == mine.number:
                    entries[rank] = answer.entries[0]
            absent = ", ".join(self._name(rank) for rank in others if rank not in entries)
            if not absent:
                break
            pause_s = min(pause_after(waiting.waited_s), _LOOK_EVERY_S)
            waiting.go_on(f"{absent} has not come", look_every_s=pause_s)
        begin = Note(NoteKind.BEGIN, mine.number, [entries[rank] for rank in sorted(entries)])
        for rank in others:
            self._leave(rank, note=begin)
        return begin

    def _answer(self, mine: Entry, waiting: Waiting) -> Note:
        place = self._place
        answered = b""
        state = f"{self._name(0)} has not come"
        while True:
            note = self._read(0, max_entries=place.num_ranks)
            if note is not None:
                # "begin" holds for this rank only if it names the number that it has just drawn.
                # Else it is of an attempt before, and answering it shows rank 0 that this rank has
                # begun again.
                is_whole = len(note.entries) == place.num_ranks
                if note.kind is NoteKind.BEGIN and is_whole and note.entries[place.rank] == mine:
                    return note
                if note.kind is NoteKind.OFFER:
                    state = "not all clouds have come"
                if note.offer != answered:
                    answered = note.offer
                    self._leave(0, note=Note(NoteKind.ANSWER, answered, [mine]))
            pause_s = min(pause_after(waiting.waited_s), _LOOK_EVERY_S)
            waiting.go_on(state, look_every_s=pause_s)

    def _answer_of(self, rank: int) -> Note | None:
        """Return the answer that a rank has left for rank 0, to whichever offer."""
        note = self._read(rank, max_entries=1)
        if note is None or note.kind is not NoteKind.ANSWER or not note.entries:
            return None
        return note

    def _leave(self, rank: int, note: Note) -> None:
        body = encode_note(note)
        # Signed with the place at which it lies, so that no note is valid at another one.
        signature = sign(self._signed(self._place.rank, receiver=rank, body=body), key=self._key)
        path = self._path(self._place.rank, receiver=rank)
        self.store.put(path, data=bytes([len(signature)]) + signature + body)

    def _read(self, rank: int, max_entries: int) -> Note | None:
        """Return the note that a rank has left for this one, None for none.

        Raises FrameError for anything that its cloud has not signed.
        """
        # The store may hand out anything, so no more is read than an honest note has.
        most = 1 + 255 + 1 + _NUMBER_BYTES + max_entries * _ENTRY_BYTES
        data = self.store.get(self._path(rank, receiver=self._place.rank), max_bytes=most)
        if not data:
            return None
        signature = data[1 : 1 + data[0]]
        body = data[1 + data[0] :]
        signed = self._signed(rank, receiver=self._place.rank, body=body)
        # Either of two on the day of a change; which one it was is settled by the digest in the
        # note.
        for certificate in self._known(rank):
            try:
                verify(signed, signature=signature, certificate=certificate)
            except SealError:
                continue
            return decode_note(body, sender=self._name(rank), max_entries=max_entries)
        raise FrameError(
            f"{self._name(rank)} has not signed the note in its name in the mailbox, or not with "
            "the certificate that this cloud has of it"
        )

    def _signed(self, sender: int, receiver: int, body: bytes) -> bytes:
        clouds = [self._place.cloud_of(rank) for rank in (sender, receiver)]
        place = (self._place.run.hex(), clouds, sender, receiver)
        return f"xcloud mailbox note {place}".encode() + body

    def _path(self, sender: int, receiver: int) -> str:
        cloud_of = self._place.cloud_of
        folder = folder_of(self._place.run, receiver=(cloud_of(receiver), receiver))
        return f"{folder}/note-{digest((cloud_of(sender), sender))}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self._place.cloud_of(rank)}"

    def _known(self, rank: int) -> Sequence[Certificate]:
        """Return the certificates that the cloud of a rank may have."""
        cloud = self._place.cloud_of(rank)
        if cloud == self._place.cloud_of(self._place.rank):
            return [self._keys.own]
        if cloud not in self._keys.peers:
            raise ConfigError(
                f"cloud {cloud!r} takes part, and `peers` in the policy of this cloud names no "
                f"certificate of it: ask its owner for {cloud}.pem"
            )
        return self._keys.peers[cloud]

    def _certificate(self, rank: int, fingerprint: str) -> Certificate:
        for certificate in self._known(rank):
            if certificate.fingerprint == fingerprint:
                return certificate
        raise ConfigError(
            f"{self._name(rank)} uses a certificate that this cloud does not have (SHA-256 "
            f"{fingerprint:.16}…): ask its owner for the new one"
        )


class MailboxLines:
    """The links of one rank to ranks of other clouds, through a mailbox.

    say: called once a minute with the ranks that are waited for.
    on_lost: see MailboxInLink.

    It waits for all other ranks first. Raises ConfigError for a mailbox that this rank cannot
    write to, and where it has no certificate of a cloud, LinkTimeout for ranks that have not come.
    """

    texts: Sequence[str] = ()
    """The lines that are down, in words: a mailbox has none."""

    def __init__(
        self,
        url: str,
        place: SealedPlace,
        keys: LineKeys,
        say: Callable[[str], None] = ignore,
        on_lost: Callable[[LinkError], object] = ignore,
    ) -> None:
        self.place = place
        self.store = ObjectStore(url)
        self._keys = keys
        self._on_lost = on_lost
        self._key = read_key(keys.key_file)
        rendezvous = MailboxRendezvous(store=self.store, place=place, keys=keys, key=self._key)
        self.attempt, self._certificates = rendezvous.hold(say)
        folder = folder_of(place.run, receiver=(place.cloud_of(place.rank), place.rank))
        self._arrivals = Arrivals(self.store, folder, check=rendezvous.check, on_lost=on_lost)
        # What has come for this attempt stays: a rank may have met the others later than they
        # sent.
        self._arrivals.clean(self.attempt)
        self.outs: list[MailboxOutLink] = []
        self.ins: list[MailboxInLink] = []
        self.words: list[SealedWordLine] = []

    def out(self, line: str, peer: int, settings: OutSettings) -> MailboxOutLink:
        """Return the sending end of a link to a rank of another cloud."""
        out = MailboxOutLink(*self._box(line, sender=self.place.rank, receiver=peer), settings)
        self.outs.append(out)
        return out

    def incoming(self, line: str, peer: int, settings: InSettings) -> MailboxInLink:
        """Return the receiving end of a link from a rank of another cloud."""
        box, keys = self._box(line, sender=peer, receiver=self.place.rank)
        incoming = MailboxInLink(
            box=box, keys=keys, arrivals=self._arrivals, settings=settings, on_lost=self._on_lost
        )
        self.ins.append(incoming)
        return incoming

    def close(self) -> None:
        """Close the lines of words, and take those of the peers out. Called once all other links
        are closed."""
        for line in self.words:
            line.close()
        until_s = time.monotonic() + _CLOSE_S
        for incoming in self.ins:
            incoming.wait(max(0.0, until_s - time.monotonic()))
        with suppress(LinkError):  # what was written again after its link was closed
            self._arrivals.clean(None)
        self.stop()

    def stop(self) -> None:
        """End all threads, whatever is under way."""
        self.store.over.set()

    def abandon(self) -> None:
        """Report to the peers, as far as they can be reached, that this rank has ended early."""
        for out in self.outs:
            out.abandon()

    def _box(self, line: str, sender: int, receiver: int) -> tuple[LinkBox, BoxKeys]:
        place = self.place
        peer = receiver if sender == place.rank else sender
        box = LinkBox(
            store=self.store,
            run=place.run,
            attempt=self.attempt,
            line=line,
            sender=(place.cloud_of(sender), sender),
            receiver=(place.cloud_of(receiver), receiver),
        )
        return box, BoxKeys(key=self._key, own=self._keys.own, peer=self._certificates[peer])

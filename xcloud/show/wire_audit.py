"""`python -m xcloud wire-audit`: what left each cloud of a run, or whether two clouds' records of
what crossed between them agree.

The records of another cloud come from its owner: they are read as data, within bounds.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import DataError, SealError
from xcloud.base.run_folder import check_is_folder, owned
from xcloud.base.terminal import say
from xcloud.base.wording import quoted
from xcloud.job.audit_keys import known_certificates
from xcloud.line.keys import Certificate
from xcloud.line.sealing import verify
from xcloud.net.frame import HEAD_BYTES, Kind
from xcloud.security.audit import (
    MAX_BYTES,
    MAX_RANKS,
    SIGNATURE,
    BoundedInt,
    as_table,
    bounded_bytes,
    compact,
    join_audit,
)

MAX_SIGNATURE_BYTES = 1 << 16

_Name = Annotated[str, Field(max_length=200)]
_COUNTED = {kind.name.lower() for kind in Kind if kind is not Kind.CLOSE}
"""The kinds of messages that records count."""


class _Count(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    rank: BoundedInt
    cloud: _Name
    kind: _Name
    messages: BoundedInt
    bytes: BoundedInt


class _Attempt(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    attempt: BoundedInt
    is_finished: bool
    sent: list[_Count]
    received: list[_Count]

    def counted(self, of: str, peer: int) -> dict[str, Counted]:
        """Return what was "sent" to a rank or "received" from it, by kind."""
        counts: list[_Count] = getattr(self, of)
        return {c.kind: Counted(c.messages, c.bytes) for c in counts if c.rank == peer}


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)
    rank: BoundedInt
    cloud: _Name
    num_ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    attempts: list[_Attempt]


class Counted(NamedTuple):
    """Messages of one kind, and the bytes of their frames."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class ComparedCount:
    """The messages of one kind in an attempt: what one rank sent and another received.

    sent, received: None where there is no record of the attempt.
    is_cut: one of the two did not come to its end, so messages may have been under way.
    """

    sender: str
    receiver: str
    kind: str
    sent: Counted | None
    received: Counted | None
    is_cut: bool

    @property
    def verdict(self) -> str:
        """ "equal", "differs", or, of a cut attempt, "under way" or "not known"."""
        # Equal, or both unknown.
        if self.sent == self.received:
            return "equal"
        if not self.is_cut:
            return "differs"
        if self.sent is None or self.received is None:
            return "not known"
        # Messages that were sent and not yet received when the attempt was cut.
        fewer = self.received.messages < self.sent.messages
        if fewer and self.received.bytes < self.sent.bytes:
            return "under way"
        return "differs"

    @property
    def in_words(self) -> str:
        sides = []
        for what, counted in (("sent", self.sent), ("received", self.received)):
            if counted is None:
                sides.append(f"no record of what was {what}")
            else:
                sides.append(f"{what} {counted.messages:,} messages, {counted.bytes:,} bytes")
        return f"{self.sender} -> {self.receiver} {self.kind}: {'; '.join(sides)}"


@dataclass(frozen=True)
class Comparison:
    """The records of several clouds, side by side.

    pairs: pairs of ranks in different clouds.
    missing: ranks without a record.
    signatures: the signer of each file, or the reason why it is not known.
    refused: files whose signature is not valid.
    not_compared: counts that have no other side, in words. A run that was resumed with fewer
        ranks or other clouds has some, in attempts before the last one.
    """

    pairs: Sequence[ComparedCount]
    missing: Sequence[int]
    signatures: Mapping[str, str]
    refused: Sequence[str]
    not_compared: Sequence[str] = ()

    @property
    def agrees(self) -> bool:
        return not (self.missing or self.refused or list(self.of("differs")))

    def of(self, verdict: str) -> Iterator[ComparedCount]:
        return (pair for pair in self.pairs if pair.verdict == verdict)

    def totals(self) -> dict[str, dict[str, dict[str, Counted]]]:
        """Return sums by "cloud_a -> cloud_b", kind, and "sent" or "received"."""
        sums: dict[str, dict[str, dict[str, Counted]]] = defaultdict(dict)
        for pair in self.pairs:
            way = f"{pair.sender.split()[0]} -> {pair.receiver.split()[0]}"
            both = sums[way].setdefault(pair.kind, {"sent": Counted(), "received": Counted()})
            for side, more in (("sent", pair.sent), ("received", pair.received)):
                if more is not None:
                    num_bytes = both[side].bytes + more.bytes
                    both[side] = Counted(both[side].messages + more.messages, num_bytes)
        return sums


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare the records that lie in these folders. Raises DataError for one that cannot be
    read, and for two of one rank that differ."""
    certificates = known_certificates()
    records: dict[int, _Record] = {}
    texts: dict[int, bytes] = {}
    signatures: dict[str, str] = {}
    refused = []
    known: dict[int, str] = {}
    # This cloud's own folder first: what it says of the ranks holds against the others'.
    for number, folder in enumerate(folders):
        for path in _files([folder]):
            data, record = _read(path)
            if number == 0:
                # This cloud's own records name the clouds of all ranks that it exchanged messages
                # with.
                for attempt in record.attempts:
                    known |= {one.rank: one.cloud for one in (*attempt.sent, *attempt.received)}
                known[record.rank] = record.cloud
    for path in _files(folders):
        data, record = _read(path)
        cloud = known.get(record.rank, record.cloud)
        if cloud != record.cloud:
            raise DataError(
                f"{path} says that rank {record.rank} is of {record.cloud!r}; by the records in "
                f"{folders[0]} it is of {cloud!r}"
            )
        # Two folders may hold the same file; two records of one rank can't both be right.
        if texts.setdefault(record.rank, data) != data:
            raise DataError(
                f"{path} is another record of rank {record.rank} than one that was read before"
            )
        records[record.rank] = record
        # A signature that is wrong is shown, and the comparison goes on.
        try:
            signatures[str(path)] = _signer(
                path, data, cloud=record.cloud, certificates=certificates
            )
        except SealError as error:
            signatures[str(path)] = str(error)
            refused.append(str(path))
    _check_clouds(records.values())
    # Each record says how many ranks there were; the largest number counts.
    num_ranks = max(record.num_ranks for record in records.values())
    missing = sorted(set(range(num_ranks)) - records.keys())
    pairs = [
        pair
        for sender, receiver in permutations(records.values(), 2)
        if sender.cloud != receiver.cloud
        for pair in _pairs(sender, receiver=receiver)
    ]
    # Counts that name a missing rank are not listed one by one: the rank is.
    alone = [line for one in records.values() for line in _alone(one, records, num_ranks)]
    return Comparison(pairs, missing, signatures, refused=refused, not_compared=alone)


def _alone(record: _Record, records: Mapping[int, _Record], num_ranks: int) -> Iterator[str]:
    """Yield a line for each rank whose counts in an attempt of this record are compared with
    nothing: a rank of an earlier attempt alone, or one that is of this record's own cloud now."""
    for attempt in sorted(record.attempts, key=lambda one: one.attempt):
        sums: dict[tuple[int, str, str], Counted] = defaultdict(Counted)
        for way, counts in (("sent to", attempt.sent), ("received from", attempt.received)):
            for one in counts:
                peer = records.get(one.rank)
                is_gone = peer is None and one.rank >= num_ranks
                # Records of one cloud are not compared with each other; the rank was elsewhere.
                has_moved = peer is not None and record.cloud == peer.cloud != one.cloud
                if is_gone or has_moved:
                    before = sums[one.rank, one.cloud, way]
                    num_bytes = before.bytes + one.bytes
                    sums[one.rank, one.cloud, way] = Counted(
                        before.messages + one.messages, num_bytes
                    )
        for (rank, cloud, way), both in sums.items():
            yield (
                f"{record.cloud} rank {record.rank}, attempt {attempt.attempt}: "
                f"{both.messages:,} messages, {both.bytes:,} bytes {way} {cloud} rank {rank}"
            )


def _check(path: Path, record: _Record) -> None:
    """Raise DataError for a record that no rank can have written. What names another rank, or
    stands twice, would be compared with nothing, and the records would agree all the same."""

    def refuse(said: str) -> NoReturn:
        raise DataError(f"{path} is no record of what crossed: {said}")

    if record.rank >= record.num_ranks:
        refuse(f"it is of rank {record.rank}, and counts {record.num_ranks} ranks from 0")
    numbers = [one.attempt for one in record.attempts]
    if len({*numbers}) < len(numbers):
        refuse("it has an attempt twice")
    last = max(numbers, default=0)
    for attempt in record.attempts:
        # An attempt before the last one may have had more ranks, as a run is resumed with others.
        num_ranks = record.num_ranks if attempt.attempt == last else MAX_RANKS
        for way, counts in (("sent", attempt.sent), ("received", attempt.received)):
            where = f"attempt {attempt.attempt}, {way}"
            seen = {(one.rank, one.kind) for one in counts}
            if len(seen) < len(counts):
                refuse(f"{where}: a kind of messages stands twice for one rank")
            for one in counts:
                if one.rank >= num_ranks or one.rank == record.rank:
                    refuse(
                        f"{where}: it names rank {one.rank}, which is not another one of its "
                        f"{num_ranks:,} ranks"
                    )
                if one.kind not in _COUNTED:
                    refuse(f"{where}: there are no messages of the kind {quoted(one.kind)}")
                # Every frame has a head, so no message is shorter.
                if one.messages == 0 or one.bytes < one.messages * HEAD_BYTES:
                    refuse(
                        f"{where}: {one.messages:,} messages of the kind {one.kind} cannot have "
                        f"{one.bytes:,} bytes"
                    )


def _check_clouds(records: Iterable[_Record]) -> None:
    """Raise DataError if records place one rank in different clouds in their last attempts. Before
    those, a resumed run may have had other clouds."""
    clouds: dict[int, str] = {}
    for record in records:
        named = [(record.rank, record.cloud)]
        for attempt in sorted(record.attempts, key=lambda one: one.attempt)[-1:]:
            named += [(one.rank, one.cloud) for one in (*attempt.sent, *attempt.received)]
        for rank, cloud in named:
            if clouds.setdefault(rank, cloud) != cloud:
                raise DataError(
                    f"the record of rank {record.rank} says that rank {rank} is of {cloud!r}; by "
                    f"another count it is of {clouds[rank]!r}"
                )


def _files(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        check_is_folder(folder)
        found = sorted(folder.glob("rank*.wire.json"))
        if not found:
            raise DataError(
                f"there is no rank*.wire.json in {folder}; every rank of a run writes one at its "
                "end"
            )
        yield from found


def _read(path: Path) -> tuple[bytes, _Record]:
    data = bounded_bytes(path, MAX_BYTES)
    try:
        record = _Record.model_validate(parsed_json(data))
    except (ValidationError, ValueError, RecursionError) as error:
        line = str(error).splitlines()[0]
        raise DataError(f"{path} is no record of what crossed: {line:.200}") from None
    _check(path, record)
    return data, record


def _signature(file: Path) -> Mapping[str, Any]:
    """Return what a signature file holds; nothing where there is none. Raises SealError."""
    if not file.exists():
        return {}
    try:
        # Another owner's file.
        found = parsed_json(bounded_bytes(file, MAX_SIGNATURE_BYTES))
    except (DataError, ValueError, OSError):
        raise SealError(f"{file} holds no signature") from None
    return found if isinstance(found, dict) else {}


def _signer(
    path: Path, data: bytes, cloud: str, certificates: Mapping[str, Sequence[Certificate]]
) -> str:
    """Return who signed a record, in words. Raises SealError where this cloud knows a certificate
    of its cloud, by which it is not signed."""
    known = certificates.get(cloud, [])
    file = path.with_suffix(SIGNATURE)
    given = _signature(file)
    # A policy that knows some clouds is meant to know all of them.
    if certificates and not known:
        names = ", ".join(sorted(certificates))
        raise SealError(
            f"this cloud's policy has no certificate of {cloud}; it has some of {names}"
        )
    if not given:
        # Not signed is as bad as signed by another, once a certificate is known.
        if known:
            raise SealError(f"not signed, and this cloud's policy has a certificate of {cloud}")
        return "not signed"
    if not known:
        return f"signed, but no certificate of {cloud} is in this cloud's policy to check it by"
    # A cloud may have changed its certificate, and the record be of before.
    for certificate in known:
        if certificate.fingerprint == given.get("certificate"):
            try:
                verify(
                    data,
                    signature=bytes.fromhex(str(given.get("signature"))),
                    certificate=certificate,
                )
            except ValueError:
                raise SealError(f"{file} holds no signature") from None
            return f"signed by {cloud}"
    raise SealError(f"signed with a key that is not {cloud}'s by this cloud's policy")


def _pairs(sender: _Record, receiver: _Record) -> Iterator[ComparedCount]:
    of_sender = {one.attempt: one for one in sender.attempts}
    # Attempt by attempt: a cut one explains why counts differ in it.
    of_receiver = {one.attempt: one for one in receiver.attempts}
    for attempt in sorted(of_sender.keys() | of_receiver.keys()):
        out = of_sender.get(attempt)
        into = of_receiver.get(attempt)
        sent = out.counted("sent", peer=receiver.rank) if out is not None else {}
        received = into.counted("received", peer=sender.rank) if into is not None else {}
        is_cut = any(one is not None and not one.is_finished for one in (out, into))
        for kind in sorted(sent.keys() | received.keys()):
            yield ComparedCount(
                sender=f"{sender.cloud} rank {sender.rank}",
                receiver=f"{receiver.cloud} rank {receiver.rank}",
                kind=kind,
                sent=None if out is None else sent.get(kind, Counted()),
                # No record of the attempt is not the same as a record of nothing.
                received=None if into is None else received.get(kind, Counted()),
                is_cut=is_cut,
            )


def in_words(found: Comparison) -> str:
    """Return the comparison for a terminal: sums, then what does not agree."""
    lines = []
    for way, kinds in found.totals().items():
        for kind, both in kinds.items():
            sent = both["sent"]
            received = both["received"]
            same = "equal" if sent == received else "NOT EQUAL"
            lines.append(
                f"{way}  {kind:<12} sent {sent.messages:>8} messages {sent.bytes:>14,} bytes, "
                f"received {received.messages:>8} messages {received.bytes:>14,} bytes  {same}"
            )
    for verdict, remark in (
        ("under way", "the attempt was interrupted, which explains it"),
        ("not known", "one of the two was ended before it could write its record"),
        ("differs", "NOTHING EXPLAINS IT"),
    ):
        lines += [f"{pair.in_words}: {remark}" for pair in found.of(verdict)]
    if found.missing:
        names = ", ".join(map(str, found.missing))
        lines.append(f"not compared: ranks {names}, whose records are not here")
    lines += [f"not compared: {line}, which has no record of that" for line in found.not_compared]
    lines += [f"{file}: {said}" for file, said in found.signatures.items()]
    lines.append("the records agree" if found.agrees else "the records do not agree")
    return "\n".join(lines)


def as_json(found: Comparison) -> str:
    listed = ("differs", "under way", "not known")
    content = {
        "agrees": found.agrees,
        "totals": found.totals(),
        **{verdict.replace(" ", "_"): [*map(vars, found.of(verdict))] for verdict in listed},
        "missing_ranks": found.missing,
        "not_compared": found.not_compared,
        "signatures": found.signatures,
        "refused_signatures": found.refused,
    }
    return json.dumps(content, indent=1, default=lambda value: value._asdict())


def main(arguments: Sequence[str] | None = None) -> int:
    """Say what left each cloud of a run; of two folders, whether their records of what crossed
    between clouds agree."""
    parser = argparse.ArgumentParser("python -m xcloud wire-audit", description=main.__doc__)
    parser.add_argument("run_dir", type=Path, help="folder with the rank*.wire.json of a run")
    parser.add_argument("other", type=Path, nargs="?", help="the same of the other cloud")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    if given.other is not None:
        found = compare([given.run_dir, given.other])
        say(as_json(found) if given.json else in_words(found))
        return 0 if found.agrees else 1
    check_is_folder(given.run_dir)
    # The joined audit is written into the folder.
    with owned(given.run_dir):
        audit = join_audit(given.run_dir)
    say(json.dumps(compact(audit), indent=1) if given.json else as_table(audit))
    return 0

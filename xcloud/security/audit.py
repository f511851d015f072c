"""List what left each cloud: every kind of message with its parts, count and bytes.
Taken from the links' records; contains no tensor values.

Every rank writes `rankN.wire.json` to its run folder once its links have closed, so nothing it
sent is missing. If a rank's file is missing, what its receivers recorded is used instead (one-way
jobs, which outlive a producer). `join_audit` merges the files of a folder into `wire_audit.json`;
for a run on several machines copy them into one folder first and run
    python -m xcloud wire-audit RUN_DIR
Token ids count as text. What activations and gradients give away is the leak meter's matter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import DataError
from xcloud.layout import Layout
from xcloud.net.frame import Kind
from xcloud.net.link import LinkRecord
from xcloud.record.files import read_json, replace_text

AUDIT_FILE = "wire_audit.json"
MAX_BYTES = 1 << 24
"""Of one rank's record."""
MAX_RANKS = 1 << 20
_KINDS = {kind.name.lower() for kind in Kind}
_STRICT = ConfigDict(strict=True)
BoundedInt = Annotated[int, Field(ge=0, lt=1 << 63)]
BoundedText = Annotated[str, Field(max_length=1000)]
_SpanText = Annotated[str, Field(pattern="^[0-9]{1,19}-[0-9]{1,19}$")]

_TEXT = {"text", "source", "target", "ids", "tokens", "first", "second"}  # fields of tasks
_LABELS = {"label", "labels", "start", "end"}

_TELLING = {
    ("activation", "evaluation", "start"): "hidden states",
    ("gradient", "averaging"): "gradients and weight changes",
}

log = logging.getLogger(__name__)
_DIRECTION = {
    **dict.fromkeys(("activation", "evaluation", "start", "batch"), "forward"),
    "gradient": "backward",
}

# What crosses before the first step, by which ranks find each other and agree on what they run.
UNFRAMED = [
    "rendezvous, in a store: addresses and ports of the ranks, names of their process groups; "
    "where ranks may begin again, how often each has",
    "start, between each rank and rank 0: settings of the experiment, digests of the code, "
    "checkpoints, numbers of samples and digests of the task's settings and data: lines of text, "
    "and whether the rank may start; where ranks may restart, digests of parameters",
    "start, from rank 0: a number for this run and one for its machine (emulated links only)",
    "start: a barrier before the first step, but where ranks may begin again",
    "start, in a mailbox: random numbers and digests of certificates, signed",
]


Sign = Callable[[bytes], dict[str, str]]
"""Returns the signature of a file's bytes: the cloud, its certificate's SHA-256, the signature."""


def audit_file(run_dir: Path, rank: int) -> Path:
    return run_dir / f"rank{rank}.wire.json"


EARLIER = ".earlier.json"
"""The ending, in place of .json, of the record of a rank's last attempt while it makes another
one."""
SIGNATURE = ".signature"
"""The ending, in place of .json, of the signature of a rank's record."""


def set_aside(audit: Path) -> None:
    """Keep a rank's record for the counts of the next attempt, which it is not a record of."""
    if audit.exists():
        audit.replace(audit.with_suffix(EARLIER))


def write_rank_audit(
    run_dir: Path,
    rank: int,
    layout: Layout,
    records: Sequence[LinkRecord],
    report_contents: Mapping[str, set[str]],
    received: Mapping[int, LinkRecord] | None = None,
    attempt: int = 0,
    is_finished: bool = True,
    sign: Sign | None = None,
) -> None:
    """Write what one rank sent, for the joined audit, and what it sent and received, for a
    comparison with the records of others (show/wire_audit.py).

    report_contents: the names of the fields of each kind of event.
    received: the records of received messages, by rank of the sender.
    attempt: a number that all ranks have in common. Counts of earlier attempts in the file stay.
    is_finished: the links have closed, so no message is under way.
    sign: a function that makes the signature of the file; None: it has none.

    Warns if the file cannot be written; the joined audit then lacks this rank.
    """
    path = audit_file(run_dir, rank)
    # From the link's own counts, taken where frames are written.
    sent = [message for record in records for message in record.described()]
    # Reports cross only where rank 0 is in another cloud.
    crosses = any(message["kind"] == "report" for message in sent)
    audit = {
        "rank": rank,
        "cloud": layout.placement(rank).cloud,
        "num_ranks": layout.num_ranks,
        "crosses_clouds": layout.crosses_clouds,
        "messages": sent,
        "received": [
            {"sender": sender, "from": layout.placement(sender).cloud, **message}
            for sender, record in (received or {}).items()
            for message in record.described()
        ],
        "unframed": UNFRAMED,
        "reports": _sorted(report_contents) if crosses else {},
        "attempts": [
            # The counts of each attempt stay apart, as both ends compare them attempt by attempt.
            *_earlier_attempts(path, attempt),
            {
                "attempt": attempt,
                "is_finished": is_finished,
                "sent": _counted(records, layout=layout, rank=rank, arrived=False),
                "received": _counted(records, layout=layout, rank=rank, arrived=True),
            },
        ],
    }
    text = json.dumps(audit, indent=1)
    try:
        # Written as a whole, as the joined audit reads it at any time.
        replace_text(path, text)  # a partial file would break the joined audit
        if sign is not None:
            signature = sign(text.encode())
            replace_text(path.with_suffix(SIGNATURE), text=json.dumps(signature, indent=1))
        else:
            # A signature of an earlier attempt is none of this file.
            path.with_suffix(SIGNATURE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s could not be written: %s", path, error)


def _earlier_attempts(path: Path, attempt: int) -> list[dict[str, Any]]:
    """Return the counts of earlier attempts, which this rank's own files have."""
    # A file that was set aside, then the current one, whose numbers count where both have an
    # attempt.
    attempts = {
        one["attempt"]: one
        for file in (path.with_suffix(EARLIER), path)
        for one in read_json(file).get("attempts", [])
    }
    return [one for number, one in attempts.items() if number != attempt]


def _counted(
    records: Sequence[LinkRecord], layout: Layout, rank: int, arrived: bool
) -> list[dict[str, Any]]:
    """Return how many messages, and bytes of whole frames, of each kind a rank sent to each other
    rank in another cloud, or received from it. The words that end a link do not count."""
    sums: dict[tuple[int, str], list[int]] = {}
    for record in records:
        if arrived:
            messages = record.arrived_messages
            sizes = record.arrived_bytes
            peer = record.link.sender
        else:
            messages = record.num_messages
            sizes = record.num_bytes
            peer = record.link.receiver
        # A copy: a link that still closes may count on.
        for kind, num in [*messages.items()]:
            if kind is not Kind.CLOSE and peer != rank:
                both = sums.setdefault((peer, kind.name.lower()), [0, 0])
                both[0] += num
                both[1] += sizes[kind]
    return [
        {
            "rank": peer,
            "cloud": layout.cloud_of(peer),
            "kind": kind,
            "messages": num,
            "bytes": size,
        }
        for (peer, kind), (num, size) in sorted(sums.items())
    ]


class _Part(BaseModel):
    model_config = _STRICT
    carries: BoundedText
    dtype: BoundedText
    shape: Annotated[list[BoundedInt | _SpanText], Field(max_length=16)]


def _known_kind(kind: str) -> str:
    if kind not in _KINDS:
        raise ValueError("there are no messages of this kind")
    return kind


class _Message(BaseModel):
    model_config = _STRICT
    to: BoundedText
    receiver: BoundedInt
    kind: Annotated[BoundedText, AfterValidator(_known_kind)]
    boundary: int | BoundedText | None
    parts: Annotated[list[_Part], Field(max_length=1000)]
    num_messages: Annotated[BoundedInt, Field(ge=1)]
    num_bytes: BoundedInt


class _Received(_Message):
    sender: BoundedInt
    from_cloud: Annotated[BoundedText, Field(alias="from")]


class _RankRecord(BaseModel):
    """The fields of a rank's record that join_audit reads. Another owner may have written it."""

    model_config = _STRICT
    rank: BoundedInt
    cloud: BoundedText
    num_ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    crosses_clouds: bool
    messages: Annotated[list[_Message], Field(max_length=100_000)]
    received: Annotated[list[_Received], Field(max_length=100_000)]
    unframed: Annotated[list[BoundedText], Field(max_length=1000)]
    reports: Annotated[dict[BoundedText, list[BoundedText]], Field(max_length=1000)]


def bounded_bytes(path: Path, most: int) -> bytes:
    """Return what a file holds. Raises DataError for one that is too long, or no file."""
    # Another owner's file: bounded before it is parsed.
    if not path.is_file():  # a pipe might never end
        raise DataError(f"{path} is no file")
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DataError(f"{path} is longer than {most:,} bytes, too long for what it should be")
    return data


def _read_record(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = parsed_json(bounded_bytes(path, MAX_BYTES))
        # Checked as a whole, then used as it is.
        _RankRecord.model_validate(found)
    except (ValidationError, ValueError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{path} is no record of what crossed: {said:.200}") from None
    return found


def _check_ranks(run_dir: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Raise DataError unless each record is of another one of the run's ranks, and what it counts
    is of messages between it and others of them, in their clouds. Any other would count twice, or
    not at all, or as what another cloud was sent."""
    num_ranks = records[0]["num_ranks"]
    clouds: dict[int, str] = {}
    for record in records:
        rank = record["rank"]
        if rank in clouds:
            raise DataError(f"{run_dir} has two records of rank {rank}; remove one")
        clouds[rank] = record["cloud"]
        if record["num_ranks"] != num_ranks:
            raise DataError(
                f"the records in {run_dir} are of runs with {num_ranks} and with "
                f"{record['num_ranks']} ranks; remove those of the other run"
            )
    for record in records:
        rank = record["rank"]
        ways = [(rank, one["receiver"], one["to"]) for one in record["messages"]]
        ways += [(one["sender"], one["receiver"], one["to"]) for one in record["received"]]
        for sender, receiver, to in ways:
            named = max(sender, receiver)
            if named >= num_ranks:
                raise DataError(
                    f"the record of rank {rank} in {run_dir} names rank {named}, and the run has "
                    f"{num_ranks} ranks from 0"
                )
            if rank not in (sender, receiver) or sender == receiver:
                raise DataError(
                    f"the record of rank {rank} in {run_dir} counts messages of rank {sender} to "
                    f"rank {receiver}"
                )
            if clouds.get(receiver, to) != to:
                raise DataError(
                    f"the record of rank {rank} in {run_dir} says that rank {receiver} is of "
                    f"{to!r}; its own says {clouds[receiver]!r}"
                )
        if rank >= num_ranks:
            raise DataError(
                f"the record of rank {rank} in {run_dir} names rank {rank}, and the run has "
                f"{num_ranks} ranks from 0"
            )


def join_audit(run_dir: Path) -> dict[str, Any]:
    """Write wire_audit.json from the ranks' files in the folder. Raises DataError without any."""
    ranks = [_read_record(path) for path in sorted(run_dir.glob("rank*.wire.json"))]
    if not ranks:
        raise DataError(
            f"there is no rank*.wire.json in {run_dir}; every rank of a run writes one at its end"
        )
    _check_ranks(run_dir, ranks)
    joined: dict[str, dict[str, Any]] = {}
    reports: dict[str, set[str]] = {}
    # Every rank says how many there are.
    missing = sorted(set(range(ranks[0]["num_ranks"])) - {rank["rank"] for rank in ranks})
    for rank in ranks:
        # What a rank sent is in its own record. For a rank without one, its receivers' stand in.
        of_missing = [message for message in rank["received"] if message["sender"] in missing]
        for message in [*({**m, "from": rank["cloud"]} for m in rank["messages"]), *of_missing]:
            boundary = message["boundary"]
            parts = message["parts"]
            head = {
                "from": message["from"],
                "to": message["to"],
                "boundary": "control" if boundary is None else boundary,
                "direction": _DIRECTION.get(message["kind"], ""),
                "kind": message["kind"],
            }
            # Messages that differ in sizes alone are one entry: their shapes become ranges.
            # Shapes are merged entry by entry, so their number must be the same.
            make_up = [[p["carries"], p["dtype"], len(p["shape"])] for p in parts]
            new = {**head, "parts": parts, "num_messages": 0, "num_bytes": 0}
            entry = joined.setdefault(json.dumps([head, make_up]), new)
            for mine, other in zip(entry["parts"], parts, strict=True):
                mine["shape"] = [*map(_span, mine["shape"], other["shape"])]
            # Counted once: what a receiver recorded is used only of senders without a record.
            for count in ("num_messages", "num_bytes"):
                entry[count] += message[count]
        for event, names in rank["reports"].items():
            reports.setdefault(event, set()).update(names)
    audit = {
        "ranks": [rank["rank"] for rank in ranks],
        "missing_ranks": missing,
        "messages": list(joined.values()),
        "reports": _sorted(reports),
        # A run in one cloud has no words between clouds.
        "unframed": ranks[0]["unframed"] if ranks[0]["crosses_clouds"] else [],
    }
    text = json.dumps(audit, indent=1, ensure_ascii=False)
    (run_dir / AUDIT_FILE).write_text(text + "\n", encoding="utf-8")
    return audit


def compact(audit: Mapping[str, Any]) -> dict[str, Any]:
    """Return a short form for summary.json: "a -> b" -> kind -> messages, bytes, contents."""
    short: dict[str, Any] = {}
    for message in audit["messages"]:
        kinds = short.setdefault(f"{message['from']} -> {message['to']}", {})
        name = message["kind"]
        # Control messages belong to no boundary.
        if message["boundary"] != "control":
            name = f"{name} {message['boundary']}"
        entry = kinds.setdefault(name, {"messages": 0, "bytes": 0, "carries": []})
        entry["messages"] += message["num_messages"]
        entry["bytes"] += message["num_bytes"]
        for part in message["parts"]:
            if part["carries"] not in entry["carries"]:
                entry["carries"].append(part["carries"])
    if audit["missing_ranks"]:
        short["missing_ranks"] = audit["missing_ranks"]
    return short


def as_table(audit: Mapping[str, Any]) -> str:
    """Return lines for a terminal that say what left each cloud.

    They begin with whether texts or labels did, and how much did from which they may be guessed.
    """
    lines = [*_in_words(audit), ""]
    for way, kinds in compact({**audit, "missing_ranks": []}).items():
        for kind, found in kinds.items():
            head = f"{way}  {kind:<14}{found['messages']:>8} messages {found['bytes']:>14,} bytes"
            lines.append(f"{head}  {'; '.join(found['carries'])}".rstrip())
    return "\n".join(lines)


def _in_words(audit: Mapping[str, Any]) -> list[str]:
    # A part is named by its field, and what follows the name describes it.
    parts = [(m["kind"], p["carries"].split()[0]) for m in audit["messages"] for p in m["parts"]]
    crosses = {
        # A batch of a one-way job is token ids by its kind.
        "token ids": any(kind == "batch" or name in _TEXT for kind, name in parts),
        "labels": any(name in _LABELS for _, name in parts),
    }
    lines = [f"{what} as such: {'yes' if found else 'no'}" for what, found in crosses.items()]
    for kinds, what in _TELLING.items():
        # Hidden states are no text, and texts can be guessed from them.
        num_bytes = sum(m["num_bytes"] for m in audit["messages"] if m["kind"] in kinds)
        if num_bytes:
            lines.append(f"{what}: {num_bytes:,} bytes, from which texts may be guessed")
    # Only if there is something to measure.
    if len(lines) > len(crosses):
        lines.append("security/meter=attack measures how much of them can be")
    if missing := audit["missing_ranks"]:
        names = ", ".join(map(str, missing))
        lines.append(f"not known of ranks {names}, whose records are not here")
    return lines


def _sorted(contents: Mapping[str, set[str]]) -> dict[str, list[str]]:
    return {event: sorted(names) for event, names in sorted(contents.items())}


def _span(a: int | str, b: int | str) -> int | str:
    """Merge 3 and "5-7" into "3-7"."""
    # Both may be ranges.
    ends = sorted(int(number) for size in (a, b) for number in str(size).split("-"))
    if ends[0] == ends[-1]:
        return ends[0]
    return f"{ends[0]}-{ends[-1]}"

"""Before anything else, all ranks compare what they are about to run. A difference ends the run in
every rank with the same message: the setting, its values, and the ranks and clouds that have them.
The data are checked later, by fingerprint (loading.py).

Clouds draw batches, learning rates and dropout from the experiment file alone. So another `seed`
pairs samples that do not belong together, another `clip_norm` makes one rank wait for a norm that
is never sent, and another layout hangs the process groups. So the comparison comes before wiring
and loading: every rank with rank 0, by what they write into the store where they meet.

What is compared is defined in compared.py. Tables of other ranks are not trusted: they are limited
in bytes, lines and text, and to printable ASCII.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from xcloud.base.errors import ConfigError, FrameError
from xcloud.cluster.transport import Meeting
from xcloud.job.job import Job
from xcloud.survive.changes import MAX_VALUE, PATH
from xcloud.survive.resume import HELD, held_in, newest_common

MAX_BYTES = 1 << 18
_MAX_LINES = 8192
_MAX_SHOWN = 8
_MAX_TEXT = 16_384

Table = Mapping[str, str]
"""As returned by compared.make_table."""
_PRINTABLE = r"^[ -~]*$"
_TABLE = TypeAdapter(
    Annotated[
        dict[
            Annotated[
                str,
                StringConstraints(pattern=rf"^(setting|code|fact|info|{HELD.strip()}) [ -~]*$"),
            ],
            Annotated[str, StringConstraints(pattern=_PRINTABLE, max_length=MAX_VALUE)],
        ],
        Field(max_length=_MAX_LINES),
    ]
)


@dataclass(frozen=True)
class Verdict:
    """Rank 0's answer to one rank. kind: go = start; stop = the run ends; refused = this rank
    ends, and the run continues without it and the other `refused` ranks. text: the reason or,
    with `go`, a note for the user; may be empty. from_step: of the checkpoint that all go on from;
    0 = from the start. attempt: a number that no other attempt at this run has."""

    kind: Literal["go", "stop", "refused"] = "go"
    refused: tuple[Annotated[int, Field(ge=0)], ...] = ()
    text: Annotated[str, StringConstraints(pattern=_PRINTABLE, max_length=_MAX_TEXT)] = ""
    from_step: Annotated[int, Field(ge=0, lt=1 << 60)] = 0
    attempt: Annotated[int, Field(ge=0)] = 0


_VERDICT = TypeAdapter(Verdict)


def agree(job: Job, meeting: Meeting, mine: Table) -> Verdict:
    """Compare with all ranks; where ranks may begin at any time, with those that save, and the
    others with rank 0. Every rank calls it first.

    mine: what this rank runs (compared.make_table), and its checkpoints (RankCheckpoints.table).
    Raises ConfigError in every rank that cannot go on; a rank of a producer that is refused while
    the others suffice finds `kind == "refused"` instead, as it must still join the wiring before
    it may leave.
    """
    rank, everyone = meeting.rank, range(meeting.num_ranks)
    compared = job.saving_ranks if meeting.is_open else everyone
    if rank in compared:
        meeting.write(f"table.{rank}", encode_table(mine))

    def name_of(rank: int) -> str:
        return rank_name(job, rank)

    def table_of(rank: int) -> dict[str, str]:
        return decode_table(meeting.read(f"table.{rank}", rank), name_of(rank))

    if rank == 0:
        tables: dict[int, Table] = {0: mine}
        unread: dict[int, str] = {}
        for peer in sorted({*compared} - {0}):
            try:
                tables[peer] = table_of(peer)
            except FrameError as error:  # the other ranks must be told too
                unread[peer] = str(error)
        judged, attempt = judge(tables, unread, name_of, job.refused_with), time.time_ns()
        for peer, verdict in judged.items():
            told = replace(verdict, text=_printable(verdict.text), attempt=attempt)
            meeting.write(f"verdict.{peer}", json.dumps(asdict(told)))
    elif rank not in compared:
        theirs = {key: v for key, v in table_of(0).items() if not key.startswith(HELD)}
        own = judge({0: theirs, rank: mine}, {}, name_of, job.refused_with)[rank]
        if own.kind != "go":
            raise ConfigError(own.text)
    of = rank if rank in compared else 0
    verdict = decode_verdict(meeting.read(f"verdict.{of}", 0))
    if verdict.kind == "stop":
        raise ConfigError(verdict.text)
    return verdict


def judge(
    tables: Mapping[int, Table],
    unread: Mapping[int, str],
    name_of: Callable[[int], str],
    refused_with: Callable[[frozenset[int]], frozenset[int]],
) -> dict[int, Verdict]:
    """Verdicts by rank. tables: of all ranks except `unread`, whose tables are invalid."""
    everyone = [*tables, *unread]
    others = [rank for rank in tables if rank != 0]
    differing: dict[str, list[int]] = {}  # key -> ranks, other than rank 0 has it
    for rank in others:
        for key in _differences(tables[0], tables[rank]):
            differing.setdefault(key, []).append(rank)
    noted = {key: ranks for key, ranks in differing.items() if key.startswith("info ")}
    bad = frozenset(r for k, ranks in differing.items() if k not in noted for r in ranks)
    bad |= frozenset(unread)
    if not bad:
        torches = _describe_values("info torch", tables, noted.get("info torch", ()), name_of)
        text = f"clouds run different builds of torch: {torches}" if torches else ""
        return _start(tables, everyone, (), text, name_of)

    said = list(unread.values())
    shown = [key for key in sorted(differing) if key.startswith(("setting ", "fact "))]
    for key in shown[:_MAX_SHOWN]:
        said.append(
            f"{key.split(' ', 1)[1]} is {_describe_values(key, tables, differing[key], name_of)}"
        )
    if len(shown) > _MAX_SHOWN:
        said.append(f"and {len(shown) - _MAX_SHOWN} more settings")
    files = [key for key in sorted(differing) if key.startswith("code ")]
    if files:
        said.append(_describe_code(files, tables, differing, name_of))
    text = (
        f"the ranks do not run the same experiment: {'; '.join(said)}. All clouds need the same "
        "experiment file and the same code of xcloud; copy both from one place and start again. "
        "Paths, caches, devices and trackers may differ."
    )
    # A rank with another layout cannot even join the process groups.
    fits = not unread and not any(key.startswith("setting cluster.") for key in differing)
    refused = refused_with(bad) if fits else frozenset()
    if not refused:
        return {rank: Verdict("stop", (), text) for rank in everyone}
    return _start(tables, everyone, tuple(sorted(refused)), text, name_of)


def _start(
    tables: Mapping[int, Table],
    everyone: Sequence[int],
    refused: tuple[int, ...],
    text: str,
    name_of: Callable[[int], str],
) -> dict[int, Verdict]:
    """All but the refused ranks begin, or go on from the newest checkpoint that all of them
    hold."""
    held = {rank: held_in(table) for rank, table in tables.items() if rank not in refused}
    try:
        step, note = newest_common(held, name_of)
    except ConfigError as error:
        return {rank: Verdict("stop", (), str(error)) for rank in everyone}
    text = "; ".join(filter(None, (text, note)))
    return {
        rank: Verdict("refused" if rank in refused else "go", refused, text, step)
        for rank in everyone
    }


def _differences(mine: Table, theirs: Table) -> list[str]:
    return [
        key
        for key in mine.keys() | theirs.keys()
        if not key.startswith(HELD)
        and PATH not in (mine.get(key), theirs.get(key))
        and mine.get(key) != theirs.get(key)
    ]


def _describe_values(
    key: str, tables: Mapping[int, Table], ranks: Sequence[int], name_of: Callable[[int], str]
) -> str:
    """'1 in rank 0 (a), 2 in rank 1 (b)'; empty if no rank differs."""
    holders: dict[str, list[int]] = {}
    for rank in (0, *ranks):
        holders.setdefault(tables[rank].get(key, "not set"), []).append(rank)
    if not ranks:
        return ""
    return ", ".join(f"{value} in {_names(held, name_of)}" for value, held in holders.items())


def _describe_code(
    files: Sequence[str],
    tables: Mapping[int, Table],
    differing: Mapping[str, list[int]],
    name_of: Callable[[int], str],
) -> str:
    ranks = sorted({rank for key in files for rank in differing[key]})
    names = [key.split(" ", 1)[1] for key in files]
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    commits = _describe_values("info commit", tables, ranks, name_of)
    return (
        f"the code of {_names(ranks, name_of)} is not that of {name_of(0)}, in "
        f"{', '.join(names[:_MAX_SHOWN])}{more} (commit {commits})"
    )


def _names(ranks: Sequence[int], name_of: Callable[[int], str]) -> str:
    more = f" and {len(ranks) - _MAX_SHOWN} more ranks" if len(ranks) > _MAX_SHOWN else ""
    return ", ".join(name_of(rank) for rank in ranks[:_MAX_SHOWN]) + more


def rank_name(job: Job, rank: int) -> str:
    if rank >= job.cluster.num_ranks:  # this rank's file knows fewer
        return f"rank {rank}"
    return f"rank {rank} (cloud {job.cluster.placement(rank).cloud})"


def encode_table(table: Table) -> str:
    """JSON. Raises ConfigError for an experiment that is too large to compare."""
    text = json.dumps(table)
    if len(text) > MAX_BYTES or len(table) > _MAX_LINES:
        raise ConfigError(
            f"this experiment has {len(table)} settings and files in {len(text):,} bytes, too "
            f"many to compare between clouds (at most {_MAX_LINES} and {MAX_BYTES:,}); move long "
            "lists into files"
        )
    return text


def decode_table(text: str, sender: str) -> dict[str, str]:
    """Raises FrameError for anything but what encode_table makes."""
    try:
        return _TABLE.validate_json(text if len(text) <= MAX_BYTES else "")
    except ValidationError as error:
        raise FrameError(
            f"{sender} sent no table of settings and digests: {_why(error)}"
        ) from None


def decode_verdict(text: str) -> Verdict:
    try:
        return _VERDICT.validate_json(text, strict=True)
    except ValidationError as error:
        raise FrameError(f"rank 0 sent no verdict on what the ranks run: {_why(error)}") from None


def _why(error: ValidationError) -> str:
    """The first reason, without what was sent."""
    return str(error.errors()[0]["msg"])


def _printable(text: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:_MAX_TEXT]

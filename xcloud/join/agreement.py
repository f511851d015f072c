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
from xcloud.join.compared import MAX_VALUE, PATH, Table

MAX_BYTES = 1 << 18
_MAX_LINES = 8192
_MAX_SHOWN = 8
_MAX_TEXT = 16_384

_PRINTABLE = r"^[ -~]*$"
_KEY = Annotated[str, StringConstraints(pattern=_PRINTABLE)]
_VALUE = Annotated[str, StringConstraints(pattern=_PRINTABLE, max_length=MAX_VALUE)]
_SECTION = Annotated[dict[_KEY, _VALUE], Field(max_length=_MAX_LINES)]
_TABLE = TypeAdapter(dict[Literal["setting", "code", "fact", "info", "held"], _SECTION])

NameOf = Callable[[int], str]
"""Of a rank, for messages."""

Held = Mapping[str, str]
"""Of a rank's checkpoints a line each, by step."""

Newest = Callable[[Mapping[int, Held], NameOf], tuple[int, str]]
"""By what the ranks hold the step that all go on from, 0 for the start, and a note for the user.
Raises ConfigError."""


@dataclass(frozen=True)
class Verdict:
    """Rank 0's answer. kind: go = start; stop = the run ends. refused: ranks that end, while the
    run continues without them. text: the reason or, with `go`, a note for the user; may be empty.
    from_step: of the checkpoint that all go on from; 0 = from the start. attempt: a number that no
    other attempt at this run has."""

    kind: Literal["go", "stop"] = "go"
    refused: tuple[Annotated[int, Field(ge=0)], ...] = ()
    text: Annotated[str, StringConstraints(pattern=_PRINTABLE, max_length=_MAX_TEXT)] = ""
    from_step: Annotated[int, Field(ge=0, lt=1 << 60)] = 0
    attempt: Annotated[int, Field(ge=0)] = 0


_VERDICT = TypeAdapter(Verdict)


def agree(job: Job, meeting: Meeting, mine: Table, held: Held, newest: Newest) -> Verdict:
    """Compare with all ranks; where ranks may begin at any time, with those that save, and the
    others with rank 0. Every rank calls it first.

    mine: what this rank runs (compared.table_of). Raises ConfigError in every rank that cannot go
    on, but in one that is `refused`, which must still join the wiring before it may leave.
    """
    rank, everyone = meeting.rank, range(meeting.num_ranks)
    compared = job.roster.saving if meeting.is_open else everyone
    mine = {**mine, "held": {step: line[:MAX_VALUE] for step, line in held.items()}}
    if rank in compared:
        meeting.write(f"table.{rank}", encode_table(mine))

    def name_of(rank: int) -> str:
        return rank_name(job, rank)

    def table_of(rank: int) -> Table:
        return decode_table(meeting.read(f"table.{rank}", rank), name_of(rank))

    if rank == 0:
        tables: dict[int, Table] = {0: mine}
        unread: dict[int, str] = {}
        for peer in sorted({*compared} - {0}):
            try:
                tables[peer] = table_of(peer)
            except FrameError as error:  # the other ranks must be told too
                unread[peer] = str(error)
        told = judge(tables, unread, name_of, job.refused_with)
        if told.kind == "go":
            told = _from_checkpoint(told, tables, name_of, newest)
        told = replace(told, text=_printable(told.text), attempt=time.time_ns())
        meeting.write("verdict", json.dumps(asdict(told)))
    elif rank not in compared:
        own = judge({0: table_of(0), rank: mine}, {}, name_of, job.refused_with)
        if own.kind == "stop":
            raise ConfigError(own.text)
    verdict = decode_verdict(meeting.read("verdict", 0))
    if verdict.kind == "stop":
        raise ConfigError(verdict.text)
    return verdict


def judge(
    tables: Mapping[int, Table],
    unread: Mapping[int, str],
    name_of: NameOf,
    refused_with: Callable[[frozenset[int]], frozenset[int]],
) -> Verdict:
    """tables: of all ranks except `unread`, whose tables are invalid."""
    differing = {section: _differing(tables, section) for section in ("setting", "fact", "code")}
    bad = frozenset(unread).union(*(r for keys in differing.values() for r in keys.values()))
    if not bad:
        others = _differing(tables, "info").get("torch", ())
        torches = _describe_values("info", "torch", tables, others, name_of)
        return Verdict(text=torches and f"clouds run different builds of torch: {torches}")

    said = list(unread.values())
    shown = [(s, key) for s in ("fact", "setting") for key in sorted(differing[s])]
    for section, key in shown[:_MAX_SHOWN]:
        ranks = differing[section][key]
        said.append(f"{key} is {_describe_values(section, key, tables, ranks, name_of)}")
    if len(shown) > _MAX_SHOWN:
        said.append(f"and {len(shown) - _MAX_SHOWN} more settings")
    if files := differing["code"]:
        ranks = sorted({rank for others in files.values() for rank in others})
        more = f" and {len(files) - _MAX_SHOWN} more" if len(files) > _MAX_SHOWN else ""
        commits = _describe_values("info", "commit", tables, ranks, name_of)
        said.append(
            f"the code of {_names(ranks, name_of)} is not that of {name_of(0)}, in "
            f"{', '.join(sorted(files)[:_MAX_SHOWN])}{more} (commit {commits})"
        )
    text = (
        f"the ranks do not run the same experiment: {'; '.join(said)}. All clouds need the same "
        "experiment file and the same code of xcloud; copy both from one place and start again. "
        "Paths, caches, devices and trackers may differ."
    )
    # A rank with another layout cannot even join the process groups.
    fits = not unread and not any(key.startswith("cluster.") for key in differing["setting"])
    refused = refused_with(bad) if fits else frozenset()
    return Verdict("go" if refused else "stop", tuple(sorted(refused)), text)


def _from_checkpoint(
    verdict: Verdict, tables: Mapping[int, Table], name_of: NameOf, newest: Newest
) -> Verdict:
    """All but the refused ranks begin, or go on from the newest checkpoint that all of them
    hold."""
    held = {r: table.get("held", {}) for r, table in tables.items() if r not in verdict.refused}
    if not any(held.values()):
        return verdict
    try:
        step, note = newest(held, name_of)
    except ConfigError as error:
        return Verdict("stop", text=str(error))
    return replace(verdict, text="; ".join(filter(None, (verdict.text, note))), from_step=step)


def _differing(tables: Mapping[int, Table], section: str) -> dict[str, list[int]]:
    """Ranks that have something else there than rank 0, by key."""
    found: dict[str, list[int]] = {}
    mine = tables[0].get(section, {})
    for rank, table in tables.items():
        theirs = table.get(section, {})
        for key in mine.keys() | theirs.keys():
            values = mine.get(key), theirs.get(key)
            if values[0] != values[1] and PATH not in values:
                found.setdefault(key, []).append(rank)
    return found


def _describe_values(
    section: str, key: str, tables: Mapping[int, Table], ranks: Sequence[int], name_of: NameOf
) -> str:
    """'1 in rank 0 (a), 2 in rank 1 (b)'; empty if no rank differs."""
    holders: dict[str, list[int]] = {}
    for rank in (0, *ranks) if ranks else ():
        holders.setdefault(tables[rank][section].get(key, "not set"), []).append(rank)
    return ", ".join(f"{value} in {_names(held, name_of)}" for value, held in holders.items())


def _names(ranks: Sequence[int], name_of: NameOf) -> str:
    more = f" and {len(ranks) - _MAX_SHOWN} more ranks" if len(ranks) > _MAX_SHOWN else ""
    return ", ".join(name_of(rank) for rank in ranks[:_MAX_SHOWN]) + more


def rank_name(job: Job, rank: int) -> str:
    if rank >= job.cluster.num_ranks:  # this rank's file knows fewer
        return f"rank {rank}"
    return f"rank {rank} (cloud {job.cluster.placement(rank).cloud})"


def encode_table(table: Table) -> str:
    """JSON. Raises ConfigError for an experiment that is too large to compare."""
    text, num_lines = json.dumps(table), sum(map(len, table.values()))
    if len(text) > MAX_BYTES or num_lines > _MAX_LINES:
        raise ConfigError(
            f"this experiment has {num_lines} settings and files in {len(text):,} bytes, too "
            f"many to compare between clouds (at most {_MAX_LINES} and {MAX_BYTES:,}); move long "
            "lists into files"
        )
    return text


def decode_table(text: str, sender: str) -> Table:
    """Raises FrameError for anything but what encode_table makes."""
    try:
        return _TABLE.validate_json(text if len(text) <= MAX_BYTES else "")  # type: ignore
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

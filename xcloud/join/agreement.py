"""Before anything else, all ranks compare what they are about to run. A difference ends the run in
every rank with the same message: the setting, its values, and the ranks and clouds that have them.
The data are checked later, by fingerprint (loading.py).

Clouds draw batches, learning rates and dropout from the experiment file alone. So another `seed`
pairs samples that do not belong together, another `clip_norm` makes one rank wait for a norm that
is never sent, and another layout hangs the process groups. So the comparison comes before wiring
and loading: every rank with rank 0, over the default process group.

What is compared is defined in compared.py. Tables of other ranks are not trusted: they are limited
in bytes, lines and text, and to printable ASCII.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xcloud.base.errors import ConfigError, FrameError
from xcloud.cluster.frame import Kind, MessageKey
from xcloud.cluster.gloo_link import MeetingLink
from xcloud.cluster.link import InLink, LinkRecord, OutLink
from xcloud.job.job import Job
from xcloud.survive.compared import MAX_VALUE, PATH, make_table
from xcloud.survive.resume import HELD, held_in, newest_common

TABLE = MessageKey(Kind.AGREEMENT, 2)
VERDICT = MessageKey(Kind.AGREEMENT, 3)
CAPACITY_BYTES = 1 << 18
WAIT_S = 300.0  # all ranks have joined, and a table takes well below a second

_MAX_LINES = 8192
_MAX_SHOWN = 8
_MAX_TEXT = 16_384
_SECTIONS = ("setting ", "code ", "fact ", "info ", HELD)
_FRAME_SLACK_BYTES = 4096

Table = Mapping[str, str]
"""As returned by compared.make_table."""


@dataclass(frozen=True)
class Verdict:
    """Rank 0's answer to one rank. kind: go = start; stop = the run ends; refused = this rank
    ends, and the run continues without it and the other `refused` ranks. text: the reason or,
    with `go`, a note for the user; may be empty. from_step: of the checkpoint that all go on from;
    0 = from the start. attempt: a number that no other attempt at this run has."""

    kind: str = "go"
    refused: tuple[int, ...] = ()
    text: str = ""
    from_step: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class Agreed:
    """The outcome for this rank if the run continues. records: of messages to other clouds."""

    verdict: Verdict = field(default_factory=Verdict)
    records: Sequence[LinkRecord] = ()


def agree(
    job: Job, settings: Mapping[str, Any], rank: int, held: Mapping[str, str] | None = None
) -> Agreed:
    """Compare with all ranks. Every rank calls it first, once the process group exists; a single
    rank agrees with itself.

    settings: the resolved experiment file as plain containers. held: this rank's checkpoints
    (resume.held). Raises ConfigError in every rank
    that cannot go on; a rank of a producer that is refused while the others suffice finds
    `verdict.kind == "refused"` instead, as it must still join the wiring before it may leave.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    table = {**make_table(settings), **(held or {})}
    if num_ranks == 1:
        return agree_alone(job, settings, [held or {}])
    links: dict[int, MeetingLink] = {}
    records: list[LinkRecord] = []
    for peer in range(1, num_ranks) if rank == 0 else (0,):
        record = None
        known = max(rank, peer) < job.cluster.num_ranks  # a file of another layout may say less
        if known and job.cluster.wan_between(rank, peer) is not None:
            record = LinkRecord(job.cluster.placement(peer).cloud, peer, None)
            records.append(record)
        links[peer] = MeetingLink(peer, rank_name(job, peer), CAPACITY_BYTES, WAIT_S, record)
    verdict = exchange(rank, table, links, links, lambda r: rank_name(job, r), job.refused_with)
    if verdict.kind == "stop":
        raise ConfigError(verdict.text)
    return Agreed(verdict, records)


def agree_alone(
    job: Job, settings: Mapping[str, Any], held: Sequence[Mapping[str, str]]
) -> Agreed:
    """The same where all ranks are in one process. held: by rank, its checkpoints."""
    table = make_table(settings)
    tables = {rank: {**table, **own} for rank, own in enumerate(held)}
    alone = judge(tables, {}, lambda r: rank_name(job, r), job.refused_with)[0]
    if alone.kind == "stop":
        raise ConfigError(alone.text)
    return Agreed(replace(alone, attempt=time.time_ns()))


def exchange(
    rank: int,
    mine: Table,
    out: Mapping[int, OutLink],
    incoming: Mapping[int, InLink],
    name_of: Callable[[int], str],
    refused_with: Callable[[frozenset[int]], frozenset[int]],
) -> Verdict:
    """Rank 0 collects every rank's table, then sends each a verdict; returns this rank's.

    refused_with: ranks that must leave so that the run can continue without the given ones; empty
    if it cannot.
    """
    carries = ("settings of the experiment, digests of the code, checkpoints: lines of text",)
    if rank != 0:
        out[0].send(TABLE, (encode_table(mine),), carries)
        return decode_verdict(incoming[0].recv(VERDICT, WAIT_S))
    tables: dict[int, Table] = {0: mine}
    unread: dict[int, str] = {}
    for peer, link in sorted(incoming.items()):
        try:
            tables[peer] = decode_table(link.recv(TABLE, WAIT_S), name_of(peer))
        except FrameError as error:  # the other ranks must be told too
            unread[peer] = str(error)
    judged, attempt = judge(tables, unread, name_of, refused_with), time.time_ns()
    verdicts = {peer: replace(verdict, attempt=attempt) for peer, verdict in judged.items()}
    for peer, link_out in sorted(out.items()):
        link_out.send(VERDICT, (encode_verdict(verdicts[peer]),), ("whether all ranks agree",))
    return verdicts[0]


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


# --- on the wire: uint8 [N], lines of printable ASCII


def encode_table(table: Table) -> Tensor:
    """Lines "key<TAB>value". Raises ConfigError for an experiment that is too large to send."""
    lines = [f"{key}\t{value}" for key, value in sorted(table.items())]
    text = "\n".join(lines).encode("ascii")
    if len(text) > CAPACITY_BYTES - _FRAME_SLACK_BYTES or len(lines) > _MAX_LINES:
        raise ConfigError(
            f"this experiment has {len(lines)} settings and files in {len(text):,} bytes, too "
            f"many to compare between clouds (at most {_MAX_LINES} and "
            f"{CAPACITY_BYTES - _FRAME_SLACK_BYTES:,}); move long lists into files"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decode_table(parts: Sequence[Tensor], sender: str) -> dict[str, str]:
    """Raises FrameError for anything but what encode_table makes."""
    lines = _text_in(parts, sender).split("\n")
    if len(lines) > _MAX_LINES or not all(line.count("\t") == 1 for line in lines):
        raise FrameError(f"the settings of {sender} are not lines of a name and a value")
    table = dict(line.split("\t") for line in lines)
    if not all(key.startswith(_SECTIONS) for key in table):
        raise FrameError(f"{sender} sent something that is neither a setting nor a digest of code")
    if any(len(value) > MAX_VALUE for value in table.values()):
        raise FrameError(f"{sender} sent a setting of more than {MAX_VALUE} characters")
    return table


def encode_verdict(verdict: Verdict) -> Tensor:
    refused = ",".join(map(str, verdict.refused))
    head = f"{verdict.kind}\n{refused}\n{verdict.from_step} {verdict.attempt}"
    text = f"{head}\n{verdict.text[:_MAX_TEXT]}"
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)


def decode_verdict(parts: Sequence[Tensor]) -> Verdict:
    kind, _, rest = _text_in(parts, "rank 0").partition("\n")
    refused, _, rest = rest.partition("\n")
    numbers, _, text = rest.partition("\n")
    known = kind in ("go", "stop", "refused") and re.fullmatch(r"[0-9,]*", refused)
    if not known or not re.fullmatch(r"[0-9]{1,18} [0-9]{1,20}", numbers):
        raise FrameError("rank 0 sent no verdict on what the ranks run")
    step, attempt = map(int, numbers.split())
    return Verdict(kind, tuple(int(r) for r in refused.split(",") if r), text, step, attempt)


def _text_in(parts: Sequence[Tensor], sender: str) -> str:
    if len(parts) != 1 or parts[0].dtype != torch.uint8 or parts[0].dim() != 1:
        raise FrameError(f"what {sender} runs came as {len(parts)} parts that are no text")
    data = parts[0].numpy().tobytes()
    if any(not 32 <= byte < 127 and byte not in b"\t\n" for byte in data):
        raise FrameError(f"what {sender} runs came with characters that no setting has")
    return data.decode("ascii")

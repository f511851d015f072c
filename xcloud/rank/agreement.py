"""All ranks compare, before anything else, what they are about to run. A difference ends the run
in every rank with the same message: the setting, its values, and the ranks and clouds that have
them. The data are compared later, by fingerprint (`agree_on`, from rank/task_data.py).

Clouds draw batches, learning rates and dropout from the experiment file alone, so another `seed`
pairs samples that do not belong together, and another layout hangs the process groups: hence
before wiring and loading, as words to and from rank 0 (net/words.py). What is compared and
what may differ stands in docs/several-machines.md. Tables of other ranks are not trusted: they
are limited in bytes, lines and text, and to printable ASCII.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError
from torch._C._distributed_c10d import HashStore

import xcloud
from xcloud.base.errors import ConfigError, FrameError
from xcloud.base.project import code_digests, commit, file_digest
from xcloud.job.compared import PATH, as_text, digest_of
from xcloud.job.job import Job
from xcloud.net.transport import Rendezvous, rendezvous_store

ComparedTable = Mapping[str, Mapping[str, str]]
"""Section (setting, code, fact, info) -> dotted key or file -> value as JSON text."""

MAX_BYTES = 1 << 18
_MAX_LINES = 8192
_MAX_SHOWN = 8
_MAX_TEXT = 16_384
MAX_LINE = 500
"""Characters of a value. The longest say why a run cannot resume from a checkpoint, and what to
do."""

_PRINTABLE = r"^[ -~]*$"
_KEY = Annotated[str, StringConstraints(pattern=_PRINTABLE)]
_VALUE = Annotated[str, StringConstraints(pattern=_PRINTABLE, max_length=MAX_LINE)]
_SECTION = Annotated[dict[_KEY, _VALUE], Field(max_length=_MAX_LINES)]
_TABLE = TypeAdapter[Any](dict[Literal["setting", "code", "fact", "info", "held"], _SECTION])

T = TypeVar("T")
NameOf = Callable[[int], str]
"""Returns the name of a rank, for messages."""

Held = Mapping[str, str]
"""A line for each of a rank's checkpoints, by step."""

Newest = Callable[[Mapping[int, Held], NameOf], tuple[int, str]]
"""Returns the step from which all resume (0: the start), chosen by what the ranks hold, and a note
for the user. Raises ConfigError."""


@dataclass(frozen=True)
class Verdict:
    """The answer of rank 0 to all ranks.

    kind: go = start; stop = the run ends.
    text: the reason or, with `go`, a note for the user; may be empty.
    from_step: step of the checkpoint from which all resume. 0 = the start.
    attempt: a number that no other attempt at this run has.
    """

    kind: Literal["go", "stop"] = "go"
    text: Annotated[str, StringConstraints(pattern=r"^[ -~\n]*$", max_length=_MAX_TEXT)] = ""
    from_step: Annotated[int, Field(ge=0, lt=1 << 60)] = 0
    attempt: Annotated[int, Field(ge=0)] = 0


_VERDICT = TypeAdapter(Verdict)
_FACTS = TypeAdapter(_SECTION)


def rendezvous_here(job: Job, rank: int, run_dir: Path) -> Rendezvous:
    """Return the rendezvous of ranks on one machine, where ranks begin once."""
    num_ranks = job.cluster.num_processes
    within_s = job.cluster.liveness.join_within_s
    store = rendezvous_store(run_dir) if num_ranks > 1 else HashStore()
    return Rendezvous(rank, num_ranks, store, within_s=within_s)


def agree(
    job: Job, rendezvous: Rendezvous, mine: ComparedTable, held: Held, newest: Newest
) -> Verdict:
    """Compare what is to run and the checkpoints with all ranks. Every rank calls it first.

    If ranks may start at any time, those that save compare with each other, and the others compare
    with rank 0.

    mine: the settings that this rank runs (table_of).
    held: the checkpoints that this rank has.

    Raises ConfigError in every rank if they may not start together.
    """
    rank = rendezvous.rank
    compared = {*range(rendezvous.num_ranks)}
    if rendezvous.is_open:
        compared = {*job.roster.saving}
    mine = {**mine, "held": {step: line[:MAX_LINE] for step, line in held.items()}}
    # Who may be late or lost holds no checkpoint that the run could need. Rank 0 must not wait for
    # it.
    if rank in compared:
        rendezvous.write("table", encode_table(mine))
    if rank == 0:
        found = _Comparison(job, rendezvous, mine, peers=compared - {0}).verdict(newest)
        # The text quotes values of other ranks, and is printed on every owner's terminal.
        text = "".join(c if " " <= c <= "~" or c == "\n" else "?" for c in found.text)
        found = replace(found, text=text[:_MAX_TEXT], attempt=time.time_ns())
        rendezvous.write("verdict", json.dumps(asdict(found)))
    elif rank not in compared:
        # Rank 0 may have given its verdict hours ago, so this rank compares by itself and ends
        # alone.
        own = _Comparison(job, rendezvous, mine, peers={0}).judge()
        if own.kind == "stop":
            raise ConfigError(own.text)
    verdict = decode_verdict(rendezvous.read("verdict", 0))
    if verdict.kind == "stop":
        with _heard_by_others(rendezvous):
            raise ConfigError(verdict.text)
    return verdict


@contextmanager
def _heard_by_others(rendezvous: Rendezvous) -> Iterator[None]:
    """Let rank 0 fail with a ConfigError only once the others have received it and are gone."""
    try:
        yield
    except ConfigError:
        # Rank 0 is the other end of their lines: if it ended first, they would read that it is
        # gone and not which setting differs.
        rendezvous.words.wait_for_leaving()
        raise


def agree_on(
    what: str,
    rendezvous: Rendezvous,
    facts: Mapping[str, str],
    left_out: Mapping[int, Collection[str]] = {},
) -> Mapping[str, str]:
    """Compare facts that all ranks must share before the first step. Return those of rank 0. Every
    rank calls it.

    what: a name for the facts.
    left_out: names of the facts that a rank need not have, by rank.

    Raises ConfigError in the rank that differs, naming the fact. Raises it in rank 0 too, unless
    ranks may start at any time.
    """
    rendezvous.write(what, json.dumps(dict(facts)))
    theirs = facts
    others = range(0 if rendezvous.is_open else rendezvous.num_ranks)
    # Rank 0 compares with all, and each with rank 0: so a difference ends both sides, each with
    # the values in its own order. Where ranks begin at any time rank 0 waits for none.
    for peer in others[1:] if rendezvous.rank == 0 else [0]:
        theirs = decode_facts(rendezvous.read(what, peer), peer)
        unneeded = left_out.get(max(peer, rendezvous.rank), ())
        with _heard_by_others(rendezvous):
            compare_facts(facts, theirs, peer, left_out=unneeded)
    return facts if rendezvous.rank == 0 else theirs


def agree_where_shared(rendezvous: Rendezvous, facts: Mapping[str, str]) -> None:
    """Compare copies of things that several ranks have built. The copies of two ranks must be
    equal. Every rank calls it; a rank without such things has no facts. Rank 0 sends to all ranks
    the digest of each thing in the first rank that has it.

    facts: digests of base models and public texts, by a name for messages.

    Raises ConfigError in the rank that differs, and in rank 0.
    """
    rendezvous.write("shared", json.dumps(dict(facts)))
    if rendezvous.rank != 0:
        # Each rank compares with the first that has a thing, whichever that is; rank 0 tells
        # nobody whose.
        first = decode_facts(rendezvous.read("what is shared", 0), peer=0)
        return _compare_shared(facts, theirs=first, whose="another rank")
    first = dict(facts)
    odd = dict[int, dict[str, str]]()
    for peer in range(1, rendezvous.num_ranks):
        theirs = decode_facts(rendezvous.read("shared", peer), peer)
        if any(first[name] != theirs[name] for name in first.keys() & theirs.keys()):
            odd[peer] = theirs
        # The first rank that has a thing speaks for it, whichever rank that is: not every rank
        # builds on every base or text.
        first = {**theirs, **first}
    rendezvous.write("what is shared", json.dumps(first))
    for peer, theirs in odd.items():
        with _heard_by_others(rendezvous):
            _compare_shared(first, theirs, whose=f"rank {peer}")


def _compare_shared(mine: Mapping[str, str], theirs: Mapping[str, str], whose: str) -> None:
    both = sorted(mine.keys() & theirs.keys())
    if differing := [name for name in both if mine[name] != theirs[name]]:
        name = differing[0]
        raise ConfigError(
            f"the ranks build on different copies of the same thing: {name} is "
            f"{mine[name][:16]} here, {theirs[name][:16]} in {whose}, so they would train halves "
            "of two networks. Copy it from one cloud to the others: the checkpoint, the tokenizer "
            "or the public text; or, where a run made it, backbones/ or causal/ of its cache_dir, "
            "as another kind of processor makes another one"
        )


def decode_facts(text: str, peer: int) -> dict[str, str]:
    return _decoded(_FACTS, text=text, what=f"rank {peer} sent no names and values of facts")


def compare_facts(
    mine: Mapping[str, str], theirs: Mapping[str, str], peer: int, left_out: Collection[str] = ()
) -> None:
    """Raise ConfigError, naming the fact, unless two ranks hold the same facts.

    left_out: names that one of the two need not have.
    """
    for name in sorted(mine.keys() | theirs.keys()):
        if (name not in mine or name not in theirs) and name in left_out:
            continue
        here = mine.get(name, "nothing")
        there = theirs.get(name, "nothing")
        if here != there:
            raise ConfigError(
                f"this rank and rank {peer} disagree about {name}: {here} here, {there} there. "
                "All clouds need the same experiment file, the same release of xcloud and the "
                "same rows of data in the same order."
            )


class _Comparison:
    """A comparison of what this rank runs with what `peers` run, of which rank 0 is one if it is
    not this."""

    def __init__(
        self, job: Job, rendezvous: Rendezvous, mine: ComparedTable, peers: Iterable[int]
    ) -> None:
        self._name_of = partial(rank_name, job)
        self._tables: dict[int, ComparedTable] = {rendezvous.rank: mine}
        self._unread: dict[int, str] = {}
        for peer in sorted(peers):
            text = rendezvous.read("table", peer)
            try:
                self._tables[peer] = decode_table(text, sender=self._name_of(peer))
            except FrameError as error:
                if rendezvous.rank != 0:
                    raise
                self._unread[peer] = str(error)  # the other ranks must be told too

    def verdict(self, newest: Newest) -> Verdict:
        """Return the answer to all ranks. They start, or resume from the newest checkpoint that
        all of them hold."""
        found = self.judge()
        held = {rank: table.get("held", {}) for rank, table in self._tables.items()}
        if found.kind == "stop" or not any(held.values()):
            return found
        try:
            # Chosen by rank 0 from what all hold: a save that one rank did not finish is not
            # agreed on.
            step, note = newest(held, self._name_of)
        except ConfigError as error:
            return Verdict(kind="stop", text=str(error))
        return replace(found, text="; ".join(filter(None, (found.text, note))), from_step=step)

    def judge(self) -> Verdict:
        """Return the answer as far as settings, code and facts decide it."""
        differing = {section: self._differing(section) for section in ("fact", "setting", "code")}
        if not (self._unread or any(differing.values())):
            # Another build of torch may still draw the same random numbers, which is a fact and
            # compared, so this is a note and no reason to stop.
            torches = self._values(
                "info", key="torch", ranks=self._differing("info").get("torch", [])
            )
            return Verdict(text=torches and f"clouds run different builds of torch: {torches}")

        said = list(self._unread.values())
        files = differing.pop("code")
        shown = [(section, key) for section, keys in differing.items() for key in sorted(keys)]
        # Facts and settings with their values; files follow by name alone, as one change touches
        # many.
        for section, key in shown[:_MAX_SHOWN]:
            said.append(
                f"{key} is {self._values(section, key=key, ranks=differing[section][key])}"
            )
        if len(shown) > _MAX_SHOWN:
            said.append(f"and {len(shown) - _MAX_SHOWN} more settings")
        if files:
            ranks = sorted({rank for others in files.values() for rank in others})
            more = f" and {len(files) - _MAX_SHOWN} more" if len(files) > _MAX_SHOWN else ""
            said.append(
                f"the code of {self._names(ranks)} is not that of {self._name_of(0)}, in "
                f"{', '.join(sorted(files)[:_MAX_SHOWN])}{more} (commit "
                f"{self._values('info', key='commit', ranks=ranks)})"
            )
        text = (
            "the ranks do not run the same experiment:\n"
            + "".join(f"  {difference}\n" for difference in said)
            + "All clouds need the same experiment file and the same code of xcloud; copy both "
            "from one place and start again. Paths, caches, devices and trackers may differ."
        )
        return Verdict(kind="stop", text=text)

    def _differing(self, section: str) -> dict[str, list[int]]:
        """Return the ranks that have something else in a section than rank 0, by key."""
        found: dict[str, list[int]] = {}
        first = self._tables[0].get(section, {})
        for rank, table in self._tables.items():
            theirs = table.get(section, {})
            for key in first.keys() | theirs.keys():
                values = (first.get(key), theirs.get(key))
                # A path stands for itself: owners keep their files where they like.
                if values[0] != values[1] and PATH not in values:
                    found.setdefault(key, []).append(rank)
        return found

    def _values(self, section: str, key: str, ranks: Sequence[int]) -> str:
        """Return '1 in rank 0 (a), 2 in rank 1 (b)'; empty if no rank differs."""
        # By value: of a hundred ranks mostly two values are left.
        holders: dict[str, list[int]] = {}
        for rank in (0, *ranks) if ranks else ():
            value = self._tables[rank].get(section, {}).get(key, "not set")
            holders.setdefault(value, []).append(rank)
        return ", ".join(f"{value} in {self._names(held)}" for value, held in holders.items())

    def _names(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - _MAX_SHOWN} more ranks" if len(ranks) > _MAX_SHOWN else ""
        return ", ".join(map(self._name_of, ranks[:_MAX_SHOWN])) + more


def rank_name(job: Job, rank: int) -> str:
    """Return the name of a rank for messages, with its cloud."""
    if rank >= job.cluster.num_ranks:  # this rank's file knows fewer
        return f"rank {rank}"
    return f"rank {rank} (cloud {job.cluster.placement(rank).cloud})"


def encode_table(table: ComparedTable) -> str:
    """Return a table as JSON. Raises ConfigError for an experiment that is too large to
    compare."""
    text = json.dumps(table)
    num_lines = sum(map(len, table.values()))
    if len(text) > MAX_BYTES or num_lines > _MAX_LINES:
        raise ConfigError(
            f"this experiment has {num_lines} settings and files in {len(text):,} bytes, too "
            f"many to compare between clouds (at most {_MAX_LINES} and {MAX_BYTES:,}); move long "
            "lists into files"
        )
    return text


def decode_table(text: str, sender: str) -> ComparedTable:
    """Return the table that `sender` sent. Raises FrameError for anything but what encode_table
    makes."""
    return _decoded(_TABLE, text=text, what=f"{sender} sent no table of settings and digests")


def decode_verdict(text: str) -> Verdict:
    return _decoded(_VERDICT, text=text, what="rank 0 sent no verdict on what the ranks run")


def _decoded(adapter: TypeAdapter[T], text: str, what: str) -> T:
    try:
        return adapter.validate_json(text if len(text) <= MAX_BYTES else "", strict=True)
    except ValidationError as error:  # the first reason, without what was sent
        raise FrameError(f"{what}: {error.errors()[0]['msg']}") from None


def table_of(compared: Mapping[str, str]) -> ComparedTable:
    """Everything of this rank that is compared. All of it is ASCII.

    compared: the settings (job/compared.py).
    """
    generator = torch.Generator().manual_seed(1)
    # Batches and dropout follow from the seed in every cloud alone, so what counts is that the
    # same seed draws the same numbers, not that releases of torch are the same.
    draws = torch.randperm(1000, generator=generator)
    return {
        "setting": compared,
        "code": _code(compared),
        "fact": {
            "release of xcloud": as_text(xcloud.__version__),
            "digest of torch's random numbers": digest_of(repr(draws.tolist()).encode()),
        },
        "info": {"torch": as_text(torch.__version__), "commit": as_text(commit())},
    }


def _code(compared: Mapping[str, str]) -> dict[str, str]:
    """Digest of every file of the package, and of each other module that a _target_ is of."""
    found = {f"xcloud/{file}": digest for file, digest in code_digests().items()}
    targets = {value.strip('"') for key, value in compared.items() if key.endswith("_target_")}
    # A class of a user's own is code that trains too, so its file is compared as ours are.
    for name in sorted({target.rpartition(".")[0] for target in targets}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if name.partition(".")[0] != "xcloud" and file and Path(file).is_file():
            found[f"module {name}"] = file_digest(Path(file))
    return found

"""What may differ between a run and its continuation: TABLE, by which going on is decided
(resume.py); docs/surviving.md shows it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xcloud.job.job import Places

_REMEMBERED = "what compression remembers of earlier steps"
_SINCE_MERGE = "what other clouds did since the last merge"


@dataclass(frozen=True)
class Outcome:
    """lost: by going on. refused: why it does not go on. is_equal: to the bits of a run that was
    not interrupted. needs_merge: goes on only from a step after which all replicas were equal."""

    lost: tuple[str, ...] = ()
    refused: str = ""
    is_equal: bool = False
    needs_merge: bool = False

    def __str__(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        words = "equal bits" if self.is_equal else "goes on"
        words += f", losing {'; '.join(self.lost)}" if self.lost else ""
        return words + (", from a merge of all parameters only" if self.needs_merge else "")


EQUAL, GOES_ON = Outcome(is_equal=True), Outcome()
FORGETS = Outcome((_REMEMBERED,))
OTHER_RUN = Outcome(refused="that would be another run")
COLUMNS = ("pipeline", "data parallel", "local updates", "streaming", "elastic", "one-way")


class Row(NamedTuple):
    """keys: the settings, as one pattern; "" where it is decided by who holds what (Places).
    others: of columns that differ from `usual`; None where a job has no such setting."""

    keys: str
    usual: Outcome
    others: Mapping[str, Outcome | None] = {}


def _elastic(lost: str = "") -> Outcome:
    return Outcome((lost, _SINCE_MERGE) if lost else (_SINCE_MERGE,))


_NONE = {"one-way": None}
_AFTER_MERGE = Outcome((_REMEMBERED,), needs_merge=True)
NOTHING, CUT = "link, liveness, slowdown, evaluation, checkpoints", "number of stages"
LANES, SHARD = "cluster: which ranks hold a stage", "cluster: parts of a sharded stage"
TABLE: Mapping[str, Row] = {
    NOTHING: Row(
        r"cluster\.(wan|links|liveness|carrier|bandwidth|link_budget)|cluster\.clouds\.[^.]+\.slowdown|"
        r"training\.(evaluate_every|eval_|checkpoint)|launch|feed\.(slow_after_s|min_producers)",
        EQUAL, {"elastic": _elastic()},
    ),
    "steps, optimizer, precision, divergence, decoding, security but privacy": Row(
        r"training\.(max_steps|optimizer\.|on_divergence|max_skips_in_a_row|precision)|"
        r"security(?!\.privacy)|model\.decoding|feed\.on_(slow|dead)",
        GOES_ON, {"elastic": _elastic()},
    ),
    "compression": Row("compression", FORGETS, {"elastic": _elastic(_REMEMBERED), **_NONE}),
    "schedule, accumulation": Row(
        r"schedule|training\.accumulate_steps", FORGETS,
        {"elastic": _elastic(_REMEMBERED), **_NONE},
    ),
    LANES: Row(
        "", FORGETS,
        {
            "local updates": _AFTER_MERGE, "streaming": _AFTER_MERGE, "elastic": _AFTER_MERGE,
            "one-way": Outcome(refused="its ranks cannot change places"),
        },
    ),
    SHARD: Row("", Outcome(refused="each rank has a part, and parts are not joined"), _NONE),
    CUT: Row("", Outcome(refused="stages hold other layers then"), _NONE),
    "security.privacy": Row(
        r"security\.privacy", Outcome(refused="one epsilon is of one noise and clip"), _NONE
    ),
    "model, task, data, seed, batch size, strategy, release": Row("", OTHER_RUN),
}  # fmt: skip


def outcome_of(row: str, column: str) -> Outcome:
    return TABLE[row].others.get(column, TABLE[row].usual) or OTHER_RUN


def _moved(before: Places, now: Places) -> str | None:
    """The row of TABLE that says what it means to go on with other ranks; None if nobody moves."""
    if list(before.ranks) == list(now.ranks):
        return None
    if before.num_stages != now.num_stages:
        return CUT
    return LANES if before.sharded_parts == now.sharded_parts else SHARD


@dataclass
class Changes:
    """What differs from the run that a checkpoint is of. said: the settings, in words. refused:
    why it does not go on, and what to set back."""

    said: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    moves: bool = False
    needs_merge: bool = False

    @property
    def forgets(self) -> bool:
        return _REMEMBERED in self.lost

    def price(self, has_memory: bool) -> str:
        """What going on costs, for the user. has_memory: whether compression remembers any."""
        lost = [what for what in self.lost if what != _REMEMBERED or has_memory]
        return f"lost by this: {'; '.join(lost)}" if lost else "nothing is lost by this"

    def take(self, outcome: Outcome, what: str, back: str) -> None:
        if outcome.refused:
            self.refused.append(f"{what}: {outcome.refused}; {back}, or start a new run")
        self.lost += [lost for lost in outcome.lost if lost not in self.lost]
        self.needs_merge |= outcome.needs_merge


def changes(
    saved: Mapping[str, str], now: Mapping[str, str], before: Places, after: Places
) -> Changes:
    """saved, now: settings as the ranks compare them (join/compared.py), and who holds what."""
    found = Changes()
    keys = [key for key in sorted(saved.keys() | now.keys()) if saved.get(key) != now.get(key)]
    found.said = _in_words(keys, saved, now, before.labels, after.labels)
    moved = _moved(before, after)
    found.moves = moved is not None
    for key in keys:
        row = next((name for name, r in TABLE.items() if r.keys and re.match(r.keys, key)), None)
        if row is None and key.startswith("cluster."):
            row = NOTHING if before.ranks else LANES  # else `moved` says what it means
        old = saved.get(key)
        back = f"leave {key} out" if old is None else f"set {key} back to {old}"
        outcome = OTHER_RUN if row is None else outcome_of(row, after.column)
        found.take(outcome, f"{key} is {now.get(key, 'not set')}", back)
    if moved is not None:
        found.take(outcome_of(moved, after.column), moved, f"undo {', '.join(found.said)}")
    return found


def _in_words(
    keys: Sequence[str], saved: Mapping[str, str], now: Mapping[str, str],
    before: Mapping[str, str], after: Mapping[str, str],
) -> list[str]:  # fmt: skip
    """Of each group that has a label and more than one key in `keys`, the labels."""
    said: dict[str, None] = {}
    for key in keys:
        group = key.partition(".")[0]
        many = sum(other.partition(".")[0] == group for other in keys) > 1
        if many and before.get(group, "") != after.get(group, ""):
            said[f"{group} {before.get(group)} -> {after.get(group)}"] = None
        else:
            said[f"{key} {saved.get(key, 'not set')} -> {now.get(key, 'not set')}"] = None
    return list(said)

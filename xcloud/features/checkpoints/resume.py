"""Resuming from a checkpoint: what may differ from the run that made it (TABLE, shown in
docs/surviving.md), and what a rank takes over. Sends nothing: what ranks hold is compared with all
else that they compare before the start (rank/agreement.py), and common_step.py finds the step.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from xcloud import __version__
from xcloud.base.bounded import parsed_json
from xcloud.base.earlier import renamed
from xcloud.base.errors import ConfigError, DataError
from xcloud.base.outcome import EQUAL, GOES_ON, Outcome
from xcloud.base.settings import DROPPED
from xcloud.comm.state import MEMORY, OUTER, State
from xcloud.feature_settings import OUTCOMES
from xcloud.features.checkpoints.common_step import newest_common
from xcloud.job.compared import as_text
from xcloud.job.config import Settings
from xcloud.job.strategy import ModelPlacement
from xcloud.rank.saving import InputDigests
from xcloud.record.checkpoint_files import CheckpointFolder

MAX_STEPS = "training.max_steps"
_REMEMBERED = "what compression remembers of earlier steps"
_SINCE_MERGE = "what other clouds did since the last merge"


FORGETS = Outcome((_REMEMBERED,))
OTHER_RUN = Outcome(refused="that would be another run")
COLUMNS = ("pipeline", "data parallel", "local updates", "streaming", "elastic", "one-way")


class SameOutcome(NamedTuple):
    """A row of TABLE: settings that have the same outcome when they change.

    keys: the settings, as one pattern; "" where the outcome depends on who holds what
        (ModelPlacement).
    others: the outcomes in columns that differ from `usual`; None where a job has no such setting.
    """

    keys: str
    usual: Outcome
    others: Mapping[str, Outcome | None] = {}


def _elastic(lost: str = "") -> Outcome:
    return Outcome((lost, _SINCE_MERGE) if lost else (_SINCE_MERGE,))


_NONE = {"one-way": None}
_AFTER_MERGE = Outcome(lost=(_REMEMBERED,), needs_merge=True)
NOTHING = "link, liveness, slowdown, evaluation, checkpoints"
CUT = "number of stages"
LANES = "cluster: which ranks hold a stage"
SHARD = "cluster: parts of a sharded stage"
_DECLARED = {
    name: SameOutcome(
        rf"{re.escape(name)}(\.|$)", outcome,
        others={} if outcome.refused else {"elastic": _elastic()},
    )
    for name, outcome in OUTCOMES.items()
}  # fmt: skip
TABLE: Mapping[str, SameOutcome] = {
    **_DECLARED,  # features say it of their settings
    NOTHING: SameOutcome(
        r"cluster\.(wan|links|liveness|carrier|bandwidth|link_budget)|cluster\.clouds\.[^.]+\.slowdown|"
        r"training\.(evaluate_every|eval_|checkpoint)|launch|feed\.slow_after_s",
        EQUAL, others={"elastic": _elastic()},
    ),
    "steps, optimizer, precision, divergence, decoding, security": SameOutcome(
        r"training\.(max_steps|optimizer\.(?!_target_)|on_divergence|max_skips_in_a_row|precision)|"
        r"security|model\.(decoding|max_answer_tokens)|feed\.on_dead",
        GOES_ON, others={"elastic": _elastic()},
    ),
    "memory and speed of stages": SameOutcome(
        r"model\.(activation_checkpointing|vocabulary_chunk)$|training\.activation_cache_mb$",
        GOES_ON, others={"elastic": _elastic(), "one-way": None},
    ),
    "compression": SameOutcome(
        "compression", FORGETS, others={"elastic": _elastic(_REMEMBERED), **_NONE},
    ),
    "schedule, accumulation": SameOutcome(
        r"schedule(?!\.predict)|training\.accumulate_steps", FORGETS,
        others={"elastic": _elastic(_REMEMBERED), **_NONE},
    ),
    LANES: SameOutcome(
        "", FORGETS,
        others={
            "local updates": _AFTER_MERGE, "streaming": _AFTER_MERGE, "elastic": _AFTER_MERGE,
            "one-way": Outcome(refused="its ranks cannot change places"),
        },
    ),
    SHARD: SameOutcome(
        "", Outcome(refused="each rank has a part, and parts are not joined"), others=_NONE
    ),
    CUT: SameOutcome("", Outcome(refused="stages hold other layers then"), others=_NONE),
    "model, task, data, seed, batch size, strategy, release": SameOutcome(
        r"_target_|model|task|seed|strategy|hooks|feed\.(_target_|run_ahead)|"
        r"training\.(_target_|batch_size|batches_per_step|optimizer\._target_)", OTHER_RUN,
    ),
}  # fmt: skip


def outcome_of(row: str, column: str) -> Outcome:
    """Return the outcome in one column of a row of TABLE."""
    return TABLE[row].others.get(column, TABLE[row].usual) or OTHER_RUN


@dataclass
class Changes:
    """The differences between this run and the one that made a checkpoint.

    said: a description of each setting that differs.
    refused: the reason why the run cannot resume, and the settings to change back.
    """

    said: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    moves: bool = False
    needs_merge: bool = False

    def price(self, has_memory: bool) -> str:
        """Return a sentence for the user on the costs of resuming.

        has_memory: true if compression keeps anything between steps.
        """
        lost = [what for what in self.lost if what != _REMEMBERED or has_memory]
        if lost:
            return f"lost by this: {'; '.join(lost)}"
        return "nothing is lost by this"

    def take(self, outcome: Outcome, what: str, back: str) -> None:
        """Add an outcome of a change. back: how to undo the change."""
        if outcome.refused:
            self.refused.append(f"{what}: {outcome.refused}; {back}, or start a new run")
        self.lost += [lost for lost in outcome.lost if lost not in self.lost]
        self.needs_merge |= outcome.needs_merge


def changes(
    saved: Mapping[str, str], now: Mapping[str, str], before: ModelPlacement, after: ModelPlacement
) -> Changes:
    """Compare two attempts at a run.

    saved, now: the settings as the ranks compare them (rank/agreement.py).
    before, after: the records of who holds what.
    """
    found = Changes()
    # A checkpoint of the release before has keys that have moved since, and settings that are no
    # more and had one value each: neither is a change.
    saved = renamed(saved)
    for kind, dropped in DROPPED.items():
        for key in [key for key, value in saved.items() if value == as_text(kind)]:
            for name in dropped:
                gone = key.replace("_target_", name)
                saved = {k: v for k, v in saved.items() if not f"{k}.".startswith(f"{gone}.")}
    keys = [key for key in sorted(saved.keys() | now.keys()) if saved.get(key) != now.get(key)]
    found.said = _in_words(keys, saved=saved, now=now, before=before.labels, after=after.labels)
    found.moves = list(before.ranks) != list(after.ranks)
    for key in keys:
        # The first row that matches decides, so features' own settings stand above the pattern of
        # `security` that would take them, too.
        row = next((name for name, r in TABLE.items() if r.keys and re.match(r.keys, key)), None)
        if row is None and key.startswith("cluster."):
            # what moves is looked at below
            # Other keys of the cluster only say who computes what.
            row = NOTHING if before.ranks else LANES
        old = saved.get(key)
        back = f"leave {key} out" if old is None else f"set {key} back to {old}"
        outcome = outcome_of(row, column=after.column) if row is not None else OTHER_RUN
        found.take(outcome, f"{key} is {now.get(key, 'not set')}", back=back)
    if found.moves:
        # The dearest of three counts: other stages hold other layers, whoever holds them.
        moved = LANES if before.sharded_parts == after.sharded_parts else SHARD
        if before.num_stages != after.num_stages:
            moved = CUT
        found.take(
            outcome_of(moved, column=after.column), moved, back=f"undo {', '.join(found.said)}"
        )
    return found


def _in_words(
    keys: Sequence[str],
    saved: Mapping[str, str],
    now: Mapping[str, str],
    before: Mapping[str, str],
    after: Mapping[str, str],
) -> list[str]:
    """Name the settings that differ; a group with more than one is named by its label, if it has
    one.
    """
    said: dict[str, None] = {}
    for key in keys:
        group = key.partition(".")[0]
        many = sum(other.partition(".")[0] == group for other in keys) > 1
        if many and before.get(group, "") != after.get(group, ""):
            said[f"{group} {before.get(group)} -> {after.get(group)}"] = None
        else:
            said[f"{key} {saved.get(key, 'not set')} -> {now.get(key, 'not set')}"] = None
    return list(said)


_SHARED = ("trainer.num_updates", "trainer.guard.")


@dataclass(frozen=True)
class RankCheckpoints:
    """The checkpoints that one rank may resume from, in its run folder.

    places: the record of who holds what now.
    settings: the settings as they are compared with other ranks.
    """

    folder: CheckpointFolder
    rank: int
    places: ModelPlacement
    settings: Mapping[str, str]

    def table(self, is_thorough: bool = True) -> dict[str, str]:
        """Return by step what this rank holds, for the comparison of all ranks.

        A line is "ok agreed ATTEMPT 0,1" or "bad agreed WHY" ("written" instead of "agreed"
        without word of all ranks). Rank 0 names the ranks that had a shard in it: those of a
        one-way job that were lost before have none.
        is_thorough: true to read every file to the end.
        """
        lines = {}
        for step in self.folder.steps():
            agreed = "agreed" if self.folder.is_agreed(step) else "written"
            try:
                attempt = self._check(step, is_thorough=is_thorough)
                # A one-way job has no placement of a model over ranks: `places.ranks` is empty
                # there.
                found = self.folder.agreed(step) if not self.places.ranks else {}
                held_by = map(str, found.get("held_by", ()))
                lines[str(step)] = f"ok {agreed} {attempt} {','.join(held_by)}".rstrip()
            except DataError as error:
                # It goes to the other ranks in a line of ASCII.
                why = str(error).encode("ascii", "replace").decode()
                lines[str(step)] = f"bad {agreed} {why}"
        return lines

    def changes(self, step: int) -> Changes:
        """Return what differs from the attempt that saved this step."""
        parts = self.folder.ranks(step)
        about = self.folder.about(step, rank=self.rank if self.rank in parts else parts[0])
        return changes(
            about["settings"],
            now=self.settings,
            before=ModelPlacement.read(about["places"]),
            after=self.places,
        )

    def done_beyond(self, max_steps: int | None) -> str:
        """Say that more steps are done than a run is to have; empty if they are not.

        Going on from an earlier one would delete what came after it.
        """
        done = max(self.folder.agreed_steps(), default=0)
        if max_steps is None or done <= max_steps:
            return ""
        return (
            f"{done} steps are done, and training.max_steps is {max_steps}; give at least {done}, "
            "or start a new run"
        )

    def own_step(self, step: int) -> int:
        """Return the newest step up to this one of which this rank has what it needs: an earlier
        one, or 0, where it was lost before and the run went on without it."""
        if self.places.ranks:
            return step
        has = (s for s in self.folder.steps() if s <= step and self.rank in self.folder.ranks(s))
        return max(has, default=0)

    def restore(self, step: int, fresh: State, facts: InputDigests) -> tuple[State, bool]:
        """Return this rank's state after `step`, and whether compression's memory was dropped.

        fresh: its state now, for what has no meaning any more.
        facts: the digests of the data it reads, which must be those it was trained on.
        Raises DataError.
        """
        self.check_facts(step, facts)
        changed = self.changes(step)
        needed = self._needed(step)
        if not changed.moves:
            state = self.folder.read(step, self.rank)
            if _REMEMBERED not in changed.lost:
                return state, False
            # What compression remembers is of the settings before: parameters, moments and
            # counters are taken over, memories begin anew.
            kept = {key: v for key, v in state.items() if not is_marked(key, mark=MEMORY)}
            new = {key: v for key, v in fresh.items() if is_marked(key, mark=MEMORY)}
            return kept | new, _remembers(state)
        parts = {rank: self.folder.read(step, rank) for rank in needed}
        # An outer optimizer's moments are spread over the ranks that merge a stage, so they are
        # put together from all parts by what they belong to, not by who held it.
        # What follows the mark in a key names a parameter, whatever holds it.
        every = (pair for part in parts.values() for pair in part.items())
        outer = {key[key.index(OUTER) :]: v for key, v in every if OUTER in key}
        held = {k: outer[k[k.index(OUTER) :]] if OUTER in k else v for k, v in fresh.items()}
        # Then each stage, with counters that all stages share, from the nearest rank that had it.
        for stage in self.places.ranks[self.rank].stages:
            own = (f"trainer.stage {stage}.", *_SHARED)
            held = {key: value for key, value in held.items() if not key.startswith(own)}
            part = parts[self._holder(step, stage)]
            held |= {key: value for key, value in part.items() if key.startswith(own)}
        return held, any(map(_remembers, parts.values()))

    def check_facts(self, step: int, facts: InputDigests) -> None:
        """Raise DataError if what this rank reads is not what the checkpoint was made with.

        Where ranks change places, what both have read is compared.
        """
        is_same_place = not self.changes(step).moves
        for rank, (kind, now) in product(self._needed(step), facts.items()):
            saved = self.folder.about(step, rank)["facts"].get(kind, {})
            # A rank that takes over another's stage may read fewer or more texts than that one
            # did.
            compared = saved.keys() | now.keys() if is_same_place else saved.keys() & now.keys()
            differing = sorted(name for name in compared if saved.get(name) != now.get(name))
            if differing:
                raise DataError(
                    f"not what the checkpoint of step {step} was made with: "
                    f"{', '.join(differing)}. Samples would mean other texts, or ids other "
                    "pieces, than those learned from. Put that back, or start a new run"
                )

    def _check(self, step: int, is_thorough: bool) -> int:
        """Return the attempt that saved the shards which this rank needs.

        Raises DataError if one is missing, damaged or of another experiment.
        """
        parts = self.folder.ranks(step)
        if not parts:
            raise DataError("no part of it is complete here")
        abouts = {rank: self.folder.about(step, rank) for rank in parts}
        for about in abouts.values():
            if about["release"] != __version__:
                raise DataError(
                    f"it was written by xcloud {about['release']}, this is {__version__}: resume "
                    "with that release"
                )
        changed = self.changes(step)
        if changed.refused:
            raise DataError("; ".join(changed.refused))
        # A rank in its old place is compared with the others by the attempt in its line; one that
        # takes parts of several ranks must compare them here.
        if changed.moves and len({about["attempt"] for about in abouts.values()}) > 1:
            raise DataError("its parts are of different attempts at this step")
        if too_short := self.done_beyond(parsed_json(self.settings.get(MAX_STEPS, "null"))):
            raise DataError(too_short)
        needed = self._needed(step)
        # Digests of files that may be gigabytes: not where a command only looks (check_can_go_on).
        for rank in needed if is_thorough else ():
            self.folder.check(step, rank)
        return int(abouts[needed[0]]["attempt"])

    def _needed(self, step: int) -> list[int]:
        parts = self.folder.ranks(step)
        changed = self.changes(step)
        before = self._before(step)
        if not changed.moves:
            if self.rank not in parts:
                raise DataError(f"the part of rank {self.rank} is not here, or incomplete")
            return [self.rank]
        if changed.needs_merge and before.column != self.places.column:
            raise DataError(
                "one replica made it, so nothing was merged that others could take over"
            )
        # Between merges each replica has parameters of its own, and another rank cannot tell whose
        # are to go on.
        if not before.is_merged(step):
            when = f"every {before.merges_every} steps, and " if before.merges_every else ""
            raise DataError(
                "replicas differed then, and other ranks can take over after a merge of all "
                f"parameters only ({when}the last step)"
            )
        if self.rank >= len(self.places.ranks):
            raise DataError(f"this cluster has {len(self.places.ranks)} ranks")
        stages = self.places.ranks[self.rank].stages
        found = {self._holder(step, stage) for stage in stages}
        if changed.needs_merge:  # each rank carries a share of what is kept from merge to merge
            replicas = {before.ranks[rank].replica for rank in found}
            mates = {r for s in stages for one in replicas for r in before.holders(s, one)}
            if missing := mates - set(parts):
                raise DataError(f"the part of rank {min(missing)} is not here, or incomplete")
            found |= mates
        return sorted(found)

    def _holder(self, step: int, stage: int) -> int:
        """Return the nearest rank whose shard of this stage is available in this folder."""
        before = self._before(step)
        own = self.places.ranks[self.rank]
        group_rank = self.places.holders(stage, own.replica).index(self.rank)
        found = []
        for rank in self.folder.ranks(step):
            there = before.ranks[rank]
            if stage in there.stages:
                its = before.holders(stage, there.replica).index(rank)
                if its == group_rank or not there.is_sharded:
                    # Own replica first, then the same place in the group, whose state is nearest
                    # to what this rank would have saved itself.
                    found.append((there.replica != own.replica, its != group_rank, rank))
        if not found:
            raise DataError(f"stage {stage}, held by other ranks then, is not in this folder")
        return min(found)[2]

    def _before(self, step: int) -> ModelPlacement:
        return ModelPlacement.read(
            self.folder.about(step, rank=self.folder.ranks(step)[0])["places"]
        )


def is_marked(key: str, mark: str) -> bool:
    return mark in key.split(".")


def _remembers(state: State) -> bool:
    # Numbers only count messages.
    return any(isinstance(v, Tensor) and is_marked(key, mark=MEMORY) for key, v in state.items())


def check_can_go_on(settings: Settings, run_dir: Path, anew: bool = False) -> None:
    """Check before any rank starts that a run can resume, where one folder has the shards of all.

    anew: a run without a checkpoint may restart.
    Raises ConfigError, also for a run that would restart without `anew`.
    """
    job = settings.job
    compared = settings.compared
    folder = CheckpointFolder(run_dir)
    holders = {
        rank: RankCheckpoints(folder, rank, job.places, compared) for rank in job.roster.saving
    }
    first = holders[min(holders)]
    if too_short := first.done_beyond(job.max_steps):
        raise ConfigError(f"{run_dir} cannot resume. {too_short}")
    with contextlib.suppress(DataError, IndexError):  # damaged or not here: ranks say so of each
        if refused := first.changes(first.folder.agreed_steps()[0]).refused:
            raise ConfigError(f"{run_dir} cannot resume. {'. '.join(refused)}")
    held = {rank: holder.table(is_thorough=False) for rank, holder in holders.items()}
    if not newest_common(held, name_of=lambda rank: f"rank {rank}")[0] and not anew:
        raise ConfigError(
            f"{run_dir} has no checkpoint, so there is nothing to resume from. To restart in "
            "this folder add resume_anew=true; the run's own command begins in a new one"
        )

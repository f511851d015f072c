"""Going on from a checkpoint: which one all ranks hold, what of it still has a meaning, and what a
rank takes over. Sends nothing: the ranks compare what they hold with everything else that they
compare before the start (join/agreement.py).

The newest agreed step of which every rank has a good part is taken; one rank that has heard of the
agreement is enough. Where there is none, one that all have written counts as well. If none is left
although one was agreed on, the run is refused: it would silently begin anew.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from xcloud import __version__
from xcloud.base.errors import ConfigError, DataError
from xcloud.comm.state import MEMORY, OUTER, State
from xcloud.job.job import Job, Places
from xcloud.record.checkpoints import CheckpointFolder
from xcloud.survive.changes import Changes, changes

_SHARED = ("trainer.num_updates", "guard.")


@dataclass(frozen=True)
class RankCheckpoints:
    """What one rank goes on with, from the parts in its run folder.

    places: who holds what now. settings: as compared with other ranks.
    """

    folder: CheckpointFolder
    rank: int
    places: Places
    settings: Mapping[str, str]

    @classmethod
    def of(
        cls, job: Job, rank: int, run_dir: Path, settings: Mapping[str, str]
    ) -> RankCheckpoints:
        return cls(CheckpointFolder(run_dir), rank, job.places, settings)

    def table(self, is_thorough: bool = True) -> dict[str, str]:
        """For the comparison of all ranks, by step: "ok agreed ATTEMPT 0,1" or "bad agreed WHY"
        ("written" instead of "agreed" without word of all ranks). Rank 0 names the ranks that had
        a part in it: those of a one-way job that were lost before have none. is_thorough: read
        every file to the end."""
        lines = {}
        for step in self.folder.steps():
            agreed = "agreed" if self.folder.is_agreed(step) else "written"
            try:
                attempt = self._check(step, is_thorough)
                found = self.folder.agreed(step) if not self.places.ranks else {}
                held_by = map(str, found.get("held_by", ()))
                line = f"ok {agreed} {attempt} {','.join(held_by)}".rstrip()
            except DataError as error:
                line = f"bad {agreed} {str(error).encode('ascii', 'replace').decode()}"
            lines[str(step)] = line
        return lines

    def changes(self, step: int) -> Changes:
        parts = self.folder.ranks(step)
        about = self.folder.about(step, self.rank if self.rank in parts else parts[0])
        before = Places.read(about["places"])
        return changes(about["settings"], self.settings, before, self.places)

    def own_step(self, step: int) -> int:
        """The newest step up to this one of which this rank has what it needs: an earlier one, or
        0, where it was lost before and the run went on without it."""
        if self.places.ranks:
            return step
        return max((s for s in self.folder.steps() if s <= step and self._has(s)), default=0)

    def _has(self, step: int) -> bool:
        return self.rank in self.folder.ranks(step)

    def restore(self, step: int, fresh: State, facts: Mapping[str, str]) -> tuple[State, bool]:
        """This rank's state after `step`, and whether compression's memory was dropped. fresh: its
        state now, for what has no meaning any more. facts: of its data, which must be those it was
        trained on. Raises DataError."""
        changed, needed = self.changes(step), self._needed(step)
        for rank in needed:
            self._check_facts(step, rank, facts)
        if not changed.moves:
            state = self.folder.read(step, self.rank)
            if not changed.forgets:
                return state, False
            kept = {key: v for key, v in state.items() if not is_marked(key, MEMORY)}
            new = {key: v for key, v in fresh.items() if is_marked(key, MEMORY)}
            return kept | new, _remembers(state)
        parts = {rank: self.folder.read(step, rank) for rank in needed}
        outer = {_tail(k): v for part in parts.values() for k, v in part.items() if OUTER in k}
        held = {key: outer[_tail(key)] if OUTER in key else v for key, v in fresh.items()}
        for stage in self.places.ranks[self.rank].stages:
            own = (f"trainer.stage {stage}.", *_SHARED)
            held = {key: value for key, value in held.items() if not key.startswith(own)}
            part = parts[self._holder(step, stage)]
            held |= {key: value for key, value in part.items() if key.startswith(own)}
        return held, any(map(_remembers, parts.values()))

    def _check(self, step: int, is_thorough: bool) -> int:
        """The attempt that the parts which this rank needs are of. Raises DataError if one is
        missing, damaged or of another experiment."""
        parts = self.folder.ranks(step)
        if not parts:
            raise DataError("no part of it is complete here")
        abouts = {rank: self.folder.about(step, rank) for rank in parts}
        for about in abouts.values():
            if about["release"] != __version__:
                raise DataError(
                    f"it was written by xcloud {about['release']}, this is {__version__}: go on "
                    "with that release"
                )
        changed = self.changes(step)
        if changed.refused:
            raise DataError("; ".join(changed.refused))
        needed = self._needed(step)
        for rank in needed if is_thorough else ():
            self.folder.check(step, rank)
        attempts = {int(abouts[rank]["attempt"]) for rank in needed}
        if len(attempts) != 1:
            raise DataError("its parts are of different attempts at this step")
        return attempts.pop()

    def _needed(self, step: int) -> list[int]:
        """The ranks whose parts to read."""
        parts, changed, before = self.folder.ranks(step), self.changes(step), self._before(step)
        if not changed.moves:
            if self.rank not in parts:
                raise DataError(f"the part of rank {self.rank} is not here, or incomplete")
            return [self.rank]
        if changed.needs_merge and before.column != self.places.column:
            raise DataError(
                "one replica made it, so nothing was merged that others could take over"
            )
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
        """Of those that have a part here one as near to this rank as there is."""
        before, own = self._before(step), self.places.ranks[self.rank]
        group_rank = self.places.holders(stage, own.replica).index(self.rank)
        found = []
        for rank in self.folder.ranks(step):
            there = before.ranks[rank]
            if stage in there.stages:
                its = before.holders(stage, there.replica).index(rank)
                if its == group_rank or not there.is_sharded:
                    found.append((there.replica != own.replica, its != group_rank, rank))
        if not found:
            raise DataError(f"stage {stage}, held by other ranks then, is not in this folder")
        return min(found)[2]

    def _before(self, step: int) -> Places:
        return Places.read(self.folder.about(step, self.folder.ranks(step)[0])["places"])

    def _check_facts(self, step: int, rank: int, facts: Mapping[str, str]) -> None:
        saved = self.folder.about(step, rank)["facts"]
        for name in saved.keys() & facts.keys():
            if saved[name] != facts[name]:
                raise DataError(
                    f"{name} is not what the checkpoint of step {step} was trained on: "
                    f"{facts[name]} now, {saved[name]} then"
                )


def is_marked(key: str, mark: str) -> bool:
    return mark in key.split(".")


def _remembers(state: State) -> bool:
    """Numbers only count messages."""
    return any(isinstance(v, Tensor) and is_marked(key, MEMORY) for key, v in state.items())


def _tail(key: str) -> str:
    """From the mark on: what follows names a parameter, whatever holds it."""
    return key[key.index(OUTER) :] if OUTER in key else key


def newest_common(
    tables: Mapping[int, Mapping[str, str]], name_of: Callable[[int], str]
) -> tuple[int, str]:
    """The step to go on from, 0 for the start, and a note for the user. tables: by rank and step;
    of other ranks, which are not trusted: anything else is dropped. Raises ConfigError where that
    would silently lose an agreed checkpoint."""
    held = {
        rank: {int(s): line for s, line in lines.items() if s.isdecimal() and len(s) < 16}
        for rank, lines in tables.items()
    }
    passed: list[str] = []
    table: dict[bool, dict[int, dict[int, str]]] = {True: {}, False: {}}  # by whether it is agreed
    for step in sorted({step for lines in held.values() for step in lines}, reverse=True):
        lines = {rank: held[rank].get(step, "bad written it has none") for rank in held}
        had_part = re.fullmatch(r"ok agreed \d+ ([\d,]+)", lines.get(0, ""))
        if had_part:
            lines = {r: line for r, line in lines.items() if str(r) in had_part[1].split(",")}
        table[any(line.split()[1:2] == ["agreed"] for line in lines.values())][step] = lines
    # Agreed ones first: of others, what ranks reported of their steps may not have come to rank 0.
    for step, lines in (table[True] | table[False]).items():
        wrong = _wrong(lines, name_of)
        if not wrong:
            return step, _note(passed, step)
        if step in table[True]:
            passed.append(f"step {step}: {'; '.join(wrong)}")
    if passed:
        raise ConfigError(
            f"there is no checkpoint that every rank can go on from. {'. '.join(passed)}. Put the "
            "missing files back, or move the folder `checkpoints` of every cloud away to begin "
            "anew"
        )
    return 0, ""


def _wrong(lines: Mapping[int, str], name_of: Callable[[int], str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for rank, line in lines.items():
        if not line.startswith("ok "):
            reasons.setdefault(line.split(maxsplit=2)[-1], []).append(name_of(rank))
    wrong = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    attempts = {line.split()[2] for line in lines.values()} if not wrong else set()
    return wrong or (["ranks have parts of different attempts"] if len(attempts) > 1 else [])


def _note(passed: Sequence[str], step: int) -> str:
    if not passed:
        return ""
    return f"going on from step {step}, not from the newest checkpoint. {'. '.join(passed)}"


def check_can_go_on(
    job: Job, run_dir: Path, settings: Mapping[str, str], anew: bool = False
) -> None:
    """Before any rank starts, where one folder has the parts of all. Raises ConfigError, also for
    a run that would begin anew unless that is asked for."""
    holders = {
        rank: RankCheckpoints.of(job, rank, run_dir, settings) for rank in job.roster.saving
    }
    first = holders[min(holders)]
    steps = first.folder.agreed_steps()
    refused = _refused(first, steps[0]) if steps else ()
    if refused:
        raise ConfigError(f"{run_dir} cannot go on. {'. '.join(refused)}")
    held = {rank: holder.table(is_thorough=False) for rank, holder in holders.items()}
    if not newest_common(held, lambda rank: f"rank {rank}")[0] and not anew:
        raise ConfigError(
            f"{run_dir} has no checkpoint, so there is nothing to go on from. To begin anew in "
            "this folder add resume_anew=true; the run's own command begins in a new one"
        )


def _refused(holder: RankCheckpoints, step: int) -> Sequence[str]:
    try:
        return holder.changes(step).refused
    except (DataError, IndexError):  # damaged, or no part is here: the ranks say so of each
        return ()

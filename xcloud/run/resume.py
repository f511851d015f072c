"""Going on from a checkpoint: which one all ranks hold, what of it still has a meaning, and what a
rank takes over. Sends nothing: the ranks compare what they hold with everything else that they
compare before the start (agreement.py).

The newest agreed step of which every rank has a good part is taken; one rank that has heard of the
agreement is enough. Where there is none, one that all have written counts as well. If none is left
although one was agreed on, the run is refused: it would silently begin anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xcloud import __version__
from xcloud.comm.memory import State
from xcloud.errors import ConfigError, DataError
from xcloud.job.experiment import Experiment
from xcloud.job.job import Job
from xcloud.project import commit
from xcloud.record.checkpoints import CheckpointFolder
from xcloud.run.compared import compared_settings

HELD = "held "
"""Begins the keys of a rank's checkpoints in its table: "held 500" -> "ok agreed ATTEMPT 0,1" or
"bad agreed WHY" ("written" instead of "agreed" without word of all ranks). Rank 0 names the ranks
that had a part in it: those of a one-way job that were lost before have none."""

_MAX_REASON = 110  # characters that fit into a table

# Settings, by the beginning of their names, that may change between a checkpoint and going on.
_FREE = (
    "training.max_steps", "training.optimizer.", "training.evaluate_every", "training.eval_",
    "training.on_divergence", "training.max_skips_in_a_row", "training.precision",
    "training.checkpoint", "launch", "security", "model.decoding",
    "cluster.wan", "cluster.links", "cluster.liveness", "cluster.bandwidth",
    "feed.on_slow", "feed.on_dead", "feed.slow_after_s", "feed.min_producers",
)  # fmt: skip
# What channels carry from step to step has no meaning after a change of these.
_CHANNELS = ("compression", "schedule", "training.accumulate_steps")
_LAYOUT = ("cluster",)


@dataclass
class Changes:
    """What differs from the experiment that a checkpoint was made by. drops_channels: the state of
    the channels has no meaning any more; moves_stages: stages are held by other ranks."""

    said: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    drops_channels: bool = False
    moves_stages: bool = False

    @property
    def text(self) -> str:
        """For the user; empty if nothing differs."""
        if not self.said:
            return ""
        dropped = " (what compression remembers of earlier steps is dropped)"
        return f"changed: {', '.join(self.said)}{dropped if self.drops_channels else ''}"


def changes(saved: Mapping[str, str], now: Mapping[str, str]) -> Changes:
    """saved, now: settings as compared.compared_settings gives them."""
    found = Changes()
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key, "not set"), now.get(key, "not set")
        if old == new:
            continue
        said = f"{key} {old} -> {new}"
        found.said.append(said)
        if key.startswith(_FREE):
            continue
        if key.startswith(_CHANNELS):
            found.drops_channels = True
        elif key.startswith(_LAYOUT):
            found.drops_channels = found.moves_stages = True
        else:
            found.refused.append(said)
    return found


@dataclass(frozen=True)
class Holder:
    """What one rank goes on with, from the parts in its run folder.

    stages: that it holds; None in jobs without, whose ranks cannot change places. settings: as
    compared with other ranks.
    """

    folder: CheckpointFolder
    rank: int
    stages: tuple[int, ...] | None
    settings: Mapping[str, str]

    @classmethod
    def of(cls, job: Job, rank: int, run_dir: Path, settings: Mapping[str, Any]) -> Holder:
        """settings: the resolved experiment file as plain containers."""
        stages = None
        if isinstance(job, Experiment) and rank < job.cluster.num_ranks:
            stages = job.cluster.placement(rank).stages
        return cls(CheckpointFolder(run_dir), rank, stages, compared_settings(settings))

    def table(self, is_thorough: bool = True) -> dict[str, str]:
        """Lines for the comparison of all ranks. is_thorough: read every file to the end."""
        lines = {}
        for step in self.folder.steps():
            agreed = "agreed" if self.folder.is_agreed(step) else "written"
            try:
                attempt = self._check(step, is_thorough)
                found = self.folder.agreed(step) if self.stages is None else {}
                held_by = map(str, found.get("held_by", ()))
                line = f"ok {agreed} {attempt} {','.join(held_by)}".rstrip()
            except DataError as error:
                reason = str(error).encode("ascii", "replace").decode()
                line = f"bad {agreed} {reason[-_MAX_REASON:]}"
            lines[f"{HELD}{step}"] = json.dumps(line)
        return lines

    def about(self, attempt: int) -> dict[str, object]:
        """Facts that this rank writes with its parts."""
        return {
            "release": __version__, "commit": commit(), "attempt": attempt,
            "stages": list(self.stages or ()), "settings": dict(self.settings),
        }  # fmt: skip

    def changes(self, step: int) -> Changes:
        parts = self.folder.ranks(step)
        first = self.rank if self.rank in parts else parts[0]
        return changes(self.folder.about(step, first)["settings"], self.settings)

    def own_step(self, step: int) -> int:
        """The newest step up to this one of which this rank has what it needs: an earlier one, or
        0, where it was lost before and the run went on without it."""
        if self.stages is not None:
            return step
        return max((s for s in self.folder.steps() if s <= step and self._has(s)), default=0)

    def _has(self, step: int) -> bool:
        return self.rank in self.folder.ranks(step)

    def restore(self, step: int, fresh: State, facts: Mapping[str, str]) -> State:
        """This rank's state after `step`. fresh: its state now, for what has no meaning any more.
        facts: of its data, which must be those it was trained on. Raises DataError."""
        changed = self.changes(step)
        state: State = {}
        for rank, wanted in self._sources(step, changed).items():
            self._check_facts(step, rank, facts)
            part = self.folder.read(step, rank)
            state |= {key: v for key, v in part.items() if key.startswith(wanted)}
        dropped: tuple[str, ...] = ("channels.",) if changed.drops_channels else ()
        dropped += ("trainer.exchange ",) if changed.moves_stages else ()
        kept = {key: value for key, value in state.items() if not key.startswith(dropped)}
        return kept | {key: v for key, v in fresh.items() if key.startswith(dropped)}

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
            raise DataError(f"it is of another experiment: {', '.join(changed.refused)}")
        needed = self._sources(step, changed)
        for rank in needed if is_thorough else ():
            self.folder.check(step, rank)
        attempts = {int(abouts[rank]["attempt"]) for rank in needed}
        if len(attempts) != 1:
            raise DataError("its parts are of different attempts at this step")
        return attempts.pop()

    def _sources(self, step: int, changed: Changes) -> dict[int, tuple[str, ...]]:
        """Whose parts to read, and which keys of them (their beginnings)."""
        parts = self.folder.ranks(step)
        if not changed.moves_stages:
            if self.rank not in parts:
                raise DataError(f"the part of rank {self.rank} is not here, or incomplete")
            return {self.rank: ("",)}
        if self.stages is None:
            raise DataError(f"it is of another cluster: {', '.join(changed.said)}")
        found: dict[int, tuple[str, ...]] = {}
        for stage in self.stages:
            holders = [r for r in parts if stage in self.folder.about(step, r)["stages"]]
            if not holders:
                raise DataError(f"stage {stage}, held by other ranks then, is not in this folder")
            common = ("trainer.num_updates", "trainer.guard.")
            held = found.get(holders[0], common)
            found[holders[0]] = (*held, f"trainer.stage {stage}.")
        return found

    def _check_facts(self, step: int, rank: int, facts: Mapping[str, str]) -> None:
        saved = self.folder.about(step, rank)["facts"]
        for name in saved.keys() & facts.keys():
            if saved[name] != facts[name]:
                raise DataError(
                    f"{name} is not what the checkpoint of step {step} was trained on: "
                    f"{facts[name]} now, {saved[name]} then"
                )


def held_in(table: Mapping[str, str]) -> dict[int, str]:
    """Step -> line, of one rank's table. Other ranks are not trusted: anything else is dropped."""
    found = {}
    for key, value in table.items():
        step = key.removeprefix(HELD)
        if key.startswith(HELD) and step.isdecimal() and len(step) < 16:
            found[int(step)] = value.strip('"')
    return found


def newest_common(
    held: Mapping[int, Mapping[int, str]], name_of: Callable[[int], str]
) -> tuple[int, str]:
    """The step to go on from, 0 for the start, and a note for the user. held: by rank and step.
    Raises ConfigError where that would silently lose an agreed checkpoint."""
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
    wrong = [
        f"{name_of(rank)}: {line.split(maxsplit=2)[-1]}"
        for rank, line in lines.items()
        if not line.startswith("ok ")
    ]
    attempts = {line.split()[2] for line in lines.values()} if not wrong else set()
    return wrong or (["ranks have parts of different attempts"] if len(attempts) > 1 else [])


def _note(passed: Sequence[str], step: int) -> str:
    if not passed:
        return ""
    return f"going on from step {step}, not from the newest checkpoint. {'. '.join(passed)}"


def check_can_go_on(job: Job, run_dir: Path, settings: Mapping[str, Any]) -> None:
    """Before any rank starts, where one folder has the parts of all. Raises ConfigError."""
    holders = {rank: Holder.of(job, rank, run_dir, settings) for rank in job.saving_ranks}
    held = {rank: held_in(holder.table(is_thorough=False)) for rank, holder in holders.items()}
    newest_common(held, lambda rank: f"rank {rank}")

"""The step from which all ranks resume, by what each of them holds.

The newest agreed step of which every rank has a good shard is taken; one rank that has heard of
the agreement is enough. Where there is none, one that all have written counts as well. If none is
left although one was agreed on, the run is refused: it would silently restart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from xcloud.base.errors import ConfigError

# What RankCheckpoints.table (resume.py) writes of a step.
_LINE = re.compile(r"ok (agreed|written) \d+( .*)?|bad (agreed|written) .+")


def newest_common(
    tables: Mapping[int, Mapping[str, str]], name_of: Callable[[int], str]
) -> tuple[int, str]:
    """Return the step to resume from, 0 for the start, and a note for the user.

    tables: a table for each rank and step. Those of other ranks are not trusted: anything
        unexpected is dropped.
    Raises ConfigError where an agreed checkpoint would silently be lost.
    """
    # Tables come from other clouds: a key of a thousand digits must cost nobody anything.
    steps = {int(s) for held in tables.values() for s in held if s.isdecimal() and len(s) < 16}
    passed: list[str] = []
    table: dict[bool, dict[int, dict[int, str]]] = {True: {}, False: {}}  # by whether it is agreed
    for step in sorted(steps, reverse=True):
        lines = {rank: held.get(str(step), "") for rank, held in tables.items()}
        lines = {
            r: t if _LINE.fullmatch(t) else "bad written it has none" for r, t in lines.items()
        }
        # Rank 0 of a one-way job names who had a shard. A producer that was lost before has none,
        # and must not keep the others from this step.
        had_part = re.fullmatch(r"ok agreed \d+ ([\d,]+)", lines.get(0, ""))
        if had_part:
            lines = {r: line for r, line in lines.items() if str(r) in had_part[1].split(",")}
        table[any(line.split()[1:2] == ["agreed"] for line in lines.values())][step] = lines
    # Agreed ones first: of others, what ranks reported of their steps may not have come to rank 0.
    for step, lines in (table[True] | table[False]).items():
        wrong = _wrong(lines, name_of)
        if not wrong:
            note = f"going on from step {step}, not from the newest checkpoint. "
            return step, note + ". ".join(passed) if passed else ""
        if step in table[True]:
            passed.append(f"step {step}: {'; '.join(wrong)}")
    if passed:
        raise ConfigError(
            f"no checkpoint is one that every rank can resume from. {'. '.join(passed)}. Put the "
            "missing files back, or move the folder `checkpoints` of every cloud away to restart"
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

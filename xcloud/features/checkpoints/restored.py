"""What a rank goes on from, as the ranks have agreed."""

from __future__ import annotations

from typing import Any

from xcloud.comm.state import StateTree, load_states, states_of
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.resume import Changes, RankCheckpoints
from xcloud.features.checkpoints.saving import (
    CheckpointWriter,
    Facts,
    Timing,
    about_part,
    bytes_to_copy,
)
from xcloud.pipeline.control import Control
from xcloud.pipeline.settings import Checkpoints
from xcloud.rank.role import RankContext
from xcloud.record.checkpoint_files import CheckpointFolder


def check_facts(context: RankContext[Any], facts: Facts) -> None:
    """Raise DataError if the run goes on from a checkpoint that was made with other data. Called
    as soon as they are loaded: what is built from them may take hours."""
    step = context.verdict.from_step
    if step and context.rank in context.job.roster.saving:
        folder = CheckpointFolder(context.run_dir)
        holder = RankCheckpoints(folder, context.rank, context.job.places, context.settings)
        if own := holder.own_step(step):
            holder.check_facts(own, facts)


def restored(
    context: RankContext[Any],
    parts: StateTree,
    control: Control | None,
    facts: Facts,
    is_told: bool = True,
) -> Checkpointer:
    """Of all that this rank goes on from, which takes over its state if the ranks have agreed
    on a checkpoint. Before the first step. facts: of the data, which must stay the same."""
    job, rank, reporter = context.job, context.rank, context.reporter
    folder, step = CheckpointFolder(context.run_dir), context.verdict.from_step
    if rank not in job.roster.saving:
        never = Checkpoints(every_steps=0, every_minutes=0)
        return Checkpointer(Timing(never), CheckpointWriter(folder, rank, {}), None, {}, reporter)
    holder = RankCheckpoints(folder, rank, job.places, context.settings)
    own = holder.own_step(step) if step else 0
    if own < step:
        since = f"goes on from its own of step {own}" if own else "begins anew"
        reporter.note(f"was lost before the checkpoint of step {step}, and {since}")
    forgets = False
    if own:
        state, forgets = holder.restore(own, states_of(parts), facts)
        load_states(parts, state, f"rank {rank}")
    elif job.checkpoint.are_made:
        bytes_to_copy(lambda: states_of(parts))  # digests are made here, not between updates
    folder.delete_after(step, rank, context.verdict.attempt, context.roll_back)
    if context.is_resumed and rank == 0:
        changed = holder.changes(step) if step else Changes()
        reporter.event("resume", now=True, step=step, changed=changed.said)
        if changed.said:
            reporter.note(changed.price(forgets))
    about = about_part(job.places, context.settings, context.verdict.attempt, facts)
    return Checkpointer(
        Timing(job.checkpoint, step, job.max_steps),
        CheckpointWriter(folder, rank, about),
        control, parts, reporter, context.asked, job.roster.saving,
        is_told,
    )  # fmt: skip

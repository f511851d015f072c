"""The state that a rank resumes from, as the ranks have agreed."""

from __future__ import annotations

from typing import Any

from xcloud.comm.snapshot import bytes_to_copy
from xcloud.comm.state import StateTree, load_states, states_of
from xcloud.features.checkpoints.checkpointing import Checkpointer
from xcloud.features.checkpoints.resume import Changes, RankCheckpoints
from xcloud.features.checkpoints.saving import CheckpointWriter, Timing, about_part
from xcloud.pipeline.control import Control
from xcloud.pipeline.settings import Checkpoints
from xcloud.rank.role import RankContext
from xcloud.rank.saving import InputDigests
from xcloud.record.checkpoint_files import CheckpointFolder


def check_facts(context: RankContext[Any], facts: InputDigests) -> None:
    """Raise DataError if the run resumes from a checkpoint that was made with other data.

    Called as soon as they are loaded: what is built from them may take hours.
    """
    step = context.verdict.from_step
    if step and context.rank in context.job.roster.saving:
        folder = CheckpointFolder(context.run_dir)
        holder = RankCheckpoints(
            folder, rank=context.rank, places=context.job.places, settings=context.settings
        )
        # A producer that was lost before may restart from nothing: then it has no facts to keep.
        if own := holder.own_step(step):
            holder.check_facts(own, facts)


def restored(
    context: RankContext[Any],
    states: StateTree,
    control: Control | None,
    facts: InputDigests,
    is_told: bool = True,
) -> Checkpointer:
    """Return the saver of `states`, once they have loaded the agreed checkpoint.

    facts: the digests of the data, which must stay the same.
    is_told: rank 0's signal comes with every step.
    Called before the first step.
    """
    job = context.job
    rank = context.rank
    reporter = context.reporter
    step = context.verdict.from_step
    folder = CheckpointFolder(context.run_dir)
    if rank not in job.roster.saving:
        # A rank that saves nothing has a Checkpointer, too, which is never due.
        never = Checkpoints(every_steps=0, every_minutes=0)
        writer = CheckpointWriter(folder, rank, about={})
        return Checkpointer(
            timing=Timing(never), writer=writer, control=None, parts={}, reporter=reporter
        )
    holder = RankCheckpoints(folder, rank, places=job.places, settings=context.settings)
    own = holder.own_step(step) if step else 0
    if own < step:
        since = f"resumes from its own of step {own}" if own else "restarts"
        reporter.note(f"was lost before the checkpoint of step {step}, and {since}")
    forgets = False
    if own:
        state, forgets = holder.restore(own, fresh=states_of(states), facts=facts)
        load_states(states, state, owner=f"rank {rank}")
    elif job.checkpoint.are_made:
        bytes_to_copy(lambda: states_of(states))  # digests are made here, not between updates
    # Later checkpoints are of the attempt that ended: this one makes those steps again.
    folder.delete_after(step, rank, attempt=context.verdict.attempt, roll_back=context.roll_back)
    # The event stands behind the restore: only now it is known whether anything was forgotten.
    if context.is_resumed and rank == 0:
        changed = holder.changes(step) if step else Changes()
        reporter.event("resume", now=True, step=step, changed=changed.said)
        if changed.said:
            reporter.note(changed.price(forgets))
    about = about_part(
        job.places, settings=context.settings, attempt=context.verdict.attempt, facts=facts
    )
    return Checkpointer(
        timing=Timing(settings=job.checkpoint, from_step=step, last_step=job.max_steps),
        writer=CheckpointWriter(folder, rank, about),
        control=control,
        parts=states,
        reporter=reporter,
        asked=context.asked,
        among=job.roster.saving,
        is_told=is_told,
    )

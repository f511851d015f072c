"""What a rank goes on from, and the part that saves it around a pipeline's updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from xcloud.cluster.transport import Meeting
from xcloud.comm.state import Stateful, bytes_to_copy, load_states, states_of
from xcloud.comm.step_clock import StepClock
from xcloud.job.job import Job
from xcloud.join.agreement import Table, Verdict, agree
from xcloud.parallel.control import Signal
from xcloud.parallel.part import Part, StepReport
from xcloud.rank.role import RankContext
from xcloud.record.checkpoints import CheckpointFolder
from xcloud.record.segments import CheckpointSteps
from xcloud.survive.changes import Changes
from xcloud.survive.checkpointing import Checkpointer, Messenger
from xcloud.survive.resume import RankCheckpoints, newest_common
from xcloud.survive.saving import CheckpointWriter, StopSignal, Timing, about_part
from xcloud.training.settings import Checkpoints


def join(
    job: Job, table: Table, rank: int, run_dir: Path, meet: Callable[[], Meeting]
) -> tuple[Meeting, Verdict]:
    """Compare with the others what is to run and what it goes on from. table: what this rank runs.
    meet: with the others, in a place that is called once this one has read its checkpoints. Raises
    ConfigError in a rank that cannot go on."""
    held = {}
    if CheckpointSteps(run_dir).steps():
        held = RankCheckpoints.of(job, rank, run_dir, table["setting"]).table()
    meeting = meet()
    return meeting, agree(job, meeting, table, held, newest_common)


def restored(
    context: RankContext[Any],
    parts: Mapping[str, Stateful],
    messenger: Messenger | None,
    facts: Mapping[str, str],
) -> Checkpointer:
    """Of all that this rank goes on from, which takes over its state if the ranks have agreed
    on a checkpoint. Before the first step. facts: of the data, which must stay the same."""
    job, rank, reporter = context.job, context.rank, context.reporter
    folder, step = CheckpointFolder(context.run_dir), context.verdict.from_step
    if rank not in job.saving_ranks:
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
    if step:  # of a run that begins anew nothing is deleted that is complete
        folder.delete_after(step, rank)
    if context.is_resumed and rank == 0:
        changed = holder.changes(step) if step else Changes()
        reporter.event("resume", now=True, step=step, changed=changed.said)
        if changed.said:
            reporter.note(changed.price(forgets))
    about = about_part(job.places, context.settings, context.verdict.attempt, facts)
    return Checkpointer(
        Timing(job.checkpoint, step, job.max_steps),
        CheckpointWriter(folder, rank, about),
        messenger, parts, reporter, context.asked, job.saving_ranks,
    )  # fmt: skip


class CheckpointPart(Part):
    """A Checkpointer around a pipeline's updates. is_told: rank 0's signal comes with every step;
    else this rank goes by the step alone."""

    def __init__(
        self, checkpoints: Checkpointer, asked: StopSignal, is_told: bool, clock: StepClock
    ) -> None:
        self._checkpoints, self._asked, self._is_told = checkpoints, asked, is_told
        self._clock = clock

    def before_update(self, step: int) -> None:
        self._asked.is_armed = self._is_told and self._checkpoints.timing.settings.are_made

    def signal(self, step: int) -> Signal:
        checkpoints = self._checkpoints
        return checkpoints.decide(step) if self._is_told else checkpoints.decide_by_step(step)

    def after_update(self, step: int, report: StepReport) -> None:
        with self._clock.paused():
            self._checkpoints.after(step, report.signal)

    def finish(self) -> None:
        self._asked.is_armed = False
        self._checkpoints.save_last()

    def settle(self) -> None:
        self._checkpoints.wait()

    def close(self, is_finished: bool) -> None:
        self._checkpoints.close()
        if is_finished:
            self._checkpoints.keep_newest()

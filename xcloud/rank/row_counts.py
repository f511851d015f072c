"""A rank whose stages read no field opens no file, if the task accepts sizes: they are among the
facts of rank 0, which reads the text.
"""

from __future__ import annotations

from dataclasses import replace

from xcloud.base.errors import FrameError
from xcloud.contracts.model import SPLITS, Task, TaskData
from xcloud.job.job import PipelineJob
from xcloud.net.transport import Rendezvous
from xcloud.rank.agreement import agree_on, compare_facts
from xcloud.rank.task_data import DATA, SAMPLES, load

UNREAD = "the task's settings and sizes"


def load_or_be_told(job: PipelineJob, rendezvous: Rendezvous, own: Task | None = None) -> TaskData:
    """Load the data as `load` does, or take their sizes from rank 0 in a rank that reads no field.

    own: its `task`.

    Raises FrameError too, where rank 0 sends no sizes.
    """
    task = job.task
    unseeing = [rank for rank in range(job.cluster.num_ranks) if not job.fields_of(rank)]
    # `sizes` is a task's row counts; None where it has them and they are not set.
    if not unseeing or 0 in unseeing or getattr(task, "sizes", ()) is not None:
        return load(job, rendezvous, task=own)
    left_out = dict.fromkeys(unseeing, (DATA, UNREAD, *SAMPLES.values()))
    if rendezvous.rank not in unseeing:
        return load(
            job,
            rendezvous,
            more=lambda data: {UNREAD: _unread(job, data).fingerprint()},
            left_out=left_out,
            task=own,
        )
    theirs = agree_on("data", rendezvous, facts={}, left_out=left_out)
    found = {split: theirs.get(SAMPLES[split], "nothing") for split in SPLITS}
    # Rank 0 may be another owner's: a number of 10^10 samples would fill the memory here.
    if not all(text.isdecimal() and len(text) < 10 for text in found.values()):
        raise FrameError(f"rank 0 sent {found} as the numbers of samples")
    sizes = {split: int(text) for split, text in found.items()}
    sized: Task = replace(task, sizes=sizes)  # type: ignore[type-var]
    data = sized.load(frozenset(), job.seed)
    # The sizes may be those of other settings of the task: what follows from both is compared too.
    compare_facts(
        {UNREAD: data.fingerprint()}, theirs={UNREAD: theirs.get(UNREAD, "nothing")}, peer=0
    )
    return data


def _unread(job: PipelineJob, data: TaskData) -> TaskData:
    """Return what a rank that reads nothing has of the same data."""
    sizes = {split: data.num_samples(split) for split in SPLITS}
    sized: Task = replace(job.task, sizes=sizes)  # type: ignore[type-var]
    return sized.load(frozenset(), job.seed)

"""Load what this rank's cloud may see, check that all clouds have the same data, and give models
what they need of it to build a stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from xcloud.base.errors import DataError
from xcloud.contracts.model import Batch, BuildContext
from xcloud.contracts.task import SPLITS, TaskData, asks_for_sizes, with_sizes
from xcloud.job.experiment import Experiment
from xcloud.parallel.exchange import RankGroup
from xcloud.record.reporter import Reporter

log = logging.getLogger(__name__)

DATA = "the task's data"
SAMPLES = {split: f"samples of {split}" for split in SPLITS}


class Comparison(Protocol):
    """Compares facts between ranks before the first step: a Control, or a store."""

    tells_sizes: bool
    """Whether rank 0 can tell others how many samples there are."""

    def agree(
        self, facts: Mapping[str, str], left_out: Mapping[int, Collection[str]] = ...
    ) -> None: ...

    def tell_sizes(self, sizes: Sequence[int], peers: Iterable[int]) -> None: ...

    def hear_sizes(self, num_splits: int) -> list[int]: ...


def load(experiment: Experiment, rank: int, control: Comparison | None) -> TaskData:
    """Load exactly the fields that this rank's stages read. A rank that reads none opens no file
    if the task accepts sizes: it receives them from rank 0, which reads the text.

    Raises DataError for missing or extra fields, ConfigError if ranks differ.
    """
    task, seed, fields = experiment.task, experiment.seed, experiment.fields_of(rank)
    unseeing = [r for r in range(experiment.cluster.num_ranks) if not experiment.fields_of(r)]
    told = 0 not in unseeing and bool(unseeing) and asks_for_sizes(task)
    told = told and control is not None and control.tells_sizes
    if told and control is not None and rank in unseeing:
        task = with_sizes(task, dict(zip(SPLITS, control.hear_sizes(len(SPLITS)), strict=True)))
    data = task.load(fields, seed)
    _check_fields(data, fields)
    for defence in experiment.security.chosen_defences.values():
        if data.head is not None:
            defence.check_labels(data.head.kind, data.head.num_outputs)
        elif "label" in fields:  # for each token
            defence.check_labels("tokens", 1)

    if control is None:
        return data
    sizes = {split: data.num_samples(split) for split in SPLITS}
    facts: dict[str, str] = {}
    if fields or not told:  # sizes are compared first: they say more than a digest
        facts = {SAMPLES[split]: str(size) for split, size in sizes.items()}
        facts[DATA] = data.fingerprint()
    if told:
        if rank == 0:
            control.tell_sizes([sizes[split] for split in SPLITS], unseeing)
        unread = with_sizes(task, sizes).load(frozenset(), seed)
        facts["the task's settings and sizes"] = unread.fingerprint()
    unread_facts = (DATA, *SAMPLES.values())
    control.agree(facts, dict.fromkeys(unseeing, unread_facts) if told else {})
    return data


def note_data(job: Experiment, rank: int, data: TaskData, reporter: Reporter) -> None:
    """Say which data these are and which texts were too long. What a cloud's texts are like is
    nobody else's matter: only rank 0 reports it, others write it to their own log."""
    if rank == 0:
        reporter.note(data.describe())
        rows = {split: data.num_samples(split) for split in SPLITS}
        digest = data.fingerprint()[:16]
        reporter.event("data", name=job.task.describe(), digest=digest, rows=rows)
    for name, num in data.num_cut.items():
        of = sum(map(data.num_samples, SPLITS))
        text = f"{num:,} of {of:,} {name} texts are longer than {job.task.max_length} tokens and "
        text += "were cut (task.max_length)"
        if num and rank == 0:
            reporter.note(text)
            reporter.event("cut", field=name, num=num)
        elif num:
            log.warning(text)


def context_of(
    job: Experiment,
    data: TaskData,
    device: torch.device,
    report: Callable[[str], None],
    group: RankGroup = RankGroup.alone(),  # noqa: B008
) -> BuildContext:
    """For the stages of a rank. group: the ranks that hold the same stage."""
    return BuildContext(
        seed=job.seed,
        device=device,
        cache_dir=job.cache_path,
        vocabularies=data.vocabularies,
        sentences=data.sentences,
        samples=partial(_spread, data),
        max_length=job.task.max_length,
        group_rank=group.group_rank,
        barrier=group.barrier,
        report=report,
        head=data.head,
    )


def _spread(data: TaskData, count: int) -> Batch:
    """So many training samples from all over the file, which may be sorted."""
    num_samples = data.num_samples("train")
    ids = torch.arange(0, num_samples, max(1, num_samples // count))[:count]
    return data.batch("train", ids)


def _check_fields(data: TaskData, fields: frozenset[str]) -> None:
    """Before anything is computed: a task that reads more than it was asked for is refused."""
    if data.num_samples("train"):
        extra = data.batch("train", torch.zeros(1, dtype=torch.int64)).keys() - fields - {"ids"}
        if extra:
            raise DataError(
                f"the task gave {', '.join(sorted(extra))}, which no stage of this rank reads; "
                "its load() must keep to the fields it is given: "
                f"{', '.join(sorted(fields)) or 'none'}"
            )

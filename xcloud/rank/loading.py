"""Load what this rank's cloud may see, and check that all clouds have the same data."""

from __future__ import annotations

import torch

from xcloud.base.errors import DataError
from xcloud.contracts.task import SPLITS, TaskData, asks_for_sizes, with_sizes
from xcloud.job.experiment import Experiment
from xcloud.join.elastic import StoreFacts
from xcloud.parallel.control import Control
from xcloud.security.defences import LABEL

DATA = "the task's data"
SAMPLES = {split: f"samples of {split}" for split in SPLITS}


def load(experiment: Experiment, rank: int, control: Control | StoreFacts | None) -> TaskData:
    """Load exactly the fields that this rank's stages read. A rank that reads none opens no file
    if the task accepts sizes: it receives them from rank 0, which reads the text.

    Raises DataError for missing or extra fields, ConfigError if ranks differ.
    """
    task, seed, fields = experiment.task, experiment.seed, experiment.fields_of(rank)
    unseeing = [r for r in range(experiment.cluster.num_ranks) if not experiment.fields_of(r)]
    told = 0 not in unseeing and bool(unseeing) and asks_for_sizes(task)
    if control is None or isinstance(control, StoreFacts):
        told = False
    elif told and rank in unseeing:
        task = with_sizes(task, dict(zip(SPLITS, control.hear_sizes(len(SPLITS)), strict=True)))
    data = task.load(fields, seed)
    _check_fields(data, fields)
    if data.head is not None:
        experiment.security.defences.check_head(data.head.kind, data.head.num_outputs)
    elif LABEL in fields:  # a label for each token
        experiment.security.defences.check_head("tokens", 1)

    if control is None:
        return data
    sizes = {split: data.num_samples(split) for split in SPLITS}
    facts: dict[str, str] = {}
    if fields or not told:  # sizes are compared first: they say more than a digest
        facts = {SAMPLES[split]: str(size) for split, size in sizes.items()}
        facts[DATA] = data.fingerprint()
    if told:
        if rank == 0 and not isinstance(control, StoreFacts):
            control.tell_sizes([sizes[split] for split in SPLITS], unseeing)
        unread = with_sizes(task, sizes).load(frozenset(), seed)
        facts["the task's settings and sizes"] = unread.fingerprint()
    unread_facts = (DATA, *SAMPLES.values())
    control.agree(facts, dict.fromkeys(unseeing, unread_facts) if told else {})
    return data


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

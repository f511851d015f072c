"""The leak meter around one rank's updates: what it sees of other clouds, boundary by boundary and
contribution by contribution, goes to a file after the last update. What leaks is found by
security/leak_meter.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from xcloud.contracts.model import NO_LABEL, Batch, Stage
from xcloud.contracts.task import TaskData
from xcloud.job.experiment import Experiment
from xcloud.parallel.part import Part
from xcloud.record.reporter import Reporter
from xcloud.security.defences import LABEL
from xcloud.security.observer import OBSERVATIONS_DIR, AveragingObserver, Observer, Victim


@dataclass(frozen=True)
class LeakObservers(Part):
    """averaged: of what replicas average; None where nothing is averaged over clouds, or no stage
    of this rank reads one text."""

    observer: Observer
    averaged: AveragingObserver | None
    reporter: Reporter
    run_dir: Path

    def before_pass(self, step: int, batches: Mapping[int, Batch]) -> None:
        for batch in batches.values():
            self.observer.batch(step, batch)

    def finish(self) -> None:
        with self.reporter.may_lose(OBSERVATIONS_DIR):
            if self.averaged is not None:
                self.averaged.attack()
            self.observer.write(self.run_dir)


def leak_observers(
    job: Experiment, rank: int, data: TaskData, stages: Mapping[int, Stage], reporter: Reporter,
    run_dir: Path,
) -> LeakObservers | None:  # fmt: skip
    """None if the leak meter is off or there is only one cloud."""
    meter, layout = job.leak_meter, job.cluster
    if meter is None:
        return None
    cloud = layout.placement(rank).cloud
    vocabularies = {name: data.vocabulary(name) for name in data.text_fields}
    token_fields = {name: (ids.pad, (ids.bos, ids.eos)) for name, ids in vocabularies.items()}
    observer = Observer(
        rank, cloud, layout.num_ranks, meter, job.training.max_steps, token_fields,
        job.fields_of_cloud(cloud), layout.placement(rank).replica,
    )  # fmt: skip
    return LeakObservers(observer, _averaged(job, observer, stages, data), reporter, run_dir)


def _averaged(
    job: Experiment, observer: Observer, stages: Mapping[int, Stage], data: TaskData
) -> AveragingObserver | None:
    layout = job.cluster
    texts = data.text_fields & job.model.fields(0, layout.num_stages)
    if layout.num_replicas == 1 or 0 not in stages or len(texts) != 1:
        return None
    (text,) = texts
    stage, ids = stages[0], data.vocabulary(text)

    def run(ids_NS: Tensor) -> None:
        ids_NS = ids_NS.to(next(stage.parameters()).device)
        zeros = torch.zeros_like(ids_NS)
        stage(None, {"ids": zeros[:, 0], text: ids_NS, "types": zeros, LABEL: zeros + NO_LABEL})

    words = torch.arange(ids.size)
    words = words[words != ids.pad]
    victim = Victim(stage, run, words, job.task.max_length, job.strategy.covers)
    return AveragingObserver(observer, victim, layout.num_replicas - 1)

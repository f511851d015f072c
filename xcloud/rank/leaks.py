"""The leak meter around one rank's updates: what it sees of other clouds goes to a file after the
last update, and security/leak_meter.py finds what leaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xcloud.cluster.frame import Kind, MessageKey
from xcloud.comm.channel import NOTHING_KNOWN, Message, Samples
from xcloud.contracts.model import NO_LABEL, Batch, Stage, TaskData
from xcloud.job.experiment import Experiment
from xcloud.parallel.part import Part
from xcloud.parallel.pipeline import BoundaryPorts
from xcloud.record.reporter import Reporter
from xcloud.security.defences import LABEL
from xcloud.security.observer import (
    OBSERVATIONS_DIR,
    AveragingWatch,
    Observer,
    ReadingStage,
    Stream,
)
from xcloud.wire.ends import Ends


@dataclass(frozen=True)
class LeakObservers(Part):
    """averaged: of what replicas average; None where nobody attacks that."""

    observer: Observer
    averaged: AveragingWatch | None
    reporter: Reporter
    run_dir: Path

    def before_pass(self, step: int, batches: Mapping[int, Batch]) -> None:
        for batch in batches.values():
            self.observer.batch(step, batch)
            if self.averaged is not None:
                self.averaged.batch(step, batch["ids"])

    def finish(self) -> None:
        with self.reporter.may_lose(OBSERVATIONS_DIR):
            if self.averaged is not None:
                self.averaged.finish(self.run_dir)
            self.observer.write(self.run_dir)


class ObservedEnd:
    """A Sender or a Receiver (`end`) of messages that the observer takes notes of."""

    def __init__(self, observer: Observer, end: Any) -> None:
        self._observer, self._end = observer, end
        self._floating = [f for f in end.fields if f.dtype.is_floating_point]

    def __getattr__(self, name: str) -> Any:  # send_start, recv_start
        return getattr(self._end, name)

    def send(self, key: MessageKey, message: Message, samples: Samples) -> Message:
        return self._note(key, self._end.send(key, message, samples), samples, "sent")

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        return self._note(key, self._end.recv(key, samples, known), samples, "received")

    def _note(self, key: MessageKey, message: Message, samples: Samples, how: str) -> Message:
        if key.kind is not Kind.EVALUATION and self._observer.wants(key.step):
            identity = self._end.identity
            for field in self._floating:
                stream = Stream(identity.direction, identity.boundary, how, field.name)
                counts = field.counts(message.get("counts"))
                self._observer.message(stream, samples["ids"], counts, message[field.name])
        return message


def observed(
    ports: dict[int, BoundaryPorts], observer: Observer, ends: Ends
) -> dict[int, BoundaryPorts]:
    """The same ports, whose messages from and to other clouds the observer takes notes of."""

    def of(side: Mapping[int, Any]) -> Any:
        return {
            peer: ObservedEnd(observer, end) if ends.leaves_cloud(peer) else end
            for peer, end in side.items()
        }

    sides = ("forward_out", "forward_in", "backward_out", "backward_in")
    return {
        stage: replace(own, **{side: of(getattr(own, side)) for side in sides})
        for stage, own in ports.items()
    }


def leak_observers(
    job: Experiment, rank: int, data: TaskData, stages: Mapping[int, Stage], reporter: Reporter,
    run_dir: Path,
) -> LeakObservers:  # fmt: skip
    """Of a job whose leak meter is on."""
    meter, layout, vocabularies = job.leak_meter, job.cluster, data.vocabularies
    assert meter is not None
    place = layout.placement(rank)
    token_fields = {name: (ids.pad, (ids.bos, ids.eos)) for name, ids in vocabularies.items()}
    observer = Observer(
        rank, place.cloud, layout.num_ranks, job.max_steps - meter.last_steps + 1,
        meter.max_rows, token_fields, job.fields_of_cloud(place.cloud), place.replica,
    )  # fmt: skip
    texts = vocabularies.keys() & job.model.fields(0, layout.num_stages)
    if layout.num_replicas == 1 or 0 not in stages or len(texts) != 1:
        return LeakObservers(observer, None, reporter, run_dir)
    (text,) = texts
    stage, ids = stages[0], vocabularies[text]

    def run(ids_NS: Tensor) -> None:
        ids_NS = ids_NS.to(next(stage.parameters()).device)
        zeros = torch.zeros_like(ids_NS)
        stage(None, {"ids": zeros[:, 0], text: ids_NS, "types": zeros, LABEL: zeros + NO_LABEL})

    words = torch.arange(ids.size)
    words = words[words != ids.pad]
    reading = ReadingStage(stage, run, words, job.task.max_length, job.strategy.traits.every)
    averaged = meter.averaged(observer, reading, layout.num_replicas - 1)
    if averaged is None and rank == 0:
        reporter.note("averages are not attacked; for that take security/meter=averages")
    return LeakObservers(observer, averaged, reporter, run_dir)

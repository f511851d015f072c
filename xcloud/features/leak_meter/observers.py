"""Observe what a rank's cloud sees of others, for the leak meter.

It goes to a file in the run folder after the last update, and features/leak_meter/meter.py finds
what leaks. Sends nothing.

Shapes: B samples of a message; R rows, sample after sample, counts [B] of them; D features.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from xcloud.comm.channel import NOTHING_KNOWN, Message, Samples
from xcloud.contracts.model import NO_LABEL, Batch, Stage, TaskData
from xcloud.features.leak_meter.meter import OBSERVATIONS_DIR, TRUTH, CrossedRows, CrossedStream
from xcloud.job.job import PipelineJob
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.ends import Ends
from xcloud.pipeline.hook import Hook
from xcloud.pipeline.pipeline import BoundaryPorts
from xcloud.rank.role import RankContext
from xcloud.record.reporter import Reporter
from xcloud.security.defences import LABEL
from xcloud.security.policy import Meter


@dataclass
class Observer:
    """The observations of one rank, from update `first_step` on.

    max_rows: the number of rows kept of each kind of message, the newest.
    token_fields: the texts that it may see (padding id, special token ids).
    holds: all batch fields that its cloud may see.
    replica: the replica of the pipeline that this rank belongs to.
    """

    rank: int
    cloud: str
    num_ranks: int
    first_step: int
    max_rows: int
    token_fields: Mapping[str, tuple[int, tuple[int, ...]]]
    holds: Collection[str]
    replica: int = 0
    _streams: dict[str, deque[CrossedRows]] = field(default_factory=dict, init=False)

    def wants(self, step: int) -> bool:
        return step >= self.first_step

    def message(
        self, stream: CrossedStream, ids: Tensor, counts: Tensor | None, rows: Tensor
    ) -> None:
        """Note one tensor of a training message, [R, D].

        What a cloud computes itself from text or labels that it holds is left out.
        """
        if stream.how == "received" or not self.holds:
            flat = rows.detach().flatten(1).to("cpu", torch.float32, copy=True)
            self._add(stream.name, ids=ids, counts=counts, rows=flat)

    def batch(self, step: int, batch: Mapping[str, Tensor]) -> None:
        """Note text and labels of a training batch: the attacks' ground truth."""
        ids = batch["ids"]
        for name, value in batch.items() if self.wants(step) else ():
            if name in self.token_fields:
                # Padding is cut off, as rows of padding do not cross either.
                is_token = value != self.token_fields[name][0]
                self._add(
                    f"{TRUTH}.{name}", ids=ids, counts=is_token.sum(1), rows=value[is_token].cpu()
                )
            elif name == LABEL and value.dim() == 1:  # not spans, nor a label for each token
                self._add(
                    f"{TRUTH}.{name}", ids=ids, counts=None, rows=value.detach().cpu().clone()
                )

    def write(self, run_dir: Path) -> Path:
        folder = run_dir / OBSERVATIONS_DIR
        folder.mkdir(exist_ok=True)
        path = folder / f"rank{self.rank}.safetensors"
        # Per stream three tensors (CrossedRows), under "STREAM/FIELD"; safetensors wants them
        # contiguous.
        tensors = {
            f"{name}/{part}": value.contiguous()
            for name, messages in self._streams.items()
            for part, value in CrossedRows.join(messages)._asdict().items()
        }
        special_ids = {name: ids for name, (_, ids) in self.token_fields.items()}
        about = {"rank": self.rank, "cloud": self.cloud, "num_ranks": self.num_ranks,
                 "holds": sorted(self.holds), "special_ids": special_ids}  # fmt: skip
        save_file(tensors, path, metadata={"about": json.dumps(about)})
        return path

    def _add(self, name: str, ids: Tensor, counts: Tensor | None, rows: Tensor) -> None:
        wide = torch.ones_like(ids) if counts is None else counts.to("cpu", torch.int64)
        messages = self._streams.setdefault(name, deque())
        messages.append(CrossedRows(ids=ids.clone(), counts=wide, rows=rows))
        # Whole messages go, the oldest first.
        while len(messages) > 1 and sum(len(m.rows) for m in messages) > self.max_rows:
            messages.popleft()


@dataclass(frozen=True)
class ReadingStage:
    """A stage that reads text, as an attacker on averages knows it.

    run: a function that computes it on token ids [N, S].
    words_N: the ids that may stand in a text (not padding).
    covers: the number of updates that one contribution sums up.
    """

    module: nn.Module
    run: Callable[[Tensor], object]
    words_N: Tensor
    max_length: int
    covers: int = 1


class AveragingWatch(Protocol):
    """A rank's observer of what other replicas contribute to averages."""

    def batch(self, step: int, ids: Tensor) -> None:
        """Note the samples that this rank trains on."""

    def received(self, step: int, replica: int, tensors: Mapping[str, Tensor]) -> None:
        """Note a contribution, as Terms.watch says."""

    def finish(self, run_dir: Path) -> None:
        """Write, after training, what was seen below OBSERVATIONS_DIR."""


@runtime_checkable
class WatchesAverages(Protocol):
    """A leak meter that attacks what replicas average, too."""

    def averaged(self, observer: Observer, stage: ReadingStage, num_others: int) -> AveragingWatch:
        """Return the observer of a stage that is averaged with `num_others` replicas."""


@dataclass(frozen=True)
class LeakObservers(Hook):
    """The hook of a rank that observes messages and averages, and writes them after training.

    averaged: the observer of what replicas average; None where nobody attacks that.
    """

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


@dataclass(eq=False)
class ObservedEnd:
    """A Sender or a Receiver (`end`) of messages that the observer takes notes of."""

    observer: Observer
    end: Any

    def __getattr__(self, name: str) -> Any:  # send_start, recv_start
        return getattr(self.end, name)

    def send(
        self, key: MessageKey, message: Message, samples: Samples, known: Message = NOTHING_KNOWN
    ) -> Message:
        # What `send` returns left in place of the message, with the noise of a defence in it.
        sent: Message = self.end.send(key, message, samples, known)
        self._note(key, {**known, **sent}, samples=samples, how="sent")
        return sent

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        received: Message = self.end.recv(key, samples, known)
        self._note(key, received, samples=samples, how="received")
        return received

    def _note(self, key: MessageKey, message: Message, samples: Samples, how: str) -> None:
        if key.kind is not Kind.EVALUATION and self.observer.wants(key.step):
            identity = self.end.identity
            for field in (f for f in self.end.fields if f.dtype.is_floating_point):
                stream = CrossedStream(
                    direction=identity.direction,
                    boundary=identity.boundary,
                    how=how,
                    field=field.name,
                )
                # A field with one row a sample has no counts.
                counts = field.counts(message.get("counts"))
                self.observer.message(
                    stream, ids=samples["ids"], counts=counts, rows=message[field.name]
                )


def observed(
    ports: dict[int, BoundaryPorts], observer: Observer, ends: Ends
) -> dict[int, BoundaryPorts]:
    """Return the same ports; the observer takes notes of messages from and to other clouds."""

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


def meter_of(job: PipelineJob) -> Meter | None:
    """Return the leak meter of a job; None where it has none, or nothing crosses."""
    return job.security.meter if job.cluster.crosses_clouds else None


def leak_observers(
    context: RankContext[PipelineJob], data: TaskData, stages: Mapping[int, Stage]
) -> LeakObservers:
    """Build the observers of a job whose leak meter is on."""
    job = context.job
    rank = context.rank
    reporter = context.reporter
    run_dir = context.run_dir
    meter = meter_of(job)
    layout = job.cluster
    vocabularies = data.vocabularies
    assert meter is not None
    place = layout.placement(rank)
    token_fields = {name: (ids.pad, (ids.bos, ids.eos)) for name, ids in vocabularies.items()}
    observer = Observer(
        rank,
        cloud=place.cloud,
        num_ranks=layout.num_ranks,
        first_step=job.max_steps - meter.last_steps + 1,
        max_rows=meter.max_rows,
        token_fields=token_fields,
        holds=job.fields_of_cloud(place.cloud),
        replica=place.replica,
    )
    # The vocabularies are of all texts that this cloud may see; the first stage reads one of them.
    texts = vocabularies.keys() & job.model.fields(0, num_stages=layout.num_stages)
    # Only averages of the stage that reads one text can be attacked for its words.
    if layout.num_replicas == 1 or 0 not in stages or len(texts) != 1:
        return LeakObservers(observer=observer, averaged=None, reporter=reporter, run_dir=run_dir)
    (text,) = texts
    stage = stages[0]
    ids = vocabularies[text]

    def run(ids_NS: Tensor) -> None:
        zeros = torch.zeros_like(ids_NS)
        # Some models ask for types or labels; these say nothing.
        stage(None, {"ids": zeros[:, 0], text: ids_NS, "types": zeros, LABEL: zeros + NO_LABEL})

    words = torch.arange(ids.size)
    words = words[words != ids.pad]
    reading = ReadingStage(
        module=stage,
        run=run,
        words_N=words,
        max_length=job.task.max_length,
        covers=job.strategy.traits.every,
    )
    averaged = None
    if isinstance(meter, WatchesAverages):
        averaged = meter.averaged(observer, reading, num_others=layout.num_replicas - 1)
    elif rank == 0:
        reporter.note("averages are not attacked; docs/privacy.md says how they are")
    return LeakObservers(observer=observer, averaged=averaged, reporter=reporter, run_dir=run_dir)

"""Say what a job sends out of each cloud, from its settings, before anything runs.

Shapes in words: B samples of a micro-batch; R rows, one for each token that is no padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from xcloud.comm.channel import BoundaryField
from xcloud.contracts.model import SplitModel
from xcloud.job.strategy import Strategy
from xcloud.pipeline.settings import Training
from xcloud.pipeline.wiring import WiredJob


class SendingJob(WiredJob, Protocol):
    """A job as far as it decides what crosses between clouds (job/job.py: PipelineJob)."""

    @property
    def model(self) -> SplitModel: ...
    @property
    def strategy(self) -> Strategy: ...
    @property
    def training(self) -> Training: ...
    @property
    def num_pieces(self) -> int: ...


class Outbound(NamedTuple):
    """A kind of message that one cloud sends to another.

    kind: the name of the message in the wire audit.
    what: a description of the content, with shapes.
    how_often: a description of when it is sent.
    max_bytes: the largest content of one message, in bytes; None where the settings do not tell.
    num_per_step: the number of such messages in a step; 0 for a kind that no step needs, or few
        do.
    """

    sender: str
    to: str
    kind: str
    what: str
    how_often: str
    max_bytes: int | None = None
    num_per_step: int = 0

    @property
    def in_words(self) -> str:
        size = "" if self.max_bytes is None else f", at most {self.max_bytes:,} bytes each"
        return f"{self.kind}: {self.what}; {self.how_often}{size}"


REPORTS = "times, losses, scores and counts of its ranks as text, norms, heartbeats"


def leaving(job: SendingJob) -> Iterator[Outbound]:
    """Yield what a pipeline sends from cloud to cloud, in the order of the stages."""
    layout = job.cluster
    for replica in range(layout.num_replicas):
        for stage in range(layout.num_stages - 1):
            yield from _at_boundary(job, stage, replica)
    first = layout.cloud_of(0)
    for cloud in layout.clouds:
        # Reports go to rank 0, and orders come from it, whichever cloud holds which stage.
        if cloud != first:
            yield Outbound(cloud, first, "report", REPORTS, "in every step and between steps")
            yield Outbound(first, cloud, "norm", "norms, orders, heartbeats", "in every step")


def _at_boundary(job: SendingJob, stage: int, replica: int) -> Iterator[Outbound]:
    here, there = (job.cluster.stage_cloud(s, replica) for s in (stage, stage + 1))
    # A boundary inside of a cloud crosses no line.
    if here == there:
        return
    boundary = job.boundaries[stage]
    if boundary.start:
        parts = ", ".join(f"{[*s.shape]} {s.dtype}".replace("torch.", "") for s in boundary.start)
        num_bytes = sum(spec.num_bytes for spec in boundary.start)
        yield Outbound(here, there, "start", f"weights {parts}", "once", max_bytes=num_bytes)
    # Rounded up, as the first replicas may have one more.
    num = -(-job.num_pieces // job.cluster.num_replicas)  # they share the micro-batches
    often = f"{num} a step"
    what, num_bytes = _coded(job, stage=stage, fields=boundary.fields, direction="forward")
    yield Outbound(here, there, "activation", what, often, max_bytes=num_bytes, num_per_step=num)
    words = "the same tensors of texts that are scored"
    yield Outbound(here, there, "evaluation", words, "one for each micro-batch of an evaluation")
    if boundary.gradient_fields:
        fields = boundary.gradient_fields
        what, num_bytes = _coded(job, stage=stage, fields=fields, direction="backward")
        yield Outbound(there, here, "gradient", what, often, max_bytes=num_bytes, num_per_step=num)


def _coded(
    job: SendingJob, stage: int, fields: tuple[BoundaryField, ...], direction: str
) -> tuple[str, int]:
    """Return the fields in words, and the most bytes that a training message of them takes."""
    boundary = job.boundaries[stage]
    # The largest micro-batch: batch sizes need not divide evenly.
    num_samples = -(-job.training.batch_size // job.num_pieces)
    # Compression may change with the steps, and this is a bound for all of them.
    plans = [one for _, one in job.compression.at_boundary(stage).by_step]
    labels = list(dict.fromkeys(getattr(plan, direction).label for plan in plans))
    most = 0
    for plan in plans:
        num_bytes = 0
        for field in fields:
            # As if every sample had the largest number of tokens.
            spec = field.spec(field.max_rows(num_samples, boundary.max_rows_per_sample))
            # Fields that nobody compresses cross as they are.
            parts = getattr(plan, direction).wire_specs(spec) if field.is_compressed else (spec,)
            num_bytes += sum(part.num_bytes for part in parts)
        most = max(most, num_bytes)
    words = ", ".join(field.in_words for field in fields)
    return f"{words}, compressed by {' or '.join(labels)}", most

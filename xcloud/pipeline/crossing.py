"""What a message goes through where it leaves a cloud, whatever carries it: the sender's defence
and the compressor. Training and its evaluations send over links (wiring.py); `Crossing` has what
arrives in an evaluation in this process, for a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from xcloud.comm.channel import (
    Boundary,
    Codec,
    Codecs,
    Message,
    ReceiveChannel,
    Samples,
    SendChannel,
    Sender,
)
from xcloud.comm.compression import ChannelId, CompressionPlan
from xcloud.comm.compression_plans import Selectable, SelectableCodecs, Selection
from xcloud.comm.state import State, StatefulTree, load_states
from xcloud.comm.step_clock import StepClock
from xcloud.layout import ClusterLayout
from xcloud.net.frame import Kind, MessageKey, Tensors
from xcloud.pipeline.guard import Guard
from xcloud.security.defences import Defence


class CrossedJob(Protocol):
    """The job as a message that leaves a cloud meets it (job/job.py: PipelineJob)."""

    @property
    def cluster(self) -> ClusterLayout: ...
    @property
    def compression(self) -> CompressionPlan: ...
    @property
    def seed(self) -> int: ...
    def defences_at(self, stage: int, replica: int) -> Mapping[str, Defence]: ...


def codecs_of(
    compression: CompressionPlan, direction: str, selection: Callable[[], Selection]
) -> Codecs:
    """Build fresh codecs of a direction: every channel has its own state.

    selection: returns the choice in force, where a run chooses among several.
    """
    codecs = [
        (until, Codec(compressor=getattr(c, direction), memory=getattr(c, f"{direction}_memory")))
        for until, c in compression.by_step
    ]
    if isinstance(compression, Selectable):
        return SelectableCodecs(codecs, selection=selection())
    return Codecs(codecs)


def learns(part: Any) -> bool:
    """Return whether parts of a channel keep more between messages than a count of them."""
    if isinstance(part, StatefulTree):
        return bool({*part.own_names} - {"num_calls"}) or learns(part.children())
    return part is not None and any(learns(one) for one in part.values())


def guarded(job: CrossedJob, stage: int, direction: str, channel: SendChannel) -> Sender:
    """Return a channel that leaves a cloud behind the defence that acts there, if one does."""
    replica = job.cluster.placement(channel.identity.sender).replica
    defence = job.defences_at(stage, replica).get(direction)
    return channel if defence is None else Guard(channel=channel, defence=defence)


class Crossing:
    """A path from a stage of the first replica to another cloud, as in an evaluation after the
    last step. It has the same defence, channels and random streams as the run.

    learned: what its compressors have learned in training (`Boundaries.learned`). Raises
        ValueError for that of other compressors.

    `learns` says whether there is anything to learn.
    """

    def __init__(
        self,
        job: CrossedJob,
        stage: int,
        boundary: Boundary,
        last_step: int,
        learned: State | None = None,
    ) -> None:
        compression = job.compression.at_boundary(stage)
        compression.at(last_step)  # raises ConfigError where the settings do not say it
        layout = job.cluster
        identity = ChannelId(
            seed=job.seed,
            boundary=stage,
            direction="forward",
            sender=layout.owner(stage, micro_batch=0),
            receiver=layout.owner(stage + 1, micro_batch=0),
        )
        # Sender and receiver stand in one function: what is sent is received next.
        link: Any = _Handed()
        ends: dict[str, Any] = {
            "link": link,
            "fields": boundary.fields,
            "new_codecs": lambda: codecs_of(compression, "forward", Selection),
            "clock": StepClock(),
            "identity": identity,
        }
        sender = SendChannel(**ends)
        self._sender = guarded(job, stage, "forward", sender)
        self._receiver = ReceiveChannel(
            **ends,
            device=torch.device("cpu"),
            overdue_s=0.0,
            max_rows_per_sample=boundary.max_rows_per_sample,
        )
        self.learns = learns(sender.learned())
        if learned is not None:  # both ends know the same of it
            for channel in (sender, self._receiver):
                load_states(channel.learned(), learned, owner="the compressors of a boundary")
        self._last_step = last_step
        self._num_messages = 0

    def arrived(self, message: Message, samples: Samples) -> Message:
        """Return what arrives of a message. The n-th call has the random numbers of an
        evaluation's n-th micro-batch."""
        key = MessageKey(Kind.EVALUATION, self._last_step, micro_batch=self._num_messages)
        self._num_messages += 1
        self._sender.send(key, message, samples)
        return self._receiver.recv(key, samples)


class _Handed:
    """Both ends of a link within a function: one message at a time."""

    def send(self, key: MessageKey, parts: Tensors, carries: Sequence[str] = ()) -> None:
        self._parts = parts

    def recv(self, key: MessageKey, overdue_s: float) -> Tensors:
        return self._parts

"""Rows of frozen parts, kept by the receiver of a channel so that they cross once, not in every
epoch. Both ends know what is kept from the messages alone.

Shapes: B samples of a micro-batch, M of them missing, which is not kept by the receiver; R rows;
D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xcloud.comm.channel import (
    NOTHING_KNOWN,
    Boundary,
    BoundaryField,
    Message,
    ReceiveChannel,
    Samples,
)
from xcloud.comm.compression import ChannelId
from xcloud.comm.devices import bring
from xcloud.contracts.model import Batch
from xcloud.layout import ClusterLayout
from xcloud.net.frame import Kind, MessageKey
from xcloud.pipeline.hook import Hook
from xcloud.pipeline.pipeline import InFlight, Pass, Pipeline
from xcloud.pipeline.schedule import Action, SplitBackward
from xcloud.pipeline.wiring import MakeReceiver, rank_pairs
from xcloud.record.reporter import Reporter

MEGABYTE = 1_000_000


@dataclass(eq=False)
class ActivationCache:
    """The list of samples that the receiver keeps: those that come first and fit into max_bytes.
    Each end has its own; both see the same messages in the same order, so they stay equal."""

    max_bytes: int
    num_bytes: int = 0
    refused: set[int] = field(default_factory=set)
    _ids: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self._ids)

    def missing(self, ids: Tensor) -> Tensor:
        """Return the positions, int64 [M], of the samples that must cross. ids: int64 [B]."""
        missing = [n for n, sample in enumerate(ids.tolist()) if sample not in self._ids]
        return torch.tensor(missing, dtype=torch.int64)

    def note(self, ids: Tensor, messages: Sequence[Message]) -> list[int]:
        """Note that samples have crossed, each with its part of a message. Return the positions of
        those that are kept from now on."""
        new = []
        for position, (sample, message) in enumerate(zip(ids.tolist(), messages, strict=True)):
            num_bytes = sum(tensor.nbytes for tensor in message.values())
            if sample in self._ids:
                continue
            # Nothing is ever put out to make room: both ends must decide alike from the messages
            # alone, and with samples drawn in a new order each epoch no choice is better.
            if self.num_bytes + num_bytes > self.max_bytes:
                self.refused.add(sample)
                continue
            self._ids.add(sample)
            self.num_bytes += num_bytes
            new.append(position)
        return new


def describe(all_kept: Sequence[ActivationCache]) -> str:
    """Say in a line what one rank keeps."""
    num_bytes = sum(kept.num_bytes for kept in all_kept)
    num_kept = sum(len(kept) for kept in all_kept)
    num_refused = sum(len(kept.refused) for kept in all_kept)
    said = f"kept the frozen rows of {num_kept} samples in {num_bytes / MEGABYTE:.2f} MB"
    if not num_refused:
        return said
    return (
        f"{said}; {num_refused} did not fit and crossed in every epoch: raise "
        "training.activation_cache_mb"
    )


class CachingChannel(ReceiveChannel):
    """A ReceiveChannel that keeps what was decoded in training, in main memory, and receives only
    what is missing: nothing where it has all samples of a micro-batch. What is kept is no state,
    so a resumed run begins with nothing at both ends."""

    def __init__(self, kept: ActivationCache, **channel: Any) -> None:
        super().__init__(**channel)
        self.kept = kept
        self._messages: dict[int, Message] = {}

    def recv(self, key: MessageKey, samples: Samples, known: Message = NOTHING_KNOWN) -> Message:
        # Ids count within a split: sample 3 of an evaluation is not sample 3 of training.
        if key.kind is Kind.EVALUATION:
            return super().recv(key, samples, known)
        missing = self.kept.missing(samples["ids"])
        came: dict[int, Message] = {}  # by position in the micro-batch
        if len(missing):
            part = {name: value[missing] for name, value in samples.items()}
            message = super().recv(key, part, known)
            each = by_sample(message, fields=self.fields, samples=part)
            for n in self.kept.note(part["ids"], each):
                # `each` holds views, which would keep the rows of the whole message alive.
                own = {name: value.to("cpu", copy=True) for name, value in each[n].items()}
                self._messages[int(part["ids"][n])] = own
            if len(missing) == len(samples["ids"]):
                return message
            came = dict(zip(missing.tolist(), each, strict=True))
        with self.clock.during("decompress"):
            for n, sample in enumerate(samples["ids"].tolist()):
                # Row counts stay on the host, which needs them to split the rows.
                came[n] = came.get(n) or {
                    name: bring(value, device=self.device) if value.is_floating_point() else value
                    for name, value in self._messages[sample].items()
                }
            return joined([came[n] for n in range(len(came))])


class ActivationCaches(dict[tuple[int, int], ActivationCache]):
    """The caches at a rank's boundaries, by the stage before and the peer. Both ends know them."""

    def receiver(self, make: MakeReceiver, identity: ChannelId, **named: Any) -> ReceiveChannel:
        """Build the receiving end of a channel, which keeps rows where there is a cache for it.

        make: a function that builds a receiving end that keeps nothing.
        identity, named: the arguments of ReceiveChannel.
        """
        kept = self.get((identity.boundary, identity.sender))
        if kept is None:
            return make(identity=identity, **named)
        return CachingChannel(kept, identity=identity, **named)


def activation_caches(
    layout: ClusterLayout, boundaries: Mapping[int, Boundary], rank: int, max_bytes: int
) -> ActivationCaches:
    """Build the caches of one rank, for each constant boundary that leaves its cloud.

    boundaries: the boundaries, by the stage before.
    max_bytes: the bytes that one receiver keeps of a boundary. Each sender has a share of it,
        since it cannot know what others have sent.
    """
    caches = ActivationCaches()
    replica = layout.placement(rank).replica
    for stage, boundary in boundaries.items():
        if not max_bytes or not boundary.is_constant:
            continue
        pairs = {*rank_pairs(layout, stage)[replica :: layout.num_replicas]}
        for sender, receiver in pairs:
            if rank not in (sender, receiver) or layout.wan_between(sender, peer=receiver) is None:
                continue
            share = max_bytes // sum(other == receiver for _, other in pairs)
            # Sender and receiver each build a cache of their own under the other's number, of the
            # same size, so that they refuse the same samples.
            peer = receiver if rank == sender else sender
            caches[stage, peer] = ActivationCache(share)
    return caches


class CachingPipeline(Pipeline):
    """A Pipeline in which a stage before a constant boundary leaves out, in training, what its
    receiver keeps: it is neither computed nor sent."""

    def __init__(self, caches: ActivationCaches, *pipeline: Any) -> None:
        super().__init__(*pipeline)
        self.caches = caches

    def _forward(
        self,
        action: Action,
        batch: Batch,
        received: Message | None,
        now: Pass,
        weights: SplitBackward | None = None,
    ) -> InFlight:
        stage = action.stage
        kept = None
        if stage in self.ports and now.kind is not Kind.EVALUATION:
            kept = self.caches.get(
                (stage, self.layout.owner(stage + 1, micro_batch=action.micro_batch))
            )
        if kept is None:
            return super()._forward(action, batch, received, now, weights)
        missing = kept.missing(batch["ids"])
        if not len(missing):
            # No message leaves and no gradient is due: before a constant boundary nothing is
            # trained, so the backward of this micro-batch has nothing to do either.
            return InFlight(batch, received=None, send=None, loss=None, weights=weights)
        if received is not None:
            fields = self.ports[stage - 1].boundary.fields
            each = by_sample(received, fields, samples=batch)
            received = joined([each[n] for n in missing.tolist()])
        batch = {name: value[missing] for name, value in batch.items()}
        work = super()._forward(action, batch, received, now, weights)
        assert work.send is not None
        # The sender counts what the receiver decodes (`work.send` has the same shapes), not the
        # compressed bytes: that is what the receiver keeps.
        fields = self.ports[stage].boundary.fields
        kept.note(batch["ids"], by_sample(work.send, fields, samples=batch))
        return work


@dataclass
class CacheReport(Hook):
    """The hook that reports what a rank's activation caches kept."""

    channels: Iterable[object]
    reporter: Reporter

    def finish(self) -> None:
        if caches := [c.kept for c in self.channels if isinstance(c, CachingChannel)]:
            self.reporter.note(describe(caches))


def by_sample(
    message: Message, fields: Sequence[BoundaryField], samples: Samples
) -> list[Message]:
    """Return the boundary's fields of each sample, as views."""
    counts = message.get("counts")
    parts = [
        torch.split(message[field.name], list(field.sample_rows(samples, counts).counts))
        for field in fields
    ]
    names = [field.name for field in fields]
    return [dict(zip(names, each, strict=True)) for each in zip(*parts, strict=True)]


def joined(messages: Sequence[Message]) -> Message:
    """Join the messages of single samples into one. `by_sample` undoes it."""
    return {name: torch.cat([m[name] for m in messages]) for name in messages[0]}

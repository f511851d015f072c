"""One rank among its counterparts in other clouds: what a strategy builds its exchange from, and
whether replicas are equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import nn

from xcloud.base.errors import ReplicasDiffer
from xcloud.comm.compressor import Chain, seed_from
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.features.replicas.averaging import (
    Averager,
    ReplicaLinks,
    Terms,
    averager_for,
    first_part,
)
from xcloud.net.frame import Kind, MessageKey, TensorSpec
from xcloud.pipeline.exchange import RankGroup, digest
from xcloud.rank.feature import MakeGuard, Watch
from xcloud.record.reporter import Reporter

Shapes = Mapping[str, torch.Size]
_CHECK = 0xFFFF_FFFF  # in place of a micro-batch; tells it from what is averaged


@dataclass(frozen=True)
class Replicas:
    """The replicas of a run as one rank sees them. Every rank builds its exchange at the same
    time.

    links: the links to this rank's counterparts in the other replicas.
    group: the ranks of this replica that hold the same stages.
    stages: the stages of this rank.
    choose: the compressor of each tensor.
    last_step: the last step of training.
    num_samples: the number of samples of an update that belong to each replica.
    weight(replica, step): the weight of these samples in the loss, according to this cloud's own
        files.
    watch: the watch of Terms.
    guard: a function that makes the `protect` of Terms.
    """

    links: ReplicaLinks
    group: RankGroup
    stages: Mapping[int, nn.Module]
    choose: Choose
    seed: int
    last_step: int
    num_samples: Sequence[int]
    weight: Callable[[int, int], float]
    reporter: Reporter
    watch: Watch | None = None
    guard: MakeGuard | None = None

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters, as "stage.name"."""
        return {
            f"{stage}.{name}": parameter
            for stage, module in sorted(self.stages.items())
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def codec(
        self,
        shapes: Shapes,
        feedback: float,
        stream: Sequence[str | int],
        plain: Collection[str] = (),
    ) -> TensorCodec:
        """Return a codec of tensors with these shapes.

        feedback: the share of a lossy compressor's error that is added to the next message.
        stream: a key that makes its random numbers differ from those of others.
        plain: the names of tensors that are sent uncompressed.
        """
        every = (p for module in self.stages.values() for p in module.parameters())
        # Dtype and device of what is trained; a rank without any still sends the loss.
        first = next(iter(self.trained.values()), next(every, torch.zeros(0)))
        name, *number = stream
        identity = seed_from(self.seed, name, min(self.stages), self.group.group_rank, *number)
        return TensorCodec(
            shapes,
            # An empty chain changes nothing.
            choose=lambda name, shape: Chain() if name in plain else self.choose(name, shape),
            identity=identity,
            feedback=feedback,
            dtype=first.dtype,
            device=first.device,
            replica=self.links.replica,
        )

    def averager(
        self,
        shapes: Shapes,
        terms: Terms,
        feedback: float,
        *stream: str | int,
        plain: Collection[str] = (),
        num_fragments: int = 1,
    ) -> Averager:
        """Return an averager of the tensors that this rank carries across; see `codec` and
        `guarded`."""
        made = partial(self.codec, feedback=feedback, stream=stream, plain=plain)
        guarded = self.guarded(terms, names=shapes, plain=plain, num_fragments=num_fragments)
        return averager_for(self.links, shapes, new_codec=made, terms=guarded)

    def guarded(
        self,
        terms: Terms,
        names: Collection[str],
        plain: Collection[str] = (),
        num_fragments: int = 1,
    ) -> Terms:
        """Return the terms with what watches and protects this cloud.

        num_fragments: the number of averagings of a rank that together are one contribution.
        Where contributions are guarded nothing plain is sent.
        """
        terms = replace(terms, watch=self.watch)
        if self.guard is None:
            return terms
        # Each message is clipped by itself, so that all parts together keep within the clip.
        num_parts = self.links.num_parts * num_fragments
        return replace(terms, protect=self.guard(names, num_parts=num_parts, silent=plain))

    def open(self, averagers: Sequence[Averager], wait_s: float = 0.0, under_way: int = 1) -> None:
        """Make room for their messages; see ReplicaLinks.open."""
        longest = max((averager.max_bytes for averager in averagers), default=0)
        self.links.open(longest, wait_s, under_way)

    def compare(self, step: int, alike: RankGroup) -> None:
        """Check that all ranks which train the same parameters hold the same bits after update
        `step`.

        step: 0 = before the first update, where frozen parameters are compared too.
        alike: the ranks of this cloud that hold the same values.
        Every one of these ranks makes the same calls. Raises ReplicasDiffer naming stage and rank.
        """
        links = self.links
        stages = sorted(self.stages)
        parameters = (self.stages[stage].parameters() for stage in stages)
        # Frozen ones cannot change: once is enough.
        compared = [[p for p in some if p.requires_grad or not step] for some in parameters]
        mine = torch.stack([digest(some) for some in compared])
        gathered = zip(alike.ranks, alike.gather(mine), strict=True)
        theirs = {f"rank {rank} of the same cloud": found for rank, found in gathered}
        # The others are compared inside their cloud only.
        if self.group.group_rank < links.num_shares:
            key = MessageKey(kind=Kind.AVERAGING, step=step, micro_batch=_CHECK)
            for replica in links.others:
                links.send(replica, key, (mine,), carries=("digests of parameters",), raw_bytes=0)
            for replica in links.others:
                name = str(links.peers[replica])
                found, _ = first_part(links.recv(replica, key), TensorSpec.of(mine), sender=name)
                theirs[name] = found.cpu()
        for name, found in theirs.items():
            for stage, own, other in zip(stages, mine, found, strict=True):
                if not torch.equal(own, other):
                    when = f"after update {step}" if step else "before the first update"
                    raise ReplicasDiffer(
                        f"{when} the parameters of stage {stage} differ between rank "
                        f"{alike.rank} and {name}; all clouds need the same seed, checkpoint "
                        "and caches, kind of processor and release of torch"
                    )

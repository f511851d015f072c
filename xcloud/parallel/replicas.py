"""One rank among its counterparts in other clouds: what a strategy builds its exchange from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from xcloud.base.errors import ReplicasDiffer
from xcloud.cluster.frame import Kind, MessageKey, TensorSpec
from xcloud.comm.compression import Chain, seed_from
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.parallel.averaging import Averager, ReplicaLinks, Terms, averager_for, first_part
from xcloud.parallel.exchange import RankGroup, Work, digest, local_part
from xcloud.record.reporter import Reporter
from xcloud.security.defences import CloudPrivacy, private_contribution

Shapes = Mapping[str, torch.Size]
_CHECK = 0xFFFF_FFFF  # in place of a micro-batch; tells it from what is averaged


@dataclass(frozen=True)
class Replicas:
    """Every rank builds its exchange at the same time.

    links: to this rank's counterparts in the other replicas. group: the ranks of this replica that
        hold the same stages. stages: of this rank. choose: the compressor of each tensor.
    last_step: of training. most_work: of any update of a replica. privacy: of what leaves this
        cloud. watch: see Terms.
    """

    links: ReplicaLinks
    group: RankGroup
    stages: Mapping[int, nn.Module]
    choose: Choose
    seed: int
    last_step: int
    most_work: Work
    reporter: Reporter
    privacy: CloudPrivacy | None = None
    watch: Callable[[int, int, Mapping[str, Tensor]], None] | None = None

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """Trained parameters, as "stage.name"."""
        return {
            f"{stage}.{name}": parameter
            for stage, module in sorted(self.stages.items())
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    @property
    def is_sharded(self) -> bool:
        return any(local_part(p) is not p for p in self.trained.values())

    def codec(
        self, shapes: Shapes, feedback: bool, stream: Sequence[str | int],
        plain: Collection[str] = (),
    ) -> TensorCodec:  # fmt: skip
        """stream: of random numbers. plain: names of tensors that go as they are."""
        every = (p for module in self.stages.values() for p in module.parameters())
        first = next(iter(self.trained.values()), next(every, torch.zeros(0)))
        name, *number = stream
        identity = seed_from(self.seed, name, min(self.stages), self.group.group_rank, *number)
        return TensorCodec(
            shapes, lambda name, shape: Chain() if name in plain else self.choose(name, shape),
            identity, feedback, first.dtype, first.device, self.links.replica,
        )  # fmt: skip

    def averager(
        self, shapes: Shapes, terms: Terms, feedback: bool, *stream: str | int,
        plain: Collection[str] = (), num_fragments: int = 1,
    ) -> Averager:  # fmt: skip
        """Of the tensors that this rank carries across; see `codec` and `guarded`."""
        made = partial(self.codec, feedback=feedback, stream=stream, plain=plain)
        guarded = self.guarded(terms, shapes, plain, num_fragments)
        return averager_for(self.links, shapes, made, guarded)

    def guarded(
        self, terms: Terms, names: Collection[str], plain: Collection[str] = (),
        num_fragments: int = 1,
    ) -> Terms:  # fmt: skip
        """With what watches and protects this cloud, under whose privacy nothing plain is sent.
        num_fragments: averagings of a rank that together are one contribution."""
        terms = replace(terms, watch=self.watch)
        if self.privacy is None:
            return terms
        num_parts = self.links.num_parts * num_fragments
        return replace(terms, protect=private_contribution(names, self.privacy, num_parts, plain))

    def open(self, averagers: Sequence[Averager], wait_s: float = 0.0, under_way: int = 1) -> None:
        """Make room for their messages; see ReplicaLinks.open."""
        longest = max((averager.max_bytes for averager in averagers), default=0)
        self.links.open(longest, wait_s, under_way)


@dataclass(frozen=True)
class ReplicaCheck:
    """Whether all ranks that train the same parameters hold them, bit for bit. Every one of them
    makes the same calls.

    every: updates between two comparisons, 0 = none; the last update is compared too. alike: the
    ranks of this cloud that hold the same values.
    """

    of: Replicas
    every: int
    alike: RankGroup

    def is_due(self, step: int) -> bool:
        return step == self.of.last_step or (bool(self.every) and step % self.every == 0)

    def compare(self, step: int) -> None:
        """After update `step`; 0 = before the first, where frozen parameters are compared too.

        Raises ReplicasDiffer naming stage and rank.
        """
        links, stages = self.of.links, sorted(self.of.stages)
        parameters = (self.of.stages[stage].parameters() for stage in stages)
        compared = [[p for p in some if p.requires_grad or not step] for some in parameters]
        mine = torch.stack([digest(some) for some in compared])
        gathered = zip(self.alike.ranks, self.alike.gather(mine), strict=True)
        theirs = {f"rank {rank} of the same cloud": found for rank, found in gathered}
        # The others are compared inside their cloud only.
        if self.of.group.group_rank < links.num_shares:
            key = MessageKey(Kind.AVERAGING, step, _CHECK)
            for replica in links.others:
                links.send(replica, key, (mine,), ("digests of parameters",), 0)
            for replica in links.others:
                name = links.name_of(replica)
                found, _ = first_part(links.recv(replica, key), TensorSpec.of(mine), name)
                theirs[name] = found.cpu()
        for name, found in theirs.items():
            for stage, own, other in zip(stages, mine, found, strict=True):
                if not torch.equal(own, other):
                    when = f"after update {step}" if step else "before the first update"
                    raise ReplicasDiffer(
                        f"{when} the parameters of stage {stage} differ between rank "
                        f"{self.alike.rank} and {name}; all clouds need the same seed, checkpoint "
                        "and caches, kind of processor and release of torch"
                    )

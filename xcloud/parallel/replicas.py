"""One rank among its counterparts in other clouds: what a strategy builds its exchange from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from xcloud.comm.compressor import Nothing, seed_from
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.parallel.averaging import Averager, PrivateContribution, Terms, averager_for
from xcloud.parallel.exchange import Work, local_part
from xcloud.parallel.rank_group import RankGroup
from xcloud.parallel.replica_links import Mailbox, ReplicaCheck, ReplicaLinks
from xcloud.record.reporter import Reporter
from xcloud.security.privacy import CloudPrivacy

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class Replicas:
    """What a strategy builds the exchange of one rank from. Every rank does it at the same time.

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

    @property
    def has_counterparts(self) -> bool:
        return self.group.group_rank < self.links.num_shares

    @cached_property
    def mail(self) -> Mailbox:
        assert self.has_counterparts, "a rank that carries nothing across averages nothing"
        return Mailbox(self.links)

    def codec(
        self, shapes: Shapes, feedback: bool, *stream: str | int, plain: Collection[str] = ()
    ) -> TensorCodec:
        """stream: of random numbers. plain: names of tensors that go as they are."""
        every = (p for module in self.stages.values() for p in module.parameters())
        first = next(iter(self.trained.values()), next(every, torch.zeros(0)))
        name, *number = stream
        return TensorCodec(
            shapes,
            lambda name, shape: Nothing() if name in plain else self.choose(name, shape),
            seed_from(self.seed, name, min(self.stages), self.group.group_rank, *number),
            feedback,
            first.dtype,
            first.device,
        )

    def averager(
        self,
        codec: Callable[[Shapes], TensorCodec],
        shapes: Shapes,
        terms: Terms,
        num_fragments: int = 1,
        silent: Collection[str] = (),
    ) -> Averager:
        """Of the tensors that this rank carries across; see `guarded`."""
        guarded = self.guarded(terms, shapes, num_fragments, silent)
        return averager_for(self.mail, shapes, codec, guarded)

    def guarded(
        self, terms: Terms, names: Collection[str], num_fragments: int = 1,
        silent: Collection[str] = (),
    ) -> Terms:  # fmt: skip
        """With what watches and protects this cloud. num_fragments: averagings of a rank that
        together are one contribution. silent: names of tensors not to be sent under `privacy`."""
        terms = replace(terms, watch=self.watch)
        if self.privacy is None:
            return terms
        num_parts = self.links.num_parts * num_fragments
        return replace(terms, protect=PrivateContribution(names, self.privacy, num_parts, silent))

    def open(
        self, averagers: Sequence[Averager | None], wait_s: float = 0.0, under_way: int = 1
    ) -> None:
        """Make room for their messages; see ReplicaLinks.open."""
        longest = max((a.max_bytes for a in averagers if a is not None), default=0)
        self.links.open(longest, wait_s, under_way)

    def check(self, every: int, alike: RankGroup | None = None) -> ReplicaCheck:
        """alike: the ranks of this cloud that hold the same values."""
        mail = self.mail if self.has_counterparts else None
        return ReplicaCheck(
            mail, alike or self.group, self.stages, self.links.name_of, every, self.last_step
        )

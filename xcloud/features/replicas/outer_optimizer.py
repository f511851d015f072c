"""One rank among its counterparts in other clouds (Replicas): what a strategy builds its exchange
from, and whether replicas are equal. And parameters that replicas change apart and bring together
from time to time (OuterParameters), with their optimizer. The inner optimizer is the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, FrameError, ReplicasDiffer
from xcloud.base.settings import settings
from xcloud.comm.compressor import Chain, seed_from
from xcloud.comm.state import OUTER, State, copy_of, fill
from xcloud.comm.tensor_codec import Choose, TensorCodec
from xcloud.features.replicas.averaging import (
    Averager,
    ReplicaLinks,
    Terms,
    averager_for,
    first_part,
)
from xcloud.features.replicas.merging import RowPiece, gather_shares
from xcloud.net.frame import Kind, MessageKey, Tensors, TensorSpec
from xcloud.pipeline.exchange import RankGroup, are_finite, digest
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
                links.send(
                    replica, key, parts=(mine,), carries=("digests of parameters",), raw_bytes=0
                )
            for replica in links.others:
                name = str(links.peers[replica])
                found, _ = first_part(
                    links.recv(replica, key=key), spec=TensorSpec.of(mine), sender=name
                )
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


@settings("strategy.averaging.outer")
class OuterOptimizer:
    """Gradient descent on the outer parameters. Their gradient: outer - values, how far replicas
    have moved away, merged.

    velocity = momentum * velocity + gradient
    outer -= learning_rate * (gradient + momentum * velocity   if nesterov, else velocity)

    DiLoCo (arXiv:2311.08105): 0.7, 0.9, Nesterov. Learning rate 1 without momentum: local SGD, and
    FedAvg (arXiv:1602.05629) where replicas count by their samples.

    learning_rate: the step of the outer parameters, as a share of the merged move.
    momentum: the share of the last velocity that is kept; 0 = none.
    nesterov: look one step of momentum ahead.
    """

    learning_rate: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, le=0.999999)] = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            key = "strategy.averaging.outer"
            raise ConfigError(f"{key}.nesterov needs a momentum; set it, or {key}.nesterov=false")

    @property
    def label(self) -> str:
        """The optimizer in a few words."""
        if not self.momentum:
            if self.learning_rate == 1:
                return "mean"
            return f"sgd({self.learning_rate:g})"
        name = "nesterov" if self.nesterov else "momentum"
        return f"{name}({self.learning_rate:g}, {self.momentum:g})"

    def step(
        self, outer: Sequence[Tensor], velocities: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Change outer parameters and velocities in place, tensor by tensor."""
        for parameter, velocity, gradient in zip(outer, velocities, gradients, strict=True):
            # Multiplications and additions apart: a fused one rounds once, and replicas on
            # different processors would drift apart.
            update = gradient
            if self.momentum:
                velocity.mul_(self.momentum).add_(gradient)
                update = gradient + velocity * self.momentum if self.nesterov else velocity
            parameter.sub_(update * self.learning_rate)


_TO_MEAN = OuterOptimizer(learning_rate=1.0, momentum=0.0, nesterov=False)


class OuterParameters:
    """The parameters that replicas change apart, with their values after the last merge.

    parameters: the parameters by name, with the same values in every rank of `group` and in all
        replicas.
    shares: the full parameters among these that each of its first ranks carries across.
    outer: the values of this rank's share after the last merge, the same bits in all replicas.
    velocity: the velocity of the outer optimizer.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shares: Sequence[Sequence[RowPiece]],
        group: RankGroup,
        optimizer: OuterOptimizer,
    ) -> None:
        self._parameters = list(parameters.values())
        self._shares = shares
        if group.group_rank < len(shares):
            self._mine = shares[group.group_rank]
        else:
            self._mine = ()
        self._own = [self._parameters[piece.index] for piece in self._mine]
        self._group = group
        self._optimizer = optimizer
        # One copy of this rank's share, not of the model: with n ranks a cloud each holds an n-th.
        self.outer = [p.detach().clone() for p in self._own]
        has_momentum = bool(optimizer.momentum)
        # Without momentum it stays empty, in memory, on the wire and in checkpoints.
        self.velocity = [t.new_zeros(t.shape if has_momentum else 0) for t in self.outer]

    @property
    def are_finite(self) -> bool:
        """True if the current parameters are finite, those of other shares too."""
        return are_finite(p.detach() for p in self._parameters)

    def gradient(self) -> list[Tensor]:
        """Return how far this replica has moved away: outer - values."""
        return [a - p.detach() for a, p in zip(self.outer, self._own, strict=True)]

    def move(self, gradients: Sequence[Tensor], is_cut_short: bool = False) -> bool:
        """Make the outer optimizer's step, unless a gradient is not finite. Return whether it was
        made.

        is_cut_short: the run ends within a round. Momentum would move as far as after a whole one,
            and no step would follow, so the replicas' mean is taken instead. The velocity is
            emptied, since the next round of a resumed run may be as short.
        The parameters stay as they are.
        """
        is_made = are_finite(gradients)
        if is_made and is_cut_short and self._optimizer.momentum:
            _TO_MEAN.step(self.outer, self.velocity, gradients)
            for velocity in self.velocity:
                velocity.zero_()
        elif is_made:
            self._optimizer.step(self.outer, self.velocity, gradients)
        return is_made

    def take(self, mix: float = 0.0) -> None:
        """Set the parameters to mix * own + (1 - mix) * outer."""
        if not mix:
            return self._write(self.outer)
        pairs = zip(self._own, self.outer, strict=True)
        # Streaming DiLoCo's alpha: what was trained while the merge crossed is not thrown away.
        self._write([own.detach() * mix + outer * (1 - mix) for own, outer in pairs])

    def keep(self, gradients: Sequence[Tensor]) -> None:
        """Set the parameters to the outer ones, plus what this replica has done by itself."""
        self._write([a - g for a, g in zip(self.outer, gradients, strict=True)])

    def flat(self) -> Tensors:
        """Return outer parameters and velocity as one vector each, for another replica's
        `replace`."""
        return tuple(
            torch.cat([tensor.reshape(-1) for tensor in tensors])
            for tensors in (self.outer, self.velocity)
        )

    def replace(self, values: Tensors) -> None:
        """Take another replica's `flat`. Raises FrameError for values of other settings."""
        # It comes from another owner's cloud: other settings there must not end in a broadcast
        # here.
        found, expected = ([flat.shape for flat in some] for some in (values, self.flat()))
        if found != expected:
            raise FrameError(
                f"the averaging server sent values and velocity of {found}, expected {expected}"
            )
        for tensors, flat in zip((self.outer, self.velocity), values, strict=True):
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, piece in zip(tensors, torch.split(flat, sizes), strict=True):
                tensor.copy_(piece.view_as(tensor))

    def state_dict(self) -> State:
        return {name: copy_of(tensor) for name, tensor in self._places.items()}

    def load_state_dict(self, state: State) -> None:
        fill(self._places, state=state, owner="local updates")

    @property
    def _places(self) -> dict[str, Tensor]:
        return {
            f"{OUTER}.{what}.{piece.name}": tensor
            for what, tensors in (("values", self.outer), ("velocity", self.velocity))
            for piece, tensor in zip(self._mine, tensors, strict=True)
        }

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        """Write the values of this rank's share into the parameters; every rank of the group gets
        those of all others."""
        like = self._parameters[0]
        for piece, value in gather_shares(
            self._group, shares=self._shares, mine=values, like=like
        ):
            self._parameters[piece.index].copy_(value)

"""Averaging of gradients: replicas in several clouds that stay equal, as every update uses one
gradient for all of them. And the project's compressors as a communication hook of torch's
DistributedDataParallel.

Inside a cloud the gradients of a stage's ranks are summed (gloo's reduce-scatter takes longer);
across clouds each rank carries its own share of the sum, so that what crosses is per cloud and not
per rank; the merged shares are gathered inside again. All stages of a rank go in one message. Of a
sharded stage each rank carries what it holds, and nothing is gathered.

These are no rounds of local updates with every=1: the merged gradient is needed before the
optimizer, and the loss travels with it.
"""

# No `from __future__ import annotations` here: torch compares the hook's annotations with classes.
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xcloud.base.settings import NotNegative, Rate, settings
from xcloud.comm.compressor import TensorChoice, seed_from
from xcloud.comm.state import MEMORY, State, StatefulTree, StateTree, whole_number
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.features.replicas.averaging import Averager, Terms
from xcloud.features.replicas.merging import (
    Contribution,
    Merge,
    Robust,
    RowPiece,
    by_rows,
    gather_shares,
    sum_up,
    weighted_mean,
)
from xcloud.features.replicas.replicas import Replicas
from xcloud.job.strategy import Averaging, Traits
from xcloud.pipeline.exchange import Exchange, FlatBuffer, RankGroup, Work, local_part

LOSS = "(loss)"
"""Travels with the gradients, as it is."""
_UNDER_WAY = f"{MEMORY}.under_way"


@settings("strategy.averaging")
class GradientAveraging(Averaging):
    """The strategy that sums the gradients of every update over the replicas, so that these stay
    equal.

    delay: the number of updates by which gradients are late. 1 = an update uses the gradient of
        the one before, which crosses while the next is computed. The trajectory then differs from
        that of 0, which waits for the gradient.
    feedback: the error of a lossy compressor is added to the next gradient; a number below 1: this
        share of it.
    check_every: the number of updates after which replicas compare digests of their parameters, as
        they do before the first and after the last; 0 = only then.
    merge: a Byzantine-robust aggregator (merging.py) of the mean gradients of the replicas'
        samples, made by every replica from the messages of all; null = the sum. A replica whose
        gradient is not finite then counts for nothing.
    """

    delay: Literal[0, 1] = 0
    feedback: bool | Rate = True
    check_every: NotNegative = 100
    merge: Robust | None = None

    @property
    def label(self) -> str:
        parts = {
            "one update late": self.delay,
            "without feedback": not self.feedback,
            f"feedback {self.feedback:g}": 0 < self.feedback < 1,
            repr(self.merge): self.merge is not None,
        }
        return ", ".join(part for part, is_said in parts.items() if is_said)

    @property
    def traits(self) -> Traits:
        return Traits(changes_results=self.delay > 0, hidden_steps=self.delay)

    def join(self, replicas: Replicas) -> Exchange:
        return AveragedGradients(averaging=self, replicas=replicas)


class AveragedGradients(Exchange):
    """The exchange of one rank that sums gradients over its cloud and over all replicas."""

    def __init__(self, averaging: GradientAveraging, replicas: Replicas) -> None:
        self._group = replicas.group
        self._delay = averaging.delay
        # A robust merge compares contributions of equal size: each is the mean gradient of its
        # replica's samples, not their share of the sum.
        samples = [float(number) for number in replicas.num_samples]
        self._per_share = sum(samples) / samples[replicas.links.replica]
        self._is_robust = averaging.merge is not None
        self._weight = samples[replicas.links.replica] if self._is_robust else 1.0
        # Who has the same values in this cloud: of sharded stages nobody.
        self._alike = replicas.group
        num_shares = replicas.links.num_shares
        if any(local_part(p) is not p for p in replicas.trained.values()):
            self._alike = RankGroup.alone(replicas.group.rank)
            num_shares = 1
        # Of a sharded parameter the rows that this rank holds; some ranks hold none of a small
        # one.
        parts = {name: local_part(p) for name, p in replicas.trained.items()}
        shapes = {name: part.shape for name, part in parts.items() if part.numel()}
        self._parameters = [replicas.trained[name] for name in shapes]
        # Every share carries the loss in front: the signal that something is not finite reaches
        # each rank of the cloud with its own share.
        loss = RowPiece(name=LOSS, index=len(shapes), first=0, last=1, shape=torch.Size([1]))
        self._shares = [[loss, *share] for share in by_rows(shapes, num_shares)]
        self._mine: list[RowPiece] = []
        self.averager = Averager()
        if self._alike.group_rank < num_shares:
            self._mine = self._shares[self._alike.group_rank]
            own = self._mine
            terms = Terms()
            if averaging.merge is not None:
                terms = Terms(merge=averaging.merge, max_weight=samples.__getitem__)
            self.averager = replicas.averager(
                {piece.name: piece.shape for piece in own},
                terms,
                averaging.feedback,
                "averaging",
                plain={LOSS},
            )
        self._under_way = 0  # with delay: the step whose gradients are used next; 0 = none
        self._has_merged = False  # in this update
        replicas.open([self.averager], under_way=1 + self._delay)
        self._replicas = replicas
        self._check_every = averaging.check_every
        self.compare(0)

    def before_update(
        self, step: int, buffers: Mapping[int, FlatBuffer], losses: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        # First inside the cloud, where lines are fast: one sum per cloud crosses.
        summed = {s: b.sum_over(self._group, loss=losses[s]) for s, b in buffers.items()}
        total = summed[max(buffers)]
        is_finite = all(buffer.is_finite() for buffer in buffers.values())
        self._send(step, loss=total, is_finite=is_finite)
        # With delay this update uses what was sent in the one before, and its own crosses
        # meanwhile.
        due = self._under_way if self._delay else step
        if due:
            total = self._receive(due, total)
        else:  # the others' are not here yet
            for buffer in buffers.values():
                buffer.zero()
            # A gradient of zero, and the loss as if all replicas had the same.
            total = total * self._per_share
        self._has_merged = due > 0
        self._under_way = step if self._delay else 0
        for buffer in buffers.values():
            if buffer.is_sharded:  # the norm of what other ranks hold is another one now
                buffer.sum_over(self._group, loss=total if self._group.leads else 0 * total)
            else:
                buffer.flat[-1] = total
        return summed | {max(buffers): total}

    def compare(self, step: int) -> None:
        self._replicas.compare(step, self._alike)

    def after_update(self, step: int, work: Work) -> None:
        if self._has_merged:
            # An update that was skipped (num_samples 0) has used nothing: compressors take back
            # what they noted of that message.
            self.averager.settle(was_used=work.num_samples > 0)
        is_due = self._check_every and step % self._check_every == 0
        if is_due or step == self._replicas.last_step:
            self.compare(step)

    own_names = (MEMORY,)
    child_names = ("averager",)

    def own(self) -> State:
        return {_UNDER_WAY: self._under_way}

    def take(self, own: State) -> None:
        self._under_way = whole_number(own, name=_UNDER_WAY)

    def _send(self, step: int, loss: Tensor, is_finite: bool) -> None:
        pieces = [piece.of([*self._gradients, loss.reshape(1)]) for piece in self._mine]
        weight = self._weight
        if self._is_robust:
            pieces = [piece * self._per_share for piece in pieces]
        if pieces and not is_finite:
            # The loss signals it; compressors may not accept NaN. A robust merge leaves it out.
            pieces = [loss.new_full((1,), math.nan), *map(torch.zeros_like, pieces[1:])]
            weight = 0.0 if self._is_robust else weight
        self.averager.start(step, pieces, weight)

    def _receive(self, step: int, like: Tensor) -> Tensor:
        """Write the merged gradients into the buffers, in all of the cloud. Return the loss."""
        merged = next(iter(self.averager.finish(step).changes), [])
        # Each rank of the cloud brought one share across; all need all of them.
        everything = gather_shares(self._alike, shares=self._shares, mine=merged, like=like)
        gradients = self._gradients
        for piece, tensor in everything:
            if piece.name != LOSS:
                piece.of(gradients).copy_(tensor)
        loss: Tensor = everything[0][1].reshape(())
        return loss

    @property
    def _gradients(self) -> list[Tensor]:
        return [local_part(p.grad) for p in self._parameters if p.grad is not None]


class CompressedAveraging(StatefulTree):
    """The state that the hook `compressed_averaging` carries from step to step; one for each
    model.

    It needs no experiment, config or link of this project:

        state = CompressedAveraging(model, Chain(powersgd=PowerSgd(4), fp16=Cast()))
        model.register_comm_hook(state, compressed_averaging)

    model: the DistributedDataParallel, or the module inside.
    compressor: the compressor of every gradient, or a choice by name and shape (PerTensor).
    feedback: the same setting as that of TensorCodec.
    merge: the merge of the ranks' gradients: the mean, as DistributedDataParallel has it, or a
        robust one.
    scaler: the GradScaler whose losses are given to `backward`. The kept residuals follow its
        scale.
    num_bytes: the bytes of this rank's messages so far. Each message goes to every other rank.
    raw_bytes: the FP32 bytes of the values that these messages stand for.

    If merged gradients are not finite, all that was sent with them counts as not sent: a
    GradScaler, or the loop, skips that step in every rank.

    Memory: with feedback one copy of the gradients in FP32, and in the backward another. Save
    `state_dict()` of every rank with the model for an exact restart: residuals differ from rank to
    rank.
    """

    own_names = ("scale",)

    def __init__(
        self,
        model: nn.Module,
        compressor: TensorChoice,
        process_group: dist.ProcessGroup | None = None,
        *,
        feedback: bool = True,
        merge: Merge = weighted_mean,
        seed: int = 0,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.process_group = process_group
        self.merge = merge
        self._scaler = scaler
        self._scale = self._scale_now
        self._sent: set[nn.Parameter] = set()  # their messages are not settled
        self._ends: list[Tensor] = []  # the least and largest of what these came to
        self.num_bytes = self.raw_bytes = 0
        self.num_ranks = dist.get_world_size(process_group)
        rank = dist.get_rank(process_group)
        if isinstance(merge, Robust):
            merge.check(self.num_ranks)
        # One each: DistributedDataParallel puts them into other buckets after the first step.
        self.codecs = {
            p: TensorCodec(
                shapes={name: p.shape},
                choose=compressor.for_tensor,
                identity=seed_from(seed, "ddp hook"),
                feedback=feedback,
                dtype=p.dtype,
                device=p.device,
                replica=rank,
            )
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Note that gradients of these are sent next. If some of them were sent before, another
        backward has begun."""
        if self._sent.intersection(parameters):
            self.settle()
        # Residuals are in units of scaled gradients: when the scaler changes its scale they
        # follow.
        if not self._sent and (scale := self._scale_now) != self._scale:
            for codec in self.codecs.values():
                codec.scale(scale / self._scale)
            self._scale = scale
        self._sent.update(parameters)

    def note(self, merged: Sequence[Tensor]) -> None:
        """Take what the messages of a bucket came to."""
        self._ends += [end for tensor in merged if tensor.numel() for end in torch.aminmax(tensor)]

    def settle(self, was_used: bool = True) -> None:
        """End the last backward.

        was_used: False where the loop has skipped its gradients for another reason than that they
            are not finite.
        """
        was_used = was_used and all(bool(end.isfinite()) for end in self._ends)
        for parameter in self._sent:
            self.codecs[parameter].settle(was_used)
        self._sent.clear()
        self._ends.clear()

    @property
    def _scale_now(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def own(self) -> State:
        self.settle()
        if self._scaler is None:
            return {}
        return {"scale": torch.tensor(self._scale, dtype=torch.float64)}

    def take(self, own: State) -> None:
        self._scale = float(own.get("scale", 1.0))  # none: of a run without a scaler
        self._sent.clear()
        self._ends.clear()

    def children(self) -> StateTree:
        return {str(number): codec for number, codec in enumerate(self.codecs.values())}


def compressed_averaging(
    state: CompressedAveraging,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Merge the gradients of a bucket over all ranks, in the backward pass.

    Every rank encodes its gradients, one all-gather brings all messages of that fixed size to all
    ranks, and each decodes and merges them in the order of the ranks: the same bits in all. The
    exchange of one bucket overlaps with the backward pass of the next.
    """
    gradients = bucket.gradients()
    parameters = bucket.parameters()
    state.begin(parameters)
    codecs = [state.codecs[parameter] for parameter in parameters]
    buffer: Tensor = bucket.buffer()
    encoded = [
        codec.encode([gradient], is_final=False)[0]
        for codec, gradient in zip(codecs, gradients, strict=True)
    ]
    # Codecs promise their sizes by shape alone, so that the messages of all ranks are of equal
    # length, as an all-gather wants them.
    message = torch.cat([part.view(torch.uint8) for parts in encoded for part in parts])
    state.num_bytes += message.numel()
    state.raw_bytes += sum(codec.raw_bytes for codec in codecs)
    messages = [torch.empty_like(message) for _ in range(state.num_ranks)]
    work = dist.all_gather(messages, message, state.process_group, async_op=True)

    def decoded(message: Tensor) -> Contribution:
        specs = [spec for codec in codecs for spec in codec.wire_specs]
        pieces = torch.split(message, [spec.num_bytes for spec in specs])
        # Copies, as a view of another dtype must begin at a multiple of its size.
        parts = iter([p.clone().view(s.dtype) for p, s in zip(pieces, specs, strict=True)])
        tensors = [codec.decode(tuple(islice(parts, len(codec.wire_specs)))) for codec in codecs]
        return Contribution(tensors=[tensor for (tensor,) in tensors], weight=1.0)

    def merged(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        found = map(decoded, messages)
        num = state.num_ranks
        # A mean needs one at a time: of many ranks all would not fit.
        if state.merge is weighted_mean:
            means = sum_up(found, weights=[1.0 / num] * num)
        else:
            means = state.merge([*found])
        state.note(means)
        for gradient, tensor in zip(gradients, means, strict=True):
            gradient.copy_(tensor)
        return buffer

    gathered: torch.futures.Future[list[Tensor]] = work.get_future()
    return gathered.then(merged)

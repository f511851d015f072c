"""The project's compressors as a communication hook of torch's DistributedDataParallel. Needs no
experiment, config or link of this project:

    state = CompressedAveraging(model, Chain(powersgd=PowerSgd(4), fp16=Cast()))
    model.register_comm_hook(state, compressed_averaging)

Every rank encodes the gradients of a bucket, one all-gather brings all messages of that fixed size
to all ranks, and each decodes and merges them in the order of the ranks: the same bits in all. The
exchange of one bucket overlaps with the backward pass of the next.
"""

# No `from __future__ import annotations` here: torch compares the hook's annotations with classes.
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xcloud.comm.compression import TensorChoice, seed_from
from xcloud.comm.state import StatefulParts, StateTree
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.merging import Contribution, Merge, check_merge, mean_of, weighted_mean


class CompressedAveraging(StatefulParts):
    """What the hook carries from step to step; one for each model.

    model: the DistributedDataParallel, or the module inside. compressor: of every gradient, or a
        choice by name and shape (PerTensor). feedback: as of TensorCodec.
    merge: of the ranks' gradients; the mean, as DistributedDataParallel has it, or a robust one.
    num_bytes: of this rank's messages so far; each goes to every other rank. raw_bytes: FP32 bytes
        of what they stand for.

    Memory: with feedback one copy of the gradients. Save `state_dict()` of every rank with the
    model for an exact restart: residuals differ from rank to rank.
    """

    def __init__(
        self, model: nn.Module, compressor: TensorChoice,
        process_group: dist.ProcessGroup | None = None, *, feedback: bool = True,
        merge: Merge = weighted_mean, seed: int = 0,
    ) -> None:  # fmt: skip
        self.process_group, self.merge = process_group, merge
        self.num_bytes = self.raw_bytes = 0
        self.num_ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        check_merge(merge, self.num_ranks)
        # One each: DistributedDataParallel puts them into other buckets after the first step.
        self.codecs = {
            p: TensorCodec({name: p.shape}, compressor.for_tensor, seed_from(seed, "ddp hook"),
                           feedback, p.dtype, p.device, rank)
            for name, p in model.named_parameters()
            if p.requires_grad
        }  # fmt: skip

    def parts(self) -> StateTree:
        return {str(number): codec for number, codec in enumerate(self.codecs.values())}


def compressed_averaging(
    state: CompressedAveraging,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The hook: merges the bucket's gradients over the ranks."""
    gradients = bucket.gradients()
    codecs = [state.codecs[parameter] for parameter in bucket.parameters()]
    buffer: Tensor = bucket.buffer()
    encoded = [codec.encode([g])[0] for codec, g in zip(codecs, gradients, strict=True)]
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
        return Contribution([tensor for (tensor,) in tensors], 1.0)

    def merged(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        found, num = map(decoded, messages), state.num_ranks
        # A mean needs one at a time: of many ranks all would not fit.
        means = mean_of(found, num) if state.merge is weighted_mean else state.merge([*found])
        for gradient, tensor in zip(gradients, means, strict=True):
            gradient.copy_(tensor)
        return buffer

    gathered: torch.futures.Future[list[Tensor]] = work.get_future()
    return gathered.then(merged)

"""The project's compressors as a communication hook of torch's DistributedDataParallel. Needs no
experiment, config or link of this project:

    state = CompressedAveraging(Chain(powersgd=PowerSgd(4), fp16=Cast()))
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

from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compressor, seed_from
from xcloud.comm.compression_plans import PerTensor
from xcloud.comm.state import State, join_states, split_state, states_of
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.merging import Contribution, Merge, check_merge, mean_of, weighted_mean


class CompressedAveraging:
    """What the hook carries from step to step; one for each model.

    compressor: of every gradient, or a choice by shape (the `names` of a PerTensor need `model`,
        the module inside or the DistributedDataParallel). feedback: as of TensorCodec.
    merge: of the ranks' gradients; the mean, as DistributedDataParallel has it, or a robust one.
    num_bytes: of this rank's messages so far; each goes to every other rank. raw_bytes: FP32 bytes
        of what they stand for.

    Memory: with feedback one copy of the gradients. Save `state_dict()` of every rank with the
    model for an exact restart: residuals differ from rank to rank.
    """

    def __init__(
        self, compressor: Compressor | PerTensor, process_group: dist.ProcessGroup | None = None,
        *, feedback: bool = True, merge: Merge = weighted_mean, seed: int = 0,
        model: nn.Module | None = None,
    ) -> None:  # fmt: skip
        chosen = PerTensor(compressor) if isinstance(compressor, Compressor) else compressor
        if not isinstance(chosen, PerTensor):
            raise ConfigError(
                f"CompressedAveraging needs a compressor or PerTensor, got {compressor!r}"
            )
        if model is None and (chosen.names or chosen.embeddings is not None):
            raise ConfigError(
                "a PerTensor that chooses by name needs CompressedAveraging(..., model=model)"
            )
        self.process_group, self.merge = process_group, merge
        self.num_bytes = self.raw_bytes = 0
        self._chosen, self._feedback, self._seed = chosen, feedback, seed
        self._names = {} if model is None else {p: name for name, p in model.named_parameters()}
        self._codecs: dict[nn.Parameter, TensorCodec] = {}  # in the order in which they first come
        self._restored: dict[str, State] = {}

    def codec(self, parameter: nn.Parameter) -> TensorCodec:
        """One for each parameter: DistributedDataParallel puts them into other buckets after the
        first step."""
        if parameter not in self._codecs:
            number, name = str(len(self._codecs)), self._names.get(parameter, "")
            codec = TensorCodec(
                {number: parameter.shape}, lambda _, shape: self._chosen.for_tensor(name, shape),
                seed_from(self._seed, "ddp hook"), self._feedback, parameter.dtype,
                parameter.device,
            )  # fmt: skip
            codec.of_replica(dist.get_rank(self.process_group))
            if number in self._restored:
                codec.load_state_dict(self._restored.pop(number))
            self._codecs[parameter] = codec
        return self._codecs[parameter]

    def state_dict(self) -> State:
        """Of parameters not met since the restart too."""
        met = {str(number): codec for number, codec in enumerate(self._codecs.values())}
        return states_of(met) | join_states(self._restored)

    def load_state_dict(self, state: State) -> None:
        """Of the same rank of an equal model; before the first step."""
        names = dict.fromkeys(name.partition(".")[0] for name in state)
        if self._codecs or not all(name.isdecimal() for name in names):
            raise ValueError(
                "the state of a CompressedAveraging is loaded before its first step, and holds "
                f"the numbers of parameters, got {list(names)[:5]}"
            )
        self._restored = split_state(state, names, "a CompressedAveraging")


def compressed_averaging(
    state: CompressedAveraging,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The hook: merges the bucket's gradients over the ranks."""
    gradients = bucket.gradients()
    codecs = [state.codec(parameter) for parameter in bucket.parameters()]
    buffer: Tensor = bucket.buffer()
    num_ranks = dist.get_world_size(state.process_group)
    check_merge(state.merge, num_ranks)
    encoded = [codec.encode([g])[0] for codec, g in zip(codecs, gradients, strict=True)]
    message = torch.cat([part.view(torch.uint8) for parts in encoded for part in parts])
    state.num_bytes += message.numel()
    state.raw_bytes += sum(codec.raw_bytes for codec in codecs)
    messages = [torch.empty_like(message) for _ in range(num_ranks)]
    work = dist.all_gather(messages, message, state.process_group, async_op=True)

    def decoded(message: Tensor) -> Contribution:
        specs = [spec for codec in codecs for spec in codec.wire_specs]
        pieces = torch.split(message, [spec.num_bytes for spec in specs])
        # Copies, as a view of another dtype must begin at a multiple of its size.
        parts = iter([p.clone().view(s.dtype) for p, s in zip(pieces, specs, strict=True)])
        tensors = [codec.decode(tuple(islice(parts, len(codec.wire_specs)))) for codec in codecs]
        return Contribution([tensor for (tensor,) in tensors], 1.0)

    def merged(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        contributions = map(decoded, messages)
        # A mean needs one at a time: of many ranks all would not fit.
        is_mean = state.merge is weighted_mean
        means = mean_of(contributions, num_ranks) if is_mean else state.merge([*contributions])
        for gradient, tensor in zip(gradients, means, strict=True):
            gradient.copy_(tensor)
        return buffer

    gathered: torch.futures.Future[list[Tensor]] = work.get_future()
    return gathered.then(merged)

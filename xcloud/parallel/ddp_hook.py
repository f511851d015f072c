"""The project's compressors as a communication hook of torch's DistributedDataParallel. Needs no
experiment, config or link of this project:

    state = CompressedAveraging(Chain(powersgd=PowerSgd(4), fp16=Cast()))
    model.register_comm_hook(state, compressed_averaging)

Every rank encodes the gradients of a bucket, one all-gather brings all messages of that fixed size
to all ranks, and each decodes and merges them in the order of the ranks: the same bits in all. The
exchange of one bucket overlaps with the backward pass of the next.
"""

# No `from __future__ import annotations` here: torch compares the hook's annotations with classes.
import torch
import torch.distributed as dist
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.cluster.frame import TensorSpec
from xcloud.comm.compression import PerTensor
from xcloud.comm.compressor import Compressor, Parts, seed_from
from xcloud.comm.state import State, join_states, split_state
from xcloud.comm.tensor_codec import TensorCodec
from xcloud.parallel.merging import Contribution, Merge, check_merge, mean_of, weighted_mean

_ALIGNED = 16
"""Parts begin at multiples of so many bytes in a message, so that any dtype can be viewed."""


class CompressedAveraging:
    """What the hook carries from step to step; one for each model.

    compressor: of every gradient, or a choice by shape (the `names` of a PerTensor need `model`,
        which may be the module inside or the DistributedDataParallel).
    feedback: add what a message lost to the next one (TensorCodec).
    merge: of the ranks' gradients; the mean, as DistributedDataParallel has it, or a robust one.
    num_bytes: of this rank's messages so far; each goes to every other rank. raw_bytes: FP32 bytes
        of what they stand for.

    Memory: with feedback one copy of the gradients. Save `state_dict()` of every rank with the
    model for an exact restart: residuals differ from rank to rank.
    """

    def __init__(
        self,
        compressor: Compressor | PerTensor,
        process_group: dist.ProcessGroup | None = None,
        *,
        feedback: bool = True,
        merge: Merge = weighted_mean,
        seed: int = 0,
        model: nn.Module | None = None,
    ) -> None:
        if not isinstance(compressor, Compressor | PerTensor):
            raise ConfigError(
                f"CompressedAveraging needs a compressor or PerTensor, got {compressor!r}"
            )
        if (
            isinstance(compressor, PerTensor)
            and model is None
            and (compressor.names or compressor.embeddings is not None)
        ):
            raise ConfigError(
                "a PerTensor that chooses by name needs CompressedAveraging(..., model=model): a "
                "bucket of gradients does not tell the names of its parameters"
            )
        self.process_group, self.merge = process_group, merge
        self.num_bytes = self.raw_bytes = 0
        self._compressor, self._feedback, self._seed = compressor, feedback, seed
        self._names = {} if model is None else {p: name for name, p in model.named_parameters()}
        self._numbers: dict[nn.Parameter, int] = {}  # in the order in which they first come
        self._codecs: dict[tuple[int, ...], TensorCodec] = {}  # by the parameters of the bucket
        self._restored: dict[int, State] = {}

    def codec(self, bucket: dist.GradBucket) -> TensorCodec:  # type: ignore[name-defined]
        """DistributedDataParallel deals its parameters out anew after the first step: what was
        kept follows each of them."""
        parameters = bucket.parameters()
        for parameter in parameters:
            self._numbers.setdefault(parameter, len(self._numbers))
        numbers = tuple(self._numbers[parameter] for parameter in parameters)
        if numbers not in self._codecs:
            self._restored = self._states()
            self._codecs = {k: c for k, c in self._codecs.items() if not set(k) & set(numbers)}
            buffer = bucket.buffer()
            codec = TensorCodec(
                {str(n): p.shape for n, p in zip(numbers, parameters, strict=True)},
                self._choose,
                seed_from(self._seed, "ddp hook"),
                self._feedback,
                buffer.dtype,
                buffer.device,
            )
            codec.of_replica(dist.get_rank(self.process_group))
            for number in set(numbers) & set(self._restored):
                codec.load_state_of(str(number), self._restored[number])
            self._codecs[numbers] = codec
            self._restored = {n: s for n, s in self._restored.items() if n not in self._held}
        return self._codecs[numbers]

    def state_dict(self) -> State:
        states = self._states()
        return join_states({str(number): states[number] for number in sorted(states)})

    def load_state_dict(self, state: State) -> None:
        """Of the same rank of an equal model; before the first step."""
        names = dict.fromkeys(name.partition(".")[0] for name in state)
        if self._codecs or not all(name.isdecimal() for name in names):
            raise ValueError(
                "the state of a CompressedAveraging is loaded before its first step, and holds "
                f"the numbers of parameters, got {list(names)[:5]}"
            )
        parts = split_state(state, names, "a CompressedAveraging")
        self._restored = {int(number): part for number, part in parts.items()}

    @property
    def _held(self) -> set[int]:
        return {number for numbers in self._codecs for number in numbers}

    def _states(self) -> dict[int, State]:
        """By the number of the parameter, those not met since the restart too."""
        states = dict(self._restored)
        for numbers, codec in self._codecs.items():
            states |= {number: codec.state_of(str(number)) for number in numbers}
        return states

    def _choose(self, number: str, shape: torch.Size) -> Compressor:
        if isinstance(self._compressor, Compressor):
            return self._compressor
        parameter = next(p for p, n in self._numbers.items() if n == int(number))
        return self._compressor.for_tensor(self._names.get(parameter, ""), shape)


def compressed_averaging(
    state: CompressedAveraging,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The hook: merges the bucket's gradients over the ranks."""
    codec, gradients = state.codec(bucket), bucket.gradients()
    buffer: Tensor = bucket.buffer()
    num_ranks = dist.get_world_size(state.process_group)
    check_merge(state.merge, num_ranks)
    message = _joined(codec.encode(gradients)[0], buffer.device)
    state.num_bytes += message.numel()
    state.raw_bytes += codec.raw_bytes
    messages = [torch.empty_like(message) for _ in range(num_ranks)]
    work = dist.all_gather(messages, message, state.process_group, async_op=True)

    def merged(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        specs = codec.wire_specs
        found = (Contribution(codec.decode(_split(each, specs)), 1.0) for each in messages)
        # A mean needs one at a time: of many ranks all would not fit.
        is_mean = state.merge is weighted_mean
        whole = mean_of(found, num_ranks) if is_mean else state.merge(list(found))
        for gradient, tensor in zip(gradients, whole, strict=True):
            gradient.copy_(tensor)
        return buffer

    gathered: torch.futures.Future[list[Tensor]] = work.get_future()
    return gathered.then(merged)


def _joined(parts: Parts, device: torch.device) -> Tensor:
    """All parts as one uint8 vector."""
    message = torch.zeros(_offsets(tuple(map(TensorSpec.of, parts)))[-1], dtype=torch.uint8)
    message = message.to(device)
    for part, start in zip(parts, _offsets(tuple(map(TensorSpec.of, parts))), strict=False):
        message[start : start + part.nbytes] = part.view(torch.uint8)
    return message


def _split(message: Tensor, specs: tuple[TensorSpec, ...]) -> Parts:
    return tuple(
        message[start : start + spec.num_bytes].view(spec.dtype)
        for spec, start in zip(specs, _offsets(specs), strict=False)
    )


def _offsets(specs: tuple[TensorSpec, ...]) -> list[int]:
    """Where each part begins, and the end of all."""
    offsets = [0]
    for spec in specs:
        offsets.append(offsets[-1] - (-spec.num_bytes // _ALIGNED) * _ALIGNED)
    return offsets

"""Time what compressing a message costs on a device.

Each codec is timed by itself, so a run takes somewhat longer; memories are left out. A codec whose
messages vary in size is given rows whose features are as unequal as those of a trained model, and
is timed once it has measured them: its bytes are an estimate.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from xcloud.comm.channel import Codec
from xcloud.comm.compressor import Compressor
from xcloud.comm.memory import NoMemory, SampleRows
from xcloud.net.frame import Kind, MessageKey, TensorSpec, decode_frame, encode_frame, seal_frame
from xcloud.simulator.costs import Direction

BUDGET_S = 0.1
MAX_REPEATS = 5
OTHER_BYTES = 32 << 20
WARM_UPS = 32  # messages of a codec that measures before it is at its usual size


def median_s(once: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of 2 to MAX_REPEATS calls, up to BUDGET_S, after one to warm up.

    Other memory is used before each call, as by what a rank computes in between, so little is left
    in a processor's caches.
    """

    def now_s() -> float:
        """Return the time at which the device has done all that it was given."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    once()
    # The first call is not counted: it allocates, and fills caches of functions.
    took_s: list[float] = []
    other = torch.ones(OTHER_BYTES // 4 if device.type == "cpu" else 0)
    while len(took_s) < 2 or (sum(took_s) < BUDGET_S and len(took_s) < MAX_REPEATS):
        other.add_(1.0)
        started_s = now_s()
        once()
        took_s.append(now_s() - started_s)
    return statistics.median(took_s)


FALL = 0.4
"""Feature n deviates by n ** -FALL, so that `Transform` takes about as many bytes as of MiniLM's
rows."""


def time_codec(
    compressor: Compressor,
    specs: Sequence[TensorSpec],
    device: torch.device,
    is_gradient: bool = False,
) -> Direction:
    """Return the costs of one message of random tensors with these specs.

    is_gradient: whether they are compressed as gradients of a boundary's activations. The costs
    are the bytes of the whole frame, the seconds of compressing with framing, and those of
    decompressing.
    """
    generator = torch.Generator().manual_seed(0)
    codecs = [
        Codec(compressor=compressor, memory=NoMemory()) for _ in specs
    ]  # what they remember must not mix
    values = []
    varies = False  # whether a message may be shorter than promised
    for codec, spec in zip(codecs, specs, strict=True):
        is_bound = any(part.is_bound for part in codec.compressor.wire_specs(spec))
        varies = varies or is_bound
        # Each timing draws the same, so that plans are compared and not draws.
        codec.compressor.use_stream(0)
        value = torch.randn(spec.shape, generator=generator, dtype=spec.dtype)
        if is_bound and spec.shape:
            value *= torch.arange(1, spec.shape[-1] + 1) ** -FALL
        values.append(value.to(device))

    drawn = [torch.randn(spec.shape, generator=generator).to(device) for spec in specs]
    activations = drawn if is_gradient else [None] * len(specs)
    no_rows = partial(SampleRows, ids=(), counts=())  # which only a memory asks for

    def encode() -> Tensor:
        parts: list[Tensor] = []
        for codec, value, own in zip(codecs, values, activations, strict=True):
            parts.extend(codec.encode(value, rows_of=no_rows, activations=own))
        return encode_frame(MessageKey(Kind.ACTIVATION), parts=tuple(parts), sequence=0)

    frame = encode()
    if varies:
        for _ in range(WARM_UPS):
            before = frame
            frame = encode()
        if len(frame) > 1.2 * len(before):  # with what a receiver needs once
            frame = encode()
    # What decodes must not be what has encoded: some codecs remember what they sent.
    receivers = copy.deepcopy(codecs)
    seal_frame(frame, deliver_at_s=0.0)
    parts = decode_frame(frame, sender="this process").parts

    def decode() -> None:
        rest = iter(parts)
        for codec, spec in zip(receivers, specs, strict=True):
            number = len(codec.compressor.wire_specs(spec))
            codec.compressor.decompress(tuple(islice(rest, number)), spec)

    return Direction(
        num_bytes=len(frame),
        compress_s=median_s(encode, device),
        decompress_s=median_s(decode, device),
    )

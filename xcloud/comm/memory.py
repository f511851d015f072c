"""State that one end of a channel keeps between messages: error feedback, delta cache.

Shapes: B samples in a message; R = sum(counts) rows, axis 0 of the tensor, sample after sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from xcloud.base.settings import Fraction, settings
from xcloud.comm.state import State, StatefulTree, copy_of

Dtype = Literal["float32", "bfloat16"] | None
_DTYPES: Mapping[str | None, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class SampleRows:
    """The rows of a message by sample: counts[i] rows of sample ids[i]."""

    ids: tuple[int, ...]
    counts: tuple[int, ...]

    def spans(self) -> Iterator[tuple[int, slice]]:
        """(sample id, its rows), in message order."""
        ends = accumulate(self.counts, initial=0)
        for sample, (start, end) in zip(self.ids, pairwise(ends), strict=True):
            yield sample, slice(start, end)


class Memory(StatefulTree):
    """Sender: before_send, compress, decompress, after_send. Receiver: decompress, after_receive.
    Each end has its own copy. Batches are planned so that a sample always meets the same two ends
    (`PinnedBatchPlan`); evaluation bypasses the memory. label: short name; "" for no memory.
    """

    label = ""

    def before_send(self, tensor: Tensor, rows: SampleRows) -> Tensor:
        """The tensor to compress instead of `tensor`."""
        return tensor

    def after_send(self, sent: Tensor, seen: Tensor, rows: SampleRows) -> None:
        """Update the memory of the sender.

        sent: the tensor that `before_send` returned.
        seen: the tensor that the peer decodes.
        """

    def after_receive(self, seen: Tensor, rows: SampleRows) -> Tensor:
        """Reconstruct the tensor from the decoded message."""
        return seen

    def settle(self, was_used: bool) -> None:
        """Commit or roll back the messages since the last call. If their update was skipped, the
        memory is as before them. Both ends of a channel get the same call."""


class NoMemory(Memory):
    """Keep nothing between messages."""

    def __repr__(self) -> str:
        return "NoMemory()"


class _PerSample(Memory):
    """Base class of memories that keep tensors [rows, *features] by sample id, all with the same
    features, in `dtype` (None: unchanged)."""

    dtype: Dtype

    def __post_init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._before: dict[int, Tensor | None] = {}  # of what changed since the last `settle`

    def settle(self, was_used: bool) -> None:
        before = self._before
        self._before = {}
        for sample, tensor in () if was_used else before.items():
            self._tensors.pop(sample, None)
            if tensor is not None:
                self._tensors[sample] = tensor

    def _get(self, sample: int, like: Tensor) -> Tensor | None:
        """The sample's tensor; None if there is none or it has another number of rows."""
        tensor = self._tensors.get(sample)
        if tensor is not None and tensor.shape == like.shape:
            return tensor.to(like)
        return None

    def _pop(self, sample: int, like: Tensor) -> Tensor | None:
        found = self._get(sample, like=like)
        self._note(sample)
        self._tensors.pop(sample, None)
        return found

    def _note(self, sample: int) -> None:
        """Note a sample before anything of it changes."""
        self._before.setdefault(sample, self._tensors.get(sample))

    def _plus(self, tensor: Tensor, rows: SampleRows, factor: float, pop: bool = False) -> Tensor:
        kept_of = self._pop if pop else self._get
        total = tensor.clone()
        for sample, span in rows.spans():
            if (kept := kept_of(sample, total[span])) is not None:
                total[span].add_(kept, alpha=factor)
        return total

    def _put(self, sample: int, tensor: Tensor) -> None:
        """Keep a copy of the tensor. A non-finite one is dropped, as it would stay non-finite for
        ever. Both ends of a channel decide alike, since both have seen the same values."""
        self._note(sample)
        if not bool(tensor.isfinite().all()):
            self._tensors.pop(sample, None)
            return
        # A copy: a view would keep the whole message alive.
        self._tensors[sample] = tensor.to(_DTYPES.get(self.dtype, tensor.dtype), copy=True)

    own_names = ("ids", "counts", "rows")

    def own(self) -> State:
        """Three tensors for any number of samples: a safetensors header holds about a million
        names."""
        if not self._tensors:
            return {}
        tensors = list(self._tensors.values())
        return {
            "ids": torch.tensor(list(self._tensors)),
            "counts": torch.tensor([len(tensor) for tensor in tensors]),
            "rows": copy_of(*tensors),
        }

    def take(self, own: State) -> None:
        self._tensors = {}
        self._before = {}
        if own:
            ids, counts, rows = (torch.as_tensor(own[name]) for name in self.own_names)
            spans = SampleRows(ids=tuple(ids.tolist()), counts=tuple(counts.tolist())).spans()
            self._tensors = {sample: rows[span].clone() for sample, span in spans}


@settings("ErrorFeedback", frozen=False)
class ErrorFeedback(_PerSample):
    """Error feedback: what compression lost of a sample is added to its next message.

    sent = x + decay * residual[id];  residual[id] = sent - seen
    Source: Seide et al., Interspeech 2014; Karimireddy et al., arXiv:1901.09847. Difference: one
    residual per sample instead of per position in the batch; so it helps from the second epoch on.
    Memory: one copy of every sample's rows, at the sender only. A sample that returns with
    another number of rows starts afresh. If a sample occurs twice in a message, the first takes
    the residual, and the errors of both are kept if their rows agree.

    decay: factor on the old error of a sample at its next message; below 1 old errors fade.
    dtype: type of the values that are kept (bfloat16: half the bytes). None: that of x.
    """

    label = "ef"

    decay: Fraction = 1.0
    dtype: Dtype = None

    def before_send(self, tensor: Tensor, rows: SampleRows) -> Tensor:
        return self._plus(tensor, rows=rows, factor=self.decay, pop=True)

    def after_send(self, sent: Tensor, seen: Tensor, rows: SampleRows) -> None:
        lost = sent - seen
        for sample, span in rows.spans():
            earlier = self._pop(sample, like=lost[span])  # of this message, see the class
            self._put(sample, lost[span] if earlier is None else lost[span] + earlier)


@settings("DeltaCache", frozen=False)
class DeltaCache(_PerSample):
    """Delta cache: send how a sample changed since its last visit; both ends keep the last value.

    first visit: sent = x, cache[id] = seen;  later: sent = x - cache[id], cache[id] += seen
    Source: Wang et al., "AQ-SGD", arXiv:2206.01299: while training converges the changes shrink,
    and so does the error at a given number of bits. Difference: the first visit is compressed
    too; so it helps from the second epoch on.

    Both caches must stay bit-equal, so both ends must decode alike: same kind of device, where
    decoding is a matrix product (`Svd`). Memory: one copy of every sample's rows at each end, on
    the tensor's device: 160,000 sentences of 25 x 768 in bfloat16 take 6 GB. A sample that returns
    with another number of rows starts afresh. If one occurs twice in a message, both are deltas to
    the previous visit, and the last one is kept.

    dtype: type of the values that are kept, with the choices of ErrorFeedback.
    """

    label = "delta"

    dtype: Dtype = None

    def before_send(self, tensor: Tensor, rows: SampleRows) -> Tensor:
        return self._plus(tensor, rows=rows, factor=-1)

    def after_send(self, sent: Tensor, seen: Tensor, rows: SampleRows) -> None:
        self.after_receive(seen, rows=rows)

    def after_receive(self, seen: Tensor, rows: SampleRows) -> Tensor:
        value = self._plus(seen, rows=rows, factor=1)
        for sample, span in rows.spans():  # only now: a sample may occur twice in a message
            self._put(sample, value[span])
        return value

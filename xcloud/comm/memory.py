"""State that one end of a channel keeps between messages: error feedback, delta cache.

Shapes: B samples in a message; R = sum(counts) rows, axis 0 of the tensor, sample after sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from xcloud.base.settings import Fraction, settings
from xcloud.comm.state import State, StatefulTree, copy_of

Dtype = Literal["float32", "bfloat16"] | None
_DTYPES: Mapping[str | None, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class SampleRows:
    """The rows of a message by sample: counts[i] rows of sample ids[i].

    tokens: the token of each row, int64 [R], where both ends of the channel read the text.
    """

    ids: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: Tensor | None = None

    def spans(self) -> Iterator[tuple[int, slice]]:
        """(sample id, its rows), in message order."""
        ends = accumulate(self.counts, initial=0)
        for sample, (start, end) in zip(self.ids, pairwise(ends), strict=True):
            yield sample, slice(start, end)


class Memory(StatefulTree):
    """Sender: before_send, compress, decompress, after_send. Receiver: decompress, after_receive.
    Each end has its own copy. Batches are planned so that a sample always meets the same two ends
    (`PinnedBatchPlan`); in an evaluation only the two methods named after it are called. label:
    short name; "" for no memory."""

    label = ""
    reads_text: ClassVar[bool] = False
    """Whether it needs `SampleRows.tokens`, so that both ends must read the text."""

    def before_send(self, tensor: Tensor, rows: SampleRows) -> Tensor:
        """The tensor to compress instead of `tensor`."""
        return tensor

    def before_evaluation(self, tensor: Tensor, rows: Callable[[], SampleRows]) -> Tensor:
        """The tensor to compress in an evaluation, which changes no memory."""
        return tensor

    def after_evaluation(self, seen: Tensor, rows: Callable[[], SampleRows]) -> Tensor:
        """Reconstruct the tensor of an evaluation from the decoded message."""
        return seen

    def after_send(self, sent: Tensor, seen: Tensor, rows: SampleRows) -> None:
        """Update the memory of the sender; unless a subclass says otherwise, as the receiver's.

        sent: the tensor that `before_send` returned.
        seen: the tensor that the peer decodes.
        """
        self.after_receive(seen, rows)

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
        # An update that all ranks skip leaves no trace: an exploding gradient would else stay in
        # the residual until the sample comes again.
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
        found = self._get(sample, like)
        # Noted only once: what counts is the state before the first message of the update.
        self._before.setdefault(sample, self._tensors.pop(sample, None))
        return found

    def _plus(self, tensor: Tensor, rows: SampleRows, factor: float, pop: bool = False) -> Tensor:
        # Error feedback takes the residual away with the message that carries it; a cache stays.
        kept_of = self._pop if pop else self._get
        total = tensor.clone()
        for sample, span in rows.spans():
            if (kept := kept_of(sample, total[span])) is not None:
                total[span].add_(kept, alpha=factor)
        return total

    def _put(self, sample: int, tensor: Tensor) -> None:
        """Keep a copy of the tensor. A non-finite one is dropped, as it would stay non-finite for
        ever. Both ends of a channel decide alike, since both have seen the same values."""
        self._before.setdefault(sample, self._tensors.get(sample))
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
        # Joined along the rows, as all have the same features.
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
        return self._plus(tensor, rows, factor=self.decay, pop=True)

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
        return self._plus(tensor, rows, factor=-1)

    def after_receive(self, seen: Tensor, rows: SampleRows) -> Tensor:
        value = self._plus(seen, rows, factor=1)
        for sample, span in rows.spans():  # only now: a sample may occur twice in a message
            self._put(sample, value[span])
        return value


_MOST_SEEN = 256
"""Rows that a token's mean stands for at most: later ones then count more, as training moves
them."""


@settings("TokenMeans", frozen=False)
class TokenMeans(Memory):
    """Send how a row differs from the mean row of its token; both ends keep the means, of the rows
    that the receiver has decoded, so nothing of them crosses.

    sent = x - a[token];  seen rows are added to the means afterwards
    a[token] = (sum of the token's rows + mean of all rows) / (their number + 1)

    Ours. Behind two blocks of a small Llama the embedding's row, which Agora (arXiv:2607.13332)
    subtracts, leaves 98 % of the variance of activations, and this 6 %. For activations only: a
    gradient whose difference rounds to zero would stay the mean for ever. Both ends must decode
    alike, as for DeltaCache. Memory at each end: one row in float32 for each token that has
    crossed. Rows that are not finite change no mean.
    """

    label = "token"
    reads_text = True

    own_names = ("tokens", "numbers", "sums")

    def __post_init__(self) -> None:
        self._means = _Means(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0, 0))
        self._before: _Means | None = None  # since the last `settle`

    def before_send(self, tensor: Tensor, rows: SampleRows) -> Tensor:
        return tensor - self._anchors(tensor, rows)

    def after_receive(self, seen: Tensor, rows: SampleRows) -> Tensor:
        value = seen + self._anchors(seen, rows)
        # Means are never changed in place, so keeping the old object is all that a return takes.
        if self._before is None:
            self._before = self._means
        self._means = self._means.with_rows(self._keys(rows), value.float().cpu())
        return value

    def before_evaluation(self, tensor: Tensor, rows: Callable[[], SampleRows]) -> Tensor:
        return tensor if self._is_empty else tensor - self._anchors(tensor, rows=rows())

    def after_evaluation(self, seen: Tensor, rows: Callable[[], SampleRows]) -> Tensor:
        return seen if self._is_empty else seen + self._anchors(seen, rows=rows())

    def settle(self, was_used: bool) -> None:
        if not was_used and self._before is not None:
            self._means = self._before
        self._before = None

    def own(self) -> State:
        if self._is_empty:
            return {}
        kept = (self._means.tokens_T, self._means.numbers_T, self._means.sums_TD)
        return {name: copy_of(tensor) for name, tensor in zip(self.own_names, kept, strict=True)}

    def take(self, own: State) -> None:
        self.__post_init__()
        if own:
            self._means = _Means(*(torch.as_tensor(own[name]).clone() for name in self.own_names))

    @property
    def _is_empty(self) -> bool:
        return not len(self._means.tokens_T)

    def _keys(self, rows: SampleRows) -> Tensor:
        assert rows.tokens is not None, "a job is refused unless both ends read the text"
        return rows.tokens

    def _anchors(self, like: Tensor, rows: SampleRows) -> Tensor:
        return self._means.of(self._keys(rows), like.shape[1:]).to(like)


@dataclass(frozen=True)
class _Means:
    """The sums of rows by token; nothing of it is changed in place.

    tokens_T: the tokens that have crossed, in ascending order. numbers_T: the number of rows of
    each. sums_TD: float32, with any shape of features.
    """

    tokens_T: Tensor
    numbers_T: Tensor
    sums_TD: Tensor

    def of(self, keys_R: Tensor, features: torch.Size) -> Tensor:
        """Return the anchor of each row."""
        width = features.numel()
        if not len(self.tokens_T):
            return torch.zeros(len(keys_R), *features)
        # Stands in for one more row of each token: a token that was never seen gets the mean of
        # all.
        mean_D = self.sums_TD.sum(0) / self.numbers_T.sum()
        padded_TD = torch.cat([self.sums_TD, self.sums_TD.new_zeros(1, width)])
        numbers_T = torch.cat([self.numbers_T, self.numbers_T.new_zeros(1)])
        places_R = torch.searchsorted(self.tokens_T, keys_R).clamp_(max=len(self.tokens_T) - 1)
        places_R[self.tokens_T[places_R] != keys_R] = len(self.tokens_T)
        anchors_RD = (padded_TD[places_R] + mean_D) / (numbers_T[places_R] + 1)[:, None]
        return anchors_RD.view(-1, *features)

    def with_rows(self, keys_R: Tensor, values: Tensor) -> _Means:
        """Return the means with more rows."""
        values_RD = values.flatten(1)
        # A row that diverged would stay in its token's mean for ever.
        is_finite_R = values_RD.isfinite().all(1)
        keys_R = keys_R[is_finite_R]
        values_RD = values_RD[is_finite_R]
        if not len(keys_R):
            return self
        tokens_T = torch.unique(torch.cat([self.tokens_T, keys_R]))
        numbers_T = torch.zeros(len(tokens_T))
        sums_TD = torch.zeros(len(tokens_T), values_RD.shape[1])
        if len(self.tokens_T):
            fading_T = _MOST_SEEN / self.numbers_T.clamp_min(_MOST_SEEN)
            earlier_T = torch.searchsorted(tokens_T, self.tokens_T)
            numbers_T[earlier_T] = self.numbers_T * fading_T
            sums_TD[earlier_T] = self.sums_TD * fading_T[:, None]
        places_R = torch.searchsorted(tokens_T, keys_R)
        # On the CPU, in order: both ends must come to the same bits.
        numbers_T.index_add_(0, places_R, torch.ones(len(keys_R)))
        sums_TD.index_add_(0, places_R, values_RD)
        return _Means(tokens_T, numbers_T, sums_TD)

"""Sums of gradients over the ranks of one cloud that hold the same stage, begun while the backward
still goes on: in buckets, each as soon as its gradients are complete in this rank (PyTorch DDP,
arXiv:2006.15704)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from xcloud.pipeline.exchange import FlatBuffer, RankGroup
from xcloud.pipeline.hook import Hook
from xcloud.pipeline.trainer import Trainer

BUCKET_BYTES = 25 << 20  # DDP's default


@dataclass
class _Bucket:
    """Neighbours in a buffer, summed together. num_missing: parameters without their whole
    gradient."""

    stage: int
    values: Tensor
    num_parameters: int
    num_missing: int = 0


class OverlappedSums(Hook):
    """The sums of one rank's gradients with the other ranks of its stages, begun in the backward.

    All ranks of a group start the same sums in the same order: from the last parameter of the last
    stage to the first of the first, as gradients come. One that is not complete in some rank (it
    has no micro-batch, or a parameter is not used) holds up those behind it, and at the latest
    `FlatBuffer.sum_over` starts the rest. Each stage's exchange must begin with that call, of the
    same group.

    buffers, groups: the buffer and the group of ranks of each stage.
    num_backwards: returns the number of backwards that this rank makes of each stage in the update
        that begins.
    """

    def __init__(
        self,
        buffers: Mapping[int, FlatBuffer],
        groups: Mapping[int, RankGroup],
        num_backwards: Callable[[], Mapping[int, int]],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._groups = groups
        self._num_backwards = num_backwards
        self._left: dict[int, int] = {}  # backwards of each stage, of this update
        self._order: list[_Bucket] = []
        for stage in sorted(buffers, reverse=True):
            if len(groups[stage].ranks) > 1 and not buffers[stage].is_sharded:
                self._add(stage, buffer=buffers[stage], bucket_bytes=bucket_bytes)
        self._num_started = 0
        self._waits: list[tuple[int, Callable[[], object]]] = []

    def begin(self, step: int) -> None:
        assert not self._waits, "the sums of the update before were never asked for"
        self._left = dict(self._num_backwards())
        self._num_started = 0
        for bucket in self._order:
            bucket.num_missing = bucket.num_parameters

    def after_micro_batch(self, stage: int) -> None:
        self._left[stage] -= 1

    def _add(self, stage: int, buffer: FlatBuffer, bucket_bytes: int) -> None:
        """Cut a stage's buffer into buckets. One that fits a bucket is left whole: its loss goes
        with it then."""
        runs: list[list[nn.Parameter]] = [[]]
        # Gradients come from the last layer to the first, so a bucket of neighbours is complete
        # early.
        for parameter in reversed(buffer.parameters):
            if sum(p.numel() * p.element_size() for p in runs[-1]) >= bucket_bytes:
                runs.append([])
            runs[-1].append(parameter)
        if len(runs) == 1:
            return
        end = len(buffer.gradients)
        for run in runs:
            first = end - sum(p.numel() for p in run)
            bucket = _Bucket(stage, values=buffer.gradients[first:end], num_parameters=len(run))
            for parameter in run:
                # Autograd calls it in the backward of each micro-batch, once the parameter's
                # gradient is there.
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._hook(bucket)
                )
            self._order.append(bucket)
            end = first
        buffer.finish_sum = lambda: self._finish(stage)

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def completed(parameter: Tensor) -> None:
            if self._left.get(bucket.stage) != 1:  # only the last micro-batch completes it
                return
            bucket.num_missing -= 1
            if bucket.num_missing < 0:
                raise RuntimeError(
                    f"a parameter of stage {bucket.stage} got a second gradient in one backward, "
                    "after others had been summed with its first; checkpoint activations with "
                    "use_reentrant=False"
                )
            while self._num_started < len(self._order):
                # Never out of turn: collectives pair up by their order, and another rank may be at
                # this one.
                if self._order[self._num_started].num_missing:
                    break
                self._start()

        return completed

    def _start(self) -> None:
        bucket = self._order[self._num_started]
        self._waits.append((bucket.stage, self._groups[bucket.stage].start_sum(bucket.values)))
        self._num_started += 1

    def _finish(self, stage: int) -> None:
        """Start what has not begun, and block until the sums of this stage are there."""
        # No hook starts a sum from here on.
        self._left = {}
        while self._num_started < len(self._order):
            self._start()
        for own, wait in self._waits:
            if own == stage:
                wait()
        self._waits = [(own, wait) for own, wait in self._waits if own != stage]


def overlapped_sums(trainer: Trainer, groups: Mapping[int, RankGroup]) -> OverlappedSums:
    """Return the hook of a rank that shares its stages with others of its cloud. groups: the group
    of ranks of each stage."""

    def num_backwards() -> dict[int, int]:
        """Return the micro-batches of this rank in an update, by stage."""
        num_passes = trainer.settings.accumulate_steps
        num_micro_batches = trainer.schedule.num_micro_batches
        return {
            stage: num_passes * len(range(first, num_micro_batches, period))
            for stage, (first, period) in trainer.pipeline.turns.items()
        }

    return OverlappedSums(trainer.buffers, groups, num_backwards=num_backwards)

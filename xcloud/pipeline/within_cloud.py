"""What ranks of one cloud that hold the same stage may do with its gradients and parameters: sum
gradients while the backward still goes on, in buckets, each as soon as its gradients are complete
in this rank (PyTorch DDP, arXiv:2006.15704); or, where the stage does not fit one rank, shard it
(FSDP2, arXiv:2304.11277): each keeps a part of every parameter, its gradient and its moments.
Before a block computes its parameters are gathered, after that dropped; its gradients are summed
and scattered again. All ranks of a sharded stage must compute in step.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from xcloud.base.errors import ConfigError
from xcloud.pipeline.exchange import FlatBuffer, RankGroup
from xcloud.pipeline.hook import Hook
from xcloud.pipeline.schedule import Schedule, put_off, rank_actions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BUCKET_BYTES = 25 << 20  # DDP's default


@dataclass
class _Bucket:
    """Neighbours in a buffer. num_missing: parameters without their whole gradient."""

    stage: int
    values: Tensor
    num_parameters: int
    num_missing: int = 0


class OverlappedSums(Hook):
    """Of one rank. Its stages' exchanges must begin with `FlatBuffer.sum_over` of the same group.

    All ranks of a group start the same sums in the same order: from the last parameter of the last
    stage to the first of the first, as gradients come. One that is not complete in some rank (it
    has no micro-batch, or a parameter is not used) holds up those behind it, and at the latest
    `FlatBuffer.sum_over` starts the rest.

    buffers, groups: by stage. num_backwards: of each stage, that this rank makes in the
    update that begins.
    """

    def __init__(
        self,
        buffers: Mapping[int, FlatBuffer],
        groups: Mapping[int, RankGroup],
        num_backwards: Callable[[], Mapping[int, int]],
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._groups, self._num_backwards = groups, num_backwards
        self._left: dict[int, int] = {}  # backwards of each stage, of this update
        self._order: list[_Bucket] = []
        for stage in sorted(buffers, reverse=True):
            if groups[stage].group_size > 1 and not buffers[stage].is_sharded:
                self._add(stage, buffers[stage], bucket_bytes)
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
        """Nothing for a stage that fits one bucket: its loss goes with it then."""
        runs: list[list[nn.Parameter]] = [[]]
        for parameter in reversed(buffer.parameters):
            if sum(p.numel() * p.element_size() for p in runs[-1]) >= bucket_bytes:
                runs.append([])
            runs[-1].append(parameter)
        if len(runs) == 1:
            return
        end = len(buffer.gradients)
        for run in runs:
            first = end - sum(p.numel() for p in run)
            bucket = _Bucket(stage, buffer.gradients[first:end], len(run))
            for parameter in run:
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
                if self._order[self._num_started].num_missing:
                    break
                self._start()

        return completed

    def _start(self) -> None:
        bucket = self._order[self._num_started]
        self._waits.append((bucket.stage, self._groups[bucket.stage].start_sum(bucket.values)))
        self._num_started += 1

    def _finish(self, stage: int) -> None:
        """Until the sums of this stage are there."""
        self._left = {}
        while self._num_started < len(self._order):
            self._start()
        for own, wait in self._waits:
            if own == stage:
                wait()
        self._waits = [(own, wait) for own, wait in self._waits if own != stage]


_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BYTES = 1 << 18
_given_back_bytes = sys.maxsize  # of this process: tensors from here on have pages of their own


class Sharder:
    """Deals a stage over the ranks of `group`, in place, before gradients and optimizer are made.
    Every rank makes the same calls. Blocks that are sharded as soon as they are built never lie
    whole in a rank beside each other; the rest of the stage, which is gathered with the whole,
    comes last."""

    def __init__(
        self,
        group: RankGroup,
        device: torch.device,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._group, self._device, self._note = group, device, note

    def block(self, block: nn.Module) -> None:
        """Gathered by itself when it computes."""
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(block, mesh=self._mesh, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)  # sums, as losses are divided already
        sharded.set_force_sum_reduction_for_comms(True)

    def rest(self, stage: nn.Module) -> None:
        """Its whole blocks one at a time, then what is left."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        blocks = list(whole_blocks(stage))
        if blocks and self._group.leads:
            self._note(
                "every rank builds a stage of this model whole before it is sharded over them, so "
                "its weights must fit one rank"
            )
        for block in blocks:
            self.block(block)
        self.block(stage)
        register_fsdp_forward_method(stage, "predict")

    @cached_property
    def _mesh(self) -> DeviceMesh:
        assert self._group.group is not None
        return self._group.group.mesh(self._device)


def sharders(
    groups: Mapping[int, RankGroup], device: torch.device, note: Callable[[str], None]
) -> dict[int, Sharder]:
    """Of a rank's stages, before anything is built. note: tells the user."""
    return_freed_memory(device, _LARGE_BYTES)
    return {stage: Sharder(group, device, note) for stage, group in groups.items()}


def return_freed_memory(device: torch.device, num_bytes: int) -> None:
    """Give tensors of num_bytes or more pages of their own from now on, which go back to the
    system when they are freed; nothing where smaller ones have them already.

    Gathering frees and allocates so often that glibc's heap else grows to twice what is in use
    (109 million weights on two CPUs: 1.6 instead of 3.1 GB a rank). What averaging makes of a
    message of the model's length stayed in it up to 14 times, and takes 0.3 of one now.
    """
    global _given_back_bytes
    if device.type != "cpu" or sys.platform != "linux" or num_bytes >= _given_back_bytes:
        return
    with contextlib.suppress(AttributeError, OSError):  # a libc without it
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, num_bytes)
        _given_back_bytes = num_bytes


def is_sharded(module: nn.Module) -> bool:
    """Whether a Sharder has sharded it."""
    return hasattr(module, "set_gradient_divide_factor")


def whole_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Entries of the outermost lists that have parameters and are not sharded yet."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            held = (b for b in child.children() if next(b.parameters(), None) is not None)
            yield from (block for block in held if not is_sharded(block))
        else:
            yield from whole_blocks(child)


def check_in_step(
    schedule: Schedule, num_stages: int, turns: Sequence[Mapping[int, tuple[int, int]]], what: str
) -> None:
    """Raise ConfigError unless the schedule has all these ranks do the same in turn, each with its
    own micro-batches, and computes their backwards at once. turns: of each rank, by stage; see
    ClusterLayout.turn."""
    orders = [rank_actions(schedule, sorted(own), num_stages, dict(own)) for own in turns]
    if any(map(put_off, orders)):
        raise ConfigError(
            f"{what}.shard: {schedule.label} puts off the gradients of weights, but gathered "
            "parameters are dropped when their backward ends; choose "
            "schedule=one_forward_one_backward or gpipe, or leave shard out"
        )
    if len({tuple((a.kind, a.stage) for a in actions) for actions in orders}) > 1:
        raise ConfigError(
            f"{what}.shard: ranks that gather parameters together must compute in step, and "
            f"{schedule.label} does not deal {schedule.num_micro_batches} micro-batches evenly to "
            f"{len(turns)} ranks; make schedule.num_micro_batches a multiple of {len(turns)}"
        )

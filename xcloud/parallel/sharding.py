"""A stage sharded over the ranks of its cloud (FSDP2, arXiv:2304.11277), where it does not fit
one: each keeps a part of every parameter, its gradient and its moments. Before a block computes
its parameters are gathered, after that dropped; its gradients are summed and scattered again.

All ranks of the stage must compute in step, for gathering takes all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from xcloud.base.errors import ConfigError
from xcloud.parallel.exchange import RankGroup
from xcloud.parallel.schedule import Schedule, put_off, rank_actions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_M_MMAP_THRESHOLD = -3  # of malloc.h
_LARGE_BYTES = 1 << 18


class Sharder:
    """Deals a stage over the ranks of `group`, in place, before gradients and optimizer are made.
    Every rank makes the same calls. Blocks that are sharded as soon as they are built never lie
    whole in a rank beside each other; the rest of the stage, which is gathered with the whole,
    comes last."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def block(self, block: nn.Module) -> None:
        """Gathered by itself when it computes."""
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(block, mesh=self._mesh, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)  # sums, as losses are divided already
        sharded.set_force_sum_reduction_for_comms(True)

    def rest(self, stage: nn.Module) -> None:
        """Its whole blocks one at a time, then what is left."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        for block in whole_blocks(stage):
            self.block(block)
        self.block(stage)
        register_fsdp_forward_method(stage, "predict")

    @cached_property
    def _mesh(self) -> DeviceMesh:
        assert self._group.group is not None
        return self._group.group.mesh(self._device)


def return_freed_memory(device: torch.device) -> None:
    """From now on large tensors get pages of their own, which go back to the system when they are
    freed. Gathering frees and allocates so often that glibc's heap else grows to twice what is in
    use (109 million weights on two CPUs: 1.6 instead of 3.1 GB a rank)."""
    if device.type == "cpu" and sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # a libc without it
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


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

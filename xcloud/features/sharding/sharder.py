"""A stage sharded over the ranks of one cloud that hold it (FSDP2, arXiv:2304.11277).

Each rank keeps a part of every parameter, its gradient and its moments. Before a block computes
its parameters are gathered, after that dropped; its gradients are summed and scattered again. All
ranks of a sharded stage must compute in step (feature.py: check_in_step).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from xcloud.pipeline.exchange import RankGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Sharder:
    """A dealer of one stage over the ranks of `group`, in place, before gradients and optimizer
    are made. Every rank makes the same calls.

    note: a function that shows a note to the user.
    """

    def __init__(
        self,
        group: RankGroup,
        device: torch.device,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._group = group
        self._device = device
        self._note = note

    def block(self, block: nn.Module) -> None:
        """Shard a block, to be gathered by itself when it computes."""
        from torch.distributed.fsdp import fully_shard

        sharded = fully_shard(block, mesh=self._mesh, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(1.0)  # sums, as losses are divided already
        sharded.set_force_sum_reduction_for_comms(True)

    def rest(self, stage: nn.Module) -> None:
        """Shard the blocks that are still whole, one at a time, then what is left of the stage."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        # A model that hands over its blocks as they are built (BuildContext.deal) never has two
        # whole ones beside each other; these are of one that does not. The rest of the stage,
        # which is gathered with the whole, comes last.
        blocks = list(whole_blocks(stage))
        if blocks and self._group.leads:
            self._note(
                "every rank builds a full stage of this model before the stage is sharded, so its "
                "weights must fit one rank"
            )
        for block in blocks:
            self.block(block)
        self.block(stage)
        # FSDP gathers before `forward` only; evaluations call `predict`.
        register_fsdp_forward_method(stage, "predict")

    @cached_property
    def _mesh(self) -> DeviceMesh:
        assert self._group.group is not None
        return self._group.group.mesh(self._device)


def is_sharded(module: nn.Module) -> bool:
    """Return whether a Sharder has sharded it."""
    return hasattr(module, "set_gradient_divide_factor")


def whole_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the outermost lists that have parameters and are not sharded yet."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            # A list of blocks is where a model repeats itself: what is gathered at a time.
            held = (b for b in child.children() if next(b.parameters(), None) is not None)
            yield from (block for block in held if not is_sharded(block))
        else:
            yield from whole_blocks(child)

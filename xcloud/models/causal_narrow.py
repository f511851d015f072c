"""A causal language model cut so that K < H features of a token cross: settings, start values.
The projections and how their basis is measured are those of encoders (low_rank_cut.py,
calibration.py). They become part of the model: the rows after the cut block have rank K.

Shapes: R rows (tokens that are not padding), H features, K = rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.models.attention import Packing
from xcloud.models.calibration import CutBlock
from xcloud.models.causal_network import Part, depth, laid_out, load_weights
from xcloud.models.causal_stage import Cut, packed_places, run
from xcloud.models.low_rank_cut import Basis, ProjectionBottom, ProjectionTop
from xcloud.models.split_point import Split


def check_settings(split: Split, blocks_per_stage: object) -> None:
    """Raise ConfigError for what a decoder cannot have, or would be ignored."""
    if split.layer is None:
        return
    if split.method == "svd" and split.is_low_rank:
        raise ConfigError(
            "model.split.method=svd replaces a sub-layer together with its skip connection. In a "
            "decoder all that a block adds goes to the rows that skip it, so without them nothing "
            "of the text would cross: choose pca, identity or orthogonal, whose down projection "
            "takes the rows themselves"
        )
    for name, usual in (("head_rank", None), ("calibration_pairs", False)):
        if getattr(split, name) != usual:
            raise ConfigError(f"model.split.{name} is for encoders; a CausalLM takes {usual}")
    if blocks_per_stage is not None:
        raise ConfigError(
            f"model.split.layer={split.layer} says where the first stage ends; leave out "
            "model.blocks_per_stage"
        )


def check_fits(split: Split, config: Any, num_stages: int) -> None:
    """Raise ConfigError for a block or a rank that the model has not."""
    if split.layer is None:
        return
    last = depth(config) - 1
    if split.layer > last:
        raise ConfigError(f"model.split.layer must be 0..{last} or null, got {split.layer}")
    if num_stages == 1:
        raise ConfigError(
            "model.split cuts the model into two stages or more, and this cluster has one; "
            "cluster=local runs all stages in one process"
        )
    split.check_rank(int(config.hidden_size))


def make_cut(
    split: Split, stage: int, config: Any, max_length: int, basis: Basis | None
) -> Cut | None:
    """What stands at the boundary after stage 0 on this stage's side; None where nothing does.
    basis None: to be filled from a file."""
    if stage > 1 or not split.is_low_rank:
        return None
    hidden = int(config.hidden_size)
    if stage == 0:
        return ProjectionBottom(split, hidden, max_length, basis)
    return ProjectionTop(split, hidden, max_length, basis)


class CausalBlock(CutBlock):
    """Block number `block` of the model in a checkpoint."""

    def __init__(self, name: str, config: Any, block: int) -> None:
        self.num_words, self.hidden = int(config.vocab_size), int(config.hidden_size)
        self._network = laid_out(config, Part(range(block + 1), True, False))
        load_weights(self._network, name)
        described: Mapping[str, Any] = json.loads(config.to_json_string())
        self.described = described
        self.tensors = {n: p.detach() for n, p in self._network.named_parameters()}

    def prepare(self, device: torch.device) -> None:
        self._network.to(device).eval().requires_grad_(False)

    def rows(self, ids_R: Tensor, types_R: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
        places_BS = packed_places(packing.unpack(types_R))
        rows_BSH = run(self._network, places_BS, packing.unpack(ids_R), None)
        return packing.pack(rows_BSH), packing.pack(places_BS)

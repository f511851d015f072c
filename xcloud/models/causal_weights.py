"""Weights of parts of a causal language model: drawn from a seed, read from a checkpoint's
safetensors, written as a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from xcloud.base.errors import DataError
from xcloud.models.causal_network import (
    HEAD,
    KINDS,
    Elsewhere,
    blocks_of,
    give_memory,
    held,
    read_config,
    tie,
    ties_words,
)
from xcloud.models.checkpoint import fetch
from xcloud.models.seeding import seeded


def draw_weights(network: Any, seed: int) -> None:
    """Start weights as the model type draws them, one stream for each block, so that the layout
    does not change them."""
    with torch.no_grad():
        for name, module in held(network):
            with seeded(seed, "causal", name):
                for inner in module.modules():
                    network._init_weights(inner)


def load_weights(
    network: Any, name_or_path: str, end_block: Callable[[str, nn.Module], None] | None = None
) -> None:
    """Fill this part from a checkpoint's safetensors, block by block; what has no memory gets it
    then. Only its own tensors are read; adapters beside them are left alone. DataError for a
    tensor that is missing or of another shape.

    end_block: called with the name of each block and the block, as soon as it is full.
    """
    files = WeightFiles(name_or_path)
    kind = KINDS[network.config.model_type]
    words = f"{kind.base}.{kind.embeddings}.weight"
    is_tied = ties_words(read_config(name_or_path))

    def found(name: str) -> str:
        names = [name, name.removeprefix(f"{kind.base}.")]  # of a file of the headless model
        names += [name.replace(HEAD, kind.old_head)]
        if name == f"{HEAD}.weight" and is_tied:
            names += [words, words.removeprefix(f"{kind.base}.")]
        place = next((given for given in names if given in files), None)
        if place is None:
            raise DataError(f"checkpoint {name_or_path!r} has no weights {name}")
        return place

    def fill(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in parameters:
            if ".lora_" in name:
                continue
            place = found(name.replace(".base_layer.", "."))
            tensor = files.tensor(place)
            if tensor.shape != parameter.shape:
                raise DataError(
                    f"checkpoint {name_or_path!r}: {place} is {list(tensor.shape)}, its "
                    f"config.json says {list(parameter.shape)}"
                )
            parameter.copy_(tensor)

    with torch.no_grad():
        for prefix, block in blocks_of(network):
            give_memory(network, block)
            fill(block.named_parameters(prefix))
            if end_block is not None and not isinstance(block, Elsewhere):
                end_block(prefix, block)
        give_memory(network, network)
        tie(network)
        blocks = tuple(f"{prefix}." for prefix, _ in blocks_of(network))
        fill((n, p) for n, p in network.named_parameters() if not n.startswith(blocks))


def write_checkpoint(network: Any, folder: Path) -> None:
    """A whole model as a folder that transformers loads. Its own save_pretrained writes on rank 0
    of a process group only, and any cloud may make a base."""
    kind = KINDS[network.config.model_type]
    folder.mkdir(parents=True, exist_ok=True)
    network.config.architectures = [type(network).__name__]
    (folder / "config.json").write_text(network.config.to_json_string(use_diff=False))
    tensors = {  # a tied matrix once
        name.replace(HEAD, kind.old_head): parameter.detach().cpu().contiguous()
        for name, parameter in network.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _file_of(name_or_path: str, file_name: str) -> Path:
    from transformers.utils.hub import cached_file

    return Path(
        fetch(name_or_path, lambda name, **where: str(cached_file(name, file_name, **where)))
    )


class WeightFiles:
    """The safetensors of a checkpoint, in a folder, the hub's cache or on the hub. A shard is
    looked for when something in it is asked for, so others' shards are not fetched."""

    def __init__(self, name_or_path: str) -> None:
        self._name = name_or_path
        self._shards: dict[str, str] = {}
        try:
            index = _file_of(name_or_path, "model.safetensors.index.json")
            self._shards = json.loads(index.read_text())["weight_map"]
        except DataError:  # one file then
            with safe_open(_file_of(name_or_path, "model.safetensors"), "pt") as file:
                self._shards = dict.fromkeys(file.keys(), "model.safetensors")

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def tensor(self, name: str) -> Tensor:
        with safe_open(_file_of(self._name, self._shards[name]), "pt") as file:
            found: Tensor = file.get_tensor(name)
        return found

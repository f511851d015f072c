"""Parts of a `transformers` causal language model (its embeddings, some of its blocks, its head),
and their weights: drawn from a seed, read from a checkpoint, written as one. What a stage computes
is causal_stage.py's.

The network is laid out on torch's "meta" device, which costs no memory; what other stages hold is
taken out, and only what is left is given memory and weights, one block after another. Names stay
those of the whole model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, DataError
from xcloud.models.checkpoint import fetch, quiet, raw_config
from xcloud.models.stages import seeded

HEAD = "lm_head"


@dataclass(frozen=True)
class Kind:
    """What the parts of a model type are called. base, embeddings, blocks, norm: module names.

    first: other modules that only the first stage runs (learned positions, their dropout).
    by_type: its forward takes a mask for each type of layer. old_head: the head's name in files.
    """

    base: str = "model"
    embeddings: str = "embed_tokens"
    blocks: str = "layers"
    norm: str = "norm"
    first: Sequence[str] = ()
    by_type: bool = False
    old_head: str = HEAD


LLAMA = Kind()
QWEN = Kind(by_type=True)
KINDS: Mapping[str, Kind] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "gemma": LLAMA,
    "qwen2": QWEN,
    "qwen3": QWEN,
    "gemma2": QWEN,
    "gemma3_text": QWEN,
    "gpt2": Kind("transformer", "wte", "h", "ln_f", ("wpe", "drop")),
    "gpt_neox": Kind(
        "gpt_neox", "embed_in", norm="final_layer_norm", first=("emb_dropout",),
        old_head="embed_out",
    ),
}  # fmt: skip


class Elsewhere(nn.Module):
    """Stands where another stage holds the module; hands on the rows."""

    def forward(self, rows: Tensor, *others: object, **options: object) -> Tensor:
        return rows


class NoPositions(nn.Module):
    """Stands where another stage has added the learned positions."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), device=positions.device)


def read_config(name_or_path: str) -> Any:
    """The transformers config of a checkpoint. DataError if it is nowhere, ConfigError if it is
    of no type in KINDS."""
    raw = raw_config(name_or_path)
    if raw.get("model_type") not in KINDS:
        raise ConfigError(
            f"the checkpoint {name_or_path!r} is of type {raw.get('model_type')!r}; causal "
            f"language models that can be cut are {', '.join(KINDS)}"
        )
    return config_of(raw)


def config_of(described: Mapping[str, Any]) -> Any:
    """The transformers config that a config.json describes."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**described)


def ties_embeddings(config: Any) -> bool:
    """Whether the head's matrix is that of the embeddings."""
    return bool(getattr(config, "tie_word_embeddings", False))


@dataclass(frozen=True)
class Part:
    """What a stage holds: some blocks, the embeddings (is_first), norm and head (is_last)."""

    blocks: range
    is_first: bool
    is_last: bool


def network_of(config: Any, part: Part) -> Any:
    """The part of the model, with memory and with buffers, its weights not set yet."""
    network = laid_out(config, part)
    give_memory(network, network)
    tie(network)
    return network


def laid_out(config: Any, part: Part) -> Any:
    """The part of the model, in float32 and without memory."""
    from transformers import AutoModelForCausalLM

    # Only eager attention knows the soft cap of Gemma 2's scores.
    way = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    with quiet(), torch.device("meta"):
        network = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=way, dtype=torch.float32
        )
    kind, base = KINDS[config.model_type], network.base_model
    blocks = getattr(base, kind.blocks)
    for number in range(config.num_hidden_layers):
        if number not in part.blocks:
            blocks[number] = Elsewhere()
    if not part.is_first:
        setattr(base, kind.embeddings, Elsewhere())
        for name in kind.first:
            setattr(base, name, NoPositions() if name == "wpe" else Elsewhere())
    if not part.is_last:
        setattr(base, kind.norm, Elsewhere())
        setattr(network, HEAD, Elsewhere())
    network.config.use_cache = False
    return network


def give_memory(network: Any, module: nn.Module) -> None:
    """To what has none yet in a module of the network; buffers are computed, weights not set."""
    for inner in module.modules():
        buffers = list(inner.buffers(recurse=False))
        if any(tensor.is_meta for tensor in (*inner.parameters(recurse=False), *buffers)):
            inner.to_empty(device="cpu", recurse=False)
            if buffers:
                network._init_weights(inner)  # rotation frequencies, embedding scales


def tie(network: Any) -> None:
    """The head to the embeddings, in a part that holds both of a model that ties them."""
    words, head = network.get_input_embeddings(), getattr(network, HEAD)
    if ties_embeddings(network.config) and not {Elsewhere} & {type(words), type(head)}:
        head.weight = words.weight


def blocks_of(network: Any) -> Iterator[tuple[str, nn.Module]]:
    """(name, block), also of those that stand elsewhere."""
    kind, base = KINDS[network.config.model_type], network.base_model
    for number, block in enumerate(getattr(base, kind.blocks)):
        yield f"{kind.base}.{kind.blocks}.{number}", block


def linear_names(config: Any) -> list[str]:
    """Last names of the matrices in a block, which LoRA may adapt."""
    from transformers.pytorch_utils import Conv1D

    _, block = next(blocks_of(laid_out(config, Part(range(1), False, False))))
    linears = (name for name, m in block.named_modules() if isinstance(m, nn.Linear | Conv1D))
    return sorted({name.rsplit(".", 1)[-1] for name in linears})


def draw_weights(network: Any, seed: int) -> None:
    """Start weights as the model type draws them, one stream for each block, so that the layout
    does not change them."""
    kind, base = KINDS[network.config.model_type], network.base_model
    ends = (kind.embeddings, *kind.first, kind.norm)
    held = {f"{kind.base}.{name}": getattr(base, name) for name in ends}
    held |= {**dict(blocks_of(network)), HEAD: getattr(network, HEAD)}
    with torch.no_grad():
        for name, module in held.items():
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
    is_tied = ties_embeddings(read_config(name_or_path))

    def place_of(name: str) -> str:
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
            place = place_of(name.replace(".base_layer.", "."))
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


class WeightFiles:
    """The safetensors of a checkpoint, in a folder, the hub's cache or on the hub. A shard is
    looked for when something in it is asked for, so others' shards are not fetched."""

    def __init__(self, name_or_path: str) -> None:
        self._name = name_or_path
        try:
            index = self._file("model.safetensors.index.json")
            self._shards: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except DataError:  # one file then
            with safe_open(self._file("model.safetensors"), "pt") as file:
                self._shards = dict.fromkeys(file.keys(), "model.safetensors")

    def _file(self, name: str) -> Path:
        from transformers.utils.hub import cached_file

        return Path(fetch(self._name, lambda at, **where: str(cached_file(at, name, **where))))

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._file(self._shards[name]), "pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

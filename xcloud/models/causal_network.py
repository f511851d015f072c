"""Parts of a `transformers` causal language model (its embeddings, some of its blocks, its head),
and their weights: drawn from a seed, read from a checkpoint, written as one. Beside them LoRA's
adapters, by `peft`. What a stage computes is causal_stage.py's.

The network is laid out on torch's "meta" device, which costs no memory; what other stages hold is
taken out, and only what is left is given memory and weights, one block after another. Names stay
those of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from xcloud.base.errors import ConfigError, DataError
from xcloud.base.settings import Positive, between, check, settings
from xcloud.models.checkpoint import WeightFiles, raw_config
from xcloud.models.stages import seeded

HEAD = "lm_head"
ADAPTER = "default"  # what peft calls the only adapter of a network
PEFT_PREFIX = "base_model.model."  # of every tensor in a file of peft


@dataclass(frozen=True)
class Kind:
    """What the parts of a model type are called. embeddings, blocks, norm: module names.

    first: other modules that only the first stage runs (learned positions, their dropout).
    by_type: its forward takes a mask for each type of layer. old_head: the head's name in files.
    """

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
    "gpt2": Kind("wte", "h", "ln_f", ("wpe", "drop")),
    "gpt_neox": Kind(
        "embed_in", norm="final_layer_norm", first=("emb_dropout",), old_head="embed_out"
    ),
}


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
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=way, dtype=torch.float32
        )
    kind, base = KINDS[config.model_type], network.base_model
    blocks = getattr(base, kind.blocks)
    for number in range(config.num_hidden_layers):
        if number not in part.blocks:
            blocks[number] = Elsewhere()
    if not part.is_first:
        for name in (kind.embeddings, *kind.first):
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
    blocks = KINDS[network.config.model_type].blocks
    for number, block in enumerate(getattr(network.base_model, blocks)):
        yield f"{network.base_model_prefix}.{blocks}.{number}", block


def draw_weights(network: Any, seed: int) -> None:
    """Start weights as the model type draws them, one stream for each block, so that the layout
    does not change them."""
    kind, prefix = KINDS[network.config.model_type], network.base_model_prefix
    ends = [f"{prefix}.{name}" for name in (kind.embeddings, *kind.first, kind.norm)]
    blocks = dict(blocks_of(network))
    with torch.no_grad():
        for name in (*ends, *blocks, HEAD):
            with seeded(seed, "causal", name):
                for inner in network.get_submodule(name).modules():
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
    kind, prefix = KINDS[network.config.model_type], f"{network.base_model_prefix}."
    is_tied = ties_embeddings(read_config(name_or_path))

    def place_of(name: str) -> str:
        # The second is of a file of the headless model.
        names = [name, name.removeprefix(prefix), name.replace(HEAD, kind.old_head)]
        if name == f"{HEAD}.weight" and is_tied:
            names += [f"{prefix}{kind.embeddings}.weight", f"{kind.embeddings}.weight"]
        return files.first_of(*names)

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
        for name, block in blocks_of(network):
            give_memory(network, block)
            fill(block.named_parameters(name))
            if end_block is not None and not isinstance(block, Elsewhere):
                end_block(name, block)
        give_memory(network, network)
        tie(network)
        blocks = tuple(f"{name}." for name, _ in blocks_of(network))
        fill((n, p) for n, p in network.named_parameters() if not n.startswith(blocks))


def write_checkpoint(network: Any, folder: Path) -> None:
    """A whole model as a folder that transformers loads. Its own save_pretrained writes on rank 0
    of a process group only, and any cloud may make a base."""
    folder.mkdir(parents=True, exist_ok=True)
    network.config.architectures = [type(network).__name__]
    (folder / "config.json").write_text(network.config.to_json_string(use_diff=False))
    kind = KINDS[network.config.model_type]
    tensors = {  # a tied matrix once
        name.replace(HEAD, kind.old_head): parameter.detach().cpu().contiguous()
        for name, parameter in network.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@settings("model.lora")
class Lora:
    """Low-rank adapters beside frozen matrices (Hu et al., arXiv:2106.09685):
    y = W x + (alpha / r) B A x, A drawn, B zero at the start.

    r: rank. alpha: scale, of which alpha / r counts. dropout: in front of A.
    targets: last names of the matrices in a block (q_proj, down_proj …); None: those that peft
        takes for this type of model. layers: blocks that get adapters, from 0; None: all. Below
        the first of them nothing is trained, and no gradient comes back over a boundary there.
    """

    r: Positive = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0.0, le=0.99)] = 0.0
    targets: Annotated[Sequence[str], Field(min_length=1)] | None = None
    layers: Annotated[Sequence[int], Field(min_length=1)] | None = None

    def check(self, config: Any) -> None:
        """Raise ConfigError for a matrix or a block that the model has not."""
        matrices = _linear_names(config)
        if unknown := sorted(set(self.targets_in(config)) - set(matrices)):
            raise ConfigError(
                f"model.lora.targets: a block of this {config.model_type} has no "
                f"{', '.join(unknown)}; its matrices are {', '.join(matrices)}"
            )
        for layer in self.layers or ():
            check("model.lora.layers", layer, between(0, config.num_hidden_layers - 1))

    def targets_in(self, config: Any) -> list[str]:
        if self.targets is not None:
            return list(self.targets)
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as usual

        if config.model_type not in usual:
            raise ConfigError(
                f"peft names no usual matrices for {config.model_type}; set model.lora.targets to "
                f"some of {', '.join(_linear_names(config))}"
            )
        return sorted(usual[config.model_type])

    def layers_in(self, config: Any) -> frozenset[int]:
        return frozenset(range(config.num_hidden_layers) if self.layers is None else self.layers)

    def add_to(self, network: Any) -> None:
        """Freeze the network and put trained adapters beside its targets, in place; `draw` starts
        them."""
        from peft import inject_adapter_in_model

        layers, targets = self.layers_in(network.config), self.targets_in(network.config)
        names = [
            name
            for number, (prefix, block) in enumerate(blocks_of(network))
            if number in layers
            for name, _ in block.named_modules(prefix=prefix)
            if name.rsplit(".", 1)[-1] in targets
        ]
        network.requires_grad_(False)
        if names:  # else a stage without adapted blocks
            with seeded(0, "replaced by draw"):
                inject_adapter_in_model(self._settings(network.config, names), network, ADAPTER)

    def draw(self, prefix: str, block: nn.Module, seed: int) -> None:
        """Start the adapters of a block called `prefix`. It depends on the seed and their own name
        alone."""
        from peft.tuners.lora import LoraLayer

        for name, module in block.named_modules(prefix=prefix):
            if isinstance(module, LoraLayer):
                with seeded(seed, "lora", name):
                    module.reset_lora_parameters(ADAPTER, True)  # type: ignore[no-untyped-call]

    def adapter_config(self, config: Any, base: str) -> Any:
        """What peft writes beside the adapter's tensors. base: folder or hub id of the model."""
        about = self._settings(config, self.targets_in(config))
        if self.layers is not None:
            about.layers_to_transform = sorted(self.layers)
            about.layers_pattern = KINDS[config.model_type].blocks
        about.base_model_name_or_path, about.inference_mode = base, True
        return about

    def _settings(self, config: Any, targets: Sequence[str]) -> Any:
        from peft import LoraConfig

        return LoraConfig(
            r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout,
            target_modules=list(targets), task_type="CAUSAL_LM",
            fan_in_fan_out=config.model_type == "gpt2",  # its matrices are stored transposed
        )  # fmt: skip


def _linear_names(config: Any) -> list[str]:
    """Last names of the matrices in a block, which LoRA may adapt."""
    from transformers.pytorch_utils import Conv1D

    _, block = next(blocks_of(laid_out(config, Part(range(1), False, False))))
    linears = (name for name, m in block.named_modules() if isinstance(m, nn.Linear | Conv1D))
    return sorted({name.rsplit(".", 1)[-1] for name in linears})


def adapter_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapters' tensors under the names that peft gives them in a file."""
    for name, tensor in network.state_dict().items():
        if ".lora_" in name:
            yield PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."), tensor

"""Parts of a `transformers` causal language model (its embeddings, some of its blocks, its head):
how they run, their weights (drawn, read from a checkpoint, written as one), and beside them LoRA's
adapters, by `peft`. What a stage computes is causal_stage.py's.

The network is laid out on torch's "meta" device, which costs no memory; what other stages hold is
taken out, and only what is left is given memory and weights, one block after another. Names stay
those of the whole model.

Shapes: B samples, S positions, H features.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xcloud.base.bounded import parsed_json
from xcloud.base.errors import ConfigError, DataError, XcloudError
from xcloud.base.settings import Positive, between, settings
from xcloud.base.wording import check
from xcloud.contracts.architecture import check_sizes
from xcloud.models.document_attention import ATTENTION, Documents, attend
from xcloud.models.experts import ExpertAdapters, Experts
from xcloud.models.frozen_weights import (
    DTYPES,
    PACKED,
    FrozenEmbedding,
    FrozenMatrix,
    WeightFormat,
    keep_matrices,
)
from xcloud.models.stages import seeded
from xcloud.pretrained import INDEX, WeightFiles, check_unread, raw_config

# peft imports bitsandbytes where it is installed, which then asks in each process for a package
# that no matrix here needs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

HEAD = "lm_head"
EXPERT_PARAMETERS = ("gate_up", "down")  # and "_proj", in transformers
ADAPTER = "default"  # what peft calls the only adapter of a network
MAX_LENGTH = 2**15 - 1  # places cross as int16
PEFT_PREFIX = "base_model.model."  # of every tensor in a file of peft


@dataclass(frozen=True)
class ModelKind:
    """The names of the modules of a model type.

    first: other modules that only the first stage runs.
    old_head: the head's name in files.
    experts: the names, in files, of an expert's gate, up and down matrix; none where there are no
        experts.
    mixture: the name, in files, of the module that holds experts and router.
    """

    embeddings: str = "embed_tokens"
    blocks: str = "layers"
    norm: str = "norm"
    first: Sequence[str] = ()
    old_head: str = HEAD
    experts: Sequence[str] = ()
    mixture: str = "mlp"

    def in_file(self, name: str) -> str:
        """Return the name in a file of a parameter of the network."""
        return name.replace(HEAD, self.old_head).replace(".mlp.", f".{self.mixture}.")


LLAMAS = ("llama", "mistral", "gemma", "qwen2", "qwen3", "gemma2", "gemma3_text")
KINDS: Mapping[str, ModelKind] = {
    **dict.fromkeys(LLAMAS, ModelKind()),
    "mixtral": ModelKind(experts=("w1", "w3", "w2"), mixture="block_sparse_moe"),
    "qwen3_moe": ModelKind(experts=("gate_proj", "up_proj", "down_proj")),
    "gpt2": ModelKind(embeddings="wte", blocks="h", norm="ln_f", first=("wpe", "drop")),
    "gpt_neox": ModelKind(
        embeddings="embed_in",
        blocks="layers",
        norm="final_layer_norm",
        first=("emb_dropout",),
        old_head="embed_out",
    ),
    "protocol_gpt": ModelKind(first=("embed_norm",)),
}


def _auto_config() -> Any:
    """Return transformers' AutoConfig, which also knows the model types of xcloud."""
    from transformers import AutoConfig

    import xcloud.models.protocol_gpt  # noqa: F401

    return AutoConfig


class Elsewhere(nn.Module):
    """Stands where another stage holds the module: hands on rows, and adds no learned position."""

    def forward(self, given: Tensor, *others: object, **options: object) -> Tensor:
        if given.is_floating_point():
            return given
        return torch.zeros((), device=given.device)


@dataclass(frozen=True)
class Part:
    """A stage's share of a model: blocks, the embeddings (is_first), norm and head (is_last)."""

    blocks: range
    is_first: bool
    is_last: bool


def read_config(name_or_path: str) -> Any:
    """DataError if it is nowhere, ConfigError if it is of no type in KINDS."""
    raw = raw_config(name_or_path)
    if raw.get("model_type") not in KINDS:
        raise ConfigError(
            f"the checkpoint {name_or_path!r} is of type {raw.get('model_type')!r}; causal "
            f"language models that can be split are {', '.join(KINDS)}"
        )
    try:
        config = config_of(raw)
        _check_can_be_made(json.dumps(raw, sort_keys=True))
    except XcloudError:
        raise
    except Exception as error:  # whatever transformers raises at what it does not know
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"config.json of {name_or_path} describes no model that transformers can make "
            f"({said:.300})"
        ) from error
    return config


@cache
def _check_can_be_made(described: str) -> None:
    """Lay out one block: on the meta device it takes no memory, and it shows what transformers
    would only say after gigabytes were read. A run reads the same config.json several times."""
    config = _of_one_block(config_of(parsed_json(described)))
    laid_out(config, part=Part(range(1), is_first=False, is_last=False))


_LOADS_MORE = ("auto_map", "custom_pipelines", "quantization_config", "implementation", "kernel")
"""In keys of a config: what has transformers load code or kernels, or read weights otherwise."""


def config_of(described: Mapping[str, Any]) -> Any:
    """Return transformers' own config of what a config.json says. Raises ConfigError for a model
    whose tokens see later ones, which attention here does not compute."""
    check_sizes(described, "config.json")
    _check_rope(described)
    config = _auto_config().for_model(**described)
    if getattr(config, "use_bidirectional_attention", False):
        raise ConfigError(
            f"this {config.model_type} has use_bidirectional_attention in its config.json: its "
            "tokens see later ones, so it is no causal language model; take one without"
        )
    return config


def _check_rope(described: Mapping[str, Any]) -> None:
    """Raise DataError for a way to turn places into angles that transformers does not know."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {"default", *ROPE_INIT_FUNCTIONS}
    for key in ("rope_scaling", "rope_parameters"):
        rope = described.get(key) or {}
        if not isinstance(rope, Mapping):
            continue
        # Gemma 3 has one description for each kind of attention, others have one for all.
        for of_layers in (rope, *rope.values()):
            if not isinstance(of_layers, Mapping):
                continue
            kind = of_layers.get("rope_type", of_layers.get("type", "default"))
            if kind not in known:
                raise DataError(
                    f"config.json: {key}: rope_type {kind!r:.100} is not one of "
                    f"{', '.join(sorted(known))}"
                )


def positions_of(config: Any) -> int:
    """Return for how many tokens of a document the model computes each as if no other document
    stood beside it.

    rope_type longrope has one table of angles for short texts and one for long ones, chosen by the
    longest document that is computed with it: there it is the length of short texts.
    """
    positions = min(MAX_LENGTH, int(config.max_position_embeddings))
    rope = getattr(config, "rope_parameters", None) or {}
    for of_layers in (rope, *rope.values()):
        if isinstance(of_layers, Mapping) and of_layers.get("rope_type") == "longrope":
            positions = min(positions, int(of_layers["original_max_position_embeddings"]))
    return positions


def config_of_stage(described: Mapping[str, Any]) -> Any:
    """Build the config that an exported stage describes, which another owner may have written.

    What is made of it is served, so it names no code. Raises DataError.
    """
    if described.get("model_type") not in KINDS:
        raise DataError(
            f"config.model_type of the stage is {described.get('model_type')!r:.100}; it can be "
            f"{', '.join(KINDS)}"
        )
    # Keys of the type's own default config are known to be harmless; others must be plain
    # attributes.
    plain = _auto_config().for_model(described["model_type"])
    known = plain.to_dict().keys() | {"model_type", "transformers_version"}
    for key in described.keys() - known:
        of_class = inspect.getattr_static(type(plain), key, None)
        is_code = callable(of_class) or isinstance(of_class, property | classmethod | staticmethod)
        if is_code or any(word in key for word in _LOADS_MORE):
            raise DataError(
                f"config.{key:.100} of the stage is nothing that a config file may set"
            )
    try:
        return config_of(described)
    except Exception as error:  # of whatever kind transformers and its checks raise
        said = " ".join(str(error).split())
        raise DataError(f"config of the stage: {said:.300}") from None


def network_of(config: Any, part: Part) -> Any:
    """With memory and buffers, its weights not set yet."""
    network = laid_out(config, part)
    give_memory(network, module=network)
    tie(network)
    return network


def _of_one_block(config: Any) -> Any:
    """Return the config of a model that has the first block alone, which is laid out at once."""
    num_blocks = config.num_hidden_layers
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    for name, value in vars(small).items():  # kinds of attention, block by block
        if isinstance(value, list) and len(value) == num_blocks:
            setattr(small, name, value[:1])
    return small


class _Undrawn(TorchFunctionMode):
    """Modules that draw no weights: on the meta device there is nothing to fill, and torch takes
    most of the time of a layout to find that out. It holds in one thread, unlike the way that
    transformers has."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return named["tensor"]
        return func(*args, **named)


def laid_out(config: Any, part: Part) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attend)
    # Laid out whole and then emptied, as the classes of transformers know nothing of parts.
    with torch.device("meta"), _Undrawn():
        network = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=ATTENTION, dtype=torch.float32, trust_remote_code=False
        )
    kind = KINDS[config.model_type]
    base = network.base_model
    blocks = getattr(base, kind.blocks)
    for number in range(config.num_hidden_layers):
        if number not in part.blocks:
            blocks[number] = Elsewhere()
        elif kind.experts:
            mixture = getattr(blocks[number], "mlp", None)
            # Some blocks of a mixture are dense.
            if (theirs := getattr(mixture, "experts", None)) is not None:
                # On the meta device, too: experts get memory with their block.
                with torch.device("meta"):
                    cast(Any, mixture).experts = Experts(theirs, kind.experts)
    if not part.is_first:
        for name in (kind.embeddings, *kind.first):
            setattr(base, name, Elsewhere())
    if not part.is_last:
        setattr(base, kind.norm, Elsewhere())
        setattr(network, HEAD, Elsewhere())
    # In training keys and values are kept by nobody; `run` asks for them when it writes.
    network.config.use_cache = False
    return network


class Past:
    """Keys and values of the tokens so far. Samples are one document each, of equal length."""

    def __init__(self) -> None:
        from transformers import DynamicCache

        self.keys_and_values = DynamicCache()  # without a config it drops nothing
        self.length = 0


def run(
    network: Any,
    places_BS: Tensor,
    ids_BS: Tensor | None,
    rows_BSH: Tensor | None,
    documents: Documents | None,
    past: Past | None = None,
    router_logits: list[Tensor] | None = None,
) -> Tensor:
    """Compute rows [B, S, H] from ids or rows.

    documents: the documents of a micro-batch whose rows stand one behind the other as one sample;
        None: each sample is one document.
    past: the keys and values of the tokens before these; those of these tokens are added to it.
    router_logits: a list to which the logits of each router are appended, [B * S, experts].
    """
    # Only what is wanted: not all models know each of these arguments.
    asked: dict[str, Any] = {}
    if documents is not None:
        asked["documents"] = documents
    if past is not None:
        asked["past_key_values"] = past.keys_and_values
        past.length += places_BS.shape[1]
    if router_logits is not None:
        asked["output_router_logits"] = True
    output = network.base_model(
        input_ids=ids_BS,
        inputs_embeds=rows_BSH,
        position_ids=places_BS,
        use_cache=past is not None,
        **asked,
    )
    if router_logits is not None:
        router_logits.extend(output.router_logits or ())
    return cast(Tensor, output.last_hidden_state)


def give_memory(network: Any, module: nn.Module) -> None:
    """To what has none yet; buffers are computed, weights not set."""
    for inner in module.modules():
        buffers = list(inner.buffers(recurse=False))
        if any(tensor.is_meta for tensor in (*inner.parameters(recurse=False), *buffers)):
            inner.to_empty(device="cpu", recurse=False)
            if buffers:
                network._init_weights(inner)  # rotation frequencies, embedding scales


def tie(network: Any) -> None:
    """The head to the embeddings, in a part that holds both."""
    words = network.get_input_embeddings()
    head = getattr(network, HEAD)
    if network.config.tie_word_embeddings and not {Elsewhere} & {type(words), type(head)}:
        head.weight = words.weight


def blocks_of(network: Any) -> Iterator[tuple[str, nn.Module]]:
    """(name, block), also of those that stand elsewhere."""
    blocks = KINDS[network.config.model_type].blocks
    for number, block in enumerate(getattr(network.base_model, blocks)):
        yield f"{network.base_model_prefix}.{blocks}.{number}", block


def draw_weights(network: Any, seed: int) -> None:
    """Draw weights as the model type does, with a random stream for each block."""
    kind = KINDS[network.config.model_type]
    prefix = network.base_model_prefix
    ends = [f"{prefix}.{name}" for name in (kind.embeddings, *kind.first, kind.norm)]
    blocks = dict(blocks_of(network))
    with torch.no_grad():
        for name in (*ends, *blocks, HEAD):
            # A stream for each block and end: weights do not depend on which stage draws them.
            with seeded(seed, "causal", name):
                for inner in network.get_submodule(name).modules():
                    network._init_weights(inner)


def place_in(files: WeightFiles, network: Any, name: str, is_tied: bool) -> str:
    """Return the name in a checkpoint's files of a parameter of the network. Raises DataError.

    is_tied: the embeddings and the head are one matrix, which has either name.
    """
    kind = KINDS[network.config.model_type]
    base = f"{network.base_model_prefix}."
    ends = [f"{base}{kind.embeddings}.weight", f"{HEAD}.weight"]
    meant = [name]
    if is_tied and name in ends:
        meant += [one for one in ends if one != name]
    # The second is of a file of the headless model.
    names = [(kind.in_file(one), kind.in_file(one).removeprefix(base), one) for one in meant]
    return files.first_of(*(one for of in names for one in of))


def check_checkpoint(name_or_path: str) -> list[str]:
    """Return which tensors of a checkpoint nothing reads. Raises DataError for one that is
    missing, that changes what others mean, or that is packed; weights are not read."""
    config = read_config(name_or_path)
    files = WeightFiles(name_or_path)
    if missing := files.missing():
        raise DataError(f"folder {name_or_path} has no {missing[0]}, which {INDEX} names")
    whole = Part(blocks=range(config.num_hidden_layers), is_first=True, is_last=True)
    network = laid_out(config, part=whole)
    is_tied = bool(config.tie_word_embeddings)
    names = {name for name, _ in network.named_parameters()} | {f"{HEAD}.weight"}
    read = {place_in(files, network, name, is_tied=is_tied) for name in sorted(names)}
    files.check_stored(read)
    kind = KINDS[config.model_type]
    inner = f"{network.base_model_prefix}.{kind.embeddings}.weight"
    embeddings, head = (
        place_in(files, network, name, is_tied=is_tied) for name in (inner, f"{HEAD}.weight")
    )
    # Both are in the file, and only one is read: they had better be equal.
    if is_tied and embeddings != head:
        if not torch.equal(files.tensor(embeddings), files.tensor(head)):
            raise DataError(
                f"checkpoint {name_or_path!r}: config.json says that embeddings and head are one "
                f"matrix (tie_word_embeddings), and {embeddings} and {head} differ; set it to "
                "false, or take one out"
            )
    return check_unread(name_or_path, {*files} - read, num_blocks=config.num_hidden_layers)


def load_weights(
    network: Any,
    name_or_path: str,
    weights: WeightFormat | None = "float32",
    end_block: Callable[[str, nn.Module], None] | None = None,
) -> None:
    """Fill this part, adapters aside, block by block. Each block gets its memory only then.

    weights: the type in which a frozen network keeps its matrices; None: as the checkpoint has
        them. Embeddings and head are never packed: beside int8 and nf4 they are as in the
        checkpoint.
    end_block: a function that is called with each full block's name and the block.
    Raises DataError for a tensor that is missing or of another shape.
    """
    files = WeightFiles(name_or_path)
    kind = KINDS[network.config.model_type]
    base = f"{network.base_model_prefix}."
    is_tied = read_config(name_or_path).tie_word_embeddings
    filled = set[str]()
    place_of = partial(place_in, files, network, is_tied=is_tied)

    def kind_at_end(name: str) -> WeightFormat:
        if weights is None or weights in PACKED:
            return files.dtype(place_of(name))
        return weights

    def keep(prefix: str, module: nn.Module) -> None:
        """Lay out the matrices of a block, or of the ends, as they are kept."""
        # A block; `network` stands for the ends, which come last.
        if module is not network:
            keep_matrices(
                module,
                kind_of=lambda name: (
                    weights or files.dtype(place_of(_of_base(f"{prefix}.{name}")))
                ),
            )
            return
        for inner in (kind.embeddings, *kind.first):
            table = getattr(network.base_model, inner)
            if isinstance(table, nn.Embedding):
                table_kind = kind_at_end(f"{base}{inner}.weight")
                if table_kind != "float32":
                    setattr(
                        network.base_model,
                        inner,
                        FrozenEmbedding(embedding=table, kind=table_kind),
                    )
        head = getattr(network, HEAD)
        if isinstance(head, nn.Linear):
            head.to(DTYPES[kind_at_end(f"{HEAD}.weight")])

    with torch.no_grad():
        # Block by block, as a block that is not filled yet takes no memory; the ends come last.
        for prefix, module in (*blocks_of(network), ("", network)):
            if weights != "float32":
                keep(prefix, module)
            give_memory(network, module)
            tie(network)
            for name, parameter in module.named_parameters(prefix):
                if name in filled or ".lora_" in name or name.endswith(".scales"):
                    continue  # filled with its block, or made here: no checkpoint has it
                filled.add(name)
                place = place_of(_of_base(name))
                tensor = files.tensor(place)
                owner = network.get_submodule(name.rpartition(".")[0])
                is_kept = isinstance(owner, FrozenMatrix) and parameter is owner.weight
                # A packed matrix has another shape than the one that the file has.
                expected = owner.stored_shape if is_kept else parameter.shape
                if tensor.shape != expected:
                    raise DataError(
                        f"checkpoint {name_or_path!r}: {place} is {list(tensor.shape)}, its "
                        f"config.json says {list(expected)}"
                    )
                if is_kept:
                    owner.fill(tensor)
                else:
                    parameter.copy_(tensor)
            if end_block is not None and prefix and not isinstance(module, Elsewhere):
                end_block(prefix, module)


def _of_base(name: str) -> str:
    """Return the name of a parameter in the network without adapters."""
    return name.replace(".base_layer.", ".")


def merged_weights(network: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight of a part by its name in a file, float32: what is kept in fewer bits is
    made dense first, then its adapter is added."""
    kind = KINDS[network.config.model_type]
    for name, parameter in network.named_parameters():
        if ".lora_" in name or name.endswith(".scales"):
            continue
        path, _, what = name.rpartition(".")
        owner = network.get_submodule(path)
        weight = parameter.detach().float()
        if isinstance(owner, FrozenMatrix) and what == "weight":
            weight = owner.stored()
        if path.endswith(".base_layer") and what == "weight":
            adapted = network.get_submodule(path.removesuffix(".base_layer"))
            weight = weight + adapted.get_delta_weight(ADAPTER).detach()
        # The path of an expert's matrix: MIXTURE.NUMBER.MATRIX.
        expert_path, _, matrix = path.rpartition(".")
        mixture_path, _, number = expert_path.rpartition(".")
        mixture = network.get_submodule(mixture_path)
        if isinstance(mixture, Experts):
            delta = mixture.delta(int(number), matrix)
            if delta is not None:
                weight = weight + delta.detach()
        yield kind.in_file(_of_base(name)), weight


def peft_name(name: str) -> str:
    """Return the name that peft has in a file for a parameter of an adapter."""
    # Of two adapters of one module the later wraps the earlier.
    name = name.replace(".experts.gate_up.lora_", ".experts.base_layer.lora_")
    name = name.replace(".experts.down.lora_", ".experts.lora_")
    return PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".").removesuffix(".weight") + ".weight"


def write_config(network: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    network.config.architectures = [type(network).__name__]
    (folder / "config.json").write_text(network.config.to_json_string(use_diff=False))


def write_checkpoint(network: Any, folder: Path) -> None:
    """Write what save_pretrained does, which writes on rank 0 of a process group only."""
    write_config(network, folder)
    kind = KINDS[network.config.model_type]
    tensors = {  # a tied matrix once
        kind.in_file(name): parameter.detach().cpu().contiguous()
        for name, parameter in network.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@settings("model.lora")
class Lora:
    """Low-rank adapters beside frozen matrices (Hu et al., arXiv:2106.09685):
    y = W x + (alpha / r) B A dropout(x), A drawn, B zero at the start.

    targets: the last names of the matrices in a block (q_proj, down_proj …); None: those that peft
        takes for this type of model.
    layers: the blocks that get adapters, counted from 0; None: all.
    experts: put adapters beside the matrices of experts, too. Gate and up share one, as they are
        one parameter in transformers (target_parameters of peft). Without dropout, as there.
    r: the rank of the adapters.
    alpha: the adapters are scaled by alpha / r.
    dropout: the share of an adapter's input features that is zeroed in training.
    """

    r: Positive = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0.0, le=0.99)] = 0.0
    targets: Annotated[Sequence[str], Field(min_length=1)] | None = None
    layers: Annotated[Sequence[int], Field(min_length=1)] | None = None
    experts: bool = False

    def check(self, config: Any) -> None:
        """Raise ConfigError for a matrix or a block that the model has not."""
        from transformers.pytorch_utils import Conv1D

        first = Part(blocks=range(1), is_first=False, is_last=False)
        _, block = next(blocks_of(laid_out(_of_one_block(config), part=first)))
        linears = (n for n, m in block.named_modules() if isinstance(m, nn.Linear | Conv1D))
        # peft takes these names for experts, in blocks without experts too.
        of_experts = KINDS[config.model_type].experts
        matrices = sorted({name.rsplit(".", 1)[-1] for name in linears} - set(of_experts))
        if unknown := sorted(set(self.targets_in(config)) - set(matrices)):
            has = "; experts get adapters by model.lora.experts=true" if of_experts else ""
            raise ConfigError(
                f"model.lora.targets: a block of this {config.model_type} has no "
                f"{', '.join(unknown)}; its matrices are {', '.join(matrices)}{has}"
            )
        if self.experts and not of_experts:
            raise ConfigError(
                f"model.lora.experts=true: this {config.model_type} has no experts; leave it out"
            )
        if self.experts and self.dropout:
            raise ConfigError(
                f"model.lora.experts=true: adapters of experts have no dropout, as in peft, and "
                f"model.lora.dropout is {self.dropout}: set it to 0"
            )
        for layer in self.layers or ():
            check(
                "model.lora.layers",
                value=layer,
                annotation=between(0, maximum=config.num_hidden_layers - 1),
            )

    def targets_in(self, config: Any) -> list[str]:
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as usual

        attention = ("q_proj", "v_proj")  # of types that peft has no list for
        return list(self.targets or sorted(usual.get(config.model_type, attention)))

    def adapts(self, config: Any, blocks: range) -> bool:
        layers = range(config.num_hidden_layers) if self.layers is None else self.layers
        return not set(blocks).isdisjoint(layers)

    def add_to(self, network: Any, part: Part) -> None:
        """Freeze the network and put adapters beside its targets, which `draw` starts."""
        from peft import inject_adapter_in_model

        network.requires_grad_(False)
        if self.adapts(network.config, blocks=part.blocks):
            # peft draws as it adds; that must not move the random numbers of the run.
            with seeded(0, "replaced by draw"):
                inject_adapter_in_model(self.adapter_config(network.config), network, ADAPTER)
        if self.experts:
            layers = self.layers
            if layers is None:
                layers = range(network.config.num_hidden_layers)
            for number, (_, block) in enumerate(blocks_of(network)):
                for experts in block.modules() if number in layers else ():
                    if isinstance(experts, Experts):
                        with torch.device("meta"):
                            experts.add_adapters(self.r, scale=self.alpha / self.r)

    def draw(self, prefix: str, block: nn.Module, seed: int) -> None:
        """Start the adapters of a block called `prefix`, from the seed and their names alone."""
        from peft.tuners.lora import LoraLayer

        for name, module in block.named_modules(prefix=prefix):
            if isinstance(module, LoraLayer):
                with seeded(seed, "lora", name):
                    module.reset_lora_parameters(ADAPTER, True)  # type: ignore[no-untyped-call]
            elif isinstance(module, ExpertAdapters):
                with seeded(seed, "lora", name):
                    module.draw()

    def adapter_config(self, config: Any, base: str | None = None) -> Any:
        """peft's own. base: folder or hub id of the model; of adapters that are written."""
        from peft import LoraConfig

        layers = sorted(self.layers) if self.layers is not None else None
        blocks = KINDS[config.model_type].blocks
        parameters = None
        if self.experts and base is not None:
            # layers_to_transform says nothing of parameters.
            where = [""] if layers is None else [f"{blocks}.{number}." for number in layers]
            parameters = [
                f"{at}mlp.experts.{name}_proj" for at in where for name in EXPERT_PARAMETERS
            ]
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets_in(config),
            layers_to_transform=layers,
            target_parameters=parameters,
            layers_pattern=None if layers is None else blocks,
            task_type="CAUSAL_LM",
            fan_in_fan_out=config.model_type == "gpt2",  # its matrices are stored transposed
            base_model_name_or_path=base,
            inference_mode=base is not None,
        )

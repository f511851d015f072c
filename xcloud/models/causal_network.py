"""Parts of a `transformers` causal language model: its embeddings, some of its blocks, its head.
What a stage sends and loses is causal_stage.py's; where weights come from is causal_base.py's.

The network is laid out on torch's "meta" device, which costs no memory; what other stages hold is
taken out, and only what is left is given memory and weights, one block after another. Names stay
those of the whole model.

Shapes: B samples, S positions, H features.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from xcloud.base.errors import ConfigError
from xcloud.models.checkpoint import fetch, quiet

HEAD = "lm_head"
Masks = Tensor | None | dict[str, Tensor | None]


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
    from transformers import PreTrainedConfig

    raw, _ = fetch(
        name_or_path, lambda name, **where: PreTrainedConfig.get_config_dict(name, **where)
    )
    check_type(raw.get("model_type"), f"the checkpoint {name_or_path!r}")
    return config_of(raw)


def config_of(described: Mapping[str, Any]) -> Any:
    """The transformers config that a config.json describes."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**described)


def check_type(model_type: object, what: str) -> None:
    """Raise ConfigError unless this is a causal language model that can be cut here."""
    if model_type not in KINDS:
        raise ConfigError(
            f"{what} is of type {model_type!r}; causal language models that can be cut are "
            f"{', '.join(KINDS)}"
        )


def depth(config: Any) -> int:
    return int(config.num_hidden_layers)


def ties_words(config: Any) -> bool:
    """Whether the head's matrix is that of the embeddings."""
    return bool(getattr(config, "tie_word_embeddings", False))


@dataclass(frozen=True)
class Part:
    """What a stage holds: some blocks, the embeddings (is_first), norm and head (is_last)."""

    blocks: range
    is_first: bool
    is_last: bool


def skeleton(config: Any) -> Any:
    """The whole model without memory, in float32."""
    from transformers import AutoModelForCausalLM

    # Only eager attention knows the soft cap of Gemma 2's scores.
    way = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
    with quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=way, dtype=torch.float32
        )


def network_of(config: Any, part: Part) -> Any:
    """The part of the model, with memory and with buffers, its weights not set yet."""
    network = laid_out(config, part)
    give_memory(network, network)
    tie(network)
    return network


def laid_out(config: Any, part: Part) -> Any:
    """The part of the model, without memory."""
    network = skeleton(config)
    kind, base = KINDS[config.model_type], base_of(network)
    blocks = getattr(base, kind.blocks)
    for number in range(depth(config)):
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
    words, head = _words_module(network), getattr(network, HEAD)
    if ties_words(network.config) and not {Elsewhere} & {type(words), type(head)}:
        head.weight = words.weight


def base_of(network: Any) -> Any:
    """The model without its head."""
    return getattr(network, KINDS[network.config.model_type].base)


def words_of(network: Any) -> nn.Parameter:
    """The matrix of the embeddings, in the first stage."""
    words: nn.Parameter = _words_module(network).weight
    return words


def _words_module(network: Any) -> Any:
    return getattr(base_of(network), KINDS[network.config.model_type].embeddings)


def blocks_of(network: Any) -> Iterator[tuple[str, nn.Module]]:
    """(name, block), also of those that stand elsewhere."""
    kind, base = KINDS[network.config.model_type], base_of(network)
    for number, block in enumerate(getattr(base, kind.blocks)):
        yield f"{kind.base}.{kind.blocks}.{number}", block


def held(network: Any) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of what this part holds: embeddings, single blocks, norm, head."""
    kind, base = KINDS[network.config.model_type], base_of(network)
    for name in (kind.embeddings, *kind.first, kind.norm):
        yield f"{kind.base}.{name}", getattr(base, name)
    yield from blocks_of(network)
    yield HEAD, getattr(network, HEAD)


def linear_names(config: Any) -> list[str]:
    """Last names of the matrices in a block, which LoRA may adapt."""
    from transformers.pytorch_utils import Conv1D

    network = skeleton(config)
    block = getattr(base_of(network), KINDS[config.model_type].blocks)[0]
    linears = (name for name, m in block.named_modules() if isinstance(m, nn.Linear | Conv1D))
    return sorted({name.rsplit(".", 1)[-1] for name in linears})


def block_number(config: Any, name: str) -> int | None:
    """Of a parameter's name, the block that it lies in."""
    kind = KINDS[config.model_type]
    found = re.search(rf"{kind.base}\.{kind.blocks}\.(\d+)\.", name)
    return int(found[1]) if found else None


def same_attention() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """For what is computed again in the backward: by the kernel of the forward, which the trainer
    chooses for its precision."""
    # The switch is that of CPUs too.
    is_fused = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return nullcontext(), nullcontext() if is_fused else sdpa_kernel(SDPBackend.MATH)


def packed_places(types_BS: Tensor) -> Tensor:
    """Position of each token in its document, from 0."""
    order_BS = torch.arange(types_BS.shape[1], device=types_BS.device).expand_as(types_BS)
    begins = torch.ones_like(types_BS, dtype=torch.bool)
    begins[:, 1:] = types_BS[:, 1:] != types_BS[:, :-1]
    starts_BS = torch.where(begins, order_BS, 0).cummax(1).values
    return order_BS - starts_BS


def attention_masks(config: Any, places_BS: Tensor, num_new: int | None = None) -> Masks:
    """What the model's forward takes as attention_mask, float32 [B, 1, S, S]: 0 where a token may
    look, else very low. A token sees itself and what stands before it in its own document. None
    where samples are one document each: attention then needs no memory in the square of S. All
    layers share a mask, 4 bytes a pair of tokens: 1.1 GB for a sample of 16,384.

    places_BS: position of each token in its document; 0 begins one. num_new: only the rows of so
    many last tokens are wanted; None: all.
    """
    begins_BS, length = places_BS == 0, places_BS.shape[1]
    documents_BS = begins_BS.cumsum(1, dtype=torch.int32)
    before = 0 if num_new is None else length - num_new
    window = getattr(config, "sliding_window", None) or length
    is_plain = not before and config._attn_implementation == "sdpa" and not begins_BS[:, 1:].any()

    def mask_of(window: int) -> Tensor | None:
        if is_plain and window >= length:
            return None
        # In place: each [S, S] more would be felt.
        sees = documents_BS[:, None, before:, None] == documents_BS[:, None, None]
        hidden = sees.tril_(before).triu_(before - window + 1).logical_not_()
        mask = torch.zeros(hidden.shape, device=hidden.device)
        return mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)

    full = mask_of(length)
    near = full if window >= length else mask_of(window)
    if KINDS[config.model_type].by_type:
        return {"full_attention": full, "sliding_attention": near}
    return near


class Past:
    """What a part's blocks keep of the tokens so far: keys and values, and where tokens stand.
    Samples of equal length, without padding."""

    def __init__(self) -> None:
        from transformers import DynamicCache

        self.keys_and_values = DynamicCache()  # without a config it drops nothing; masks do
        self.places_BS: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.places_BS is None else self.places_BS.shape[1]

    def add(self, places_BS: Tensor) -> Tensor:
        """Places of all tokens, these last."""
        before = [] if self.places_BS is None else [self.places_BS]
        self.places_BS = torch.cat([*before, places_BS], 1)
        return self.places_BS


def run(
    network: Any,
    places_BS: Tensor,
    ids_BS: Tensor | None,
    rows_BSH: Tensor | None,
    past: Past | None = None,
) -> Tensor:
    """Through this part's embeddings (ids) or from rows, its blocks and its norm: [B, S, H].
    past: of the tokens before these, which are added to it."""
    cache, seen_BS = None, places_BS
    if past is not None:
        cache, seen_BS = past.keys_and_values, past.add(places_BS)
    masks = attention_masks(network.config, seen_BS, places_BS.shape[1])
    output = base_of(network)(
        input_ids=ids_BS, inputs_embeds=rows_BSH, attention_mask=masks, position_ids=places_BS,
        past_key_values=cache, use_cache=cache is not None,
    )  # fmt: skip
    rows: Tensor = output.last_hidden_state
    return rows

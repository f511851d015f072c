"""The network of the benchmark Protocol NanoGPT as a model type of transformers, so that
causal_network.py can cut it as it cuts the others. Importing this module registers it.

Source: PluralisResearch/ProtocolNanoGPT, train_gpt.py, at 0551bc3b; it descends from
modded-nanogpt's records/track_3_optimization. Settings of a new one: scratch.py.

Shapes: B samples, S positions, H features, N heads of F features.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from xcloud.models.document_attention import attend

MODEL_TYPE = "protocol_gpt"
LOWEST_FREQUENCY = 1 / 1024
SCALE_OF_128 = 0.12  # of attention scores, for heads of 128 features
EMBEDDING_STD = 0.0056
"""The benchmark draws embeddings with 1 and gives them a learning rate of 0.7, 180 times that of
the other parameters here. Behind a norm only the ratio of the two counts, so that small
embeddings learn as fast with the one learning rate that a run here has."""


class ProtocolGptConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    model_type = MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = 50_304,
        hidden_size: int = 1024,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 8,
        max_position_embeddings: int = 1024,
        final_logit_root_cap: float = 15.0,
        **more: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.final_logit_root_cap = final_logit_root_cap
        more.setdefault("tie_word_embeddings", False)
        super().__init__(**more)


def rotated(rows_BSNF: Tensor, places_BS: Tensor) -> Tensor:
    """Turn pairs of features by an angle that grows with the place. Half of the pairs turn, with
    frequencies from 1 down to 1 / 1024; the others stay."""
    num_turned = rows_BSNF.shape[3] // 4
    exponents = torch.linspace(0, 1, steps=num_turned, device=rows_BSNF.device)
    # A frequency of zero is an angle of zero: that half of the pairs stays.
    frequencies = F.pad(LOWEST_FREQUENCY**exponents, (0, num_turned))
    angle = (places_BS.float()[:, :, None] * frequencies)[:, :, None]
    cos = angle.cos()
    sin = angle.sin()
    first, second = rows_BSNF.float().chunk(2, dim=3)
    turned = torch.cat((first * cos + second * sin, second * cos - first * sin), 3)
    return turned.type_as(rows_BSNF)


class ZeroStartLinear(nn.Linear):
    """A linear layer whose weights start as zeros: the last of each branch and the head, so a new
    network hands rows on as they are and guesses all tokens alike."""


class Attention(nn.Module):
    def __init__(self, config: ProtocolGptConfig, number: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.number = number
        self.num_heads = config.num_attention_heads
        # The benchmark's constant for its heads, scaled as 1 / sqrt(F) is for others.
        self.scale = SCALE_OF_128 * (128 / (width // self.num_heads)) ** 0.5
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = ZeroStartLinear(width, width)

    def forward(
        self, rows_BSH: Tensor, position_ids: Tensor, past_key_values: Any, **asked: Any
    ) -> Tensor:
        heads = (
            torch.unflatten(product(rows_BSH), 2, (self.num_heads, -1))
            for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key, value = heads
        size = query.shape[3:]
        # Queries and keys of one length: scores are cosines, times the scale.
        query = rotated(F.rms_norm(query, size), position_ids).transpose(1, 2)
        key = rotated(F.rms_norm(key, size), position_ids).transpose(1, 2)
        value = value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.number)
        mixed, _ = attend(self, query, key, value, None, scaling=self.scale, **asked)
        return cast(Tensor, self.o_proj(mixed.flatten(2)))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, 4 * width)
        self.down_proj = ZeroStartLinear(4 * width, width)

    def forward(self, rows_BSH: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(self.up_proj(rows_BSH).relu().square()))


class Block(GradientCheckpointingLayer):  # type: ignore[no-untyped-call]
    def __init__(self, config: ProtocolGptConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size)
        self.self_attn = Attention(config, number)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size)
        self.mlp = FeedForward(config.hidden_size)

    def forward(self, rows_BSH: Tensor, **asked: Any) -> Tensor:
        rows_BSH = rows_BSH + self.self_attn(self.attention_norm(rows_BSH), **asked)
        return cast(Tensor, rows_BSH + self.mlp(self.feed_forward_norm(rows_BSH)))


class _OfProtocolGpt(PreTrainedModel):  # type: ignore[no-untyped-call]
    config_class = ProtocolGptConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_attention_backend = True
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.normal_(std=EMBEDDING_STD)
        elif isinstance(module, nn.RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear):
            if isinstance(module, ZeroStartLinear):
                module.weight.zero_()
            else:
                module.weight.normal_(std=(0.33 / module.in_features) ** 0.5)
            assert module.bias is not None
            module.bias.zero_()


class ProtocolGptModel(_OfProtocolGpt):  # type: ignore[no-untyped-call]
    def __init__(self, config: ProtocolGptConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_norm = nn.RMSNorm(config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, number) for number in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        position_ids: Tensor,
        past_key_values: Any = None,
        **asked: Any,
    ) -> BaseModelOutputWithPast:
        rows_BSH = inputs_embeds
        if rows_BSH is None:
            rows_BSH = self.embed_norm(self.embed_tokens(input_ids))
        for block in self.layers:
            rows_BSH = block(
                rows_BSH, position_ids=position_ids, past_key_values=past_key_values, **asked
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(rows_BSH))


class ProtocolGptForCausalLM(_OfProtocolGpt):  # type: ignore[no-untyped-call]
    def __init__(self, config: ProtocolGptConfig) -> None:
        super().__init__(config)
        self.model = ProtocolGptModel(config)
        self.lm_head = ZeroStartLinear(config.hidden_size, config.vocab_size)
        self.post_init()  # type: ignore[no-untyped-call]


AutoConfig.register(MODEL_TYPE, ProtocolGptConfig)
AutoModel.register(ProtocolGptConfig, ProtocolGptModel)
AutoModelForCausalLM.register(ProtocolGptConfig, ProtocolGptForCausalLM)

"""What the tests of causal language models share: tiny checkpoints of every kind, batches, the
settings of a small run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.translation_models import context
from tests.understanding_models import RandomText
from xcloud.comm.channel import Message
from xcloud.contracts.model import NO_LABEL, NO_TOKEN, Batch, BuildContext, Stage
from xcloud.models.causal import CausalLM
from xcloud.models.causal_stage import NextTokenPretraining, OwnCausal

WORDS, WIDTH, BLOCKS = 40, 16, 4
SMALL = [
    "+exp=lora_clm", "tracker=none", "compression=none", "training.max_steps=4",
    "training.batch_size=8", "task.data.num_train=60", "task.data.num_dev=10",
    "task.data.num_test=10",
    "task.tokenizer.vocab_size=400", "task.max_length=64", "model.own.hidden=32",
    "model.own.num_texts=200", "model.own.feed_forward=64", "model.own.pretraining.steps=30",
    "model.lora.dropout=0.1", "training.optimizer.warmup_steps=1",
    "training.precision=fp32",  # as the bounds; auto may be bf16
]  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 4},
    "gemma2": {"head_dim": 4, "sliding_window": 3, "final_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 4, "sliding_window": 3},
    "gpt2": NO_DROPOUT | {"loss_type": "ForCausalLM"},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    },
}  # fmt: skip


def theirs(kind: str, **changes: Any) -> Any:
    """The model of transformers, weights large enough for every block to matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind] | changes))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(std=0.4)
    return network.eval()


def saved(kind: str, folder: Path, **changes: Any) -> Any:
    """theirs(), and its folder filled."""
    network = theirs(kind, **changes)
    network.save_pretrained(folder)
    return network


def folder_in(kind: str, folder: Path, dtype: torch.dtype, **changes: Any) -> Any:
    """A checkpoint of this dtype; returns transformers' model of its values."""
    network = saved(kind, folder, **changes).to(dtype)
    network.save_pretrained(folder)
    return network.float()


def where(cache_dir: Path, **changes: Any) -> BuildContext:
    return context(cache_dir, fields=[], **changes)


def build(model: CausalLM, num_stages: int, at: BuildContext) -> list[Stage]:
    return [
        model.build_stage(n, num_stages, replace(at, vocabularies={})) for n in range(num_stages)
    ]


def batch_of(*samples: Sequence[Sequence[int]]) -> Batch:
    """Each sample a list of documents, all of it to be guessed."""
    lines: dict[str, list[Tensor]] = {"text": [], "types": [], "label": []}
    for documents in samples:
        lines["text"].append(torch.tensor([t for d in documents for t in d]))
        lines["types"].append(torch.tensor([n for n, d in enumerate(documents) for _ in d]))
        lines["label"].append(torch.tensor([t for d in documents for t in [*d[1:], NO_LABEL]]))
    fill = {"text": NO_TOKEN, "types": 0, "label": NO_LABEL}
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {k: pad(v, batch_first=True, padding_value=fill[k]) for k, v in lines.items()}
    return {"ids": torch.arange(len(samples)), **batch}


def words(count: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, WORDS, (count,), generator=draw).tolist()


def through(stages: Sequence[Stage], batch: Batch) -> Message | None:
    """What reaches the last stage."""
    message: Message | None = None
    for stage in stages[:-1]:
        message = stage(message, batch).send
    return message


def loss_of(stages: Sequence[Stage], batch: Batch) -> Tensor:
    loss = stages[-1](through(stages, batch), batch).loss
    assert loss is not None
    return loss


def next_words(stages: Sequence[Stage], batch: Batch) -> Tensor:
    """Logits behind each sample."""
    with torch.no_grad():
        return stages[-1].eval().next_words(through([s.eval() for s in stages], batch), batch)


def own(**changes: Any) -> OwnCausal:
    steps = changes.pop("steps", 3)
    sizes = {"num_texts": 40, "hidden": 16, "num_layers": 2, "num_heads": 2, "feed_forward": 32}
    pretraining = NextTokenPretraining(steps=steps, batch_size=4, length=12, warmup_steps=1)
    return OwnCausal(RandomText(), **(sizes | {"pretraining": pretraining} | changes))

"""Random transformers checkpoints, small and saved, to be read as pre-trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.translation_models import IDS

SIZES: dict[str, Any] = {
    "vocab_size": IDS.size,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
}
OFFSET = {"pad_token_id": 1, "max_position_embeddings": 26, "type_vocab_size": 1}
KINDS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_act": "gelu_new"},
    "roberta": OFFSET,
    "xlm-roberta": OFFSET,
    "camembert": OFFSET,
    "ernie": {"use_task_id": True, "hidden_act": "relu"},
    "electra": {"embedding_size": 16},
}


def saved(folder: Path, model_type: str, *, head: bool = True, **changes: Any) -> Any:
    """A random transformers model, saved; no parameter is trivial, so that a lost one shows."""
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

    config = AutoConfig.for_model(model_type, **(SIZES | KINDS[model_type] | changes))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = (AutoModelForMaskedLM if head else AutoModel).from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def padded_ids(pad: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(2, IDS.size, (4, 9), generator=draw)
    for line, count in enumerate((9, 4, 1, 6)):
        ids[line, count:] = pad
    return ids

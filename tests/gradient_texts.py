"""Texts, a small causal model that learns them, and the gradients it gives."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tests.causal_models import batch_of, loss_of, saved
from tests.causal_models import build as build_causal
from tests.causal_models import where as where_causal
from xcloud.contracts.model import Batch, Stage
from xcloud.models.causal import CausalLM
from xcloud.models.causal_network import Lora

TEXTS = [[3, 9, 4, 11], [20, 21, 9]]


def causal(kind: str, folder: Path, lora: Lora | None = None) -> Stage:
    saved(kind, folder / "model")
    (stage,) = build_causal(CausalLM(str(folder / "model"), lora=lora), 1, where_causal(folder))
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if ".lora_B." in name:  # zero at the start of training
                parameter.normal_(std=0.1)
    return stage


def run(stage: Stage, ids_NS: Tensor) -> None:
    zeros = torch.zeros_like(ids_NS)
    stage(None, {"ids": zeros[:, 0], "text": ids_NS, "types": zeros, "label": zeros - 100})


def gradients(stages: list[Stage], batch: Batch) -> dict[str, Tensor]:
    """Of the first stage, by parameter name."""
    (loss_of(stages, batch) / 7).backward()
    return {n: p.grad for n, p in stages[0].named_parameters() if p.grad is not None}


def as_batch(texts: list[list[int]]) -> Batch:
    return batch_of(*([text] for text in texts))

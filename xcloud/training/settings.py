"""How a run trains: sizes, lengths, precision. Nothing runs here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from xcloud.base.settings import NotNegative, NotNegativeFloat, Positive, settings
from xcloud.training.divergence import OnDivergence
from xcloud.training.optimizer import Optimizer


@settings("training.checkpoint")
class Checkpoints:
    """When a run saves what it can go on from (survive/checkpointing.py).

    every_steps, every_minutes: whichever comes first; 0 = not for this reason, both 0 = never.
    keep: of the checkpoints that all ranks have completed, the newest so many.
    """

    every_steps: NotNegative = 500
    every_minutes: NotNegativeFloat = 10.0
    keep: Positive = 2

    @property
    def are_made(self) -> bool:
        return bool(self.every_steps or self.every_minutes)


@settings("training")
class Training:
    """batch_size: samples of one update, over all ranks and accumulation steps together.

    accumulate_steps: passes over the pipeline for one update; each pass has
    schedule.num_micro_batches micro-batches of batch_size / (passes * micro-batches) samples.
    precision: fp32; bf16 = autocast; auto = bf16 where the device multiplies it fast (a GPU with
    bf16, a CPU with AMX), else fp32. Boundary tensors and optimizer states stay FP32.
    evaluate_every: updates between evaluations on the dev split; 0 = only at the end.
    eval_samples: at most so many samples of a split are scored (the first ones); None = all.
    activation_cache_mb: where all that lies before a boundary between clouds is frozen, a rank
    behind it keeps up to so many megabytes of the rows that cross there (10**6 bytes,
    at each boundary),
    which then cross in the first epoch only. 0 = none.
    on_divergence: what to do with an update whose loss or gradient is not finite in any cloud:
    stop the run, or skip the update in every rank, at most max_skips_in_a_row times in a row.
    """

    max_steps: Positive
    batch_size: Positive = 64
    accumulate_steps: Positive = 1
    precision: Literal["fp32", "bf16", "auto"] = "auto"
    evaluate_every: NotNegative = 0
    eval_batch_size: Positive = 64
    eval_samples: Positive | None = None
    activation_cache_mb: NotNegative = 0
    on_divergence: OnDivergence = "stop"
    max_skips_in_a_row: Positive = 10
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)


def resolve_precision(precision: str, device: torch.device) -> str:
    """fp32 or bf16."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return "bf16" if torch.cpu._is_amx_tile_supported() else "fp32"


def autocast_for(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    if resolve_precision(precision, device) == "fp32":
        return nullcontext
    if device.type == "cpu":
        return _bf16_on_cpu
    return lambda: torch.autocast(device.type, torch.bfloat16)


@contextmanager
def _bf16_on_cpu() -> Iterator[None]:
    """Attention by plain products: the fused kernel's backward in bf16 is 3 to 7 times slower on
    CPUs with short texts, the products are not (torch 2.13, 16 to 96 tokens)."""
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        yield

"""How a run trains: sizes, lengths, precision, optimizer. Nothing runs here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import field
from inspect import unwrap
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from xcloud.base.settings import NotNegative, NotNegativeFloat, Positive, PositiveFloat, settings
from xcloud.feature_settings import OfTraining

OnDivergence = Literal["stop", "skip"]


class AdamW(torch.optim.AdamW):
    """torch's, whose methods are marked for torch.compile: the first call of a marked one imports
    the compiler, 2 s of a rank's start. Nothing is compiled here, so these go without the mark."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


@settings("optimizer")
class Optimizer:
    """AdamW, with a learning rate that rises linearly and then follows `decay`.

    learning_rate: highest learning rate, reached at the end of the warm-up.
    warmup_steps: updates in which the learning rate rises from 0.
    decay: the learning rate after the warm-up. inverse_sqrt = learning_rate * sqrt(warmup_steps /
        step) (AB-Net's, arXiv:2010.06138); linear = falls to 0 after max_steps; constant = stays.
    betas: decay of the running mean of gradients, and of that of their squares.
    eps: number added to the root of the mean square, against divisions by 0.
    weight_decay: factor of the decay of matrices, embeddings included. Biases and the gains of
        norms (parameters of fewer than two axes) do not decay, as in BERT (arXiv:1810.04805) and
        nanoGPT.
    clip_norm: bound on the norm of the full model's gradient, over all clouds; 0 = off.
    """

    learning_rate: PositiveFloat = 5e-4
    warmup_steps: NotNegative = 4000
    decay: Literal["inverse_sqrt", "linear", "constant"] = "inverse_sqrt"
    betas: Annotated[
        Sequence[Annotated[float, Field(ge=0.0, le=0.999999)]], Field(min_length=2, max_length=2)
    ] = (0.9, 0.98)
    eps: PositiveFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.0
    clip_norm: NotNegativeFloat = 0.0

    def learning_rate_at(self, step: int, max_steps: int) -> float:
        """Return the learning rate of update `step` (1-based), never above the peak. With
        decay=linear it is 0 for any step after max_steps: to train longer, raise max_steps."""
        warmup = max(1, self.warmup_steps)
        if step < warmup:
            return self.learning_rate * step / warmup
        if self.decay == "inverse_sqrt":
            return self.learning_rate * math.sqrt(warmup / step)
        if self.decay == "linear":
            # It reaches 0 one step behind the last, so that the last update moves something, too.
            left = max_steps - step + 1
            whole = max_steps - warmup + 1
            if left > 0:
                return self.learning_rate * (left / whole)
            return 0.0
        return self.learning_rate

    @property
    def adam_betas(self) -> tuple[float, float]:
        return float(self.betas[0]), float(self.betas[1])

    def build(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of a module's trained parameters."""
        groups = self.groups(p for p in module.parameters() if p.requires_grad)
        # On CPUs one pass over the memory instead of ten: 20 ms instead of 150 for 12.9 M weights.
        # The same formula, rounded in another order; the same bits for any number of threads.
        # On a GPU one kernel instead of a dozen.
        devices = {p.device for group in groups for p in group["params"]}
        fused = True if len(devices) == 1 and devices.pop().type in ("cpu", "cuda") else None
        return AdamW(groups, self.learning_rate, self.adam_betas, self.eps, fused=fused)

    def groups(self, trained: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        """Return the parameter groups of AdamW: those that decay, and those that do not."""
        every = list(trained)
        decayed = {"params": [p for p in every if p.ndim >= 2], "weight_decay": self.weight_decay}
        spared = {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0}
        return [group for group in (decayed, spared) if group["params"]]


@settings("training.checkpoint")
class Checkpoints:
    """When a run saves a checkpoint to resume from (features/checkpoints/checkpointing.py).

    every_steps: updates between checkpoints. 0 = no checkpoint for this reason.
    every_minutes: minutes between checkpoints. 0 = no checkpoint for this reason. Whichever of the
        two is reached first applies; if both are 0, no checkpoint is saved.
    keep: number of checkpoints to keep: the newest that all ranks have completed.
    """

    every_steps: NotNegative = 500
    every_minutes: NotNegativeFloat = 10.0
    keep: Positive = 2

    @property
    def are_made(self) -> bool:
        return bool(self.every_steps or self.every_minutes)


@settings("training")
class Updates:
    """How many updates are made, and of what.

    max_steps: number of updates of the run.
    batch_size: number of samples of one update, over all ranks and accumulation steps together.
    accumulate_steps: number of passes over the pipeline for one update. Each pass has
        schedule.num_micro_batches micro-batches of batch_size / (passes * micro-batches) samples.
    precision: fp32; bf16 = autocast; auto = bf16 if the device multiplies it fast (a GPU with
        bf16, a CPU with AMX), else fp32. Boundary tensors and optimizer states stay FP32.
    on_divergence: action if, in any cloud, an update's loss or gradient is not finite, or is so
        large that the optimizer's squares of it would not be (1.8e19 in FP32, not clipped). stop =
        the run stops; skip = the update is skipped in every rank.
    max_skips_in_a_row: number of updates in a row that may be skipped. One more stops the run.
    """

    max_steps: Positive
    batch_size: Positive = 64
    accumulate_steps: Positive = 1
    precision: Literal["fp32", "bf16", "auto"] = "auto"
    on_divergence: OnDivergence = "stop"
    max_skips_in_a_row: Positive = 10


@settings("training")
class Training(OfTraining, Updates):
    """Updates, with evaluations and checkpoints between them.

    evaluate_every: updates between evaluations on the dev split; 0 = only at the end.
    eval_batch_size: number of samples that are scored at a time.
    eval_samples: maximum number of samples of a split that are scored, its first ones. None = all.
    activation_cache_mb: megabytes (10**6 bytes), at each boundary, of a cache of the rows that
        cross there. It is kept by a rank behind a boundary between clouds if all that lies before
        the boundary is frozen. The rows then cross in the first epoch only. 0 = no cache.
    optimizer: the learning rate, decay and bounds of the optimizer.
    checkpoint: when the run saves a checkpoint to resume from.
    """

    evaluate_every: NotNegative = 0
    eval_batch_size: Positive = 64
    eval_samples: Positive | None = None
    activation_cache_mb: NotNegative = 0
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)

    def is_evaluated(self, step: int) -> bool:
        """Return whether the dev split is scored after this update."""
        several = (self.evaluate_every, self.until.every if self.until is not None else 0)
        return any(every and step % every == 0 for every in several)


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return fp32 or bf16; of `auto` bf16 where the device multiplies it in hardware."""
    if precision != "auto":
        return precision
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported()
    else:
        has_bf16 = torch.cpu._is_amx_tile_supported()
    if has_bf16:
        return "bf16"
    return "fp32"


def is_emulated(precision: str, device: torch.device) -> bool:
    """bf16 on a CPU that multiplies it in software: some 50 times slower than fp32."""
    chosen = device.type == "cpu" and resolve_precision(precision, device=device) == "bf16"
    return chosen and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def autocast_for(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    if resolve_precision(precision, device=device) == "fp32":
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

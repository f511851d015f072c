"""Puts off the gradients of linear layers' weights, so that a backward gives those of activations
first. Works on any model from outside; knows no pipeline.

Shapes: N rows (samples and positions), I inputs, O outputs of a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def can_wait(module: nn.Module) -> list[nn.Module]:
    """The layers in `module` whose weights may wait: nn.Linear and GPT-2's Conv1D with a trained
    weight that is theirs alone, not also a table of embeddings."""
    holders = Counter(p for part in module.modules() for p in part._parameters.values())
    return [
        part
        for part in module.modules()
        if (type(part).forward is nn.Linear.forward or _is_conv1d(part))
        and part.weight.requires_grad
        and holders[part.weight] == 1  # type: ignore[index]
    ]


class DeferredWeights:
    """Entered around the forward and around the backward of one micro-batch:

        deferred = DeferredWeights(can_wait(stage))
        with deferred:
            loss = stage(...)
        with deferred:  # a forward may be computed again
            loss.backward()
        deferred.compute()  # adds what was put off

    Put off are weight and bias of these layers wherever their input has a gradient; all other
    parameters get theirs in the backward. Until `compute` autograd keeps the layers' inputs and
    output gradients as it keeps activations, so hooks on saved tensors see them. Gradients are
    bit-equal to those of one backward, unless a forward calls a layer more than twice: then their
    sum is rounded in another order.

    Not for parameters that are sharded over ranks: they are gone once their layer's backward ends.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._kept: list[Tensor] = []

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.forward = partial(_forward, layer, self._kept)

    def __exit__(self, *raised: object) -> None:
        for layer in self._layers:
            del layer.forward  # that of its class again

    def compute(self) -> None:
        """Add what was put off to `.grad`."""
        if self._kept:
            torch.autograd.backward(self._kept)
        self._kept.clear()


def _is_conv1d(layer: nn.Module) -> bool:
    """Of transformers: its weight is [I, O]."""
    return type(layer).__name__ == "Conv1D"


def _weight_OI(layer: Any, dtype: torch.dtype) -> Tensor:
    weight: Tensor = layer.weight.t() if _is_conv1d(layer) else layer.weight
    return weight.to(dtype)


def _forward(layer: nn.Module, kept: list[Tensor], rows: Tensor) -> Tensor:
    """In place of the layer's own."""
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    elif rows.dtype != layer.weight.dtype:
        return type(layer).forward(layer, rows)  # type: ignore[no-any-return]  # says what is wrong
    if not (torch.is_grad_enabled() and rows.requires_grad and rows.dim() > 1):
        return type(layer).forward(layer, rows)  # type: ignore[no-any-return]
    return _Linear.apply(rows, layer, kept)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    """The layer's output. The backward gives the gradient of its input and keeps what those of
    weight and bias are made of."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, layer: Any, kept: list[Tensor]) -> Tensor:
        ctx.layer, ctx.kept = layer, kept
        ctx.save_for_backward(rows)
        # Not cast by autocast, which would keep a copy without a graph for later calls.
        weight_OI = _weight_OI(layer, rows.dtype)
        bias = None if layer.bias is None else layer.bias.to(rows.dtype)
        return nn.functional.linear(rows, weight_OI, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), layer = ctx.saved_tensors, ctx.layer
        with torch.enable_grad():
            ctx.kept.append(
                _Weight.apply(  # type: ignore[no-untyped-call]
                    layer.weight, layer.bias, rows.detach(), gradient.detach(), _is_conv1d(layer)
                )
            )
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        to_rows = gradient_NO.mm(_weight_OI(layer, gradient.dtype))
        return to_rows.view(rows.shape), None, None


class _Weight(torch.autograd.Function):
    """Nothing, with the gradients of weight and bias as its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        gradient: Tensor,
        is_transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, gradient)
        ctx.is_transposed, ctx.dtype = is_transposed, weight.dtype
        return rows.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        rows_NI, gradient_NO = (t.reshape(-1, t.shape[-1]) for t in ctx.saved_tensors)
        pair = (rows_NI, gradient_NO) if ctx.is_transposed else (gradient_NO, rows_NI)
        to_bias = gradient_NO.sum(0).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return pair[0].t().mm(pair[1]).to(ctx.dtype), to_bias, None, None, None

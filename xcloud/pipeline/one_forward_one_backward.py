"""1F1B and zero bubble: schedules that alternate forwards and backwards, of which the second
splits a backward. The gradients of linear layers' weights are put off then, so that those of
activations come first; that works on any model from outside, and knows no pipeline.

Shapes: N rows (samples and positions), I inputs, O outputs of a layer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xcloud.base.settings import Positive, settings
from xcloud.pipeline.schedule import Action, Schedule, SplitBackward, split_backwards


def _counts_in_flight(num_stages: int, num_lanes: int, num_micro_batches: int) -> list[int]:
    """Return numbers of micro-batches in flight that are worth trying."""
    p = num_stages
    counts = (num_lanes * k for k in (p, p + 1, 2 * p, 4 * p))
    return sorted({count for count in counts if count < num_micro_batches})


@settings("schedule")
class OneForwardOneBackward(Schedule):
    """1F1B (PipeDream-flush): after a warm-up, forwards and backwards alternate.

    num_in_flight: micro-batches that stage 0 starts before its first backward, over all of its
        ranks and replicas together; the later stages hold evenly fewer, the last one 1. None =
        num_stages for every lane (ClusterLayout.num_lanes), the textbook's count. On a slow link
        one or two more a lane keep the stages busy while messages travel.
    num_micro_batches: pieces that a pass is cut into, over all ranks and replicas of a stage
        together.
    """

    num_micro_batches: Positive = 4
    num_in_flight: Positive | None = None

    @property
    def label(self) -> str:
        return f"1f1b m={self.num_micro_batches} in flight={self.num_in_flight or 'p'}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        warm_up = self._warm_up(stage, num_stages=num_stages)
        # The warm-up, then a backward and a forward in turn, then the backwards that are left.
        actions = [Action("forward", stage, micro_batch=i) for i in range(warm_up)]
        for i in range(self.num_micro_batches):
            actions.append(Action("backward", stage, micro_batch=i))
            if warm_up + i < self.num_micro_batches:
                actions.append(Action("forward", stage, micro_batch=warm_up + i))
        return actions

    def for_lanes(self, num_stages: int, num_lanes: int) -> Schedule:
        if self.num_in_flight is not None:
            return self
        return replace(self, num_in_flight=num_stages * num_lanes)

    def variants(self, num_stages: int, num_lanes: int) -> list[Schedule]:
        """Return it with other numbers in flight, its own first."""
        counts = _counts_in_flight(
            num_stages, num_lanes=num_lanes, num_micro_batches=self.num_micro_batches
        )
        return [self, *(replace(self, num_in_flight=k) for k in counts)]

    def _warm_up(self, stage: int, num_stages: int) -> int:
        """Forwards of a stage before its first backward."""
        at_first = self.num_in_flight or num_stages
        behind = num_stages - 1
        # Falls evenly to 1 at the last stage, which has its loss at once and waits for no
        # gradient.
        share = (behind - stage) / behind if behind else 0.0
        return min(1 + math.ceil((at_first - 1) * share), self.num_micro_batches)


@settings("schedule")
class ZeroBubble(OneForwardOneBackward):
    """1F1B whose backward is split (Qi et al., arXiv:2401.10241): a stage sends the gradient that
    the stage before waits for, and computes those of its weights later, where it would wait.
    Stage 0, for which nobody waits, does both at once.

    num_in_memory: micro-batches that a stage keeps anything of at most, from their forward to
        their weights' gradients, where its forwards in flight leave room; over all ranks and
        replicas of the stage, as num_in_flight. None = num_in_flight: no stage keeps more than
        stage 0 does (ZB-H1). 1 = every stage keeps what it keeps under 1F1B.
    """

    num_in_memory: Positive | None = None

    @property
    def label(self) -> str:
        memory = "" if self.num_in_memory is None else f" in memory={self.num_in_memory}"
        in_flight = self.num_in_flight or "p"
        return f"zero bubble m={self.num_micro_batches} in flight={in_flight}{memory}"

    def actions(self, stage: int, num_stages: int) -> list[Action]:
        order = super().actions(stage, num_stages)
        if stage == 0:
            return order
        memory = self.num_in_memory or self.num_in_flight or num_stages
        max_late = max(0, memory - self._warm_up(stage, num_stages=num_stages))
        num_late = num_weights = 0
        actions: list[Action] = []
        for action in order:
            if action.kind == "forward":
                # A forward that would exceed the memory first lets go of the oldest weights that
                # wait.
                makes_room = num_late > max_late
            else:  # in the cool-down, while the gradient is on its way
                makes_room = bool(actions) and actions[-1].kind == "backward"
            if makes_room:
                actions.append(Action("weights", stage, micro_batch=num_weights))
                num_weights += 1
                num_late -= 1
            num_late += action.kind == "backward"
            actions.append(action)
        # Weights wait in the order of their backwards, so a count says which come next.
        late = range(num_weights, self.num_micro_batches)
        return actions + [Action("weights", stage, micro_batch=i) for i in late]

    def splits(self, stage: nn.Module) -> Callable[[], DeferredWeights]:
        return partial(DeferredWeights, can_wait(stage))

    def variants(self, num_stages: int, num_lanes: int) -> list[Schedule]:
        m = self.num_micro_batches
        counts = [*_counts_in_flight(num_stages, num_lanes=num_lanes, num_micro_batches=m), m]
        return [self, *(replace(self, num_in_flight=k, num_in_memory=k) for k in counts)]


def max_kept(
    actions: Iterable[Action], num_ranks: int, activations: float, waiting: float
) -> float:
    """Return the bytes that the fullest of a stage's ranks keeps at most.

    actions: the actions of one stage, in order.
    activations: bytes of a micro-batch's activations.
    waiting: bytes of a micro-batch that are still kept while its weights' gradients wait.
    """
    actions = list(actions)
    late = split_backwards(actions)
    kept = [0.0] * num_ranks
    most = 0.0
    for kind, stage, i in actions:
        waits = waiting if (stage, i) in late else 0.0
        change = {"forward": activations, "backward": waits - activations, "weights": -waits}
        # Micro-batch i of a stage is that of its rank i mod n.
        kept[i % num_ranks] += change[kind]
        most = max(most, kept[i % num_ranks])
    return most


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


@dataclass(eq=False)
class DeferredWeights(SplitBackward):
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

    layers: Sequence[nn.Module]
    _kept: list[Tensor] = field(default_factory=list, init=False)

    def __enter__(self) -> None:
        for layer in self.layers:
            # In the instance, in front of the class's method: the module, its hooks and its
            # state_dict stay as they are.
            layer.forward = partial(_forward, layer, self._kept)

    def __exit__(self, *raised: object) -> None:
        for layer in self.layers:
            del layer.forward  # that of its class again

    def compute(self) -> None:
        """Add what was put off to `.grad`."""
        if self._kept:
            torch.autograd.backward(self._kept)
        self._kept.clear()


def _is_conv1d(layer: nn.Module) -> bool:
    """Return whether this is the Conv1D of transformers, whose weight is [I, O]."""
    return type(layer).__name__ == "Conv1D"


def _weight_OI(layer: Any, dtype: torch.dtype) -> Tensor:
    weight: Tensor = layer.weight.t() if _is_conv1d(layer) else layer.weight
    return weight.to(dtype)


def _forward(layer: nn.Module, kept: list[Tensor], rows: Tensor) -> Tensor:
    """In place of the layer's own."""
    if torch.is_autocast_enabled(rows.device.type):
        # Autocast knows nn.Linear and not this function, so the cast is made here.
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
        ctx.layer = layer
        ctx.kept = kept
        ctx.save_for_backward(rows)
        # Not cast by autocast, which would keep a copy without a graph for later calls.
        weight_OI = _weight_OI(layer, dtype=rows.dtype)
        bias = None if layer.bias is None else layer.bias.to(rows.dtype)
        return nn.functional.linear(rows, weight_OI, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), layer = ctx.saved_tensors, ctx.layer
        # A graph of its own, of detached tensors: it is run in `compute`, when this backward has
        # ended.
        with torch.enable_grad():
            ctx.kept.append(
                _Weight.apply(  # type: ignore[no-untyped-call]
                    layer.weight, layer.bias, rows.detach(), gradient.detach(), _is_conv1d(layer)
                )
            )
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        to_rows = gradient_NO.mm(_weight_OI(layer, dtype=gradient.dtype))
        return to_rows.view(rows.shape), None, None


class _Weight(torch.autograd.Function):
    """An operation that returns nothing, with the gradients of weight and bias as its backward."""

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
        ctx.is_transposed = is_transposed
        ctx.dtype = weight.dtype
        return rows.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        rows_NI, gradient_NO = (t.reshape(-1, t.shape[-1]) for t in ctx.saved_tensors)
        pair = (rows_NI, gradient_NO) if ctx.is_transposed else (gradient_NO, rows_NI)
        to_bias = gradient_NO.sum(0).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return pair[0].t().mm(pair[1]).to(ctx.dtype), to_bias, None, None, None

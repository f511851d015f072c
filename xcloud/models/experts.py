"""Experts of a mixture (Shazeer et al., arXiv:1701.06538) in blocks of `transformers`, as matrices
of their own; LoRA beside them; and the loss that has routers spread tokens over experts.

transformers keeps all experts of a block in one parameter, which whoever handles matrices passes
over without a word. Here each matrix is a Linear under the name that it has in a file, so that it
is read, packed, sharded and merged as any other.

Shapes: R rows (tokens), E experts, k of them for each row, H features, B samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.comm.channel import BoundaryField, Message
from xcloud.comm.devices import bring
from xcloud.models.encoder import Packing

TOKENS = "expert_tokens"
SHARES = "expert_shares"


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)), its matrices under their names in a file.

    adapters: the LoRA adapters beside gate and up, which are one matrix in transformers, and
        beside down."""

    def __init__(
        self, names: Sequence[str], hidden: int, feed_forward: int, activation: nn.Module
    ) -> None:
        super().__init__()
        self._names = names
        self._activation = activation
        gate, up, down = names
        self.add_module(gate, nn.Linear(hidden, feed_forward, bias=False))
        self.add_module(up, nn.Linear(hidden, feed_forward, bias=False))
        self.add_module(down, nn.Linear(feed_forward, hidden, bias=False))

    def forward(self, rows_RH: Tensor, adapters: Sequence[ExpertAdapter]) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self._names)
        # down(act(gate x) * up x), each product with what its adapter adds.
        opened = gate(rows_RH)
        passed = up(rows_RH)
        if adapters:
            of_gate, of_up = adapters[0].product(rows_RH).chunk(2, dim=-1)
            opened = opened + of_gate
            passed = passed + of_up
        inner = self._activation(opened) * passed
        result: Tensor = down(inner)
        if adapters:
            result = result + adapters[1].product(inner)
        return result


@dataclass(frozen=True)
class ExpertAdapter:
    """LoRA beside one matrix [O, I] of one expert: (scale B A) x. A is [r, I], B is [O, r]."""

    a: Tensor
    b: Tensor
    scale: float

    def product(self, rows: Tensor) -> Tensor:
        return F.linear(F.linear(rows, self.a), self.b) * self.scale

    def delta(self) -> Tensor:
        """Return what it adds to the matrix, [O, I]."""
        return self.scale * (self.b @ self.a)


class ExpertAdapters(nn.Module):
    """LoRA beside a matrix [O, I] of each expert, laid out as peft does beside a parameter
    [E, O, I]: lora_A [E r, I], expert by expert, and lora_B [O, r E], the expert changing first.
    """

    def __init__(self, num_experts: int, shape: tuple[int, int], r: int, scale: float) -> None:
        super().__init__()
        outputs, inputs = shape
        self._num_experts = num_experts
        self._scale = scale
        # Laid out and drawn as peft does, so that a file of adapters loads there.
        self.lora_A = nn.Parameter(torch.empty(num_experts * r, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, r * num_experts))

    def draw(self) -> None:
        """Start as peft does: A uniform, B zero."""
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        nn.init.zeros_(self.lora_B)

    def each(self) -> list[ExpertAdapter]:
        """Return the adapter of each expert."""
        # One unbind of all: a slice of one expert would get a gradient of the size of all.
        all_a = torch.unflatten(self.lora_A, 0, (self._num_experts, -1)).unbind(0)
        all_b = torch.unflatten(self.lora_B, 1, (-1, self._num_experts)).unbind(2)
        return [ExpertAdapter(a, b, scale=self._scale) for a, b in zip(all_a, all_b, strict=True)]


class Experts(nn.Module):
    """The experts that replace those of transformers. Expert n is the child called "n".

    theirs: the experts of transformers, of whose memory nothing is kept.
    names: the names of an expert's gate, up and down matrix in a file.
    """

    gate_up: ExpertAdapters | None
    down: ExpertAdapters | None

    def __init__(self, theirs: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.num_experts: int = theirs.num_experts
        self._hidden: int = theirs.hidden_dim
        self._feed_forward: int = theirs.intermediate_dim
        self._names = names
        for number in range(self.num_experts):
            expert = Expert(
                names,
                hidden=self._hidden,
                feed_forward=self._feed_forward,
                activation=theirs.act_fn,
            )
            self.add_module(str(number), expert)
        self.gate_up = None
        self.down = None

    def add_adapters(self, r: int, scale: float) -> None:
        """Put LoRA beside all matrices; `ExpertAdapters.draw` starts it."""
        shape = (2 * self._feed_forward, self._hidden)
        self.gate_up = ExpertAdapters(self.num_experts, shape, r, scale=scale)
        shape = (self._hidden, self._feed_forward)
        self.down = ExpertAdapters(self.num_experts, shape, r, scale=scale)

    def delta(self, number: int, name: str) -> Tensor | None:
        """Return what LoRA adds to a matrix of an expert, or None without LoRA."""
        if self.gate_up is None or self.down is None:
            return None
        gate, _, down = self._names
        if name == down:
            return self.down.each()[number].delta()
        of_gate, of_up = self.gate_up.each()[number].delta().chunk(2)
        return of_gate if name == gate else of_up

    def forward(self, rows_RH: Tensor, chosen_Rk: Tensor, weights_Rk: Tensor) -> Tensor:
        """Return the weighted sum of what the chosen experts make of each row."""
        order = chosen_Rk.flatten().argsort(stable=True)  # places in [R, k], expert by expert
        # The host waits for the device here: only the device knows which expert gets which rows.
        counts = chosen_Rk.flatten().bincount(minlength=self.num_experts).tolist()
        # Place n of the flattened [R, k] is of row n // k.
        sorted_rows = rows_RH[order // chosen_Rk.shape[1]]
        weight = next(self.get_submodule("0").parameters())
        is_trained = weight.requires_grad and torch.is_grad_enabled()
        made = []
        of_each: Sequence[tuple[ExpertAdapter, ...]] = [()] * self.num_experts  # without LoRA
        if self.gate_up is not None and self.down is not None:
            of_each = list(zip(self.gate_up.each(), self.down.each(), strict=True))
        rows_of_each = torch.split(sorted_rows, counts)
        for number, (rows, adapters) in enumerate(zip(rows_of_each, of_each, strict=True)):
            # Ranks that share out trained weights need the gradient of each, if only of zeros.
            if len(rows) or is_trained:
                made.append(self.get_submodule(str(number))(rows, adapters))
        weights = weights_Rk.flatten()[order, None]
        weighted = torch.cat(made) * weights
        # Back into [R, k]: a row's k results then lie beside each other and are added in one
        # order.
        in_place = weighted[order.argsort()]
        return torch.unflatten(in_place, 0, chosen_Rk.shape).sum(1).to(rows_RH.dtype)


@dataclass(frozen=True)
class RouterLoss:
    """The loss of transformers that has routers spread tokens over experts (Fedus et al.,
    arXiv:2101.03961, equations 4 to 6), E * sum of f * P over the experts, which is added to the
    mean of the guessed tokens' losses. Over the tokens of a micro-batch and all routers of the
    model, f is the share of tokens that an expert gets, of which all experts' shares add up to k,
    and P is its mean probability.

    It is no sum over blocks, so each stage sends two sums for each sample and expert to the next:
    the tokens (an integer) and the probabilities, whose gradient comes back. Each stage adds its
    own sums. The last stage computes the loss.

    weight: the weight of this loss.
    num_experts: E, the number of experts.
    num_chosen: k, the number of experts that each token is sent to.
    """

    weight: float
    num_experts: int
    num_chosen: int

    def fields(self) -> tuple[BoundaryField, ...]:
        """Return what crosses a boundary: 8 bytes a sample and expert; back come 4."""
        features = (self.num_experts,)
        return (
            BoundaryField(name=TOKENS, features=features, dtype=torch.int32),
            BoundaryField(name=SHARES, features=features, dtype=torch.float32, is_exact=True),
        )

    def sums(
        self, logits: Sequence[Tensor], packing: Packing, received: Message | None
    ) -> Message:
        """Return the sums so far, of this stage and those before.

        logits: the logits of each router of this stage, [R, E], rows of the samples one behind the
            other.
        """
        device = packing.positions.device
        if received is None:
            shape = (len(packing.counts), self.num_experts)
            tokens_BE = torch.zeros(shape, dtype=torch.int32, device=device)
            shares_BE = torch.zeros(shape, device=device)
        else:
            tokens_BE = bring(received[TOKENS], device)
            shares_BE = received[SHARES]
        for of_router in logits:
            # In float32, as transformers sums them.
            shares_BSE = packing.unpack(of_router.softmax(-1).float())
            chosen_BSk = shares_BSE.topk(self.num_chosen, dim=-1).indices
            chosen_BSE = torch.zeros_like(shares_BSE).scatter_(2, chosen_BSk, 1)
            # Padded cells hold arbitrary values, and they are no tokens.
            if packing.mask is not None:
                is_token_BS1 = packing.mask[:, 0, 0, :, None]
                chosen_BSE = chosen_BSE * is_token_BS1
                shares_BSE = shares_BSE * is_token_BS1
            tokens_BE = tokens_BE + chosen_BSE.sum(1).to(torch.int32)
            shares_BE = shares_BE + shares_BSE.sum(1)
        return {TOKENS: tokens_BE, SHARES: shares_BE}

    def of(self, sums: Message) -> Tensor:
        """Return the weighted loss from the sums of all stages."""
        tokens_E = sums[TOKENS].sum(0).float()
        shares_E = sums[SHARES].sum(0)
        # Each token is sent to k experts. With f = tokens / rows and P = shares / rows the two
        # divisions make rows squared.
        num_rows = tokens_E.sum() / self.num_chosen
        return self.weight * self.num_experts * (tokens_E * shares_E).sum() / num_rows**2

"""Attacks on the gradient of a whole batch, or on a weight change: which tokens made it, and in
which order; and scores of the tokens that they guess. Pure tensor code: reads no file, knows no
link. Of single messages: xcloud/features/leak_meter/meter.py.

Shapes: V words, H features of a layer's input, O outputs, N candidates, B texts, S positions,
K dimensions of a row space.

Each attack finds its own threshold, from where the sorted scores drop most steeply or from how
far they spread, so it works on exact and on compressed gradients, and recovers nothing where
nothing stands out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xcloud.features.leak_meter.observers import ReadingStage

TEXTS = "texts"  # the attack that guesses whole texts; the others guess sets of tokens
_MIN_DROP = 3.0  # between neighbouring scores; random rows of equal size drop by less
_MIN_RANK_DROP = 10.0  # between neighbouring singular values; the last ones of noise vary more
_CLEAR_DROP = 100.0  # whatever stands before it is no noise
_OUTLIER = 8.0  # standard deviations (by the median of deviations) of rows that are noise alone
_FLOOR = 1e-7  # of the largest score: below it is rounding error of float32 sums
_CHUNK = 4096  # candidates at a time


def changed_rows(change_VH: Tensor, weights_VH: Tensor | None = None) -> Tensor:
    """Token ids whose rows of an embedding stand out, int64.

    A token that is not in the batch has gradient zero, so this is exact for gradients, whatever
    the size of the batch (Melis et al., arXiv:1805.04049).
    weights_VH: of a weight change the weights before it. Weight decay shrinks all rows by one
    factor, which is estimated from the rows and taken off.
    """
    rows = change_VH.double()
    if weights_VH is not None:
        before = weights_VH.double()
        squares = before.square().sum(1)
        factors = (rows * before).sum(1)[squares > 0] / squares[squares > 0]
        rows = rows - factors.median() * before
    norms = rows.norm(dim=1)
    clear = _before_drop(norms, _CLEAR_DROP)
    if len(clear):
        return clear
    middle = norms.median()
    spread = 1.4826 * (norms - middle).abs().median()
    outliers: Tensor = (norms > middle + _OUTLIER * spread).nonzero()[:, 0]
    return outliers


def raised_words(gradient_VH: Tensor) -> Tensor:
    """Token ids that a language model's head was trained to predict, int64.

    The gradient of word v's row is sum_r (p_rv - [v = label_r]) h_r. Final hidden states share a
    common direction, so the few rows that point against the majority are those of labels.
    """
    rows = gradient_VH.double()
    common = F.normalize(rows, dim=1).mean(0)
    return _before_drop(-(rows @ common).clamp(max=0))


class Span(NamedTuple):
    """Row space of a gradient: orthonormal rows [K, H]."""

    basis_KH: Tensor

    def distances(self, inputs: Tensor) -> Tensor:
        """[..., H] -> [...]: the part of each input outside the space, relative to its norm."""
        x = inputs.double()
        left = x - (x @ self.basis_KH.T) @ self.basis_KH
        distances: Tensor = left.norm(dim=-1) / x.norm(dim=-1).clamp(min=1e-30)
        return distances


def row_space(gradients: Sequence[Tensor]) -> Span | None:
    """The space spanned by the inputs of linear layers with gradients [O, H]; layers that read
    the same input may be given together.

    A gradient is sum_r d_r x_r', so its rows are combinations of the inputs x_r. None if they span
    everything (at least H tokens, or noise), which shows nothing of single inputs.
    """
    scaled = [g.double() / g.double().norm().clamp(min=1e-30) for g in gradients]
    stacked = torch.cat(scaled)
    squares, vectors = torch.linalg.eigh(stacked.T @ stacked)
    sizes = squares.clamp(min=0).sqrt().flip(0)
    rank = _steepest(sizes, _MIN_RANK_DROP)
    if not rank or rank >= stacked.shape[1]:
        return None
    return Span(vectors.flip(1)[:, :rank].T.contiguous())


def spanned(distances_N: Tensor) -> tuple[Tensor, float]:
    """Which candidates lie in the space, int64, and the distance that separates them from the
    others (Petrov et al., DAGER, arXiv:2405.15586: exact with fewer tokens than dimensions).

    Nothing, and 0.0, if no group of candidates is clearly nearer than the rest.
    """
    order = distances_N.argsort()
    closeness = 1 / distances_N[order].clamp(min=_FLOOR)
    count = _steepest(closeness)
    if not count or count == len(order):
        return order[:0], 0.0
    near, far = distances_N[order[count - 1]], distances_N[order[count]]
    return order[:count], math.sqrt(float(near.clamp(min=_FLOOR)) * float(far))


class _AllSeen(Exception):
    """All that is asked for has been computed."""


@dataclass(frozen=True)
class Victim(ReadingStage):
    """module: with the weights that the gradients were computed with."""

    def inputs(self, names: Sequence[str], ids_NS: Tensor) -> dict[str, Tensor]:
        """What linear layers read for these tokens: name -> [N, S, H]."""
        inputs: dict[str, Tensor] = {}

        def note(name: str, layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            rows = arguments[0].detach()
            if rows.numel() == ids_NS.numel() * rows.shape[-1]:  # not of pooled texts
                inputs[name] = rows.reshape(*ids_NS.shape, rows.shape[-1]).float()
            if len(inputs) == len(names):
                raise _AllSeen

        was_training = self.module.training
        with ExitStack() as stack:
            stack.callback(self.module.train, was_training)
            for name in names:
                layer = self.module.get_submodule(name)
                stack.callback(layer.register_forward_pre_hook(partial(note, name)).remove)
            self.module.eval()  # the attacker does not know the dropout of others
            with torch.no_grad(), suppress(_AllSeen):
                self.run(ids_NS)
        return inputs

    def distances(self, name: str, span: Span, ids_NS: Tensor) -> Tensor:
        """[N, S], how far each input of a layer is outside the span of its gradient."""
        chunks = torch.split(ids_NS, max(1, _CHUNK // ids_NS.shape[1]))
        return torch.cat([span.distances(self.inputs([name], ids)[name]) for ids in chunks])


def sequences(
    victim: Victim, tokens_N: Tensor, name: str, span: Span, threshold: float, width: int = 256
) -> list[list[int]]:
    """The texts of a causal model's batch, from the tokens in it, in the right order (ibid.).

    name: of a layer behind the first attention, whose inputs depend on the tokens before; span: of
    its gradient. A text grows by every token that keeps the last input in the span, and ends where
    none does. At most `width` texts at a time.
    """
    found: list[list[int]] = []
    growing = tokens_N[:, None]
    growing = growing[victim.distances(name, span, growing)[:, -1] < threshold][:width]
    while len(growing) and growing.shape[1] < victim.max_length:
        texts, token = torch.meshgrid(torch.arange(len(growing)), tokens_N, indexing="ij")
        tries = torch.cat([growing[texts.flatten()], token.reshape(-1, 1)], dim=1)
        last = victim.distances(name, span, tries)[:, -1].view(len(growing), len(tokens_N))
        fits = last < threshold
        found += growing[~fits.any(1)].tolist()
        growing = tries[fits.flatten()][last[fits].argsort()[:width]]
    found += growing.tolist()
    # Attention over equal values is that value: "a a a" reads as "a", which begins a real text.
    begun = Counter(text[0] for text in found)
    return [text for text in found if len(set(text)) > 1 or begun[text[0]] == 1]


def linear_gradients(module: nn.Module, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients [O, H] of the module's linear layers, by layer name, from tensors by parameter
    name. GPT-2 stores its matrices transposed."""
    found = {}
    for name, layer in module.named_modules():
        gradient = changes.get(f"{name}.weight")
        if gradient is None or gradient.dim() != 2 or isinstance(layer, nn.Embedding):
            continue
        found[name] = gradient.T if type(layer).__name__ == "Conv1D" else gradient
    return found


class Recovered(NamedTuple):
    """What an attack recovers: distinct tokens, and whole texts where the order is found too."""

    tokens: Tensor
    texts: list[list[int]]


def attack_layers(victim: Victim, changes: Mapping[str, Tensor]) -> Recovered:
    """The span check on a causal model or an encoder, full gradients or those of LoRA's A.

    First layers that read the tokens one by one name the tokens; then, in a causal model, the
    first layer behind an attention gives their order. An encoder's first layers read position
    and token together, so they give the order up to the text that a token belongs to: no texts.
    """
    gradients = linear_gradients(victim.module, changes)
    layers = _Layers.of(victim, list(gradients))
    span, behind = (
        row_space([gradients[name] for name in names]) if names else None
        for names in (layers.alone, layers.in_order)
    )
    tokens, threshold = torch.zeros(0, dtype=torch.int64), 0.0
    if span is not None:
        length = victim.max_length if layers.knows_place else 1
        repeated = victim.words_N[:, None].expand(-1, length)
        distances = victim.distances(layers.alone[0], span, repeated)
        near, threshold = spanned(distances.flatten())
        tokens = torch.unique(victim.words_N[near // length])
    if not len(tokens) or behind is None:
        return Recovered(tokens, [])
    return Recovered(tokens, sequences(victim, tokens, layers.in_order[0], behind, threshold))


class _Layers(NamedTuple):
    """alone: linear layers that read one and the same input, of a token whatever stands beside
    it. in_order: those with one input that depends on tokens before, and on none behind.
    knows_place: whether the input of `alone` depends on the position."""

    alone: list[str]
    in_order: list[str]
    knows_place: bool

    @classmethod
    def of(cls, victim: Victim, names: Sequence[str]) -> _Layers:
        a, b, c = victim.words_N[-3:].tolist()
        ids = torch.tensor([[a, b, a], [c, b, a], [a, b, c]])
        seen = victim.inputs(names, ids)
        same: dict[str, list[str]] = {}  # by the first layer that reads the input
        for name, rows in seen.items():
            first = next((k for k in same if _equal(seen[k], rows)), name)
            same.setdefault(first, []).append(name)
        alone: list[str] = []
        in_order: list[str] = []
        for first, members in same.items():
            rows = seen[first]
            looks_back = not _equal(rows[0, 1], rows[1, 1])
            looks_ahead = not _equal(rows[0, 1], rows[2, 1])
            if not (looks_back or looks_ahead or alone):
                alone = members
            elif looks_back and not looks_ahead and len(members) > len(in_order):
                in_order = members  # the more, the larger is their common row space
        knows_place = bool(alone) and not _equal(seen[alone[0]][0, 0], seen[alone[0]][0, 2])
        return cls(alone, in_order, knows_place)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def _before_drop(scores_N: Tensor, least: float = _MIN_DROP) -> Tensor:
    """The places of the scores before their steepest drop, the largest first."""
    ordered = scores_N.sort(descending=True)
    places: Tensor = ordered.indices[: _steepest(ordered.values, least)]
    return places


def _steepest(scores_N: Tensor, least: float = _MIN_DROP) -> int:
    """How many of the scores, sorted from the largest, stand before their steepest drop; 0 if no
    neighbours differ by a factor of `least`."""
    if not len(scores_N) or not float(scores_N[0]) > 0:
        return 0
    floored = scores_N.double().clamp(min=_FLOOR * float(scores_N[0]))
    drops = floored[:-1] / floored[1:]
    if not len(drops) or float(drops.max()) < least:
        return 0
    return int(drops.argmax()) + 1


def f1_of_sets(guessed: Sequence[int], true: Sequence[int]) -> float:
    """Harmonic mean of the shares of guessed tokens that are true and of true ones guessed;
    distinct tokens."""
    return rouge([[*{*guessed}]], [[*{*true}]], 1)


def rouge(guessed: Sequence[Sequence[int]], true: Sequence[Sequence[int]], n: int) -> float:
    """ROUGE-N (F1) over runs of n neighbouring tokens of all texts together; n = 1 ignores
    order, n = 2 needs it."""
    runs = [
        Counter(tuple(text[i : i + n]) for text in texts for i in range(len(text) - n + 1))
        for texts in (guessed, true)
    ]
    right = sum((runs[0] & runs[1]).values())
    return 2 * right / (runs[0].total() + runs[1].total()) if right else 0.0


def score(
    attack: str,
    guesses: Mapping[int, Sequence[Sequence[int]]],
    truth: Mapping[int, Sequence[Sequence[int]]],
    public: Sequence[Sequence[int]],
) -> dict[str, float] | None:
    """Means over the steps whose texts are known: tokens = F1 of the distinct tokens guessed,
    baseline = that of guessing as many of the most frequent tokens of the `public` texts, order =
    ROUGE-2 of guessed texts. None without a step to judge."""
    counts = Counter(chain.from_iterable(public))
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    scores = []
    for step in guesses.keys() & truth.keys():
        true = [*{*chain.from_iterable(truth[step])}]
        scores.append(
            {
                "tokens": f1_of_sets([*chain.from_iterable(guesses[step])], true),
                "baseline": f1_of_sets(frequent[: len(true)], true),
                "order": rouge(guesses[step], truth[step], 2),
            }
        )
    if not scores:
        return None
    names = ("tokens", "baseline", *(["order"] if attack == TEXTS else []))
    means = {name: round(fmean(found[name] for found in scores), 4) for name in names}
    return means | {"num_updates": len(scores)}

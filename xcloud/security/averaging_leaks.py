"""What averaging tells: attack the contributions of other replicas, and score the guesses.
The attacks are gradient_attacks.py's; a rank runs them after training, as it has the weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from xcloud.security.gradient_attacks import (
    attack_layers,
    changed_rows,
    f1_of_sets,
    raised_words,
    rouge,
)
from xcloud.security.observer import Observer

TEXTS = "texts"  # the attack that guesses whole texts; the others guess sets of tokens


@dataclass(frozen=True)
class Victim:
    """What an attacker knows of a stage that reads text.

    run: computes the stage on token ids [N, S]. words_N: ids that may stand in a text.
    covers: updates that one contribution sums up.
    """

    module: nn.Module
    run: Callable[[Tensor], object]
    words_N: Tensor
    max_length: int
    covers: int = 1


@dataclass
class _Seen:
    step: int
    replica: int
    changes: dict[str, Tensor]
    weights: dict[str, Tensor]


class AveragingObserver:
    """Keeps the contributions of the last merges, and attacks them when training is over.

    One update or one merge at a time: what several of them together tell is not tried.
    """

    def __init__(self, observer: Observer, victim: Victim, num_others: int) -> None:
        self._observer, self._victim = observer, victim
        observer.covers = victim.covers
        self._seen: deque[_Seen] = deque(maxlen=observer.averaging_steps * num_others)

    def received(self, step: int, replica: int, tensors: Mapping[str, Tensor]) -> None:
        """Another replica's gradient or weight change, as decoded, by "stage.name"; the victim is
        stage 0. A tensor of which only a part came (a share of its rows) is left out."""
        if not self._observer.wants(step - self._victim.covers + 1):
            return
        own = {f"0.{name}": p for name, p in self._victim.module.named_parameters()}
        changes = {
            name: tensor.detach().float().cpu().clone()
            for name, tensor in tensors.items()
            if name in own and tensor.shape == own[name].shape
        }
        known = [seen.weights for seen in self._seen if seen.step == step]
        weights = known[0] if known else {n: p.detach().clone() for n, p in own.items()}
        self._seen.append(_Seen(step, replica, _without_stage(changes), _without_stage(weights)))

    def attack(self) -> None:
        """Note what the attacks guess."""
        for seen in self._seen:
            with _holding(self._victim.module, seen.weights):
                for name, guess in self._guesses(seen):
                    self._observer.guess(seen.replica, name, seen.step, guess)
        self._seen.clear()

    def _guesses(self, seen: _Seen) -> Iterator[tuple[str, list[list[int]]]]:
        victim = self._victim
        num_words = int(victim.words_N.max()) + 1
        for name, module in victim.module.named_modules():
            change = seen.changes.get(f"{name}.weight")
            if change is None or len(change) < num_words:
                continue
            if isinstance(module, nn.Embedding):
                before = seen.weights[f"{name}.weight"].cpu() if victim.covers > 1 else None
                yield "embedding_rows", [changed_rows(change, before).tolist()]
            elif isinstance(module, nn.Linear):
                yield "head_rows", [raised_words(change).tolist()]
        found = attack_layers(
            victim.module, victim.run, seen.changes, victim.words_N, victim.max_length
        )
        yield "layer_inputs", [found.tokens.tolist()]
        yield TEXTS, found.texts


def _without_stage(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("0."): tensor for name, tensor in named.items()}


@contextmanager
def _holding(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The module with the weights of another step."""
    own = {name: parameter.data for name, parameter in module.named_parameters()}
    try:
        for name, parameter in module.named_parameters():
            parameter.data = weights[name]
        yield
    finally:
        for name, parameter in module.named_parameters():
            parameter.data = own[name]


def score(
    attack: str,
    guesses: Mapping[int, Sequence[Sequence[int]]],
    truth: Mapping[int, Sequence[Sequence[int]]],
    public: Sequence[Sequence[int]],
) -> dict[str, float] | None:
    """Means over the steps whose texts are known: tokens = F1 of the distinct tokens guessed,
    baseline = that of guessing as many of the most frequent tokens of the `public` texts, order =
    ROUGE-2 of guessed texts. None without a step to judge."""
    steps = sorted(guesses.keys() & truth.keys())
    if not steps:
        return None
    tokens, baselines, orders = [], [], []
    for step in steps:
        true = {token for text in truth[step] for token in text}
        tokens.append(f1_of_sets([t for text in guesses[step] for t in text], sorted(true)))
        baselines.append(f1_of_sets(_most_frequent(public, len(true)), sorted(true)))
        orders.append(rouge(guesses[step], truth[step], 2))
    found = {"tokens": _mean(tokens), "baseline": _mean(baselines)}
    if attack == TEXTS:
        found["order"] = _mean(orders)
    return found | {"num_updates": len(steps)}


def _most_frequent(texts: Sequence[Sequence[int]], count: int) -> list[int]:
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
    values, counts = torch.unique(tokens, return_counts=True)
    best: list[int] = values[counts.argsort(descending=True)][:count].tolist()
    return best


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)

"""Gradient matching: find a text whose gradients resemble those that were seen. Pure tensor code.
Needs no more tokens than dimensions, unlike the span check of gradient_attacks.py, but only works
for short texts and small models.

Shapes: B texts, S positions, H features, V words, N candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_word_gradients(
    logits_of: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    words_VH: Tensor,
    sharpness: float = 20.0,
) -> Callable[[Tensor], list[Tensor]]:
    """For match_gradients: the gradients of a causal model that reads embeddings [B, S, H] and
    learns to guess, at each place, the word that the next embedding resembles (by cosine).

    logits_of: embeddings [B, S, H] -> logits [B, S, V], twice differentiable.
    """
    table = F.normalize(words_VH, dim=1)

    def gradients_of(rows_BSH: Tensor) -> list[Tensor]:
        next_BSV = (sharpness * (F.normalize(rows_BSH[:, 1:], dim=-1) @ table.T)).softmax(-1)
        loss = -(next_BSV * logits_of(rows_BSH)[:, :-1].log_softmax(-1)).sum()
        return list(torch.autograd.grad(loss, parameters, create_graph=True))

    return gradients_of


def match_gradients(
    gradients_of: Callable[[Tensor], Sequence[Tensor]],
    target: Sequence[Tensor],
    start_BSH: Tensor,
    row_norm: float,
    num_steps: int = 300,
    learning_rate: float = 0.05,
) -> Tensor:
    """Embeddings [B, S, H] whose gradients resemble the target (Zhu et al., DLG, arXiv:1906.08935;
    cosine distance and the regulariser on the mean norm: LAMP, arXiv:2202.08827).

    gradients_of: differentiable. row_norm: mean norm of the model's word embeddings.
    """
    found = start_BSH.clone().requires_grad_()
    optimizer = torch.optim.Adam([found], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, num_steps)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = gradient_distance(gradients_of(found), target)
        loss = loss + (found.norm(dim=-1).mean() / row_norm - 1).square()
        loss.backward()
        optimizer.step()
        schedule.step()
    return found.detach()


def gradient_distance(found: Sequence[Tensor], target: Sequence[Tensor]) -> Tensor:
    """1 - cosine, the mean over tensors."""
    cosines = [
        F.cosine_similarity(a.flatten(), b.flatten(), dim=0)
        for a, b in zip(found, target, strict=True)
    ]
    return 1 - torch.stack(cosines).mean()


def nearest_words(rows_BSH: Tensor, words_VH: Tensor, allowed_N: Tensor) -> Tensor:
    """int64 [B, S]: of the allowed words, the one with the largest cosine to each row."""
    table = F.normalize(words_VH[allowed_N], dim=1)
    best: Tensor = allowed_N[(F.normalize(rows_BSH, dim=-1) @ table.T).argmax(-1)]
    return best


def improve_by_swaps(
    ids_BS: Tensor, distance_of: Callable[[Tensor], float], allowed_N: Tensor, num_tries: int
) -> Tensor:
    """The discrete half of LAMP: swap two places, or put another allowed word in one, and keep
    what brings the gradients nearer."""
    generator = torch.Generator().manual_seed(0)
    best, best_distance = ids_BS.clone(), distance_of(ids_BS)
    for number in range(num_tries):
        changed = best.flatten().clone()
        i, j = torch.randint(len(changed), (2,), generator=generator).tolist()
        if number % 2:
            changed[i], changed[j] = changed[j].clone(), changed[i].clone()
        else:
            pick = torch.randint(len(allowed_N), (1,), generator=generator)
            changed[i] = allowed_N[pick]
        tried = changed.view_as(best)
        distance = distance_of(tried)
        if distance < best_distance:
            best, best_distance = tried, distance
    return best

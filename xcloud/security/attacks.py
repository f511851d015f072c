"""Attacks on what crosses a boundary. Pure tensor code: reads no file.

Shapes: N samples or rows, D features, C classes. Attacks that learn are fitted on the known
samples and judged on the others. Deterministic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_NUM_KNOWN_POSITIVES = 16
_PROBE_PENALTY = 1e-2
_NETWORK_WIDTH = 256
_NETWORK_EPOCHS = 12
_NETWORK_BATCH = 256


def auc(scores_N: Tensor, is_positive_N: Tensor) -> float:
    """Probability that a positive scores above a negative (a tie counts half); nan if either
    class is missing."""
    positives, negatives = scores_N[is_positive_N].double(), scores_N[~is_positive_N].double()
    if not len(positives) or not len(negatives):
        return float("nan")
    ordered = negatives.sort().values
    below = torch.searchsorted(ordered, positives, right=False)
    up_to = torch.searchsorted(ordered, positives, right=True)
    return float((below + up_to).double().mean() / (2 * len(negatives)))


def norm_attack(norms_N: Tensor, is_positive_N: Tensor) -> float:
    """AUC of the gradient norm (arXiv:2102.08504, section 3). Which class has the larger norm
    is one bit, which the attacker is given."""
    found = auc(norms_N, is_positive_N)
    return max(found, 1 - found)


def direction_attack(vectors_ND: Tensor, is_positive_N: Tensor) -> float:
    """AUC of the cosine to one sample known to be positive (ibid.), the mean over 16 of them."""
    unit = F.normalize(vectors_ND.double(), dim=1)
    positives = torch.nonzero(is_positive_N).flatten()
    spread = torch.linspace(0, len(positives) - 1, _NUM_KNOWN_POSITIVES).long()
    found = []
    for known in sorted(set(positives[spread].tolist())):
        others = torch.arange(len(unit)) != known
        found.append(auc(unit[others] @ unit[known], is_positive_N[others]))
    return sum(found) / len(found)


def spectral_attack(vectors_ND: Tensor, is_positive_N: Tensor) -> float:
    """AUC of the projection on the direction of largest variance: uses no labels; the sign is
    given (Sun et al., arXiv:2203.01451, use it on activations)."""
    centred = (vectors_ND - vectors_ND.mean(0)).double()
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    found = auc(centred @ vectors[:, -1], is_positive_N)
    return max(found, 1 - found)


def probe(features_ND: Tensor, classes_N: Tensor, is_known_N: Tensor, num_classes: int) -> Tensor:
    """Class scores [unknown, C] of a logistic regression fitted on the known samples."""
    known = features_ND[is_known_N].double()
    mean, spread = known.mean(0), known.std(0, correction=0)
    used = spread > 1e-9 * spread.max().clamp(min=1e-30)
    scaled = ((features_ND.double() - mean) / spread)[:, used]
    weight = torch.zeros(scaled.shape[1] + 1, num_classes, dtype=torch.float64, requires_grad=True)
    x = F.pad(scaled, (0, 1), value=1.0)
    optimizer = torch.optim.LBFGS([weight], max_iter=60, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x[is_known_N] @ weight, classes_N[is_known_N])
        value = value + _PROBE_PENALTY * weight[:-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return (x[~is_known_N] @ weight).detach()


def linear_inverter(rows_ND: Tensor, tokens_N: Tensor, is_known_N: Tensor) -> Tensor:
    """The token guessed for each unknown row: linear discriminant of the tokens' mean rows, with
    the known rows' shrunk covariance. Exact where a row is a linear map of its token's embedding.
    """
    known, seen = rows_ND[is_known_N].double(), tokens_N[is_known_N]
    tokens, index, counts = torch.unique(seen, return_inverse=True, return_counts=True)
    means = torch.zeros(len(tokens), known.shape[1], dtype=torch.float64)
    means.index_add_(0, index, known)
    means /= counts[:, None]
    inside = known - means[index]
    covariance = inside.T @ inside / len(known)
    overall = (known - known.mean(0)).square().mean()
    # A token seen once has no spread of its own, so part of the overall variance is added.
    shrunk = covariance + (1e-2 * overall + 1e-12) * torch.eye(known.shape[1], dtype=torch.float64)
    directions = torch.linalg.solve(shrunk, means.T)  # [D, tokens]
    offsets = torch.log(counts / len(known)) - 0.5 * (means.T * directions).sum(0)
    guessed: Tensor = tokens[(rows_ND[~is_known_N].double() @ directions + offsets).argmax(1)]
    return guessed


def network_inverter(rows_ND: Tensor, tokens_N: Tensor, is_known_N: Tensor) -> Tensor:
    """The token guessed for each unknown row by a network with one hidden layer."""
    known = rows_ND[is_known_N].float()
    tokens, index = torch.unique(tokens_N[is_known_N], return_inverse=True)
    mean, spread = known.mean(0), known.std(0, correction=0).clamp(min=1e-9)
    x = (rows_ND.float() - mean) / spread
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], _NETWORK_WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(_NETWORK_WIDTH, len(tokens)),
        )
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    inputs = x[is_known_N]
    for _ in range(_NETWORK_EPOCHS):
        order = torch.randperm(len(inputs), generator=generator)
        for batch in torch.split(order, _NETWORK_BATCH):
            optimizer.zero_grad()
            F.cross_entropy(network(inputs[batch]), index[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        guessed: Tensor = tokens[network(x[~is_known_N]).argmax(1)]
    return guessed


def most_frequent(tokens_N: Tensor) -> int:
    """The guess of an attacker who sees nothing."""
    values, counts = torch.unique(tokens_N, return_counts=True)
    return int(values[counts.argmax()])

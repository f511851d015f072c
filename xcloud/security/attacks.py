"""Attacks on what crosses a boundary, and scores of tokens that attacks guess. Pure tensor code:
reads no file.

Shapes: N samples or rows, D features, C classes. Attacks that learn are fitted on the known
samples and judged on the others. Deterministic.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

TEXTS = "texts"  # the attack that guesses whole texts; the others guess sets of tokens
_NUM_KNOWN_POSITIVES = 16
_PROBE_PENALTY = 1e-2
_NETWORK_WIDTH = 256
_NETWORK_EPOCHS = 12
_NETWORK_BATCH = 256


def auc(scores_N: Tensor, is_positive_N: Tensor) -> float:
    """Probability that a positive scores above a negative (a tie counts half); nan if either
    class is missing."""
    from sklearn.metrics import roc_auc_score

    if bool(is_positive_N.all()) or not bool(is_positive_N.any()):
        return float("nan")
    return float(roc_auc_score(is_positive_N.numpy(), scores_N.nan_to_num().numpy()))


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
    from sklearn.decomposition import PCA

    projected = PCA(1, svd_solver="covariance_eigh").fit_transform(vectors_ND.double().numpy())
    found = auc(torch.from_numpy(projected[:, 0]), is_positive_N)
    return max(found, 1 - found)


def probe(features_ND: Tensor, classes_N: Tensor, is_known_N: Tensor, num_classes: int) -> Tensor:
    """Log-probabilities [unknown, C] of a logistic regression fitted on the known samples."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    known, unknown = features_ND[is_known_N].double(), features_ND[~is_known_N].double()
    scores = torch.full((len(unknown), num_classes), -math.inf, dtype=torch.float64)
    seen = torch.unique(classes_N[is_known_N])
    if len(seen) == 1:
        scores[:, seen] = 0.0
        return scores
    strength = 1 / (2 * _PROBE_PENALTY * len(known))
    model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000))
    model.fit(known.numpy(), classes_N[is_known_N].numpy())
    scores[:, seen] = torch.from_numpy(model.predict_log_proba(unknown.numpy()))
    return scores


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
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    known = rows_ND[is_known_N].float()
    mean, spread = known.mean(0), known.std(0, correction=0).clamp(min=1e-9)
    x = ((rows_ND.float() - mean) / spread).numpy()
    network = MLPClassifier(
        _NETWORK_WIDTH, batch_size=_NETWORK_BATCH, learning_rate_init=3e-3,
        max_iter=_NETWORK_EPOCHS, random_state=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # so few epochs are meant
        network.fit(x[is_known_N.numpy()], tokens_N[is_known_N].numpy())
    return torch.from_numpy(network.predict(x[~is_known_N.numpy()]))


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

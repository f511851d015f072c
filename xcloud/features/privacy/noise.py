"""The mathematics of differential privacy: clip, add noise, and say what that guarantees.

(epsilon, delta): whoever sees everything that was noised cannot tell, beyond a factor of
e^epsilon and with probability delta to fail, whether one sample (one cloud's data) was used or
left out. Noise is drawn from what is secret to the sender (security/defences.py).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from xcloud.features.privacy.settings import Privacy
from xcloud.security.defences import normal


def clip_factor(tensors: Iterable[Tensor], limit: float) -> float:
    """Return what brings the common norm of the tensors to at most `limit`.

    It is nan if they are not finite, so that the update is seen to be.
    """
    # In float64, as a norm that is rounded down would let a contribution exceed the bound.
    squares = [float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors]
    norm = math.sqrt(sum(squares))
    if not math.isfinite(norm):
        return math.nan
    return min(1.0, limit / norm) if norm else 1.0


def private_contribution(
    names: Collection[str], privacy: Privacy, num_parts: int, silent: Collection[str] = ()
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function that clips what this replica contributes, and adds noise.

    names: the names of the tensors.
    num_parts: the number of messages that together are one contribution of a cloud.
    silent: the names of tensors for which zero is sent (or nan, where they are not finite).
    """
    are_silent = [name in silent for name in names]
    limit = privacy.clip / math.sqrt(num_parts)
    deviation = privacy.clip * privacy.noise
    chance = np.random.default_rng()  # not of the run's seed, which the other clouds know too

    def protect(tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = list(zip(tensors, are_silent, strict=True))
        factor = clip_factor([tensor for tensor, is_silent in pairs if not is_silent], limit)
        contribution = []
        for tensor, is_silent in pairs:
            # 0 * tensor and not zeros: a value that is not finite stays visible as nan, and the
            # update is skipped.
            sent = 0 * tensor if is_silent else tensor * factor
            if deviation and not is_silent:
                sent = sent + deviation * normal(sent, chance)
            contribution.append(sent)
        return contribution

    return protect


def max_squared_uses(batches: Iterable[Tensor]) -> int:
    """Return the squared uses of the sample that counts most, for gaussian_epsilon.

    batches: the sample ids of each update.
    """
    totals = Counter[int]()
    for ids in batches:
        # A sample that stands twice in one update moves it by twice the clip: squares within an
        # update, sums over updates.
        totals.update({sample: count**2 for sample, count in Counter(ids.tolist()).items()})
    return max(totals.values(), default=0)


_MAX_MU = 1e4
"""Beyond it epsilon is tens of millions, and its logarithms differ by less than their rounding."""
_MAX_EXACT = 100.0
"""Beyond it epsilon promises nothing and a bound will do: Opacus would take minutes and gigabytes
to find it."""


def gaussian_epsilon(noise: float, squared_uses: float, delta: float) -> float:
    """Return the smallest epsilon of Gaussian releases.

    It is exact: they are one release with mu = sqrt(squared_uses) / noise (Dong et al.,
    arXiv:1905.02383, corollaries 1 and 3.3):
        delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu)
    Assumes nothing of how batches are drawn; whoever knows the seed knows the batches.

    squared_uses: the sum over all releases of the square of how often one unit (sample, cloud) is
        in it.
    """
    if not squared_uses:
        return 0.0
    if not noise:
        return math.inf
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    mu = math.sqrt(squared_uses) / noise
    if mu > _MAX_MU:
        return math.inf

    def failure(epsilon: float) -> float:
        # e^epsilon Phi(-x) by its logarithm: the factors overflow and vanish.
        beyond = log_ndtr(-mu / 2 - epsilon / mu) + epsilon
        return math.exp(log_ndtr(mu / 2 - epsilon / mu)) - math.exp(beyond)

    # failure falls with epsilon: double the upper end until it is low enough, then bisect.
    if failure(0.0) <= delta:
        return 0.0
    high = 1.0
    while failure(high) > delta:
        high *= 2
    return float(brentq(lambda epsilon: failure(epsilon) - delta, 0.0, high, xtol=1e-12))


def sampled_epsilon(noise: float, rate: float, num_updates: int, delta: float) -> float:
    """Return epsilon as is usually reported of DP-SGD.

    Every sample is in each update's batch with probability `rate`, independently and in secret. By
    Opacus (PRV, arXiv:2106.02848); raises ImportError if it is not installed.
    """
    from opacus.accountants import PRVAccountant, RDPAccountant

    if not noise:
        return math.inf
    exact = PRVAccountant()
    bound = RDPAccountant()
    # The bound is quick and always at hand; PRV is exact and slow where epsilon is large.
    exact.history = bound.history = [(noise, rate, num_updates)]
    with warnings.catch_warnings():  # of the grids on which they begin their search
        warnings.simplefilter("ignore")
        epsilon = float(bound.get_epsilon(delta))
        if epsilon > _MAX_EXACT:
            return epsilon
        return float(exact.get_epsilon(delta))

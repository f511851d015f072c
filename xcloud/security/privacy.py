"""Differential privacy: clip what a sample, or a cloud, can contribute, add Gaussian noise, say
what that guarantees. Pure: no links, no trainer.

(epsilon, delta): whoever sees everything that was noised cannot tell, beyond a factor of
e^epsilon and with probability delta to fail, whether one sample (one cloud's data) was used or
left out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from xcloud.base.settings import NotNegativeFloat, PositiveFloat, settings


@settings("security.privacy")
class _Noised:
    """clip: largest norm of one contribution. noise: standard deviation of the noise on every
    value, in units of clip. delta: of the guarantee; choose less than 1 / number of samples."""

    clip: PositiveFloat
    noise: NotNegativeFloat
    delta: Annotated[float, Field(gt=0.0, le=0.999999)] = 1e-5

    unit = ""

    @property
    def label(self) -> str:
        return f"private by {self.unit} (clip {self.clip:g}, noise {self.noise:g})"

    def epsilon(self, squared_uses: float) -> float:
        """squared_uses: sum over all releases of the square of how often one unit is in it."""
        return gaussian_epsilon(self.noise, squared_uses, self.delta)


@settings("security.privacy")
class SamplePrivacy(_Noised):
    """DP-SGD (Abadi et al., arXiv:1607.00133): every sample's gradient is clipped, each replica
    adds noise to the sum of its own before any of it leaves the cloud.

    g = 1/B (sum_i g_i min(1, clip / |g_i|) + noise * clip * N(0, I)), B the update's samples, g_i
    the gradient of sample i, times B over the weight of the whole update.
    Differences: each stage is clipped by itself, to clip / sqrt(stages), which bounds the whole by
    clip; lengths of texts, on which the weight depends, count as public (they are sent in plain).
    """

    unit = "sample"


@settings("security.privacy")
class CloudPrivacy(_Noised):
    """DP-FedAvg (McMahan et al., arXiv:1710.06963), noised by each cloud: what a replica gives to
    a merge, gradient or weight change, is clipped as a whole and noised before it is sent.

    Hides whether a cloud took part with all its data. The noise is as long as clip * noise *
    sqrt(number of values), so it takes many clouds, or few values (LoRA), to learn despite it.
    Difference: each part of a message's values that is sent apart (fragments, shares of ranks) is
    clipped by itself, to clip / sqrt(parts).
    """

    unit = "cloud"


Privacy = SamplePrivacy | CloudPrivacy


def clip_factor(tensors: Iterable[Tensor], limit: float) -> float:
    """What to multiply the tensors by so that their common norm is at most `limit`; 1 if it is.
    nan where they are not finite, so that the update is seen to be."""
    squares = [float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors]
    norm = math.sqrt(sum(squares))
    if not math.isfinite(norm):
        return math.nan
    return min(1.0, limit / norm) if norm else 1.0


def noise_like(tensor: Tensor, deviation: float, chance: np.random.Generator) -> Tensor:
    """N(0, deviation^2). chance: secret to the sender; who can draw the same can subtract it."""
    drawn = torch.from_numpy(chance.standard_normal(tensor.shape, dtype=np.float32))
    return deviation * drawn.to(tensor)


def private_contribution(
    names: Collection[str], privacy: CloudPrivacy, num_parts: int, silent: Collection[str] = ()
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Clips what this replica contributes, and adds noise: before the encoder, so its residual is
    of noised values.

    names: of the tensors. num_parts: messages that together are one contribution of a cloud.
    silent: names of which zero is sent (or nan, where they are not finite).
    """
    are_silent = [name in silent for name in names]
    limit, deviation = privacy.clip / math.sqrt(num_parts), privacy.clip * privacy.noise
    # Not drawn from the run's seed: the other clouds know that one too.
    chance = np.random.default_rng()

    def noised(tensor: Tensor) -> Tensor:
        return tensor + noise_like(tensor, deviation, chance) if deviation else tensor

    def protect(tensors: Sequence[Tensor]) -> list[Tensor]:
        pairs = list(zip(tensors, are_silent, strict=True))
        factor = clip_factor([tensor for tensor, is_silent in pairs if not is_silent], limit)
        return [0 * t if is_silent else noised(t * factor) for t, is_silent in pairs]

    return protect


def most_squared_uses(batches: Iterable[Tensor]) -> int:
    """Of the sample that counts most: the sum over updates of the square of how often it is in
    the batch, for gaussian_epsilon. batches: sample ids of each update."""
    totals: dict[int, int] = {}
    for ids in batches:
        samples, counts = torch.unique(ids, return_counts=True)
        for sample, count in zip(samples.tolist(), counts.tolist(), strict=True):
            totals[sample] = totals.get(sample, 0) + count**2
    return max(totals.values(), default=0)


def gaussian_epsilon(noise: float, squared_uses: float, delta: float) -> float:
    """The smallest epsilon of Gaussian releases whose squared sensitivities, in units of the
    clip, add up to `squared_uses`. Exact: together they are one Gaussian release with
    mu = sqrt(squared_uses) / noise (Dong et al., arXiv:1905.02383, corollaries 1 and 3.3):
        delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu)
    Assumes nothing of how batches are drawn; whoever knows the seed knows the batches.
    """
    if not squared_uses:
        return 0.0
    if not noise:
        return math.inf
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    mu = math.sqrt(squared_uses) / noise

    def failure(epsilon: float) -> float:
        # e^epsilon Phi(-x) by its logarithm: the factors overflow and vanish.
        beyond = log_ndtr(-mu / 2 - epsilon / mu) + epsilon
        return math.exp(log_ndtr(mu / 2 - epsilon / mu)) - math.exp(beyond)

    if failure(0.0) <= delta:
        return 0.0
    high = 1.0
    while failure(high) > delta:
        high *= 2
    return float(brentq(lambda epsilon: failure(epsilon) - delta, 0.0, high, xtol=1e-12))


def sampled_epsilon(noise: float, rate: float, num_updates: int, delta: float) -> float:
    """As is usually reported of DP-SGD: as though every sample were in each update's batch with
    probability `rate`, independently and unknown to everyone. By the accountant of Opacus (PRV,
    arXiv:2106.02848), which must be installed (ImportError)."""
    from opacus.accountants import PRVAccountant

    if not noise:
        return math.inf
    accountant = PRVAccountant()
    accountant.history = [(noise, rate, num_updates)]
    with warnings.catch_warnings():  # of the grid on which it begins its search
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))

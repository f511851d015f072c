"""Noise that a cloud adds to what it sends at stage boundaries, before memory and compressor:
defences of text and labels (the leak meter tells how much they help). Pure tensor code: no links,
no compressors, no trainer.

Noise is drawn from a `chance` that is secret to the sender: anyone who can reproduce the noise can
subtract it.

Shapes: B samples of a message; R rows, sample after sample, counts [B] of them; D features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Labelled, NotNegativeFloat, PositiveFloat, settings

LABEL = "label"
"""The batch field that `Marvell` reads."""

_TINY = 1e-12


class Defence(Labelled, ABC):
    """A defence of one direction, without state.

    needs_labels: the defence reads the samples' labels.
    """

    needs_labels = False

    def protect(
        self, tensor: Tensor, counts: Tensor | None, labels: Tensor | None,
        chance: np.random.Generator,
    ) -> Tensor:  # fmt: skip
        """Return what to send instead of `tensor`, [R, D].

        counts: None if every sample is one row.
        """
        # A micro-batch without rows has nothing to hide, and nothing to take a maximum of.
        if not tensor.numel():
            return tensor
        if counts is None:
            counts = torch.ones(len(tensor))
        wide = counts.to(tensor.device, torch.int64)
        # [B, longest]: true where a sample has a row.
        has_row = torch.arange(int(wide.max()), device=tensor.device) < wide[:, None]
        return self._protect(tensor, has_row, labels, chance=chance)

    @abstractmethod
    def _protect(
        self, tensor: Tensor, has_row: Tensor, labels: Tensor | None, chance: np.random.Generator
    ) -> Tensor:
        """Return what to send, as `protect` does.

        has_row: bool [B, longest], where the rows are if every sample is padded to the longest; in
            this order they are the tensor's, of which there is at least one.
        """

    def check_labels(self, kind: str, num_outputs: int) -> None:
        """Raise ConfigError for labels that it cannot hide. kind, num_outputs: of the head."""
        if self.needs_labels and (kind, num_outputs) != ("classes", 2):
            raise ConfigError(
                f"security.defences.backward: {self.label} hides labels of two classes, but "
                f"this task's are of kind {kind!r} with {num_outputs} outputs; choose "
                "security/defences/backward=max_norm or gaussian_noise"
            )


@settings("GaussianNoise")
class GaussianNoise(Defence):
    """The Gaussian mechanism: clip each row to norm `clip`, then add noise to every value.

    x' = x * min(1, clip / |x|) + sigma * clip * N(0, I)
    Source: Abadi et al., arXiv:1607.00133 (clip and noise, here applied at the boundary).
    Difference: it protects one row of one message; no privacy budget over steps is kept.

    unit: "absolute", or "largest": clip is relative to the largest row norm of the message, which
        gives no formal guarantee.
    clip: the norm that a row is clipped to.
    sigma: the standard deviation of the noise, in units of the clipped norm; 0 = none.
    """

    clip: PositiveFloat
    sigma: NotNegativeFloat
    unit: Literal["absolute", "largest"] = "largest"

    label_form = "gaussian({sigma:g})"

    def _protect(
        self, tensor: Tensor, has_row: Tensor, labels: Tensor | None, chance: np.random.Generator
    ) -> Tensor:
        # Never zero, as a row is divided by its norm.
        norms = torch.linalg.vector_norm(tensor.flatten(1), dim=1).clamp(min=_TINY)
        # The largest norm of the message is a value of the data, so noise by it guarantees
        # nothing.
        clip = self.clip * (float(norms.detach().max()) if self.unit == "largest" else 1.0)
        # Not clamp: at exactly 1, where nothing is clipped, it would still pass on a gradient.
        scale = torch.where(norms > clip, clip / norms, 1.0)
        # Noise is drawn from the sender's own generator, which no other cloud knows.
        noise = self.sigma * clip * normal(tensor, chance)
        return tensor * scale.view(-1, *[1] * (tensor.dim() - 1)) + noise


@dataclass(frozen=True)
class MaxNorm(Defence):
    """Scale every sample so that its mean square norm equals the largest of the message.

    x' = x * (1 + e * sqrt(|x_longest|^2 / |x|^2 - 1)),  e ~ N(0, 1), |x| over all rows of a sample
    Source: Li et al., arXiv:2102.08504, section 4.1. Differences: the largest of a
    micro-batch, not of a batch; a sample of zeros gets a random direction.
    Hides the norm and nothing else: directions are kept, up to their sign.
    """

    label_form = "max_norm"

    def _protect(
        self, tensor: Tensor, has_row: Tensor, labels: Tensor | None, chance: np.random.Generator
    ) -> Tensor:
        # The sample of each row, in the rows' order.
        owner = has_row.nonzero()[:, 0]

        def squares_of(rows: Tensor) -> Tensor:
            """Return the squared norm of each sample over all its rows, float64 [B]."""
            squares = rows.detach().flatten(1).double().square().sum(1)
            return squares.new_zeros(len(has_row)).index_add_(0, owner, squares)

        def of_rows(per_sample: Tensor) -> Tensor:
            return per_sample[owner].view(-1, *[1] * (tensor.dim() - 1))

        # The factor is no part of what is learned: gradients go through the tensor alone.
        with torch.no_grad():
            squares = squares_of(tensor)
            longest = squares.max()
            # Clamped so that samples of nearly zero give no infinite factor, also where all are
            # zero.
            spread = (longest / squares.clamp(min=_TINY * float(longest) + 1e-45) - 1).clamp(min=0)
            factor = 1 + spread.sqrt() * normal(spread, chance)
            # A sample of zeros has no direction to scale: it gets a random one of the largest norm
            # below.
            factor = torch.where(squares > 0, factor, torch.ones_like(factor))
            noise = normal(tensor, chance) * of_rows(squares == 0)
            noise_scale = (longest / squares_of(noise).clamp(min=_TINY)).sqrt()
        scaled: Tensor = tensor * of_rows(factor).to(tensor.dtype)
        return scaled + (noise * of_rows(noise_scale)).to(tensor.dtype)


class NoiseShape(NamedTuple):
    """The variances of the noise for samples of class 0 and 1.

    They are those along the difference of the class means, and in every direction orthogonal to
    it.
    """

    along_0: float
    across_0: float
    along_1: float
    across_1: float


@settings("Marvell")
class Marvell(Defence):
    """Noise with the class covariances that best hide a binary label at a given power.

    Source: Li et al., arXiv:2102.08504, section 4.2: the gradients of class 0 and 1 are
    N(m0, u I) and N(m1, v I) in d dimensions, g = |m1 - m0|^2, a share p is of class 1. Noise
    N(0, S0), N(0, S1) is added so as to minimise the symmetric Kullback-Leibler divergence of
    the two sums, which bounds the AUC of every attack, under
        p tr(S1) + (1 - p) tr(S0) <= power * g.
    The best S have one variance along m1 - m0 and one orthogonal to it (their theorem), so with
    A1 = u + along_0, A2 = u + across_0, B1 = v + along_1, B2 = v + across_1 the objective is
        (d-1) (A2/B2 + B2/A2) + (A1 + g) / B1 + (B1 + g) / A1, which `noise_shape` minimises.

    A sample's gradient is the vector of all its rows, padded to the longest of the message. m, u,
    v, p are estimated from the message. Differences: a message is a micro-batch; if it has only
    one class, isotropic noise of power * mean |gradient|^2 is used.

    power: s of the paper; 0.25 .. 25 there. Needs labels 0 and 1 in the sender's cloud.
    """

    power: PositiveFloat
    needs_labels = True

    label_form = "marvell({power:g})"

    def _protect(
        self, tensor: Tensor, has_row: Tensor, labels: Tensor | None, chance: np.random.Generator
    ) -> Tensor:
        assert labels is not None
        is_class = labels.dim() == 1 and not labels.is_floating_point()
        if not is_class or bool(((labels != 0) & (labels != 1)).any()):
            raise ConfigError(
                "Marvell hides a binary label, so it needs integers 0 and 1, got labels such as "
                f"{labels.flatten()[:3].tolist()}; choose another security/defences/backward "
                "(max_norm, gaussian_noise)"
            )
        # All rows of a sample side by side, with zeros where a sample has fewer: Marvell's vector.
        rows = tensor.detach().flatten(1).double()
        flat = rows.new_zeros(*has_row.shape, rows.shape[1])
        flat[has_row] = rows
        noise = self.noise(flat.flatten(1), is_1=labels.to(tensor.device) == 1, chance=chance)
        return tensor + noise.view_as(flat)[has_row].view_as(tensor).to(tensor.dtype)

    def noise(self, flat: Tensor, is_1: Tensor, chance: np.random.Generator) -> Tensor:
        """Return noise float64 [B, d].

        is_1: bool [B].
        """
        size = flat.shape[1]
        share = float(is_1.double().mean())
        # One class has no difference to hide: the power is spread over all directions.
        if share in (0.0, 1.0):
            variance = self.power * float(flat.square().sum(1).mean()) / size
            isotropic: Tensor = normal(flat, chance) * variance**0.5
            return isotropic
        mean_0 = flat[~is_1].mean(0)
        mean_1 = flat[is_1].mean(0)
        difference = mean_1 - mean_0
        gap = float(difference.square().sum())
        # Equal means: nothing tells the classes apart.
        if gap == 0:
            return torch.zeros_like(flat)
        shape = noise_shape(
            float((flat[~is_1] - mean_0).square().mean()),
            v=float((flat[is_1] - mean_1).square().mean()),
            # power of the paper is in units of the squared distance of the means.
            size=size, gap=gap, share=share, power=self.power * gap,
        )  # fmt: skip
        # For each sample the variances of its own class.
        variances = flat.new_tensor([shape[:2], shape[2:]])[is_1.long()]  # [B, along and across]
        along, across = variances.unbind(1)
        # What the direction of the difference gets beyond all others.
        one = normal(flat[:, 0], chance) * (along - across).clamp(min=0).sqrt()
        noise: Tensor = one[:, None] * difference / gap**0.5
        return noise + across.sqrt()[:, None] * normal(flat, chance)


def noise_shape(
    u: float, v: float, size: int, gap: float, share: float, power: float
) -> NoiseShape:
    """Return Marvell's noise. Letters as there: d = size, g = gap, p = share of class 1.

    power: the mean square length of the noise.

    If u <= v, orthogonal noise in class 1 would only widen the gap to class 0, so B2 = v and A2 is
    in [u, v]. All power is spent, since scaling A1 and B1 up lowers the objective. The objective
    is a sum of monomials in A1, A2, B1, hence convex in their logarithms, and so is its minimum
    over some of them: both searches below are unimodal.
    """
    # The paper assumes u <= v; the other case is the same with the classes exchanged.
    if u > v:
        mirrored = noise_shape(v, v=u, size=size, gap=gap, share=1 - share, power=power)
        return NoiseShape(
            along_0=mirrored.along_1,
            across_0=mirrored.across_1,
            along_1=mirrored.along_0,
            across_1=mirrored.across_0,
        )
    # A class of equal gradients has no variance, and would be divided by.
    u = max(u, _TINY * gap)
    v = max(v, _TINY * gap)

    # What the power leaves for noise along the difference.
    def left_along(across_0: float) -> float:
        return max(0.0, power - (1 - share) * (size - 1) * across_0)

    def divergence(across_0: float, along_0: float) -> float:
        # All that class 0 leaves goes to class 1, weighed by its share.
        along_1 = max(0.0, left_along(across_0) - (1 - share) * along_0) / share
        a1 = u + along_0
        a2 = u + across_0
        b1 = v + along_1
        return (size - 1) * (a2 / v + v / a2) + (a1 + gap) / b1 + (b1 + gap) / a1

    def best_along(across_0: float) -> float:
        # All power to class 0 is the most that it can get.
        most = left_along(across_0) / (1 - share)
        # Along is never less than across: noise across helps only from there on.
        return _lowest(
            lambda along: divergence(across_0, along), low=min(across_0, most), high=most
        )

    # A2 lies in [u, v], and the power bounds it, too.
    max_across = min(v - u, power / ((1 - share) * size))
    across_0 = _lowest(lambda a: divergence(a, best_along(a)), low=0.0, high=max_across)
    along_0 = best_along(across_0)
    along_1 = max(0.0, left_along(across_0) - (1 - share) * along_0) / share
    return NoiseShape(along_0, across_0, along_1, across_1=0.0)


def normal(like: Tensor, chance: np.random.Generator) -> Tensor:
    return torch.from_numpy(chance.standard_normal(like.shape, dtype=np.float32)).to(like)


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimiser of a unimodal function; both ends are candidates."""
    from scipy.optimize import minimize_scalar

    # Relative to the interval, so that precision does not depend on the scale of gradients.
    precise = {"xatol": 1e-9 * (high - low)}
    inside = minimize_scalar(function, bounds=(low, high), method="bounded", options=precise).x
    # The search stays inside of its bounds, and the best may lie on one.
    return float(min((low, inside, high), key=function))

"""Noise that a cloud adds to what it sends, so that the receiver learns less about text or labels.
Pure tensor code: no links, no compressors. leak_meter.py measures how much it helps.

Shapes: B samples of a message; R rows, sample after sample, counts [B] of them; D features.
A defence acts in the sender's cloud, before memory and compressor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from xcloud.base.errors import ConfigError
from xcloud.base.settings import NotNegativeFloat, PositiveFloat, settings

LABEL = "label"
"""The batch field that `Marvell` reads."""

_TINY = 1e-12


@runtime_checkable
class Defence(Protocol):
    """Defence of one direction, without state. All noise is drawn from `chance`, which must be
    secret to the sender: anyone who can reproduce the noise can subtract it."""

    @property
    def needs_labels(self) -> bool:
        """Whether `protect` needs the samples' labels."""

    @property
    def label(self) -> str:
        """Short name."""

    def protect(
        self,
        tensor: Tensor,
        counts: Tensor | None,
        labels: Tensor | None,
        chance: np.random.Generator,
    ) -> Tensor:
        """What to send instead of `tensor`, [R, D]. counts: None if every sample is one row."""


@settings("GaussianNoise")
class GaussianNoise:
    """The Gaussian mechanism: clip each row to norm `clip`, then add noise to every value.

    x' = x * min(1, clip / |x|) + sigma * clip * N(0, I)
    Source: Abadi et al., arXiv:1607.00133 (clip and noise, here applied at the boundary).
    Difference: it protects one row of one message; no privacy budget over steps is kept.

    unit: "absolute", or "largest": clip is relative to the largest row norm of the message, which
        suits activations and gradients of any size but gives no formal guarantee.
    """

    clip: PositiveFloat
    sigma: NotNegativeFloat
    unit: Literal["absolute", "largest"] = "largest"
    needs_labels = False

    @property
    def label(self) -> str:
        return f"gaussian({self.sigma:g})"

    def protect(
        self,
        tensor: Tensor,
        counts: Tensor | None,
        labels: Tensor | None,
        chance: np.random.Generator,
    ) -> Tensor:
        if not tensor.numel():
            return tensor
        norms = torch.linalg.vector_norm(tensor.flatten(1), dim=1).clamp(min=_TINY)
        clip = self.clip * (float(norms.detach().max()) if self.unit == "largest" else 1.0)
        # Not clamp: at exactly 1, where nothing is clipped, it would still pass on a gradient.
        scale = torch.where(norms > clip, clip / norms, 1.0)
        scale = scale.view(-1, *[1] * (tensor.dim() - 1))
        noised: Tensor = tensor * scale + self.sigma * clip * _normal(tensor, chance)
        return noised


@dataclass(frozen=True)
class MaxNorm:
    """Scale every sample so that its mean square norm equals the largest of the message.

    x' = x * (1 + e * sqrt(|x_longest|^2 / |x|^2 - 1)),  e ~ N(0, 1), |x| over all rows of a sample
    Source: Li et al., arXiv:2102.08504, section 4.1. Differences: the largest of a
    micro-batch, not of a batch; a sample of zeros gets a random direction.
    Hides the norm and nothing else: directions are kept, up to their sign.
    """

    needs_labels = False
    label = "max_norm"

    def protect(
        self,
        tensor: Tensor,
        counts: Tensor | None,
        labels: Tensor | None,
        chance: np.random.Generator,
    ) -> Tensor:
        owner = sample_of_row(tensor, counts)
        if not len(owner):
            return tensor
        num_samples = len(tensor) if counts is None else len(counts)
        with torch.no_grad():
            squares = _squares(tensor, owner, num_samples)
            longest = squares.max()
            spread = (longest / squares.clamp(min=_TINY * float(longest) + 1e-45) - 1).clamp(min=0)
            factor = 1 + spread.sqrt() * _normal(spread, chance)
            factor = torch.where(squares > 0, factor, torch.ones_like(factor))
            noise = _normal(tensor, chance) * (squares == 0)[owner].view(_column(tensor))
            noise_squares = _squares(noise, owner, num_samples)
            noise_scale = (longest / noise_squares.clamp(min=_TINY)).sqrt()
        scaled: Tensor = tensor * factor[owner].view(_column(tensor)).to(tensor.dtype)
        return scaled + (noise * noise_scale[owner].view(_column(tensor))).to(tensor.dtype)


class NoiseShape(NamedTuple):
    """Variances of the noise for samples of class 0 and 1: along the difference of the class
    means, and in every direction orthogonal to it."""

    along_0: float
    across_0: float
    along_1: float
    across_1: float


@settings("Marvell")
class Marvell:
    """Noise with the class covariances that best hide a binary label at a given power.

    Model of Li et al., arXiv:2102.08504, section 4.2: the gradients of class 0 and 1 are
    N(m0, u I) and N(m1, v I) in d dimensions, g = |m1 - m0|^2, a share p is of class 1. Noise
    N(0, S0), N(0, S1) is added so as to minimise the symmetric Kullback-Leibler divergence of
    the two sums, which bounds the AUC of every attack, under
        p tr(S1) + (1 - p) tr(S0) <= power * g.
    The best S have one variance along m1 - m0 and one orthogonal to it (their theorem), so with
    A1 = u + along_0, A2 = u + across_0, B1 = v + along_1, B2 = v + across_1 the objective is
        (d-1) (A2/B2 + B2/A2) + (A1 + g) / B1 + (B1 + g) / A1.
    `noise_shape` minimises it.

    A sample's gradient is the vector of all its rows, padded to the longest of the message; noise
    for padding rows is not sent. m, u, v, p are estimated from the message.
    Differences: a message is a micro-batch; if it has only one class, the difference to the other
    is unknown, and isotropic noise of power * mean |gradient|^2 is used.

    power: s of the paper; 0.25 .. 25 there. Needs labels 0 and 1 in the sender's cloud.
    """

    power: PositiveFloat
    needs_labels = True

    @property
    def label(self) -> str:
        return f"marvell({self.power:g})"

    def protect(
        self,
        tensor: Tensor,
        counts: Tensor | None,
        labels: Tensor | None,
        chance: np.random.Generator,
    ) -> Tensor:
        assert labels is not None
        if not _is_binary(labels):
            raise ConfigError(
                "Marvell hides a binary label, so it needs integers 0 and 1, got "
                f"{str(labels.dtype).removeprefix('torch.')} labels such as "
                f"{labels.flatten()[:3].tolist()}; for other labels choose another "
                "security/defences/backward (max_norm, gaussian_noise)"
            )
        if not tensor.numel():
            return tensor
        owner = sample_of_row(tensor, counts)
        place = _place_in_sample(owner)
        longest = int(place.max()) + 1
        rows = tensor.detach().flatten(1).double()
        flat = rows.new_zeros(len(labels), longest, rows.shape[1])
        flat[owner, place] = rows
        noise = self._noise(flat.flatten(1), labels.to(tensor.device) == 1, chance)
        return tensor + noise.view_as(flat)[owner, place].view_as(tensor).to(tensor.dtype)

    def _noise(self, flat: Tensor, is_1: Tensor, chance: np.random.Generator) -> Tensor:
        """float64 [B, d]. is_1: bool [B]."""
        size = flat.shape[1]
        share = float(is_1.double().mean())
        if share in (0.0, 1.0):
            variance = self.power * float(flat.square().sum(1).mean()) / size
            isotropic: Tensor = _normal(flat, chance) * variance**0.5
            return isotropic
        mean_0, mean_1 = flat[~is_1].mean(0), flat[is_1].mean(0)
        difference = mean_1 - mean_0
        gap = float(difference.square().sum())
        if gap == 0:
            return torch.zeros_like(flat)
        shape = noise_shape(
            float((flat[~is_1] - mean_0).square().mean()),
            float((flat[is_1] - mean_1).square().mean()),
            size, gap, share, self.power * gap,
        )  # fmt: skip
        variances = flat.new_tensor([shape[:2], shape[2:]])[is_1.long()]  # [B, along and across]
        along, across = variances.unbind(1)
        one = _normal(flat[:, 0], chance) * (along - across).clamp(min=0).sqrt()
        noise: Tensor = one[:, None] * difference / gap**0.5
        return noise + across.sqrt()[:, None] * _normal(flat, chance)


def noise_shape(
    u: float, v: float, size: int, gap: float, share: float, power: float
) -> NoiseShape:
    """The variances of Marvell's noise. Letters as there: d = size, g = gap, p = share of class 1,
    power: mean square length of the noise.

    If u <= v, orthogonal noise in class 1 would only widen the gap to class 0, so B2 = v and A2 is
    in [u, v]. All power is spent, since scaling A1 and B1 up lowers the objective. The objective
    is a sum of monomials in A1, A2, B1, hence convex in their logarithms, and so is its minimum
    over some of them: both searches below are unimodal.
    """
    if u > v:
        mirrored = noise_shape(v, u, size, gap, 1 - share, power)
        return NoiseShape(mirrored.along_1, mirrored.across_1, mirrored.along_0, mirrored.across_0)
    u, v = max(u, _TINY * gap), max(v, _TINY * gap)

    def left_along(across_0: float) -> float:
        return max(0.0, power - (1 - share) * (size - 1) * across_0)

    def divergence(across_0: float, along_0: float) -> float:
        along_1 = max(0.0, left_along(across_0) - (1 - share) * along_0) / share
        a1, a2, b1 = u + along_0, u + across_0, v + along_1
        return (size - 1) * (a2 / v + v / a2) + (a1 + gap) / b1 + (b1 + gap) / a1

    def best_along(across_0: float) -> float:
        most = left_along(across_0) / (1 - share)
        return _lowest(lambda along: divergence(across_0, along), min(across_0, most), most)

    most_across = min(v - u, power / ((1 - share) * size))
    across_0 = _lowest(lambda a: divergence(a, best_along(a)), 0.0, most_across)
    along_0 = best_along(across_0)
    along_1 = max(0.0, left_along(across_0) - (1 - share) * along_0) / share
    return NoiseShape(along_0, across_0, along_1, 0.0)


@settings("security.defences")
class Defences:
    """forward: for activations, in training and in evaluation. backward: for gradients.

    A defence acts where a message goes from a cloud that holds the protected data (forward: what
    the first stage reads; backward: what the last one reads) to one that does not. Later messages
    are computed from protected ones.
    """

    forward: Defence | None = None
    backward: Defence | None = None

    def __post_init__(self) -> None:
        if self.forward is not None and self.forward.needs_labels:
            raise ConfigError(
                f"security.defences.forward: {self.forward.label} needs labels, which are "
                "not available at evaluation; use it backward"
            )

    @property
    def label(self) -> str:
        """ "gaussian(0.1)+marvell(4)", forward first; "" without any."""
        if self.forward is None and self.backward is None:
            return ""
        return "+".join(
            d.label if d is not None else "none" for d in (self.forward, self.backward)
        )

    def at(self, stage: int, cloud_of: Callable[[int], str], last: int) -> dict[str, Defence]:
        """Defences at the boundary after `stage`, by direction. cloud_of: stage -> cloud."""
        before, after = cloud_of(stage), cloud_of(stage + 1)
        found = {}
        if self.forward is not None and before == cloud_of(0) != after:
            found["forward"] = self.forward
        if self.backward is not None and after == cloud_of(last) != before:
            found["backward"] = self.backward
        return found

    def check_head(self, kind: str, num_outputs: int) -> None:
        """Raise ConfigError if a defence cannot hide these labels. kind, num_outputs: of the
        task's head, known where labels are."""
        if self.backward is not None and self.backward.needs_labels:
            if (kind, num_outputs) != ("classes", 2):
                raise ConfigError(
                    f"security.defences.backward: {self.backward.label} hides labels of two "
                    f"classes, but this task's are of kind {kind!r} with {num_outputs} outputs; "
                    "choose security/defences/backward=max_norm or gaussian_noise"
                )

    def check(self, last_reads: frozenset[str]) -> None:
        """Raise ConfigError if a defence needs labels that the last stage does not read."""
        if self.backward is not None and self.backward.needs_labels and LABEL not in last_reads:
            raise ConfigError(
                f"security.defences.backward: {self.backward.label} needs the batch field "
                f"{LABEL!r}, but the last stage reads {', '.join(sorted(last_reads)) or 'nothing'}"
            )


def no_defence() -> None:
    """No defence, for configs (security/defences/forward=none)."""


def sample_of_row(tensor: Tensor, counts: Tensor | None) -> Tensor:
    """For each row, the position of its sample in the message, int64 [R]."""
    if counts is None:
        return torch.arange(len(tensor), device=tensor.device)
    wide = counts.to(tensor.device, torch.int64)
    return torch.repeat_interleave(torch.arange(len(wide), device=tensor.device), wide)


def _is_binary(labels: Tensor) -> bool:
    is_class = labels.dim() == 1 and not labels.is_floating_point()
    return is_class and bool(((labels == 0) | (labels == 1)).all())


def _place_in_sample(owner: Tensor) -> Tensor:
    """0, 1, 2 ... for the rows of each sample."""
    counts = torch.bincount(owner)
    first = counts.cumsum(0) - counts
    return torch.arange(len(owner), device=owner.device) - first[owner]


def _squares(tensor: Tensor, owner: Tensor, num_samples: int) -> Tensor:
    """Squared norm of each sample over all its rows, float64 [B]."""
    rows = tensor.detach().flatten(1).double().square().sum(1)
    return torch.zeros(num_samples, dtype=rows.dtype, device=rows.device).index_add_(
        0, owner, rows
    )


def _column(tensor: Tensor) -> tuple[int, ...]:
    return (-1, *[1] * (tensor.dim() - 1))


def _normal(like: Tensor, chance: np.random.Generator) -> Tensor:
    return torch.from_numpy(chance.standard_normal(like.shape, dtype=np.float32)).to(like)


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Minimiser of a unimodal function, by golden-section search; both ends are candidates."""
    ratio = (5**0.5 - 1) / 2
    first, last = low, high
    a, b = last - ratio * (last - first), first + ratio * (last - first)
    at_a, at_b = function(a), function(b)
    for _ in range(40):
        if at_a <= at_b:
            last, b, at_b = b, a, at_a
            a = last - ratio * (last - first)
            at_a = function(a)
        else:
            first, a, at_a = a, b, at_b
            b = first + ratio * (last - first)
            at_b = function(b)
    return float(min((low, a, b, high), key=function))

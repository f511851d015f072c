"""The settings of `security.privacy`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xcloud.base.outcome import Outcome
from xcloud.base.settings import Labelled, NotNegativeFloat, PositiveFloat, settings


@settings("security.privacy", formerly="xcloud.security.defences.Privacy")
class Privacy(Labelled):
    """Clips what one unit can contribute to what leaves a cloud, and adds noise.

    unit: "sample": DP-SGD (Abadi et al., arXiv:1607.00133). Every sample's gradient is clipped,
        each replica adds noise to the sum of its own before any of it leaves the cloud:
        g = 1/B (sum_i g_i min(1, clip / |g_i|) + noise * clip * N(0, I)), B the update's samples,
        g_i the gradient of sample i, times B over the weight of the whole update.
        Differences: each stage is clipped by itself, to clip / sqrt(stages), which bounds the
        whole by clip; lengths of texts, on which the weight depends, count as public.
        "cloud": DP-FedAvg (McMahan et al., arXiv:1710.06963), noised by each cloud. What a replica
        gives to a merge, gradient or weight change, is clipped as a whole and noised; hides
        whether a cloud took part with all its data. It takes many clouds, or few values (LoRA), to
        learn despite it. Difference: each part of a message that is sent apart (fragments, shares
        of ranks) is clipped by itself, to clip / sqrt(parts).
    clip: the largest norm of one contribution.
    noise: the standard deviation of the noise on every value, in units of clip.
    delta: the delta of the guarantee; choose less than 1 / number of samples.
    """

    unit: Literal["sample", "cloud"]
    clip: PositiveFloat
    noise: NotNegativeFloat
    delta: Annotated[float, Field(gt=0.0, le=0.999999)] = 1e-5

    label_form = "private by {unit} (clip {clip:g}, noise {noise:g})"


@settings(kw_only=True)
class PrivacySetting:
    """Adds the setting of this feature to `security`.

    privacy: the clipping and noise of gradients or weight changes, and the account of the privacy
        loss.
    """

    privacy: Annotated[Privacy | None, Outcome(refused="one epsilon is of one noise and clip")] = (
        None
    )

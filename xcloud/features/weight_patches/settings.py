"""The settings of `training.patches`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from xcloud.base.outcome import EQUAL
from xcloud.base.settings import Address, NotNegative, Positive, settings


@settings("training.patches", formerly="xcloud.pipeline.settings.Patches")
class Patches:
    """When a run writes its weights for workers elsewhere (docs/follow-weights.md).

    every: updates between two patches. A patch has the values that changed in BF16. The last
        update has a patch, too. 0 = no patches.
    whole_every: patches between two snapshots. A snapshot has all values.
    url: folder or bucket that fsspec knows. Each run needs one of its own. None: the run folder,
        if one machine plays all clouds.
    reader: cloud to whose certificate (`peers` of the policy) the weights are sealed. None: they
        are not sealed.
    """

    every: NotNegative = 0
    whole_every: Positive = 20
    url: Address | None = None
    reader: str | None = None


@settings(kw_only=True)
class PatchesSetting:
    """Adds the setting of this feature to `training`.

    patches: when the run writes its weights for workers elsewhere.
    """

    patches: Annotated[Patches, EQUAL] = field(default_factory=Patches)

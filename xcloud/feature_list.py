"""The one list of what a job may use beyond a plain pipeline. Nothing else names all features."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from xcloud.features.autopilot.figures import SWITCHES
from xcloud.features.leak_meter.figures import LEAKS
from xcloud.features.one_way.figures import PRODUCERS
from xcloud.features.privacy.figures import GUARANTEE
from xcloud.features.replicas.figures import MERGES
from xcloud.features.sentinel.figures import DEPARTURES
from xcloud.features.until.figures import TARGET
from xcloud.features.weight_patches.figures import WEIGHTS
from xcloud.record.feature_figures import FeatureFigure
from xcloud.record.run_figures import OF_EVERY_RUN
from xcloud.record.usage import USAGE

if TYPE_CHECKING:
    from xcloud.rank.feature import Feature

FIGURES: Sequence[FeatureFigure] = (
    *(LEAKS, MERGES, SWITCHES, GUARANTEE, DEPARTURES, WEIGHTS),
    *OF_EVERY_RUN,
    *(PRODUCERS, TARGET, USAGE),
)
"""What they add to summary, closing table, tracker and pictures, and what every run has there. In
the order of the table, which ends with what the run used."""


@cache
def all_features() -> Sequence[Feature]:
    """Return all features, in the order in which they change what a rank builds and act on an
    update. Imported only here: who reads a record needs no torch."""
    from xcloud.features.activation_cache.feature import ActivationCaching
    from xcloud.features.autopilot.feature import AutopilotFeature
    from xcloud.features.leak_meter.feature import LeakMeasurement
    from xcloud.features.preferences.feature import PreferenceTuning
    from xcloud.features.privacy.feature import DifferentialPrivacy
    from xcloud.features.replicas.feature import ReplicaAveraging
    from xcloud.features.replicas.links import averager_of_ends
    from xcloud.features.sentinel.feature import DepartureWatch
    from xcloud.features.sharding.feature import Sharding
    from xcloud.features.tied.feature import TiedEnds
    from xcloud.features.two_buffered.feature import OverlappedUpdates
    from xcloud.features.until.feature import RunUntil
    from xcloud.features.weight_patches.feature import WeightPatches

    # The order counts: a hook sees what those before it have changed, and whether the run ends is
    # asked last.
    return (
        LeakMeasurement(),
        ReplicaAveraging(),
        TiedEnds(averager_of_ends),
        Sharding(),
        PreferenceTuning(),
        DifferentialPrivacy(),
        ActivationCaching(),
        DepartureWatch(),
        AutopilotFeature(),
        WeightPatches(),
        OverlappedUpdates(),
        RunUntil(),
    )

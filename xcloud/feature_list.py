"""The one list of what a job may use beyond a plain pipeline. Nothing else names all features."""

from collections.abc import Sequence

from xcloud.features.activation_cache.feature import ActivationCaching
from xcloud.features.autopilot.feature import AutopilotFeature
from xcloud.features.leak_meter.feature import LeakMeasurement
from xcloud.features.privacy.feature import DifferentialPrivacy
from xcloud.features.replicas.feature import Replicas
from xcloud.features.sharding.feature import Sharding
from xcloud.features.tied.feature import TiedEnds
from xcloud.rank.feature import Feature

FEATURES: Sequence[Feature] = (
    AutopilotFeature(),
    Replicas(),
    TiedEnds(),
    Sharding(),
    DifferentialPrivacy(),
    LeakMeasurement(),
    ActivationCaching(),
)

"""The one list of the settings that features add to those of a job. Each stands in the feature's
folder, in a settings.py that imports no room above this one; feature_list.py imports what stands
above a job, so that the two lists cannot be one. For files of earlier releases a feature that is
deleted leaves its setting here, as `dropped={"NAME": VALUE}` of a class below, and the class of a
group, as MOVED["CLASS"] = "xcloud.base.settings.nothing"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_type_hints

from xcloud.base.outcome import Outcome
from xcloud.base.settings import settings
from xcloud.features.autopilot.settings import AutopilotSetting
from xcloud.features.privacy.settings import PrivacySetting
from xcloud.features.sentinel.settings import DepartureSetting
from xcloud.features.until.settings import Until, UntilSetting
from xcloud.features.weight_patches.settings import Patches, PatchesSetting

IN_NO_FILE = (Patches, Until)
"""These classes are named by no file of conf/."""


@settings(kw_only=True)
class OfTraining(UntilSetting, PatchesSetting):
    """Adds the settings of all features to `training`."""


@settings(kw_only=True)
class OfSecurity(PrivacySetting, DepartureSetting):
    """Adds the settings of all features to `security`."""


@settings(kw_only=True)
class OfJob(AutopilotSetting):
    """Adds the settings of all features to a job."""


OUTCOMES: Mapping[str, Outcome] = {
    place + name: mark
    for place, kind in {"training.": OfTraining, "security.": OfSecurity, "": OfJob}.items()
    # get_type_hints keeps the marks that a bare annotation hides.
    for name, hint in get_type_hints(kind, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
    if isinstance(mark, Outcome)
}
"""Each setting has here what happens to a run that resumes with another value of it."""

"""The setting `security.on_departure`."""

from __future__ import annotations

from typing import Literal

from xcloud.base.settings import settings

OnDeparture = Literal["alarm", "stop", "ignore"]


@settings(kw_only=True)
class DepartureSetting:
    """Adds the setting of this feature to `security`.

    on_departure: the reaction when activations or gradients from another cloud suddenly change in
        norm, spread or direction (features/sentinel/): raise an alarm, stop the run, or ignore it.
        None: raise an alarm, but ignore it where one machine plays all clouds, which then have one
        owner.
    """

    on_departure: OnDeparture | None = None

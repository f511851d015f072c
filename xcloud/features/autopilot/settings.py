"""The settings of `autopilot`: what a run may change while it goes on. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.outcome import GOES_ON
from xcloud.base.settings import Positive, settings
from xcloud.comm.compression import Compression


@settings("autopilot")
class Autopilot:
    """The settings of `autopilot`.

    choices: compressors besides the run's own, by name.
    micro_batches, in_flight: numbers besides the schedule's own (num_micro_batches,
        num_in_flight).
    every: updates between looks.
    worth: how many times faster a choice must be predicted to be for a switch.
    confirm: looks in a row that must say so; fewer where they promise more.
    dwell: updates that must have passed since the last switch.
    """

    choices: Mapping[str, Compression]
    micro_batches: Sequence[Positive] = ()
    in_flight: Sequence[Positive] = ()
    every: Positive = 2
    worth: Annotated[float, Field(gt=1.0)] = 1.05
    confirm: Positive = 4
    dwell: Positive = 10

    def __post_init__(self) -> None:
        if not (self.choices or self.micro_batches or self.in_flight):
            raise ConfigError(
                "autopilot.choices, micro_batches and in_flight are empty, so there would be "
                "nothing to choose"
            )


@settings(kw_only=True)
class AutopilotSetting:
    """Adds the setting of this feature to a job.

    autopilot: the settings of what may change during the run; null: nothing changes.
    """

    autopilot: Annotated[Autopilot | None, GOES_ON] = None

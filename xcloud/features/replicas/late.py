"""What local updates do where a cloud is late or lost: three policies of one setting."""

from __future__ import annotations

from abc import ABC
from typing import Annotated, ClassVar

from pydantic import Field

from xcloud.base.settings import Seconds, settings

NAME = "strategy.averaging.late"
WaitSeconds = Annotated[float, Field(gt=0)]


class LatePolicy(ABC):
    """A policy for a cloud that is late at a merge, or lost. A base class of settings."""

    advice: ClassVar[str] = (
        "a policy of conf/strategy/averaging/late is chosen with a slash, such as "
        "+strategy/averaging/late=skip"
    )
    word: ClassVar[str]
    """As it is chosen in YAML and on the command line."""
    is_elastic: ClassVar[bool] = True
    """Whether the run continues without a cloud. The first cloud then merges for all."""
    may_leave: ClassVar[bool] = False
    """Whether it continues without one that is lost."""
    label: ClassVar[str] = ""
    """What differs from waiting, in words."""

    wait_s: float
    restart_s: float | None = None


@settings(NAME)
class Wait(LatePolicy):
    """Every merge is of all clouds; the run ends if one does not come.

    wait_s: seconds that a merge waits for a cloud, counted from when its own cloud is there.
    """

    word = "wait"
    is_elastic = False

    wait_s: WaitSeconds = 600.0


@settings(NAME)
class Skip(LatePolicy):
    """A merge is made without a late cloud, whose change is part of the next one. A lost cloud
    ends the run.

    wait_s: seconds that a merge waits for a cloud, counted from when the first cloud is there.
    """

    word = "skip"
    label = "skips the late"

    wait_s: WaitSeconds = 600.0


@settings(NAME)
class GoOn(LatePolicy):
    """Merges are made without a late or lost cloud until it comes back. It then takes the values
    of the others and continues at their step.

    wait_s: seconds that a merge waits for a cloud, counted from when the first cloud is there.
    restart_s: the seconds to wait before a run on one machine restarts a lost cloud; null = never.
    """

    word = "go_on"
    may_leave = True
    label = "continues without the lost"

    wait_s: WaitSeconds = 600.0
    restart_s: Seconds | None = None

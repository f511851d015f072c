"""The settings of `training.until`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, cast

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.outcome import EQUAL
from xcloud.base.settings import Positive, settings


@settings("training.until", formerly="xcloud.pipeline.settings.Until")
class Until:
    """A target that ends a run at the first evaluation on the dev split that reaches it.

    metric: the name of a score of the task, such as accuracy; "loss" is the logarithm of a
        perplexity, too.
    at_most: the score that is low enough; None where high scores are good.
    at_least: the score that is high enough; None where low scores are good.
    every: updates between two evaluations.
    """

    metric: Annotated[str, Field(min_length=1)]
    at_most: float | None = None
    at_least: float | None = None
    every: Positive = 25

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ConfigError(
                f"training.until of {self.metric}: give either at_most or at_least, got at_most "
                f"{self.at_most} and at_least {self.at_least}"
            )

    @property
    def in_words(self) -> str:
        if self.at_most is not None:
            return f"{self.metric} <= {self.at_most:g}"
        return f"{self.metric} >= {self.at_least:g}"

    def is_reached(self, scores: Mapping[str, float]) -> bool:
        """Return whether the scores of the dev split reach the target. Raises ConfigError if the
        metric is none of them."""
        value = scores.get(self.metric)
        if value is None and self.metric == "loss" and scores.get("perplexity", 0) > 0:
            value = math.log(scores["perplexity"])
        if value is None:
            raise ConfigError(
                f"training.until.metric is {self.metric!r}, which this task does not score: take "
                f"one of {', '.join(scores)}"
            )
        if self.at_most is not None:
            return value <= self.at_most
        return value >= cast(float, self.at_least)


@settings(kw_only=True)
class UntilSetting:
    """Adds the setting of this feature to `training`.

    until: a target at which the run ends before max_steps. None: the run makes all updates.
    """

    until: Annotated[Until | None, EQUAL] = None

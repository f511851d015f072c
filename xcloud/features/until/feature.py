"""A run that ends at the first evaluation that reaches a target (training.until), as a feature:
what it needs of a job. The evaluator (rank/task_data.py) compares and all ranks end together."""

from __future__ import annotations

from xcloud.job.needs import Conflict, FeatureUse, every_update_together, plain
from xcloud.rank.feature import Feature

no_plan = plain(
    lambda job: job.plan is not None,
    setting="plan= prices all updates of a run",
    remedy="leave plan= out",
)


class RunUntil(Feature):
    """An end of the run that its own evaluations decide."""

    uses = (
        FeatureUse(
            setting="training.until",
            asked=lambda job: job.training.until is not None,
            why={
                every_update_together: "ends a run at the same update everywhere",
                no_plan: "does not know the last update beforehand",
            },
            without="leave training.until out",
        ),
    )

    ends_early = Conflict("training.until ends it at any evaluation", "leave training.until out")
    headline = "until {job.training.until.in_words}"

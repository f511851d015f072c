"""The account of a run's privacy: epsilon and delta of what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xcloud.features.privacy.noise import gaussian_epsilon, max_squared_uses, sampled_epsilon
from xcloud.features.privacy.settings import Privacy
from xcloud.pipeline.batch_plan import BatchPlan
from xcloud.pipeline.hook import Hook
from xcloud.pipeline.trainer import Trainer
from xcloud.record.reporter import Reporter


@dataclass
class PrivacyAccount(Hook):
    """The hook of rank 0 that reports what the run guarantees.

    contributions: returns how often each cloud gave to averagings of the same values, in so many
    updates.
    """

    privacy: Privacy
    trainer: Trainer
    contributions: Callable[[int], int]
    reporter: Reporter

    def finish(self) -> None:
        made = self.trainer.num_updates
        guarantee = account(
            self.privacy,
            plan=self.trainer.feed.plan,
            num_updates=made,
            num_contributions=self.contributions(made),
        )
        self.reporter.event("privacy", **guarantee)


def account(
    privacy: Privacy, plan: BatchPlan, num_updates: int, num_contributions: int
) -> dict[str, Any]:
    """Return what so many updates guarantee, as the "privacy" event tells it.

    num_contributions: how often each cloud contributes to averages of the same values.

    epsilon holds against whoever sees all that other replicas gave, and knows the batches, which
    follow from the seed. epsilon_if_sampled is as usually reported, for secret random batches;
    None where Opacus is not installed, and for clouds, which take part in every merge.
    """
    rate = 1.0
    sampled = None
    if privacy.unit == "sample":
        # The batches that were really drawn: the sample that came most often has the weakest
        # protection, and it sets epsilon for all.
        uses = max_squared_uses(plan.ids(step) for step in range(1, num_updates + 1))
        rate = min(1.0, plan.batch_size / plan.num_samples)
        # Opacus is an extra of the installation; the guarantee itself does without it.
        try:
            sampled = sampled_epsilon(privacy.noise, rate, num_updates, delta=privacy.delta)
        except ImportError:
            pass
    else:
        uses = num_contributions
    return {
        "unit": privacy.unit,
        "clip": privacy.clip,
        "noise": privacy.noise,
        "delta": privacy.delta,
        "epsilon": gaussian_epsilon(privacy.noise, squared_uses=uses, delta=privacy.delta),
        "epsilon_if_sampled": sampled,
        "sampling_rate": rate,
        "num_updates": num_updates,
    }

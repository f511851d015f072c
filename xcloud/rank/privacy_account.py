"""What a run's clipping with noise guarantees, as an event for its summary."""

from __future__ import annotations

from typing import Any

from xcloud.security.privacy import Privacy, SamplePrivacy, most_squared_uses, sampled_epsilon
from xcloud.training.batch_plan import BatchPlan


def account(
    privacy: Privacy, plan: BatchPlan, num_updates: int, num_contributions: int
) -> dict[str, Any]:
    """num_contributions: of each cloud to averagings of the same values.

    epsilon: against whoever sees all that other replicas gave, and knows the batches, which follow
    from the seed. epsilon_if_sampled: as usually reported, for secret random batches; None where
    Opacus is not installed, and for clouds, which take part in every merge.
    """
    rate, sampled = 1.0, None
    if isinstance(privacy, SamplePrivacy):
        uses = most_squared_uses(plan.ids(step) for step in range(1, num_updates + 1))
        rate = min(1.0, plan.batch_size / plan.num_samples)
        try:
            sampled = sampled_epsilon(privacy.noise, rate, num_updates, privacy.delta)
        except ImportError:
            pass
    else:
        uses = num_contributions
    return {
        "unit": privacy.unit,
        "clip": privacy.clip,
        "noise": privacy.noise,
        "delta": privacy.delta,
        "epsilon": privacy.epsilon(uses),
        "epsilon_if_sampled": sampled,
        "sampling_rate": rate,
        "num_updates": num_updates,
    }

"""The steps of a run whose clouds keep rows of frozen parts (training.activation_cache_mb): all
samples cross in the first epoch, in later ones those that did not fit. Prices one plan; searches
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xcloud.plan.plans import NO_COMPRESSION, Plan
from xcloud.plan.pricing import Pricer


@dataclass(frozen=True)
class Keeping:
    """max_bytes: that a rank keeps of each boundary. num_samples: of an epoch. num_steps: of the
    run."""

    max_bytes: int
    num_samples: int
    num_steps: int


@dataclass(frozen=True)
class OverEpochs:
    """Seconds of a step in the first epoch, in later ones, and on average over the run.

    kept_share: of the samples, at the boundary where fewest fit. first_epoch_share: of the run's
    steps. at_the_end: prices the run's last step."""

    first_epoch_s: float
    later_epochs_s: float
    kept_share: float
    first_epoch_share: float
    at_the_end: Pricer

    @property
    def mean_s(self) -> float:
        first = self.first_epoch_share
        return first * self.first_epoch_s + (1 - first) * self.later_epochs_s

    def as_table(self) -> dict[str, float]:
        names = ("first_epoch_s", "later_epochs_s", "mean_s", "kept_share", "first_epoch_share")
        return {name: getattr(self, name) for name in names}


def over_epochs(pricer: Pricer, plan: Plan, keeping: Keeping) -> OverEpochs | None:
    """None if the plan has no boundary between clouds with nothing trained before it."""
    if pricer.arranged[plan.strategy].is_whole:
        return None
    layout = pricer.arranged[plan.strategy].replicas[0]
    b, missing = pricer.samples(plan), dict[int, float]()
    for stage in pricer.silent_boundaries(plan):
        if layout.stage_cloud(stage) == layout.stage_cloud(stage + 1):
            continue
        rows, _ = pricer.directions_at(NO_COMPRESSION, plan.ends[stage], b)  # kept as decoded
        num_ranks = len(layout.ranks_of(stage + 1)) * len(pricer.arranged[plan.strategy].replicas)
        fitting = num_ranks * keeping.max_bytes / max(1.0, rows.num_bytes / b)
        missing[stage] = max(0.0, 1 - fitting / keeping.num_samples)
    if not missing:
        return None
    # What those that still cross take is their share of what all take, though messages get fewer
    # only where none is left.
    later = replace(pricer, crossing=missing)
    first_share = min(1.0, keeping.num_samples / (pricer.batch_size * keeping.num_steps))
    return OverEpochs(
        pricer.step_s(plan), later.step_s(plan), 1 - max(missing.values()), first_share,
        later if first_share < 1 else pricer,
    )  # fmt: skip

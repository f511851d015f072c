"""What a step costs where clouds keep rows of frozen parts: in the first epoch all samples cross,
in later ones those that did not fit."""

from __future__ import annotations

from dataclasses import replace

from xcloud.simulator.plan import NO_COMPRESSION, Plan
from xcloud.simulator.pricing import OverEpochs, Pricer


def over_epochs(
    pricer: Pricer, plan: Plan, max_bytes: int, num_samples: int, num_steps: int
) -> OverEpochs | None:
    """Return how a step changes after the first epoch.

    None if there is no boundary between clouds with nothing trained before it.

    max_bytes: the bytes that a rank keeps of each boundary.
    num_samples: the number of samples of an epoch.
    num_steps: the number of steps of the run.
    """
    if pricer.arranged[plan.strategy].is_whole:
        return None
    layout = pricer.arranged[plan.strategy].replicas[0]
    b = pricer.samples(plan)
    missing = dict[int, float]()
    for stage in pricer.silent_boundaries(plan):  # those behind which no gradient returns
        if layout.stage_cloud(stage) == layout.stage_cloud(stage + 1):
            continue
        rows, _ = pricer.directions_at(NO_COMPRESSION, plan.ends[stage], b)  # kept as decoded
        # Each rank behind the boundary keeps max_bytes of the samples that come to it.
        num_ranks = len(layout.ranks_of(stage + 1)) * len(pricer.arranged[plan.strategy].replicas)
        fitting = num_ranks * max_bytes / max(1.0, rows.num_bytes / b)
        missing[stage] = max(0.0, 1 - fitting / num_samples)
    if not missing:
        return None
    # What those that still cross take is their share of what all take, though messages get fewer
    # only where none is left.
    later = replace(pricer, crossing=missing)
    first_share = min(1.0, num_samples / (pricer.batch_size * num_steps))
    return OverEpochs(
        first_epoch_s=pricer.step_s(plan),
        later_epochs_s=later.step_s(plan),
        kept_share=1 - max(missing.values()),
        first_epoch_share=first_share,
        at_the_end=later if first_share < 1 else pricer,
    )

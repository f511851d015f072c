"""The settings of `plan`: what is searched, with what profile. Plans nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.comm.compression import Compression, Phased
from xcloud.parallel.strategy import Strategy

DIMENSIONS = ("split", "micro_batches", "schedule", "compression", "strategy")
MOST_USUAL = 128  # micro-batches, where none are given


@settings("plan")
class Planning:
    """mode: show = print the ranked plans, run nothing; apply = run the best one.
    search: what may differ from the settings of the job; the rest stays as the job has it.
        compression and most strategies touch the quality of what is learned.
    compressors, strategies, schedules: candidates by name, beside the job's own.
    micro_batches: counts to try; null = powers of two and three times these, at most 128.
    profile: a file to plan with; null = make a trial run here, or take one made before.
    trial_steps: about so many updates of the trial run.
    rows: plans in the table.
    """

    mode: Literal["show", "apply"] = "show"
    search: Sequence[Literal["split", "micro_batches", "schedule", "compression", "strategy"]] = (
        DIMENSIONS  # type: ignore[assignment]
    )
    compressors: Mapping[str, Compression | Phased] = field(default_factory=dict)
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    schedules: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: Annotated[Sequence[Positive], Field(min_length=1)] | None = None
    profile: str | None = None
    trial_steps: Positive = 80
    rows: Positive = 10

    def counts(self, batch_size: int, own: int) -> list[int]:
        """Numbers of micro-batches to try. batch_size: samples of one pass. Raises ConfigError."""
        if "micro_batches" not in self.search:
            return [own]
        given = self.micro_batches
        if given is None:
            usual = sorted(k * 2**n for n in range(8) for k in (1, 3))
            given = [m for m in usual if m <= min(batch_size, MOST_USUAL)]
        elif (most := max(given)) > batch_size:
            raise ConfigError(
                f"plan.micro_batches has {most}, and a pass has {batch_size} samples "
                "(training.batch_size / training.accumulate_steps); leave it out"
            )
        return sorted({*given, own})


def no_plan() -> None:
    """For conf/plan/none.yaml."""

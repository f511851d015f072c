"""The settings of `plan`: what is searched, with what profile. Plans nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xcloud.base.checks import check_choice, check_int, check_number
from xcloud.base.errors import ConfigError
from xcloud.comm.compression import Compression, Phased
from xcloud.parallel.strategy import Strategy

DIMENSIONS = ("split", "micro_batches", "schedule", "compression", "strategy")
LEAST_TRIAL = 4  # steps of a trial
MOST_USUAL = 128  # micro-batches, where none are given


@dataclass(frozen=True)
class Planning:
    """mode: show = print the ranked plans, run nothing; apply = run the best one.
    search: what may differ from the settings of the job; the rest stays as the job has it.
        compression and most strategies touch the quality of what is learned.
    compressors, strategies: candidates by name, beside the job's own.
    micro_batches: counts to try; null = powers of two and three times these, at most 128.
    profile: a file to plan with; null = measure here, or take what was measured before.
    max_age_days: how long a measured profile is taken as it is.
    work_factor: how many times longer work takes in a run than when it was measured by itself:
        all seconds of work in the profile are multiplied. null = as the profile says, or else as a
        trial run shows (planner/trial.py); 1 where neither is to be had.
    trial_steps: of the trial run; the first 2 are not counted. 0 = no trial.
    rows: plans in the table.
    """

    mode: str = "show"
    search: Sequence[str] = DIMENSIONS
    compressors: Mapping[str, Compression | Phased] = field(default_factory=dict)
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    micro_batches: Sequence[int] | None = None
    profile: str | None = None
    max_age_days: float = 7.0
    work_factor: float | None = None
    trial_steps: int = 10
    rows: int = 10

    def __post_init__(self) -> None:
        check_choice("plan.mode", self.mode, ("show", "apply"))
        if not isinstance(self.search, list | tuple):
            raise ConfigError(f"plan.search must be a list, got {self.search!r}")
        for name in self.search:
            check_choice("plan.search", name, DIMENSIONS)
        for name, compression in self.compressors.items():
            if not isinstance(compression, Compression | Phased):
                raise ConfigError(
                    f"plan.compressors.{name} must be a Compression or Phased, got "
                    f"{compression!r}; add one with +compression@plan.compressors.{name}=…"
                )
        for name, strategy in self.strategies.items():
            if not isinstance(strategy, Strategy):
                raise ConfigError(f"plan.strategies.{name} must be a Strategy, got {strategy!r}")
        if self.micro_batches is not None:
            if not isinstance(self.micro_batches, list | tuple) or not self.micro_batches:
                raise ConfigError(
                    f"plan.micro_batches must be a list of counts or null, got "
                    f"{self.micro_batches!r}"
                )
            for count in self.micro_batches:
                check_int("plan.micro_batches", count, 1)
        check_number("plan.max_age_days", self.max_age_days, 0.0)
        if self.work_factor is not None:
            check_number("plan.work_factor", self.work_factor, 0.0, 100.0, above=True)
        check_int("plan.trial_steps", self.trial_steps, 0)
        if 0 < self.trial_steps < LEAST_TRIAL:
            raise ConfigError(
                f"plan.trial_steps must be 0 (no trial) or at least {LEAST_TRIAL}, of which the "
                f"first 2 are not counted, got {self.trial_steps}"
            )
        check_int("plan.rows", self.rows, 1)

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

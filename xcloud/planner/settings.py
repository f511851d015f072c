"""The settings of `plan`: what is searched, with what profile. Plans nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, Literal, Protocol, Self, runtime_checkable

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, ReadPath, settings
from xcloud.comm.compression import Compression
from xcloud.comm.compression_plans import Phased
from xcloud.job.strategy import Strategy
from xcloud.pipeline.schedule import Schedule

DIMENSIONS = ("split", "micro_batches", "schedule", "compression", "strategy")
MAX_USUAL = 128  # micro-batches, where none are given


@runtime_checkable
class FreelyCut(Protocol):
    """A model of equal blocks that may be cut after any of them, so that a planner can choose.

    Its setting is `blocks_per_stage`: a count for each stage but the last.
    """

    def num_blocks(self, max_length: int) -> int:
        """Return the number of blocks; 0 where other settings say where the model is cut."""

    def block_counts(self, num_stages: int, max_length: int) -> list[int]:
        """Return the blocks of each stage, as the settings say now."""

    def with_block_counts(self, counts: Sequence[int]) -> Self:
        """Return the model with so many blocks in each stage."""


def variants_of(
    schedule: Schedule, num_stages: int, num_micro_batches: int, num_lanes: int = 1
) -> list[Schedule]:
    """Return the variants of a schedule with so many micro-batches, itself if it offers none."""
    same = with_micro_batches(schedule, number=num_micro_batches)
    variants: dict[object, Schedule] = {}
    for one in same.variants(num_stages, num_lanes):  # some differ in name only
        fitted = one.for_lanes(num_stages, num_lanes)
        # Two variants with the same actions in the first and the last stage are one.
        ends = (fitted.actions(stage, num_stages) for stage in {0, num_stages - 1})
        variants.setdefault(tuple(map(tuple, ends)), one)
    return list(variants.values())


def with_micro_batches(schedule: Schedule, number: int) -> Schedule:
    return replace(schedule, num_micro_batches=number)  # type: ignore[type-var]


@settings("plan")
class Planning:
    """The settings of `plan`.

    mode: the action. show = print the ranked plans, run nothing; apply = run the best one.
    search: the settings of the job that plans may change. The rest stays as the job has it.
        Compression and most strategies change the quality of the trained model.
    compressors, strategies, schedules: the candidates by name, beside the job's own.
    micro_batches: the numbers of micro-batches to try; null = powers of two and three times these,
        at most 128.
    profile: a file to plan with; null = make a trial run here, or use an earlier one.
    trial_steps: the approximate number of updates of the trial run.
    rows: the number of plans in the table.
    """

    mode: Literal["show", "apply"] = "show"
    search: Sequence[Literal["split", "micro_batches", "schedule", "compression", "strategy"]] = (
        DIMENSIONS  # type: ignore[assignment]
    )
    compressors: Mapping[str, Compression | Phased] = field(default_factory=dict)
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    schedules: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: Annotated[Sequence[Positive], Field(min_length=1)] | None = None
    profile: ReadPath | None = None
    trial_steps: Positive = 80
    rows: Positive = 10

    def counts(self, batch_size: int, own: int) -> list[int]:
        """Return the numbers of micro-batches to try.

        batch_size: the number of samples of one pass.
        Raises ConfigError for a given count that is larger.
        """
        if "micro_batches" not in self.search:
            return [own]
        given = self.micro_batches
        if given is None:
            # 1, 2, 3, 4, 6, 8, 12 and so on.
            usual = sorted(k * 2**n for n in range(8) for k in (1, 3))
            given = [m for m in usual if m <= min(batch_size, MAX_USUAL)]
        elif max(given) > batch_size:
            raise ConfigError(
                f"plan.micro_batches has {max(given)}, and a pass has {batch_size} samples "
                "(training.batch_size / training.accumulate_steps); leave it out"
            )
        return sorted({*given, own})

"""What a user says of how a one-way job's consumer takes from its producers. `plan.py` does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from xcloud.base.checks import check_choice, check_int, check_number
from xcloud.base.errors import ConfigError


@dataclass(frozen=True)
class Feed:
    """How a consumer takes from its producers.

    run_ahead: batches of one rank of a producer that may be ordered and not yet consumed. It must
        cover what one step takes and what the round trip of the link takes meanwhile. null = twice
        what one producer alone would have to give for a step, at least 8.
    order: fixed = in turn by share, the same in every run of the same seed (bit-equal in one cloud
        and across clouds as long as no producer is slow or lost); arrival = whoever has a batch
        ready, nearest to the shares.
    on_slow: what to do about a producer that is silent for slow_after_s. wait = wait for it (with
        order=arrival: no producer may get more than run_ahead batches ahead of its share);
        redistribute = the others take over its share until it has caught up.
    on_dead: redistribute = the others take over its share; pause = wait for the user, who goes on
        without it or ends the run; stop = the run fails.
    min_producers: start as soon as so many are ready, the others join later; null = all.
    """

    run_ahead: int | None = None
    order: Literal["fixed", "arrival"] = "fixed"
    on_slow: Literal["wait", "redistribute"] = "wait"
    slow_after_s: float = 30.0
    on_dead: Literal["redistribute", "pause", "stop"] = "redistribute"
    min_producers: int | None = None

    def __post_init__(self) -> None:
        if self.run_ahead is not None:
            check_int("feed.run_ahead", self.run_ahead, 1, 4096)
        check_choice("feed.order", self.order, ("fixed", "arrival"))
        check_choice("feed.on_slow", self.on_slow, ("wait", "redistribute"))
        check_number("feed.slow_after_s", self.slow_after_s, 0.0, above=True)
        check_choice("feed.on_dead", self.on_dead, ("redistribute", "pause", "stop"))
        if self.min_producers is not None:
            check_int("feed.min_producers", self.min_producers, 1)

    @property
    def most_ahead(self) -> int:
        """run_ahead as a number; OneWayExperiment replaces null by what is usual for its job."""
        return 8 if self.run_ahead is None else self.run_ahead

    @staticmethod
    def usual_run_ahead(num_lanes: Sequence[int], batches_per_step: int) -> int:
        return max(8, 2 * _needed(num_lanes, batches_per_step))

    def check(self, num_lanes: Sequence[int], num_consumers: int, batches_per_step: int) -> None:
        """Raises ConfigError if these cannot work together."""
        if batches_per_step % num_consumers:
            raise ConfigError(
                f"training.batches_per_step is {batches_per_step}, which cannot be dealt evenly "
                f"to the consumer's {num_consumers} ranks; make it a multiple of {num_consumers}"
            )
        needed = _needed(num_lanes, batches_per_step)
        if self.run_ahead is not None and self.run_ahead < needed:
            raise ConfigError(
                f"feed.run_ahead is {self.run_ahead}, but one producer alone may have to give the "
                f"{batches_per_step} batches of a step with {min(num_lanes)} ranks; set it to at "
                f"least {needed}, better {2 * needed}"
            )
        if self.min_producers is not None and self.min_producers > len(num_lanes):
            raise ConfigError(
                f"feed.min_producers is {self.min_producers}, but only {len(num_lanes)} clouds "
                "feed"
            )


def _needed(num_lanes: Sequence[int], batches_per_step: int) -> int:
    """Batches of each rank of the smallest producer, if it alone had to fill a step."""
    fewest = min(num_lanes)
    return -(-(batches_per_step + fewest - 1) // fewest)

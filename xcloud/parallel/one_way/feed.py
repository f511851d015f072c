"""How a consumer takes from its producers: what a user says, and whose turn it is by their shares.
`plan.py` orders accordingly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings


@settings("feed")
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
    on_dead: redistribute = the others take over its share; pause = wait for the user, who
        continues without it or ends the run; stop = the run fails.
    min_producers: start as soon as so many are ready, the others join later; null = all.
    """

    run_ahead: Annotated[int, Field(ge=1, le=4096)] | None = None
    order: Literal["fixed", "arrival"] = "fixed"
    on_slow: Literal["wait", "redistribute"] = "wait"
    slow_after_s: Annotated[float, Field(gt=0.0)] = 30.0
    on_dead: Literal["redistribute", "pause", "stop"] = "redistribute"
    min_producers: Positive | None = None

    @property
    def most_ahead(self) -> int:
        """run_ahead as a number; OneWayExperiment replaces null by what is usual for its job."""
        return 8 if self.run_ahead is None else self.run_ahead

    @staticmethod
    def usual_run_ahead(group_sizes: Sequence[int], batches_per_step: int) -> int:
        return max(8, 2 * _needed(group_sizes, batches_per_step))

    def check(self, group_sizes: Sequence[int], num_consumers: int, batches_per_step: int) -> None:
        """group_sizes: ranks of each producer. Raises ConfigError if these do not fit together."""
        if batches_per_step % num_consumers:
            raise ConfigError(
                f"training.batches_per_step is {batches_per_step}, which cannot be divided evenly "
                f"among the consumer's {num_consumers} ranks; make it a multiple of "
                f"{num_consumers}"
            )
        needed = _needed(group_sizes, batches_per_step)
        if self.run_ahead is not None and self.run_ahead < needed:
            raise ConfigError(
                f"feed.run_ahead is {self.run_ahead}, but one producer alone may have to give the "
                f"{batches_per_step} batches of a step with {min(group_sizes)} ranks; set it to "
                f"at least {needed}, better {2 * needed}"
            )
        if self.min_producers is not None and self.min_producers > len(group_sizes):
            raise ConfigError(
                f"feed.min_producers is {self.min_producers}, but only {len(group_sizes)} clouds "
                "feed"
            )


def _needed(group_sizes: Sequence[int], batches_per_step: int) -> int:
    """Batches of each rank of the smallest producer, if it alone had to fill a step."""
    fewest = min(group_sizes)
    return -(-(batches_per_step + fewest - 1) // fewest)


class Shares:
    """Whose turn it is, and how many batches each producer will have made in the end.

    shares: of each producer, adding up to 1. num_batches: that the consumer will use in all.
    turns: by producer, what it is owed in batches.
    """

    def __init__(
        self, shares: Sequence[float], group_sizes: Sequence[int], num_batches: int
    ) -> None:
        self.shares, self.group_sizes, self.num_batches = shares, group_sizes, num_batches
        self.turns = [0.0] * len(shares)
        self.num_used = 0  # or skipped, when what was left was last divided
        self.used_before: Counter[int] = Counter()  # by producer, then
        self.promised: dict[tuple[int, int], int] = {}  # num_planned, by producer and number

    def next(self, active: Sequence[int]) -> int:
        """The active producer that is owed most."""
        whole = sum(self.shares[p] for p in active)
        return max(active, key=lambda p: (self.turns[p] + self.shares[p] / whole, -p))

    def give(self, chosen: int, active: Sequence[int]) -> None:
        """A slot to this one."""
        whole = sum(self.shares[p] for p in active)
        for p in active:
            self.turns[p] += self.shares[p] / whole
        self.turns[chosen] -= 1.0

    def nearest(
        self,
        ready: Sequence[int],
        able: Sequence[int],
        taken: Mapping[int, int],
        most_ahead: float,
    ) -> int | None:
        """Of `ready` the producer that has given least for its share among those that are able to
        feed; None if each is more than most_ahead batches ahead of it. taken: batches so far."""
        whole = sum(self.shares[p] for p in able) or 1.0
        total = sum(taken.get(p, 0) for p in able) + 1
        ahead = {p: taken.get(p, 0) + 1 - total * self.shares[p] / whole for p in ready}
        ahead = {p: a for p, a in ahead.items() if a <= most_ahead or p not in able}
        return min(ahead, key=lambda p: (ahead[p], p), default=None)

    def expected(self, p: int, active: Sequence[int]) -> int:
        """Batches that each rank of an active producer will have made at the end: what it gave,
        and its share of what is left among those that feed."""
        is_whole = len(active) == len(self.shares)
        together = 1.0 if is_whole else sum(self.shares[q] for q in active)
        num_left = max(0, self.num_batches - self.num_used)
        to_come = num_left * self.shares[p] / together if together else 0.0
        return max(1, math.ceil((self.used_before[p] + to_come) / self.group_sizes[p]))

    def promise(self, p: int, number: int, active: Sequence[int]) -> int:
        """The same for all ranks that make this number, whenever each gets its order: ranks that
        average gradients need one learning rate."""
        return self.promised.setdefault((p, number), self.expected(p, active))

    def divide_anew(self, used: Counter[int], num_skipped: int) -> None:
        """used: by producer, so far."""
        self.used_before, self.num_used = used, used.total() + num_skipped

    def forget(self, p: int) -> None:
        """Who comes back does not claim what it missed."""
        self.turns[p] = 0.0
        self.promised = {key: n for key, n in self.promised.items() if key[0] != p}

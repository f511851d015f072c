"""How a consumer takes from its producers: what a user says, and whose turn it is by their shares.
`plan.py` orders accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field

from xcloud.base.errors import ConfigError
from xcloud.base.settings import Positive, settings
from xcloud.cluster.one_way_layout import OneWayLayout
from xcloud.comm.state import State, StatefulParts, rows_of, whole_number, whole_numbers


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
        """run_ahead as a number; see `fitted`."""
        return self.run_ahead or 8

    def fitted(self, layout: OneWayLayout, batches_per_step: int) -> Feed:
        """With a run_ahead in place of null. Raises ConfigError if these do not fit together."""
        if batches_per_step % layout.num_consumers:
            raise ConfigError(
                f"training.batches_per_step is {batches_per_step}, which cannot be divided evenly "
                f"among the consumer's {layout.num_consumers} ranks; make it a multiple of "
                f"{layout.num_consumers}"
            )
        # Batches of each rank of the smallest producer, if it alone had to fill a step.
        fewest = min(map(len, layout.sources))
        needed = -(-(batches_per_step + fewest - 1) // fewest)
        if self.run_ahead is not None and self.run_ahead < needed:
            raise ConfigError(
                f"feed.run_ahead is {self.run_ahead}, but one producer alone may have to give the "
                f"{batches_per_step} batches of a step with {fewest} ranks; set it to at least "
                f"{needed}, better {2 * needed}"
            )
        if self.min_producers is not None and self.min_producers > len(layout.producers):
            raise ConfigError(
                f"feed.min_producers is {self.min_producers}, but only {len(layout.producers)} "
                "clouds feed"
            )
        return replace(self, run_ahead=self.run_ahead or max(8, 2 * needed))


class Shares(StatefulParts):
    """Whose turn it is, and how many batches each producer will have made in the end.

    num_batches: that the consumer will use in all. turns: by producer, what it is owed in batches.
    """

    own_names = ("turns", "used_before", "promised", "num_used")

    def __init__(self, layout: OneWayLayout, num_batches: int) -> None:
        self.shares, self.sources, self.num_batches = layout.shares, layout.sources, num_batches
        self.turns = [0.0] * len(self.shares)
        self.num_used = 0  # or skipped, when what was left was last divided
        self.used_before = [0] * len(self.shares)  # by producer, then
        self.promised: dict[tuple[int, int], int] = {}  # num_planned, by producer and number

    def owed(self, active: Sequence[int]) -> dict[int, float]:
        """To each active producer, when the next slot is given."""
        whole = sum(self.shares[p] for p in active)
        return {p: self.turns[p] + self.shares[p] / whole for p in active}

    def give(self, chosen: int, owed: Mapping[int, float]) -> None:
        """The slot to this one."""
        for p, turns in owed.items():
            self.turns[p] = turns - (p == chosen)

    def promise(self, p: int, number: int, active: Sequence[int]) -> int:
        """Batches that each rank of an active producer will have made at the end: what it gave,
        and its share of what is left among those that feed. The same for all ranks that make this
        number, whenever each gets its order: ranks that average gradients need one learning rate.
        """
        is_whole = len(active) == len(self.shares)
        together = 1.0 if is_whole else sum(self.shares[q] for q in active)
        num_left = max(0, self.num_batches - self.num_used)
        to_come = num_left * self.shares[p] / together if together else 0.0
        expected = math.ceil((self.used_before[p] + to_come) / len(self.sources[p]))
        return self.promised.setdefault((p, number), max(1, expected))

    def divide_anew(self, used: Sequence[int], num_skipped: int) -> None:
        """used: by producer, so far."""
        self.used_before, self.num_used = list(used), sum(used) + num_skipped

    def forget(self, p: int) -> None:
        """Who comes back does not claim what it missed."""
        self.turns[p] = 0.0
        self.promised = {key: n for key, n in self.promised.items() if key[0] != p}

    def own(self) -> State:
        return {
            "turns": torch.tensor(self.turns, dtype=torch.float64),
            "used_before": torch.tensor(self.used_before),
            "promised": rows_of(3, [(*key, number) for key, number in self.promised.items()]),
            "num_used": self.num_used,
        }

    def take(self, own: State) -> None:
        num_producers = len(self.shares)
        self.used_before = whole_numbers(own, "used_before", num_producers).tolist()
        self.turns = torch.as_tensor(own["turns"]).tolist()
        promised = whole_numbers(own, "promised", -1, 3).tolist()
        self.promised = {(p, number): num_planned for p, number, num_planned in promised}
        self.num_used = whole_number(own, "num_used")

"""What is usual of a stream of messages, and when it is left. Pure arithmetic: no links, no
events.

Source: SENTINEL (arXiv:2603.03592): running means of what crosses between stages, and a bound on
the distance from them. Differences: a stream is held against its own past, not against other ranks
of its stage, which may be none; directions are those of sums over rows; and deviations add up over
steps (a two-sided CUSUM: Page, Biometrika 41, 1954), so that one odd batch is no alarm and a weak
but lasting change is.

Shapes: D features of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xcloud.comm.state import State, StatefulTree, fill, whole_number
from xcloud.features.sentinel.measures import NUM_NUMBERS, NUM_ROWS


@dataclass(frozen=True)
class Statistic:
    """How one number of a step's messages is followed.

    floor: of its standard deviation.
    slack: standard deviations that are usual in every step.
    """

    name: str
    floor: float
    slack: float = 1.25


STATISTICS = (
    # ln of the root mean square, which training itself moves, most in a warm-up
    Statistic(name="norm", floor=0.08, slack=1.5),
    Statistic(
        name="spread", floor=0.01
    ),  # ln(mean magnitude / root mean square); a constant has 0
    Statistic(name="row norms", floor=0.01),  # ln(mean norm of a row / root mean square of them)
    # cosines to running means: of the mean row, and of the mean row of signed squares
    Statistic(name="direction", floor=0.12, slack=1.75),
    Statistic(name="asymmetry", floor=0.12, slack=1.75),
)
LOOKS_BACK = 25.0  # steps, of running means, which must follow what training moves
VARIANCES_LOOK_BACK = 100.0  # steps
LEARNS_FOR = 50  # steps before anything is judged
MOST = 4.0  # standard deviations that one step adds at most
ALARM = 12.0  # standard deviations beyond the slack, added up over steps
CLIP = 3.0  # standard deviations by which one step moves what is usual
_TINY = 1e-30


class Departure(NamedTuple):
    """A sudden departure of one statistic: its value, what was usual, and its deviation."""

    statistic: str
    value: float
    usual: float
    deviation: float

    @property
    def in_words(self) -> str:
        return (
            f"{self.statistic} {self.value:.3g}, usual is {self.usual:.3g} ± {self.deviation:.2g}"
        )


class Baseline(StatefulTree):
    """The usual values of one stream of messages, of each statistic one a step.

    After a departure it learns anew: what lasts is told once.
    """

    own_names = ("num_steps", "usual", "directions")

    def __init__(self, num_features: int) -> None:
        self.num_steps = 0
        self._usual = torch.zeros(4, len(STATISTICS), dtype=torch.float64)
        """Of each statistic: mean, variance, sums of what went beyond the slack up and down."""
        self._directions = torch.zeros(NUM_ROWS, num_features)

    def own(self) -> State:
        return {
            "num_steps": self.num_steps,
            "usual": self._usual.clone(),
            "directions": self._directions.clone(),
        }

    def take(self, own: State) -> None:
        self.num_steps = whole_number(own, name="num_steps")
        targets = {"usual": self._usual, "directions": self._directions}
        rest = {name: value for name, value in own.items() if name != "num_steps"}
        fill(targets, state=rest, owner="a baseline of messages")

    def judge(self, measured: Tensor) -> Departure | None:
        """Take in the mean of what `measure` found in a step's messages; return the statistic that
        departs most, if any does. Values that are not finite are left to the trainer.

        measured: float32 [3 + 2D], on the host.
        """
        if not bool(measured.isfinite().all()):
            return None
        values = self._statistics(measured)
        self.num_steps += 1
        newest = 1 / self.num_steps
        share_of_variance = max(newest, 1 / VARIANCES_LOOK_BACK)
        found: list[tuple[float, Departure]] = []
        rows = self._usual.T.tolist()
        for number, one in enumerate(STATISTICS):
            mean, variance, up, down = rows[number]
            deviation = max(math.sqrt(variance), one.floor)
            by = (values[number] - mean) / deviation
            if self.num_steps > LEARNS_FOR:
                up = max(0.0, up + min(by, MOST) - one.slack)
                down = max(0.0, down - max(by, -MOST) - one.slack)
                if max(up, down) > ALARM:
                    departure = Departure(
                        statistic=one.name, value=values[number], usual=mean, deviation=deviation
                    )
                    found.append((abs(by), departure))
                by = max(-CLIP, min(by, CLIP))
            moved = by * deviation
            mean += max(newest, 1 / LOOKS_BACK) * moved
            variance += share_of_variance * (moved * moved - variance)
            if self.num_steps == 1:
                variance = 0.0
            rows[number] = [mean, variance, up, down]
        if found:
            self.num_steps = 0
            self._usual.zero_()
            self._directions.zero_()
            return max(found)[1]
        self._usual = torch.tensor(rows, dtype=torch.float64).T.contiguous()
        return None

    def _statistics(self, measured: Tensor) -> list[float]:
        mean_square, size, row_norm = measured[:NUM_NUMBERS].tolist()
        root = math.sqrt(mean_square)
        num_features = self._directions.shape[1]
        now = measured[NUM_NUMBERS:].view(NUM_ROWS, num_features)
        now = now / torch.linalg.vector_norm(now, dim=1, keepdim=True).clamp(min=_TINY)
        usual = self._directions
        lengths = torch.linalg.vector_norm(usual, dim=1).clamp(min=_TINY)
        cosines = ((usual * now).sum(1) / lengths).tolist()
        share = max(1 / (self.num_steps + 1), 1 / LOOKS_BACK)
        self._directions = torch.lerp(usual, now, share)
        return [
            math.log(root + _TINY),
            math.log((size + _TINY) / (root + _TINY)),
            math.log((row_norm + _TINY) / (root * math.sqrt(num_features) + _TINY)),
            *cosines,
        ]

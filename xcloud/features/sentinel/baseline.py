"""What is usual of a stream of messages, and when it is left. Pure arithmetic: no links, no
events.

Source: SENTINEL (arXiv:2603.03592): running means of what crosses between stages, and a bound on
the distance from them. Differences: a stream is held against its own past, not against other ranks
of its stage, which may be none; directions are those of sums over rows; and the bound is the range
of the last steps, widened, because training moves some streams a lot and others hardly at all.

Shapes: D features of a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from xcloud.comm.state import State, StatefulTree, fill, whole_number
from xcloud.features.sentinel.measures import NUM_NUMBERS, NUM_ROWS

STATISTICS = (
    "norm",  # ln of the root mean square
    "spread",  # ln(mean magnitude / root mean square); a constant has 0
    "row norms",  # ln(mean norm of a row / root mean square of them)
    # cosines to running means: of the mean row, and of the mean row of signed squares
    "direction",
    "asymmetry",
)
WINDOW = 75  # steps whose range is usual
LASTS_FOR = 5  # steps that must all be beyond, so that odd batches are no departure
BEYOND = 0.5  # ranges from the nearer end of the range
MIN_RANGE = 0.1  # of a stream that hardly moves: training may begin to move it again
DIRECTIONS_LOOK_BACK = 25.0  # steps, of running means, which must follow what training moves
LEARNS_FOR = WINDOW + LASTS_FOR - 1  # steps before anything is judged
_TINY = 1e-30


class Departure(NamedTuple):
    """A sudden departure of one statistic.

    value: the newest value.
    usual: the middle of its range before.
    deviation: the distance from there to both ends of the range.
    """

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

    After a departure it learns again: a lasting change is reported once.
    """

    own_names = ("num_steps", "values", "directions")

    def __init__(self, num_features: int) -> None:
        self.num_steps = 0
        self._values = torch.zeros(WINDOW + LASTS_FOR, len(STATISTICS), dtype=torch.float64)
        """The statistics of the last steps, the newest at the end."""
        self._directions = torch.zeros(NUM_ROWS, num_features)

    def own(self) -> State:
        return {
            "num_steps": self.num_steps,
            "values": self._values.clone(),
            "directions": self._directions.clone(),
        }

    def take(self, own: State) -> None:
        self.num_steps = whole_number(own, name="num_steps")
        targets = {"values": self._values, "directions": self._directions}
        rest = {name: value for name, value in own.items() if name != "num_steps"}
        fill(targets, state=rest, owner="a baseline of messages")

    def judge(self, measured: Tensor) -> Departure | None:
        """Take in the mean of what `measure` found in a step's messages; return the statistic that
        departs most, if any does. Values that are not finite are left to the trainer.

        measured: float32 [3 + 2D], on the host.
        """
        # NaN would stay in the running means, so that nothing was ever judged again.
        if not bool(measured.isfinite().all()):
            return None
        newest = torch.tensor([self._statistics(measured)], dtype=torch.float64)
        self._values = torch.cat([self._values[1:], newest])
        self.num_steps += 1
        if self.num_steps <= LEARNS_FOR:
            return None
        # The first WINDOW rows are what is usual, the last LASTS_FOR are judged: all of them must
        # lie beyond, on one side.
        low, high = torch.aminmax(self._values[:WINDOW], dim=0)
        lowest, highest = torch.aminmax(self._values[WINDOW:], dim=0)
        # Negative where even one of the steps is within the range.
        above = lowest - high
        below = low - highest
        ranges = (high - low).clamp(min=MIN_RANGE)
        num_ranges = torch.maximum(above, below) / ranges
        most = int(num_ranges.argmax())
        if num_ranges[most] <= BEYOND:
            return None
        departure = Departure(
            statistic=STATISTICS[most],
            value=float(self._values[-1, most]),
            usual=float(low[most] + high[most]) / 2,
            deviation=float(high[most] - low[most]) / 2,
        )
        # From here on what follows is learned as usual: a lasting change is reported once.
        self.num_steps = 0
        self._directions.zero_()
        return departure

    def _statistics(self, measured: Tensor) -> list[float]:
        mean_square, size, row_norm = measured[:NUM_NUMBERS].tolist()
        root = math.sqrt(mean_square)
        num_features = self._directions.shape[1]
        now = measured[NUM_NUMBERS:].view(NUM_ROWS, num_features)
        now = now / torch.linalg.vector_norm(now, dim=1, keepdim=True).clamp(min=_TINY)
        usual = self._directions
        lengths = torch.linalg.vector_norm(usual, dim=1).clamp(min=_TINY)
        cosines = ((usual * now).sum(1) / lengths).tolist()
        # A plain mean of the first steps, then an exponential one.
        share = max(1 / (self.num_steps + 1), 1 / DIRECTIONS_LOOK_BACK)
        self._directions = torch.lerp(usual, now, share)
        return [
            # Logarithms: a norm that doubles departs as far from small values as from large ones.
            math.log(root + _TINY),
            math.log((size + _TINY) / (root + _TINY)),
            math.log((row_norm + _TINY) / (root * math.sqrt(num_features) + _TINY)),
            *cosines,
        ]

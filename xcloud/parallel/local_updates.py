"""What a user says of local updates: each replica trains alone for a number of steps, then their
changes are merged. Local SGD, FedAvg, DiLoCo, Streaming DiLoCo. `local_rounds.py` does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from xcloud.checks import check_choice, check_int, check_number
from xcloud.errors import ConfigError
from xcloud.parallel.outer_optimizer import OuterOptimizer

NAME = "strategy.averaging"


@dataclass(frozen=True)
class LocalUpdates:
    """Settings. Steps are counted alike in all replicas: a merge stands at a step's number.

    every: steps between two merges of the same parameters (H).
    outer: what is done with the merged change.
    weigh: replicas count by the samples or tokens that they trained on since the last merge, or
        all alike.
    fragments: parameters are merged in so many parts, one after the other, every / fragments steps
        apart (Streaming DiLoCo, arXiv:2501.18512).
    overlap: steps that a replica goes on while its change is merged (tau there).
    mix: share of its own values that a replica keeps at a merge (alpha there: 0.5 with overlap).
    most_s, most_tokens: a replica that has spent so many seconds, or trained on so many tokens,
        since the last merge makes no more steps before the next: so a slow cloud does fewer steps
        than `every` instead of being waited for, and counts for what it did.
    wait_s: how long a merge waits for a replica.
    """

    every: int = 50
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    weigh: Literal["samples", "tokens", "equal"] = "samples"
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0
    most_s: float | None = None
    most_tokens: int | None = None
    wait_s: float = 600.0

    def __post_init__(self) -> None:
        check_int(f"{NAME}.every", self.every, 1)
        check_choice(f"{NAME}.weigh", self.weigh, ("samples", "tokens", "equal"))
        check_int(f"{NAME}.fragments", self.fragments, 1)
        check_int(f"{NAME}.overlap", self.overlap, 0)
        check_number(f"{NAME}.mix", self.mix, 0.0, 0.999999)
        check_number(f"{NAME}.wait_s", self.wait_s, 0.0, above=True)
        if self.most_s is not None:
            check_number(f"{NAME}.most_s", self.most_s, 0.0, above=True)
        if self.most_tokens is not None:
            check_int(f"{NAME}.most_tokens", self.most_tokens, 1)
        if self.fragments > self.every:
            raise ConfigError(
                f"{NAME}.fragments ({self.fragments}) must be at most {NAME}.every "
                f"({self.every}): one fragment is merged at a step"
            )
        if self.overlap >= self.every:
            raise ConfigError(
                f"{NAME}.overlap ({self.overlap}) must be less than {NAME}.every ({self.every}): "
                "a merge must end before the next one of the same parameters begins"
            )

    @property
    def label(self) -> str:
        parts = [f"every {self.every}", self.outer.label]
        if self.fragments > 1:
            parts.append(f"{self.fragments} fragments")
        if self.overlap:
            parts.append(f"overlap {self.overlap}")
        if self.mix:
            parts.append(f"mix {self.mix:g}")
        return f"local updates ({', '.join(parts)})"

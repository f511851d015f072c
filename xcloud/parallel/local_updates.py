"""What a user says of local updates: each replica trains alone for a number of steps, then their
changes are merged. Local SGD, FedAvg, DiLoCo, Streaming DiLoCo. `local_rounds.py` does it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from xcloud.base.checks import check_choice, check_int, check_number
from xcloud.base.errors import ConfigError
from xcloud.parallel.merging import Robust, check_robust
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
    mix: share of its own values that a replica keeps at a merge (alpha there: 0.5 with overlap; if
        0 the steps made during the overlap are lost).
    most_s, most_tokens: a replica that has spent so many seconds, or trained on so many tokens,
        since the last merge makes no more steps before the next: so a slow cloud does fewer steps
        than `every` instead of being waited for, and counts for what it did.
    merge: one that bears a bad cloud (parallel/merging.py); null = the weighted mean.
    feedback: what a lossy compressor leaves out of a change is added to the next one.
    wait_s: how long a merge waits for a replica, from the moment where its own cloud is there.
    late: what then becomes of it. wait: it counts as one that has left. skip: this merge is
        without it; its change stays with it and is part of the next one.
    leave: what a replica that is gone does to the others. fail: the run ends. go_on: they merge
        without it, and take it in when it comes back; it gets their values then.

    restart_s: seconds after which a run on one machine starts a lost cloud again; null = never.
        On several machines that is up to whoever runs them.

    With skip or go_on the first cloud merges for all (it must stay), each replica is in one cloud,
    and merges are of all parameters at once.
    """

    every: int = 50
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    weigh: Literal["samples", "tokens", "equal"] = "samples"
    fragments: int = 1
    overlap: int = 0
    mix: float = 0.0
    most_s: float | None = None
    most_tokens: int | None = None
    feedback: bool = True
    merge: Robust | None = None
    wait_s: float = 600.0
    late: Literal["wait", "skip"] = "wait"
    leave: Literal["fail", "go_on"] = "fail"
    restart_s: float | None = None

    def __post_init__(self) -> None:
        check_int(f"{NAME}.every", self.every, 1)
        check_robust(self.merge)
        check_choice(f"{NAME}.weigh", self.weigh, ("samples", "tokens", "equal"))
        check_int(f"{NAME}.fragments", self.fragments, 1)
        check_int(f"{NAME}.overlap", self.overlap, 0)
        check_number(f"{NAME}.mix", self.mix, 0.0, 0.999999)
        check_choice(f"{NAME}.feedback", self.feedback, (True, False))
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
        check_choice(f"{NAME}.late", self.late, ("wait", "skip"))
        check_choice(f"{NAME}.leave", self.leave, ("fail", "go_on"))
        if self.restart_s is not None:
            check_number(f"{NAME}.restart_s", self.restart_s, 0.0)
            if self.leave == "fail":
                raise ConfigError(
                    f"{NAME}.restart_s needs {NAME}.leave=go_on: a run that ends with a lost "
                    "cloud starts nothing again"
                )
        if self.is_elastic and (self.fragments > 1 or self.overlap or self.mix):
            raise ConfigError(
                f"{NAME}.late=skip and {NAME}.leave=go_on merge all parameters at once; set "
                f"{NAME}.fragments=1, {NAME}.overlap=0 and {NAME}.mix=0"
            )

    @property
    def needs_whole_replicas(self) -> str:
        """The settings for which all ranks of a replica must be in one cloud and hold all stages;
        empty if there are none."""
        found = {
            "late=skip": self.late == "skip",
            "leave=go_on": self.leave == "go_on",
            "most_s": self.most_s is not None,
            "most_tokens": self.most_tokens is not None,
            "weigh=tokens": self.weigh == "tokens",
        }
        return ", ".join(f"{NAME}.{name}" for name, is_set in found.items() if is_set)

    @property
    def is_elastic(self) -> bool:
        """Whether a merge may be without some replica."""
        return self.late == "skip" or self.leave == "go_on"

    @property
    def most_under_way(self) -> int:
        """Fragments that are under way at once."""
        return max(1, -(-self.overlap * self.fragments // self.every))

    def weight_of(self, work: float) -> float:
        """How much a replica counts that has done so much since the last merge."""
        return float(work > 0) if self.weigh == "equal" else work

    @property
    def label(self) -> str:
        parts = [f"every {self.every}", self.outer.label]
        if self.fragments > 1:
            parts.append(f"{self.fragments} fragments")
        if self.overlap:
            parts.append(f"overlap {self.overlap}")
        if self.mix:
            parts.append(f"mix {self.mix:g}")
        if self.merge is not None:
            parts.append(repr(self.merge))
        if self.late == "skip":
            parts.append("skips the late")
        if self.leave == "go_on":
            parts.append("goes on without the lost")
        return ", ".join(parts)

"""The memories that channels of stage boundaries have of samples, where an update may be
skipped."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from xcloud.pipeline.hook import Hook, StepReport


class Settled(Protocol):
    """A channel, or whatever else remembers messages until it knows whether they were used."""

    def settle(self, was_used: bool) -> None: ...


@dataclass(frozen=True)
class ChannelMemories(Hook):
    """A hook that tells this rank's channels whether the update was made. An exploding gradient
    that all ranks skip would else stay in a residual or a delta cache until its sample's next
    visit."""

    channels: Collection[Settled]

    def after_update(self, step: int, report: StepReport) -> None:
        for channel in self.channels:
            channel.settle(was_used=report.skipped is None)

"""What the doctor looks at: the part of one cloud in an experiment file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xcloud.base.errors import ConfigError
from xcloud.job.config import Settings
from xcloud.job.job import Job
from xcloud.launch.join import ALONE, Machine
from xcloud.layout import ClusterLayout
from xcloud.line.mailbox import Mailbox
from xcloud.security.policy import Policy


@dataclass(frozen=True)
class Case:
    """The part of one cloud in an experiment file, with sealed lines to clouds of other owners or
    a mailbox between them.

    digest: SHA-256 of the file.
    refusal: the reason why this cloud's policy would not let the file run, apart from `approved`.
    run_dir: the folder that the run would write.
    machine: this machine among those of the cloud.
    """

    file: Path
    digest: str
    settings: Settings
    refusal: ConfigError | None
    cloud: str
    policy: Policy
    policy_file: Path
    run_dir: Path
    machine: Machine = ALONE

    @property
    def job(self) -> Job:
        return self.settings.job

    @property
    def layout(self) -> ClusterLayout:
        layout = self.job.cluster
        assert isinstance(layout, ClusterLayout), "other layouts refuse several owners"
        return layout

    @property
    def has_mailbox(self) -> bool:
        return isinstance(self.layout.wan, Mailbox)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of this cloud on this machine."""
        return len(self.machine.ranks_of(self.layout, self.cloud))

    @property
    def peers(self) -> list[str]:
        """The clouds to which this one has a line."""
        joined = [{*pair} for pair in self.layout.lines]
        others = [name for name in self.layout.clouds if name != self.cloud]
        return [other for other in others if {self.cloud, other} in joined]

    @property
    def own_address(self) -> tuple[str, int]:
        """Return the host and port at which the first rank of this machine is dialled."""
        address = self.layout.address_of(self.machine.ranks_of(self.layout, self.cloud)[0])
        assert address is not None, "a cloud that is dialled has an address"
        return address

    def dials(self, peer: str) -> bool:
        """Return whether this cloud dials a peer, which else dials this machine."""
        return self.layout.listener_of(self.cloud, there=peer) == peer

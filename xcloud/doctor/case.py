"""What the doctor looks at: the part of one cloud in an experiment file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from xcloud.base.errors import ConfigError
from xcloud.job.config import Settings
from xcloud.launch.join import ALONE, Machine
from xcloud.layout import ClusterLayout, host_and_port
from xcloud.line.keys import LineKeys
from xcloud.line.relayed import Meeting, rooms_of
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
    def layout(self) -> ClusterLayout:
        layout = self.settings.job.cluster
        # sealed and mailbox are refused in every other layout.
        assert isinstance(layout, ClusterLayout), "other layouts refuse several owners"
        return layout

    @property
    def num_ranks(self) -> int:
        """The number of ranks of this cloud on this machine."""
        return len(self.machine.ranks_of(self.layout, self.cloud))

    @property
    def peers(self) -> list[str]:
        """The clouds to which this one has a line."""
        # Whichever of the two is named first.
        joined = [{*pair} for pair in self.layout.lines]
        others = [name for name in self.layout.clouds if name != self.cloud]
        return [other for other in others if {self.cloud, other} in joined]

    def listens_at(self, keys: LineKeys, label: str) -> tuple[str, int] | Meeting:
        """Return where the first rank of this machine waits for peers that dial."""
        address = self.layout.address_of(self.machine.ranks_of(self.layout, self.cloud)[0])
        if address is not None:
            return address
        # Without an address both dial a relay, where each pair has its rooms.
        return self._meeting(keys, [one for one in keys.peers if not self.dials(one)], label)

    def dialled_at(self, keys: LineKeys, peer: str, label: str) -> list[tuple[str, int] | Meeting]:
        """Return where this cloud dials the machines of a peer."""
        addresses = self.layout.clouds[peer].addresses
        if addresses:
            # A rank on each machine of the peer listens.
            return [host_and_port(address) for address in addresses]
        return [self._meeting(keys, peers=[peer], label=label)]

    def _meeting(self, keys: LineKeys, peers: Sequence[str], label: str) -> Meeting:
        assert self.layout.relay is not None, "the layout has been checked"
        rooms = [rooms_of(keys, cloud=peer, label=label) for peer in peers]
        return Meeting(host_and_port(self.layout.relay), rooms=tuple(chain.from_iterable(rooms)))

    def dials(self, peer: str) -> bool:
        """Return whether this cloud dials a peer, which else dials this machine."""
        return self.layout.listener_of(self.cloud, there=peer) == peer

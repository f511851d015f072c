"""What the doctor looks at: the part of one cloud in an experiment file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xcloud.base.errors import ConfigError
from xcloud.job.config import Settings
from xcloud.job.job import Job
from xcloud.layout import ClusterLayout
from xcloud.security.policy import Policy


@dataclass(frozen=True)
class Case:
    """The part of one cloud in an experiment file, with sealed lines to clouds of other owners.

    digest: SHA-256 of the file.
    refusal: why this cloud's policy would not let the file run, apart from `approved`.
    run_dir: the folder that the run would write.
    """

    file: Path
    digest: str
    settings: Settings
    refusal: ConfigError | None
    cloud: str
    policy: Policy
    policy_file: Path
    run_dir: Path

    @property
    def job(self) -> Job:
        return self.settings.job

    @property
    def layout(self) -> ClusterLayout:
        layout = self.job.cluster
        assert isinstance(layout, ClusterLayout), "other layouts refuse cluster/wan=sealed"
        return layout

    @property
    def num_ranks(self) -> int:
        """The number of ranks of this cloud."""
        return len(self.layout.ranks_in(self.cloud))

    @property
    def peers(self) -> list[str]:
        """The clouds to which this one has a line."""
        joined = [{*pair} for pair in self.layout.lines]
        others = [name for name in self.layout.clouds if name != self.cloud]
        return [other for other in others if {self.cloud, other} in joined]

    def address_of(self, cloud: str) -> tuple[str, int]:
        """Return the host and port of the first rank of a cloud that others dial."""
        address = self.layout.address_of(self.layout.ranks_in(cloud)[0])
        assert address is not None, "of two clouds with a line one has an address"
        return address
